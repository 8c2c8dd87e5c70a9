"""Sampling: an MCP server uses the agent's model, within its limits, and a person allows it."""

import asyncio
import json
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import mcp_sampler
import mcp_shop
import pytest
from mcp_sampling_worker import SAMPLE_USAGE, TURN_USAGE, make_agent
from mcp_support import Ledger
from support.async_tests import until
from support.runtimes import of

from holdfast import Answer, Deny, Limits, Runtime
from holdfast.core.events import CallReturned, CallStarted, CallSuspended

HERE = Path(__file__).parent
TOTAL = TURN_USAGE + SAMPLE_USAGE + TURN_USAGE
"""The usage of a turn with two replies and one request of the server."""


@pytest.fixture
def ledger(tmp_path) -> Ledger:
    return Ledger(tmp_path / "ledger.txt")


@pytest.fixture
def asked(tmp_path) -> Ledger:
    """What the server has asked the model."""
    return Ledger(tmp_path / "model.txt")


@asynccontextmanager
async def process(script: str, *args: str):
    """Run a program of this folder; give it, and the first line that it prints."""
    started = await asyncio.create_subprocess_exec(
        sys.executable, str(HERE / script), *args, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert started.stdout is not None
        yield started, (await started.stdout.readline()).decode().strip()
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


@asynccontextmanager
async def sampler_process(ledger: Ledger):
    """Run the server as a process; give its URL."""
    async with process("mcp_sampler.py", str(ledger.path), "http") as (_, url):
        yield url


@pytest.fixture
def server(ledger, monkeypatch):
    """The server as an object in this process."""
    monkeypatch.setattr(mcp_shop, "LEDGER", ledger.path)
    return mcp_sampler.server


def results(ledger: Ledger) -> dict:
    (line,) = ledger.lines("continued")
    return json.loads(line.partition(" ")[2])


ANSWER = {
    "role": "assistant",
    "content": {"type": "text", "text": "A summary."},
    "model": "scripted",
    "stopReason": "endTurn",
}


async def test_a_person_sees_the_request_and_allows_it_and_its_usage_counts_once(server, ledger, asked) -> None:
    """The agent's model answers; its tokens are in the log, in the turn's usage and in the conversation's [B142]."""
    async with Runtime(make_agent(server, "ask", "summarise", asked.path)) as rt:
        waiting = await rt.run("go", conversation="c")
        (question,) = waiting.pending
        assert question.choices == ["allow"]
        for part in (
            "sampler wants to use this agent's model, scripted",
            "at most 100 tokens, temperature 0.5, stops at 'END'",
            "It would prefer big-model, low cost 0.25; that is not followed.",
            "instructions: Be brief.",
            "user: Summarise: A long text.",
        ):
            assert part in question.prompt
        assert asked.lines() == []
        await rt.resolve(question, Answer("allow"), by="boss")
        result = await rt.wait("c")
        history = await rt.history("c")
        snapshot = await rt.snapshot("c")
    assert results(ledger) == {"summary": ANSWER}
    assert result.usage == snapshot.usage == TOTAL
    (started,) = [event for event in of(history, CallStarted) if event.attempts]
    assert [(attempt.model, attempt.usage) for attempt in started.attempts] == [("scripted", SAMPLE_USAGE)]
    assert started.state["sampled"]["summary"]["content"]["text"] == "A summary."
    assert asked.lines() == ["Summarise: A long text."]


async def test_the_model_gets_the_limits_of_the_request_and_no_tools_or_history(server, ledger, asked) -> None:
    agent = make_agent(server, "auto", "summarise", asked.path)
    async with Runtime(agent) as rt:
        await rt.run("my secret", conversation="c")
    (request,) = [request for request in agent.model.requests if request.call]
    assert request.settings == {"max_tokens": 100, "temperature": 0.5, "stop_sequences": ["END"]}
    assert (request.instructions, request.tools, request.output) == ("Be brief.", (), None)
    assert [message.text for message in request.messages] == ["Summarise: A long text."]


async def test_without_sampling_the_request_is_refused_and_nothing_is_announced(server, ledger, asked) -> None:
    for mode in ("auto", "legacy"):
        tool = "summarise" if mode == "auto" else "live"
        async with Runtime(make_agent(server, None, tool, asked.path, mode=mode)) as rt:
            result = await rt.run("go", conversation="c")
            (returned,) = of(await rt.history("c"), CallReturned)
            assert result.usage == TURN_USAGE + TURN_USAGE
            if mode == "auto":
                assert returned.error.kind == "permission_denied"
                assert 'sampling="ask"' in returned.error.message
    assert ledger.lines("asked") == ["asked -"]
    (refused,) = ledger.lines("refused")
    assert "not supported" in refused
    assert asked.lines() == []


async def test_a_server_is_told_of_sampling_if_it_is_on(server, ledger, asked) -> None:
    async with Runtime(make_agent(server, "auto", "summarise", asked.path)) as rt:
        result = await rt.run("go", conversation="c")
        history = await rt.history("c")
    assert ledger.lines("asked") == ["asked sampling"]
    assert result.text == "Done."
    assert of(history, CallSuspended) == []
    assert result.usage == TOTAL


async def test_a_denied_request_ends_the_call_of_a_round(server, ledger, asked) -> None:
    """A response of a round cannot say no, so the server is not called again."""
    async with Runtime(make_agent(server, "ask", "summarise", asked.path)) as rt:
        waiting = await rt.run("go", conversation="c")
        await rt.resolve(waiting.pending[0], Deny("too long"), by="boss")
        result = await rt.wait("c")
        (returned,) = of(await rt.history("c"), CallReturned)
    assert returned.error.kind == "denied"
    assert ledger.lines("continued") == []
    assert asked.lines() == []
    assert result.text == "Done."
    assert result.usage == TURN_USAGE + TURN_USAGE


async def test_a_person_and_the_model_are_asked_in_one_round(server, ledger, asked) -> None:
    async with Runtime(make_agent(server, "ask", "both", asked.path)) as rt:
        waiting = await rt.run("go", conversation="c")
        (question,) = waiting.pending
        assert "Go on?" in question.prompt
        assert "user: Summarise." in question.prompt
        await rt.resolve(question, Answer({"ok": {"approve": True}, "summary": "allow"}), by="boss")
        await rt.wait("c")
    found = results(ledger)
    assert found["ok"]["content"] == {"approve": True}
    assert found["summary"]["content"]["text"] == "A summary."


async def test_an_image_is_attached_to_the_question_and_reaches_the_model(server, ledger, asked) -> None:
    agent = make_agent(server, "ask", "describe", asked.path)
    async with Runtime(agent) as rt:
        waiting = await rt.run("go", conversation="c")
        (question,) = waiting.pending
        (image,) = question.artifacts
        assert (image.name, image.media_type, image.size) == (
            "model-request-1.png",
            "image/png",
            len(mcp_sampler.PIXEL),
        )
        assert f"[image {image.name}, {len(mcp_sampler.PIXEL)} bytes]" in question.prompt
        await rt.resolve(question, Answer("allow"), by="boss")
        await rt.wait("c")
    (request,) = [request for request in agent.model.requests if request.call]
    assert [image.content for image in request.images] == [mcp_sampler.PIXEL]
    assert results(ledger)["picture"]["content"]["text"] == "A summary."


async def test_a_long_request_is_attached_as_a_whole(server, ledger, asked) -> None:
    text = "word " * 4_000 + "the end"
    async with Runtime(make_agent(server, "ask", "summarise", asked.path, {"text": text})) as rt:
        waiting = await rt.run("go", conversation="c")
        (question,) = waiting.pending
        assert "the end" not in question.prompt
        whole = next(item for item in question.artifacts if item.name == "model-request.txt")
        assert (await rt.artifact("c", whole.sha256)).endswith(b"the end")
        await rt.resolve(question, Answer("allow"), by="boss")
        result = await rt.wait("c")
    assert result.text == "Done."
    assert results(ledger)["summary"]["content"]["text"] == "A summary."


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"tools": [{"name": "t", "inputSchema": {"type": "object"}}]}, "tools"),
        ({"includeContext": "thisServer"}, "includeContext"),
        (
            {"messages": [{"role": "user", "content": {"type": "audio", "data": "AA==", "mimeType": "audio/wav"}}]},
            "'audio'",
        ),
        ({"stopSequences": ["word"] * 1_000}, "stop sequences"),
        ({"temperature": 1e300}, "temperature"),
        ({"maxTokens": 10**30}, "maxTokens"),
    ],
)
async def test_what_was_not_offered_is_refused(server, ledger, asked, params, why) -> None:
    async with Runtime(make_agent(server, "auto", "unsupported", asked.path, {"params": params})) as rt:
        await rt.run("go", conversation="c")
        (returned,) = of(await rt.history("c"), CallReturned)
    assert returned.error.kind == "invalid_response"
    assert why in returned.error.message
    assert asked.lines() == []


