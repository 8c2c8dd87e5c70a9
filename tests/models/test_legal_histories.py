"""Any log gives a request that the provider accepts: every provider, every kind of reply."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.model_agents import say, weather
from support.model_requests import ask, assistant, offer, request, result, use, user
from support.strict_google import check_google
from support.strict_responses import check_responses
from support.strict_rules import Refused
from support.strict_server import StrictServer, check_anthropic, check_openai

from holdfast import Agent, Runtime
from holdfast.models import Thinking, ToolCall
from holdfast.models.providers import ProviderModel

SIDES = ("anthropic", "openai", "responses", "google", "groq", "deepseek")
EVERY_SIDE = pytest.mark.parametrize("side", SIDES)
PROVIDERS = {
    "anthropic": "anthropic",
    "responses": "openai",
    "google": "google",
    "groq": "groq",
    "deepseek": "deepseek",
}
LOOK_TOOL = (offer("look"),)


def model(server, side, **options):
    return ProviderModel(getattr(server, side), key="k", **options)


# --- replies without visible text ---


@EVERY_SIDE
@pytest.mark.parametrize(
    "pieces", [[Thinking("hm")], [Thinking("hm"), " \n"]], ids=["reasoning", "reasoning and blanks"]
)
async def test_a_conversation_continues_after_a_reply_with_reasoning_and_no_text(side, pieces):
    """A turn that ended without visible text does not make the provider refuse every later turn."""

    with StrictServer(
        [pieces, "Here I am.", [Thinking("hm"), ToolCall("weather", {"city": "Rome"})], "Sunny."]
    ) as server:
        async with Runtime(Agent("a", model=model(server, side), tools=[weather])) as rt:
            assert (await say(rt, "hello")).reason == "completed"
            assert (await say(rt, "are you there?")).reason == "completed"
            assert (await say(rt, "and in Rome?")).reason == "completed"
    assert server.refused == []
    assert len(server.requests) == 4
    assert "are you there?" in server.requests[1].text


# --- reasoning is sent back if it is allowed ---


@pytest.mark.parametrize("side", ["anthropic", "responses", "google"])
async def test_signed_reasoning_is_sent_back_with_the_calls_that_followed_it(side):
    """Signed or encrypted reasoning is sent back while the parts that followed it are unchanged."""
    with StrictServer([[Thinking("hm"), "I look.", ToolCall("look")], "ok"]) as server:
        reply = (await ask(model(server, side), tools=LOOK_TOOL)).message(model(server, side).provider)
        await ask(model(server, side), "hello", reply, result(reply.calls[0]), tools=LOOK_TOOL)
    assert server.refused == []
    sealed = {"anthropic": "c2lnbmVk", "responses": "sealed", "google": "thoughtSignature"}[side]
    assert sealed in server.requests[1].text


async def test_reasoning_is_left_out_if_the_text_after_it_was_changed():
    """OpenAI refuses reasoning without the item that followed it. The call after the text is kept, without an id."""
    with StrictServer([[Thinking("hm"), "I look.", ToolCall("look")], "ok"]) as server:
        reply = (await ask(model(server, "responses"), tools=LOOK_TOOL)).message("openai")
        changed = msgspec.structs.replace(reply, text="Let me look it up for you.")
        await ask(model(server, "responses"), "hello", changed, result(changed.calls[0]), tools=LOOK_TOOL)
    assert server.refused == []
    messages = server.requests[1].body["input"]
    assert [item.get("type", item.get("role")) for item in messages] == [
        "user",
        "assistant",
        "function_call",
        "function_call_output",
    ]
    assert messages[1]["content"] == "Let me look it up for you."
    assert "id" not in messages[2]


@pytest.mark.parametrize(
    "asked", [{"thinking": True}, {"anthropic_thinking": {"type": "enabled", "budget_tokens": 2000}}]
)
async def test_thinking_is_not_requested_in_a_turn_whose_calls_have_no_signed_thought(asked):
    """With extended thinking, Anthropic refuses calls of another provider until their turn is over."""
    call = use("look", "id-1")
    begun = [user("look"), assistant("", call), result(call)]
    with StrictServer(["fine", "fine"]) as server:
        claude = model(server, "anthropic", settings={**asked, "max_tokens": 4000})
        await ask(claude, *begun, tools=LOOK_TOOL)
        await ask(claude, *begun, assistant("done"), user("thanks"), tools=LOOK_TOOL)
    assert server.refused == []
    assert [(incoming.body.get("thinking") or {}).get("type") for incoming in server.requests] == [None, "enabled"]


# --- handwritten histories, which the strict servers do not produce ---


def part(kind, **data):
    return {"kind": kind, "data": data}


def hosted_call(id, tool="web_search", args=None):
    return part("hosted_call", id=id, item=id, tool=tool, args={"query": "x"} if args is None else args)


A = use("look", "id-1")
OWN_REPLIES = {
    "anthropic ends in a thought": (
        "anthropic",
        assistant("found", thinking="hm", parts=[part("text", n=5), part("thinking", n=2, signature="s")]),
    ),
    "anthropic ends in a sealed thought": (
        "anthropic",
        assistant("found", parts=[part("text", n=5), part("thinking", n=0, signature="s", id="redacted_thinking")]),
    ),
    "anthropic thought before a hosted call that has no result": (
        "anthropic",
        assistant(thinking="hm", parts=[part("thinking", n=2, signature="s"), hosted_call("srvtoolu_1")]),
    ),
    "anthropic blank text that has details": (
        "anthropic",
        assistant("  ", parts=[part("text", n=2, details={"citations": []}), part("text", n=0, details={"x": 1})]),
    ),
    "openai reasoning and nothing else": (
        "responses",
        assistant(thinking="hm", parts=[part("thinking", n=2, id="rs_7", signature="sealed")]),
    ),
    "openai reasoning and empty text in a phase": (
        "responses",
        assistant(
            thinking="hm",
            parts=[
                part("thinking", n=2, id="rs_7", signature="sealed"),
                part("text", n=0, id="msg_7_1", details={"phase": "final_answer"}),
            ],
        ),
    ),
    "openai reasoning, blank text, more reasoning and a call": (
        "responses",
        assistant(
            " ",
            A,
            thinking="hmhm",
            parts=[
                part("thinking", n=2, id="rs_7", signature="sealed"),
                part("text", n=1, id="msg_7_1"),
                part("thinking", n=2, id="rs_8", signature="sealed"),
                part("call", i=0, id="fc_8_1"),
            ],
        ),
    ),
    "openai text, and reasoning that nothing follows": (
        "responses",
        assistant(
            "found",
            thinking="hmhm",
            parts=[
                part("thinking", n=2, id="rs_7", signature="sealed"),
                part("text", n=5, id="msg_7_1"),
                part("thinking", n=2, id="rs_8", signature="sealed"),
            ],
        ),
    ),
    "openai reasoning before a hosted call and blank text": (
        "responses",
        assistant(
            thinking="hm",
            parts=[
                part("thinking", n=2, id="rs_7", signature="sealed"),
                hosted_call("ws_7_1"),
                part("hosted_result", id="ws_7_1", tool="web_search", content={"status": "completed"}),
                part("text", n=0, id="msg_7_2"),
            ],
        ),
    ),
    "openai reasoning before a hosted call that cannot be sent": (
        "responses",
        assistant(
            "found",
            thinking="hm",
            parts=[
                part("thinking", n=2, id="rs_7", signature="sealed"),
                hosted_call("ws_7_1", args={}),
                part("text", n=5, id="msg_7_2"),
            ],
        ),
    ),
    "openai reasoning before an answer that had another form": (
        "responses",
        assistant(
            "[1]", thinking="hm", parts=[part("thinking", n=2, id="rs_7", signature="sealed"), part("text", n=3)]
        ),
    ),
    "google thoughts and a signature": (
        "google",
        assistant(
            thinking="hm",
            parts=[part("thinking", n=2), part("text", n=0, details={"thought_signature": "dGhvdWdodA=="})],
        ),
    ),
    "google thoughts before a hosted call that is not sent": (
        "google",
        assistant(thinking="hm", parts=[part("thinking", n=2), hosted_call("g", tool="url_context")]),
    ),
    "groq hosted calls and nothing else": ("groq", assistant(parts=[hosted_call("g")])),
    "deepseek reasoning and nothing else": (
        "deepseek",
        assistant(thinking="hm", parts=[part("thinking", n=2, id="reasoning_content")]),
    ),
}


@pytest.mark.parametrize("name", OWN_REPLIES)
@pytest.mark.parametrize("last", [True, False], ids=["last", "earlier"])
async def test_a_providers_own_reply_is_sent_back_in_a_form_that_it_accepts(name, last):
    """A provider refuses some of its own replies if they are sent back: these are repaired or left out."""
    side, reply = OWN_REPLIES[name]

    reply_ = msgspec.structs.replace(reply, provider=PROVIDERS[side])
    after = [] if last else [assistant("so"), user("on")]
    with StrictServer(["fine"]) as server:
        messages = [user("a"), reply_, *map(result, reply_.calls), user("b"), *after]
        assert (await ask(model(server, side), *messages, tools=LOOK_TOOL)).text == "fine"
    assert server.refused == []


@EVERY_SIDE
async def test_a_history_with_two_replies_in_a_row_is_accepted(side):
    """Google accepts a call only after a user turn. Other providers merge two replies in a row into one."""
    messages = [user("a"), assistant("half", partial=True), assistant("", A), result(A)]
    with StrictServer(["fine"]) as server:
        assert (await ask(model(server, side), *messages, tools=LOOK_TOOL)).text == "fine"
    assert server.refused == []


# --- generated conversations, which change providers ---


@dataclass(frozen=True)
class Step:
    """A reply, and how the log changed it."""

    side: str
    pieces: tuple[Any, ...]
    fate: str
    answered: int
    """How many of its calls have a result in the log."""
    user: str | None


FATES = ("kept", "kept", "kept", "changed", "emptied", "same length", "partial", "without parts", "cut parts")
_ids = itertools.count(1)
ID_FORMS = ("call_{}", "functions.look:{}", "x" * 60 + "{}", "a|{}", "ünï {}")

pieces = st.lists(
    st.one_of(
        st.sampled_from([Thinking("hm"), Thinking("Let me see.\n"), "Fine.", " \n", "Good — ça va 🙂. "]),
        st.builds(
            lambda form, name, n: ("call", form, name, n),
            st.sampled_from(ID_FORMS),
            st.sampled_from(["look", "look", "no such tool", ""]),
            st.integers(0, 3),
        ),
    ),
    max_size=4,
).map(tuple)
steps = st.lists(
    st.builds(
        Step,
        side=st.sampled_from(SIDES),
        pieces=pieces,
        fate=st.sampled_from(FATES),
        answered=st.integers(0, 3),
        user=st.sampled_from(["go on", "go on", "", None]),
    ),
    min_size=1,
    max_size=5,
)


def apply_fate(reply, fate):
    """Return the reply as the log holds it after this change."""
    replace = msgspec.structs.replace
    match fate:
        case "changed":
            return replace(reply, text="Something else, by a hook.")
        case "emptied":
            return replace(reply, text="")
        case "same length":
            return replace(reply, text="x" * len(reply.text))
        case "partial":
            return replace(reply, text=f"{reply.text}\n[cut off]", calls=(), partial=True, parts=None)
        case "without parts":
            return replace(reply, parts=None)
        case "cut parts":
            return replace(reply, parts=(reply.parts or [])[:-1] or None)
        case _:
            return reply


class World:
    """One server and one model for each provider, shared by all examples: they keep no state."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.reply: list[Any] = []
        self.server = StrictServer([lambda _: self.reply] * 100_000)
        self.server.start()
        extended = {"thinking": True}
        self.models = {
            side: model(self.server, side, settings=extended if side == "anthropic" else None) for side in SIDES
        }

    def close(self):
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        self.server.stop()

    def talk(self, conversation):
        async def main():
            async with asyncio.timeout(60):  # only ends a test that hangs
                await self._talk(conversation)

        self.loop.run_until_complete(main())

    async def _talk(self, conversation):
        log = [user("hello")]
        for step in conversation:
            self.reply = [
                ToolCall(piece[2], {"n": piece[3]}, id=piece[1].format(next(_ids)))
                if isinstance(piece, tuple)
                else piece
                for piece in step.pieces
            ]
            one = self.models[step.side]
            reply = apply_fate((await ask(one, *log, tools=LOOK_TOOL)).message(one.provider), step.fate)
            log += [reply, *map(result, reply.calls[: step.answered])]
            if step.user is not None:
                log.append(user(step.user))
        self.reply = ["The end."]
        for one in self.models.values():
            await ask(one, *log, tools=LOOK_TOOL)
            await ask(one, request(*log, tools=LOOK_TOOL, injected=("by the way",)))


