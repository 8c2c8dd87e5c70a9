"""Revival: a new process continues where a killed one stopped. After a kill, the store of that process is unusable."""

import asyncio
from typing import Any

import pytest
from support.async_tests import until
from support.revival import Seen, agent, kill, kinds, life, of, paired, rewrite, run
from support.runtimes import Clock

from holdfast import (
    Agent,
    Answer,
    Approve,
    Call,
    ClientResult,
    Deny,
    Invalid,
    Result,
    Runtime,
    ScriptedModel,
    Stale,
    Submit,
    ToolCall,
    tool,
)
from holdfast.core.events import AssistantSaid, CallResolved, CallReturned, CallStarted, CallSuspended, MessageReceived
from holdfast.models.scripted import Drip, Hang
from holdfast.stores.memory import MemoryStore
from holdfast.tools.toolset import gated


@tool(executor="human", prompt="Which one?")
def choose(n: int = 0) -> str:
    """Ask the user."""
    raise NotImplementedError


def work_tool(seen, **options):
    """Return a server tool that notes its runs and waits at the door in its first attempt."""

    @tool(**options)
    async def work(n: int, call: Call) -> str:
        """Work."""
        seen.note(call, n=n)
        if call.attempt == 1:
            await seen.door.wait()
        return f"worked {call.attempt}"

    return work


async def kill_during_call(seen, *tools, calls):
    """Run a conversation, kill its owner while ``seen`` runs, and return the store for the next process."""
    store = MemoryStore()
    first = ScriptedModel([calls])
    async with life(agent(first, *tools), store=store) as rt:
        await rt.send("c", "go")
        await seen.running()
        await kill(rt)
    return store.sibling()


async def wait_until_idle(rt, conversation="c"):
    """Wait until the conversation is idle; return its log."""
    await until(lambda: _is_idle(rt, conversation))
    return await rt.history(conversation)


async def _is_idle(rt, conversation):
    return (await rt.snapshot(conversation)).state == "idle"


async def wait_until_pending(rt, count=1) -> Any:
    """Wait until so many calls are pending; return them."""
    return await until(lambda: _pending(rt, count))


async def _pending(rt, count):
    found = await rt.pending()
    return found if len(found) >= count else None


def test_a_late_answer_after_a_kill_is_accepted_and_the_turn_completes():
    """A pending call survives the kill of its process [B31]."""

    async def main():
        store = MemoryStore()
        async with life(agent(ScriptedModel([[ToolCall("choose")]]), choose), store=store) as rt:
            await (await rt.send("c", "hi")).result()
            await kill(rt)
        model = ScriptedModel(["thank you"])
        async with life(agent(model, choose), store=store.sibling()) as rt:
            (entry,) = await rt.pending()
            await rt.resolve("c", entry.call, Answer("late"), by="ann")
            log = await wait_until_idle(rt)
            paired(log)
            assert len(model.requests) == 1
            assert '"late"' in model.requests[0].messages[-1].content

    run(main)


def test_an_answer_after_a_kill_and_after_the_deadline_is_stale_as_expired():
    """It is stale even if no process has recorded the expiry yet [B31]."""

    async def main():
        clock = Clock()
        store = MemoryStore()
        assert choose.fn is not None
        slow = tool(executor="human", prompt="?", expires="10s")(choose.fn)
        async with life(agent(ScriptedModel([[ToolCall("choose")]]), slow), store=store, clock=clock) as rt:
            await (await rt.send("c", "hi")).result()
            (entry,) = await rt.pending()
            await kill(rt)
        clock.now = entry.deadline
        async with life(store=store.sibling(), clock=clock) as desk:
            with pytest.raises(Stale) as refused:
                await desk.resolve("c", entry.call, Answer("too late"))
            assert refused.value.reason == "expired"
        model = ScriptedModel(["never mind"])
        async with life(agent(model, slow), store=store.sibling(), clock=clock) as rt:
            log = await wait_until_idle(rt)
            paired(log)
            assert of(log, CallReturned)[0].error.kind == "timeout"
            with pytest.raises(Stale) as refused:
                await rt.resolve("c", entry.call, Answer("much too late"))
            assert refused.value.reason == "expired"

    run(main)


