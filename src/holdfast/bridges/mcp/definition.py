"""A tool of a server as a tool of ours: its name, schema, approval and recovery.

A server is not trusted. A definition that is too large or that has control characters in its name is left out, with the
reason. The schema reaches the model as the server gave it; nothing that it refers to elsewhere is fetched.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import mcp_types as types
import msgspec

from holdfast.bridges.mcp.connection import clean_text
from holdfast.core.schema.validation import compile_schema
from holdfast.core.tool import TOOL_NAME
from holdfast.errors import DeclarationError, Invalid
from holdfast.tools.declare import Tool

Trust = Literal["none", "hints"]
MAX_DESCRIPTION, MAX_SCHEMA = 32 * 1024, 128 * 1024
MAX_NAME = 128
OVERRIDES = ("approval", "recovery", "timeout", "expires", "on_expiry", "risk", "prompt", "result_bytes", "retention")
"""The options that can be given for single tools."""


@dataclass(frozen=True, kw_only=True)
class RemoteTool:
    """A tool as its server describes it. ``approval=`` and ``tools=`` can be functions of it."""

    server: str
    name: str
    """The server's own name of the tool, without our prefix."""
    title: str
    description: str
    read_only: bool
    """``readOnlyHint``: it changes nothing. The default is False."""
    destructive: bool
    """``destructiveHint``: it may delete or overwrite. The default is True; False for a read-only tool."""
    idempotent: bool
    """``idempotentHint``: a repeated call with the same arguments changes nothing more. The default is False."""
    open_world: bool
    """``openWorldHint``: it reaches beyond the server, such as the web. The default is True."""
    annotations: Mapping[str, Any]
    """All annotations, as the server gave them."""
    definition: types.Tool


def read_remote_tool(server: str, tool: types.Tool) -> RemoteTool:
    """Return the tool with the defaults that the protocol gives to missing hints."""
    hints = tool.annotations
    given = hints.model_dump(by_alias=True, mode="json", exclude_none=True) if hints is not None else {}
    read_only = hints is not None and hints.read_only_hint is True
    return RemoteTool(
        server=server,
        name=tool.name,
        title=clean_text(tool.title or (hints.title if hints else None) or tool.name, 200),
        description=clean_text(tool.description or "", MAX_DESCRIPTION),
        read_only=read_only,
        destructive=not read_only and not (hints is not None and hints.destructive_hint is False),
        idempotent=read_only or (hints is not None and hints.idempotent_hint is True),
        open_world=not (hints is not None and hints.open_world_hint is False),
        annotations=given,
        definition=tool,
    )


