"""The server on loopback against bare Starlette: memory per reader, and decisions per second.

``python server.py bare|ours|running FILE`` serves until its standard input ends, prints its port, and answers each line
of input with its resident memory in bytes. The benchmark starts it as a separate process. ``ours`` has no agent and
only records decisions, as ``serve --no-run`` does; ``running`` also runs the approved calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import measures
import msgspec
import parked
from measures import Progress, Row, Sizes, clock

from holdfast import Runtime
from holdfast.errors import install_command

T = TypeVar("T")
TOKEN = "the-token-of-the-bench"
CLIENTS = 32
AWAKE = 4 * CLIENTS
"""Requests before a server is measured."""
_EVENTS = (
    b"GET /api/conversations/conversation-0/events HTTP/1.1\r\nhost: localhost\r\n"
    b"authorization: Bearer %s\r\n\r\n" % TOKEN.encode()
)
READERS = {True: 200, False: 5_000}
ROUND = {True: (64, 2), False: (320, 30)}
"""Decisions in a round, and how many rounds."""


def missing() -> str | None:
    """Return the reason for which these measures cannot run here, or None."""
    from importlib.util import find_spec

    lacking = [name for name in ("starlette", "uvicorn", "httptools") if find_spec(name) is None]
    return f"{', '.join(lacking)} not installed: {install_command('server')}" if lacking else None


# --- the measured process ---


def bare() -> Any:
    """Return the baseline application: a POST that reads and writes JSON, and a stream that stays open."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    async def post(request: Request) -> Response:
        msgspec.json.decode(await request.body())
        return Response(b'{"status":"accepted","seq":7}', media_type="application/json")

    async def events(request: Request) -> StreamingResponse:
        async def stream() -> AsyncIterator[bytes]:
            yield b"retry: 1000\n\n"
            while True:
                await asyncio.sleep(15)
                yield b": \n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    path = "/api/conversations/{conversation}"
    return Starlette(
        routes=[Route(f"{path}/calls/{{call}}/resolve", post, methods=["POST"]), Route(f"{path}/events", events)]
    )


async def serving(which: str, path: str) -> None:
    from holdfast.server import Limits, TokenAuth, app
    from holdfast.server.process import open_socket, serve

    agents = [parked.agent()] if which == "running" else []
    limits = Limits(principal_streams=10_000)
    served = app(Runtime(*agents, store=f"sqlite:///{path}"), TokenAuth(TOKEN), limits=limits)
    listening = open_socket("127.0.0.1", 0)
    loop = asyncio.get_running_loop()

    def ready(stop: Any) -> None:
        def answer() -> None:
            for _ in sys.stdin:
                print(parked.resident(), flush=True)
            loop.call_soon_threadsafe(stop)
            loop.call_soon_threadsafe(stop)

        threading.Thread(target=answer, daemon=True).start()
        print(listening.getsockname()[1], flush=True)

    await serve(served, listening, ready, bare() if which == "bare" else None)


class Server:
    def __init__(self, which: str, path: Path):
        self._process = subprocess.Popen(
            [sys.executable, __file__, which, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.port = int(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def resident(self) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return int(self._line())

    def end(self) -> None:
        self._process.communicate()


@contextlib.contextmanager
def server(which: str, path: Path) -> Iterator[Server]:
    running = Server(which, path)
    try:
        yield running
    finally:
        running.end()


# --- readers ---


async def readers(size: Sizes, progress: Progress) -> list[Row]:
    quick = size is measures.QUICK
    count = READERS[quick]
    _raise_file_limit(count)
    weights: dict[str, list[float]] = {"bare": [], "ours": []}
    with tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as name:
        directory = Path(name)
        _, path = await park_conversations(directory, 10)
        for n in range(1 if quick else 3):
            for which, found in weights.items():
                progress(f"{count:,} readers of {which}, {n + 1}")
                with server(which, path) as running:
                    found.append(await _memory_of_readers(running, count) / count)
    each, least = statistics.median(weights["ours"]), statistics.median(weights["bare"])
    value, best = measures.ratio(weights["ours"], weights["bare"])
    said = f"{value:.2f}x ({each / 1e3:.1f} and {least / 1e3:.1f} KB each)"
    return [Row(f"memory of {count:,} SSE readers to bare Starlette's", "<= 1.5x", said, value, 1.5, best)]


async def _memory_of_readers(running: Server, count: int) -> float:
    """Return the memory that ``count`` readers of one conversation add, each on its own connection."""
    warm = [await _open_reader(running.port) for _ in range(20)]
    before = running.resident()
    held = [await _open_reader(running.port) for _ in range(count)]
    after = running.resident()
    for _, writer in (*warm, *held):
        writer.close()
    await asyncio.sleep(0)
    return after - before


async def _open_reader(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_EVENTS)
    await reader.readuntil(b"retry: 1000\n\n")
    return reader, writer


def _raise_file_limit(count: int) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2 * count + 500)), hard))


