"""The routes: each is a few lines over ``Runtime``, and one line of the table that also makes the OpenAPI document."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import msgspec
from starlette.requests import Request

from assent.core.decisions import Accepted, Approve, Decision, Previewed, Principal
from assent.core.events import AssistantSaid, CallResolved
from assent.core.results import ANSWER_LIMIT, MESSAGE_LIMIT
from assent.core.schema import check_plain
from assent.errors import Invalid, NotFound, Stale, StoreError
from assent.runtime.clients import BEAT, PRESENT, Client
from assent.runtime.deciding import each_of
from assent.runtime.intake import conversation_id, new_id
from assent.runtime.runtime import ConversationInfo, Runtime
from assent.server import wire
from assent.server.auth import Auth, MaySee, identify
from assent.server.budgets import OverBudget
from assent.server.hub import Hub, whole
from assent.server.problems import HTTPProblem, problem_of
from assent.server.sse import CHUNK, Frame, Stream
from assent.stores.base import LogStore, Row

SMALL = 64 * 1024
"""Bytes of a body that says little."""
ANSWER = 2 * ANSWER_LIMIT
MESSAGE = 2 * MESSAGE_LIMIT
"""Text may be longer as JSON; the runtime holds the limits themselves."""
PAGE_BYTES = 1024 * 1024
"""Of a page of the log, or of messages: what a reader that never reads can hold up."""
READ = 32
"""Events that are read from the store at once: each may have some megabytes."""
MAX_CLIENTS, MAX_CLIENTS_LATELY = 32, 512
"""Clients of one principal in one conversation: that are there, and that the store still remembers."""
HEALTHY = 5.0
"""Seconds that the store may take to answer whoever asks after its health."""
PAUSE = 0.05
"""Seconds before a reader that a channel has overtaken reads on in the log."""


@dataclass(slots=True)
class Asked:
    """A request that has passed the door."""

    runtime: Runtime
    hub: Hub
    auth: Auth
    may_see: MaySee | None
    request: Request
    by: Principal
    path: dict[str, str]
    query: Any
    body: Any = None

    @property
    def conversation(self) -> str:
        return self.path["conversation"]

    async def sees(self, conversation: str) -> bool:
        if self.may_see is None:
            return True
        verdict = self.may_see(self.by, conversation)
        return await verdict if inspect.isawaitable(verdict) else verdict

    async def seen(self, conversation: str) -> str:
        """The conversation; one that is not theirs is as unknown as one that does not exist."""
        conversation_id(conversation)
        if self.may_see is not None and not await self.sees(conversation):
            raise NotFound(f"no conversation {conversation!r}")
        return conversation

    async def row(self, conversation: str) -> Row:
        await self.seen(conversation)
        row = await self.runtime.store.row(conversation)
        if row is None:
            raise NotFound(f"no conversation {conversation!r}")
        return row

    async def exists(self, conversation: str) -> str:
        return (await self.row(conversation)).conversation

    async def still(self) -> None:
        """Whoever asked is still let in; raises if not."""
        self.by = await identify(self.auth, self.request)


Handler = Callable[[Asked], Awaitable[Any]]
Streaming = Callable[[Stream], Awaitable[None]]


@dataclass(frozen=True)
class Endpoint:
    """One line of the table."""

    method: str
    path: str
    run: Handler | None = None
    gives: Any = None
    """None: no content."""
    takes: type | None = None
    query: type = wire.NoQuery
    status: int = 200
    limit: int = SMALL
    stream: Callable[[Asked], Awaitable[Streaming]] | None = None

    @property
    def doc(self) -> str:
        return inspect.getdoc(self.run or self.stream) or ""


# --- conversations ---


async def open_conversation(asked: Asked) -> wire.Opened:
    """Open a conversation."""
    new: wire.NewConversation = asked.body
    if new.id is not None:
        await asked.seen(new.id)  # nobody opens what they may not see: it could be somebody else's
    try:
        return wire.Opened(await asked.runtime.open(new.id, agent=new.agent, by=asked.by, metadata=new.metadata))
    except Invalid:
        if new.id is None or await asked.runtime.store.row(new.id) is None:
            raise
    detail = f"conversation {new.id!r} exists already"
    raise HTTPProblem(409, "conflict", detail, title="there is one of that name already")


async def list_conversations(asked: Asked) -> wire.Conversations:
    """Conversations by id, or those that were made last first, page by page."""
    which: wire.WhichConversations = asked.query
    if which.cursor is not None:
        check_plain(which.cursor, "cursor")
        # In this order the cursor's place is looked up: one that they may not see must have none, like an unknown one.
        if which.order == "newest" and not await asked.sees(which.cursor):
            return wire.Conversations([], None)
    found: list[ConversationInfo] = []
    cursor, size = which.cursor, which.limit if asked.may_see is None else wire.PAGE
    while True:  # as far as it takes: a cursor is always the id of one that they may see
        rows = await asked.runtime.conversations(which.status, cursor, size, newest=which.order == "newest")
        for row in rows:
            cursor = row.conversation
            if await asked.sees(row.conversation):
                found.append(row)
                if len(found) == which.limit:
                    return wire.Conversations(found, cursor)
        if len(rows) < size:
            return wire.Conversations(found, None)
        await asyncio.sleep(0)


async def show_conversation(asked: Asked) -> wire.ShownConversation:
    """The conversation as it is now, with its newest messages; go on with its events after ``seq``."""
    which: wire.WhichMessages = asked.query
    snapshot = await asked.runtime.snapshot(await asked.seen(asked.conversation))
    end = len(snapshot.messages) if which.before is None else min(which.before, len(snapshot.messages))
    first, size = end, 0
    while first > max(0, end - which.limit):
        size += len(wire.encode(snapshot.messages[first - 1]))
        if first < end and size > PAGE_BYTES:
            break
        first -= 1
    fields = {name: getattr(snapshot, name) for name in snapshot.__struct_fields__}
    fields["pending"] = [wire.entry(entry) for entry in snapshot.pending]
    fields["messages"] = snapshot.messages[first:end]
    return wire.ShownConversation(**fields, earlier=first)


async def say(asked: Asked) -> wire.Said:
    """Say something: answered once it is durable, while the turn runs."""
    new: wire.NewMessage = asked.body
    name = await asked.exists(asked.conversation)
    turn = await asked.runtime.send(
        name, new.text, by=asked.by, agent=new.agent, when_busy=new.when_busy, mode=new.mode
    )
    return wire.Said(turn.seq)


async def cancel(asked: Asked) -> wire.WasCancelled:
    """End the open turn; every open call is cancelled."""
    name = await asked.seen(asked.conversation)
    return wire.WasCancelled(await asked.runtime.cancel(name, by=asked.by, reason=asked.body.reason))


async def show_worker(asked: Asked) -> wire.Worker:
    """Whether somebody runs the conversation, and how many could: where nobody does, what is owed waits."""
    row = await asked.row(asked.conversation)
    alive = [each for each in await asked.runtime.owners() if each.alive]
    claimed = any(each.owner == row.owner for each in alive)
    return wire.Worker(row.status, claimed, sum(row.agent in each.agents for each in alive))


async def read_log(asked: Asked) -> wire.RawLog:
    """What happened, event by event: after < seq < before; as many as fit into a page."""
    which: wire.WhichEvents = asked.query
    row = await asked.row(asked.conversation)
    if which.last:
        before = row.seq + 1 if which.before is None else min(which.before, row.seq + 1)
        bodies = await _newest(asked.runtime.store, row.conversation, which.after, before, which.limit)
        first = before - len(bodies)
        place = first if bodies and first - 1 > which.after else None
    else:
        bodies, more = await _oldest(asked.runtime.store, row.conversation, which.after, which.before, which.limit)
        place = which.after + len(bodies) if more else None
    return wire.RawLog([msgspec.Raw(wire.current(body)) for body in bodies], place)


async def _oldest(store: LogStore, name: str, after: int, before: int | None, limit: int) -> tuple[list[bytes], bool]:
    """Return the first events after this one, as many as fit into a page; whether more may follow."""
    bodies: list[bytes] = []
    size = 0
    while len(bodies) < limit:
        want = min(READ, limit - len(bodies))
        found = await store.read(name, after + len(bodies), before, want)
        for body in found:
            size += len(body)
            if bodies and size > PAGE_BYTES:
                return bodies, True
            bodies.append(body)
        if len(found) < want:
            return bodies, False
    return bodies, True


async def _newest(store: LogStore, name: str, after: int, before: int, limit: int) -> list[bytes]:
    """Return the last events before this one, as many as fit into a page and at least one."""
    bodies: list[bytes] = []  # the newest first
    size, low = 0, max(after, before - 1 - limit)
    while (end := before - len(bodies)) - 1 > low:
        for body in reversed(await store.read(name, max(low, end - 1 - READ), end, READ)):
            size += len(body)
            if bodies and size > PAGE_BYTES:
                return bodies[::-1]
            bodies.append(body)
        if before - len(bodies) == end:
            break  # the log is shorter than it was
    return bodies[::-1]


async def follow(asked: Asked) -> Streaming:
    """The log from ``Last-Event-ID`` or ``after`` on, then what happens, as it happens."""
    seq = asked.query.after
    last = asked.request.headers.get("last-event-id")
    if last is not None:
        if not last.isascii() or not last.isdigit() or len(last) > 16:
            raise Invalid(f"Last-Event-ID is a sequence number, not {last[:40]!r}")
        seq = int(last)
    row = await asked.row(asked.conversation)
    name = row.conversation

    async def check() -> bool:
        await asked.still()
        await asked.seen(name)
        return False

    async def shows(frame: Frame) -> bool:
        if frame.seq is not None:
            await asked.seen(name)
        return True

    async def streaming(stream: Stream) -> None:
        stream.check_access(check)
        # Nobody has read beyond the end: a channel that began there would have nothing for all others.
        at, count = min(seq, row.seq), 1
        while not stream.gone:
            # About a chunk at a time: what a reader that never reads can hold is bounded.
            while (page := await asked.hub.pages.read(name, at, count)) is not None:
                try:
                    await stream.write(page.data)
                except OverBudget:
                    await stream.send_back(at)
                    return
                at = page.seq
                count = max(1, min(READ, page.count * 2, page.count * CHUNK // len(page.data)))
            async with asked.hub.conversation(name, at) as channel:
                position = channel.after(at)
                if position is not None:
                    await stream.follow(channel, position, at, None if asked.may_see is None else shows)
                    return
            await asyncio.sleep(PAUSE)  # the channel has moved on meanwhile

    return streaming


# --- deciding ---


def resolve(asked: Asked) -> Awaitable[Accepted]:
    """Decide a waiting call: accepted means durable."""
    return _decided(asked, asked.conversation, asked.path["call"], shown(wire.given(asked.body.decision)))


async def _decided(asked: Asked, conversation: str, call: str, decision: Decision) -> Accepted:
    if asked.may_see is not None:
        await asked.seen(conversation)
    try:
        return await asked.runtime.resolve(conversation, call, decision, by=asked.by)
    except Stale as stale:
        if stale.reason == "unknown":
            await asked.exists(conversation)  # or it is not found, as one that is not theirs
        elif stale.reason != "superseded":
            repeated = await _repeated(asked, conversation, call, decision)
            if repeated is not None:
                return repeated
        raise


async def _repeated(asked: Asked, conversation: str, call: str, decision: Decision) -> Accepted | None:
    """Return the answer to the same decision by the same principal: a client that lost it asks again."""
    end = (await asked.row(conversation)).seq
    while end > 0:
        for event in reversed(await asked.runtime.history(conversation, max(end - READ, 0), end + 1)):
            match event:
                case CallResolved() if event.call_id == call:
                    if event.by.id == asked.by.id and event.decision == decision:
                        return Accepted(event.seq)
                case AssistantSaid() if any(made.id == call for made in event.calls):
                    return None
                case _:
                    pass
        end -= READ
    return None


def shown(decision: Decision) -> Decision:
    """An approval stands for what somebody has seen."""
    if isinstance(decision, Approve) and decision.digest is None:
        raise Invalid("an approval over HTTP carries the digest of what was shown: give `digest`")
    return decision


async def resolve_batch(asked: Asked) -> wire.Results:
    """Decide several calls: malformed, none is decided; else each has its own result."""
    batch: wire.BatchResolving = asked.body
    places: dict[tuple[str, str], int] = {}
    given: list[tuple[str, str, Decision]] = []
    for n, item in enumerate(batch.decisions):
        first = places.setdefault((item.conversation, item.call), n)
        if first != n:
            raise Invalid(f"decisions[{n}] decides the same call as decisions[{first}]")
        try:
            given.append((item.conversation, item.call, shown(wire.given(item.decision))))
        except Invalid as problem:
            raise Invalid(f"decisions[{n}]: {problem.message}") from None
    return wire.Results(await each_of(given, itemgetter(0), partial(_resolved, asked)))


async def _resolved(asked: Asked, wanted: tuple[str, str, Decision]) -> wire.Result:
    conversation, call, decision = wanted
    try:
        done = await _decided(asked, conversation, call, decision)
    except Exception as error:  # whatever it is: others of the batch are decided
        problem = problem_of(error, asked.request.scope)
        return wire.Result(conversation=conversation, call=call, problem=problem)
    return wire.Result(conversation=conversation, call=call, status=done.status, seq=done.seq)


async def preview(asked: Asked) -> Previewed:
    """What the call would do with other arguments, and the digest that an approval of them carries."""
    name = await asked.exists(asked.conversation)
    return await asked.runtime.preview(name, asked.path["call"], asked.body.args, by=asked.by)


async def list_pending(asked: Asked) -> wire.PendingList:
    """What waits for somebody, the next to expire first."""
    name = asked.query.conversation
    if name is not None:
        await asked.exists(name)
    entries = await asked.runtime.pending(name)
    seen = [entry for entry in entries if name is not None or await asked.sees(entry.conversation)]
    return wire.PendingList([wire.entry(entry) for entry in seen])


async def follow_pending(asked: Asked) -> Streaming:
    """All that waits, then what is added and removed. The whole list comes first, and again where it has to shrink."""

    async def streaming(stream: Stream) -> None:
        async with asked.hub.inbox() as inbox:
            position = inbox.next
            told: set[str] = set()
            """The conversations that they were told of, where not everybody may see all."""

            async def tell() -> None:
                entries = [entry for entry in list(inbox.entries.values()) if await asked.sees(entry.conversation)]
                told.clear()
                told.update(entry.conversation for entry in entries)
                await stream.write(whole(entries))

            async def shows(frame: Frame) -> bool:
                name = frame.about or ""
                if await asked.sees(name):
                    told.add(name)
                    return True
                if name in told:
                    await tell()
                return False

            async def check() -> bool:
                await asked.still()
                for name in told.intersection([entry.conversation for entry in inbox.entries.values()]):
                    if not await asked.sees(name):
                        return True
                return False

            stream.check_access(check)
            try:
                if inbox.ended:
                    pass  # what is not known is not told as an empty list
                elif asked.may_see is None:
                    await stream.write(inbox.whole())
                else:
                    await tell()
            except OverBudget:
                await stream.send_back(0)
                return
            await stream.follow(inbox, position, shows=None if asked.may_see is None else shows, renew=tell)

    return streaming


async def list_grants(asked: Asked) -> wire.Grants:
    """The remembered approvals of a conversation."""
    grants = await asked.runtime.grants(await asked.seen(asked.query.conversation))
    return wire.Grants([wire.grant(given) for given in grants])


async def revoke(asked: Asked) -> None:
    """Take a remembered approval back."""
    await asked.runtime.revoke(await asked.seen(asked.conversation), asked.path["grant"], by=asked.by)


# --- clients ---


async def announce(asked: Asked) -> wire.Announced:
    """A page is there and can run client tools."""
    new: wire.Announcing = asked.body
    if new.client is not None:
        check_plain(new.client, "client")
    check_plain(new.tools, "tools")
    name = await asked.seen(asked.conversation)
    client = new.client or new_id()
    own = _own_client(asked, client)
    mine = [row for row in await asked.runtime.store.clients(name) if row.client.endswith(_own_client(asked, ""))]
    others = [row for row in mine if row.client != own]
    present = [row for row in others if row.until > asked.runtime.home.now()]
    if len(present) >= MAX_CLIENTS or len(others) >= MAX_CLIENTS_LATELY:
        raise HTTPProblem(
            429,
            "backpressure",
            f"you have {len(present)} clients in this conversation, and {len(others)} had lately: "
            "let them leave (DELETE), or use the id of one of them",
            {"retry-after": f"{PRESENT:.0f}"},
        )
    await asked.runtime.attach_client(name, new.tools, client=own, by=asked.by, keep=False)
    return wire.Announced(client, BEAT)


def _own_client(asked: Asked, client: str) -> str:
    """Return the name under which the store has this principal's client: another's of the same id has another name."""
    return f"{client}~{hashlib.sha256(asked.by.id.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"


async def beat(asked: Asked) -> None:
    """The page is still there."""
    await (await _client(asked, asked.path["client"])).beat()


async def leave(asked: Asked) -> None:
    """The page goes away: what it ran is free for another."""
    await (await _client(asked, asked.path["client"])).detach()


async def lease(asked: Asked) -> wire.Leased:
    """May this page run the call? One does at a time; asking again renews it."""
    client = await _client(asked, asked.body.client)
    return wire.Leased(await client.lease(asked.path["call"]))


async def progress(asked: Asked) -> None:
    """How far the page that runs a call is; viewers see it. It also renews the lease; another page's is dropped."""
    client = await _client(asked, asked.body.client)
    if await client.lease(asked.path["call"]):
        await client.progress(asked.path["call"], asked.body.payload)


