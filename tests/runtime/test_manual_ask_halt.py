"""Manual calls, manual mode, handlers that ask a question (``Ask``), handlers that end the turn (``Halt``)."""

import asyncio

import pytest
from support.async_tests import until
from support.runtimes import Counting, agent, logged, of, paired, rest, sees

from holdfast import (
    Answer,
    Approve,
    Ask,
    Call,
    Failed,
    Halt,
    Invalid,
    Result,
    Runtime,
    ScriptedModel,
    Stale,
    Submit,
    ToolCall,
)
from holdfast import tool as declare
from holdfast.core.events import CallResolved, CallReturned, CallStarted, CallSuspended, TurnEnded
from holdfast.core.tool import RESERVED_REASONS
from holdfast.errors import DeclarationError


@declare
async def echo(text: str) -> str:
    """Give the text back."""
    return text


@declare(manual=True)
def by_hand(what: str) -> int:
    """Do it by hand."""
    raise NotImplementedError


@declare(manual=True, approval="required")
def by_hand_gated(what: str) -> int:
    """Do it by hand, after an approval."""
    raise NotImplementedError


@declare(executor="human")
def choose() -> str:
    """Let the person choose."""
    raise NotImplementedError


ECHO = ToolCall("echo", {"text": "x"})
HAND = ToolCall("by_hand", {"what": "lift"})


async def test_the_automatic_call_runs_and_only_the_manual_one_is_pending():
    """An automatic call runs at once; the manual call beside it waits for a submitted result [B66]."""
    model = ScriptedModel([[ECHO, HAND], "done"])
    async with Runtime(agent(model, echo, by_hand)) as rt:
        turn = await rt.send("c", "hi")
        snapshot = await rest(turn)
        (entry,) = snapshot.pending
        assert (snapshot.state, entry.tool, entry.kind, entry.reason) == (
            "awaiting_input",
            "by_hand",
            "manual",
            "manual",
        )
        assert entry.schema == {"type": "integer"}
        assert [event.tool for event in of(await rt.history("c"), CallReturned)] == ["echo"]
        with pytest.raises(Invalid):
            await rt.resolve("c", entry.call, Submit("much"))
        with pytest.raises(Invalid):
            await rt.resolve("c", entry.call, Answer(3))
        await rt.resolve("c", entry.call, Submit(3), by="bob")
        await turn.final_result()
        assert [envelope["result"] for envelope in sees(model)] == ["x", 3]
        returned = of(await rt.history("c"), CallReturned)[1]
        assert (returned.source, returned.by) == ("manual", "bob")


async def test_a_failed_manual_call_is_an_error_of_the_submitted_kind():
    """The model sees the error kind of the ``Failed`` decision [B66]."""
    model = ScriptedModel([[HAND], "done"])
    async with Runtime(agent(model, by_hand)) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        await rt.resolve("c", entry.call, Failed("resource_missing", "no hands"))
        await turn.final_result()
        assert sees(model)[0]["error"]["kind"] == "resource_missing"
        assert of(await rt.history("c"), CallReturned)[0].source == "manual"


async def test_a_gated_manual_call_is_approved_first_and_then_done_by_hand():
    """A manual call with an approval is suspended twice: for the approval, then for its result [B66, B36]."""
    model = ScriptedModel([[ToolCall("by_hand_gated", {"what": "lift"})], "done"])
    async with Runtime(agent(model, by_hand_gated)) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        assert entry.kind == "approval"
        await rt.resolve("c", entry.call, Approve(args={"what": "push"}))
        (entry,) = await rt.pending()
        assert (entry.kind, entry.args) == ("manual", {"what": "push"})
        await rt.resolve("c", entry.call, Submit(1))
        await turn.final_result()
        assert sees(model)[0]["edited_args"] == {"what": "push"}


