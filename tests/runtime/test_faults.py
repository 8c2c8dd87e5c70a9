"""Faults stay local: a store that fails, a model or caller that misbehaves, or a process that closes costs one input,
one turn or one attempt. Nothing hangs, runs twice or leaks.

The tests run in virtual time: retries, pauses and graces have their real lengths.
"""

import asyncio
import gc
import logging
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
from support.async_tests import until
from support.revival import kill
from support.runtimes import Clock, Counting, Tape, agent, logged, of, paired, rest, sees, types

from holdfast import (
    Agent,
    Answer,
    Approve,
    Ask,
    Call,
    Deny,
    Halt,
    HoldfastError,
    Invalid,
    NotAllowed,
    Principal,
    Runtime,
    ScriptedModel,
    Stale,
    ToolCall,
    ToolError,
    tool,
)
from holdfast.core.events import (
    AssistantSaid,
    CallReturned,
    CallStarted,
    CallSuspended,
    MessageReceived,
    ResolutionRefused,
    TurnEnded,
    Usage,
)
from holdfast.core.inputs import SendMessage
from holdfast.core.results import MODEL_LIMIT
from holdfast.core.schema.validation import call_digest
from holdfast.errors import StoreError
from holdfast.models.base import FinishPart, ProviderPart, TextPart, ToolCallPart, UsagePart
from holdfast.models.scripted import Drip, Hang
from holdfast.runtime import engine, takeover
from holdfast.runtime.commit import CLIENT_GRACE
from holdfast.runtime.conversation import WRITE_RETRIES
from holdfast.runtime.pending_calls import clients
from holdfast.runtime.pending_calls.inbox import RETRY_SECONDS
from holdfast.runtime.steps import tool_call
from holdfast.stores.memory import MemoryStore

pytestmark = pytest.mark.virtual_time


def now():
    return asyncio.get_running_loop().time()


def fail_appends(store, event, failure: type[Exception] = StoreError, conversation=None, times=None):
    """Make appends with such an event fail so many times, or until the returned function is called."""
    append, left = store.append, [times]

    async def failing(wanted):
        if conversation in (None, wanted.conversation) and any(f'"{event}"'.encode() in b for b in wanted.events):
            if left[0] is None:
                raise failure("disk full")
            if left[0]:
                left[0] -= 1
                raise failure("disk full for a moment")
        await append(wanted)

    store.append = failing
    return lambda: setattr(store, "append", append)


def count_free_slots(rt):
    """Return the number of free slots."""
    taken = 0
    while rt._engine.slots.try_acquire("any"):
        taken += 1
    for _ in range(taken):
        rt._engine.slots.release("any")
    return taken


class Parts:
    """A model that streams these parts, one list per call; the last list repeats."""

    name = "parts"

    def __init__(self, *replies):
        self.replies, self.calls = replies, 0

    async def stream(self, request):
        self.calls += 1
        for part in self.replies[min(self.calls, len(self.replies)) - 1]:
            if isinstance(part, BaseException):
                raise part
            yield part


@tool(executor="human")
def choose() -> str:
    """Let the person choose."""
    raise NotImplementedError


@tool(executor="client")
def locate() -> str:
    """Where is the user?"""
    raise NotImplementedError


@tool
async def echo(n: int) -> int:
    """Return the number."""
    return n


@tool(approval="required")
async def gated(n: int) -> int:
    """Return the number after an approval."""
    return n


class Charge:
    """A tool that records its attempts and how many ran concurrently.

    A run takes ``lasts`` seconds, and its cancellation ``dies`` seconds.
    """

    def __init__(self, lasts=0.0, dies=0.0, **options):
        self.attempts, self.at, self.running, self.most = [], [], 0, 0
        self.lasts, self.dies = lasts, dies
        self.tool = tool(name="charge", description="Charge the card.", **options)(self.charge)

    async def charge(self, call: Call) -> str:
        self.attempts.append(call.attempt)
        self.at.append(now())
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.lasts)
        except asyncio.CancelledError:
            await asyncio.sleep(self.dies)  # a slow clean-up
            raise
        finally:
            self.running -= 1
        return "charged"


# --- many conversations ---


class SlowStore(MemoryStore):
    """A memory store whose reads take time, as those of a real store do."""

    async def load(self, conversation):
        await asyncio.sleep(0.001)
        return await super().load(conversation)

    async def read(self, *args, **options):
        await asyncio.sleep(0.001)
        return await super().read(*args, **options)


CONVERSATIONS = [f"c{n}" for n in range(150)]


def slow_model():
    """Return a model that is slow enough for every waiter to wait before it replies."""
    return ScriptedModel([Drip("done", pause=5.0)] * len(CONVERSATIONS))


