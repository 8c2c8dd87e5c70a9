"""Faults around a model call: hooks that fail, ignored cancels, unknown usage, values that cannot be recorded."""

import asyncio

import pytest
from support.async_tests import until
from support.runtimes import agent, of, skip_time

from holdfast import Agent, Approve, Context, Deny, Limits, Runtime, ScriptedModel, ToolCall, tool
from holdfast.core.events import AssistantSaid, ErrorInfo, OutputRejected, TurnEnded, Usage
from holdfast.errors import DeclarationError, ModelError
from holdfast.hooks import ToolOutcome, after_model, after_tool, before_tool
from holdfast.models import FinishPart, TextPart
from holdfast.models.scripted import Hang
from holdfast.runtime.steps.retry import Retry
from holdfast.stores.memory import MemoryStore

SECRET = "the code is 4711"


@tool
async def echo(text: str) -> str:
    """Give the text back."""
    return text


async def run_turn(rt, text="hi"):
    return await (await rt.send("c", text)).final_result()


@pytest.mark.parametrize("fault", ["hook raises", "hook times out", "turn is cancelled", "turn is out of time"])
async def test_a_reply_that_an_after_model_hook_did_not_pass_is_not_logged(fault):
    """A hook that raises, exceeds its timeout or is cancelled fails closed [B64]."""

    @after_model(timeout=0.05 if fault == "hook times out" else 5)
    async def mask(reply):
        if fault == "hook raises":
            raise RuntimeError("the vault is down")
        await asyncio.sleep(60)

    limits = Limits(seconds=0.05) if fault == "turn is out of time" else None
    async with Runtime(agent([SECRET, "second"], hooks=[mask], limits=limits)) as rt:
        turn = await rt.send("c", "hi")
        if fault == "turn is cancelled":
            await until(lambda: rt._engine._active["c"].partial.streaming)
            await asyncio.sleep(0.01)
            await rt.cancel("c")
        assert (await turn.final_result()).reason in ("failed", "cancelled", "time_limit")
        assert SECRET not in str(await rt.history("c"))


async def test_a_model_stream_that_ignores_its_cancel_is_not_retried_and_does_not_disturb_the_next_turn():
    asked = []

    class IgnoresCancel:
        name = "ignores cancel"

        async def stream(self, request):
            asked.append(request.turn)
            if len(asked) == 1:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    await asyncio.sleep(0.05)
                raise ModelError("gone", kind="network")
            for word in ("one ", "two ", "three"):
                await asyncio.sleep(0.03)
                yield TextPart(word)
            yield FinishPart()

    async with Runtime(Agent("a", model=IgnoresCancel(), retry=Retry(first=0.001, most=0.001))) as rt:
        first = await rt.send("c", "one")
        await until(lambda: asked)
        await rt.cancel("c")
        assert (await first.final_result()).reason == "cancelled"
        assert (await run_turn(rt)).reason == "completed"
        assert asked == [1, 2]


async def test_a_call_whose_before_tool_hook_was_removed_from_the_code_needs_an_approval():
    """After a roll-back or half of a deploy an approver decides instead of the hook [B64]."""

    @before_tool
    async def guard(call, args):
        await asyncio.sleep(60)
        return Deny("no")

    store = MemoryStore()
    script = [[ToolCall("echo", {"text": "x"})], "done"]
    async with Runtime(agent(ScriptedModel(script, follow=True), echo, hooks=[guard]), store=store.sibling()) as rt:
        await rt.send("c", "hi")
        await until(lambda: rt._engine._active["c"].tasks.all())
    async with Runtime(agent(ScriptedModel(script, follow=True), echo), store=store.sibling()) as rt:
        (waiting,) = await until(rt.pending)
        assert waiting.kind == "approval"


PRICED = Usage(10, 10, cost=0.001)


@pytest.mark.parametrize(("limits", "reason"), [(Limits(cost=1), "cost_limit"), (Limits(tokens=9999), "token_limit")])
async def test_one_reply_without_usage_makes_the_total_unknown_and_the_limit_reached(limits, reason):
    replies = [[ToolCall("echo", {"text": "x"}), *more] for more in ([PRICED], [], [PRICED], [PRICED])]
    model = ScriptedModel([*replies, "never"])
    async with Runtime(agent(model, echo, limits=limits)) as rt:
        assert (await run_turn(rt)).reason == reason
        assert len(model.requests) == 2


