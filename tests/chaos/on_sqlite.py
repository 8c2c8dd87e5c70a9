"""A worker's store on SQLite, on a disk that may fill and with a clock that may jump; and what can be broken in it."""

import asyncio
import time
from contextlib import asynccontextmanager

import apsw
import shop
from faults import Clock, Disk

from assent import Runtime
from assent.core import machine
from assent.core.decisions import Accepted
from assent.errors import Stale
from assent.runtime.home import Home
from assent.stores import writer
from assent.stores.jobs import reply
from assent.stores.sqlite import SQLiteStore


def arm(crash):
    writer.crash = crash


@asynccontextmanager
async def at_work(order):
    disk = Disk() if order["full"] else None
    clock = jumping = None
    if order["jumps"] is not None:
        clock = Clock(order["worker"], order["clocks"])
        jumping = asyncio.create_task(clock.jumps(order["jumps"]))

    def room(asked):
        """So many bytes are left from now on; how many writes were refused until now?"""
        disk.room = asked["bytes"]
        return disk.refused

    store = SQLiteStore(order["store"])
    async with Runtime(shop.agent(), store=store, only=order["only"], clock=clock) as rt:
        yield rt, {}, {"room": room}
    if jumping:
        jumping.cancel()


def hurry(_):
    """The negative control: replies when everything is checked and written, and then commits."""
    attempt, crash = writer.Writer._attempt, writer.crash
    now = []

    def remember(self, group):
        now[:] = group
        return attempt(self, group)

    def too_early(point):
        if point == "append:before_commit":
            reply(now)
            time.sleep(0.003)  # the answer is out before the disk has it
        if crash:
            crash(point)

    writer.Writer._attempt = remember
    writer.crash = too_early


def rerun(_):
    """Another negative control: whatever was interrupted runs again, also what must not."""
    recover = machine._recover
    machine._recover = lambda log, call, recovery, *rest: recover(log, call, "redispatch", *rest)


def winners(_):
    """Another: whoever comes second is told that they decided it."""
    submit = Home.submit

    async def polite(self, *args, **given):
        try:
            return await submit(self, *args, **given)
        except Stale as stale:
            if stale.reason != "resolved":
                raise
            return Accepted(0)

    Home.submit = polite


def greedy(order):
    """Another: a process that is to run some conversations runs them all."""
    order["only"] = None


def early(_):
    """Another: a clock is an hour ahead, deadlines pass by it, and nobody has seen it jump."""
    Clock.jump = lambda self, offset: setattr(self, "offset", 3600.0)


def blind(_):
    """Another: a commit that met a full disk is taken for one that did not."""
    attempt = writer.Writer._attempt

    def hopeful(self, group):
        fault, settled = attempt(self, group)
        return (None, True) if isinstance(fault, apsw.FullError) else (fault, settled)

    writer.Writer._attempt = hopeful


CONTROLS = {"ack": hurry, "rerun": rerun, "winners": winners, "greedy": greedy, "early": early, "blind": blind}
