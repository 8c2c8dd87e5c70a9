"""``MCP``: the tools of an MCP server as tools of an agent."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, cast

import mcp_types as types

from holdfast.bridges.mcp.connection import Away, Connection, Lost, Target, clean_text, describe_problem
from holdfast.bridges.mcp.definition import (
    RemoteTool,
    Trust,
    check_overrides,
    declare_tool,
    default_recovery,
    local_name,
    read_remote_tool,
    refusal_of,
)
from holdfast.bridges.mcp.exchange import Exchange, ToolPlan
from holdfast.bridges.mcp.model_requests import SAMPLING, Sampling
from holdfast.bridges.mcp.offers import PROMPT_TOOLS, RESOURCE_TOOLS, Method, offered_tools
from holdfast.bridges.mcp.stdio import ProgramSandbox
from holdfast.core.decisions import SYSTEM, Principal
from holdfast.core.tool import RECOVERIES, fingerprint_of, parse_duration
from holdfast.errors import DeclarationError, HoldfastError, Invalid, ToolError
from holdfast.tools.adapters import Approval, check_approval
from holdfast.tools.call import Call
from holdfast.tools.declare import Tool
from holdfast.tools.toolset import Toolset, ToolSource

log = logging.getLogger("holdfast")

MAX_TOOLS = 500
MAX_CONNECTIONS = 64
"""Connections to one server, if its headers depend on the principal."""
MAX_INSTRUCTIONS = 8_000
RECHECK_AFTER = 30.0
"""Seconds after which a list of tools is read again before a call of one of them is sent."""
NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,31}")

Duration = str | float | timedelta
Headers = Callable[[Principal], Any]
ApprovalOf = Callable[[RemoteTool], Approval | None]


class MCP(ToolSource):
    """The tools of an MCP server: ``Agent(tools=[MCP("https://mcp.example.com", name="crm")])``.

    The server is connected when a runtime opens, and its tools are read then. If it is away, the agent works without
    its tools, and gets them as soon as the server answers. Revision 2026-07-28 and the revisions with a handshake, back
    to 2024-11-05, are spoken.

    target:        a URL (streamable HTTP), a command as a list (``["npx", "-y", "server"]``), or a server object of the
                   official SDK in this process
    name:          the prefix of its tools: the tool ``refund`` of the server ``crm`` is ``crm_refund``
    tools:         the server's names of the tools to take, or a function of a RemoteTool; default: all
    approval:      "auto" or "required" for all, a mapping from the server's name of a tool, or a function of a
                   RemoteTool (it has name, description, read_only, destructive, idempotent, annotations) that returns
                   "auto", "required", a function of (args, call), or None for the default. Default: "required"; with
                   trust="hints", tools that say that they are read only run freely
    trust:         "none" (default): the server's hints about its tools decide nothing; "hints": they are believed
    headers:       a function of the principal, plain or async, that returns the HTTP headers with its credentials. Each
                   principal then has a connection of its own; the list of tools is read as the system principal
    overrides:     options of single tools as data: {"refund": {"recovery": "fail", "timeout": "10s"}}. The options:
                   approval, recovery, timeout, expires, on_expiry, risk, prompt, result_bytes, retention
    instructions:  whether the server's own instructions are added to the agent's
    resources:     whether the server's resources are offered as the tools list_resources and read_resource, with the
                   prefix. Approvals and overrides name them like tools of the server; with trust="hints" they run
                   freely, because the protocol defines them as reads
    prompts:       the same for its prompts: list_prompts and get_prompt
    env:           of a command: the environment variables that it gets, besides a few harmless ones such as PATH
    cwd:           of a command: its working directory
    roots:         the directories that the server is told it may work in
    timeout:       the time limit of one request; a person's time to answer does not count
    connect_timeout:  the time limit for connecting and for reading the tools
    max_bytes:     the largest message that is read
    mode:          "auto" (default), "legacy" or "2026-07-28": how the protocol's revision is chosen
    sampling:      whether the server can use the agent's model (sampling). None (default): no, and its requests are
                   refused. "ask": a person sees each request and allows it. "auto": without asking, for servers that
                   you trust. Tokens and cost count toward the limits of the turn
    sandbox:       of a command: the Workspace in whose sandbox it runs. It reads the workspace and the system's
                   directories, writes to a private /tmp only, and has no network. None: the rights of this process
    """

    def __init__(
        self,
        target: Any,
        *,
        name: str | None = None,
        tools: Sequence[str] | Callable[[RemoteTool], bool] | None = None,
        approval: Approval | Mapping[str, Approval] | ApprovalOf | None = None,
        trust: Trust = "none",
        headers: Headers | None = None,
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        instructions: bool = False,
        resources: bool = False,
        prompts: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        roots: Sequence[str | Path] = (),
        timeout: Duration = "5m",
        connect_timeout: Duration = "30s",
        max_bytes: int = 16 * 1024 * 1024,
        mode: Literal["auto", "legacy", "2026-07-28"] = "auto",
        sampling: Sampling | None = None,
        sandbox: ProgramSandbox | None = None,
    ):
        super().__init__()
        given = _read_target(target)
        self._name = _check_name(name if name is not None else _default_name(given))
        self._refuse_options(given, headers, env, cwd, sampling, sandbox)
        if trust not in ("none", "hints"):
            raise DeclarationError(f'MCP: trust must be "none" or "hints", not {trust!r:.80}')
        for option, value in (("resources", resources), ("prompts", prompts)):
            if not isinstance(value, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise DeclarationError(f"MCP: {option} is True or False, not {value!r:.80}")
        self._trust: Trust = trust
        self._filter = _check_filter(tools)
        self._approval = _check_approvals(approval)
        self._headers = headers
        self._overrides = check_overrides(overrides or {})
        self._shows_instructions = instructions
        self._offered: dict[str, Method] = (RESOURCE_TOOLS if resources else {}) | (PROMPT_TOOLS if prompts else {})
        self._timeout, self._connect_timeout = (
            _seconds(timeout, "timeout"),
            _seconds(connect_timeout, "connect_timeout"),
        )
        self._mode = mode
        directory = None if cwd is None else str(cwd)
        self._target = Target(given, env=dict(env or {}), cwd=directory, sandbox=sandbox, max_bytes=max_bytes)
        self._roots = [{"uri": Path(root).resolve().as_uri(), "name": Path(root).name or "/"} for root in roots]
        self._sampling: Sampling | None = sampling
        self._exchange = Exchange(self._name, self._connection, self._roots, sampling)
        self._connections: OrderedDict[str, Connection] = OrderedDict()
        self._toolset = Toolset()
        self._plans: dict[str, ToolPlan] = {}
        self._listed_at: float | None = None
        self._left_out: dict[str, str] = {}
        self._reason = "it has not been connected yet"
        self._users = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self._list_lock = asyncio.Lock()

    def _refuse_options(self, given: Any, headers: Any, env: Any, cwd: Any, sampling: Any, sandbox: Any) -> None:
        if headers is not None and not (isinstance(given, str) and callable(headers)):
            raise DeclarationError("MCP: headers is a function of the principal, for a server with a URL")
        if (env is not None or cwd is not None) and not isinstance(given, tuple):
            raise DeclarationError("MCP: env and cwd are for a server that is started by a command")
        if sampling not in (None, *SAMPLING):
            raise DeclarationError(f'MCP: sampling must be None, "ask" or "auto", not {sampling!r:.80}')
        if sandbox is not None:
            if not isinstance(given, tuple) or not hasattr(sandbox, "launch_program"):
                raise DeclarationError("MCP: sandbox is a Workspace, for a server that is started by a command")
            sandbox.check_confinement()

    def __repr__(self) -> str:
        return f"MCP({self._target.describe()!r}, name={self._name!r})"

    # --- a source of tools ---

    @property
    def name(self) -> str:
        return f"MCP server {self._name}"

    @property
    def toolset(self) -> Toolset:
        return self._toolset

    @property
    def note(self) -> str:
        """What the model is told: that the server is away, and the server's instructions if they are wanted."""
        if self._users and self._listed_at is None:
            return f"The tools of the server {self._name!r} are not available now: it is not reachable."
        if not self._shows_instructions:
            return ""
        main = self._connections.get("")
        text = main.instructions if main is not None else ""
        return f"Instructions of the server {self._name!r}:\n{clean_text(text, MAX_INSTRUCTIONS)}" if text else ""

    @property
    def left_out(self) -> Mapping[str, str]:
        """The server's tools that were left out: name -> why."""
        return dict(self._left_out)

    @property
    def problem(self) -> str | None:
        """Why the server's tools are not known; None if they are."""
        return self._reason if self._listed_at is None else None

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        if self._users and self._loop is not loop:
            raise Invalid(f"{self.name} is open on another event loop: create one MCP object for each")
        self._users += 1
        if self._users > 1:
            return
        self._loop = loop
        self._changed, self._list_lock = asyncio.Event(), asyncio.Lock()
        await self._list_tools()
        self._announce()
        self._watch = asyncio.create_task(self._keep_listed(), name=f"holdfast:mcp:{self._name}:tools")

    async def close(self) -> None:
        self._users = max(0, self._users - 1)
        if self._users:
            return
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            self._watch = None
        await self._exchange.close()
        connections = list(self._connections.values())
        self._connections.clear()
        await asyncio.gather(*(connection.close() for connection in connections))

    def tasks(self) -> list[asyncio.Task[None]]:
        watch = [self._watch] if self._watch is not None else []
        held = [task for connection in self._connections.values() for task in connection.tasks()]
        return [*watch, *held, *self._exchange.tasks()]

    def absent_tool(self, name: str) -> Tool | None:
        if not name.startswith(f"{self._name}_") or (self._listed_at is not None and name not in self._toolset):
            return None
        plan = ToolPlan(name=name.removeprefix(f"{self._name}_"), timeout=self._timeout)

        async def handler(args: dict[str, Any], call: Call) -> Any:
            return await self._exchange.run_absent(plan, args, call, self._reason)

        async def reconcile(args: dict[str, Any], call: Call) -> str:
            return _recovery_word(call, "ask")

        return Tool.declare(
            name=name,
            description=f"A tool of the server {self._name}, which is not reachable.",
            parameters={"type": "object"},
            handler=handler,
            recovery=reconcile,
        )

    def abandon_call(self, tool: str, state: Any, by: Principal) -> None:
        mine = tool in self._toolset or (self._listed_at is None and tool.startswith(f"{self._name}_"))
        if mine and isinstance(state, dict):
            self._exchange.abandon(cast("dict[str, Any]", state), by)

    # --- the list of tools ---

    async def refresh(self) -> None:
        """Read the list of tools again. Raises nothing: see ``problem``."""
        await self._list_tools()

    async def _keep_listed(self) -> None:
        """Read the tools when they have changed, and until they were read once, with a backoff."""
        while True:
            if self._listed_at is None:
                main = self._connections.get("")
                delay = max(main.delay if main is not None else 0.0, 0.1)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), delay)
            else:
                await self._changed.wait()
            self._changed.clear()
            await self._list_tools()

    async def _list_tools(self) -> None:
        async with self._list_lock:
            try:
                async with asyncio.timeout(2 * self._connect_timeout):
                    connection = await self._connection(SYSTEM)
                    await connection.session(patient=True)
                    has = connection.capabilities
                    # A server with resources or prompts only need not answer a request for its tools.
                    found = await connection.list_tools() if has.tools is not None or not self._offered else []
            except (Away, Lost, HoldfastError, TimeoutError) as problem:
                self._reason = str(problem) if isinstance(problem, Away | Lost) else describe_problem(problem)
                if self._listed_at is None:
                    log.warning("the tools of %s are not known: %s", self.name, self._reason)
                else:
                    log.warning("the tools of %s could not be read again: %s", self.name, self._reason)
                return
            self._take_tools(found, has)
            self._listed_at = time.monotonic()
            self._announce()

    def _take_tools(self, found: Sequence[types.Tool], has: types.ServerCapabilities) -> None:
        """Make our tools from the server's. Tools that did not change are the same objects as before."""
        tools: dict[str, Tool] = {}
        plans: dict[str, ToolPlan] = {}
        left_out: dict[str, str] = {}
        remotes: list[RemoteTool] = []
        for tool in found[:MAX_TOOLS]:
            shown = clean_text(tool.name, 80)
            if why := refusal_of(tool):
                left_out[shown] = why
            elif tool.name in self._offered:
                left_out[shown] = "its name is used for the server's resources or prompts"
            elif self._filter(remote := read_remote_tool(self._name, tool)):
                remotes.append(remote)
        offered = self._offered_methods(has, left_out)
        for remote in (*remotes, *offered_tools(self._name, offered)):
            name = local_name(self._name, remote.name, tools)
            try:
                made, plan = self._declare(remote, name, offered.get(remote.name, "tools/call"))
            except HoldfastError as problem:
                left_out[clean_text(remote.name, 80)] = clean_text(problem.message, 300)
                continue
            old = self._toolset.get(name)
            tools[name] = old if old is not None and old.spec == made.spec and self._plans.get(name) == plan else made
            plans[name] = plan
        if len(found) > MAX_TOOLS:
            left_out[f"and {len(found) - MAX_TOOLS} more"] = f"only the first {MAX_TOOLS} are read"
        for name, why in left_out.items():
            if self._left_out.get(name) != why:
                log.warning("%s: the tool %r is left out: %s", self.name, name, why)
        self._left_out = left_out
        if unknown := sorted(set(self._overrides) - {tool.name for tool in found} - set(self._offered)):
            log.warning("%s has no %s: the overrides of them are not used", self.name, ", ".join(unknown))
        if list(tools.values()) != list(self._toolset):
            self._plans, self._toolset = plans, Toolset(*tools.values())

    def _offered_methods(self, has: types.ServerCapabilities, left_out: dict[str, str]) -> dict[str, Method]:
        """Return the tools for resources and prompts that were asked for and that the server can answer."""
        methods: dict[str, Method] = {}
        for name, method in self._offered.items():
            kind = method.partition("/")[0]
            if getattr(has, kind) is None:
                left_out[name] = f"the server has no {kind}"
            else:
                methods[name] = method
        return methods

    def _declare(self, remote: RemoteTool, name: str, method: Method) -> tuple[Tool, ToolPlan]:
        options = self._overrides.get(remote.name, {})
        word = options.get("recovery") or default_recovery(remote, self._trust)
        if word not in RECOVERIES:
            raise DeclarationError(
                f"recovery of {remote.name!r} must be one of {', '.join(RECOVERIES)}, not {word!r:.80}"
            )
        plan = ToolPlan(
            name=remote.name,
            method=method,
            output_schema=remote.definition.output_schema,
            timeout=_seconds(options["timeout"], "timeout") if "timeout" in options else self._timeout,
            recovery=word,
        )

        async def handler(args: dict[str, Any], call: Call) -> Any:
            if not call.state:
                await self._check_unchanged(made, name)
            return await self._exchange.run(plan, args, call)

        async def reconcile(args: dict[str, Any], call: Call) -> str:
            return _recovery_word(call, word)

        made = declare_tool(
            remote,
            name,
            handler=handler,
            reconcile=reconcile,
            approval=self._approval(remote),
            trust=self._trust,
            options=options,
        )
        return made, plan

    async def _check_unchanged(self, made: Tool, name: str) -> None:
        """Refuse to send a call if the server has changed the tool's definition without a word."""
        if self._listed_at is None or time.monotonic() - self._listed_at > RECHECK_AFTER:
            await self._list_tools()
        now = self._toolset.get(name)
        if now is None or fingerprint_of(now.spec) != fingerprint_of(made.spec):
            what = "no longer has this tool" if now is None else "has changed this tool's definition"
            raise ToolError(
                "conflict",
                f"{self.name} {what} since the call was made. Nothing was sent; call it again",
                {"server": self._name},
            )

    # --- connections ---

    async def _connection(self, principal: Principal) -> Connection:
        """Return the connection for a principal: one for all, unless the headers depend on the principal."""
        key = "" if self._headers is None or principal.id == SYSTEM.id else principal.id
        found = self._connections.get(key)
        if found is None:
            found = self._connections[key] = self._make_connection(principal)
            await self._evict()
        self._connections.move_to_end(key)
        return found

    def _make_connection(self, principal: Principal) -> Connection:
        async def headers() -> Mapping[str, str]:
            given: Any = self._headers(principal) if self._headers is not None else {}
            return await given if inspect.isawaitable(given) else given or {}

        async def on_question(params: Any, key: str | None) -> types.ElicitResult | types.ErrorData:
            return await self._exchange.answer_live(made, params, key)

        async def on_sample(params: Any, key: str | None) -> types.CreateMessageResult | types.ErrorData:
            return await self._exchange.sample_live(made, params, key)

        made = Connection(
            self._name,
            self._target,
            headers=headers,
            mode=self._mode,
            connect_timeout=self._connect_timeout,
            roots=self._roots,
            on_question=on_question,
            on_change=self._changed.set,
            on_sample=on_sample if self._sampling is not None else None,
        )
        return made

    async def _evict(self) -> None:
        """Close the connections that were unused for longest; never the one that the tools are read with."""
        while len(self._connections) > MAX_CONNECTIONS:
            oldest = next(key for key in self._connections if key)
            await self._connections.pop(oldest).close()