@pytest.fixture(scope="module")
def world():
    one = World()
    yield one
    one.close()


def step(side, *pieces, fate="kept", user: str | None = "go on"):
    return Step(side=side, pieces=pieces, fate=fate, answered=3, user=user)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(conversation=steps)
@example([step("responses", Thinking("hm"))])
@example([step("anthropic", Thinking("hm"), " ")])
@example([step("google", Thinking("hm"), fate="kept")])
@example([step("responses", Thinking("hm"), "Fine.", ("call", ID_FORMS[0], "look", 1), fate="changed", user=None)])
@example([step("responses", ("call", ID_FORMS[3], "look", 1), ("call", ID_FORMS[3], "look", 2), user=None)])
def test_every_provider_accepts_every_generated_conversation(world, conversation):
    """No provider refuses a request, whichever provider wrote the replies and however the log changed them."""
    world.server.refused.clear()
    world.server.requests.clear()
    world.talk(conversation)
    assert world.server.refused == []


# --- the strict servers refuse what the real ones refuse ---

CALL = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "s"}


@pytest.mark.parametrize(
    ("replies", "message"),
    [
        ([[THOUGHT]], "final block"),
        ([[{"type": "text", "text": "hi"}, THOUGHT]], "final block"),
        ([[{"type": "text", "text": "hi"}, {"type": "redacted_thinking", "data": "x"}]], "final block"),
        ([[CALL]], "must start with a thinking block"),
    ],
)
def test_the_strict_anthropic_refuses_thoughts_that_are_out_of_place(replies, message):
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    for content in replies:
        messages.append({"role": "assistant", "content": content})
        answer = [{"type": "tool_result", "tool_use_id": "t", "content": "1"}] if CALL in content else "and?"
        messages.append({"role": "user", "content": answer})
    body = {"max_tokens": 1, "messages": messages, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    with pytest.raises(Refused, match=message):
        check_anthropic(body)


def reasoning(n):
    return {"type": "reasoning", "id": f"rs_{n}", "summary": []}


def message_item(id=None, text="hi"):
    return {"type": "message", "role": "assistant", "content": text} | ({"id": id} if id else {})


def call_item(id=None):
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    return call | ({"id": id} if id else {})


OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "1"}
QUESTION = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([reasoning(1)], "required following item"),
        ([reasoning(1), QUESTION], "required following item"),
        ([reasoning(1), message_item()], "required following item"),
        ([reasoning(1), reasoning(2), message_item("msg_2_1")], "required following item"),
        ([reasoning(1), call_item(), OUTPUT], "required following item"),
        ([reasoning(1), call_item("fc_1_2"), OUTPUT], "another item"),
        ([message_item("msg_1_1")], "required 'reasoning' item"),
        ([call_item("fc_1_1"), OUTPUT], "required 'reasoning' item"),
        ([message_item("msg_0_1"), message_item("msg_0_1")], "Duplicate item"),
        ([call_item()], "No tool output"),
        ([OUTPUT], "No tool call"),
        ([call_item(), call_item(), OUTPUT], "duplicate call_id"),
        ([message_item(text=" ")], "must not be empty"),
    ],
)
def test_the_strict_responses_api_refuses_incomplete_replies(items, message):
    with pytest.raises(Refused, match=message):
        check_responses({"input": [QUESTION, *items]})


