"""What goes over the wire beside the structs of the core, which are sent as they are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, cast

import msgspec
import msgspec.inspect

from assent.core import codec
from assent.core.decisions import Accepted, Decision, Pending, Principal
from assent.core.events import VERSION, AnyEvent, Mode
from assent.core.inputs import WhenBusy
from assent.core.live import AnyLive, LiveEvent, Snapshot, Suspended
from assent.core.state import Grant, Status
from assent.core.strict_json import refuse_duplicate_keys
from assent.errors import Invalid
from assent.runtime.runtime import ConversationInfo
from assent.server.problems import Problem

MANY = 2**53
"""Sequence numbers end here: what a page's numbers can hold."""
PAGE = 500
BATCH = 200
Seq = Annotated[int, msgspec.Meta(ge=0, le=MANY)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
ToolName = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is asked: a word that we do not know is refused, never ignored."""


# --- decisions ---
# The log takes what a later version has added to a decision; a caller's slip must not pass for it.

_GIVEN: dict[type, Any] = {
    msgspec.defstruct(f"Given{kind.__name__}", [], bases=(kind,), frozen=True, forbid_unknown_fields=True): kind
    for kind in cast("tuple[type[msgspec.Struct], ...]", Decision.__args__)  # type: ignore[attr-defined]
}
for _strict, _kind in _GIVEN.items():
    _strict.__doc__ = _kind.__doc__
if TYPE_CHECKING:
    Given = Decision
else:
    Given = Union[tuple(_GIVEN)]  # noqa: UP007


def given(decision: Any) -> Decision:
    """The decision that was given."""
    return _GIVEN[type(decision)](*msgspec.structs.astuple(decision))


# --- bodies ---


class NewConversation(Request, frozen=True, kw_only=True):
    """Open a conversation; an id is made up if none is given, and the agent may be left out where there is one."""

    id: Name | None = None
    agent: str | None = None
    metadata: dict[str, Any] | None = None


class NewMessage(Request, frozen=True, kw_only=True):
    """Say something."""

    text: str
    when_busy: WhenBusy = "refuse"
    mode: Mode | None = None
    agent: str | None = None


class Cancelling(Request, frozen=True, kw_only=True):
    """End the open turn."""

    reason: str | None = None


class Resolving(Request, frozen=True, kw_only=True):
    """Decide a waiting call. An approval carries the digest of what was shown."""

    decision: Given


class Previewing(Request, frozen=True, kw_only=True):
    """What would the call do with these arguments?"""

    args: dict[str, Any]


class Progressing(Request, frozen=True, kw_only=True):
    """How far the client that runs a call is."""

    client: Name
    payload: Any


class Announcing(Request, frozen=True, kw_only=True):
    """A page is there and can run these client tools; an empty list stands for all."""

    client: Name | None = None
    tools: Annotated[list[ToolName], msgspec.Meta(max_length=500)] = []


class Leasing(Request, frozen=True, kw_only=True):
    """May this client run the call?"""

    client: Name


class Nothing(Request, frozen=True, kw_only=True):
    """No more is to be said."""


class BatchItem(Request, frozen=True, kw_only=True):
    """One decision of a batch."""

    conversation: Name
    call: str
    decision: Given


class BatchResolving(Request, frozen=True, kw_only=True):
    """Decide several calls: all are looked at before any is decided, then each stands for itself."""

    decisions: Annotated[list[BatchItem], msgspec.Meta(min_length=1, max_length=BATCH)]


# --- queries ---


class NoQuery(Request, frozen=True, kw_only=True):
    pass


class WhichConversations(Request, frozen=True, kw_only=True):
    status: Status | None = None
    cursor: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=PAGE)] = 100
    order: Literal["id", "newest"] = "id"


class WhichMessages(Request, frozen=True, kw_only=True):
    before: Seq | None = None
    """The messages before this one, counted from 0, instead of the newest: ``earlier`` of the last answer."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=PAGE)] = PAGE


class WhichEvents(Request, frozen=True, kw_only=True):
    after: Seq = 0
    before: Seq | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=PAGE)] = PAGE
    last: bool = False
    """The newest ``limit`` of them instead of the oldest: how a page scrolls back."""


