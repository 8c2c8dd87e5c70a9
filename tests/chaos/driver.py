"""Chaos: real processes on one SQLite file, killed with SIGKILL at random moments and at named points.

Besides, a disk is full for a while, clocks jump, processes run half of the conversations each or leave in good order,
many decide the same call at once, and the store is backed up while all that goes on.

    python tests/chaos/driver.py --kills 1000 --conversations 20 --seed 7

See ``trial`` for what is done meanwhile, and what is checked in the end.
"""

import argparse
import asyncio
import contextlib
import io
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from math import inf
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent.parent / "src")]

import shop  # noqa: E402
from evidence import Clock, timely, within  # noqa: E402
from trial import CROWD, Trial  # noqa: E402

from holdfast import Runtime  # noqa: E402
from holdfast.cli.commands.verify import verify_store  # noqa: E402
from holdfast.core import codec  # noqa: E402
from holdfast.errors import HoldfastError  # noqa: E402
from holdfast.stores.sqlite.store import SQLiteStore  # noqa: E402

WORKERS = 3
DECK = ["full", "jumps", "jumps", "halves", "leave", "copy", *["kill"] * 10]
"""What befalls a process: each card once in so many processes, in an order that the dice make."""
SPLIT = 6
"""So many processes, one after the other, run half of the conversations each."""
BACKUP, HALF_BACKUP = "a backup meanwhile", "a kill during a backup"
FAULTS = (
    CROWD,
    "a full disk",
    "a jump of a clock",
    "a process for half of them",
    "a process that leaves",
    BACKUP,
    HALF_BACKUP,
)
"""Besides kills."""
BACKUP_SECONDS = 1.5
"""Between two backups that this process makes."""
CONTROLS = {
    "ack": "kill",
    "rerun": "kill",
    "winners": "kill",
    "greedy": "halves",
    "early": "jumps",
    "blind": "full",
    "copied": "copy",
}
"""What can be broken on purpose (see ``on_sqlite``), and the card that brings it to light."""


@dataclass
class Backup:
    """A backup that was asked for."""

    path: Path
    seen: dict[str, int]
    """How many events of each conversation had been read before it began."""
    outcome: str = "unknown"


