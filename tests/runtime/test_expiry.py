"""Deadlines: they are stored with the call, survive every process, and expire it on time."""

import asyncio

import pytest
from support.async_tests import until
from support.revival import Seen, agent, kill, life, of, paired, run
from support.runtimes import Clock

from holdfast import Answer, Approve, Call, Default, Deny, Runtime, ScriptedModel, Stale, ToolCall, tool
from holdfast.core.decisions import Expired
from holdfast.core.events import CallResolved, CallReturned, TurnEnded
from holdfast.errors import StoreError
from holdfast.runtime.pending_calls import inbox
from holdfast.stores.memory import MemoryStore


def make_choose_tool(**options):
    @tool(executor="human", prompt="?", **options)
    def choose() -> str:
        """Ask the user."""
        raise NotImplementedError

    return choose


async def wait_until_idle(rt):
    await until(lambda: is_idle(rt))
    return await rt.history("c")


async def is_idle(rt):
    return (await rt.snapshot("c")).state == "idle"


async def suspend_call(rt):
    await (await rt.send("c", "go")).result()
    (entry,) = await rt.pending("c")
    return entry


@pytest.mark.parametrize(
    ("on_expiry", "ok", "content"),
    [
        ("error", False, '"kind":"timeout","message":"user did not respond"'),
        ("deny", False, '"kind":"denied"'),
        (Default("the window seat"), True, '"result":"the window seat"'),
    ],
    ids=["error", "deny", "default"],
)
def test_a_call_without_an_answer_expires_in_the_log_and_the_model_continues(on_expiry, ok, content):
    """The model sees a timeout error, a denial or the default value [B55]."""

    async def main():
        clock = Clock()
        model = ScriptedModel([[ToolCall("choose")], "I went on"])
        choose = make_choose_tool(expires="1h", on_expiry=on_expiry)
        async with Runtime(agent(model, choose), clock=clock) as rt:
            entry = await suspend_call(rt)
            assert entry.deadline == clock.now + 3600
            clock.now = entry.deadline
            log = await wait_until_idle(rt)
            paired(log)
            (resolved,) = of(log, CallResolved)
            assert isinstance(resolved.decision, Expired)
            assert (resolved.by.id, resolved.at) == ("system", entry.deadline)
            (returned,) = of(log, CallReturned)
            assert (returned.ok, returned.source) == (ok, "system")
            assert content in model.requests[1].messages[-1].content
            assert of(log, TurnEnded)[0].reason == "completed"

    run(main)


def test_an_expiry_that_halts_ends_the_turn():
    """The model is not called again [B55]."""

    async def main():
        clock = Clock()
        model = ScriptedModel([[ToolCall("choose")]])
        async with Runtime(agent(model, make_choose_tool(expires="1h", on_expiry="halt")), clock=clock) as rt:
            entry = await suspend_call(rt)
            clock.now = entry.deadline
            log = await wait_until_idle(rt)
            paired(log)
            (ended,) = of(log, TurnEnded)
            assert (ended.reason, ended.halted) == ("halted", True)
            assert len(model.requests) == 1

    run(main)


def test_an_expired_approval_never_runs_the_tool():
    """A late approval is stale [B55]."""

    async def main():
        clock, seen = Clock(), Seen()

        @tool(approval="required", expires="1h")
        async def work(call: Call) -> str:
            """Work."""
            seen.note(call)
            return "worked"

        async with Runtime(agent(ScriptedModel([[ToolCall("work")], "ok"]), work), clock=clock) as rt:
            entry = await suspend_call(rt)
            clock.now = entry.deadline + 1
            with pytest.raises(Stale) as refused:
                await rt.resolve("c", entry.call, Approve())
            assert refused.value.reason == "expired"
            paired(await wait_until_idle(rt))
            assert seen.calls == []

    run(main)


def test_after_a_restart_a_call_expires_at_its_original_deadline_without_any_request():
    """The new process expires the call by itself [B56]."""

    async def main():
        clock, store = Clock(), MemoryStore()
        choose = make_choose_tool(expires="1h")
        async with life(agent(ScriptedModel([[ToolCall("choose")]]), choose), store=store, clock=clock) as rt:
            entry = await suspend_call(rt)
            await kill(rt)
        clock.now += 1800
        model = ScriptedModel(["no answer came"])
        async with life(agent(model, choose), store=store.sibling(), clock=clock) as rt:
            assert (await rt.pending())[0].deadline == entry.deadline
            clock.now = entry.deadline - 0.001
            await wait_for_deadline_checks(rt)
            assert len(await rt.pending()) == 1
            clock.now = entry.deadline
            await until(lambda: has_none_pending(rt))  # reads only the inbox: no request names "c"
            await until(lambda: model.requests)
            log = await wait_until_idle(rt)
            paired(log)
            assert of(log, CallResolved)[0].at == entry.deadline

    run(main)


