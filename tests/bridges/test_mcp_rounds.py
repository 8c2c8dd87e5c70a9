"""Input rounds, tasks and live questions of MCP servers, with kills."""

import asyncio
import json
import signal

import pytest
from mcp_support import Ledger, desk, shop_command, shop_server, worker
from support.async_tests import until
from support.runtimes import of

from holdfast import Agent, Answer, Deny, Invalid, Runtime, ScriptedModel, ToolCall
from holdfast.bridges.mcp import MCP, exchange
from holdfast.core.events import CallReturned, CallStarted, CallSuspended


@pytest.fixture
def ledger(tmp_path) -> Ledger:
    return Ledger(tmp_path / "ledger.txt")


PATIENCE = 120
"""Seconds to connect: programs start slowly on a busy machine."""


def store_url(tmp_path) -> str:
    return f"sqlite:///{tmp_path / 'store.db'}"


async def pending_question(rt, count=1):
    await until(lambda: _count(rt, count))
    return await rt.pending()


async def _count(rt, count):
    return len(await rt.pending()) >= count


async def test_an_input_round_survives_a_kill_and_is_continued_once_by_another_process(tmp_path, ledger) -> None:
    """A worker is killed, a process without the agent answers, another worker finishes [B142]."""
    store = store_url(tmp_path)
    async with shop_server(ledger) as url:
        async with worker(store, url, "refund", {"order": 7}, "Refund order 7") as first, Runtime(store=store) as rt:
            (question,) = await pending_question(rt)
            assert question.prompt == "shop asks: Refund order 7?"
            assert question.schema["properties"] == {"approve": {"type": "boolean"}}
            first.send_signal(signal.SIGKILL)
            await first.wait()
            await rt.resolve(question, Answer({"approve": True}), by="boss")
            assert ledger.lines("continued") == []
        async with worker(store, url, "refund", {"order": 7}), Runtime(store=store) as rt:
            result = await rt.wait("c")
            history = await rt.history("c")
    assert result.text == "Done."
    state = of(history, CallSuspended)[0].state
    asked, continued = ledger.lines()
    assert asked == "asked 7"
    assert continued == 'continued 7 s1 accept {"approve": true}'
    assert list(state["inputs"]) == ["ok"]
    assert state["request_state"], "the server's sealed state is in the log"
    assert "accept" in of(history, CallReturned)[0].value


async def test_a_declined_question_is_passed_on_to_the_server(ledger) -> None:
    async with shop_server(ledger) as url:
        agent = desk(MCP(url, name="shop", approval="auto"), ToolCall("shop_refund", {"order": 7}))
        async with Runtime(agent) as rt:
            result = await rt.run("go", conversation="c")
            await rt.resolve(result.pending[0], Deny("too much"), by="boss")
            await rt.wait("c")
            (returned,) = of(await rt.history("c"), CallReturned)
    assert ledger.lines() == ["asked 7", "continued 7 s1 decline null"]
    assert "decline" in returned.value


async def test_several_inputs_of_a_round_are_answered_together(ledger) -> None:
    """Forms and a link are one question; defaults are filled in; an answer that lacks one is refused."""
    async with shop_server(ledger) as url:
        agent = desk(MCP(url, name="shop", approval="auto"), ToolCall("shop_ship", {"order": 7}))
        async with Runtime(agent) as rt:
            result = await rt.run("go", conversation="c")
            (question,) = result.pending
            assert "https://pay.example.com/7" in question.prompt
            with pytest.raises(Invalid, match="pay"):
                await rt.resolve(question, Answer({"yes": {"approve": True}, "wrap": {}}), by="boss")
            answer = {"yes": {"approve": True}, "wrap": {}, "pay": "done"}
            await rt.resolve(question, Answer(answer), by="boss")
            await rt.wait("c")
    (line,) = ledger.lines("shipped")
    found = json.loads(line.partition(" ")[2])
    assert found == {
        "pay": ["accept", None],
        "wrap": ["accept", {"colour": "red"}],
        "yes": ["accept", {"approve": True}],
    }


