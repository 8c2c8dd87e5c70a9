"""Handlers that ask and continue with the answer: ``Ask(resume=...)``, ``call.answers`` and ``call.state``."""

import asyncio
from typing import Any

import pytest
from support.async_tests import until
from support.revival import kill, life
from support.runtimes import Clock, agent, logged, of, paired, sees

from holdfast import (
    Answer,
    Approve,
    Ask,
    Call,
    Default,
    Deny,
    Invalid,
    NotAllowed,
    Result,
    Runtime,
    ScriptedModel,
    Stale,
    Submit,
    ToolCall,
)
from holdfast import tool as declare
from holdfast.core.decide.draft import Draft
from holdfast.core.decide.gate import MAX_QUESTIONS
from holdfast.core.decide.machine import decide_into
from holdfast.core.decisions import Principal
from holdfast.core.effects import owed
from holdfast.core.events import CallResolved, CallReturned, CallStarted, CallSuspended
from holdfast.core.inputs import ImportConversation
from holdfast.core.results import INLINE_LIMIT
from holdfast.core.schema.validation import call_digest
from holdfast.core.state import State, evolve
from holdfast.hooks import after_tool, before_tool
from holdfast.runtime.commit import build_append
from holdfast.stores.memory import MemoryStore

BUY = [ToolCall("buy", {"what": "tea"})]
QUOTE = {"price": 40, "lines": [["tea", 40]]}


def buy_tool(runs, *, description="Buy it.", planned=False, door=None, **options):
    """Return a tool that quotes a price, asks for a yes and a number, and then buys.

    runs:  gets (attempt, answers, state, plan) of each run, and the keys of purchases
    door:  an event that the run after the last answer waits for
    """

    async def buy(what: str, call: Call) -> object:
        runs.append((call.attempt, call.answers, call.state, call.plan))
        if not call.answers:
            return Ask(f"Buy {what} for 40?", choices=["yes", "no"], resume=QUOTE)
        if len(call.answers) == 1:
            return Ask("How many?", answer=int, resume=call.state | {"agreed": call.answers[0]})
        if door is not None:
            await door.wait()
        return {"key": call.key, "answers": list(call.answers), "state": call.state}

    made = declare(name="buy", description=description, **options)(buy)
    if planned:

        @made.preview
        async def _(what: str) -> str:
            return f"would buy {what}"

    return made


def answers_of(runs):
    return [answers for _, answers, _, _ in runs]


async def answer_all(rt, *answers, conversation="c"):
    """Answer the conversation's questions in order, each once it is open."""
    for answer in answers:
        (entry,) = await question(rt, conversation)
        await rt.resolve(entry, Answer(answer), by="ann")
        await until(lambda entry=entry: entry_gone(rt, entry))


async def entry_gone(rt, entry):
    return all(now.id != entry.id for now in await rt.pending(entry.conversation))


async def question(rt, conversation="c"):
    return await until(lambda: rt.pending(conversation))


async def test_a_handler_continues_with_the_answers_and_its_state_under_the_same_id_and_key():
    """The answer does not become the result: the handler runs again, and the model sees one result [B108]."""
    runs: list[Any] = []
    model = ScriptedModel([BUY, "done"])
    async with Runtime(agent(model, buy_tool(runs))) as rt:
        turn = await rt.send("c", "hi")
        (first,) = (await turn.result()).pending
        assert (first.kind, first.prompt, first.choices) == ("elicitation", "Buy tea for 40?", ["yes", "no"])
        assert first.continues
        await rt.resolve(first, Answer("yes"), by="ann")
        (second,) = (await turn.result()).pending
        assert (second.call, second.prompt, second.schema) == (first.call, "How many?", {"type": "integer"})
        assert second.id != first.id, "it is another suspension"
        await rt.resolve(second, Answer(3), by="bob")
        await turn.final_result()
        agreed = QUOTE | {"agreed": "yes"}
        assert runs == [(1, (), None, None), (2, ("yes",), QUOTE, None), (3, ("yes", 3), agreed, None)]
        result = {"key": f"c/{first.call}", "answers": ["yes", 3], "state": agreed}
        assert sees(model) == [{"ok": True, "result": result}]
        events = await rt.history("c")
        assert [event.attempt for event in of(events, CallStarted)] == [1, 2, 3]
        assert [(event.continues, event.state) for event in of(events, CallSuspended)] == [
            (True, QUOTE),
            (True, agreed),
        ]
        assert [event.by for event in of(events, CallResolved)] == ["ann", "bob"]
        assert [(event.source, event.by) for event in of(events, CallReturned)] == [("server", "system")]
        paired(events)


