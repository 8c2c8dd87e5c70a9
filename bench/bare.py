"""Baselines: a tool call without a runtime, a commit without a store, a stream without viewers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from queue import SimpleQueue
from typing import Any

import apsw


async def call(text: str, fn: Callable[..., Awaitable[Any]]) -> str:
    """Decode the arguments, await the function, encode the result."""
    return json.dumps(await fn(**json.loads(text)))


async def parallel(n: int, text: str, fn: Callable[..., Awaitable[Any]]) -> None:
    await asyncio.gather(*(call(text, fn) for _ in range(n)))


async def chunks(n: int, text: str) -> AsyncIterator[str]:
    """Yield n chunks, giving control to the event loop before each, as a provider's stream does."""
    for _ in range(n):
        await asyncio.sleep(0)
        yield text


class Writer:
    """A thread with one connection that commits lists of rows durably and wakes the event loop after each."""

    def __init__(self, path: str):
        self._path = path
        self._jobs: SimpleQueue[tuple[list[bytes], asyncio.Future[None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    async def commit(self, rows: list[bytes]) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._jobs.put((rows, done))
        await done

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _serve(self) -> None:
        db = apsw.Connection(self._path)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        db.execute("CREATE TABLE IF NOT EXISTS events (id INTEGER PRIMARY KEY, body BLOB NOT NULL)")
        while (job := self._jobs.get()) is not None:
            rows, done = job
            db.execute("BEGIN IMMEDIATE")
            for body in rows:
                db.execute("INSERT INTO events (body) VALUES (?)", (body,))
            db.execute("COMMIT")
            done.get_loop().call_soon_threadsafe(done.set_result, None)
        db.close()
