"""Holdfast under /holdfast in a FastAPI application, with its session cookies: `uvicorn with_fastapi:api`.

Open http://127.0.0.1:8000/login/ada and then /holdfast/. Every user sees only the conversations that they opened.
`POST /ask?text=...` is a route of the application's own that runs the agent.
"""

import os
import secrets
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from hello import agent

from holdfast import Principal, Runtime
from holdfast.server import OpenedBy, app

runtime = Runtime(
    agent,
    store=os.environ.get("HOLDFAST_STORE", "sqlite:///holdfast.db"),
    may_resolve=lambda principal, pending, decision: pending.risk != "high" or "boss" in principal.roles,
    may_grant=lambda principal, pending, decision: "boss" in principal.roles,
)
people = {"ada": Principal("ada", roles=("boss",)), "bo": Principal("bo")}
sessions: dict[str, Principal] = {}


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
    async with runtime:
        yield


api = FastAPI(lifespan=lifespan)


@api.get("/login/{name}")
def login(name: str, response: Response) -> str:
    """Replace this with your own login."""
    key = secrets.token_urlsafe()
    sessions[key] = people[name]
    response.set_cookie("session", key, httponly=True, samesite="strict")
    return f"hello {name}"


def authenticate(request: Request) -> Principal | None:
    """Return the user from the session cookie; None refuses the request."""
    return sessions.get(request.cookies.get("session", ""))


@api.post("/ask")
async def ask(text: str, request: Request) -> dict[str, Any]:
    """Run the agent for the user; return its reply, and what waits for a decision on the page."""
    user = authenticate(request)
    if user is None:
        raise HTTPException(401)
    result = await runtime.run(text, by=user)
    waiting = [pending.prompt for pending in result.pending]
    return {"text": result.text, "waiting": waiting, "conversation": result.conversation}


api.mount("/holdfast", app(runtime, auth=authenticate, may_see=OpenedBy(runtime), hosts=["localhost", "desk.example"]))
