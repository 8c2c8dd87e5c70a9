"""Recorded exchanges with providers, played back to ProviderModel through the SDKs and the provider layer."""

from __future__ import annotations

import json

import pytest
from support.model_requests import ask, assistant, hosted_tool, offer, result, use, user
from support.recordings import RECORDINGS, load_exchanges, playback

from holdfast.models.providers import ProviderModel

CITY = {
    "additionalProperties": False,
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "type": "object",
}
NAMED = {
    "additionalProperties": False,
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
    "type": "object",
}

USED = {
    "anthropic_code_execution_tool_stream",
    "anthropic_model_thinking_part_stream",
    "anthropic_web_search_tool_stream",
    "deepseek_responses_function_tool_stream",
    "google_model_web_search_tool_stream",
    "google_streaming_tool_call_thought_signature",
    "multiple_parallel_tool_calls",
    "openai_responses_model_file_search_tool_stream",
    "openai_responses_model_web_search_tool_stream",
    "openai_responses_thinking_with_code_execution_tool_stream",
    "openai_tool_call_roundtrip_wire_stable_ag_ui",
    "tool_use_failed_error_streaming",
}


def model(name, server, path="", **settings):
    return ProviderModel(f"{name}@{server.url}{path}", key="k", settings={"cache": False, **settings})


def without(body, *names):
    return {name: value for name, value in body.items() if name not in names}


def events(exchange, type=None):
    """Return the data of the events of a recorded stream."""
    lines = exchange["response"]["body"].splitlines()
    data = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return [event for event in data if type is None or event.get("type") == type]


def anthropic_blocks(exchange):
    """Return the content blocks of a recorded Anthropic stream, which must be in the next request."""
    blocks = {}
    for event in events(exchange):
        if event["type"] == "content_block_start":
            blocks[event["index"]] = {**event["content_block"], "citations": [], "json": ""}
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            match delta["type"]:
                case "text_delta":
                    block["text"] += delta["text"]
                case "thinking_delta":
                    block["thinking"] += delta["thinking"]
                case "signature_delta":
                    block["signature"] += delta["signature"]
                case "input_json_delta":
                    block["json"] += delta["partial_json"]
                case "citations_delta":
                    block["citations"].append(delta["citation"])
    for block in blocks.values():
        partial, citations = block.pop("json"), block.pop("citations")
        if partial:
            block["input"] = json.loads(partial)
        if citations:
            block["citations"] = citations
    return list(blocks.values())


def is_sent_back(sent, received):
    """Return whether a block was sent back with everything received, except fields that only responses have."""
    answers_only = {"caller"} | ({"citations"} if not received.get("citations") else set())
    expected = {name: value for name, value in received.items() if name not in answers_only and value is not None}
    return {name: value for name, value in sent.items() if name in expected} == expected


def test_every_recording_is_used():
    assert {path.stem for path in RECORDINGS.glob("*.json")} == USED


async def test_anthropic_thinking_streams_and_its_signature_is_sent_back_verbatim():
    [exchange] = load_exchanges("anthropic_model_thinking_part_stream")
    with playback(exchange, exchange) as server:
        claude = model(
            "anthropic:claude-sonnet-4-0", server, max_tokens=4096,
            anthropic_thinking={"type": "enabled", "budget_tokens": 1024},
        )  # fmt: skip
        got = await ask(claude, "How do I cross the street?")
        await ask(claude, "How do I cross the street?", got.message("anthropic"), "And back?")
    assert server.requests[0].body == exchange["request"]["body"]
    thinking, text = anthropic_blocks(exchange)
    assert (got.thinking, got.text, got.finish) == (thinking["thinking"], text["text"], "stop")
    assert (got.usage.input_tokens, got.usage.output_tokens, got.usage.cache_read_tokens) == (43, 282, 0)
    assert got.usage.cost == pytest.approx(43 * 3e-6 + 282 * 15e-6)
    assert server.requests[1].body["messages"][1] == {
        "role": "assistant",
        "content": [thinking, {"type": "text", "text": text["text"]}],
    }