def _recovery_word(call: Call, word: str) -> str:
    """Return what happens to an interrupted run: a task is polled on, and the agent's model is asked again.

    Neither repeats what was sent to the server. Anything else is recovered as declared.
    """
    state: Any = call.state
    if not isinstance(state, dict):
        return word
    now = cast("dict[str, Any]", state.get("away", state))  # pyright: ignore[reportUnknownMemberType]
    if "task" in now or ("sample" in now and "live" not in now):
        return "redispatch"
    return word


def _read_target(given: Any) -> Any:
    if isinstance(given, str):
        if not re.match(r"https?://[^/\s]+", given):
            raise DeclarationError(
                f"MCP: {given!r:.80} is no URL; a command is given as a list: ['python', 'server.py']"
            )
        return given
    if isinstance(given, list | tuple):
        words = tuple(given)  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
        if not words or not all(isinstance(word, str) and word for word in words):  # pyright: ignore[reportUnknownVariableType]
            raise DeclarationError(f"MCP: a command is a list of words, not {given!r:.80}")
        return words  # pyright: ignore[reportUnknownVariableType]
    if given is None or isinstance(given, bytes | int | float | dict):
        raise DeclarationError(f"MCP takes a URL, a command as a list, or a server object, not {given!r:.80}")
    return given


