"""A worker on SQLite, on a disk that may fill and with a clock that may jump; and its deliberate defects."""

import asyncio
import subprocess
import time
from contextlib import asynccontextmanager

import apsw
import shop
from deliveries import Bell
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
async def run_worker(order):
    disk = Disk() if order["full"] else None
    clock = jumping = None
    if order["jumps"] is not None:
        clock = Clock(order["worker"], order["clocks"])
        jumping = asyncio.create_task(clock.jumps(order["jumps"]))

    def set_free_bytes(request):
        """Set the free bytes of the disk; return the number of writes that failed so far."""
        disk.free = request["bytes"]
        return disk.refused

    async def back_up(request):
        await rt.backup(request["path"])

    store = SQLiteStore(order["store"])
    bell = Bell(order["bell"], order["worker"])
    async with Runtime(
        *shop.agents(order["till"]), store=store, only=order["only"], clock=clock, channels=[bell]
    ) as rt:
        yield rt, {}, {"room": set_free_bytes, "backup": back_up}
    if jumping:
        jumping.cancel()


def acknowledge_early(_):
    """Acknowledge appends before they are committed."""
    attempt, crash = writer.Writer._try_commit, writer.crash_hook
    now = []

    def remember(self, group):
        now[:] = group
        return attempt(self, group)

    def resolve_first(point):
        if point == "append:before_commit":
            resolve_jobs(now)
            time.sleep(0.003)  # the caller has the reply before the disk has the data
        if crash:
            crash(point)

    writer.Writer._try_commit = remember
    writer.crash_hook = resolve_first


def rerun_everything(_):
    """Run every interrupted call again, also those with ``recovery="fail"``."""
    recover = machine._recover_call
    machine._recover_call = lambda log, call, recovery, *rest: recover(log, call, "redispatch", *rest)


def accept_every_decision(_):
    """Report a decision that came too late as accepted."""
    submit = Engine.submit_decisions

    async def submit_or_accept(self, *args, **given):
        try:
            return await submit(self, *args, **given)
        except Stale as stale:
            if stale.reason != "resolved":
                raise
            return Accepted(0)

    Engine.submit_decisions = submit_or_accept


def run_all_conversations(order):
    """Run all conversations in a process that is assigned half of them."""
    order["only"] = None


def hide_clock_jump(_):
    """Set the clock an hour ahead without recording the jump: calls expire early."""
    Clock.jump = lambda self, offset: setattr(self, "offset", 3600.0)


def ignore_full_disk(_):
    """Treat a commit that failed on a full disk as successful."""
    attempt = writer.Writer._try_commit

    def commit_or_ignore(self, group):
        fault, settled = attempt(self, group)
        return (None, True) if isinstance(fault, apsw.FullError) else (fault, settled)

    writer.Writer._try_commit = commit_or_ignore


def copy_file_only(_):
    """Make backups by copying the database file without its write-ahead log."""

    def copy(_connect, source, target, **_options):
        subprocess.run(["cp", source, target], check=True)  # copying in this process would drop the store's locks

    backup.back_up = copy


CONTROLS = {
    "ack": acknowledge_early,
    "rerun": rerun_everything,
    "winners": accept_every_decision,
    "greedy": run_all_conversations,
    "early": hide_clock_jump,
    "blind": ignore_full_disk,
    "copied": copy_file_only,
}
