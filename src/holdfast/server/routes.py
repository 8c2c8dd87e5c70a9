"""The endpoints of the API: thin functions over ``Runtime``, and the table for the routes and the OpenAPI document."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from operator import itemgetter
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.requests import Request

from holdfast.channels.card import public_pending, public_principal
from holdfast.core.decide.deputies import DEPUTIES
from holdfast.core.decisions import Accepted, Approve, Decision, Previewed, Principal, TakeBack, split_suspension
from holdfast.core.events import ApprovalTakenBack, AssistantSaid, CallResolved, CallSuspended, VoteCast
from holdfast.core.images import IMAGE_TYPES
from holdfast.core.results import ANSWER_LIMIT, MESSAGE_LIMIT
from holdfast.core.schema.validation import check_plain
from holdfast.core.state import Delegation, Grant
from holdfast.core.timeline import Timeline
from holdfast.core.tool import MEDIA_TYPE, parse_duration
from holdfast.errors import Invalid, NotAllowed, NotFound, Stale, StoreError
from holdfast.runtime.arguments import check_conversation_id, new_id
from holdfast.runtime.artifacts import find_artifact, load_artifact
from holdfast.runtime.audit import DecisionFilters, DecisionPage
from holdfast.runtime.audit_export import export_decisions
from holdfast.runtime.pending_calls.clients import HEARTBEAT_SECONDS, PRESENCE_SECONDS, Client, stored_name
from holdfast.runtime.pending_calls.outcome import CallOutcome
from holdfast.runtime.pending_calls.resolve import gather_by_conversation
from holdfast.runtime.pending_calls.shared_grants import split_grant_id
from holdfast.runtime.runtime import ConversationInfo, Runtime
from holdfast.runtime.search import SearchResults, cursor_conversation
from holdfast.server import api_types
from holdfast.server.auth import Auth, MaySee, identify
from holdfast.server.limits import CHUNK_BYTES, OverBudget
from holdfast.server.problems import HTTPProblem, problem_of
from holdfast.server.streams import Frame, Hub, Stream, pending_frame
from holdfast.server.timeline_page import export_timeline
from holdfast.stores.base import ConversationRow, LogStore

SMALL_BODY_BYTES = 64 * 1024
"""Limit on request bodies without a larger one of their own."""
ANSWER_BYTES = 2 * ANSWER_LIMIT
MESSAGE_BYTES = 2 * MESSAGE_LIMIT
"""Twice the runtime's own limits, since text may be longer as JSON."""
PAGE_BYTES = 1024 * 1024
"""Limit on a page of the log or of messages, which a client may leave unread."""
READ_BATCH = 32
"""Events read from the store at once; one event may have several megabytes."""
MAX_CLIENTS, MAX_CLIENTS_LATELY = 32, 512
"""Clients of one principal in one conversation: present, and in the store including those that left."""
HEALTH_SECONDS = 5.0
"""Time limit for the store in a health check."""
OVERTAKEN_SECONDS = 0.05
"""Pause before a reader that the channel has overtaken reads more of the log."""


EXPORT_PAGE = 100
"""Decisions that are read at a time for an export."""


@dataclass(slots=True)
class RequestContext:
    """An authenticated request, with its decoded parameters and body."""

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

    async def can_see(self, conversation: str) -> bool:
        if self.may_see is None:
            return True
        verdict = self.may_see(self.by, conversation)
        return await verdict if inspect.isawaitable(verdict) else verdict

    async def check_visible(self, conversation: str) -> str:
        """Return the conversation's id; raise NotFound if the principal may not see it."""
        check_conversation_id(conversation)
        if conversation == DEPUTIES:  # a log of the whole store, which has its own routes
            raise NotFound(f"no conversation {conversation!r}")
        if self.may_see is not None and not await self.can_see(conversation):
            raise NotFound(f"no conversation {conversation!r}")
        return conversation

    async def load_row(self, conversation: str) -> ConversationRow:
        """Return the conversation's row; raise NotFound if it does not exist or the principal may not see it."""
        await self.check_visible(conversation)
        row = await self.runtime.store.row(conversation)
        if row is None:
            raise NotFound(f"no conversation {conversation!r}")
        return row

    async def check_exists(self, conversation: str) -> str:
        return (await self.load_row(conversation)).conversation

    async def reauthenticate(self) -> None:
        """Authenticate the request again; raise if the principal has lost access."""
        self.by = await identify(self.auth, self.request)


