"""Access and limits: tokens and cookies, hosts and origins, content types, sizes, and concurrent requests."""

import asyncio
import base64
import contextlib
import gc
import hashlib
import json
import re
from collections import defaultdict
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from support.web_site import TOKEN, desk, refund_agent, site
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from holdfast import Agent, Invalid, NotAllowed, Runtime, ScriptedModel, ToolCall, tool
from holdfast.errors import StoreError
from holdfast.server import Limits, TokenAuth, app, limits, process, routes
from holdfast.server.auth import Origins
from holdfast.server.limits import CHUNK_BYTES
from holdfast.server.problems import HTTPProblem
from holdfast.server.routes import ENDPOINTS

JSON = {"content-type": "application/json"}


async def test_every_route_without_a_valid_token_is_401():
    async with site(desk("x"), token=None) as s:
        paths = [(e.method, re.sub(r"\{\w+\}", "c", e.path)) for e in ENDPOINTS]
        paths += [("GET", p) for p in ("/", "/api/openapi.json", "/static/index.html", "/nothing", "/api/nothing")]
        for method, path in paths:
            for headers in ({}, {"authorization": "Bearer no"}, {"authorization": "Basic x"}, {"cookie": "holdfast=x"}):
                answer = await s.http.request(method, path, headers=headers)
                assert answer.status_code == 401, (method, path)
                assert answer.json()["kind"] == "not_authenticated"
                assert answer.headers["www-authenticate"] == "Bearer"


async def test_the_printed_address_sets_a_strict_cookie_and_drops_the_token_from_the_address():
    """By a script, not a redirect: a browser sends no strict cookie after a redirect that another site began."""
    async with site(desk("x"), token=None) as s:
        wrong = await s.http.get("/", params={"token": "wrong"})
        assert wrong.status_code == 401
        assert "set-cookie" not in wrong.headers
        first = await s.http.get("/", params={"token": TOKEN, "view": "in box"})
        assert (first.status_code, first.headers["content-type"]) == (200, "text/html; charset=utf-8")
        [script] = re.findall("<script>(.*)</script>", first.text)
        assert "searchParams.delete('token')" in script
        assert "location.replace" in script
        allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"script-src 'sha256-{allowed}'" in first.headers["content-security-policy"]
        assert first.headers["cache-control"] == "no-store"
        cookie = first.headers["set-cookie"]
        assert all(part in cookie for part in ("HttpOnly", "SameSite=Strict", "Path=/"))
        assert "Secure" not in cookie
        assert TOKEN not in cookie
        assert (await s.get("/api/me"))["principal"] == "ada"  # the client keeps cookies
        assert first.headers["referrer-policy"] == "no-referrer"
        value = first.headers["set-cookie"].partition("=")[2].partition(";")[0]
        s.http.cookies.clear()
        for headers in ({"authorization": f"Bearer {value}"}, {"cookie": f"{cookie.partition('=')[0]}={TOKEN}"}):
            await s.get("/api/me", 401, headers=headers)  # the token is no cookie, and the cookie is no token
        assert (await s.http.get("/", params={"token": value})).status_code == 401


async def test_a_token_in_the_query_of_any_other_address_is_refused():
    async with site(desk("x"), token=None) as s:
        for path in ("/api/me", "/static/index.html", "//evil.example/"):
            assert (await s.http.get(s.base + path, params={"token": TOKEN})).status_code == 401


async def test_a_browser_that_is_not_signed_in_gets_a_401_page_that_says_what_to_do():
    """Requests to the API get a problem document instead. The token form leads to the root of the mount."""
    reads = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    mounted: dict[str, Any] = {"wrap": lambda served: Starlette(routes=[Mount("/as&sent", served)])}
    async with site(desk("x"), token=None, **mounted) as s:
        for path in ("/as&sent/", "/as&sent/?token=wrong", "/as&sent/static/index.html", "/as&sent/nothing"):
            answer = await s.http.get(path, headers=reads)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert answer.headers["content-type"] == "text/html; charset=utf-8"
            assert "Open the address that the server printed" in answer.text
            # Without an action the form keeps the fragment of the address.
            place = "" if path.partition("?")[0] == "/as&sent/" else ' action="/as&amp;sent/"'
            assert f'<form{place}><label>Token <input name="token" type="password"' in answer.text
            assert ("The token is wrong or no longer valid" in answer.text) is ("wrong" in path)
            [look] = re.findall("<style>(.*)</style>", answer.text)
            allowed = base64.b64encode(hashlib.sha256(look.encode()).digest()).decode()
            policy = answer.headers["content-security-policy"]
            assert f"default-src 'none'; style-src 'sha256-{allowed}'; form-action 'self'" in policy
            assert "script" not in policy + answer.text
        for method, path in (("GET", "/as&sent/api/me"), ("POST", "/as&sent/")):
            answer = await s.http.request(method, path, headers=reads)
            assert (answer.status_code, answer.json()["kind"]) == (401, "not_authenticated")
        assert (await s.http.get("/as&sent/", params={"token": TOKEN}, headers=reads)).status_code == 200
    async with site(desk("x"), auth=lambda request: None) as s:
        answer = await s.http.get("/", headers=reads)
        assert answer.status_code == 401
        assert "ask the operator of this server" in answer.text
        assert "<form" not in answer.text


