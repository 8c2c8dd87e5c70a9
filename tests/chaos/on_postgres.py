"""A worker on PostgreSQL, which serves HTTP like ``holdfast serve``; and its deliberate defects.

It records each append in a file before making it. It can die around each important statement: before it is sent,
after it is sent, and after the reply.
"""

import asyncio
import itertools
import json
import logging
import os
import time
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import msgspec
import shop
from deliveries import CHANNEL, Bell
from evidence import Intent
from faults import Clock

from holdfast import Runtime
from holdfast.core.decide import wait
from holdfast.core.events import VoteCast
from holdfast.errors import Stale, StoreError
from holdfast.runtime import conversation
from holdfast.runtime.conversation import Conversation
from holdfast.runtime.steps.tasks import Tasks
from holdfast.server import TokenAuth, api_types, app, process
from holdfast.stores.postgres import PostgresStore, append, heartbeat, leases
from holdfast.stores.postgres.connection import Link

TOKEN = "token-of-the-chaos-test"
STATEMENTS = {
    append.APPEND: "append",
    leases.CLAIM: "claim",
    leases.CLAIM_OWING: "take",
    leases.RELEASE: "release",
    heartbeat.RENEW: "renew",
}
POINTS = (
    *(f"{name}:{when}" for name in STATEMENTS.values() for when in ("before_send", "after_send", "after_reply")),
    *(point for point in shop.CRASH_POINTS if not point.startswith("append")),
)
EXPECTED = ("log_write_failed", "log_read_failed")
"""The kinds of errors that a worker may log: the database is or was unreachable."""


class RecordingStore(PostgresStore):
    """A store that records each append, with its epoch, before making it."""

    def __init__(self, url, worker, path):
        super().__init__(url)
        self._worker = worker
        self._notes = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    async def append(self, append):
        if append.events:
            row = {
                "conversation": append.conversation,
                "worker": self._worker,
                "seq": append.expected + 1,
                "events": len(append.events),
                "epoch": append.epoch,
                "digest": Intent.of(append.events),
            }
            os.write(self._notes, (json.dumps(row) + "\n").encode())
        await super().append(append)

    async def close(self):
        await super().close()
        if self._notes >= 0:
            os.close(self._notes)
            self._notes = -1


def arm(crash):
    fetch = Link.fetch

    async def fetch_or_crash(self, sql, *values, **more):
        name = next((name for begin, name in STATEMENTS.items() if sql.startswith(begin)), None)
        if name is None:
            return await fetch(self, sql, *values, **more)
        crash(f"{name}:before_send")
        asyncio.get_running_loop().call_soon(crash, f"{name}:after_send")  # then it is in the socket's buffer
        found = await fetch(self, sql, *values, **more)
        crash(f"{name}:after_reply")
        return found

    Link.fetch = fetch_or_crash


@asynccontextmanager
async def run_worker(order):
    Complaints(order["worker"], order["complaints"])
    shop.Process.slow = order["slow"]
    # A process that exits while the database is unreachable aborts the requests that wait for it.
    logging.getLogger("uvicorn.error").addFilter(lambda record: "graceful shutdown" not in record.getMessage())
    jumping = None
    if order["jumps_seed"] is not None:
        time.time = clock = Clock(order["worker"], order["clocks"])
        jumping = asyncio.create_task(clock.jumps(order["jumps_seed"]))
    while True:
        store = RecordingStore(order["store"], order["worker"], order["intents"])
        rt = Runtime(*shop.agents(), store=store, channels=[Bell(order["bell"], order["worker"])])
        up = asyncio.get_running_loop().create_future()
        listening = process.open_socket("127.0.0.1", 0)
        port = listening.getsockname()[1]
        serve = asyncio.create_task(process.serve(app(rt, TokenAuth(TOKEN)), listening, up.set_result))
        await asyncio.wait({up, serve}, return_when=asyncio.FIRST_COMPLETED)
        if up.done():
            break
        failure = serve.exception()
        assert failure is not None, "the server ended before it was up"
        if not is_expected(failure):
            raise failure
        await asyncio.sleep(0.1)  # a supervisor would start it again
    yield rt, {"port": port}, {}
    stop = up.result()
    stop()
    await serve
    if jumping:
        jumping.cancel()


def is_expected(failure):
    return isinstance(failure, StoreError) and failure.kind in EXPECTED and "cause" in failure.details


class Complaints(logging.FileHandler):
    """A handler that writes a process's warnings to a file, except those that the faults explain."""

    def __init__(self, worker, path):
        super().__init__(path, delay=True)
        self.setLevel(logging.WARNING)
        self.setFormatter(logging.Formatter(f"worker {worker}: %(message)s"))
        self.addFilter(is_unexpected)
        log = logging.getLogger("holdfast")
        log.addHandler(self)
        log.propagate = False

    def close(self):
        log = logging.getLogger("holdfast")
        log.removeHandler(self)
        log.propagate = True
        super().close()


