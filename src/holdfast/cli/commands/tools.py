"""``holdfast tools`` and ``holdfast dry-run``: list the tools of an agent, and preview a call."""

from __future__ import annotations

import asyncio
import shlex
from typing import Any

import click
import msgspec
from rich.table import Table
from rich.text import Text

from holdfast.cli.agents import load_agent
from holdfast.cli.options import by_option, by_or_login, example, json_option, spec_argument
from holdfast.cli.output import print_json_lines, print_text
from holdfast.cli.render.console import make_console
from holdfast.cli.render.text import escape_control_characters, format_duration, value_text
from holdfast.core.json_values import parse_strict_object
from holdfast.core.tool import ToolSpec, recovery_of
from holdfast.errors import Invalid
from holdfast.runtime.agent import Agent
from holdfast.runtime.runtime import Runtime

RISK_STYLES = {"high": "bold red", "medium": "yellow", "low": "dim"}


@click.command(epilog=example("holdfast tools hello:agent", "holdfast tools hello:agent --json | jq .parameters"))
@spec_argument
@json_option
def tools(spec: str, as_json: bool) -> int:
    """List the tools of an agent, with their executor, approval, recovery, deadline and risk."""
    agent = load_agent(spec)
    asyncio.run(read_sources(agent))
    return print_tools(agent, as_json)


@click.command(
    "dry-run",
    context_settings={"allow_extra_args": True},
    epilog=example("""holdfast dry-run hello:agent send_mail --args '{"to": "ada@x.org", "text": "Hi"}'"""),
)
@spec_argument
@click.argument("tool")
@click.option("--args", metavar="JSON", default="{}", help="The arguments, as the model would give them.")
@by_option
@json_option
@click.pass_context
def dry_run(ctx: click.Context, spec: str, tool: str, args: str, by: str | None, as_json: bool) -> int:
    """Preview a call without running it.

    Calls the tool's preview on a store in memory; an error that the run would raise is reported here, too.
    """

    if ctx.args:
        raise Invalid(f"the arguments are given with --args: --args {shlex.quote(' '.join(ctx.args))}")
    given = parse_strict_object(args, "--args")
    return asyncio.run(dry_run_tool(load_agent(spec), tool, given, by_or_login(by), as_json))


async def read_sources(agent: Agent) -> None:
    """Read the tools that come from servers; say on standard error which servers cannot be reached."""
    for source in agent.sources:
        await source.open()
        if source.problem is not None:
            click.echo(escape_control_characters(f"{source.name} is not reachable: {source.problem}"), err=True)
        await source.close()


def print_tools(agent: Agent, as_json: bool) -> int:
    specs = list(agent.tools.specs.values())
    if as_json:
        print_json_lines([_spec_to_dict(spec) for spec in specs])
    elif not specs:
        print_text(f"agent {agent.name} has no tools")
    else:
        _print_table(specs)
    return 0


def _spec_to_dict(spec: ToolSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "description": spec.description,
        "executor": spec.executor,
        "approval": spec.gate,
        "manual": spec.manual,
        "preview": spec.planned,
        "recovery": recovery_of(spec),
        "expires": spec.expires,
        "on_expiry": spec.on_expiry,
        "timeout": spec.timeout,
        "risk": spec.risk,
        "approvers": spec.approvers,
        "approver_roles": spec.approver_roles,
        "not_requester": spec.not_requester,
        "escalate_to": spec.escalate_to,
        "escalate_after": spec.escalate_after,
        "remind": spec.remind,
        "extend_limit": spec.extend_limit,
        "prompt": spec.prompt,
        "parameters": msgspec.Raw(spec.parameters.encode()),
        "result": None if spec.result is None else msgspec.Raw(spec.result.encode()),
        "origin": spec.origin,
    }


def _print_table(specs: list[ToolSpec]) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("tool", overflow="fold")
    for name in ("run by", "approval", "if interrupted", "waits for", "risk"):
        table.add_column(name)
    for spec in specs:
        waits = spec.executor in ("human", "client") or spec.manual or spec.gate != "auto"
        table.add_row(
            Text(escape_control_characters(spec.name), style="bold"),
            Text("hand" if spec.manual else spec.executor),
            Text(spec.gate + (", with a plan" if spec.planned else ""), style="yellow" if spec.gate != "auto" else ""),
            Text(recovery_of(spec) if spec.executor == "server" and not spec.manual else "–"),
            Text("–" if not waits else format_duration(spec.expires) if spec.expires is not None else "default"),
            Text(spec.risk, style=RISK_STYLES[spec.risk]),
        )
    make_console().print(table)


async def dry_run_tool(agent: Agent, tool: str, args: dict[str, Any], by: str, as_json: bool) -> int:
    async with Runtime(agent) as rt:
        plan = await rt.dry_run(tool, args, agent=agent.name, by=by)
    if as_json:
        print_json_lines([plan])
    elif isinstance(plan, dict | list):
        print_text(msgspec.json.format(msgspec.json.encode(plan)).decode())
    else:
        print_text(value_text(plan))
    return 0
