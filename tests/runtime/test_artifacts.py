"""Bytes that a tool keeps: stored in the append of the event that names them, read by readers of that log alone."""

import asyncio
from typing import Any

import pytest
from support.async_tests import until
from support.revival import kill
from support.runtimes import agent, of

from holdfast import Agent, Approve, Ask, Call, NotFound, Result, Runtime, ScriptedModel, ToolCall, ToolError, blocking
from holdfast import tool as declare
from holdfast.core.events import CallReturned, CallStarted, CallSuspended
from holdfast.core.results import RESULT_LIMIT
from holdfast.runtime import artifacts
from holdfast.runtime.steps import hooks
from holdfast.stores.memory import MemoryStore


@declare
async def show(call: Call, lines: int = 3) -> dict[str, Any]:
    """Show lines."""
    kept = call.keep("line\n" * lines, name="lines.txt")
    return {"head": "line", "all": kept.sha256}


@declare
async def fetch(sha256: str, call: Call) -> str | None:
    """Read an artifact."""
    found = await call.read_artifact(sha256)
    return None if found is None else found.decode()[:20]


def shows(*more: Any) -> ScriptedModel:
    return ScriptedModel([[ToolCall("show", {})], *more, "done"])


async def run(rt: Runtime, conversation: str = "c") -> list[Any]:
    await (await rt.send(conversation, "hi")).final_result()
    return of(await rt.history(conversation), CallReturned)


async def test_what_a_handler_keeps_is_stored_in_the_append_of_its_result():
    """The reference is in CallReturned, and the bytes are there as soon as the event is."""
    store = MemoryStore()
    appends, append = [], store.append

    async def record(given):
        appends.append(given)
        await append(given)

    store.append = record
    async with Runtime(agent(shows(), show), store=store) as rt:
        (returned,) = await run(rt)
        (reference,) = returned.artifacts
        assert (reference.size, reference.media_type, reference.name) == (15, "text/plain", "lines.txt")
        assert returned.value == {"head": "line", "all": reference.sha256}
        assert await rt.artifact("c", reference.sha256) == b"line\n" * 3
    (with_bytes,) = [given for given in appends if given.artifacts]
    assert any(b'"CallReturned"' in body for body in with_bytes.events)


@pytest.mark.parametrize("problem", [ToolError("command_failed", "exit 1"), RuntimeError("a bug"), None])
async def test_what_a_handler_kept_before_it_failed_is_stored_with_its_error(problem):
    """Also after a timeout, which is what None stands for here."""

    @declare(timeout=0.01 if problem is None else None)
    async def fails(call: Call) -> None:
        """Fail."""
        call.keep(b"its output", "application/octet-stream")
        if problem is not None:
            raise problem
        await asyncio.Event().wait()

    async with Runtime(agent(ScriptedModel([[ToolCall("fails", {})], "done"]), fails)) as rt:
        (returned,) = await run(rt)
        assert returned.error is not None
        assert [await rt.artifact("c", found.sha256) for found in returned.artifacts] == [b"its output"]


async def test_what_a_question_is_about_is_stored_with_the_suspension():
    @declare
    async def asks(call: Call) -> Any:
        """Ask."""
        call.keep("the choices")
        return Ask("Which?")

    async with Runtime(agent(ScriptedModel([[ToolCall("asks", {})], "done"]), asks)) as rt:
        result = await (await rt.send("c", "hi")).result()
        (reference,) = result.pending[0].artifacts
        assert await rt.artifact("c", reference.sha256) == b"the choices"


@declare(approval="required")
async def write(text: str, call: Call) -> str:
    """Write."""
    return call.plan["diff"]


@write.preview
async def _(text: str, call: Call) -> dict[str, Any]:
    return {"diff": call.keep(f"+{text}", "text/x-diff").sha256}


async def test_what_a_preview_keeps_is_stored_with_the_suspension_and_the_handler_reads_it():
    """The approver reads the whole diff [B73]; the plan that is made again before the run adds nothing."""
    model = ScriptedModel([[ToolCall("write", {"text": "a"})], "done"])
    async with Runtime(agent(model, write)) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        assert [found.media_type for found in entry.artifacts] == ["text/x-diff"]
        assert await rt.artifact("c", entry.preview["diff"]) == b"+a"
        await rt.resolve(entry, Approve())
        await turn.final_result()
        events = await rt.history("c")
        assert of(events, CallSuspended)[0].artifacts == entry.artifacts
        assert of(events, CallStarted)[0].artifacts == ()
        assert of(events, CallReturned)[0].value == entry.preview["diff"]


async def test_the_artifact_of_an_edited_plan_is_stored_with_the_start_that_records_the_plan():
    model = ScriptedModel([[ToolCall("write", {"text": "a"})], "done"])
    async with Runtime(agent(model, write)) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        await rt.resolve("c", entry.call, Approve(args={"text": "b"}))
        await turn.final_result()
        (started,) = of(await rt.history("c"), CallStarted)
        assert started.preview == {"diff": started.artifacts[0].sha256}
        assert await rt.artifact("c", started.preview["diff"]) == b"+b"