class Chaos(Trial):
    backend = "on_sqlite"

    def __init__(self, directory, *, kills=200, **options):
        super().__init__(directory, **options)
        self.kills, self.killed = kills, 0
        self.store = self.directory / "chaos.db"
        self.clocks = self.directory / "clocks.jsonl"
        self.clocks.touch()
        self.halves, self.split = [], 0
        self.only = {}
        self.backups, self.copying = [], set()

    def order(self):
        wishes = {"store": str(self.store), "clocks": str(self.clocks), "only": None, "full": False, "jumps": None}
        return super().order() | wishes

    async def opened_desk(self):
        desk = Runtime(store=SQLiteStore(self.store))
        await desk.start()
        return desk

    def away(self, worker, op):
        away = worker is not None and worker.excused and op.kind in ("log_write_failed", "invalid_args")
        if op.kind == "log_write_failed" and not away:
            self.violations.append(f"{op}: its disk is not full")
        return away

    async def spawn(self, fault="at a random moment", *, only=None, **wishes):
        worker = await super().spawn(fault, only=only, **wishes)
        self.only[worker.number] = only
        return worker

    # --- what befalls processes ---

    async def fate(self, dice):
        """One process after the other, each of which is killed, or leaves."""
        cards, deck = DECK, []
        if self.control:
            # Who has acknowledged what its disk did not take is ahead of its log for ever: not where it is not wanted.
            cards = [card for card in DECK if card != "full"] + 5 * [CONTROLS[self.control]]
        while self.killed < self.kills:
            deck = deck or dice.sample(cards, len(cards))
            card = deck.pop()
            if card == "halves":
                some = dice.sample(self.names, len(self.names) // 2)
                self.halves = [some, [name for name in self.names if name not in some]]
                self.split = SPLIT
                continue
            self.killed += card != "leave"
            worker = await getattr(self, f"_{card}")(dice, self._half())
            await self.ended(worker, killed=card != "leave")

    def _half(self):
        """The conversations that the next process runs, while they are split; None: all."""
        if not self.split:
            return None
        self.split -= 1
        self.others["a process for half of them"] += 1
        return self.halves[self.split % 2]

    async def _kill(self, dice, only):
        point = dice.choice([*shop.CRASH_POINTS, *[None] * len(shop.CRASH_POINTS)])
        if point is None:
            worker = await self.spawn(only=only)
            await asyncio.sleep(dice.choice([0.005, 0.02, 0.06, 0.15]) * (0.5 + dice.random()))
        else:
            times = dice.randint(1, 4 if point.startswith("append") else 2)  # the others are rarer
            worker = await self.spawn(point, crash=f"{point}@{times}", only=only)
            if not await worker.buried(0.5 + dice.random() / 10):
                worker.fault = "at a random moment"  # it did not come by
        return worker

    async def _leave(self, dice, only):
        """It goes by itself, in good order, whatever it is doing."""
        worker = await self.spawn(only=only)
        await worker.up()
        await asyncio.sleep(dice.random() / 5)
        self.leave(worker)
        self.others["a process that leaves"] += 1
        return worker

    async def _jumps(self, dice, only):
        """Its clock is wrong, by minutes or hours, and by other ones every moment."""
        worker = await self.spawn(only=only, jumps=dice.getrandbits(32))
        await worker.up()
        await asyncio.sleep(0.1 + dice.random() / 3)
        return worker

    async def _full(self, dice, only):
        """Its disk is full for a while; it is asked for something in that time, and after it."""
        worker = await self.spawn(only=only, full=True)
        await worker.up()
        await asyncio.sleep(dice.random() / 10)
        await self.room(worker, dice.choice([0, 0, 5_000, 20_000]))
        meanwhile = asyncio.create_task(self.say(dice, worker))
        await asyncio.sleep(dice.choice([0.05, 0.1, 0.2, 0.4]))
        self.others["a full disk"] += await self.room(worker, None) > 0
        try:
            async with asyncio.timeout(1 if self.control else 10):
                await meanwhile
                said = await self.say(dice, worker)
        except TimeoutError:
            said = None
        if said is None or said.outcome != "ok":
            self.violations.append(f"worker {worker.number} has room again, and says {said}")
        return worker

    async def _copy(self, dice, only):
        """It is asked for a backup, and killed before, while or after it is made."""
        worker = await self.spawn(only=only)
        await worker.up()
        copying = asyncio.create_task(self.back_up(worker))
        self.copying.add(copying)
        await asyncio.wait([copying], timeout=dice.choice([0.0, 0.01, 0.05, 30.0]))
        return worker

    async def back_up(self, worker):
        """Ask a worker (None: our own runtime) for a backup. What becomes of it is checked in the end."""
        seen = {name: len(known) for name, known in self.seen.items()}
        made = Backup(self.directory / f"backup{len(self.backups)}.db", seen)
        self.backups.append(made)
        if worker is None:
            try:
                await self.desk.backup(made.path)
                made.outcome = "ok"
            except HoldfastError as failure:
                self.violations.append(f"{made.path.name}: {failure}")
                return
        else:
            self.count += 1
            answer = await worker.ask(self.count, {"verb": "backup", "path": str(made.path)})
            made.outcome = answer["outcome"]
            if made.outcome == "refused":
                self.violations.append(f"{made.path.name}: {answer}")
        self.others[BACKUP if made.outcome == "ok" else HALF_BACKUP] += 1

    async def keep_backing_up(self):
        while not self.resting:
            await self.back_up(None)
            await asyncio.sleep(BACKUP_SECONDS)

    async def room(self, worker, size):
        self.count += 1
        return (await worker.ask(self.count, {"verb": "room", "bytes": size}))["seq"]

    # --- the run ---

    async def run(self):
        clients = [asyncio.create_task(self.client(name)) for name in self.names]
        backups = asyncio.create_task(self.keep_backing_up())
        started = time.monotonic()
        await asyncio.gather(*(self.fate(random.Random(f"{self.seed}/fate/{n}")) for n in range(WORKERS)))
        self.seconds = time.monotonic() - started
        self.resting = True
        await asyncio.gather(*clients, backups, *self.copying)
        os.fsync(self.history)
        await self.spawn()
        await self.rest()

    async def judge(self):
        clocks = self._clocks()

        def evident(name, events, bodies, effects):
            yield lambda: timely(events, clocks, self.first_seen(name))
            yield lambda: within(effects, self.only)

        store = SQLiteStore(self.store)
        await store.open()
        try:
            await self.check(store, evident)
            for made in self.backups:
                try:
                    await self._check_backup(made, store)
                except (AssertionError, HoldfastError) as broken:
                    self.violations.append(f"{made.path.name}: {broken}")
        finally:
            await store.close()

    async def _check_backup(self, made, live):
        """A backup is a store at one moment of the run, with all that was read before it began.

        Where its process died before it could say so, it is there as a whole, or not at all.
        """
        if made.outcome != "ok" and not made.path.exists():
            return
        assert made.path.exists(), "it was reported as complete, and is not there"
        with contextlib.redirect_stdout(io.StringIO()) as said:
            verified = await verify_store(f"sqlite:///{made.path}", None, as_json=False)
        assert verified == 0, f"the backup does not verify: {said.getvalue()}"
        store = SQLiteStore(made.path)
        await store.open()
        try:
            for name in self.names:
                bodies = await store.read(name)
                assert len(bodies) >= made.seen[name], f"the backup lacks events of {name} that were read before"
                assert bodies == (await live.read(name))[: len(bodies)], f"{name} in the backup is no prefix of the log"
                await self._kept(store, name, [codec.decode_event(body) for body in bodies], bodies)
        finally:
            await store.close()

    def _clocks(self):
        """What every clock has shown: the wall's, and each that jumped, from one jump to the next."""
        jumps = [json.loads(line) for line in self.clocks.read_text().splitlines()]
        clocks = [Clock(0.0, self.began, inf)]
        for number in {jump["worker"] for jump in jumps}:
            mine = [jump for jump in jumps if jump["worker"] == number]
            ends = [*(jump["since"] for jump in mine[1:]), self.ends.get(number, inf)]
            clocks += [Clock(jump["offset"], jump["since"], end) for jump, end in zip(mine, ends, strict=True)]
        self.others["a jump of a clock"] = len(jumps)
        return clocks


async def chaos(directory, **options):
    """A whole run; the finished ``Chaos`` with its violations."""
    async with Chaos(directory, **options) as run:
        await run.run()
        await run.judge()
    return run


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--control", choices=[*CONTROLS], help="break it on purpose: the checker must see it")
    parser.add_argument("--keep", metavar="DIRECTORY", help="leave the store, the history and the ledger there")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        if given.keep:
            os.makedirs(given.keep, exist_ok=True)
        run = asyncio.run(
            chaos(
                given.keep or scratch,
                kills=given.kills,
                conversations=given.conversations,
                seed=given.seed,
                control=given.control,
            )
        )
    print(run.table())
    for violation in run.violations[:5]:
        print(f"\nVIOLATION {violation}")
    return 1 if run.violations else 0


if __name__ == "__main__":
    sys.exit(main())
