"""Chaos on PostgreSQL: worker processes that die, stop or lose the database, and a database that restarts.

    python tests/chaos/postgres.py --minutes 60 --seed 7

It runs in rounds of a minute: each has its own conversations and its own schema, ends with a recovery, and is checked
on its own. See ``trial`` for what the clients do. Every worker serves HTTP; viewers watch every conversation over
connections that are cut at random bytes, and continue at another worker.
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
from evidence import (  # noqa: E402
    Clock,
    Intent,
    check_event_times,
    check_expiry_times,
    check_intents,
    check_stream,
    check_timer_times,
)
from on_postgres import POINTS, Complaints, RecordingStore  # noqa: E402
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
DECK = ["kill", "kill", "point", "point", "point", "point", "stop", "stop_in_tool", "lose", "lose", "silence", "jump"]
"""The faults of processes, one for each process, drawn in random order until the deck is used up."""
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
JUMPED = "a jump of a clock"
CUT_ONE, CUT_ALL = "a connection terminated", "all connections terminated"
RESTART = "a restart of PostgreSQL"
OUTAGE = "an outage of about a lease"
PAUSE_SECONDS = 2.0
"""Seconds in which this process, which has no faults, did not run: then the machine was paused."""
OUTAGES = (0.8, 1.8)
"""The duration of an outage in leases: after it an owner's lease has just expired, or is about to."""
DATABASE_FAULTS = [CUT_ONE, CUT_ONE, CUT_ALL, RESTART, OUTAGE]
LEFT = "a process that leaves"
STREAM = "a stream cut"
FAULTS = (
    *(CROWD, STOPPED, STOPPED_IN_TOOL, LOST_APPEND, LOST_LEASE, LATE, SILENCE),
    *(JUMPED, CUT_ONE, CUT_ALL, RESTART, OUTAGE, LEFT, STREAM),
)
"""The faults other than kills."""
CONTROLS = {
    "fence": ["stop_in_tool", "kill"],
    "ack": ["point", "kill"],
    "twice": ["kill"],
    "doubled": ["kill"],
    "blind": ["lose"],
    "void": ["silence", "silence", "lose"],
    "early": ["kill"],
    "stutter": ["kill"],
    "lost": ["kill"],
    "renamed": ["kill"],
    "eager": ["kill"],
    "votes": ["kill"],
    "silent": ["kill"],
}
"""The deliberate defects (see ``on_postgres``), each with the faults that reveal it."""
DESK = 0
"""The worker number of the driver's own runtime."""
RECOVERY_SECONDS = 120.0
"""Seconds in which a process that survived a fault must serve a request. Only a process that hangs needs longer, also
on a machine that is ten times slower than an idle one."""


