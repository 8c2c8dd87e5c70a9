"""Golden logs: every log that was ever written stays readable and keeps its meaning.

They are written once by ``generate.py``. If one of these tests fails, the code is wrong, not the file.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any, get_args

import generate
import msgspec
import pytest
from shapes import differences, incompatible_changes, shape
from shapes import events as event_types

from holdfast import Runtime
from holdfast.core import codec
from holdfast.core.decide.draft import Draft
from holdfast.core.effects import owed
from holdfast.core.events import VERSION, AnyEvent
from holdfast.core.state import Phase, State, evolve, pending_entries, status_of
from holdfast.core.transcript import Transcript
from holdfast.errors import StoreNewer
from holdfast.runtime.commit import build_append
from holdfast.stores.base import GENESIS, hash_chain
from holdfast.stores.memory import MemoryStore
from holdfast.testing import ManualClock

HERE = Path(__file__).parent
LOGS = [log for version in sorted(HERE.glob("v*")) for log in generate.logs(version)]
WHAT_TO_DO = f"""
The shape of the log is not what tests/golden/v{VERSION}/shape.json says:

{{changes}}

Logs of the old shape exist and must stay readable. So:
 - a new field: give it a default that means what its absence meant; add a scene to tests/golden/scenes.py in which
   it has another value; run `python tests/golden/generate.py --shape`, then without (existing logs are left alone).
 - a field that is removed or changes its type, its default or its meaning: raise the event's VERSION in
   core/events.py, write an upcaster in core/codec.py (UPCASTERS), add a scene, and run
   `python tests/golden/generate.py --shape --force`; leave the old logs as they are.
 - a new event: as for a new field, and fold it in core/state.py and core/transcript.py."""


def bodies(log: Path) -> list[bytes]:
    return log.read_bytes().splitlines()


def decode_log(log: Path) -> list[AnyEvent]:
    return [codec.decode_event(body) for body in bodies(log)]


def fold_log(log: Path) -> list[State]:
    states = [State(conversation=log.stem)]
    for event in decode_log(log):
        states.append(evolve(states[-1], event))
    return states


def load_expected(log: Path, what: str) -> Any:
    return json.loads(log.with_suffix(f".{what}.json").read_bytes())


def to_plain(value: Any) -> Any:
    return json.loads(msgspec.json.encode(value))


def remove_versions(value: Any) -> Any:
    """Return the value without the versions of its events: an upcast event has a newer one."""
    if isinstance(value, dict):
        event = "seq" in value and "at" in value
        return {name: remove_versions(each) for name, each in value.items() if not (event and name == "v")}
    return [remove_versions(each) for each in value] if isinstance(value, list) else value


logs = pytest.mark.parametrize("log", LOGS, ids=lambda log: f"{log.parent.name}-{log.stem}")
current = pytest.mark.parametrize(
    "log", [log for log in LOGS if log.parent.name == f"v{VERSION}"], ids=lambda log: log.stem
)


def test_every_scene_has_a_log_and_every_log_has_its_expectations() -> None:
    assert {log.stem for log in LOGS} >= set(generate.SCENES)
    for log in LOGS:
        assert log.with_suffix(".state.json").exists()
        assert log.with_suffix(".transcript.json").exists()
        assert log.with_suffix(".trace.jsonl").exists()


@logs
def test_every_line_decodes_and_sequence_numbers_have_no_gap(log: Path) -> None:
    assert [event.seq for event in decode_log(log)] == [*range(1, len(bodies(log)) + 1)]


@current
def test_every_line_is_encoded_again_byte_for_byte(log: Path) -> None:
    for body in bodies(log):
        event = codec.decode_event(body)
        if json.loads(body)["v"] == event.v:  # an upcast event has other fields
            assert codec.encode_event(event) == body


@logs
def test_the_folded_state_has_not_changed(log: Path) -> None:
    assert remove_versions(to_plain(fold_log(log)[-1])) == remove_versions(load_expected(log, "state"))


@logs
def test_the_state_after_each_event_has_not_changed(log: Path) -> None:
    trace = [json.loads(line) for line in log.with_suffix(".trace.jsonl").read_bytes().splitlines()]
    assert generate.trace(decode_log(log), log.stem) == trace


@logs
def test_the_transcript_has_not_changed(log: Path) -> None:
    transcript = Transcript()
    for event in decode_log(log):
        transcript.apply(event)
    assert to_plain(transcript.visible_messages()) == load_expected(log, "transcript")


@logs
def test_every_prefix_of_a_log_can_be_folded_and_rendered(log: Path) -> None:
    transcript = Transcript()
    for event, state in zip(decode_log(log), fold_log(log)[1:], strict=True):
        transcript.apply(event)
        assert state.seq == event.seq
        assert status_of(state) in ("idle", "preparing", "executing_tools", "awaiting_input")
        msgspec.json.encode([pending_entries(state), transcript.visible_messages()])
        assert isinstance(owed(state), frozenset)
        again = codec.decode_state(codec.encode_state(state))
        assert again == state, "a snapshot is the same state"


@logs
def test_a_runtime_serves_a_log_without_the_code_of_its_agent(log: Path) -> None:
    events = decode_log(log)

    async def main() -> None:
        store = MemoryStore()
        await store.open()
        state = State(conversation=log.stem)
        for event in events:
            draft = Draft(state, event.at)
            draft.add_event(event)
            await store.append(build_append(state, draft, owes=bool(owed(draft.state)), epoch=None, release=False))
            state = draft.state
        await store.close()
        async with Runtime(store=store.sibling(), clock=ManualClock(events[-1].at)) as desk:
            snapshot = await desk.snapshot(log.stem)
            assert to_plain(snapshot.messages) == load_expected(log, "transcript")
            assert await desk.pending(approved=True) == sorted(
                pending_entries(state), key=lambda e: (e.deadline, e.conversation, e.call)
            )
            assert await desk.history(log.stem) == events, "no event is added to the log"

    asyncio.run(main())


def test_every_type_of_event_occurs_in_a_log() -> None:
    assert {event.type for log in LOGS for event in decode_log(log)} == set(event_types())
    assert len(event_types()) == 27


def test_every_call_phase_occurs_also_at_the_end_of_a_log() -> None:
    passed = {call.phase for log in LOGS for s in fold_log(log) if s.turn for call in s.turn.calls.values()}
    assert passed == set(get_args(Phase))
    left = {call.phase for log in LOGS if (turn := fold_log(log)[-1].turn) for call in turn.calls.values()}
    assert left == set(get_args(Phase))


def test_every_kind_of_decision_expiry_recovery_and_ending_occurs() -> None:
    text = "\n".join(log.read_text() for log in LOGS)

    def values(field: str) -> set[str]:
        return set(re.findall(rf'"{field}":"(\w+)"', text))

    recorded = set(re.findall(r'"decision":\{"type":"(\w+)"', text))
    assert recorded == {
        "approve", "deny", "answer", "client_result", "submit", "failed", "expired", "detached",
    }  # fmt: skip
    assert values("on_expiry") == {"deny", "halt"}, "error is the default, which is not encoded"
    assert '"on_expiry":{"type":"default"' in text
    assert values("recovery") >= {"fail", "ask", "reconcile"}
    assert values("scope") == {"args", "tool", "user", "everyone"}, (
        "args and tool in version 1, conversation is the default"
    )
    reasons = {event.reason for log in LOGS for event in decode_log(log) if event.type == "TurnEnded"}
    assert reasons >= {"completed", "halted", "cancelled", "step_limit", "failed", "handed_over", "cost_limit"}
    errors = {
        event.error.kind for log in LOGS for event in decode_log(log) if event.type == "CallReturned" and event.error
    }
    assert errors >= {
        "cancelled", "conflict", "denied", "detached", "interrupted", "invalid_args", "timeout", "unknown_tool",
    }  # fmt: skip
    waits = {event.reason for log in LOGS for event in decode_log(log) if event.type == "CallSuspended"}
    assert waits >= {"plan changed", "recovery", "manual", "asked by the tool", "the grant no longer holds"}


def test_every_field_of_every_event_occurs_with_a_value_that_is_not_the_default() -> None:
    """So a new field needs a golden log that contains it."""
    seen: dict[str, set[str]] = {}

    def walk(value: Any) -> None:
        if isinstance(value, msgspec.Struct):
            fields = seen.setdefault(type(value).__name__, set())
            for field in msgspec.structs.fields(value):
                held = getattr(value, field.name)
                default = field.default_factory() if callable(field.default_factory) else field.default
                if field.required or held != default:
                    fields.add(field.encode_name)
                walk(held)
        elif isinstance(value, list | tuple):
            for each in value:
                walk(each)

    for log in LOGS:
        for event in decode_log(log):
            walk(event)
    missing = {
        f"{name}.{field}"
        for name, struct in shape()["structs"].items()
        for field in struct["fields"]
        if field not in seen.get(name, set())
    }
    assert not missing, f"no golden log has these: add a scene to tests/golden/scenes.py: {sorted(missing)}"


def test_the_shape_of_the_log_is_pinned() -> None:
    pinned = json.loads((HERE / f"v{VERSION}" / "shape.json").read_bytes())
    changes = differences(pinned, to_plain(shape()))
    assert not changes, WHAT_TO_DO.format(changes="\n".join(f"   {change}" for change in changes))


def test_added_changed_and_removed_fields_are_detected() -> None:
    pinned = to_plain(shape())
    assert differences(pinned, to_plain(shape())) == []
    mine = to_plain(shape())
    mine["structs"]["TurnEnded"]["fields"]["why"] = {"type": "str", "default": ""}
    del mine["structs"]["TurnEnded"]["fields"]["halted"]
    mine["structs"]["Usage"]["fields"]["cost"]["default"] = 0
    mine["structs"]["TurnPaused"] = {"fields": {}}
    assert [change.partition(": ")[0] for change in differences(pinned, mine)] == [
        "TurnEnded.halted",
        "TurnEnded.why",
        "TurnPaused",
        "Usage.cost",
    ]
    assert [change.partition(": ")[0] for change in incompatible_changes(pinned, mine)] == [
        "TurnEnded.halted",
        "Usage.cost",
    ]


def test_every_version_has_a_golden_directory() -> None:
    assert {f"v{n}" for n in range(1, VERSION + 1)} == {log.parent.name for log in LOGS}


def test_an_event_of_a_newer_version_is_refused_and_an_older_one_is_upcast(monkeypatch: pytest.MonkeyPatch) -> None:
    body = bodies(HERE / "v1" / "plain.jsonl")[0]
    newer = body.replace(b'"v":1', f'"v":{VERSION + 1}'.encode())
    with pytest.raises(StoreNewer):
        codec.decode_event(newer)
    monkeypatch.setitem(codec.VERSIONS, "ConversationOpened", VERSION + 1)
    upcasters = {("ConversationOpened", VERSION): lambda data: {**data, "agent": data["agent"] + "!"}}
    monkeypatch.setattr(codec, "UPCASTERS", upcasters)
    upcast = codec.decode_event(body.replace(b'"v":1', f'"v":{VERSION}'.encode()))
    assert (upcast.v, upcast.agent) == (VERSION + 1, "desk!")  # type: ignore[union-attr]


def test_the_hash_chains_of_the_golden_logs_have_not_changed() -> None:
    """The hashes are of the stored bytes: neither an edit nor a line-ending filter may change one."""
    for log in LOGS:
        heads = json.loads((log.parent / "heads.json").read_bytes())
        assert hash_chain(GENESIS, bodies(log))[-1].hex() == heads[log.name], f"{log.name} was changed"


def test_the_generator_does_not_overwrite_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main([str(tmp_path)]) == 0
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(written) == {path.name for path in (HERE / f"v{VERSION}").iterdir()}
    (tmp_path / "plain.jsonl").write_bytes(b"old")
    assert generate.main([str(tmp_path)]) == 1
    assert "refused" in capsys.readouterr().out
    assert (tmp_path / "plain.jsonl").read_bytes() == b"old"
    (tmp_path / "queue.jsonl").unlink()
    assert generate.main([str(tmp_path)]) == 0, "a missing log is written"
    assert (tmp_path / "queue.jsonl").read_bytes() == written["queue.jsonl"]
    assert (tmp_path / "plain.jsonl").read_bytes() == b"old"
    assert generate.main(["--force", str(tmp_path)]) == 0
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == written, "it is deterministic"
    assert generate.main(["--expect", str(tmp_path)]) == 0
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == written, (
        "the expectations follow from the logs"
    )
