"""The encoding of events: round trips, versions, upcasters, damage, the hash chain."""

import hashlib
import json
import typing

import msgspec
import pytest

from holdfast.core import codec, events
from holdfast.core.decisions import (
    Answer,
    Approve,
    ClientResult,
    Deny,
    Detached,
    Expired,
    Failed,
    Principal,
    Submit,
)
from holdfast.core.events import Attempt, CallMade, ErrorInfo, Usage, Verdict
from holdfast.core.state import State
from holdfast.core.tool import Default, Retention
from holdfast.errors import HoldfastError, StoreDamaged, StoreNewer

HEAD: dict[str, typing.Any] = {
    "seq": 7,
    "at": 12.5,
    "by": Principal("ann", roles=("boss",), claims={"team": [1, None, {"é": "\U0001f600"}]}),
    "v": 1,
}
ERROR = ErrorInfo("timeout", "late", {"after": 3})
ATTEMPTS = (Attempt("m", Usage(1, 2, None, None, 0.5)), Attempt("m", None, ERROR))
MADE = CallMade(
    id="bcdfg1", provider_id="p1", tool="pay", args={"n": 1, "deep": [{"a": [True, 1.5, "ü"]}]}, raw="{", refused=ERROR,
    grant="g1", executor="client", gate="required", planned=True, manual=True, prompt="Pay {n}?", expires=60.0,
    on_expiry=Default({"v": 1}), recovery="ask", timeout=1.5, retention=Retention.last(3), risk="high",
    schema={"type": "object"}, result_schema=True,
)  # fmt: skip
CALL: dict[str, typing.Any] = {"call_id": "bcdfg1"}
VERDICTS = (Verdict("approval", "required", "why"),)
FULL = [
    events.ConversationOpened(**HEAD, agent="a", metadata={"k": [1]}),
    events.MessageReceived(**HEAD, text="h\u2028i \U0001f600", agent="a", mode="manual", output={"type": "string"}),
    events.MessageReceived(**HEAD, text="why?", agent="a", aside=True),
    events.TurnStarted(**HEAD, turn=1, message=2, agent="a", mode="manual", steps=3),
    events.AssistantSaid(
        **HEAD, turn=1, step=1, id="m1.1", text="t", thinking="hm", calls=(MADE,), attempts=ATTEMPTS, partial=True,
        parts=[{"kind": "x", "data": {"signature": "=="}}], provider="p",
    ),
    events.OutputRejected(**HEAD, turn=1, message="no", attempts=ATTEMPTS, text="{}", aside=3),
    events.AsideAnswered(
        **HEAD, turn=1, message=3, id="a3.1", text="t", thinking="hm", attempts=ATTEMPTS, error=ERROR, finish="length",
        verdicts=VERDICTS, context={"estimate": 3},
    ),
    events.CallSuspended(
        **HEAD, **CALL, tool="pay", executor="client", kind="approval", prompt="?", args={"n": 1}, preview=[1],
        preview_error="x", digest="d", deadline=99.5, on_expiry=Default(None), schema={"type": "object"},
        result_schema=False, choices=["a", 1], risk="medium", recovery=True, reason="r", verdicts=VERDICTS,
    ),
    *(
        events.CallResolved(**HEAD, **CALL, kind="approval", decision=decision, digest="d")
        for decision in (
            Approve({"n": 2}, "d", "args", "1h"), Approve(), Deny("no", stop=True), Answer({"a": 1}), ClientResult([1]),
            Submit(None), Failed("timeout", "m", {"d": 1}), Expired(), Detached(),
        )
    ),
    events.VoteCast(**HEAD, **CALL, suspension=4, digest="d", missing=1),
    events.ApprovalTakenBack(**HEAD, **CALL, suspension=4, approval=6, deadline=9.5, vote=5),
    events.GraceEnded(**HEAD, **CALL, approval=6, approver=Principal("ada", ("boss",))),
    events.DeadlineExtended(**HEAD, **CALL, suspension=4, until=9.5),
    events.ReminderDue(**HEAD, **CALL, suspension=4, before=60.0),
    events.CallEscalated(**HEAD, **CALL, suspension=4, to=("boss",)),
    events.CallStarted(**HEAD, **CALL, attempt=2, epoch=9, grant="g1", digest="d", verdicts=VERDICTS),
    events.CallReturned(
        **HEAD, **CALL, tool="pay", ok=False, value="v", data={"d": 1}, error=ERROR, source="client", artifact="s",
        size=9, edited={"n": 2}, halt="enough", verdicts=VERDICTS,
    ),
    events.CancelRequested(**HEAD, turn=1, reason="because"),
    events.HistorySummarised(**HEAD, upto=3, text="s", attempts=ATTEMPTS),
    events.TurnEnded(**HEAD, turn=1, reason="failed", value=[1], error=ERROR, halted=True),
    events.GrantGiven(**HEAD | {"v": 2}, **CALL, grant="g1", tool="pay", remember="args", args_digest="d", until=5.5),
    events.GrantRevoked(**HEAD, grant="g1"),
    events.ResolutionRefused(**HEAD, **CALL, decision="Approve", reason="may not"),
    events.ConversationImported(**HEAD, trusted=True, origin="support", grants=("g1",)),
    events.ConversationRenamed(**HEAD, title="Refund of order 7"),
    events.ConversationArchived(**HEAD, archived=False),
    events.DeputyNamed(**HEAD, delegation="d7", deputy="bob", until=99.5),
    events.DeputyEnded(**HEAD, delegation="d7"),
]  # fmt: skip
ALL = typing.get_args(events.AnyEvent)
MESSAGE = FULL[1]