class PostgresTrial(Trial):
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
            "jumps_seed": None,
            "slow": LEASE / 2,
        }

    async def open_desk(self):
        self.warnings = Complaints(DESK, self.complaints)
        desk = Runtime(store=RecordingStore(self.url, DESK, self.intents))
        await desk.start()
        return desk

    async def __aexit__(self, *error):
        await super().__aexit__(*error)
        self.warnings.close()

    def was_unavailable(self, worker, op):
        leaves = worker is not None and worker.excused
        return op.kind in ("log_write_failed", "log_read_failed") or (leaves and op.kind == "invalid_args")

    def query(self, text, *values):
        """Query the database directly."""
        return pg.asked(self.url, text, *values)

    # --- faults of processes ---

    async def run_faults(self, rng):
        deck = []
        while time.monotonic() < self.until:
            deck = deck or rng.sample(self.deck, len(self.deck))
            async with AsyncExitStack() as stack:
                await getattr(self, f"_{deck.pop()}")(rng, stack)

    async def _kill(self, rng, stack):
        worker = await self.spawn()
        await worker.wait_until_up()
        await asyncio.sleep(rng.choice([0.1, 0.4, 1.0, 2.0]) * (0.5 + rng.random()))
        await self.end_worker(worker, killed=True)

    async def _point(self, rng, stack):
        point = rng.choice(POINTS)
        worker = await self.spawn(point, crash=f"{point}@{rng.randint(1, 3)}")
        if not await worker.wait_until_dead(3.0 + rng.random()):
            worker.fault = "at a random moment"  # it did not reach the point
        await self.end_worker(worker, killed=True)

    async def _stop(self, rng, stack):
        worker = await self.spawn()
        await worker.wait_until_up()
        await asyncio.sleep(0.3 + rng.random())
        worker.signal(signal.SIGSTOP)
        await self.pause(worker, rng, STOPPED)

    async def _stop_in_tool(self, rng, stack):
        point = rng.choice(["tool:before_effect", "tool:after_effect"])
        worker = await self.spawn(crash=f"{point}@{rng.randint(1, 3)}!")
        until = time.monotonic() + 4.0
        while not worker.is_stopped() and time.monotonic() < until:
            await asyncio.sleep(0.01)
        if worker.is_stopped():
            await self.pause(worker, rng, STOPPED_IN_TOOL)
        else:  # it did not reach the point
            await self.end_worker(worker, killed=True)

    async def pause(self, worker, rng, fault):
        """Leave a worker stopped until other workers have its conversations, and then continue it."""
        since = time.time()
        await asyncio.sleep(LEASE * (1.2 + rng.random()))
        self.stops.setdefault(worker.number, []).append((since, time.time()))
        worker.signal(signal.SIGCONT)
        self.other_faults[fault] += 1
        await self.finish_fault(worker, rng)

    async def _lose(self, rng, stack):
        proxy = await stack.enter_async_context(Proxy(self.database.port))
        worker = await self.spawn(store=self.proxy_url(proxy))
        await worker.wait_until_up()
        for _ in range(rng.randint(1, 3)):
            await asyncio.sleep(rng.random() / 2)
            marker, fault = rng.choice(STATEMENTS)
            how = rng.choice(["lose", "lose", "hush", "keep"])
            struck = proxy.strike(marker, how)
            with suppress(TimeoutError):
                async with asyncio.timeout(LEASE):
                    await asyncio.shield(struck)
            if not struck.done():
                continue  # no such statement was sent yet
            self.other_faults[LATE if how == "keep" else fault] += 1
            if how == "keep":  # it arrives after its sender has given up
                await asyncio.sleep(LEASE * rng.random())
                await proxy.deliver()
        await self.finish_fault(worker, rng)

    async def _silence(self, rng, stack):
        proxy = await stack.enter_async_context(Proxy(self.database.port))
        worker = await self.spawn(store=self.proxy_url(proxy))
        await worker.wait_until_up()
        await asyncio.sleep(rng.random())
        with proxy.silent():
            await asyncio.sleep(LEASE * rng.choice([0.2, 0.4, 0.8, 1.3, 2.0]))
        self.other_faults[SILENCE] += 1
        await self.finish_fault(worker, rng)

    async def _jump(self, rng, stack):
        worker = await self.spawn(jumps_seed=rng.getrandbits(32))
        await worker.wait_until_up()
        await asyncio.sleep(0.5 + rng.random())
        await self.finish_fault(worker, rng)

    async def finish_fault(self, worker, rng):
        """Check that the worker serves requests after its fault, and then kill it or ask it to exit."""
        since = time.time()
        answer = None
        while (
            worker.is_alive()
            and (answer is None or answer.outcome != "ok")
            and self.seconds_without_outages(since) < RECOVERY_SECONDS
        ):
            with suppress(TimeoutError):
                async with asyncio.timeout(RECOVERY_SECONDS):
                    answer = await self.send_message(rng, worker)
            await asyncio.sleep(0.1)
        if self.seconds_without_outages(since) >= RECOVERY_SECONDS:
            self.violations.append(f"worker {worker.number} does not recover: {answer}")
        await asyncio.sleep(2 * rng.random())
        killed = rng.random() < 0.5
        if not killed:
            self.ask_to_exit(worker)
            self.other_faults[LEFT] += 1
        await self.end_worker(worker, killed=killed)

    def seconds_without_outages(self, since):
        """Return the seconds since then, without outages of the database."""
        away = sum(end - max(begin, since) for begin, end in self.outages if end > since)
        return time.time() - since - away

    def proxy_url(self, proxy):
        schema = pg.schema_of(self.url)
        place = f"postgres@127.0.0.1:{proxy.port}/postgres"
        return f"postgresql://{place}?sslmode=disable&holdfast_schema={schema}&holdfast_lease={LEASE}"

    # --- faults of the database ---

    async def disturb_database(self, rng):
        deck = []
        while time.monotonic() < self.until:
            await asyncio.sleep(0.5 + 3 * rng.random())
            deck = deck or rng.sample(DATABASE_FAULTS, len(DATABASE_FAULTS))
            kind = deck.pop()
            if kind in (RESTART, OUTAGE):
                since = time.time()
                await asyncio.to_thread(self.database.halt)
                if kind == OUTAGE:
                    await asyncio.sleep(max(0.0, LEASE * rng.uniform(*OUTAGES) - (time.time() - since)))
                await asyncio.to_thread(self.database.start)
                self.outages.append((since, time.time()))
            else:
                mine = "SELECT pid FROM pg_stat_activity WHERE application_name = 'holdfast' ORDER BY random() LIMIT $1"
                limit = 1 if kind == CUT_ONE else 1000
                await self.query(f"SELECT pg_terminate_backend(pid) FROM ({mine}) AS them", limit)
            self.other_faults[kind] += 1

    # --- viewers ---

    async def watch(self, viewer):
        rng = random.Random(f"{self.seed}/viewer/{viewer.conversation}")
        while self.watching:
            ports = [worker.port for worker in self.connected_workers() if worker.port]
            if ports and self.was_created(viewer.conversation):
                length = rng.choice([200, 1000, 5000, 20_000]) * rng.random()
                self.other_faults[STREAM] += await viewer.watch(rng.choice(ports), 1 + int(length))
            await asyncio.sleep(rng.random() / 5)

    # --- the run ---

    async def run(self, report=lambda run: None):
        clients = [asyncio.create_task(self.client(name)) for name in self.names]
        viewers = [asyncio.create_task(self.watch(viewer)) for viewer in self.viewers.values()]
        beside = [asyncio.create_task(self.report(report)), asyncio.create_task(self.record_pauses())]
        started = time.monotonic()
        self.until = started + self.planned
        tasks = [self.run_faults(random.Random(f"{self.seed}/fate/{n}")) for n in range(WORKERS)]
        if not self.control or self.control == "void":  # this defect shows only after an outage
            tasks.append(self.disturb_database(random.Random(f"{self.seed}/weather")))
        await asyncio.gather(*tasks)
        self.seconds = time.monotonic() - started
        self.resting = True
        await asyncio.gather(*clients)
        if not self.control:  # a run with a defect need not come to rest
            await self.recover()
            await self.wait_for_viewers()
        self.watching = False
        await asyncio.gather(*viewers)
        for task in beside:
            task.cancel()
        if self.control:
            await self.desk.close()
        else:
            await self.check_nothing_left()

    async def report(self, report):
        while True:
            await asyncio.sleep(5.0)
            report(self)

    async def record_pauses(self):
        """Record the times in which the machine was paused, as a virtual one is during a migration."""
        while True:
            since = time.time()
            await asyncio.sleep(0.2)
            if time.time() - since > PAUSE_SECONDS:
                self.outages.append((since, time.time()))

    async def recover(self):
        """Start healthy workers; check that owed work is done and that pending entries match the log; come to rest."""
        started_at = time.monotonic()
        for _ in range(3):
            await (await self.spawn()).wait_until_up()
        until = started_at + self.rest_seconds
        while any(row.owes for row in await self.desk.store.rows(limit=1000)):
            if time.monotonic() > until:
                break  # rest() will report it
            await asyncio.sleep(0.05)
        self.recovery = time.monotonic() - started_at
        for name in self.names:
            await self.check_pending(name)
        self.rest_seconds = until - time.monotonic()
        await self.rest()
        self.rested = time.monotonic() - started_at

    async def check_pending(self, name):
        """Check that the fold of the log, the pending entries and the timers have the same calls and deadlines."""
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
        self.counts["waiting"] += len(fold)
        deadlines = {call: entry.deadline for call, entry in fold.items()}
        if fold != inbox or deadlines != {call: row.deadline for call, row in due.items()}:
            self.violations.append(f"{name}: pending by the log {[*fold]}, by the inbox {[*inbox]}, due {due}")
        if late := [call for call, row in due.items() if row.due > row.deadline]:
            self.violations.append(f"{name}: the timers of {late} are set after their deadlines")

    async def wait_for_viewers(self):
        """Wait until every viewer has the whole log."""
        heads = await self.desk.store.heads(self.names)
        until = time.monotonic() + 20.0
        while behind := [v.conversation for v in self.viewers.values() if v.last < heads.get(v.conversation, 0)]:
            if time.monotonic() > until:
                self.violations.append(f"viewers of {behind} do not see the end of the log")
                break
            await asyncio.sleep(0.05)

    async def check_nothing_left(self):
        """Check that no process, no connection and no lease is left."""
        at_most = (len(self.workers) + 1) * CONNECTIONS_PER_STORE
        count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'holdfast'"
        await self.wait_for_count(count, at_most, "connections for so few processes")
        for worker in [*self.workers.values()]:
            self.ask_to_exit(worker)
            await self.end_worker(worker, killed=False)
        await self.desk.close()
        await self.wait_for_count(count, 0, "connections")
        await self.wait_for_count("SELECT count(*) FROM owners WHERE until > clock_timestamp()", 0, "owners")
        held = "SELECT count(*) FROM conversations JOIN owners USING (owner) WHERE until > clock_timestamp()"
        await self.wait_for_count(held, 0, "leases")

    async def wait_for_count(self, count, at_most, what):
        until = time.monotonic() + LEASE + 1.0
        while (left := (await self.query(count))[0][0]) > at_most:
            if time.monotonic() > until:
                self.violations.append(f"{left} {what} are left over (at most {at_most})")
                break
            await asyncio.sleep(0.1)

    async def judge(self):
        intents = {name: [] for name in self.names}
        for line in self.intents.read_text().splitlines():
            row = json.loads(line)
            intents[row.pop("conversation")].append(Intent(**row))
        clock = Clock(0.0, self.started_at, inf)  # the database runs on this machine, so its clock is the real one
        self.other_faults[JUMPED] = len(self.clocks.read_text().splitlines())

        answers = self.answers()

        def more_laws(name, events, bodies, effects):
            yield lambda: check_intents(events, bodies, intents[name])
            yield lambda: check_event_times(events, [clock], self.first_seen(name))
            yield lambda: check_expiry_times(events, self.outages, answers)
            yield lambda: check_timer_times(events, self.outages, answers)
            yield lambda: check_stream(bodies, self.viewers[name].got)

        store = RecordingStore(self.url, DESK, self.intents)
        await store.open()
        try:
            await self.check(store, more_laws)
        finally:
            await store.close()

    def answers(self):
        """Return the intervals in which clients waited, of requests that were answered outside of outages."""
        asked = [op for ops in self.operations.values() for op in ops if op.outcome != "unknown" and not op.unavailable]
        spans = [(op.invoked, op.answered) for op in asked]
        return [
            (since, until)
            for since, until in spans
            if not any(since <= end and begin <= until for begin, end in self.outages)
        ]

    def forget(self):
        """Drop the records of a finished round, so that an hour of rounds fits into memory."""
        self.viewers, self.operations, self.seen, self.observations, self.crowds = {}, {}, {}, {}, {}

    def effect(self, row):
        stops = self.stops.get(row["worker"], ())
        zombie = any(since - 0.05 <= row["when"] <= until + 1.0 for since, until in stops)
        return dataclasses.replace(super().effect(row), zombie=zombie)