@pytest.mark.parametrize("state", [None, False, 0, "", [], {}, {"a": [1, None]}], ids=repr)
async def test_any_json_value_can_be_the_state_also_none(state):
    """``resume=None`` continues, too: only a question without ``resume`` ends the call [B108]."""

    @declare
    async def go(call: Call) -> object:
        """Ask once."""
        if not call.answers:
            return Ask("Well?", resume=state)
        return [type(call.state).__name__, call.state, call.answers[0]]

    model = ScriptedModel([[ToolCall("go")], "done"])
    async with Runtime(agent(model, go)) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        await rt.resolve(entry, Answer("yes"))
        await turn.final_result()
        assert sees(model)[0]["result"] == [type(state).__name__, state, "yes"]


async def test_a_last_question_without_resume_ends_the_call_with_its_answer():
    """``Ask`` without ``resume`` in a later run is as in the first one: the answer is the result [B68, B108]."""

    @declare
    async def go(call: Call) -> object:
        """Ask twice."""
        return Ask("And then?") if call.answers else Ask("What?", resume=1)

    model = ScriptedModel([[ToolCall("go")], "done"])
    async with Runtime(agent(model, go)) as rt:
        await rt.send("c", "hi")
        await answer_all(rt, "this", "that")
        await logged(rt, CallReturned)
        await rt.wait("c")
        assert sees(model) == [{"ok": True, "result": "that"}]
        assert len(of(await rt.history("c"), CallStarted)) == 2


async def test_a_handler_cannot_change_its_answers_and_state_for_a_later_run():
    """A handler gets copies: a run that is repeated gets what the log has [B108]."""

    @declare
    async def go(call: Call) -> object:
        """Ask, and spoil what it got."""
        if call.answers:
            call.answers[0].append("spoilt")
            call.state["spoilt"] = True
        if len(call.answers) < 2:
            return Ask("Which?", answer=list, resume={"n": len(call.answers)})
        return [list(call.answers), call.state]

    model = ScriptedModel([[ToolCall("go")], "done"])
    async with Runtime(agent(model, go)) as rt:
        await rt.send("c", "hi")
        await answer_all(rt, ["a"], ["b"])
        await rt.wait("c")
        assert sees(model)[0]["result"] == [[["a", "spoilt"], ["b"]], {"n": 1, "spoilt": True}]


@pytest.mark.parametrize(
    ("state", "kind"),
    [(object(), "invalid_result"), ({"a": float("nan")}, "invalid_result"), ("x" * INLINE_LIMIT, "too_large")],
    ids=["not JSON", "NaN", "too large"],
)
async def test_a_state_that_cannot_be_logged_is_an_error_of_the_handler(state, kind):
    """It is an error result of the kind that a result would have, and no question is asked [B15, B108]."""

    @declare
    async def go() -> object:
        """Ask."""
        return Ask("Well?", resume=state)

    model = ScriptedModel([[ToolCall("go")], "done"])
    async with Runtime(agent(model, go)) as rt:
        await (await rt.send("c", "hi")).final_result()
        assert sees(model)[0]["error"]["kind"] == kind
        assert of(await rt.history("c"), CallSuspended) == []


async def test_a_handler_that_asks_for_ever_ends_with_conflict():
    """After 20 questions the next one is an error result, and the turn goes on [B109]."""
    runs: list[int] = []

    @declare
    async def nag(call: Call) -> Ask:
        """Ask again and again."""
        runs.append(len(call.answers))
        return Ask(f"Question {len(call.answers) + 1}", resume=None)

    model = ScriptedModel([[ToolCall("nag")], "done"])
    async with Runtime(agent(model, nag)) as rt:
        turn = await rt.send("c", "hi")
        await answer_all(rt, *map(str, range(MAX_QUESTIONS)))
        assert (await turn.final_result()).reason == "completed"
        assert sees(model)[0]["error"]["kind"] == "conflict"
        assert runs == list(range(MAX_QUESTIONS + 1))
        events = await rt.history("c")
        assert len(of(events, CallSuspended)) == MAX_QUESTIONS == 20
        paired(events)


