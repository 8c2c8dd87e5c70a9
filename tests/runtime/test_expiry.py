"""Silence: deadlines are data, outlive every process, and pass on time."""

import asyncio

import pytest
from support.async_tests import until
from support.revival import Seen, agent, kill, life, of, paired, run
from support.runtimes import Clock

from holdfast import Answer, Approve, Call, Default, Deny, Runtime, ScriptedModel, Stale, ToolCall, tool
from holdfast.core.decisions import Expired
from holdfast.core.events import CallResolved, CallReturned, TurnEnded
from holdfast.errors import StoreError
from holdfast.runtime import inbox
from holdfast.stores.memory import MemoryStore


def asking(**options):
    @tool(executor="human", prompt="?", **options)
    def choose() -> str:
        """Ask the user."""
        raise NotImplementedError

    return choose


async def idle(rt):
    await until(lambda: _idle(rt))
    return await rt.history("c")


async def _idle(rt):
    return (await rt.snapshot("c")).state == "idle"


async def suspended(rt):
    await (await rt.send("c", "go")).result()
    (entry,) = await rt.pending("c")
    return entry


@pytest.mark.parametrize(
    ("on_expiry", "ok", "told"),
    [
        ("error", False, '"kind":"timeout","message":"user did not respond"'),
        ("deny", False, '"kind":"denied"'),
        (Default("the window seat"), True, '"result":"the window seat"'),
    ],
)
def test_without_an_answer_the_expiry_is_logged_and_the_model_goes_on(on_expiry, ok, told):
    """B55"""

    async def main():
        clock = Clock()
        model = ScriptedModel([[ToolCall("choose")], "I went on"])
        choose = asking(expires="1h", on_expiry=on_expiry)
        async with Runtime(agent(model, choose), clock=clock) as rt:
            entry = await suspended(rt)
            assert entry.deadline == clock.now + 3600
            clock.now = entry.deadline
            log = await idle(rt)
            paired(log)
            (resolved,) = of(log, CallResolved)
            assert isinstance(resolved.decision, Expired)
            assert (resolved.by.id, resolved.at) == ("system", entry.deadline)
            (returned,) = of(log, CallReturned)
            assert (returned.ok, returned.source) == (ok, "system")
            assert told in model.requests[1].messages[-1].content
            assert of(log, TurnEnded)[0].reason == "completed"

    run(main)


def test_an_expiry_that_halts_ends_the_turn():
    """B55"""

    async def main():
        clock = Clock()
        model = ScriptedModel([[ToolCall("choose")]])
        async with Runtime(agent(model, asking(expires="1h", on_expiry="halt")), clock=clock) as rt:
            entry = await suspended(rt)
            clock.now = entry.deadline
            log = await idle(rt)
            paired(log)
            (ended,) = of(log, TurnEnded)
            assert (ended.reason, ended.halted) == ("halted", True)
            assert len(model.requests) == 1

    run(main)


def test_an_expired_approval_never_runs_the_tool():
    """B55"""

    async def main():
        clock, seen = Clock(), Seen()

        @tool(approval="required", expires="1h")
        async def work(call: Call) -> str:
            """Work."""
            seen.note(call)
            return "worked"

        async with Runtime(agent(ScriptedModel([[ToolCall("work")], "ok"]), work), clock=clock) as rt:
            entry = await suspended(rt)
            clock.now = entry.deadline + 1
            with pytest.raises(Stale) as refused:
                await rt.resolve("c", entry.call, Approve())
            assert refused.value.reason == "expired"
            paired(await idle(rt))
            assert seen.calls == []

    run(main)


def test_a_restart_before_the_deadline_fires_at_the_original_one_with_nobody_touching_the_conversation():
    """B56"""

    async def main():
        clock, store = Clock(), MemoryStore()
        choose = asking(expires="1h")
        async with life(agent(ScriptedModel([[ToolCall("choose")]]), choose), store=store, clock=clock) as rt:
            entry = await suspended(rt)
            await kill(rt)
        clock.now += 1800
        model = ScriptedModel(["nobody was there"])
        async with life(agent(model, choose), store=store.sibling(), clock=clock) as rt:
            assert (await rt.pending())[0].deadline == entry.deadline
            clock.now = entry.deadline - 0.001
            await looked(rt)
            assert len(await rt.pending()) == 1
            clock.now = entry.deadline
            await until(lambda: _none_pending(rt))  # nothing but the inbox is looked at: nobody touches "c"
            await until(lambda: model.requests)
            log = await idle(rt)
            paired(log)
            assert of(log, CallResolved)[0].at == entry.deadline

    run(main)


