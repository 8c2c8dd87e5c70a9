"""A store that commands share, of every kind; and what happens in it, seen from this process."""

import asyncio
from pathlib import Path

import pg
import pytest
from terminal import until

from assent import Runtime

SHIFT = Path(__file__).resolve().parent / "shift.py"
LEASE = 2.0


def url_of(kind, desk=None, name="shared"):
    """A store that does not exist yet."""
    return f"sqlite:///{desk.path}/{name}.db" if kind == "sqlite" else pg.fresh(lease=LEASE)


both = pytest.mark.parametrize("kind", ["sqlite", "postgres"])


def ask(url, work):
    """Do something with a runtime that runs nothing."""

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
    """Its events, when its turn has ended."""
    return until(lambda: (found := events(url, name))[-1].type == "TurnEnded" and found)


def ledger(desk):
    """What was done, by which process: [(what, hole, pid)]."""
    path = desk.path / "ledger"
    return (
        [(*line.split()[:2], int(line.split()[2])) for line in path.read_text().splitlines()] if path.exists() else []
    )


def until_noted(desk, what, hole, number=1):
    """The processes that did it, when so many have."""

    def done():
        pids = [pid for each, where, pid in ledger(desk) if (each, where) == (what, hole)]
        return pids if len(pids) >= number else None

    return until(done)