@pytest.mark.parametrize("where", ["agent", "turn"])
async def test_in_manual_mode_nothing_runs_and_every_call_of_a_known_tool_is_pending(where):
    """Manual mode, of the agent or of one turn, runs no handler, preview or approval function [B67]."""

    ran = []

    @declare(approval="required")
    async def gated() -> str:
        """Never run here."""
        ran.append("gated")
        return "no"

    async def policy(args, call):
        ran.append("policy")
        return True

    @declare(approval=policy)
    async def with_policy() -> str:
        """Never approved here."""
        return "no"

    @declare(approval="required")
    async def planned() -> str:
        """Never planned here."""
        return "no"

    @planned.preview
    async def _() -> str:
        ran.append("preview")
        return "plan"

    names = ["gated", "with_policy", "planned", "choose"]
    model = ScriptedModel([[ECHO, *(ToolCall(name) for name in names), ToolCall("nope")], "done"])
    mode = {"mode": "manual"} if where == "agent" else {}
    async with Runtime(agent(model, echo, gated, with_policy, planned, choose, **mode)) as rt:
        turn = await rt.send("c", "hi", mode="manual" if where == "turn" else None)
        entries = (await turn.result()).pending
        assert [entry.tool for entry in entries] == ["echo", *names]
        assert {(entry.kind, entry.reason) for entry in entries} == {("manual", "manual")}
        assert ran == []
        assert of(await rt.history("c"), CallStarted) == []
        await rt.resolve_many("c", {entry.call: Submit(f"{entry.tool} by hand") for entry in entries})
        await turn.final_result()
        envelopes = sees(model)
        assert [envelope.get("result") for envelope in envelopes[:-1]] == [f"{n} by hand" for n in ["echo", *names]]
        assert envelopes[-1]["error"]["kind"] == "unknown_tool"
        assert ran == []
        paired(await rt.history("c"))


async def test_resolve_many_records_all_decisions_or_none():
    """One invalid or stale decision refuses the whole batch [B67]."""
    model = ScriptedModel([[HAND, HAND], "done"])
    async with Runtime(agent(model, by_hand)) as rt:
        turn = await rt.send("c", "hi")
        one, two = (await turn.result()).pending
        before = await rt.history("c")
        for bad in ({two.call: Submit("no number")}, {two.call: Answer(2)}):
            with pytest.raises(Invalid):
                await rt.resolve_many("c", {one.call: Submit(1)} | bad)
        with pytest.raises(Stale):
            await rt.resolve_many("c", {one.call: Submit(1), "nope": Submit(2)})
        with pytest.raises(Invalid):
            await rt.resolve_many("c", {one.call: Submit(1), two.call: "two"})  # type: ignore[dict-item]
        assert await rt.history("c") == before
        assert len(await rt.pending()) == 2
        accepted = await rt.resolve_many("c", {one.call: Submit(1), two.call: Submit(2)})
        events = await rt.history("c")
        assert accepted.seq == max(event.seq for event in of(events, CallResolved))
        assert len(of(events, CallResolved)) == 2
        await turn.final_result()
        assert [envelope["result"] for envelope in sees(model)] == [1, 2]


async def test_manual_calls_are_pending_together_and_submitting_them_continues_the_turn():
    """The manual calls of one reply are in the snapshot together; their results continue the turn [B90]."""
    model = ScriptedModel([[HAND, ECHO, HAND], [HAND], "done"])
    async with Runtime(agent(model, by_hand, echo)) as rt:
        turn = await rt.send("c", "hi")
        snapshot = await rest(turn)
        assert [(p.kind, p.reason) for p in snapshot.pending] == [("manual", "manual")] * 2
        await rt.resolve_many("c", {entry.call: Submit(n) for n, entry in enumerate(snapshot.pending)})
        await until(lambda: len(model.requests) == 2)
        (entry,) = (await turn.result()).pending
        await rt.resolve_many("c", {entry.call: Submit(9)})
        assert (await turn.final_result()).reason == "completed"
        assert [envelope["result"] for envelope in sees(model)] == [0, "x", 1, 9]


# --- handlers that ask ---


def asking_tool(runs, **options):
    """Return a tool whose handler notes its run and asks a question."""

    @declare
    async def book(call: Call) -> Ask:
        """Ask first."""
        runs.append(call.id)
        return Ask("Which seat?", **options)

    return book


