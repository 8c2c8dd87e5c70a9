"""The scenes of the golden logs: the inputs of each go through the machine, and its events are the log.

The clock is fixed and ids follow from the conversation's name, so a scene gives the same bytes each time. Events
that the machine does not emit yet are written by hand. Add scenes; do not change one whose log exists.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from holdfast import Call, Default, Principal, Retention, provider_tool, tool
from holdfast.core.decide.draft import Draft
from holdfast.core.decide.machine import decide_into
from holdfast.core.decide.resolution import judgement_key
from holdfast.core.decisions import Answer, Approve, ClientResult, Deny, Extend, Failed, Submit, TakeBack
from holdfast.core.events import (
    VERSION,
    AnyEvent,
    AssistantSaid,
    Attempt,
    CallReturned,
    ConversationOpened,
    DeputyEnded,
    DeputyNamed,
    ErrorInfo,
    HistorySummarised,
    Limits,
    OutputRejected,
    TurnEnded,
    Usage,
    Verdict,
)
from holdfast.core.inputs import (
    ArchiveConversation,
    AsideRejected,
    AsideReplied,
    BeginTurn,
    CallFinished,
    CallReconciled,
    CallWanted,
    CancelTurn,
    ClaimCall,
    ClientGone,
    ContinueOutcome,
    DeadlinePassed,
    EndTurn,
    ErrorOutcome,
    HaltOutcome,
    ImportConversation,
    Kept,
    ModelFailed,
    ModelHalted,
    ModelReplied,
    OpenConversation,
    OwnerStarted,
    PreviewMade,
    QuestionOutcome,
    RefuseResolution,
    RenameConversation,
    ReplyRejected,
    Resolve,
    RevokeGrant,
    SendMessage,
    SummaryMade,
    TimeLimitReached,
    TimerDue,
    ValueOutcome,
    WindowPassed,
)
from holdfast.core.schema.validation import call_digest
from holdfast.core.state import Grant, State, evolve
from holdfast.core.tool import Artifact, annotations_of, definition_of, fingerprint_of
from holdfast.tools.toolset import Toolset

ADA = Principal("ada", ("agent", "night shift"), {"tenant": "north", "level": 3})
BOSS = Principal("boss", ("manager",))
DEPUTY = Principal("deputy")
USER = Principal("user")
USAGE = Usage(120, 30, 100, 20, 0.0042)
SCHEMA = {"type": "object", "properties": {"total": {"type": "number"}}, "required": ["total"]}


# --- tools: only their declarations matter ---


async def _odd(args: dict[str, Any], call: Call) -> bool:
    return True


async def _found(args: dict[str, Any], call: Call) -> str:
    return "fail"


def _server(name: str, **options: Any) -> Any:
    async def handler(n: int = 0) -> dict: ...

    return tool(name=name, description=f"Tool {name}. More about it.", **options)(handler)


def _stub(name: str, **options: Any) -> Any:
    def handler(n: int = 0) -> int: ...

    return tool(name=name, description=f"Tool {name}.", **options)(handler)


def _planned(it: Any) -> Any:
    @it.preview
    async def _(n: int = 0) -> str: ...

    return it


SPECS = Toolset(
    _server("look", retention=Retention.last(3)),
    _server("once", recovery="fail", timeout="30s", risk="medium"),
    _server("asked", recovery="ask", expires="2h", retention=Retention.forever()),
    _server("known", recovery=_found),
    _server("pay", approval="required", expires="1h", risk="high", prompt="Pay {n}?"),
    _planned(_server("wire", approval="required", expires="1h", recovery="fail")),
    _server("policy", approval=_odd, expires="1h"),
    _server("deny_silence", approval="required", expires="1h", on_expiry="deny"),
    _server("halt_silence", approval="required", expires="1h", on_expiry="halt"),
    _server("error_silence", approval="required", expires="1h"),
    _stub("default_silence", executor="human", prompt="How many?", expires="1h", on_expiry=Default(7)),
    _stub("choose", executor="human", prompt="Which of {n}?"),
    _stub("locate", executor="client", retention=Retention.turns(2)),
    _stub("gated_locate", executor="client", approval="required"),
    _server("by_hand", manual=True),
    _server("gated_by_hand", manual=True, approval="required"),
    provider_tool("web_search", max_uses=3),
).specs


class Scene:
    """One conversation, input by input."""

    def __init__(self, name: str):
        self.name = name
        self.state = State(conversation=name)
        self.events: list[AnyEvent] = []
        self.specs = SPECS
        self.now = 1_700_000_000.0
        self.epoch = 1

    def tell(self, *inputs: Any) -> None:
        """Decide these inputs, a quarter of a second after the last ones."""
        self.now += 0.25
        draft = Draft(self.state, self.now)
        for given in inputs:
            decide_into(draft, given, self.specs)
        self.events += draft.events
        self.state = draft.state

    def write(self, kind: Any, by: Principal = USER, **fields: Any) -> None:
        """Add an event without the machine."""
        self.now += 0.25
        event = kind(seq=self.state.seq + 1, at=self.now, by=by, v=VERSION, **fields)
        self.events.append(event)
        self.state = evolve(self.state, event)

    def say(self, text: str = "go", by: Principal = USER, **more: Any) -> None:
        self.tell(SendMessage(text=text, by=by, agent="desk", **more))

    def begin(self, steps: int = 20, mode: Any = "auto") -> None:
        self.tell(BeginTurn(steps=steps, mode=mode))

    def reply(self, *calls: Any, text: str = "", **more: Any) -> None:
        """Reply as the model; a call is a tool's name, or (name, args), or (name, args, provider's id)."""
        turn = self.state.turn
        assert turn is not None
        wanted: list[Any] = [(c, {"n": 1}, None) if isinstance(c, str) else (*c, None)[:3] for c in calls]
        more.setdefault("attempts", (Attempt("scripted", USAGE),))
        made = tuple(CallWanted(tool=tool, args=args, provider_id=theirs) for tool, args, theirs in wanted)
        self.tell(ModelReplied(turn=turn.number, step=turn.step + 1, text=text, calls=made, **more))

    def turn(self, *calls: Any, **more: Any) -> None:
        self.say()
        self.begin()
        self.reply(*calls, **more)

    def call(self, tool: str, nth: int = 0) -> str:
        assert self.state.turn is not None
        return [call for call, state in self.state.turn.calls.items() if state.made.tool == tool][nth]

    def run(self, tool: str, outcome: Any = None, nth: int = 0, **claim: Any) -> None:
        """Claim a call and finish it."""
        self.claim(tool, nth, **claim)
        self.finish(tool, outcome, nth)

    def claim(self, tool: str, nth: int = 0, **claim: Any) -> None:
        self.tell(ClaimCall(call=self.call(tool, nth), epoch=self.epoch, **claim))

    def finish(self, tool: str, outcome: Any = None, nth: int = 0, **more: Any) -> None:
        call = self.call(tool, nth)
        assert self.state.turn is not None
        attempt = self.state.turn.calls[call].attempt
        outcome = outcome or ValueOutcome(value={"did": tool})
        self.tell(CallFinished(call=call, attempt=attempt, outcome=outcome, **more))

    def plan(self, tool: str, preview: Any = None, nth: int = 0, **more: Any) -> None:
        self.tell(PreviewMade(call=self.call(tool, nth), preview=preview, **more))

    def decide(self, tool: str, decision: Any, by: Principal = BOSS, nth: int = 0) -> None:
        self.tell(Resolve(decisions={self.call(tool, nth): decision}, by=by))

    def digest(self, tool: str, args: dict[str, Any], preview: Any, nth: int = 0) -> str:
        """Return the digest that an approval of the call with these arguments has."""
        assert self.state.turn is not None
        return call_digest(tool, args, preview, self.state.turn.calls[self.call(tool, nth)].fingerprint)

    def silence(self, tool: str, seconds: float) -> None:
        self.now += seconds
        self.tell(DeadlinePassed(call=self.call(tool)))

    def wake(self) -> None:
        """Start a new owner."""
        self.epoch += 1
        self.tell(OwnerStarted(epoch=self.epoch))

    def end(self, text: str = "done") -> None:
        self.reply(text=text)
        self.tell(EndTurn())


# --- scenes ---


def plain(s: Scene) -> None:
    """Plain turns, with every part that a reply of a model can have."""
    s.tell(OpenConversation(agent="desk", by=ADA, metadata={"subject": "order 7", "tags": ["a", "ü"]}))
    s.say("Where is order 7?", ADA)
    s.begin()
    parts = [{"kind": "signature", "data": "c2ln"}, {"kind": "server_tool", "data": {"name": "web_search"}}]
    s.reply(
        ("look", {"n": 7}, "toolu_1"),
        ("look", {"n": 8}, "toolu_1"),
        text="Let me look.",
        thinking="It is about order 7.",
        parts=parts,
        provider="scripted",
        attempts=(
            Attempt("big", error=ErrorInfo("provider_http_error", "try later", {"after": 2})),
            Attempt("scripted", Usage(input_tokens=10)),
        ),
    )
    s.run("look", ValueOutcome(value={"where": "Bonn", "days": 2.5}, data={"map": [50.7, 7.1]}))
    s.run("look", ValueOutcome(value=None), nth=1)
    s.end("It is in Bonn.")
    s.say("Thanks \u2603", ADA)
    s.begin()
    s.reply(("look", '{"n": 9}', "toolu_1"))
    s.run("look", ValueOutcome(value=[1, "two", None, True]))
    s.end("You are welcome.")


def approval(s: Scene) -> None:
    """Approved, edited and denied calls; a refused resolution; a plan that is approved, changes, and is abandoned."""
    s.turn("pay")
    s.tell(RefuseResolution(call=s.call("pay"), decision="Approve", by=USER, reason="user may not resolve pay"))
    s.decide("pay", Approve())
    s.run("pay")
    s.reply("pay", "pay")
    s.decide("pay", Approve(args={"n": 2}))
    s.decide("pay", Deny("too much"), nth=1)
    s.run("pay")
    s.reply("wire", "wire", "wire")
    s.plan("wire", {"from": 1, "to": 2})
    s.plan("wire", nth=1, failure="the preview failed: KeyError: 'account'")
    s.plan("wire", nth=2, error=ErrorInfo("resource_missing", "no such account"))
    suspension = s.state.turn.calls[s.call("wire")].suspension
    s.decide("wire", Approve(digest=suspension.digest))
    s.run("wire", plan=PreviewMade(call=s.call("wire"), preview={"from": 1, "to": 2}))
    s.decide("wire", Deny(), nth=1)
    s.reply("wire")
    for n in range(3):
        s.plan("wire", f"plan {n}") if n == 0 else None
        s.decide("wire", Approve())
        s.claim("wire", plan=PreviewMade(call=s.call("wire"), preview=f"plan {n + 1}"))
    s.reply("policy", "policy")
    s.claim("policy", required=True, verdicts=(Verdict("approval", "required", "over the limit"),))
    s.run("policy", nth=1, verdicts=(Verdict("approval", "auto"),))
    s.decide("policy", Approve())
    s.run("policy")
    s.reply("pay", "choose")
    s.decide("pay", Deny("stop here", stop=True))
    s.tell(EndTurn())


def grants(s: Scene) -> None:
    """Grants for arguments and for a tool, with an end; used; revoked before and after the call is made."""
    s.turn("pay")
    s.decide("pay", Approve(remember="args"))
    s.run("pay")
    s.reply("pay", ("pay", {"n": 2}))
    s.run("pay")
    s.decide("pay", Approve(remember="tool", duration="1h"), nth=1)
    s.run("pay", nth=1)
    s.reply(("pay", {"n": 3}), "policy")
    s.run("pay")
    s.claim("policy", required=True, verdicts=(Verdict("approval", "required"),))
    s.decide("policy", Approve(remember="tool", duration=60.0))
    s.run("policy")
    s.reply("policy", ("pay", {"n": 4}))
    s.run("policy", required=True, verdicts=(Verdict("approval", "required"),))
    for grant in [grant.id for grant in s.state.grants if grant.tool == "pay"]:
        s.tell(RevokeGrant(grant=grant, by=BOSS))
    s.claim("pay")
    s.decide("pay", Approve())
    s.run("pay")
    s.end()


def questions(s: Scene) -> None:
    """A person answers; a handler asks a question; a question is denied."""
    s.turn("choose", "look")
    s.decide("choose", Answer(3), by=ADA)
    s.run("look", QuestionOutcome(question="Sure?", choices=["yes", "no"], expires=600.0))
    s.decide("look", Answer("yes"), by=ADA)
    s.reply("choose", "look")
    s.decide("choose", Deny("none of them"), by=ADA)
    s.claim("look")
    s.finish("look", QuestionOutcome(question="How many?", schema={"type": "integer"}))
    s.decide("look", Deny(), by=ADA)
    s.end()


def clients(s: Scene) -> None:
    """A client runs a call, fails, needs an approval first, or disconnects."""
    s.turn("locate", "locate", "gated_locate", "locate")
    s.decide("locate", ClientResult(5), by=ADA)
    s.decide("locate", Failed("read_failed", "no signal", {"code": 2}), by=ADA, nth=1)
    s.decide("gated_locate", Approve(args={"n": 4}))
    if s.state.turn.calls[s.call("gated_locate")].phase == "ready":
        s.claim("gated_locate")
    s.decide("gated_locate", ClientResult(6), by=ADA)
    s.tell(ClientGone(call=s.call("locate", 2)))
    s.end()


def manual(s: Scene) -> None:
    """Calls that people run: a manual tool, a gated one, and a whole turn."""
    s.turn("by_hand", "by_hand", "gated_by_hand")
    s.decide("by_hand", Submit({"by": "hand"}), by=ADA)
    s.decide("by_hand", Failed("command_failed", "it broke"), by=ADA, nth=1)
    s.decide("gated_by_hand", Approve())
    if s.state.turn.calls[s.call("gated_by_hand")].phase == "ready":
        s.claim("gated_by_hand")
    s.decide("gated_by_hand", Submit({}), by=ADA)
    s.end()
    s.say("all of it by hand", mode="manual")
    s.begin()
    s.reply("look", "pay", "choose")
    for name in ("look", "pay"):
        s.decide(name, Submit({"hand": name}))
    s.decide("choose", Submit(1))
    s.end()


def recovery(s: Scene) -> None:
    """A kill while calls run: redispatched, failed, asked about, reconciled."""
    names = ("look", "once", "asked", "asked", "asked", "asked", "known", "known", "known")
    s.turn(*names)
    seen: dict[str, int] = {}
    for name in names:
        s.claim(name, seen.get(name, 0))
        seen[name] = seen.get(name, 0) + 1
    s.wake()
    s.finish("look")
    s.decide("asked", Approve())
    s.decide("asked", Submit({"was": "done"}), nth=1)
    s.decide("asked", Deny("leave it"), nth=2)
    s.run("asked")
    s.tell(CallReconciled(call=s.call("known"), epoch=s.epoch, verdict=ValueOutcome(value={"found": 1})))
    s.tell(CallReconciled(call=s.call("known", 1), epoch=s.epoch, verdict="redispatch"))
    s.tell(CallReconciled(call=s.call("known", 2), epoch=s.epoch, verdict="fail"))
    s.wake()
    s.tell(CallReconciled(call=s.call("known", 1), epoch=s.epoch, verdict="ask"))
    s.decide("known", Deny(), nth=1)
    s.now += 7200.0
    s.tell(DeadlinePassed(call=s.call("asked", 3)))
    s.end()


def expiry(s: Scene) -> None:
    """Deadlines pass, with each option of on_expiry."""
    s.turn("error_silence", "deny_silence", "default_silence")
    s.silence("error_silence", 3600.0)
    s.silence("deny_silence", 0.0)
    s.silence("default_silence", 0.0)
    s.reply("halt_silence", "choose")
    s.silence("halt_silence", 3600.0)
    s.tell(EndTurn())


def cancelled(s: Scene) -> None:
    """Cancelled in mid-stream, with calls in every phase, and with a call that is being recovered."""
    s.say()
    s.begin()
    s.tell(CancelTurn(by=ADA, reason="changed my mind"))
    s.tell(EndTurn(text="The first half of", thinking="hm", attempts=(Attempt("scripted"),)))
    s.turn("look", "pay", "choose", "asked", "once")
    s.claim("look")
    s.claim("asked")
    s.wake()
    s.run("once")
    s.tell(CancelTurn(by=USER))
    s.tell(EndTurn())
    s.say()
    s.begin()
    s.tell(CancelTurn(by=USER))
    s.tell(EndTurn())


def queue(s: Scene) -> None:
    """Queued messages, and one that interrupts, each with its own options."""
    s.say("one")
    s.begin()
    s.say("two", ADA, when_busy="queue", output=SCHEMA)
    s.say("three", when_busy="queue", mode="manual")
    s.reply("choose")
    s.decide("choose", Answer(1))
    s.end("first")
    s.begin()
    s.say("four", BOSS, when_busy="interrupt")
    s.tell(EndTurn(text="cut"))
    s.begin(mode="manual")
    s.end("third")
    s.begin()
    s.end("fourth")


def failures(s: Scene) -> None:
    """Calls that cannot run, tools that fail, large results, limits, and failures of the model."""
    s.turn("nope", ("look", '{"n": '), ("look", {"n": "seven"}), "web_search", text="several")
    s.reply("look", "look", "once", ("look", {"n": 4}))
    s.run("look")
    s.run("look", ErrorOutcome(error=ErrorInfo("network", "no reply", {"host": "x"}), data={"trace": "t"}), nth=1)
    s.run("once", ErrorOutcome(error=ErrorInfo("timeout", "once was stopped after 30 s", {"partial": [1, 2]})))
    s.run("look", ValueOutcome(value="x" * 70_000, data="y" * 70_000), nth=2)
    s.reply("look")
    s.run("look", ValueOutcome(value={"big": ["z" * 1000] * 70}))
    s.end()
    s.say()
    s.begin(steps=1)
    s.reply("look")
    s.run("look")
    s.tell(EndTurn())
    s.say()
    s.begin()
    error = ErrorInfo("rate_limited", "slow down", {"status": 429})
    attempts = (Attempt("scripted", USAGE, ErrorInfo("network", "reset")),)
    s.tell(ModelFailed(turn=3, step=1, error=error, text="I was about to", thinking="t", attempts=attempts))


def halts(s: Scene) -> None:
    """A tool halts the turn: running calls finish, pending ones are cancelled; its value is large."""
    s.turn("look", "once", "pay", "choose")
    s.claim("look")
    s.claim("once")
    s.finish("look", HaltOutcome(reason="handed_over", value={"to": "ann"}))
    s.finish("once")
    s.tell(EndTurn())
    s.turn("look")
    s.run("look", HaltOutcome(reason="exported", value="row\n" * 20_000))
    s.tell(EndTurn())


def by_hand(s: Scene) -> None:
    """Events that the machine does not emit yet, written by hand."""
    s.say("sum it up", output=SCHEMA)
    s.begin()
    attempts = (Attempt("scripted", Usage(output_tokens=4)),)
    s.write(
        OutputRejected,
        turn=1,
        message="`total` is missing: answer again, as JSON that fits the schema",
        attempts=attempts,
        text='{"sum": 3}',
    )
    s.write(AssistantSaid, turn=1, step=2, id="m1.2", text='{"total": 3}', attempts=attempts)
    s.write(TurnEnded, turn=1, reason="completed", value={"total": 3})
    s.write(HistorySummarised, upto=s.state.seq, text="The sum is 3.", attempts=(Attempt("small", USAGE),))
    s.turn("look")
    s.claim("look")
    verdicts = (Verdict("after_tool", "changed", "a key was removed"),)
    s.write(CallReturned, call_id=s.call("look"), tool="look", ok=True, value={"key": "[removed]"}, verdicts=verdicts)
    s.write(TurnEnded, turn=2, reason="cost_limit", error=ErrorInfo("usage_limit_reached", "2.00 of 2.00 spent"))


def waiting(s: Scene) -> None:
    """An open turn with a call in each phase, a grant, and a queued message."""
    s.turn("pay")
    s.decide("pay", Approve(args={"n": 6}, remember="tool"))
    s.run("pay")
    s.reply("look", "look", "look", "wire", "pay", "choose", "locate", "by_hand", "asked", "policy")
    s.run("look")
    s.claim("look", 1)
    s.claim("asked")
    s.wake()
    s.plan("wire", {"from": 1})
    s.decide("wire", Approve())
    s.claim("wire", plan=PreviewMade(call=s.call("wire"), preview={"from": 2}))
    s.claim("policy", required=True, verdicts=(Verdict("approval", "required"),))
    s.say("and then?", ADA, when_busy="queue")


def answers(s: Scene) -> None:
    """Structured answers, guardrails, hooks that end a turn, limits, and a summary of the history."""
    s.say("Sum it up", output=SCHEMA)
    s.tell(BeginTurn(steps=9, limits=Limits(tokens=9_000, cost=0.5, seconds=120.0)))
    s.reply(text="It is three.", draft=True, output=SCHEMA, finish="length")
    s.reply(text='{"sum": 3}', output=SCHEMA)
    guard = (Verdict("no_secrets", "rejected", "it names a customer"),)
    context = {"tokens": {"history": 12, "total": 40}, "stubbed": []}
    reject = ReplyRejected(
        turn=1, step=3, reason="leave names out", text="Ada owes 3", verdicts=guard, context=context, record=b"{}"
    )
    s.tell(reject)
    changed = (Verdict("tidy", "changed"),)
    s.reply(text='{"total": 3}', output=SCHEMA, context=context, verdicts=changed)
    s.tell(EndTurn())
    s.tell(SummaryMade(upto=s.state.seq, text="The sum is 3.", attempts=(Attempt("small", USAGE),)))
    s.say()
    s.begin()
    s.tell(
        ModelHalted(turn=2, step=1, reason="closed_today", value="come back", verdicts=(Verdict("hours", "halted"),))
    )
    s.say()
    s.tell(BeginTurn(steps=9, limits=Limits(cost=0.004)))
    s.reply("look")
    s.run("look")
    s.tell(EndTurn())
    s.say()
    s.tell(BeginTurn(steps=9, limits=Limits(seconds=1.5)))
    s.tell(TimeLimitReached(turn=4, step=1, text="As I was", thinking="hm", attempts=(Attempt("scripted"),)))


def hooked(s: Scene) -> None:
    """Hooks before every gate: they edit, deny, end the turn or require an approval, and change results."""
    s.specs = {name: replace(spec, hooked=True) for name, spec in SPECS.items()}
    s.turn("look", "once", "pay", "wire", "choose", "locate")
    edited = (Verdict("cap", "edited", "at most 2"),)
    s.claim("look", args={"n": 2}, verdicts=edited)
    call = s.call("look")
    changed = (Verdict("mask", "changed"),)
    s.tell(CallFinished(call=call, attempt=1, outcome=ValueOutcome(value="[redacted]"), verdicts=changed))
    denied = ErrorInfo("denied", "hook 'budget' denied: spent", {"hook": "budget"})
    s.claim("once", refused=denied, verdicts=(Verdict("cap", "allowed"), Verdict("budget", "denied", "spent")))
    s.claim("pay", args={"n": 2}, verdicts=edited)
    s.decide("pay", Approve(remember="args"))
    s.run("pay")
    plan = PreviewMade(call=s.call("wire"), preview="2 will go")
    s.claim("wire", args={"n": 2}, verdicts=edited, plan=plan)
    s.decide("wire", Approve())
    s.claim("wire", plan=plan)
    s.finish("wire")
    s.claim("choose", args={"n": 2}, verdicts=edited)
    s.decide("choose", Answer(2))
    s.claim("locate", verdicts=(Verdict("cap", "allowed"),))
    s.decide("locate", ClientResult(3))
    s.reply("pay", "look", "look")
    s.claim("pay", args={"n": 2}, verdicts=edited)  # covered by the grant
    s.claim("look", required=True, verdicts=(Verdict("careful", "required", "the third time"),))
    stopped = ErrorInfo("denied", "hook 'hours' ended the turn: closed", {"hook": "hours"})
    s.claim(
        "look", 1, refused=stopped, halt=HaltOutcome(reason="closed", value=9), verdicts=(Verdict("hours", "halted"),)
    )
    s.finish("pay")
    s.tell(EndTurn())


def edits(s: Scene) -> None:
    """Edited arguments with the digest of the suspension, with that of their own plan, judged, and refused."""
    s.turn("wire", "wire", "pay", "wire")
    for nth in (0, 1, 2):
        s.plan("wire", {"from": 1, "to": nth}, nth)
    shown = [s.state.turn.calls[s.call("wire", nth)].suspension.digest for nth in (0, 1)]
    s.tell(RefuseResolution(call=s.call("wire"), decision="Cancel", by=USER, reason="user may not resolve wire"))
    s.decide("wire", Approve(args={"n": 2}, digest=shown[0]))
    s.claim("wire", plan=PreviewMade(call=s.call("wire"), preview={"from": 2, "to": 0}))
    s.finish("wire")
    plan = {"from": 3, "to": 1}
    s.decide("wire", Approve(args={"n": 3}, digest=s.digest("wire", {"n": 3}, plan, 1)), nth=1)
    s.claim("wire", 1, plan=PreviewMade(call=s.call("wire", 1), preview=plan))
    s.finish("wire", nth=1)
    s.decide("pay", Approve(args={"n": 4}, digest=s.state.turn.calls[s.call("pay")].suspension.digest))
    s.run("pay")
    third, plan = s.call("wire", 2), {"from": 5, "to": 2}
    suspension = s.state.turn.calls[third].suspension
    assert suspension is not None
    judged = {third: judgement_key(suspension)}
    bound = {third: s.digest("wire", {"n": 5}, plan, 2)}
    s.tell(Resolve(decisions={third: Approve(args={"n": 5})}, by=BOSS, judged=judged, plans=bound))
    s.claim("wire", 2, plan=PreviewMade(call=third, preview=plan))
    s.finish("wire", nth=2)
    s.end()


def redefined(s: Scene) -> None:
    """The tools' definitions change: after an approval, under a grant, before a plan, and while a call runs."""
    later = {
        name: replace(spec, description=f"Tool {name}, anew.", version="2", planned=spec.planned)
        for name, spec in SPECS.items()
    }
    now = {name: definition_of(spec) for name, spec in later.items()}
    s.turn("pay", "wire", "wire", ("pay", {"n": 2}))
    s.plan("wire", "plan 1")
    s.plan("wire", "plan 1", 1, definition=now["wire"])
    s.decide("pay", Approve(remember="tool"))
    s.decide("wire", Approve())
    s.decide("wire", Deny("not like this"), nth=1)
    s.claim("pay", definition=now["pay"])
    s.decide("pay", Approve())
    s.run("pay", definition=now["pay"])
    s.claim("wire", plan=PreviewMade(call=s.call("wire"), preview="plan 1"), definition=now["wire"])
    s.decide("wire", Approve())
    s.run("wire", plan=PreviewMade(call=s.call("wire"), preview="plan 1"), definition=now["wire"])
    s.decide("pay", Approve(), nth=1)
    narrow = replace(later["pay"], parameters='{"type":"object","properties":{"n":{"maximum":1}}}')
    s.claim("pay", 1, definition=definition_of(narrow))
    s.specs = later
    s.reply("pay", "asked")
    s.decide("pay", Approve(remember="args"))
    s.run("pay", definition=now["pay"])
    s.claim("asked")
    s.epoch += 1
    s.tell(OwnerStarted(epoch=s.epoch, definitions={"asked": definition_of(SPECS["asked"])}))
    s.decide("asked", Approve())
    s.run("asked", definition=definition_of(SPECS["asked"]))
    s.end()


