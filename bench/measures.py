"""The measures: each compares Holdfast with a baseline, in alternating rounds."""

from __future__ import annotations

import asyncio
import gc
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import bare
import parked
import skeleton

from holdfast import Agent, Approve, Runtime, ScriptedModel, ToolCall, tool
from holdfast.core.live import TextDelta
from holdfast.models.base import FinishPart, Request, StreamPart, TextPart, ToolCallPart
from holdfast.stores.base import Append
from holdfast.stores.memory import MemoryStore
from holdfast.stores.sqlite.store import SQLiteStore

ARGS = {"city": "Paris", "days": 3}
ARGS_TEXT = '{"city": "Paris", "days": 3}'
clock = time.perf_counter


class Row(NamedTuple):
    """One row of the result table."""

    name: str
    goal: str
    measured: str
    value: float
    limit: float | None
    """None: nothing is asked of it."""
    best: float | None = None
    """The same from the quietest rounds, where noise only ever adds."""

    @property
    def holds(self) -> bool:
        """Whether both ratios meet the goal. On a busy disk both sides wait, which makes the median ratio look good."""
        return self.limit is None or max(self.value, self.best or 0) <= self.limit


class Sizes(NamedTuple):
    """The number of rounds and steps of each measure."""

    rounds: int
    steps: int
    durable: int
    fill: int
    far: int
    chunks: int
    history: int
    parked: tuple[int, int]
    imports: int


FULL = Sizes(15, 200, 20, 14, 2000, 2000, 1000, (10_000, 50_000), 9)
QUICK = Sizes(2, 40, 10, 1, 200, 100, 100, (200, 1_000), 1)

Progress = Callable[[str], None]


@tool
async def weather(city: str, days: int) -> str:
    """The weather in a city."""
    return "sunny, 21 degrees, light wind from the west"


async def plain_weather(city: str, days: int) -> str:
    return "sunny, 21 degrees, light wind from the west"


class BenchModel:
    """A model that requests the same calls n times, then ends; it records the time of each request."""

    name = "marks"

    def __init__(self, n: int, calls: int = 1, tool: str = "weather"):
        self.asked: Callable[[int], None] = lambda step: None
        self._n, self._calls, self._tool = n, calls, tool
        self.again()

    def again(self) -> None:
        """Reset the model for another turn."""
        self.at: list[float] = []
        self.last = asyncio.Event()

    async def stream(self, request: Request) -> AsyncIterator[StreamPart]:
        self.at.append(clock())
        self.asked(request.step)
        if request.step > self._n:
            self.last.set()
            yield TextPart("done")
        else:
            for index in range(self._calls):
                yield ToolCallPart(index, f"p{request.step}.{index}", self._tool, ARGS_TEXT)
        yield FinishPart()


class CountingStore(MemoryStore):
    """A memory store that counts the bytes appended to it."""

    written = 0

    async def append(self, append: Append) -> None:
        self.written += sum(map(len, append.events)) + sum(len(row.body) for row in append.opened)
        self.written += len(append.snapshot or b"")
        await super().append(append)


async def turn(rt: Runtime, name: str, model: BenchModel) -> None:
    """Run one turn without viewers, and poll only near its end, so that polling does not slow it."""
    await rt.send(name, "How is the weather?")
    await model.last.wait()
    await idle(rt, name)


async def idle(rt: Runtime, name: str) -> None:
    while (row := await rt.store.row(name)) is None or row.status != "idle":  # noqa: ASYNC110
        await asyncio.sleep(0.002)


def copy_store(source: Path, directory: Path) -> Path:
    """Return the path of a new copy of a store; the last copy is deleted."""
    for old in directory.glob("copy.db*"):
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    return Path(shutil.copy(source, directory / "copy.db"))


def run_python(*arguments: str) -> list[str]:
    """Run a new Python interpreter and return the lines that it prints."""
    return subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True).stdout.split()


Timed = Callable[[], Awaitable[float]]


async def alternate(rounds: int, progress: Progress, **sides: Timed) -> dict[str, list[float]]:
    """Time the sides in the order A B B A A B ..., so that other load affects both, and order favours neither."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for each in sides.values():
        await each()  # warm up
    for n in range(rounds):
        progress(f"round {n + 1} of {rounds}")
        for name in round_order(sides, n):
            gc.collect()
            found[name].append(await sides[name]())
    return found


def round_order(sides: Iterable[str], n: int) -> list[str]:
    """Return the order of the sides in round n, reversed in every second round: an idle process is slow at first."""
    return list(sides)[:: -1 if n % 2 else 1]


def ratio(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """Return the median of the rounds' ratios, and the ratio of the fastest rounds."""
    pairs = [a / b for a, b in zip(ours, theirs, strict=True)]
    return statistics.median(pairs), quietest(ours) / quietest(theirs)


