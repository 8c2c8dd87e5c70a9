"""The application mounted in another one, and alone under an ASGI server."""

import asyncio

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from support.web_site import TOKEN, desk, refund_agent, site

from holdfast import Runtime
from holdfast.server import TokenAuth, app
from holdfast.server.process import open_socket


def mount_at(path):
    """Return a wrapper: a host application with its own page, and ours mounted at ``path``."""

    def wrap(served):
        async def own(request):
            return PlainTextResponse("the host's own")

        return Starlette(routes=[Route("/", own), Mount(path, app=served)])

    return wrap


async def test_a_mounted_application_serves_its_routes_its_page_and_its_cookie_below_its_path():
    async with site(refund_agent(), wrap=mount_at("/desk/holdfast")) as s:
        assert (await s.http.get("/")).text == "the host's own"
        below = "/desk/holdfast"
        await s.post(f"{below}/api/conversations", {"id": "a/b"}, 201)
        await s.post(f"{below}/api/conversations/a%2Fb/messages", {"text": "hi"}, 202)
        async with s.events(f"{below}/api/conversations/a%2Fb/events") as reader:
            suspended = (await reader.until("CallSuspended"))[-1][2]
        path = f"{below}/api/conversations/a%2Fb/calls/{suspended['call_id']}/resolve"
        await s.post(path, {"decision": {"type": "deny"}})
        await s.get(f"{below}/nothing", 404)
        async with httpx.AsyncClient(base_url=s.base, trust_env=False, follow_redirects=True) as page:
            login = await page.get(below, params={"token": TOKEN})
            assert (login.status_code, login.url.path) == (200, f"{below}/")
            assert "Path=/desk/holdfast/" in login.headers["set-cookie"]
            assert "importmap" in (await page.get(f"{below}/")).text
            assert (await page.get(f"{below}/api/me")).json()["principal"] == "ada"
            without = await page.get(below)
            assert without.url.path == f"{below}/"


async def test_headers_that_the_host_application_adds_are_on_our_responses():
    def add_header(served):
        async def host(scope, receive, send):
            async def send_signed(message):
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], (b"x-signed", b"by the host")]
                await send(message)

            await served(scope, receive, send_signed)

        return host

    async with site(refund_agent(), wrap=add_header) as s:
        answer = await s.http.get("/api/me")
        assert (answer.status_code, answer.headers["x-signed"]) == (200, "by the host")


async def test_the_mount_path_without_a_trailing_slash_redirects_and_keeps_the_token():
    async with Runtime(desk("x")) as runtime:
        transport = httpx.ASGITransport(app(runtime, TokenAuth(TOKEN)), root_path="/p")
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            answer = await http.get("/p", params={"token": TOKEN, "a": "b c"})
            assert (answer.status_code, answer.headers["location"]) == (308, f"/p/?token={TOKEN}&a=b+c")
            login = await http.get(answer.headers["location"])
            assert (login.status_code, "Path=/p/;" in login.headers["set-cookie"]) == (200, True)


async def test_mounted_streams_end_when_the_host_stops():
    async with site(desk("x"), wrap=mount_at("/x")) as s, s.events("/x/api/pending/events") as reader:
        await reader.next()
        s.stop()
        assert await reader.rest() == []


async def test_under_a_plain_asgi_server_the_application_starts_and_closes_the_runtime():
    runtime = Runtime(desk("hello"))
    listening = open_socket("127.0.0.1", 0)
    base = f"http://127.0.0.1:{listening.getsockname()[1]}"
    config = uvicorn.Config(app(runtime, TokenAuth(TOKEN)), http="httptools", ws="none", log_config=None)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server._serve([listening]))
    while not server.started:
        await asyncio.sleep(0.01)
    async with httpx.AsyncClient(base_url=base, trust_env=False) as http:
        answer = await http.get("/api/me", headers={"authorization": f"Bearer {TOKEN}"})
        assert answer.json()["agents"] == ["desk"]
    server.should_exit = True
    await task
    assert runtime._engine.closing


async def test_a_request_before_the_runtime_has_started_is_503():
    runtime = Runtime(desk("hello"))
    transport = httpx.ASGITransport(app(runtime, TokenAuth(TOKEN)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        answer = await http.get("/api/me", headers={"authorization": f"Bearer {TOKEN}"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
