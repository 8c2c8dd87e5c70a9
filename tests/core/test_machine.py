"""The pure core, driven by hand and at random: decide, evolve, owed."""

import random
from collections.abc import Mapping
from typing import Any

import pytest

from holdfast.core import codec
from holdfast.core.decide.draft import Draft
from holdfast.core.decide.machine import TRANSITIONS, decide, decide_into
from holdfast.core.decide.reply import make_call_id
from holdfast.core.decisions import Answer, Approve, ClientResult, Deny, Failed, Pending, Principal, Submit, TakeBack
from holdfast.core.effects import AnswerAside, CallModel, CloseTurn, RunPreview, RunTool, StartTurn, owed
from holdfast.core.events import (
    ApprovalTakenBack,
    AsideAnswered,
    AssistantSaid,
    CallMade,
    CallResolved,
    CallReturned,
    CallStarted,
    CallSuspended,
    ErrorInfo,
    GraceEnded,
    MessageReceived,
    Mode,
    TurnEnded,
    TurnStarted,
    Usage,
)
from holdfast.core.inputs import (
    AsideRejected,
    AsideReplied,
    BeginTurn,
    CallFinished,
    CallReconciled,
    CallWanted,
    CancelTurn,
    ClaimCall,
    ClientGone,
    DeadlinePassed,
    EndTurn,
    ErrorOutcome,
    HaltOutcome,
    ModelFailed,
    ModelReplied,
    OpenConversation,
    OwnerStarted,
    PreviewMade,
    QuestionOutcome,
    RefuseResolution,
    Resolve,
    RevokeGrant,
    SendMessage,
    ValueOutcome,
    WindowPassed,
)
from holdfast.core.live import Snapshot
from holdfast.core.state import State, evolve, pending_entries, status_of
from holdfast.core.tool import Default, ToolSpec, recovery_of
from holdfast.errors import Busy, HoldfastError, Invalid, Refused, Stale

ANN = Principal("ann")
OBJECT = '{"type":"object","properties":{"n":{"type":"integer"}}}'


def spec(name, **fields):
    return ToolSpec(name=name, description=f"Do {name}.", parameters=OBJECT, **fields)


SPECS = {
    each.name: each
    for each in (
        spec("plain"),
        spec("gated", gate="required"),
        spec("graced", gate="required", grace=10.0),
        spec("gated_again", gate="required", recovery="redispatch"),
        spec("planned", gate="required", planned=True),
        spec("judged", gate="policy"),
        spec("human", executor="human", result='{"type":"string"}'),
        spec("client", executor="client"),
        spec("gated_client", executor="client", gate="required"),
        spec("manual", manual=True),
        spec("gated_manual", manual=True, gate="required"),
        spec("careful", recovery="ask"),
        spec("once", recovery="fail"),
        spec("evidence", recovery="reconcile"),
        spec("defaulted", executor="human", on_expiry=Default("quiet")),
        spec("halting", executor="human", on_expiry="halt"),
        spec("hosted", executor="provider"),
    )
}


class Untouchable(Mapping):
    """Tool declarations that raise when they are read."""

    def __getitem__(self, key):
        raise AssertionError(f"specs were consulted for {key!r}")

    def __iter__(self):
        raise AssertionError("specs were listed")

    def __len__(self):
        raise AssertionError("specs were counted")

    def __bool__(self):
        raise AssertionError("specs were looked at")


