"""Suspended calls: questions, answers, approvals, denials, refusals and deadlines."""

import asyncio
from typing import Any

import pytest
from support.async_tests import until
from support.runtimes import Clock, Counting, Tape, agent, looked, of, paired, rest, sees, types

from holdfast import (
    Accepted,
    Answer,
    Approve,
    Ask,
    Call,
    ClientResult,
    Default,
    Deny,
    Failed,
    Invalid,
    NotAllowed,
    NotFound,
    Principal,
    Retention,
    Runtime,
    ScriptedModel,
    Stale,
    Submit,
    ToolCall,
)
from holdfast import tool as declare
from holdfast.core.events import (
    AssistantSaid,
    CallResolved,
    CallReturned,
    CallStarted,
    CallSuspended,
    ResolutionRefused,
)
from holdfast.core.schema.validation import call_digest
from holdfast.errors import DeclarationError, TooLarge
from holdfast.models.scripted import Hang
from holdfast.stores.memory import MemoryStore


@declare(executor="human", prompt="Which one of {options}?")
def choose(options: list[str]) -> str:
    """Let the person choose."""
    raise NotImplementedError


@declare
async def echo(text: str) -> str:
    """Give the text back."""
    return text


def refund_tool(ran=None, **options):
    """Return a gated tool; it notes its runs in ``ran``."""

    @declare(approval="required", **options)
    async def refund(order: int, amount: float, call: Call) -> dict:
        """Refund an order."""
        if ran is not None:
            ran.append((order, amount, call.approver and call.approver.id))
        return {"refunded": amount}

    return refund


CHOOSE = ToolCall("choose", {"options": ["a", "b"]})
ECHO = ToolCall("echo", {"text": "hi"})
REFUND = ToolCall("refund", {"order": 1, "amount": 2.5})


# --- questions ---


async def test_a_human_call_is_stored_as_pending_before_viewers_see_it():
    """The entry is committed before it is announced, and the state is ``awaiting_input`` [B25]."""
    store = MemoryStore()
    async with Runtime(agent([[CHOOSE], "done"], choose), store=store) as rt:
        await rt.open("c")
        async with Tape(rt, "c") as tape:
            turn = await rt.send("c", "hi", by="ann")
            suspended = await tape.until_type("suspended")
            assert [row.call for row in await store.pending("c")] == [suspended.call_id]
            snapshot = await rest(turn)
        assert snapshot.state == "awaiting_input"
        (entry,) = snapshot.pending
        assert (entry.kind, entry.tool, entry.executor) == ("elicitation", "choose", "human")
        assert entry.prompt == "Which one of ['a', 'b']?"
        assert entry.args == {"options": ["a", "b"]}
        assert entry.schema == {"type": "string"}
        assert (entry.principal, entry.conversation, entry.agent) == ("ann", "c", "a")
        assert await rt.pending() == [entry] == await rt.pending("c")
        assert suspended.pending == entry
        states = [item.state for item in tape.live if item.type == "state_changed"]
        assert states[-1] == "awaiting_input"


async def test_an_answer_is_the_result_and_the_turn_resumes_by_itself():
    """The log has the principal that answered and the digest of the question [B26]."""
    model = ScriptedModel([[CHOOSE], "done"])
    store = Counting()
    async with Runtime(agent(model, choose), store=store) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        accepted = await rt.resolve("c", entry.call, Answer("b"), by="ann")
        assert (await turn.final_result()).reason == "completed"
        assert sees(model) == [{"ok": True, "result": "b"}]
        events = await rt.history("c")
        assert isinstance(accepted, Accepted)
        resolved = events[accepted.seq - 1]
        assert isinstance(resolved, CallResolved)
        assert (resolved.by, resolved.decision, resolved.digest) == ("ann", Answer("b"), entry.digest)
        returned = of(events, CallReturned)[0]
        assert (returned.by, returned.source) == ("ann", "human")
        assert ["CallResolved", "CallReturned"] in store.types()
        assert await rt.pending() == []


async def test_a_declined_question_is_a_denial_that_the_model_sees():
    """The model sees the reason of the denial [B26, B35]."""
    model = ScriptedModel([[CHOOSE], "done"])
    async with Runtime(agent(model, choose)) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        await rt.resolve("c", entry.call, Deny("none of your business"))
        await turn.final_result()
        error = sees(model)[0]["error"]
        assert (error["kind"], error["details"]) == ("denied", {"reason": "none of your business"})


