"""``AgentServer``: an agent's tools, the agent itself and its inbox as an MCP server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any, TypeVar, cast

import mcp_types as types
import msgspec
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.lowlevel import Server
from mcp.server.request_state import RequestStateBoundary, RequestStateSecurity
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import MCPError
from starlette.types import Receive, Scope, Send

from holdfast.bridges.direct_agent import SUFFIX, direct_agent
from holdfast.bridges.mcp.server_calls import Exchange, Report, follow, read_progress, start_call, start_turn
from holdfast.bridges.mcp.server_inbox import INBOX_TOOLS, find_result, list_pending, show_result, start_decision
from holdfast.bridges.mcp.server_results import call_result, describe_tool, error_result, turn_result
from holdfast.bridges.mcp.server_rounds import (
    TASKS,
    Context,
    MaySee,
    Rounds,
    Taken,
    Way,
    choose_round,
    choose_way,
    fills_forms,
)
from holdfast.bridges.mcp.server_tasks import TaskParams, Tasks, UpdateParams, check_extension, to_protocol_error
from holdfast.channels.links import Links
from holdfast.core.decisions import Pending, Principal
from holdfast.core.tool import ToolSpec
from holdfast.errors import DeclarationError, HoldfastError, Invalid, NotFound
from holdfast.runtime.agent_definition import AgentDefinition
from holdfast.runtime.runtime import Runtime
from holdfast.tools.toolset import HELP_TOOL

__all__ = ["AgentServer", "direct_agent"]

PRINCIPAL = "holdfast.principal"
"""Where ``holdfast.server`` puts the authenticated Principal in the scope of a request."""
CALL_KEY = "holdfast/callKey"
"""The field of a request's ``_meta`` by which a client names a call. Holdfast's own client sends it."""
MAX_KEY = 1000
STATE_SECONDS = 100 * 365 * 86_400.0
"""How long the seal of a requestState holds. The deadline of the call ends it earlier: the log knows that."""
SERVED = ("server", "human")
"""The executors of tools that are offered. Client tools need a page, and providers run their own tools."""
P = TypeVar("P", bound=types.RequestParams)


class AgentServer:
    """Serves an agent over MCP: its tools, the agent as the tool ``ask_NAME``, and the tools of the inbox.

    Each call is a conversation in the runtime's store, so it has a log, and survives the process. A call that needs a
    decision is answered by what the client can do: with a task, with a form for its user, or with an address.

    runtime:  a runtime with ``agent`` and ``direct_agent(agent)``
    agent:    the agent that is served
    keys:     a secret of at least 32 bytes that seals requestState, or several: the first one seals, all of them open.
              Processes that continue each other's questions have the same key
    by:       the principal of requests without an HTTP request, as over stdio. Over HTTP, ``holdfast.server`` names it
    may_see:  function of (principal, conversation), as in ``holdfast.server.app``
    links:    signed links, for clients that cannot ask their users
    note:     where else a person can decide; added to the text for clients that cannot ask their users
    inbox:    whether the tools ``pending``, ``decide`` and ``result`` are offered
    base:     a server of the SDK that is extended: its own tools, prompts and resources stay
    """

    def __init__(
        self,
        runtime: Runtime[Any],
        agent: AgentDefinition[Any],
        *,
        keys: str | bytes | Sequence[str | bytes],
        by: str | Principal | None = None,
        may_see: MaySee | None = None,
        links: Links | None = None,
        note: str = "",
        inbox: bool = True,
        base: Server[Any] | None = None,
    ):
        self._direct = f"{agent.name}{SUFFIX}"
        if agent.name not in runtime.agents or self._direct not in runtime.agents:
            raise DeclarationError(
                f"to serve {agent.name!r} over MCP, its runtime also runs its direct calls: "
                f"Runtime(agent, direct_agent(agent), ...)"
            )
        self._runtime, self._agent = runtime, agent
        self._by = None if by is None else Principal.of(by)
        self._ask = f"ask_{agent.name}".replace(".", "_")[:64]
        self._inbox = dict(INBOX_TOOLS) if inbox else {}
        taken = [name for name in (self._ask, *self._inbox) if name in agent.tools.specs]
        if taken:
            raise DeclarationError(
                f"agent {agent.name!r} has a tool {taken[0]!r}, a name that the MCP server needs for its own: rename it"
                + ("" if taken[0] == self._ask else ", or serve the agent with inbox=False")
            )
        self._rounds = Rounds(runtime, may_see, links, note)
        self._tasks = Tasks(self._rounds)
        self.server: Server[Any] = base or Server(
            agent.name, version=version("holdfast"), instructions=self._instructions()
        )
        """The server of the SDK, to which prompts and resources can be added."""
        self._install(keys)

    def _instructions(self) -> str:
        return (
            "Some calls wait for a person. If a result says so, do not repeat the call: your user decides it, "
            "and `result` returns what came of it."
        )

    def _install(self, keys: str | bytes | Sequence[str | bytes]) -> None:
        server = self.server
        listed, called = server.get_request_handler("tools/list"), server.get_request_handler("tools/call")
        self._base_list = None if listed is None else listed.handler
        self._base_call = None if called is None else called.handler
        server.add_request_handler("tools/list", types.PaginatedRequestParams, self._list_tools)
        server.add_request_handler("tools/call", types.CallToolRequestParams, self._call_tool)
        server.add_request_handler("tasks/get", TaskParams, self._task_method(self._tasks.get))
        server.add_request_handler("tasks/update", UpdateParams, self._task_method(self._tasks.update))
        server.add_request_handler("tasks/cancel", TaskParams, self._task_method(self._tasks.cancel))
        server.extensions[TASKS] = {}
        security = RequestStateSecurity(
            keys=(keys,) if isinstance(keys, str | bytes) else tuple(keys),
            ttl=STATE_SECONDS,
            bind_principal=lambda ctx: self._principal(ctx).id,
        )
        server.middleware.append(RequestStateBoundary(security, default_audience=f"holdfast:{self._agent.name}"))

    # --- transports ---

    async def run_stdio(self) -> None:
        """Serve one client over standard input and output, until it closes them."""
        async with stdio_server() as (reading, writing):
            await self.server.run(reading, writing, self.server.create_initialization_options())

    def http(self) -> HTTPEndpoint:
        """Return the ASGI application for streamable HTTP: ``holdfast.server.app(..., mounts={"/mcp": ...})``."""
        return HTTPEndpoint(self.server)

    # --- requests ---

    def _principal(self, ctx: Context) -> Principal:
        request: Any = ctx.request
        found = self._by if request is None else request.scope.get(PRINCIPAL)
        if not isinstance(found, Principal):
            raise MCPError(code=types.INVALID_REQUEST, message="sign in: this request has no principal")
        return found

    @property
    def _specs(self) -> dict[str, ToolSpec]:
        """The agent's tools that are offered now. The server's own tools keep their names."""
        own = {self._ask, *self._inbox, HELP_TOOL}
        specs = self._agent.tools.specs.items()
        return {name: spec for name, spec in specs if spec.executor in SERVED and name not in own}

    async def _list_tools(self, ctx: Context, params: types.PaginatedRequestParams) -> types.ListToolsResult:
        self._principal(ctx)
        tools = [describe_tool(spec) for spec in self._specs.values()]
        tools += [self._describe_ask(), *self._inbox.values()]
        if self._base_list is not None:
            theirs = await self._base_list(ctx, params)
            assert isinstance(theirs, types.ListToolsResult)
            tools += [tool for tool in theirs.tools if not self._owns(tool.name)]
        return types.ListToolsResult(tools=tools)

    def _describe_ask(self) -> types.Tool:
        return types.Tool(
            name=self._ask,
            description=f"Send a message to the agent {self._agent.name}, and return its answer.",
            input_schema={
                "type": "object",
                "properties": {
                    "message": {"type": "string", "description": "What the agent is to do or to answer."},
                    "conversation": {"type": "string", "description": "Continue this one; a new one if not given."},
                },
                "required": ["message"],
                "additionalProperties": False,
            },
        )

    def _owns(self, name: str) -> bool:
        return name in self._specs or name == self._ask or name in self._inbox

    async def _call_tool(self, ctx: Context, params: types.CallToolRequestParams) -> Any:
        if not self._owns(params.name):
            if self._base_call is not None:
                return await self._base_call(ctx, params)
            raise MCPError(code=types.INVALID_PARAMS, message=f"Unknown tool: {params.name[:200]}")
        by = self._principal(ctx)
        try:
            return await self._answer(ctx, params, by)
        except HoldfastError as problem:
            return error_result(problem)

    async def _answer(self, ctx: Context, params: types.CallToolRequestParams, by: Principal) -> Any:
        args, report, way = params.arguments or {}, _reporter(ctx), choose_way(ctx)
        given: dict[str, Any] = dict(params.input_responses or {})
        taken = Taken()
        if params.request_state is None:
            exchange = await self._start(params.name, args, by, report, _call_key(ctx))
            if isinstance(exchange, types.CallToolResult):
                return exchange
            if given and exchange.kind == "tool":
                await self._take_early_answers(exchange, given, by, report)
        else:
            exchange = msgspec.json.decode(params.request_state, type=Exchange)
            await self._rounds.check_visible(by, exchange.conversation)
            taken = await self._rounds.take_answers(exchange, given, by, way)
            if exchange.kind != "decide":
                await follow(self._runtime, exchange, report)
        return await self._respond(ctx, exchange, by, way, taken, report)

    async def _start(
        self, name: str, args: dict[str, Any], by: Principal, report: Report, key: str
    ) -> Exchange | types.CallToolResult:
        """Begin what the request asks for; return its result, if it needs no conversation."""
        match name:
            case "pending" if name in self._inbox:
                return await list_pending(self._rounds, args, by)
            case "decide" if name in self._inbox:
                return await start_decision(self._rounds, args, by)
            case "result" if name in self._inbox:
                return await show_result(self._rounds, args, by)
            case self._ask:
                message, conversation = args.get("message"), args.get("conversation")
                if not isinstance(message, str) or not isinstance(conversation, str | None):
                    raise Invalid(f"{self._ask} needs `message`, a text; `conversation` is the id of one")
                if conversation is not None:
                    await self._check_continues(conversation, by)
                return await start_turn(self._runtime, self._agent.name, conversation, message, by, report)
            case _:
                return await start_call(self._runtime, self._direct, name, args, by, report, key)

    async def _check_continues(self, conversation: str, by: Principal) -> None:
        """Raise NotFound unless the conversation exists, the principal may see it, and this agent runs it."""
        await self._rounds.check_visible(by, conversation)
        if (await self._runtime.load_state(conversation)).agent != self._agent.name:
            raise NotFound(f"no conversation {conversation!r} with {self._agent.name}")

    async def _take_early_answers(
        self, exchange: Exchange, given: dict[str, Any], by: Principal, report: Report
    ) -> None:
        """Take answers that came with the first request. They may answer questions, never approve.

        Without a requestState nothing says which plan the client's user has seen.
        """
        entries = [
            entry
            for entry in (await read_progress(self._runtime, exchange)).pending
            if entry.kind == "elicitation" and self._rounds.may_ask(entry, by)
        ]
        asked, _ = self._rounds.make_requests(exchange, entries, by, "form", Taken())
        await self._rounds.take_answers(asked, given, by, "form")
        await follow(self._runtime, exchange, report)

    async def _respond(
        self, ctx: Context, exchange: Exchange, by: Principal, way: Way, taken: Taken, report: Report
    ) -> Any:
        """Return the result, if there is one; else ask the client's user, or say who has to decide where."""
        while True:
            if exchange.kind == "decide":
                entries, done = await self._decided(exchange, by)
                if done is not None:
                    return done
            else:
                progress = await read_progress(self._runtime, exchange)
                if progress.returned is not None:
                    return await call_result(self._runtime, exchange.conversation, progress.returned)
                if progress.turn is not None:
                    return turn_result(progress.turn)
                entries = progress.pending
                # A client that cannot ask its user gets the address at once: it would poll the task for ever.
                if way == "task" and (fills_forms(ctx) or not any(self._rounds.may_ask(each, by) for each in entries)):
                    return self._tasks.start(ctx, exchange, progress, by)
            if way == "task":
                way = choose_round(ctx)
            asks = [entry for entry in entries if self._rounds.may_ask(entry, by)]
            if not asks or taken.closed or taken.refused or way == "text":
                return self._rounds.explain(entries, by, taken)
            if way != "live":
                asked, requests = self._rounds.make_requests(exchange, asks, by, way, taken)
                if not requests:
                    return self._rounds.explain(entries, by, taken)
                return types.InputRequiredResult(
                    input_requests=requests, request_state=msgspec.json.encode(asked).decode()
                )
            taken = await self._rounds.ask_live(ctx, exchange, asks[0], by, taken.problems.get(asks[0].id, ""))
            if exchange.kind != "decide":
                await follow(self._runtime, exchange, report)

    async def _decided(self, exchange: Exchange, by: Principal) -> tuple[list[Pending], types.CallToolResult | None]:
        """Return the call that ``decide`` is about, if it still waits, or else what came of it."""
        ((suspension, _),) = exchange.asked.values()
        entries = [each for each in await self._runtime.pending(exchange.conversation) if each.id == suspension]
        if entries:
            return entries, None
        return [], await find_result(self._rounds, f"{exchange.conversation}/{suspension}", by)

    def _task_method(
        self, method: Callable[[Context, P, Principal], Awaitable[dict[str, Any]]]
    ) -> Callable[[Context, P], Awaitable[dict[str, Any]]]:
        async def handle(ctx: Context, params: P) -> dict[str, Any]:
            by = self._principal(ctx)
            check_extension(ctx)
            try:
                return await method(ctx, params, by)
            except HoldfastError as problem:
                raise to_protocol_error(problem) from None

        return handle