async def test_a_server_that_asks_for_ever_is_ended(ledger) -> None:
    """A call asks at most 20 questions [B156]."""
    async with shop_server(ledger) as url:
        agent = desk(MCP(url, name="shop", approval="auto"), ToolCall("shop_badger", {}))
        async with Runtime(agent) as rt:
            result = await rt.run("go", conversation="c")
            for _ in range(20):
                await rt.resolve(result.pending[0], Answer({"approve": True}), by="boss")
                result = await rt.wait("c")
            (returned,) = of(await rt.history("c"), CallReturned)
    assert returned.error.kind == "conflict"


async def test_an_answer_waits_while_the_server_is_away(tmp_path, ledger) -> None:
    """The answer is not lost: a person is asked to try again, and it is passed on once [B156]."""
    async with shop_server(ledger) as url:
        port = url
        source = MCP(url, name="shop", approval="auto", connect_timeout=5)
        rt = Runtime(desk(source, ToolCall("shop_refund", {"order": 7})))
        await rt.start()
        result = await rt.run("go", conversation="c")
    await rt.resolve(result.pending[0], Answer({"approve": True}), by="boss")
    again = await rt.wait("c")
    assert again.pending[0].choices == ["try again"]
    assert "not reachable" in again.pending[0].prompt
    assert ledger.lines("continued") == []
    await rt.close()
    assert port


async def test_a_task_is_polled_on_by_another_process_after_a_kill(tmp_path, ledger) -> None:
    """The task's id is in the log before it is polled [B144]."""
    store = store_url(tmp_path)
    async with shop_server(ledger) as url:
        async with worker(store, url, "print_page", {}, "Print it") as first:
            await ledger.has("polled")
            first.send_signal(signal.SIGKILL)
            await first.wait()
        ledger.finish_tasks()
        async with worker(store, url, "print_page", {}), Runtime(store=store) as rt:
            result = await rt.wait("c")
            history = await rt.history("c")
    assert result.text == "Done."
    assert ledger.lines("started") == ["started task-1"]
    assert of(history, CallStarted)[1].state["task"]["id"] == "task-1"
    assert of(history, CallReturned)[0].value == "printed null"


async def test_a_task_that_asks_is_suspended_and_continued_after_a_kill(tmp_path, ledger) -> None:
    """``input_required`` of a task is the same suspension as that of a call [B144]."""
    store = store_url(tmp_path)
    async with shop_server(ledger) as url:
        async with worker(store, url, "print_book", {}, "Print it") as first, Runtime(store=store) as rt:
            (question,) = await pending_question(rt)
            assert question.prompt == "shop asks: Which paper?"
            first.send_signal(signal.SIGKILL)
            await first.wait()
            await rt.resolve(question, Answer({"approve": True}), by="boss")
        ledger.finish_tasks()
        async with worker(store, url, "print_book", {}), Runtime(store=store) as rt:
            await rt.wait("c")
            history = await rt.history("c")
    assert ledger.lines("started") == ["started task-1"]
    assert len(ledger.lines("updated")) == 1
    assert "approve" in of(history, CallReturned)[0].value


async def test_a_cancelled_turn_cancels_the_task_and_a_closed_process_does_not(ledger, tmp_path) -> None:
    store = store_url(tmp_path)
    async with shop_server(ledger) as url:

        def make():
            return desk(MCP(url, name="shop", approval="auto"), ToolCall("shop_print_page", {}))

        rt = Runtime(make(), store=store, drain=0.1)
        await rt.start()
        await rt.send("c", "go")
        await ledger.has("polled")
        await rt.close()
        assert ledger.lines("cancelled") == []
        async with Runtime(make(), store=store) as rt:
            await ledger.has("polled", len(ledger.lines("polled")) + 1)
            await rt.cancel("c")
            await ledger.has("cancelled")
            assert (await rt.wait("c")).reason == "cancelled"
    assert ledger.lines("started", "cancelled") == ["started task-1", "cancelled task-1"]