class Log:
    """A conversation without a runtime: events are folded as they are decided, and every move of a call is recorded."""

    def __init__(self, state=None, now=1000.0, moves=None, specs=SPECS):
        self.specs = specs
        self.state = state or State(conversation="c")
        self.now = now
        self.events = []
        self.moves = set() if moves is None else moves
        self.epoch = 1

    def tell(self, input):
        specs = self.specs if isinstance(input, ModelReplied) else Untouchable()
        return self.fold(decide(self.state, input, specs, self.now))

    def fold(self, events):
        for event in events:
            before = self.phases()
            self.state = evolve(self.state, event)
            assert self.state.seq == event.seq, "gapless"
            self.note(event, before)
            self.events.append(event)
        return events

    def phases(self):
        turn = self.state.turn
        return {call: state.phase for call, state in turn.calls.items()} if turn else {}

    def note(self, event, before):
        after = self.phases()
        if isinstance(event, AssistantSaid):
            self.moves |= {(None, "AssistantSaid", after[made.id]) for made in event.calls}
            return
        named = getattr(event, "call_id", None)
        for call, phase in after.items():
            if call != named:
                assert before[call] == phase, f"{event.type} moved another call"
        if isinstance(
            event, CallSuspended | CallResolved | CallStarted | CallReturned | ApprovalTakenBack | GraceEnded
        ):
            label = event.type + (f": {event.kind}" if isinstance(event, CallSuspended) else "")
            if isinstance(event, CallResolved) and event.starts_at is not None:
                label += ": with a grace window"
            self.moves.add((before[named], label, after[named]))

    def start(self, *tools, mode: Mode = "auto", steps=5):
        self.tell(SendMessage(text="hi", by=ANN, agent="a", when_busy="queue"))
        self.tell(BeginTurn(steps=steps, mode=mode))
        return self.reply(*tools)

    def reply(self, *tools, text=""):
        turn = self.state.turn
        calls = tuple(CallWanted(provider_id=None, tool=name, args={"n": 1}) for name in tools)
        said = self.tell(ModelReplied(turn=turn.number, step=turn.step + 1, text=text, calls=calls))
        return [made.id for made in said[0].calls]

    def phase(self, call):
        return self.state.turn.calls[call].phase

    def claim(self, call, **fields):
        return self.tell(ClaimCall(call=call, epoch=self.epoch, **fields))

    def finish(self, call, outcome=None):
        attempt = self.state.turn.calls[call].attempt
        return self.tell(CallFinished(call=call, attempt=attempt, outcome=outcome or ValueOutcome(value=1)))

    def resolve(self, call, decision, by=ANN):
        return self.tell(Resolve(decisions={call: decision}, by=by))


def event_types(events):
    return [event.type for event in events]


# --- refusals ---


def test_a_refused_input_adds_no_event_and_leaves_the_draft_as_it_was():
    """Refused inputs log nothing [B13, B27, B28]."""
    log = Log()
    (human, gated) = log.start("human", "gated")
    before = log.state
    refused = {
        Busy: [SendMessage(text="x", by=ANN)],
        Invalid: [
            OpenConversation(agent="a", by=ANN),
            Resolve(decisions={human: Approve()}, by=ANN),
            Resolve(decisions={human: Answer(5)}, by=ANN),
            Resolve(decisions={gated: Approve(args={"n": "x"})}, by=ANN),
            Resolve(decisions={human: Answer("fine"), gated: Answer("no")}, by=ANN),
        ],
        Stale: [
            Resolve(decisions={"nope": Answer("x")}, by=ANN),
            Resolve(decisions={human: Answer("fine"), "nope": Answer("x")}, by=ANN),
            Resolve(decisions={gated: Approve(digest="0" * 64)}, by=ANN),
            Resolve(decisions={gated: Approve()}, by=ANN, judged={}),
            Resolve(decisions={gated: Approve()}, by=ANN, judged={gated: "0" * 64}),
            RefuseResolution(call="nope", decision="Approve", by=ANN, reason="no"),
            DeadlinePassed(call=human),
            ClientGone(call=human),
            RevokeGrant(grant="g1", by=ANN),
            BeginTurn(steps=3),
            ModelReplied(turn=1, step=2),
            ModelReplied(turn=1, step=1),
            ModelFailed(turn=1, step=2, error=ErrorInfo("network", "x")),
            PreviewMade(call=human),
            PreviewMade(call="nope"),
            ClaimCall(call=gated, epoch=1),
            ClaimCall(call=human, epoch=1),
            CallFinished(call=human, attempt=0, outcome=ValueOutcome()),
            CallReconciled(call=human, epoch=9, verdict="redispatch"),
            EndTurn(),
        ],
    }
    for kind, inputs in refused.items():
        for each in inputs:
            draft = Draft(before, log.now)
            mark = draft.mark()
            with pytest.raises(kind):
                decide_into(draft, each, SPECS)
            draft.roll_back(mark)
            assert draft.state is before
            assert draft.events == draft.states == draft.artifacts == []
    assert log.state is before