@pytest.mark.parametrize("decision", [Deny("too dear"), Deny("stop", stop=True), None], ids=["deny", "stop", "expiry"])
async def test_a_denial_or_expiry_of_a_second_question_ends_the_call_as_of_any_other(decision):
    """The handler does not run again, and what the tool declares for an expiry is the result [B108]."""
    runs: list[Any] = []
    clock = Clock()
    model = ScriptedModel([BUY, "done"])
    async with Runtime(agent(model, buy_tool(runs, on_expiry=Default("nothing"))), clock=clock) as rt:
        turn = await rt.send("c", "hi")
        await answer_all(rt, "yes")
        (entry,) = await question(rt)
        if decision is None:
            clock.now = entry.deadline + 1
        else:
            await rt.resolve(entry, decision)
        ended = await turn.final_result()
        (returned,) = of(await rt.history("c"), CallReturned)
        kind = returned.error and returned.error.kind
        assert (kind, returned.value) == ((None, "nothing") if decision is None else ("denied", None))
        assert ended.reason == ("halted" if decision and decision.stop else "completed")
        assert len(runs) == 2


async def test_a_late_answer_to_a_question_that_the_call_continues_with_is_stale():
    """While the handler continues, a second answer names the first one's principal [B108]."""
    runs: list[Any] = []
    door = asyncio.Event()
    async with Runtime(agent([BUY, "done"], buy_tool(runs, door=door))) as rt:
        turn = await rt.send("c", "hi")
        await answer_all(rt, "yes", 3)
        await until(lambda: len(runs) == 3)
        (call,) = {event.call_id for event in of(await rt.history("c"), CallStarted)}
        with pytest.raises(Stale) as stale:
            await rt.resolve("c", call, Answer(4), by="bob")
        assert (stale.value.reason, stale.value.winner) == ("resolved", "ann")
        door.set()
        assert (await turn.final_result()).reason == "completed"


async def test_a_permission_for_one_question_is_not_one_for_the_next():
    """``may_resolve`` judges each question of a call, also if another was asked while it was judging [B108]."""
    runs: list[Any] = []
    judged: list[tuple[str, str]] = []
    asked = asyncio.Event()

    async def may_resolve(principal, pending, decision):
        judged.append((principal.id, pending.prompt))
        if principal.id == "bob" and len(judged) == 1:
            asked.set()
            await until(lambda: len(runs) == 2)  # ann answers the first question meanwhile
        return principal.id == "ann" or pending.choices is not None

    async with Runtime(agent([BUY, "done"], buy_tool(runs)), may_resolve=may_resolve) as rt:
        (first,) = (await (await rt.send("c", "hi")).result()).pending
        late = asyncio.create_task(rt.resolve("c", first.call, Answer(3), by="bob"))
        await asked.wait()
        await rt.resolve("c", first.call, Answer("yes"), by="ann")
        with pytest.raises(NotAllowed):
            await late
        assert judged[-1] == ("bob", "How many?")
        assert answers_of(runs) == [(), ("yes",)]


# --- kills, and other processes ---


async def test_another_process_continues_after_a_kill_between_the_answer_and_the_continuation():
    """Neither the answer nor the state is lost, and the handler continues once [B108]."""
    runs: list[Any] = []
    store = MemoryStore()
    model = ScriptedModel([BUY, "done"], follow=True)
    async with life(agent(model, buy_tool(runs)), store=store.sibling()) as rt:
        (first,) = (await (await rt.send("c", "hi")).result()).pending
        await kill(rt)
    async with Runtime(store=store.sibling()) as desk:  # runs no agent: the answer is recorded, and nothing continues
        await desk.resolve("c", first.call, Answer("yes"), by="ann")
        assert await desk.pending() == []
    assert answers_of(runs) == [()]
    async with Runtime(agent(model, buy_tool(runs)), store=store.sibling()) as rt:
        (second,) = await question(rt)
        assert runs[1:] == [(2, ("yes",), QUOTE, None)]
        await rt.resolve(second, Answer(3))
        await rt.wait("c")
        assert answers_of(runs) == [(), ("yes",), ("yes", 3)]
        paired(await rt.history("c"))