def interrupted(s: Scene) -> None:
    """A kill in a gated call and in one that a hook sent to approval: both are asked about, the rest runs again."""
    s.specs = {**SPECS, "look": replace(SPECS["look"], hooked=True)}
    s.turn("pay", "look", "look")
    s.decide("pay", Approve())
    s.claim("pay")
    s.claim("look", required=True, verdicts=(Verdict("careful", "required", "the first time"),))
    s.decide("look", Approve())
    s.claim("look")
    s.claim("look", 1, verdicts=(Verdict("careful", "allowed"),))
    s.wake()
    s.decide("pay", Submit({"was": "paid"}))
    s.decide("look", Approve())
    s.run("look")
    s.finish("look", nth=1)
    s.end()


def imported(s: Scene) -> None:
    """Imported from a file, first without trust and then with it: its open calls are asked about again."""
    s.specs = {**SPECS, "look": replace(SPECS["look"], hooked=True)}
    s.turn("pay", "wire", "once", "look", "locate", "choose", "known")
    s.plan("wire", "1 will go")
    s.decide("pay", Approve(remember="tool"))
    s.decide("wire", Approve())
    s.claim("once")
    s.claim("known")
    s.tell(ImportConversation(by=ADA, origin="support"))
    s.tell(ImportConversation(by=BOSS, trusted=True, origin="support"))
    s.epoch = 0
    s.wake()
    for name in ("pay", "wire", "look", "locate"):
        plan = PreviewMade(call=s.call(name), preview=f"{name}, planned here")
        s.claim(name, plan=plan, definition=definition_of(SPECS[name]), verdicts=(Verdict("cap", "allowed"),))
    s.decide("pay", Approve())
    s.run("pay", plan=PreviewMade(call=s.call("pay"), preview="pay, planned here"))
    s.decide("wire", Deny("not here"))
    s.decide("look", Approve())
    s.run("look", plan=PreviewMade(call=s.call("look"), preview="look, planned here"))
    s.decide("locate", Approve())
    s.claim("locate", plan=PreviewMade(call=s.call("locate"), preview="locate, planned here"))
    s.decide("locate", ClientResult(3))
    s.decide("choose", Answer(2))
    s.decide("known", Submit({"was": "done"}))
    s.end()


