"""Clients: pages and other programs that run client tools.

A client is present as long as it sends heartbeats, and one client at a time runs a call. Presence and call leases are
rows of the store, not events: losing them costs at most a second run of a call in another page, since the first valid
resolution wins.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from typing import Any, Protocol

from holdfast.core.decisions import Accepted, ClientResult, Decision, Failed, Pending, Principal
from holdfast.core.inputs import ClientGone, Input
from holdfast.core.live import AnyLive, ToolProgress
from holdfast.core.schema.validation import check_plain
from holdfast.runtime.arguments import new_id
from holdfast.runtime.commit import CLIENT_GRACE
from holdfast.runtime.live import LiveSource
from holdfast.runtime.services import RunContext
from holdfast.stores.base import ClientRow, LogStore

log = logging.getLogger("holdfast")

HEARTBEAT_SECONDS = 30.0
"""Seconds between a client's heartbeats."""
PRESENCE_SECONDS = 2.5 * HEARTBEAT_SECONDS
"""Seconds that a client counts as present after a heartbeat: two may be lost."""
CALL_LEASE_SECONDS = 30.0
"""Seconds that a client may run a call before another client may take it over."""


def stored_name(client: str, by: Principal) -> str:
    """Return the store's name of a client. It includes the principal, so that no other principal can replace it."""
    return f"{client}~{hashlib.sha256(by.id.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"


class ClientServices(Protocol):
    """The parts of the engine that clients use."""

    @property
    def store(self) -> LogStore: ...

    @property
    def closing(self) -> bool: ...

    @property
    def now(self) -> Callable[[], float]: ...

    async def load_conversation(self, name: str) -> RunContext: ...

    async def submit_input(self, name: str, input: Input) -> object: ...

    async def submit_decisions(self, conversation: str, decisions: dict[str, Decision], by: Principal) -> Accepted: ...

    async def pending(self, conversation: str | None = None) -> list[Pending]: ...

    def recheck_deadlines(self) -> None: ...

    def publish_live(self, source: LiveSource, item: AnyLive) -> None: ...


class Client:
    """An attached client, which runs client tools. As an async context manager it detaches at the end."""

    def __init__(self, clients: Clients, conversation: str, name: str, tools: tuple[str, ...], by: Principal):
        self._clients = clients
        self.conversation, self.id, self.tools, self.by = conversation, name, tools, by
        self.stored = stored_name(name, by)
        """The client's name in the store, which includes its principal."""

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.detach()

    def runs(self, tool: str) -> bool:
        """Return whether this client runs the tool."""
        return not self.tools or tool in self.tools

    async def beat(self) -> None:
        """Record a heartbeat: the client is still present."""
        await self._clients.record_heartbeat(self)

    async def lease(self, call: str) -> bool:
        """Lease a call for this client, or renew its lease. Return False if another client holds the lease."""
        return await self._clients.lease_call(self, call)

    async def progress(self, call: str, payload: Any) -> None:
        """Report progress to viewers. Reports after the end of the call are dropped."""
        await self._clients.publish_progress(self.conversation, call, payload)

    async def result(self, call: str, value: Any) -> Accepted:
        """Submit the result of a call. It is validated, and durable when this returns."""
        return await self._clients.submit_decision(self, call, ClientResult(value))

    async def failed(self, call: str, kind: str, message: str) -> Accepted:
        """Report that a call has failed. The model sees this error."""
        return await self._clients.submit_decision(self, call, Failed(kind, message))

    async def detach(self) -> None:
        """Leave. Calls that wait for a client wait a few seconds longer for another one to attach."""
        await self._clients.detach(self)


