"""Chaos: real processes on one SQLite file, killed with SIGKILL at random moments and at named points.

    python tests/chaos/driver.py --kills 1000 --conversations 20 --seed 7

The driver is the client. It asks workers (and a runtime of its own) to send, decide and cancel, and keeps a history
of what it asked for and what it was told, outside of the system; what tools really did stands in a ledger,
outside of the system as well. When the last kill is done everything is let come to rest, and the laws
(``laws``) are asked of every log, with the history and the ledger as evidence.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = HERE.parent.parent / "src"
sys.path[:0] = [str(HERE), str(SOURCE)]

import laws  # noqa: E402
import msgspec  # noqa: E402
import shop  # noqa: E402

from assent import Answer, Approve, Deny, Runtime, Submit  # noqa: E402
from assent.core import codec  # noqa: E402
from assent.core.decisions import Pending  # noqa: E402
from assent.core.events import CallReturned, CallStarted  # noqa: E402
from assent.core.state import State, evolve, pending  # noqa: E402
from assent.errors import AssentError, Refused  # noqa: E402
from assent.stores.base import GENESIS, chain  # noqa: E402
from assent.stores.sqlite import SQLiteStore  # noqa: E402

WORKERS = 3
REST = 60.0
"""Seconds in which everything must come to rest after the last kill."""


class Worker:
    """One process, from the driver's side."""

    def __init__(self, number, pid, fault):
        self.number, self.pid, self.fault = number, pid, fault
        self.out = None
        self.asked = {}

    async def listen(self, reader, out):
        self.out = out
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

    async def ask(self, number, request):
        if self.out is None:
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

    def kill(self):
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    async def buried(self, patience=60.0):
        """Wait until it is dead, at most so long; is it?"""
        until = time.monotonic() + patience
        while alive := self.alive():
            if time.monotonic() > until:
                break
            await asyncio.sleep(0.002)
        return not alive


