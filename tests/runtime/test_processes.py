"""Several processes on one store: concurrent decisions, requests to a running owner, take-over, agents as JSON."""

import asyncio
import time

import pytest
import reviving_process
from support.async_tests import until
from support.revival import Process, Seen, agent, life, milliseconds, of, paired, run
from support.runtimes import rest

from holdfast import (
    Agent,
    Answer,
    Approve,
    Call,
    NotFound,
    Runtime,
    ScriptedModel,
    Stale,
    ToolCall,
    tool,
)
from holdfast.core.events import CallResolved, CallReturned
from holdfast.errors import DeclarationError, StoreError
from holdfast.runtime.turn import Turn
from holdfast.stores.memory import MemoryStore


def url(path):
    return f"sqlite:///{path}"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "holdfast.db"


@tool(executor="human", prompt="Which one?")
def choose() -> str:
    """Ask the user."""
    raise NotImplementedError


async def suspend_conversation(store):
    """Return the pending entry of a conversation that waits for an answer and that no process runs."""
    async with Runtime(agent(ScriptedModel([[ToolCall("choose")]]), choose), store=store) as rt:
        turn = await rt.send("c", "go")
        (entry,) = (await turn.result()).pending
    return entry


async def wait_until_idle(rt):
    """Wait until the conversation is idle; return its log."""
    await until(lambda: _is_idle(rt))
    return await rt.history("c")


async def _is_idle(rt):
    return (await rt.snapshot("c")).state == "idle"


def test_exactly_one_of_two_processes_that_resolve_a_call_wins(path):
    """The loser gets ``Stale`` with the name of the winner [B30]."""

    async def main():
        entry = await suspend_conversation(url(path))
        with Process("resolve", path, entry.call, "ann") as ann, Process("resolve", path, entry.call, "bob") as bob:
            assert [await ann.says(), await bob.says()] == [["ready"], ["ready"]]
            ann.tell("go")
            bob.tell("go")
            outcomes = {"ann": await ann.says(), "bob": await bob.says()}
        winners = [name for name, words in outcomes.items() if words[0] == "won"]
        assert len(winners) == 1, outcomes
        (loser,) = {"ann", "bob"} - {*winners}
        assert outcomes[loser] == ["stale", "resolved", winners[0]]
        async with Runtime(agent(ScriptedModel(["thanks"]), choose), store=url(path)) as rt:
            log = await wait_until_idle(rt)
            paired(log)
            (resolved,) = of(log, CallResolved)
            assert (resolved.by.id, resolved.seq) == (winners[0], int(outcomes[winners[0]][1]))
            assert of(log, CallReturned)[0].value == winners[0]

    run(main, timeout=60)


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_exactly_one_of_fifty_decisions_at_two_runtimes_wins(path, kind):
    """The other 49 are stale and name the winner [B30]."""

    async def main():
        one = MemoryStore() if kind == "memory" else url(path)
        model = ScriptedModel([[ToolCall("choose")], "thanks"])
        async with life(agent(model, choose), store=one) as owner:
            two = one.sibling() if kind == "memory" else one
            async with life(store=two) as desk:
                turn = await owner.send("c", "go")
                (entry,) = (await turn.result()).pending
                outcomes = await asyncio.gather(
                    *((owner, desk)[n % 2].resolve("c", entry.call, Answer(f"d{n}"), by=f"d{n}") for n in range(50)),
                    return_exceptions=True,
                )
                losers = [outcome for outcome in outcomes if isinstance(outcome, Stale)]
                assert len(losers) == 49, outcomes
                log = await wait_until_idle(owner)
                paired(log)
                (resolved,) = of(log, CallResolved)
                assert {(stale.reason, stale.winner) for stale in losers} == {("resolved", resolved.by.id)}

    run(main, timeout=60)


@pytest.mark.parametrize(
    ("verb", "request_event", "effect_event"),
    [("cancel", "CancelRequested", "TurnEnded"), ("interrupt", "MessageReceived", "TurnStarted")],
)
def test_a_streaming_owner_acts_on_a_cancel_or_interrupt_from_another_process(path, verb, request_event, effect_event):
    """Without the request the reply of the owner would never end [B87]."""

    async def main():
        with Process("stream", path) as owner, Process("guest", path, verb) as guest:
            assert await owner.says() == ["streaming"]
            assert await guest.says() == ["ready"]
            guest.tell("go")
            assert await guest.says() == ["done"]
            seen = []
            while effect_event not in seen:  # its stream never ends by itself
                seen += await owner.says()
            assert request_event in seen

    run(main, timeout=60)