async def run_round(directory, *, report=lambda run: None, **options):
    """Return a finished round with its violations."""
    async with PostgresTrial(directory, **options) as run:
        await run.run(report)
        await run.judge()
    await run.query(f"DROP SCHEMA {pg.schema_of(run.url)} CASCADE")
    return run


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0, help="of faults")
    parser.add_argument("--round", type=float, default=60.0, metavar="SECONDS", help="of faults in a round")
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--control", choices=[*CONTROLS], help="a deliberate defect, which the checker must report")
    parser.add_argument("--keep", metavar="DIRECTORY", help="keep the histories and the ledgers there")
    given = parser.parse_args(argv)
    done, seconds = [], given.minutes * 60
    while seconds > 0:
        number, length = len(done) + 1, min(seconds, given.round)
        seed = given.seed + len(done)

        def report(run, number=number, seed=seed):
            faults = sum(run.faults.values()) + sum(run.other_faults.values())
            answers = sum(times for what, times in run.counts.items() if " " in what)
            events = sum(len(seen) for seen in run.seen.values())
            at = time.time() - run.started_at
            print(
                f"round {number} (seed {seed}) {at:4.0f} s: {faults} faults, {answers} answers, {events} events, "
                f"{len(run.violations)} violations",
                flush=True,
            )

        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(given.keep or scratch) / f"round{number}"
            os.makedirs(directory)
            options = {"seconds": length, "conversations": given.conversations, "seed": seed, "control": given.control}
            done.append(asyncio.run(run_round(directory, report=report, **options)))
        report(done[-1])
        for violation in done[-1].violations[:5]:
            print(f"\nVIOLATION (seed {seed}) {violation}", flush=True)
        done[-1].forget()
        seconds -= length
    print(total(done).table())
    print(f"{'owed work is done':34} {max(run.recovery for run in done):5.1f} s after the faults, at most")
    print(f"{'everything is at rest':34} {max(run.rested for run in done):5.1f} s after the faults, at most")
    return 1 if any(run.violations for run in done) else 0


def total(done):
    """Return all rounds as one."""
    first = done[0]
    for name in ("faults", "other_faults", "counts"):
        setattr(first, name, sum((getattr(run, name) for run in done), Counter()))
    first.seconds = sum(run.seconds for run in done)
    first.effects = sum(run.effects for run in done)
    first.violations = [violation for run in done for violation in run.violations]
    return first


if __name__ == "__main__":
    sys.exit(main())