class Chaos:
    def __init__(self, directory, *, kills=200, conversations=20, seed=1, control=None):
        self.directory = Path(directory)
        self.kills, self.seed, self.control = kills, seed, control
        self.names = [f"c{n:02}" for n in range(conversations)]
        self.dice = random.Random(seed)
        self.store, self.ledger = self.directory / "chaos.db", self.directory / "effects.jsonl"
        self.complaints = self.directory / "stderr.txt"
        self.operations = {name: [] for name in self.names}
        self.seen = {name: [] for name in self.names}
        self.faults, self.told = Counter(), Counter()
        self.workers = {}
        self.number = self.count = self.killed = 0
        self.violations = []
        self.resting = False

    # --- processes ---

    async def __aenter__(self):
        self.ledger.touch()
        self.history = os.open(self.directory / "history.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self.scratch = tempfile.TemporaryDirectory()  # the path of a socket must be short
        self.socket = f"{self.scratch.name}/s"
        self.server = await asyncio.start_unix_server(self._welcome, self.socket)
        with self.complaints.open("w") as complaints:
            self.forks = subprocess.Popen(  # noqa: ASYNC220 - it is up before anything else begins
                [sys.executable, str(HERE / "worker.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,
                text=True,
                env={**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{HERE}"},
            )
        self.desk = Runtime(store=SQLiteStore(self.store))
        await self.desk.start()
        return self

    async def __aexit__(self, *_):
        for worker in self.workers.values():
            worker.kill()
        for worker in self.workers.values():
            await worker.buried()
        await self.desk.close()
        self.server.close()
        await self.server.wait_closed()
        self.forks.stdin.close()
        self.forks.wait()
        self.forks.stdout.close()
        os.close(self.history)
        self.scratch.cleanup()

    async def _welcome(self, reader, out):
        line = await reader.readline()
        worker = self.workers.get(json.loads(line)["worker"]) if line else None
        if worker is not None:
            await worker.listen(reader, out)
        out.close()

    async def spawn(self, fault="", crash=None):
        self.number += 1
        order = {
            "worker": self.number,
            "store": str(self.store),
            "ledger": str(self.ledger),
            "socket": self.socket,
            "seed": self.seed,
            "control": self.control,
            "crash": crash,
        }
        number = self.number
        print(json.dumps(order), file=self.forks.stdin, flush=True)
        worker = self.workers[number] = Worker(number, int(self.forks.stdout.readline()), fault)
        return worker

    async def fate(self, dice):
        """One process after the other, each of which is killed."""
        while self.killed < self.kills:
            self.killed += 1
            point = dice.choice([*shop.CRASH_POINTS, *[None] * len(shop.CRASH_POINTS)])
            if point is None:
                worker = await self.spawn("at a random moment")
                await asyncio.sleep(dice.choice([0.005, 0.02, 0.06, 0.15]) * (0.5 + dice.random()))
            else:
                worker = await self.spawn(point, f"{point}@{dice.randint(1, 4)}")
                if not await worker.buried(0.3 + dice.random() / 10):
                    worker.fault = "at a random moment"  # it did not come by
            worker.kill()
            await worker.buried()
            worker.lost()
            self.faults[worker.fault] += 1
            del self.workers[worker.number]

    # --- clients ---

    def note(self, **fact):
        os.write(self.history, (json.dumps(fact) + "\n").encode())

    async def operate(self, name, verb, dice, **request):
        """Ask somebody for something; the history knows before they do, and keeps what they said."""
        self.count += 1
        number = self.count
        op = laws.Operation(verb, f"op{number}", text=request.get("text", ""))
        op.decisions = request.pop("decisions", {})
        self.operations[name].append(op)
        plain = msgspec.to_builtins(op.decisions)
        self.note(id=number, status="invoked", verb=verb, conversation=name, by=op.by, **request, decisions=plain)
        workers = [worker for worker in self.workers.values() if worker.out is not None]
        if workers and dice.random() < 0.8:
            asked = {"verb": verb, "conversation": name, "by": op.by, "decisions": plain, **request}
            answer = await dice.choice(workers).ask(number, asked)
        else:
            answer = await self._here(name, verb, op, request)
        op.outcome, op.seq, op.said = answer["outcome"], answer.get("seq"), answer.get("said", "")
        status = {"ok": "ok", "refused": "failed", "unknown": "unknown"}[op.outcome]
        self.note(id=number, status=status, seq=op.seq, said=op.said)
        self.told[f"{verb} {status}"] += 1

    async def _here(self, name, verb, op, request):
        """The driver's own runtime: a guest on the same file."""
        try:
            match verb:
                case "send":
                    when_busy = request["when_busy"]
                    turn = await self.desk.send(name, op.text, by=op.by, agent="shop", when_busy=when_busy)
                    return {"outcome": "ok", "seq": turn.seq}
                case "resolve":
                    return {"outcome": "ok", "seq": (await self.desk.submit(name, op.decisions, by=op.by)).seq}
                case _:
                    return {"outcome": "ok", "seq": None if await self.desk.cancel(name, by=op.by) else 0}
        except Refused as refusal:
            return {"outcome": "refused", "said": repr(refusal)}
        except AssentError as failure:
            return {"outcome": "unknown", "said": repr(failure)}

    async def client(self, name):
        dice = random.Random(f"{self.seed}/{name}")
        while not self.resting:
            entries = await self.desk.pending(name) if self.seen_once(name) else []
            roll = dice.random()
            if entries and roll < 0.75:
                some = dice.sample(entries, dice.randint(1, len(entries)))
                decisions = {entry.call: decided(entry, dice) for entry in some}
                both = [self.operate(name, "resolve", dice, decisions=decisions)]
                if dice.random() < 0.3:  # somebody else decides the same, at the same time
                    again = {entry.call: decided(entry, dice) for entry in some}
                    both.append(self.operate(name, "resolve", dice, decisions=again))
                await asyncio.gather(*both)
            elif roll > 0.93 and self.seen_once(name):
                await self.operate(name, "cancel", dice)
            else:
                when_busy = dice.choice(["refuse", "refuse", "queue", "interrupt"])
                text = f"message {dice.getrandbits(256):x}"
                await self.operate(name, "send", dice, text=text, when_busy=when_busy)
            await self.observe(name)
            await asyncio.sleep(dice.random() / 10)

    def seen_once(self, name):
        return any(op.verb == "send" and op.outcome == "ok" for op in self.operations[name])

    async def observe(self, name):
        """What anybody has read stays as it was: remember it."""
        known = self.seen[name]
        known += [sha256(body).digest() for body in await self.desk.store.read(name, after=len(known))]

    # --- the run ---

    async def run(self):
        clients = [asyncio.create_task(self.client(name)) for name in self.names]
        started = time.monotonic()
        await asyncio.gather(*(self.fate(random.Random(f"{self.seed}/fate/{n}")) for n in range(WORKERS)))
        self.seconds = time.monotonic() - started
        self.resting = True
        await asyncio.gather(*clients)
        os.fsync(self.history)
        await self.spawn("never")
        await self.rest()

    async def rest(self):
        """Let everything come to its end: whatever waits is decided."""
        dice = random.Random(f"{self.seed}/rest")
        until = time.monotonic() + REST
        while time.monotonic() < until:
            rows = [row for row in await self.desk.store.rows(limit=1000) if row.conversation in self.operations]
            busy = [row for row in rows if row.status != "idle" or row.owes]
            if not busy:
                return
            for row in busy:
                for entry in await self.desk.pending(row.conversation):
                    await self.operate(row.conversation, "resolve", dice, decisions={entry.call: decided(entry, dice)})
            await asyncio.sleep(0.05)
        self.violations.append(f"never comes to rest: {[(row.conversation, row.status) for row in busy]}")

    async def check(self):
        """Every law, of every conversation; what is broken, in words."""
        effects = [json.loads(line) for line in self.ledger.read_text().splitlines()]
        store = SQLiteStore(self.store)
        await store.open()
        try:
            for name in self.names:
                mine = [
                    laws.Effect(e["conversation"], e["call"], e["attempt"], e["tool"], e["args"])
                    for e in effects
                    if e["conversation"] == name
                ]
                try:
                    await self._check(store, name, mine)
                except (AssertionError, AssentError) as broken:
                    self.violations.append(f"{name}: {broken}")
        finally:
            await store.close()
        self.effects = len(effects)
        if said := self.complaints.read_text().strip():
            self.violations.append(f"a worker complained: {said[-2000:]}")
        return self.violations

    async def _check(self, store, name, effects):
        bodies = await store.read(name)
        events = [codec.decode(body) for body in bodies]
        self.told["events"] += len(events)
        self.told["recovered"] += sum(isinstance(e, CallStarted) and e.attempt > 1 for e in events)
        self.told["interrupted"] += sum(
            isinstance(e, CallReturned) and e.error is not None and e.error.kind == "interrupted" for e in events
        )
        for op in self.operations[name]:
            if op.outcome == "ok":
                assert op.seq is None or op.seq <= len(events), f"{op}: acknowledged, and lost"
        laws.acknowledged(events, self.operations[name])
        laws.check(events, effects, shop.TRUTHS)
        seen = self.seen[name]
        assert [sha256(body).digest() for body in bodies[: len(seen)]] == seen, "what was read has changed"
        row = await store.row(name)
        if row is None:
            assert not bodies
            return
        hashes = await store.hashes(name)
        assert hashes == chain(GENESIS, bodies), "the hash chain does not hold"
        assert (row.seq, row.hash) == (len(bodies), hashes[-1]), "the row is not at the log's end"
        state = State(conversation=name)
        for event in events:
            state = evolve(state, event)
        loaded = await store.load(name)
        again = codec.decode_state(loaded.snapshot) if loaded.snapshot else State(conversation=name)
        for body in loaded.events:
            again = evolve(again, codec.decode(body))
        assert again == state, "snapshot + tail is not the fold"
        inbox = [msgspec.json.decode(entry.body, type=Pending) for entry in await store.pending(name)]
        assert sorted(inbox, key=lambda e: e.call) == sorted(pending(state), key=lambda e: e.call), "the inbox lies"

    def table(self):
        lines = [f"{'fault injected':28} times"]
        lines += [f"{fault:28} {times:5}" for fault, times in sorted(self.faults.items())]
        lines += [f"{'kills':28} {sum(self.faults.values()):5}   in {self.seconds:.1f} s", ""]
        lines += [f"{'what clients were told':28} times"]
        lines += [f"{what:28} {times:5}" for what, times in sorted(self.told.items()) if " " in what]
        lines += ["", f"{'what the log and ledger say':28} times"]
        lines += [f"{what:28} {self.told[what]:5}" for what in ("events", "recovered", "interrupted")]
        lines += [f"{'effects':28} {self.effects:5}", f"{'violations':28} {len(self.violations):5}"]
        return "\n".join(lines)


def decided(entry, dice):
    if entry.kind == "elicitation":
        return dice.choice([Answer(dice.randint(0, 9)), Answer(1), Deny("no")])
    choices = [Approve(), Approve(digest=entry.digest), Approve(remember="args"), Deny("no")]
    choices.append(Submit({"by hand": 1}) if entry.recovery else Approve(args={"n": dice.randint(0, 9)}))
    return dice.choice(choices)


async def chaos(directory, **options):
    """A whole run; the finished ``Chaos`` with its violations."""
    async with Chaos(directory, **options) as run:
        await run.run()
        await run.check()
    return run


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--control", choices=["ack", "rerun"], help="break it on purpose: the checker must see it")
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
