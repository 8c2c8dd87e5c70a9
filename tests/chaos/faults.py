"""Faults of the machine that a worker runs on: its disk is full, its clock jumps."""

import asyncio
import json
import logging
import os
import random
import time

import apsw

from holdfast.runtime import conversation, takeover


class Disk(apsw.VFS):
    """The file layer of this process's SQLite, on a disk that can be full: then writes fail with SQLITE_FULL.

    Everything above it is real: SQLite's handling in the middle of a COMMIT, its roll-back, its next attempt.
    """

    def __init__(self):
        self.below = apsw.vfs_names()[0]
        super().__init__("filling", self.below, makedefault=True)
        self.free = None
        """The free bytes; None for no limit."""
        self.refused = 0
        # An owner retries for a while, then stops and tries again later: here with shorter pauses.
        conversation.WRITE_RETRIES = (0.02, 0.05, 0.1)
        takeover.BACKOFF_SECONDS = 0.2
        expected = ("disk is full", "the store answers again")
        logging.getLogger("holdfast").addFilter(lambda record: not any(each in _full_text(record) for each in expected))

    def xOpen(self, name, flags):
        return File(self, name, flags)

    def reserve(self, size):
        if self.free is not None and self.free < size:
            self.refused += 1
            raise apsw.FullError("no space left on device")
        if self.free is not None:
            self.free -= size


class File(apsw.VFSFile):
    def __init__(self, disk, name, flags):
        self.disk = disk
        super().__init__(disk.below, name, flags)

    def xWrite(self, data, offset):
        self.disk.reserve(len(data))
        super().xWrite(data, offset)


def _full_text(record):
    return f"{record.getMessage()} {record.exc_info and record.exc_info[1]}"


class Clock:
    """The real clock plus an offset. A jump is recorded in a file before it is made."""

    def __init__(self, worker, evidence):
        self.worker, self.offset = worker, 0.0
        self._real = time.time
        self._evidence = os.open(evidence, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def __call__(self):
        return self._real() + self.offset

    def jump(self, offset):
        row = {"worker": self.worker, "since": self._real(), "offset": offset}
        os.write(self._evidence, (json.dumps(row) + "\n").encode())
        self.offset = offset

    async def jumps(self, seed):
        """Jump by minutes or hours, forward and backward, and sometimes back to the right time."""
        rng = random.Random(seed)
        while True:
            away = rng.choice([0.0, 120.0, 3600.0, 3 * 3600.0])
            self.jump(rng.choice([-1, 1]) * away * (0.5 + rng.random()))
            await asyncio.sleep(0.02 + rng.random() / 10)