async def stalled(size: Sizes, progress: Progress) -> list[Row]:
    """Measure readers that never read, on a log that is far larger than the buffer for each."""
    count = 50 if size is measures.QUICK else 1_000
    _raise_file_limit(count)
    with tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as name:
        path = Path(name) / "long.db"
        async with Runtime(parked.agent(), store=f"sqlite:///{path}") as rt:
            await (await rt.send("conversation-0", "x" * 20_000)).result()
            for _ in range(300):
                await rt.send("conversation-0", "x" * 20_000, when_busy="queue")
        progress(f"{count:,} readers that never read")
        with server("ours", path) as running:
            before = running.resident()
            held = [_open_silent_reader(running.port) for _ in range(count)]
            after = 0
            while (now := running.resident()) > after:
                after = now
                await asyncio.sleep(1)
            for each in held:
                each.close()
    each_one = (after - before) / count / 1e3
    said = f"{each_one:.0f} KB each, of a log of 6,000 KB"
    return [Row(f"memory of {count:,} readers that never read", "<= 200 KB each", said, each_one, 200)]


def _open_silent_reader(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", port))
    sock.sendall(_EVENTS)
    return sock


# --- decisions ---


async def resolving(size: Sizes, progress: Progress) -> list[Row]:
    """Measure decisions against bare POSTs: for conversations that the server has in memory, and for cold ones.

    The last row is a server that also runs the agent: a decision counts when its tool has run and its turn has ended.

    All servers stay up, and the first round of each is not counted: a new process is slow at first, and so are commits
    while the write-ahead log still grows. A server that was idle during the last measurement is slow, too: each gets
    some requests before it is measured.
    """
    count, rounds = ROUND[size is measures.QUICK]
    times: list[float] = []
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=".", prefix=".bench-")))
        entries, path = await park_conversations(directory, 3 * count * (rounds + 1))
        paths = {which: Path(shutil.copy(path, directory / f"{which}.db")) for which in ("bare", "ours", "running")}
        ports = {which: stack.enter_context(server(which, paths[which])).port for which in paths}
        left = {which: list(entries) for which in paths}
        watching = await stack.enter_async_context(Runtime(store=f"sqlite:///{paths['running']}"))
        sides = {
            "bare": ("bare", _decide_concurrently),
            "known": ("ours", _decide_loaded),
            "in batches": ("ours", _decide_in_batches),
            "not read yet": ("ours", _decide_concurrently),
            "run": ("running", functools.partial(_decide_and_wait, watching)),
        }
        rates: dict[str, list[float]] = {side: [] for side in sides}
        for n in range(rounds + 1):
            for side in measures.round_order(sides, n):
                which, decide = sides[side]
                progress(f"{count} decisions by {CLIENTS} clients, {side}, round {n} of {rounds}")
                some = [left[which].pop() for _ in range(count)]
                await _run_clients(ports[which], AWAKE * [some[0]], Client.warm_up)
                seconds, each = await decide(ports[which], some)
                if n:
                    rates[side].append(seconds / count)
                    times += each if side == "not read yet" else ()
    late = statistics.quantiles(times, n=100)[98] * 1e3
    what = f"durable decisions over HTTP to bare POSTs, {CLIENTS} clients"
    return [
        _compare_rates(what, rates["known"], rates["bare"]),
        _compare_rates("... of what it has yet to read, 32 in a request", rates["in batches"], rates["bare"]),
        _compare_rates("... of what it has yet to read, one in a request", rates["not read yet"], rates["bare"]),
        Row(f"99th percentile of these, {CLIENTS} clients", "< 50 ms", f"{late:.1f} ms", late, 50),
        _compare_rates("decided, run and answered by the same process", rates["run"], rates["bare"]),
    ]