RouteHandler = Callable[[RequestContext], Awaitable[Any]]
StreamRunner = Callable[[Stream], Awaitable[None]]


NO_PAGE = {"content-security-policy": "sandbox; default-src 'none'; frame-ancestors 'none'"}
"""Headers of files: nothing runs in one, even if a browser shows it as a page."""


@dataclass(frozen=True, slots=True)
class Download:
    """A response that is no JSON. The browser saves it; it must never show it as a page of this site.

    Only images of the types that models take are shown: nothing runs in them. The sandbox holds even if a browser read
    one as a page.
    """

    content: bytes
    media_type: str
    name: str

    @property
    def headers(self) -> dict[str, str]:
        disposition = "inline" if self.media_type in IMAGE_TYPES else "attachment"
        known = MEDIA_TYPE.fullmatch(self.media_type)  # an imported log may have any text here
        return {
            "content-type": self.media_type if known else "application/octet-stream",
            "content-disposition": f"{disposition}; filename*=UTF-8''{quote(self.name, safe='')}",
            **NO_PAGE,
        }


@dataclass(frozen=True, slots=True)
class TextStream:
    """A text of any length that the browser saves as a file; it is sent as it is made."""

    parts: AsyncIterator[bytes]
    headers: dict[str, str]

    @classmethod
    async def start(cls, text: AsyncIterator[str], media_type: str, name: str) -> TextStream:
        """Return the response once the first part is there: until then a failure is a problem document."""
        first = await anext(text, "")

        async def parts() -> AsyncGenerator[bytes]:
            yield first.encode()
            async for part in text:
                yield part.encode()

        disposition = f"attachment; filename*=UTF-8''{quote(name, safe='')}"
        return cls(parts(), {"content-type": media_type, "content-disposition": disposition, **NO_PAGE})


@dataclass(frozen=True)
class Endpoint:
    """A method and path of the API with its handler and types. Exactly one of ``run`` and ``stream`` is set."""

    method: str
    path: str
    run: RouteHandler | None = None
    response_type: Any = None
    """None: no content; Download: bytes of any type; TextStream: text of any length."""
    body_type: type | None = None
    query: type = api_types.NoQuery
    status: int = 200
    body_limit: int = SMALL_BODY_BYTES
    stream: Callable[[RequestContext], Awaitable[StreamRunner]] | None = None

    @property
    def doc(self) -> str:
        return inspect.getdoc(self.run or self.stream) or ""


# --- conversations ---


async def open_conversation(context: RequestContext) -> api_types.OpenedConversation:
    """Open a conversation."""
    new: api_types.NewConversation = context.body
    if new.id is not None:
        await context.check_visible(new.id)  # an id that the principal may not see could belong to another principal
    try:
        return api_types.OpenedConversation(
            await context.runtime.open(new.id, agent=new.agent, by=context.by, metadata=new.metadata)
        )
    except Invalid:
        if new.id is None or await context.runtime.store.row(new.id) is None:
            raise
    detail = f"conversation {new.id!r} exists already"
    raise HTTPProblem(409, "conflict", detail, title="a conversation with this id exists")


async def list_conversations(context: RequestContext) -> api_types.Conversations:
    """List conversations page by page, by id or newest first. Archived ones are listed apart, with archived=true."""
    query: api_types.ConversationsQuery = context.query
    if query.cursor is not None:
        check_plain(query.cursor, "cursor")
        # This order looks the cursor up: a cursor that the principal may not see must behave like an unknown one.
        if query.order == "newest" and not await context.can_see(query.cursor):
            return api_types.Conversations([], None)
    found: list[ConversationInfo] = []
    cursor, size = query.cursor, query.limit if context.may_see is None else api_types.PAGE
    while True:  # until the page is full: the cursor must be the id of a visible conversation
        rows = await context.runtime.conversations(
            query.status, cursor, size, newest=query.order == "newest", archived=query.archived
        )
        for row in rows:
            cursor = row.conversation
            if await context.can_see(row.conversation):
                found.append(row)
                if len(found) == query.limit:
                    return api_types.Conversations(found, cursor)
        if len(rows) < size:
            return api_types.Conversations(found, None)
        await asyncio.sleep(0)


