"""Requests to each provider: schemas, structured answers, paused turns, faults, and the cost of rendering."""

from __future__ import annotations

import asyncio
import json
import sys
import threading

import pytest
from support.http_provider import HTTPProvider
from support.model_requests import ODD_SCHEMA, ask, assistant, hosted_tool, offer, request, result, use, user

from holdfast.core.transcript import Messages
from holdfast.errors import ModelError
from holdfast.models.providers import ProviderModel

NAMES = {
    "anthropic": "anthropic:claude-sonnet-4-5",
    "openai": "openai:gpt-5",
    "openai-chat": "openai-chat:gpt-4o",
    "google": "google:gemini-2.5-pro",
    "groq": "groq:openai/gpt-oss-120b",
    "deepseek": "deepseek:deepseek-chat",
    "deepseek-responses": "deepseek-responses:deepseek-v4-flash",
}
EVERY_PROVIDER = pytest.mark.parametrize("provider", NAMES)


def refusing_server():
    """Return a server that records each request and answers 400."""

    async def answer(incoming, response):
        await response.json(400, {"error": {"message": "no", "type": "invalid_request_error"}})

    return HTTPProvider(answer)


def streaming_server(*bodies):
    """Return a server that streams one of these bodies for each request."""
    left = list(bodies)

    async def answer(incoming, response):
        await response.stream()
        await response.chunk(left.pop(0))
        await response.end()

    return HTTPProvider(answer)


async def request_body(name, **fields):
    """Return the body that a model sends for a request."""
    with refusing_server() as server:
        with pytest.raises(ModelError) as problem:
            await ask(ProviderModel(f"{name}@{server.url}"), request("hi", **fields))
        assert problem.value.details.get("status") == 400, problem.value
    return server.requests[0].body


def tools_of(provider, body):
    match provider:
        case "anthropic":
            return [(tool["name"], tool["input_schema"], tool) for tool in body["tools"]]
        case "google":
            declared = body["tools"][0]["functionDeclarations"]
            return [(tool["name"], tool.get("parametersJsonSchema", tool.get("parameters_json_schema")), tool)
                    for tool in declared]  # fmt: skip
        case "openai" | "deepseek-responses":
            return [(tool["name"], tool["parameters"], tool) for tool in body["tools"]]
        case _:
            functions = [tool["function"] for tool in body["tools"]]
            return [(tool["name"], tool["parameters"], tool) for tool in functions]


@EVERY_PROVIDER
async def test_an_odd_schema_reaches_the_provider_unchanged(provider):
    body = await request_body(NAMES[provider], tools=(offer("odd", ODD_SCHEMA, "An odd one."), offer("plain")))
    odd, plain = tools_of(provider, body)
    assert odd[:2] == ("odd", ODD_SCHEMA)
    assert list(odd[1]) == list(ODD_SCHEMA)  # in the same order
    assert plain[0] == "plain"
    # The Responses API requires the field: there it says false.
    assert odd[2].get("strict") is (False if provider in ("openai", "deepseek-responses") else None)


def stream_of(provider, text, calls=()):
    """Return a stream in the provider's format: text, or calls (name, arguments)."""
    if provider == "anthropic":
        usage = {"input_tokens": 3, "output_tokens": 1}
        message = {"id": "m", "type": "message", "role": "assistant", "model": "claude", "content": [], "usage": usage}
        blocks = [("text_delta", "text", text, {"type": "text", "text": ""})] if text else []
        for n, (name, args) in enumerate(calls):
            start = {"type": "tool_use", "id": f"t{n}", "name": name, "input": {}}
            blocks.append(("input_json_delta", "partial_json", args, start))
        events = [{"type": "message_start", "message": message}]
        for index, (kind, word, value, start) in enumerate(blocks):
            events.append({"type": "content_block_start", "index": index, "content_block": start})
            events.append({"type": "content_block_delta", "index": index, "delta": {"type": kind, word: value}})
            events.append({"type": "content_block_stop", "index": index})
        stop = "tool_use" if calls else "end_turn"
        events.append({"type": "message_delta", "delta": {"stop_reason": stop}, "usage": {"output_tokens": 9}})
        events.append({"type": "message_stop"})
        return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
    delta = {"content": text} if text else {}
    if calls:
        delta["tool_calls"] = [
            {"index": n, "id": f"t{n}", "type": "function", "function": {"name": name, "arguments": args}}
            for n, (name, args) in enumerate(calls)
        ]
    choice = {"index": 0, "delta": delta, "finish_reason": "tool_calls" if calls else "stop"}
    if provider == "google":
        parts = [{"text": text}] if text else [{"functionCall": {"name": n, "args": json.loads(a)}} for n, a in calls]
        candidate = {"content": {"parts": parts, "role": "model"}, "finishReason": "STOP", "index": 0}
        return f"data: {json.dumps({'candidates': [candidate]})}\n\n"
    about = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return f"data: {json.dumps({**about, 'choices': [choice]})}\n\ndata: [DONE]\n\n"


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 1}, "age": {"type": "integer"}},
    "required": ["name"],
}