async def test_the_second_click_of_a_double_click_is_stale_and_names_the_winner():
    """One resolution is logged [B27]."""
    async with Runtime(agent([[CHOOSE], Hang()], choose)) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        both = await asyncio.gather(
            rt.resolve("c", entry.call, Answer("a"), by="ann"),
            rt.resolve("c", entry.call, Answer("b"), by="bob"),
            return_exceptions=True,
        )
        assert isinstance(both[0], Accepted)
        assert isinstance(both[1], Stale)
        assert (both[1].reason, both[1].winner, both[1].http_status) == ("resolved", "ann", 409)
        with pytest.raises(Stale) as later:
            await rt.resolve("c", entry.call, Answer("a"), by="ann")
        assert later.value.winner == "ann"
        assert len(of(await rt.history("c"), CallResolved)) == 1


async def test_a_late_decision_names_the_winner_even_after_later_turns():
    """The winner is found in the log [B27]."""
    async with Runtime(agent([[CHOOSE], "done", "more"], choose)) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        await rt.resolve("c", entry.call, Answer("a"), by="ann")
        await turn.final_result()
        await (await rt.send("c", "on")).final_result()
        with pytest.raises(Stale) as late:
            await rt.resolve("c", entry.call, Answer("b"), by="bob")
        assert (late.value.reason, late.value.winner) == ("resolved", "ann")


async def test_the_winner_is_searched_from_the_end_of_the_log_and_no_further_than_the_call():
    """For an unknown call the whole log is read, in pages, so that other tasks can run [B27]."""
    store, reads = MemoryStore(), []
    read = store.read

    async def counted_read(name, after=0, before=None, limit=None):
        found = await read(name, after, before, limit)
        if found:
            reads.append(len(found))
        return found

    async with Runtime(agent([*["hi"] * 150, [CHOOSE, ECHO], "done"], choose, echo), store=store) as rt:
        for _ in range(150):
            await (await rt.send("c", "hi")).final_result()
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        await rt.resolve("c", entry.call, Answer("a"), by="ann")
        await turn.final_result()
        (said,) = [event for event in of(await rt.history("c"), AssistantSaid) if event.calls]
        store.read = counted_read
        for made, winner in zip(said.calls, ("ann", None), strict=True):
            reads.clear()
            with pytest.raises(Stale) as late:
                await rt.resolve("c", made.id, Answer("b"), by="bob")
            assert (late.value.reason, late.value.winner) == ("resolved", winner)
            assert sum(reads) < said.seq / 2
        reads.clear()
        with pytest.raises(Stale) as late:
            await rt.resolve("c", "never", Answer("b"), by="bob")
        seq = (await rt.conversations())[0].seq
        assert (late.value.reason, sum(reads)) == ("unknown", seq)
        assert seq > 2 * max(reads)


async def test_decisions_on_unknown_calls_and_conversations_are_refused_and_change_nothing():
    """Unknown calls, idle conversations and unknown conversations give typed errors [B28]."""
    async with Runtime(agent([[CHOOSE], "done", "hello"], choose)) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        await (await rt.send("idle", "hi")).result()
        before = [await rt.history("c"), await rt.history("idle")]
        for conversation, call in (("c", "nope"), ("idle", entry.call), ("nowhere", entry.call)):
            with pytest.raises(Stale) as refused:
                await rt.resolve(conversation, call, Answer("a"))
            assert (refused.value.reason, refused.value.http_status, refused.value.exit_code) == ("unknown", 404, 3)
        with pytest.raises(NotFound):
            await rt.cancel("nowhere")
        with pytest.raises(NotFound):
            await rt.snapshot("nowhere")
        with pytest.raises(NotFound):
            await rt.history("nowhere")
        with pytest.raises(NotFound):
            await anext(rt.events("nowhere"))
        assert [await rt.history("c"), await rt.history("idle")] == before
        assert {row.conversation for row in await rt.conversations()} == {"c", "idle"}
        assert [p.call for p in await rt.pending()] == [entry.call]


async def test_a_decision_on_a_running_call_is_stale():
    """The reason is ``phase`` [B28]."""
    door, running = asyncio.Event(), []

    @declare
    async def slow(call: Call) -> None:
        """Wait."""
        running.append(call.id)
        await door.wait()

    async with Runtime(agent([[ToolCall("slow")], "done"], slow)) as rt:
        turn = await rt.send("c", "hi")
        await until(lambda: running)
        with pytest.raises(Stale) as refused:
            await rt.resolve("c", running[0], Approve())
        assert refused.value.reason == "phase"
        door.set()
        await turn.final_result()


