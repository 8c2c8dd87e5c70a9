"""A trial: real processes on one store, clients that send them requests, and records of both outside of the system.

The driver is the client. It asks workers (and a runtime of its own, the desk) to send, decide and cancel, and records
the requests and their answers in a history; tools record their effects in a ledger. At the end every conversation
comes to rest, and each log is checked against the laws (``laws``, ``evidence``). The faults are up to the subclass:
``driver`` (SQLite) or ``postgres``.
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
from functools import partial
from hashlib import sha256
from pathlib import Path

import laws
import msgspec
import shop
from deliveries import CHANNEL, Receiver
from evidence import Crowd, check_contest, check_deliveries, check_unchanged
from peers import Worker, refusal

from holdfast import Answer, Approve, Deny, Extend, Submit, TakeBack
from holdfast.core import codec
from holdfast.core.decisions import Expired, Pending
from holdfast.core.events import (
    ApprovalTakenBack,
    AsideAnswered,
    CallEscalated,
    CallResolved,
    CallReturned,
    ConversationRenamed,
    DeadlineExtended,
    GraceEnded,
    ReminderDue,
    VoteCast,
)
from holdfast.core.notice import NOTICE_KINDS
from holdfast.core.state import State, evolve, pending_entries
from holdfast.errors import HoldfastError
from holdfast.stores.base import GENESIS, ChannelRow, hash_chain

HERE = Path(__file__).parent
SOURCE = HERE.parent.parent / "src"

DECIDERS = 50
"""The number of clients that sometimes decide one call at once."""
CROWD = f"{DECIDERS} deciders of one call"
TWICE = "one person who votes twice"
COUNTED = {
    AsideAnswered: "asides",
    VoteCast: "votes",
    DeadlineExtended: "extensions",
    ReminderDue: "reminders",
    CallEscalated: "escalations",
    ApprovalTakenBack: "undone approvals",
    GraceEnded: "grace windows",
    ConversationRenamed: "renames",
}
"""The events that a run should have, and the words under which they are counted."""


def read_ledger(path):
    """Return the rows of a ledger. A line that a kill cut off is left out: its effect did not happen."""
    rows = []
    for line in path.read_text().splitlines():
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


class Trial:
    backend = ""
    """The module that gives workers their store."""
    rest_seconds = 300.0
    """The time in which everything must come to rest after the last fault; much more than a quiet machine needs."""
    excused: tuple[type[Exception], ...] = ()
    """The errors that clients may get at the desk: they retry."""

    def __init__(self, directory, *, conversations=20, seed=1, control=None):
        self.directory = Path(directory)
        self.seed, self.control = seed, control
        self.names = [f"c{n:02}" for n in range(conversations)]
        self.ledger = self.directory / "effects.jsonl"
        self.complaints = self.directory / "stderr.txt"
        self.operations = {name: [] for name in self.names}
        self.crowds = {name: [] for name in self.names}
        self.seen = {name: [] for name in self.names}
        self.observations = {name: [] for name in self.names}
        self.faults, self.other_faults, self.counts = Counter(), Counter(), Counter()
        self.workers, self.ends = {}, {}
        self.number = self.count = self.effects = 0
        self.violations = []
        self.resting = False

    def order(self):
        """Return the settings of every worker, without its number and its fault."""
        places = {"ledger": str(self.ledger), "complaints": str(self.complaints)}
        return {**places, "seed": self.seed, "control": self.control, "crash": None, "bell": self.receiver.port}

    async def open_desk(self):
        """Return the driver's own runtime, without agents: a guest on the same store."""
        raise NotImplementedError

    # --- processes ---

    async def __aenter__(self):
        self.ledger.touch()
        self.started_at = time.time()
        self.history = os.open(self.directory / "history.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self.scratch = tempfile.TemporaryDirectory()  # the path of a socket must be short
        self.socket = f"{self.scratch.name}/s"
        self.server = await asyncio.start_unix_server(self._accept, self.socket)
        with self.complaints.open("w") as complaints:
            self.forks = subprocess.Popen(  # noqa: ASYNC220 - it is up before the trial starts
                [sys.executable, str(HERE / "worker.py"), self.backend],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,
                text=True,
                env={**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{HERE}"},
            )
        self.receiver = Receiver(random.Random(f"{self.seed}/receiver"), self.other_faults)
        await self.receiver.start()
        self.desk = await self.open_desk()
        await self.desk.store.put_channel(ChannelRow(name=CHANNEL, kinds=NOTICE_KINDS))
        return self

    async def __aexit__(self, *_):
        workers = [*self.workers.values()]
        for worker in workers:
            worker.kill()
        for worker in workers:
            await worker.wait_until_dead()
        await self.desk.close()
        await self.receiver.close()
        self.server.close()
        await self.server.wait_closed()
        self.forks.stdin.close()
        self.forks.wait()
        self.forks.stdout.close()
        os.close(self.history)
        self.scratch.cleanup()

    async def _accept(self, reader, out):
        line = await reader.readline()
        hello = json.loads(line) if line else {}
        worker = self.workers.get(hello.get("worker"))
        if worker is not None:
            worker.port = hello.get("port")
            await worker.listen(reader, out)
        out.close()

    async def spawn(self, fault="at a random moment", **options):
        self.number += 1
        order = {**self.order(), "worker": self.number, "socket": self.socket, **options}
        print(json.dumps(order), file=self.forks.stdin, flush=True)
        pid = int(self.forks.stdout.readline())
        worker = self.workers[self.number] = Worker(self.number, pid, fault, order)
        return worker

    async def end_worker(self, worker, *, killed):
        """Kill a worker, or wait until it has exited, and remove it."""
        if killed:
            worker.kill()
            self.faults[worker.fault] += 1
        elif not await worker.wait_until_dead(20.0):
            self.violations.append(f"worker {worker.number} does not exit")
            worker.signal(signal.SIGUSR1)  # it prints what it is doing
            await asyncio.sleep(1.0)
            worker.kill()
        if not await worker.wait_until_dead():
            self.violations.append(f"worker {worker.number} is still alive")
        self.ends[worker.number] = time.time()
        worker.fail_requests()
        del self.workers[worker.number]

    def ask_to_exit(self, worker):
        """Ask a worker to exit cleanly, whatever it is doing."""
        worker.excused = True
        if worker.out is not None:
            worker.out.write(b'{"verb": "exit"}\n')

    def send_message(self, rng, worker):
        text = f"message {rng.getrandbits(256):x}"
        names = [name for name in self.names if shop.agent_of(name) == "shop"]  # every worker runs it
        return self.operate(rng.choice(names), "send", worker, text=text, when_busy="queue")

    # --- clients ---

    def note(self, **fact):
        os.write(self.history, (json.dumps({"at": time.time(), **fact}) + "\n").encode())

    async def operate(self, name, verb, worker, *, counted=None, **request):
        """Send a request to a worker (None: the driver's own runtime); record it first, and then its answer."""
        self.count += 1
        number = self.count
        op = laws.Operation(verb, f"op{number}", text=request.get("text", ""), person=request.get("person"))
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
            answer = await self._perform_here(name, verb, op, request)
        op.answered = time.time()
        op.outcome, op.seq, op.said = answer["outcome"], answer.get("seq"), answer.get("said", "")
        op.kind, op.reason, op.winner = answer.get("kind", ""), answer.get("reason"), answer.get("winner")
        op.unavailable = self.was_unavailable(worker, op)
        status = {"ok": "ok", "refused": "failed", "unknown": "unknown"}[op.outcome]
        self.note(id=number, status=status, seq=op.seq, said=op.said)
        self.counts[f"{counted or verb} {status}"] += 1
        return op

    def connected_workers(self):
        return [worker for worker in self.workers.values() if worker.out is not None]

    def choose_worker(self, rng):
        workers = self.connected_workers()
        return rng.choice(workers) if workers and rng.random() < 0.8 else None

    async def crowd(self, name, entry, rng):
        """Decide one call many times at once, in different ways, at every worker and at the desk."""
        self.other_faults[CROWD] += 1
        desks = [*self.connected_workers(), None]
        requests = [(desks[n % len(desks)], {entry.call: choose_decision(entry, rng)}) for n in range(DECIDERS)]
        operations = await asyncio.gather(
            *(self.operate(name, "resolve", desk, counted="decider", decisions=made) for desk, made in requests)
        )
        self.crowds[name].append(Crowd(entry.call, entry.since, operations))

    def was_unavailable(self, worker, op):
        """Return whether the worker could not serve any request, for a known reason."""
        return False

    async def _perform_here(self, name, verb, op, request):
        """Perform a request in the driver's own runtime, a guest on the same store."""
        try:
            match verb:
                case "send":
                    when_busy = request["when_busy"]
                    agent = shop.agent_of(name)
                    turn = await self.desk.send(name, op.text, by=op.by, agent=agent, when_busy=when_busy)
                    return {"outcome": "ok", "seq": turn.seq}
                case "resolve":
                    by = shop.principal(op.by, op.person)
                    return {"outcome": "ok", "seq": (await self.desk.resolve_many(name, op.decisions, by=by)).seq}
                case "rename":
                    await self.desk.rename(name, op.text, by=op.by)
                    return {"outcome": "ok"}
                case "archive":
                    await self.desk.archive(name, request["archived"], by=op.by)
                    return {"outcome": "ok"}
                case _:
                    return {"outcome": "ok", "seq": None if await self.desk.cancel(name, by=op.by) else 0}
        except HoldfastError as failure:
            return refusal(failure)

    async def client(self, name):
        rng = random.Random(f"{self.seed}/{name}")
        while not self.resting:
            try:
                await self.send_request(name, rng)
                await self.observe(name)
            except self.excused:
                self.counts["desk failed"] += 1
            await asyncio.sleep(rng.random() / 10)

    async def send_request(self, name, rng):
        found = await self.desk.pending(name, approved=True) if self.was_created(name) else []
        entries = [entry for entry in found if entry.starts_at is None]
        approved = [entry for entry in found if entry.starts_at is not None]
        roll = rng.random()
        first = not self.other_faults[CROWD] and self.connected_workers()
        single = [entry for entry in entries if entry.approvers == 1 and not entry.grace]
        shared = [entry for entry in entries if entry.approvers > 1]
        if single and (first or roll < (0.3 if self.control == "winners" else 0.02)):
            await self.crowd(name, rng.choice(single), rng)
        elif shared and roll < 0.5:
            await self.vote(name, rng.choice(shared), rng)
        elif approved and roll < 0.55:
            undo = {rng.choice(approved).call: TakeBack()}
            await self.operate(name, "resolve", self.choose_worker(rng), counted="undo", decisions=undo)
        elif entries and roll < 0.6:
            entry = rng.choice(entries)
            if entry.extend_until is not None:
                later = {entry.call: Extend(f"{entry.deadline - entry.since + rng.choice([0, 1, 40])}s")}
                await self.operate(name, "resolve", self.choose_worker(rng), counted="extend", decisions=later)
        elif entries and roll < 0.75:
            some = rng.sample(entries, rng.randint(1, len(entries)))
            decisions = {entry.call: choose_decision(entry, rng) for entry in some}
            both = [self.operate(name, "resolve", self.choose_worker(rng), decisions=decisions)]
            if rng.random() < 0.3:  # another client decides the same calls at the same time
                again = {entry.call: choose_decision(entry, rng) for entry in some}
                both.append(self.operate(name, "resolve", self.choose_worker(rng), decisions=again))
            await asyncio.gather(*both)
        elif roll > 0.97 and self.was_created(name):
            await self.operate(name, "archive", self.choose_worker(rng), archived=rng.random() < 0.7)
        elif roll > 0.93 and self.was_created(name):
            await self.operate(name, "rename", self.choose_worker(rng), text=f"title {rng.getrandbits(64):x}")
        elif roll > 0.88 and self.was_created(name):
            await self.operate(name, "cancel", self.choose_worker(rng))
        else:
            when_busy = rng.choice(["refuse", "refuse", "queue", "interrupt", "aside", "aside"])
            text = f"message {rng.getrandbits(256):x}"
            await self.operate(name, "send", self.choose_worker(rng), text=text, when_busy=when_busy)

    async def vote(self, name, entry, rng):
        """Approve a call that needs two approvals twice at once: as two people, or as one person."""
        people = rng.sample(shop.PEOPLE, 2)
        if rng.random() < 0.5:
            people = people[:1] * 2
            self.other_faults[TWICE] += 1
        await asyncio.gather(
            *(
                self.operate(
                    name,
                    "resolve",
                    self.choose_worker(rng),
                    counted="vote",
                    decisions={entry.call: Approve(digest=entry.digest)},
                    person=person,
                )
                for person in people
            )
        )

    def was_created(self, name):
        return any(op.verb == "send" and op.outcome == "ok" for op in self.operations[name])

    async def observe(self, name):
        """Read the new events and keep their digests: an event that was read must not change."""
        known = self.seen[name]
        known += [sha256(body).digest() for body in await self.desk.store.read(name, after=len(known))]
        self.observations[name].append((len(known), time.time()))

    # --- the end ---

    async def rest(self):
        """Decide pending calls until every conversation is at rest."""
        rng = random.Random(f"{self.seed}/rest")
        until = time.monotonic() + self.rest_seconds
        self.receiver.healthy = True
        while time.monotonic() < until:
            rows = [row for row in await self.desk.store.rows(limit=1000) if row.conversation in self.operations]
            busy = [row for row in rows if row.status != "idle" or row.owes]
            if not busy:
                await self.empty_outbox(until)
                return
            await asyncio.gather(*(self._decide(row.conversation, rng) for row in busy))
            await asyncio.sleep(0.05)
        self.violations.append(f"never comes to rest: {[(row.conversation, row.status) for row in busy]}")

    async def empty_outbox(self, until):
        """Wait until every notice is delivered. One that a clock ahead of the others made due much later is retried."""
        store = self.desk.store
        while rows := await store.outbox(CHANNEL):
            if time.monotonic() > until:
                self.violations.append(f"notices are never delivered: {rows[:3]}")
                return
            await store.retry_notices([row.id for row in rows if row.due > time.time() + 10.0], time.time())
            await asyncio.sleep(0.05)

    async def _decide(self, name, rng):
        for entry in await self.desk.pending(name):
            decisions = {entry.call: choose_decision(entry, rng)}
            await self.operate(name, "resolve", self.choose_worker(rng), decisions=decisions)

    def first_seen(self, name):
        """Return a function from a sequence number to the time at which that event was first read."""
        lengths = [length for length, _ in self.observations[name]]
        times = [*(at for _, at in self.observations[name]), time.time()]
        return lambda seq: times[bisect_left(lengths, seq)]

    async def check(self, store, more_laws):
        """Check every law on every conversation, and collect the violations. ``more_laws``: those of the subclass."""
        rows = read_ledger(self.ledger)
        self.effects = len(rows)
        for name in self.names:
            mine = [self.effect(row) for row in rows if row["conversation"] == name]
            before = self.deliveries(name)
            bodies = await store.read(name)
            events = [codec.decode_event(body) for body in bodies]
            self._count(events)
            left = {row.id for row in await store.outbox(CHANNEL, limit=100_000)}
            sent = partial(check_deliveries, events, name, before, self.deliveries(name), left)
            for law in [*self._laws(name, events, bodies, mine), *more_laws(name, events, bodies, mine), sent]:
                try:
                    law()
                except AssertionError as broken:
                    self.violations.append(f"{name}: {broken}")
            try:
                await self._check_indexes(store, name, events, bodies)
            except (AssertionError, HoldfastError) as broken:
                self.violations.append(f"{name}: {broken}")
        if logged := self.complaints.read_text().strip():
            self.violations.append(f"a worker logged: {logged[-2000:]}")

    def deliveries(self, name):
        """Return the attempts so far to deliver notices of a conversation."""
        return [delivery for delivery in self.receiver.deliveries if delivery.conversation == name]

    def effect(self, row):
        known = ("conversation", "call", "attempt", "tool", "args", "worker", "answers", "state")
        did = {key: row[key] for key in known}
        return laws.Effect(**did)

    def _count(self, events):
        self.counts["events"] += len(events)
        self.counts["expired"] += sum(isinstance(e, CallResolved) and isinstance(e.decision, Expired) for e in events)
        for kind, counted in COUNTED.items():
            self.counts[counted] += sum(isinstance(event, kind) for event in events)
        runs = laws.runs_of(events)
        self.counts["continued"] += len({(call, len(answers)) for (call, _), (answers, _) in runs.items() if answers})
        self.counts["recovered"] += len(runs) - len({(call, len(answers)) for (call, _), (answers, _) in runs.items()})
        self.counts["interrupted"] += sum(
            isinstance(e, CallReturned) and e.error is not None and e.error.kind == "interrupted" for e in events
        )

    def _laws(self, name, events, bodies, effects):
        for crowd in self.crowds[name]:
            yield lambda crowd=crowd: check_contest(events, crowd)
        yield lambda: laws.acknowledged(events, self.operations[name])
        yield lambda: laws.check(events, effects, shop.TRUTHS | shop.TILL_TRUTHS)
        yield lambda: check_unchanged(bodies, self.seen[name])

    async def _check_indexes(self, store, name, events, bodies):
        """Check that the row, the snapshot and the pending entries match the log."""
        row = await store.row(name)
        if row is None:
            assert not bodies
            return
        assert (row.title, row.archived) == laws.label_of(events), "the row's title or archive differs from the log"
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
            "the pending entries do not match the log"
        )

    def table(self):
        lines = [f"{'killed':34} times"]
        lines += [f"{fault:34} {times:5}" for fault, times in sorted(self.faults.items())]
        lines += [f"{'kills':34} {sum(self.faults.values()):5}   in {self.seconds:.1f} s", ""]
        lines += [f"{'other faults':34} times"]
        lines += [f"{fault:34} {times:5}" for fault, times in sorted(self.other_faults.items())]
        lines += ["", f"{'answers to clients':34} times"]
        lines += [f"{what:34} {times:5}" for what, times in sorted(self.counts.items()) if " " in what]
        lines += ["", f"{'log and ledger':34} times"]
        lines += [f"{what:34} {times:5}" for what, times in sorted(self.counts.items()) if " " not in what]
        lines += [f"{'effects':34} {self.effects:5}", f"{'violations':34} {len(self.violations):5}"]
        return "\n".join(lines)


def choose_decision(entry, rng):
    if entry.approvers > 1:
        return rng.choice([Approve(), Approve(digest=entry.digest), Approve(), Deny("no")])
    if entry.kind == "elicitation" and entry.tool in shop.TILL_TRUTHS:
        return rng.choice([Answer(entry.choices[0] if entry.choices else {"approve": True}), Deny("no")])
    if entry.kind == "elicitation":
        return rng.choice([Answer(rng.randint(0, 9)), Answer(1), Deny("no")])
    choices = [Approve(), Approve(digest=entry.digest), Approve(remember="args"), Deny("no")]
    choices.append(Submit({"by hand": 1}) if entry.recovery else Approve(args={"n": rng.randint(0, 9)}))
    return rng.choice(choices)
