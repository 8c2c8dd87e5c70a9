"""A FastAPI application on loopback that the tests of ``Toolset.from_openapi`` call."""

# FastAPI reads the annotations at run time: no postponed ones in this file.

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated, Any

import uvicorn
from fastapi import Cookie, FastAPI, Header, HTTPException, Query, Request, Response
from fastapi.responses import PlainTextResponse, RedirectResponse
from pydantic import BaseModel, Field

from holdfast.server.process import open_socket


class Size(StrEnum):
    small = "small"
    large = "large"


class Line(BaseModel):
    sku: str
    count: int = Field(ge=1)


class Order(BaseModel):
    lines: list[Line]
    note: str | None = None
    size: Size = Size.small


class Shop:
    """The API, the requests that it received, and the events that its slow operations wait for."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.orders: list[Order] = []
        self.entered = threading.Event()
        self.release = asyncio.Event()
        self.elsewhere = "http://127.0.0.1:9/stolen"
        self.base = ""
        self.app = make_app(self)

    def paths(self) -> list[str]:
        return [f"{one['method']} {one['path']}" for one in self.requests]

    def document(self) -> dict[str, Any]:
        """Return the document as the application generates it."""
        return self.app.openapi()


def make_app(shop: Shop) -> FastAPI:
    app = FastAPI(title="Shop")

    @app.middleware("http")
    async def record(request: Request, handle: Any) -> Response:
        path = request.scope["raw_path"].decode()
        query = request.scope["query_string"].decode()
        shop.requests.append({"method": request.method, "path": path, "query": query, "headers": dict(request.headers)})
        return await handle(request)

    @app.get("/items/{sku}")
    def read_item(sku: str, size: Size = Size.small, tag: Annotated[list[str], Query()] = []) -> dict[str, Any]:  # noqa: B006
        """Read one item."""
        if sku == "missing":
            raise HTTPException(404, "no such item")
        return {"sku": sku, "size": size, "tags": tag}

    @app.head("/items/{sku}")
    def check_item(sku: str) -> Response:
        """Check that an item exists."""
        return Response(headers={"etag": '"7"'})

    @app.get("/seen")
    def read_seen(x_trace: Annotated[str, Header()], basket: Annotated[str | None, Cookie()] = None) -> dict[str, Any]:
        """Return what arrived."""
        return {"trace": x_trace, "basket": basket}

    @app.post("/orders", status_code=201)
    def create_order(order: Order) -> dict[str, Any]:
        """Place an order."""
        shop.orders.append(order)
        return {"id": len(shop.orders), "lines": len(order.lines), "note": order.note}

    @app.delete("/orders/{number}", status_code=204)
    def delete_order(number: int) -> None:
        """Delete an order."""

    @app.get("/me")
    def read_me(request: Request) -> dict[str, Any]:
        """Return the caller's credentials, as a careless server does."""
        given = request.headers.get("authorization")
        if given is None:
            raise HTTPException(401, "who are you?")
        if given.endswith("expired"):
            raise HTTPException(403, f"refused: {given}")
        return {"authorization": given}

    @app.get("/broken")
    def read_broken() -> None:
        """Fail."""
        raise HTTPException(500, "x" * 100_000)

    @app.post("/broken")
    def write_broken() -> None:
        """Fail after a change."""
        raise HTTPException(503, "try later", headers={"Retry-After": "7"})

    @app.get("/limited")
    def read_limited() -> None:
        """Refuse."""
        raise HTTPException(429, "slow down", headers={"Retry-After": "7"})

    @app.get("/text", response_class=PlainTextResponse)
    def read_text() -> str:
        """Return text."""
        return "grüße"

    @app.get("/picture")
    def read_picture() -> Response:
        """Return a picture."""
        return Response(b"\x89PNG" + bytes(96), media_type="image/png")

    @app.get("/huge")
    def read_huge() -> list[str]:
        """Return too much."""
        return ["x" * 1000] * 2000

    @app.get("/not-json")
    def read_not_json() -> Response:
        """Claim to be JSON."""
        return Response(b"<html>", media_type="application/json")

    @app.get("/slow")
    async def read_slow() -> str:
        """Answer late."""
        shop.entered.set()
        await shop.release.wait()
        return "late"

    @app.post("/slow")
    async def write_slow() -> str:
        """Change something late."""
        shop.entered.set()
        await shop.release.wait()
        return "late"

    @app.get("/moved")
    def read_moved() -> RedirectResponse:
        """Redirect within the server."""
        return RedirectResponse("/me")

    @app.get("/stolen")
    def read_stolen() -> RedirectResponse:
        """Redirect to another server."""
        return RedirectResponse(shop.elsewhere)

    @app.post("/moved")
    def write_moved() -> RedirectResponse:
        """Redirect a change to another path."""
        return RedirectResponse("/orders")

    return app


@contextmanager
def serving_shop() -> Iterator[Shop]:
    """Serve the shop from a thread until the block ends."""
    shop = Shop()
    listening = open_socket("127.0.0.1", 0)
    shop.base = f"http://127.0.0.1:{listening.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(shop.app, log_level="error", ws="none", lifespan="off"))
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve(sockets=[listening])

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        yield shop  # the socket listens already: a request waits until the server accepts it
    finally:
        while not loops:
            thread.join(0.01)
        loops[0].call_soon_threadsafe(shop.release.set)
        server.should_exit = server.force_exit = True  # a failed test may leave connections open
        thread.join()
        listening.close()
