"""``holdfast timeline``: where the time and the cost of a conversation's turns went."""

from __future__ import annotations

import asyncio
import os

import click

from holdfast.cli.options import (
    MAX_INTEGER,
    Whole,
    conversation_argument,
    example,
    json_option,
    store_option,
    store_url,
)
from holdfast.cli.output import print_json_lines, print_text
from holdfast.cli.render.console import make_console
from holdfast.cli.render.timeline import TimelinePrinter
from holdfast.cli.store import is_store_missing, not_found_error
from holdfast.errors import Invalid
from holdfast.runtime.runtime import Runtime


@click.command(
    epilog=example(
        "holdfast timeline support",
        "holdfast timeline support --events --turns 1",
        "holdfast timeline support --html support.html",
    )
)
@conversation_argument
@click.option("--turns", type=Whole(1, MAX_INTEGER), default=5, show_default=True, metavar="N", help="At most N turns.")
@click.option("--before", type=Whole(1, MAX_INTEGER), metavar="N", help="Only turns that began before event N.")
@click.option("--events", is_flag=True, help="List the events, too, each with the time until the next one.")
@click.option("--html", "path", metavar="FILE", type=click.Path(), help="Write an HTML file that opens offline.")
@click.option("--force", is_flag=True, help="With --html: replace FILE if it exists.")
@json_option
@store_option
def timeline(
    conversation: str,
    turns: int,
    before: int | None,
    events: bool,
    path: str | None,
    force: bool,
    as_json: bool,
    store: str | None,
) -> int:
    """Show where the time and the cost of a conversation went.

    The newest turns, each with a bar for every model call, run of a tool and wait for a person. The time of a turn is
    split into model, tools, people and other; people are counted only while no work remains. All of it is computed
    from the log. Waits are drawn shorter than they were if they would hide the work.
    """
    if path is not None and (as_json or events):
        raise Invalid("--html writes a file with all events: give it without --json and --events")
    if force and path is None:
        raise Invalid("--force goes with --html FILE")
    url = store_url(store)
    if path is not None:
        return asyncio.run(write_timeline(url, conversation, path, force=force))
    return asyncio.run(show_timeline(url, conversation, turns, before, events, as_json))


async def show_timeline(
    url: str, conversation: str, turns: int, before: int | None, events: bool, as_json: bool
) -> int:
    if await is_store_missing(url):
        raise not_found_error(url, conversation)
    async with Runtime(store=url) as rt:
        page = await rt.timeline(conversation, before=before, turns=turns)
    if as_json:
        print_json_lines([page])
        return 0
    TimelinePrinter(make_console()).print_page(page, events)
    return 0


async def write_timeline(url: str, conversation: str, path: str, *, force: bool) -> int:
    from holdfast.server.timeline_page import export_timeline  # only the file needs the server's modules

    if await is_store_missing(url):
        raise not_found_error(url, conversation)
    _check_target(path, force)
    async with Runtime(store=url) as rt:
        content = await export_timeline(rt, conversation)
    try:
        _write(path, content)
    except OSError as failure:
        raise Invalid(f"{path!r} cannot be written: {failure.strerror}", kind="write_failed") from None
    print_text(f"wrote the timeline of {conversation} to {path}")
    return 0


def _check_target(path: str, force: bool) -> None:
    if os.path.lexists(path) and not force:
        raise Invalid(f"{path!r} is there already; --force replaces it", kind="write_failed")


def _write(path: str, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