@pytest.mark.parametrize("by", ["a process with the agent", "a process without the agent"])
async def test_a_cancelled_turn_cancels_the_task_that_waits_for_an_answer(ledger, tmp_path, by) -> None:
    """The process that began the task was killed: the one that closes the turn tells the server [B143]."""
    store = store_url(tmp_path)
    async with shop_server(ledger) as url:
        async with worker(store, url, "print_book", {}, "go") as first, Runtime(store=store) as rt:
            await pending_question(rt)
            first.send_signal(signal.SIGKILL)
            await first.wait()
        if by == "a process with the agent":
            agent = desk(MCP(url, name="shop", approval="auto"), ToolCall("shop_print_book", {}))
            async with Runtime(agent, store=store) as rt:
                await rt.cancel("c")
                assert (await rt.wait("c")).reason == "cancelled"
        else:
            async with worker(store, url, "print_book", {}), Runtime(store=store) as rt:
                await rt.cancel("c")
                assert (await rt.wait("c")).reason == "cancelled"
                await ledger.has("cancelled")
    assert ledger.lines("started", "updated", "cancelled") == ["started task-1", "cancelled task-1"]


async def test_a_process_without_the_agent_ends_a_cancelled_turn_if_no_other_one_does(ledger, tmp_path) -> None:
    """A process with the agent is alive, but works for other conversations only."""
    store = store_url(tmp_path)
    async with shop_server(ledger) as url:
        async with worker(store, url, "print_book", {}, "go"), Runtime(store=store) as rt:
            await pending_question(rt)
        agent = desk(MCP(url, name="shop", approval="auto"))
        async with Runtime(agent, store=store, only=["another"]), Runtime(store=store) as rt:
            await rt.cancel("c")
            assert (await rt.wait("c")).reason == "cancelled"


async def test_the_cancellation_of_a_task_is_given_up_if_its_server_stays_away(
    ledger, tmp_path, monkeypatch, caplog
) -> None:
    """The turn is over at once; the runtime closes."""
    monkeypatch.setattr(exchange, "CANCEL_SECONDS", 0.6)
    async with shop_server(ledger) as url:
        agent = desk(MCP(url, name="shop", approval="auto"), ToolCall("shop_print_book", {}))
        rt = Runtime(agent, store=store_url(tmp_path))
        await rt.start()
        await rt.run("go", conversation="c")
    await rt.cancel("c")
    assert (await rt.wait("c")).reason == "cancelled"
    await until(lambda: "the cancellation of task task-1 did not reach shop" in caplog.text)
    await rt.close()


async def test_a_cancelled_turn_ends_the_request_of_a_live_question(ledger, monkeypatch) -> None:
    """Otherwise open requests would add up until no call can be made."""
    monkeypatch.setattr(exchange, "MAX_LIVE", 1)
    async with shop_server(ledger) as url:
        calls = ToolCall("shop_ask_live", {"order": 7})
        agent = desk(MCP(url, name="shop", approval="auto", mode="legacy"), calls)
        async with Runtime(agent) as rt:
            await rt.run("go", conversation="c")
            await rt.cancel("c")
            result = await rt.run("go", conversation="d")
            assert [question.prompt for question in result.pending] == ["shop asks: Refund order 7 now?"]