def test_a_cancel_without_a_turn_and_a_second_cancel_do_nothing():
    """Only the first cancel of a turn is logged [B61]."""
    log = Log()
    assert log.tell(CancelTurn(by=ANN)) == []
    log.start("human")
    assert event_types(log.tell(CancelTurn(by=ANN))) == ["CancelRequested"]
    assert log.tell(CancelTurn(by=ANN)) == []


def test_declarations_are_consulted_only_when_the_model_replied():
    """Other inputs are decided from the events alone: ``Log`` passes declarations that raise [B89]."""
    log = Log()
    gated, planned, human = log.start("gated", "planned", "human")
    fresh = Log()
    fresh.tell(SendMessage(text="hi", by=ANN, agent="a"))
    fresh.tell(BeginTurn(steps=2))
    replied = ModelReplied(turn=1, step=1, calls=(CallWanted(provider_id=None, tool="plain", args={}),))
    with pytest.raises(AssertionError, match="consulted"):
        decide(fresh.state, replied, Untouchable(), 0.0)
    log.resolve(gated, Approve(remember="tool"))
    log.claim(gated)
    log.tell(PreviewMade(call=planned, preview="plan"))
    log.resolve(planned, Deny("no"))
    log.finish(gated)
    log.now += 10**9
    log.tell(DeadlinePassed(call=human))
    log.tell(RevokeGrant(grant=log.state.grants[0].id, by=ANN))
    assert owed(log.state) == {CallModel(1, 2)}


# --- single steps ---


def test_owed_work_is_a_function_of_the_state_alone():
    """Work is level-triggered: it does not depend on how the state came about [B47, B51]."""
    log = Log()
    assert owed(log.state) == frozenset()
    log.tell(SendMessage(text="hi", by=ANN, agent="a"))
    assert owed(log.state) == {StartTurn(2)}
    log.tell(BeginTurn(steps=2))
    assert owed(log.state) == {CallModel(1, 1)}
    plain, planned, human, gated = log.reply("plain", "planned", "human", "gated")
    assert owed(log.state) == {RunTool(plain), RunPreview(planned)}
    assert status_of(log.state) == "executing_tools"
    log.claim(plain)
    log.tell(PreviewMade(call=planned, preview="p"))
    assert owed(log.state) == {RunTool(plain)}
    log.finish(plain)
    assert owed(log.state) == frozenset()
    assert status_of(log.state) == "awaiting_input"
    log.resolve(gated, Approve())
    assert owed(log.state) == {RunTool(gated)}
    log.resolve(human, Answer("x"))
    log.resolve(planned, Deny())
    log.claim(gated)
    log.finish(gated)
    assert owed(log.state) == {CallModel(1, 2)}
    log.reply("plain")
    call = next(iter(log.state.turn.calls))
    log.claim(call)
    log.finish(call)
    assert owed(log.state) == {CloseTurn(1)}, "the second of two steps"
    assert log.tell(EndTurn())[-1].reason == "step_limit"
    assert owed(log.state) == frozenset()


def test_a_gated_call_cannot_be_claimed_without_an_approval_of_its_plan():
    """The core enforces the gate [B35]."""
    log = Log()
    gated, planned = log.start("gated", "planned")
    for call in (gated, planned):
        with pytest.raises(Stale):
            log.claim(call)
    log.tell(PreviewMade(call=planned, preview="a"))
    log.resolve(planned, Approve())
    assert event_types(log.claim(planned, plan=PreviewMade(call=planned, preview="b"))) == ["CallSuspended"]
    log.resolve(planned, Approve())
    assert event_types(log.claim(planned)) == ["CallSuspended"], "no plan at all is not the plan that was approved"


def test_a_late_result_of_an_earlier_attempt_is_stale():
    """Late results are ignored [B59]."""
    log = Log()
    (plain,) = log.start("plain")
    log.claim(plain)
    log.tell(OwnerStarted(epoch=2))
    assert log.state.turn.calls[plain].attempt == 2
    with pytest.raises(Stale):
        log.tell(CallFinished(call=plain, attempt=1, outcome=ValueOutcome(value="old")))
    log.finish(plain)
    with pytest.raises(Stale):
        log.finish(plain)


