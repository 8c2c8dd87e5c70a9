"""An ordered set of tools with unique names, wrappers that derive one set from another, and sources of tools."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from holdfast.core.tool import ToolSpec, help_of
from holdfast.errors import DeclarationError, ToolError, install_command
from holdfast.tools.adapters import tools_from_functions
from holdfast.tools.declare import Tool, as_tool
from holdfast.tools.handler import Handler
from holdfast.tools.options import check_tool_name, refuse_illegal_pair

if TYPE_CHECKING:
    import asyncio
    from types import ModuleType

    from holdfast.core.decisions import Principal
    from holdfast.tools.adapters import Approvals, Only
    from holdfast.tools.options import Duration

HELP_TOOL = "tool_help"
ANY_OBJECT = '{"type":"object"}'


class Toolset:
    """Tools with unique names, in order. Takes tools, subclasses of Tool and other Toolsets, which are flattened."""

    __slots__ = ("_tools",)

    def __init__(self, *given: Any):
        self._tools: dict[str, Tool] = {}
        for item in given:
            if isinstance(item, ToolSource):
                raise DeclarationError(
                    f"{item.name} is read when the agent runs: it goes into Agent(tools=[...]) itself"
                )
            for tool in item if isinstance(item, Toolset) else (as_tool(item),):
                name = tool.spec.name
                if name in self._tools:
                    first, second = self._tools[name].spec.origin or "?", tool.spec.origin or "?"
                    raise DeclarationError(
                        f"two tools are called {name!r}: one from {first}, one from {second}; "
                        "give one of them another name=, or put a prefix before one set: prefixed(...)"
                    )
                self._tools[name] = tool

    @staticmethod
    def from_functions(
        given: ModuleType | Iterable[Callable[..., Any]], *, approval: Approvals = None, only: Only = None
    ) -> Toolset:
        """Make tools from the public functions of a module, or from a list of functions.

        A module's own functions whose names have no leading underscore are taken; imported ones are not. Tools that
        are found are taken as they are. The rules are those of ``@tool``: a function without a docstring is refused.

        approval:  as in ``@tool``, for all functions, or a mapping from the name to the approval
        only:      the names to take, or a function of the name
        """
        return Toolset(*tools_from_functions(given, approval, only))

    @staticmethod
    def from_openapi(
        document: Any,
        *,
        base_url: str | None = None,
        auth: Callable[[Principal], Any] | None = None,
        approval: Approvals = None,
        only: Only = None,
        timeout: Duration | None = "30s",
    ) -> Toolset:
        """Make a server tool from each operation of an OpenAPI 3.0 or 3.1 document: a dict, JSON text or a path.

        GET and HEAD run freely and may be repeated after a crash. Everything else needs an approval, is shown to the
        approver as method, URL and body, is sent with ``Idempotency-Key: call.key``, and is asked about after a crash.

        base_url:  where the API is. Default: the first of the document's servers
        auth:      a function of the principal, plain or async, that returns the headers with the credentials. It is
                   called when a call runs; the credentials are not in previews, results, errors or the log
        approval:  "auto" or "required" for all, a mapping from the tool's name, or a function of the operation (it
                   has name, method, path, operation_id, summary, description, tags, deprecated) that returns "auto",
                   "required", a function of (args, call), or None for the default
        only:      tool names or operation ids to take, or a function of the operation
        timeout:   the time limit of one call
        """
        try:
            from holdfast.tools.openapi import tools_from_openapi
        except ModuleNotFoundError as problem:
            raise DeclarationError(f"from_openapi needs httpx: {install_command('openapi')}") from problem
        return Toolset(
            *tools_from_openapi(document, base_url=base_url, auth=auth, approval=approval, only=only, timeout=timeout)
        )

    @staticmethod
    def from_langchain(*tools: Any, approval: Approvals = None, only: Only = None) -> Toolset:
        """Make tools from LangChain tools (``langchain_core.tools.BaseTool``).

        approval:  as in ``@tool``, for all tools, or a mapping from the name to the approval
        only:      the names to take, or a function of the name
        """
        try:
            from holdfast.tools.langchain import tools_from_langchain
        except ModuleNotFoundError as problem:
            raise DeclarationError(f"from_langchain needs langchain-core: {install_command('langchain')}") from problem
        return Toolset(*tools_from_langchain(tools, approval, only))

    @staticmethod
    def from_pydantic_ai(*tools: Any, approval: Approvals = None, only: Only = None) -> Toolset:
        """Make tools from pydantic-ai's: a ``FunctionToolset``, with or without ``approval_required()``, or ``Tool`` s.

        ``requires_approval=True`` becomes ``approval="required"``. A tool's ``RunContext`` has ``deps`` (from
        ``call.scope``) and the call's identity; what only a run of a pydantic-ai agent has is refused when it is read.

        approval:  as in ``@tool``, for all tools, or a mapping from the name; it adds approvals and removes none
        only:      the names to take, or a function of the name
        """
        try:
            from holdfast.tools.pydantic_ai import tools_from_pydantic_ai
        except ModuleNotFoundError as problem:
            raise DeclarationError(
                f"from_pydantic_ai needs pydantic-ai-slim, as every provider's extra does: {install_command('openai')}"
            ) from problem
        return Toolset(*tools_from_pydantic_ai(tools, approval, only))

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())

    def __len__(self) -> int:
        return len(self._tools)

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    def get(self, name: str) -> Tool | None:
        return self._tools.get(name)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tools)

    @property
    def specs(self) -> Mapping[str, ToolSpec]:
        """The specs by tool name. Not cached: ``@tool.preview`` may replace a spec after the set was created."""
        return {name: tool.spec for name, tool in self._tools.items()}

    def __repr__(self) -> str:
        return f"Toolset({', '.join(self._tools)})"


class ToolSource(ABC):
    """Tools of another program, such as an MCP server: ``Agent(tools=[source])``.

    A runtime opens the sources of its agents before it runs anything, and closes them last. A source that cannot reach
    its program does not raise: its tools are missing or fail, and the agent works with the rest.
    """

    def __init__(self) -> None:
        self._listeners: list[Callable[[], None]] = []

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call this function whenever ``toolset`` or ``note`` has changed."""
        self._listeners.append(listener)

    def _announce(self) -> None:
        for listener in self._listeners:
            listener()

    @property
    @abstractmethod
    def name(self) -> str:
        """A name for messages."""

    @property
    @abstractmethod
    def toolset(self) -> Toolset:
        """The tools as they are known now."""

    @property
    def note(self) -> str:
        """Text that is added to the agent's instructions, such as why tools are missing; empty: nothing."""
        return ""

    @property
    def problem(self) -> str | None:
        """Why the tools are not known; None if they are."""
        return None

    @abstractmethod
    async def open(self) -> None:
        """Connect and read the tools. Returns in bounded time, also if the program is away; raises nothing."""

    @abstractmethod
    async def close(self) -> None:
        """Disconnect. Each ``open`` has one ``close``: the last one disconnects."""

    def absent_tool(self, name: str) -> Tool | None:
        """Return what runs a call in the log whose tool is this source's and is not known now; None: not this source's.

        Its handler says what is missing. It is not listed, and no approval is bound to its definition.
        """
        return None

    def abandon_call(self, tool: str, state: Any, by: Principal) -> None:
        """End what a call has begun: it is over, and the run that was to follow does not. Returns at once.

        Its turn was cancelled or halted, or its question expired, while no handler of it ran.

        tool:   the name of the tool; it may be another source's
        state:  what the handler passed to its next run (``Ask(resume=...)``, ``Continue``)
        by:     the principal of the turn
        """
        return

    def tasks(self) -> list[asyncio.Task[None]]:
        """Return the tasks that run for this source; ``Runtime.kill`` cancels them."""
        return []


