"""Golden logs: what was ever written is read for ever, and means what it meant.

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
from shapes import differences, kept, shape
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

Logs of the old shape exist and are read for ever. So:
 - a new field: give it a default that means what its absence meant; add a scene to tests/golden/scenes.py in which
   it has another value; run `python tests/golden/generate.py --shape`, then without (existing logs are left alone).
 - a field that goes, changes its type, its default or its meaning: raise VERSION in core/events.py, write an upcaster
   in core/codec.py (UPCASTERS) and a golden directory of the new version; leave the old one as it is.
 - a new event: as for a new field, and fold it in core/state.py and core/transcript.py."""


def bodies(log: Path) -> list[bytes]:
    return log.read_bytes().splitlines()


def decoded(log: Path) -> list[AnyEvent]:
    return [codec.decode_event(body) for body in bodies(log)]


def folded(log: Path) -> list[State]:
    states = [State(conversation=log.stem)]
    for event in decoded(log):
        states.append(evolve(states[-1], event))
    return states


def expected(log: Path, what: str) -> Any:
    return json.loads(log.with_suffix(f".{what}.json").read_bytes())


def plain(value: Any) -> Any:
    return json.loads(msgspec.json.encode(value))


def unversioned(value: Any) -> Any:
    """Without the versions of the events in it: an old one that was lifted means what it meant."""
    if isinstance(value, dict):
        event = "seq" in value and "at" in value
        return {name: unversioned(each) for name, each in value.items() if not (event and name == "v")}
    return [unversioned(each) for each in value] if isinstance(value, list) else value


logs = pytest.mark.parametrize("log", LOGS, ids=lambda log: f"{log.parent.name}-{log.stem}")
current = pytest.mark.parametrize(
    "log", [log for log in LOGS if log.parent.name == f"v{VERSION}"], ids=lambda log: log.stem
)


def test_there_are_logs_and_each_has_its_expectations() -> None:
    assert {log.stem for log in LOGS} >= set(generate.SCENES)
    for log in LOGS:
        assert log.with_suffix(".state.json").exists()
        assert log.with_suffix(".transcript.json").exists()
        assert log.with_suffix(".trace.jsonl").exists()


@logs
def test_every_line_decodes_and_sequence_numbers_have_no_gap(log: Path) -> None:
    assert [event.seq for event in decoded(log)] == [*range(1, len(bodies(log)) + 1)]


@current
def test_every_line_is_encoded_again_byte_for_byte(log: Path) -> None:
    for body in bodies(log):
        assert codec.encode_event(codec.decode_event(body)) == body


@logs
def test_the_fold_is_what_it_was(log: Path) -> None:
    assert unversioned(plain(folded(log)[-1])) == unversioned(expected(log, "state"))


@logs
def test_what_each_event_did_is_what_it_was(log: Path) -> None:
    told = [json.loads(line) for line in log.with_suffix(".trace.jsonl").read_bytes().splitlines()]
    assert generate.trace(decoded(log), log.stem) == told


@logs
def test_the_transcript_is_what_it_was(log: Path) -> None:
    transcript = Transcript()
    for event in decoded(log):
        transcript.apply(event)
    assert plain(transcript.visible_messages()) == expected(log, "transcript")


@logs
def test_every_prefix_can_be_folded_owed_and_shown(log: Path) -> None:
    transcript = Transcript()
    for event, state in zip(decoded(log), folded(log)[1:], strict=True):
        transcript.apply(event)
        assert state.seq == event.seq
        assert status_of(state) in ("idle", "preparing", "executing_tools", "awaiting_input")
        msgspec.json.encode([pending_entries(state), transcript.visible_messages()])
        assert isinstance(owed(state), frozenset)
        again = codec.decode_state(codec.encode_state(state))
        assert again == state, "a snapshot is the same state"


@logs
def test_a_runtime_serves_it_without_the_agents_code(log: Path) -> None:
    events = decoded(log)

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
            assert plain(snapshot.messages) == expected(log, "transcript")
            assert await desk.pending() == sorted(
                pending_entries(state), key=lambda e: (e.deadline, e.conversation, e.call)
            )
            assert await desk.history(log.stem) == events, "nothing is added to it"

    asyncio.run(main())


def test_every_event_occurs() -> None:
    assert {event.type for log in LOGS for event in decoded(log)} == set(event_types())
    assert len(event_types()) == 16


def test_every_phase_occurs_and_stands_at_the_end_of_a_log() -> None:
    passed = {call.phase for log in LOGS for s in folded(log) if s.turn for call in s.turn.calls.values()}
    assert passed == set(get_args(Phase))
    left = {call.phase for log in LOGS if (turn := folded(log)[-1].turn) for call in turn.calls.values()}
    assert left == set(get_args(Phase))