async def has_none_pending(rt):
    return not await rt.pending()


async def wait_for_deadline_checks(rt, times=3):
    """Wait until the runtime has checked the deadlines so many times."""
    store, seen = rt.store, []
    due = store.list_due

    async def counted(now, limit=100):
        seen.append(now)
        return await due(now, limit)

    store.list_due = counted
    await until(lambda: len(seen) >= times)
    del store.list_due


def test_a_call_whose_deadline_passed_while_no_process_ran_expires_after_the_next_start():
    """The new process finds the deadline in the store [B56]."""

    async def main():
        clock, store = Clock(), MemoryStore()
        choose = make_choose_tool(expires="1h")
        async with life(agent(ScriptedModel([[ToolCall("choose")]]), choose), store=store, clock=clock) as rt:
            await suspend_call(rt)
            await kill(rt)
        clock.now += 7200
        async with life(agent(ScriptedModel(["ok"]), choose), store=store.sibling(), clock=clock) as rt:
            paired(await wait_until_idle(rt))

    run(main)


def test_a_process_without_agents_expires_calls_and_leaves_the_turn_to_a_process_with_the_agent():
    """An expiry is an append of a guest [B56]."""

    async def main():
        clock, store = Clock(), MemoryStore()
        choose = make_choose_tool(expires="1h")
        async with life(agent(ScriptedModel([[ToolCall("choose")]]), choose), store=store, clock=clock) as rt:
            entry = await suspend_call(rt)
            await kill(rt)
        async with life(store=store.sibling(), clock=clock) as desk:
            clock.now = entry.deadline
            await until(lambda: has_none_pending(desk))
            assert (await desk.snapshot("c")).state == "preparing"
        async with life(agent(ScriptedModel(["ok"]), choose), store=store.sibling(), clock=clock) as rt:
            paired(await wait_until_idle(rt))

    run(main)


def test_an_answer_cancels_the_deadline():
    """A call that was answered in time does not expire [B57]."""

    async def main():
        clock = Clock()
        model = ScriptedModel([[ToolCall("choose")], "thanks"])
        async with Runtime(agent(model, make_choose_tool(expires="1h")), clock=clock) as rt:
            entry = await suspend_call(rt)
            clock.now = entry.deadline - 1
            await rt.resolve("c", entry.call, Answer("in time"))
            await wait_until_idle(rt)
            clock.now = entry.deadline + 3600
            await wait_for_deadline_checks(rt)
            log = await rt.history("c")
            assert [r.decision for r in of(log, CallResolved)] == [Answer("in time")]

    run(main)


def test_a_call_that_is_suspended_again_gets_a_fresh_deadline_and_the_old_one_has_no_effect():
    """The plan changed, so a second approval is needed [B57, B73]."""

    async def main():
        clock, plan = Clock(), ["one"]

        @tool(approval="required", expires="1h")
        async def work() -> str:
            """Work."""
            return "worked"

        @work.preview
        async def _() -> str:
            return plan[0]

        async with Runtime(agent(ScriptedModel([[ToolCall("work")], "ok"]), work), clock=clock) as rt:
            first = await suspend_call(rt)
            clock.now += 1800
            plan[0] = "another"
            await rt.resolve("c", first.call, Approve())
            second = await until(lambda: find_new_entry(rt, first))
            assert second.deadline == first.deadline + 1800
            clock.now = first.deadline + 1
            await wait_for_deadline_checks(rt)
            assert await rt.pending() == [second]
            await rt.resolve("c", second.call, Deny("no more"))
            paired(await wait_until_idle(rt))

    async def find_new_entry(rt, first):
        found = await rt.pending()
        return found[0] if found and found[0].digest != first.digest else None

    run(main)


def test_a_clock_that_jumps_expires_a_call_only_when_it_reaches_the_deadline():
    """A jump back delays the expiry [B57]."""

    async def main():
        clock = Clock()
        async with Runtime(
            agent(ScriptedModel([[ToolCall("choose")], "ok"]), make_choose_tool(expires="1h")), clock=clock
        ) as rt:
            entry = await suspend_call(rt)
            clock.now += 3000  # a jump that does not reach the deadline fires nothing
            await wait_for_deadline_checks(rt)
            assert len(await rt.pending()) == 1
            clock.now -= 6000  # and a jump back waits longer
            await wait_for_deadline_checks(rt)
            assert len(await rt.pending()) == 1
            clock.now = entry.deadline - 0.01
            await wait_for_deadline_checks(rt)
            assert len(await rt.pending()) == 1
            clock.now = entry.deadline
            assert of(await wait_until_idle(rt), CallResolved)[0].at >= entry.deadline

    run(main)


