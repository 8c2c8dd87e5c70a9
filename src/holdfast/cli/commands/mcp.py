"""``holdfast mcp``: the commands of the Model Context Protocol."""

from __future__ import annotations

import click

from holdfast.cli.commands.mcp_serve import serve
from holdfast.cli.options import example


@click.group(epilog=example("holdfast mcp serve hello:agent --http"))
def mcp() -> None:
    """Work with MCP, the Model Context Protocol."""


mcp.add_command(serve)
