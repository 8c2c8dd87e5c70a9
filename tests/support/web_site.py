"""A real server on loopback, an HTTP client with its token, and readers of its event streams."""

# Tools that a person or a page answers have a return type and no body.
# pyright: reportReturnType=false

import asyncio
import json
from contextlib import asynccontextmanager
from typing import Any

import httpx

from holdfast import Agent, Runtime, ScriptedModel, ToolCall, ToolError, tool
from holdfast.server import TokenAuth, app
from holdfast.server.process import open_socket, serve

TOKEN = "a-token-of-the-tests"


@tool(approval="required", risk="high")
async def refund(order: int, amount: float) -> dict:
    """Give money back."""
    return {"refunded": amount}


@refund.preview
async def _(order: int, amount: float) -> dict:
    if amount > 100:
        raise ToolError("invalid_args", "more than was paid")
    return {"pays": f"{amount:.2f} for order {order}"}


@tool(approval="required")
async def greet(name: str) -> str:
    """Say hello."""
    return f"hello {name}"


@tool(executor="human", prompt="Which colour?")
def choose(colours: list[str]) -> str:
    """Ask which colour."""


@tool(executor="client")
def locate() -> str:
    """Where the page is."""


def desk(*turns, name="desk"):
    """Return an agent whose model gives these replies, in any number of conversations."""
    return Agent(name, model=ScriptedModel(list(turns), follow=True), tools=[refund, greet, choose, locate])


def refund_agent(amount=5.0, *more):
    """Return an agent that asks for the refund of this amount, which needs an approval."""
    return desk(["let me see", ToolCall("refund", {"order": 7, "amount": amount}), *more], "done")


class Site:
    """A running server, and an HTTP client that has its token."""

    def __init__(self, runtime, base, http, stop):
        self.runtime, self.base, self.http, self.stop = runtime, base, http, stop

    async def get(self, path, status=200, **options):
        return self._read(await self.http.get(path, **options), status)

    async def post(self, path, body=None, status=200, **options):
        return self._read(await self.http.post(path, json=body if body is not None else {}, **options), status)

    async def delete(self, path, status=204):
        return self._read(await self.http.delete(path), status)

    def _read(self, response, status) -> Any:
        assert response.status_code == status, f"{response.status_code}, not {status}: {response.text}"
        if status >= 400:
            assert response.headers["content-type"] == "application/problem+json"
            assert response.json()["status"] == status
        return response.json() if response.content else None

    async def begin(self, conversation="c", text="hi", **more):
        """Open a conversation and send a message to it."""
        await self.post("/api/conversations", {"id": conversation}, 201)
        return await self.post(f"/api/conversations/{conversation}/messages", {"text": text, **more}, 202)

    async def pending(self, count=1, conversation=None):
        """Wait until this many calls are pending, and return their entries in order."""
        where = {"conversation": conversation} if conversation else {}
        while True:
            found = (await self.get("/api/pending", params=where))["pending"]
            if len(found) == count:
                return found
            await asyncio.sleep(0.005)

    async def idle(self, conversation="c"):
        """Wait until the conversation is idle, and return its snapshot."""
        while True:
            snapshot = await self.get(f"/api/conversations/{conversation}")
            if snapshot["state"] == "idle":
                return snapshot
            await asyncio.sleep(0.005)

    @asynccontextmanager
    async def events(self, path, **options):
        async with self.http.stream("GET", path, timeout=None, **options) as response:
            assert response.status_code == 200, await response.aread()
            yield Reader(response)


class Reader:
    """An event stream, read one event at a time."""

    def __init__(self, response):
        self.response = response
        self._lines = response.aiter_lines()
        self.beats = 0

    async def next(self) -> Any:
        """Return (type, id or None, data) of the next event, or None at the end."""
        kind = place = data = None
        async for line in self._lines:
            if line.startswith(":"):
                self.beats += 1
            elif line.startswith("event: "):
                kind = line[7:]
            elif line.startswith("id: "):
                place = int(line[4:])
            elif line.startswith("data: "):
                data = json.loads(line[6:])
            elif not line and kind is not None:
                return kind, place, data
        return None

    async def until(self, kind):
        """Return all events up to and including the first of this type."""
        seen = []
        while True:
            event = await self.next()
            assert event is not None, f"the stream ended before {kind}: {[e[0] for e in seen]}"
            seen.append(event)
            if event[0] == kind:
                return seen

    async def rest(self):
        """Return all events until the stream ends."""
        seen = []
        while (event := await self.next()) is not None:
            seen.append(event)
        return seen


@asynccontextmanager
async def site(
    *agents,
    store: Any = "memory:",
    auth=None,
    may_resolve=None,
    may_grant=None,
    clock=None,
    token: str | None = TOKEN,
    wrap=None,
    **options,
):
    """Run a server on loopback. ``wrap`` mounts the application in another one."""
    runtime = Runtime(*agents, store=store, may_resolve=may_resolve, may_grant=may_grant, clock=clock, drain=0.5)
    served = app(runtime, auth or TokenAuth(TOKEN, "ada"), **options)
    listening = open_socket("127.0.0.1", 0)
    base = f"http://127.0.0.1:{listening.getsockname()[1]}"
    ready = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(served, listening, ready.set_result, wrap(served) if wrap else None))
    await asyncio.wait({ready, task}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        async with httpx.AsyncClient(base_url=base, headers=headers, timeout=60, trust_env=False) as http:
            yield Site(runtime, base, http, ready.result())
    finally:
        ready.result()()
        await task
