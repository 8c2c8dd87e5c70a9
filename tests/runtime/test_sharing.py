"""Several processes on one store: who runs what, and what a viewer sees of what another process runs."""

import asyncio

from harness import story, until

from assent import Agent, Call, Runtime, ScriptedModel, ToolCall, tool
from assent.core.events import CallReturned, CallStarted, TurnEnded
from assent.core.live import TextDelta, ToolProgress
from assent.models.base import FinishPart, TextPart
from assent.stores.memory import MemoryStore


class Slow:
    """A model that says a word whenever it is let."""

    name = "slow"

    def __init__(self, words):
        self.words, self.said, self.go = words, 0, asyncio.Semaphore(0)

    async def stream(self, request):
        for word in self.words:
            await self.go.acquire()
            self.said += 1
            yield TextPart(word)
        yield FinishPart()


class Fragile(MemoryStore):
    """A store whose leases may lapse: what a machine meets that was asleep, or cut off from its database."""

    def __init__(self, data=None):
        super().__init__(data)
        self._lapse = asyncio.Event()

    async def lapsed(self):
        await self._lapse.wait()
        self._lapse.clear()

    def lapse(self):
        del self._data.alive[self.owner]
        row = self._data.owners.pop(self.owner)
        self.owner = f"{self.owner}+"
        self._data.alive[self.owner], self._data.owners[self.owner] = self, row
        self._lapse.set()


def works():
    """Calls ``work``, then is done."""
    return ScriptedModel([[ToolCall("work", {})], "done"], follow=True)


async def ended(rt, name):
    return any(isinstance(event, TurnEnded) for event in await rt.history(name))


class Far(MemoryStore):
    """A store that takes its time to read."""

    async def read(self, *args, **options):
        await asyncio.sleep(0.05)
        return await super().read(*args, **options)


def test_what_is_about_to_run_counts_when_more_is_taken():
    @story
    async def scene():
        store = MemoryStore()
        begun, go = [], asyncio.Event()

        @tool
        async def work(call: Call) -> str:
            """Work."""
            begun.append(call.conversation)
            await go.wait()
            return "ok"

        agent = Agent("a", model=works(), tools=[work])
        async with Runtime(store=store) as front, Runtime(agent, store=Far(store._data), at_once=2):
            for n in range(6):
                await front.send(f"c{n}", "go", agent="a")
                await asyncio.sleep(0.01)
            await until(lambda: len(begun) >= 2)
            await asyncio.sleep(0.5)
            assert len(begun) == 2
            go.set()
            await until(lambda: len(begun) == 6)

    scene()


def test_a_process_runs_no_more_conversations_than_it_may_and_the_others_wait_their_turn():
    @story
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

        agent = Agent("a", model=works(), tools=[work])
        async with Runtime(agent, store=MemoryStore(), at_once=2) as rt:
            turns = [await rt.send(f"c{n}", "go") for n in range(9)]
            for turn in turns:
                await turn.ended()
        assert most == 2

    scene()


def test_what_one_process_has_no_room_for_another_takes_up():
    @story
    async def scene():
        hold, where = asyncio.Event(), []

        def agent(name):
            @tool
            async def work() -> str:
                """Work."""
                where.append(name)
                await hold.wait()
                return "ok"

            return Agent("a", model=works(), tools=[work])

        store = MemoryStore()
        async with (
            Runtime(agent("one"), store=store, at_once=1) as one,
            Runtime(agent("two"), store=store.sibling(), at_once=1),
        ):
            await one.send("c1", "go")
            await until(lambda: where == ["one"])
            await one.send("c2", "go")
            await until(lambda: where == ["one", "two"])
            hold.set()
            await until(lambda: ended(one, "c2"))

    scene()