def test_the_examples_contain_every_type_of_event():
    """So the tests below cover every type of event [B54]."""
    assert {type(event) for event in FULL} == set(ALL)
    assert len(ALL) == 27


@pytest.mark.parametrize("event", FULL, ids=lambda e: e.type)
def test_an_event_round_trips_to_the_same_value_and_the_same_bytes(event):
    """A log that is read and written again does not change [B53]."""
    body = codec.encode_event(event)
    again = codec.decode_event(body)
    assert again == event
    assert type(again) is type(event)
    assert codec.encode_event(again) == body
    plain = json.loads(body)
    assert (plain["type"], plain["seq"], plain["v"]) == (type(event).__name__, 7, event.VERSION)


@pytest.mark.parametrize("event", FULL, ids=lambda e: e.type)
def test_unknown_fields_of_a_later_minor_version_are_ignored(event):
    """Fields are only ever added with a default [B53]."""
    plain = json.loads(codec.encode_event(event)) | {"added_later": {"x": 1}}
    assert codec.decode_event(json.dumps(plain).encode()) == event


@pytest.mark.parametrize("event", FULL, ids=lambda e: e.type)
def test_an_event_of_a_newer_version_is_refused(event):
    """It is refused also if the current code could decode it."""
    plain = json.loads(codec.encode_event(event))
    v = event.VERSION + 1
    for newer in (plain | {"v": v}, {"type": "NotYetInvented", "v": v, "seq": 7}, plain | {"v": v, "seq": "seven"}):
        with pytest.raises(StoreNewer, match="upgrade") as refused:
            codec.decode_event(json.dumps(newer).encode())
        assert refused.value.kind == "store_newer"


