"""Whatever a log holds, the next request is one that the provider takes: every provider, every kind of reply."""

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
EVERY = pytest.mark.parametrize("side", SIDES)
PROVIDERS = {
    "anthropic": "anthropic",
    "responses": "openai",
    "google": "google",
    "groq": "groq",
    "deepseek": "deepseek",
}
LOOK = (offer("look"),)


def model(server, side, **options):
    return ProviderModel(getattr(server, side), key="k", **options)


# --- replies that leave nothing to read ---


@EVERY
@pytest.mark.parametrize(
    "pieces", [[Thinking("hm")], [Thinking("hm"), " \n"]], ids=["reasoning", "reasoning and blanks"]
)
async def test_a_conversation_goes_on_after_a_reply_that_had_reasoning_and_no_text(side, pieces):
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


# --- reasoning goes back where it may ---


@pytest.mark.parametrize("side", ["anthropic", "responses", "google"])
async def test_reasoning_goes_back_with_the_calls_that_it_led_to(side):
    """What the provider signed or sealed is sent back for as long as what followed it stands there unchanged."""
    with StrictServer([[Thinking("hm"), "I look.", ToolCall("look")], "ok"]) as server:
        reply = (await ask(model(server, side), tools=LOOK)).message(model(server, side).provider)
        await ask(model(server, side), "hello", reply, result(reply.calls[0]), tools=LOOK)
    assert server.refused == []
    sealed = {"anthropic": "c2lnbmVk", "responses": "sealed", "google": "thoughtSignature"}[side]
    assert sealed in server.requests[1].text


async def test_reasoning_is_left_out_where_the_text_behind_it_was_changed():
    """OpenAI refuses reasoning without the item that followed it; the call behind the text stays, without an id."""
    with StrictServer([[Thinking("hm"), "I look.", ToolCall("look")], "ok"]) as server:
        reply = (await ask(model(server, "responses"), tools=LOOK)).message("openai")
        changed = msgspec.structs.replace(reply, text="Let me look it up for you.")
        await ask(model(server, "responses"), "hello", changed, result(changed.calls[0]), tools=LOOK)
    assert server.refused == []
    said = server.requests[1].body["input"]
    assert [item.get("type", item.get("role")) for item in said] == [
        "user",
        "assistant",
        "function_call",
        "function_call_output",
    ]
    assert said[1]["content"] == "Let me look it up for you."
    assert "id" not in said[2]


@pytest.mark.parametrize(
    "asked", [{"thinking": True}, {"anthropic_thinking": {"type": "enabled", "budget_tokens": 2000}}]
)
async def test_thinking_is_not_asked_for_in_the_middle_of_calls_that_began_without_a_signed_thought(asked):
    """Anthropic's extended thinking refuses calls that another provider made, until their turn is over."""
    call = use("look", "id-1")
    begun = [user("look"), assistant("", call), result(call)]
    with StrictServer(["fine", "fine"]) as server:
        claude = model(server, "anthropic", settings={**asked, "max_tokens": 4000})
        await ask(claude, *begun, tools=LOOK)
        await ask(claude, *begun, assistant("done"), user("thanks"), tools=LOOK)
    assert server.refused == []
    assert [(heard.body.get("thinking") or {}).get("type") for heard in server.requests] == [None, "enabled"]


# --- histories by hand: what the strict servers do not say by themselves ---


def part(kind, **data):
    return {"kind": kind, "data": data}


def hosted_call(id, tool="web_search", args=None):
    return part("hosted_call", id=id, item=id, tool=tool, args={"query": "x"} if args is None else args)