async def test_anthropic_code_execution_is_reported_at_its_start_and_end_and_sent_back_verbatim():
    [exchange] = load_exchanges("anthropic_code_execution_tool_stream")
    with playback(exchange, exchange) as server:
        claude = model(
            "anthropic:claude-sonnet-4-6", server, max_tokens=4096,
            anthropic_thinking={"type": "enabled", "budget_tokens": 3000},
        )  # fmt: skip
        question, tools = "what is 65465-6544 * 65464-6+1.02255", (hosted_tool("code_execution"),)
        got = await ask(claude, question, tools=tools)
        await ask(claude, question, got.message("anthropic"), "Sure?", tools=tools)
    # The recording was made by an older layer, which also sent the default tool_choice.
    assert server.requests[0].body == without(exchange["request"]["body"], "tool_choice")
    begun, done = got.hosted
    assert (begun.tool, begun.done, begun.id) == ("code_execution", False, done.id)
    assert done.done
    assert done.args == {"command": 'echo "65465-6544 * 65464-6+1.02255" | bc -l'}
    assert done.result["stdout"].startswith("-428330955")
    assert got.text.endswith("-428,330,955.97745**")
    received, sent = anthropic_blocks(exchange), server.requests[1].body["messages"][1]["content"]
    assert [block["type"] for block in sent] == [block["type"] for block in received]
    assert [block["type"] for block in sent][2:4] == ["server_tool_use", "bash_code_execution_tool_result"]
    assert all(is_sent_back(a, b) for a, b in zip(sent, received, strict=True))
    assert server.requests[1].body["container"] == "container_011CaNRFAbjdPf4rmBarZzqQ"


async def test_anthropic_web_search_results_and_citations_are_sent_back_verbatim():
    [exchange] = load_exchanges("anthropic_web_search_tool_stream")
    with playback(exchange, exchange) as server:
        claude = model("anthropic:claude-sonnet-4-0", server, max_tokens=4096)
        question, tools = "Give me the top 3 news in the world today.", (hosted_tool("web_search"),)
        instructions = "You are a helpful assistant."
        got = await ask(claude, question, tools=tools, instructions=instructions)
        await ask(claude, question, got.message("anthropic"), "Thanks", tools=tools, instructions=instructions)
    # As above; the older layer ended the system prompt with an empty line and sent it as plain text, and the newer
    # one names max_uses.
    body, was = server.requests[0].body, exchange["request"]["body"]
    assert without(body, "tools", "system") == without(was, "tool_choice", "tools", "system")
    assert [without(tool, "max_uses") for tool in body["tools"]] == was["tools"]
    assert [block["text"] for block in body["system"]] == [was["system"].strip()]
    received = anthropic_blocks(exchange)
    sent = server.requests[1].body["messages"][1]["content"]
    # Blocks of only white space were received; Anthropic would refuse them.
    received = [block for block in received if block.get("text", "x").strip()]
    assert [block["type"] for block in sent] == [block["type"] for block in received]
    cited = [(a, b) for a, b in zip(sent, received, strict=True) if b.get("citations")]
    assert cited
    assert all(is_sent_back(a, b) for a, b in zip(sent, received, strict=True))
    assert [part.done for part in got.hosted] == [False, True] * 2
    assert got.hosted[1].args == {"query": "top world news today"}
    assert got.hosted[1].result[0]["encrypted_content"]


async def test_deepseek_reasoning_and_its_call_are_sent_back_as_recorded():
    first, second = load_exchanges("deepseek_responses_function_tool_stream")
    with playback(first, second) as server:
        deepseek = model("deepseek-responses:deepseek-v4-flash", server)
        question = "What is the temperature in Tokyo?"
        tools = (offer("get_temperature", CITY, "Get the current temperature in a city."),)
        got = await ask(deepseek, question, tools=tools)
        reply = got.message("deepseek-responses")
        again = await ask(deepseek, question, reply, result(reply.calls[0], "21.0"), tools=tools)
    assert [(call.name, call.args) for call in got.calls] == [("get_temperature", {"city": "Tokyo"})]
    assert got.finish == "tool_calls"
    assert again.text == "The current temperature in Tokyo is **21.0°C**."
    for incoming, exchange in zip(server.requests, (first, second), strict=True):
        body, was = incoming.body, exchange["request"]["body"]
        # The recording let the layer rewrite schemas for strict mode; we do not.
        assert [tool | {"strict": True} for tool in body["tools"]] == was["tools"]
        assert [tool["strict"] for tool in body["tools"]] == [False]
        # The newer layer always writes arguments without spaces.
        was = json.loads(json.dumps(was).replace(json.dumps('{"city": "Tokyo"}'), json.dumps('{"city":"Tokyo"}')))
        assert without(body, "tools") == without(was, "tools")