async def test_a_question_of_a_handler_is_pending_under_its_call_and_the_answer_is_the_result():
    """A handler that returns ``Ask`` is not run again: the answer is the result of its call [B68]."""
    runs = []
    model = ScriptedModel([[ToolCall("book")], "done"])
    schema = {"type": "integer", "minimum": 1}
    async with Runtime(agent(model, asking_tool(runs, answer=schema, choices=[1, 2]))) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        assert (entry.call, entry.kind, entry.prompt) == (runs[0], "elicitation", "Which seat?")
        assert (entry.choices, entry.schema) == ([1, 2], schema)
        assert len(of(await rt.history("c"), CallStarted)) == 1
        for wrong in (Answer(3), Answer("1"), Answer(0), Submit(1), Approve()):
            with pytest.raises(Invalid):
                await rt.resolve("c", entry.call, wrong)
        assert await rt.pending() == [entry]
        await rt.resolve("c", entry.call, Answer(2), by="ann")
        await turn.final_result()
        assert sees(model) == [{"ok": True, "result": 2}]
        assert len(runs) == 1, "the handler is not run again"
        returned = of(await rt.history("c"), CallReturned)[0]
        assert (returned.source, returned.by) == ("human", "ann")


async def test_an_answer_is_text_unless_the_question_declares_a_type_or_choices():
    """An answer that does not fit the question's type or choices is refused [B68]."""
    for options, good, bad in (({}, "window", 5), ({"answer": list[int]}, [1], ["a"]), ({"choices": ["a"]}, "a", "b")):
        async with Runtime(agent([[ToolCall("book")], "done"], asking_tool([], **options))) as rt:
            turn = await rt.send("c", "hi")
            (entry,) = (await turn.result()).pending
            with pytest.raises(Invalid):
                await rt.resolve("c", entry.call, Answer(bad))
            await rt.resolve("c", entry.call, Answer(good))
            await turn.final_result()


@pytest.mark.parametrize(
    "ask",
    [
        {"answer": {"$ref": "https://example.com/x.json"}},
        {"answer": {"type": "nonsense"}},
        {"choices": [object()]},
        {"answer": object()},
    ],
    ids=["remote schema", "unknown type", "choice that is not JSON", "schema that is not JSON"],
)
async def test_a_question_with_an_unusable_schema_or_choice_is_an_error_of_the_handler(ask):
    """Such a question is an error result, and no call is suspended [B68, B88]."""

    model = ScriptedModel([[ToolCall("book")], "done"])
    async with Runtime(agent(model, asking_tool([], **ask))) as rt:
        assert (await (await rt.send("c", "hi")).final_result()).reason == "completed"
        assert sees(model)[0]["error"]["kind"] in ("invalid_result", "handler_failed")
        assert of(await rt.history("c"), CallSuspended) == []


async def test_two_questions_and_a_manual_call_in_one_turn_are_all_pending_and_all_get_results():
    """Several pending calls can be answered in any order, one by one or together [B69]."""
    model = ScriptedModel([[ToolCall("book"), HAND, ToolCall("book"), ECHO], "done"])
    async with Runtime(agent(model, asking_tool([]), by_hand, echo)) as rt:
        turn = await rt.send("c", "hi")
        snapshot = await rest(turn)
        assert [entry.kind for entry in snapshot.pending] == ["elicitation", "manual", "elicitation"]
        one, hand, two = (entry.call for entry in snapshot.pending)
        await rt.resolve("c", two, Answer("2C"))
        assert (await rest(turn)).state == "awaiting_input"
        await rt.resolve_many("c", {one: Answer("1A"), hand: Submit(7)})
        await turn.final_result()
        assert [envelope["result"] for envelope in sees(model)] == ["1A", 7, "2C", "x"]
        paired(await rt.history("c"))


# --- handlers that halt ---


