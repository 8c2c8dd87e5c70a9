"""Several processes on one store: which one runs a conversation, and what viewers in other processes see."""

import asyncio

import msgspec
import pytest
from support.async_tests import run_bounded, until
from support.runtimes import Fragile

from holdfast import Agent, Call, Runtime, ScriptedModel, ToolCall, tool
from holdfast.core.events import CallReturned, CallStarted, TurnEnded
from holdfast.core.live import TextDelta, ThinkingDelta, ToolArgsDelta, ToolProgress
from holdfast.models.base import FinishPart, TextPart, ThinkingPart, ToolCallPart
from holdfast.stores.memory import MemoryStore


class SteppedModel:
    """A model that sends one word for each release of ``go``."""

    name = "stepped"

    def __init__(self, words):
        self.words, self.sent, self.go = words, 0, asyncio.Semaphore(0)

    async def stream(self, request):
        for word in self.words:
            await self.go.acquire()
            self.sent += 1
            yield TextPart(word)
        yield FinishPart()


def work_model():
    """Return a model that calls ``work`` and then answers."""
    return ScriptedModel([[ToolCall("work", {})], "done"], follow=True)


async def has_ended(rt, name):
    return any(isinstance(event, TurnEnded) for event in await rt.history(name))


class SlowStore(MemoryStore):
    """A store with slow reads."""

    async def read(self, *args, **options):
        await asyncio.sleep(0.05)
        return await super().read(*args, **options)


async def test_conversations_that_are_still_being_loaded_count_towards_max_conversations():
    store = MemoryStore()
    started, go = [], asyncio.Event()

    @tool
    async def work(call: Call) -> str:
        """Work."""
        started.append(call.conversation)
        await go.wait()
        return "ok"

    agent = Agent("a", model=work_model(), tools=[work])
    async with Runtime(store=store) as front, Runtime(agent, store=SlowStore(store._data), max_conversations=2):
        for n in range(6):
            await front.send(f"c{n}", "go", agent="a")
            await asyncio.sleep(0.01)
        await until(lambda: len(started) >= 2)
        await asyncio.sleep(0.5)
        assert len(started) == 2
        go.set()
        await until(lambda: len(started) == 6)


def test_a_process_runs_at_most_max_conversations_at_once_and_the_rest_wait():
    async def scene():
        running, most = 0, 0

        @tool
        async def work() -> str:
            """Work."""
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.01)
            running -= 1
            return "ok"

        agent = Agent("a", model=work_model(), tools=[work])
        async with Runtime(agent, store=MemoryStore(), max_conversations=2) as rt:
            turns = [await rt.send(f"c{n}", "go") for n in range(9)]
            for turn in turns:
                await turn.final_result()
        assert most == 2

    run_bounded(scene())


async def test_a_conversation_that_exceeds_the_limit_of_one_process_runs_in_another():
    release, ran_in = asyncio.Event(), []

    def agent(name):
        @tool
        async def work() -> str:
            """Work."""
            ran_in.append(name)
            await release.wait()
            return "ok"

        return Agent("a", model=work_model(), tools=[work])

    store = MemoryStore()
    async with (
        Runtime(agent("one"), store=store, max_conversations=1) as one,
        Runtime(agent("two"), store=store.sibling(), max_conversations=1),
    ):
        await one.send("c1", "go")
        await until(lambda: ran_in == ["one"])
        await one.send("c2", "go")
        await until(lambda: ran_in == ["one", "two"])
        release.set()
        await until(lambda: has_ended(one, "c2"))