async def test_auth_may_be_any_function_and_refuses_with_none_or_not_allowed():
    async def auth(request):
        match request.headers.get("x-user"):
            case "eve":
                raise NotAllowed("not you")
            case name:
                return name

    async with site(desk("x"), auth=auth) as s:
        assert await s.get("/api/me", headers={"x-user": "bo"}) == {
            "principal": "bo",
            "roles": [],
            "deputy_of": [],
            "agents": ["desk"],
        }
        await s.get("/api/me", 401, headers={"x-user": "eve"})
        await s.get("/api/me", 401)


async def test_a_request_for_an_unknown_host_is_421():
    """This stops DNS rebinding: an attacker's name that resolves to this server."""
    async with site(desk("x"), hosts=["localhost", "desk.example"]) as s:
        for host in ("localhost", "localhost:1", "DESK.example:80", "127.0.0.1:9", "[::1]:8"):
            await s.get("/api/me", headers={"host": host})
        for host in ("evil.example", "localhost.evil.example", "", "[::1", "desk.example.", "a b"):
            assert "hosts" in (await s.get("/api/me", 421, headers={"host": host}))["detail"]


async def test_a_write_from_another_origin_is_403_and_has_no_cors_headers():
    async with site(desk("x"), origins=["https://friend.example"]) as s:
        own = s.base.removeprefix("http://")

        async def post(status, **headers):
            await s.post("/api/conversations", {}, status, headers={k.replace("_", "-"): v for k, v in headers.items()})

        await post(201)
        await post(201, origin=s.base)
        await post(201, origin="https://friend.example")
        await post(201, sec_fetch_site="same-origin")
        await post(403, origin="https://evil.example")
        await post(403, origin="null")
        await post(403, origin="http://127.0.0.1:1")
        await post(403, origin=f"http://{own}.evil.example")
        await post(403, sec_fetch_site="cross-site")
        await post(403, sec_fetch_site="same-site")
        answer = await s.http.delete("/api/grants/c/g", headers={"origin": "https://evil.example"})
        assert answer.status_code == 403
        for origin in ("https://evil.example", "https://friend.example.evil.example", "http://friend.example"):
            asks = {"origin": origin, "access-control-request-method": "POST"}
            for answer in (
                await s.http.options("/api/conversations", headers=asks),
                await s.http.get("/", headers=asks),
            ):
                assert not [name for name in answer.headers if name.startswith("access-control")]
                assert "origin" in answer.headers.get_list("vary", split_commas=True)
        assert (await s.http.options("/api/conversations", headers=asks)).status_code == 403


