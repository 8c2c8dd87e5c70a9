"""``holdfast conversations``, ``rename`` and ``archive``: list, search, rename and archive conversations."""

from __future__ import annotations

import asyncio

import click
from rich.text import Text

from holdfast.cli.options import (
    MAX_INTEGER,
    Whole,
    by_option,
    by_or_login,
    complete_conversation,
    conversation_argument,
    example,
    json_option,
    store_option,
    store_url,
)
from holdfast.cli.output import print_json_lines, print_text, try_print
from holdfast.cli.render.console import make_console
from holdfast.cli.render.event import print_conversations
from holdfast.cli.render.text import escape_control_characters, format_time
from holdfast.cli.store import is_store_missing, not_found_error
from holdfast.errors import Invalid
from holdfast.runtime.runtime import ConversationInfo, Runtime
from holdfast.runtime.search import SearchHit

PAGE_SIZE = 500
INDEX_ATTEMPTS = 60
"""Searches while the index is being built, about a second each: a late result is better than an incomplete one."""


@click.command(
    epilog=example(
        "holdfast conversations", 'holdfast conversations --search "refund zurich"', "holdfast conversations --archived"
    )
)
@click.option("--search", "text", metavar="TEXT", help="Find messages, replies and titles with all of these words.")
@click.option("--archived", is_flag=True, help="List only archived conversations.")
@click.option("--all", "everything", is_flag=True, help="Include archived conversations.")
@click.option("--limit", type=Whole(1, MAX_INTEGER), default=50, show_default=True, metavar="N", help="At most N.")
@json_option
@store_option
def conversations(
    text: str | None, archived: bool, everything: bool, limit: int, as_json: bool, store: str | None
) -> int:
    """List conversations, newest first, or search them.

    Each word of a search matches the words that begin with it. Archived conversations are searched, too.
    """
    if archived and everything:
        raise Invalid("give --archived or --all, not both")
    url = store_url(store)
    if text is not None:
        return asyncio.run(search_conversations(url, text, True if archived else None, limit, as_json))
    return asyncio.run(list_newest(url, None if everything else archived, limit, as_json))


@click.command(epilog=example('holdfast rename support "Refund of order 42"'))
@conversation_argument
@click.argument("title")
@by_option
@store_option
def rename(conversation: str, title: str, by: str | None, store: str | None) -> int:
    """Give a conversation a title.

    Without one, its title is its first message, shortened.
    """
    return asyncio.run(rename_conversation(store_url(store), conversation, title, by_or_login(by)))


@click.command(epilog=example("holdfast archive support", "holdfast archive support --undo"))
@click.argument("names", nargs=-1, required=True, metavar="CONVERSATION...", shell_complete=complete_conversation)
@click.option("--undo", is_flag=True, help="Unarchive them.")
@by_option
@store_option
def archive(names: tuple[str, ...], undo: bool, by: str | None, store: str | None) -> int:
    """Archive conversations: lists leave them out.

    Archived conversations go on, and their pending calls stay pending. A new message unarchives its conversation. To
    save one to a file, use `holdfast export`.
    """
    return asyncio.run(archive_conversations(store_url(store), names, by_or_login(by), archived=not undo))


async def list_newest(url: str, archived: bool | None, limit: int, as_json: bool) -> int:
    if await is_store_missing(url):
        raise not_found_error(url, None)
    found: list[ConversationInfo] = []
    more = True
    async with Runtime(store=url) as rt:
        while more and len(found) < limit:
            cursor = found[-1].conversation if found else None
            size = min(PAGE_SIZE, limit - len(found))
            page = await rt.conversations(cursor=cursor, limit=size, newest=True, archived=archived)
            found += page
            more = len(page) == size
    if as_json:
        print_json_lines(found)
    elif found:
        print_conversations(make_console(), found)
        if more:
            print_text(f"the newest {len(found)}; for more: --limit")
    else:
        print_text("no archived conversations" if archived else "no conversations")
    return 0


async def search_conversations(url: str, text: str, archived: bool | None, limit: int, as_json: bool) -> int:
    if await is_store_missing(url):
        raise not_found_error(url, None)
    hits: list[SearchHit] = []
    complete = False
    async with Runtime(store=url) as rt:
        for _ in range(INDEX_ATTEMPTS):
            results = await rt.search(text, limit=limit, archived=archived)
            hits, complete = results.hits, results.complete
            if complete:
                break
    if as_json:
        print_json_lines(hits)
    elif hits:
        for hit in hits:
            _print_hit(hit)
    else:
        print_text("nothing found")
    if not complete:
        try_print("the search index is not complete: some conversations were not searched", err=True)
    return 0


def _print_hit(hit: SearchHit) -> None:
    out = make_console()
    heading = Text(escape_control_characters(hit.title or hit.conversation), style="bold")
    heading.append("  (archived)" if hit.archived else "", style="dim")
    out.print(heading)
    line = Text("  ")
    for n, part in enumerate(hit.parts):
        line.append(escape_control_characters(part), style="bold yellow" if n % 2 else "")
    out.print(line)
    sender = f"{hit.by}, " if hit.by else ""
    place = f"{hit.conversation} {hit.seq}" if hit.seq else f"{hit.conversation}, its title"
    out.print(Text(f"  {escape_control_characters(sender + place)}, {format_time(hit.at)}", style="dim"))


async def rename_conversation(url: str, conversation: str, title: str, by: str) -> int:
    if await is_store_missing(url):
        raise not_found_error(url, conversation)
    async with Runtime(store=url) as rt:
        await rt.rename(conversation, title, by=by)
    print_text(f"renamed {conversation}")
    return 0


async def archive_conversations(url: str, names: tuple[str, ...], by: str, *, archived: bool) -> int:
    if await is_store_missing(url):
        raise not_found_error(url, names[0])
    async with Runtime(store=url) as rt:
        for name in names:
            await rt.archive(name, archived, by=by)
            print_text(f"{'archived' if archived else 'unarchived'} {name}")
    return 0
