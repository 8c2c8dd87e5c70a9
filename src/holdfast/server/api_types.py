"""Types of requests and responses beside the structs of the core, their JSON codec, and the frames of streams."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, cast

import msgspec
import msgspec.inspect

from holdfast.channels.card import public_pending, public_principal
from holdfast.core import codec
from holdfast.core.audit import DecisionKind
from holdfast.core.decisions import Accepted, Decision, GrantScope, Pending, Principal
from holdfast.core.events import (
    AnyEvent,
    ApprovalTakenBack,
    CallResolved,
    CancelRequested,
    DeadlineExtended,
    GraceEnded,
    GrantGiven,
    Mode,
    VoteCast,
)
from holdfast.core.inputs import WhenBusy
from holdfast.core.json_values import refuse_duplicate_keys
from holdfast.core.live import AnyLive, LiveEvent, Snapshot, Suspended
from holdfast.core.state import Delegation, Grant, Status
from holdfast.errors import Invalid
from holdfast.runtime.audit import DecisionFilters
from holdfast.runtime.audit_export import ExportFormat
from holdfast.runtime.runtime import ConversationInfo
from holdfast.server.problems import Problem

MAX_SEQ = 2**53
"""Largest sequence number: JavaScript numbers are exact up to here."""
PAGE = 500
BATCH = 200
Seq = Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQ)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
ToolName = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class StrictRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of request types. Unknown fields are refused."""


# --- decisions ---
# The log accepts unknown fields in a decision, which a later version may have written. In a request they are typos:
# each decision has a strict subclass here.

_STRICT_DECISIONS: dict[type, Any] = {
    msgspec.defstruct(f"Given{kind.__name__}", [], bases=(kind,), frozen=True, forbid_unknown_fields=True): kind
    for kind in cast("tuple[type[msgspec.Struct], ...]", Decision.__args__)  # type: ignore[attr-defined]
}
for _strict, _kind in _STRICT_DECISIONS.items():
    _strict.__doc__ = _kind.__doc__
if TYPE_CHECKING:
    StrictDecision = Decision
else:
    StrictDecision = Union[tuple(_STRICT_DECISIONS)]  # noqa: UP007


def to_decision(decision: Any) -> Decision:
    """Return the core's decision for a strict one."""
    return _STRICT_DECISIONS[type(decision)](*msgspec.structs.astuple(decision))


# --- bodies ---


class NewConversation(StrictRequest, frozen=True, kw_only=True):
    """Open a conversation. Without an id it gets a random one; the agent may be omitted if there is only one."""

    id: Name | None = None
    agent: str | None = None
    metadata: dict[str, Any] | None = None


class NewMessage(StrictRequest, frozen=True, kw_only=True):
    """Send a message."""

    text: str
    when_busy: WhenBusy = "refuse"
    mode: Mode | None = None
    agent: str | None = None


class CancelRequest(StrictRequest, frozen=True, kw_only=True):
    """Cancel the open turn."""

    reason: str | None = None


class RenameRequest(StrictRequest, frozen=True, kw_only=True):
    """Give the conversation a title."""

    title: str


class ArchiveRequest(StrictRequest, frozen=True, kw_only=True):
    """Archive the conversation; with false, unarchive it."""

    archived: bool = True


class ResolveRequest(StrictRequest, frozen=True, kw_only=True):
    """Decide a pending call. An approval carries the digest of the call that was shown."""

    decision: StrictDecision


class PreviewRequest(StrictRequest, frozen=True, kw_only=True):
    """Preview a call with these arguments."""

    args: dict[str, Any]


class ProgressRequest(StrictRequest, frozen=True, kw_only=True):
    """Report the progress of a call that a client runs."""

    client: Name
    payload: Any


class AnnounceRequest(StrictRequest, frozen=True, kw_only=True):
    """Announce a page that can run these client tools; an empty list stands for all."""

    client: Name | None = None
    tools: Annotated[list[ToolName], msgspec.Meta(max_length=500)] = []


class LeaseRequest(StrictRequest, frozen=True, kw_only=True):
    """Lease a call to this client."""

    client: Name


class EmptyRequest(StrictRequest, frozen=True, kw_only=True):
    """A request without fields."""


class BatchItem(StrictRequest, frozen=True, kw_only=True):
    """One decision of a batch."""

    conversation: Name
    call: str
    decision: StrictDecision