def quietest(rounds: list[float]) -> float:
    """Return the slowest of the fastest fifth of the rounds: the minimum alone would be an outlier."""
    return sorted(rounds)[(len(rounds) - 1) // 5]


def us(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} us" if seconds >= 1e-5 else f"{seconds * 1e6:,.1f} us"


# --- a step ---


async def step(size: Sizes, progress: Progress) -> list[Row]:
    async def ours() -> float:
        model = BenchModel(size.steps)
        agent = Agent("bench", model=model, tools=[weather], max_steps=size.steps + 1)
        async with Runtime(agent) as rt:
            await turn(rt, "c", model)
        return (model.at[-1] - model.at[0]) / size.steps

    async def stream(step: int) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        yield "weather", ARGS

    async def least() -> float:
        began = clock()
        await skeleton.steps(size.steps, stream, {"weather": plain_weather})
        return (clock() - began) / size.steps

    found = await alternate(size.rounds, progress, ours=ours, least=least)
    times, best = ratio(found["ours"], found["least"])
    took, quiet, theirs = statistics.median(found["ours"]), min(found["ours"]), statistics.median(found["least"])
    return [
        Row("a step, memory store", "<= 400 us", us(took), took * 1e6, 400, quiet * 1e6),
        Row("... against the skeleton", "", f"{times:.2f}x ({us(theirs)})", times, None, best),
    ]


async def durable(size: Sizes, progress: Progress) -> list[Row]:
    model = BenchModel(size.durable)
    agent = Agent("bench", model=model, tools=[weather], max_steps=size.durable + 1)
    with tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as directory:
        # Both stay open and have filled their write-ahead logs once: while the file still grows, a commit takes 50 %
        # longer than later, when it overwrites old pages.
        async with Runtime(agent, store=f"sqlite:///{directory}/ours.db") as rt:
            writer = bare.Writer(f"{directory}/bare.db")
            sample: list[bytes] = []
            n = 0

            async def ours() -> float:
                nonlocal n, sample
                n += 1
                model.again()
                await turn(rt, f"c{n}", model)
                sample = await rt.store.read(f"c{n}", after=3, before=7)
                return (model.at[-1] - model.at[0]) / size.durable

            async def commits() -> float:
                began = clock()
                for _ in range(size.durable):
                    await writer.commit(sample[:2])  # the reply and the start of the call
                    await writer.commit(sample[2:])  # the result
                return (clock() - began) / size.durable

            progress("filling the write-ahead logs")
            for _ in range(size.fill):
                await ours()
                await commits()
                await commits()  # it writes one page, our store two
            # Many short rounds: the disk's latency changes from one moment to the next.
            found = await alternate(size.rounds * 3, progress, ours=ours, commits=commits)
            writer.close()
    times, best = ratio(found["ours"], found["commits"])
    took, theirs = statistics.median(found["ours"]), statistics.median(found["commits"])
    shown = f"{times:.2f}x ({us(took)} / {us(theirs)})"
    return [Row("a durable step against two bare commits", "<= 2x", shown, times, 2, best)]


async def flat(size: Sizes, progress: Progress) -> list[Row]:
    far, width = size.far, 50 if size.far >= 1000 else 20
    early, late, near_bytes, far_bytes = [], [], 0, 0
    for n in range(max(3, size.rounds // 2)):
        progress(f"conversation {n + 1}: {far + width} steps")
        model, store = BenchModel(far + width), CountingStore()
        written: list[int] = []
        model.asked = lambda step, written=written, store=store: written.append(store.written)
        agent = Agent("bench", model=model, tools=[weather], max_steps=far + width + 1)
        gc.collect()
        async with Runtime(agent, store=store) as rt:
            await turn(rt, "c", model)
        took = [b - a for a, b in pairwise(model.at)]
        early.append(statistics.median(took[9 : 9 + width]))
        late.append(statistics.median(took[far - 1 : far - 1 + width]))
        sizes = [b - a for a, b in pairwise(written)]
        near_bytes, far_bytes = statistics.median(sizes[9 : 9 + width]), statistics.median(sizes[far - 1 :])
    times, best = ratio(late, early)
    shown = f"{times:.2f}x ({us(statistics.median(late))} / {us(statistics.median(early))})"
    grown = far_bytes / near_bytes
    bytes_shown = f"{grown:.3f}x ({far_bytes:,.0f} / {near_bytes:,.0f} bytes)"
    return [
        Row(f"step {far:,} against step 10: time", "<= 1.2x", shown, times, 1.2, best),
        Row(f"step {far:,} against step 10: bytes", "<= 1.2x", bytes_shown, grown, 1.2),
    ]


# --- concurrency ---


async def parallel(size: Sizes, progress: Progress) -> list[Row]:
    async def ours() -> float:
        model = BenchModel(5, calls=100)
        agent = Agent("bench", model=model, tools=[weather], max_steps=6)
        async with Runtime(agent, parallel=100) as rt:
            await turn(rt, "c", model)
        return min(b - a for a, b in pairwise(model.at)) / 100

    async def loop() -> float:
        took = []
        for _ in range(5):
            began = clock()
            await bare.parallel(100, ARGS_TEXT, plain_weather)
            took.append(clock() - began)
        return min(took) / 100

    found = await alternate(size.rounds, progress, ours=ours, loop=loop)
    times, best = ratio(found["ours"], found["loop"])
    took, theirs = statistics.median(found["ours"]), statistics.median(found["loop"])
    shown = f"{times:.2f}x ({us(took)} / {us(theirs)})"
    return [Row("a call among 100 at once against the bare loop", "<= 4x", shown, times, 4, best)]


async def together(size: Sizes, progress: Progress) -> list[Row]:
    progress("100 results at one moment")
    gate, entered = asyncio.Event(), 0

    @tool
    async def wait(city: str, days: int) -> str:
        """Wait for a signal."""
        nonlocal entered
        entered += 1
        await gate.wait()
        return "done"

    counts: list[int] = []
    with tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as directory:
        for n in range(min(size.rounds, 5)):
            gate, entered = asyncio.Event(), 0
            model = BenchModel(1, calls=100, tool="wait")
            agent = Agent("bench", model=model, tools=[wait], max_steps=3)
            store = SQLiteStore(f"{directory}/together{n}.db")
            seen: list[int] = []
            model.asked = lambda step, store=store, seen=seen: seen.append(store.commits)
            async with Runtime(agent, store=store, parallel=100) as rt:
                handle = await rt.send("c", "All at once")
                while entered < 100:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
                before = store.commits
                gate.set()
                await handle.final_result()
            counts.append(seen[1] - before)
    worst = max(counts)
    return [Row("100 results that arrive together: commits", "<= 2", f"{worst}", worst, 2)]


# --- recovery ---


async def resume(size: Sizes, progress: Progress) -> list[Row]:
    entered = 0.0

    @tool(approval="required")
    async def pay(amount: int) -> str:
        """Pay an invoice."""
        nonlocal entered
        entered = clock()
        return "paid"

    async def build(path: Path, messages: int) -> str:
        turns = messages // 2
        script: list[Any] = ["All is well, thank you for asking, and how are you?"] * turns
        model = ScriptedModel([*script, [ToolCall("pay", {"amount": 5})], "done"])
        store = SQLiteStore(path, synchronous="OFF")
        async with Runtime(Agent("bench", model=model, tools=[pay]), store=store) as rt:
            for _ in range(turns):
                await (await rt.send("c", "How are you today, all of you?")).final_result()
            await (await rt.send("c", "Pay them.")).result()
            return (await rt.pending())[0].call

    with tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as name:
        directory = Path(name)
        calls = {}
        for messages in (10, size.history):
            progress(f"a history of {messages:,} messages")
            calls[messages] = await build(directory / f"{messages}.db", messages)

        def side(messages: int) -> Timed:
            async def once() -> float:
                path = copy_store(directory / f"{messages}.db", directory)
                model = ScriptedModel(["done"])
                async with Runtime(Agent("bench", model=model, tools=[pay]), store=f"sqlite:///{path}") as rt:
                    began = clock()
                    await rt.resolve("c", calls[messages], Approve(), by="boss")
                    while entered < began:  # noqa: ASYNC110
                        await asyncio.sleep(0)
                    took = entered - began
                    await idle(rt, "c")
                return took

            return once

        found = await alternate(size.rounds, progress, short=side(10), long=side(size.history))
    short, long = statistics.median(found["short"]), statistics.median(found["long"])
    more = max((long - short) * 1e3, 0.001)
    best = max((min(found["long"]) - min(found["short"])) * 1e3, 0.001)
    shown = f"{more:.2f} ms ({long * 1e3:.1f} - {short * 1e3:.1f})"
    return [Row(f"resolve() to handler, {size.history:,} messages minus 10", "<= 10 ms", shown, more, 10, best)]


async def parking(size: Sizes, progress: Progress) -> list[Row]:
    few, many = size.parked
    with tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as name:
        directory = Path(name)
        bodies, events, entry = await parked.record_parked_conversation(directory)
        small, large = directory / "few.db", directory / "many.db"
        progress(f"parking {few:,} conversations")
        await parked.park(small, 0, few, bodies, entry)
        shutil.copy(small, large)
        progress(f"parking {many:,} conversations")
        await parked.park(large, few, many, bodies, entry)
        each = (large.stat().st_size - small.stat().st_size) / (many - few)
        weights: dict[str, list[int]] = {"few": [], "many": []}
        for n in range(1 if size is QUICK else 5):
            for which, path in (("few", small), ("many", large)):
                progress(f"weighing a process with {few if which == 'few' else many:,}, {n + 1}")
                weights[which].append(
                    int(run_python(parked.__file__, f"sqlite:///{copy_store(path, directory)}", "0")[0])
                )
    light, heavy = statistics.median(weights["few"]), statistics.median(weights["many"])
    more = max((heavy - light) / 1e6, 0.001)
    said = parked.text_size(events)
    beyond = (each - said) / 1e3
    stored = sum(map(len, bodies))
    return [
        Row(
            f"RSS with {many:,} parked minus with {few:,}",
            "< 2 MB",
            f"{more:.2f} MB ({heavy / 1e6:.1f} - {light / 1e6:.1f})",
            more,
            2,
        ),
        Row(
            "disk for a parked conversation beyond its messages",
            "< 1.5 KB",
            f"{beyond:.2f} KB ({each:,.0f} bytes - {said} said; {stored} are its events)",
            beyond,
            1.5,
        ),
    ]


# --- viewers and import time ---


async def streaming(size: Sizes, progress: Progress) -> list[Row]:
    n, text = size.chunks, "word "

    class Talks:
        name = "talks"

        async def stream(self, request: Request) -> AsyncIterator[StreamPart]:
            async for chunk in bare.chunks(n, text):
                yield TextPart(chunk)
            yield FinishPart()

    async def ours() -> float:
        async with Runtime(Agent("bench", model=Talks())) as rt:
            await rt.open("c")
            first = last = 0.0
            seen = 0

            async def read() -> None:
                nonlocal first, last, seen
                async for event in rt.events("c"):
                    if isinstance(event, TextDelta):
                        last = clock()
                        first = first or last
                        seen += 1
                        if seen == n:
                            return

            reader = asyncio.create_task(read())
            await asyncio.sleep(0.01)
            await rt.send("c", "Talk")
            await reader
            await idle(rt, "c")
        return (last - first) / (n - 1)

    async def generator() -> float:
        first = last = 0.0
        async for _ in bare.chunks(n, text):
            last = clock()
            first = first or last
        return (last - first) / (n - 1)

    found = await alternate(size.rounds, progress, ours=ours, generator=generator)
    times, best = ratio(found["ours"], found["generator"])
    took, theirs = statistics.median(found["ours"]), statistics.median(found["generator"])
    shown = f"{times:.2f}x ({us(took)} / {us(theirs)})"
    return [Row("a streamed chunk to one reader against a generator", "<= 3x", shown, times, 3, best)]


HEAVY = ("openai", "anthropic", "google", "httpx", "aiohttp", "requests", "fastapi", "starlette", "uvicorn", "django",
         "psycopg", "asyncpg", "sqlalchemy", "pydantic", "opentelemetry", "numpy", "rich", "click",
         "prompt_toolkit")  # fmt: skip
IMPORT = f"""
import sys, time
began = time.perf_counter()
import holdfast
took = time.perf_counter() - began
print(took, ",".join(name for name in {HEAVY!r} if name in sys.modules) or "-")
"""


async def importing(size: Sizes, progress: Progress) -> list[Row]:
    took: list[float] = []
    heavy = "-"
    for n in range(size.imports + 1):
        progress(f"interpreter {n + 1} of {size.imports + 1}")
        seconds, heavy = run_python("-c", IMPORT)
        took.append(float(seconds))
    median = statistics.median(took[1:])  # the first run may have compiled bytecode
    shown = f"{median:.3f} s, {'nothing heavy loaded' if heavy == '-' else f'LOADED: {heavy}'}"
    return [Row("import holdfast", "< 0.3 s", shown, median if heavy == "-" else 99.0, 0.3, min(took))]


ALL: tuple[Callable[[Sizes, Progress], Awaitable[list[Row]]], ...] = (
    step,
    durable,
    flat,
    parallel,
    together,
    resume,
    parking,
    streaming,
    importing,
)
