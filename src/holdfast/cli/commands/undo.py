"""``holdfast undo``: put the files back that the file tools of a workspace changed."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Any

import click
import msgspec
from rich.text import Text

from holdfast.cli.options import (
    MAX_INTEGER,
    Whole,
    conversation_argument,
    example,
    store_option,
    store_url,
)
from holdfast.cli.output import print_text
from holdfast.cli.render.console import make_console
from holdfast.cli.render.text import escape_control_characters, pluralize
from holdfast.cli.store import connect_to_store, is_store_missing, not_found_error
from holdfast.core import codec
from holdfast.core.events import AnyEvent, CallReturned, ConversationImported, TurnEnded, TurnStarted
from holdfast.errors import Invalid, NotAllowed, NotFound, Refused
from holdfast.runtime.arguments import check_conversation_id
from holdfast.stores.base import LogStore
from holdfast.tools.protected import protect
from holdfast.urls import display_url
from holdfast.workspace.files.changes import Change
from holdfast.workspace.files.root import Root
from holdfast.workspace.files.undo import (
    FileChanged,
    Undo,
    choose_root,
    find_commands,
    plan_undo,
    read_changes,
    select_turn,
)

STYLES = {"+": "green", "-": "red", "@": "cyan"}


@click.command(epilog=example("holdfast undo dev --dry-run", "holdfast undo dev", "holdfast undo dev --to 12 --yes"))
@conversation_argument
@click.option("--to", type=Whole(0, MAX_INTEGER), metavar="SEQ", help="Undo all changes after this event of the log.")
@click.option("--root", metavar="DIR", help="The workspace [default: the one that the log names].")
@click.option("--dry-run", is_flag=True, help="Only show the diff.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@store_option
def undo(conversation: str, to: int | None, root: str | None, dry_run: bool, yes: bool, store: str | None) -> int:
    """Put files back that write, edit and apply_patch changed.

    Undoes the last turn that changed files; called again, the turn before it. With --to 0, everything. Shows the diff
    and asks. All files are put back or none: if one was changed since by anything else, it is named and nothing is
    done.

    Changes by commands (bash) are not covered. New directories stay. The undo is not recorded in the log, and the
    model is not told.
    """
    return asyncio.run(undo_changes(store_url(store), conversation, to, root, dry_run=dry_run, yes=yes))


async def undo_changes(
    url: str, conversation: str, to: int | None, given_root: str | None, *, dry_run: bool, yes: bool
) -> int:
    if await is_store_missing(url):
        raise not_found_error(url, conversation)
    async with connect_to_store(url) as store:
        protections = [protect(path) for path in store.location.files]
        try:
            return await _Command(store, url, conversation).run(to, given_root, dry_run=dry_run, yes=yes)
        finally:
            for end in protections:
                end()


class _Command:
    def __init__(self, store: LogStore, url: str, conversation: str):
        self._store, self._url, self._conversation = store, url, check_conversation_id(conversation)

    async def run(self, to: int | None, given_root: str | None, *, dry_run: bool, yes: bool) -> int:
        events = await self._load_events()
        _check_origin(events, given_root)
        if to is not None and to > len(events):
            raise Invalid(f"--to {to}: there are only {len(events)} events in {self._conversation}")
        changes = [change for change in read_changes(events) if change.seq > (to or 0)]
        if not changes:
            after = f" after event {to}" if to else ""
            print_text(f"nothing to undo: no file tool changed a file in {self._conversation}{after}")
            return 0
        path, mine = choose_root(changes, given_root)
        with Root(path) as root:
            chosen = select_turn(root, mine) if to is None else mine
            if not chosen:
                print_text(f"nothing to undo: the files of {self._conversation} are as they were before")
                return 0
            found = plan_undo(root, chosen, await self._load_contents(chosen))
            self._print_plan(root, chosen, found)
            _print_limits(events, changes, chosen, len(changes) - len(mine))
            if found.problems:
                raise Refused(_describe_problems(found), kind="conflict")
            if not found.changes:
                print_text("nothing to undo: these files are as they were before")
                return 0
            if dry_run:
                print_text(f"{pluralize(len(found.changes), 'file')} would be put back; nothing was done")
                return 0
            if not yes and not _confirm(len(found.changes)):
                print_text("nothing was done")
                return 0
            await asyncio.to_thread(found.commit, root)
        for change in found.changes:
            print_text(f"{_past(change)} {change.path}")
        return 0

    async def _load_events(self) -> list[AnyEvent]:
        bodies = await self._store.read(self._conversation)
        if not bodies:
            raise NotFound(f"there is no conversation {self._conversation!r} in {display_url(self._url)}")
        return [await self._load_data(codec.decode_event(body)) for body in bodies]

    async def _load_data(self, event: AnyEvent) -> AnyEvent:
        """Return the event with its data, if that was too large for the event."""
        if isinstance(event, CallReturned):
            match event.data:
                case {"artifact": str(name), "size": int()} if any(one.sha256 == name for one in event.artifacts):
                    data = await self._store.artifact(name)
                    return msgspec.structs.replace(event, data=msgspec.json.decode(data or b"null"))
                case _:
                    pass
        return event

    async def _load_contents(self, changes: Sequence[FileChanged]) -> dict[str, bytes]:
        names = {change.kept for change in changes if change.kept is not None}
        loaded = {name: await self._store.artifact(name) for name in names}
        return {name: content for name, content in loaded.items() if content is not None}

    def _print_plan(self, root: Root, chosen: Sequence[FileChanged], found: Undo) -> None:
        turns = sorted({change.turn for change in chosen})
        which = f"turn {turns[0]}" if len(turns) == 1 else f"turns {turns[0]} to {turns[-1]}"
        events = f"events {min(change.seq for change in chosen)} to {max(change.seq for change in chosen)}"
        print_text(f"undo of {which} of {self._conversation} ({events}) in {root.path}\n")
        for problem in found.problems:
            print_text(f"✗ {problem.path}: {problem.message}")
            _print_diff(problem.diff)
        if not found.problems:
            _print_diff(found.diff())
        if found.unchanged:
            print_text(f"already as before: {', '.join(found.unchanged)}")


def _check_origin(events: Sequence[AnyEvent], given_root: str | None) -> None:
    """Refuse an imported log that nobody vouches for: a forged one could name any directory and any content."""
    imports = [event for event in events if isinstance(event, ConversationImported)]
    if imports and not imports[-1].trusted:
        raise NotAllowed("this conversation was imported without --trust: its log may name any directory and content")
    if imports and given_root is None:
        raise Invalid("this conversation was imported, so its directory may be another one here: give --root")


def _print_diff(diff: str) -> None:
    out = make_console()
    for line in escape_control_characters(diff, block=True).splitlines():
        head = line.startswith(("+++ ", "--- "))
        out.print(Text(line, style="bold" if head else STYLES.get(line[:1], "")), soft_wrap=True)
    if diff:
        out.print()


def _print_limits(events: list[AnyEvent], changes: list[FileChanged], chosen: list[FileChanged], left: int) -> None:
    """Print what the undo does not cover."""
    started = [event.seq for event in events if isinstance(event, TurnStarted) and event.seq < chosen[0].seq]
    commands = find_commands(events, max(started, default=0))
    if commands:
        ran = pluralize(len(commands), "command ran", "commands ran")
        print_text(f"note: {ran} since event {max(started, default=0)}; what bash changed is not undone")
    if left:
        others = ", ".join(sorted({change.root for change in changes} - {chosen[0].root}))
        print_text(f"note: {pluralize(left, 'change')} in {others} not included: use --root")
    if sum(isinstance(event, TurnStarted) - isinstance(event, TurnEnded) for event in events):
        print_text("note: a turn of this conversation is open: its agent may change the files again")


def _describe_problems(found: Undo) -> str:
    names = ", ".join(problem.path for problem in found.problems)
    return f"cannot undo: {names}: see above. Nothing was changed; settle these files by hand, or use --to"


def _past(change: Change) -> str:
    return "removed" if change.content is None else "put back"


def _confirm(number: int) -> bool:
    stdin: Any = sys.stdin
    if stdin is None or not stdin.isatty() or not os.isatty(1):
        raise Invalid("there is no terminal to confirm it: give --yes, or --dry-run to show the diff only")
    return click.confirm(f"Put {pluralize(number, 'file')} back?")
