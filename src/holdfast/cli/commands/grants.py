"""``holdfast grants`` and ``holdfast revoke``: list and revoke remembered approvals."""

from __future__ import annotations

import asyncio

import click
import msgspec
from rich.table import Table
from rich.text import Text

from holdfast.cli.command_lines import CommandWriter
from holdfast.cli.lookup import list_conversations
from holdfast.cli.options import (
    by_option,
    by_or_login,
    complete_conversation,
    example,
    json_option,
    store_option,
    store_url,
)
from holdfast.cli.output import print_json_lines, print_text
from holdfast.cli.render.console import make_console
from holdfast.cli.render.event import describe_decider
from holdfast.cli.render.text import describe_coverage, describe_scope, escape_control_characters, format_time
from holdfast.cli.store import is_store_missing, not_found_error
from holdfast.core.state import Grant
from holdfast.errors import Invalid
from holdfast.runtime.pending_calls.shared_grants import full_grant_id, split_grant_id
from holdfast.runtime.runtime import Runtime


@click.command(epilog=example("holdfast grants", "holdfast grants support", "holdfast grants --shared"))
@click.argument(
    "words", nargs=-1, metavar="[CONVERSATION | revoke CONVERSATION GRANT]", shell_complete=complete_conversation
)
@click.option("--shared", is_flag=True, help="Only those that reach beyond their conversation.")
@by_option
@json_option
@store_option
def grants(words: tuple[str, ...], shared: bool, by: str | None, as_json: bool, store: str | None) -> int:
    """List remembered approvals, or revoke one.

    Without CONVERSATION, list those of all conversations. GRANT is the id of a grant, or the beginning of it.
    """
    if shared:
        if words:
            raise Invalid("--shared lists the whole store: without CONVERSATION")
        return asyncio.run(list_grants(store_url(store), None, as_json, shared=True))
    match words:
        case ("revoke", conversation, grant):
            return asyncio.run(revoke_grant(store_url(store), conversation, grant, by_or_login(by)))
        case () | (_,) if words != ("revoke",):
            return asyncio.run(list_grants(store_url(store), words[0] if words else None, as_json))
        case _:
            raise Invalid("give nothing, a CONVERSATION, or: revoke CONVERSATION GRANT")


@click.command(epilog=example("holdfast revoke support/g11"))
@click.argument("grant", metavar="CONVERSATION/GRANT")
@by_option
@store_option
def revoke(grant: str, by: str | None, store: str | None) -> int:
    """Revoke a remembered approval.

    A call that starts afterwards asks again, in whichever conversation.
    """
    named = split_grant_id(grant)
    if named is None:
        raise Invalid(f"{grant!r} does not name a conversation: give CONVERSATION/GRANT, as `holdfast grants` shows it")
    return asyncio.run(revoke_grant(store_url(store), *named, by_or_login(by)))


async def list_grants(url: str, conversation: str | None, as_json: bool, *, shared: bool = False) -> int:
    if await is_store_missing(url):
        raise not_found_error(url, conversation)
    found: list[tuple[str, Grant]] = []
    async with Runtime(store=url) as rt:
        if shared:
            names = sorted({named[0] for grant in await rt.grants() if (named := split_grant_id(grant.id))})
        elif conversation is None:
            names = [info.conversation for info in await list_conversations(rt)]
        else:
            names = [conversation]
        for name in names:
            given = await rt.grants(name)
            found += [(name, grant) for grant in given if not shared or grant.scope != "conversation"]
    if as_json:
        print_json_lines([{"conversation": name, **msgspec.to_builtins(grant)} for name, grant in found])
    elif found:
        _print_grants(found)
        name, grant = found[0]
        print_text("\nto revoke one:")
        print_text(f"  {CommandWriter(url).format_command('revoke', full_grant_id(name, grant.id))}")
    else:
        print_text("no approval is remembered" + (f" in {conversation}" if conversation is not None else ""))
    return 0


def _print_grants(found: list[tuple[str, Grant]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("conversation", "grant", "tool", "holds for", "given by", "until"):
        table.add_column(name, overflow="fold")
    for name, grant in found:
        where = "" if grant.scope == "conversation" else f", {describe_scope(grant)}"
        table.add_row(
            Text(escape_control_characters(name)),
            Text(escape_control_characters(grant.id), style="bold"),
            Text(escape_control_characters(grant.tool)),
            Text(describe_coverage(grant) + where, style="yellow" if not where else "bold yellow"),
            Text(escape_control_characters(describe_decider(grant))),
            Text(format_time(grant.until) if grant.until is not None else "revoked"),
        )
    make_console().print(table)


async def revoke_grant(url: str, conversation: str, given: str, by: str) -> int:
    """Revoke a grant, named by its id or the beginning of it."""
    if await is_store_missing(url):
        raise not_found_error(url, conversation)
    async with Runtime(store=url) as rt:
        grants = await rt.grants(conversation)
        matching = [grant for grant in grants if given and grant.id.startswith(given)]
        if len(matching) > 1 and given not in {grant.id for grant in matching}:
            names = ", ".join(f"{grant.id} ({grant.tool})" for grant in matching)
            raise Invalid(f"{given!r} is ambiguous: {names}")
        name = matching[0].id if len(matching) == 1 else given
        await rt.revoke(conversation, name, by=by)
        ended = next((grant for grant in grants if grant.id == name), None)
        where = f"in {conversation}"
        if ended is not None and ended.scope != "conversation":
            where = f"for {describe_scope(ended)}"
        print_text(f"revoked {name}: {ended.tool if ended else 'it'} asks again {where}")
    return 0