async def test_resolve_returns_although_the_next_model_call_hangs():
    """The decision is durable before the turn resumes [B29]."""
    model = ScriptedModel([[CHOOSE], Hang()])
    async with Runtime(agent(model, choose)) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        accepted = await rt.resolve("c", entry.call, Answer("a"))
        assert (await rt.history("c"))[accepted.seq - 1].type == "CallResolved"
        await until(lambda: len(model.requests) == 2)
        assert (await rt.snapshot("c")).state == "preparing"


async def test_exactly_one_of_two_runtimes_that_resolve_a_call_wins():
    """The loser gets ``Stale`` with the name of the winner [B30]."""
    store = MemoryStore()
    ran = []
    async with Runtime(agent([[REFUND], "done"], refund_tool(ran)), store=store) as one:
        turn = await one.send("c", "hi")
        (entry,) = (await turn.result()).pending
        async with Runtime(store=store.sibling()) as two:
            both = await asyncio.gather(
                one.resolve("c", entry.call, Deny("no"), by="one"),
                two.resolve("c", entry.call, Approve(), by="two"),
                return_exceptions=True,
            )
            won = [isinstance(each, Accepted) for each in both]
            assert sorted(won) == [False, True]
            lost = both[won.index(False)]
            assert isinstance(lost, Stale)
            assert lost.winner == ("one" if won[0] else "two")
            await turn.final_result()
            resolved = of(await one.history("c"), CallResolved)
            assert [event.by.id for event in resolved] == [lost.winner]
            assert len(ran) == (0 if won[0] else 1)


async def test_the_same_provider_call_id_in_two_conversations_names_two_calls():
    """An answer to one of them does not reach the other [B32]."""
    model = ScriptedModel([[ToolCall("choose", {"options": []}, id="same")], "done"], follow=True)
    async with Runtime(agent(model, choose)) as rt:
        turns = [await rt.send(name, "hi") for name in ("c1", "c2")]
        (first,), (second,) = [(await turn.result()).pending for turn in turns]
        await rt.resolve("c1", first.call, Answer("one"))
        await turns[0].final_result()
        assert [entry.conversation for entry in await rt.pending()] == ["c2"]
        with pytest.raises(Stale):
            await rt.resolve("c2", first.call, Answer("forged"))
        await rt.resolve("c2", second.call, Answer("two"))
        await turns[1].final_result()
        assert sees(model)[-1]["result"] == "two"


# --- rights ---


async def test_a_decision_without_the_right_is_refused_and_logged_and_the_call_stays_pending():
    """``may_resolve`` decides who may approve [B33]."""
    asked = []

    async def may(principal, pending, decision):
        asked.append((principal.id, pending.tool))
        return "boss" in principal.roles

    ran = []
    async with Runtime(agent([[REFUND], "done"], refund_tool(ran)), may_resolve=may) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        for by in ("eve", "systems", Principal("eve", roles=("clerk",))):
            with pytest.raises(NotAllowed) as refused:
                await rt.resolve("c", entry.call, Approve(), by=by)
            assert (refused.value.http_status, refused.value.exit_code) == (403, 5)
        assert await rt.pending() == [entry]
        logged = of(await rt.history("c"), ResolutionRefused)
        assert [event.by.id for event in logged] == ["eve", "systems", "eve"]
        assert {(event.call_id, event.decision) for event in logged} == {(entry.call, "Approve")}
        await rt.resolve("c", entry.call, Approve(), by=Principal("ann", roles=("boss",)))
        await turn.final_result()
        assert ran == [(1, 2.5, "ann")]
        assert asked[-1] == ("ann", "refund")


