"""Chaos: real processes on one SQLite file, killed with SIGKILL at random moments and at named points.

Besides, a disk is full for a while, clocks jump, processes run half of the conversations each or leave in good order,
and many decide the same call at once.

    python tests/chaos/driver.py --kills 1000 --conversations 20 --seed 7

The driver is the client. It asks workers (and a runtime of its own) to send, decide and cancel, and keeps a history
of what it asked for and what it was told, outside of the system; what tools really did stands in a ledger,
outside of the system as well, and so does what clocks have shown. When the last kill is done everything is let come to
rest, and the laws (``laws``) are asked of every log, with the history, the ledger and the clocks as evidence.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections import Counter
from hashlib import sha256
from math import inf
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = HERE.parent.parent / "src"
sys.path[:0] = [str(HERE), str(SOURCE)]

import laws  # noqa: E402
import msgspec  # noqa: E402
import shop  # noqa: E402
from peers import Worker, refusal  # noqa: E402

from assent import Answer, Approve, Deny, Runtime, Submit  # noqa: E402
from assent.core import codec  # noqa: E402
from assent.core.decisions import Expired, Pending  # noqa: E402
from assent.core.events import CallResolved, CallReturned, CallStarted  # noqa: E402
from assent.core.state import State, evolve, pending  # noqa: E402
from assent.errors import AssentError  # noqa: E402
from assent.stores.base import GENESIS, chain  # noqa: E402
from assent.stores.sqlite import SQLiteStore  # noqa: E402

WORKERS = 3
DECIDERS = 50
"""How many decide one call at once, now and then."""
DECK = ["full", "jumps", "jumps", "halves", "leave", *["kill"] * 11]
"""What befalls a process: each card once in so many processes, in an order that the dice make."""
SPLIT = 6
"""So many processes, one after the other, run half of the conversations each."""
FAULTS = (
    f"{DECIDERS} deciders of one call",
    "a full disk",
    "a jump of a clock",
    "a process for half of them",
    "a process that leaves",
)
"""Besides kills."""
CONTROLS = {"ack": "kill", "rerun": "kill", "winners": "kill", "greedy": "halves", "early": "jumps", "blind": "full"}
"""What can be broken on purpose (see ``worker``), and the card that brings it to light."""
REST = 60.0
"""Seconds in which everything must come to rest after the last kill."""


class Chaos:
    def __init__(self, directory, *, kills=200, conversations=20, seed=1, control=None):
        self.directory = Path(directory)
        self.kills, self.seed, self.control = kills, seed, control
        self.names = [f"c{n:02}" for n in range(conversations)]
        self.store, self.ledger = self.directory / "chaos.db", self.directory / "effects.jsonl"
        self.clocks = self.directory / "clocks.jsonl"
        self.complaints = self.directory / "stderr.txt"
        self.operations = {name: [] for name in self.names}
        self.crowds = {name: [] for name in self.names}
        self.seen = {name: [] for name in self.names}
        self.sights = {name: [] for name in self.names}
        self.faults, self.others, self.told = Counter(), Counter(), Counter()
        self.workers, self.only, self.ends = {}, {}, {}
        self.halves, self.split = [], 0
        self.number = self.count = self.killed = 0
        self.violations = []
        self.resting = False

    # --- processes ---

    async def __aenter__(self):
        self.ledger.touch()
        self.clocks.touch()
        self.began = time.time()
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

    async def spawn(self, fault="at a random moment", *, crash=None, only=None, full=False, jumps=None):
        self.number += 1
        number = self.number
        order = {
            "worker": number,
            "store": str(self.store),
            "ledger": str(self.ledger),
            "clocks": str(self.clocks),
            "socket": self.socket,
            "seed": self.seed,
            "control": self.control,
            "crash": crash,
            "only": only,
            "full": full,
            "jumps": jumps,
        }
        print(json.dumps(order), file=self.forks.stdin, flush=True)
        pid = int(self.forks.stdout.readline())
        worker = self.workers[number] = Worker(number, pid, fault, only=only, full=full, jumps=jumps)
        self.only[number] = only
        return worker

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
            if card != "leave":
                worker.kill()
                self.faults[worker.fault] += 1
            elif not await worker.buried(20.0):
                self.violations.append(f"worker {worker.number} does not leave")
                worker.kill()
            await worker.buried()
            self.ends[worker.number] = time.time()
            worker.lost()
            del self.workers[worker.number]

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
        worker.excused = True
        worker.out.write(b'{"verb": "leave"}\n')
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

    async def room(self, worker, size):
        self.count += 1
        return (await worker.ask(self.count, {"verb": "room", "bytes": size}))["seq"]

    def say(self, dice, worker):
        text = f"message {dice.getrandbits(256):x}"
        return self.operate(dice.choice(self.names), "send", worker, text=text, when_busy="queue")

    # --- clients ---

    def note(self, **fact):
        os.write(self.history, (json.dumps(fact) + "\n").encode())

    async def operate(self, name, verb, worker, *, counted=None, **request):
        """Ask a worker (None: our own runtime) for something; the history knows first, and keeps what they said."""
        self.count += 1
        number = self.count
        op = laws.Operation(verb, f"op{number}", text=request.get("text", ""))
        op.decisions = request.pop("decisions", {})
        self.operations[name].append(op)
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
        op.away = worker is not None and worker.excused and op.kind in ("log_write_failed", "invalid_args")
        if op.kind == "log_write_failed" and not op.away:
            self.violations.append(f"{op}: its disk is not full")
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
        desks = [*self.up(), None]
        asked = [(desks[n % len(desks)], {entry.call: decided(entry, dice)}) for n in range(DECIDERS)]
        operations = await asyncio.gather(
            *(self.operate(name, "resolve", desk, counted="decider", decisions=said) for desk, said in asked)
        )
        self.crowds[name].append(laws.Crowd(entry.call, entry.since, operations))
        self.others[FAULTS[0]] += 1

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
        except AssentError as failure:
            return refusal(failure)

    async def client(self, name):
        dice = random.Random(f"{self.seed}/{name}")
        while not self.resting:
            entries = await self.desk.pending(name) if self.seen_once(name) else []
            roll = dice.random()
            first = not self.others[FAULTS[0]] and self.up()
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
            await self.observe(name)
            await asyncio.sleep(dice.random() / 10)

    def seen_once(self, name):
        return any(op.verb == "send" and op.outcome == "ok" for op in self.operations[name])

    async def observe(self, name):
        """What anybody has read stays as it was: remember it."""
        known = self.seen[name]
        known += [sha256(body).digest() for body in await self.desk.store.read(name, after=len(known))]
        self.sights[name].append((len(known), time.time()))

    # --- the run ---

    async def run(self):
        clients = [asyncio.create_task(self.client(name)) for name in self.names]
        started = time.monotonic()
        await asyncio.gather(*(self.fate(random.Random(f"{self.seed}/fate/{n}")) for n in range(WORKERS)))
        self.seconds = time.monotonic() - started
        self.resting = True
        await asyncio.gather(*clients)
        os.fsync(self.history)
        await self.spawn()
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
                    decisions = {entry.call: decided(entry, dice)}
                    await self.operate(row.conversation, "resolve", self.somebody(dice), decisions=decisions)
            await asyncio.sleep(0.05)
        self.violations.append(f"never comes to rest: {[(row.conversation, row.status) for row in busy]}")

    async def check(self):
        """Every law, of every conversation; what is broken, in words."""
        effects = [json.loads(line) for line in self.ledger.read_text().splitlines()]
        clocks = self._clocks()
        store = SQLiteStore(self.store)
        await store.open()
        try:
            for name in self.names:
                mine = [
                    laws.Effect(e["conversation"], e["call"], e["attempt"], e["tool"], e["args"], worker=e["worker"])
                    for e in effects
                    if e["conversation"] == name
                ]
                try:
                    await self._check(store, name, mine, clocks)
                except (AssertionError, AssentError) as broken:
                    self.violations.append(f"{name}: {broken}")
        finally:
            await store.close()
        self.effects = len(effects)
        if said := self.complaints.read_text().strip():
            self.violations.append(f"a worker complained: {said[-2000:]}")
        return self.violations

    def _clocks(self):
        """What every clock has shown: the wall's, and each that jumped, from one jump to the next."""
        jumps = [json.loads(line) for line in self.clocks.read_text().splitlines()]
        clocks = [laws.Clock(0.0, self.began, inf)]
        for number in {jump["worker"] for jump in jumps}:
            mine = [jump for jump in jumps if jump["worker"] == number]
            ends = [*(jump["since"] for jump in mine[1:]), self.ends.get(number, inf)]
            clocks += [laws.Clock(jump["offset"], jump["since"], end) for jump, end in zip(mine, ends, strict=True)]
        self.others["a jump of a clock"] = len(jumps)
        return clocks

    def _seen(self, name):
        """When an event was first known to be there: a function of where it stands."""
        lengths = [length for length, _ in self.sights[name]]
        times = [*(at for _, at in self.sights[name]), time.time()]
        return lambda seq: times[bisect_left(lengths, seq)]

    async def _check(self, store, name, effects, clocks):
        bodies = await store.read(name)
        events = [codec.decode(body) for body in bodies]
        self.told["events"] += len(events)
        self.told["expired"] += sum(isinstance(e, CallResolved) and isinstance(e.decision, Expired) for e in events)
        self.told["recovered"] += sum(isinstance(e, CallStarted) and e.attempt > 1 for e in events)
        self.told["interrupted"] += sum(
            isinstance(e, CallReturned) and e.error is not None and e.error.kind == "interrupted" for e in events
        )
        for op in self.operations[name]:
            if op.outcome == "ok":
                assert op.seq is None or op.seq <= len(events), f"{op}: acknowledged, and lost"
        for crowd in self.crowds[name]:
            laws.contested(events, crowd)
        laws.acknowledged(events, self.operations[name])
        laws.timely(events, clocks, self._seen(name))
        laws.check(events, effects, shop.TRUTHS)
        laws.within(effects, self.only)
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
        lines = [f"{'killed':28} times"]
        lines += [f"{fault:28} {times:5}" for fault, times in sorted(self.faults.items())]
        lines += [f"{'kills':28} {sum(self.faults.values()):5}   in {self.seconds:.1f} s", ""]
        lines += [f"{'other faults':28} times"]
        lines += [f"{fault:28} {times:5}" for fault, times in sorted(self.others.items())]
        lines += ["", f"{'what clients were told':28} times"]
        lines += [f"{what:28} {times:5}" for what, times in sorted(self.told.items()) if " " in what]
        lines += ["", f"{'what the log and ledger say':28} times"]
        lines += [f"{what:28} {self.told[what]:5}" for what in ("events", "expired", "recovered", "interrupted")]
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