async def search_conversations(context: RequestContext) -> SearchResults:
    """Search titles, messages and replies, the most recently created conversation first.

    ``complete`` is false while the search index is being built: search again later.
    """
    query: api_types.SearchQuery = context.query
    check_plain(query.text, "text")
    if query.cursor is not None:
        check_plain(query.cursor, "cursor")
        # The cursor is looked up: one that the principal may not see must behave like an unknown one.
        if not await context.can_see(cursor_conversation(query.cursor)):
            return SearchResults(hits=[], next=None, complete=True)
    return await context.runtime.search(
        query.text,
        cursor=query.cursor,
        limit=query.limit,
        archived=query.archived,
        visible=None if context.may_see is None else context.can_see,
    )


async def list_decisions(context: RequestContext) -> DecisionPage:
    """List what was decided, expired or refused in the conversations that the principal may see, the latest first.

    ``complete`` is false while the index is being built: ask again later. A page can have fewer decisions than
    ``limit``, or none, and continue all the same.
    """
    query: api_types.DecisionsQuery = context.query
    filters = query.filters()
    if context.may_see is not None:
        filters["visible"] = context.can_see
    return await context.runtime.decisions(**filters, cursor=query.cursor, limit=query.limit)


async def export_history(context: RequestContext) -> TextStream:
    """Download all decisions that fit the filters, as CSV or as one JSON object a line (``format=jsonl``)."""
    query: api_types.ExportQuery = context.query
    filters = query.filters()
    if context.may_see is not None:
        filters["visible"] = context.can_see
    parts = export_decisions(_accessible_pages(context, filters), query.format)
    media_type = "text/csv; charset=utf-8" if query.format == "csv" else "application/jsonl"
    return await TextStream.start(parts, media_type, f"decisions.{query.format}")


async def _accessible_pages(context: RequestContext, filters: DecisionFilters) -> AsyncGenerator[DecisionPage]:
    """Yield the pages of a long export for as long as the principal has access."""
    async with aclosing(context.runtime.decision_pages(EXPORT_PAGE, **filters)) as pages:
        async for page in pages:
            yield page
            await context.reauthenticate()


async def rename_conversation(context: RequestContext) -> None:
    """Give the conversation a title."""
    name = await context.check_exists(context.conversation)
    await context.runtime.rename(name, context.body.title, by=context.by)


async def archive_conversation(context: RequestContext) -> None:
    """Archive or unarchive the conversation. Its pending calls stay pending."""
    name = await context.check_exists(context.conversation)
    await context.runtime.archive(name, context.body.archived, by=context.by)


async def show_conversation(context: RequestContext) -> api_types.ConversationPage:
    """Show the conversation as of now, with its newest messages; follow its events after ``seq``."""
    query: api_types.MessagesQuery = context.query
    snapshot = await context.runtime.snapshot(await context.check_visible(context.conversation))
    end = len(snapshot.messages) if query.before is None else min(query.before, len(snapshot.messages))
    first, size = end, 0
    while first > max(0, end - query.limit):
        size += len(api_types.encode_json(snapshot.messages[first - 1]))
        if first < end and size > PAGE_BYTES:
            break
        first -= 1
    fields = {name: getattr(snapshot, name) for name in snapshot.__struct_fields__}
    fields["pending"] = [public_pending(entry) for entry in snapshot.pending]
    fields["messages"] = snapshot.messages[first:end]
    return api_types.ConversationPage(**fields, earlier=first)


async def send_message(context: RequestContext) -> api_types.AcceptedMessage:
    """Send a message. The response comes once the message is durable; the turn then runs."""
    new: api_types.NewMessage = context.body
    name = await context.check_exists(context.conversation)
    turn = await context.runtime.send(
        name, new.text, by=context.by, agent=new.agent, when_busy=new.when_busy, mode=new.mode
    )
    return api_types.AcceptedMessage(turn.seq)


async def cancel_turn(context: RequestContext) -> api_types.CancelOutcome:
    """Cancel the open turn and every open call in it."""
    name = await context.check_visible(context.conversation)
    return api_types.CancelOutcome(await context.runtime.cancel(name, by=context.by, reason=context.body.reason))


async def show_worker(context: RequestContext) -> api_types.Worker:
    """Show whether a worker runs the conversation, and how many could. Without one its work waits."""
    row = await context.load_row(context.conversation)
    alive = [worker for worker in await context.runtime.owners() if worker.alive]
    claimed = any(worker.owner == row.owner for worker in alive)
    return api_types.Worker(row.status, claimed, sum(row.agent in worker.agents for worker in alive))


