"""``holdfast export`` and ``holdfast import``: a conversation as a file."""

from __future__ import annotations

import asyncio
import os
from functools import reduce

import click

from holdfast.cli.archive_file import Archive, EndLine, archive_lines, read_archive, write_archive
from holdfast.cli.command_lines import CommandWriter
from holdfast.cli.options import by_option, by_or_login, conversation_argument, example, store_option, store_url
from holdfast.cli.output import print_raw_lines, print_text
from holdfast.cli.render.text import describe_coverage, describe_scope
from holdfast.cli.store import connect_to_store, is_store_missing, not_found_error
from holdfast.core import codec
from holdfast.core.decide.draft import Draft
from holdfast.core.decide.machine import decide_into
from holdfast.core.decisions import Principal
from holdfast.core.effects import owed
from holdfast.core.inputs import ImportConversation
from holdfast.core.state import Grant, State, evolve, pending_entries, shared_grants
from holdfast.errors import Conflict, Invalid, NotFound, StoreDamaged
from holdfast.runtime.arguments import check_conversation_id
from holdfast.runtime.commit import build_append
from holdfast.runtime.log_check import check_log
from holdfast.stores.base import GENESIS, ConversationRow, LogStore, hash_chain


@click.command(epilog=example("holdfast export support support.jsonl", "holdfast export support | wc -l"))
@conversation_argument
@click.argument("file", default="-", type=click.Path())
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@store_option
def export(conversation: str, file: str, force: bool, store: str | None) -> int:
    """Write a conversation to a file: one event a line.

    The file has the events, byte for byte as they are stored, then the artifacts that they name, then one line
    with their number and hash. Without FILE, to standard output.
    """
    return asyncio.run(export_conversation(store_url(store), conversation, file, force=force))


@click.command(
    "import",
    epilog=example(
        "holdfast import support.jsonl",
        "holdfast import support.jsonl --as copy --store sqlite:///b.db",
        "holdfast import support.jsonl --trust",
    ),
)
@click.argument("file", type=click.Path())
@click.option("--as", "name", metavar="NAME", help="The name of the conversation here [default: its old name].")
@click.option("--trust", is_flag=True, help="Let it continue here: you vouch for the content of the file.")
@click.option(
    "--grant",
    "kept",
    multiple=True,
    metavar="GRANT",
    help="With --trust: let this grant, which reaches beyond its conversation, hold here, too.",
)
@by_option
@store_option
def import_(file: str, name: str | None, trust: bool, kept: tuple[str, ...], by: str | None, store: str | None) -> int:
    """Read a conversation from a file that export wrote.

    The import is atomic: a line that is damaged, out of order or of a newer version is refused by its number,
    and an existing conversation is never changed. FILE may be "-".

    Such a file can be forged, approvals included. So an imported conversation can be read, and nothing of it runs. With
    --trust (also later, with the same file) it continues as soon as a process runs its agent: do not let it continue in
    both places. Calls that had not started ask for approval again here, and calls that were running ask before they
    run again; remembered approvals stay valid. All of these are listed. Remembered approvals that reach beyond the
    conversation would let calls of other conversations run: those that are not named with --grant are dropped.
    """
    if kept and not trust:
        raise Invalid("--grant goes with --trust: without it nothing of the file holds here")
    return asyncio.run(import_conversation(store_url(store), file, name, trust=trust, by=by_or_login(by), kept=kept))


async def export_conversation(url: str, conversation: str, path: str, *, force: bool) -> int:
    if await is_store_missing(url):
        raise not_found_error(url, conversation)
    if path != "-":
        _check_target(path, force)
    async with connect_to_store(url) as store:
        row = await store.row(check_conversation_id(conversation))
        if row is None:
            raise NotFound(f"no conversation {conversation!r}")
        found = await check_log(store, row)
        if found.problem is not None:
            raise StoreDamaged(f"conversation {conversation!r} is not exported: {found.problem.message}")
        end = EndLine(conversation, row.seq, row.hash.hex())
        if path == "-":
            async for line in archive_lines(store, end):
                print_raw_lines([line])
            return 0
        await write_archive(path, archive_lines(store, end))
    artifacts = f" and {found.artifacts} artifacts" if found.artifacts else ""
    print_text(f"exported {row.seq} events{artifacts} of {conversation} to {path}")
    return 0


def _check_target(path: str, force: bool) -> None:
    if os.path.lexists(path) and not os.path.isfile(path):
        raise Invalid(f"{path!r} is not a file; give the path of one, or none for standard output", kind="write_failed")
    if os.path.lexists(path) and not force:
        raise Invalid(f"{path!r} is there already; --force replaces it", kind="write_failed")


