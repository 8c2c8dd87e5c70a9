"""Real servers on loopback that channels send to: an HTTP receiver with faults, and a fake of Slack's API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, Literal
from urllib.parse import parse_qs

SECRET = "whsec_" + "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OTHER_SECRET = "whsec_" + "C2FVsBQIhrscChlQIMV+b5sSYspob7oD"

Answer = int | tuple[int, dict[str, str]] | Literal["hang", "die"]
"""A status, a status with headers, or a fault: never answer; close the connection without an answer."""


class Received:
    """One request."""

    def __init__(self, path: str, headers: dict[str, str], body: bytes):
        self.path, self.headers, self.body = path, headers, body

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class HTTPReceiver:
    """An HTTP server on loopback that records every request. ``answer`` maps (number from 0, request) to the answer."""

    def __init__(self, answer: Callable[[int, Received], Answer | bytes] = lambda n, _: 200):
        self.answer = answer
        self.requests: list[Received] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> HTTPReceiver:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._handle(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:]) if name}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        request = Received(head[0].split()[1], headers, body)
        self.requests.append(request)
        answer = self.answer(len(self.requests) - 1, request)
        if answer == "hang":
            await asyncio.Event().wait()
        if answer == "die":
            writer.transport.abort()
            return
        more: dict[str, str] = {}
        content = answer if isinstance(answer, bytes) else b""
        if isinstance(answer, tuple):
            status, more = answer
        else:
            status = answer if isinstance(answer, int) else 200
        lines = [f"HTTP/1.1 {status} x", f"content-length: {len(content)}", "connection: close"]
        lines += [f"{name}: {value}" for name, value in more.items()]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + content)
        await writer.drain()


class SlackAPI(HTTPReceiver):
    """A fake of Slack's web API: answers each method, and records its arguments in ``calls``."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.refuse: dict[str, Answer | bytes | Callable[[dict[str, Any]], Answer | bytes | None]] = {}
        """Method -> its answer from now on, or a function of its arguments; None: the usual answer."""
        self.tokens: set[str] = set()

    def _answer(self, n: int, request: Received) -> Answer | bytes:
        method = request.path.rpartition("/")[2]
        self.tokens.add(request.headers.get("authorization", ""))
        if request.headers.get("content-type", "").startswith("application/json"):
            arguments = request.json
        else:
            arguments = {name: values[0] for name, values in parse_qs(request.body.decode()).items()}
        for name in ("blocks", "view"):
            if isinstance(arguments.get(name), str):
                arguments[name] = json.loads(arguments[name])
        self.calls.append((method, arguments))
        refusal = self.refuse.get(method)
        answer = refusal(arguments) if callable(refusal) else refusal
        if answer is not None:
            return answer
        ts = arguments.get("ts", f"1700000000.{len(self.calls):06}")
        return json.dumps({"ok": True, "channel": arguments.get("channel"), "ts": ts}).encode()

    def of(self, method: str) -> list[dict[str, Any]]:
        return [arguments for name, arguments in self.calls if name == method]