async def test_an_allowed_origin_passes_the_preflight_and_reads_every_response():
    friend = "https://friend.example"
    async with site(desk("x"), origins=[friend + "/"], token=None) as s:
        asks = {
            "origin": friend,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        first = await s.http.options("/api/conversations", headers=asks)
        assert first.status_code == 204
        assert first.headers["access-control-allow-headers"] == "authorization,content-type"
        assert {"GET", "POST", "DELETE"} == set(first.headers["access-control-allow-methods"].split(", "))
        known = {"authorization": f"Bearer {TOKEN}", "origin": friend}
        for answer in (
            first,
            await s.http.post("/api/conversations", json={"id": "c"}, headers=known),
            await s.http.get("/api/conversations/none", headers=known),
            await s.http.get("/api/me", headers={"origin": friend}),  # 401
        ):
            assert answer.headers["access-control-allow-origin"] == friend
            assert answer.headers["access-control-allow-credentials"] == "true"
            assert "origin" in answer.headers.get_list("vary", split_commas=True)
        async with s.events("/api/conversations/c/events", headers=known) as reader:
            assert reader.response.headers["access-control-allow-origin"] == friend


@pytest.mark.parametrize("origin", ["*", "desk.example", "https://desk.example/page", "https://", "null", "file://x"])
def test_a_malformed_origin_is_refused_when_the_application_is_made(origin):
    with pytest.raises(Invalid, match="origin"):
        app(Runtime(), origins=[origin])


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
async def test_a_content_type_other_than_json_is_415(kind):
    async with site(desk("x")) as s:
        headers = {"content-type": kind} if kind else {}
        answer = await s.http.post("/api/conversations", content=b"{}", headers=headers)
        assert (answer.status_code, answer.json()["kind"]) == (415, "invalid_args")


async def test_a_body_may_be_empty_but_not_malformed():
    async with site(desk("x")) as s:
        assert (await s.http.post("/api/conversations", headers=JSON)).status_code == 201
        odd = (b"{", b"\xff", b'{"id": "\\ud800"}', b"[" * 100_0, b'{"metadata": ' + b'{"a":' * 900 + b"1" + b"}" * 901)
        for body in (*odd, b'{"metadata": {"a": 1e999}}', b'{"metadata": {"a": NaN}}', b'{"id": "\\u0000"}'):
            answer = await s.http.post("/api/conversations", content=body, headers=JSON)
            assert answer.status_code == 422, (body[:40], answer.text)


async def test_a_body_that_is_too_large_is_refused_with_or_without_a_content_length():
    async with site(desk("x")) as s:
        large = b'{"id": "' + b"x" * 70_000 + b'"}'
        answer = await s.http.post("/api/conversations", content=large, headers=JSON)
        assert (answer.status_code, answer.json()["kind"]) == (413, "too_large")

        async def pieces():
            for _ in range(100):
                yield b"x" * 10_000

        answer = await s.http.post("/api/conversations", content=pieces(), headers=JSON)
        assert (answer.status_code, answer.json()["kind"]) == (413, "too_large")
        await s.get("/api/me")
        await s.post("/api/conversations", {"id": "c"}, 201)
        await s.post("/api/conversations/c/messages", {"text": "x" * 1_000_000}, 202)
        problem = await s.post("/api/conversations/c/messages", {"text": "x" * 5_000_000}, 422)
        assert problem["kind"] == "too_large"


async def test_an_answer_over_one_mebibyte_is_refused_and_the_call_stays_pending():
    async with site(desk(["?", ToolCall("choose", {"colours": []})], "ok")) as s:
        await s.begin()
        [entry] = await s.pending()
        path = f"/api/conversations/c/calls/{entry['call']}/resolve"
        problem = await s.post(path, {"decision": {"type": "answer", "value": "x" * 1_100_000}}, 422)
        assert problem["kind"] == "too_large"
        await s.post(path, {"decision": {"type": "answer", "value": "x" * 1_000_000}})


async def test_concurrent_requests_over_the_limit_get_503_with_retry_after():
    """Streams have a limit of their own: open streams do not block a decision."""
    began, go_on = asyncio.Event(), asyncio.Event()

    @tool(approval="required")
    async def slow(x: int) -> int:
        """Take your time."""
        return x

    @slow.preview
    async def _(x: int) -> int:
        if x:
            began.set()
            await go_on.wait()
        return x

    agent = Agent("slow", model=ScriptedModel([[ToolCall("slow", {"x": 0})], "ok"]), tools=[slow])
    async with site(agent, limits=Limits(requests=1, streams=1)) as s:
        await s.begin()
        [entry] = await s.pending()
        call = f"/api/conversations/c/calls/{entry['call']}"
        first = asyncio.create_task(s.post(f"{call}/preview", {"args": {"x": 1}}))
        await began.wait()
        answer = await s.http.get("/api/me")
        assert (answer.status_code, answer.headers["retry-after"], answer.json()["kind"]) == (503, "1", "backpressure")
        async with s.events("/api/pending/events") as reader:
            await reader.next()
            answer = await s.http.get("/api/pending/events")
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            go_on.set()
            await first
            await s.get("/api/me")
        while (await s.http.send(s.http.build_request("GET", "/api/pending/events"), stream=True)).status_code == 503:
            await asyncio.sleep(0.01)


async def test_unfinished_request_bodies_only_block_requests_of_the_same_principal():
    async with site(desk("x"), auth=lambda r: r.headers.get("x-who"), limits=Limits(requests=4)) as s:
        host, port = s.base.removeprefix("http://").split(":")
        half = f"POST /api/conversations HTTP/1.1\r\nhost: {host}:{port}\r\nx-who: eve\r\ncontent-length: 20\r\n"
        half += "content-type: application/json\r\n\r\n{"
        writers = []
        for _ in range(4):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(half.encode())
            writers.append(writer)
        eve, bo = {"x-who": "eve"}, {"x-who": "bo"}
        while (await s.http.post("/api/conversations", json={}, headers=eve)).status_code != 503:
            await asyncio.sleep(0.01)
        await s.get("/api/me", headers=eve)
        await s.post("/api/conversations", {}, 201, headers=bo)
        for writer in writers:
            writer.close()
        while (await s.http.post("/api/conversations", json={}, headers=eve)).status_code == 503:
            await asyncio.sleep(0.01)


async def test_unread_responses_are_abandoned_and_only_block_requests_of_the_same_principal(monkeypatch):
    monkeypatch.setattr(limits, "STALL_SECONDS", 2.0)
    chunk_sizes = defaultdict(list)

    async def ask(who, send):
        async def receive():
            return {"type": "http.request", "body": b""}

        path, headers = "/api/conversations/c/log", [(b"host", b"localhost"), (b"x-who", who)]
        scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b""}
        await served({**scope, "headers": headers, "root_path": "", "scheme": "http"}, receive, send)

    async def block_after_one_chunk(message):
        if message.get("body"):
            sizes = chunk_sizes[asyncio.current_task()]
            sizes.append(len(message["body"]))
            if len(sizes) > 1:
                await asyncio.Event().wait()

    statuses = []

    async def accept_all(message):
        if "status" in message:
            statuses.append(message["status"])

    async with Runtime(desk("x")) as rt:
        served = app(rt, auth=lambda r: r.headers.get("x-who"), limits=Limits(requests=4))
        await (await rt.send("c", "x" * 200_000)).result()
        unread = [asyncio.create_task(ask(b"eve", block_after_one_chunk)) for _ in range(4)]
        while sum(map(len, chunk_sizes.values())) < 8:  # all four are blocked in their second chunk
            await asyncio.sleep(0.001)
        await ask(b"eve", accept_all)
        await ask(b"bo", accept_all)
        assert statuses == [503, 200]
        await asyncio.gather(*unread)  # the server abandons them after STALL_SECONDS
        assert list(chunk_sizes.values()) == [[CHUNK_BYTES, CHUNK_BYTES]] * 4
        await ask(b"eve", accept_all)
        assert statuses == [503, 200, 200]