async def test_no_caller_can_act_as_the_principal_system():
    """In the log that principal stands for expired deadlines only [B33]."""
    async with Runtime(agent([[REFUND], "done"], refund_tool([]))) as rt:
        turn = await rt.send("c", "hi", by="ann")
        (entry,) = (await turn.result()).pending
        before = await rt.history("c")
        for verb in (
            lambda by: rt.open("d", by=by),
            lambda by: rt.send("c", "hi", by=by, when_busy="queue"),
            lambda by: rt.resolve("c", entry.call, Approve(), by=by),
            lambda by: rt.resolve_many("c", {entry.call: Deny()}, by=by),
            lambda by: rt.cancel("c", by=by),
            lambda by: rt.revoke("c", "g1", by=by),
            lambda by: rt.dry_run("refund", {"order": 1, "amount": 2.5}, by=by),
            lambda by: rt.attach_client("c", by=by),
        ):
            for by in ("system", Principal("system", roles=("boss",))):
                with pytest.raises(Invalid, match="the runtime's own") as refused:
                    await verb(by)
                assert refused.value.kind == "invalid_args"
        assert await rt.history("c") == before
        assert [info.conversation for info in await rt.conversations()] == ["c"]


async def test_a_process_with_an_outdated_state_still_asks_may_resolve():
    """A call that this process does not know yet is judged before its decision is recorded [B33]."""
    store = MemoryStore()
    asked = []

    def may(principal, pending, decision):
        asked.append(pending.call)
        return False

    async with Runtime(agent([[CHOOSE], "done"], choose), store=store) as owner:
        await owner.open("c")
        async with Runtime(store=store.sibling(), may_resolve=may) as guest:
            conv = await guest._engine.load_conversation("c")
            turn = await owner.send("c", "hi")
            (entry,) = (await turn.result()).pending
            assert conv.state.seq == 1, "it has not read the new events"
            refresh, skipped = conv.ensure_latest, []

            async def skip_first_refresh():
                if skipped:
                    await refresh()
                skipped.append(True)

            conv.ensure_latest = skip_first_refresh
            with pytest.raises(NotAllowed):
                await guest.resolve("c", entry.call, Answer("a"), by="eve")
            assert skipped
            assert asked == [entry.call]
            assert of(await owner.history("c"), CallResolved) == []


async def test_one_decision_that_is_not_allowed_refuses_the_whole_batch():
    """``resolve_many`` records all decisions or none [B33, B67]."""
    model = ScriptedModel([[CHOOSE, REFUND], "done"])

    def may(principal, pending, decision):
        return pending.tool == "choose"

    async with Runtime(agent(model, choose, refund_tool()), may_resolve=may) as rt:
        turn = await rt.send("c", "hi")
        ask, approval = (await turn.result()).pending
        with pytest.raises(NotAllowed):
            await rt.resolve_many("c", {ask.call: Answer("a"), approval.call: Approve()})
        assert len(await rt.pending()) == 2
        assert of(await rt.history("c"), CallResolved) == []


# --- validation ---


async def test_an_answer_that_violates_its_schema_is_refused_and_the_call_stays_pending():
    """The error says what does not fit, and nothing is logged [B34]."""
    async with Runtime(agent([[CHOOSE], "done"], choose)) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        before = await rt.history("c")
        wrong: list[tuple[Any, str]] = [
            (Answer(5), "string"),
            (Answer(None), "string"),
            (Answer("\ud800"), "surrogate"),
            (Answer(object()), "plain JSON"),
            (Approve(), "Answer or Deny"),
            (ClientResult("a"), "Answer or Deny"),
            (Submit("a"), "elicitation"),
            (Failed("timeout", "x"), "Answer or Deny"),
            (Deny(5), "reason"),  # type: ignore[arg-type]
            (Deny("no", stop="yes"), "stop"),  # type: ignore[arg-type]
            ("a", "no decision"),
        ]
        for decision, words in wrong:
            with pytest.raises(Invalid) as refused:
                await rt.resolve("c", entry.call, decision)
            assert words in refused.value.message, decision
            assert (refused.value.http_status, refused.value.exit_code) == (422, 2)
        with pytest.raises(TooLarge):
            await rt.resolve("c", entry.call, Answer("x" * 2_000_000))
        with pytest.raises(Invalid):
            await rt.resolve_many("c", {})
        with pytest.raises(DeclarationError):
            Failed("my_own_kind", "x")
        assert await rt.pending() == [entry]
        assert await rt.history("c") == before
        await rt.resolve("c", entry.call, Answer("a"))
        await turn.final_result()


