"""Chaos on PostgreSQL: worker processes that die, stand still and lose the database, and a database that goes away.

    python tests/chaos/postgres.py --minutes 60 --seed 7

Rounds of a minute: each has conversations and a schema of its own, ends with everything healed, and is judged by
itself. See ``trial`` for what is done meanwhile. Every worker serves HTTP; viewers watch every conversation there, on
lines that are cut at random bytes, and go on elsewhere.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack, suppress
from math import inf
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent / "src")]

import laws  # noqa: E402
import msgspec  # noqa: E402
from evidence import Clock, Intent, intended, joined, punctual, timely  # noqa: E402
from on_postgres import POINTS, Complaints, Noted  # noqa: E402
from support import pg  # noqa: E402
from support.pgproxy import Proxy  # noqa: E402
from trial import CROWD, Trial  # noqa: E402
from viewers import Viewer  # noqa: E402

from holdfast import Runtime  # noqa: E402
from holdfast.core import codec  # noqa: E402
from holdfast.core.decisions import Pending  # noqa: E402
from holdfast.errors import StoreError  # noqa: E402
from holdfast.stores.postgres.errors import CONNECTIONS_PER_STORE  # noqa: E402

LEASE = 2.0
WORKERS = 4
DECK = ["kill", "kill", "point", "point", "point", "point", "stop", "stop_in_tool", "lose", "lose", "silence", "astray"]
"""What befalls a process: each card once in so many processes, in an order that the dice make."""
STOPPED = "stopped for longer than a lease"
STOPPED_IN_TOOL = "stopped in the middle of a tool"
LOST_APPEND, LOST_LEASE = "the reply to an append lost", "the reply about a lease lost"
LATE = "a statement that arrives late"
STATEMENTS = [
    *[("INSERT INTO events", LOST_APPEND)] * 4,
    ("epoch = c.epoch + 1", LOST_LEASE),
    ("UPDATE owners SET until", LOST_LEASE),
]
SILENCE = "silence"
STRAYED = "a jump of a clock"
CUT_ONE, CUT_ALL = "a connection terminated", "all connections terminated"
RESTART = "a restart of PostgreSQL"
OUTAGE = "an outage of about a lease"
STILL = 2.0
"""Seconds without a pulse of this process, which nothing is done to: then the machine stood still."""
OUTAGES = (0.8, 1.8)
"""Leases that an outage lasts: owners that come back find their own lease gone, or only just there."""
WEATHER = [CUT_ONE, CUT_ONE, CUT_ALL, RESTART, OUTAGE]
LEFT = "a process that leaves"
STREAM = "a stream cut"
FAULTS = (
    *(CROWD, STOPPED, STOPPED_IN_TOOL, LOST_APPEND, LOST_LEASE, LATE, SILENCE),
    *(STRAYED, CUT_ONE, CUT_ALL, RESTART, OUTAGE, LEFT, STREAM),
)
"""Besides kills."""
CONTROLS = {
    "fence": ["stop_in_tool", "kill"],
    "ack": ["point", "kill"],
    "twice": ["kill"],
    "doubled": ["kill"],
    "blind": ["lose"],
    "void": ["silence", "silence", "lose"],
    "early": ["kill"],
    "stutter": ["kill"],
}
"""What can be broken on purpose (see ``on_postgres``), and the cards that bring it to light."""
DESK = 0
"""The number of our own runtime, among the workers."""
AGAIN = 120.0
"""Seconds in which a process that has lived through a fault does what it is asked for. Only a process that hangs needs
longer, also on a machine that is ten times slower than a quiet one."""


class Storm(Trial):
    backend = "on_postgres"
    rest_seconds = 120.0
    excused = (StoreError,)

    def __init__(self, directory, *, seconds=60.0, **options):
        super().__init__(directory, **options)
        self.planned = self.seconds = seconds
        self.deck = CONTROLS[self.control] if self.control else DECK
        self.intents, self.clocks = self.directory / "intents.jsonl", self.directory / "clocks.jsonl"
        for path in (self.intents, self.clocks):
            path.touch()
        self.database = pg.server()
        self.url = pg.fresh(lease=LEASE)
        self.outages, self.stops = [], {}
        self.viewers = {name: Viewer(name) for name in self.names}
        self.watching = True
        self.recovery = self.rested = 0.0

    def order(self):
        return super().order() | {
            "store": self.url,
            "intents": str(self.intents),
            "clocks": str(self.clocks),
            "astray": None,
            "slow": LEASE / 2,
        }

    async def opened_desk(self):
        self.says = Complaints(DESK, self.complaints)
        desk = Runtime(store=Noted(self.url, DESK, self.intents))
        await desk.start()
        return desk

    async def __aexit__(self, *error):
        await super().__aexit__(*error)
        self.says.close()

    def away(self, worker, op):
        leaves = worker is not None and worker.excused
        return op.kind in ("log_write_failed", "log_read_failed") or (leaves and op.kind == "invalid_args")

    def ask(self, text, *values):
        """Ask the database, past everything."""
        return pg.asked(self.url, text, *values)

    # --- what befalls processes ---

    async def fate(self, dice):
        deck = []
        while time.monotonic() < self.until:
            deck = deck or dice.sample(self.deck, len(self.deck))
            async with AsyncExitStack() as stack:
                await getattr(self, f"_{deck.pop()}")(dice, stack)

    async def _kill(self, dice, stack):
        worker = await self.spawn()
        await worker.up()
        await asyncio.sleep(dice.choice([0.1, 0.4, 1.0, 2.0]) * (0.5 + dice.random()))
        await self.ended(worker, killed=True)

    async def _point(self, dice, stack):
        point = dice.choice(POINTS)
        worker = await self.spawn(point, crash=f"{point}@{dice.randint(1, 3)}")
        if not await worker.buried(3.0 + dice.random()):
            worker.fault = "at a random moment"  # it did not come by
        await self.ended(worker, killed=True)

    async def _stop(self, dice, stack):
        worker = await self.spawn()
        await worker.up()
        await asyncio.sleep(0.3 + dice.random())
        worker.signal(signal.SIGSTOP)
        await self.stopped(worker, dice, STOPPED)

    async def _stop_in_tool(self, dice, stack):
        point = dice.choice(["tool:before_effect", "tool:after_effect"])
        worker = await self.spawn(crash=f"{point}@{dice.randint(1, 3)}!")
        until = time.monotonic() + 4.0
        while not worker.stopped() and time.monotonic() < until:
            await asyncio.sleep(0.01)
        if worker.stopped():
            await self.stopped(worker, dice, STOPPED_IN_TOOL)
        else:  # it did not come by
            await self.ended(worker, killed=True)

    async def stopped(self, worker, dice, fault):
        """It stands still until others have its work, and then wakes up."""
        since = time.time()
        await asyncio.sleep(LEASE * (1.2 + dice.random()))
        self.stops.setdefault(worker.number, []).append((since, time.time()))
        worker.signal(signal.SIGCONT)
        self.others[fault] += 1
        await self.over(worker, dice)

    async def _lose(self, dice, stack):
        proxy = await stack.enter_async_context(Proxy(self.database.port))
        worker = await self.spawn(store=self.through(proxy))
        await worker.up()
        for _ in range(dice.randint(1, 3)):
            await asyncio.sleep(dice.random() / 2)
            words, fault = dice.choice(STATEMENTS)
            how = dice.choice(["lose", "lose", "hush", "keep"])
            struck = proxy.strike(words, how)
            with suppress(TimeoutError):
                async with asyncio.timeout(LEASE):
                    await asyncio.shield(struck)
            if not struck.done():
                continue  # nothing of the kind was sent; perhaps it will be
            self.others[LATE if how == "keep" else fault] += 1
            if how == "keep":  # it arrives when nobody waits for it any more
                await asyncio.sleep(LEASE * dice.random())
                await proxy.deliver()
        await self.over(worker, dice)

    async def _silence(self, dice, stack):
        proxy = await stack.enter_async_context(Proxy(self.database.port))
        worker = await self.spawn(store=self.through(proxy))
        await worker.up()
        await asyncio.sleep(dice.random())
        with proxy.silent():
            await asyncio.sleep(LEASE * dice.choice([0.2, 0.4, 0.8, 1.3, 2.0]))
        self.others[SILENCE] += 1
        await self.over(worker, dice)

    async def _astray(self, dice, stack):
        worker = await self.spawn(astray=dice.getrandbits(32))
        await worker.up()
        await asyncio.sleep(0.5 + dice.random())
        await self.over(worker, dice)

    async def over(self, worker, dice):
        """The fault is over: the process goes on by itself. Then it is killed, or leaves."""
        since = time.time()
        said = None
        while worker.alive() and (said is None or said.outcome != "ok") and self.well_since(since) < AGAIN:
            with suppress(TimeoutError):
                async with asyncio.timeout(AGAIN):
                    said = await self.say(dice, worker)
            await asyncio.sleep(0.1)
        if self.well_since(since) >= AGAIN:
            self.violations.append(f"worker {worker.number} does not go on: {said}")
        await asyncio.sleep(2 * dice.random())
        killed = dice.random() < 0.5
        if not killed:
            self.leave(worker)
            self.others[LEFT] += 1
        await self.ended(worker, killed=killed)

    def well_since(self, since):
        """Seconds since then, without those in which the database was away."""
        away = sum(end - max(begin, since) for begin, end in self.outages if end > since)
        return time.time() - since - away

    def through(self, proxy):
        schema = pg.schema_of(self.url)
        place = f"postgres@127.0.0.1:{proxy.port}/postgres"
        return f"postgresql://{place}?sslmode=disable&holdfast_schema={schema}&holdfast_lease={LEASE}"

    # --- what befalls the database ---

    async def weather(self, dice):
        deck = []
        while time.monotonic() < self.until:
            await asyncio.sleep(0.5 + 3 * dice.random())
            deck = deck or dice.sample(WEATHER, len(WEATHER))
            kind = deck.pop()
            if kind in (RESTART, OUTAGE):
                since = time.time()
                await asyncio.to_thread(self.database.halt)
                if kind == OUTAGE:
                    await asyncio.sleep(max(0.0, LEASE * dice.uniform(*OUTAGES) - (time.time() - since)))
                await asyncio.to_thread(self.database.start)
                self.outages.append((since, time.time()))
            else:
                mine = "SELECT pid FROM pg_stat_activity WHERE application_name = 'holdfast' ORDER BY random() LIMIT $1"
                limit = 1 if kind == CUT_ONE else 1000
                await self.ask(f"SELECT pg_terminate_backend(pid) FROM ({mine}) AS them", limit)
            self.others[kind] += 1

    # --- viewers ---

    async def watch(self, viewer):
        dice = random.Random(f"{self.seed}/viewer/{viewer.conversation}")
        while self.watching:
            ports = [worker.port for worker in self.up() if worker.port]
            if ports and self.seen_once(viewer.conversation):
                length = dice.choice([200, 1000, 5000, 20_000]) * dice.random()
                self.others[STREAM] += await viewer.watch(dice.choice(ports), 1 + int(length))
            await asyncio.sleep(dice.random() / 5)

    # --- the run ---

    async def run(self, report=lambda run: None):
        clients = [asyncio.create_task(self.client(name)) for name in self.names]
        viewers = [asyncio.create_task(self.watch(viewer)) for viewer in self.viewers.values()]
        beside = [asyncio.create_task(self.report(report)), asyncio.create_task(self.pulse())]
        started = time.monotonic()
        self.until = started + self.planned
        fates = [self.fate(random.Random(f"{self.seed}/fate/{n}")) for n in range(WORKERS)]
        if not self.control or self.control == "void":  # that shows only after an outage
            fates.append(self.weather(random.Random(f"{self.seed}/weather")))
        await asyncio.gather(*fates)
        self.seconds = time.monotonic() - started
        self.resting = True
        await asyncio.gather(*clients)
        if not self.control:  # what is broken need not come to rest
            await self.healed()
            await self.caught_up()
        self.watching = False
        await asyncio.gather(*viewers)
        for task in beside:
            task.cancel()
        if self.control:
            await self.desk.close()
        else:
            await self.empty()

    async def report(self, report):
        while True:
            await asyncio.sleep(5.0)
            report(self)

    async def pulse(self):
        """A machine that stands still (a virtual one is, when it is copied) is nobody's being late."""
        while True:
            since = time.time()
            await asyncio.sleep(0.2)
            if time.time() - since > STILL:
                self.outages.append((since, time.time()))

    async def healed(self):
        """Everything is well again: what is owed is done, and what waits is what the log says; then all is decided."""
        began = time.monotonic()
        for _ in range(3):
            await (await self.spawn()).up()
        until = began + self.rest_seconds
        while any(row.owes for row in await self.desk.store.rows(limit=1000)):
            if time.monotonic() > until:
                break  # then it does not come to rest either
            await asyncio.sleep(0.05)
        self.recovery = time.monotonic() - began
        for name in self.names:
            await self.agrees(name)
        self.rest_seconds = until - time.monotonic()
        await self.rest()
        self.rested = time.monotonic() - began

    async def agrees(self, name):
        """What waits by the fold of the log, what the inbox shows, and what the timers will look at, are the same."""
        store = self.desk.store
        for _ in range(20):
            before = await store.heads([name])
            bodies = await store.read(name)
            rows = await store.pending(name)
            timers, _ = await store.list_due(inf, 100_000)
            if before == await store.heads([name]):
                break
        fold = {entry.call: entry for entry in laws.waiting(name, [codec.decode_event(b) for b in bodies])}
        inbox = {row.call: msgspec.json.decode(row.body, type=Pending) for row in rows}
        due = {row.call: row for row in timers if row.conversation == name}
        self.told["waiting"] += len(fold)
        deadlines = {call: entry.deadline for call, entry in fold.items()}
        if fold != inbox or deadlines != {call: row.deadline for call, row in due.items()}:
            self.violations.append(f"{name}: by the log {[*fold]} wait, the inbox has {[*inbox]}, the timers {due}")
        if late := [call for call, row in due.items() if row.due > row.deadline]:
            self.violations.append(f"{name}: the timers of {late} are set after their deadlines")

    async def caught_up(self):
        """Every viewer has the whole log."""
        heads = await self.desk.store.heads(self.names)
        until = time.monotonic() + 20.0
        while behind := [v.conversation for v in self.viewers.values() if v.last < heads.get(v.conversation, 0)]:
            if time.monotonic() > until:
                self.violations.append(f"viewers of {behind} do not see the end of the log")
                break
            await asyncio.sleep(0.05)

    async def empty(self):
        """Nothing is left over: no process, no connection, no lease."""
        at_most = (len(self.workers) + 1) * CONNECTIONS_PER_STORE
        count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'holdfast'"
        await self.comes_to(count, at_most, "connections for so few processes")
        for worker in [*self.workers.values()]:
            self.leave(worker)
            await self.ended(worker, killed=False)
        await self.desk.close()
        await self.comes_to(count, 0, "connections")
        await self.comes_to("SELECT count(*) FROM owners WHERE until > clock_timestamp()", 0, "owners")
        held = "SELECT count(*) FROM conversations JOIN owners USING (owner) WHERE until > clock_timestamp()"
        await self.comes_to(held, 0, "leases")

    async def comes_to(self, count, at_most, what):
        until = time.monotonic() + LEASE + 1.0
        while (left := (await self.ask(count))[0][0]) > at_most:
            if time.monotonic() > until:
                self.violations.append(f"{left} {what} are left over (at most {at_most})")
                break
            await asyncio.sleep(0.1)

    async def judge(self):
        intents = {name: [] for name in self.names}
        for line in self.intents.read_text().splitlines():
            row = json.loads(line)
            intents[row.pop("conversation")].append(Intent(**row))
        clock = Clock(0.0, self.began, inf)  # the database's, which is the wall's: it runs on this machine
        self.others[STRAYED] = len(self.clocks.read_text().splitlines())

        answers = self.answers()

        def evident(name, events, bodies, effects):
            yield lambda: intended(events, bodies, intents[name])
            yield lambda: timely(events, [clock], self.first_seen(name))
            yield lambda: punctual(events, self.outages, answers)
            yield lambda: joined(bodies, self.viewers[name].got)

        store = Noted(self.url, DESK, self.intents)
        await store.open()
        try:
            await self.check(store, evident)
        finally:
            await store.close()

    def answers(self):
        """From when until when each client waited that was answered while the database was there."""
        asked = [op for ops in self.operations.values() for op in ops if op.outcome != "unknown" and not op.away]
        spans = [(op.invoked, op.answered) for op in asked]
        return [
            (since, until)
            for since, until in spans
            if not any(since <= end and begin <= until for begin, end in self.outages)
        ]

    def forget(self):
        """What a round has seen is not kept for an hour."""
        self.viewers, self.operations, self.seen, self.sights, self.crowds = {}, {}, {}, {}, {}

    def effect(self, row):
        stops = self.stops.get(row["worker"], ())
        zombie = any(since - 0.05 <= row["when"] <= until + 1.0 for since, until in stops)
        return dataclasses.replace(super().effect(row), zombie=zombie)


