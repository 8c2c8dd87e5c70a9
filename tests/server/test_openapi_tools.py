"""Tools from an OpenAPI document, against a real FastAPI application on loopback."""

import asyncio
import json
import threading

import pytest
from support.async_tests import until
from support.revival import kill
from support.runtimes import agent, sees, skip_time
from support.shop_api import serving_shop

from holdfast import Approve, Runtime, ScriptedModel, ToolCall, ToolError
from holdfast.errors import KINDS
from holdfast.stores.memory import MemoryStore
from holdfast.tools import Call, Toolset
from holdfast.tools.openapi.client import KIND_OF_STATUS, MAX_ERROR_BYTES


@pytest.fixture
def shop(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving_shop() as running:
        yield running


def tools_of(shop, **options):
    return Toolset.from_openapi(shop.document(), base_url=shop.base, **options)


async def run(tools, path, method="get", args=None, **call):
    """Run the handler of one operation, without a runtime."""
    [tool] = [one for one in tools if one.spec.metadata["openapi"] == {"method": method.upper(), "path": path}]
    return await tool(args or {}, Call(tool=tool.spec.name, **call))


async def failure(*given, **options):
    """Run the handler of one operation and return its error."""
    with pytest.raises(ToolError) as caught:
        await run(*given, **options)
    return caught.value


async def test_path_query_header_and_cookie_parameters_arrive_where_the_document_says(shop):
    tools = tools_of(shop)
    item = {"sku": "a b/ü?#", "size": "large", "tag": ["x&y", "z"]}
    assert await run(tools, "/seen", args={"x-trace": "t 1", "basket": "b;1"}) == {"trace": "t 1", "basket": "b%3B1"}
    await run(tools, "/items/{sku}", args={**item, "sku": "a b,ü?#"})
    assert shop.requests[-1]["path"] == "/items/a%20b%2C%C3%BC%3F%23"
    assert shop.requests[-1]["query"] == "size=large&tag=x%26y&tag=z"
    assert await run(tools, "/items/{sku}", args={**item, "sku": "a b"}) == {
        "sku": "a b",
        "size": "large",
        "tags": ["x&y", "z"],
    }


async def test_a_gated_post_shows_its_request_and_runs_once_after_the_approval(shop):
    model = ScriptedModel(
        [[ToolCall("create_order_orders_post", {"body": {"lines": [{"sku": "s", "count": 2}]}})], "ok"]
    )
    seen = []

    def auth(principal):
        seen.append(principal.id)
        return {"Authorization": f"Bearer token-of-{principal.id}"}

    store = MemoryStore()
    async with Runtime(agent(model, tools_of(shop, auth=auth)), store=store) as rt:
        turn = await rt.send("c", "order", by="ada")
        [pending] = (await turn.result()).pending
        body = {"lines": [{"sku": "s", "count": 2}]}
        assert pending.preview == {"method": "POST", "url": f"{shop.base}/orders", "body": body}
        assert (seen, shop.requests) == ([], []), "nothing is sent and no credentials are asked for before the approval"
        await rt.resolve("c", pending.call, Approve(), by="boss")
        assert (await turn.final_result()).reason == "completed"
        [request] = shop.requests
        assert seen == ["ada"]
        assert request["headers"]["authorization"] == "Bearer token-of-ada"
        assert request["headers"]["idempotency-key"] == f"c/{pending.call}"
        assert request["headers"]["content-type"] == "application/json"
        assert sees(model) == [{"ok": True, "result": {"id": 1, "lines": 1, "note": None}}]
        assert len(shop.orders) == 1
        assert "token-of-ada" not in repr(await rt.history("c"))


async def test_a_get_runs_without_an_approval_and_sends_no_idempotency_key(shop):
    model = ScriptedModel([[ToolCall("read_item_items__sku__get", {"sku": "s"})], "ok"])
    async with Runtime(agent(model, tools_of(shop))) as rt:
        assert (await (await rt.send("c", "read")).final_result()).reason == "completed"
    assert sees(model) == [{"ok": True, "result": {"sku": "s", "size": "small", "tags": []}}]
    assert "idempotency-key" not in shop.requests[0]["headers"]


async def test_arguments_that_do_not_fit_the_documents_schema_are_refused_before_anything_is_sent(shop):
    """Enums, minima and required fields of the document's models are checked here, not by the server."""
    wrong = [
        ToolCall("read_item_items__sku__get", {"sku": "s", "size": "huge"}),
        ToolCall("create_order_orders_post", {"body": {"lines": [{"sku": "s", "count": 0}]}}),
        ToolCall("create_order_orders_post", {"body": {"lines": [{"count": 1}]}}),
        ToolCall("create_order_orders_post", {}),
    ]
    model = ScriptedModel([wrong, "ok"])
    async with Runtime(agent(model, tools_of(shop))) as rt:
        await (await rt.send("c", "go")).final_result()
    assert [one["error"]["kind"] for one in sees(model)] == ["invalid_args"] * 4
    assert shop.requests == []


async def test_null_is_accepted_where_the_document_allows_it(shop):
    body = {"lines": [], "note": None}
    model = ScriptedModel([[ToolCall("create_order_orders_post", {"body": body})], "ok"])
    async with Runtime(agent(model, tools_of(shop, approval="auto"))) as rt:
        await (await rt.send("c", "go")).final_result()
    assert sees(model)[0]["result"] == {"id": 1, "lines": 0, "note": None}


async def test_an_error_status_becomes_a_tool_error_of_a_fitting_kind_with_the_status_and_the_body(shop):
    tools = tools_of(shop)
    missing = await failure(tools, "/items/{sku}", args={"sku": "missing"})
    assert (missing.kind, missing.details) == ("not_found", {"status": 404, "body": {"detail": "no such item"}})
    invalid = await failure(tools, "/orders", "post", {"body": {"lines": 1}})
    assert (invalid.kind, invalid.details["status"]) == ("invalid_args", 422)
    assert invalid.details["body"]["detail"][0]["loc"] == ["body", "lines"]
    limited = await failure(tools, "/limited")
    assert (limited.kind, limited.details["retry_after"]) == ("rate_limited", "7")
    assert (await failure(tools, "/me")).kind == "not_authenticated"
    assert set(KIND_OF_STATUS.values()) <= set(KINDS)


async def test_an_error_body_is_bounded_and_a_failed_post_says_that_it_may_have_taken_effect(shop):
    tools = tools_of(shop)
    broken = await failure(tools, "/broken")
    assert broken.kind == "provider_http_error"
    assert "effect" not in broken.message
    assert len(broken.details["body"]) <= MAX_ERROR_BYTES + 4
    assert "may have taken effect" in (await failure(tools, "/broken", "post")).message


async def test_credentials_that_a_server_echoes_are_replaced_in_results_and_errors(shop):
    tools = tools_of(shop, auth=lambda principal: {"Authorization": f"Bearer secret-{principal.id}"})
    assert await run(tools, "/me", principal="ada") == {"authorization": "[redacted]"}
    assert shop.requests[-1]["headers"]["authorization"] == "Bearer secret-ada"
    refused = await failure(tools, "/me", principal="expired")
    assert refused.kind == "permission_denied"
    assert "secret-" not in refused.message + json.dumps(refused.details)
    assert "[redacted]" in json.dumps(refused.details)


async def test_an_auth_function_may_be_async_and_the_text_of_its_exception_is_not_shown(shop, caplog):
    async def auth(principal):
        if principal.id == "bob":
            raise ValueError("password hunter2-hunter2")
        return {"Authorization": f"Bearer {principal.id}-token"}

    tools = tools_of(shop, auth=auth)
    await run(tools, "/me", principal="ada")
    assert shop.requests[-1]["headers"]["authorization"] == "Bearer ada-token"
    failed = await failure(tools, "/me", principal="bob")
    assert failed.kind == "not_authenticated"
    assert "ValueError" in failed.message
    assert "nothing was sent" in failed.message
    assert "hunter2" not in failed.message + caplog.text
    assert len(shop.requests) == 1
    assert (await failure(tools_of(shop, auth=lambda _: "token"), "/me")).kind == "not_authenticated"


async def test_a_text_response_is_a_string_a_binary_one_is_described_and_an_empty_one_is_its_status(shop):
    tools = tools_of(shop)
    assert await run(tools, "/text") == "grüße"
    assert await run(tools, "/picture") == {"content_type": "image/png", "bytes": 100}
    assert await run(tools, "/orders/{number}", "delete", {"number": 4}) == {"status": 204}
    head = await run(tools, "/items/{sku}", "head", {"sku": "s"})
    assert (head["status"], head["headers"]["etag"]) == (200, '"7"')


async def test_a_response_that_is_too_large_or_not_the_json_that_it_claims_is_an_error(shop):
    tools = tools_of(shop)
    assert (await failure(tools, "/huge")).kind == "too_large"
    assert (await failure(tools, "/not-json")).kind == "invalid_response"


@pytest.mark.parametrize("value", ["..", ".", "../me", "a/../../me", "..\\me", ""])
async def test_a_path_value_cannot_leave_its_segment(shop, value):
    refused = await failure(tools_of(shop), "/items/{sku}", args={"sku": value})
    assert refused.kind == "invalid_args"
    assert shop.requests == []


async def test_a_path_value_cannot_name_another_host_or_add_a_query_or_a_header(shop):
    tools = tools_of(shop)
    assert (await run(tools, "/items/{sku}", args={"sku": "x@evil.example?admin=1#y"}))["sku"] == (
        "x@evil.example?admin=1#y"
    )
    assert shop.requests[-1]["query"] == ""
    refused = await failure(tools, "/seen", args={"x-trace": "a\r\nX-Admin: 1"})
    assert refused.kind == "invalid_args"
    assert len(shop.requests) == 1


async def test_a_redirect_is_followed_within_the_server_and_never_to_another_one(shop, monkeypatch):
    with serving_shop() as other:
        tools = tools_of(shop, auth=lambda _: {"X-Api-Key": "secret-key", "Authorization": "Bearer secret"})
        await run(tools, "/moved")
        assert shop.paths() == ["GET /moved", "GET /me"]
        shop.elsewhere = f"{other.base}/me"
        stolen = await failure(tools, "/stolen")
        assert (stolen.kind, stolen.details["status"]) == ("provider_http_error", 307)
        assert other.requests == []
        moved = await failure(tools, "/moved", "post")
        assert "not followed" in moved.message
        assert shop.paths()[-1] == "POST /moved", "an approval covers one request to one path"


@pytest.mark.parametrize(("method", "effect"), [("get", ""), ("post", " and may have taken effect")])
async def test_a_timeout_says_whether_the_request_may_have_taken_effect(shop, method, effect):
    task = asyncio.create_task(failure(tools_of(shop, timeout="30s"), "/slow", method))
    await asyncio.to_thread(shop.entered.wait)
    skip_time(31)
    error = await task
    assert error.kind == "timeout"
    assert (
        error.message == f"{'read' if method == 'get' else 'write'}_slow_slow_{method} did not finish in 30 s{effect}"
    )
    assert error.details == {"timeout": 30.0, "sent": True}


async def test_a_timeout_before_the_request_is_sent_says_so(shop):
    started, release = threading.Event(), threading.Event()

    def auth(principal):
        started.set()
        release.wait()

    task = asyncio.create_task(failure(tools_of(shop, timeout="30s", auth=auth), "/slow", "post"))
    await asyncio.to_thread(started.wait)
    skip_time(31)
    error = await task
    release.set()
    assert (error.kind, error.details["sent"]) == ("timeout", False)
    assert error.message.endswith("did not finish in 30 s; nothing was sent")


async def test_a_server_that_cannot_be_reached_is_a_network_error_that_says_nothing_was_sent(shop):
    from holdfast.server.process import open_socket

    with open_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
    tools = Toolset.from_openapi(shop.document(), base_url=f"http://127.0.0.1:{port}")
    error = await failure(tools, "/orders", "post", {"body": {"lines": []}})
    assert (error.kind, error.details) == ("network", {"sent": False})
    assert "nothing was sent" in error.message


async def test_after_a_crash_an_interrupted_post_waits_for_a_person_and_a_get_is_repeated(shop):
    store = MemoryStore()
    calls = [ToolCall("write_slow_slow_post", {}), ToolCall("read_slow_slow_get", {})]
    first = Runtime(agent([calls, "ok"], tools_of(shop, approval="auto")), store=store)
    await first.start()
    await first.send("c", "go")
    await until(lambda: len(shop.requests) == 2)
    await kill(first)
    shop.requests.clear()
    model = ScriptedModel([calls, "ok"], follow=True)
    async with Runtime(agent(model, tools_of(shop, approval="auto")), store=store.sibling()) as second:
        await until(lambda: shop.requests)
        [pending] = await until(second.pending)
        assert (pending.tool, pending.recovery) == ("write_slow_slow_post", True)
        assert shop.paths() == ["GET /slow"]