async def test_a_malformed_approval_is_refused_and_nothing_is_logged():
    """Edited arguments, digest, remember and duration are checked [B34, B36]."""
    async with Runtime(agent([[REFUND], "done"], refund_tool())) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        before = await rt.history("c")
        for decision in (
            Approve(args={"order": "one", "amount": 1}),
            Approve(args={"amount": 1}),
            Approve(args=[1]),  # type: ignore[arg-type]
            Approve(args={"order": 1, "amount": float("nan")}),
            Approve(args={"order": 1, "amount": 1}, digest=5),  # type: ignore[arg-type]
            Approve(remember="all"),  # type: ignore[arg-type]
            Approve(duration="1h"),
            Approve(remember="tool", duration="soon"),
            Approve(remember="tool", duration="-1h"),
        ):
            with pytest.raises(Invalid):
                await rt.resolve("c", entry.call, decision)
        with pytest.raises(Stale) as superseded:
            await rt.resolve("c", entry.call, Approve(digest="0" * 64))
        assert superseded.value.reason == "superseded"
        assert await rt.history("c") == before
        assert await rt.pending() == [entry]


# --- approvals ---


async def test_an_approved_call_runs_once_with_exactly_the_arguments_that_were_shown():
    """The log has the digest that the approver saw [B35]."""
    ran = []
    model = ScriptedModel([[REFUND], "done"])
    async with Runtime(agent(model, refund_tool(ran, risk="high", prompt="Refund {order}?"))) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        assert ran == []
        assert (entry.kind, entry.risk, entry.prompt) == ("approval", "high", "Refund 1?")
        assert entry.preview == {"tool": "refund", "args": {"order": 1, "amount": 2.5}}
        assert entry.digest == call_digest("refund", {"order": 1, "amount": 2.5}, entry.preview, entry.fingerprint)
        await rt.resolve("c", entry.call, Approve(digest=entry.digest), by="boss")
        await turn.final_result()
        assert ran == [(1, 2.5, "boss")]
        events = await rt.history("c")
        order = [e.type for e in events if e.type.startswith("Call")]
        assert order == ["CallSuspended", "CallResolved", "CallStarted", "CallReturned"]
        assert of(events, CallResolved)[0].digest == entry.digest == of(events, CallSuspended)[0].digest
        assert sees(model) == [{"ok": True, "result": {"refunded": 2.5}}]


async def test_a_denied_call_never_runs_and_the_model_sees_the_reason():
    """The turn continues after a denial [B35]."""
    ran = []
    model = ScriptedModel([[REFUND], "I see"])
    async with Runtime(agent(model, refund_tool(ran))) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        await rt.resolve("c", entry.call, Deny("too much"), by="boss")
        assert (await turn.final_result()).reason == "completed"
        assert ran == []
        error = sees(model)[0]["error"]
        assert error["kind"] == "denied"
        assert "too much" in error["message"]
        assert of(await rt.history("c"), CallStarted) == []


async def test_edited_arguments_run_and_the_log_has_both_versions():
    """The model sees that its arguments were changed [B36]."""
    ran = []
    model = ScriptedModel([[REFUND], "done"])
    async with Runtime(agent(model, refund_tool(ran))) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        edited = {"order": 1, "amount": 1.0}
        await rt.resolve("c", entry.call, Approve(args=edited), by="boss")
        await turn.final_result()
        assert ran == [(1, 1.0, "boss")]
        events = await rt.history("c")
        assert of(events, CallSuspended)[0].args == {"order": 1, "amount": 2.5}
        assert of(events, CallResolved)[0].decision.args == edited
        assert of(events, CallReturned)[0].edited == edited
        envelope = sees(model)[0]
        assert (envelope["ok"], envelope["result"], envelope["edited_args"]) == (True, {"refunded": 1.0}, edited)
        assert "changed" in envelope["note"]
        assert model.requests[1].messages[1].calls[0].args == {"order": 1, "amount": 2.5}


async def test_a_denial_with_stop_cancels_pending_calls_lets_running_ones_finish_and_ends_the_turn():
    """The turn ends as halted, without another model call [B35, B70]."""
    door, running = asyncio.Event(), []

    @declare
    async def slow(call: Call) -> str:
        """Wait."""
        running.append(call.id)
        await door.wait()
        return "finished"

    model = ScriptedModel([[REFUND, CHOOSE, ToolCall("slow")]])
    async with Runtime(agent(model, refund_tool(), choose, slow)) as rt:
        turn = await rt.send("c", "hi")
        await until(lambda: running)
        approval, question = await rt.pending("c")
        if approval.kind != "approval":
            approval, question = question, approval
        await rt.resolve("c", approval.call, Deny("stop it", stop=True), by="boss")
        assert await rt.pending("c") == []
        with pytest.raises(Stale) as late:
            await rt.resolve("c", question.call, Answer("a"))
        assert late.value.reason == "cancelled"
        door.set()
        ended = await turn.final_result()
        assert (ended.reason, ended.value, ended.halted) == ("halted", "stop it", True)
        by_tool = {event.tool: event for event in of(await rt.history("c"), CallReturned)}
        assert by_tool["slow"].value == "finished"
        assert by_tool["choose"].error.kind == "cancelled"
        assert by_tool["refund"].error.kind == "denied"
        assert len(model.requests) == 1
        paired(await rt.history("c"))