def native_schema(provider, body):
    match provider:
        case "anthropic":
            return body.get("output_config", {}).get("format", {}).get("schema")
        case "google":
            config = body["generationConfig"]
            return config.get("responseJsonSchema", config.get("response_json_schema"))
        case "openai" | "deepseek-responses":
            return body.get("text", {}).get("format", {}).get("schema")
        case _:
            return (body.get("response_format") or {}).get("json_schema", {}).get("schema")


@EVERY_PROVIDER
async def test_a_structured_answer_is_requested_natively_if_supported_and_otherwise_as_a_tool(provider):
    body = await request_body(NAMES[provider], output=PERSON)
    schema = native_schema(provider, body)
    if provider in ("groq", "deepseek"):
        assert schema is None
        [(name, parameters, _)] = tools_of(provider, body)
        assert (name, parameters) == ("final_result", PERSON)
    elif provider == "anthropic":  # supports a subset: objects are closed, lengths are descriptions
        assert schema["properties"]["age"] == {"type": "integer"}
        assert schema["additionalProperties"] is False
    else:
        assert schema == PERSON


async def test_gemini_2_gets_an_output_tool_if_it_has_other_tools_and_gemini_3_does_not():
    body = await request_body("google:gemini-2.5-flash", output=PERSON, tools=(offer("look"),))
    assert native_schema("google", body) is None
    assert [tool[0] for tool in tools_of("google", body)] == ["look", "final_result"]
    body = await request_body("google:gemini-3-pro-preview", output=PERSON, tools=(offer("look"),))
    assert native_schema("google", body) == PERSON
    assert [tool[0] for tool in tools_of("google", body)] == ["look"]


async def test_a_call_of_the_output_tool_becomes_text_and_other_calls_stay_calls():
    answer = '{"name": "Ann"}'
    calls = [("look", "{}"), ("final_result", answer)]
    with streaming_server(
        stream_of("deepseek", "", calls[1:]), stream_of("deepseek", "", calls), stream_of("deepseek", "no")
    ) as server:
        model = ProviderModel(f"deepseek:deepseek-chat@{server.url}")
        got = await ask(model, "who?", output=PERSON, tools=(offer("look"),))
        both = await ask(model, "who?", output=PERSON, tools=(offer("look"),))
        neither = await ask(model, "who?", output=PERSON)
    assert (json.loads(got.text), got.calls, got.finish) == ({"name": "Ann"}, (), "stop")
    assert [call.name for call in both.calls] == ["look"]
    assert both.finish == "tool_calls"
    assert neither.text == "no"  # not valid: the runtime's validation reports it


async def test_the_output_tool_gets_a_name_that_no_other_tool_has():
    body = await request_body("deepseek:deepseek-chat", output=PERSON, tools=(offer("final_result"),))
    assert [tool[0] for tool in tools_of("deepseek", body)] == ["final_result", "final_result_"]


@pytest.mark.parametrize("provider", ["anthropic", "openai-chat", "google", "deepseek"])
async def test_an_answer_that_is_not_an_object_is_wrapped_in_one_for_the_provider_and_unwrapped(provider):
    schema = {"type": "array", "items": {"$ref": "#/$defs/n"}, "$defs": {"n": {"type": "integer"}}}
    wrapped = '{"result": [1, 2]}'
    calls = [("final_result", wrapped)] if provider == "deepseek" else []

    with streaming_server(stream_of(provider, "" if calls else wrapped, calls)) as server:
        got = await ask(ProviderModel(f"{NAMES[provider]}@{server.url}"), "numbers?", output=schema)
    assert json.loads(got.text) == [1, 2]
    assert '"$defs"' in server.requests[0].text


async def test_a_paused_turn_is_continued_and_becomes_one_reply():
    first = stream_of("anthropic", "Searching. ").replace("end_turn", "pause_turn")
    with streaming_server(first, stream_of("anthropic", "Found it.")) as server:
        claude = ProviderModel(f"anthropic:claude-sonnet-4-5@{server.url}", settings={"cache": False})
        got = await ask(claude, "search", tools=(hosted_tool("web_search", max_uses=2),))
    assert (got.text, got.finish) == ("Searching. Found it.", "stop")
    assert (got.usage.input_tokens, got.usage.output_tokens) == (6, 18)
    assert [record["data"]["n"] for record in got.records if record["kind"] == "text"] == [11, 9]
    asked, again = (incoming.body for incoming in server.requests)
    assert asked["tools"][0]["max_uses"] == 2
    assert again["messages"] == [
        *asked["messages"],
        {"role": "assistant", "content": [{"type": "text", "text": "Searching. "}]},
    ]


async def test_a_turn_that_is_paused_ten_times_is_an_error():
    paused = stream_of("anthropic", "Hm. ").replace("end_turn", "pause_turn")
    with streaming_server(*[paused] * 20) as server, pytest.raises(ModelError, match="paused") as problem:
        await ask(ProviderModel(f"anthropic:claude-sonnet-4-5@{server.url}"))
    assert problem.value.kind == "invalid_response"
    assert len(server.requests) == 10