def _compare_rates(what: str, ours: list[float], bare: list[float]) -> Row:
    value, best = measures.ratio(ours, bare)
    fast, least = 1 / statistics.median(ours), 1 / statistics.median(bare)
    said = f"{value:.2f}x ({1 / value:.0%}; {fast:,.0f} and {least:,.0f} a second)"
    return Row(what, "", said, value, None, best)


Entry = tuple[str, str, str]
"""The ids of a conversation and of its pending call, and the digest to approve."""


class Client:
    """One connection, one request at a time."""

    @classmethod
    async def connect(cls, port: int) -> Client:
        client = cls()
        client._reader, client._writer = await asyncio.open_connection("127.0.0.1", port)
        return client

    async def warm_up(self, entry: Entry) -> None:
        """Send a request to an unknown path."""
        await self._request("GET", "/api/nothing", b"")

    async def look(self, entry: Entry) -> None:
        answer = await self._request("GET", f"/api/conversations/{entry[0]}", b"")
        assert entry[2].encode() in answer, answer

    async def decide(self, entry: Entry) -> float:
        """Approve the call and return the seconds that it took."""
        conversation, call, digest = entry
        body = msgspec.json.encode({"decision": {"type": "approve", "digest": digest}})
        began = clock()
        answer = await self._request("POST", f"/api/conversations/{conversation}/calls/{call}/resolve", body)
        assert b"accepted" in answer, answer
        return clock() - began

    async def decide_all(self, entries: list[Entry]) -> float:
        """Approve all of these calls with one request and return the seconds that it took."""
        decisions = [
            {"conversation": conversation, "call": call, "decision": {"type": "approve", "digest": digest}}
            for conversation, call, digest in entries
        ]
        body = msgspec.json.encode({"decisions": decisions})
        began = clock()
        answer = await self._request("POST", "/api/pending/resolve", body)
        assert answer.count(b"accepted") == len(entries), answer
        return clock() - began

    async def _request(self, method: str, path: str, body: bytes) -> bytes:
        self._writer.write(
            f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {TOKEN}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        head = await self._reader.readuntil(b"\r\n\r\n")
        return await self._reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))

    def close(self) -> None:
        self._writer.close()


Decided = tuple[float, list[float]]
"""Seconds for all decisions, and for each."""


async def _decide_concurrently(port: int, entries: list[Entry]) -> Decided:
    """Decide each entry once, from all clients."""
    began = clock()
    times = await _run_clients(port, entries, Client.decide)
    return clock() - began, times


async def _decide_loaded(port: int, entries: list[Entry]) -> Decided:
    """Do the same with conversations in memory: each is requested first, which is not measured."""
    await _run_clients(port, entries, Client.look)
    return await _decide_concurrently(port, entries)


async def _decide_and_wait(watching: Runtime, port: int, entries: list[Entry]) -> Decided:
    """Decide each entry once and wait until all turns have ended."""
    began = clock()
    times = await _run_clients(port, entries, Client.decide)
    for conversation, _, _ in entries:
        await measures.idle(watching, conversation)
    return clock() - began, times


async def _run_clients(port: int, entries: list[Entry], work: Callable[[Client, Entry], Awaitable[T]]) -> list[T]:
    """Share the entries among the clients, each of which sends one request at a time."""
    left, done = list(entries), list[T]()

    async def client() -> None:
        client = await Client.connect(port)
        while left:
            done.append(await work(client, left.pop()))
        client.close()

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return done


async def _decide_in_batches(port: int, entries: list[Entry]) -> Decided:
    """Decide each entry once, from one client, in batches of ``CLIENTS`` entries."""
    client = await Client.connect(port)
    times = [await client.decide_all(entries[start : start + CLIENTS]) for start in range(0, len(entries), CLIENTS)]
    client.close()
    return sum(times), times


async def park_conversations(directory: Path, count: int) -> tuple[list[Entry], Path]:
    """Create a store with ``count`` conversations that wait for an approval; return the pending calls and its path."""
    bodies, _, entry = await parked.record_parked_conversation(directory)
    path = directory / "parked.db"
    await parked.park(path, 0, count, bodies, entry)
    async with Runtime(store=f"sqlite:///{path}") as rt:
        found = [(each.conversation, each.call, each.digest) for each in await rt.pending()]
    return found, path


ALL = (readers, stalled, resolving)

if __name__ == "__main__":
    asyncio.run(serving(sys.argv[1], sys.argv[2]))