class BatchResolveRequest(StrictRequest, frozen=True, kw_only=True):
    """Decide several calls. All decisions are validated first; then each is accepted or refused on its own."""

    decisions: Annotated[list[BatchItem], msgspec.Meta(min_length=1, max_length=BATCH)]


# --- queries ---


class NoQuery(StrictRequest, frozen=True, kw_only=True):
    pass


class ConversationsQuery(StrictRequest, frozen=True, kw_only=True):
    status: Status | None = None
    cursor: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=PAGE)] = 100
    order: Literal["id", "newest"] = "id"
    archived: bool = False
    """List the archived conversations instead of the others."""


class SearchQuery(StrictRequest, frozen=True, kw_only=True):
    text: Annotated[str, msgspec.Meta(max_length=1000)]
    """Words, at most 16; a hit has each of them, as the beginning of a word."""
    cursor: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20
    archived: bool | None = None
    """True: only archived conversations; false: only others; by default all."""


class DecisionFilterQuery(StrictRequest, frozen=True, kw_only=True):
    who: str | None = None
    """The id of a principal: what it decided, and what its deputies decided for it."""
    tool: str | None = None
    conversation: str | None = None
    kinds: str | None = None
    """Kinds of decisions, separated by commas, such as ``deny,refused``; by default all."""
    since: float | None = None
    """Decisions from this time on, in seconds since the Unix epoch."""
    until: float | None = None
    """Decisions before this time."""
    text: Annotated[str, msgspec.Meta(max_length=1000)] | None = None
    """Words in the arguments, the plan, the question, the reason, the answer or the names."""
    verify: bool = False
    """Verify the hash chains of the conversations, and compare the decisions with the index that finds them."""

    def filters(self) -> DecisionFilters:
        return {
            "who": self.who,
            "tool": self.tool,
            "conversation": self.conversation,
            "kinds": cast("list[DecisionKind]", [kind for kind in (self.kinds or "").split(",") if kind]),
            "since": self.since,
            "until": self.until,
            "text": self.text,
            "verify": self.verify,
        }


class DecisionsQuery(DecisionFilterQuery, frozen=True, kw_only=True):
    cursor: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 50


class ExportQuery(DecisionFilterQuery, frozen=True, kw_only=True):
    format: ExportFormat = "csv"


class MessagesQuery(StrictRequest, frozen=True, kw_only=True):
    before: Seq | None = None
    """Show the messages before this index instead of the newest: ``earlier`` of the last response."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=PAGE)] = PAGE


class EventsQuery(StrictRequest, frozen=True, kw_only=True):
    after: Seq = 0
    before: Seq | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=PAGE)] = PAGE
    last: bool = False
    """Return the newest ``limit`` events instead of the oldest, to scroll back."""


class TimelineQuery(StrictRequest, frozen=True, kw_only=True):
    before: Annotated[int, msgspec.Meta(ge=1, le=MAX_SEQ)] | None = None
    """Show the turns that began before this event: ``earlier`` of the last response."""
    turns: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20


class FollowQuery(StrictRequest, frozen=True, kw_only=True):
    after: Seq = 0


class PendingQuery(StrictRequest, frozen=True, kw_only=True):
    conversation: Name | None = None


class CallQuery(StrictRequest, frozen=True, kw_only=True):
    wait: Annotated[float, msgspec.Meta(ge=0, le=30)] = 0
    """Seconds to wait until the call has ended or waits again."""


class GrantsQuery(StrictRequest, frozen=True, kw_only=True):
    conversation: Name | None = None


# --- responses ---


class OpenedConversation(msgspec.Struct, frozen=True):
    conversation: str


class Conversations(msgspec.Struct, frozen=True):
    conversations: list[ConversationInfo]
    next: str | None
    """The cursor of the next page; null on the last page."""


class ConversationPage(Snapshot, frozen=True, kw_only=True):
    """The state of a conversation, with one page of its messages: the newest, or those before ``before``."""

    earlier: int
    """The number of messages before this page, which is ``before`` of the next one; 0 on the last page."""


class AcceptedMessage(msgspec.Struct, frozen=True):
    seq: int


class CancelOutcome(msgspec.Struct, frozen=True):
    cancelled: bool
    """False if there was no open turn."""


class Worker(msgspec.Struct, frozen=True):
    state: str
    """The status of the conversation in its log."""
    claimed: bool
    """Whether a running worker owns the conversation."""
    able: int
    """The number of running workers with its agent."""


class EventLog(msgspec.Struct, frozen=True):
    events: list[AnyEvent]
    next: int | None
    """``after`` of the next page (with ``last``: ``before``); null on the last page."""


class RawEventLog(msgspec.Struct, frozen=True):
    """An ``EventLog`` with events as they are stored, without decoding them."""

    events: list[msgspec.Raw]
    next: int | None


class AnnouncedClient(msgspec.Struct, frozen=True):
    client: str
    heartbeat: float
    """Seconds between heartbeats. A client that misses two counts as gone."""


class LeaseOutcome(msgspec.Struct, frozen=True):
    leased: bool
    """False if another client runs the call, or it is not pending for clients."""


class PendingList(msgspec.Struct, frozen=True):
    pending: list[Pending]


class RemovedPending(msgspec.Struct, frozen=True):
    conversation: str
    call: str


class BatchResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The outcome of one decision of a batch: accepted, or a problem."""

    conversation: str
    call: str
    status: Literal["accepted"] | None = None
    seq: int | None = None
    missing: int = 0
    """How many more people must approve the call before it runs."""
    starts_at: float | None = None
    """When the approved call runs, if the approval can be taken back until then."""
    problem: Problem | None = None


