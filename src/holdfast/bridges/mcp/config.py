"""Targets of servers from the command line, and from a file ``.mcp.json`` where the user names one."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from holdfast.bridges.mcp.toolset import MCP
from holdfast.core.decisions import Principal
from holdfast.core.json_values import parse_strict_object
from holdfast.errors import DeclarationError

_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


def parse_target(text: str) -> str | list[str]:
    """Return the target that a command line names: a URL, or a command with its arguments."""
    if re.match(r"https?://", text):
        return text
    words = shlex.split(text)
    if not words:
        raise DeclarationError("give a URL, or a command in quotes: 'python server.py'")
    return words


def load_servers(path: str | Path, **options: Any) -> dict[str, MCP]:
    """Return the servers of a file of the form ``{"mcpServers": {NAME: {"command", "args", "env"} or {"url"}}}``.

    No file is ever read unless it is named here. ``${VARIABLE}`` and ``${VARIABLE:-default}`` are replaced from the
    environment. The options are those of ``MCP``, for all servers.
    """
    file = Path(path)
    try:
        data = parse_strict_object(file.read_text(), str(file))
    except OSError as problem:
        raise DeclarationError(f"{file}: {problem.strerror}") from None
    servers = data.get("mcpServers")
    if not isinstance(servers, dict):
        raise DeclarationError(f'{file}: there is no object "mcpServers" in it')
    return {
        str(name): _make_server(str(file), str(name), entry, options)
        for name, entry in cast("dict[str, Any]", servers).items()
    }


def _make_server(file: str, name: str, entry: Any, options: Mapping[str, Any]) -> MCP:
    if not isinstance(entry, dict):
        raise DeclarationError(f"{file}: the entry of {name!r} is no object")
    found = cast("dict[str, Any]", _expand(entry, file))
    local = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:32]
    if isinstance(found.get("url"), str):
        fixed = _texts(found.get("headers"))

        def headers(principal: Principal) -> dict[str, str]:
            return fixed

        return MCP(found["url"], name=local, headers=headers if fixed else None, **options)
    if not isinstance(found.get("command"), str):
        raise DeclarationError(f'{file}: {name!r} has neither "command" nor "url"')
    command = [found["command"], *map(str, found.get("args") or [])]
    return MCP(command, name=local, env=_texts(found.get("env")), cwd=found.get("cwd"), **options)


def _texts(given: Any) -> dict[str, str]:
    """Return an object of the file with texts as values."""
    entries = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    return {key: str(value) for key, value in entries.items()}


def _expand(value: Any, file: str) -> Any:
    if isinstance(value, dict):
        return {key: _expand(item, file) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_expand(item, file) for item in cast("list[Any]", value)]
    return _VARIABLE.sub(lambda found: _variable(found, file), value) if isinstance(value, str) else value


def _variable(found: re.Match[str], file: str) -> str:
    value: str | None = os.environ.get(found[1], cast("str | None", found[2]))
    if value is None:
        raise DeclarationError(f"{file}: the environment variable {found[1]} is not set")
    return value