async def test_every_viewer_sees_every_event_of_more_conversations_than_the_cache_holds(monkeypatch):
    """A viewer does not depend on the cache of idle conversations [B87]."""
    monkeypatch.setattr(engine, "MAX_IDLE", len(CONVERSATIONS) // 2)
    store = MemoryStore()
    seen = {name: [] for name in CONVERSATIONS}

    async def view(viewer, name):
        async for event in viewer.events(name):
            if event.seq:
                seen[name].append(event.seq)

    async def all_see(*numbers):
        with suppress(TimeoutError):
            async with asyncio.timeout(20):
                await until(lambda: all(each == [*numbers] for each in seen.values()))
        assert {name: each for name, each in seen.items() if each != [*numbers]} == {}

    async with Runtime(agent(slow_model()), store=store) as rt, Runtime(store=SlowStore(store._data)) as viewer:
        for name in CONVERSATIONS:
            await rt.open(name)
        views = [asyncio.create_task(view(viewer, name)) for name in CONVERSATIONS]
        await all_see(1)
        gc.collect()  # evicted conversations are gone
        turns = await asyncio.gather(*(rt.send(name, "hi") for name in CONVERSATIONS))
        await all_see(1, 2, 3)
        await asyncio.gather(*(turn.final_result() for turn in turns))
        await all_see(1, 2, 3, 4, 5)
        for task in views:
            task.cancel()
        await asyncio.gather(*views, return_exceptions=True)


async def test_a_process_without_the_agent_sees_the_end_of_more_turns_than_the_cache_holds(monkeypatch):
    """A caller that waits does not depend on the cache of idle conversations [B87]."""
    monkeypatch.setattr(engine, "MAX_IDLE", len(CONVERSATIONS) // 2)
    store, model = MemoryStore(), slow_model()
    async with Runtime(agent(model), store=store), Runtime(store=SlowStore(store._data)) as web:
        turns = await asyncio.gather(*(web.send(name, "hi", agent="a") for name in CONVERSATIONS))
        await until(lambda: len(model.requests) == len(CONVERSATIONS))
        ends = [asyncio.create_task(asyncio.wait_for(turn.final_result(), 10)) for turn in turns]
        await asyncio.sleep(1)
        gc.collect()  # evicted conversations are gone
        ended = await asyncio.gather(*ends, return_exceptions=True)
        assert {getattr(end, "reason", repr(end)) for end in ended} == {"completed"}


# --- inputs that cannot be encoded ---


async def test_a_digest_that_cannot_be_encoded_is_refused_and_does_not_disturb_the_turn():
    """The other call of the turn runs once, and no slot is lost [B34, B35]."""
    charge = Charge(lasts=2.0)
    model = ScriptedModel([[ToolCall("charge"), ToolCall("gated", {"n": 1})], "done"])
    async with Runtime(agent(model, charge.tool, gated), parallel=2) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = await until(rt.pending)
        await until(lambda: charge.running)
        number: Any = 5
        for decision in (Approve(args={"n": 2}, digest="\ud800"), Approve(digest="\ud800"), Approve(digest=number)):
            with pytest.raises(Invalid):
                await rt.resolve("c", entry.call, decision)
        assert (charge.running, count_free_slots(rt)) == (1, 1)
        assert await rt.pending() == [entry]
        await rt.resolve("c", entry.call, Approve())
        assert (await turn.final_result()).reason == "completed"
        assert charge.attempts == [1]
        assert count_free_slots(rt) == 2
        paired(await rt.history("c"))


async def test_an_input_that_cannot_be_encoded_is_refused_and_the_inputs_beside_it_are_recorded():
    store = Counting()
    async with Runtime(agent(["one", "two"]), store=store) as rt:
        await rt.open("c")
        by = Principal("ann")
        bad, good = await asyncio.gather(
            rt._engine.submit_input("c", SendMessage(text="\ud800", by=by, agent="a", when_busy="queue")),
            rt._engine.submit_input("c", SendMessage(text="fine", by=by, agent="a", when_busy="queue")),
            return_exceptions=True,
        )
        assert isinstance(bad, HoldfastError)
        assert bad.kind == "log_encode_failed"
        assert [event.text for event in of(good, MessageReceived)] == ["fine"]
        await logged(rt, TurnEnded)
        assert [event.text for event in of(await rt.history("c"), MessageReceived)] == ["fine"]


async def test_a_tool_result_that_cannot_be_encoded_is_an_error_and_the_tool_runs_once():
    """The append is the last check, if an earlier one misses the value [B15]."""
    runs = []

    @tool
    async def odd() -> str:
        """Return text that cannot be encoded."""
        runs.append(1)
        return "\ud800"

    model = ScriptedModel([[ToolCall("odd")], "done"])
    with mock.patch.object(tool_call, "to_plain_json", lambda value, what: value):
        async with Runtime(agent(model, odd)) as rt:
            assert (await (await rt.send("c", "hi")).final_result()).reason == "completed"
    assert (sees(model)[0]["error"]["kind"], runs) == ("invalid_result", [1])


# --- models that misbehave ---


@pytest.mark.parametrize(
    "args", [[1], [], 5, None, {"n": [1]}, {"n": "\ud800"}, {"n": {1}}, {1: 2}, {"n": 2**2000}], ids=ascii
)
async def test_arguments_that_are_no_object_or_violate_the_schema_are_invalid_and_the_turn_continues(args):
    """The handler does not run [B17]."""
    model = ScriptedModel([[ToolCall("echo", args)], "done"])
    async with Runtime(agent(model, echo)) as rt:
        assert (await (await rt.send("c", "hi")).final_result()).reason == "completed"
        assert sees(model)[0]["error"]["kind"] == "invalid_args"
        assert of(await rt.history("c"), CallStarted) == []


async def test_arguments_that_cannot_be_encoded_do_not_fail_a_turn_that_has_a_viewer():
    """The live events of a call do not affect its validation [B17]."""
    model = ScriptedModel(["hello", [ToolCall("echo", {"n": "\ud800"})], "done"])
    async with Runtime(agent(model, echo)) as rt:
        await (await rt.send("c", "hi")).final_result()
        seen = []

        async def read_events():
            async for event in rt.events("c"):
                seen.append(event)

        viewer = asyncio.ensure_future(read_events())
        await until(lambda: seen)
        assert (await (await rt.send("c", "hi")).final_result()).reason == "completed"
        viewer.cancel()


NOT_TEXT: Any = 7
NOT_A_NUMBER: Any = "3"
NOT_USAGE: Any = {"input_tokens": 3}
NONE: Any = None
MALFORMED = {
    "usage as an object": [TextPart("hi"), UsagePart(NOT_USAGE), FinishPart()],
    "usage that is no number": [TextPart("hi"), UsagePart(Usage(input_tokens=NOT_A_NUMBER)), FinishPart()],
    "bad usage, then an error": [TextPart("hi"), UsagePart(Usage(input_tokens=NOT_A_NUMBER)), OSError("reset")],
    "text that is None": [TextPart(NONE), FinishPart()],
    "a call id that is no text": [ToolCallPart(0, NOT_TEXT, "echo", {"n": 1}), FinishPart()],
    "a tool name that is no text": [ToolCallPart(0, None, NOT_TEXT, {"n": 1}), FinishPart()],
    "indexes that cannot be sorted": [
        ToolCallPart(0, None, "echo", ""),
        ToolCallPart(NOT_A_NUMBER, None, "echo", ""),
        FinishPart(),
    ],
    "provider data that is not JSON": [ProviderPart("x", object()), FinishPart()],
}


@pytest.mark.parametrize("reply", MALFORMED.values(), ids=MALFORMED)
async def test_a_malformed_reply_ends_the_turn_as_failed_after_one_model_call(reply):
    """A reply that cannot be recorded is not requested, and paid for, again [B61]."""
    model = Parts(reply)
    async with Runtime(Agent("a", model=model, tools=[echo])) as rt:
        async with asyncio.timeout(20):
            ended = await (await rt.send("c", "hi")).final_result()
        assert (ended.reason, model.calls) == ("failed", 1)
        if isinstance(reply[1], UsagePart) and not isinstance(reply[-1], OSError):
            assert ended.error.kind == "invalid_response"
        assert (await rt.snapshot("c")).state == "idle"


async def test_a_provider_part_whose_kind_cannot_be_encoded_does_not_stop_the_conversation():
    """The data of the part is kept [B46]."""
    model = Parts([ProviderPart("\ud800", {"kept": 1}), TextPart("hi"), FinishPart()])
    async with Runtime(Agent("a", model=model)) as rt:
        assert (await (await rt.send("c", "hi")).final_result()).reason == "completed"
        (said,) = of(await rt.history("c"), AssistantSaid)
        assert (said.parts[0]["data"], said.text, model.calls) == ({"kept": 1}, "hi", 1)
        assert (await (await rt.send("c", "again")).final_result()).reason == "completed"


async def test_a_model_that_cancels_itself_ends_the_turn_as_failed_after_one_call():
    """The partial text is kept, and the model is not called again [B61]."""
    model = Parts([TextPart("hi"), asyncio.CancelledError()])
    async with Runtime(Agent("a", model=model)) as rt:
        async with asyncio.timeout(20):
            ended = await (await rt.send("c", "hi")).final_result()
        assert (ended.reason, ended.error.kind, model.calls) == ("failed", "network", 1)
        (said,) = of(await rt.history("c"), AssistantSaid)
        assert (said.text, said.partial) == ("hi", True)


async def test_a_stream_that_ignores_its_cancellation_does_not_write_into_the_next_reply():
    """The interrupted turn is cancelled, and the next reply has its own text only [B58]."""
    opened = []

    class UncancellableModel:
        name = "uncancellable"

        async def stream(self, request):
            opened.append(request)
            if len(opened) == 1:
                for _ in range(60):
                    with suppress(asyncio.CancelledError):
                        await asyncio.sleep(0.5)
                    yield TextPart("old ")
            else:
                for _ in range(4):
                    await asyncio.sleep(0.5)
                    yield TextPart("new ")
            yield FinishPart()

    async with Runtime(Agent("a", model=UncancellableModel())) as rt:
        await rt.send("c", "one")
        await until(lambda: opened)
        turn = await rt.send("c", "two", when_busy="interrupt")
        assert (await turn.final_result()).reason == "completed"
        await asyncio.sleep(30)
        *_, said = of(await rt.history("c"), AssistantSaid)
        assert said.text == "new " * 4
        assert [end.reason for end in of(await rt.history("c"), TurnEnded)] == ["cancelled", "completed"]


# --- a store that fails for longer than the retries ---


async def test_a_conversation_whose_appends_failed_runs_again_once_the_store_recovers():
    """The tool runs a second attempt [B48]."""
    charge = Charge()
    model = ScriptedModel([[ToolCall("charge")], "done"])
    async with Runtime(agent(model, charge.tool)) as rt:
        repair = fail_appends(rt.store, "CallReturned")
        turn = await rt.send("c", "hi")
        with pytest.raises(StoreError, match="disk full"):
            await turn.final_result()
        repair()
        async with asyncio.timeout(2 * takeover.BACKOFF_SECONDS):
            assert (await turn.final_result()).reason == "completed"
        assert charge.attempts == [1, 2]
        paired(await rt.history("c"))


async def test_a_conversation_that_its_owner_cannot_write_is_taken_over_by_another_process():
    """The owner releases its lease, although it still runs [B48]."""
    charge, store = Charge(), MemoryStore()
    model = ScriptedModel([[ToolCall("charge")], "done"], follow=True)
    async with Runtime(agent(model, charge.tool), store=store) as rt:
        fail_appends(store, "CallReturned")
        turn = await rt.send("c", "hi")
        await until(lambda: charge.attempts)
        async with Runtime(agent(model, charge.tool), store=store.sibling()) as other:
            started = now()
            await logged(other, TurnEnded)
            assert now() - started < sum(WRITE_RETRIES) + 2 * takeover.POLL_SECONDS
            assert charge.attempts == [1, 2]
            paired(await other.history("c"))
            row = await other.store.row("c")
            assert (row.owner, row.owes) == (None, False)
        assert (await turn.final_result()).reason == "completed"


@pytest.mark.parametrize("helped", [True, False], ids=["a worker ends the turn", "the canceller ends the turn"])
@pytest.mark.parametrize("only", [None, ["another"]], ids=["runs all conversations", "runs other conversations"])
async def test_a_turn_ends_although_the_store_of_the_process_that_cancelled_it_fails(helped, only):
    """The process that cancels has no agent; in the end no process holds the lease [B60]."""
    store = MemoryStore()
    worker = Runtime(agent([[ToolCall("choose")], "done"], choose), store=store)
    async with worker, Runtime(store=store.sibling(), only=only) as web:
        await (await worker.send("c", "hi")).result()
        if not helped:
            await worker.close()
        repair = fail_appends(web.store, "TurnEnded")
        assert await web.cancel("c")
        await asyncio.sleep(sum(WRITE_RETRIES) + 0.1)
        if not helped:
            assert types(await web.history("c"))[-1] == "CancelRequested"
            repair()
        async with asyncio.timeout(2 * takeover.BACKOFF_SECONDS):
            await logged(web, TurnEnded)
        (ended,) = of(await web.history("c"), TurnEnded)
        assert ended.reason == "cancelled"
        paired(await web.history("c"))
        assert (await web.store.row("c")).owner is None


async def test_a_tool_whose_result_cannot_be_written_does_not_run_again_before_the_backoff():
    """The backoff holds, also if another task of the conversation ends meanwhile [B48]."""
    charge = Charge()

    @tool
    async def slow() -> None:
        """Take long."""
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(1)

    model = ScriptedModel([[ToolCall("charge"), ToolCall("slow")], "done"])
    async with Runtime(agent(model, charge.tool, slow), drain=0) as rt:
        fail_appends(rt.store, "CallReturned")
        turn = await rt.send("c", "hi")
        with suppress(TimeoutError):
            async with asyncio.timeout(40):
                while True:  # a caller that waits again after each error
                    with suppress(StoreError):
                        await turn.final_result()
    apart = [after - before for before, after in zip(charge.at, charge.at[1:], strict=False)]
    assert charge.attempts == list(range(1, len(charge.at) + 1))
    assert min(apart) >= sum(WRITE_RETRIES) + takeover.BACKOFF_SECONDS - 0.01
    assert len(charge.at) >= 40 // (sum(WRITE_RETRIES) + takeover.BACKOFF_SECONDS + 2 * takeover.POLL_SECONDS)


async def test_two_attempts_of_a_call_never_run_concurrently_in_one_process():
    """Also if the first is slow to cancel and a decision wakes the conversation meanwhile [B48]."""
    charge = Charge(lasts=10, dies=4)
    model = ScriptedModel([[ToolCall("charge"), ToolCall("echo", {"n": 1}), ToolCall("gated", {"n": 1})], "done"])
    async with Runtime(agent(model, charge.tool, echo, gated)) as rt:
        fail_appends(rt.store, "CallReturned", times=1 + len(WRITE_RETRIES))
        turn = await rt.send("c", "hi")
        (entry,) = await until(rt.pending)
        with pytest.raises(StoreError):
            await turn.final_result()
        assert charge.running == 1
        await rt.resolve("c", entry.call, Approve())
        assert (await turn.final_result()).reason == "completed"
        assert (charge.attempts, charge.most) == ([1, 2], 1)
        assert charge.at[1] - charge.at[0] >= sum(WRITE_RETRIES) + charge.dies
        paired(await rt.history("c"))


async def test_an_unexpected_store_error_does_not_leak_a_slot():
    charge = Charge()
    model = ScriptedModel([[ToolCall("charge")], "done"])
    async with Runtime(agent(model, charge.tool), parallel=2) as rt:
        fail_appends(rt.store, "CallStarted", OSError, times=1)
        turn = await rt.send("c", "hi")
        with pytest.raises(OSError, match="disk full for a moment"):
            await turn.final_result()
        assert count_free_slots(rt) == 2
        assert (await turn.final_result()).reason == "completed"
        assert count_free_slots(rt) == 2


def fail_releases(store):
    """Make releases fail until the returned function is called; also return the list of failures."""
    release, failures = store.release, []

    async def failing(*args):
        failures.append(args)
        raise StoreError("disk full")

    store.release = failing
    return failures, lambda: setattr(store, "release", release)


async def test_a_lease_whose_release_failed_is_released_later():
    """No other process may run a conversation whose owner is alive [B60]."""
    store = MemoryStore()
    async with Runtime(agent([[ToolCall("choose")], "done"], choose), store=store) as worker:
        await (await worker.send("c", "hi")).result()
        async with Runtime(store=store.sibling()) as web:
            failures, repair = fail_releases(web.store)
            fail_appends(web.store, "TurnEnded", times=1 + len(WRITE_RETRIES))
            await web.cancel("c")
            await until(lambda: failures)
            assert (await web.store.row("c")).owner == web.store.owner
            repair()
            await logged(worker, TurnEnded)
            assert (await web.store.row("c")).owner is None


async def test_a_lease_that_was_claimed_in_vain_and_not_released_does_not_block_the_next_turn():
    """Two processes may close a turn; the second finds nothing to do [B60]."""
    store = MemoryStore()
    model = ScriptedModel([[ToolCall("choose")], "done"])
    async with Runtime(agent(model, choose), store=store) as worker, Runtime(store=store.sibling()) as web:
        turn = await worker.send("c", "hi")
        await turn.result()
        claim = web.store.claim

        async def late(name):
            await turn.final_result()
            return await claim(name)

        web.store.claim = late
        failures, repair = fail_releases(web.store)
        async with Tape(worker, "c"):  # a viewer, so that the worker sees the cancel at once
            await web.cancel("c")
            await until(lambda: failures)
        repair()
        async with asyncio.timeout(20):
            assert (await (await worker.send("c", "again")).final_result()).reason == "completed"


async def test_an_unexpected_error_at_one_deadline_is_retried_and_delays_no_other_deadline():
    """The failed expiry is written after a pause [B55, B56]."""
    clock = Clock()

    @tool(executor="human", expires="1h")
    def ask() -> str:
        """Ask."""
        raise NotImplementedError

    model = ScriptedModel([[ToolCall("ask")], "done"], follow=True)
    async with Runtime(agent(model, ask), clock=clock) as rt:
        for name in ("c1", "c2"):
            await (await rt.send(name, "hi")).result()
        fail_appends(rt.store, "CallResolved", OSError, conversation="c1", times=1)
        clock.now += 3600
        async with asyncio.timeout(20):
            await logged(rt, TurnEnded, conversation="c2")
        assert [entry.conversation for entry in await rt.pending()] == ["c1"]
        clock.now += RETRY_SECONDS
        async with asyncio.timeout(20):
            await logged(rt, TurnEnded, conversation="c1")
        assert of(await rt.history("c1"), CallReturned)[0].error.kind == "timeout"


# --- shutdown ---


async def test_callers_and_viewers_that_wait_when_the_runtime_closes_get_an_error():
    """None of them hangs: the turn may continue in another process."""
    async with Runtime(agent([[Hang()]])) as rt:
        turn = await rt.send("c", "hi")

        async def view():
            async for _ in rt.events("c"):
                pass

        waiting = [asyncio.create_task(wait) for wait in (turn.final_result(), rest(turn), view())]
        await asyncio.sleep(1)
    async with asyncio.timeout(20):
        errors = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(each) for each in errors] == [StoreError] * 3
    assert all("closed" in str(each) for each in errors)


# --- clients ---


async def test_a_client_that_attached_twice_and_detached_sends_no_more_heartbeats():
    """Its call fails as detached after the grace [B43]."""
    model = ScriptedModel([[ToolCall("locate")], "done"])
    async with Runtime(agent(model, locate), clock=now) as rt:
        await rt.open("c")
        await rt.attach_client("c", client="tab")
        tab = await rt.attach_client("c", client="tab")
        turn = await rt.send("c", "hi")
        await turn.result()
        await asyncio.sleep(3 * clients.HEARTBEAT_SECONDS)
        assert len(await rt.pending()) == 1, "the client is attached and sends heartbeats"
        left = now()
        await tab.detach()
        await turn.final_result()
        assert CLIENT_GRACE <= now() - left < CLIENT_GRACE + 1
        assert sees(model)[0]["error"]["kind"] == "detached"
        await asyncio.sleep(1.5 * clients.HEARTBEAT_SECONDS)
        assert [row.until for row in await rt.store.clients("c")] == [left]


async def test_the_clients_of_a_runtime_detach_when_it_closes():
    """Another process sees that they are gone [B43]."""
    store = MemoryStore()
    async with Runtime(store=store.sibling(), clock=now) as viewer:
        async with Runtime(agent([], locate), store=store, clock=now) as rt:
            await rt.open("c")
            await rt.attach_client("c", client="tab")
            assert [row.until > now() for row in await viewer.store.clients("c")] == [True]
        assert [row.until <= now() for row in await viewer.store.clients("c")] == [True]


@pytest.mark.parametrize("failure", [StoreError, OSError])
async def test_a_heartbeat_that_fails_is_logged_and_the_next_one_is_sent(failure, caplog):
    """The client stays attached [B43]."""
    async with Runtime(agent([], locate), clock=now) as rt:
        await rt.open("c")
        await rt.attach_client("c", client="tab")
        put = rt.store.put_client

        async def failing(row):
            rt.store.put_client = put
            raise failure("disk full")

        rt.store.put_client = failing
        with caplog.at_level(logging.ERROR, logger="holdfast"):
            await asyncio.sleep(1.5 * clients.HEARTBEAT_SECONDS)
        assert "disk full" in caplog.text
        await asyncio.sleep(clients.HEARTBEAT_SECONDS)
        assert [row.until for row in await rt.store.clients("c")] == [
            2 * clients.HEARTBEAT_SECONDS + clients.PRESENCE_SECONDS
        ]


@pytest.mark.parametrize("failure", [StoreError, OSError])
async def test_a_client_that_fails_to_detach_does_not_keep_the_runtime_from_closing(failure):
    """A heartbeat task that is left running would fail the test."""
    async with Runtime(agent([], locate)) as rt:
        await rt.open("c")
        for name in ("tab", "phone"):
            await rt.attach_client("c", client=name)

        async def failing(row):
            raise failure("disk full")

        rt.store.put_client = failing
    await asyncio.sleep(0)
    with pytest.raises(Invalid, match="not open"):
        await rt.send("c", "hi")


async def test_attach_client_refuses_tools_that_are_not_a_list_of_names():
    async with Runtime(agent([], locate)) as rt:
        await rt.open("c")
        wrong: list[Any] = ["locate", [1]]
        for tools in wrong:
            with pytest.raises(Invalid, match="list of names"):
                await rt.attach_client("c", tools)
        assert await rt.store.clients("c") == []


async def test_a_client_that_does_not_offer_the_tool_gets_no_lease():
    """A client that offers the tool gets the lease [B44]."""
    async with Runtime(agent([[ToolCall("locate")], "done"], locate)) as rt:
        await rt.open("c")
        other = await rt.attach_client("c", ["other"])
        able = await rt.attach_client("c", ["other", "locate"])
        (entry,) = (await (await rt.send("c", "hi")).result()).pending
        assert not await other.lease(entry.call)
        assert await able.lease(entry.call)


# --- interrupted calls ---


async def test_an_interrupted_call_of_a_halted_turn_is_an_error_and_no_approver_is_asked():
    """The turn ends with the reason of the halt [B49, B70]."""
    store = MemoryStore()
    started_paying = asyncio.Event()

    @tool(recovery="ask")
    async def pay() -> None:
        """Pay."""
        started_paying.set()
        await asyncio.sleep(3600)

    @tool
    async def stop() -> Halt:
        """Hand over."""
        await started_paying.wait()
        return Halt("handed_over")

    model = ScriptedModel([[ToolCall("pay"), ToolCall("stop")], "done"])
    async with Runtime(agent(model, pay, stop), store=store) as rt:
        await rt.send("c", "hi")
        await logged(rt, CallReturned)
        await kill(rt)
    async with Runtime(agent(model, pay, stop), store=store.sibling()) as rt:
        await logged(rt, TurnEnded)
        log = await rt.history("c")
        assert of(log, TurnEnded)[0].reason == "handed_over"
        assert of(log, CallSuspended) == []
        assert [event.error.kind for event in of(log, CallReturned) if event.error] == ["interrupted"]
        paired(log)


async def test_an_interrupted_call_whose_grant_was_revoked_needs_an_approval_to_run_again():
    """The second attempt waits for a person [B37, B48]."""
    store, runs = MemoryStore(), []

    @tool(approval="required")
    async def pay(n: int, call: Call) -> int:
        """Pay."""
        runs.append((n, call.attempt))
        if n == 2 and call.attempt == 1:
            await asyncio.sleep(3600)
        return n

    model = ScriptedModel([[ToolCall("pay", {"n": 1})], [ToolCall("pay", {"n": 2})], "done"], follow=True)
    async with Runtime(agent(model, pay), store=store) as rt:
        (entry,) = (await (await rt.send("c", "hi")).result()).pending
        await rt.resolve("c", entry.call, Approve(remember="tool"))
        await until(lambda: (2, 1) in runs)
        await kill(rt)
    async with Runtime(store=store.sibling()) as guest:
        (grant,) = await guest.grants("c")
        await guest.revoke("c", grant.id)
    async with Runtime(agent(model, pay), store=store.sibling()) as rt:
        (entry,) = await until(rt.pending)
        assert (entry.kind, entry.recovery, entry.args) == ("approval", True, {"n": 2})
        assert runs == [(1, 1), (2, 1)]
        await rt.resolve("c", entry.call, Approve())
        await logged(rt, TurnEnded)
        assert runs == [(1, 1), (2, 1), (2, 2)]
        paired(await rt.history("c"))


# --- decisions ---


async def test_a_question_of_an_approved_tool_can_be_declined():
    """A denial answers the question; a second approval is stale [B35, B68]."""

    @tool(approval="required")
    async def book() -> Ask:
        """Book a flight."""
        return Ask("Which?", choices=["window", "aisle"])

    model = ScriptedModel([[ToolCall("book")], "done"])
    async with Runtime(agent(model, book)) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        await rt.resolve("c", entry.call, Approve(), by="boss")
        (question,) = (await turn.result()).pending
        assert question.kind == "elicitation"
        with pytest.raises(Stale) as late:
            await rt.resolve("c", entry.call, Approve(), by="bob")
        assert (late.value.reason, late.value.winner) == ("resolved", "boss")
        await rt.resolve("c", entry.call, Deny("neither"), by="ann")
        await turn.final_result()
        assert sees(model)[0]["error"]["details"] == {"reason": "neither"}


async def test_large_edited_arguments_are_truncated_for_the_model_only():
    """The handler gets all of them [B21, B36]."""
    ran = []

    @tool(approval="required")
    async def write(text: str) -> int:
        """Write."""
        ran.append(len(text))
        return 1

    model = ScriptedModel([[ToolCall("write", {"text": "a"})], "done"])
    async with Runtime(agent(model, write)) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        await rt.resolve("c", entry.call, Approve(args={"text": "x" * 500_000}))
        await turn.final_result()
    (seen,) = sees(model)
    assert ran == [500_000]
    assert len(seen["edited_args"].encode()) <= MODEL_LIMIT
    assert "total 500011 bytes" in seen["edited_args"]


async def test_a_queued_message_stays_queued_while_the_earlier_turn_waits_for_a_person():
    """It runs after the answer [B13, B25]."""
    async with Runtime(agent([[ToolCall("choose")], "one", "two"], choose)) as rt:
        first = await rt.send("c", "one")
        (entry,) = (await first.result()).pending
        second = await rt.send("c", "two", when_busy="queue")
        async with asyncio.timeout(20):
            snapshot = await rest(second)
        assert (snapshot.state, snapshot.pending, snapshot.queued) == ("awaiting_input", [entry], 1)
        await rt.resolve("c", entry.call, Answer("x"))
        assert (await second.final_result()).reason == "completed"


@pytest.mark.parametrize(
    ("choices", "other"), [([1, 2], True), ([True, False], 1), (["1"], 1), ([None], False)], ids=str
)
async def test_an_answer_of_another_json_type_than_the_choices_is_refused(choices, other):
    """``True`` is not the choice ``1``, although the two are equal in Python [B34, B68]."""

    @tool
    async def ask() -> Ask:
        """Ask."""
        return Ask("Which?", choices=choices)

    model = ScriptedModel([[ToolCall("ask")], "done"])
    async with Runtime(agent(model, ask)) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        with pytest.raises(Invalid, match="is not one of"):
            await rt.resolve("c", entry.call, Answer(other))
        assert await rt.pending() == [entry]
        await rt.resolve("c", entry.call, Answer(choices[0]))
        await turn.final_result()
        assert sees(model) == [{"ok": True, "result": choices[0]}]


async def test_the_result_of_a_halted_turn_names_the_artifact_of_a_large_value():
    """``call_result`` returns the value itself [B21, B70]."""
    large = {"k": "v" * 70_000}

    @tool
    async def stop() -> Halt:
        """Hand over."""
        return Halt("handed_over", large)

    async with Runtime(agent([[ToolCall("stop")]], stop)) as rt:
        ended = await (await rt.send("c", "hi")).final_result()
        (returned,) = of(await rt.history("c"), CallReturned)
        assert ended.value == {"artifact": returned.artifact, "size": returned.size}
        assert await rt.call_result("c", returned.call_id) == large


async def test_call_result_raises_the_error_of_a_failed_call():
    """Kind, message and details are those that the handler raised [B15]."""

    @tool
    async def bad() -> None:
        """Fail."""
        raise ToolError("timeout", "too slow", {"after": 3})

    async with Runtime(agent([[ToolCall("bad")], "done"], bad)) as rt:
        await (await rt.send("c", "hi")).final_result()
        (returned,) = of(await rt.history("c"), CallReturned)
        with pytest.raises(ToolError, match="too slow") as raised:
            await rt.call_result("c", returned.call_id)
        assert (raised.value.kind, raised.value.details) == ("timeout", {"after": 3})


async def test_a_turn_that_is_being_cancelled_has_no_pending_calls():
    """A decision would be stale [B60]."""
    charge = Charge(lasts=3600, dies=3)
    async with Runtime(agent([[ToolCall("charge"), ToolCall("choose")]], charge.tool, choose)) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = await until(rt.pending)
        await until(lambda: charge.running)
        await rt.cancel("c")
        await asyncio.sleep(1)
        assert charge.running == 1, "the turn is still open"
        snapshot = await rt.snapshot("c")
        assert (snapshot.state, snapshot.pending, await rt.pending()) == ("executing_tools", [], [])
        with pytest.raises(Stale) as late:
            await rt.resolve("c", entry.call, Answer("x"))
        assert late.value.reason == "cancelled"
        assert (await turn.final_result()).reason == "cancelled"
        paired(await rt.history("c"))


async def raise_later(by, entry, decision):
    raise ZeroDivisionError


@pytest.mark.parametrize("may", [lambda by, entry, decision: 1 / 0, raise_later], ids=["sync rule", "async rule"])
async def test_a_may_resolve_rule_that_fails_refuses_the_decision(may, caplog):
    """The call stays pending, and the refusal is logged [B33]."""
    async with Runtime(agent([[ToolCall("choose")], "done"], choose), may_resolve=may) as rt:
        (entry,) = (await (await rt.send("c", "hi")).result()).pending
        with pytest.raises(NotAllowed, match="ZeroDivisionError"):
            await rt.resolve("c", entry.call, Answer("x"), by="ann")
        assert await rt.pending() == [entry]
        (refused,) = of(await rt.history("c"), ResolutionRefused)
        assert (refused.by, refused.call_id, refused.decision) == ("ann", entry.call, "Answer")
    assert "may_resolve failed" in caplog.text


async def test_a_digest_of_neither_the_original_nor_the_edit_is_superseded():
    """Also for a tool without a preview of its own [B35, B36]."""
    model = ScriptedModel([[ToolCall("gated", {"n": 1})], "done"])
    async with Runtime(agent(model, gated)) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        with pytest.raises(Stale) as stale:
            await rt.resolve("c", entry.call, Approve(args={"n": 2}, digest="nonsense"))
        assert stale.value.reason == "superseded"
        assert await rt.pending() == [entry]
        right = call_digest("gated", {"n": 2}, {"tool": "gated", "args": {"n": 2}}, entry.fingerprint)
        await rt.resolve("c", entry.call, Approve(args={"n": 2}, digest=right))
        await turn.final_result()
        assert sees(model)[0]["result"] == 2
