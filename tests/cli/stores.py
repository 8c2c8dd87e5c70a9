"""Stores that several commands share, and helpers that read them from this process."""

import asyncio
from pathlib import Path

import pytest
from support import pg
from terminal import until

from holdfast import Runtime

SHIFT = Path(__file__).resolve().parent / "shift.py"


def url_of(kind, desk=None, name="shared", lease=None):
    """Return the URL of a store that does not exist yet. ``lease``: seconds, on PostgreSQL only."""
    return f"sqlite:///{desk.path}/{name}.db" if kind == "sqlite" else pg.fresh(lease=lease)


both = pytest.mark.parametrize("kind", ["sqlite", "postgres"])


def ask(url, work):
    """Run a coroutine function with a runtime that has no agents, and return its result."""

    async def asked():
        async with Runtime(store=url) as rt:
            return await work(rt)

    return asyncio.run(asked())


def send(url, *names, agent="digger"):
    async def work(rt):
        for name in names:
            await rt.send(name, "go", agent=agent, by="boss")

    ask(url, work)


def events(url, name):
    async def work(rt):
        return await rt.history(name)

    return ask(url, work)


def until_over(url, name):
    """Wait until the turn has ended, and return the events."""
    return until(lambda: (found := events(url, name))[-1].type == "TurnEnded" and found)


def ledger(desk):
    """Return what the tools did, in order: [(action, hole, pid)]."""
    path = desk.path / "ledger"
    return (
        [(*line.split()[:2], int(line.split()[2])) for line in path.read_text().splitlines()] if path.exists() else []
    )


def until_noted(desk, what, hole, number=1):
    """Wait until an action was done so many times, and return the process ids."""

    def done():
        pids = [pid for each, where, pid in ledger(desk) if (each, where) == (what, hole)]
        return pids if len(pids) >= number else None

    return until(done)
