"""``assent workers``: who has the store open and holds what, and what nobody holds."""

from __future__ import annotations

import asyncio

import msgspec
from rich.table import Table
from rich.text import Text

from assent.cli.commands import Commands
from assent.cli.output import json_lines, say
from assent.cli.reading import missing, no_store
from assent.cli.text import shown, span
from assent.cli.verification import opened
from assent.stores.base import LogStore, OwnerRow

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
    lapses_in: float | None
    """Seconds until its leases end unless it shows again that it lives; null: that is known otherwise."""
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
        raise no_store(url, ", so nobody works on it")
    async with opened(url) as store:
        now = store.now()
        found = [_worker(each, now) for each in await store.owners() if each.owner != store.owner]
        left = await unheld(store)
    if as_json:
        json_lines([*found, left])
        return 0
    # The dead are kept for a while; those of whom nothing is left to take over are only counted.
    listed = [each for each in found if each.alive or each.holds]
    if listed:
        _print(listed, now)
    else:
        say("nobody has the store open")
    if gone := len(found) - len(listed):
        say(f"{gone} {'is' if gone == 1 else 'are'} dead and held nothing")
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
        lapses_in=None if row.until is None else row.until - now,
        holds=row.holds,
    )


def _told(left: Unheld) -> str:
    if not left.unheld:
        return "nothing is owed that nobody holds"
    waited = span(left.lag)
    if left.unheld == 1:
        return f"1 conversation owes something and nobody holds it; it has waited {waited}"
    many = f"{left.unheld} or more" if left.unheld >= COUNTED else str(left.unheld)
    return f"{many} conversations owe something and nobody holds them; the oldest has waited {waited}"


def _somebody(found: list[Worker], left: Unheld) -> bool:
    running = {agent for each in found if each.alive for agent in each.agents}
    return running >= set(left.agents)


def _alive(worker: Worker) -> Text:
    left = worker.lapses_in
    if worker.alive:
        return Text("yes" if left is None else f"yes, {max(left, 0):.1f} s left", "green")
    return Text("dead" if left is None else f"dead for {span(-left)}", "bold red")


def _print(found: list[Worker], now: float) -> None:
    from assent.cli.cards import console

    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("pid", justify="right", no_wrap=True)
    table.add_column("host", overflow="fold")
    table.add_column("agents", overflow="fold")
    table.add_column("since", no_wrap=True)
    table.add_column("alive", no_wrap=True)
    table.add_column("holds", justify="right", no_wrap=True)
    for each in found:
        table.add_row(
            str(each.pid),
            shown(each.host),
            shown(", ".join(each.agents)) or "-",
            span(now - each.since),
            _alive(each),
            str(each.holds),
        )
    console().print(table)