APPROVED = next(event for event in FULL if isinstance(event, events.CallResolved))
DAMAGED = {
    "empty": b"",
    "cut": codec.encode_event(MESSAGE)[:-3],
    "not UTF-8": codec.encode_event(MESSAGE).replace(b"a", b"\xff", 1),
    "not JSON": b"hello",
    "a list": b"[]",
    "no type": b'{"v":1,"seq":1}',
    "unknown type": b'{"type":"Nonsense","v":1,"seq":1,"at":1.0,"by":{"id":"a"}}',
    "a missing field": json.dumps(
        {k: v for k, v in json.loads(codec.encode_event(MESSAGE)).items() if k != "text"}
    ).encode(),
    "a field of another type": codec.encode_event(MESSAGE).replace(b'"seq":7', b'"seq":"7"'),
    "no version": codec.encode_event(MESSAGE).replace(b'"v":1,', b""),
    "an unknown decision": codec.encode_event(APPROVED).replace(b'"type":"approve"', b'"type":"nod"'),
    "100,000 levels": b'{"type":"MessageReceived","v":1,"x":' + b"[" * 100_000,
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_bytes_are_reported_as_damage(name):
    """Damage is never repaired silently."""
    with pytest.raises(StoreDamaged) as reported:
        codec.decode_event(DAMAGED[name])
    assert reported.value.kind == "corrupt_log_line"


def test_an_event_of_an_older_version_is_upcast_step_by_step(monkeypatch):
    """Each (type, version) has an upcaster, unless the type did not change."""
    monkeypatch.setattr(codec, "VERSIONS", dict.fromkeys(codec.VERSIONS, 3))
    upcasters = {
        ("MessageReceived", 1): lambda data: data | {"text": data.pop("words")},
        ("MessageReceived", 2): lambda data: data | {"text": data["text"].upper()},
    }
    monkeypatch.setattr(codec, "UPCASTERS", upcasters)
    old = json.loads(codec.encode_event(MESSAGE))
    old["words"] = old.pop("text")
    upcast = codec.decode_event(json.dumps(old).encode())
    assert isinstance(upcast, events.MessageReceived)
    assert (upcast.text, upcast.v) == (MESSAGE.text.upper(), 3)
    second = json.loads(codec.encode_event(MESSAGE)) | {"v": 2, "text": "half way"}
    assert codec.decode_event(json.dumps(second).encode()).text == "HALF WAY"
    untouched = codec.decode_event(codec.encode_event(FULL[0]))
    assert (untouched.agent, untouched.v) == ("a", 3)
    current = json.loads(codec.encode_event(MESSAGE)) | {"v": 3}
    assert codec.decode_event(json.dumps(current).encode()).text == MESSAGE.text


def test_a_grant_of_version_1_held_in_its_conversation_and_its_scope_is_what_it_covers():
    """Version 2 calls that ``remember``; ``scope`` says where the grant holds [B53]."""
    for covered in ("args", "tool"):
        old = {"type": "GrantGiven", "seq": 7, "at": 1.0, "by": {"id": "ann"}, "v": 1}
        old |= {"grant": "g7", "tool": "pay", "call_id": "b1", "scope": covered, "until": 9.5}
        grant = codec.decode_event(json.dumps(old).encode())
        assert (grant.remember, grant.scope, grant.user, grant.until) == (covered, "conversation", None, 9.5)
        assert (grant.v, grant.annotations) == (2, "")


def test_an_event_that_cannot_be_encoded_raises_log_encode_failed():
    for value in (object(), "\ud800", {1, object()}):
        with pytest.raises(HoldfastError) as failed:
            codec.encode_event(events.ConversationOpened(**HEAD, agent="a", metadata={"x": value}))
        assert failed.value.kind == "log_encode_failed"


def test_each_hash_of_the_chain_covers_every_earlier_byte():
    """A hash is SHA-256 of the previous hash and the stored bytes; the first previous hash is zeros."""
    bodies = [codec.encode_event(event) for event in FULL]
    assert bytes(32) == codec.GENESIS
    hashes = codec.hash_chain(codec.GENESIS, bodies)
    for before, body, after in zip([codec.GENESIS, *hashes], bodies, hashes, strict=False):
        assert after == hashlib.sha256(before + body).digest()
    for n, body in enumerate(bodies):
        changed = [*bodies[:n], body[:-2] + b" }", *bodies[n + 1 :]]
        others = codec.hash_chain(codec.GENESIS, changed)
        assert others[:n] == hashes[:n]
        assert all(one != other for one, other in zip(others[n:], hashes[n:], strict=True))


def test_a_snapshot_that_is_damaged_or_of_another_version_is_ignored():
    """A snapshot is a cache, so it never leads to an error."""
    state = State(conversation="c", seq=3, agent="a")
    body = codec.encode_state(state)
    assert codec.decode_state(body) == state
    other = json.loads(body) | {"version": codec.STATE_VERSION + 1}
    for bad in (json.dumps(other).encode(), b"", b"{}", body[:-2], b"\xff" + body):
        assert codec.decode_state(bad) is None


def test_null_usage_stays_null_and_sums_count_reported_values_only():
    total = Usage() + Usage(1, None) + None + Usage(2, None, cost=0.5)
    assert total == Usage(3, None, None, None, 0.5)
    assert msgspec.json.encode(Usage()) == b"{}"
