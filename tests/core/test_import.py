"""Logs imported from a file: their approvals do not count, and without trust nothing runs."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from holdfast.core import codec, state
from holdfast.core.decide.machine import decide
from holdfast.core.decisions import Approve, Principal
from holdfast.core.effects import RunPreview, RunTool, owed
from holdfast.core.events import CallStarted
from holdfast.core.inputs import (
    BeginTurn,
    CallFinished,
    CallReconciled,
    CancelTurn,
    ClaimCall,
    EndTurn,
    ImportConversation,
    OwnerStarted,
    PreviewMade,
    Resolve,
    SendMessage,
    ValueOutcome,
    WindowPassed,
)
from holdfast.core.state import State, evolve, pending_entries, shared_grants, status_of
from holdfast.core.tool import Deciders, Definition
from holdfast.errors import Invalid, NotAllowed, Refused

GOLDEN = Path(__file__).parent.parent / "golden"
LOGS = sorted(GOLDEN.glob("v*/*.jsonl"))
LOGS = [path for path in LOGS if not path.name.endswith(".trace.jsonl")]
ANN = Principal("ann", ("manager",))
BEN = Principal("ben", ("manager",))
NOW = 1_700_100_000.0


def prefixes(path):
    """Yield the state after each event of this log."""
    now = State(conversation=path.stem)
    for body in path.read_bytes().splitlines():
        now = evolve(now, codec.decode_event(body))
        yield now


def apply_input(before, given, at=NOW):
    events = decide(before, given, {}, at)
    for event in events:
        before = evolve(before, event)
    return before, events


def run_owed_work(now):
    """Do all owed work, as an owner whose hooks, policies and recovery functions allow everything."""
    now, done = apply_input(now, OwnerStarted(epoch=1))
    while True:
        before = len(done)
        for effect in owed(now):
            call = now.turn.calls.get(effect.call) if isinstance(effect, RunPreview | RunTool) else None
            if call is None:
                continue
            if isinstance(effect, RunPreview):
                given = PreviewMade(call=effect.call, preview="a plan")
            elif call.phase == "running" and call.epoch < 1:
                given = CallReconciled(call=effect.call, epoch=1, verdict="redispatch")
            elif call.phase == "running":
                continue
            else:
                given = ClaimCall(call=effect.call, epoch=1, plan=PreviewMade(call=effect.call, preview="a plan"))
            try:
                now, events = apply_input(now, given)
            except Refused:
                continue
            done += events
        if len(done) == before:
            return now, done


def check_closed(before):
    """Check that nothing is owed, nothing is pending, and every input is refused."""
    now, _ = apply_input(before, ImportConversation(by=ANN, origin="x"))
    assert now.closed
    assert owed(now) == frozenset(), "something is owed"
    assert pending_entries(now) == [], "something is pending"
    assert status_of(now) == "idle"
    calls = list(now.turn.calls.values()) if now.turn else []
    inputs = [
        SendMessage(text="go", by=ANN, agent="a", when_busy="interrupt"),
        CancelTurn(by=ANN),
        OwnerStarted(epoch=9),
        EndTurn(),
    ]
    inputs += [BeginTurn(steps=3), *(ClaimCall(call=call.made.id, epoch=9) for call in calls)]
    inputs += [Resolve(decisions={call.made.id: Approve()}, by=ANN) for call in calls]
    inputs += [CallFinished(call=c.made.id, attempt=c.attempt, outcome=ValueOutcome(value=1)) for c in calls]
    for given in inputs:
        with pytest.raises(NotAllowed, match="imported without trust"):
            decide(now, given, {}, NOW)


def check_asked_again(before):
    """Check that no open call of the file starts, or reaches a client, before it is approved here."""
    now, first = apply_input(before, ImportConversation(by=ANN, trusted=True, origin="x"))
    held = tuple(grant for grant in before.grants if grant.scope == "conversation")
    assert (now.closed, now.grants) == (False, held), "no grant reaches other conversations here"
    now, events = run_owed_work(now)
    begun = [event for event in (*first, *events) if isinstance(event, CallStarted)]
    assert not begun, "a call started on an approval of the file"
    handed = [entry for entry in pending_entries(now) if entry.kind == "client_exec"]
    assert not handed, "a client got a call on an approval of the file"
    if now.turn is None or now.turn.cancelling or now.turn.halt is not None:
        return
    asked = [entry for entry in pending_entries(now) if entry.kind == "approval"]
    for entry in asked:
        for by in (ANN, BEN)[: entry.approvers]:
            now, _ = apply_input(now, Resolve(decisions={entry.call: Approve(digest=entry.digest)}, by=by))
    for call in now.turn.calls.values():
        if call.window is not None and call.window.starts_at is not None:
            now, _ = apply_input(now, WindowPassed(call=call.made.id), call.window.starts_at)
    now, events = run_owed_work(now)
    moved = {e.call_id for e in events if isinstance(e, CallStarted) or getattr(e, "kind", "") == "client_exec"}
    moved |= {entry.call for entry in pending_entries(now) if entry.kind in ("client_exec", "manual")}
    assert moved >= {entry.call for entry in asked}, "a call that was approved here does not run"


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_a_log_imported_without_trust_owes_nothing_and_accepts_no_input(path):
    """This holds for a log that is cut after any event."""
    for before in prefixes(path):
        check_closed(before)


def test_a_trusted_import_takes_over_the_shared_grants_that_are_listed_and_no_others():
    """Without trust a grant holds nowhere, whether it is listed or not [B115]."""
    path = next(path for path in LOGS if path.stem == "shared")
    before = max(prefixes(path), key=lambda state: len(shared_grants(state)))
    (one, *others) = shared_grants(before)
    assert others
    now, _ = apply_input(before, ImportConversation(by=ANN, trusted=True, origin="x", grants=(one.id,)))
    assert shared_grants(now) == (one,)
    closed, _ = apply_input(before, ImportConversation(by=ANN, origin="x", grants=(one.id,)))
    assert shared_grants(closed) == ()
    later, _ = apply_input(closed, ImportConversation(by=ANN, trusted=True, origin="x", grants=(one.id,)))
    assert shared_grants(later) == (one,), "also if trust comes later"


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_open_calls_of_a_trusted_import_need_an_approval_before_they_run(path):
    """In a log that is cut after any event, its approvals, grants, gates and recoveries start nothing."""
    for before in prefixes(path):
        check_asked_again(before)


def test_trust_unlocks_a_conversation_imported_without_it():
    before = next(s for s in prefixes(GOLDEN / "v1" / "approval.jsonl") if pending_entries(s))
    now, _ = apply_input(before, ImportConversation(by=ANN, origin="x"))
    assert pending_entries(now) == []
    now, _ = apply_input(now, ImportConversation(by=ANN, trusted=True, origin="x"))
    assert owed(now)
    check_asked_again(now)


@pytest.mark.parametrize("claimed", [{}, {"manual": True}, {"executor": "human"}, {"recovery": "reconcile"}])
def test_a_call_that_ran_in_the_file_needs_an_approval_whatever_its_settings(claimed):
    """The file's settings for who runs a call, and how it is recovered, start nothing here."""
    before = next(
        state
        for state in prefixes(GOLDEN / "v1" / "plain.jsonl")
        if state.turn and any(call.phase == "running" for call in state.turn.calls.values())
    )
    assert before.turn is not None
    calls = {
        name: replace(call, made=replace(call.made, **claimed)) if call.phase == "running" else call
        for name, call in before.turn.calls.items()
    }
    running = [name for name, call in before.turn.calls.items() if call.phase == "running"]
    now, _ = apply_input(
        replace(before, turn=replace(before.turn, calls=calls)), ImportConversation(by=ANN, trusted=True, origin="x")
    )
    now, events = apply_input(now, OwnerStarted(epoch=1))
    assert not any(isinstance(event, CallStarted) for event in events)
    assert {entry.call for entry in pending_entries(now) if entry.recovery} == set(running)