class BatchResults(msgspec.Struct, frozen=True):
    results: list[BatchResult]


class Grants(msgspec.Struct, frozen=True):
    grants: list[Grant]


class NewDelegation(StrictRequest, frozen=True, kw_only=True):
    to: Name
    until: float | None = None
    """When it ends, in seconds since the epoch."""
    duration: str | float | None = None
    """Instead of ``until``: how long it lasts, such as ``14d``."""


class Delegations(msgspec.Struct, frozen=True):
    delegations: list[Delegation]


class OfferedScopes(msgspec.Struct, frozen=True):
    """Where the caller may have an approval remembered."""

    args: tuple[GrantScope, ...] = ()
    """For remember="args"."""
    tool: tuple[GrantScope, ...] = ()
    """For remember="tool"."""


class Health(msgspec.Struct, frozen=True):
    status: Literal["ok"] = "ok"


class Me(msgspec.Struct, frozen=True):
    principal: str
    roles: tuple[str, ...]
    """The principal's roles, which a tool's ``approver_roles`` and ``escalate_to`` may name."""
    deputy_of: list[Principal]
    """The principals for whom the caller may decide now, as their deputy."""
    agents: list[str]
    """The agents that run here."""


EXTRA_TYPES: tuple[Any, ...] = (AnyLive, RemovedPending, Accepted, Problem)
"""Types in the OpenAPI document that no endpoint names: contents of streams, and problems."""


# --- JSON ---

_encoder = msgspec.json.Encoder()
_decoders: dict[type, msgspec.json.Decoder[Any]] = {}


def encode_json(value: Any) -> bytes:
    """Return the value as JSON."""
    return _encoder.encode(value)


def decode_body(body: bytes, into: type) -> Any:
    """Return the decoded body of a request; raise Invalid with the place of the error."""
    decoder = _decoders.get(into)
    if decoder is None:
        decoder = _decoders[into] = msgspec.json.Decoder(into)
    try:
        value = decoder.decode(body or b"{}")
        if body:
            refuse_duplicate_keys(body, "the body")
        if _NUL.search(body):
            raise Invalid("the body contains the character NUL (\\u0000): remove it")
        return value
    except RecursionError:
        raise Invalid("the body is nested too deeply; flatten it") from None
    except (msgspec.MsgspecError, UnicodeError, ValueError, OverflowError) as problem:
        if _HALF_SURROGATE.search(body) and "truncated" in str(problem):
            raise Invalid("the body is invalid: half of a surrogate pair (such as \\ud800) is not text") from None
        raise Invalid(f"the body is invalid: {_explain_mismatch(problem, into)}") from None


def decode_query(query: Sequence[tuple[str, str]], into: type) -> Any:
    """Return the decoded query of a request; raise Invalid with the reason, also for a repeated parameter."""
    given = dict(query)
    if len(given) != len(query):
        raise Invalid("a query parameter is given twice")
    try:
        return msgspec.convert(given, cast(Any, into), strict=False)
    except (msgspec.ValidationError, ValueError, OverflowError) as problem:
        raise Invalid(f"the query is invalid: {_explain_mismatch(problem, into)}") from None


_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
_HALF_SURROGATE = re.compile(rb"\\u[dD][89abAB]")