def test_each_recovery_has_its_own_event_when_a_new_owner_starts():
    """A running call is redispatched, suspended, failed or reconciled, as its tool declares [B49]."""
    log = Log()
    plain, careful, once, evidence = log.start("plain", "careful", "once", "evidence")
    for call in (plain, careful, once, evidence):
        log.claim(call)
    assert log.tell(OwnerStarted(epoch=1)) == [], "its own epoch has nothing to recover"
    recovered = log.tell(OwnerStarted(epoch=2))
    assert {event.call_id: event.type for event in recovered} == {
        plain: "CallStarted",
        careful: "CallSuspended",
        once: "CallReturned",
    }
    assert owed(log.state) == {RunTool(plain), RunTool(evidence)}
    (entry,) = pending_entries(log.state)
    assert (entry.kind, entry.recovery, entry.reason) == ("approval", True, "recovery")
    with pytest.raises(Invalid):
        log.resolve(careful, Approve(args={"n": 2}))
    log.resolve(careful, Approve())
    log.epoch = 2
    assert log.claim(careful)[0].attempt == 2
    log.tell(CallReconciled(call=evidence, epoch=2, verdict=ValueOutcome(value="it had worked")))
    assert log.phase(evidence) == "done"


def test_gated_and_high_risk_calls_without_a_declared_recovery_are_suspended_for_approval():
    """A declared recovery always wins; client, human and manual calls are redispatched [B48]."""
    risky, stated = spec("risky", risk="high"), spec("stated", risk="high", recovery="redispatch")
    medium = spec("medium", risk="medium")
    specs = {**SPECS, **{each.name: each for each in (risky, stated, medium)}}
    log = Log(specs=specs)
    names = ("plain", "medium", "gated", "gated_again", "judged", "risky", "stated")
    calls = dict(zip(names, log.start(*names), strict=True))
    for name in ("gated", "gated_again"):
        log.resolve(calls[name], Approve())
    for call in calls.values():
        log.claim(call)
    recovered = {event.call_id: event.type for event in log.tell(OwnerStarted(epoch=2))}
    again = {name for name, call in calls.items() if recovered[call] == "CallStarted"}
    assert again == {"plain", "medium", "gated_again", "stated"}
    assert {name for name, call in calls.items() if recovered[call] == "CallSuspended"} == {"gated", "judged", "risky"}
    for name in ("gated_client", "human", "gated_manual", "hosted"):
        assert recovery_of(SPECS[name]) == "redispatch"


def test_a_call_that_a_hook_sent_to_approval_is_not_repeated_by_default():
    """The approval is for one run; a declared recovery wins [B48]."""
    hooked = spec("hooked", hooked=True)
    stated = spec("stated", hooked=True, recovery="redispatch")
    log = Log(specs={each.name: each for each in (hooked, stated)})
    approved, free, explicit = log.start("hooked", "hooked", "stated")
    for call in (approved, explicit):
        log.claim(call, required=True)
        log.resolve(call, Approve())
    for call in (approved, free, explicit):
        log.claim(call)
    recovered = {event.call_id: event.type for event in log.tell(OwnerStarted(epoch=2))}
    assert recovered == {approved: "CallSuspended", free: "CallStarted", explicit: "CallStarted"}


def test_a_call_that_a_hook_sent_to_approval_and_a_grant_covered_is_not_repeated_by_default():
    """A grant counts as an approval [B48]."""
    log = Log(specs={"hooked": spec("hooked", hooked=True)})
    first, granted = log.start("hooked", "hooked")
    log.claim(first, required=True)
    log.resolve(first, Approve(remember="tool"))
    log.claim(granted, required=True)
    recovered = {event.call_id: event.type for event in log.tell(OwnerStarted(epoch=2))}
    assert recovered == {granted: "CallSuspended"}


@pytest.mark.parametrize(
    ("decision", "ok", "kind"), [(Submit({"done": True}), True, None), (Deny("enough"), False, "interrupted")]
)
def test_a_recovery_question_can_be_decided_with_a_result_or_a_denial(decision, ok, kind):
    """The approver may submit the result of the interrupted run, or deny another one [B49]."""
    log = Log()
    (careful,) = log.start("careful")
    log.claim(careful)
    log.tell(OwnerStarted(epoch=2))
    returned = log.resolve(careful, decision)[-1]
    assert (returned.ok, returned.error and returned.error.kind) == (ok, kind)