Tools = Toolset | Iterable[Any]


def prefixed(tools: Tools, prefix: str) -> Toolset:
    """Return the tools with a prefix on every name. Provider tools keep their names: the provider defines them."""

    def add_prefix(tool: Tool) -> Tool:
        if tool.spec.executor == "provider":
            return tool
        return tool.copy_with(name=check_tool_name(prefix + tool.spec.name))

    return Toolset(*(add_prefix(tool) for tool in _as_toolset(tools)))


def filtered(tools: Tools, predicate: Callable[[Tool], bool]) -> Toolset:
    """Return the tools for which the predicate is true."""
    return Toolset(*(tool for tool in _as_toolset(tools) if predicate(tool)))


def gated(
    tools: Tools,
    predicate: Callable[[Tool], bool] | None = None,
    *,
    approval: str | Callable[..., Any] = "required",
) -> Toolset:
    """Return the tools with an approval added to those that the predicate selects.

    Without a predicate, every server and client tool is selected. Selecting a human or provider tool raises
    DeclarationError, as declaring it with an approval does. An approval only gets stricter: "required" replaces a
    tool's own approval function, but a function never replaces "required".
    """
    if approval != "required" and not callable(approval):
        raise DeclarationError(f'gated: approval must be "required" or a function of (args, call), not {approval!r}')

    def add_gate(tool: Tool) -> Tool:
        chosen = tool.spec.executor in ("server", "client") if predicate is None else predicate(tool)
        if not chosen:
            return tool
        label = f"tool {tool.spec.name!r}"
        refuse_illegal_pair(tool.spec.executor, "required", label)
        if not callable(approval):
            return tool.copy_with(gate="required")
        if tool.spec.gate != "auto":
            return tool
        return tool.copy_with(gate="policy", policy=Handler(approval, "raw", f"{label}: approval"))

    return Toolset(*(add_gate(tool) for tool in _as_toolset(tools)))


def _as_toolset(tools: Tools) -> Toolset:
    return tools if isinstance(tools, Toolset) else Toolset(*tools)


def add_help_tool(tools: Toolset) -> Toolset:
    """Return the tools, plus ``tool_help`` if any of them is compact."""
    compact = {spec.name: spec for spec in tools.specs.values() if spec.compact}
    if not compact:
        return tools

    async def tool_help(args: dict[str, Any]) -> Any:
        name = args.get("tool")
        if name is None:
            return [help_of(spec) for spec in compact.values()]
        if name not in compact:
            known = ", ".join(compact)
            raise ToolError("unknown_tool", f"there is no help for {name!r}; there is for: {known}")
        return help_of(compact[name])

    helper = Tool.declare(
        name=HELP_TOOL,
        handler=tool_help,
        description="Return a tool's full description and arguments. Call this before you first call a tool whose "
        "arguments are not listed.",
        parameters={
            "type": "object",
            "properties": {"tool": {"type": "string", "enum": list(compact)}},
            "additionalProperties": False,
        },
    )
    return Toolset(tools, helper)


def describe_for_model(spec: ToolSpec) -> tuple[str, str]:
    """Return the description and the parameters (JSON Schema text) that the model sees."""
    if not spec.compact:
        return spec.description, spec.parameters
    line = spec.description.strip().split("\n", 1)[0]
    return f"{line} (arguments: ask {HELP_TOOL})", ANY_OBJECT