def is_unexpected(record):
    failure = record.exc_info[1] if record.exc_info else None
    outage = record.getMessage().startswith(("the store could not be reached in time", "the store answers again"))
    return not (outage or is_expected(failure) or any(is_expected(arg) for arg in record.args or ()))


# --- deliberate defects ---------------------------------------------------------------------------------


def remove_fences(_):
    """Remove every fence: appends have no epoch, and an owner neither notices that its lease expired nor reacts to a
    newer owner in the log."""
    append = PostgresStore.append

    async def append_without_epoch(self, step):
        await append(self, msgspec.structs.replace(step, epoch=None, release=False))

    async def never(self):
        await asyncio.Event().wait()

    PostgresStore.append = append_without_epoch
    PostgresStore.wait_until_lapsed = never
    Conversation._drop_ownership = lambda self: None


def acknowledge_early(_):
    """Acknowledge an append before it is written."""
    write = append.AppendKind.write

    async def settle_first(self, link, jobs):
        for job in jobs:
            job.settle(None)
        await asyncio.sleep(0.02)
        return await write(self, link, jobs)

    append.AppendKind.write = settle_first


def send_twice(_):
    """Send every message twice."""
    send = Runtime.send

    async def send_again(self, *args, **given):
        turn = await send(self, *args, **given)
        await send(self, *args, **given | {"when_busy": "queue"})
        return turn

    Runtime.send = send_again


def run_twice(_):
    """Run every tool call twice."""
    act = shop.act

    async def act_again(name, n, call):
        await act(name, n, call)
        return await act(name, n, call)

    shop.act = act_again


def skip_read_back(_):
    """Do not read back after a lost reply whether the append was committed: a refused append is decided again."""

    async def do_nothing(self, link, jobs, outcomes):
        pass

    append.AppendKind._recognise_committed = do_nothing


def accept_stale_work(_):
    """Accept results of work that started under an earlier epoch, and end the current work of the same effect."""

    def mark_done(self, run):
        self._running.pop(run.effect, None)

    def keep_all(items, epoch):
        for item in items:
            item.epoch = epoch if item.epoch is not None else None
        return reject_stale(items, epoch)

    reject_stale, conversation.reject_stale = conversation.reject_stale, keep_all
    Tasks.mark_done = mark_done


def advance_clock(_):
    """Take a time half a minute ahead for that of the database."""
    now = heartbeat.LeaseManager.now
    heartbeat.LeaseManager.now = lambda self: now(self) + 30.0


def repeat_event(_):
    """Send a viewer that reconnects its next event twice."""
    log_frame = api_types.log_frame
    api_types.log_frame = lambda body: (log_frame(body)[0], log_frame(body)[1] * 2)


def settle_before_sending(_):
    """Delete a row of the outbox before its notice is sent: a failed attempt is not repeated."""
    settle = PostgresStore.settle_notice

    async def ignore(self, id, **outcome):
        pass

    async def settle_first(self, *args, **options):
        rows, due = await claim(self, *args, **options)
        for row in rows:
            await settle(self, row.id)
        return rows, due

    claim = PostgresStore.claim_notices
    PostgresStore.claim_notices, PostgresStore.settle_notice = settle_first, ignore


def rename_notices(_):
    """Give a notice another id at each attempt."""
    send, count = Bell.send, itertools.count(1)

    async def send_renamed(self, notice):
        await send(self, msgspec.structs.replace(notice, id=f"{notice.id}.{next(count)}"))

    Bell.send = send_renamed


def announce_early(order):
    """Send notices before the append that they are about."""
    append = RecordingStore.append
    bell = Bell(order["bell"], order["worker"])

    async def announce(self, step):
        for seq, kind in step.notices:
            early = SimpleNamespace(
                id=f"{step.conversation}/{seq}/{CHANNEL}", kind=kind, conversation=step.conversation, seq=seq
            )
            with suppress(ConnectionError):
                await bell.send(early)
        await append(self, step)

    RecordingStore.append = announce


def count_votes_twice(_):
    """Count every approval, also the second one of a person."""

    def add_vote(log, suspension, by, on_behalf_of):
        missing = suspension.approvers - len(log.require_turn().calls[suspension.call_id].wait.votes) - 1
        fields = {"suspension": suspension.seq, "digest": suspension.digest, "missing": missing}
        log.add(VoteCast, by, call_id=suspension.call_id, on_behalf_of=on_behalf_of, **fields)
        return missing == 0

    wait.add_vote = add_vote


def forget_reminders(_):
    """Neither remind nor escalate."""

    def do_nothing(log, suspension):
        raise Stale("no reminder or escalation is due", reason="phase")

    wait.apply_timer = do_nothing


CONTROLS = {
    "fence": remove_fences,
    "ack": acknowledge_early,
    "twice": send_twice,
    "doubled": run_twice,
    "blind": skip_read_back,
    "void": accept_stale_work,
    "early": advance_clock,
    "stutter": repeat_event,
    "lost": settle_before_sending,
    "renamed": rename_notices,
    "eager": announce_early,
    "votes": count_votes_twice,
    "silent": forget_reminders,
}