def test_a_streaming_owner_receives_a_message_that_another_process_queues(path):
    """The message arrives while the reply of the owner still streams [B87]."""

    async def main():
        with Process("stream", path) as owner, Process("guest", path, "send") as guest:
            assert await owner.says() == ["streaming"]
            assert await guest.says() == ["ready"]
            guest.tell("go")
            assert await guest.says() == ["done"]
            assert await owner.says() == ["MessageReceived"]  # the endless stream is still open

    run(main, timeout=60)


def test_an_owner_that_runs_a_tool_receives_an_answer_from_another_process(path):
    """The answer arrives while another call still runs [B87]."""

    async def main():
        with Process("mixed", path) as owner, Process("guest", path, "answer") as guest:
            assert await owner.says() == ["running"]
            assert await guest.says() == ["ready"]
            guest.tell("go")
            assert await guest.says() == ["done"]
            assert await owner.says() == ["resolved"]  # the endless call still runs

    run(main, timeout=60)


def test_the_conversation_of_a_killed_process_can_be_read_answered_and_taken_over(path):
    """The snapshot is the same before and after the kill; the next process finishes both calls [B53, B48]."""

    async def main():
        with Process("hold", path) as owner:
            assert await owner.says() == ["running"]
            async with Runtime(store=url(path)) as desk:
                live = await desk.snapshot("c")
                owner.kill()
                dead = await desk.snapshot("c")
                assert dead == live
                assert [f.tool for f in dead.in_flight] == ["work"]
                (entry,) = await desk.pending()
                await desk.resolve("c", entry.call, Answer("mine"), by="ann")

            @tool
            async def work() -> str:
                """Work."""
                return "worked after all"

            start = time.monotonic()
            async with Runtime(agent(ScriptedModel(["done"]), work, choose), store=url(path)) as rt:
                log = await wait_until_idle(rt)
                print(f"taken over and finished {milliseconds(start):.0f} ms after the start")
                paired(log)
                assert [r.value for r in of(log, CallReturned)] == ["mine", "worked after all"]

    run(main, timeout=60)


def test_a_cancel_after_the_owner_was_killed_closes_the_turn(path):
    """A process without the agent records it; a later answer is stale [B60]."""

    async def main():
        with Process("hold", path) as owner:
            assert await owner.says() == ["running"]
            owner.kill()
        async with Runtime(store=url(path)) as desk:
            (entry,) = await desk.pending()
            assert await desk.cancel("c", by="ann")
            log = await wait_until_idle(desk)
            paired(log)
            assert [r.error.kind for r in of(log, CallReturned)] == ["cancelled", "cancelled"]
            with pytest.raises(Stale) as refused:
                await desk.resolve("c", entry.call, Answer("late"))
            assert refused.value.reason == "cancelled"

    run(main, timeout=60)


def test_an_agent_that_is_stored_as_json_runs_in_another_process(path, tmp_path):
    """Handlers are named by import path, and the JSON round-trips unchanged [B10]."""

    async def main():
        saved = reviving_process.saved_agent()
        data = tmp_path / "agent.json"
        data.write_text(saved.to_json())
        assert Agent.from_json(data.read_text()).to_json() == saved.to_json()
        with Process("load_and_run", path, data) as other:
            assert await other.says() == ["preview", "would", "pay", "2.5"]
            assert "found 3" in " ".join(await other.says())
            assert '"paid":2.5,"by":"boss"' in " ".join(await other.says())

    run(main, timeout=60)


def test_an_agent_with_a_lambda_cannot_be_stored_and_the_error_says_how_to_name_a_handler():
    """A handler needs an import path [B10]."""
    nameless = tool(name="nameless", description="?", parameters={"type": "object"})(lambda args: 1)
    with pytest.raises(DeclarationError, match=r"package\.module:function"):
        Agent("a", model=None, tools=[nameless]).to_json()