@pytest.mark.parametrize("mode", ["legacy"])
async def test_a_live_question_of_an_older_server_is_an_inbox_entry(ledger, mode) -> None:
    async with shop_server(ledger) as url:
        agent = desk(MCP(url, name="shop", approval="auto", mode=mode), ToolCall("shop_ask_live", {"order": 7}))
        async with Runtime(agent) as rt:
            result = await rt.run("go", conversation="c")
            (question,) = result.pending
            assert question.prompt == "shop asks: Refund order 7 now?"
            await rt.resolve(question, Answer({"approve": True}), by="boss")
            await rt.wait("c")
            (returned,) = of(await rt.history("c"), CallReturned)
    assert returned.value == {"result": "accept 7"}
    assert ledger.lines() == ["live 7", "answered 7 accept"]


async def test_live_questions_of_several_calls_are_shown_under_their_calls(ledger) -> None:
    """Over HTTP a question comes in the response to its call."""
    async with shop_server(ledger) as url:
        calls = [ToolCall("shop_ask_live", {"order": order}) for order in (7, 8, 9)]
        agent = desk(MCP(url, name="shop", approval="auto", mode="legacy"), *calls)
        async with Runtime(agent) as rt:
            result = await rt.run("go", conversation="c")
            assert {question.prompt: question.args for question in result.pending} == {
                f"shop asks: Refund order {order} now?": {"order": order} for order in (7, 8, 9)
            }


async def test_a_live_question_of_a_program_names_the_calls_that_it_may_be_about(ledger) -> None:
    """On standard output nothing says which call a question belongs to. Other conversations' calls stay private."""
    source = MCP(shop_command(ledger), name="shop", approval="auto", mode="legacy", connect_timeout=PATIENCE)
    model = ScriptedModel([[ToolCall("shop_slow")], "-"], follow=True)
    first, second = ToolCall("shop_slow"), ToolCall("shop_ask_live", {"order": 7})
    agents = Agent("other", model=model, tools=[source]), desk(source, first, second)
    async with Runtime(*agents, drain=0.1) as rt:
        await rt.send("d", "go", agent="other")
        await ledger.has("slow")
        await rt.send("c", "go", agent="desk")
        (question,) = await pending_question(rt)
        assert question.prompt.splitlines() == [
            "The server does not say which of 3 running calls this is about: slow {}, ask_live {"
            '"order":7}, 1 of other conversations.',
            "shop asks: Refund order 7 now?",
        ]


async def test_if_the_connection_of_a_live_question_is_gone_recovery_decides(ledger, tmp_path) -> None:
    """The call's recovery is "ask": the person is told, and asked whether it is to run again."""
    store = store_url(tmp_path)

    def make():
        source = MCP(shop_command(ledger), name="shop", approval="auto", mode="legacy", connect_timeout=PATIENCE)
        return desk(source, ToolCall("shop_ask_live", {"order": 7}))

    async with Runtime(make(), store=store) as rt:
        result = await rt.run("go", conversation="c")
        assert "Refund order 7" in result.pending[0].prompt
    async with Runtime(make(), store=store) as rt:
        (question,) = await rt.pending()
        await rt.resolve(question, Answer({"approve": True}), by="boss")
        again = await rt.wait("c")
        assert "connection" in again.pending[0].prompt
        assert again.pending[0].choices == ["run again"]
        await rt.resolve(again.pending[0], Answer("run again"), by="boss")
        third = await rt.wait("c")
        await rt.resolve(third.pending[0], Answer({"approve": False}), by="boss")
        await rt.wait("c")
    assert ledger.lines("live", "answered") == ["live 7", "live 7", "answered 7 accept"]


async def test_a_live_question_outlasts_the_time_limit_of_requests(ledger) -> None:
    """The person's time to answer does not count."""
    source = MCP(shop_command(ledger), name="shop", approval="auto", mode="legacy", timeout=5, connect_timeout=PATIENCE)
    async with Runtime(desk(source, ToolCall("shop_ask_live", {"order": 7}))) as rt:
        result = await rt.run("go", conversation="c")
        async with asyncio.timeout(60):
            await rt.resolve(result.pending[0], Answer({"approve": True}), by="boss")
            assert (await rt.wait("c")).text == "Done."