class FromWhere(Request, frozen=True, kw_only=True):
    after: Seq = 0


class OneOrAll(Request, frozen=True, kw_only=True):
    conversation: Name | None = None


class One(Request, frozen=True, kw_only=True):
    conversation: Name


# --- answers ---


class Opened(msgspec.Struct, frozen=True):
    conversation: str


class Conversations(msgspec.Struct, frozen=True):
    conversations: list[ConversationInfo]
    next: str | None
    """The cursor of the next page; null: there is none."""


class ShownConversation(Snapshot, frozen=True, kw_only=True):
    """A conversation at one moment, with one page of its messages: the newest, or those before ``before``."""

    earlier: int
    """How many messages come before the first of these: ``before`` of the next page; 0: there are none."""


class Said(msgspec.Struct, frozen=True):
    seq: int


class WasCancelled(msgspec.Struct, frozen=True):
    cancelled: bool
    """False: there was nothing to cancel."""


class Worker(msgspec.Struct, frozen=True):
    state: str
    """As its log has it."""
    claimed: bool
    """Whether a living process has it."""
    able: int
    """How many living processes run its agent."""


class Log(msgspec.Struct, frozen=True):
    events: list[AnyEvent]
    next: int | None
    """Go on with ``after`` this (with ``last``: ``before`` this); null: that was all."""


class RawLog(msgspec.Struct, frozen=True):
    """A ``Log`` of events as they are stored: an event is encoded once in its life."""

    events: list[msgspec.Raw]
    next: int | None


class Announced(msgspec.Struct, frozen=True):
    client: str
    heartbeat: float
    """Seconds between heartbeats; one that misses two counts as gone."""


class Leased(msgspec.Struct, frozen=True):
    leased: bool
    """False: another client runs it, or it does not wait for a client."""


class PendingList(msgspec.Struct, frozen=True):
    pending: list[Pending]


class Removed(msgspec.Struct, frozen=True):
    conversation: str
    call: str


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of one decision of a batch: accepted, or a problem."""

    conversation: str
    call: str
    status: Literal["accepted"] | None = None
    seq: int | None = None
    problem: Problem | None = None


class Results(msgspec.Struct, frozen=True):
    results: list[Result]


class Grants(msgspec.Struct, frozen=True):
    grants: list[Grant]


class Health(msgspec.Struct, frozen=True):
    status: Literal["ok"] = "ok"


class Me(msgspec.Struct, frozen=True):
    principal: str
    agents: list[str]
    """Those that run here."""


ANSWERS: tuple[Any, ...] = (AnyLive, Removed, Accepted, Problem)
"""What is answered beside the types that routes name."""


# --- reading and writing ---

_encoder = msgspec.json.Encoder()
_decoders: dict[type, msgspec.json.Decoder[Any]] = {}


def encode(value: Any) -> bytes:
    """JSON, as it is sent."""
    return _encoder.encode(value)


def decode(body: bytes, into: type) -> Any:
    """A request's body; Invalid says what does not fit and where."""
    decoder = _decoders.get(into)
    if decoder is None:
        decoder = _decoders[into] = msgspec.json.Decoder(into)
    try:
        value = decoder.decode(body or b"{}")
        if body:
            refuse_duplicate_keys(body, "the body")
        if _NUL.search(body):
            raise Invalid("the body holds the character NUL (\\u0000): leave it out")
        return value
    except RecursionError:
        raise Invalid("the body is nested too deeply; flatten it") from None
    except (msgspec.MsgspecError, UnicodeError, ValueError, OverflowError) as problem:
        if _HALF.search(body) and "truncated" in str(problem):
            raise Invalid("the body does not fit: half of a surrogate pair (such as \\ud800) is no text") from None
        raise Invalid(f"the body does not fit: {_explained(problem, into)}") from None


