"""A worker's store on SQLite, on a disk that may fill and with a clock that may jump; and what can be broken in it."""

import asyncio
import subprocess
import time
from contextlib import asynccontextmanager

import apsw
import shop
from faults import Clock, Disk

from holdfast import Runtime
from holdfast.core.decide import machine
from holdfast.core.decisions import Accepted
from holdfast.errors import Stale
from holdfast.runtime.engine import Engine
from holdfast.stores.sqlite import backup, writer
from holdfast.stores.sqlite.jobs import resolve_jobs
from holdfast.stores.sqlite.store import SQLiteStore


def arm(crash):
    writer.crash_hook = crash


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

    async def back_up(asked):
        await rt.backup(asked["path"])

    store = SQLiteStore(order["store"])
    async with Runtime(shop.agent(), store=store, only=order["only"], clock=clock) as rt:
        yield rt, {}, {"room": room, "backup": back_up}
    if jumping:
        jumping.cancel()


def hurry(_):
    """The negative control: replies when everything is checked and written, and then commits."""
    attempt, crash = writer.Writer._try_commit, writer.crash_hook
    now = []

    def remember(self, group):
        now[:] = group
        return attempt(self, group)

    def too_early(point):
        if point == "append:before_commit":
            resolve_jobs(now)
            time.sleep(0.003)  # the answer is out before the disk has it
        if crash:
            crash(point)

    writer.Writer._try_commit = remember
    writer.crash_hook = too_early


def rerun(_):
    """Another negative control: whatever was interrupted runs again, also what must not."""
    recover = machine._recover_call
    machine._recover_call = lambda log, call, recovery, *rest: recover(log, call, "redispatch", *rest)


def winners(_):
    """Another: whoever comes second is told that they decided it."""
    submit = Engine.submit_decisions

    async def polite(self, *args, **given):
        try:
            return await submit(self, *args, **given)
        except Stale as stale:
            if stale.reason != "resolved":
                raise
            return Accepted(0)

    Engine.submit_decisions = polite


def greedy(order):
    """Another: a process that is to run some conversations runs them all."""
    order["only"] = None


def early(_):
    """Another: a clock is an hour ahead, deadlines pass by it, and nobody has seen it jump."""
    Clock.jump = lambda self, offset: setattr(self, "offset", 3600.0)


def blind(_):
    """Another: a commit that met a full disk is taken for one that did not."""
    attempt = writer.Writer._try_commit

    def hopeful(self, group):
        fault, settled = attempt(self, group)
        return (None, True) if isinstance(fault, apsw.FullError) else (fault, settled)

    writer.Writer._try_commit = hopeful


def copied(_):
    """Another: a backup is a copy of the file, without what is in the write-ahead log only."""

    def copy(_connect, source, target, **_options):
        subprocess.run(["cp", source, target], check=True)  # in this process it would drop the store's locks

    backup.back_up = copy


CONTROLS = {
    "ack": hurry,
    "rerun": rerun,
    "winners": winners,
    "greedy": greedy,
    "early": early,
    "blind": blind,
    "copied": copied,
}