RECOVERED = {
    "redispatch": ({"recovery": "redispatch"}, None, True),
    "approved again": ({"recovery": "ask"}, Approve(), True),
    "submitted": ({"recovery": "ask"}, Submit("by hand"), False),
    "fail": ({"recovery": "fail"}, None, False),
}


@pytest.mark.parametrize("case", RECOVERED)
async def test_an_interrupted_continuation_is_recovered_as_declared_with_the_same_answers_and_state(case):
    """It counts as one more attempt, whatever the question before it was [B108]."""
    options, decision, repeats = RECOVERED[case]
    runs: list[Any] = []
    store, door = MemoryStore(), asyncio.Event()
    model = ScriptedModel([BUY, "done"], follow=True)
    async with life(agent(model, buy_tool(runs, door=door, **options)), store=store.sibling()) as rt:
        await rt.send("c", "hi")
        await answer_all(rt, "yes", 3)
        await until(lambda: len(runs) == 3)
        await kill(rt)
    door.set()
    async with Runtime(agent(model, buy_tool(runs, door=door, **options)), store=store.sibling()) as rt:
        if decision is not None:
            (entry,) = await question(rt)
            assert (entry.recovery, entry.reason) == (True, "recovery")
            assert entry.preview["answers"] == ["yes", 3]
            await rt.resolve(entry, decision)
        await logged(rt, CallReturned)
        agreed = QUOTE | {"agreed": "yes"}
        again = [(4, ("yes", 3), agreed, None)] if repeats else []
        assert runs[2:] == [(3, ("yes", 3), agreed, None), *again]
        (returned,) = of(await rt.history("c"), CallReturned)
        assert returned.ok == (case != "fail")
        assert returned.error is None or returned.error.kind == "interrupted"


async def test_a_reconcile_function_sees_the_answers_and_the_state_of_the_interrupted_run():
    """It is asked about the run that was interrupted, not about the question before it [B108]."""
    runs: list[Any] = []
    seen: list[Any] = []
    store, door = MemoryStore(), asyncio.Event()
    model = ScriptedModel([BUY, "done"], follow=True)

    async def look_up(args, call):
        seen.append((call.attempt, call.answers, call.state))
        return Result("found")

    made = buy_tool(runs, door=door, recovery=look_up)
    async with life(agent(model, made), store=store.sibling()) as rt:
        await rt.send("c", "hi")
        await answer_all(rt, "yes", 3)
        await until(lambda: len(runs) == 3)
        await kill(rt)
    async with Runtime(agent(model, made), store=store.sibling()) as rt:
        await logged(rt, CallReturned)
        assert seen == [(3, ("yes", 3), QUOTE | {"agreed": "yes"})]
        assert len(runs) == 3


# --- gates ---


async def test_the_plan_of_a_gated_call_is_compared_once_and_given_to_each_run():
    """A plan that changes while a question is open is no reason to ask: the call has begun [B108]."""
    runs: list[Any] = []
    plan = ["the plan"]
    made = buy_tool(runs, approval="required")

    @made.preview
    async def _(what: str) -> str:
        return plan[0]

    async with Runtime(agent([BUY, "done"], made)) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        await rt.resolve(entry, Approve(), by="boss")
        await question(rt)
        plan[0] = "another plan"
        await answer_all(rt, "yes", 3)
        await turn.final_result()
        assert [plan for _, _, _, plan in runs] == ["the plan"] * 3
        kinds = [event.kind for event in of(await rt.history("c"), CallSuspended)]
        assert kinds == ["approval", "elicitation", "elicitation"]


