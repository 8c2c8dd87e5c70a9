"""An agent's tools as they are declared, and what one of them would do, without doing it."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text

from assent.cli.cards import console
from assent.cli.output import json_lines, say
from assent.cli.text import shown, span, value_text
from assent.core.tool import ToolSpec, recovery_of
from assent.runtime.agent import Agent
from assent.runtime.runtime import Runtime

RISKS = {"high": "bold red", "medium": "yellow", "low": "dim"}


def print_tools(agent: Agent, as_json: bool) -> int:
    specs = list(agent.tools.specs.values())
    if as_json:
        json_lines([_data(spec) for spec in specs])
    elif not specs:
        say(f"agent {agent.name} has no tools")
    else:
        _table(specs)
    return 0


def _data(spec: ToolSpec) -> dict[str, Any]:
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
        "prompt": spec.prompt,
        "parameters": msgspec.Raw(spec.parameters.encode()),
        "result": None if spec.result is None else msgspec.Raw(spec.result.encode()),
        "origin": spec.origin,
    }


def _table(specs: list[ToolSpec]) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("tool", overflow="fold")
    for name in ("run by", "approval", "if interrupted", "waits for", "risk"):
        table.add_column(name)
    for spec in specs:
        waits = spec.executor in ("human", "client") or spec.manual or spec.gate != "auto"
        table.add_row(
            Text(shown(spec.name), style="bold"),
            Text("hand" if spec.manual else spec.executor),
            Text(spec.gate + (", with a plan" if spec.planned else ""), style="yellow" if spec.gate != "auto" else ""),
            Text(recovery_of(spec) if spec.executor == "server" and not spec.manual else "–"),
            Text("–" if not waits else span(spec.expires) if spec.expires is not None else "default"),
            Text(spec.risk, style=RISKS[spec.risk]),
        )
    console().print(table)


async def dry_run(agent: Agent, tool: str, args: dict[str, Any], by: str, as_json: bool) -> int:
    async with Runtime(agent) as rt:
        plan = await rt.dry_run(tool, args, agent=agent.name, by=by)
    if as_json:
        json_lines([plan])
    elif isinstance(plan, dict | list):
        say(msgspec.json.format(msgspec.json.encode(plan)).decode())
    else:
        say(value_text(plan))
    return 0
