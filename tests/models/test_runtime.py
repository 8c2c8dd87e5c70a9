"""Providers in a whole Runtime: requests and responses on the wire, and their effect on the conversation."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from itertools import pairwise
from unittest import mock

import pytest
from support.async_tests import run_bounded
from support.http_provider import HTTPProvider
from support.model_agents import SIDES, Tape, agent, calls, model, of, paired, results, say, skip_time, until, weather
from support.strict_server import SIGNATURE, Breaks, Closes, Cut, Garbage, Hang, Status, StrictServer

from holdfast import Answer, Approve, Context, Deny, Limits, Retention, Runtime, Submit, tool
from holdfast.core.events import AssistantSaid, OutputRejected
from holdfast.core.live import Retrying
from holdfast.hooks import on_stream
from holdfast.models import Request, Thinking, ToolCall
from holdfast.models.providers import ProviderModel
from holdfast.runtime.steps.prompt import encode_request

ROME, OSLO = ToolCall("weather", {"city": "Rome"}), ToolCall("weather", {"city": "Oslo"})
ENDPOINT = {"anthropic": "", "openai": "/v1"}
NAME = {"anthropic": "anthropic:claude-haiku-4-5", "openai": "openai-chat:gpt-4o"}


# --- retries and fallbacks ---


@SIDES
async def test_two_503_responses_are_retried_with_backoff_until_the_provider_replies(side):
    """503, 503, 200 are three requests with backoff between them [B23]."""
    with StrictServer([Status(503), Status(503), "here I am"]) as server:
        async with Runtime(agent(server, side)) as rt:
            await rt.open("c")
            async with Tape(rt, "c") as tape:
                await rt.send("c", "hello")
                await tape.until_type("TurnEnded")
        [said] = of(tape.items, AssistantSaid)
    assert (said.text, said.partial) == ("here I am", False)
    assert [attempt.error and attempt.error.details["status"] for attempt in said.attempts] == [503, 503, None]
    waits = [event.delay for event in of(tape.live, Retrying)]
    gaps = [b.at - a.at for a, b in pairwise(server.requests)]
    assert len(gaps) == len(waits) == 2
    assert all(gap >= wait >= 0.005 for gap, wait in zip(gaps, waits, strict=True))
    assert len({incoming.text for incoming in server.requests}) == 1  # the same request, to the byte


@SIDES
async def test_a_429_is_retried_after_the_delay_that_the_provider_gives(side):
    """The retry-after of the provider is honoured [B23]."""
    with StrictServer([Status(429, retry_after=0.3), "now"]) as server:
        async with Runtime(agent(server, side)) as rt:
            assert (await say(rt)).reason == "completed"
    first, second = server.requests
    assert second.at - first.at >= 0.3  # its own first pause would be 0.01 s


@SIDES
async def test_a_429_with_a_retry_after_of_an_hour_is_not_retried(side):
    """A delay that is too long fails the turn at once [B23]."""
    with StrictServer([Status(429, retry_after=3600)]) as server:
        async with Runtime(agent(server, side)) as rt:
            end = await say(rt)
    assert (end.reason, end.error.kind, end.error.details["retry_after"]) == ("failed", "rate_limited", 3600)
    assert len(server.requests) == 1


@SIDES
async def test_a_401_is_not_retried_and_fails_as_not_authenticated(side):
    """After 401 there is no retry [B23]."""
    with StrictServer([Status(401, "bad key")]) as server:
        async with Runtime(agent(server, side)) as rt:
            end = await say(rt)
    assert (end.reason, end.error.kind) == ("failed", "not_authenticated")
    assert len(server.requests) == 1


@SIDES
@pytest.mark.parametrize("fault", [Cut(["half a sen"]), Breaks(["half a "]), Garbage(["half a "])], ids=str)
async def test_a_reply_that_breaks_after_its_first_token_is_not_retried(side, fault):
    """After the first token neither the provider nor the fallback is asked again [B23]."""

    with StrictServer([fault, "fine"]) as server, StrictServer(["me too"]) as other:
        async with Runtime(agent(server, side, fallbacks=[model(other, side)])) as rt:
            end = await say(rt)
            [said] = of(await rt.history("c"), AssistantSaid)
            assert (end.reason, said.partial, said.text[:5]) == ("failed", True, "half ")
            assert (len(server.requests), len(other.requests)) == (1, 0)
            assert (await say(rt, "again")).reason == "completed"
        assert not server.refused
        assert "[cut off" in server.requests[-1].text


@pytest.mark.parametrize(("first", "second"), [("anthropic", "openai"), ("openai", "anthropic")])
async def test_a_fallback_continues_the_conversation_of_an_unreachable_provider(first, second):
    """Calls and results are sent to the fallback; thoughts that only the first provider can read are not [B23]."""
    gone = StrictServer([[Thinking("hm"), "I look.", ROME], "Sunny in Rome."])
    gone.start()
    with StrictServer(["Sunny, as I said.", [OSLO], "There too."]) as other:
        async with Runtime(agent(gone, first, weather, fallbacks=[model(other, second)])) as rt:
            assert (await say(rt, "Rome?")).reason == "completed"
            gone.stop()
            assert (await say(rt, "Sure?")).reason == "completed"
            assert (await say(rt, "And Oslo?")).reason == "completed"
            said = of(await rt.history("c"), AssistantSaid)
    assert not gone.refused
    assert not other.refused
    assert said[0].thinking == "hm"
    assert said[-1].text == "There too."
    assert [attempt.error.kind for attempt in said[2].attempts[:-1]] == ["network"] * 3
    assert SIGNATURE not in other.requests[-1].text
    sent_calls = [(name, args) for _, name, args in calls(other.requests[-1].body)]
    assert sent_calls == [("weather", {"city": "Rome"}), ("weather", {"city": "Oslo"})]
    assert [envelope["result"] for _, envelope in results(other.requests[-1].body)] == [
        "sunny in Rome",
        "sunny in Oslo",
    ]


# --- streams that break ---


@SIDES
async def test_a_stream_that_breaks_inside_a_call_makes_no_call_and_the_next_turn_completes(side):
    ran = []

    @tool
    async def pay(amount: int, to: str) -> str:
        """Pay."""
        ran.append(amount)
        return "paid"

    cut = Cut(["I will pay.", ToolCall("pay", {"amount": 1_000_000, "to": "somebody or other"})])
    with StrictServer([cut, "As you like."]) as server:
        async with Runtime(agent(server, side, pay)) as rt:
            end = await say(rt, "Pay them")
            [said] = of(await rt.history("c"), AssistantSaid)
            assert (end.reason, end.error.kind) == ("failed", "network")
            assert (said.text, said.partial, said.calls) == ("I will pay.", True, ())
            assert (await say(rt, "Better not")).reason == "completed"
    assert not server.refused
    assert ran == calls(server.requests[-1].body) == []
    assert "I will pay.\\n[cut off" in server.requests[-1].text


@SIDES
@pytest.mark.parametrize(
    ("fault", "kind", "asked"),
    [(Garbage(), "invalid_response", 1), (Closes(), "network", 3)],
    ids=["garbage", "closes"],
)
async def test_a_reply_without_a_token_fails_the_turn_and_is_not_in_the_next_request(side, fault, kind, asked):
    with StrictServer([fault] * asked + ["fine"]) as server:
        async with Runtime(agent(server, side)) as rt:
            end = await say(rt)
            assert (end.reason, end.error.kind) == ("failed", kind)
            assert len(server.requests) == asked
            assert (await say(rt, "again")).reason == "completed"
        assert not server.refused
        assert not any(message["role"] == "assistant" for message in server.requests[-1].body["messages"])


@SIDES
@pytest.mark.parametrize("kind", ["text/event-stream", "application/json"])
async def test_an_empty_200_response_is_retried_as_a_network_error(side, kind):
    """The timeout of a proxy often looks like this."""

    async def nothing(incoming, response):
        await response.stream(kind)
        await response.end()

    with HTTPProvider(nothing) as server:
        server.anthropic, server.openai = (f"{NAME[s]}@{server.url}{ENDPOINT[s]}" for s in ("anthropic", "openai"))
        async with Runtime(agent(server, side)) as rt:
            end = await say(rt)
    assert (end.reason, end.error.kind, len(server.requests)) == ("failed", "network", 3)


@SIDES
async def test_a_cancel_closes_the_connection_and_keeps_the_partial_reply(side):
    """Cancel while streaming closes the connection; the partial text is kept and marked for the model [B58]."""
    with StrictServer([Hang(["One moment, I "]), "Fine."]) as server:
        async with Runtime(agent(server, side)) as rt:
            turn = await rt.send("c", "hello")

            async def begun():
                return (await rt.snapshot("c")).partial == "One moment, I "

            await until(begun)
            await rt.cancel("c")
            end = await turn.final_result()
            await until(lambda: server.requests[0].gone)
            [said] = of(await rt.history("c"), AssistantSaid)
            assert (end.reason, said.text, said.partial) == ("cancelled", "One moment, I ", True)
            assert (await say(rt, "Never mind")).reason == "completed"
    assert not server.refused
    assert "[cut off" in server.requests[-1].text


@SIDES
async def test_a_cancel_before_the_first_token_closes_the_connection(side):
    """Cancel closes the connection to the provider [B58]."""
    with StrictServer([Hang(), "Fine."]) as server:
        async with Runtime(agent(server, side)) as rt:
            turn = await rt.send("c", "hello")
            await until(lambda: server.requests)
            await rt.cancel("c")
            assert (await turn.final_result()).reason == "cancelled"
            await until(lambda: server.requests[0].gone)
            assert (await say(rt, "again")).reason == "completed"
    assert not server.refused


@SIDES
async def test_a_turn_over_its_time_limit_closes_the_connection_and_keeps_the_partial_reply(side):
    with StrictServer(["Hello.", Hang(["One moment, I "]), "Fine."]) as server:
        one = agent(server, side)
        async with Runtime(one) as rt:
            await say(rt, conversation="first")  # imports the SDK, which may take long
        one.limits = Limits(seconds=25)
        async with Runtime(one) as rt:
            turn = await rt.send("c", "hello")

            async def begun():
                return (await rt.snapshot("c")).partial == "One moment, I "

            await until(begun)
            skip_time(25)
            end = await turn.final_result()
            await until(lambda: server.requests[1].gone)
            one.limits = Limits()
            [said] = of(await rt.history("c"), AssistantSaid)
            assert (end.reason, said.text, said.partial) == ("time_limit", "One moment, I ", True)
            assert (await say(rt, "again")).reason == "completed"
    assert not server.refused


@SIDES
async def test_a_hook_that_fails_during_a_reply_closes_the_connection(side):
    class Broken:
        def feed(self, text):
            raise ValueError(text)

        def end(self):
            return ""

    with StrictServer([Hang(["One moment, I "])]) as server:
        async with Runtime(agent(server, side, hooks=[on_stream(Broken)])) as rt:
            end = await say(rt)
            await until(lambda: server.requests[0].gone)  # while the runtime is still open
    assert (end.reason, end.error.kind) == ("failed", "handler_failed")


# --- calls and their results ---


@SIDES
async def test_duplicate_provider_ids_are_made_unique_and_results_stay_with_their_calls(side):
    def twice(*cities):
        return [ToolCall("weather", {"city": city}, id="same") for city in cities]

    with StrictServer([twice("Rome", "Oslo"), "ok", twice("Bonn"), twice("Lyon", "Kiel"), "ok"]) as server:
        async with Runtime(agent(server, side, weather)) as rt:
            assert (await say(rt, "two")).reason == "completed"
            assert (await say(rt, "and more")).reason == "completed"
            paired(await rt.history("c"))
    assert not server.refused
    body = server.requests[-1].body
    asked = {id: args["city"] for id, _, args in calls(body)}
    assert list(asked.values()) == ["Rome", "Oslo", "Bonn", "Lyon", "Kiel"]  # five distinct ids
    assert {id: envelope["result"] for id, envelope in results(body)} == {
        id: f"sunny in {city}" for id, city in asked.items()
    }


@SIDES
async def test_of_1000_calls_in_one_reply_128_run_and_every_one_gets_a_result(side):
    ran = []

    @tool
    async def count(n: int) -> int:
        """Count."""
        ran.append(n)
        return n

    with StrictServer([[ToolCall("count", {"n": n}) for n in range(1000)], "phew"]) as server:
        async with Runtime(agent(server, side, count)) as rt:
            assert (await say(rt)).reason == "completed"
            paired(await rt.history("c"))
    assert not server.refused
    assert sorted(ran) == list(range(128))
    body = server.requests[-1].body
    numbers = {id: args["n"] for id, _, args in calls(body)}
    answered = results(body)
    assert [numbers[id] for id, _ in answered] == list(range(1000))
    assert [envelope["result"] for _, envelope in answered[:128]] == list(range(128))
    assert {envelope["error"]["kind"] for _, envelope in answered[128:]} == {"too_large"}


@SIDES
async def test_a_cancel_while_tools_run_leaves_a_history_that_the_provider_accepts(side):
    """Cancelled calls get ``cancelled`` results [B59]."""
    entered = asyncio.Event()

    @tool
    async def wait() -> str:
        """Wait."""
        entered.set()
        return await asyncio.get_running_loop().create_future()

    with StrictServer([["I try.", ROME, ToolCall("wait"), ToolCall("nothing")], "Fine."]) as server:
        async with Runtime(agent(server, side, weather, wait)) as rt:
            turn = await rt.send("c", "go")
            await entered.wait()
            await rt.cancel("c")
            assert (await turn.final_result()).reason == "cancelled"
            assert (await say(rt, "go on")).reason == "completed"
            paired(await rt.history("c"))
    assert not server.refused
    kinds = [envelope.get("error", {}).get("kind") for _, envelope in results(server.requests[-1].body)]
    assert kinds == [None, "cancelled", "unknown_tool"]


@tool(approval="required")
async def refund(order: int) -> str:
    """Give money back."""
    return f"order {order} is refunded"


@tool(executor="human", prompt="Which flight?")
def choose(options: list[str]) -> str:
    """Let the user choose."""
    raise NotImplementedError


@tool(manual=True)
def measure(what: str) -> str:
    """Let a person measure something."""
    raise NotImplementedError


@SIDES
async def test_denials_answers_and_submitted_results_are_accepted_by_the_provider(side):
    """Every decision becomes the result of its call [B26, B35]."""
    script = [
        [
            ToolCall("refund", {"order": 1}),
            ToolCall("refund", {"order": 2}),
            ToolCall("choose", {"options": ["AZ1", "AZ2"]}),
            ToolCall("measure", {"what": "the wing"}),
        ],
        "Done.",
    ]
    with StrictServer(script) as server:
        async with Runtime(agent(server, side, refund, choose, measure)) as rt:
            turn = await rt.send("c", "go")
            await turn.result()
            waiting = {(one.tool, one.args.get("order")): one.call for one in await rt.pending("c")}
            await rt.resolve("c", waiting["refund", 1], Deny("too much"))
            await rt.resolve("c", waiting["measure", None], Submit("5 m"))
            await rt.resolve("c", waiting["choose", None], Answer("AZ2"))
            assert len(server.requests) == 1
            await rt.resolve("c", waiting["refund", 2], Approve())
            assert (await turn.final_result()).reason == "completed"
    assert not server.refused
    denied, refunded, chosen, measured = [envelope for _, envelope in results(server.requests[-1].body)]
    assert (denied["error"]["kind"], "too much" in denied["error"]["message"]) == ("denied", True)
    assert [each["result"] for each in (refunded, chosen, measured)] == ["order 2 is refunded", "AZ2", "5 m"]


CHILD = """
import asyncio, sys
from holdfast import Agent, Runtime, tool
from holdfast.models.providers import ProviderModel