async def test_google_search_is_reported_and_the_next_request_is_as_recorded():
    first, second = load_exchanges("google_model_web_search_tool_stream")
    with playback(first, first) as server:
        gemini = model("google:gemini-2.5-pro", server)
        question, tools = "What is the weather in San Francisco today?", (hosted_tool("web_search"),)
        instructions = "You are a helpful chatbot."
        got = await ask(gemini, question, tools=tools, instructions=instructions)
        reply = got.message("google")
        await ask(gemini, question, reply, "how about Mexico City?", tools=tools, instructions=instructions)
    assert [(part.tool, part.done) for part in got.hosted] == [("web_search", False), ("web_search", True)]
    assert got.usage.cache_read_tokens is None
    for incoming, exchange in zip(server.requests, (first, second), strict=True):
        # The newer layer asks for text; the recording's second exchange was not streamed.
        assert incoming.body["generationConfig"] == {"responseModalities": ["TEXT"]}
        assert incoming.body == exchange["request"]["body"] | {"generationConfig": {"responseModalities": ["TEXT"]}}


async def test_the_thought_signature_of_gemini_is_sent_back_with_its_call():
    first, second = load_exchanges("google_streaming_tool_call_thought_signature")
    with playback(first, second) as server:
        gemini = model("google:gemini-3-pro-preview", server)
        question = "What is the capital of the user country? Call the tool"
        tools = (offer("get_country", {"additionalProperties": False, "properties": {}, "type": "object"}),)
        got = await ask(gemini, question, tools=tools)
        reply = got.message("google")
        again = await ask(gemini, question, reply, result(reply.calls[0], "Mexico"), tools=tools)
    assert again.text == "The capital of Mexico is Mexico City."
    assert [(call.name, call.args) for call in got.calls] == [("get_country", {})]
    for incoming in server.requests:  # newer than the recording: the provider validates calls
        assert incoming.body["toolConfig"] == {"functionCallingConfig": {"mode": "VALIDATED"}}
    assert without(server.requests[0].body, "toolConfig") == first["request"]["body"]
    # Gemini gave the call no id: the layer generated one for the recording, and another one here.
    sent, was = json.dumps(without(server.requests[1].body, "toolConfig")), json.dumps(second["request"]["body"])
    old = second["request"]["body"]["contents"][1]["parts"][0]["functionCall"]["id"]
    assert json.loads(sent) == json.loads(was.replace(old, reply.calls[0].id))
    assert server.requests[1].body["contents"][1]["parts"][0]["thoughtSignature"]


async def test_parallel_calls_and_their_results_are_sent_to_anthropic_as_recorded():
    first, second = load_exchanges("multiple_parallel_tool_calls")
    [streamed] = load_exchanges("anthropic_code_execution_tool_stream")  # any stream: only the request is checked
    blocks = first["response"]["body"]["content"]
    calls = tuple(use(block["name"], block["id"], block["input"]) for block in blocks if block["type"] == "tool_use")
    answers = {block["tool_use_id"]: block["content"] for block in second["request"]["body"]["messages"][2]["content"]}
    history = [
        user("Alice, Bob, Charlie and Daisy are a family. Who is the youngest?"),
        assistant(blocks[0]["text"], *calls),
        *[result(call, answers[call.id]) for call in calls],
    ]
    was = second["request"]["body"]
    with playback(streamed) as server:
        claude = model("anthropic:claude-haiku-4-5", server, max_tokens=4096)
        tools = (offer("retrieve_entity_info", NAMED, "Get the knowledge about the given entity."),)
        await ask(claude, *history, tools=tools, instructions=was["system"])
    body = server.requests[0].body
    # The recording was not streamed; a result's text and the system prompt are blocks of text now.
    for block in body["messages"][2]["content"]:
        [text] = block["content"]
        block["content"] = text["text"]
    [system] = body.pop("system")
    assert system == {"type": "text", "text": was["system"]}
    assert body.pop("stream") is True
    assert body == without(was, "stream", "system")
    assert len(calls) == 4