async def import_conversation(
    url: str, path: str, name: str | None, *, trust: bool, by: str, kept: tuple[str, ...] = ()
) -> int:
    """Import a file with one append, together with the indexes that its log implies.

    The importer's own ConversationImported follows the last event of the file, so that the file itself cannot
    claim to be trusted.
    """
    archive = read_archive(path)
    if name is None and archive.end is None and path == "-":
        raise Invalid("standard input does not name the conversation: give --as NAME")
    conversation = check_conversation_id(archive.name if name is None else name)
    state = reduce(evolve, archive.events, State(conversation=conversation))
    if not state.agent:
        raise StoreDamaged(f"{archive.path}: no event says which agent the conversation is with")
    shared = {grant.id for grant in state.grants if grant.scope != "conversation"}
    for grant in kept:
        if grant not in shared:
            known = ", ".join(sorted(shared)) or "none"
            raise Invalid(f"--grant {grant}: the file has no such grant beyond its conversation; it has: {known}")
    mark = ImportConversation(by=Principal(by), trusted=trust, origin=archive.name, grants=kept)
    async with connect_to_store(url) as store:
        row = await store.row(conversation)
        if row is not None:
            if not trust or not await _was_imported(store, row, archive):
                raise _name_taken_error(conversation, row.seq)
            before = State(conversation=conversation)
            for body in await store.read(conversation):
                before = evolve(before, codec.decode_event(body))
            if not before.closed:
                raise _name_taken_error(conversation, row.seq)
            bodies: list[bytes] = []
        else:
            before, bodies = State(conversation=conversation), archive.bodies
        draft = Draft(before if row is not None else state, store.now())
        decide_into(draft, mark, {})
        draft.bodies[:0] = bodies
        draft.artifacts.extend(archive.artifacts.items() if row is None else ())
        try:
            owes = bool(owed(draft.state))
            await store.append(build_append(before, draft, owes=owes, epoch=None, release=False))
        except Conflict as lost:
            raise _name_taken_error(conversation, lost.actual) from lost
    _print_import(archive, state, draft.state, url)
    return 0


async def _was_imported(store: LogStore, row: ConversationRow, archive: Archive) -> bool:
    """Return whether the conversation is an import of this file without later events."""
    if row.seq != len(archive.bodies) + 1:
        return False
    return (await store.hashes(row.conversation))[-2] == hash_chain(GENESIS, archive.bodies)[-1]


def _name_taken_error(conversation: str, seq: int) -> Conflict:
    refusal = Conflict(conversation, expected=0, actual=seq)
    refusal.message = f"there is a conversation {conversation!r} already ({seq} events); import it --as another name"
    return refusal


def _print_import(archive: Archive, before: State, state: State, url: str) -> None:
    artifacts = f" and {len(archive.artifacts)} artifacts" if archive.artifacts else ""
    print_text(f"imported {len(archive.events)} events{artifacts} as {state.conversation}")
    if archive.end is None:
        print_text("its last line was missing: the file may be incomplete")
    if state.closed:
        print_text(
            "without trust: it can be read, and nothing of it runs; to continue it, import the file with --trust"
        )
        _print_shared_grants(before, state)
        return
    _print_taken_over(before, state)
    if waiting := len(pending_entries(state)):
        count = "1 answer" if waiting == 1 else f"{waiting} answers"
        print_text(f"it waits for {count}: {CommandWriter(url).pending_command(state.conversation)}")
    elif owed(state):
        print_text(f"its turn is open: a process that runs agent {state.agent} on this store continues it")


def _describe_grant(grant: Grant) -> str:
    return f"grant {grant.id}: {grant.tool} with {describe_coverage(grant)}, given by {grant.by.id}"


def _print_shared_grants(before: State, state: State) -> None:
    """Print the file's grants beyond one conversation that do not hold here."""
    held = {grant.id for grant in shared_grants(state)}
    for grant in before.grants:
        if grant.scope != "conversation" and grant.id not in held:
            then = f"--trust --grant {grant.id} lets it hold here" if state.closed else "it was not named with --grant"
            print_text(f"  {_describe_grant(grant)}: does not hold for {describe_scope(grant)} here ({then})")


def _print_taken_over(before: State, state: State) -> None:
    """Print the approvals, running calls, grants and queued messages that the file brings along."""
    asked = state.turn.calls if state.turn else {}
    for call_id, call in (before.turn.calls if before.turn else {}).items():
        if call.phase == "done" or not asked[call_id].imported:
            continue
        how = f", approved by {call.approver.id}" if call.approver else ", let through by a grant" if call.grant else ""
        if call.phase == "running" or call.recovering:
            then = "may have run; a person decides here whether it runs again"
        else:
            then = "has not started, and is asked about again here"
        print_text(f"  {call.made.tool} ({call_id}){how}: {then}")
    for grant in state.grants:
        where = "here" if grant.scope == "conversation" else f"for {describe_scope(grant)}"
        print_text(f"  {_describe_grant(grant)}: holds {where} from now on")
    _print_shared_grants(before, state)
    for queued in state.queue:
        print_text(f"  the message of {queued.by.id} (event {queued.message}) is answered next")