@tool
async def weather(city: str) -> str:
    "The weather in a city."
    return f"sunny in {city}"

@tool(recovery="fail")
async def work() -> str:
    "Work."
    print("working", flush=True)
    await asyncio.Event().wait()

async def main():
    agent = Agent("a", model=ProviderModel(sys.argv[1], key="k"), tools=[weather, work])
    async with Runtime(agent, store="sqlite:///" + sys.argv[2]) as rt:
        await (await rt.send("c", "go")).final_result()

asyncio.run(main())
"""


@SIDES
def test_after_a_kill_9_during_a_tool_the_provider_accepts_the_history(side, tmp_path):
    """The lost call gets an ``interrupted`` error, and the finished call keeps its result [B49, B50]."""

    @tool(recovery="fail")
    async def work() -> str:
        """Work."""
        raise AssertionError("it is not run again")

    script = [["I try.", ROME, ToolCall("work")], "I do not know.", "Fine."]
    path = tmp_path / "a.db"
    with StrictServer(script, follow=True) as server:
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, getattr(server, side), str(path)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout.readline() == "working\n"
        child.kill()
        child.wait()
        child.stdout.close()

        async def revived():
            async with Runtime(agent(server, side, weather, work), store=f"sqlite:///{path}") as rt:

                async def idle():
                    return (await rt.snapshot("c")).state == "idle"

                await until(idle)
                assert (await say(rt, "And now?")).reason == "completed"
                paired(await rt.history("c"))

        run_bounded(revived())
    assert not server.refused
    assert len(server.requests) == 3
    rome, lost = [envelope for _, envelope in results(server.requests[-1].body)]
    assert (rome["result"], lost["error"]["kind"]) == ("sunny in Rome", "interrupted")


# --- structured answers ---


def schema_in(side, body):
    if side == "anthropic":
        return body.get("output_config", {}).get("format", {}).get("schema")
    return body.get("response_format", {}).get("json_schema", {}).get("schema")


ANSWER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}


@SIDES
async def test_a_structured_answer_is_requested_with_its_schema_repaired_and_returned_as_the_value(side):
    """An answer that does not fit is sent back for repair; the turn ends with a validated object [B24]."""
    script = [[ROME], '{"city": "Rome"}', '{"city": "Rome", "degrees": 21}', "You are welcome."]
    with StrictServer(script) as server:
        async with Runtime(agent(server, side, weather)) as rt:
            end = await say(rt, "Rome?", output=ANSWER)
            assert (end.reason, end.value) == ("completed", {"city": "Rome", "degrees": 21})
            assert len(of(await rt.history("c"), OutputRejected)) == 1
            assert (await say(rt, "Thanks")).reason == "completed"
    assert not server.refused
    asked = [schema_in(side, incoming.body) for incoming in server.requests]
    assert [schema is not None and schema["required"] for schema in asked] == [["city", "degrees"]] * 3 + [False]
    assert "degrees" in json.dumps(server.requests[2].body["messages"][-1])  # names the missing field


@SIDES
async def test_a_separate_answer_is_requested_after_the_tools_are_done(side):
    """The turn ends with a validated object [B24]."""
    script = [[ROME], "It is sunny.", '{"city": "Rome", "degrees": 21}', "You are welcome."]
    with StrictServer(script) as server:
        async with Runtime(agent(server, side, weather, output_mode="separate")) as rt:
            end = await say(rt, "Rome?", output=ANSWER)
            assert (end.reason, end.value) == ("completed", {"city": "Rome", "degrees": 21})
            await say(rt, "Thanks")
    assert not server.refused
    assert [bool(schema_in(side, incoming.body)) for incoming in server.requests] == [False, False, True, False]
    assert ["Now give the final answer" in incoming.text for incoming in server.requests] == [False, False, True, False]


# --- requests ---


@SIDES
async def test_each_request_uses_the_key_of_its_principal_and_no_key_is_logged(side):
    keys = {"ann": "key-of-ann", "bob": "key-of-bob"}

    async def key_of(request):
        return keys.get(request.principal)

    with StrictServer(["hello"] * 4) as server:
        one = agent(server, side, model=ProviderModel(getattr(server, side), key=key_of))
        async with Runtime(one) as rt:
            async with asyncio.TaskGroup() as group:
                for who in keys:
                    group.create_task(say(rt, conversation=who, by=who))
            assert (await say(rt, conversation="ann", by="bob")).reason == "completed"
            end = await say(rt, conversation="eve", by="eve")
            logged = [repr(await rt.history(name)) for name in ("ann", "bob", "eve")]
    assert (end.error.kind, len(server.requests)) == ("not_authenticated", 3)
    sent = [incoming.headers["authorization"].removeprefix("Bearer ") for incoming in server.requests]
    assert (sorted(sent[:2]), sent[2]) == (["key-of-ann", "key-of-bob"], "key-of-bob")
    assert not any(key in log for key in keys.values() for log in logged)


def without_cache_markers(value):
    """Return the value without Anthropic's cache markers."""
    if isinstance(value, dict):
        return {name: without_cache_markers(part) for name, part in value.items() if name != "cache_control"}
    return [without_cache_markers(part) for part in value] if isinstance(value, list) else value