def test_every_kind_of_decision_expiry_recovery_and_ending_occurs() -> None:
    text = "\n".join(log.read_text() for log in LOGS)

    def values(field: str) -> set[str]:
        return set(re.findall(rf'"{field}":"(\w+)"', text))

    recorded = set(re.findall(r'"decision":\{"type":"(\w+)"', text))
    assert recorded == {
        "approve", "deny", "answer", "client_result", "submit", "failed", "expired", "detached",
    }  # fmt: skip
    assert values("on_expiry") == {"deny", "halt"}, "error is the default, and left out"
    assert '"on_expiry":{"type":"default"' in text
    assert values("recovery") >= {"fail", "ask", "reconcile"}
    assert values("scope") == {"args", "tool"}
    reasons = {event.reason for log in LOGS for event in decoded(log) if event.type == "TurnEnded"}
    assert reasons >= {"completed", "halted", "cancelled", "step_limit", "failed", "handed_over", "cost_limit"}
    errors = {
        event.error.kind for log in LOGS for event in decoded(log) if event.type == "CallReturned" and event.error
    }
    assert errors >= {
        "cancelled", "conflict", "denied", "detached", "interrupted", "invalid_args", "timeout", "unknown_tool",
    }  # fmt: skip
    waits = {event.reason for log in LOGS for event in decoded(log) if event.type == "CallSuspended"}
    assert waits >= {"plan changed", "recovery", "manual", "asked by the tool", "the grant no longer holds"}


def test_every_field_of_every_event_occurs_with_a_value_of_its_own() -> None:
    """So a field that is added needs a golden log in which it stands."""
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
        for event in decoded(log):
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
    changes = differences(pinned, plain(shape()))
    assert not changes, WHAT_TO_DO.format(changes="\n".join(f"   {change}" for change in changes))


def test_a_field_that_is_added_changed_or_taken_away_is_seen() -> None:
    pinned = plain(shape())
    assert differences(pinned, plain(shape())) == []
    mine = plain(shape())
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
    assert [change.partition(": ")[0] for change in kept(pinned, mine)] == ["TurnEnded.halted", "Usage.cost"]


def test_a_version_without_its_golden_directory_is_not_released() -> None:
    assert {f"v{n}" for n in range(1, VERSION + 1)} == {log.parent.name for log in LOGS}


def test_a_newer_log_is_refused_and_an_older_one_is_lifted(monkeypatch: pytest.MonkeyPatch) -> None:
    body = bodies(HERE / "v1" / "plain.jsonl")[0]
    newer = body.replace(b'"v":1', f'"v":{VERSION + 1}'.encode())
    with pytest.raises(StoreNewer):
        codec.decode_event(newer)
    monkeypatch.setattr(codec, "VERSION", VERSION + 1)
    lifts = {("ConversationOpened", VERSION): lambda data: {**data, "agent": data["agent"] + "!"}}
    monkeypatch.setattr(codec, "UPCASTERS", lifts)
    lifted = codec.decode_event(body.replace(b'"v":1', f'"v":{VERSION}'.encode()))
    assert (lifted.v, lifted.agent) == (VERSION + 1, "desk!")  # type: ignore[union-attr]


def test_the_hash_chain_of_the_golden_logs_is_what_it_was() -> None:
    """The stored bytes are what is hashed: not one of them may change, by a hand or by a line-ending filter."""
    for log in LOGS:
        heads = json.loads((log.parent / "heads.json").read_bytes())
        assert hash_chain(GENESIS, bodies(log))[-1].hex() == heads[log.name], f"{log.name} was changed"


def test_the_generator_does_not_write_a_log_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main([str(tmp_path)]) == 0
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(written) == {path.name for path in (HERE / f"v{VERSION}").iterdir()}
    (tmp_path / "plain.jsonl").write_bytes(b"old")
    assert generate.main([str(tmp_path)]) == 1
    assert "refused" in capsys.readouterr().out
    assert (tmp_path / "plain.jsonl").read_bytes() == b"old"
    (tmp_path / "queue.jsonl").unlink()
    assert generate.main([str(tmp_path)]) == 0, "what is new is written"
    assert (tmp_path / "queue.jsonl").read_bytes() == written["queue.jsonl"]
    assert (tmp_path / "plain.jsonl").read_bytes() == b"old"
    assert generate.main(["--force", str(tmp_path)]) == 0
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == written, "it is deterministic"
    assert generate.main(["--expect", str(tmp_path)]) == 0
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == written, (
        "what it means follows from the log"
    )
