"""``holdfast outbox``: list, retry and drop notices that have not been delivered."""

from __future__ import annotations

import asyncio

import click
from rich.table import Table
from rich.text import Text

from holdfast.cli.command_lines import CommandWriter
from holdfast.cli.options import example, json_option, store_option, store_url
from holdfast.cli.output import print_json_lines, print_text
from holdfast.cli.render.console import make_console
from holdfast.cli.render.text import escape_control_characters, format_duration, format_time, pluralize
from holdfast.cli.store import connect_to_store, is_store_missing, no_store_error
from holdfast.errors import Invalid, NotFound
from holdfast.stores.base import LogStore, OutboxRow

PAGE = 500
"""Rows per read."""


@click.command(
    epilog=example(
        "holdfast outbox",
        "holdfast outbox --channel mail --failed --json",
        "holdfast outbox retry support/12/mail            # or: retry --all",
        "holdfast outbox drop --channel mail              # the channel is no longer used",
    )
)
@click.argument("words", nargs=-1, metavar="[retry ID... | drop ID...]")
@click.option("--channel", metavar="NAME", help="Only the notices of this channel.")
@click.option("--failed", is_flag=True, help="Only notices that are not tried again.")
@click.option("--all", "everything", is_flag=True, help="retry: every notice that has failed.")
@json_option
@store_option
def outbox(
    words: tuple[str, ...], channel: str | None, failed: bool, everything: bool, as_json: bool, store: str | None
) -> int:
    """List the notices that were not delivered yet, try them again, or drop them.

    A notice is delivered by a process whose agent's module has the channel. One that fails is tried again for about
    three days. `drop --channel NAME` also removes the channel from the store, so that nothing more is queued for it.
    """
    url = store_url(store)
    match words:
        case ():
            return asyncio.run(list_notices(url, channel, failed, as_json))
        case ("retry", *ids) if bool(ids) != everything:
            return asyncio.run(retry_notices(url, channel, ids))
        case ("drop", *ids) if bool(ids) != (channel is not None) and not everything:
            return asyncio.run(drop_notices(url, channel, ids))
        case _:
            raise Invalid("give nothing, or: retry ID..., retry --all, drop ID..., drop --channel NAME")


async def read_rows(store: LogStore, channel: str | None) -> list[OutboxRow]:
    """Return all rows of a channel, or of all, oldest first."""
    found: list[OutboxRow] = []
    while page := await store.outbox(channel, after=found[-1] if found else None, limit=PAGE):
        found += page
    return found


async def list_notices(url: str, channel: str | None, failed: bool, as_json: bool) -> int:
    if await is_store_missing(url):
        raise no_store_error(url)
    async with connect_to_store(url) as store:
        rows = [row for row in await read_rows(store, channel) if row.failed or not failed]
        now, names = store.now(), [row.name for row in await store.channels()]
    if as_json:
        print_json_lines(rows)
        return 0
    if not rows:
        print_text(f"no notice waits; channels: {', '.join(names)}" if names else "no channel is registered")
        return 0
    _print_rows(rows, now)
    first = next((row for row in rows if row.failed), None)
    if first is not None:
        print_text(f"\nto try one again:\n  {CommandWriter(url).format_command('outbox', 'retry', first.id)}")
    return 0


def _print_rows(rows: list[OutboxRow], now: float) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("id", "kind", "since", "attempts", "next", "error"):
        table.add_column(name, overflow="fold")
    for row in rows:
        wait = row.due - now
        upcoming = "now" if wait <= 0 else f"in {format_duration(wait)}"
        table.add_row(
            Text(escape_control_characters(row.id), style="bold"),
            Text(row.kind),
            Text(format_time(row.at)),
            Text(str(row.attempts)),
            Text("failed", style="bold red") if row.failed else Text(upcoming),
            Text(escape_control_characters(row.error or "")),
        )
    make_console().print(table)


async def retry_notices(url: str, channel: str | None, ids: list[str]) -> int:
    if await is_store_missing(url):
        raise no_store_error(url)
    async with connect_to_store(url) as store:
        chosen = ids or [row.id for row in await read_rows(store, channel) if row.failed]
        count = await store.retry_notices(chosen, store.now())
    if ids and not count:
        raise NotFound("no notice with this id waits: see `holdfast outbox`")
    print_text(f"{pluralize(count, 'notice')} will be tried again")
    return 0


async def drop_notices(url: str, channel: str | None, ids: list[str]) -> int:
    if await is_store_missing(url):
        raise no_store_error(url)
    async with connect_to_store(url) as store:
        if channel is not None:
            if channel not in [row.name for row in await store.channels()]:
                raise NotFound(f"no channel {channel!r} is registered")
            count = len(await read_rows(store, channel))
            await store.drop_channel(channel)
            print_text(f"dropped the channel {channel} and {pluralize(count, 'notice')}")
            return 0
        count = await store.drop_notices(ids)
    if not count:
        raise NotFound("no notice with this id waits: see `holdfast outbox`")
    print_text(f"dropped {pluralize(count, 'notice')}")
    return 0