async def read_log(context: RequestContext) -> api_types.RawEventLog:
    """List the events of the log with after < seq < before, as many as fit into a page."""
    query: api_types.EventsQuery = context.query
    row = await context.load_row(context.conversation)
    store = context.runtime.store
    if query.last:
        before = row.seq + 1 if query.before is None else min(query.before, row.seq + 1)
        bodies = await _read_newest(store, row.conversation, query.after, before, query.limit)
        first = before - len(bodies)
        next_page = first if bodies and first - 1 > query.after else None
    else:
        bodies, more = await _read_oldest(store, row.conversation, query.after, query.before, query.limit)
        next_page = query.after + len(bodies) if more else None
    return api_types.RawEventLog([msgspec.Raw(api_types.public_body(body)) for body in bodies], next_page)


async def _read_oldest(
    store: LogStore, name: str, after: int, before: int | None, limit: int
) -> tuple[list[bytes], bool]:
    """Return the events that follow ``after``, as many as fit into a page, and whether more may follow."""
    bodies: list[bytes] = []
    size = 0
    while len(bodies) < limit:
        want = min(READ_BATCH, limit - len(bodies))
        found = await store.read(name, after + len(bodies), before, want)
        for body in found:
            size += len(body)
            if bodies and size > PAGE_BYTES:
                return bodies, True
            bodies.append(body)
        if len(found) < want:
            return bodies, False
    return bodies, True


async def _read_newest(store: LogStore, name: str, after: int, before: int, limit: int) -> list[bytes]:
    """Return the events that precede ``before``, as many as fit into a page and at least one."""
    bodies: list[bytes] = []  # newest first
    size, low = 0, max(after, before - 1 - limit)
    while (end := before - len(bodies)) - 1 > low:
        for body in reversed(await store.read(name, max(low, end - 1 - READ_BATCH), end, READ_BATCH)):
            size += len(body)
            if bodies and size > PAGE_BYTES:
                return bodies[::-1]
            bodies.append(body)
        if before - len(bodies) == end:
            break  # the log was truncated since
    return bodies[::-1]


async def read_timeline(context: RequestContext) -> Timeline:
    """Show where the time and the cost of the conversation's turns went, the newest turn first."""
    query: api_types.TimelineQuery = context.query
    name = await context.check_exists(context.conversation)
    return await context.runtime.timeline(name, before=query.before, turns=query.turns)


async def download_timeline(context: RequestContext) -> Download:
    """Download the timeline as one HTML file that opens offline."""
    name = await context.check_exists(context.conversation)
    return Download(await export_timeline(context.runtime, name), "text/html", f"{name} timeline.html")


async def read_artifact(context: RequestContext) -> Download:
    """Download bytes that a call of the conversation kept, or a result that is too large for the log."""
    name = await context.check_exists(context.conversation)
    store, sha256 = context.runtime.store, context.path["sha256"]
    reference = await find_artifact(store, name, sha256)
    if reference is None:
        raise NotFound(f"no artifact {sha256[:80]!r} in conversation {name!r}")
    return Download(await load_artifact(store, name, reference), reference.media_type, reference.name or sha256)


