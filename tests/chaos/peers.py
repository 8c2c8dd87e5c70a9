"""The protocol between the driver and its workers: one JSON object a line."""

import asyncio
import json
import os
import signal
import time
from contextlib import suppress

import psutil

from holdfast.errors import HoldfastError, Refused, Stale


def refusal(failure: HoldfastError) -> dict:
    """Return the answer for an error; ``unknown`` if the store does not know whether the request was recorded."""
    settled = isinstance(failure, Refused) or failure.details.get("outcome") == "nothing"
    stale = {"reason": failure.reason, "winner": failure.winner} if isinstance(failure, Stale) else {}
    outcome = "refused" if settled else "unknown"
    return {"outcome": outcome, "kind": failure.kind, "said": repr(failure), **stale}


class Worker:
    """A worker process, as the driver sees it."""

    def __init__(self, number, pid, fault, order):
        self.number, self.pid, self.fault = number, pid, fault
        self.jumps = order.get("jumps") is not None
        self.excused = bool(order.get("full"))
        """Whether it may report that the log cannot be written: its disk is full, or it exits."""
        self.port = None
        """The port on which it serves HTTP, if it does."""
        self.out = None
        self.requests = {}
        self._up = asyncio.Event()

    async def listen(self, reader, out):
        self.out = out
        self._up.set()
        with suppress(ConnectionError):
            while line := await reader.readline():
                answer = json.loads(line)
                future = self.requests.pop(answer["id"], None)
                if future is not None and not future.done():
                    future.set_result(answer)
        self.fail_requests()

    def fail_requests(self):
        """Answer all open requests to a dead worker with ``unknown``."""
        self.out = None
        for future in self.requests.values():
            if not future.done():
                future.set_result({"outcome": "unknown"})
        self.requests.clear()

    async def wait_until_up(self):
        async with asyncio.timeout(20):
            await self._up.wait()

    async def ask(self, number, request):
        if self.out is None or self.out.is_closing():
            return {"outcome": "unknown"}
        future = self.requests[number] = asyncio.get_running_loop().create_future()
        self.out.write(json.dumps({"id": number, **request}).encode() + b"\n")
        return await future

    def is_alive(self):
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def is_stopped(self):
        """Return whether the process is stopped by a signal."""
        try:
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        except psutil.NoSuchProcess:
            return False

    def signal(self, number):
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self):
        self.signal(signal.SIGKILL)

    async def wait_until_dead(self, timeout=60.0):
        """Wait until the process is dead, at most ``timeout`` seconds; return whether it is."""
        until = time.monotonic() + timeout
        while alive := self.is_alive():
            if time.monotonic() > until:
                break
            await asyncio.sleep(0.002)
        return not alive
