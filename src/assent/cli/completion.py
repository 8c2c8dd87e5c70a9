"""What the shell offers at Tab: calls that wait, conversations that exist. Whatever goes wrong, it offers nothing."""

from __future__ import annotations

import asyncio
import os

import click
import msgspec
from click.shell_completion import CompletionItem, get_completion_class

from assent.cli.commands import DEFAULT_STORE
from assent.cli.inbox import VERBS
from assent.cli.output import prepare
from assent.cli.reading import missing
from assent.cli.text import cut, shown
from assent.cli.verification import opened
from assent.core.decisions import Pending
from assent.errors import Invalid
from assent.models.providers.names import PROVIDERS
from assent.stores.base import Row

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_ASSENT_COMPLETE"
MANY = 200
LONG = 60

_pending = msgspec.json.Decoder(Pending)


def script(shell: str) -> str:
    """What a shell has to read to complete our commands."""
    found = get_completion_class(shell)
    if found is None:
        raise Invalid(f"no completion for {shell!r}; there is one for {', '.join(SHELLS)}")
    cli = click.get_current_context().find_root().command
    return found(cli, {}, "assent", VARIABLE).source()


def calls(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
    """Ids of calls that wait for this command; with their conversation where that is typed, or is needed."""
    try:
        waiting = asyncio.run(_waiting(_url(ctx)))
    except Exception:
        return []
    verb = ctx.info_name or ""
    waiting = [e for e in waiting if verb in VERBS[e.kind] or (verb == "submit" and e.recovery)]
    ids = [entry.call for entry in waiting]
    items: list[CompletionItem] = []
    for entry in waiting:
        whole = "/" in incomplete or ids.count(entry.call) > 1
        value = f"{entry.conversation}/{entry.call}" if whole else entry.call
        if value.startswith(incomplete) or (not incomplete and whole):
            items.append(_item(value, f"{entry.tool}: {entry.prompt}"))
    return items[:MANY]


def conversations(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
    try:
        rows = asyncio.run(_rows(_url(ctx), incomplete))
    except Exception:
        return []
    return [_item(row.conversation, f"{row.agent}, {row.status}") for row in rows]


def models(incomplete: str) -> list[CompletionItem]:
    """Providers: which models each has, only it knows."""
    return [CompletionItem(f"{name}:") for name in PROVIDERS if f"{name}:".startswith(incomplete)]


def _item(value: str, help: str) -> CompletionItem:
    return CompletionItem(value, help=cut(shown(help), LONG))


def _url(ctx: click.Context) -> str:
    """The store that the command would use, as far as it is typed."""
    prepare()
    at: click.Context | None = ctx
    while at is not None:
        if at.params.get("store"):
            return str(at.params["store"])
        at = at.parent
    return os.environ.get("ASSENT_STORE") or DEFAULT_STORE


async def _waiting(url: str) -> list[Pending]:
    if await missing(url):
        return []
    async with opened(url) as store:
        return [_pending.decode(row.body) for row in await store.pending() if row.intact]


async def _rows(url: str, prefix: str) -> list[Row]:
    if await missing(url):
        return []
    async with opened(url) as store:
        rows: list[Row] = []
        cursor: str | None = None
        while len(rows) < MANY and (page := await store.rows(cursor=cursor, limit=1000)):
            rows += [row for row in page if row.conversation.startswith(prefix)]
            cursor = page[-1].conversation
        return rows[:MANY]
