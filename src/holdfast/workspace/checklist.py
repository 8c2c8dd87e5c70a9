"""update_plan: the agent's checklist. Each call gives the whole list; page and terminal show the latest one."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from holdfast.core.tool import Result
from holdfast.tools.declare import Tool

MAX_ENTRIES = 100


class Entry(msgspec.Struct, frozen=True):
    """One item of the checklist."""

    content: Annotated[str, msgspec.Meta(min_length=1, max_length=500)]
    status: Literal["pending", "in_progress", "completed"] = "pending"
    priority: Literal["high", "medium", "low"] = "medium"


Entries = Annotated[list[Entry], msgspec.Meta(max_length=MAX_ENTRIES)]


async def update_plan(entries: Entries) -> Any:
    """Show people your plan as a checklist, and keep it current while you work.

    Each call replaces the whole list: give every entry, also those that did not change. It changes no file.

    entries:  the steps in order; at most one should be in_progress
    """
    done = sum(entry.status == "completed" for entry in entries)
    summary = f"{done} of {len(entries)} completed" if entries else "the plan is empty"
    return Result(summary, data={"checklist": msgspec.to_builtins(entries)})


def checklist_tools() -> list[Tool]:
    """Return the tool update_plan, which runs in every mode."""
    return [Tool.declare(name="update_plan", handler=update_plan, recovery="redispatch")]