async def test_a_call_whose_lease_expires_is_cancelled_and_runs_again_under_the_next_epoch():
    """A process that lost its lease runs nothing that another process may run [B50]."""

    started, stopped = asyncio.Event(), []

    @tool
    async def work(call) -> str:
        """Work."""
        started.set()
        if call.attempt > 1:
            return "ok"
        try:
            await asyncio.sleep(60)
            return "late"
        finally:
            stopped.append(call.attempt)

    store = Fragile()
    agent = Agent("a", model=work_model(), tools=[work])
    async with Runtime(agent, store=store) as rt:
        turn = await rt.send("c", "go")
        await started.wait()
        store.lapse()
        await until(lambda: stopped == [1])
        await turn.final_result()
        events = await rt.history("c")
    assert [(e.attempt, e.epoch) for e in events if isinstance(e, CallStarted)] == [(1, 1), (2, 2)]
    assert [e.value for e in events if isinstance(e, CallReturned)] == ["ok"]


async def test_a_viewer_in_another_process_sees_a_reply_while_it_is_streamed():
    model = SteppedModel(["Good ", "morning ", "to ", "you"])
    store = MemoryStore()
    async with Runtime(Agent("a", model=model), store=store) as owner, Runtime(store=store.sibling()) as other:
        await owner.send("c", "hello")
        model.go.release()
        await until(lambda: model.sent == 1)
        seen = []

        async def view():
            async for event in other.events("c"):
                if isinstance(event, TextDelta):
                    seen.append((event.n, event.text))

        viewer = asyncio.ensure_future(view())
        await until(lambda: seen == [(1, "Good ")])  # sent before the viewer subscribed
        assert (await other.snapshot("c")).state == "streaming"
        model.go.release()
        await until(lambda: seen == [(1, "Good "), (2, "morning ")])
        assert (await other.snapshot("c")).partial == "Good morning "
        assert (await other.snapshot("c")).partial_n == 2
        model.go.release()
        model.go.release()
        await until(lambda: has_ended(other, "c"))
        assert [text for _, text in seen] == model.words
        await until(lambda: is_idle(other, "c"))
        assert (await other.snapshot("c")).partial == ""
        viewer.cancel()


async def is_idle(rt, name):
    return (await rt.snapshot(name)).state == "idle"


async def test_a_live_event_that_was_lost_in_transit_is_requested_again():
    model = SteppedModel(["one ", "two ", "three"])
    store = MemoryStore()
    async with Runtime(Agent("a", model=model), store=store) as owner, Runtime(store=store.sibling()) as other:
        await owner.send("c", "hello")
        seen = []

        async def view():
            async for event in other.events("c"):
                if isinstance(event, TextDelta):
                    seen.append(event.text)

        viewer = asyncio.ensure_future(view())
        await until(lambda: owner.store.transport.has_listeners("c"))
        send, owner.store.transport.send = owner.store.transport.send, lambda *_: None
        model.go.release()
        await until(lambda: model.sent == 1)
        await asyncio.sleep(0.01)
        owner.store.transport.send = send
        model.go.release()
        await until(lambda: seen == ["one ", "two "])
        model.go.release()
        await until(lambda: has_ended(other, "c"))
        viewer.cancel()


def test_progress_reaches_a_viewer_in_another_process():
    async def scene():
        step = asyncio.Semaphore(0)

        @tool
        async def work(call) -> str:
            """Work."""
            for n in range(3):
                await step.acquire()
                await call.progress({"done": n})
            await step.acquire()
            return "ok"

        store = MemoryStore()
        agent = Agent("a", model=work_model(), tools=[work])
        async with Runtime(agent, store=store) as owner, Runtime(store=store.sibling()) as other:
            await owner.send("c", "go")
            step.release()
            await until(lambda: has_progress(owner))
            seen = []

            async def view():
                async for event in other.events("c"):
                    if isinstance(event, ToolProgress):
                        seen.append(event.payload["done"])

            viewer = asyncio.ensure_future(view())
            await until(lambda: seen == [0])
            step.release()
            await until(lambda: seen == [0, 1])
            (call,) = (await other.snapshot("c")).in_flight
            assert call.progress == {"done": 1}
            step.release()
            step.release()
            await until(lambda: has_ended(other, "c"))
            assert seen == [0, 1, 2]
            viewer.cancel()

    async def has_progress(rt):
        calls = (await rt.snapshot("c")).in_flight
        return calls and calls[0].progress

    run_bounded(scene())


