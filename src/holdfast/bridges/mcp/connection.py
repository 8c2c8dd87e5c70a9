"""The session with one server: connects, reconnects with a backoff, and says what went wrong with a request.

A session of the SDK lives in one task, because its cancel scopes do. Other tasks send their requests through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, Literal

import mcp_types as types
from mcp import Client
from mcp.client.extension import ClientExtension, ResultClaim
from mcp.client.session import ClientSession
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import BaseModel, ConfigDict, ValidationError

from holdfast.bridges.mcp.http import Origins, failure_of, open_http
from holdfast.bridges.mcp.stdio import ProgramSandbox, ServerErrors, open_stdio
from holdfast.core.text.hidden_characters import is_hidden
from holdfast.errors import ToolError

log = logging.getLogger("holdfast")

TASKS = "io.modelcontextprotocol/tasks"
"""The tasks extension (SEP-2663): a call may return a task that is polled."""
FIRST_DELAY, LAST_DELAY = 0.25, 30.0
"""Seconds between attempts to connect: doubled after each failure, up to the second one."""
MAX_TOOLS, MAX_PAGES = 1_000, 100


class Away(Exception):
    """The server cannot be reached. Nothing was sent."""


class Lost(Exception):
    """The connection failed after a request was sent: whether the server has acted on it is unknown."""


class LinksFirst(Exception):
    """The server wants links to be opened before the call (error -32042 of revision 2025-11-25)."""

    def __init__(self, inputs: dict[str, Any]):
        super().__init__("links first")
        self.inputs = inputs


class RawResult(BaseModel):
    """Any result, as it came."""

    model_config = ConfigDict(extra="allow")

    def as_dict(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class TaskResult(types.Result):
    """A result of tools/call that is a task."""

    model_config = ConfigDict(extra="allow")
    result_type: Literal["task"] = "task"


class TasksExtension(ClientExtension):
    """Tells servers that this client can poll tasks. The results are read by exchange.py, not by the SDK."""

    identifier = TASKS

    def claims(self) -> Sequence[ResultClaim[Any]]:
        return [ResultClaim(result_type="task", model=TaskResult, resolve=_never_resolve)]


async def _never_resolve(*_: Any) -> types.CallToolResult:
    raise AssertionError("the results of tasks are read by exchange.py")


class TaskParams(types.RequestParams):
    task_id: str
    input_responses: dict[str, Any] | None = None


class TaskRequest(types.Request[TaskParams, Literal["tasks/get", "tasks/update", "tasks/cancel"]]):
    method: Literal["tasks/get", "tasks/update", "tasks/cancel"]
    params: TaskParams
    name_param = "taskId"


SampleHandler = Callable[
    [types.CreateMessageRequestParams, str | None], Awaitable[types.CreateMessageResult | types.ErrorData]
]
ElicitHandler = Callable[[types.ElicitRequestParams, str | None], Awaitable[types.ElicitResult | types.ErrorData]]
"""Handlers of a server's requests. They also get the key of the call that the request is about, if that is known."""


class Target:
    """Where a server is: a URL, a command, or an object in this process."""

    given: Any

    def __init__(
        self, given: Any, *, env: Mapping[str, str], cwd: str | None, sandbox: ProgramSandbox | None, max_bytes: int
    ):
        self.given, self._env, self._cwd, self.max_bytes = given, env, cwd, max_bytes
        self._sandbox = sandbox

    @property
    def is_url(self) -> bool:
        return isinstance(self.given, str)

    @property
    def is_command(self) -> bool:
        return isinstance(self.given, tuple)

    def describe(self) -> str:
        """Return the target for messages, without credentials."""
        if isinstance(self.given, str):
            scheme, _, rest = self.given.partition("://")
            return f"{scheme}://{rest.partition('/')[0].rpartition('@')[2]}"
        if isinstance(self.given, tuple):
            return f"the command {self.given[0]!r}"  # pyright: ignore[reportUnknownMemberType]
        return f"the object {type(self.given).__name__}"

    def open(
        self, headers: Mapping[str, str], errors: ServerErrors, on_end: Callable[[], None], origins: Origins
    ) -> Any:
        """Return what the SDK's client connects to.

        origins:  is told which requests of a server with a URL belong to which call
        on_end:   called when a program's output has ended
        """
        if isinstance(self.given, str):
            return open_http(self.given, headers=headers, max_bytes=self.max_bytes, origins=origins)
        if self.is_command:
            command: tuple[str, ...] = self.given
            return open_stdio(
                command,
                env=self._env,
                cwd=self._cwd,
                sandbox=self._sandbox,
                max_bytes=self.max_bytes,
                errors=errors,
                on_end=on_end,
            )
        return self.given