def _explain_mismatch(problem: Exception, into: type) -> str:
    """Return the decoder's message, with the valid words or fields where it has none."""
    text = str(problem)
    if text == "Input data was truncated":
        return "the JSON is incomplete: it ends too early"
    unknown = text.startswith("Object contains unknown field")
    place = text.rpartition(" - at `")[2]
    known = unknown or text.startswith(("Invalid value", "Invalid enum value"))
    found = [msgspec.inspect.type_info(into)] if known else []
    for key in re.findall(r"\.(\w+)", place):
        structs = [type_ for type_ in _flatten_types(found) if isinstance(type_, msgspec.inspect.StructType)]
        tags = [str(struct.tag) for struct in structs if struct.tag_field == key]
        if tags:
            return f"{text}; one of {', '.join(tags)}"
        found = [field.type for struct in structs for field in struct.fields if field.encode_name == key]
    if unknown:
        structs = [type_ for type_ in _flatten_types(found) if isinstance(type_, msgspec.inspect.StructType)]
        lists = [(struct.tag, ", ".join(field.encode_name for field in struct.fields)) for struct in structs]
        return f"{text}; known: {'; '.join(f'{tag}: {names}' if tag else names for tag, names in lists)}"
    literals = [type_ for type_ in _flatten_types(found) if isinstance(type_, msgspec.inspect.LiteralType)]
    words = [str(word) for literal in literals for word in literal.values]
    return f"{text}; one of {', '.join(words)}" if words else text


def _flatten_types(types: Sequence[msgspec.inspect.Type]) -> list[msgspec.inspect.Type]:
    """Return the types with unions and lists replaced by their members."""
    found: list[msgspec.inspect.Type] = []
    for type_ in types:
        match type_:
            case msgspec.inspect.UnionType():
                found += _flatten_types(type_.types)
            case msgspec.inspect.ListType():
                found += _flatten_types([type_.item_type])
            case _:
                found.append(type_)
    return found


# --- server-sent events ---


class _EventHead(msgspec.Struct):
    type: str
    seq: int
    v: int


_head_decoder = msgspec.json.Decoder(_EventHead)


def encode_frame(name: str, data: bytes, seq: int | None = None) -> bytes:
    """Return one server-sent event. The data is JSON, which our encoder writes without line breaks."""
    id_line = b"" if seq is None else b"id: %d\n" % seq
    return b"%sevent: %s\ndata: %s\n\n" % (id_line, name.encode(), data)


def public_body(body: bytes) -> bytes:
    """Return a stored event as it is sent: unchanged, unless it is of an older version or contains claims."""
    head = _head_decoder.decode(body)
    unchanged = head.v == codec.VERSIONS.get(head.type) and b'"claims"' not in body
    return body if unchanged else _encoder.encode(_public_event(codec.decode_event(body)))


def log_frame(body: bytes) -> tuple[int, bytes]:
    """Return the sequence number and the frame of a stored event."""
    head = _head_decoder.decode(body)
    return head.seq, encode_frame(head.type, public_body(body), head.seq)


def live_frame(event: AnyEvent | AnyLive) -> bytes:
    """Return the frame of a new event."""
    return encode_frame(event.type, _encoder.encode(_public_event(event)), event.seq)


ON_BEHALF_EVENTS = (
    CallResolved,
    CancelRequested,
    VoteCast,
    DeadlineExtended,
    GrantGiven,
    ApprovalTakenBack,
    GraceEnded,
)
"""Events that name the principal for whom a deputy acted."""

# --- principals: the claims of a sign-in are never sent to viewers ---


def _public_event(event: AnyEvent | AnyLive) -> AnyEvent | AnyLive:
    if isinstance(event, Suspended):
        return msgspec.structs.replace(event, pending=public_pending(event.pending))
    if isinstance(event, LiveEvent):
        return event
    if isinstance(event, GraceEnded):
        event = msgspec.structs.replace(event, approver=public_principal(event.approver))
    if isinstance(event, ON_BEHALF_EVENTS) and event.on_behalf_of is not None:
        event = msgspec.structs.replace(event, on_behalf_of=public_principal(event.on_behalf_of))
    return msgspec.structs.replace(event, by=public_principal(event.by)) if event.by.claims else event


def public_delegation(delegation: Delegation) -> Delegation:
    """Return a delegation as it is sent."""
    return msgspec.structs.replace(delegation, principal=public_principal(delegation.principal))


def public_grant(grant: Grant) -> Grant:
    """Return a remembered approval as it is sent."""
    represented = grant.on_behalf_of and public_principal(grant.on_behalf_of)
    return msgspec.structs.replace(grant, by=public_principal(grant.by), on_behalf_of=represented)