async def test_openai_file_search_is_reported_and_sent_back_with_its_message():
    [exchange] = load_exchanges("openai_responses_model_file_search_tool_stream")
    with playback(exchange, exchange) as server:
        gpt = model("openai:gpt-4o", server, "/v1", openai_send_reasoning_ids=True)
        tools = (hosted_tool("file_search", file_store_ids=["vs_6931d752e41c8191833fcaad1cf47055"]),)
        instructions = "You are a helpful assistant."
        got = await ask(gpt, "What is the capital of France?", tools=tools, instructions=instructions)
        await ask(gpt, "?", got.message("openai"), "Sure?", tools=tools, instructions=instructions)
    assert server.requests[0].body == exchange["request"]["body"]
    assert got.text == "The capital of France is Paris."
    assert [(part.tool, part.done) for part in got.hosted] == [("file_search", False), ("file_search", True)]
    assert got.hosted[1].args == {"queries": ["What is the capital of France?"]}
    output = events(exchange, "response.completed")[0]["response"]["output"]
    search, message = server.requests[1].body["input"][1:3]
    assert search == {key: output[0][key] for key in ("id", "type", "status", "queries")}
    assert message["id"] == output[1]["id"]
    [sent], [was] = message["content"], output[1]["content"]
    assert (sent["text"], sent["annotations"]) == (was["text"], was["annotations"])


async def test_openai_encrypted_reasoning_and_searches_are_sent_back_as_recorded():
    first, second = load_exchanges("openai_responses_model_web_search_tool_stream")
    with playback(first, first) as server:
        gpt = model("openai:gpt-5", server, "/v1", openai_include_web_search_sources=True)
        question, tools = "What is the weather in San Francisco today?", (hosted_tool("web_search"),)
        instructions = "You are a helpful assistant."
        got = await ask(gpt, question, tools=tools, instructions=instructions)
        follow_up = second["request"]["body"]["input"][-1]["content"]
        await ask(gpt, question, got.message("openai"), follow_up, tools=tools, instructions=instructions)
    # The older layer sent previous_response_id as null.
    assert server.requests[0].body == without(first["request"]["body"], "previous_response_id")
    assert (got.usage.input_tokens, got.usage.cache_read_tokens) == (9463, 8320)
    body, was = server.requests[1].body, second["request"]["body"]
    assert without(body, "input", "stream") == without(was, "input", "stream", "previous_response_id")
    sent, recorded_input = body["input"], was["input"]
    assert [item.get("type", "message") for item in sent] == [item.get("type", "message") for item in recorded_input]
    for item, expected in zip(sent, recorded_input, strict=True):
        assert item == expected


async def test_openai_reasoning_between_code_executions_is_sent_back_in_order():
    [exchange] = load_exchanges("openai_responses_thinking_with_code_execution_tool_stream")
    with playback(exchange, exchange) as server:
        gpt = model("openai:gpt-5", server, "/v1", openai_reasoning_effort="low", openai_reasoning_summary="detailed")
        question, tools = "what's 123456 to the power of 123?", (hosted_tool("code_execution"),)
        got = await ask(gpt, question, tools=tools)
        await ask(gpt, question, got.message("openai"), "Sure?", tools=tools)
    assert server.requests[0].body == exchange["request"]["body"]
    # Not from the last event, which repeats the items with newly encrypted reasoning.
    output = [event["item"] for event in events(exchange, "response.output_item.done")]
    sent = server.requests[1].body["input"][1:-1]
    assert [item["type"] for item in sent] == [item["type"] for item in output]
    for item, was in zip(sent, output, strict=True):
        assert item["id"] == was["id"]
        if item["type"] == "reasoning":
            assert (item["encrypted_content"], item["summary"]) == (was["encrypted_content"], was["summary"])
        if item["type"] == "code_interpreter_call":
            assert (item["code"], item["container_id"]) == (was["code"], was["container_id"])
    assert got.thinking.startswith("**Calculating a large integer**")
    assert [part.done for part in got.hosted] == [False, True] * 3