def refusal_of(tool: types.Tool) -> str | None:
    """Return why a server's tool is left out; None: it is taken."""
    if not 0 < len(tool.name) <= MAX_NAME:
        return f"its name has {len(tool.name)} characters; 1 to {MAX_NAME} are allowed"
    if any(unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") for character in tool.name):
        return "its name has control characters"
    if (size := len((tool.description or "").encode())) > MAX_DESCRIPTION:
        return f"its description has {size} bytes; the limit is {MAX_DESCRIPTION}"
    for label, schema in (("schema", tool.input_schema), ("output schema", tool.output_schema)):
        if schema is None:
            continue
        if (size := len(msgspec.json.encode(schema))) > MAX_SCHEMA:
            return f"its {label} has {size} bytes; the limit is {MAX_SCHEMA}"
        try:
            compile_schema(schema)
        except Invalid as problem:
            return f"its {label} cannot be used: {clean_text(problem.message, 300)}"
    return None


def local_name(prefix: str, name: str, taken: Iterable[str] = ()) -> str:
    """Return our name of a server's tool: letters, digits, ``_`` and ``-``, at most 64 characters, not taken."""
    made = re.sub(r"[^A-Za-z0-9_-]", "_", f"{prefix}_{name}")
    if TOOL_NAME.fullmatch(made) and made not in taken and made == f"{prefix}_{name}":
        return made
    suffix = hashlib.sha256(name.encode()).hexdigest()[:6]
    return made if len(made) <= 64 and made not in taken else f"{made[:57]}_{suffix}"


def default_recovery(remote: RemoteTool, trust: Trust) -> str:
    """Return "redispatch" if a trusted server says that a repeat is harmless, else "ask"."""
    return "redispatch" if trust == "hints" and remote.idempotent else "ask"


def declare_tool(
    remote: RemoteTool,
    name: str,
    *,
    handler: Callable[..., Any],
    reconcile: Callable[..., Any],
    approval: Any,
    trust: Trust,
    options: Mapping[str, Any],
) -> Tool:
    """Declare our tool for a server's; raise DeclarationError if its schema or an option is not legal.

    approval:  the application's choice for this tool; None: the default
    options:   the application's overrides for this tool
    """
    given = dict(options)
    recovery = given.pop("recovery", None) or default_recovery(remote, trust)
    given.pop("timeout", None)  # of one request: exchange.py keeps it, because a task may take longer
    trusted = trust == "hints"
    free = trusted and remote.read_only
    chosen = given.pop("approval", None) or approval or ("auto" if free else "required")
    risk = given.pop("risk", None) or ("low" if free else "medium" if trusted and not remote.destructive else "high")
    described = {"title": remote.title, "annotations": dict(remote.annotations)}
    metadata = {"mcp": {"server": remote.server, "tool": remote.name, "recovery": recovery, **described}}
    given.setdefault("prompt", _prompt(remote, trusted))
    return Tool.declare(
        name=name,
        description=remote.description.strip() or f"{remote.title}, a tool of the server {remote.server}.",
        parameters=remote.definition.input_schema,
        handler=handler,
        recovery=reconcile,
        approval=chosen,
        risk=risk,
        metadata=metadata,
        version=_version(remote),
        **given,
    ).copy_with(origin=f"MCP server {remote.server}")


def check_overrides(given: Any) -> dict[str, dict[str, Any]]:
    """Return ``overrides=``: tool -> options; refuse options that cannot be overridden."""
    if not isinstance(given, Mapping):
        raise DeclarationError(f"MCP: overrides is a mapping from tool names to options, not {given!r:.80}")
    found: dict[str, dict[str, Any]] = {}
    for name, options in given.items():  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(name, str) or not isinstance(options, Mapping):
            raise DeclarationError("MCP: overrides maps tool names to options, such as {'refund': {'timeout': '10s'}}")
        if unknown := sorted(set(map(str, options)) - set(OVERRIDES)):  # pyright: ignore[reportUnknownArgumentType]
            raise DeclarationError(
                f"MCP: overrides of {name!r}: unknown {', '.join(unknown)}; the options are {', '.join(OVERRIDES)}"
            )
        found[name] = dict(options)  # pyright: ignore[reportUnknownArgumentType]
    return found


def _prompt(remote: RemoteTool, trusted: bool) -> str:
    """Return the sentence that approvers read first: the tool, the server, and what the server says about effects."""
    hints: list[str] = []
    if remote.annotations.get("readOnlyHint") is True:
        hints.append("read only")
    elif remote.annotations.get("destructiveHint") is not False:
        hints.append("may be destructive")
    if remote.annotations.get("idempotentHint") is True:
        hints.append("idempotent")
    says = f" (the server says: {', '.join(hints)}{'' if trusted else '; not trusted'})" if remote.annotations else ""
    text = f"{remote.server}: {remote.title}{says}"
    return text.replace("{", "(").replace("}", ")")


def _version(remote: RemoteTool) -> str:
    """Return a digest of the parts that the fingerprint lacks: a change of them needs new approvals, too."""
    parts = [remote.name, dict(remote.annotations), remote.definition.title, remote.definition.output_schema]
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16]