@SIDES
async def test_a_request_begins_with_the_previous_request_byte_for_byte(side):
    """With retention for ever, a request begins with the previous one [B63].

    Anthropic's cache markers move with the tail of the request and are not part of the cached prefix: they are left out
    of the comparison. Requests to OpenAI have none and are compared in the bytes that were sent.

    Every reply with calls has a thought: otherwise the layer adds an empty thought to the calls of the current turn, if
    the chat server shows its thoughts, and drops it in the next turn.
    """
    script = [
        [Thinking("hm"), "I look.", ROME, OSLO],
        "Sunny.",
        [Thinking("7?"), ToolCall("weather", {"city": 7})],
        [Thinking("no?"), ToolCall("nothing")],
        "Sorry: ça ne va pas \U0001f642",
        "no JSON",
        '{"n": 1}',
        Cut(["half a sen"]),
        "Back.",
        "Bye.",
    ]
    turns = ["Rome, Oslo?", "And 7?", ("A number?", {"type": "object", "properties": {"n": {"type": "integer"}}}), "x"]
    with StrictServer(script) as server:
        context = Context(retention=Retention.forever())
        async with Runtime(agent(server, side, weather, context=context, instructions="Be brief.")) as rt:
            for turn in [*turns, "Are you there?", "Bye"]:
                text, output = turn if isinstance(turn, tuple) else (turn, None)
                await say(rt, text, output=output)
    assert not server.refused
    assert len(server.requests) == len(script)
    assert ("weather", {"city": 7}) in [(name, args) for _, name, args in calls(server.requests[-1].body)]
    for earlier, later in pairwise(server.requests):
        was, now = earlier.body, later.body
        if side == "openai":
            start = earlier.text[earlier.text.index('"messages":[') :][: len(to_json(was["messages"])) + 10]
            assert start == f'"messages":{to_json(was["messages"])}'[:-1]
            assert start in later.text
        # The order of the keys is compared too.
        assert to_json(without_cache_markers(now["messages"][: len(was["messages"])])) == to_json(
            without_cache_markers(was["messages"])
        )
        assert to_json(without_cache_markers(now.get("tools"))) == to_json(without_cache_markers(was.get("tools")))
        assert to_json(without_cache_markers(now.get("system"))) == to_json(without_cache_markers(was.get("system")))