def test_an_agent_that_gets_its_handlers_at_load_continues_a_suspended_conversation(path):
    """The approved call runs with the handlers that were given to ``from_json`` [B86]."""

    async def main():
        saved = reviving_process.saved_agent()
        saved.model = ScriptedModel([[ToolCall("pay", {"amount": 9})]])
        async with Runtime(saved, store=url(path)) as rt:
            (entry,) = (await (await rt.send("c", "go")).result()).pending
        data = saved.to_json(handlers=False)
        loaded = Agent.from_json(
            data,
            handlers={"pay": reviving_process.pay, "look": reviving_process.look},
            model=ScriptedModel(["paid"]),
        )
        async with Runtime(loaded, store=url(path)) as rt:
            await rt.resolve("c", entry.call, Approve(digest=entry.digest), by="boss")
            log = await wait_until_idle(rt)
            paired(log)
            assert of(log, CallReturned)[0].value == {"paid": 9, "by": "boss"}

    run(main, timeout=60)


def test_a_conversation_that_was_not_found_is_found_after_another_process_opens_it():
    """A lookup that fails is not cached [B53]."""

    async def main():
        store = MemoryStore()
        async with life(store=store.sibling()) as desk:
            with pytest.raises(NotFound):
                await desk.snapshot("c")
            async with life(agent(ScriptedModel(["hello", "again"])), store=store) as rt:
                await (await rt.send("c", "hi")).final_result()
                turn = await desk.send("c", "from the desk, which knows no agent")
                assert (await turn.final_result()).reason == "completed"

    run(main)


def test_a_process_that_waits_for_more_conversations_than_it_caches_sees_all_of_them_end(monkeypatch):
    """Appends of another process reach every waiting caller, whatever the size of the cache [B53, B87]."""
    monkeypatch.setattr("holdfast.runtime.engine.MAX_IDLE", 20)
    monkeypatch.setattr("holdfast.runtime.engine.MAX_FULL", 5)

    async def main():
        store = MemoryStore()
        names = [f"c{n}" for n in range(150)]
        go = asyncio.Event()

        async def reply(request):
            await go.wait()
            return "done"

        async with (
            life(agent(ScriptedModel([reply] * len(names))), store=store) as rt,
            life(store=store.sibling()) as desk,
        ):
            for name in names:
                await rt.send(name, "hi")
            waiting = asyncio.gather(*(rest(Turn(desk._engine, name, 2)) for name in names))
            await until(lambda: len(desk._engine.bus.topics()) == len(names))
            go.set()
            assert {snapshot.state for snapshot in await waiting} == {"idle"}

    run(main)


def test_a_snapshot_and_the_events_after_it_have_every_reply_exactly_once():
    """That holds even if the conversation continues while the snapshot is read [B53]."""

    async def main():
        async with Runtime(agent(ScriptedModel(["one", "two"]))) as rt:
            await (await rt.send("c", "first")).final_result()
            read, interruptions = rt.store.read, []

            async def interrupted_read(*args, **options):
                bodies = await read(*args, **options)
                if options.get("before") and not interruptions:
                    interruptions.append(True)
                    await (await rt.send("c", "second")).final_result()
                return bodies

            rt.store.read = interrupted_read
            before = await rt.snapshot("c")
            assert interruptions
            texts = [message.text for message in before.messages]
            tail = await rt.history("c", after=before.seq)
            later = [event.text for event in tail if event.type == "AssistantSaid"]
            assert [text for text in (*texts, *later) if text in ("one", "two")] == ["one", "two"]

    run(main)


def test_a_conversation_whose_append_failed_is_retried_without_a_new_request(monkeypatch):
    """A full disk has space again; the process lives and holds the lease [B48]."""
    monkeypatch.setattr("holdfast.runtime.conversation.WRITE_RETRIES", (0.001,))
    monkeypatch.setattr("holdfast.runtime.takeover.BACKOFF_SECONDS", 0.05)
    monkeypatch.setattr("holdfast.runtime.takeover.POLL_SECONDS", 0.02)

    async def main():
        full = False
        seen = Seen()

        @tool
        async def work(call: Call) -> str:
            """Work."""
            nonlocal full
            seen.note(call)
            full = call.attempt == 1
            return "worked"

        store = MemoryStore()
        append = store.append

        async def failing(step):
            if full:
                raise StoreError("the disk is full")
            await append(step)

        store.append = failing
        async with life(agent(ScriptedModel([[ToolCall("work")], "done"]), work), store=store) as rt:
            await rt.send("c", "go")
            await seen.running()
            await until(lambda: rt._engine._store_watcher._backed_off)
            full = False
            log = await wait_until_idle(rt)
            paired(log)
            assert [attempt for _, attempt, _ in seen.calls] == [1, 2]

    run(main)