def remembered(s: Scene) -> None:
    """A grant that compares one argument, which the approved call has or has not, and one for a changed definition."""
    shell = _server("shell", approval="required", remember=("n",), expires="1h").spec
    s.specs = {**SPECS, "shell": shell}
    s.turn(("shell", {"n": 1}), ("shell", {}))
    s.decide("shell", Approve(remember="args"))
    s.decide("shell", Approve(remember="args"), nth=1)
    s.run("shell")
    s.run("shell", nth=1)
    s.reply(("shell", {"n": 1}), ("shell", {"n": 2}))
    s.run("shell")
    later = definition_of(replace(shell, version="2"))
    s.decide("shell", Approve(), nth=1)
    s.claim("shell", 1, definition=later)
    s.decide("shell", Approve(remember="args"), nth=1)
    s.run("shell", nth=1, definition=later)
    s.end()


def _keep(text: str, media_type: str = "text/plain", name: str = "") -> Kept:
    raw = text.encode()
    return Kept(Artifact(hashlib.sha256(raw).hexdigest(), len(raw), media_type, name), raw)


def artifacts(s: Scene) -> None:
    """Bytes that were kept: with a plan, with the plan of an edit, with a result, an error and a question."""
    s.turn("wire", "wire", "look", "once", "look")
    diff = _keep("-1\n+2\n", "text/x-diff", "wire.diff")
    for nth in (0, 1):
        s.plan("wire", {"diff": diff.reference.sha256, "nth": nth}, nth, kept=(diff,))
    s.decide("wire", Approve())
    s.run("wire", plan=PreviewMade(call=s.call("wire"), preview={"diff": diff.reference.sha256, "nth": 0}))
    s.decide("wire", Approve(args={"n": 2}), nth=1)
    edited = PreviewMade(call=s.call("wire", 1), preview="of two", kept=(_keep("-1\n+3\n", name="edit.diff"),))
    s.claim("wire", 1, plan=edited)
    s.finish("wire", nth=1, kept=(_keep("before"), _keep("{}", "application/json")))
    s.claim("look")
    s.finish("look", ValueOutcome(value="cut", data={"text": "x" * 70_000}), kept=(_keep("all of it"),))
    s.claim("once")
    s.finish("once", ErrorOutcome(error=ErrorInfo("command_failed", "exit 1")), kept=(_keep("its output"),))
    s.claim("look", 1)
    s.finish("look", QuestionOutcome(question="Which?"), 1, kept=(_keep("the choices"),))
    s.decide("look", Answer("this"), nth=1)
    s.end()