def test_an_expired_call_has_the_outcome_that_the_tool_declares():
    """It is an error, a default value, or the end of the turn [B55]."""
    for tool, value, kind, owes in (
        ("human", None, "timeout", CallModel(1, 2)),
        ("defaulted", "quiet", None, CallModel(1, 2)),
        ("halting", None, "timeout", CloseTurn(1)),
    ):
        log = Log()
        (call,) = log.start(tool)
        with pytest.raises(Stale):
            log.tell(DeadlinePassed(call=call))
        log.now = pending_entries(log.state)[0].deadline
        with pytest.raises(Stale) as late:
            log.resolve(call, Answer("x"))
        assert late.value.reason == "expired"
        resolved, returned = log.tell(DeadlinePassed(call=call))
        assert (resolved.by, returned.value) == ("system", value)
        assert (returned.error and returned.error.kind) == kind
        assert owed(log.state) == {owes}


def test_call_ids_are_numbered_in_a_conversation_and_differ_between_conversations():
    """Call ids do not come from the provider [B32, B85]."""
    log = Log()
    first = log.start("human", "human")
    for call in first:
        log.resolve(call, Answer("x"))
    second = log.reply("human")
    assert [call[5:] for call in (*first, *second)] == ["1", "2", "3"]
    assert len({make_call_id(name, 1) for name in ("c", "d", "c/1", "c1")}) == 4


def test_a_new_owner_adds_the_result_of_a_decision_if_the_log_was_cut_before_it():
    """Consequences are a function of the state [B51, B54]."""
    log = Log()
    (human,) = log.start("human")
    resolved, returned = decide(log.state, Resolve(decisions={human: Answer("x")}, by=ANN), Untouchable(), 0.0)
    cut = Log(evolve(log.state, resolved))
    assert cut.phase(human) == "ready"
    (healed,) = cut.tell(OwnerStarted(epoch=5))
    assert (healed.type, healed.value, healed.by, healed.source) == ("CallReturned", "x", "ann", "human")
    assert (healed.seq, healed.value) == (returned.seq, returned.value)


# --- at random ---