@pytest.mark.parametrize("tokens", [1e6, 0.5])
def test_a_token_limit_that_is_not_a_whole_number_is_refused_at_declaration(tokens):
    limits = Limits(tokens=tokens)
    with pytest.raises(DeclarationError):
        Agent("a", model=None, limits=limits)


@pytest.mark.parametrize("fields", [("denied", "no", ["why"]), ("denied", 7), (None, "no")])
async def test_a_malformed_error_of_an_after_tool_hook_does_not_make_the_log_unreadable(fields):
    @after_tool
    async def malformed(call, outcome):
        return ToolOutcome(error=ErrorInfo(*fields))

    store = MemoryStore()
    script = [[ToolCall("echo", {"text": "x"})], "done"]
    async with Runtime(agent(script, echo, hooks=[malformed]), store=store.sibling()) as rt:
        assert (await run_turn(rt)).reason == "completed"
    async with Runtime(store=store.sibling()) as rt:
        assert (await rt.snapshot("c")).state == "idle"


async def test_a_model_error_whose_details_cannot_be_recorded_still_fails_the_turn():
    model = ScriptedModel([ModelError("odd", kind="invalid_response", details={"response": object()})])
    async with Runtime(agent(model)) as rt:
        end = await run_turn(rt)
        assert (end.reason, end.error.kind) == ("failed", "invalid_response")


async def test_the_log_has_exactly_the_attempts_that_were_made():
    failed = asyncio.Event()

    class RateLimited:
        name = "rate limited"

        async def stream(self, request):
            try:
                raise ModelError("later", kind="rate_limited", details={"retry_after": 30})
                yield
            finally:
                failed.set()

    async with Runtime(Agent("a", model=RateLimited(), limits=Limits(seconds=25))) as rt:
        turn = await rt.send("c", "hi")
        await failed.wait()
        skip_time(25)
        assert (await turn.final_result()).reason == "time_limit"
        assert [attempt.error.kind for attempt in of(await rt.history("c"), AssistantSaid)[0].attempts] == [
            "rate_limited"
        ]
    async with Runtime(agent([["a b c", Hang()]])) as rt:
        turn = await rt.send("c", "hi")
        await until(lambda: rt._engine._active["c"].partial.streaming)
        await rt.cancel("c")
        await turn.final_result()
        assert [attempt.model for attempt in of(await rt.history("c"), AssistantSaid)[0].attempts] == ["scripted"]


async def test_a_tool_that_runs_beside_a_pending_approval_counts_towards_the_time_limit():

    now = [1_000.0]
    done = asyncio.Event()

    @tool
    async def work() -> str:
        """Work for an hour."""
        await done.wait()
        now[0] += 3600
        return "done"

    @tool(approval="required")
    async def pay() -> str:
        """Pay."""
        return "paid"

    model = ScriptedModel([[ToolCall("work"), ToolCall("pay")], "never"])
    async with Runtime(agent(model, work, pay, limits=Limits(seconds=60)), clock=lambda: now[0]) as rt:
        turn = await rt.send("c", "hi")
        (waiting,) = await until(rt.pending)
        done.set()
        await turn.result()
        await rt.resolve("c", waiting.call, Approve())
        assert (await turn.final_result()).reason == "time_limit"


async def test_requests_whose_replies_were_rejected_or_cut_off_are_recorded_too():
    schema = {"type": "object", "required": ["n"]}
    model = ScriptedModel(["no JSON", '{"n": 1}', ["half", ModelError("gone", kind="network")]])
    async with Runtime(agent(model, record="full", output=schema)) as rt:
        await run_turn(rt)
        await run_turn(rt)
        events = await rt.history("c")
        kept = [event.context["request"] for event in (*of(events, OutputRejected), *of(events, AssistantSaid))]
        assert len(set(kept)) == 3
        assert [event.reason for event in of(events, TurnEnded)] == ["completed", "failed"]


def test_an_agent_is_saved_with_its_context():
    context = Context(window=3, budget=500, summary="openai:small")
    assert Agent.from_json(Agent("a", model="openai:m", context=context).to_json()).context == context