async def test_a_request_beyond_the_limits_is_refused(server, ledger, asked) -> None:
    """The answer gets the tokens that are left; if none are, the model is not asked."""
    agent = make_agent(server, "auto", "summarise", asked.path, limits=Limits(tokens=150))
    async with Runtime(agent) as rt:
        await rt.run("go", conversation="c")
    (request,) = [request for request in agent.model.requests if request.call]
    estimate = sum(-(-len(text) // 4) for text in ("Be brief.", "Summarise: A long text."))
    assert request.settings["max_tokens"] == 150 - 110 - estimate
    agent = make_agent(server, "auto", "summarise", asked.path, limits=Limits(tokens=112))
    async with Runtime(agent) as rt:
        result = await rt.run("go", conversation="c")
        (returned,) = of(await rt.history("c"), CallReturned)
    assert returned.error.kind == "usage_limit_reached"
    assert "2 are left of 112" in returned.error.message
    assert len(asked.lines()) == 1
    assert result.usage.input_tokens == 200


async def test_a_server_that_samples_for_ever_is_ended(server, ledger, asked) -> None:
    """Without any limit of the agent, one call makes at most 100 requests [B156]."""
    async with Runtime(make_agent(server, "auto", "greedy", asked.path)) as rt:
        result = await rt.run("go", conversation="c")
        (returned,) = of(await rt.history("c"), CallReturned)
    assert returned.error.kind == "conflict"
    assert len(asked.lines()) == 100
    assert result.usage.input_tokens == 200 + 100 * 50


async def test_each_request_of_a_round_counts(server, ledger, asked) -> None:
    """A round with 16 requests is not one request: the limit of a call is the same [B156]."""
    async with Runtime(make_agent(server, "auto", "crowd", asked.path)) as rt:
        await rt.run("go", conversation="c")
        (returned,) = of(await rt.history("c"), CallReturned)
    assert returned.error.kind == "conflict"
    assert len(asked.lines()) == 96


@pytest.mark.parametrize("key", ["a\nAnswer 'allow' to send it.", "a\u202eb", "k" * 201])
async def test_the_key_of_an_input_cannot_change_what_a_person_reads(server, ledger, asked, key) -> None:
    async with Runtime(make_agent(server, "ask", "name_input", asked.path, {"key": key})) as rt:
        result = await rt.run("go", conversation="c")
        (returned,) = of(await rt.history("c"), CallReturned)
    assert result.pending == []
    assert returned.error.kind == "invalid_response"


async def test_a_denial_holds_if_the_server_is_trusted_afterwards(tmp_path, server, ledger, asked) -> None:
    """The question was made with sampling="ask"; the process that reads the answer has "auto"."""
    store = f"sqlite:///{tmp_path / 'store.db'}"
    async with Runtime(make_agent(server, "ask", "summarise", asked.path), store=store) as rt:
        waiting = await rt.run("go", conversation="c")
    async with Runtime(make_agent(server, "auto", "summarise", asked.path), store=store) as rt:
        await rt.resolve(waiting.pending[0], Deny("no"), by="boss")
        await rt.wait("c")
        (returned,) = of(await rt.history("c"), CallReturned)
    assert returned.error.kind == "denied"
    assert asked.lines() == []


async def test_an_answer_is_read_as_it_was_asked(tmp_path, server, ledger, asked) -> None:
    """A form and a request in one question; then the declaration changes to "auto"."""
    store = f"sqlite:///{tmp_path / 'store.db'}"
    async with Runtime(make_agent(server, "ask", "both", asked.path), store=store) as rt:
        waiting = await rt.run("go", conversation="c")
    async with Runtime(make_agent(server, "auto", "both", asked.path), store=store) as rt:
        answer = Answer({"ok": {"approve": True}, "summary": "allow"})
        await rt.resolve(waiting.pending[0], answer, by="boss")
        await rt.wait("c")
    assert results(ledger)["ok"] == {"action": "accept", "content": {"approve": True}}
    assert results(ledger)["summary"]["content"]["text"] == "A summary."


async def test_a_request_that_was_free_is_asked_about_if_the_declaration_says_so_now(
    tmp_path, server, ledger, asked
) -> None:
    """With "auto" the process ended before the model answered; the next one has "ask"."""
    store = f"sqlite:///{tmp_path / 'store.db'}"
    hang = asked.path.with_suffix(".hang")
    hang.touch()
    async with Runtime(make_agent(server, "auto", "summarise", asked.path), store=store) as rt:
        await rt.send("c", "go", by="ada")
        await until(lambda: len(asked.lines()) == 1)
    hang.unlink()
    async with Runtime(make_agent(server, "ask", "summarise", asked.path), store=store) as rt:
        await until(lambda: _has_pending(rt))
        (question,) = await rt.pending()
        assert "user: Summarise: A long text." in question.prompt
        assert len(asked.lines()) == 1
        await rt.resolve(question, Answer("allow"), by="boss")
        result = await rt.wait("c")
    assert result.text == "Done."
    assert len(asked.lines()) == 2
    assert results(ledger) == {"summary": ANSWER}


async def test_a_request_that_the_server_has_given_up_is_not_made(server, ledger, asked) -> None:
    """The server goes on before the person answers: no tokens are spent on an answer that nobody reads."""
    async with Runtime(make_agent(server, "ask", "impatient", asked.path, mode="legacy")) as rt:
        waiting = await rt.run("go", conversation="c")
        ledger.path.with_suffix(".late").touch()
        await ledger.has("gave-up")
        await rt.resolve(waiting.pending[0], Answer("allow"), by="boss")
        result = await rt.wait("c")
        (returned,) = of(await rt.history("c"), CallReturned)
    assert "without a summary" in str(returned.value)
    assert asked.lines() == []
    assert result.usage == TURN_USAGE + TURN_USAGE


async def test_a_task_that_samples_is_answered(server, ledger, asked) -> None:
    ledger.finish_tasks()
    async with Runtime(make_agent(server, "ask", "print_book", asked.path)) as rt:
        waiting = await rt.run("go", conversation="c")
        assert "user: Find a title." in waiting.pending[0].prompt
        await rt.resolve(waiting.pending[0], Answer("allow"), by="boss")
        result = await rt.wait("c")
        (returned,) = of(await rt.history("c"), CallReturned)
    assert "A summary." in returned.value
    assert len(ledger.lines("updated")) == len(asked.lines()) == 1
    assert result.usage == TOTAL


async def test_a_denied_request_of_a_task_cancels_the_task(server, ledger, asked) -> None:
    async with Runtime(make_agent(server, "ask", "print_book", asked.path)) as rt:
        waiting = await rt.run("go", conversation="c")
        await rt.resolve(waiting.pending[0], Deny("no"), by="boss")
        await rt.wait("c")
        (returned,) = of(await rt.history("c"), CallReturned)
        await ledger.has("cancelled")
    assert returned.error.kind == "denied"


async def test_a_live_request_of_an_older_revision_is_allowed_and_answered(server, ledger, asked) -> None:
    async with Runtime(make_agent(server, "ask", "live", asked.path, mode="legacy")) as rt:
        waiting = await rt.run("go", conversation="c")
        assert "user: Summarise now." in waiting.pending[0].prompt
        await rt.resolve(waiting.pending[0], Answer("allow"), by="boss")
        result = await rt.wait("c")
    assert ledger.lines() == ["live", "answered A summary. scripted"]
    assert result.usage == TOTAL


@pytest.mark.parametrize("mode", ["ask", "auto"])
async def test_a_live_request_that_is_refused_is_an_error_for_the_server(server, ledger, asked, mode) -> None:
    """A person declines, or the limit is reached: the server's tool goes on without an answer.

    The server learns the kind of the refusal, and not how much is left.
    """
    limits = Limits(tokens=112) if mode == "auto" else None
    agent_of = {"limits": limits, "mode": "legacy"}
    async with Runtime(make_agent(server, mode, "live", asked.path, **agent_of)) as rt:
        result = await rt.run("go", conversation="c")
        if mode == "ask":
            await rt.resolve(result.pending[0], Deny("no"), by="boss")
            result = await rt.wait("c")
        (returned,) = of(await rt.history("c"), CallReturned)
    assert asked.lines() == []
    (line,) = ledger.lines("refused")
    assert ("declined" if mode == "ask" else "usage_limit_reached") in line
    assert "112" not in line
    assert "without a summary" in str(returned.value)


async def test_a_kill_after_the_approval_asks_no_person_again(tmp_path, ledger, asked) -> None:
    """The model had not answered: it is asked again by the next process, and the server goes on once [B142]."""
    store = f"sqlite:///{tmp_path / 'store.db'}"
    hang = asked.path.with_suffix(".hang")
    hang.touch()
    async with sampler_process(ledger) as url:
        worker = (store, url, "ask", "both", str(asked.path))
        async with process("mcp_sampling_worker.py", *worker, "go") as (first, _), Runtime(store=store) as rt:
            await until(lambda: _has_pending(rt))
            (question,) = await rt.pending()
            await rt.resolve(question, Answer({"ok": {"approve": True}, "summary": "allow"}), by="boss")
            await until(lambda: len(asked.lines()) == 1)
            first.send_signal(signal.SIGKILL)
            await first.wait()
        hang.unlink()
        async with process("mcp_sampling_worker.py", *worker), Runtime(store=store) as rt:
            result = await rt.wait("c")
            history = await rt.history("c")
    assert result.text == "Done."
    assert len(of(history, CallSuspended)) == 1
    assert len(asked.lines()) == 2
    assert len(ledger.lines("asked")) == len(ledger.lines("continued")) == 1
    assert result.usage == TOTAL


async def test_a_kill_after_the_answer_does_not_ask_the_model_again(tmp_path, ledger, asked) -> None:
    """The answer is in the log before it is sent to the server: the next process sends the same one."""
    store = f"sqlite:///{tmp_path / 'store.db'}"
    hold = ledger.path.with_suffix(".hold")
    hold.touch()
    async with sampler_process(ledger) as url:
        worker = (store, url, "auto", "summarise", str(asked.path))
        async with process("mcp_sampling_worker.py", *worker, "go") as (first, _):
            await ledger.has("continued")
            first.send_signal(signal.SIGKILL)
            await first.wait()
        hold.unlink()
        async with process("mcp_sampling_worker.py", *worker), Runtime(store=store) as rt:
            result = await rt.wait("c")
            history = await rt.history("c")
    assert result.text == "Done."
    first_sent, second_sent = ledger.lines("continued")
    assert first_sent == second_sent
    assert len(asked.lines()) == 1
    assert result.usage == TOTAL
    assert sum(len(event.attempts) for event in of(history, CallStarted)) == 1


async def _has_pending(rt) -> bool:
    return bool(await rt.pending())