def long_results(s: Scene) -> None:
    """A tool whose results may be longer than others, and one whose results may not: in the event, and as artifacts."""
    s.specs = {**SPECS, "reader": _server("reader", result_bytes=20_000).spec}
    s.turn("reader", "reader", "look")
    s.claim("reader")
    s.finish("reader", ValueOutcome(value="r" * 18_000))
    s.claim("reader", 1)
    s.finish("reader", ValueOutcome(value="r" * 70_000), 1)
    s.claim("look")
    s.finish("look", ValueOutcome(value="l" * 18_000))
    s.end()


def images(s: Scene) -> None:
    """Two images of a result, of which the model sees one, and a result without images."""
    s.turn("look", "look")
    seen, other = _keep("\x89PNG", "image/png", "chart.png"), _keep("GIF89a", "image/gif", "other.gif")
    s.claim("look")
    s.finish("look", ValueOutcome(value={"path": "chart.png"}, images=(seen.reference,)), kept=(seen, other))
    s.claim("look", 1)
    s.finish("look", ValueOutcome(value="text"), 1)
    s.end()


def approvers(s: Scene) -> None:
    """Two approvers with a role, a plan that changed after their votes, more time, a reminder and an escalation."""
    s.specs = {
        **SPECS,
        "transfer": _planned(
            _server(
                "transfer",
                approval="required",
                expires="2h",
                approvers=2,
                approver_roles=("manager", "night shift"),
                not_requester=True,
                remind=["1h", "5m"],
                extend_limit="6h",
                escalate_to=("boss", "auditor"),
                escalate_after="30m",
            )
        ).spec,
    }
    s.turn("transfer")
    call = s.call("transfer")
    s.plan("transfer", "first plan")
    s.decide("transfer", Approve(), by=ADA)
    s.tell(Resolve(decisions={call: Extend("3h")}, by=DEPUTY, on_behalf_of={call: BOSS}))
    s.now += 1800
    s.tell(TimerDue(call=call))
    s.decide("transfer", Approve())
    s.claim("transfer", plan=PreviewMade(call=call, preview="second plan"))
    s.now += 4000
    s.tell(TimerDue(call=call))
    s.tell(Resolve(decisions={call: Approve()}, by=DEPUTY, on_behalf_of={call: BOSS}))
    s.decide("transfer", Approve(), by=ADA)
    s.run("transfer", plan=PreviewMade(call=call, preview="second plan"))
    s.end()
    s.turn("transfer")
    s.plan("transfer", "third plan")
    s.decide("transfer", Approve(), by=ADA)