def test_a_kill_while_streaming_leads_to_one_more_model_call_and_no_second_user_message():
    """The new process calls the model again with the same messages [B47]."""

    async def main():
        store = MemoryStore()
        first = ScriptedModel([["half a sen", Hang()]])
        async with life(agent(first), store=store) as rt:
            await rt.send("c", "tell me")
            await until(lambda: _is_streaming(rt))
            await kill(rt)
        second = ScriptedModel(["a whole sentence"])
        async with life(agent(second), store=store.sibling()) as rt:
            log = await wait_until_idle(rt)
            assert kinds(log) == [
                "ConversationOpened",
                "MessageReceived",
                "TurnStarted",
                "AssistantSaid",
                "TurnEnded",
            ]
            assert len(first.requests) == len(second.requests) == 1
            assert [m.text for m in second.requests[0].messages] == ["tell me"]

    async def _is_streaming(rt):
        return (await rt.snapshot("c")).partial.startswith("half")

    run(main)


def test_a_server_call_that_was_running_at_the_kill_runs_again_without_a_model_call_first():
    """It has the same id and arguments; its attempt is 2 [B48, B85]."""

    async def main():
        seen = Seen()
        store = await kill_during_call(seen, work_tool(seen), calls=[ToolCall("work", {"n": 7})])
        model = ScriptedModel(["done"])
        async with life(agent(model, work_tool(seen)), store=store) as rt:
            log = await wait_until_idle(rt)
            paired(log)
            (first, second) = seen.calls
            assert first[0] == second[0], "the same call id, and so the same key"
            assert [first[1:], second[1:]] == [(1, {"n": 7}), (2, {"n": 7})]
            starts = of(log, CallStarted)
            assert [s.attempt for s in starts] == [1, 2]
            assert starts[1].epoch > starts[0].epoch
            assert len(model.requests) == 1
            assert '"worked 2"' in model.requests[0].messages[-1].content

    run(main)


def test_recovery_fail_does_not_run_the_call_again_and_says_that_the_outcome_is_unknown():
    """The model sees an ``interrupted`` error [B49]."""

    async def main():
        seen = Seen()
        work = work_tool(seen, recovery="fail")
        store = await kill_during_call(seen, work, calls=[ToolCall("work", {"n": 1})])
        model = ScriptedModel(["I see"])
        async with life(agent(model, work), store=store) as rt:
            log = await wait_until_idle(rt)
            paired(log)
            assert len(seen.calls) == 1
            (returned,) = of(log, CallReturned)
            assert returned.error.kind == "interrupted"
            assert "unknown" in returned.error.message
            assert '"interrupted"' in model.requests[0].messages[-1].content

    run(main)


@pytest.mark.parametrize(
    ("decision", "runs", "value", "kind"),
    [
        (Approve(), 2, "worked 2", None),
        (Submit("it had worked"), 1, "it had worked", None),
        (Deny("leave it"), 1, None, "interrupted"),
    ],
)
def test_recovery_ask_lets_an_approver_decide_about_an_interrupted_call(decision, runs, value, kind):
    """The approver runs it again, submits its result, or leaves it interrupted [B49]."""

    async def main():
        seen = Seen()
        work = work_tool(seen, recovery="ask")
        store = await kill_during_call(seen, work, calls=[ToolCall("work", {"n": 1})])
        async with life(agent(ScriptedModel(["ok"]), work), store=store) as rt:
            (entry,) = await wait_until_pending(rt)
            assert (entry.kind, entry.recovery, entry.reason) == ("approval", True, "recovery")
            assert len(seen.calls) == 1, "it does not run before the decision"
            with pytest.raises(Invalid):
                await rt.resolve("c", entry.call, Answer("wrong kind"))
            await rt.resolve("c", entry.call, decision, by="boss")
            log = await wait_until_idle(rt)
            paired(log)
            (returned,) = of(log, CallReturned)
            assert (returned.value, returned.error and returned.error.kind) == (value, kind)
            assert len(seen.calls) == runs

    run(main)


def test_recovery_ask_without_an_answer_expires_as_interrupted():
    """The question has the default deadline of 7 days [B49, B82]."""

    async def main():
        clock, seen = Clock(), Seen()
        work = work_tool(seen, recovery="ask")
        store = await kill_during_call(seen, work, calls=[ToolCall("work", {"n": 1})])
        async with life(agent(ScriptedModel(["ok"]), work), store=store, clock=clock) as rt:
            (entry,) = await wait_until_pending(rt)
            assert entry.deadline == clock.now + 7 * 86400
            clock.now = entry.deadline
            log = await wait_until_idle(rt)
            assert of(log, CallReturned)[0].error.kind == "interrupted"
            assert len(seen.calls) == 1

    run(main)


