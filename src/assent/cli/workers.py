"""``assent workers``: who has the store open and holds what, and what nobody holds."""

from __future__ import annotations

import asyncio

import msgspec
from rich import box
from rich.table import Table
from rich.text import Text

from assent.cli.commands import Commands
from assent.cli.output import json_lines, say
from assent.cli.reading import missing
from assent.cli.text import shown, span
from assent.cli.verification import opened
from assent.errors import NotFound
from assent.stores.base import LogStore, OwnerRow
from assent.urls import place

COUNTED = 1000
"""So many conversations that nobody holds are looked at; more are many."""


class Worker(msgspec.Struct, kw_only=True):
    """One line of ``--json``."""

    owner: str
    host: str
    pid: int
    agents: tuple[str, ...]
    since: float
    alive: bool
    seen_ago: float | None
    """Seconds since it last showed that it lives; null: that is known otherwise."""
    holds: int


class Unheld(msgspec.Struct, kw_only=True):
    """The last line of ``--json``: what is owed and nobody runs."""

    unheld: int
    """At most 1000 are counted."""
    lag: float
    """Seconds since the last event of the one that has waited longest."""
    agents: tuple[str, ...]
    """Whose they are."""


async def workers(url: str, as_json: bool) -> int:
    if await missing(url):
        raise NotFound(f"there is no store {place(url)}, so nobody works on it")
    async with opened(url) as store:
        now = store.now()
        found = [_worker(each, now) for each in await store.owners() if each.owner != store.owner]
        left = await unheld(store)
    if as_json:
        json_lines([*found, left])
        return 0
    if found:
        _print(found, now)
    else:
        say("nobody has the store open")
    say(_told(left))
    if left.unheld and not _somebody(found, left):
        say(f"nobody runs {', '.join(left.agents)}: {Commands(url).write('worker', 'MODULE:AGENT')}")
    return 0


async def unheld(store: LogStore) -> Unheld:
    """What is owed and nobody holds."""
    names = await store.owing(limit=COUNTED)
    rows = [row for row in await asyncio.gather(*(store.row(name) for name in names)) if row is not None]
    lag = max((store.now() - row.updated for row in rows), default=0.0)
    return Unheld(unheld=len(rows), lag=max(0.0, lag), agents=tuple(sorted({row.agent for row in rows})))


def _worker(row: OwnerRow, now: float) -> Worker:
    return Worker(
        owner=row.owner,
        host=row.host,
        pid=row.pid,
        agents=row.agents,
        since=row.since,
        alive=row.alive,
        seen_ago=None if row.seen is None else max(0.0, now - row.seen),
        holds=row.holds,
    )


def _told(left: Unheld) -> str:
    if not left.unheld:
        return "nothing is owed that nobody holds"
    many = f"{left.unheld} or more" if left.unheld >= COUNTED else str(left.unheld)
    return f"{many} owe something and nobody holds them; the oldest has waited {span(left.lag)}"


def _somebody(found: list[Worker], left: Unheld) -> bool:
    running = {agent for each in found if each.alive for agent in each.agents}
    return running >= set(left.agents)


def _print(found: list[Worker], now: float) -> None:
    from assent.cli.cards import console

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("owner", no_wrap=True)
    table.add_column("host", overflow="fold")
    table.add_column("pid", justify="right")
    table.add_column("agents", overflow="fold")
    for name in ("since", "alive", "seen"):
        table.add_column(name, no_wrap=True)
    table.add_column("holds", justify="right")
    for each in found:
        table.add_row(
            shown(each.owner),
            shown(each.host),
            str(each.pid),
            shown(", ".join(each.agents)) or "-",
            span(now - each.since),
            Text("yes", "green") if each.alive else Text("dead", "bold red"),
            "-" if each.seen_ago is None else f"{each.seen_ago:.1f} s",
            str(each.holds),
        )
    console().print(table)
