"""Completions for the shell: pending calls, conversations and model providers. Every failure completes nothing."""

from __future__ import annotations

import asyncio
import os

import click
import msgspec
from click.shell_completion import CompletionItem

from holdfast.cli.command_lines import DEFAULT_STORE
from holdfast.cli.lookup import VERBS
from holdfast.cli.output import prepare_streams
from holdfast.cli.render.text import ellipsize, escape_control_characters
from holdfast.cli.store import connect_to_store, is_store_missing
from holdfast.core.decisions import Pending
from holdfast.models.providers.names import PROVIDERS
from holdfast.stores.base import ConversationRow

COMPLETE_VARIABLE = "_HOLDFAST_COMPLETE"
MAX_ITEMS = 200
MAX_CHARS = 60
_pending = msgspec.json.Decoder(Pending)


def complete_calls(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
    """Return the pending calls that this command can decide, with their conversation if it is typed or needed."""
    try:
        waiting = asyncio.run(_load_pending(_url(ctx)))
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
    return items[:MAX_ITEMS]


def complete_conversations(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
    try:
        rows = asyncio.run(_load_rows(_url(ctx), incomplete))
    except Exception:
        return []
    return [_item(row.conversation, f"{row.agent}, {row.status}") for row in rows]


def complete_models(incomplete: str) -> list[CompletionItem]:
    """Return the providers; the list of their models is not known here."""
    return [CompletionItem(f"{name}:") for name in PROVIDERS if f"{name}:".startswith(incomplete)]


def _item(value: str, help: str) -> CompletionItem:
    return CompletionItem(value, help=ellipsize(escape_control_characters(help), MAX_CHARS))


def _url(ctx: click.Context) -> str:
    """Return the store that the command would use, from the words typed so far."""
    prepare_streams()
    at: click.Context | None = ctx
    while at is not None:
        if at.params.get("store"):
            return str(at.params["store"])
        at = at.parent
    return os.environ.get("HOLDFAST_STORE") or DEFAULT_STORE


async def _load_pending(url: str) -> list[Pending]:
    if await is_store_missing(url):
        return []
    async with connect_to_store(url) as store:
        return [_pending.decode(row.body) for row in await store.pending() if row.intact]


async def _load_rows(url: str, prefix: str) -> list[ConversationRow]:
    if await is_store_missing(url):
        return []
    async with connect_to_store(url) as store:
        rows: list[ConversationRow] = []
        cursor: str | None = None
        while len(rows) < MAX_ITEMS and (page := await store.rows(cursor=cursor, limit=1000)):
            rows += [row for row in page if row.conversation.startswith(prefix)]
            cursor = page[-1].conversation
        return rows[:MAX_ITEMS]
