"""Hooks around model calls in real turns: what the model is sent, what viewers see and what is logged."""

import asyncio

from msgspec.structs import replace
from support.runtimes import Tape, agent, of

from holdfast import Halt, Runtime, ScriptedModel, ToolCall, tool
from holdfast.core.events import AssistantSaid, OutputRejected, TurnEnded, Verdict
from holdfast.hooks import Reject, after_model, before_model, on_stream, redact

SECRET = "sk-9f8e7d6c5b4a"


async def test_text_that_a_hook_injects_is_in_one_request_only_and_not_in_the_log():
    """The log has the verdict of the hook, but not its text [B64]."""

    @tool
    async def look() -> str:
        """Look."""
        return "seen"

    @before_model
    async def step(request):
        return f"This is step {request.step}."

    model = ScriptedModel([[ToolCall("look")], "done"])
    async with Runtime(agent(model, look, hooks=[step])) as rt:
        await (await rt.send("c", "go")).final_result()
        log = await rt.history("c")
    assert [request.injected for request in model.requests] == [("This is step 1.",), ("This is step 2.",)]
    assert [said.verdicts for said in of(log, AssistantSaid)] == [(Verdict("step", "injected"),)] * 2
    assert "This is step" not in str(log)


async def test_a_hook_can_change_a_request_without_changing_the_transcript():
    @before_model
    async def short(request):
        return replace(request, messages=tuple(request.messages)[-1:], instructions="Be brief.")

    model = ScriptedModel(["one", "two"])
    async with Runtime(agent(model, hooks=[short])) as rt:
        for text in ("first", "second"):
            await (await rt.send("c", text)).final_result()
        assert [message.text for message in (await rt.snapshot("c")).messages] == ["first", "one", "second", "two"]
    assert [message.text for message in model.requests[1].messages] == ["second"]
    assert model.requests[1].instructions == "Be brief."


async def test_a_hook_can_halt_the_turn_before_the_model_is_called():
    """A ``before_model`` hook that returns ``Halt`` ends the turn without a request [B64]."""

    @before_model
    def closed(request):
        return Halt("closed", {"until": "9:00"})

    model = ScriptedModel(["never"])
    async with Runtime(agent(model, hooks=[closed])) as rt:
        end = await (await rt.send("c", "go")).final_result()
        assert (end.reason, end.value, end.halted) == ("closed", {"until": "9:00"}, True)
        [ended] = of(await rt.history("c"), TurnEnded)
        assert ended.verdicts == (Verdict("closed", "halted", "closed"),)
        assert of(await rt.history("c"), AssistantSaid) == []
    assert model.requests == []


async def test_a_hook_that_raises_fails_the_turn_and_is_named_in_the_error():
    """The next turn of the conversation works [B64]."""

    @before_model
    async def flaky(request):
        if request.turn == 1:
            raise RuntimeError("no weather")

    async with Runtime(agent(["fine"], hooks=[flaky])) as rt:
        end = await (await rt.send("c", "go")).final_result()
        assert (end.reason, end.error.kind) == ("failed", "handler_failed")
        assert end.error.message == "hook 'flaky' raised RuntimeError: no weather"
        assert (await (await rt.send("c", "again")).final_result()).reason == "completed"


async def test_a_skipped_parallel_hook_is_named_in_the_log():
    """A parallel hook that exceeds its timeout is skipped, and the log says so [B64]."""

    @before_model(parallel=True, timeout=0.02)
    async def slow(request):
        await asyncio.sleep(60)

    async with Runtime(agent(["fine"], hooks=[slow])) as rt:
        assert (await (await rt.send("c", "go")).final_result()).reason == "completed"
        (said,) = of(await rt.history("c"), AssistantSaid)
    assert said.verdicts == (Verdict("slow", "skipped", "hook 'slow' took longer than 0.02 s"),)


async def test_a_reply_that_a_hook_rejects_is_requested_again_with_the_reason_at_most_twice():
    @after_model
    async def prices(reply):
        return Reject("do not state prices") if "$" in reply.text else None

    model = ScriptedModel(["It is $5.", "It is cheap.", "$1", "$2", "$3"])
    async with Runtime(agent(model, hooks=[prices])) as rt:
        assert (await (await rt.send("c", "how much?")).final_result()).reason == "completed"
        log = await rt.history("c")
        (rejected,) = of(log, OutputRejected)
        assert (rejected.text, rejected.verdicts) == (
            "It is $5.",
            (Verdict("prices", "rejected", "do not state prices"),),
        )
        assert "do not state prices" in str(model.requests[1].messages)
        assert [said.text for said in of(log, AssistantSaid)] == ["It is cheap."]
        end = await (await rt.send("c", "and now?")).final_result()
        assert (end.reason, len(model.requests)) == ("failed", 5)
        assert "prices rejected this reply" in end.error.message


async def test_an_after_model_hook_that_halts_ends_the_turn_and_runs_none_of_the_calls():
    ran = []

    @tool
    async def wipe() -> str:
        """Wipe it."""
        ran.append(1)
        return "wiped"

    @after_model
    async def guard(reply):
        return Halt("handed_over", "a person looks at it") if any(c.tool == "wipe" for c in reply.calls) else None

    async with Runtime(agent([["On it.", ToolCall("wipe")]], wipe, hooks=[guard])) as rt:
        end = await (await rt.send("c", "go")).final_result()
        assert (end.reason, end.value, ran) == ("handed_over", "a person looks at it", [])
        (said,) = of(await rt.history("c"), AssistantSaid)
        assert (said.text, said.calls, said.partial) == ("On it.", (), True)


async def test_redacted_text_reaches_neither_viewers_nor_the_log():
    def reply(request):
        return f"The key is {SECRET}, keep it."

    async with Runtime(agent([reply], hooks=[redact("sk-[0-9a-f]+")])) as rt:
        await rt.open("c")
        async with Tape(rt, "c") as tape:
            await (await rt.send("c", "go")).final_result()
            await tape.until_type("TurnEnded")
        assert (
            "".join(item.text for item in tape.live if item.type == "text_delta") == "The key is [redacted], keep it."
        )
        assert SECRET not in str(tape.items)
        assert "sk-" not in str(await rt.snapshot("c"))


async def test_a_stream_hook_that_raises_fails_the_turn_and_the_text_is_not_logged():
    @on_stream
    class Broken:
        def feed(self, text):
            raise ValueError("lost")

        def end(self):
            return ""

    async with Runtime(agent([SECRET], hooks=[Broken])) as rt:
        end = await (await rt.send("c", "go")).final_result()
        assert (end.reason, end.error.message) == ("failed", "hook 'Broken' raised ValueError: lost")
        assert SECRET not in str(await rt.history("c"))