def decode_query(query: Sequence[tuple[str, str]], into: type) -> Any:
    """A request's query; each parameter once."""
    given = dict(query)
    if len(given) != len(query):
        raise Invalid("a query parameter was given twice")
    try:
        return msgspec.convert(given, cast(Any, into), strict=False)
    except (msgspec.ValidationError, ValueError, OverflowError) as problem:
        raise Invalid(f"the query does not fit: {_explained(problem, into)}") from None


_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
_HALF = re.compile(rb"\\u[dD][89abAB]")


def _explained(problem: Exception, into: type) -> str:
    """What does not fit; where one of several words or fields was expected, which."""
    text = str(problem)
    if text == "Input data was truncated":
        return "it is no whole JSON: it ends too early"
    unknown = text.startswith("Object contains unknown field")
    place = text.rpartition(" - at `")[2]
    known = unknown or text.startswith(("Invalid value", "Invalid enum value"))
    found = [msgspec.inspect.type_info(into)] if known else []
    for key in re.findall(r"\.(\w+)", place):
        structs = [each for each in _within(found) if isinstance(each, msgspec.inspect.StructType)]
        tags = [str(each.tag) for each in structs if each.tag_field == key]
        if tags:
            return f"{text}; one of {', '.join(tags)}"
        found = [field.type for each in structs for field in each.fields if field.encode_name == key]
    if unknown:
        structs = [each for each in _within(found) if isinstance(each, msgspec.inspect.StructType)]
        lists = [(each.tag, ", ".join(field.encode_name for field in each.fields)) for each in structs]
        return f"{text}; known: {'; '.join(f'{tag}: {names}' if tag else names for tag, names in lists)}"
    literals = [each for each in _within(found) if isinstance(each, msgspec.inspect.LiteralType)]
    words = [str(word) for each in literals for word in each.values]
    return f"{text}; one of {', '.join(words)}" if words else text


def _within(types: Sequence[msgspec.inspect.Type]) -> list[msgspec.inspect.Type]:
    """Them, or what they are made of."""
    found: list[msgspec.inspect.Type] = []
    for each in types:
        match each:
            case msgspec.inspect.UnionType():
                found += _within(each.types)
            case msgspec.inspect.ListType():
                found += _within([each.item_type])
            case _:
                found.append(each)
    return found


# --- server-sent events ---


class _Head(msgspec.Struct):
    type: str
    seq: int
    v: int = VERSION


_heads = msgspec.json.Decoder(_Head)


def frame(name: str, data: bytes, seq: int | None = None) -> bytes:
    """One event of a stream; JSON has no line breaks of its own."""
    place = b"" if seq is None else b"id: %d\n" % seq
    return b"%sevent: %s\ndata: %s\n\n" % (place, name.encode(), data)


def current(body: bytes) -> bytes:
    """An event of the log as it is sent: as it is stored, unless an older version has written it or it has claims."""
    plain = _heads.decode(body).v == VERSION and b'"claims"' not in body
    return body if plain else _encoder.encode(_public(codec.decode(body)))


def stored(body: bytes) -> tuple[int, bytes]:
    """An event of the log as a frame, with its sequence number."""
    head = _heads.decode(body)
    return head.seq, frame(head.type, current(body), head.seq)


def told(event: AnyEvent | AnyLive) -> bytes:
    """An event as it happens, as a frame."""
    return frame(event.type, _encoder.encode(_public(event)), event.seq)


# --- who did it: what claims were made to sign somebody in is nobody else's business ---


def _bare(who: Principal) -> Principal:
    return Principal(who.id, who.roles)


def _public(event: AnyEvent | AnyLive) -> AnyEvent | AnyLive:
    if isinstance(event, Suspended):
        return msgspec.structs.replace(event, pending=entry(event.pending))
    if isinstance(event, LiveEvent) or not event.by.claims:
        return event
    return msgspec.structs.replace(event, by=_bare(event.by))


def entry(waits: Pending) -> Pending:
    """What waits, as it is sent."""
    return msgspec.structs.replace(waits, principal=_bare(waits.principal)) if waits.principal.claims else waits


def grant(given: Grant) -> Grant:
    """A remembered approval, as it is sent."""
    return msgspec.structs.replace(given, by=_bare(given.by)) if given.by.claims else given