class Connection:
    """One connection to a server. It is opened when it is needed, and again after it has broken."""

    def __init__(
        self,
        name: str,
        target: Target,
        *,
        headers: Callable[[], Awaitable[Mapping[str, str]]],
        mode: str,
        connect_timeout: float,
        roots: Sequence[Mapping[str, str]],
        on_question: ElicitHandler,
        on_change: Callable[[], None],
        on_sample: SampleHandler | None = None,
    ):
        self.name, self._target, self._headers = name, target, headers
        self._mode, self._connect_timeout, self._roots = mode, connect_timeout, roots
        self._on_question, self._on_change, self._on_sample = on_question, on_change, on_sample
        self._client: Client | None = None
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._lock = asyncio.Lock()
        self._errors = ServerErrors(name)
        self._origins: Origins = {}
        self._failures, self._retry_at, self._reason = 0, 0.0, ""

    @property
    def is_open(self) -> bool:
        return self._client is not None

    @property
    def is_modern(self) -> bool:
        """Whether the server speaks a revision without a handshake: its questions are results of calls."""
        client = self._client
        return client is not None and client.protocol_version in MODERN_PROTOCOL_VERSIONS

    @property
    def instructions(self) -> str:
        """The server's own instructions; empty if it has none or is away."""
        return (self._client.instructions or "") if self._client is not None else ""

    @property
    def capabilities(self) -> types.ServerCapabilities:
        """What the server offers; nothing if it is away."""
        return self._client.server_capabilities if self._client is not None else types.ServerCapabilities()

    @property
    def delay(self) -> float:
        """Seconds until the next attempt to connect is allowed."""
        return max(0.0, self._retry_at - time.monotonic())

    def tasks(self) -> list[asyncio.Task[None]]:
        return [self._task] if self._task is not None else []

    async def session(self, *, patient: bool = False) -> ClientSession:
        """Return the session, connected if necessary; raise Away. Between failures there is a delay.

        patient:  try to connect even if the delay is not over
        """
        async with self._lock:
            if self._client is None:
                if self.delay and not patient:
                    raise Away(self._reason)
                await self._connect()
            client = self._client
            if client is None:
                raise Away(self._reason)
            return client.session

    async def close(self) -> None:
        async with self._lock:
            await self._disconnect()

    async def drop(self) -> None:
        """Give up a session that no longer works. The next request connects again."""
        async with self._lock:
            await self._disconnect()

    async def _disconnect(self) -> None:
        task, self._task, self._client = self._task, None, None
        self._stop.set()
        if task is not None and not task.done():
            await asyncio.wait([task], timeout=15.0)
            task.cancel()
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)

    async def _connect(self) -> None:
        await self._disconnect()
        self._stop = asyncio.Event()
        ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(ready, self._stop), name=f"holdfast:mcp:{self.name}")
        await asyncio.wait([ready, self._task], return_when=asyncio.FIRST_COMPLETED)
        if ready.done() and not ready.cancelled() and ready.exception() is None:
            self._client, self._failures, self._retry_at = ready.result(), 0, 0.0
            return
        self._failures += 1
        self._retry_at = time.monotonic() + min(LAST_DELAY, FIRST_DELAY * 2 ** min(self._failures, 10))
        problem = ready.exception() if ready.done() else None
        self._reason = self._describe_failure(problem)

    def _describe_failure(self, problem: BaseException | None) -> str:
        words = describe_problem(problem) if problem is not None else "it closed the connection"
        last = self._errors.last
        return f"{self._target.describe()}: {words}" + (f"; it wrote: {last}" if last else "")

    async def _hold(self, ready: asyncio.Future[Client], stop: asyncio.Event) -> None:
        """Hold the session open until it is to stop or breaks."""
        listener: asyncio.Task[None] | None = None
        try:
            headers = await self._headers()
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(self._connect_timeout):
                    client = await stack.enter_async_context(self._make_client(headers, stop.set))
                ready.set_result(client)
                listener = asyncio.create_task(self._listen(client), name=f"holdfast:mcp:{self.name}:changes")
                await stop.wait()
        except BaseException as problem:
            if not ready.done():
                ready.set_exception(problem if isinstance(problem, Exception) else Away("it was stopped"))
                ready.exception()  # read, so that it is not reported as never retrieved
            elif isinstance(problem, Exception):
                log.debug("mcp server %s: the connection ended: %s", self.name, describe_problem(problem))
            else:
                raise
        finally:
            if listener is not None:
                listener.cancel()
                await asyncio.gather(listener, return_exceptions=True)
            if self._stop is stop:
                self._client = None

    def _make_client(self, headers: Mapping[str, str], on_end: Callable[[], None]) -> Client:
        return Client(
            self._target.open(headers, self._errors, on_end, self._origins),
            mode=self._mode,
            client_info=types.Implementation(name="holdfast", version=version("holdfast")),
            elicitation_callback=self._answer_question,
            sampling_callback=self._answer_sample if self._on_sample is not None else None,
            list_roots_callback=self._list_roots if self._roots else None,
            logging_callback=self._log,
            message_handler=self._on_message,
            extensions=[TasksExtension()],
            cache=None,
        )

    async def _answer_question(
        self, context: Any, params: types.ElicitRequestParams
    ) -> types.ElicitResult | types.ErrorData:
        return await self._on_question(params, self._origins.pop(context.request_id, None))

    async def _answer_sample(
        self, context: Any, params: types.CreateMessageRequestParams
    ) -> types.CreateMessageResult | types.ErrorData:
        assert self._on_sample is not None
        return await self._on_sample(params, self._origins.pop(context.request_id, None))

    async def _list_roots(self, context: Any) -> types.ListRootsResult:
        return types.ListRootsResult.model_validate({"roots": list(self._roots)})

    async def _log(self, params: types.LoggingMessageNotificationParams) -> None:
        log.debug("mcp server %s: %s: %.500s", self.name, params.level, params.data)

    async def _on_message(self, message: Any) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            self._on_change()

    async def _listen(self, client: Client) -> None:
        """Follow the changes of a modern server's tools. A server with a handshake sends them by itself."""
        capabilities = client.server_capabilities.tools
        if not self.is_modern or capabilities is None or not capabilities.list_changed:
            return
        try:
            async with client.listen(tools_list_changed=True) as changes:
                async for _ in changes:
                    self._on_change()
        except Exception as problem:
            log.debug("mcp server %s: changes of its tools are not followed: %s", self.name, describe_problem(problem))

    # --- requests ---

    async def list_tools(self) -> list[types.Tool]:
        """Return the server's tools, all pages; raise Away or Lost."""
        session = await self.session(patient=True)
        found: list[types.Tool] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            params = types.PaginatedRequestParams(cursor=cursor)
            async with asyncio.timeout(self._connect_timeout):
                page = await self._guard(session.list_tools(params=params))
            found += page.tools
            cursor = page.next_cursor
            if cursor is None or len(found) > MAX_TOOLS:
                break
        return found

    async def probe(self) -> None:
        """Raise Away unless the server answers now. Called before an answer is passed on, which cannot be repeated."""
        session = await self.session(patient=True)
        if self.is_modern and self._target.is_url and session.protocol_version is not None:
            try:
                async with asyncio.timeout(self._connect_timeout):
                    await self._guard(session.send_discover(session.protocol_version))
            except (Lost, TimeoutError) as problem:
                raise Away(describe_problem(problem)) from None

    async def send(
        self, request: Any, *, timeout: float | None, on_progress: Any = None, session: ClientSession | None = None
    ) -> dict[str, Any]:
        """Send a request, and return its raw result.

        Raises Away (not sent), Lost (unknown), ToolError (the server refused it, or it took too long).
        """
        session = session or await self.session()
        try:
            async with asyncio.timeout(timeout):
                raw = await self._guard(session.send_request(request, RawResult, progress_callback=on_progress))
        except TimeoutError:
            raise ToolError(
                "timeout",
                f"{self.name} did not answer within {timeout:g} s; whether it took effect is unknown",
                {"server": self.name},
            ) from None
        return raw.as_dict()

    async def _guard(self, request: Awaitable[Any]) -> Any:
        """Await a request; raise its errors as Away, Lost or ToolError."""
        try:
            return await request
        except MCPError as error:
            raise await self._to_error(error) from error
        except ValidationError as problem:
            first = problem.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))[:200]
            message = f"{self.name} answered with something that the protocol does not allow: {where}: {first['msg']}"
            raise ToolError("invalid_response", message, {"server": self.name}) from None
        except (RuntimeError, OSError) as problem:  # the session was closed under the request
            raise Lost(describe_problem(problem)) from problem

    async def _to_error(self, error: MCPError) -> Exception:
        failure = failure_of(error.error.data)
        if failure is not None:
            return self._http_error(failure, error.error.message)
        if error.code == types.CONNECTION_CLOSED:
            await self.drop()
            return Lost(error.error.message)
        if error.code == types.INVALID_REQUEST and error.error.message == "Session terminated":
            await self.drop()
            return Away("the server has ended the session")
        if error.code == types.URL_ELICITATION_REQUIRED and (inputs := _links_of(error.error.data)):
            return LinksFirst(inputs)
        return rpc_error(self.name, error)

    def _http_error(self, failure: Mapping[str, Any], message: str) -> Exception:
        kinds = {401: "not_authenticated", 403: "permission_denied", 429: "rate_limited"}
        if failure["status"] in kinds:
            hint = "; check the headers= of this server" if failure["status"] != 429 else ""
            return ToolError(kinds[failure["status"]], f"{self.name}: {message}{hint}", {"server": self.name})
        return Lost(message) if failure["sent"] else Away(f"{self._target.describe()}: {message}")