class NumberedModel:
    """A model that sends "A1 ", "A2 " ..., one for each release of ``go``; its second request begins with "B1 "."""

    name = "numbered"

    def __init__(self, part=TextPart, ignores_cancel=False):
        self.part, self.ignores_cancel, self.requests, self.go = part, ignores_cancel, 0, asyncio.Semaphore(0)

    async def stream(self, request):
        self.requests += 1
        letter = "AB"[self.requests - 1]
        for n in range(1, 5):
            try:
                await self.go.acquire()
            except asyncio.CancelledError:
                if not self.ignores_cancel or self.requests > 1:
                    raise
            yield self.part(f"{letter}{n} ")
        yield FinishPart()


class Viewer:
    """A viewer of the conversation: the states, and the deltas of the reply of the newest epoch."""

    def __init__(self, rt, kind=TextDelta):
        self.epoch, self.deltas, self.states, self._kind = 0, [], [], kind
        self._task = asyncio.ensure_future(self._read(rt))

    async def _read(self, rt):
        async for event in rt.events("c"):
            if event.type == "state_changed":
                self.states.append(event.state)
            if isinstance(event, self._kind) and event.epoch >= self.epoch:
                if event.epoch > self.epoch:
                    self.epoch, self.deltas = event.epoch, []
                self.deltas.append(event.text)

    @property
    def text(self):
        return "".join(self.deltas)

    def close(self):
        self._task.cancel()


async def test_a_reply_that_the_next_owner_restarts_replaces_the_partial_reply_for_every_viewer():
    model, store = NumberedModel(), Fragile()
    async with Runtime(Agent("a", model=model), store=store) as owner, Runtime(store=store.sibling()) as other:
        await owner.send("c", "hello")
        here, there = Viewer(owner), Viewer(other)
        await until(lambda: owner.store.transport.has_listeners("c"))
        for _ in range(3):
            model.go.release()
        await until(lambda: here.text == there.text == "A1 A2 A3 ")
        before = await other.snapshot("c")
        store.lapse()
        await until(lambda: model.requests == 2)
        await until(lambda: here.states[-2:] == ["streaming", "preparing"])
        assert (await owner.snapshot("c")).partial == ""
        model.go.release()
        await until(lambda: here.text == there.text == "B1 ")
        await until(lambda: here.states[-1] == there.states[-1] == "streaming")
        snapshots = [await owner.snapshot("c"), await other.snapshot("c")]
        assert [(s.partial, s.partial_n, s.state) for s in snapshots] == [("B1 ", 1, "streaming")] * 2
        assert snapshots[0].epoch == snapshots[1].epoch > before.epoch > 0
        assert snapshots[0].message_id == before.message_id
        for _ in range(3):
            model.go.release()
        await until(lambda: here.text == there.text == "B1 B2 B3 B4 ")
        here.close()
        there.close()


def call_part(text):
    return ToolCallPart(0, None, "work", text)


@pytest.mark.parametrize(("part", "kind"), [(ThinkingPart, ThinkingDelta), (call_part, ToolArgsDelta)])
async def test_restarted_reasoning_and_arguments_carry_the_new_epoch(part, kind):
    model, store = NumberedModel(part), Fragile()
    async with Runtime(Agent("a", model=model), store=store) as owner, Runtime(store=store.sibling()) as other:
        await owner.send("c", "hello")
        here, there = Viewer(owner, kind), Viewer(other, kind)
        await until(lambda: owner.store.transport.has_listeners("c"))
        for _ in range(3):
            model.go.release()
        await until(lambda: here.text == there.text == "A1 A2 A3 ")
        store.lapse()
        await until(lambda: model.requests == 2)
        model.go.release()
        await until(lambda: here.text == there.text == "B1 ")
        here.close()
        there.close()


