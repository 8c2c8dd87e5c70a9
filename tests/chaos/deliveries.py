"""Deliveries of the outbox: a channel that workers have, and the receiver in the driver, which fails at times.

One connection carries one notice: a line of JSON to the receiver, and ``ok`` or ``no`` back. The receiver also closes
connections without an answer, before and after it has recorded the notice, and leaves some without an answer.
"""

import asyncio
import json
import logging
from contextlib import suppress
from dataclasses import dataclass

from holdfast.core.notice import NOTICE_KINDS
from holdfast.runtime.pending_calls import outbox

CHANNEL = "bell"
FAULTS = ("refused", "cut before it was recorded", "cut after it was recorded", "no answer")
"""The faults of the receiver, besides the answer ``ok``."""


@dataclass(frozen=True)
class Delivery:
    """An attempt to deliver a notice, as the receiver saw it."""

    id: str
    kind: str
    conversation: str
    seq: int
    worker: int
    accepted: bool
    """Whether it was recorded: the receiver has the notice, whatever the sender was answered."""


class Bell:
    """A channel that sends notices to the receiver."""

    name, kinds = CHANNEL, NOTICE_KINDS

    def __init__(self, port, worker):
        self._port, self._worker = port, worker

    async def send(self, notice):
        reader, out = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            row = {"id": notice.id, "kind": notice.kind, "conversation": notice.conversation, "seq": notice.seq}
            out.write(json.dumps(row | {"worker": self._worker}).encode() + b"\n")
            answer = await reader.readline()
            if answer != b"ok\n":
                raise ConnectionError(f"the receiver answered {answer!r}")
        finally:
            out.close()


def hurry():
    """Shorten the pauses of the outbox in this process, so that many attempts fit into a run."""
    outbox.LEASE_SECONDS, outbox.SEND_SECONDS = 4.0, 2.0
    outbox.RETRY_SECONDS = (0.2,) * 200
    outbox.POLL_SECONDS = 0.2


def is_about_receiver(record):
    """Return whether a log record is a warning about an attempt that failed, or about the first that succeeds again."""
    return record.levelno == logging.WARNING and record.getMessage().startswith(f"channel {CHANNEL}")


class Receiver:
    """The server that notices are sent to. It answers as ``rng`` says, and always ``ok`` once it is ``healthy``."""

    def __init__(self, rng, faults):
        self._rng, self._faults = rng, faults
        self.healthy = False
        self.deliveries: list[Delivery] = []
        self._tasks = set()

    async def start(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader, out):
        task = asyncio.current_task()
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with suppress(ConnectionError, asyncio.CancelledError):
            line = await reader.readline()
            if line.endswith(b"\n"):
                await self._answer(json.loads(line), out)
        out.transport.abort() if not self.healthy else out.close()

    async def _answer(self, row, out):
        fault = None if self.healthy or self._rng.random() < 0.85 else self._rng.choice(FAULTS)
        accepted = fault in (None, "cut after it was recorded")
        self.deliveries.append(Delivery(**row, accepted=accepted))
        if fault is not None:
            self._faults[f"a notice: {fault}"] += 1
        match fault:
            case None:
                out.write(b"ok\n")
            case "refused":
                out.write(b"no\n")
            case "no answer":
                await asyncio.sleep(5.0)
            case _:
                return
        await out.drain()
        out.close()