class RandomShell:
    """A shell that does owed work and other allowed inputs in random order."""

    def __init__(self, seed, moves):
        self.rng = random.Random(seed)
        self.log = Log(moves=moves)
        self.previews = 0

    def play(self, steps):
        for _ in range(steps):
            self.log.now += self.rng.choice([0, 1, 1000])
            chosen = self.choose_input()
            if chosen is None:
                continue
            before = self.log.state
            try:
                self.log.tell(chosen)
            except Refused:
                assert self.log.state is before

    def choose_input(self):
        log, rng = self.log, self.rng
        turn = log.state.turn
        if rng.random() < 0.1:
            return SendMessage(text="x", by=ANN, agent="a", when_busy=rng.choice(["queue", "interrupt", "refuse"]))
        if rng.random() < 0.1:
            return SendMessage(text="why?", by=ANN, when_busy="aside")
        if rng.random() < 0.03:
            return CancelTurn(by=ANN)
        if rng.random() < 0.05 and log.state.grants:
            return RevokeGrant(grant=log.state.grants[0].id, by=ANN)
        if rng.random() < 0.08:
            log.epoch += 1
            return OwnerStarted(epoch=log.epoch)
        effects = sorted(owed(log.state), key=repr)
        waiting = pending_entries(log.state)
        if waiting and (not effects or rng.random() < 0.5):
            return self.decision(rng.choice(waiting))
        if not effects:
            return None
        return self.effect(rng.choice(effects), turn)

    def decision(self, entry):
        rng = self.rng
        if entry.starts_at is not None:
            self.log.now += rng.choice([0, 6])
            inputs = [Resolve(decisions={entry.call: TakeBack()}, by=ANN), WindowPassed(call=entry.call)]
            return rng.choice([*inputs, CancelTurn(by=ANN)])
        if rng.random() < 0.1:
            self.log.now = max(self.log.now, entry.deadline)
            return DeadlinePassed(call=entry.call)
        if rng.random() < 0.1:
            return ClientGone(call=entry.call)
        if rng.random() < 0.1:
            return RefuseResolution(call=entry.call, decision="Approve", by=ANN, reason="no")
        remembers: list[Any] = [None, None, "args", "tool"]
        remember = rng.choice(remembers)
        edited = rng.choice([None, None, {"n": 7}])
        choices = {
            "approval": [Approve(remember=remember, args=edited), Approve(), Deny("no"), Submit(1)],
            "elicitation": [Answer("yes"), Deny("no", stop=rng.random() < 0.2)],
            "client_exec": [ClientResult(1), Failed("timeout", "x")],
            "manual": [Submit(1), Failed("timeout", "x")],
        }
        return Resolve(decisions={entry.call: rng.choice(choices[entry.kind])}, by=ANN)

    def effect(self, effect, turn):
        rng = self.rng
        match effect:
            case StartTurn():
                modes: list[Mode] = ["auto", "auto", "auto", "auto", "manual"]
                return BeginTurn(steps=rng.choice([1, 3]), mode=rng.choice(modes))
            case CloseTurn():
                return EndTurn(text=rng.choice(["", "half"]))
            case AnswerAside(message):
                if rng.random() < 0.2:
                    return AsideRejected(message=message, reason="no")
                return AsideReplied(
                    message=message, text="because", error=rng.choice([None, ErrorInfo("network", "x")])
                )
            case CallModel(number, step):
                if rng.random() < 0.05:
                    return ModelFailed(turn=number, step=step, error=ErrorInfo("network", "x"), text="half")
                names = rng.choices([*SPECS, "unknown"], k=rng.randint(0, 4))
                calls = tuple(
                    CallWanted(
                        provider_id=rng.choice([None, "p"]), tool=n, args=rng.choice([{"n": 1}, '{"n":"x"}', {}])
                    )
                    for n in names
                )
                return ModelReplied(turn=number, step=step, text="so", calls=calls)
            case RunPreview(call):
                return PreviewMade(call=call, **self.plan())
            case RunTool(call):
                return self.run(call, turn.calls[call])

    def plan(self) -> dict[str, Any]:
        self.previews += 1
        return self.rng.choice(
            [
                {"preview": "p"},
                {"preview": f"p{self.previews}"},
                {"failure": "x"},
                {"error": ErrorInfo("not_found", "x")},
            ]
        )

    def run(self, call, state):
        rng, log = self.rng, self.log
        if state.phase == "ready":
            plan = PreviewMade(call=call, **self.plan()) if state.bound else None
            return ClaimCall(call=call, epoch=log.epoch, required=rng.random() < 0.5, plan=plan)
        if state.epoch < log.epoch:
            verdicts = [
                "redispatch",
                "fail",
                "ask",
                ValueOutcome(value=2),
                ErrorOutcome(error=ErrorInfo("timeout", "x")),
            ]
            return CallReconciled(call=call, epoch=log.epoch, verdict=rng.choice(verdicts))
        outcomes = [
            ValueOutcome(value=1),
            ErrorOutcome(error=ErrorInfo("timeout", "x")),
            QuestionOutcome(question="?"),
            HaltOutcome(reason="stop"),
        ]
        return CallFinished(call=call, attempt=state.attempt, outcome=rng.choice(outcomes))

    def rest(self):
        """Do all owed work, then cancel what is pending, until the log is at rest."""
        for _ in range(200):
            turn = self.log.state.turn
            effects = sorted(owed(self.log.state), key=repr)
            if not effects and turn is None:
                return
            try:
                self.log.tell(self.finish_effect(effects[0], turn) if effects else CancelTurn(by=ANN))
            except Refused as refusal:
                raise AssertionError(f"owed work was refused: {effects[0]}: {refusal}") from refusal
        raise AssertionError("it does not come to rest")

    def finish_effect(self, effect, turn):
        match effect:
            case CallModel(number, step):
                return ModelReplied(turn=number, step=step, text="done")
            case AnswerAside(message):
                return AsideReplied(message=message, text="because")
            case RunPreview(call):
                return PreviewMade(call=call, preview="p")
            case RunTool(call) if turn.calls[call].phase == "running":
                state = turn.calls[call]
                if state.epoch < self.log.epoch:
                    return CallReconciled(call=call, epoch=self.log.epoch, verdict="fail")
                return CallFinished(call=call, attempt=state.attempt, outcome=ValueOutcome(value=1))
            case RunTool(call):
                return ClaimCall(call=call, epoch=self.log.epoch)
            case _:
                return self.effect(effect, turn)


