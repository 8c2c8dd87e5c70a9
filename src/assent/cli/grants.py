"""Remembered approvals: which there are, and taking one back."""

from __future__ import annotations

import msgspec
from rich.table import Table
from rich.text import Text

from assent.cli import inbox
from assent.cli.commands import Commands
from assent.cli.output import json_lines, say
from assent.cli.reading import missing, unknown
from assent.cli.text import moment, shown
from assent.core.state import Grant
from assent.errors import Invalid
from assent.runtime.runtime import Runtime


async def listed(url: str, conversation: str | None, as_json: bool) -> int:
    if await missing(url):
        raise unknown(url, conversation)
    found: list[tuple[str, Grant]] = []
    async with Runtime(store=url) as rt:
        names = [info.conversation for info in await inbox.conversations(rt)] if conversation is None else None
        for name in [conversation] if conversation is not None else names or []:
            found += [(name, grant) for grant in await rt.grants(name)]
    if as_json:
        json_lines([{"conversation": name, **msgspec.to_builtins(grant)} for name, grant in found])
    elif found:
        _table(found)
        name, grant = found[0]
        say("\nto take one back:")
        say(f"  {Commands(url).write('grants', 'revoke', name, grant.id)}")
    else:
        say("no approval is remembered" + (f" in {conversation}" if conversation is not None else ""))
    return 0


def _table(found: list[tuple[str, Grant]]) -> None:
    from assent.cli.cards import console

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("conversation", "grant", "tool", "holds for", "given by", "until"):
        table.add_column(name, overflow="fold")
    for name, grant in found:
        table.add_row(
            Text(shown(name)),
            Text(shown(grant.id), style="bold"),
            Text(shown(grant.tool)),
            Text("these arguments" if grant.scope == "args" else "any arguments", style="yellow"),
            Text(shown(grant.by.id)),
            Text(moment(grant.until) if grant.until is not None else "revoked"),
        )
    console().print(table)


async def revoke(url: str, conversation: str, given: str, by: str) -> int:
    """Take one back, named by its id or the beginning of it."""
    if await missing(url):
        raise unknown(url, conversation)
    async with Runtime(store=url) as rt:
        grants = await rt.grants(conversation)
        matching = [grant for grant in grants if given and grant.id.startswith(given)]
        if len(matching) > 1 and given not in {grant.id for grant in matching}:
            names = ", ".join(f"{grant.id} ({grant.tool})" for grant in matching)
            raise Invalid(f"{given!r} is ambiguous: {names}")
        name = matching[0].id if len(matching) == 1 else given
        await rt.revoke(conversation, name, by=by)
        tool = next((grant.tool for grant in grants if grant.id == name), "it")
        say(f"revoked {name}: {tool} asks again in {conversation}")
    return 0