async def test_a_chat_history_is_sent_to_openai_as_recorded():
    exchanges = load_exchanges("openai_tool_call_roundtrip_wire_stable_ag_ui")
    call = exchanges[0]["response"]["body"]["choices"][0]["message"]["tool_calls"][0]
    called = use("get_weather", call["id"], json.loads(call["function"]["arguments"]))
    answer = exchanges[1]["response"]["body"]["choices"][0]["message"]["content"]
    history = [
        user("What is the weather in Paris? Use the tool."),
        assistant("", called),
        result(called, "sunny in Paris"),
    ]
    asked = [history[:1], history, [*history, assistant(answer), user("Reply with exactly: OK")]]
    done = {"choices": [{"index": 0, "delta": {"content": "OK"}, "finish_reason": "stop"}]}
    stream = {
        "status": 200,
        "content_type": "text/event-stream",
        "body": f"data: {json.dumps(done)}\n\ndata: [DONE]\n\n",
    }
    with playback(*[{"response": stream}] * 3) as server:
        gpt = model("openai-chat:gpt-4o", server, "/v1")
        for messages, tools in zip(asked, ((offer("get_weather", CITY),),) * 2 + ((),), strict=True):
            got = await ask(gpt, *messages, tools=tools)
            assert got.text == "OK"
            assert got.usage.input_tokens is None  # the stream has no usage
    for incoming, exchange in zip(server.requests, exchanges[:3], strict=True):
        body, was = incoming.body, exchange["request"]["body"]
        for tool in was.get("tools", []):
            assert tool["function"].pop("strict") is True  # the recording let the layer rewrite schemas; we do not
        assert body.pop("stream") is True
        assert body.pop("stream_options") == {"include_usage": True}
        for message, expected in zip(body["messages"], was["messages"], strict=True):
            if expected.get("tool_calls"):  # the same arguments with other spaces
                for a, b in zip(message["tool_calls"], expected["tool_calls"], strict=True):
                    a["function"]["arguments"] = json.loads(a["function"]["arguments"])
                    b["function"]["arguments"] = json.loads(b["function"]["arguments"])
        assert body == without(was, "stream")


async def test_a_call_that_groq_refuses_during_the_stream_is_returned_as_a_call():
    first, second, third = load_exchanges("tool_use_failed_error_streaming")
    with playback(first, second, third) as server:
        groq = model("groq:openai/gpt-oss-120b", server)
        question = first["request"]["body"]["messages"][1]["content"]
        instructions = first["request"]["body"]["messages"][0]["content"]
        tools = (offer("get_something_by_name", NAMED),)
        got = await ask(groq, question, tools=tools, instructions=instructions)
        history = [user(question), got.message("groq"), result(got.calls[0], "no such parameter", ok=False)]
        again = await ask(groq, *history, tools=tools, instructions=instructions)
        history += [again.message("groq"), result(again.calls[0], "something")]
        last = await ask(groq, *history, tools=tools, instructions=instructions)
    assert [(call.name, call.args) for call in got.calls] == [("get_something_by_name", {"invalid_param": "value"})]
    assert got.finish == "tool_calls"
    assert again.finish == "tool_calls"
    assert last.finish == "stop"
    assert last.text
    assert got.usage.input_tokens is None  # the refusal replaced the usage
    assert again.usage.input_tokens
    for incoming, exchange in zip(server.requests, (first, second, third), strict=True):
        body, was = incoming.body, exchange["request"]["body"]
        assert without(body, "messages") == without(was, "messages")
        assert [m["role"] for m in body["messages"]] == [m["role"] for m in was["messages"]]
    # Its reasoning is sent back as recorded; the result envelope and the ids are Holdfast's.
    assert server.requests[1].body["messages"][2]["content"] == second["request"]["body"]["messages"][2]["content"]