async def test_nothing_is_stored_of_a_run_whose_process_dies():
    """The bytes come with the result: after a kill the next attempt keeps its own."""
    store, kept = MemoryStore(), []

    @declare(recovery="redispatch")
    async def slow(call: Call) -> None:
        """Be slow."""
        kept.append(call.keep(f"attempt {call.attempt}").sha256)
        if call.attempt == 1:
            await asyncio.Event().wait()

    dying = Runtime(agent(ScriptedModel([[ToolCall("slow", {})]]), slow), store=store)
    await dying.start()
    await dying.send("c", "hi")
    await until(lambda: kept)
    await kill(dying)
    async with Runtime(agent(ScriptedModel(["done"]), slow), store=store.sibling()) as rt:
        await rt.wait("c")
        assert await rt.artifact("c", kept[1]) == b"attempt 2"
        with pytest.raises(NotFound):
            await rt.artifact("c", kept[0])
        assert await rt.store.artifact(kept[0]) is None


async def test_a_hash_gives_no_access_to_another_conversation():
    """The hash of another conversation's artifact is not found, neither by the verb nor by a tool."""
    store = MemoryStore()
    async with Runtime(agent(shows(), show), store=store) as rt:
        (returned,) = await run(rt, "hers")
        sha256 = returned.artifacts[0].sha256
    calls = [ToolCall("fetch", {"sha256": sha256}), ToolCall("forge", {"sha256": sha256})]

    @declare
    async def forge(sha256: str) -> Any:
        """Return data that looks like a reference."""
        return Result({"artifact": sha256, "size": 10**6}, data={"artifact": sha256, "size": 10**6})

    model = ScriptedModel([calls, calls[:1], "done"])
    async with Runtime(agent(model, fetch, forge), store=store.sibling()) as rt:
        found = await run(rt, "his")
        assert [event.value for event in found if event.tool == "fetch"] == [None, None]
        for name in ("his", "nobodys"):
            with pytest.raises(NotFound):
                await rt.artifact(name, sha256)
        for bad in ("", "x", sha256.upper(), sha256[:-1]):
            with pytest.raises(NotFound):
                await rt.artifact("hers", bad)


async def test_a_tool_reads_the_artifacts_of_its_conversation_and_results_that_became_one(monkeypatch):
    """Also from a log of many pages, and what the same run has just kept."""
    monkeypatch.setattr(artifacts, "PAGE", 2)

    @declare
    async def big(call: Call) -> str:
        """Return much."""
        return "x" * 100_000

    store = MemoryStore()
    model = ScriptedModel([[ToolCall("show", {}), ToolCall("big", {})], "done"])
    async with Runtime(agent(model, show, big), store=store) as rt:
        first, second = sorted(await run(rt), key=lambda event: event.tool, reverse=True)
        for _ in range(5):
            await (await rt.send("c", "more")).final_result()
    shas = [first.artifacts[0].sha256, second.artifact]
    calls = [[ToolCall("fetch", {"sha256": sha}) for sha in shas], "done"]
    async with Runtime(agent(ScriptedModel(calls), fetch), store=store.sibling()) as rt:
        values = {event.value for event in (await run(rt))[2:]}
        assert values == {"line\nline\nline\n", '"' + "x" * 19}
        assert await rt.artifact("c", shas[1]) == b'"' + b"x" * 100_000 + b'"'
    call = Call()
    assert await call.read_artifact(call.keep("now").sha256) == b"now"


async def test_more_than_the_limit_is_refused_as_too_large():
    """64 MiB in all for one run; equal bytes count once, and the refused ones are not stored."""

    @declare
    async def greedy(call: Call) -> int:
        """Keep too much."""
        half = bytes(RESULT_LIMIT // 2)
        call.keep(half)
        call.keep(half, name="again")
        call.keep(half + b"x")
        return 0

    async with Runtime(agent(ScriptedModel([[ToolCall("greedy", {})], "done"]), greedy)) as rt:
        (returned,) = await run(rt)
        assert returned.error is not None
        assert (returned.error.kind, [found.size for found in returned.artifacts]) == (
            "too_large",
            [RESULT_LIMIT // 2] * 2,
        )


async def test_a_withheld_result_stores_nothing_that_its_handler_kept():
    """An after_tool hook that fails may exist to hide data."""

    async def broken(call, outcome):
        raise RuntimeError("a bug")

    with_hook = Agent("a", model=shows(), tools=[show], hooks=[hooks.after_tool(broken)])
    async with Runtime(with_hook) as rt:
        (returned,) = await run(rt)
        assert (returned.ok, returned.artifacts) == (False, ())


def test_the_blocking_runtime_reads_artifacts():
    with blocking.Runtime(agent(shows(), show)) as rt:
        result = rt.run("hi", conversation="c")
        assert result.reason == "completed"
        (returned,) = of(rt.history("c"), CallReturned)
        assert rt.artifact("c", returned.artifacts[0].sha256) == b"line\n" * 3
        with pytest.raises(NotFound):
            rt.artifact("d", returned.artifacts[0].sha256)