@pytest.mark.parametrize(
    ("verdict", "runs", "value", "kind"),
    [
        (lambda: Result("found in the ledger"), 1, "found in the ledger", None),
        (lambda: "redispatch", 2, "worked 2", None),
        (lambda: "fail", 1, None, "interrupted"),
        (lambda: 1 / 0, 1, None, "interrupted"),
        (lambda: "nonsense", 1, None, "interrupted"),
    ],
)
def test_a_reconcile_function_decides_about_an_interrupted_call(verdict, runs, value, kind):
    """It gives the result, a new run or a failure; if it raises, the call stays interrupted [B49]."""

    async def main():
        seen, asked = Seen(), []

        async def look(args, call):
            asked.append((args, call.attempt))
            return verdict()

        work = work_tool(seen, recovery=look)
        store = await kill_during_call(seen, work, calls=[ToolCall("work", {"n": 3})])
        async with life(agent(ScriptedModel(["ok"]), work), store=store) as rt:
            log = await wait_until_idle(rt)
            paired(log)
            assert asked == [({"n": 3}, 1)]
            (returned,) = of(log, CallReturned)
            assert (returned.value, returned.error and returned.error.kind) == (value, kind)
            assert len(seen.calls) == runs

    run(main)


def test_a_reconcile_function_can_ask_an_approver():
    """The call then waits for an approval to run again [B49]."""

    async def main():
        seen = Seen()

        async def look(args, call):
            return "ask"

        work = work_tool(seen, recovery=look)
        store = await kill_during_call(seen, work, calls=[ToolCall("work", {"n": 3})])
        async with life(agent(ScriptedModel(["ok"]), work), store=store) as rt:
            (entry,) = await wait_until_pending(rt)
            assert entry.recovery
            await rt.resolve("c", entry.call, Approve())
            paired(await wait_until_idle(rt))
            assert [attempt for _, attempt, _ in seen.calls] == [1, 2]

    run(main)


def test_a_kill_with_a_finished_a_running_and_a_pending_call_recovers_each_correctly():
    """The finished call is not rerun, the running one is, and the pending one can be answered [B50]."""

    async def main():
        store, seen, quick = MemoryStore(), Seen(), Seen()

        @tool
        async def fast(n: int, call: Call) -> str:
            """Quick."""
            quick.note(call, n=n)
            return "quick"

        tools = (fast, work_tool(seen), choose)
        calls = [ToolCall("fast", {"n": 1}), ToolCall("work", {"n": 2}), ToolCall("choose")]
        async with life(agent(ScriptedModel([calls]), *tools), store=store) as rt:
            await rt.send("c", "go")
            await seen.running()
            await until(lambda: _returned(rt))
            await kill(rt)
        model = ScriptedModel(["all three"])
        async with life(agent(model, *tools), store=store.sibling()) as rt:
            (entry,) = await rt.pending()
            await seen.running(2)
            await rt.resolve("c", entry.call, Answer("mine"))
            log = await wait_until_idle(rt)
            paired(log)
            assert len(quick.calls) == 1
            assert [attempt for _, attempt, _ in seen.calls] == [1, 2]
            results = [m.content for m in model.requests[0].messages[-3:]]
            assert [("quick" in r, "worked 2" in r, "mine" in r) for r in results] == [
                (True, False, False),
                (False, True, False),
                (False, False, True),
            ]

    async def _returned(rt):
        return of(await rt.history("c"), CallReturned)

    run(main)


async def revive_after(events, last, *agents, **options):
    """Return a runtime on a store whose log ends right after this event."""
    store = MemoryStore()
    await store.open()
    await rewrite(store, "c", events[: events.index(last) + 1])
    await store.close()
    return Runtime(*agents, store=store.sibling(), **options)


async def log_of_one_turn(calls, *tools, decide: Any = None):
    """Run one turn to its end; return its log."""
    async with Runtime(agent(ScriptedModel([calls, "done"]), *tools)) as rt:
        turn = await rt.send("c", "go")
        for entry in (await turn.result()).pending:
            await rt.resolve("c", entry.call, decide, by="boss")
        await turn.final_result()
        return await rt.history("c")