def test_the_strict_responses_api_accepts_complete_replies():
    check_responses(
        {
            "input": [
                QUESTION,
                reasoning(1),
                message_item("msg_1_1"),
                call_item("fc_1_2"),
                OUTPUT,
                message_item(),
                QUESTION,
            ]
        }
    )


def turn(role, *parts):
    return {"role": role, "parts": list(parts)}


FUNCTION = {"functionCall": {"id": "c", "name": "look", "args": {}}, "thoughtSignature": "s"}
RESPONSE = {"functionResponse": {"id": "c", "name": "look", "response": {}}}
TEXT = {"text": "hi"}


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ([turn("model", TEXT)], "begin with a user"),
        ([turn("user", TEXT), turn("model", TEXT)], "end with a user"),
        ([turn("user", {"text": ""})], "must not be empty"),
        ([turn("user", TEXT), turn("model"), turn("user", TEXT)], "at least one parts field"),
        ([turn("user", TEXT), turn("model", {**TEXT, "thought": True}), turn("user", TEXT)], "not a thought"),
        ([turn("user", TEXT), turn("model", FUNCTION), turn("user", TEXT)], "number of function response"),
        ([turn("user", TEXT), turn("user", RESPONSE)], "number of function response"),
        (
            [turn("user", TEXT), turn("model", TEXT), turn("model", FUNCTION), turn("user", RESPONSE)],
            "immediately after",
        ),
        (
            [turn("user", TEXT), turn("model", {"functionCall": FUNCTION["functionCall"]}), turn("user", RESPONSE)],
            "thought_signature",
        ),
    ],
)
def test_the_strict_gemini_refuses_turns_that_are_empty_or_out_of_order(contents, message):
    with pytest.raises(Refused, match=message):
        check_google({"contents": contents})


def test_the_strict_deepseek_refuses_calls_without_the_reasoning_that_led_to_them():
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "c", "content": "1"})
    with pytest.raises(Refused, match="reasoning_content"):
        check_openai({"model": "deepseek-reasoner", "messages": messages})
    check_openai({"model": "deepseek-chat", "messages": messages})