async def _none_pending(rt):
    return not await rt.pending()


async def looked(rt, times=3):
    """The watch has looked at what is due so many times more."""
    store, seen = rt.store, []
    due = store.list_due

    async def counted(now, limit=100):
        seen.append(now)
        return await due(now, limit)

    store.list_due = counted
    await until(lambda: len(seen) >= times)
    del store.list_due


def test_a_deadline_that_passed_while_nobody_ran_fires_at_once_when_somebody_does():
    """B56"""

    async def main():
        clock, store = Clock(), MemoryStore()
        choose = asking(expires="1h")
        async with life(agent(ScriptedModel([[ToolCall("choose")]]), choose), store=store, clock=clock) as rt:
            await suspended(rt)
            await kill(rt)
        clock.now += 7200
        async with life(agent(ScriptedModel(["ok"]), choose), store=store.sibling(), clock=clock) as rt:
            paired(await idle(rt))

    run(main)


def test_a_process_without_agents_lets_deadlines_pass_and_leaves_the_rest_to_who_can():
    """B56: expiry is a guest's event; the turn goes on where its agent is."""

    async def main():
        clock, store = Clock(), MemoryStore()
        choose = asking(expires="1h")
        async with life(agent(ScriptedModel([[ToolCall("choose")]]), choose), store=store, clock=clock) as rt:
            entry = await suspended(rt)
            await kill(rt)
        async with life(store=store.sibling(), clock=clock) as desk:
            clock.now = entry.deadline
            await until(lambda: _none_pending(desk))
            assert (await desk.snapshot("c")).state == "preparing"
        async with life(agent(ScriptedModel(["ok"]), choose), store=store.sibling(), clock=clock) as rt:
            paired(await idle(rt))

    run(main)


def test_answering_cancels_the_deadline():
    """B57"""

    async def main():
        clock = Clock()
        model = ScriptedModel([[ToolCall("choose")], "thanks"])
        async with Runtime(agent(model, asking(expires="1h")), clock=clock) as rt:
            entry = await suspended(rt)
            clock.now = entry.deadline - 1
            await rt.resolve("c", entry.call, Answer("in time"))
            await idle(rt)
            clock.now = entry.deadline + 3600
            await looked(rt)
            log = await rt.history("c")
            assert [r.decision for r in of(log, CallResolved)] == [Answer("in time")]

    run(main)


def test_a_decision_that_suspends_again_gets_a_fresh_deadline_and_the_old_one_is_void():
    """B57, B73: the plan changed, so it is asked again; the first deadline passes unnoticed."""

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
            first = await suspended(rt)
            clock.now += 1800
            plan[0] = "another"
            await rt.resolve("c", first.call, Approve())
            second = await until(lambda: _again(rt, first))
            assert second.deadline == first.deadline + 1800
            clock.now = first.deadline + 1
            await looked(rt)
            assert await rt.pending() == [second]
            await rt.resolve("c", second.call, Deny("no more"))
            paired(await idle(rt))

    async def _again(rt, first):
        found = await rt.pending()
        return found[0] if found and found[0].digest != first.digest else None

    run(main)


def test_a_clock_that_jumps_forward_fires_early_by_no_more_than_the_jump_and_backward_waits():
    """B57"""

    async def main():
        clock = Clock()
        async with Runtime(agent(ScriptedModel([[ToolCall("choose")], "ok"]), asking(expires="1h")), clock=clock) as rt:
            entry = await suspended(rt)
            clock.now += 3000  # a jump that does not reach the deadline fires nothing
            await looked(rt)
            assert len(await rt.pending()) == 1
            clock.now -= 6000  # and a jump back waits longer
            await looked(rt)
            assert len(await rt.pending()) == 1
            clock.now = entry.deadline - 0.01
            await looked(rt)
            assert len(await rt.pending()) == 1
            clock.now = entry.deadline
            assert of(await idle(rt), CallResolved)[0].at >= entry.deadline

    run(main)


