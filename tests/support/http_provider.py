"""A loopback HTTP server in a thread of its own: it records requests, and a function writes each response."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ReceivedRequest:
    """A request, as the server received it."""

    method: str
    path: str
    headers: dict[str, str]
    text: str
    at: float = field(default_factory=time.monotonic)
    gone: float | None = None
    """When the client closed the connection before the response was complete."""

    @property
    def body(self) -> Any:
        return json.loads(self.text) if self.text else None


class Responder:
    """The response to one request."""

    def __init__(self, incoming: ReceivedRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.incoming, self._reader, self._writer = incoming, reader, writer

    async def json(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        kind = {"content-type": "application/json", "content-length": str(len(data)), **(headers or {})}
        await self.head(status, kind)
        self._writer.write(data)
        await self._writer.drain()

    async def head(self, status: int, headers: dict[str, str]) -> None:
        lines = [f"HTTP/1.1 {status} X", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        self._writer.write("\r\n".join(lines).encode())
        await self._writer.drain()

    async def stream(self, kind: str = "text/event-stream") -> None:
        await self.head(200, {"content-type": kind, "transfer-encoding": "chunked"})

    async def chunk(self, text: str) -> None:
        data = text.encode()
        self._writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await self._writer.drain()

    async def end(self) -> None:
        self._writer.write(b"0\r\n\r\n")
        await self._writer.drain()

    def cut(self) -> None:
        """Reset the connection in the middle of the response."""
        self._writer.transport.abort()
        raise ConnectionAbortedError

    async def hang(self) -> None:
        """Send nothing more until the client closes the connection."""
        try:
            await self._reader.read(1)
        finally:
            self.incoming.gone = time.monotonic()


class HTTPProvider:
    """``with HTTPProvider(answer) as server``: it listens at ``server.url`` and records ``server.requests``."""

    def __init__(self, answer: Callable[[ReceivedRequest, Responder], Awaitable[None]]):
        self._answer = answer
        self.requests: list[ReceivedRequest] = []
        self.connections = 0
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def start(self) -> HTTPProvider:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(60)
        assert not self._thread.is_alive()

    __enter__ = start

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        tasks: set[asyncio.Task[None]] = set()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task
            tasks.add(task)
            self.connections += 1
            try:
                while await self._one(reader, writer):
                    pass
            except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                pass
            finally:
                tasks.discard(task)
                writer.close()

        server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=2**24)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._over.wait()
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        line = await reader.readline()
        if not line:
            return False
        method, path, _ = line.decode().split(" ", 2)
        headers: dict[str, str] = {}
        while (line := await reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode().partition(":")
            headers[name.strip().lower()] = value.strip()
        text = (await reader.readexactly(int(headers.get("content-length", 0)))).decode()
        incoming = ReceivedRequest(method, path, headers, text)
        self.requests.append(incoming)
        await self._answer(incoming, Responder(incoming, reader, writer))
        return True