async def storm(directory, *, report=lambda run: None, **options):
    """One round; the finished ``Storm`` with its violations."""
    async with Storm(directory, **options) as run:
        await run.run(report)
        await run.judge()
    await run.ask(f"DROP SCHEMA {pg.schema_of(run.url)} CASCADE")
    return run


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0, help="of faults")
    parser.add_argument("--round", type=float, default=60.0, metavar="SECONDS", help="of faults in a round")
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--control", choices=[*CONTROLS], help="break it on purpose: the checker must see it")
    parser.add_argument("--keep", metavar="DIRECTORY", help="leave the histories and the ledgers there")
    given = parser.parse_args(argv)
    done, seconds = [], given.minutes * 60
    while seconds > 0:
        number, length = len(done) + 1, min(seconds, given.round)
        seed = given.seed + len(done)

        def report(run, number=number, seed=seed):
            faults = sum(run.faults.values()) + sum(run.others.values())
            told = sum(times for what, times in run.told.items() if " " in what)
            events = sum(len(seen) for seen in run.seen.values())
            at = time.time() - run.began
            print(
                f"round {number} (seed {seed}) {at:4.0f} s: {faults} faults, {told} answers, {events} events, "
                f"{len(run.violations)} violations",
                flush=True,
            )

        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(given.keep or scratch) / f"round{number}"
            os.makedirs(directory)
            options = {"seconds": length, "conversations": given.conversations, "seed": seed, "control": given.control}
            done.append(asyncio.run(storm(directory, report=report, **options)))
        report(done[-1])
        for violation in done[-1].violations[:5]:
            print(f"\nVIOLATION (seed {seed}) {violation}", flush=True)
        done[-1].forget()
        seconds -= length
    print(total(done).table())
    print(f"{'all that is owed is done':34} {max(run.recovery for run in done):5.1f} s after healing, at most")
    print(f"{'everything is at rest':34} {max(run.rested for run in done):5.1f} s after healing, at most")
    return 1 if any(run.violations for run in done) else 0


def total(done):
    """All rounds as one."""
    first = done[0]
    for name in ("faults", "others", "told"):
        setattr(first, name, sum((getattr(run, name) for run in done), Counter()))
    first.seconds = sum(run.seconds for run in done)
    first.effects = sum(run.effects for run in done)
    first.violations = [violation for run in done for violation in run.violations]
    return first


if __name__ == "__main__":
    sys.exit(main())
