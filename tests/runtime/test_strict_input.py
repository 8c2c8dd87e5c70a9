"""Strict input: NUL characters from callers are refused, from models and tools they are stored; repeated keys."""

import dataclasses

import pytest
from support.runtimes import agent, of, sees

from holdfast import Answer, Approve, Deny, Invalid, Principal, Runtime, ScriptedModel, Submit, ToolCall
from holdfast import tool as declare
from holdfast.core.events import CallReturned, OutputRejected


@declare(approval="required")
async def echo(text: str) -> str:
    """Give the text back."""
    return text


@declare(executor="human")
def choose() -> str:
    """Let the person choose."""
    raise NotImplementedError


@declare(manual=True)
def by_hand() -> str:
    """Do it by hand."""
    raise NotImplementedError


async def test_a_nul_character_in_the_input_of_a_caller_is_refused():
    model = ScriptedModel([[ToolCall("echo", {"text": "x"}), ToolCall("choose")]])
    async with Runtime(agent(model, echo, choose)) as rt:
        with pytest.raises(Invalid, match=r"metadata: a NUL character at tags\[1\]; remove it"):
            await rt.open("d", metadata={"tags": ["x", "a\0b"]})
        turn = await rt.send("c", "hi")
        approval, question = sorted((await turn.result()).pending, key=lambda entry: entry.tool != "echo")
        for call, decision in (
            (approval.call, Approve(args={"text": "a\0"})),
            (approval.call, Deny("no\0")),
            (question.call, Answer("a\0b")),
        ):
            with pytest.raises(Invalid, match="a NUL character"):
                await rt.resolve("c", call, decision)
        for by in ("bob\0", Principal("bob", claims={"a\0": 1})):
            with pytest.raises(Invalid, match="by: a NUL character"):
                await rt.resolve("c", question.call, Answer("a"), by=by)
        with pytest.raises(Invalid, match="reason: a NUL character"):
            await rt.cancel("c", reason="\0")
        await rt.resolve("c", question.call, Answer(r"no NUL, but \u0000 written out"))
        assert (await rt.snapshot("c")).pending[0].call == approval.call


async def test_a_nul_character_from_a_model_or_a_tool_is_stored():
    model = ScriptedModel([[ToolCall("echo", {"text": "a\0b"}), ToolCall("by_hand")], "d\0one"])
    async with Runtime(agent(model, echo, by_hand)) as rt:
        turn = await rt.send("c", "hi")
        for entry in (await turn.result()).pending:
            await rt.resolve("c", entry.call, Approve() if entry.tool == "echo" else Submit("by\0hand"))
        await turn.final_result()
        assert {event.value for event in of(await rt.history("c"), CallReturned)} == {"a\0b", "by\0hand"}


async def test_arguments_with_a_repeated_key_are_invalid():
    """It would be a guess which of the two values to run [B17]."""
    model = ScriptedModel([[ToolCall("echo", '{"text": "a", "text": "b"}')], "done"])
    async with Runtime(agent(model, echo)) as rt:
        await (await rt.send("c", "hi")).final_result()
    (seen,) = sees(model)
    assert seen["error"]["kind"] == "invalid_args"
    assert 'the key "text" appears twice in one object' in seen["error"]["message"]


@dataclasses.dataclass
class Total:
    amount: int


async def test_a_structured_answer_with_a_repeated_key_is_sent_back_for_repair():
    """The rejection says that a key appears twice [B24]."""
    model = ScriptedModel(['{"amount": 1, "amount": 2}', '{"amount": 2}'])
    async with Runtime(agent(model, output=Total)) as rt:
        ended = await (await rt.send("c", "hi")).final_result()
        (rejected,) = of(await rt.history("c"), OutputRejected)
    assert "appears twice" in rejected.message
    assert ended.value == {"amount": 2}