def _ask(question: str, state: Any, **more: Any) -> QuestionOutcome:
    return QuestionOutcome(question=question, schema={"type": "integer"}, continues=True, state=state, **more)


def continued(s: Scene) -> None:
    """Handlers ask and continue: twice, after a kill, after a revoked grant and a changed plan, too often, imported."""
    s.turn("look", "wire", "asked", "once")
    s.run("look", _ask("How many?", {"price": [40, "EUR"]}, expires=600.0))
    s.decide("look", Answer(3), by=ADA)
    s.run("look", _ask("And when?", None))
    s.decide("look", Answer(4), by=ADA)
    s.run("look")
    s.plan("wire", "1 will go")
    s.decide("wire", Approve())
    s.run("wire", _ask("To whom?", 0), plan=PreviewMade(call=s.call("wire"), preview="1 will go"))
    s.decide("wire", Answer(5))
    s.run("wire")
    s.run("asked", _ask("Which?", "first"))
    s.decide("asked", Answer(6))
    s.claim("asked")
    s.claim("once")
    s.finish("once", _ask("Sure?", {}))
    s.decide("once", Deny("no"))
    s.wake()
    s.decide("asked", Approve())
    s.run("asked", QuestionOutcome(question="Anything else?"))
    s.decide("asked", Answer("nothing"))
    s.reply("pay", ("pay", {"n": 2}), "look")
    s.decide("pay", Approve(remember="tool"))
    s.run("pay")
    s.decide("pay", Approve(), nth=1)
    s.run("pay", _ask("How?", {"total": 2}), nth=1)
    later = definition_of(replace(SPECS["pay"], description="Tool pay, anew."))
    s.decide("pay", Answer(7), nth=1)
    s.claim("pay", 1, definition=later)
    s.decide("pay", Approve(), nth=1)
    s.run("pay", nth=1, definition=later)
    for n in range(21):
        s.run("look", _ask(f"Question {n}", n))
        if n < 20:
            s.decide("look", Answer(n), by=ADA)
    s.reply("pay", "look", "asked")
    s.run("pay", _ask("How?", 1))
    for grant in s.state.grants:
        s.tell(RevokeGrant(grant=grant.id, by=BOSS))
    s.decide("pay", Answer(8))
    s.claim("pay")
    s.run("look", _ask("Where?", 2))
    s.run("asked", _ask("Who?", 3))
    s.decide("asked", Answer(9))
    s.tell(ImportConversation(by=BOSS, trusted=True, origin="shop"))
    s.epoch = 0
    s.wake()
    s.claim("pay", definition=definition_of(SPECS["pay"]), verdicts=(Verdict("cap", "allowed"),))
    s.claim("asked", definition=definition_of(SPECS["asked"]))
    s.decide("look", Answer(10))
    s.claim("look", definition=definition_of(SPECS["look"]))
    s.decide("pay", Approve())
    s.run("pay")
    s.decide("asked", Deny("not here"))
    s.decide("look", Approve())
    s.run("look")
    s.end()