def to_json(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@SIDES
async def test_a_recorded_request_is_the_sent_one_without_secrets(side):
    with StrictServer([[ROME], "Sunny."]) as server:
        one = agent(
            server,
            side,
            weather,
            record="full",
            instructions="Use sk-live-0123456789abcdef.",
            settings={"max_tokens": 99},
            model=ProviderModel(getattr(server, side), key="sk-tenant-0123456789abcdef"),
        )
        async with Runtime(one) as rt:
            await say(rt, "My key is ghp_0123456789012345678901234567890123")
            said = of(await rt.history("c"), AssistantSaid)
            kept = [(await rt.store.artifact(each.context["request"])).decode() for each in said]
    assert "sk-live-0123456789abcdef" in server.requests[1].text  # only the record is redacted, not the request
    for text in kept:
        assert "0123456789" not in text
        assert text.count("[redacted]") == 2
    record = json.loads(kept[1])
    assert record["settings"] == {"max_tokens": 99}
    assert [tool["name"] for tool in record["tools"]] == ["weather"]
    assert [message["role"] for message in record["messages"]] == ["user", "assistant", "tool"]
    [(_, envelope)] = results(server.requests[1].body)
    assert json.loads(record["messages"][-1]["content"]) == envelope


def recorded_instructions(text, environment):
    request = Request(conversation="c", turn=1, step=1, instructions=text, messages=())
    with mock.patch.dict(os.environ, environment, clear=True):
        return json.loads(encode_request(request))["instructions"]


def test_text_that_looks_like_a_key_and_values_of_key_variables_are_redacted():
    environment = {"SHOP_TOKEN": 'tok"en-of-the-shop', "PATH": "/usr/bin:/bin", "PIN_KEY": "short"}
    text = json.dumps(
        {"a": 'it is tok"en-of-the-shop', "b": "/usr/bin:/bin is short", "c": "Bearer abcdefghijklmnop123"}
    )
    redacted = json.loads(recorded_instructions(text, environment))
    assert redacted == {"a": "it is [redacted: SHOP_TOKEN]", "b": "/usr/bin:/bin is short", "c": "Bearer [redacted]"}
    for secret in (
        "sk-ant-api03-0123456789abcdef",
        "gsk_0123456789abcdefg",
        "AKIAIOSFODNN7EXAMPLE",
        "xoxb-0123456789-a",
    ):
        assert recorded_instructions(f"<{secret}>", {}) == "<[redacted]>"
    for word in ("sk-short", "ask-me-anything", "a risk-averse-investment"):
        assert recorded_instructions(word, {}) == word
