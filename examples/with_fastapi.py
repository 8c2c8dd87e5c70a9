"""Assent below /assent of a FastAPI application, with its own keys: `uvicorn with_fastapi:api`.

Open http://127.0.0.1:8000/login/ada and then /assent/: everybody sees the conversations that they opened.
"""

import os
import secrets
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from hello import agent

from assent import Principal, Runtime
from assent.server import OpenedBy, app

runtime = Runtime(
    agent,
    store=os.environ.get("ASSENT_STORE", "sqlite:///assent.db"),
    may_resolve=lambda principal, pending, decision: pending.risk != "high" or "boss" in principal.roles,
    may_grant=lambda principal, pending, decision: "boss" in principal.roles,
)
people = {"ada": Principal("ada", roles=("boss",)), "bo": Principal("bo")}
sessions: dict[str, Principal] = {}


@asynccontextmanager
async def lifespan(_: FastAPI):
    async with runtime:
        yield


api = FastAPI(lifespan=lifespan)


@api.get("/login/{name}")
def login(name: str, response: Response) -> str:
    """Your own login stands here."""
    key = secrets.token_urlsafe()
    sessions[key] = people[name]
    response.set_cookie("session", key, httponly=True, samesite="strict")
    return f"hello {name}"


def who(request: Request) -> Principal | None:
    """Who asks; None: they have to log in first."""
    return sessions.get(request.cookies.get("session", ""))


api.mount("/assent", app(runtime, auth=who, may_see=OpenedBy(runtime), hosts=["localhost", "desk.example"]))