def checkpoints(s: Scene) -> None:
    """Handlers that pass a state to their next run, killed after it; and denied questions after which they continue."""
    s.turn("look", "asked", "once")
    kept = Kept(Artifact("a" * 64, 3, "text/plain", "job.txt"), b"job")
    s.claim("look")
    s.finish("look", ContinueOutcome(state={"job": "j1"}), kept=(kept,))
    s.run("asked", ContinueOutcome(state=["j2", None]))
    s.run("once", _ask("Sure?", {"job": "j3"}, denial_continues=True))
    s.decide("once", Deny("not now"), by=ADA)
    s.wake()
    s.finish("look", _ask("Which?", {"job": "j1", "round": 1}, denial_continues=True))
    s.decide("asked", Approve())
    s.run("asked")
    s.claim("once")
    s.finish("once", _ask("And now?", 2, denial_continues=True))
    s.decide("once", Answer(1), by=ADA)
    s.run("once")
    s.decide("look", Deny("", stop=True))
    s.tell(EndTurn())


def shared(s: Scene) -> None:
    """Grants beyond the conversation: given here, given elsewhere, ended between reply and claim, and imported."""
    elsewhere = Grant(
        id="support/g9",
        tool="once",
        remember="tool",
        scope="everyone",
        by=BOSS,
        at=s.now,
        fingerprint=fingerprint_of(SPECS["pay"]),
        annotations=annotations_of(SPECS["pay"]),
    )
    paying = replace(elsewhere, tool="pay", scope="user", user=USER.id)
    s.turn("pay")
    s.decide("pay", Approve(remember="args", scope="user", duration="1h"))
    s.run("pay")
    s.reply(("pay", {"n": 2}))
    s.decide("pay", Approve(remember="tool", scope="everyone"))
    s.run("pay")
    s.reply(("pay", {"n": 3}))
    s.run("pay")
    for grant in s.state.grants:
        s.tell(RevokeGrant(grant=grant.id, by=BOSS))
    s.reply(("pay", {"n": 4}), ("pay", {"n": 5}), shared=(elsewhere, paying))
    s.run("pay", shared=(paying,))
    s.claim("pay", 1)
    s.decide("pay", Approve(remember="tool", scope="everyone"), nth=1)
    s.run("pay", nth=1)
    s.tell(ImportConversation(by=ADA, origin="desk"))
    s.tell(ImportConversation(by=BOSS, trusted=True, origin="desk", grants=(s.state.grants[0].id,)))
    s.epoch = 0
    s.wake()
    s.end()


