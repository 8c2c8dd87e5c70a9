"""``holdfast mcp tools`` and ``holdfast mcp call``: look at an MCP server, and try one of its tools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.text import Text

from holdfast.cli.options import by_option, by_or_login, example, json_option
from holdfast.cli.output import EXIT_WAITING, print_json_lines, print_text
from holdfast.cli.render.console import make_console
from holdfast.cli.render.text import escape_control_characters, value_text
from holdfast.core.decisions import Principal
from holdfast.core.json_values import parse_strict_object
from holdfast.core.schema.validation import validate_value
from holdfast.core.tool import Ask, Continue, Result
from holdfast.errors import DeclarationError, Invalid, ToolError, install_command
from holdfast.tools.call import Call

if TYPE_CHECKING:
    from holdfast.bridges.mcp import MCP

F = Callable[..., Any]


def target_options(command: F) -> F:
    """Add the argument TARGET and the options that say how the server is started."""
    for option in (
        click.option("--env", "env", metavar="NAME=VALUE", multiple=True, help="A variable for a server's command."),
        click.option("--config", type=click.Path(), metavar="FILE", help="Take TARGET as a name in this .mcp.json."),
        click.argument("target"),
    ):
        command = option(command)
    return command


@click.command(
    epilog=example(
        "holdfast mcp tools https://mcp.example.com/mcp",
        "holdfast mcp tools 'npx -y @modelcontextprotocol/server-filesystem /tmp'",
        "holdfast mcp tools crm --config .mcp.json",
    )
)
@target_options
@json_option
def tools(target: str, config: str | None, env: tuple[str, ...], as_json: bool) -> int:
    """List the tools of an MCP server as an agent would get them.

    TARGET is a URL, a command in quotes, or a name in the file of --config.
    """
    return asyncio.run(_list_tools(_open_target(target, config, env), as_json))


@click.command(
    epilog=example("""holdfast mcp call 'python shop.py' refund --args '{"order": 7}'"""),
)
@target_options
@click.argument("tool")
@click.option("--args", metavar="JSON", default="{}", help="The arguments.")
@by_option
@json_option
def call(
    target: str, config: str | None, env: tuple[str, ...], tool: str, args: str, by: str | None, as_json: bool
) -> int:
    """Call a tool of an MCP server, without an agent: no approval, no log.

    If the server asks a question, it is printed and the exit code is 75: questions are answered in a conversation.
    """
    given = parse_strict_object(args, "--args")
    return asyncio.run(_call_tool(_open_target(target, config, env), tool, given, by_or_login(by), as_json))


def _open_target(target: str, config: str | None, env: tuple[str, ...]) -> MCP:
    try:
        from holdfast.bridges.mcp import MCP
        from holdfast.bridges.mcp.config import load_servers, parse_target
    except ModuleNotFoundError as problem:
        raise DeclarationError(f"holdfast mcp needs the package mcp: {install_command('mcp')}") from problem
    if config is not None:
        servers = load_servers(config)
        if target not in servers:
            raise Invalid(f"{config} has no server {target!r}; it has {', '.join(servers) or 'none'}")
        return servers[target]
    parsed = parse_target(target)
    variables = {name: value for name, _, value in (word.partition("=") for word in env)}
    return MCP(parsed, env=variables if variables else None)


async def _read_tools(server: MCP) -> None:
    await server.open()
    if server.problem is not None:
        raise ToolError("resource_missing", f"the server is not reachable: {server.problem}")


async def _list_tools(server: MCP, as_json: bool) -> int:
    try:
        await _read_tools(server)
        specs = list(server.toolset.specs.values())
        if as_json:
            print_json_lines([_describe(spec) for spec in specs])
        else:
            console = make_console()
            for spec in specs:
                line = escape_control_characters(spec.description.strip().splitlines()[0])
                console.print(Text(spec.metadata["mcp"]["tool"], style="bold"), Text(f"({spec.gate}) {line}"))
        for name, why in server.left_out.items():
            click.echo(escape_control_characters(f"left out: {name}: {why}"), err=True)
    finally:
        await server.close()
    return 0


def _describe(spec: Any) -> dict[str, Any]:
    remote = spec.metadata["mcp"]
    return {
        "tool": remote["tool"],
        "title": remote["title"],
        "description": spec.description,
        "annotations": remote["annotations"],
        "approval": spec.gate,
        "recovery": remote["recovery"],
        "risk": spec.risk,
        "parameters": msgspec.Raw(spec.parameters.encode()),
    }


async def _call_tool(server: MCP, name: str, args: dict[str, Any], by: Principal | str, as_json: bool) -> int:
    try:
        await _read_tools(server)
        known = {tool.spec.metadata["mcp"]["tool"]: tool for tool in server.toolset}
        tool = known.get(name)
        if tool is None or tool.handler is None:
            raise Invalid(f"no tool {name!r}; the server has {', '.join(known) or 'none'}", kind="unknown_tool")
        validate_value(tool.spec.parameters, args, f"arguments of {name}")
        state: Any = None
        while True:
            given = Call(conversation="mcp-call", tool=tool.spec.name, principal=by, state=state)
            outcome = await tool.handler(args, given)
            if not isinstance(outcome, Continue):
                break
            state = outcome.state
        if isinstance(outcome, Ask):
            print_text(outcome.question)
            return EXIT_WAITING
        value = outcome.output if isinstance(outcome, Result) else outcome
        if as_json:
            print_json_lines([{"result": value}])
        else:
            print_text(value if isinstance(value, str) else value_text(value))
    finally:
        await server.close()
    return 0
