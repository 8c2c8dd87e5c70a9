"""Handlers that pass a state to their next run with ``Continue``, and that continue after a denied question."""

import asyncio

import pytest
from support.revival import kill, life
from support.runtimes import agent, of

from holdfast import Ask, Call, Continue, Deny, Result, Runtime, ScriptedModel, ToolCall, tool
from holdfast.core.decide import gate
from holdfast.core.events import CallResolved, CallReturned, CallStarted, CallSuspended
from holdfast.errors import DeclarationError
from holdfast.stores.memory import MemoryStore

START = [ToolCall("job", {"n": 1})]


def job_tool(runs, **options):
    @tool(name="job", description="Start a job elsewhere, and wait for it.", **options)
    async def job(n: int, call: Call) -> object:
        runs.append((call.attempt, call.state))
        if call.state is None:
            return Continue({"job": f"j{n}"})
        return {"finished": call.state["job"]}

    return job


async def test_a_handler_that_returns_continue_runs_again_with_its_state() -> None:
    """The state is in the log before the next run."""
    runs = []
    async with Runtime(agent([START, "done"], job_tool(runs))) as rt:
        await rt.run("go", conversation="c")
        started = of(await rt.history("c"), CallStarted)
        (returned,) = of(await rt.history("c"), CallReturned)
    assert runs == [(1, None), (2, {"job": "j1"})]
    assert [event.state for event in started] == [None, {"job": "j1"}]
    assert returned.value == {"finished": "j1"}


async def test_a_killed_run_gets_the_state_of_its_checkpoint_again() -> None:
    """A reconcile function sees the checkpoint, and lets the handler go on from it."""
    store, polls, waiting = MemoryStore(), [], asyncio.Event()

    def make(blocks):
        @tool(name="job", description="Start a job.", approval="auto", recovery=reconcile)
        async def job(n: int, call: Call) -> object:
            if call.state is None:
                return Continue({"job": "j1"})
            polls.append(call.state)
            if blocks:
                waiting.set()
                await asyncio.Event().wait()
            return "finished"

        return agent(ScriptedModel([START, "done"], follow=True), job)

    async def reconcile(args: dict, call: Call) -> object:
        return "redispatch" if call.state == {"job": "j1"} else Result("lost")

    async with life(make(True), store=store.sibling()) as rt:
        await rt.send("c", "go")
        await waiting.wait()
        await kill(rt)
    async with Runtime(make(False), store=store.sibling()) as rt:
        result = await rt.wait("c")
        assert await rt.call_result("c", of(await rt.history("c"), CallReturned)[0].call_id) == "finished"
    assert result.text == "done"
    assert polls == [{"job": "j1"}] * 2


async def test_a_handler_continues_after_a_denied_question_if_it_says_so() -> None:
    """``call.denied`` has the reason, and the answer is None."""
    seen = []

    @tool(name="job", description="Ask.")
    async def job(n: int, call: Call) -> object:
        if not call.answers:
            return Ask("Really?", answer=bool, resume={"n": n}, on_deny="continue")
        seen.append((call.answers, call.denied, call.state))
        return "passed on"

    async with Runtime(agent([START, "done"], job)) as rt:
        result = await rt.run("go", conversation="c")
        await rt.resolve(result.pending[0], Deny("not today"), by="ada")
        await rt.wait("c")
        history = await rt.history("c")
    assert seen == [((None,), "not today", {"n": 1})]
    assert of(history, CallSuspended)[0].denial_continues
    assert of(history, CallResolved)[0].decision == Deny("not today")
    assert of(history, CallReturned)[0].value == "passed on"


async def test_a_denial_that_stops_the_turn_does_not_continue_the_call() -> None:
    @tool(name="job", description="Ask.")
    async def job(n: int, call: Call) -> object:
        return Ask("Really?", answer=bool, resume=None, on_deny="continue")

    async with Runtime(agent([START, "done"], job)) as rt:
        result = await rt.run("go", conversation="c")
        await rt.resolve(result.pending[0], Deny("no", stop=True), by="ada")
        ended = await rt.wait("c")
        (returned,) = of(await rt.history("c"), CallReturned)
    assert ended.reason == "halted"
    assert returned.error.kind == "denied"


async def test_a_handler_that_continues_for_ever_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MAX_RUNS", 5)

    @tool(name="job", description="Never ends.")
    async def job(n: int, call: Call) -> object:
        return Continue({"run": call.attempt})

    model = agent([START, "done"], job)
    async with Runtime(model) as rt:
        await rt.run("go", conversation="c")
        (returned,) = of(await rt.history("c"), CallReturned)
    assert returned.error.kind == "conflict"
    assert "5 times" in returned.error.message


def test_continue_and_on_deny_refuse_what_makes_no_sense() -> None:
    with pytest.raises(DeclarationError, match="needs a state"):
        Continue(None)
    with pytest.raises(DeclarationError, match="needs resume="):
        Ask("?", on_deny="continue")
    with pytest.raises(DeclarationError, match='"end" or "continue"'):
        Ask("?", resume=1, on_deny="stop")  # pyright: ignore[reportArgumentType]
