"""Between the driver and its workers: one JSON object a line, and what an answer says."""

import asyncio
import json
import os
import signal
import time
from contextlib import suppress

import psutil

from holdfast.errors import HoldfastError, Refused, Stale


def refusal(failure: HoldfastError) -> dict:
    """What the one who asked is told. ``unknown`` where the store itself does not know whether it was recorded."""
    settled = isinstance(failure, Refused) or failure.details.get("outcome") == "nothing"
    stale = {"reason": failure.reason, "winner": failure.winner} if isinstance(failure, Stale) else {}
    outcome = "refused" if settled else "unknown"
    return {"outcome": outcome, "kind": failure.kind, "said": repr(failure), **stale}


class Worker:
    """One process, from the driver's side."""

    def __init__(self, number, pid, fault, order):
        self.number, self.pid, self.fault = number, pid, fault
        self.jumps = order.get("jumps") is not None
        self.excused = bool(order.get("full"))
        """It may say that the log cannot be written: its disk is full, or it leaves."""
        self.port = None
        """Where it serves HTTP, if it does."""
        self.out = None
        self.asked = {}
        self._up = asyncio.Event()

    async def listen(self, reader, out):
        self.out = out
        self._up.set()
        with suppress(ConnectionError):
            while line := await reader.readline():
                answer = json.loads(line)
                future = self.asked.pop(answer["id"], None)
                if future is not None and not future.done():
                    future.set_result(answer)
        self.lost()

    def lost(self):
        """It is dead: what was asked of it and not answered, nobody knows."""
        self.out = None
        for future in self.asked.values():
            if not future.done():
                future.set_result({"outcome": "unknown"})
        self.asked.clear()

    async def up(self):
        async with asyncio.timeout(20):
            await self._up.wait()

    async def ask(self, number, request):
        if self.out is None or self.out.is_closing():
            return {"outcome": "unknown"}
        future = self.asked[number] = asyncio.get_running_loop().create_future()
        self.out.write(json.dumps({"id": number, **request}).encode() + b"\n")
        return await future

    def alive(self):
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def stopped(self):
        """Does it stand still?"""
        try:
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        except psutil.NoSuchProcess:
            return False

    def signal(self, number):
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self):
        self.signal(signal.SIGKILL)

    async def buried(self, patience=60.0):
        """Wait until it is dead, at most so long; is it?"""
        until = time.monotonic() + patience
        while alive := self.alive():
            if time.monotonic() > until:
                break
            await asyncio.sleep(0.002)
        return not alive