def test_a_conversation_that_cannot_be_loaded_does_not_delay_the_deadlines_of_others():
    """A damaged log affects its own conversation only [B55]."""

    async def main():
        clock, store = Clock(), MemoryStore()
        choose = make_choose_tool(expires="1h")

        def model():
            return ScriptedModel([[ToolCall("choose")], "ok"], follow=True)

        async with life(agent(model(), choose), store=store, clock=clock) as rt:
            await (await rt.send("bad", "go")).result()
            clock.now += 1
            await suspend_call(rt)
            await kill(rt)
        store._data.conversations["bad"].events[0] = b"not an event"
        clock.now += 7200
        async with life(agent(model(), choose), store=store.sibling(), clock=clock) as rt:
            paired(await wait_until_idle(rt))
            assert [entry.conversation for entry in await rt.pending()] == ["bad"]

    run(main)


class BlockingStore(MemoryStore):
    """A store that, while ``door`` is cleared, blocks or refuses writes to conversations named "held..."."""

    def __init__(self, refuses=False):
        super().__init__()
        self.door, self.tries = asyncio.Event(), []
        self.door.set()
        self.refuses = refuses
        """Whether a write is refused at once; else it waits for ``door``."""

    async def append(self, append):
        await self._pass(append.conversation)
        await super().append(append)

    async def postpone(self, conversation, call, due):
        await self._pass(conversation)
        await super().postpone(conversation, call, due)

    async def _pass(self, conversation):
        if conversation.startswith("held") and not self.door.is_set():
            self.tries.append(conversation)
            if self.refuses:
                raise StoreError("the conversation is held")
            await self.door.wait()


async def suspend_in(rt, *names):
    """Suspend a call in each of these conversations; return the last deadline."""
    for name in names:
        await (await rt.send(name, "go")).result()
    return max(entry.deadline for entry in await rt.pending())


def choosing_agent():
    return agent(ScriptedModel([[ToolCall("choose")], "ok"], follow=True), make_choose_tool(expires="1h"))


@pytest.mark.parametrize("refuses", [False, True], ids=["blocked", "refused"])
def test_an_expiry_that_cannot_be_written_delays_no_other_and_is_written_once_the_store_recovers(refuses, monkeypatch):
    """A refused append is retried after a pause, a blocked one waits [B55]."""
    monkeypatch.setattr(inbox, "MAX_CONCURRENT", 1 if refuses else 2)  # only a blocked write counts

    async def main():
        clock, store = Clock(), BlockingStore(refuses)
        async with Runtime(choosing_agent(), store=store, clock=clock) as rt:
            await suspend_in(rt, "held")
            clock.now += 1  # "held" has the earlier deadline: it is always first
            deadline = await suspend_in(rt, "c")
            store.door.clear()
            clock.now = deadline
            paired(await wait_until_idle(rt))
            await wait_for_deadline_checks(rt)
            assert store.tries == ["held"]  # no second attempt during the first or right after it
            assert len([task for task in asyncio.all_tasks() if task.get_name() == "holdfast:deadline"]) == (
                not refuses
            )
            store.door.set()
            clock.now += inbox.RETRY_SECONDS
            await until(lambda: has_none_pending(rt))
            assert len(of(await rt.history("held"), CallResolved)) == 1

    run(main)


def test_deadlines_of_the_same_moment_are_handled_concurrently_up_to_a_limit(monkeypatch):
    """Each call expires exactly once [B55]."""
    monkeypatch.setattr(inbox, "MAX_CONCURRENT", 5)

    async def main():
        clock, store = Clock(), BlockingStore()
        names = [f"held{n}" for n in range(12)]
        async with Runtime(choosing_agent(), store=store, clock=clock) as rt:
            deadline = await suspend_in(rt, *names)
            store.door.clear()
            clock.now = deadline
            await until(lambda: len(store.tries) >= 5)
            await wait_for_deadline_checks(rt)
            assert len(store.tries) == 5
            store.door.set()
            await until(lambda: has_none_pending(rt))
            for name in names:
                assert len(of(await rt.history(name), CallResolved)) == 1

    run(main)


def test_a_blocked_expiry_does_not_keep_the_runtime_from_closing():
    async def main():
        clock, store = Clock(), BlockingStore()
        async with Runtime(choosing_agent(), store=store, clock=clock) as rt:
            deadline = await suspend_in(rt, "held")
            store.door.clear()
            clock.now = deadline
            await until(lambda: store.tries)
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("holdfast:")]

    run(main)


def test_a_call_expires_in_real_time_and_not_before_its_deadline():
    """The default clock is the system clock [B55]."""

    async def main():
        async with Runtime(agent(ScriptedModel([[ToolCall("choose")], "ok"]), make_choose_tool(expires="200ms"))) as rt:
            entry = await suspend_call(rt)
            log = await wait_until_idle(rt)
            assert of(log, CallResolved)[0].at >= entry.deadline

    run(main)