def _default_name(given: Any) -> str:
    if isinstance(given, str):
        host = given.partition("://")[2].partition("/")[0].rpartition("@")[2].partition(":")[0]
        parts = [part for part in host.split(".") if part not in ("www", "mcp", "api")]
        words = parts[0] if parts else "server"
    elif isinstance(given, tuple):
        words = Path(given[-1]).stem  # pyright: ignore[reportUnknownArgumentType]
    else:
        words = str(getattr(given, "name", "") or "server")
    made = re.sub(r"[^A-Za-z0-9]+", "-", words).strip("-")[:32]
    return made if NAME.fullmatch(made) else "server"


def _check_name(name: Any) -> str:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise DeclarationError(f"MCP: name {name!r:.80}: give a letter, then up to 31 letters, digits or `-`")
    return name


def _seconds(given: Duration, option: str) -> float:
    try:
        return parse_duration(given)
    except Invalid as problem:
        raise DeclarationError(f"MCP: {option}: {problem.message}") from None


def _check_filter(tools: Any) -> Callable[[RemoteTool], bool]:
    if tools is None:
        return lambda remote: True
    if callable(tools):
        return lambda remote: bool(tools(remote))
    if isinstance(tools, str) or not all(isinstance(name, str) for name in tools):
        raise DeclarationError(f"MCP: tools is a list of names or a function, not {tools!r:.80}")
    names = frozenset(tools)
    return lambda remote: remote.name in names


def _check_approvals(approval: Any) -> Callable[[RemoteTool], Approval | None]:
    """Return the function that gives a tool's approval; None: the default."""
    if approval is None or isinstance(approval, str):
        given = None if approval is None else check_approval(approval, "MCP: approval")
        return lambda remote: given
    if isinstance(approval, Mapping):
        given_by_name = cast("Mapping[str, Any]", approval)
        by_name: dict[str, Approval] = {
            name: check_approval(value, f"MCP: approval of {name!r}") for name, value in given_by_name.items()
        }
        return lambda remote: by_name.get(remote.name)
    if not callable(approval):
        raise DeclarationError(f"MCP: approval is a word, a mapping or a function of the tool, not {approval!r:.80}")

    def choose(remote: RemoteTool) -> Approval | None:
        chosen = approval(remote)
        return None if chosen is None else check_approval(chosen, f"MCP: approval of {remote.name!r}")

    return choose