def _links_of(data: Any) -> dict[str, Any]:
    """Return the links of an error that asks for them, as inputs of a round."""
    links: Any = data.get("elicitations") if isinstance(data, dict) else None  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
    if not isinstance(links, list):
        return {}
    return {
        f"link_{n}": {"method": "elicitation/create", "params": {**link, "mode": "url"}}
        for n, link in enumerate(links[:16], 1)  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
        if isinstance(link, dict)
    }


def rpc_error(name: str, error: MCPError) -> ToolError:
    """Return the error of a server as ours."""
    kind = "invalid_args" if error.code == types.INVALID_PARAMS else "provider_http_error"
    message = clean_text(error.error.message, 2_000) or "an error without a message"
    return ToolError(kind, f"{name}: {message}", {"server": name, "code": error.code})


def describe_problem(problem: BaseException) -> str:
    """Return one line for an error; of a group of errors, its first one."""
    while isinstance(problem, BaseExceptionGroup):
        problem = problem.exceptions[0]  # pyright: ignore[reportUnknownVariableType,reportUnknownMemberType]
    if isinstance(problem, TimeoutError):
        return "it did not answer in time"
    if isinstance(problem, MCPError):
        return clean_text(problem.error.message, 300)
    return clean_text(f"{type(problem).__name__}: {problem}" if str(problem) else type(problem).__name__, 300)  # pyright: ignore[reportUnknownArgumentType]


def clean_text(text: str, limit: int) -> str:
    """Return text of a server with a mark in place of each hidden character, and cut."""
    shown = "".join(
        "\ufffd" if is_hidden(character) and character not in "\n\t" else character for character in text[:limit]
    )
    return shown if len(text) <= limit else f"{shown}… ({len(text)} characters)"