@pytest.mark.parametrize(
    ("last", "runs", "model_calls"),
    [(AssistantSaid, 1, 1), (CallStarted, 1, 1), (CallReturned, 0, 1)],
    ids=["after the reply", "after the claim", "after the result"],
)
def test_a_turn_that_is_cut_off_between_the_events_of_a_call_continues_correctly(last, runs, model_calls):
    """The handler and the model are called only as often as is still needed [B51]."""

    async def main():
        seen = Seen()
        seen.door.set()
        work = work_tool(seen)
        log = await log_of_one_turn([ToolCall("work", {"n": 1})], work)
        seen.calls.clear()
        model = ScriptedModel(["done again"] * 2)
        async with await revive_after(log, of(log, last)[0], agent(model, work)) as rt:
            paired(await wait_until_idle(rt))
            assert len(seen.calls) == runs
            assert len(model.requests) == model_calls

    run(main)


def test_an_approval_never_becomes_a_result():
    """After a kill the approved handler runs, and its approver is not asked again [B51]."""

    async def main():
        seen = Seen()
        seen.door.set()
        work = work_tool(seen, approval="required", recovery="redispatch")
        log = await log_of_one_turn([ToolCall("work", {"n": 1})], work, decide=Approve())
        for last, attempts in ((of(log, CallResolved)[0], [1]), (of(log, CallStarted)[0], [2])):
            seen.calls.clear()
            async with await revive_after(log, last, agent(ScriptedModel(["done"]), work)) as rt:
                after = await wait_until_idle(rt)
                paired(after)
                assert [attempt for _, attempt, _ in seen.calls] == attempts
                (returned,) = of(after, CallReturned)
                assert returned.value == f"worked {attempts[-1]}"
                assert returned.source == "server"
                assert await rt.pending() == [], "the approver is not asked again"

    run(main)


@pytest.mark.parametrize(
    ("options", "wrap"),
    [
        ({"approval": "required"}, False),
        ({"approval": lambda args, call: True}, False),
        ({"risk": "high"}, False),
        ({}, True),
    ],
    ids=["approval required", "approval function", "high risk", "gated toolset"],
)
def test_an_interrupted_gated_or_high_risk_call_does_not_run_again_without_an_approval(options, wrap):
    """Without a declared recovery an approver decides first [B48]."""

    async def main():
        seen = Seen()
        seen.door.set()
        work = work_tool(seen, **options)
        if wrap:
            (work,) = gated([work])
        asks = wrap or "approval" in options
        log = await log_of_one_turn([ToolCall("work", {"n": 1})], work, decide=Approve() if asks else None)
        seen.calls.clear()
        async with await revive_after(log, of(log, CallStarted)[0], agent(ScriptedModel(["done"]), work)) as rt:
            await until(lambda: rt.pending())
            (entry,) = await rt.pending()
            assert (entry.kind, entry.recovery) == ("approval", True)
            assert seen.calls == []
            await rt.resolve("c", entry.call, Approve())
            paired(await wait_until_idle(rt))
            assert [attempt for _, attempt, _ in seen.calls] == [2]

    run(main)


def test_a_running_call_whose_tool_was_removed_from_the_code_gets_an_error_result():
    """The error is ``unknown_tool`` and lists the tools that exist [B52]."""

    async def main():
        seen = Seen()
        store = await kill_during_call(seen, work_tool(seen), calls=[ToolCall("work", {"n": 1})])
        model = ScriptedModel(["I see"])
        async with life(agent(model, choose), store=store) as rt:
            log = await wait_until_idle(rt)
            paired(log)
            (returned,) = of(log, CallReturned)
            assert returned.error.kind == "unknown_tool"
            assert "choose" in returned.error.message
            assert len(model.requests) == 1

    run(main)


@pytest.mark.parametrize("planned", [False, True], ids=["without a preview", "with a preview"])
def test_an_approved_call_whose_tool_was_removed_from_the_code_gets_an_error_result(planned):
    """The turn ends without running the handler [B52]."""

    async def main():
        store, seen = MemoryStore(), Seen()
        work = work_tool(seen, approval="required")
        if planned:

            @work.preview
            async def plan(n: int, call: Call) -> str:
                return "would work"

        async with life(agent(ScriptedModel([[ToolCall("work", {"n": 1})]]), work), store=store) as rt:
            await (await rt.send("c", "go")).result()
            await kill(rt)
        async with life(agent(ScriptedModel(["I see"])), store=store.sibling()) as rt:
            for _ in range(4):  # a plan that cannot be made is asked about again, and then the call fails
                await until(lambda: _settled(rt))
                for entry in await rt.pending():
                    await rt.resolve("c", entry.call, Approve())
            log = await wait_until_idle(rt)
            paired(log)
            assert of(log, CallReturned)[0].error.kind in ("unknown_tool", "conflict")
            assert seen.calls == []

    async def _settled(rt):
        return (await rt.snapshot("c")).state in ("awaiting_input", "idle")

    run(main)