def deputies(s: Scene) -> None:
    """The log of deputies: two are named, and one delegation is ended before its time."""
    s.write(ConversationOpened, ADA, agent="")
    s.write(DeputyNamed, ADA, delegation="d2", deputy="boss", until=s.now + 3600)
    s.write(DeputyNamed, BOSS, delegation="d3", deputy="user", until=s.now + 60)
    s.write(DeputyEnded, ADA, delegation="d2")


def represented(s: Scene) -> None:
    """A deputy approves a call for a principal, and cancels the turn for it."""
    s.turn("pay", "once")
    call = s.call("pay")
    s.tell(Resolve(decisions={call: Approve()}, by=BOSS, on_behalf_of={call: ADA}))
    s.run("pay")
    s.tell(CancelTurn(by=BOSS, on_behalf_of=ADA))
    s.tell(EndTurn())


def represented_grant(s: Scene) -> None:
    """A deputy has an approval remembered for a principal; it covers no request of that principal."""
    s.specs = {**SPECS, "pay": replace(SPECS["pay"], not_requester=True)}
    s.turn("pay")
    call = s.call("pay")
    s.tell(Resolve(decisions={call: Approve(remember="tool")}, by=BOSS, on_behalf_of={call: ADA}))
    s.run("pay")
    s.reply("pay")
    s.run("pay")
    s.end()
    s.say("mine", ADA)
    s.begin()
    s.reply("pay")