def check_invariants(events):
    made = [call.id for event in events if isinstance(event, AssistantSaid) for call in event.calls]
    returned = [event.call_id for event in events if isinstance(event, CallReturned)]
    assert sorted(made) == sorted(returned), "every call has exactly one result"
    assert len(set(made)) == len(made)
    started = [event.turn for event in events if isinstance(event, TurnStarted)]
    ended = [event.turn for event in events if isinstance(event, TurnEnded)]
    assert started == ended == list(range(1, len(started) + 1)), "every turn has exactly one end"
    check_asides(events)
    approved, frozen = set(), {}
    for event in events:
        match event:
            case AssistantSaid():
                frozen |= {call.id: call for call in event.calls}
                assert not (event.partial and event.calls)
            case CallResolved(decision=Approve()):
                approved.add(event.call_id)
            case CallStarted():
                call: CallMade = frozen[event.call_id]
                if call.gate == "required":
                    assert event.call_id in approved, "a gated call started without an approval"
                if call.grant is not None and event.attempt == 1:
                    assert event.grant is not None or event.call_id in approved


def check_asides(events):
    """Every aside has one answer, in order, before the next step and the end of its turn."""
    waiting = []
    for event in events:
        match event:
            case MessageReceived(aside=True):
                waiting.append(event.seq)
            case AsideAnswered():
                assert waiting[:1] == [event.message], "asides are answered once each, in their order"
                del waiting[0]
            case AssistantSaid() | TurnStarted() | TurnEnded():
                assert not waiting, f"{event.type} came before the answer to an aside"
    assert not waiting, "an aside was lost"


def test_the_calls_of_random_logs_make_exactly_the_moves_of_the_transition_table():
    """TRANSITIONS is complete, and every row of it occurs [B54]."""
    moves = set()
    for seed in range(250):
        shell = RandomShell(seed, moves)
        shell.play(60)
        shell.rest()
        check_invariants(shell.log.events)
        assert moves <= set(TRANSITIONS), f"seed {seed}: {moves - set(TRANSITIONS)}"
    assert moves == set(TRANSITIONS), f"never seen: {set(TRANSITIONS) - moves}"


def test_a_new_owner_brings_every_prefix_of_a_log_to_rest():
    """Every call of a log that was cut anywhere gets its result [B54]."""
    for seed in range(40):
        shell = RandomShell(seed, set())
        shell.play(40)
        shell.rest()
        events = shell.log.events
        for cut in range(len(events) + 1):
            other = RandomShell(seed, set())
            log = other.log
            log.fold(events[:cut])
            log.now = shell.log.now
            log.epoch = shell.log.epoch + 1
            log.tell(OwnerStarted(epoch=log.epoch))
            other.rest()
            check_invariants(log.events)


def test_a_state_that_was_stored_and_read_back_is_the_same_state():
    """The state is the fold of the log, and also the snapshot plus the tail [B54]."""
    for seed in range(20):
        shell = RandomShell(seed, set())
        shell.play(60)
        state = State(conversation="c")
        for event in shell.log.events:
            stored = codec.decode_state(codec.encode_state(state))
            assert stored is not None
            state = evolve(stored, codec.decode_event(codec.encode_event(event)))
        assert codec.encode_state(state) == codec.encode_state(shell.log.state)
        assert owed(state) == owed(shell.log.state)
        assert pending_entries(state) == pending_entries(shell.log.state)


# --- after faults ---


