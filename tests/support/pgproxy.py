"""A TCP proxy in front of PostgreSQL that loses data on purpose.

It reads the client's side of the protocol, so it can wait for a certain statement.

    async with Proxy(port) as proxy:
        proxy.port                                   # connect there
        struck = proxy.strike("INSERT INTO events", "lose")
        await struck                                 # the query of the statement that was hit
        with proxy.silent(): ...                     # nothing is forwarded, connections stay open
        with proxy.away(): ...                       # all connections are reset, new ones are refused
        proxy.ignored = lambda number: number == 1   # this connection is accepted and never gets a reply
        proxy.delay = lambda number: 0.5             # seconds before this connection is served

What can happen to a statement: ``lose`` its reply (it is executed and committed, then the connection breaks), ``hush``
(it is executed, and the connection stays, but nothing comes back), ``cut`` (it never reaches the server),
``keep`` (it reaches the server only when ``proxy.deliver()`` is called; until then the connection is silent).
"""

import asyncio
from contextlib import contextmanager, suppress

SSL_REQUEST = 80877103
READY = b"Z\x00\x00\x00\x05I"


class Proxy:
    def __init__(self, port):
        self._target = port
        self._links = set()
        self._strikes = []
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._open = True
        self._kept = []
        self.accepted = 0
        self.ignored = lambda number: False
        self.delay = lambda number: 0.0
        self._unanswered = set()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self._server.close()
        self._flowing.set()
        for link in list(self._links):
            link.cut()
        for writer in self._unanswered:
            writer.transport.abort()
        while self._links or self._unanswered:
            await asyncio.sleep(0.001)
        await self._server.wait_closed()

    def strike(self, marker, how):
        """Do this to the next statement that has the marker in its text; return a future of its query."""
        struck = asyncio.get_running_loop().create_future()
        self._strikes.append((marker, how, struck))
        return struck

    async def deliver(self):
        """Send the data that was held back to the server, if it still accepts it."""
        for link, data in self._kept:
            with suppress(OSError):
                link.to_server.write(data)
                await link.to_server.drain()
        self._kept.clear()

    @contextmanager
    def silent(self):
        self._flowing.clear()
        yield
        self._flowing.set()

    @contextmanager
    def away(self):
        self._open = False
        self.cut()
        yield
        self._open = True

    def cut(self):
        for link in list(self._links):
            link.cut()

    async def _accepted(self, reader, writer):
        self.accepted += 1
        number = self.accepted
        self._unanswered.add(writer)
        try:
            if self.ignored(number):
                with suppress(OSError):
                    while await reader.read(1 << 16):  # until the client gives up
                        pass
                writer.transport.abort()
                return
            await asyncio.sleep(self.delay(number))
        finally:
            self._unanswered.discard(writer)
        await self._flowing.wait()
        if not self._open:
            writer.transport.abort()
            return
        link = _Link(self, reader, writer)
        self._links.add(link)
        try:
            await link.serve(self._target)
        finally:
            self._links.discard(link)

    def struck(self, query):
        for strike in self._strikes:
            marker, how, struck = strike
            if marker in query:
                self._strikes.remove(strike)
                struck.set_result(query)
                return how
        return None


class _Link:
    def __init__(self, proxy, reader, writer):
        self.proxy = proxy
        self.client, self.to_client = reader, writer
        self.statements = {}
        self.mute = self.cut_when_ready = self.keeping = False
        self._tail = b""

    async def serve(self, port):
        try:
            self.server, self.to_server = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            self.to_client.transport.abort()
            return
        try:
            there = asyncio.ensure_future(self._there())
            back = asyncio.ensure_future(self._back())
            await asyncio.wait({there, back}, return_when=asyncio.FIRST_COMPLETED)
            if self.keeping:  # the client has given up; the server does not know yet
                await asyncio.wait({back})
            for task in (there, back):
                task.cancel()
            await asyncio.gather(there, back, return_exceptions=True)
        finally:
            self.cut()

    def cut(self):
        self.to_client.transport.abort()
        if hasattr(self, "to_server"):
            self.to_server.transport.abort()

    async def _there(self):
        started = False
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                kind = await self.client.readexactly(1) if started else b""
                size = await self.client.readexactly(4)
                body = await self.client.readexactly(int.from_bytes(size, "big") - 4)
                if not started:
                    started = int.from_bytes(body[:4], "big") != SSL_REQUEST
                await self.proxy._flowing.wait()
                if not await self._passed(kind, kind + size + body, body):
                    return

    async def _passed(self, kind, data, body):
        if self.keeping:
            self.proxy._kept.append((self, data))
            return True
        if kind == b"P":
            name, query, _ = body.split(b"\0", 2)
            self.statements[name] = query.decode()
        elif kind == b"B":
            name = body.split(b"\0", 2)[1]
            match self.proxy.struck(self.statements.get(name, "")):
                case "lose":
                    self.mute = self.cut_when_ready = True
                case "hush":
                    self.mute = True
                case "cut":
                    return False
                case "keep":
                    self.mute = self.keeping = True
                    self.proxy._kept.append((self, data))
                    return True
        self.to_server.write(data)
        await self.to_server.drain()
        return True

    async def _back(self):
        with suppress(OSError):
            while data := await self.server.read(1 << 16):
                await self.proxy._flowing.wait()
                if self.mute:
                    self._tail = (self._tail + data)[-len(READY) :]
                    if self.cut_when_ready and self._tail == READY:
                        return
                else:
                    self.to_client.write(data)
                    await self.to_client.drain()