def test_who_must_approve_an_imported_call_comes_from_the_tool_here_and_not_from_the_file():
    """A file, forged or written before the tool asked for two people, cannot have one person suffice."""
    before = next(s for s in prefixes(GOLDEN / "v1" / "approval.jsonl") if pending_entries(s))
    entry = pending_entries(before)[0]
    assert (entry.approvers, entry.not_requester) == (1, False)
    now, _ = apply_input(before, ImportConversation(by=ANN, trusted=True, origin="x"))
    definition = Definition(
        fingerprint=entry.fingerprint,
        description="Pays.",
        prompt="Pay?",
        parameters='{"type":"object"}',
        deciders=Deciders(approvers=2, not_requester=True),
    )
    now, _ = apply_input(now, OwnerStarted(epoch=1))
    plan = PreviewMade(call=entry.call, preview="a plan")
    now, _ = apply_input(now, ClaimCall(call=entry.call, epoch=1, definition=definition, plan=plan))
    again = next(waiting for waiting in pending_entries(now) if waiting.call == entry.call)
    assert (again.approvers, again.not_requester) == (2, True)


def test_a_mark_of_trust_in_the_file_does_not_make_it_trusted():
    """The importer's own mark follows the events of the file, and decides."""
    before = next(s for s in prefixes(GOLDEN / "v1" / "approval.jsonl") if pending_entries(s))
    forged, _ = apply_input(before, ImportConversation(by=ANN, trusted=True, origin="x"))
    check_closed(forged)


def test_a_conversation_without_a_log_cannot_be_marked_as_imported():
    with pytest.raises(Invalid, match="no log"):
        decide(State(conversation="c"), ImportConversation(by=ANN), {}, NOW)


reset_imported_call = state._reset_imported_call
MUTANTS = {
    "approvals of the file count": ("_reset_imported_call", lambda call: call, check_asked_again, "a call started"),
    "recoveries of the file count": (
        "_reset_imported_call",
        lambda call: replace(reset_imported_call(call), imported=False),
        check_asked_again,
        "a call started",
    ),
    "clients of the file continue": (
        "_reset_imported_call",
        lambda call: call if call.phase == "awaiting_client" else reset_imported_call(call),
        check_asked_again,
        "a client got a call",
    ),
    "a log without trust stays open": (
        "_apply_import",
        lambda now, event: replace(now, seq=event.seq, epoch=0),
        check_closed,
        "assert",
    ),
}


@pytest.mark.parametrize(("name", "mutant", "check", "message"), MUTANTS.values(), ids=MUTANTS)
def test_each_check_fails_when_its_rule_is_removed(monkeypatch, name, mutant, check, message):
    monkeypatch.setattr(state, name, mutant)
    failed = []
    for path in LOGS:
        for before in prefixes(path):
            try:
                check(before)
            except (AssertionError, Refused) as failure:
                failed.append(str(failure))
    assert any(message in text for text in failed), failed
