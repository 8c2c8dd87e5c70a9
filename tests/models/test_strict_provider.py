"""Histories, faults, cancels and keys, with a provider that is as strict as the real ones."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import msgspec
import pytest
from support.model_requests import (
    ODD_SCHEMA,
    CollectedReply,
    ask,
    assistant,
    hosted_tool,
    offer,
    request,
    result,
    use,
    user,
)
from support.strict_server import SIGNATURE, Breaks, Closes, Cut, Ends, Garbage, Hang, Status, StrictServer

from holdfast.errors import ModelError
from holdfast.models import Thinking, ToolCall
from holdfast.models.providers import ProviderModel

SIDES = pytest.mark.parametrize("side", ["anthropic", "openai"])


def model(server, side, **options):
    return ProviderModel(getattr(server, side), **options)


async def failure_of(server, side, *messages, **fields):
    """Send a request that must fail, and return its error."""
    with pytest.raises(ModelError) as problem:
        await ask(model(server, side), *messages, **fields)
    return problem.value


@SIDES
async def test_parallel_calls_and_their_results_make_a_round_trip(side):
    script = [
        ["I look.", ToolCall("weather", {"city": "Rome"}), ToolCall("weather", {"city": "Oslo"})],
        "Rome is warmer.",
    ]
    with StrictServer(script) as server:
        tools = (offer("weather", {"type": "object", "properties": {"city": {"type": "string"}}}),)
        got = await ask(model(server, side), "Compare", tools=tools, instructions="Be brief.")
        reply = got.message(side)
        last = await ask(model(server, side), "Compare", reply, *map(result, reply.calls), tools=tools)
    assert not server.refused
    assert (got.text, got.finish) == ("I look.", "tool_calls")
    assert [(call.name, call.args["city"]) for call in got.calls] == [("weather", "Rome"), ("weather", "Oslo")]
    assert (last.text, last.finish) == ("Rome is warmer.", "stop")
    assert last.usage.input_tokens == 10
    assert last.usage.cache_read_tokens == (0 if side == "anthropic" else None)  # the OpenAI stream has no such field


A, B = use("look", "id-1"), use("look", "id-2")
HISTORIES = {
    "empty text": [user(""), assistant("ok"), user(" \n")],
    "an assistant that said nothing": [user("a"), assistant(""), user("b"), assistant("  "), user("c")],
    "it begins with an assistant": [assistant("hello"), user("a")],
    "it ends with an assistant": [user("a"), assistant("hello")],
    "two users in a row": [user("a"), user("b"), assistant("c"), user("d"), user("e")],
    "a partial reply": [user("a"), assistant("half\n[cut off]", partial=True, thinking="hm"), user("b")],
    "a call that has no result": [user("a"), assistant("", A, B), result(A), user("b")],
    "calls at the very end": [user("a"), assistant("", A)],
    "a result that has no call": [user("a"), result(A), assistant("b"), user("c")],
    "a failed call": [user("a"), assistant("", A), result(A, '{"ok":false}', ok=False)],
    "an empty result": [user("a"), assistant("", A), result(A, "")],
    "arguments that are not JSON": [user("a"), assistant("", bad := use("look", "x", raw='{"a": ')), result(bad)],
    "an unknown tool": [user("a"), assistant("", bad := use("run it; now!", "x")), result(bad)],
    "a tool without a name": [user("a"), assistant("", bad := use("", "x")), result(bad)],
    "an id of another provider": [user("a"), assistant("", bad := use("look", "functions.look:0|x")), result(bad)],
    "a very long id": [user("a"), assistant("", bad := use("look", "x" * 200)), result(bad)],
    "no messages": [],
    "another provider's parts": [
        user("a"),
        assistant(
            "found",
            A,
            thinking="hm",
            provider="google",
            parts=[
                {"kind": "thinking", "data": {"n": 2, "signature": "not-yours"}},
                {"kind": "hosted_call", "data": {"id": "s", "tool": "web_search", "args": {}}},
                {"kind": "text", "data": {"n": 5}},
                {"kind": "call", "data": {"i": 0, "details": {"thought_signature": "not-yours"}}},
            ],
        ),
        result(A),
    ],
    "parts that do not fit": [
        user("a"),
        assistant("found", provider="anthropic", parts=[{"kind": "text", "data": {"n": 99}}]),
        assistant("found", provider="openai-chat", parts=[{"kind": "text", "data": {}}, {"kind": "new", "data": {}}]),
        user("b"),
    ],
}


@SIDES
@pytest.mark.parametrize("history", HISTORIES)
async def test_every_history_is_rendered_in_a_form_that_the_provider_accepts(side, history):
    with StrictServer(["fine"]) as server:
        asked = request("x", injected=()) if not HISTORIES[history] else request(*HISTORIES[history])
        if not HISTORIES[history]:
            asked = type(asked)(conversation="c", turn=1, step=1, instructions="", messages=())
        got = await ask(model(server, side), asked)
    assert not server.refused
    assert got.text == "fine"
    assert "not-yours" not in server.requests[0].text


def test_the_strict_provider_refuses_empty_messages_and_wrong_roles():
    from support.strict_server import Refused, check_anthropic, check_openai

    def message(role, content="hi"):
        return {"role": role, "content": content}

    empty = [
        [],
        [message("user", "")],
        [message("user"), message("assistant", ""), message("user")],
        [message("robot")],
    ]
    out_of_turn = [
        [message("assistant"), message("user")],
        [message("user"), message("assistant")],
        [message("user", " \n")],
    ]
    for messages in empty:
        with pytest.raises(Refused):
            check_openai({"messages": messages})
    for messages in [*empty, *out_of_turn]:
        with pytest.raises(Refused):
            check_anthropic({"max_tokens": 1, "messages": messages})
    for messages in out_of_turn:
        check_openai({"messages": messages})  # OpenAI accepts them


def test_the_strict_provider_refuses_calls_and_results_that_do_not_belong_together():
    from support.strict_server import Refused, check_anthropic, check_openai

    def tool_use(*ids):
        return {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": id, "name": "a", "input": {}} for id in ids],
        }

    def tool_result(*ids):
        return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": "1"} for id in ids]}

    def tool_calls(*ids):
        calls = [{"id": id, "type": "function", "function": {"name": "a", "arguments": "{}"}} for id in ids]
        return {"role": "assistant", "content": None, "tool_calls": calls}

    def tool(id):
        return {"role": "tool", "tool_call_id": id, "content": "1"}

    hi = {"role": "user", "content": "hi"}
    check_anthropic({"max_tokens": 1, "messages": [hi, tool_use("a", "b"), tool_result("a", "b")]})
    check_openai({"messages": [hi, tool_calls("a", "b"), tool("a"), tool("b"), hi]})
    late = {"role": "user", "content": [{"type": "text", "text": "x"}, *tool_result("a")["content"]]}
    for messages in (
        [hi, tool_use("a"), hi],
        [hi, tool_use("a", "b"), tool_result("a")],
        [hi, tool_result("a")],
        [hi, tool_use("a"), tool_result("a", "b")],
        [hi, tool_use("a"), late],
        [hi, tool_use("a", "a"), tool_result("a")],
        [hi, tool_use("a"), tool_result("a"), tool_use("a"), tool_result("a")],
        [hi, tool_use("a")],
    ):
        with pytest.raises(Refused):
            check_anthropic({"max_tokens": 1, "messages": messages})
    for messages in (
        [hi, tool_calls("a"), hi],
        [hi, tool_calls("a", "b"), tool("a"), hi],
        [hi, tool("a")],
        [hi, tool_calls("a", "a"), tool("a")],
        [hi, tool_calls("a"), tool("a"), tool("a")],
        [hi, tool_calls("a")],
    ):
        with pytest.raises(Refused):
            check_openai({"messages": messages})


@SIDES
async def test_a_refusal_is_reported_with_its_status_and_the_providers_message(side):
    with StrictServer([Status(400, "messages: no, thank you")]) as server:
        problem = await failure_of(server, side)
    assert (problem.kind, problem.details["status"]) == ("provider_http_error", 400)
    assert "messages: no, thank you" in problem.message


AN_HOUR_LATER = format_datetime(datetime.now(UTC) + timedelta(seconds=3600), usegmt=True)


@SIDES
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (Status(429, retry_after=2), "rate_limited"),
        (Status(429, retry_after=AN_HOUR_LATER), "rate_limited"),
        (Status(429, type="insufficient_quota", message="You exceeded your current quota"), "usage_limit_reached"),
        (Status(402), "usage_limit_reached"),
        (Status(401), "not_authenticated"),
        (Status(403), "not_authenticated"),
        (Status(404), "model_not_supported"),
        (Status(500), "provider_http_error"),
        (Status(503, retry_after=1), "provider_http_error"),
        (Status(529), "provider_http_error"),
        (Status(422), "provider_http_error"),
    ],
    ids=lambda value: getattr(value, "code", None),
)
async def test_an_error_status_has_its_kind_and_the_sdk_does_not_retry(side, status, kind):
    if side == "anthropic" and status.type == "insufficient_quota":
        status = Status(400, "Your credit balance is too low to access the API.")

    with StrictServer([status] * 5) as server:
        problem = await failure_of(server, side)
    assert (problem.kind, problem.details["status"]) == (kind, status.code)
    assert len(server.requests) == 1  # retries are up to the runtime
    if status.retry_after == AN_HOUR_LATER:
        assert 1800 < problem.details["retry_after"] <= 3600  # counted from the import of this module
    elif status.retry_after:
        assert problem.details["retry_after"] == status.retry_after


@SIDES
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Cut(["I will ", ToolCall("look", {"a": "some words in here"})]), "network"),
        (Cut(), "network"),
        (Closes(), "network"),
        (Ends(), "network"),
        (Ends([ToolCall("look", {"a": 1})]), "network"),
        (Garbage(["well, "]), "invalid_response"),
        (Garbage(), "invalid_response"),
        (Breaks(), "provider_http_error"),
        (Breaks(type="rate_limit_error"), "rate_limited"),
    ],
    ids=str,
)
async def test_a_stream_that_breaks_is_an_error_of_its_kind(side, fault, kind):
    if side == "openai" and isinstance(fault, Breaks):
        kind = {"rate_limit_error": "rate_limited"}.get(fault.type, kind)

    with StrictServer([fault]) as server:
        assert (await failure_of(server, side)).kind == kind


@SIDES
async def test_a_refused_connection_is_a_network_error(side):
    with StrictServer() as server:
        name = getattr(server, side)
    with pytest.raises(ModelError) as problem:
        await ask(ProviderModel(name))
    assert problem.value.kind == "network"


@SIDES
async def test_a_cancelled_request_closes_the_connection(side):
    """The connection closes with the task, not when the client is closed or the loop ends."""
    with StrictServer([Hang(["one moment "])]) as server:
        first_part = asyncio.Event()

        async def wait():
            async for _ in model(server, side).stream(request("hi")):
                first_part.set()

        task = asyncio.create_task(wait())
        await first_part.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while server.requests[0].gone is None:
            await asyncio.sleep(0.001)


async def test_a_reply_that_breaks_off_still_reports_its_usage():
    with StrictServer([Cut(["I will ", ToolCall("look", {"a": "some words in here"})])]) as server:
        got = CollectedReply()
        with pytest.raises(ModelError):
            await ask(model(server, "anthropic"), into=got)
    usage = got.usage
    assert (usage.input_tokens, usage.output_tokens) == (10, 1)
    assert usage.cost


@SIDES
async def test_a_provider_that_sends_nothing_is_a_network_error_after_the_timeout(side):
    with StrictServer([Hang()]) as server, pytest.raises(ModelError) as problem:
        await ask(model(server, side, timeout=0.2))
    assert problem.value.kind == "network"


@SIDES
async def test_a_thousand_calls_in_one_reply_arrive(side):
    calls = [ToolCall("look", {"n": n}) for n in range(1000)]
    with StrictServer([calls, "done"]) as server:
        got = await ask(model(server, side))
        reply = got.message(side)
        last = await ask(model(server, side), "go", reply, *map(result, reply.calls))
    assert [call.args["n"] for call in got.calls] == list(range(1000))
    assert not server.refused
    assert last.text == "done"


@SIDES
async def test_two_calls_with_one_id_both_arrive(side):
    with StrictServer([[ToolCall("look", {"n": 1}, id="same"), ToolCall("look", {"n": 2}, id="same")]]) as server:
        got = await ask(model(server, side))
    assert [(call.id, call.args) for call in got.calls] == [("same", {"n": 1}), ("same", {"n": 2})]


async def test_signed_thinking_is_sent_back_before_the_call_that_followed_it():
    with StrictServer([[Thinking("hm"), ToolCall("look", {})], "ok"]) as server:
        got = await ask(model(server, "anthropic"))
        reply = got.message("anthropic")
        await ask(model(server, "anthropic"), "hello", reply, result(reply.calls[0]))
    assert not server.refused
    thinking, call = server.requests[1].body["messages"][1]["content"]
    assert thinking == {"type": "thinking", "thinking": "hm", "signature": SIGNATURE}
    assert call["type"] == "tool_use"


@pytest.mark.parametrize("text", ["", "Let me look it up for you.", "No."])
async def test_text_changed_by_a_hook_keeps_its_place_and_signed_parts_stay(text):
    with StrictServer([[Thinking("hm"), "I look.", ToolCall("look", {}), "Wait."], "ok"]) as server:
        got = await ask(model(server, "anthropic"))
        changed = msgspec.structs.replace(got.message("anthropic"), text=text)
        await ask(model(server, "anthropic"), "hello", changed, result(changed.calls[0]))
    assert not server.refused
    sent = server.requests[1].body["messages"][1]["content"]
    assert [block["type"] for block in sent] == ["thinking", *(["text"] if text else []), "tool_use"]
    assert [block["text"] for block in sent if block["type"] == "text"] == ([text] if text else [])


async def test_a_plain_reply_has_no_parts_of_the_provider():
    with StrictServer(["hello", [ToolCall("a")], ["x", ToolCall("a")]]) as server:
        for _ in range(3):
            assert not (await ask(model(server, "anthropic"))).records


@SIDES
async def test_injected_text_comes_last_and_has_no_cache_marker(side):
    with StrictServer(["a", "b", "c"]) as server:
        tools, a = (offer("look", {"type": "object"}, "Looks."),), use("look", "id")
        fields = {"tools": tools, "instructions": "Be brief."}
        await ask(model(server, side), "hi", **fields)
        await ask(model(server, side), "hi", injected=("The time is noon.", "It rains."), **fields)
        await ask(model(server, side), "hi", assistant("", a), result(a), injected=("It is late.",), **fields)
    assert not server.refused
    plain, injected, after = (incoming.body for incoming in server.requests)
    if side == "openai":
        assert [m["role"] for m in injected["messages"]] == ["system", "user", "user"]
        assert "It is late." in str(after["messages"][-1]["content"])
        return
    marker = {"type": "ephemeral", "ttl": "5m"}
    assert plain["cache_control"] == marker  # at the end of the conversation
    assert plain["system"][-1]["cache_control"] == marker
    assert plain["tools"][-1]["cache_control"] == marker
    assert "cache_control" not in injected
    said, noon, rain = injected["messages"][-1]["content"]
    assert said == {"type": "text", "text": "hi", "cache_control": marker}
    assert [block["text"] for block in (noon, rain)] == ["The time is noon.", "It rains."]
    assert "cache_control" not in noon
    assert "cache_control" not in rain
    found, late = after["messages"][-1]["content"]
    assert (found["type"], found["cache_control"]) == ("tool_result", marker)
    assert late == {"type": "text", "text": "It is late."}


@SIDES
async def test_a_schema_arrives_as_it_was_declared_and_without_strict(side):
    with StrictServer(["ok"]) as server:
        await ask(model(server, side), tools=(offer("odd", ODD_SCHEMA),))
    [tool] = server.requests[0].body["tools"]
    declared = tool if side == "anthropic" else tool["function"]
    assert declared["input_schema" if side == "anthropic" else "parameters"] == ODD_SCHEMA
    assert "strict" not in declared


async def test_the_key_function_is_called_for_every_request_and_all_keys_share_a_connection():
    async def key_of(request):
        return f"key-of-{request.principal}"

    with StrictServer(["a", "b", "c"]) as server:
        claude = model(server, "anthropic", key=key_of)
        for principal in ("ann", "bob", "ann"):
            await ask(claude, principal=principal)
    assert [incoming.headers["authorization"].split()[-1] for incoming in server.requests] == [
        "key-of-ann",
        "key-of-bob",
        "key-of-ann",
    ]
    assert server.connections == 1


async def test_a_key_function_that_returns_none_or_fails_is_an_error_without_its_secret():
    def broken(request):
        raise RuntimeError("sk-very-secret-key is locked")

    with StrictServer(["a"]) as server:
        for key in (lambda request: None, broken):
            with pytest.raises(ModelError) as problem:
                await ask(model(server, "openai", key=key))
            assert problem.value.kind == "not_authenticated"
            assert "secret" not in problem.value.message
    assert not server.requests


@SIDES
async def test_an_error_never_repeats_the_key(side):
    words = "Incorrect API key provided: hunter2-hunter2. Also sk-abcdefghijkl0123."
    with StrictServer([Status(401, words)]) as server, pytest.raises(ModelError) as problem:
        await ask(model(server, side, key="hunter2-hunter2"))
    assert "hunter2" not in str(problem.value)
    assert "abcdefghijkl" not in str(problem.value)
    assert "[secret]" in problem.value.message


@SIDES
async def test_settings_of_a_request_override_those_of_the_model(side):
    with StrictServer(["a"]) as server:
        claude = model(server, side, settings={"temperature": 0.1, "max_tokens": 50})
        await ask(claude, settings={"max_tokens": 70})
    body = server.requests[0].body
    assert body["temperature"] == 0.1
    assert body.get("max_tokens") == 70 or body.get("max_completion_tokens") == 70


@SIDES
async def test_an_unsupported_provider_tool_or_option_is_refused_with_the_supported_ones(side):
    with StrictServer(["a"]) as server:
        with pytest.raises(ModelError) as problem:
            await ask(model(server, side), tools=(hosted_tool("telepathy"),))
        assert problem.value.kind == "model_not_supported"
        assert ("web_search" in problem.value.message) == (side == "anthropic")
        if side == "anthropic":
            with pytest.raises(ModelError, match="colour"):
                await ask(model(server, side), tools=(hosted_tool("web_search", colour="red"),))
    assert not server.requests


def test_one_model_serves_one_event_loop_after_another():
    with StrictServer(["a", "b"]) as server:
        claude = model(server, "anthropic")
        assert asyncio.run(ask(claude)).text == "a"
        assert asyncio.run(ask(claude)).text == "b"
