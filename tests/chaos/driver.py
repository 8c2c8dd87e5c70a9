"""Chaos: real processes on one SQLite file, killed with SIGKILL at random moments and at named points.

Other faults: a disk is full for a while, clocks jump, processes run half of the conversations each or exit cleanly,
many clients decide the same call at once, and the store is backed up meanwhile.

    python tests/chaos/driver.py --kills 1000 --conversations 20 --seed 7

See ``trial`` for what the clients do, and what is checked at the end.
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
from collections import defaultdict
from dataclasses import dataclass
from math import inf
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent.parent / "src")]

import laws  # noqa: E402
import shop  # noqa: E402
from evidence import Clock, check_assignment, check_event_times  # noqa: E402
from trial import CROWD, Trial  # noqa: E402

from holdfast import Runtime  # noqa: E402
from holdfast.cli.commands.verify import verify_store  # noqa: E402
from holdfast.core import codec  # noqa: E402
from holdfast.errors import HoldfastError  # noqa: E402
from holdfast.stores.sqlite.store import SQLiteStore  # noqa: E402

WORKERS = 3
DECK = ["full", "jumps", "jumps", "halves", "leave", "copy", *["till"] * 5, *["kill"] * 10]
"""The faults of processes, one for each process, drawn in random order until the deck is used up."""
SPLIT = 6
"""The number of successive processes that run half of the conversations each."""
BACKUP, HALF_BACKUP = "a backup meanwhile", "a kill during a backup"
FAULTS = (
    CROWD,
    "a full disk",
    "a jump of a clock",
    "a process for half of the conversations",
    "a process that leaves",
    BACKUP,
    HALF_BACKUP,
)
"""The faults other than kills."""
WITH_SERVER = "while it works with an MCP server"
BACKUP_SECONDS = 1.5
"""The pause between two backups that this process makes."""
CONTROLS = {
    "ack": "kill",
    "rerun": "kill",
    "winners": "kill",
    "greedy": "halves",
    "early": "jumps",
    "blind": "full",
    "copied": "copy",
}
"""The deliberate defects (see ``on_sqlite``), each with the fault that reveals it."""


@dataclass
class Backup:
    """A backup that was requested."""

    path: Path
    seen: dict[str, int]
    """The number of events of each conversation that had been read before it started."""
    outcome: str = "unknown"


class Chaos(Trial):
    backend = "on_sqlite"

    def __init__(self, directory, *, kills=200, tills=4, **options):
        super().__init__(directory, **options)
        self.tills = [f"m{n:02}" for n in range(tills)]
        self.names += self.tills
        for known in (self.operations, self.crowds, self.seen, self.observations):
            known.update((name, []) for name in self.tills)
        self.till_ledger, self.till = self.directory / "till.txt", None
        self.kills, self.killed = kills, 0
        self.store = self.directory / "chaos.db"
        self.clocks = self.directory / "clocks.jsonl"
        self.clocks.touch()
        self.halves, self.split = [], 0
        self.only = {}
        self.backups, self.copying = [], set()

    def order(self):
        options = {"store": str(self.store), "clocks": str(self.clocks), "only": None, "full": False, "jumps": None}
        return super().order() | options | {"till": None}

    async def __aenter__(self):
        command = [sys.executable, str(HERE / "till.py"), str(self.till_ledger), "http"]
        with (self.directory / "till-stderr.txt").open("w") as errors:  # it logs the clients that are killed
            self.server_of_till = await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.PIPE, stderr=errors
            )
        self.till = (await self.server_of_till.stdout.readline()).decode().strip()
        return await super().__aenter__()

    async def __aexit__(self, *problem):
        await super().__aexit__(*problem)
        self.server_of_till.kill()
        await self.server_of_till.wait()

    async def open_desk(self):
        desk = Runtime(store=SQLiteStore(self.store))
        await desk.start()
        return desk

    def was_unavailable(self, worker, op):
        away = worker is not None and worker.excused and op.kind in ("log_write_failed", "invalid_args")
        if op.kind == "log_write_failed" and not away:
            self.violations.append(f"{op}: the log could not be written, and the disk is not full")
        return away

    async def spawn(self, fault="at a random moment", *, only=None, **options):
        worker = await super().spawn(fault, only=only, **options)
        self.only[worker.number] = only
        return worker

    # --- faults of processes ---

    async def run_faults(self, rng):
        """Start one process after the other; each is killed or exits."""
        cards, deck = DECK, []
        if self.control:
            # A process that acknowledges a write that failed never matches its log again: only for its own control.
            cards = [card for card in DECK if card != "full"] + 5 * [CONTROLS[self.control]]
        while self.killed < self.kills:
            deck = deck or rng.sample(cards, len(cards))
            card = deck.pop()
            if card == "halves":
                some = rng.sample(self.names, len(self.names) // 2)
                self.halves = [some, [name for name in self.names if name not in some]]
                self.split = SPLIT
                continue
            self.killed += card != "leave"
            worker = await getattr(self, f"_{card}")(rng, self._half())
            await self.end_worker(worker, killed=card != "leave")

    def _half(self):
        """Return the conversations that the next process runs; None for all."""
        if not self.split:
            return None
        self.split -= 1
        self.other_faults["a process for half of the conversations"] += 1
        return self.halves[self.split % 2]

    async def _kill(self, rng, only):
        point = rng.choice([*shop.CRASH_POINTS, *[None] * len(shop.CRASH_POINTS)])
        if point is None:
            worker = await self.spawn(only=only)
            await asyncio.sleep(rng.choice([0.005, 0.02, 0.06, 0.15]) * (0.5 + rng.random()))
        else:
            times = rng.randint(1, 4 if point.startswith("append") else 2)  # other points are passed less often
            worker = await self.spawn(point, crash=f"{point}@{times}", only=only)
            if not await worker.wait_until_dead(0.5 + rng.random() / 10):
                worker.fault = "at a random moment"  # it did not reach the point
        return worker

    async def _till(self, rng, only):
        """Kill a process that works with the MCP server: at an append, or at a random moment."""
        appends = [point for point in shop.CRASH_POINTS if point.startswith("append")]
        point = rng.choice([*appends, *[None] * len(appends)])
        crash = None if point is None else f"{point}@{rng.randint(1, 12)}"
        mine = None if only is None else [*only, *self.tills]
        worker = await self.spawn(WITH_SERVER, only=mine, till=self.till, crash=crash)
        if point is None:
            await worker.wait_until_up()
            await asyncio.sleep(rng.random() / 2)
        else:
            await worker.wait_until_dead(2.0)
        return worker

    async def _leave(self, rng, only):
        """Ask a process to exit cleanly at a random moment."""
        worker = await self.spawn(only=only)
        await worker.wait_until_up()
        await asyncio.sleep(rng.random() / 5)
        self.ask_to_exit(worker)
        self.other_faults["a process that leaves"] += 1
        return worker

    async def _jumps(self, rng, only):
        """Start a process whose clock jumps by minutes or hours, several times a second."""
        worker = await self.spawn(only=only, jumps=rng.getrandbits(32))
        await worker.wait_until_up()
        await asyncio.sleep(0.1 + rng.random() / 3)
        return worker

    async def _full(self, rng, only):
        """Fill a process's disk for a while; send it a message during that time, and after it."""
        worker = await self.spawn(only=only, full=True)
        await worker.wait_until_up()
        await asyncio.sleep(rng.random() / 10)
        await self.set_free_bytes(worker, rng.choice([0, 0, 5_000, 20_000]))
        meanwhile = asyncio.create_task(self.send_message(rng, worker))
        await asyncio.sleep(rng.choice([0.05, 0.1, 0.2, 0.4]))
        self.other_faults["a full disk"] += await self.set_free_bytes(worker, None) > 0
        try:
            async with asyncio.timeout(1 if self.control else 10):
                await meanwhile
                answer = await self.send_message(rng, worker)
        except TimeoutError:
            answer = None
        if answer is None or answer.outcome != "ok":
            self.violations.append(f"worker {worker.number} has free space again, and answers {answer}")
        return worker

    async def _copy(self, rng, only):
        """Ask a process for a backup, and kill it before, during or after that."""
        worker = await self.spawn(only=only)
        await worker.wait_until_up()
        copying = asyncio.create_task(self.back_up(worker))
        self.copying.add(copying)
        await asyncio.wait([copying], timeout=rng.choice([0.0, 0.01, 0.05, 30.0]))
        return worker

    async def back_up(self, worker):
        """Ask a worker (None: the driver's own runtime) for a backup. It is checked at the end."""
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
        self.other_faults[BACKUP if made.outcome == "ok" else HALF_BACKUP] += 1

    async def keep_backing_up(self):
        while not self.resting:
            await self.back_up(None)
            await asyncio.sleep(BACKUP_SECONDS)

    async def set_free_bytes(self, worker, size):
        self.count += 1
        return (await worker.ask(self.count, {"verb": "room", "bytes": size}))["seq"]

    # --- the run ---

    async def run(self):
        clients = [asyncio.create_task(self.client(name)) for name in self.names]
        backups = asyncio.create_task(self.keep_backing_up())
        started = time.monotonic()
        await asyncio.gather(*(self.run_faults(random.Random(f"{self.seed}/fate/{n}")) for n in range(WORKERS)))
        self.seconds = time.monotonic() - started
        self.resting = True
        await asyncio.gather(*clients, backups, *self.copying)
        os.fsync(self.history)
        await self.spawn(till=self.till)
        await self.rest()

    async def judge(self):
        clocks = self._clocks()

        def more_laws(name, events, bodies, effects):
            yield lambda: check_event_times(events, clocks, self.first_seen(name))
            yield lambda: check_assignment(effects, self.only)
            yield lambda: laws.remote_rounds(events, remote[name])

        remote = read_till(self.till_ledger)
        self.counts["first-rounds"] = sum(row.begun for rows in remote.values() for row in rows.values())
        self.counts["remote-answers"] = sum(row.continued for rows in remote.values() for row in rows.values())
        store = SQLiteStore(self.store)
        await store.open()
        try:
            await self.check(store, more_laws)
            for made in self.backups:
                try:
                    await self._check_backup(made, store)
                except (AssertionError, HoldfastError) as broken:
                    self.violations.append(f"{made.path.name}: {broken}")
        finally:
            await store.close()

    async def _check_backup(self, made, live):
        """Check that a backup is the store at one moment, with all events that were read before it started.

        If its process died before it answered, the backup is complete or does not exist.
        """
        if made.outcome != "ok" and not made.path.exists():
            return
        assert made.path.exists(), "it was reported as complete and does not exist"
        with contextlib.redirect_stdout(io.StringIO()) as output:
            verified = await verify_store(f"sqlite:///{made.path}", None, as_json=False)
        assert verified == 0, f"the backup does not verify: {output.getvalue()}"
        store = SQLiteStore(made.path)
        await store.open()
        try:
            for name in self.names:
                bodies = await store.read(name)
                assert len(bodies) >= made.seen[name], f"the backup lacks events of {name} that were read before"
                assert bodies == (await live.read(name))[: len(bodies)], f"the backup of {name} is no prefix of the log"
                await self._check_indexes(store, name, [codec.decode_event(body) for body in bodies], bodies)
        finally:
            await store.close()

    def _clocks(self):
        """Return the real clock, and one for each interval between two jumps of a worker's clock."""
        jumps = [json.loads(line) for line in self.clocks.read_text().splitlines()]
        clocks = [Clock(0.0, self.started_at, inf)]
        for number in {jump["worker"] for jump in jumps}:
            mine = [jump for jump in jumps if jump["worker"] == number]
            ends = [*(jump["since"] for jump in mine[1:]), self.ends.get(number, inf)]
            clocks += [Clock(jump["offset"], jump["since"], end) for jump, end in zip(mine, ends, strict=True)]
        self.other_faults["a jump of a clock"] = len(jumps)
        return clocks


def read_till(path):
    """Return what the MCP server has done: conversation -> call -> Remote."""
    found, tasks = defaultdict(lambda: defaultdict(laws.Remote)), {}
    for line in path.read_text().splitlines() if path.exists() else ():
        word, *rest = line.split()
        key = rest[1] if word == "task" else tasks.get(rest[0]) if word == "updated" else rest[0]
        if word == "task":
            tasks[rest[0]] = key
        if word in ("asked", "task", "continued", "updated"):
            conversation, _, call = key.rpartition("/")
            row = found[conversation][call]
            row.begun += word in ("asked", "task")
            row.continued += word in ("continued", "updated")
    return found


async def chaos(directory, **options):
    """Return a finished run with its violations."""
    async with Chaos(directory, **options) as run:
        await run.run()
        await run.judge()
    return run


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--control", choices=[*CONTROLS], help="a deliberate defect, which the checker must report")
    parser.add_argument("--keep", metavar="DIRECTORY", help="keep the store, the history and the ledger there")
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