def test_snapshot_pending_and_history_are_served_when_no_process_runs_the_conversation():
    """A process without the agent reads everything and records answers, but runs nothing [B53]."""

    async def main():
        store, seen = MemoryStore(), Seen()
        calls = ["let me see", ToolCall("work", {"n": 1}), ToolCall("choose")]
        async with life(agent(ScriptedModel([calls]), work_tool(seen), choose), store=store) as rt:
            await rt.send("c", "go")
            await seen.running()
            before = await rt.snapshot("c")
            log = await rt.history("c")
            await kill(rt)
        async with life(store=store.sibling()) as desk:
            after = await desk.snapshot("c")
            assert after.messages == before.messages
            assert after.pending == before.pending == await desk.pending()
            assert (after.state, after.seq, after.turn) == ("executing_tools", before.seq, 1)
            assert [(f.tool, f.phase, f.attempt) for f in after.in_flight] == [("work", "running", 1)]
            assert await desk.history("c") == log
            assert [row.conversation for row in await desk.conversations()] == ["c"]
            await desk.resolve("c", after.pending[0].call, Answer("from the desk"))
            assert await desk.pending() == []
            assert len(seen.calls) == 1, "it only records the answer"

    run(main)


def test_a_gated_client_call_that_was_approved_waits_for_its_client_after_a_kill():
    """A kill between the two suspensions revives in the second one [B42]."""

    async def main():
        store = MemoryStore()

        @tool(executor="client", approval="required")
        def locate() -> str:
            """Where is the user?"""
            raise NotImplementedError

        async with life(agent(ScriptedModel([[ToolCall("locate")]]), locate), store=store) as rt:
            await (await rt.send("c", "where am I?")).result()
            (asked,) = await rt.pending()
            await rt.resolve("c", asked.call, Approve(), by="ann")
            await kill(rt)
        async with life(agent(ScriptedModel(["in Rome"]), locate), store=store.sibling()) as rt:
            (entry,) = await rt.pending()
            assert (entry.call, entry.kind) == (asked.call, "client_exec")
            await rt.resolve("c", entry.call, ClientResult("Rome"), by="page")
            log = await wait_until_idle(rt)
            paired(log)
            assert [s.kind for s in of(log, CallSuspended)] == ["approval", "client_exec"]

    run(main)


def test_every_prefix_of_a_log_with_every_kind_of_call_is_a_legal_start():
    """One log with all kinds of calls; ``test_state_machine`` cuts generated logs [B54]."""

    async def main():
        clock = Clock()

        @tool
        async def plain(n: int) -> int:
            """Plain."""
            return n

        @tool(approval="required", recovery="fail")
        async def gated(n: int) -> int:
            """Gated."""
            return n

        @gated.preview
        async def plan(n: int) -> str:
            return f"would return {n}"

        @tool(executor="client", approval="required")
        def locate() -> str:
            """Where?"""
            raise NotImplementedError

        @tool(manual=True)
        async def by_hand(n: int) -> int:
            """By hand."""
            return n

        tools = (plain, gated, choose, locate, by_hand)
        step = [
            *(ToolCall(name, {"n": 1}) for name in ("plain", "gated", "by_hand", "nope")),
            ToolCall("choose"),
            ToolCall("locate"),
        ]

        def model():
            return ScriptedModel([step, "one", "two", "three"], follow=True)

        decisions = {
            "approval": Approve(remember="args"),
            "elicitation": Answer("x"),
            "client_exec": ClientResult("here"),
            "manual": Submit(2),
        }
        async with life(agent(model(), *tools), store="memory:", clock=clock) as rt:
            turn = await rt.send("c", "go", by="ann")
            await rt.send("c", "and then?", by="ann", when_busy="queue")
            for _ in range(2):
                for entry in (await turn.result()).pending:
                    await rt.resolve("c", entry.call, decisions[entry.kind], by="boss")
            await turn.final_result()
            await until(lambda: _is_idle(rt, "c"))
            log = await rt.history("c")
        paired(log)
        assert len(log) > 25
        for event in log:
            async with await revive_after(log, event, agent(model(), *tools), clock=clock) as rt:
                for _ in range(4):
                    await until(lambda rt=rt: _at_rest(rt))
                    for entry in await rt.pending():
                        await rt.resolve("c", entry.call, Deny() if entry.kind == "approval" else decisions[entry.kind])
                after = await wait_until_idle(rt)
                assert after[: event.seq] == log[: event.seq]
                paired(after)

    async def _at_rest(rt):
        return not (await rt.store.row("c")).owes

    run(main, timeout=60)