A = use("look", "id-1")
OWN = {
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


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("last", [True, False], ids=["last", "earlier"])
async def test_a_reply_of_the_provider_itself_is_sent_back_in_a_form_that_it_takes(name, last):
    """Replies are legal to receive that are illegal to send back: they are mended, or left out."""
    side, reply = OWN[name]

    reply_ = msgspec.structs.replace(reply, provider=PROVIDERS[side])
    after = [] if last else [assistant("so"), user("on")]
    with StrictServer(["fine"]) as server:
        said = [user("a"), reply_, *map(result, reply_.calls), user("b"), *after]
        assert (await ask(model(server, side), *said, tools=LOOK)).text == "fine"
    assert server.refused == []


@EVERY
async def test_a_user_stands_between_two_replies(side):
    """Google takes a call behind a user only; a reply behind a reply would also be merged into one elsewhere."""
    said = [user("a"), assistant("half", partial=True), assistant("", A), result(A)]
    with StrictServer(["fine"]) as server:
        assert (await ask(model(server, side), *said, tools=LOOK)).text == "fine"
    assert server.refused == []


# --- generated conversations, which move from provider to provider ---


@dataclass(frozen=True)
class Step:
    """A reply, and what became of it."""

    side: str
    pieces: tuple[Any, ...]
    fate: str
    answered: int
    """So many of its calls have a result in the log."""
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


def settled(reply, fate):
    """The message as the log holds it after its fate."""
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
    """One server and one model a side, for all examples: they keep nothing of a conversation."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.said: list[Any] = []
        self.server = StrictServer([lambda _: self.said] * 100_000)
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
            async with asyncio.timeout(60):  # it only ends what hangs
                await self._talk(conversation)

        self.loop.run_until_complete(main())

    async def _talk(self, conversation):
        log = [user("hello")]
        for step in conversation:
            self.said = [
                ToolCall(piece[2], {"n": piece[3]}, id=piece[1].format(next(_ids)))
                if isinstance(piece, tuple)
                else piece
                for piece in step.pieces
            ]
            one = self.models[step.side]
            reply = settled((await ask(one, *log, tools=LOOK)).message(one.provider), step.fate)
            log += [reply, *map(result, reply.calls[: step.answered])]
            if step.user is not None:
                log.append(user(step.user))
        self.said = ["The end."]
        for one in self.models.values():
            await ask(one, *log, tools=LOOK)
            await ask(one, request(*log, tools=LOOK, injected=("by the way",)))


@pytest.fixture(scope="module")
def world():
    one = World()
    yield one
    one.close()


def spoke(side, *pieces, fate="kept", user: str | None = "go on"):
    return Step(side=side, pieces=pieces, fate=fate, answered=3, user=user)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(conversation=steps)
@example([spoke("responses", Thinking("hm"))])
@example([spoke("anthropic", Thinking("hm"), " ")])
@example([spoke("google", Thinking("hm"), fate="kept")])
@example([spoke("responses", Thinking("hm"), "Fine.", ("call", ID_FORMS[0], "look", 1), fate="changed", user=None)])
@example([spoke("responses", ("call", ID_FORMS[3], "look", 1), ("call", ID_FORMS[3], "look", 2), user=None)])
def test_every_provider_takes_every_conversation(world, conversation):
    """No log makes a request that a provider refuses, whoever wrote the replies and whatever became of them."""
    world.server.refused.clear()
    world.server.requests.clear()
    world.talk(conversation)
    assert world.server.refused == []


# --- the strict servers refuse what the real ones refuse ---

CALL = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "s"}


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([[THOUGHT]], "final block"),
        ([[{"type": "text", "text": "hi"}, THOUGHT]], "final block"),
        ([[{"type": "text", "text": "hi"}, {"type": "redacted_thinking", "data": "x"}]], "final block"),
        ([[CALL]], "must start with a thinking block"),
    ],
)
def test_the_strict_anthropic_refuses_thoughts_that_are_out_of_place(messages, why):
    said: list[Any] = [{"role": "user", "content": "hi"}]
    for content in messages:
        said.append({"role": "assistant", "content": content})
        asked = [{"type": "tool_result", "tool_use_id": "t", "content": "1"}] if CALL in content else "and?"
        said.append({"role": "user", "content": asked})
    body = {"max_tokens": 1, "messages": said, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    with pytest.raises(Refused, match=why):
        check_anthropic(body)


def reasoning(n):
    return {"type": "reasoning", "id": f"rs_{n}", "summary": []}


def spoken(id=None, text="hi"):
    return {"type": "message", "role": "assistant", "content": text} | ({"id": id} if id else {})


def called(id=None):
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    return call | ({"id": id} if id else {})


OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "1"}
ASKED = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("items", "why"),
    [
        ([reasoning(1)], "required following item"),
        ([reasoning(1), ASKED], "required following item"),
        ([reasoning(1), spoken()], "required following item"),
        ([reasoning(1), reasoning(2), spoken("msg_2_1")], "required following item"),
        ([reasoning(1), called(), OUTPUT], "required following item"),
        ([reasoning(1), called("fc_1_2"), OUTPUT], "another item"),
        ([spoken("msg_1_1")], "required 'reasoning' item"),
        ([called("fc_1_1"), OUTPUT], "required 'reasoning' item"),
        ([spoken("msg_0_1"), spoken("msg_0_1")], "Duplicate item"),
        ([called()], "No tool output"),
        ([OUTPUT], "No tool call"),
        ([called(), called(), OUTPUT], "duplicate call_id"),
        ([spoken(text=" ")], "must not be empty"),
    ],
)
def test_the_strict_responses_api_refuses_incomplete_replies(items, why):
    with pytest.raises(Refused, match=why):
        check_responses({"input": [ASKED, *items]})


def test_the_strict_responses_api_takes_whole_replies():
    check_responses({"input": [ASKED, reasoning(1), spoken("msg_1_1"), called("fc_1_2"), OUTPUT, spoken(), ASKED]})


def turn(role, *parts):
    return {"role": role, "parts": list(parts)}


FUNCTION = {"functionCall": {"id": "c", "name": "look", "args": {}}, "thoughtSignature": "s"}
RESPONSE = {"functionResponse": {"id": "c", "name": "look", "response": {}}}
TEXT = {"text": "hi"}


@pytest.mark.parametrize(
    ("contents", "why"),
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
def test_the_strict_gemini_refuses_turns_that_are_empty_or_out_of_order(contents, why):
    with pytest.raises(Refused, match=why):
        check_google({"contents": contents})


def test_the_strict_deepseek_refuses_calls_without_the_reasoning_that_led_to_them():
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    said = [ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}]
    said.append({"role": "tool", "tool_call_id": "c", "content": "1"})
    with pytest.raises(Refused, match="reasoning_content"):
        check_openai({"model": "deepseek-reasoner", "messages": said})
    check_openai({"model": "deepseek-chat", "messages": said})
