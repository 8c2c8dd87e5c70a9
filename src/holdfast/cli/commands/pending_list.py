"""``holdfast pending``: list the pending calls, with the commands that answer them."""

from __future__ import annotations

import asyncio
import time

import click

from holdfast import urls
from holdfast.cli.command_lines import CommandWriter
from holdfast.cli.lookup import describe_unattended
from holdfast.cli.options import conversation_option, example, json_option, store_option, store_url, wait_option
from holdfast.cli.output import EXIT_WAITING, print_json_lines, print_text
from holdfast.cli.render.card import print_card
from holdfast.cli.render.console import make_console
from holdfast.cli.store import is_store_missing, not_found_error
from holdfast.core.decisions import Pending
from holdfast.runtime.runtime import Runtime

POLL_SECONDS = 0.1
MAX_POLL_SECONDS = 2.0
"""The longest interval between checks for a store that does not exist yet: each may connect to a server."""


@click.command(epilog=example("holdfast pending", "holdfast pending --json --wait 60 | jq .call"))
@json_option
@wait_option("Wait for a pending call; exit 75 if none comes.")
@conversation_option("Only the calls of this conversation.")
@store_option
def pending(as_json: bool, wait: float | None, conversation: str | None, store: str | None) -> int:
    """List the pending calls, and how to answer them.

    The next to expire comes first; each card ends with the exact commands that answer it.
    """
    return asyncio.run(list_pending(store_url(store), as_json, wait, conversation))


async def list_pending(url: str, as_json: bool, wait: float | None, conversation: str | None) -> int:
    until = time.monotonic() + (wait or 0.0)
    pause = POLL_SECONDS
    while (gone := await is_store_missing(url)) and (
        left := until - time.monotonic()
    ) > 0:  # another process may create it
        await asyncio.sleep(min(pause, left))
        pause = min(pause * 2, MAX_POLL_SECONDS)
    if gone and (conversation is not None or wait is None):
        raise not_found_error(url, conversation)
    if as_json:
        return await _print_pending_json(url, wait, until, conversation) if not gone else EXIT_WAITING
    entries: list[Pending] = []
    idle: list[str] = []
    if not gone:
        async with Runtime(store=url) as rt:
            while True:
                entries = await rt.pending(conversation, approved=wait is None)  # --wait is for calls to decide
                if entries or time.monotonic() >= until:
                    break
                await asyncio.sleep(POLL_SECONDS)
            if conversation is not None and not entries:
                await rt.history(conversation, limit=1)  # refuses an unknown conversation
            if entries:
                _print_cards(entries, entries if conversation is None else await rt.pending(approved=True), url)
            else:
                idle = await describe_unattended(rt, conversation, CommandWriter(url))
    if not entries:
        rest = f": there is no store {urls.display_url(url)} yet" if gone else "; " if idle else ""
        print_text(f"nothing is waiting{rest}" + "\n".join(idle))
    return EXIT_WAITING if not entries and wait is not None else 0


async def _print_pending_json(url: str, wait: float | None, until: float, conversation: str | None) -> int:
    """Print one JSON object a line, with one page of entries in memory at a time."""
    async with Runtime(store=url) as rt:
        while True:
            found = False
            async for page in rt.pending_pages(conversation, approved=wait is None):
                found = True
                print_json_lines(page)
            if found or time.monotonic() >= until:
                break
            await asyncio.sleep(POLL_SECONDS)
        if conversation is not None and not found:
            await rt.history(conversation, limit=1)  # refuses an unknown conversation
    return EXIT_WAITING if not found and wait is not None else 0


def _print_cards(entries: list[Pending], others: list[Pending], url: str) -> None:
    out, commands = make_console(), CommandWriter(url)
    for entry in entries:
        print_card(out, entry, commands, others, time.time())