async def _client(asked: Asked, name: str) -> Client:
    """A client that is there, as it was announced, here or to a process that is gone."""
    conversation, own = await asked.exists(asked.conversation), _own_client(asked, name)
    for row in await asked.runtime.store.clients(conversation):
        if row.client == own and row.until > asked.runtime.home.now():
            return Client(asked.runtime.home.clients, conversation, own, row.tools, asked.by)
    raise NotFound(f"no client {name!r} in this conversation: announce it first")


# --- beside ---


async def health(asked: Asked) -> wire.Health:
    """Is the store there?"""
    try:
        async with asyncio.timeout(HEALTHY):
            await asked.runtime.store.rows(limit=1)
    except TimeoutError:
        raise StoreError(f"the store did not answer within {HEALTHY:g} s", kind="log_read_failed") from None
    return wire.Health()


async def me(asked: Asked) -> wire.Me:
    """Who you are, and which agents run here."""
    return wire.Me(asked.by.id, list(asked.runtime.agents))


CONVERSATION = "/api/conversations/{conversation}"
CALL = CONVERSATION + "/calls/{call}"
CLIENTS = CONVERSATION + "/clients"

ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint("POST", "/api/conversations", open_conversation, wire.Opened, wire.NewConversation, status=201),
    Endpoint(
        "GET", "/api/conversations", list_conversations, wire.Conversations, query=wire.WhichConversations
    ),
    Endpoint("GET", CONVERSATION, show_conversation, wire.ShownConversation, query=wire.WhichMessages),
    Endpoint("POST", CONVERSATION + "/messages", say, wire.Said, wire.NewMessage, status=202, limit=MESSAGE),
    Endpoint("POST", CONVERSATION + "/cancel", cancel, wire.WasCancelled, wire.Cancelling),
    Endpoint("GET", CONVERSATION + "/worker", show_worker, wire.Worker),
    Endpoint("GET", CONVERSATION + "/log", read_log, wire.Log, query=wire.WhichEvents),
    Endpoint("GET", CONVERSATION + "/events", query=wire.FromWhere, stream=follow),
    Endpoint("POST", CALL + "/resolve", resolve, Accepted, wire.Resolving, limit=ANSWER),
    Endpoint("POST", CALL + "/preview", preview, Previewed, wire.Previewing, limit=ANSWER),
    Endpoint("POST", CALL + "/progress", progress, None, wire.Progressing, status=204),
    Endpoint("POST", CALL + "/lease", lease, wire.Leased, wire.Leasing),
    Endpoint("POST", CLIENTS, announce, wire.Announced, wire.Announcing),
    Endpoint("POST", CLIENTS + "/{client}/heartbeat", beat, None, wire.Nothing, status=204),
    Endpoint("DELETE", CLIENTS + "/{client}", leave, None, status=204),
    Endpoint("GET", "/api/pending", list_pending, wire.PendingList, query=wire.OneOrAll),
    Endpoint("GET", "/api/pending/events", stream=follow_pending),
    Endpoint("POST", "/api/pending/resolve", resolve_batch, wire.Results, wire.BatchResolving, limit=4 * ANSWER),
    Endpoint("GET", "/api/grants", list_grants, wire.Grants, query=wire.One),
    Endpoint("DELETE", "/api/grants/{conversation}/{grant}", revoke, None, status=204),
    Endpoint("GET", "/api/health", health, wire.Health),
    Endpoint("GET", "/api/me", me, wire.Me),
)  # fmt: skip