def test_a_halted_turn_does_not_ask_about_interrupted_calls():
    """This holds whether the halt comes before the recovery or after it [B49, B70]."""
    log = Log()
    careful, plain = log.start("careful", "plain")
    log.claim(careful)
    log.claim(plain)
    log.finish(plain, HaltOutcome(reason="handed_over"))
    (returned,) = log.tell(OwnerStarted(epoch=2))
    assert (returned.call_id, returned.error.kind) == (careful, "interrupted")
    assert log.tell(EndTurn())[-1].reason == "handed_over"

    log = Log()
    careful, plain = log.start("careful", "plain")
    log.claim(careful)
    log.claim(plain)
    log.epoch = 2
    assert event_types(log.tell(OwnerStarted(epoch=2))) == ["CallSuspended", "CallStarted"]
    halting = log.finish(plain, HaltOutcome(reason="handed_over"))
    assert [(event.call_id, event.error and event.error.kind) for event in halting] == [
        (plain, None),
        (careful, "interrupted"),
    ]
    assert pending_entries(log.state) == []


def test_a_call_that_ran_on_a_grant_is_not_run_again_after_the_grant_is_revoked():
    """A call that a person approved is run again [B37, B48]."""
    log = Log()
    approved, other = log.start("gated_again", "gated_again")
    log.resolve(approved, Approve(remember="tool"))
    log.claim(approved)
    log.resolve(other, Deny("no"))
    log.finish(approved)
    (granted,) = log.reply("gated_again")
    log.claim(granted)
    held = Log(log.state)
    assert event_types(held.tell(OwnerStarted(epoch=2))) == ["CallStarted"], "the grant holds"
    log.tell(RevokeGrant(grant=log.state.grants[0].id, by=ANN))
    assert event_types(log.tell(OwnerStarted(epoch=2))) == ["CallSuspended"]
    (entry,) = pending_entries(log.state)
    assert (entry.call, entry.kind, entry.recovery) == (granted, "approval", True)
    log.resolve(granted, Approve())
    log.epoch = 2
    log.claim(granted)
    assert log.state.turn.calls[granted].attempt == 2
    assert event_types(log.tell(OwnerStarted(epoch=3))) == ["CallStarted"], "this time a person approved it"


def test_a_turn_that_is_cancelled_or_halted_has_no_pending_calls():
    """Its calls cannot be decided any more [B60, B70]."""
    for end in ("cancel", "halt"):
        log = Log()
        plain, human, gated = log.start("plain", "human", "gated")
        log.claim(plain)
        assert [entry.call for entry in pending_entries(log.state)] == [human, gated]
        if end == "cancel":
            log.tell(CancelTurn(by=ANN))
        else:
            log.resolve(gated, Deny("stop", stop=True))
        assert pending_entries(log.state) == []
        assert status_of(log.state) == "executing_tools"
        with pytest.raises(Stale) as late:
            log.resolve(human, Answer("x"))
        assert late.value.reason == "cancelled"


def test_an_input_that_cannot_be_encoded_is_refused_and_earlier_inputs_of_the_draft_stay():
    log = Log()
    draft = Draft(log.state, log.now)
    decide_into(draft, SendMessage(text="hi", by=ANN, agent="a"), {})
    mark = draft.mark()
    with pytest.raises(HoldfastError, match="MessageReceived cannot be encoded"):
        decide_into(draft, SendMessage(text="\ud800", by=ANN, when_busy="queue"), {})
    draft.roll_back(mark)
    decide_into(draft, SendMessage(text="there", by=ANN, when_busy="queue"), {})
    assert [codec.decode_event(body) for body in draft.bodies] == draft.events
    assert [event.text for event in draft.events[1:]] == ["hi", "there"]


def test_a_pending_entry_and_a_snapshot_can_be_made_from_their_stable_fields():
    """Every field that was added later has a default."""
    waiting = Pending(
        conversation="c",
        call="x",
        tool="t",
        executor="server",
        kind="approval",
        prompt="?",
        args={},
        preview=None,
        digest="",
        schema=None,
        deadline=0.0,
        on_expiry="error",
        risk="low",
        principal=ANN,
    )
    seen = Snapshot(
        state="awaiting_input",
        turn=None,
        pending=[waiting],
        in_flight=[],
        messages=[],
        partial="",
        usage=Usage(),
        seq=0,
    )
    assert seen.pending == [waiting]
