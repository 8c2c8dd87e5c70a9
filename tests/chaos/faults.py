"""What can be wrong with the machine that a worker runs on: its disk is full, its clock jumps."""

import asyncio
import json
import logging
import os
import random
import time

import apsw

from holdfast.runtime import conversation, takeover


class Disk(apsw.VFS):
    """The file layer of this process's SQLite, on a disk that can be full: then what is written meets SQLITE_FULL.

    Everything above it is real: SQLite's own handling in the middle of a COMMIT, its roll-back, its next attempt.
    """

    def __init__(self):
        self.below = apsw.vfs_names()[0]
        super().__init__("filling", self.below, makedefault=True)
        self.room = None
        """Bytes that are left; None: plenty."""
        self.refused = 0
        # An owner tries again for a while, then stops and looks again later: the same, in less time.
        conversation.WRITE_RETRIES = (0.02, 0.05, 0.1)
        takeover.BACKOFF_SECONDS = 0.2
        expected = ("disk is full", "the store answers again")
        logging.getLogger("holdfast").addFilter(lambda record: not any(each in _whole(record) for each in expected))

    def xOpen(self, name, flags):
        return File(self, name, flags)

    def take(self, size):
        if self.room is not None and self.room < size:
            self.refused += 1
            raise apsw.FullError("no space left on device")
        if self.room is not None:
            self.room -= size


class File(apsw.VFSFile):
    def __init__(self, disk, name, flags):
        self.disk = disk
        super().__init__(disk.below, name, flags)

    def xWrite(self, data, offset):
        self.disk.take(len(data))
        super().xWrite(data, offset)


def _whole(record):
    return f"{record.getMessage()} {record.exc_info and record.exc_info[1]}"


class Clock:
    """The wall's clock, and how wrong this one is. A jump is written down, outside of the system, before it is made."""

    def __init__(self, worker, evidence):
        self.worker, self.offset = worker, 0.0
        self._wall = time.time
        self._evidence = os.open(evidence, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def __call__(self):
        return self._wall() + self.offset

    def jump(self, offset):
        row = {"worker": self.worker, "since": self._wall(), "offset": offset}
        os.write(self._evidence, (json.dumps(row) + "\n").encode())
        self.offset = offset

    async def jumps(self, seed):
        """By minutes or hours, forward and backward, and now and then back to what is right."""
        dice = random.Random(seed)
        while True:
            away = dice.choice([0.0, 120.0, 3600.0, 3 * 3600.0])
            self.jump(dice.choice([-1, 1]) * away * (0.5 + dice.random()))
            await asyncio.sleep(0.02 + dice.random() / 10)
