"""``holdfast mcp``: the commands of the Model Context Protocol."""

from __future__ import annotations

import click

from holdfast.cli.commands.mcp_client import call, tools
from holdfast.cli.commands.mcp_serve import serve
from holdfast.cli.options import example


@click.group(epilog=example("holdfast mcp serve hello:agent --http", "holdfast mcp tools https://mcp.example.com/mcp"))
def mcp() -> None:
    """Work with MCP, the Model Context Protocol."""


mcp.add_command(serve)
mcp.add_command(tools)
mcp.add_command(call)