def test_an_agent_that_gets_its_handlers_at_load_continues_a_conversation_after_a_kill():
    """The approved call runs with the handler that was given to ``from_json`` [B86]."""

    async def main():
        store, seen = MemoryStore(), Seen()
        seen.door.set()
        work = work_tool(seen, approval="required")
        saved = agent(ScriptedModel([[ToolCall("work", {"n": 5})]]), work)
        data = saved.to_json(handlers=False)
        async with life(saved, store=store) as rt:
            await (await rt.send("c", "go")).result()
            await kill(rt)

        async def given_at_load(n: int, call: Call) -> str:
            seen.note(call, n=n)
            return "ran the handler given at load"

        loaded = Agent.from_json(data, handlers={"work": given_at_load}, model=ScriptedModel(["fine"]))
        async with life(loaded, store=store.sibling()) as rt:
            (entry,) = await rt.pending()
            await rt.resolve("c", entry.call, Approve(), by="boss")
            log = await wait_until_idle(rt)
            paired(log)
            assert of(log, CallReturned)[0].value == "ran the handler given at load"
            assert [args for _, _, args in seen.calls] == [{"n": 5}]

    run(main)


def test_a_queued_message_survives_the_kill_of_its_process():
    """The new process answers both messages in order [B13, B47]."""

    async def main():
        store = MemoryStore()
        async with life(agent(ScriptedModel([[Drip("slow", 30.0)]])), store=store) as rt:
            await rt.send("c", "one")
            await rt.send("c", "two", when_busy="queue")
            await kill(rt)
        model = ScriptedModel(["first", "second"])
        async with life(agent(model), store=store.sibling()) as rt:
            log = await wait_until_idle(rt)
            paired(log)
            assert [m.text for m in of(log, MessageReceived)] == ["one", "two"]
            assert [m.text for m in of(log, AssistantSaid)] == ["first", "second"]

    run(main)


def test_a_standby_process_takes_over_from_a_killed_one_without_a_restart():
    """The interrupted call runs again in the standby process [B48]."""

    async def main():
        store, seen = MemoryStore(), Seen()
        work = work_tool(seen)
        async with life(agent(ScriptedModel(["done"]), work), store=store.sibling()) as standby:
            async with life(agent(ScriptedModel([[ToolCall("work", {"n": 1})]]), work), store=store) as rt:
                await rt.send("c", "go")
                await seen.running()
                await kill(rt)
            log = await wait_until_idle(standby)
            paired(log)
            assert [attempt for _, attempt, _ in seen.calls] == [1, 2]

    run(main)


def test_cancelling_one_reader_does_not_cancel_other_readers_of_the_conversation():
    """Readers share one load of the log, which continues if the first reader is cancelled [B53]."""

    async def main():
        store = MemoryStore()
        async with life(agent(ScriptedModel(["hello"])), store=store) as rt:
            await (await rt.send("c", "hi")).final_result()
        slow = store.sibling()
        entered, go = asyncio.Event(), asyncio.Event()
        load = slow.load

        async def delayed_load(name):
            entered.set()
            await go.wait()
            return await load(name)

        slow.load = delayed_load
        async with life(store=slow) as desk:
            first = asyncio.create_task(desk.snapshot("c"))
            await entered.wait()
            second = asyncio.create_task(desk.snapshot("c"))
            await asyncio.sleep(0)
            first.cancel()
            go.set()
            assert (await second).state == "idle"
            assert (await asyncio.gather(first, return_exceptions=True))[0].__class__ is asyncio.CancelledError

    run(main)