async def test_decisions_submitted_together_all_count_even_if_one_stops_the_turn():
    """The order of the decisions in the batch makes none of them late [B67, B35]."""
    for first in (0, 1):
        ran = []
        async with Runtime(agent([[REFUND, REFUND, CHOOSE]], refund_tool(ran), choose)) as rt:
            turn = await rt.send("c", "hi")
            one, two, ask = sorted((await turn.result()).pending, key=lambda p: (p.kind != "approval", p.call))
            decisions = [(one.call, Deny("no", stop=True)), (two.call, Deny("nor this", stop=True))]
            given = dict([*decisions[first:], *decisions[:first], (ask.call, Answer("a"))])
            await rt.resolve_many("c", given)
            assert (await turn.final_result()).reason == "halted"
            events = await rt.history("c")
            assert len(of(events, CallResolved)) == 3
            by_call = {event.call_id: event for event in of(events, CallReturned)}
            assert by_call[ask.call].value == "a"
            assert {by_call[call].error.kind for call in (one.call, two.call)} == {"denied"}
            assert ran == []
            paired(events)


# --- several calls in one turn ---


async def test_server_calls_run_while_a_question_is_pending_and_the_model_gets_all_results_together():
    """After the answer there is one model call, with three results [B38]."""
    model = ScriptedModel([[ToolCall("echo", {"text": "1"}), CHOOSE, ToolCall("echo", {"text": "2"})], "done"])
    async with Runtime(agent(model, echo, choose)) as rt:
        turn = await rt.send("c", "hi")
        snapshot = await rest(turn)
        (entry,) = snapshot.pending
        assert len(of(await rt.history("c"), CallReturned)) == 2
        assert len(model.requests) == 1
        await rt.resolve("c", entry.call, Answer("b"))
        await turn.final_result()
        assert len(model.requests) == 2
        assert [envelope["result"] for envelope in sees(model)] == ["1", "b", "2"]


async def test_the_state_is_executing_tools_until_the_server_calls_finish_even_after_the_answer():
    """An early answer does not start the next model call [B39]."""
    door = asyncio.Event()

    @declare
    async def slow() -> str:
        """Wait."""
        await door.wait()
        return "late"

    model = ScriptedModel([[CHOOSE, ToolCall("slow")], "done"])
    async with Runtime(agent(model, choose, slow)) as rt:
        await rt.open("c")
        async with Tape(rt, "c") as tape:
            turn = await rt.send("c", "hi")
            suspended = await tape.until_type("suspended")
            assert (await rt.snapshot("c")).state == "executing_tools"
            await rt.resolve("c", suspended.call_id, Answer("a"))
            assert (await rt.snapshot("c")).state == "executing_tools"
            assert len(model.requests) == 1
            door.set()
            await turn.final_result()
        states = [item.state for item in tape.live if item.type == "state_changed"]
        assert "awaiting_input" not in states
        assert [envelope["result"] for envelope in sees(model)] == ["a", "late"]


# --- deadlines and frozen settings ---


