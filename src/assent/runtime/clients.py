"""Clients: pages and other programs that run client tools. Present while they beat, and one runs a call at a time.

Presence and leases are rows of the store, not events: losing them costs at most a double run in a page, since
the first valid resolution wins.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from assent.core.decisions import Accepted, ClientResult, Failed, Pending, Principal
from assent.core.inputs import ClientGone
from assent.core.live import ToolProgress
from assent.core.schema import check_plain
from assent.runtime.intake import new_id
from assent.runtime.record import CLIENT_GRACE
from assent.stores.base import ClientRow

if TYPE_CHECKING:
    from assent.runtime.home import Home

log = logging.getLogger("assent")

BEAT = 30.0
"""Seconds between a client's heartbeats."""
PRESENT = 2.5 * BEAT
"""Seconds that a client counts as present after its last one: two may be lost."""
LEASE = 30.0
"""Seconds that a client may run a call before another one may take it over."""


class Client:
    """An attached client. As an async context manager it detaches by itself."""

    def __init__(self, clients: Clients, conversation: str, name: str, tools: tuple[str, ...], by: Principal):
        self._clients = clients
        self.conversation, self.id, self.tools, self.by = conversation, name, tools, by

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.detach()

    def runs(self, tool: str) -> bool:
        """Whether it runs this tool."""
        return not self.tools or tool in self.tools

    async def beat(self) -> None:
        """Still there."""
        await self._clients.present(self)

    async def lease(self, call: str) -> bool:
        """May this client run the call? One holds the lease at a time; asking again renews it."""
        home = self._clients.home
        found = (await home.loaded(self.conversation)).call(call)
        if found is None or found.phase != "awaiting_client" or not self.runs(found.made.tool):
            return False
        now = home.now()
        return await home.store.lease_call(self.conversation, call, self.id, now, now + LEASE)

    async def progress(self, call: str, payload: Any) -> None:
        """Tell viewers how far it is. After the call's end it is dropped."""
        await self._clients.progress(self.conversation, call, payload)

    async def result(self, call: str, value: Any) -> Accepted:
        """What the call returned: validated, and durable when this returns."""
        return await self._clients.home.submit(self.conversation, {call: ClientResult(value)}, self.by)

    async def failed(self, call: str, kind: str, message: str) -> Accepted:
        """The call failed: the model sees this error."""
        return await self._clients.home.submit(self.conversation, {call: Failed(kind, message)}, self.by)

    async def detach(self) -> None:
        """Leave. Calls that wait for a client have a short grace for another one to come."""
        await self._clients.leave(self)


class Clients:
    def __init__(self, home: Home):
        self.home = home
        self._kept: dict[tuple[str, str], tuple[Client, asyncio.Task[None]]] = {}
        """Those that count as present for as long as this process lives."""

    async def attach(
        self, conversation: str, tools: tuple[str, ...], name: str | None, by: Principal, *, keep: bool
    ) -> Client:
        client = Client(self, conversation, name or new_id(), tools, by)
        await self.present(client)
        self._stop(client)  # whoever was here under this name
        if keep:
            task = asyncio.get_running_loop().create_task(self._beating(client), name=f"assent:client:{client.id}")
            self._kept[conversation, client.id] = client, task
        return client

    async def _beating(self, client: Client) -> None:
        while True:
            await asyncio.sleep(BEAT)
            try:
                await self.present(client)
            except Exception as problem:
                log.error("client %s: its heartbeat was not recorded: %s", client.id, problem)

    def tasks(self) -> list[asyncio.Task[None]]:
        return [task for _, task in self._kept.values()]

    async def present(self, client: Client) -> None:
        await self._put(client, self.home.now() + PRESENT)

    async def leave(self, client: Client) -> None:
        self._stop(client)
        if not self.home.closing:
            await self._put(client, self.home.now())
            await self._look_again(client)

    async def close(self) -> None:
        """The process goes away, and with it the clients that live in it."""
        for client, _ in list(self._kept.values()):
            try:
                await self.leave(client)
            except Exception as problem:
                log.error("client %s: its leaving was not recorded: %s", client.id, problem)

    def _stop(self, client: Client) -> None:
        _, task = self._kept.pop((client.conversation, client.id), (None, None))
        if task is not None:
            task.cancel()

    async def _put(self, client: Client, until: float) -> None:
        row = ClientRow(conversation=client.conversation, client=client.id, tools=client.tools, until=until)
        await self.home.store.put_client(row)

    async def _look_again(self, client: Client) -> None:
        """The last client may have left: what it ran is free, and looked at again when the grace is over."""
        conversation, now = client.conversation, self.home.now()
        soon = now + CLIENT_GRACE
        for entry in await self.home.pending(conversation):
            if entry.kind == "client_exec":  # nothing else has a client to lose
                await self.home.store.lease_call(conversation, entry.call, client.id, now, now)
                await self.home.store.postpone(conversation, entry.call, min(soon, entry.deadline))
        self.home.recheck()

    async def look(self, entry: Pending) -> None:
        """A client call has waited for its grace, or for a client's next heartbeat."""
        home = self.home
        able = [
            row.until
            for row in await home.store.clients(entry.conversation)
            if not row.tools or entry.tool in row.tools
        ]
        ends = max([entry.since, *able]) + CLIENT_GRACE
        if home.now() >= ends:
            await home.tell(entry.conversation, ClientGone(call=entry.call))
        else:
            await home.store.postpone(entry.conversation, entry.call, min(ends, entry.deadline))

    async def progress(self, conversation: str, call: str, payload: Any) -> None:
        check_plain(payload, "progress")
        conv = await self.home.loaded(conversation)
        found = conv.call(call)
        if found is None or found.phase != "awaiting_client":
            return
        n = conv.progress.get(call, (0, None))[0] + 1
        conv.progress[call] = (n, payload)
        self.home.live(conv, ToolProgress(conversation=conversation, call_id=call, n=n, payload=payload))