@EVERY_PROVIDER
async def test_cancelling_a_request_closes_the_connection_for_every_provider(provider):
    """The connection closes with the task, not when the client is closed or the loop ends."""

    async def answer(incoming, response):
        await response.stream()
        asked.set()
        await response.hang()
        response.cut()

    asked = threading.Event()

    with HTTPProvider(answer) as server:
        task = asyncio.create_task(ask(ProviderModel(f"{NAMES[provider]}@{server.url}")))
        await asyncio.to_thread(asked.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while server.requests[0].gone is None:
            await asyncio.sleep(0.001)


FAULTS = {
    "rate limit": ("rate_limited", 429, "slow down"),
    "unknown key": ("not_authenticated", 401, "who are you?"),
    "no such model": ("model_not_supported", 404, "no such model"),
    "server error": ("provider_http_error", 500, "oops"),
    "garbage": ("invalid_response", 200, "data: {not json\n\n"),
    "reset connection": ("network", 200, None),
    "empty stream": ("network", 200, ""),
}


@EVERY_PROVIDER
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_has_the_same_kind_for_every_provider(provider, fault):
    kind, status, words = FAULTS[fault]

    async def answer(incoming, response):
        if status != 200:
            error = {"message": words, "code": status, "status": "X"}
            await response.json(status, {"error": error}, {"retry-after": "7"})
            return
        await response.stream()
        if words is None:
            await response.chunk("data: ")
            response.cut()
        if words:
            named = "event: message_start\n" if provider == "anthropic" else ""  # its SDK ignores events without a name
            await response.chunk(f"{named}{words}")
        await response.end()

    with HTTPProvider(answer) as server:
        with pytest.raises(ModelError) as problem:
            await ask(ProviderModel(f"{NAMES[provider]}@{server.url}"))
        assert len(server.requests) == 1
    assert problem.value.kind == kind, problem.value
    if status == 429:
        assert problem.value.details["retry_after"] == 7


@pytest.mark.parametrize(
    ("word", "reason"), [("max_tokens", "length"), ("refusal", "content_filter"), ("stop_sequence", "stop")]
)
async def test_the_finish_reason_is_reported(word, reason):
    with streaming_server(stream_of("anthropic", "x").replace("end_turn", word)) as server:
        assert (await ask(ProviderModel(f"anthropic:claude-sonnet-4-5@{server.url}"))).finish == reason


async def test_a_model_without_a_known_price_has_no_cost():
    with streaming_server(stream_of("anthropic", "x")) as server:
        got = await ask(ProviderModel(f"anthropic:my-own-thing@{server.url}"))
    assert (got.usage.input_tokens, got.usage.cost, got.usage.cache_read_tokens) == (3, None, None)


def long_history(rounds):
    messages = []
    for n in range(rounds):
        a = use("look", f"call-{n}", {"n": n, "words": "x" * 200})
        messages += [user(f"question {n}"), assistant(f"I look {n}", a), result(a)]
    return messages


def test_only_the_new_messages_of_a_long_history_are_rendered():
    """The next request has the same objects as the previous one."""
    from holdfast.models.providers.render import MessageRenderer

    messages = long_history(334)
    renderer = MessageRenderer("anthropic", "anthropic")

    def parts():
        asked = request()
        asked = type(asked)(conversation="c", turn=1, step=1, instructions="", messages=Messages(messages))
        rendered = renderer.render_request(asked, mark=False)
        return [part for message in rendered for part in message.parts]

    before = parts()
    assert len(before) > 1000
    for n in range(3):
        messages += [assistant("fine"), user(f"more {n}")]
        after = parts()
        assert len(after) == len(before) + 2
        assert all(old is new for old, new in zip(before, after, strict=False))
        before = after


@pytest.mark.parametrize("provider", ["anthropic", "openai", "openai-chat", "groq"])
async def test_a_message_that_was_sent_before_costs_fewer_than_100_function_calls(provider):
    """It cost 650 to 2000 while the SDK walked every field; long histories then blocked the event loop."""

    async def calls(model, messages):
        """Return how many Python functions a request calls in the loop's thread."""
        made = 0

        def count(frame, event, arg):
            nonlocal made
            made += event == "call"

        for counted in (False, True):  # the first request imports, connects and renders
            sys.setprofile(count if counted else None)
            try:
                with pytest.raises(ModelError):
                    await ask(model, *messages)
            finally:
                sys.setprofile(None)
        return made

    with refusing_server() as server:
        model = ProviderModel(f"{NAMES[provider]}@{server.url}")
        short, long = await calls(model, long_history(100)), await calls(model, long_history(200))
    assert (long - short) / 300 < 100


def test_the_cache_of_rendered_messages_is_bounded():
    from holdfast.models.providers import render

    renderer = render.MessageRenderer("anthropic", "anthropic")
    for n in range(3):
        renderer.render_request(request(*[user(f"{n} {i}") for i in range(render.MAX_CACHED_MESSAGES)]), mark=False)
    assert len(renderer._rendered) <= render.MAX_CACHED_MESSAGES