def test_one_conversation_that_cannot_be_loaded_does_not_hold_up_the_deadlines_of_the_others():
    """B55"""

    async def main():
        clock, store = Clock(), MemoryStore()
        choose = asking(expires="1h")

        def model():
            return ScriptedModel([[ToolCall("choose")], "ok"], follow=True)

        async with life(agent(model(), choose), store=store, clock=clock) as rt:
            await (await rt.send("bad", "go")).result()
            clock.now += 1
            await suspended(rt)
            await kill(rt)
        store._data.conversations["bad"].events[0] = b"not an event"
        clock.now += 7200
        async with life(agent(model(), choose), store=store.sibling(), clock=clock) as rt:
            paired(await idle(rt))
            assert [entry.conversation for entry in await rt.pending()] == ["bad"]

    run(main)


class Held(MemoryStore):
    """Once closed, its ``door`` is in the way of whoever writes to a conversation whose name begins with "held"."""

    def __init__(self, refuses=False):
        super().__init__()
        self.door, self.tries = asyncio.Event(), []
        self.door.set()
        self.refuses = refuses
        """They are told so, at once; else they wait."""

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
                raise StoreError("somebody holds it")
            await self.door.wait()


async def asked(rt, *names):
    """Each of these waits for an answer; the deadline of the last."""
    for name in names:
        await (await rt.send(name, "go")).result()
    return max(entry.deadline for entry in await rt.pending())


def chooses():
    return agent(ScriptedModel([[ToolCall("choose")], "ok"], follow=True), asking(expires="1h"))


@pytest.mark.parametrize("refuses", [False, True])
def test_a_deadline_that_is_held_up_holds_up_no_other_and_passes_once_when_it_can(refuses, monkeypatch):
    """B55"""
    monkeypatch.setattr(inbox, "MAX_CONCURRENT", 1 if refuses else 2)  # only what waits takes room

    async def main():
        clock, store = Clock(), Held(refuses)
        async with Runtime(chooses(), store=store, clock=clock) as rt:
            await asked(rt, "held")
            clock.now += 1  # the one that is held is the first to be looked at, each time
            deadline = await asked(rt, "c")
            store.door.clear()
            clock.now = deadline
            paired(await idle(rt))
            await looked(rt)
            assert store.tries == ["held"]  # it is not tried again while it is tried, or was just now
            assert len([task for task in asyncio.all_tasks() if task.get_name() == "holdfast:deadline"]) == (
                not refuses
            )
            store.door.set()
            clock.now += inbox.RETRY_SECONDS
            await until(lambda: _none_pending(rt))
            assert len(of(await rt.history("held"), CallResolved)) == 1

    run(main)


def test_deadlines_of_one_moment_pass_together_but_not_all_at_once(monkeypatch):
    """B55"""
    monkeypatch.setattr(inbox, "MAX_CONCURRENT", 5)

    async def main():
        clock, store = Clock(), Held()
        names = [f"held{n}" for n in range(12)]
        async with Runtime(chooses(), store=store, clock=clock) as rt:
            deadline = await asked(rt, *names)
            store.door.clear()
            clock.now = deadline
            await until(lambda: len(store.tries) >= 5)
            await looked(rt)
            assert len(store.tries) == 5
            store.door.set()
            await until(lambda: _none_pending(rt))
            for name in names:
                assert len(of(await rt.history(name), CallResolved)) == 1

    run(main)


def test_a_deadline_that_is_held_up_does_not_keep_the_runtime_from_closing():
    async def main():
        clock, store = Clock(), Held()
        async with Runtime(chooses(), store=store, clock=clock) as rt:
            deadline = await asked(rt, "held")
            store.door.clear()
            clock.now = deadline
            await until(lambda: store.tries)
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("holdfast:")]

    run(main)


def test_real_time_expires_on_time():
    """B55: on the wall's clock, and not before its time."""

    async def main():
        async with Runtime(agent(ScriptedModel([[ToolCall("choose")], "ok"]), asking(expires="200ms"))) as rt:
            entry = await suspended(rt)
            log = await idle(rt)
            assert of(log, CallResolved)[0].at >= entry.deadline

    run(main)
