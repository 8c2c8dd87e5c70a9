"""A viewer that watches a conversation over HTTP, on connections that are cut at any byte, and joins the events."""

import asyncio
from contextlib import suppress

from on_postgres import TOKEN

SILENCE = 2.0
"""Seconds without data after which a viewer gives up a connection."""


class Viewer:
    """A viewer. ``got``: the events of the log that it received, as (number, bytes), in that order."""

    def __init__(self, conversation):
        self.conversation = conversation
        self.got = []

    @property
    def last(self):
        return self.got[-1][0] if self.got else 0

    async def watch(self, port, length):
        """Watch over one connection, for at most ``length`` bytes; return whether it was cut there."""
        with suppress(OSError):
            reader, out = await asyncio.open_connection("127.0.0.1", port)
            try:
                out.write(
                    f"GET /api/conversations/{self.conversation}/events HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                    f"Authorization: Bearer {TOKEN}\r\nLast-Event-ID: {self.last}\r\n\r\n".encode()
                )
                head = await self._within(reader.readuntil(b"\r\n\r\n"))
                if not head or not head.startswith(b"HTTP/1.1 200"):
                    return False
                return await self._follow(reader, length)
            finally:
                out.transport.abort()
        return False

    async def _follow(self, reader, length):
        chunks, text = _Chunks(), b""
        while length > 0 and (data := await self._within(reader.read(min(length, 65536)))):
            length -= len(data)
            *frames, text = (text + chunks.decode(data)).split(b"\n\n")
            for frame in frames:
                fields = dict(line.split(b": ", 1) for line in frame.split(b"\n") if b": " in line)
                if b"id" in fields:
                    self.got.append((int(fields[b"id"]), fields[b"data"]))
        return length <= 0

    async def _within(self, coroutine):
        try:
            async with asyncio.timeout(SILENCE):
                return await coroutine
        except (TimeoutError, asyncio.IncompleteReadError):
            return b""


class _Chunks:
    """A decoder for HTTP chunks: each is its size on a line of its own, then so many bytes and a line end."""

    def __init__(self):
        self._data, self._left = b"", 0

    def decode(self, data):
        self._data += data
        text = b""
        while self._data:
            if self._left > 2:
                piece = self._data[: self._left - 2]
                text += piece
                self._data, self._left = self._data[len(piece) :], self._left - len(piece)
            elif self._left:
                piece = self._data[: self._left]
                self._data, self._left = self._data[len(piece) :], self._left - len(piece)
            else:
                size, end, rest = self._data.partition(b"\r\n")
                if not end:
                    break
                self._data, self._left = rest, int(size, 16) + 2
        return text