async def test_a_connection_that_never_sends_a_complete_request_is_closed(monkeypatch):
    monkeypatch.setattr(process, "HEAD_SECONDS", 0.5)
    async with site(desk("x")) as s, s.events("/api/pending/events") as stream:
        host, port = s.base.removeprefix("http://").split(":")
        for sent in (b"", b"GET / HT", b"GET /api/health HTTP/1.1\r\nhost: localhost\r\n\r\nGET / HTTP/1.1\r\nho"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            with contextlib.suppress(ConnectionResetError):
                await reader.read()
            writer.close()
        assert await stream.next()  # a stream that is open stays open
        await s.get("/api/me")


async def test_a_request_that_outlasts_the_drain_of_a_stopping_server_gets_503(monkeypatch, caplog):
    began = asyncio.Event()

    @tool(approval="required")
    async def slow(x: int) -> int:
        """Take your time."""
        return x

    @slow.preview
    async def _(x: int) -> int:
        if x:
            began.set()
            await asyncio.sleep(60)
        return x

    monkeypatch.setattr(process, "DRAIN_SECONDS", 0.2)
    agent = Agent("slow", model=ScriptedModel([[ToolCall("slow", {"x": 0})], "ok"]), tools=[slow])
    async with site(agent) as s:
        await s.begin()
        [entry] = await s.pending()
        path = f"/api/conversations/c/calls/{entry['call']}/preview"
        asked = asyncio.create_task(s.http.post(path, json={"args": {"x": 1}}))
        await began.wait()
        s.stop()
        answer = await asked
        assert (answer.status_code, answer.json()["kind"], answer.headers["retry-after"]) == (503, "backpressure", "1")
    assert not [record for record in caplog.records if record.exc_info]


async def test_every_response_has_the_security_headers():
    async with site(refund_agent()) as s:
        for path in ("/api/me", "/", "/nothing", "/api/pending"):
            headers = (await s.http.get(path)).headers
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["x-frame-options"] == "DENY"
            assert headers["referrer-policy"] == "no-referrer"
            assert "frame-ancestors 'none'" in headers["content-security-policy"]
            assert "server" not in headers
        assert (await s.http.get("/api/me")).headers["cache-control"] == "no-store"


async def test_a_store_failure_is_503_with_retry_after_unless_the_write_may_have_been_recorded(monkeypatch, caplog):
    async with site(refund_agent()) as s:
        await s.begin()
        [entry] = await s.pending()
        store, read, append = s.runtime.store, s.runtime.store.rows, s.runtime.store.append
        faults: list[StoreError] = []

        async def fail(*_, **__):
            raise faults[-1]

        async def refusal_of(request):
            answer = await request
            problem = answer.json()
            assert "there" not in problem["detail"]  # the store's address is not for every caller
            assert set(problem["details"]) <= {"outcome"}
            outcome = problem["details"].get("outcome")
            return answer.status_code, answer.headers.get("retry-after"), problem["kind"], outcome

        faults.append(StoreError("nothing listens there", kind="log_read_failed", details={"place": "there"}))
        store.rows = fail
        assert await refusal_of(s.http.get("/api/health")) == (503, "1", "log_read_failed", None)
        assert "a request was refused: nothing listens there" in caplog.text
        monkeypatch.setattr(routes, "HEALTH_SECONDS", 0.1)
        store.rows = lambda **_: asyncio.Event().wait()
        assert await refusal_of(s.http.get("/api/health")) == (503, "1", "log_read_failed", None)
        store.rows = read
        decision = {"decision": {"type": "approve", "digest": entry["digest"]}}
        path = f"/api/conversations/c/calls/{entry['call']}/resolve"
        store.append = fail
        for outcome, status, again in (("nothing", 503, "1"), ("unknown", 500, None)):
            faults.append(StoreError("the connection to there broke", details={"outcome": outcome, "place": "there"}))
            assert await refusal_of(s.http.post(path, json=decision)) == (status, again, "log_write_failed", outcome)
            item = {"conversation": "c", "call": entry["call"], **decision}
            [result] = (await s.post("/api/pending/resolve", {"decisions": [item]}))["results"]
            assert (result["problem"]["status"], result["problem"]["details"]["outcome"]) == (status, outcome)
        store.append = append
        await s.post(path, decision)


async def test_a_deleted_write_ahead_log_is_a_500_that_says_to_restart(tmp_path):
    """A retry cannot help, so there is no 503 and no Retry-After."""
    path = tmp_path / "holdfast.db"
    async with site(refund_agent(), store=f"sqlite:///{path}") as s:
        await s.begin()
        [entry] = await s.pending()
        (tmp_path / "holdfast.db-wal").unlink()
        decision = {"decision": {"type": "approve", "digest": entry["digest"]}}
        resolve = f"/api/conversations/c/calls/{entry['call']}/resolve"
        for _ in range(2):
            for request in (s.http.post(resolve, json=decision), s.http.get("/api/health")):
                answer = await request
                problem = answer.json()
                assert (answer.status_code, answer.headers.get("retry-after")) == (500, None)
                assert "Retrying does not help: restart this process." in problem["detail"]
                assert "; try again" not in problem["detail"]
                assert str(tmp_path) not in problem["detail"]  # the store's path is not for every caller
                assert problem["details"] == {"outcome": "nothing"}


async def test_an_unexpected_exception_is_a_500_problem_without_the_text_of_the_exception():
    def auth(request):
        raise RuntimeError("a secret of the inside")

    async with site(desk("x"), auth=auth) as s:
        problem = await s.get("/api/me", 500)
        assert problem["kind"] == "handler_failed"
        assert "secret" not in str(problem)


async def test_an_ipv6_loopback_host_with_a_port_is_accepted():
    async with site(desk("x")) as s, httpx.AsyncClient(trust_env=False) as other:
        answer = await other.get(f"{s.base}/api/me", headers={"host": "[::1]:80"})
        assert answer.status_code == 401


async def test_a_long_unknown_host_is_refused_and_not_cached():
    async with site(desk("x")) as s:
        for n in range(3):
            answer = await s.http.get("/api/me", headers={"host": f"{n}." + "x" * 20_000})
            assert answer.status_code == 421
    origins = Origins(["localhost"], [])
    with pytest.raises(HTTPProblem):
        origins.check_request("GET", {"host": "x" * 20_000})
    assert origins._known.cache_info().currsize == 0


async def test_the_headers_of_an_asgi_scope_may_be_a_one_shot_iterator():
    messages = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        messages.append(message)

    async with Runtime() as rt:
        headers = iter([(b"host", b"localhost"), (b"authorization", f"Bearer {TOKEN}".encode())])
        scope = {"type": "http", "method": "GET", "path": "/api/me", "query_string": b"", "headers": headers}
        await app(rt, TokenAuth(TOKEN, "ada"))(scope, receive, send)
    assert (messages[0]["status"], b"ada" in messages[1]["body"]) == (200, True)


async def test_a_response_has_the_same_headers_with_and_without_a_host_application():
    async with site(refund_agent()) as direct, site(refund_agent(), wrap=lambda served: served) as hosted:
        heads = []
        for s in (direct, hosted):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(s.base.rpartition(":")[2]))
            ask = f"GET /api/me HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {TOKEN}\r\n\r\n".encode()
            writer.write(ask)
            whole = await reader.readuntil(b"}")  # the whole response
            head, _, body = whole.partition(b"\r\n\r\n")
            writer.write(ask + ask)  # pipelined: two responses, in order
            assert [await reader.readexactly(len(whole)) for _ in "12"] == [whole, whole]
            writer.write(ask.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
            last = await reader.read()
            assert last.endswith(body), "the connection is closed after the response"
            assert b"connection: close" in last
            writer.close()
            heads.append({line.partition(b": ")[::2] for line in head.split(b"\r\n") if not line.startswith(b"date")})
        assert heads[0] == heads[1]


async def test_large_responses_arrive_whole_and_a_head_response_has_no_body():
    async with site(refund_agent()) as s:
        whole = await s.http.get("/api/openapi.json")
        assert len(whole.content) == int(whole.headers["content-length"]) > 10_000
        head = await s.http.head("/api/openapi.json")
        assert (head.content, head.headers["content-length"]) == (b"", whole.headers["content-length"])
        await s.begin("c", "x" * 200_000)
        await s.pending()
        log = (await s.get("/api/conversations/c/log"))["events"]
        assert "x" * 200_000 in {event.get("text") for event in log}


async def test_a_finished_request_leaves_no_reference_cycle():
    """The garbage collector runs seldom: until then large request heads would fill the memory."""
    async with site(refund_agent()) as s:
        await s.get("/api/me")
        gc.collect()
        gc.disable()
        try:
            for headers in ({}, {"authorization": "Bearer nobody"}):
                for _ in range(20):
                    await s.http.get("/api/me", headers=headers)
            left = [each for each in gc.get_objects() if isinstance(each, RequestResponseCycle)]
        finally:
            gc.enable()
        assert len(left) <= 2  # the connection keeps its last one


async def ask_raw(s, *pieces):
    """Send bytes on a new connection until the server stops reading; return the whole response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(s.base.rpartition(":")[2]))
    answer = b""

    async def read():
        nonlocal answer
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(65536):
                answer += piece

    reading = asyncio.create_task(read())
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
    await reading
    writer.close()
    return answer


def status_of(answer):
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize(
    ("line", "piece"),
    [(b"", b"x-a: b\r\n" * 1000), (b"", b"x" * 10_000), (b"x-a: ", b"v" * 10_000)],
    ids=["many lines", "endless header name", "endless header value"],
)
async def test_a_head_that_grows_over_64_kb_is_refused_with_431_and_its_connection_closes(line, piece):
    """A client without a token cannot make the server buffer more."""

    async with site(desk("x")) as s:
        answer = await ask_raw(s, b"GET /api/me HTTP/1.1\r\nhost: localhost\r\n" + line, *[piece] * 100)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431 ")
        assert b"\r\nconnection: close" in head
        problem = json.loads(body)
        assert (problem["status"], problem["kind"]) == (431, "too_large")
        await s.get("/api/me")


async def test_an_address_over_64_kb_is_refused_with_431():
    async with site(desk("x")) as s:
        assert status_of(await ask_raw(s, b"GET /", *[b"x" * 10_000] * 100)) == 431


async def test_a_head_below_64_kb_is_accepted_in_one_piece_or_in_many():
    async with site(desk("x")) as s:
        lines = [f"x-{n}: {'v' * 600}\r\n".encode() for n in range(100)]
        end = f"authorization: Bearer {TOKEN}\r\nconnection: close\r\n\r\n".encode()
        pieces = [b"GET /api/me HTTP/1.1\r\nhost: localhost\r\n", *lines, end]
        assert status_of(await ask_raw(s, *pieces)) == 200
        assert status_of(await ask_raw(s, b"".join(pieces))) == 200


async def test_more_than_256_header_lines_are_refused_with_431():
    """A header line costs far more memory than its bytes."""
    async with site(desk("x")) as s:
        ask = b"GET /api/me HTTP/1.1\r\nhost: localhost\r\n" + b"x-a: b\r\n" * 300 + b"\r\n"
        assert status_of(await ask_raw(s, ask)) == 431


async def test_trailers_never_become_headers():
    """A token, a host or an origin after the body is ignored."""
    seen = []

    def auth(request):
        seen.append(dict(request.headers))
        return "ada" if request.headers.get("authorization") == f"Bearer {TOKEN}" else None

    async with site(desk("x"), auth=auth) as s:
        head = b"POST /api/conversations HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head += b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
        trailer = f"authorization: Bearer {TOKEN}\r\nx-later: 1\r\n\r\n".encode()
        assert status_of(await ask_raw(s, head + trailer)) == 401
        assert status_of(await ask_raw(s, head, trailer)) == 401
        assert [h for h in seen if "x-later" in h] == []


@pytest.mark.parametrize("piece", [b"x" * 10_000, b"x-a: b\r\n" * 1000], ids=["one line", "many lines"])
async def test_endless_trailers_close_the_connection(piece):
    async with site(desk("x")) as s:
        head = b"POST /api/nothing HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"
        answer = await ask_raw(s, head, *[piece] * 100)  # returns because the server has closed the connection
        assert status_of(answer) == 401


async def test_the_application_refuses_a_long_head_that_another_server_accepts():
    messages = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        messages.append(message)

    async with Runtime() as rt:
        headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {TOKEN}".encode()), (b"x", b"v" * 70_000)]
        scope = {"type": "http", "method": "GET", "path": "/api/me", "query_string": b"", "headers": headers}
        await app(rt, TokenAuth(TOKEN, "ada"))(scope, receive, send)
    assert (messages[0]["status"], json.loads(messages[1]["body"])["kind"]) == (431, "too_large")


async def test_two_host_or_origin_headers_are_refused_with_400():
    """A proxy could check one of the two headers and Holdfast the other."""
    async with site(desk("x")) as s:
        for twice in (b"host: localhost\r\nhost: evil.example", b"host: evil.example\r\nHost: localhost"):
            answer = await ask_raw(s, b"GET /api/me HTTP/1.1\r\n" + twice + b"\r\nconnection: close\r\n\r\n")
            assert status_of(answer) == 400
            assert b"two host headers" in answer
        origins = [("origin", s.base), ("origin", "https://evil.example")]
        answer = await s.http.post("/api/conversations", json={}, headers=origins)
        assert (answer.status_code, answer.json()["kind"]) == (400, "invalid_args")


async def test_an_origin_with_the_same_host_and_another_scheme_is_403():
    """Different programs can serve http and https of one name. A proxy forwards the scheme of the request."""
    async with site(desk("x"), hosts=["desk.example"]) as s:
        host = {"host": "desk.example"}
        refused = await s.post("/api/conversations", {}, 403, headers={**host, "origin": "https://desk.example"})
        assert "--allow-origin" in refused["detail"]
        for origin in ("http://desk.example", "http://desk.example:80"):
            await s.post("/api/conversations", {}, 201, headers={**host, "origin": origin})
        forwarded = {**host, "x-forwarded-proto": "https"}  # by a proxy on this machine
        await s.post("/api/conversations", {}, 201, headers={**forwarded, "origin": "https://desk.example"})
        await s.post("/api/conversations", {}, 403, headers={**forwarded, "origin": "http://desk.example"})
