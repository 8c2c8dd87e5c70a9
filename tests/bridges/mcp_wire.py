"""A client of the wire format of MCP, revision 2026-07-28, that can send anything, also what no real client sends."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from starlette.requests import Request

from holdfast import Agent, Runtime
from holdfast.bridges.mcp.server import AgentServer, direct_agent
from holdfast.channels import Links
from holdfast.core.decisions import Principal
from holdfast.server import app

VERSION = "2026-07-28"
META = "io.modelcontextprotocol"
FORMS: dict[str, Any] = {"elicitation": {"form": {}}}
TASKS: dict[str, Any] = {**FORMS, "extensions": {f"{META}/tasks": {}}}
KEY = "a secret of at least 32 characters"
LINKS = Links("another secret of at least 32 characters", "http://desk.example")


class WireClient:
    """Sends single requests as one principal: the token is its id."""

    def __init__(self, http: httpx.AsyncClient, token: str, capabilities: dict[str, Any]):
        self._http, self._token, self._capabilities = http, token, capabilities
        self._ids = itertools.count(1)

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the whole response of a request."""
        more = params.pop("meta", {})
        meta = {f"{META}/protocolVersion": VERSION, f"{META}/clientCapabilities": self._capabilities, **more}
        body = {"jsonrpc": "2.0", "id": next(self._ids), "method": method, "params": {**params, "_meta": meta}}
        headers = {
            "authorization": f"Bearer {self._token}",
            "accept": "application/json, text/event-stream",
            "mcp-protocol-version": VERSION,
            "mcp-method": method,
        }
        name = params.get("name") or params.get("taskId")
        response = await self._http.post("/mcp", json=body, headers=headers | ({"mcp-name": name} if name else {}))
        if response.headers["content-type"].startswith("text/event-stream"):
            frames = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
            return json.loads(frames[-1])
        return response.json()

    async def call(self, name: str, args: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        """Return the result of tools/call."""
        answer = await self.send("tools/call", name=name, arguments=args or {}, **more)
        assert "result" in answer, answer
        return answer["result"]

    async def continue_call(
        self, name: str, args: dict[str, Any], round: dict[str, Any], **answers: Any
    ) -> dict[str, Any]:
        """Answer a round, and return the result."""
        return await self.call(name, args, inputResponses=answers, requestState=round["requestState"])


def accept(**content: Any) -> dict[str, Any]:
    """Return the answer of a user who fills in the form."""
    return {"action": "accept", "content": content}


def identify(request: Request) -> Principal | None:
    """The token names the principal; "guest" and no token are nobody."""
    token = request.headers.get("authorization", "").removeprefix("Bearer ")
    return Principal(token) if token and token != "guest" else None


class Desk:
    """An agent that is served over MCP to several principals."""

    def __init__(self, runtime: Runtime[Any], http: httpx.AsyncClient, server: AgentServer):
        self.runtime, self.http, self.server = runtime, http, server

    def client(self, token: str = "ann", capabilities: dict[str, Any] | None = None) -> WireClient:
        return WireClient(self.http, token, FORMS if capabilities is None else capabilities)


@asynccontextmanager
async def serve_desk(
    agent: Agent[Any], *, store: Any = "memory:", may_see: Any = None, **rules: Any
) -> AsyncIterator[Desk]:
    """Serve an agent through the whole HTTP application."""
    async with Runtime(agent, direct_agent(agent), store=store, **rules) as runtime:
        server = AgentServer(runtime, agent, keys=KEY, links=LINKS, may_see=may_see)
        served = app(runtime, identify, may_see=may_see, links=LINKS, mounts={"/mcp": server.http()})
        transport = httpx.ASGITransport(served)
        async with served.run_mounts(), httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            yield Desk(runtime, http, server)