async def stream_events(context: RequestContext) -> StreamRunner:
    """Stream the log from ``Last-Event-ID`` or ``after`` on, then new events as they happen."""
    seq = context.query.after
    last = context.request.headers.get("last-event-id")
    if last is not None:
        if not last.isascii() or not last.isdigit() or len(last) > 16:
            raise Invalid(f"Last-Event-ID is a sequence number, not {last[:40]!r}")
        seq = int(last)
    row = await context.load_row(context.conversation)
    name = row.conversation

    async def check_reader() -> bool:
        await context.reauthenticate()
        await context.check_visible(name)
        return False

    async def may_show(frame: Frame) -> bool:
        if frame.seq is not None:
            await context.check_visible(name)
        return True

    async def run_stream(stream: Stream) -> None:
        stream.check_access(check_reader)
        # A position beyond the end is clamped: a channel that began there would miss events for its other readers.
        at, count = min(seq, row.seq), 1
        while not stream.gone:
            # About one chunk at a time bounds the unread data of a reader that never reads.
            while (page := await context.hub.pages.read(name, at, count)) is not None:
                try:
                    await stream.write(page.data)
                except OverBudget:
                    await stream.send_backpressure(at)
                    return
                at = page.seq
                count = max(1, min(READ_BATCH, page.count * 2, page.count * CHUNK_BYTES // len(page.data)))
            async with context.hub.conversation(name, at) as channel:
                position = channel.position_after(at)
                if position is not None:
                    await stream.follow(channel, position, at, None if context.may_see is None else may_show)
                    return
            await asyncio.sleep(OVERTAKEN_SECONDS)  # the channel has dropped frames that this reader needs

    return run_stream


# --- decisions ---


async def resolve_call(context: RequestContext) -> Accepted:
    """Decide a pending call. An accepted decision is durable."""
    decision = require_digest(api_types.to_decision(context.body.decision))
    return await _resolve_or_repeat(context, context.conversation, context.path["call"], decision)


async def _resolve_or_repeat(context: RequestContext, conversation: str, call: str, decision: Decision) -> Accepted:
    if context.may_see is not None:
        await context.check_visible(conversation)
        if isinstance(decision, Approve) and decision.scope != "conversation" and not context.runtime.has_grant_rule:
            raise NotAllowed(
                f"{context.by.id} does not see every conversation, and this approval would be remembered beyond this "
                f'one: scope="{decision.scope}" needs Runtime(may_grant=...); approve with scope="conversation"'
            )
    try:
        return await context.runtime.resolve(conversation, call, decision, by=context.by)
    except Stale as stale:
        if stale.reason == "unknown":
            await context.check_exists(conversation)  # raises NotFound, as for an invisible conversation
        elif stale.reason != "superseded":
            repeated = await _find_repeat(context, conversation, call, decision)
            if repeated is not None:
                return repeated
        raise


async def _find_repeat(context: RequestContext, conversation: str, call: str, decision: Decision) -> Accepted | None:
    """Return the outcome of an equal decision by the same principal: a client retries after a lost response.

    It must be about the same suspension of the call: the one that the request names, or the latest.
    """
    call, seq = split_suspension(call)
    found: Accepted | None = None
    end = (await context.load_row(conversation)).seq
    while end > 0:
        for event in reversed(await context.runtime.history(conversation, max(end - READ_BATCH, 0), end + 1)):
            match event:
                case CallResolved() if event.call_id == call:
                    if event.by.id == context.by.id and event.decision == decision:
                        found = found or Accepted(event.seq, starts_at=event.starts_at)
                case ApprovalTakenBack() if event.call_id == call:
                    if not isinstance(decision, TakeBack):
                        return found  # an earlier approval no longer counts
                    if event.by.id == context.by.id:
                        found = found or Accepted(event.seq)
                case VoteCast() if event.call_id == call and event.by.id == context.by.id:
                    if isinstance(decision, Approve) and decision.digest == event.digest:
                        found = found or Accepted(event.seq, missing=event.missing)
                case CallSuspended() if event.call_id == call:
                    if seq is None or event.seq == seq:
                        return found
                    found = None
                case AssistantSaid() if any(made.id == call for made in event.calls):
                    return None
                case _:
                    pass
        end -= READ_BATCH
    return None


def require_digest(decision: Decision) -> Decision:
    """Return the decision; raise Invalid for an approval that does not say which preview was approved."""
    if isinstance(decision, Approve) and decision.digest is None:
        raise Invalid("an approval over HTTP needs the `digest` of the pending call that was shown")
    return decision


async def resolve_batch(context: RequestContext) -> api_types.BatchResults:
    """Decide several calls. A malformed batch decides none; otherwise each call has its own result."""
    batch: api_types.BatchResolveRequest = context.body
    places: dict[tuple[str, str], int] = {}
    given: list[tuple[str, str, Decision]] = []
    for n, item in enumerate(batch.decisions):
        first = places.setdefault((item.conversation, split_suspension(item.call)[0]), n)
        if first != n:
            raise Invalid(f"decisions[{n}] decides the same call as decisions[{first}]")
        try:
            given.append((item.conversation, item.call, require_digest(api_types.to_decision(item.decision))))
        except Invalid as problem:
            raise Invalid(f"decisions[{n}]: {problem.message}") from None
    return api_types.BatchResults(await gather_by_conversation(given, itemgetter(0), partial(_resolve_item, context)))


async def _resolve_item(context: RequestContext, item: tuple[str, str, Decision]) -> api_types.BatchResult:
    conversation, call, decision = item
    try:
        done = await _resolve_or_repeat(context, conversation, call, decision)
    except Exception as error:  # the rest of the batch is still decided
        problem = problem_of(error, context.request.scope)
        return api_types.BatchResult(conversation=conversation, call=call, problem=problem)
    return api_types.BatchResult(
        conversation=conversation,
        call=call,
        status=done.status,
        seq=done.seq,
        missing=done.missing,
        starts_at=done.starts_at,
    )


async def show_call(context: RequestContext) -> CallOutcome:
    """Show what has become of a call; with ``wait``, once it has ended or waits again, or that time has passed."""
    name = await context.check_exists(context.conversation)
    found = await context.runtime.outcome(name, context.path["call"], timeout=context.query.wait)
    pending = found.pending and public_pending(found.pending)
    return msgspec.structs.replace(found, pending=pending)


async def preview_call(context: RequestContext) -> Previewed:
    """Preview the call with other arguments, and return the digest for an approval of them."""
    name = await context.check_exists(context.conversation)
    return await context.runtime.preview(name, context.path["call"], context.body.args, by=context.by)


async def list_pending(context: RequestContext) -> api_types.PendingList:
    """List the pending calls, soonest deadline first; also approved ones that can still be taken back."""
    name = context.query.conversation
    if name is not None:
        await context.check_exists(name)
    entries = await context.runtime.pending(name, approved=True)
    visible = [entry for entry in entries if name is not None or await context.can_see(entry.conversation)]
    return api_types.PendingList([public_pending(entry) for entry in visible])


async def stream_pending(context: RequestContext) -> StreamRunner:
    """Stream the pending calls: first the complete list, then additions and removals. A new list replaces the old."""

    async def run_stream(stream: Stream) -> None:
        async with context.hub.inbox() as inbox:
            position = inbox.next_position
            shown: set[str] = set()  # the conversations in the reader's list; unused without may_see

            async def send_list() -> None:
                entries = [entry for entry in list(inbox.entries.values()) if await context.can_see(entry.conversation)]
                shown.clear()
                shown.update(entry.conversation for entry in entries)
                await stream.write(pending_frame(entries))

            async def may_show(frame: Frame) -> bool:
                name = frame.about or ""
                if await context.can_see(name):
                    shown.add(name)
                    return True
                if name in shown:
                    await send_list()
                return False

            async def check_reader() -> bool:
                await context.reauthenticate()
                for name in shown.intersection([entry.conversation for entry in inbox.entries.values()]):
                    if not await context.can_see(name):
                        return True
                return False

            stream.check_access(check_reader)
            try:
                if inbox.ended:
                    pass  # the list is unknown: an empty one would be wrong
                elif context.may_see is None:
                    await stream.write(inbox.list_frame())
                else:
                    await send_list()
            except OverBudget:
                await stream.send_backpressure(0)
                return
            await stream.follow(inbox, position, shows=None if context.may_see is None else may_show, renew=send_list)

    return run_stream


async def list_grants(context: RequestContext) -> api_types.Grants:
    """List the remembered approvals of a conversation; without one, those that reach beyond their conversation.

    Of the latter, the caller is shown those of conversations that the caller may see, and those that hold for the
    caller's own turns. Their ids are ``CONVERSATION/ID``.
    """
    name = context.query.conversation
    if name is not None:
        grants = await context.runtime.grants(await context.check_visible(name))
    else:
        grants = [grant for grant in await context.runtime.grants() if await _may_see_grant(context, grant)]
    return api_types.Grants([api_types.public_grant(grant) for grant in grants])


async def _may_see_grant(context: RequestContext, grant: Grant) -> bool:
    named = split_grant_id(grant.id)
    return grant.user == context.by.id or (named is not None and await context.can_see(named[0]))


async def list_deputies(context: RequestContext) -> api_types.Delegations:
    """List who decides for whom now. A caller who does not see every conversation is shown the own delegations."""
    found = await context.runtime.deputies()
    if context.may_see is not None:
        found = [one for one in found if context.by.id in (one.principal.id, one.deputy)]
    return api_types.Delegations([api_types.public_delegation(one) for one in found])


async def name_deputy(context: RequestContext) -> Delegation:
    """Name a deputy of the caller: until the end of the period, the deputy may decide what the caller may decide."""
    new: api_types.NewDelegation = context.body
    if (new.until is None) == (new.duration is None):
        raise Invalid("give the end of the period once: as `until` or as `duration`")
    until = new.until if new.duration is None else timedelta(seconds=parse_duration(new.duration))
    assert until is not None
    return api_types.public_delegation(await context.runtime.delegate(new.to, until, by=context.by))


async def end_delegation(context: RequestContext) -> None:
    """End a delegation before its time. The caller is the principal or the deputy."""
    await context.runtime.end_delegation(context.path["delegation"], by=context.by)


async def list_scopes(context: RequestContext) -> api_types.OfferedScopes:
    """Show where the caller may have an approval of the pending call remembered, so that a page offers only that."""
    name = await context.check_exists(context.conversation)
    found = await context.runtime.grant_scopes(name, context.path["call"], by=context.by)
    if context.may_see is not None and not context.runtime.has_grant_rule:
        found = {remember: scopes[:1] for remember, scopes in found.items() if scopes[:1] == ("conversation",)}
    return api_types.OfferedScopes(args=found.get("args", ()), tool=found.get("tool", ()))


async def revoke_grant(context: RequestContext) -> None:
    """Revoke a remembered approval by the conversation that it was given in and its id there."""
    conversation = await context.check_visible(context.conversation)
    await context.runtime.revoke(conversation, context.path["grant"], by=context.by)


# --- clients ---


async def announce_client(context: RequestContext) -> api_types.AnnouncedClient:
    """Announce a page that can run client tools."""
    new: api_types.AnnounceRequest = context.body
    if new.client is not None:
        check_plain(new.client, "client")
    check_plain(new.tools, "tools")
    name = await context.check_visible(context.conversation)
    client = new.client or new_id()
    own, suffix = stored_name(client, context.by), stored_name("", context.by)
    rows = await context.runtime.store.clients(name)
    recent = [row for row in rows if row.client.endswith(suffix) and row.client != own]
    present = [row for row in recent if row.until > context.runtime.now()]
    if len(present) >= MAX_CLIENTS or len(recent) >= MAX_CLIENTS_LATELY:
        raise HTTPProblem(
            429,
            "backpressure",
            f"you have {len(present)} clients in this conversation, and had {len(recent)} recently: "
            "remove some (DELETE), or use the id of one of them",
            {"retry-after": f"{PRESENCE_SECONDS:.0f}"},
        )
    await context.runtime.attach_client(name, new.tools, client=client, by=context.by, keep=False)
    return api_types.AnnouncedClient(client, HEARTBEAT_SECONDS)


async def renew_client(context: RequestContext) -> None:
    """Renew the presence of a page."""
    await (await _find_client(context, context.path["client"])).beat()


async def remove_client(context: RequestContext) -> None:
    """Remove a page that leaves: another page can take over its calls."""
    await (await _find_client(context, context.path["client"])).detach()


async def lease_call(context: RequestContext) -> api_types.LeaseOutcome:
    """Lease a call to this page. One page runs it at a time; the same request renews the lease."""
    client = await _find_client(context, context.body.client)
    return api_types.LeaseOutcome(await client.lease(context.path["call"]))


async def report_progress(context: RequestContext) -> None:
    """Report progress of a call to its viewers, and renew the lease. Ignored from a page without the lease."""
    client = await _find_client(context, context.body.client)
    if await client.lease(context.path["call"]):
        await client.progress(context.path["call"], context.body.payload)


async def _find_client(context: RequestContext, name: str) -> Client:
    """Return a present client by its name, announced to this or to another process."""
    client = await context.runtime.find_client(await context.check_exists(context.conversation), name, by=context.by)
    if client is None:
        raise NotFound(f"no client {name!r} in this conversation: announce it first")
    return client


# --- status ---


async def check_health(context: RequestContext) -> api_types.Health:
    """Check that the store responds."""
    try:
        async with asyncio.timeout(HEALTH_SECONDS):
            await context.runtime.store.rows(limit=1)
    except TimeoutError:
        raise StoreError(f"the store did not respond within {HEALTH_SECONDS:g} s", kind="log_read_failed") from None
    return api_types.Health()


async def describe_me(runtime: Runtime, by: Principal) -> api_types.Me:
    """Return what a page has to know about its principal to foresee which decisions are refused."""
    deputy_of = {one.principal.id: one.principal for one in await runtime.deputies() if one.deputy == by.id}
    represented = [public_principal(each) for each in deputy_of.values()]
    agents = [name for name, agent in runtime.agents.items() if not agent.internal]
    return api_types.Me(by.id, by.roles, represented, agents)


async def show_me(context: RequestContext) -> api_types.Me:
    """Show the authenticated principal, those for whom it decides as a deputy, and the agents that run here."""
    return await describe_me(context.runtime, context.by)


CONVERSATION = "/api/conversations/{conversation}"
CALL = CONVERSATION + "/calls/{call}"
CLIENTS = CONVERSATION + "/clients"

ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        "POST",
        "/api/conversations",
        open_conversation,
        api_types.OpenedConversation,
        api_types.NewConversation,
        status=201,
    ),
    Endpoint(
        "GET", "/api/conversations", list_conversations, api_types.Conversations, query=api_types.ConversationsQuery
    ),
    Endpoint("GET", CONVERSATION, show_conversation, api_types.ConversationPage, query=api_types.MessagesQuery),
    Endpoint(
        "POST",
        CONVERSATION + "/messages",
        send_message,
        api_types.AcceptedMessage,
        api_types.NewMessage,
        status=202,
        body_limit=MESSAGE_BYTES,
    ),
    Endpoint("GET", "/api/search", search_conversations, SearchResults, query=api_types.SearchQuery),
    Endpoint("GET", "/api/decisions", list_decisions, DecisionPage, query=api_types.DecisionsQuery),
    Endpoint("GET", "/api/decisions/export", export_history, TextStream, query=api_types.ExportQuery),
    Endpoint("POST", CONVERSATION + "/rename", rename_conversation, None, api_types.RenameRequest, status=204),
    Endpoint("POST", CONVERSATION + "/archive", archive_conversation, None, api_types.ArchiveRequest, status=204),
    Endpoint("POST", CONVERSATION + "/cancel", cancel_turn, api_types.CancelOutcome, api_types.CancelRequest),
    Endpoint("GET", CONVERSATION + "/worker", show_worker, api_types.Worker),
    Endpoint("GET", CONVERSATION + "/log", read_log, api_types.EventLog, query=api_types.EventsQuery),
    Endpoint("GET", CONVERSATION + "/timeline", read_timeline, Timeline, query=api_types.TimelineQuery),
    Endpoint("GET", CONVERSATION + "/timeline/file", download_timeline, Download),
    Endpoint("GET", CONVERSATION + "/artifacts/{sha256}", read_artifact, Download),
    Endpoint("GET", CONVERSATION + "/events", query=api_types.FollowQuery, stream=stream_events),
    Endpoint("GET", CALL, show_call, CallOutcome, query=api_types.CallQuery),
    Endpoint("POST", CALL + "/resolve", resolve_call, Accepted, api_types.ResolveRequest, body_limit=ANSWER_BYTES),
    Endpoint("POST", CALL + "/preview", preview_call, Previewed, api_types.PreviewRequest, body_limit=ANSWER_BYTES),
    Endpoint("GET", CALL + "/scopes", list_scopes, api_types.OfferedScopes),
    Endpoint("POST", CALL + "/progress", report_progress, None, api_types.ProgressRequest, status=204),
    Endpoint("POST", CALL + "/lease", lease_call, api_types.LeaseOutcome, api_types.LeaseRequest),
    Endpoint("POST", CLIENTS, announce_client, api_types.AnnouncedClient, api_types.AnnounceRequest),
    Endpoint("POST", CLIENTS + "/{client}/heartbeat", renew_client, None, api_types.EmptyRequest, status=204),
    Endpoint("DELETE", CLIENTS + "/{client}", remove_client, None, status=204),
    Endpoint("GET", "/api/pending", list_pending, api_types.PendingList, query=api_types.PendingQuery),
    Endpoint("GET", "/api/pending/events", stream=stream_pending),
    Endpoint(
        "POST",
        "/api/pending/resolve",
        resolve_batch,
        api_types.BatchResults,
        api_types.BatchResolveRequest,
        body_limit=4 * ANSWER_BYTES,
    ),
    Endpoint("GET", "/api/grants", list_grants, api_types.Grants, query=api_types.GrantsQuery),
    Endpoint("DELETE", "/api/grants/{conversation}/{grant}", revoke_grant, None, status=204),
    Endpoint("GET", "/api/deputies", list_deputies, api_types.Delegations),
    Endpoint("POST", "/api/deputies", name_deputy, Delegation, api_types.NewDelegation, status=201),
    Endpoint("DELETE", "/api/deputies/{delegation}", end_delegation, None, status=204),
    Endpoint("GET", "/api/health", check_health, api_types.Health),
    Endpoint("GET", "/api/me", show_me, api_types.Me),
)