async def test_late_live_events_of_an_owner_that_lost_its_lease_reach_no_viewer():
    model, store, held = NumberedModel(ignores_cancel=True), Fragile(), []
    async with Runtime(Agent("a", model=model), store=store) as owner, Runtime(store=store.sibling()) as other:
        await owner.send("c", "hello")
        here, there = Viewer(owner), Viewer(other)
        await until(lambda: owner.store.transport.has_listeners("c"))
        model.go.release()
        await until(lambda: here.text == there.text == "A1 ")
        send, owner.store.transport.send = owner.store.transport.send, lambda *frame: held.append(frame)
        model.go.release()
        await until(lambda: here.text == "A1 A2 ")
        owner.store.transport.send = send
        store.lapse()
        await until(lambda: model.requests == 2)
        assert (here.text, there.text) == ("A1 A2 ", "A1 "), "the old owner continued, and no viewer saw it"
        model.go.release()
        await until(lambda: here.text == there.text == "B1 ")
        send(*held[0])
        model.go.release()
        await until(lambda: here.text == there.text == "B1 B2 ")
        assert (await other.snapshot("c")).partial == "B1 B2 "
        here.close()
        there.close()


async def test_live_events_from_an_older_version_without_epochs_are_accepted():
    model, store = NumberedModel(), MemoryStore()
    async with Runtime(Agent("a", model=model), store=store) as owner, Runtime(store=store.sibling()) as other:
        await owner.send("c", "hello")
        there = Viewer(other)
        await until(lambda: owner.store.transport.has_listeners("c"))
        send = owner.store.transport.send

        def send_without_epoch(conversation, frame):
            turn_step, item, _ = msgspec.msgpack.decode(frame)
            item.pop("epoch", None)
            send(conversation, msgspec.msgpack.encode([turn_step, item]))

        owner.store.transport.send = send_without_epoch
        for n in range(1, 4):
            model.go.release()
            await until(lambda n=n: len(there.deltas) == n)
        assert (await other.snapshot("c")).partial == there.text == "A1 A2 A3 "
        there.close()


def test_the_progress_of_a_second_attempt_reaches_viewers_that_saw_more_of_the_first():
    async def scene():
        step = asyncio.Semaphore(0)

        @tool
        async def work(call: Call) -> str:
            """Work."""
            try:
                for n in range(1, 4):
                    await step.acquire()
                    await call.progress([call.attempt, n])
                await step.acquire()
            except asyncio.CancelledError:
                await call.progress("late")  # no viewer sees it
                raise
            return "ok"

        async def progress(rt):
            return [(call.attempt, call.progress) for call in (await rt.snapshot("c")).in_flight]

        store = Fragile()
        agent = Agent("a", model=work_model(), tools=[work])
        async with Runtime(agent, store=store) as owner, Runtime(store=store.sibling()) as other:
            await owner.send("c", "go")
            seen = [], []

            async def view(rt, seen):
                async for event in rt.events("c"):
                    if event.type == "tool_call_started":
                        seen.append(event.attempt)
                    if isinstance(event, ToolProgress):
                        seen.append(event.payload)

            viewers = [asyncio.ensure_future(view(*each)) for each in zip((owner, other), seen, strict=True)]
            await until(lambda: owner.store.transport.has_listeners("c"))
            for _ in range(3):
                step.release()
            await until(lambda: all([1, 3] in each for each in seen))
            store.lapse()
            await until(lambda: has_restarted(owner))
            step.release()
            await until(lambda: all([2, 1] in each for each in seen))
            assert seen == ([1, [1, 1], [1, 2], [1, 3], 2, [2, 1]],) * 2
            assert await progress(owner) == await progress(other) == [(2, [2, 1])]
            for _ in range(3):
                step.release()
            await until(lambda: has_ended(other, "c"))
            for viewer in viewers:
                viewer.cancel()

    async def has_restarted(rt):
        return any(isinstance(event, CallStarted) and event.attempt == 2 for event in await rt.history("c"))

    run_bounded(scene())