def test_when_a_lease_has_lapsed_what_ran_is_stopped_and_whoever_takes_it_up_goes_on():
    """B50: the process that was cut off runs nothing that another may run."""

    @story
    async def scene():
        begun, stopped = asyncio.Event(), []

        @tool
        async def work(call) -> str:
            """Work."""
            begun.set()
            if call.attempt > 1:
                return "ok"
            try:
                await asyncio.sleep(60)
            finally:
                stopped.append(call.attempt)

        store = Fragile()
        agent = Agent("a", model=works(), tools=[work])
        async with Runtime(agent, store=store) as rt:
            turn = await rt.send("c", "go")
            await begun.wait()
            store.lapse()
            await until(lambda: stopped == [1])
            await turn.ended()
            events = await rt.history("c")
        assert [(e.attempt, e.epoch) for e in events if isinstance(e, CallStarted)] == [(1, 1), (2, 2)]
        assert [e.value for e in events if isinstance(e, CallReturned)] == ["ok"]

    scene()


def test_a_viewer_at_another_process_sees_the_reply_stream():
    @story
    async def scene():
        model = Slow(["Good ", "morning ", "to ", "you"])
        store = MemoryStore()
        async with Runtime(Agent("a", model=model), store=store) as owner, Runtime(store=store.sibling()) as other:
            await owner.send("c", "hello")
            model.go.release()
            await until(lambda: model.said == 1)
            seen = []

            async def look():
                async for event in other.events("c"):
                    if isinstance(event, TextDelta):
                        seen.append((event.n, event.text))

            viewer = asyncio.ensure_future(look())
            await until(lambda: seen == [(1, "Good ")])  # what was said before they looked
            assert (await other.snapshot("c")).state == "streaming"
            model.go.release()
            await until(lambda: seen == [(1, "Good "), (2, "morning ")])
            assert (await other.snapshot("c")).partial == "Good morning "
            assert (await other.snapshot("c")).partial_n == 2
            model.go.release()
            model.go.release()
            await until(lambda: ended(other, "c"))
            assert [text for _, text in seen] == model.words
            await until(lambda: idle(other, "c"))
            assert (await other.snapshot("c")).partial == ""
            viewer.cancel()

    scene()


async def idle(rt, name):
    return (await rt.snapshot(name)).state == "idle"


def test_a_piece_that_the_wire_lost_is_made_good():
    @story
    async def scene():
        model = Slow(["one ", "two ", "three"])
        store = MemoryStore()
        async with Runtime(Agent("a", model=model), store=store) as owner, Runtime(store=store.sibling()) as other:
            await owner.send("c", "hello")
            seen = []

            async def look():
                async for event in other.events("c"):
                    if isinstance(event, TextDelta):
                        seen.append(event.text)

            viewer = asyncio.ensure_future(look())
            await until(lambda: owner.store.wire.listened("c"))
            send, owner.store.wire.send = owner.store.wire.send, lambda *_: None
            model.go.release()
            await until(lambda: model.said == 1)
            await asyncio.sleep(0.01)
            owner.store.wire.send = send
            model.go.release()
            await until(lambda: seen == ["one ", "two "])
            model.go.release()
            await until(lambda: ended(other, "c"))
            viewer.cancel()

    scene()


def test_progress_reaches_a_viewer_at_another_process():
    @story
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
        agent = Agent("a", model=works(), tools=[work])
        async with Runtime(agent, store=store) as owner, Runtime(store=store.sibling()) as other:
            await owner.send("c", "go")
            step.release()
            await until(lambda: shown(owner))
            seen = []

            async def look():
                async for event in other.events("c"):
                    if isinstance(event, ToolProgress):
                        seen.append(event.payload["done"])

            viewer = asyncio.ensure_future(look())
            await until(lambda: seen == [0])
            step.release()
            await until(lambda: seen == [0, 1])
            (flying,) = (await other.snapshot("c")).in_flight
            assert flying.progress == {"done": 1}
            step.release()
            step.release()
            await until(lambda: ended(other, "c"))
            assert seen == [0, 1, 2]
            viewer.cancel()

    async def shown(rt):
        flying = (await rt.snapshot("c")).in_flight
        return flying and flying[0].progress

    scene()
