"""A trial: real processes on one store, clients that ask them for things, and evidence of all that, kept elsewhere.

The driver is the client. It asks workers (and a runtime of its own, the desk) to send, decide and cancel, and keeps a
history of what it asked for and what it was told, outside of the system; what tools really did stands in a ledger,
outside of the system as well. In the end everything is let come to rest, and the laws (``laws``, ``evidence``) are
asked of every log. What befalls the processes is up to whoever makes the trial: ``driver`` (SQLite) or ``postgres``.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections import Counter
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import laws
import msgspec
import shop
from evidence import Crowd, contested, unchanged
from peers import Worker, refusal

from holdfast import Answer, Approve, Deny, Submit
from holdfast.core import codec
from holdfast.core.decisions import Expired, Pending
from holdfast.core.events import CallResolved, CallReturned, CallStarted
from holdfast.core.state import State, evolve, pending_entries
from holdfast.errors import HoldfastError
from holdfast.stores.base import GENESIS, hash_chain

HERE = Path(__file__).parent
SOURCE = HERE.parent.parent / "src"

DECIDERS = 50
"""How many decide one call at once, now and then."""
CROWD = f"{DECIDERS} deciders of one call"


def read_ledger(path):
    """Return the rows of a ledger. A line that a kill has torn is left out: its effect did not happen."""
    rows = []
    for line in path.read_text().splitlines():
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


class Trial:
    backend = ""
    """The module that workers get their store from."""
    rest_seconds = 120.0
    """In which everything must come to rest after the last fault."""
    excused: tuple[type[Exception], ...] = ()
    """What clients may meet at the desk: they try again."""

    def __init__(self, directory, *, conversations=20, seed=1, control=None):
        self.directory = Path(directory)
        self.seed, self.control = seed, control
        self.names = [f"c{n:02}" for n in range(conversations)]
        self.ledger = self.directory / "effects.jsonl"
        self.complaints = self.directory / "stderr.txt"
        self.operations = {name: [] for name in self.names}
        self.crowds = {name: [] for name in self.names}
        self.seen = {name: [] for name in self.names}
        self.sights = {name: [] for name in self.names}
        self.faults, self.others, self.told = Counter(), Counter(), Counter()
        self.workers, self.ends = {}, {}
        self.number = self.count = self.effects = 0
        self.violations = []
        self.resting = False

    def order(self):
        """What every worker is told, beside its number and what is wrong with it."""
        places = {"ledger": str(self.ledger), "complaints": str(self.complaints)}
        return {**places, "seed": self.seed, "control": self.control, "crash": None}

    async def opened_desk(self):
        """A runtime of our own, without agents: a guest on the same store."""
        raise NotImplementedError

    # --- processes ---

    async def __aenter__(self):
        self.ledger.touch()
        self.began = time.time()
        self.history = os.open(self.directory / "history.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self.scratch = tempfile.TemporaryDirectory()  # the path of a socket must be short
        self.socket = f"{self.scratch.name}/s"
        self.server = await asyncio.start_unix_server(self._welcome, self.socket)
        with self.complaints.open("w") as complaints:
            self.forks = subprocess.Popen(  # noqa: ASYNC220 - it is up before anything else begins
                [sys.executable, str(HERE / "worker.py"), self.backend],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,
                text=True,
                env={**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{HERE}"},
            )
        self.desk = await self.opened_desk()
        return self

    async def __aexit__(self, *_):
        workers = [*self.workers.values()]
        for worker in workers:
            worker.kill()
        for worker in workers:
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
        hello = json.loads(line) if line else {}
        worker = self.workers.get(hello.get("worker"))
        if worker is not None:
            worker.port = hello.get("port")
            await worker.listen(reader, out)
        out.close()

    async def spawn(self, fault="at a random moment", **wishes):
        self.number += 1
        order = {**self.order(), "worker": self.number, "socket": self.socket, **wishes}
        print(json.dumps(order), file=self.forks.stdin, flush=True)
        pid = int(self.forks.stdout.readline())
        worker = self.workers[self.number] = Worker(self.number, pid, fault, order)
        return worker

    async def ended(self, worker, *, killed):
        """It is dead, or leaves: see it off."""
        if killed:
            worker.kill()
            self.faults[worker.fault] += 1
        elif not await worker.buried(20.0):
            self.violations.append(f"worker {worker.number} does not leave")
            worker.signal(signal.SIGUSR1)  # it says what it does instead
            await asyncio.sleep(1.0)
            worker.kill()
        if not await worker.buried():
            self.violations.append(f"worker {worker.number} is left over")
        self.ends[worker.number] = time.time()
        worker.lost()
        del self.workers[worker.number]

    def leave(self, worker):
        """It is to go by itself, in good order, whatever it is doing."""
        worker.excused = True
        if worker.out is not None:
            worker.out.write(b'{"verb": "leave"}\n')

    def say(self, dice, worker):
        text = f"message {dice.getrandbits(256):x}"
        return self.operate(dice.choice(self.names), "send", worker, text=text, when_busy="queue")

    # --- clients ---

    def note(self, **fact):
        os.write(self.history, (json.dumps({"at": time.time(), **fact}) + "\n").encode())

    async def operate(self, name, verb, worker, *, counted=None, **request):
        """Ask a worker (None: our own runtime) for something; the history knows first, and keeps what they said."""
        self.count += 1
        number = self.count
        op = laws.Operation(verb, f"op{number}", text=request.get("text", ""))
        op.decisions = request.pop("decisions", {})
        self.operations[name].append(op)
        op.invoked = time.time()
        plain = msgspec.to_builtins(op.decisions)
        self.note(id=number, status="invoked", verb=verb, conversation=name, by=op.by, **request, decisions=plain)
        if worker is not None:
            op.jumps = worker.jumps
            asked = {"verb": verb, "conversation": name, "by": op.by, "decisions": plain, **request}
            answer = await worker.ask(number, asked)
        else:
            answer = await self._here(name, verb, op, request)
        op.answered = time.time()
        op.outcome, op.seq, op.said = answer["outcome"], answer.get("seq"), answer.get("said", "")
        op.kind, op.reason, op.winner = answer.get("kind", ""), answer.get("reason"), answer.get("winner")
        op.away = self.away(worker, op)
        status = {"ok": "ok", "refused": "failed", "unknown": "unknown"}[op.outcome]
        self.note(id=number, status=status, seq=op.seq, said=op.said)
        self.told[f"{counted or verb} {status}"] += 1
        return op

    def up(self):
        return [worker for worker in self.workers.values() if worker.out is not None]

    def somebody(self, dice):
        workers = self.up()
        return dice.choice(workers) if workers and dice.random() < 0.8 else None

    async def crowd(self, name, entry, dice):
        """Many decide one call at once, each in their own way, at every worker and here."""
        self.others[CROWD] += 1
        desks = [*self.up(), None]
        asked = [(desks[n % len(desks)], {entry.call: decided(entry, dice)}) for n in range(DECIDERS)]
        operations = await asyncio.gather(
            *(self.operate(name, "resolve", desk, counted="decider", decisions=said) for desk, said in asked)
        )
        self.crowds[name].append(Crowd(entry.call, entry.since, operations))

    def away(self, worker, op):
        """Whoever was asked could not do anything for anybody, and had a reason."""
        return False

    async def _here(self, name, verb, op, request):
        """The driver's own runtime: a guest on the same file."""
        try:
            match verb:
                case "send":
                    when_busy = request["when_busy"]
                    turn = await self.desk.send(name, op.text, by=op.by, agent="shop", when_busy=when_busy)
                    return {"outcome": "ok", "seq": turn.seq}
                case "resolve":
                    return {"outcome": "ok", "seq": (await self.desk.resolve_many(name, op.decisions, by=op.by)).seq}
                case _:
                    return {"outcome": "ok", "seq": None if await self.desk.cancel(name, by=op.by) else 0}
        except HoldfastError as failure:
            return refusal(failure)

    async def client(self, name):
        dice = random.Random(f"{self.seed}/{name}")
        while not self.resting:
            try:
                await self.wish(name, dice)
                await self.observe(name)
            except self.excused:
                self.told["desk failed"] += 1
            await asyncio.sleep(dice.random() / 10)

    async def wish(self, name, dice):
        entries = await self.desk.pending(name) if self.seen_once(name) else []
        roll = dice.random()
        first = not self.others[CROWD] and self.up()
        if entries and (first or roll < (0.3 if self.control == "winners" else 0.02)):
            await self.crowd(name, dice.choice(entries), dice)
        elif entries and roll < 0.75:
            some = dice.sample(entries, dice.randint(1, len(entries)))
            decisions = {entry.call: decided(entry, dice) for entry in some}
            both = [self.operate(name, "resolve", self.somebody(dice), decisions=decisions)]
            if dice.random() < 0.3:  # somebody else decides the same, at the same time
                again = {entry.call: decided(entry, dice) for entry in some}
                both.append(self.operate(name, "resolve", self.somebody(dice), decisions=again))
            await asyncio.gather(*both)
        elif roll > 0.93 and self.seen_once(name):
            await self.operate(name, "cancel", self.somebody(dice))
        else:
            when_busy = dice.choice(["refuse", "refuse", "queue", "interrupt"])
            text = f"message {dice.getrandbits(256):x}"
            await self.operate(name, "send", self.somebody(dice), text=text, when_busy=when_busy)

    def seen_once(self, name):
        return any(op.verb == "send" and op.outcome == "ok" for op in self.operations[name])

    async def observe(self, name):
        """What anybody has read stays as it was: remember it."""
        known = self.seen[name]
        known += [sha256(body).digest() for body in await self.desk.store.read(name, after=len(known))]
        self.sights[name].append((len(known), time.time()))

    # --- the end ---

    async def rest(self):
        """Let everything come to its end: whatever waits is decided."""
        dice = random.Random(f"{self.seed}/rest")
        until = time.monotonic() + self.rest_seconds
        while time.monotonic() < until:
            rows = [row for row in await self.desk.store.rows(limit=1000) if row.conversation in self.operations]
            busy = [row for row in rows if row.status != "idle" or row.owes]
            if not busy:
                return
            await asyncio.gather(*(self._decide(row.conversation, dice) for row in busy))
            await asyncio.sleep(0.05)
        self.violations.append(f"never comes to rest: {[(row.conversation, row.status) for row in busy]}")

    async def _decide(self, name, dice):
        for entry in await self.desk.pending(name):
            await self.operate(name, "resolve", self.somebody(dice), decisions={entry.call: decided(entry, dice)})

    def first_seen(self, name):
        """When an event was first known to be there: a function of where it stands."""
        lengths = [length for length, _ in self.sights[name]]
        times = [*(at for _, at in self.sights[name]), time.time()]
        return lambda seq: times[bisect_left(lengths, seq)]

    async def check(self, store, evident):
        """Every law, of every conversation; what is broken, in words. ``evident``: more laws, with more evidence."""
        rows = read_ledger(self.ledger)
        self.effects = len(rows)
        for name in self.names:
            mine = [self.effect(row) for row in rows if row["conversation"] == name]
            bodies = await store.read(name)
            events = [codec.decode_event(body) for body in bodies]
            self._count(events)
            for law in [*self._laws(name, events, bodies, mine), *evident(name, events, bodies, mine)]:
                try:
                    law()
                except AssertionError as broken:
                    self.violations.append(f"{name}: {broken}")
            try:
                await self._kept(store, name, events, bodies)
            except (AssertionError, HoldfastError) as broken:
                self.violations.append(f"{name}: {broken}")
        if said := self.complaints.read_text().strip():
            self.violations.append(f"a worker complained: {said[-2000:]}")

    def effect(self, row):
        did = {key: row[key] for key in ("conversation", "call", "attempt", "tool", "args", "worker")}
        return laws.Effect(**did)

    def _count(self, events):
        self.told["events"] += len(events)
        self.told["expired"] += sum(isinstance(e, CallResolved) and isinstance(e.decision, Expired) for e in events)
        self.told["recovered"] += sum(isinstance(e, CallStarted) and e.attempt > 1 for e in events)
        self.told["interrupted"] += sum(
            isinstance(e, CallReturned) and e.error is not None and e.error.kind == "interrupted" for e in events
        )

    def _laws(self, name, events, bodies, effects):
        for crowd in self.crowds[name]:
            yield lambda crowd=crowd: contested(events, crowd)
        yield lambda: laws.acknowledged(events, self.operations[name])
        yield lambda: laws.check(events, effects, shop.TRUTHS)
        yield lambda: unchanged(bodies, self.seen[name])

    async def _kept(self, store, name, events, bodies):
        """What the store keeps beside the log fits the log."""
        row = await store.row(name)
        if row is None:
            assert not bodies
            return
        hashes = await store.hashes(name)
        assert hashes == hash_chain(GENESIS, bodies), "the hash chain does not hold"
        assert (row.seq, row.hash) == (len(bodies), hashes[-1]), "the row is not at the log's end"
        state = State(conversation=name)
        for event in events:
            state = evolve(state, event)
        loaded = await store.load(name)
        again = codec.decode_state(loaded.snapshot) if loaded.snapshot else State(conversation=name)
        assert again is not None, "the snapshot cannot be read"
        for body in loaded.events:
            again = evolve(again, codec.decode_event(body))
        assert again == state, "snapshot + tail is not the fold"
        inbox = [msgspec.json.decode(entry.body, type=Pending) for entry in await store.pending(name)]
        assert sorted(inbox, key=lambda e: e.call) == sorted(pending_entries(state), key=lambda e: e.call), (
            "the inbox lies"
        )

    def table(self):
        lines = [f"{'killed':34} times"]
        lines += [f"{fault:34} {times:5}" for fault, times in sorted(self.faults.items())]
        lines += [f"{'kills':34} {sum(self.faults.values()):5}   in {self.seconds:.1f} s", ""]
        lines += [f"{'other faults':34} times"]
        lines += [f"{fault:34} {times:5}" for fault, times in sorted(self.others.items())]
        lines += ["", f"{'what clients were told':34} times"]
        lines += [f"{what:34} {times:5}" for what, times in sorted(self.told.items()) if " " in what]
        lines += ["", f"{'what the log and ledger say':34} times"]
        lines += [f"{what:34} {times:5}" for what, times in sorted(self.told.items()) if " " not in what]
        lines += [f"{'effects':34} {self.effects:5}", f"{'violations':34} {len(self.violations):5}"]
        return "\n".join(lines)


def decided(entry, dice):
    if entry.kind == "elicitation":
        return dice.choice([Answer(dice.randint(0, 9)), Answer(1), Deny("no")])
    choices = [Approve(), Approve(digest=entry.digest), Approve(remember="args"), Deny("no")]
    choices.append(Submit({"by hand": 1}) if entry.recovery else Approve(args={"n": dice.randint(0, 9)}))
    return dice.choice(choices)