async def test_a_suspension_without_expires_gets_the_default_deadline_of_the_runtime():
    """That holds for approvals, questions, ``Ask`` and manual calls; the default is 7 days [B82]."""
    clock = Clock(1000.0)

    @declare
    async def asks() -> Ask:
        """Ask."""
        return Ask("well?")

    @declare
    async def asks_briefly() -> Ask:
        """Ask for a minute."""
        return Ask("well?", expires="1m")

    @declare(manual=True)
    async def by_hand() -> None:
        """Done by hand."""

    @declare(approval="required", expires="1h")
    async def stated() -> None:
        """Have its own deadline."""

    tools = [asks, asks_briefly, by_hand, stated, refund_tool(), choose]
    calls = [ToolCall(name) for name in ("asks", "asks_briefly", "by_hand", "stated")]
    model = ScriptedModel([[*calls, REFUND, CHOOSE]])
    async with Runtime(agent(model, *tools), clock=clock, expires="2d") as rt:
        entries = (await (await rt.send("c", "hi")).result()).pending
        assert {entry.tool: entry.deadline for entry in entries} == {
            "asks": 1000.0 + 2 * 86_400,
            "asks_briefly": 1060.0,
            "by_hand": 1000.0 + 2 * 86_400,
            "stated": 4600.0,
            "refund": 1000.0 + 2 * 86_400,
            "choose": 1000.0 + 2 * 86_400,
        }
    async with Runtime(agent([[CHOOSE]], choose), clock=clock) as rt:
        (entry,) = (await (await rt.send("c", "hi")).result()).pending
        assert entry.deadline == 1000.0 + 7 * 86_400


@pytest.mark.parametrize("never", [None, 0, -1, float("inf"), "never", ""])
def test_a_wait_without_a_deadline_is_refused_at_declaration(never):
    """``expires`` must be a positive, finite duration [B82]."""

    def act() -> str:
        """Act."""
        return "done"

    with pytest.raises(ValueError, match=r"expires|duration"):
        declare(approval="required", expires=never)(act)
    with pytest.raises((ValueError, TypeError)):
        Runtime(expires=never)
    if never is not None:
        with pytest.raises(ValueError, match="duration"):
            Ask("well?", expires=never)


async def test_a_pending_call_keeps_its_settings_when_the_code_changes():
    """Approval, expiry, recovery, timeout, retention and risk are frozen in the event of the call [B89]."""
    clock = Clock(1000.0)
    store = MemoryStore()

    def version(**options):
        @declare(**options)
        async def act(call: Call) -> str:
            """Act."""
            return "acted"

        return act

    old = version(
        approval="required", expires="1h", on_expiry=Default("nothing"), recovery="fail", timeout=5,
        retention=Retention.last(2), risk="high",
    )  # fmt: skip
    async with Runtime(agent([[ToolCall("act")], "done"], old), store=store, clock=clock) as rt:
        (entry,) = (await (await rt.send("c", "hi")).result()).pending
    new = version(expires="1m", timeout=0.000001)  # no approval, no default, another deadline
    model = ScriptedModel([[ToolCall("act")], "done"], follow=True)
    async with Runtime(agent(model, new), store=store.sibling(), clock=clock) as rt:
        assert await rt.pending() == [entry]
        assert entry.on_expiry == Default("nothing")
        made = of(await rt.history("c"), AssistantSaid)[0].calls[0]
        frozen = (made.gate, made.expires, made.recovery, made.timeout, made.retention, made.risk)
        assert frozen == ("required", 3600.0, "fail", 5.0, Retention.last(2), "high")
        await rt.resolve("c", entry.call, Approve())
        await until(lambda: model.requests)
        assert sees(model) == [{"ok": True, "result": "acted"}], "the frozen timeout holds"
    again = MemoryStore()
    async with Runtime(agent([[ToolCall("act")], "done"], old), store=again, clock=clock) as rt:
        (entry,) = (await (await rt.send("c", "hi")).result()).pending
    model = ScriptedModel([[ToolCall("act")], "done"], follow=True)
    async with Runtime(agent(model, version()), store=again.sibling(), clock=clock) as rt:
        clock.now += 61
        await looked(rt.store)
        assert await rt.pending() == [entry], "the new deadline does not apply"
        clock.now = 1000.0 + 3600
        await until(lambda: model.requests)
        assert sees(model) == [{"ok": True, "result": "nothing"}]


async def test_an_answer_at_the_deadline_is_stale_as_expired():
    """The exit code is 4, the HTTP status 410 [B55]."""
    clock = Clock(1000.0)
    async with Runtime(agent([[CHOOSE], "done"], choose), clock=clock, expires=60) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        clock.now = entry.deadline
        with pytest.raises(Stale) as late:
            await rt.resolve("c", entry.call, Answer("a"))
        assert (late.value.reason, late.value.exit_code, late.value.http_status) == ("expired", 4, 410)
        await turn.final_result()
        assert types(await rt.history("c"))[-4:] == ["CallResolved", "CallReturned", "AssistantSaid", "TurnEnded"]