async def test_a_call_asks_for_an_approval_when_its_grant_was_revoked_while_the_question_was_open():
    """The approval has the true reason and shows the answers; then the call continues with them [B108]."""
    runs: list[Any] = []
    model = ScriptedModel([BUY, BUY, "done"])
    async with Runtime(agent(model, buy_tool(runs, approval="required"))) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        await rt.resolve(entry, Approve(remember="tool"), by="boss")
        await answer_all(rt, "yes", 3)
        await until(lambda: len(runs) == 4)
        (grant,) = await rt.grants("c")
        await rt.revoke("c", grant.id)
        await answer_all(rt, "no")
        (again,) = await question(rt)
        assert (again.kind, again.recovery, again.continues) == ("approval", False, True)
        assert again.reason == "the grant no longer holds"
        assert (again.preview["answers"], again.preview["state"]) == (["no"], QUOTE)
        assert again.digest == call_digest("buy", again.args, again.preview, again.fingerprint)
        assert len(runs) == 4
        with pytest.raises(Invalid, match="arguments that it began with"):
            await rt.resolve(again, Approve(args={"what": "coffee"}))
        await rt.resolve(again, Approve(), by="boss")
        await answer_all(rt, 5)
        await turn.final_result()
        assert runs[4:] == [(2, ("no",), QUOTE, None), (3, ("no", 5), QUOTE | {"agreed": "no"}, None)]
        paired(await rt.history("c"))


async def test_a_denied_approval_of_a_continuation_is_a_denial():
    """It is not reported as an interrupted call: the handler had ended with its question [B108]."""
    runs: list[Any] = []
    model = ScriptedModel([BUY, BUY, "done"])
    async with Runtime(agent(model, buy_tool(runs, approval="required"))) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        await rt.resolve(entry, Approve(remember="tool"))
        await answer_all(rt, "yes", 3)
        await question(rt)
        (grant,) = await rt.grants("c")
        await rt.revoke("c", grant.id)
        await answer_all(rt, "yes")
        (again,) = await question(rt)
        await rt.resolve(again, Deny("not now"))
        await turn.final_result()
        assert sees(model)[-1]["error"]["kind"] == "denied"
        assert len(runs) == 4


async def test_a_call_asks_for_an_approval_when_its_definition_changed_while_the_question_was_open():
    """The approver sees the new definition; once approved, the new code continues with the answers [B108]."""
    old, new = [], []
    store = MemoryStore()
    model = ScriptedModel([BUY, "done"], follow=True)
    options: dict[str, Any] = {"approval": "required", "planned": True}
    async with Runtime(agent(model, buy_tool(old, **options)), store=store.sibling()) as rt:
        (entry,) = (await (await rt.send("c", "hi")).result()).pending
        await rt.resolve(entry, Approve())
        await question(rt)
    async with Runtime(
        agent(model, buy_tool(new, description="Buy it twice.", **options)), store=store.sibling()
    ) as rt:
        await answer_all(rt, "yes")
        (again,) = await question(rt)
        words = "the tool's definition changed since it was approved; it now says: Buy it twice."
        assert (again.kind, again.reason, again.prompt) == ("approval", words, "Buy it twice.")
        assert (again.recovery, again.continues, again.fingerprint != entry.fingerprint) == (False, True, True)
        assert again.preview["plan"] == "would buy tea"
        await rt.resolve(again, Approve())
        await answer_all(rt, 3)
        await rt.wait("c")
        assert answers_of(old) == [()]
        assert new == [
            (2, ("yes",), QUOTE, "would buy tea"),
            (3, ("yes", 3), QUOTE | {"agreed": "yes"}, "would buy tea"),
        ]


async def test_a_call_without_an_approval_continues_when_its_definition_changed():
    """No approver saw the old definition, so there is none to ask again [B108]."""
    runs: list[Any] = []
    store = MemoryStore()
    model = ScriptedModel([BUY, "done"], follow=True)
    async with Runtime(agent(model, buy_tool(runs)), store=store.sibling()) as rt:
        await (await rt.send("c", "hi")).result()
    async with Runtime(agent(model, buy_tool(runs, description="Buy it twice.")), store=store.sibling()) as rt:
        await answer_all(rt, "yes", 3)
        await rt.wait("c")
        assert answers_of(runs) == [(), ("yes",), ("yes", 3)]


