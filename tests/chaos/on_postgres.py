"""A worker on PostgreSQL, which serves HTTP as ``holdfast serve`` does; and what can be broken in it.

What it is about to append is written down first, outside of the system. It can die around each statement that
matters: before it is sent, when it is on its way, and when the reply has come.
"""

import asyncio
import json
import logging
import os
import time
from contextlib import asynccontextmanager

import msgspec
import shop
from evidence import Intent
from faults import Clock

from holdfast import Runtime
from holdfast.errors import StoreError
from holdfast.runtime import conversation
from holdfast.runtime.conversation import Conversation
from holdfast.runtime.tasks import Tasks
from holdfast.server import TokenAuth, api_types, app, process
from holdfast.stores.postgres import PostgresStore, append, heartbeat, leases
from holdfast.stores.postgres.connection import Link

TOKEN = "a-token-of-the-storm"
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
"""What a worker may complain of: the database is away, or was."""


class Noted(PostgresStore):
    """Writes down what it is about to append, and under which epoch."""

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

    async def watched(self, sql, *values, **more):
        name = next((name for begin, name in STATEMENTS.items() if sql.startswith(begin)), None)
        if name is None:
            return await fetch(self, sql, *values, **more)
        crash(f"{name}:before_send")
        asyncio.get_running_loop().call_soon(crash, f"{name}:after_send")  # then it is in the socket
        found = await fetch(self, sql, *values, **more)
        crash(f"{name}:after_reply")
        return found

    Link.fetch = watched


@asynccontextmanager
async def at_work(order):
    Complaints(order["worker"], order["complaints"])
    shop.Place.slow = order["slow"]
    # Whoever leaves while the database is away cuts the requests that wait for it.
    logging.getLogger("uvicorn.error").addFilter(lambda record: "graceful shutdown" not in record.getMessage())
    straying = None
    if order["astray"] is not None:
        time.time = clock = Clock(order["worker"], order["clocks"])
        straying = asyncio.create_task(clock.jumps(order["astray"]))
    while True:
        rt = Runtime(shop.agent(), store=Noted(order["store"], order["worker"], order["intents"]))
        up = asyncio.get_running_loop().create_future()
        listening = process.open_socket("127.0.0.1", 0)
        port = listening.getsockname()[1]
        serve = asyncio.create_task(process.serve(app(rt, TokenAuth(TOKEN)), listening, up.set_result))
        await asyncio.wait({up, serve}, return_when=asyncio.FIRST_COMPLETED)
        if up.done():
            break
        failure = serve.exception()
        assert failure is not None, "the server ended before it was up"
        if not excusable(failure):
            raise failure
        await asyncio.sleep(0.1)  # whoever runs us starts us again
    yield rt, {"port": port}, {}
    stop = up.result()
    stop()
    await serve
    if straying:
        straying.cancel()


def excusable(failure):
    return isinstance(failure, StoreError) and failure.kind in EXPECTED and "cause" in failure.details


class Complaints(logging.FileHandler):
    """Whatever a process has to say, unless it is what must be expected of it here."""

    def __init__(self, worker, path):
        super().__init__(path, delay=True)
        self.setLevel(logging.WARNING)
        self.setFormatter(logging.Formatter(f"worker {worker}: %(message)s"))
        self.addFilter(unexpected)
        log = logging.getLogger("holdfast")
        log.addHandler(self)
        log.propagate = False

    def close(self):
        log = logging.getLogger("holdfast")
        log.removeHandler(self)
        log.propagate = True
        super().close()


def unexpected(record):
    failure = record.exc_info[1] if record.exc_info else None
    outage = record.getMessage().startswith(("the store could not be reached in time", "the store answers again"))
    return not (outage or excusable(failure) or any(excusable(arg) for arg in record.args or ()))


# --- what can be broken ---------------------------------------------------------------------------------


def unfenced(_):
    """Every fence is off: appends do not say under which epoch; who was away too long is not told so, and does not
    mind what it sees in the log."""
    append = PostgresStore.append

    async def anybody(self, step):
        await append(self, msgspec.structs.replace(step, epoch=None, release=False))

    async def never(self):
        await asyncio.Event().wait()

    PostgresStore.append = anybody
    PostgresStore.wait_until_lapsed = never
    Conversation._drop_ownership = lambda self: None


def hurry(_):
    """Acknowledges what it is about to write, and then writes it."""
    write = append.AppendKind.write

    async def too_early(self, link, jobs):
        for job in jobs:
            job.settle(None)
        await asyncio.sleep(0.02)
        return await write(self, link, jobs)

    append.AppendKind.write = too_early


def twice(_):
    """A message is delivered twice."""
    send = Runtime.send

    async def again(self, *args, **given):
        turn = await send(self, *args, **given)
        await send(self, *args, **given | {"when_busy": "queue"})
        return turn

    Runtime.send = again


def doubled(_):
    """A call is handed to its tool twice."""
    act = shop.act

    async def again(name, n, call):
        await act(name, n, call)
        return await act(name, n, call)

    shop.act = again


def blind(_):
    """After a lost reply it is not asked whether the append has landed: what is refused is decided anew."""

    async def unseen(self, link, jobs, outcomes):
        pass

    append.AppendKind._recognise_committed = unseen


def void(_):
    """What was begun under an earlier epoch counts, and ends whatever runs for the same effect now."""

    def done(self, run):
        self._running.pop(run.effect, None)

    def current(items, epoch):
        for item in items:
            item.epoch = epoch if item.epoch is not None else None
        return inbox_current(items, epoch)

    inbox_current, conversation.reject_stale = conversation.reject_stale, current
    Tasks.mark_done = done


def early(_):
    """What it takes for the database's time is half a minute ahead."""
    now = heartbeat.LeaseManager.now
    heartbeat.LeaseManager.now = lambda self: now(self) + 30.0


def stutter(_):
    """A viewer who comes back is sent the first event after its last one twice."""
    stored = api_types.log_frame
    api_types.log_frame = lambda body: (stored(body)[0], stored(body)[1] * 2)


CONTROLS = {
    "fence": unfenced,
    "ack": hurry,
    "twice": twice,
    "doubled": doubled,
    "blind": blind,
    "void": void,
    "early": early,
    "stutter": stutter,
}