class Clients:
    """The clients of all conversations, as far as this process knows them."""

    def __init__(self, services: ClientServices):
        self._services = services
        self._present: dict[tuple[str, str], tuple[Client, asyncio.Task[None]]] = {}
        """Clients that are present as long as this process lives, and the tasks that send their heartbeats."""

    async def attach(
        self, conversation: str, tools: tuple[str, ...], name: str | None, by: Principal, *, keep: bool
    ) -> Client:
        """Attach a client; with ``keep``, send its heartbeats until it detaches."""
        client = Client(self, conversation, name or new_id(), tools, by)
        await self.record_heartbeat(client)
        self._stop_heartbeats(client)  # of an earlier client of the same principal and name
        if keep:
            task = asyncio.get_running_loop().create_task(
                self._send_heartbeats(client), name=f"holdfast:client:{client.id}"
            )
            self._present[conversation, client.stored] = client, task
        return client

    async def find(self, conversation: str, name: str, by: Principal) -> Client | None:
        """Return a principal's client if it is present, whichever process it was attached to."""
        own, now = stored_name(name, by), self._services.now()
        for row in await self._services.store.clients(conversation):
            if row.client == own and row.until > now:
                return Client(self, conversation, name, row.tools, by)
        return None

    async def _send_heartbeats(self, client: Client) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            try:
                await self.record_heartbeat(client)
            except Exception as problem:
                log.error("client %s: its heartbeat was not recorded: %s", client.id, problem)

    def tasks(self) -> list[asyncio.Task[None]]:
        """Return the tasks that send heartbeats."""
        return [task for _, task in self._present.values()]

    async def record_heartbeat(self, client: Client) -> None:
        """Record that the client is present."""
        await self._store_presence(client, self._services.now() + PRESENCE_SECONDS)

    async def detach(self, client: Client) -> None:
        """Record that the client has left."""
        self._stop_heartbeats(client)
        if not self._services.closing:
            await self._store_presence(client, self._services.now())
            await self._recheck_pending(client)

    async def close(self) -> None:
        """Detach the clients that live in this process."""
        for client, _ in list(self._present.values()):
            try:
                await self.detach(client)
            except Exception as problem:
                log.error("client %s: its detachment was not recorded: %s", client.id, problem)

    def _stop_heartbeats(self, client: Client) -> None:
        _, task = self._present.pop((client.conversation, client.stored), (None, None))
        if task is not None:
            task.cancel()

    async def _store_presence(self, client: Client, until: float) -> None:
        row = ClientRow(conversation=client.conversation, client=client.stored, tools=client.tools, until=until)
        await self._services.store.put_client(row)

    async def _recheck_pending(self, client: Client) -> None:
        """Free the calls of a client that has left; they are checked again after the grace period."""
        store, conversation, now = self._services.store, client.conversation, self._services.now()
        soon = now + CLIENT_GRACE
        for entry in await self._services.pending(conversation):
            if entry.kind == "client_exec":
                await store.lease_call(conversation, entry.call, client.stored, now, now)
                await store.postpone(conversation, entry.call, min(soon, entry.deadline))
        self._services.recheck_deadlines()

    async def check_presence(self, entry: Pending) -> None:
        """End a client call that no present client can run; otherwise check it again later.

        Called when the grace period is over, or when a client's presence ends.
        """
        store = self._services.store
        able = [
            row.until for row in await store.clients(entry.conversation) if not row.tools or entry.tool in row.tools
        ]
        ends = max([entry.since, *able]) + CLIENT_GRACE
        if self._services.now() >= ends:
            await self._services.submit_input(entry.conversation, ClientGone(call=entry.call))
        else:
            await store.postpone(entry.conversation, entry.call, min(ends, entry.deadline))

    async def lease_call(self, client: Client, call: str) -> bool:
        """Lease a call for a client; False if it does not wait for this client, or another one holds the lease."""
        found = (await self._services.load_conversation(client.conversation)).find_call(call)
        if found is None or found.phase != "awaiting_client" or not client.runs(found.made.tool):
            return False
        now = self._services.now()
        return await self._services.store.lease_call(
            client.conversation, call, client.stored, now, now + CALL_LEASE_SECONDS
        )

    async def submit_decision(self, client: Client, call: str, decision: Decision) -> Accepted:
        """Resolve a call on behalf of the client's principal."""
        return await self._services.submit_decisions(client.conversation, {call: decision}, client.by)

    async def publish_progress(self, conversation: str, call: str, payload: Any) -> None:
        """Send a progress report to viewers, unless the call has ended."""
        check_plain(payload, "progress")
        conv = await self._services.load_conversation(conversation)
        found = conv.find_call(call)
        if found is None or found.phase != "awaiting_client":
            return
        n = conv.progress.get(call, (0, None))[0] + 1
        conv.progress[call] = (n, payload)
        self._services.publish_live(conv, ToolProgress(conversation=conversation, call_id=call, n=n, payload=payload))