async def test_a_halt_lets_running_calls_finish_cancels_waiting_calls_and_ends_the_turn():
    """The turn ends with the reason and the value of the ``Halt`` once the running calls have finished [B70]."""
    door, running = asyncio.Event(), []

    @declare
    async def slow(n: int) -> int:
        """Wait."""
        running.append(n)
        await door.wait()
        return n

    @declare
    async def hand_over() -> Halt:
        """End the turn."""
        await until(lambda: running)
        return Halt("handed_over", {"to": "ann"})

    calls = [ToolCall("slow", {"n": 1}), ToolCall("hand_over"), ToolCall("choose"), ToolCall("slow", {"n": 2})]
    model = ScriptedModel([calls])
    tools = agent(model, slow, hand_over, choose)
    async with Runtime(tools, parallel_per_tool={"slow": 1}) as rt:
        turn = await rt.send("c", "hi")
        await logged(rt, CallReturned, lambda event: event.halt)
        assert of(await rt.history("c"), TurnEnded) == [], "a sibling still runs"
        assert await rt.pending() == []
        door.set()
        ended = await turn.final_result()
        assert (ended.reason, ended.value, ended.halted) == ("handed_over", {"to": "ann"}, True)
        returned = [(e.tool, e.value, e.error and e.error.kind) for e in of(await rt.history("c"), CallReturned)]
        assert ("slow", 1, None) in returned
        assert ("slow", None, "cancelled") in returned, "it had no slot yet, and is not started"
        assert ("choose", None, "cancelled") in returned
        assert running == [1]
        assert len(model.requests) == 1
        paired(await rt.history("c"))


async def test_a_question_that_is_asked_after_a_halt_is_cancelled_in_the_same_append():
    """The store never has a pending entry for a question after the ``Halt`` of another call [B70]."""
    door = asyncio.Event()

    @declare
    async def late() -> Ask:
        """Ask too late."""
        await door.wait()
        return Ask("anybody?")

    @declare
    async def stop() -> Halt:
        """End the turn."""
        return Halt("enough")

    store = Counting()
    async with Runtime(agent([[ToolCall("late"), ToolCall("stop")]], late, stop), store=store) as rt:
        turn = await rt.send("c", "hi")
        await logged(rt, CallReturned)
        door.set()
        assert (await turn.final_result()).reason == "enough"
        assert await rt.pending() == []
        events = await rt.history("c")
        assert store.types()[-1] == ["CallSuspended", "CallReturned", "TurnEnded"]
        assert of(events, CallReturned)[-1].error.kind == "cancelled"
        paired(events)


async def test_a_conversation_continues_after_a_halt_and_the_model_sees_its_value_as_the_result():
    """In the next turn the value of the ``Halt`` is the result of its call [B70]."""

    @declare
    async def stop() -> Halt:
        """End the turn."""
        return Halt("enough", 42)

    model = ScriptedModel([[ToolCall("stop")], "hello again"])
    async with Runtime(agent(model, stop)) as rt:
        await (await rt.send("c", "hi")).final_result()
        assert (await (await rt.send("c", "more")).final_result()).reason == "completed"
        assert sees(model) == [{"ok": True, "result": 42}]


@pytest.mark.parametrize("reason", [*sorted(RESERVED_REASONS), "", "  ", None, 5])
async def test_a_halt_with_a_reserved_or_empty_reason_is_refused(reason):
    """``Halt`` raises DeclarationError; in a handler that is an error result [B70]."""
    with pytest.raises(DeclarationError):
        Halt(reason)

    @declare
    async def stop() -> Halt:
        """End the turn, wrongly."""
        return Halt(reason)

    model = ScriptedModel([[ToolCall("stop")], "done"])
    async with Runtime(agent(model, stop)) as rt:
        assert (await (await rt.send("c", "hi")).final_result()).reason == "completed"
        assert sees(model)[0]["error"]["kind"] == "handler_failed"


@pytest.mark.parametrize("value", [Halt("a\ud800"), Halt("fine", object()), Result(Ask("?")), Ask("")])
async def test_a_halt_or_question_that_cannot_be_recorded_is_an_invalid_result(value):
    """A ``Halt`` or an ``Ask`` that cannot be stored is an error result, and the turn continues [B15, B70]."""

    @declare
    async def stop() -> object:
        """Return it."""
        return value

    model = ScriptedModel([[ToolCall("stop")], "done"])
    async with Runtime(agent(model, stop)) as rt:
        assert (await (await rt.send("c", "hi")).final_result()).reason == "completed"
        assert sees(model)[0]["error"]["kind"] == "invalid_result"