def asides(s: Scene) -> None:
    """Asides while calls wait: answered, rejected and repaired, failed, with a decision meanwhile, and cancelled."""
    s.turn("look", "pay", "choose")
    s.run("look")
    s.say("Why?", ADA, when_busy="aside")
    first = s.state.seq
    s.say("And when?", BOSS, when_busy="aside")
    attempts = (Attempt("scripted", USAGE),)
    context = {"tokens": {"history": 30, "total": 60}}
    guard = (Verdict("no_names", "rejected", "it names a customer"),)
    s.tell(
        AsideRejected(
            message=first, reason="leave names out", text="Ada owes it", attempts=attempts, verdicts=guard,
            context=context, record=b"{}",
        ),
        AsideReplied(
            message=first, text="It is owed", thinking="hm", attempts=attempts, finish="length",
            verdicts=(Verdict("tidy", "changed"),), context=context,
        ),
    )  # fmt: skip
    s.decide("pay", Approve())
    s.claim("pay")
    error = ErrorInfo("network", "no reply", {"host": "x"})
    s.tell(AsideReplied(message=first + 1, text="On Fri", attempts=attempts, error=error))
    s.finish("pay")
    s.decide("choose", Answer(1))
    s.end()
    s.turn("choose")
    s.say("Which?", when_busy="aside")
    s.decide("choose", Answer(2))
    s.tell(AsideReplied(message=s.state.seq - 2, text="The second.", attempts=attempts))
    s.reply("choose")
    s.say("Again?", when_busy="aside")
    s.say("Hello?", when_busy="aside")
    s.tell(CancelTurn(by=ADA))
    s.tell(EndTurn(text="I think", thinking="hm", attempts=attempts))
    s.turn("choose")
    s.say("Still there?", when_busy="aside")


def labels(s: Scene) -> None:
    """A conversation is named, archived, taken back by a message, archived again and taken back."""
    s.tell(OpenConversation(agent="desk", by=ADA))
    s.tell(ArchiveConversation(archived=True, by=ADA))
    s.say("Where is the parcel that I sent to Zürich?\n\nIt was the one with the lamp, and it was not cheap.", ADA)
    s.tell(RenameConversation(title="Parcel to Zürich", by=BOSS), ArchiveConversation(archived=True, by=BOSS))
    s.begin()
    s.reply("pay")
    s.tell(ArchiveConversation(archived=False, by=ADA), ArchiveConversation(archived=False, by=ADA))
    s.tell(RenameConversation(title="Parcel", by=ADA), RenameConversation(title="Parcel", by=ADA))


def model_requests(s: Scene) -> None:
    """Handlers that ask the agent's model: in a run that continues, asks, returns, fails or is cancelled."""
    used = (Attempt("m", None, ErrorInfo("network", "no reply")), Attempt("m2", Usage(50, 7, 5, 1, 0.25)))
    verdicts = (Verdict("tidy", "changed"),)
    s.turn("look", "asked", "once")
    s.claim("look")
    s.finish("look", ContinueOutcome(state={"said": "Yes."}), attempts=used, verdicts=verdicts)
    s.finish("look", attempts=used[1:])
    s.claim("asked")
    s.finish("asked", _ask("Which?", 1), attempts=used, verdicts=verdicts)
    s.claim("once")
    s.finish("once", ErrorOutcome(error=ErrorInfo("usage_limit_reached", "none left")), attempts=used)
    s.decide("asked", Answer(1))
    s.claim("asked")
    s.tell(CancelTurn(by=ADA))
    s.tell(EndTurn(stopped=frozenset({s.call("asked")}), asked={s.call("asked"): (Attempt("m"),)}))


def grace(s: Scene) -> None:
    """Approvals with a grace window: taken back, passed with a grant, by a deputy, of several, cancelled, left open."""
    s.specs = {
        **SPECS,
        "send": _server("send", approval="required", grace="30s", expires="1h").spec,
        "both": _server("both", approval="required", grace="1m", approvers=2, expires="1h").spec,
    }
    s.turn("send", "both")
    send, both = s.call("send"), s.call("both")
    s.decide("send", Approve(remember="tool"))
    s.now += 10
    s.tell(Resolve(decisions={send: TakeBack()}, by=DEPUTY, on_behalf_of={send: ADA}))
    s.tell(Resolve(decisions={send: Approve(remember="args")}, by=DEPUTY, on_behalf_of={send: BOSS}))
    s.decide("both", Approve(), by=ADA)
    s.decide("both", Approve())
    s.tell(RefuseResolution(call=both, decision="TakeBack", by=USER, reason="no"))
    s.decide("both", TakeBack())
    s.decide("both", Approve(), by=DEPUTY)
    s.now += 60
    s.tell(WindowPassed(call=send), WindowPassed(call=both))
    s.run("send")
    s.run("both")
    s.reply("both")
    s.decide("both", Approve(), by=ADA)
    s.decide("both", Approve())
    s.tell(CancelTurn(by=ADA))
    s.tell(EndTurn())
    s.turn("both")
    s.decide("both", Approve(), by=ADA)
    s.decide("both", Approve())


SCENES: dict[str, Callable[[Scene], None]] = {
    "plain": plain,
    "approval": approval,
    "grants": grants,
    "questions": questions,
    "clients": clients,
    "manual": manual,
    "recovery": recovery,
    "expiry": expiry,
    "cancelled": cancelled,
    "queue": queue,
    "failures": failures,
    "halts": halts,
    "by-hand": by_hand,
    "waiting": waiting,
    "answers": answers,
    "hooked": hooked,
    "edits": edits,
    "redefined": redefined,
    "interrupted": interrupted,
    "imported": imported,
    "artifacts": artifacts,
    "remembered": remembered,
    "long-results": long_results,
    "images": images,
    "approvers": approvers,
    "continued": continued,
    "checkpoints": checkpoints,
    "shared": shared,
    "deputies": deputies,
    "labels": labels,
    "represented": represented,
    "represented-grant": represented_grant,
    "asides": asides,
    "model-requests": model_requests,
    "grace": grace,
}