def _call_key(ctx: Context) -> str:
    """Return the name that the client gives to this call, the same if it repeats it; empty if it gives none."""
    found = (ctx.meta or {}).get(CALL_KEY)
    return found[:MAX_KEY] if isinstance(found, str) else ""


def _reporter(ctx: Context) -> Report:
    """Return the function that passes progress on to the client. Its numbers only grow, as the protocol demands."""
    last = 0.0

    async def report(payload: Any) -> None:
        nonlocal last
        facts = cast("dict[str, Any]", payload) if isinstance(payload, dict) else {}
        value: Any = facts.get("progress", payload)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        last = max(last, float(value)) if number else last + 1
        total: Any = facts.get("total")
        message: Any = facts.get("message", None if number else msgspec.json.encode(payload).decode()[:1000])
        await ctx.session.report_progress(
            last, float(total) if isinstance(total, int | float) else None, None if message is None else str(message)
        )

    return report


class HTTPEndpoint:
    """The ASGI application of an MCP server. It serves between the start and the end of ``run``."""

    def __init__(self, server: Server[Any]):
        self._server = server
        self._manager: StreamableHTTPSessionManager | None = None

    @asynccontextmanager
    async def run(self) -> AsyncGenerator[None]:
        """Serve requests until the context ends."""
        # holdfast.server has checked Host, Origin and the size of headers before a request gets here.
        manager = StreamableHTTPSessionManager(self._server)
        ready, stopped = asyncio.Event(), asyncio.Event()

        async def run_sessions() -> None:
            async with manager.run():
                ready.set()
                await stopped.wait()

        # The SDK's task group has to end in the task that started it, and a caller's context may end in another.
        sessions = asyncio.create_task(run_sessions(), name="holdfast:mcp-sessions")
        await ready.wait()
        self._manager = manager
        try:
            yield
        finally:
            self._manager = None
            stopped.set()
            await sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        principal: Principal = scope[PRINCIPAL]
        # A session of an older revision belongs to the principal that opened it: the SDK compares this.
        # The parser keeps spaces after a header's value, and the SDK compares values.
        scope["headers"] = [(name, value.strip(b" \t")) for name, value in scope["headers"]]
        scope["user"] = AuthenticatedUser(AccessToken(token="", client_id=principal.id, scopes=[]))
        if self._manager is None:
            raise Invalid("the MCP server is not running: serve it within run()", kind="resource_missing")
        await self._manager.handle_request(scope, receive, send)