async def test_before_hooks_and_approval_functions_judge_a_call_once_and_after_hooks_see_its_result():
    """They judged the arguments, which a continuation cannot change; a question is not a result [B108]."""
    runs: list[Any] = []
    judged: list[str] = []

    @before_tool
    async def watch(call, args):
        judged.append("before")

    @after_tool
    async def look(call, result):
        judged.append("after")

    async def policy(args, call):
        judged.append("approval")
        return False

    async with Runtime(agent([BUY, "done"], buy_tool(runs, approval=policy), hooks=[watch, look])) as rt:
        turn = await rt.send("c", "hi")
        await answer_all(rt, "yes", 3)
        await turn.final_result()
        assert judged == ["before", "approval", "after"]
        assert len(runs) == 3


# --- imports ---


async def import_copy(store, rt, name="copy"):
    """Import the conversation "c" with trust, under another name."""
    state = State(conversation=name)
    events = await rt.history("c")
    for event in events:
        state = evolve(state, event)
    draft = Draft(state, events[-1].at)
    decide_into(draft, ImportConversation(by=Principal("importer"), trusted=True, origin="c"), {})
    whole = Draft(State(conversation=name), draft.now)
    for event in (*events, *draft.events):
        whole.add_event(event)
    await store.append(
        build_append(State(conversation=name), whole, owes=bool(owed(whole.state)), epoch=None, release=False)
    )


@pytest.mark.parametrize("gated", [False, True], ids=["auto", "approved in the file"])
@pytest.mark.parametrize("answered", [False, True], ids=["open question", "answered question"])
async def test_an_imported_call_that_asked_needs_an_approval_before_it_continues(gated, answered):
    """The question stays open; the file's approval does not count, and hooks see the call here [B108]."""
    runs: list[Any] = []
    hooked: list[str] = []

    @before_tool
    async def watch(call, args):
        hooked.append(call.conversation)

    store = MemoryStore()
    model = ScriptedModel([BUY, "done"], follow=True)
    gate: dict[str, Any] = {"approval": "required"} if gated else {}
    async with Runtime(agent(model, buy_tool(runs, **gate), hooks=[watch]), store=store.sibling()) as rt:
        await (await rt.send("c", "hi")).result()
        if gated:
            (entry,) = await question(rt)
            await rt.resolve(entry, Approve())
        (entry,) = await until(lambda: questions(rt))
    async with Runtime(store=store.sibling()) as desk:
        if answered:
            await desk.resolve("c", entry.call, Answer("yes"))
        await import_copy(desk.store, desk)
    runs.clear()
    hooked.clear()
    async with Runtime(agent(model, buy_tool(runs, **gate), hooks=[watch]), store=store.sibling()) as rt:
        if not answered:
            await answer_all(rt, "yes", conversation="copy")
        (again,) = await question(rt, "copy")
        assert (again.kind, again.reason, again.continues) == ("approval", "imported, and asked again here", True)
        assert (again.preview["answers"], again.preview["state"]) == (["yes"], QUOTE)
        assert "copy" in hooked
        copied = [event.call_id for event in of(await rt.history("copy"), CallStarted)]
        assert len(copied) == 1, "it has not continued without an approval"
        await rt.resolve(again, Approve(), by="ann")
        await answer_all(rt, 3, conversation="copy")
        await rt.wait("copy")
        events = await rt.history("copy")
        assert [event.attempt for event in of(events, CallStarted)] == [1, 2, 3]
        (returned,) = of(events, CallReturned)
        assert returned.value["answers"] == ["yes", 3]
        assert returned.value["key"].startswith("copy/")


async def questions(rt):
    return [entry for entry in await rt.pending("c") if entry.kind == "elicitation"]


async def test_a_hook_may_refuse_an_imported_call_that_asked():
    """The hooks of this process have not seen the call, so they decide before it continues [B108]."""
    runs: list[Any] = []
    store = MemoryStore()
    model = ScriptedModel([BUY, "done"], follow=True)

    @before_tool
    async def refuse(call, args):
        return Deny("not here")

    async with Runtime(agent(model, buy_tool(runs)), store=store.sibling()) as rt:
        await (await rt.send("c", "hi")).result()
        await import_copy(rt.store, rt)
    async with Runtime(agent(model, buy_tool(runs), hooks=[refuse]), store=store.sibling()) as rt:
        await answer_all(rt, "yes", conversation="copy")
        await logged(rt, CallReturned, conversation="copy")
        assert len(runs) == 1
