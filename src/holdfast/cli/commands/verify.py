"""``holdfast verify``: check every log, and compare its caches (snapshot, pending entries, row) with the log."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import click
import msgspec

from holdfast.cli.options import example, json_option, optional_conversation_argument, store_option, store_url
from holdfast.cli.output import print_json_lines, print_text
from holdfast.cli.render.text import escape_control_characters
from holdfast.cli.store import PAGE_SIZE, connect_to_store, is_store_missing, not_found_error
from holdfast.core import codec
from holdfast.core.decisions import Pending
from holdfast.core.effects import owed
from holdfast.core.state import State, pending_entries, status_of
from holdfast.errors import HoldfastError, Invalid, NotFound, StoreDamaged
from holdfast.runtime.arguments import check_conversation_id
from holdfast.runtime.commit import agent_of
from holdfast.runtime.decision_rows import check_rows
from holdfast.runtime.event_log import fold_log, rebuild_from_log
from holdfast.runtime.log_check import LogCheck, Problem, check_log
from holdfast.stores.base import ConversationRow, LogStore

TRIES = 5
"""Attempts to compare the caches of a conversation that is being appended to."""


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a heads file: the end of a conversation's log when the file was written."""

    conversation: str
    seq: int
    head: str


_heads = msgspec.json.Decoder(Head)
_pending = msgspec.json.Decoder(Pending)


@click.command(
    epilog=example(
        "holdfast verify",
        "holdfast verify support --json",
        "holdfast verify --write-heads heads.jsonl",
        "holdfast verify --heads heads.jsonl",
    )
)
@optional_conversation_argument
@click.option("--rebuild", is_flag=True, help="Rebuild caches that do not fit, from the logs.")
@click.option("--heads", metavar="FILE", type=click.Path(), help="Compare with the heads that --write-heads wrote.")
@click.option(
    "--write-heads", metavar="FILE", type=click.Path(), help="If every check passes, write the head of each log."
)
@json_option
@store_option
def verify(
    conversation: str | None,
    rebuild: bool,
    heads: str | None,
    write_heads: str | None,
    as_json: bool,
    store: str | None,
) -> int:
    """Check that logs are unchanged.

    Recomputes the hash chain of a conversation, or of all, decodes every event, checks the artifacts that they name,
    and compares snapshots, pending entries, the index of decisions and the list of conversations with what the logs
    say. The first mismatch is named; then the exit code is 1.

    By itself it detects damage, and edits that do not recompute the hashes. It cannot detect that the last events of a
    log were removed, that a log was rewritten with new hashes, or that a whole conversation is missing: compare with
    heads that were written earlier (--write-heads) and kept where the store's writers cannot change them.
    """
    if write_heads is not None and conversation is not None:
        raise Invalid("--write-heads writes the heads of all conversations: leave CONVERSATION out")
    return asyncio.run(
        verify_store(
            store_url(store), conversation, as_json, rebuild_caches=rebuild, heads=heads, write_heads=write_heads
        )
    )


async def verify_store(
    url: str,
    conversation: str | None,
    as_json: bool,
    *,
    rebuild_caches: bool = False,
    heads: str | None = None,
    write_heads: str | None = None,
) -> int:
    kept = {} if heads is None else _read_heads(heads)
    if await is_store_missing(url):
        raise not_found_error(url, conversation)
    bad: list[LogCheck] = []
    async with connect_to_store(url) as store:
        rows = await _load_rows(store, conversation)
        if conversation is not None:
            kept = {name: head for name, head in kept.items() if name == conversation}
        for number, row in enumerate(rows):
            watched = len(rows) > 1 and sys.stderr.isatty()
            if watched:
                _print_progress(
                    f"verifying {number + 1} of {len(rows)}: {escape_control_characters(row.conversation)[:40]}"
                )
            found = await _check_conversation(store, row, kept.pop(row.conversation, None), rebuild_caches)
            if watched:
                _print_progress("")
            _print_check(found, as_json)
            if not found.ok:
                bad.append(found)
    for gone in kept.values():
        lost = Problem(message=f"the file of heads has it with {gone.seq} events, and it is not in the store")
        found = LogCheck(conversation=gone.conversation, ok=False, events=0, artifacts=0, head="", problem=lost)
        _print_check(found, as_json)
        bad.append(found)
    if bad:
        first = bad[0]
        all_of = len(rows) + len(kept)
        rest = f"; {len(bad) - 1} more of {all_of} conversations fail" if len(bad) > 1 else ""
        assert first.problem is not None
        raise StoreDamaged(f"conversation {first.conversation!r}: {first.problem.message}{rest}")
    if not rows and not as_json:
        print_text("nothing to verify: no conversations")
    if write_heads is not None:
        _write_heads(write_heads, rows)
    return 0


def _print_check(found: LogCheck, as_json: bool) -> None:
    if as_json:
        print_json_lines([found])
    else:
        print_text(_describe_check(found))


def _read_heads(path: str) -> dict[str, Head]:
    try:
        with open(path, "rb") as file:
            heads = [_heads.decode(line) for line in file if line.strip()]
    except OSError as failure:
        raise Invalid(f"{path!r} cannot be read: {failure.strerror or failure}", kind="read_failed") from failure
    except (msgspec.DecodeError, UnicodeDecodeError) as failure:
        raise Invalid(f"{path!r} is not a file that --write-heads wrote: {failure}", kind="read_failed") from failure
    return {head.conversation: head for head in heads}


def _write_heads(path: str, rows: list[ConversationRow]) -> None:
    """Write the file atomically: to a temporary file first, then renamed."""
    temporary = ""
    try:
        with tempfile.NamedTemporaryFile(dir=os.path.dirname(path) or ".", prefix=".holdfast-", delete=False) as file:
            temporary = file.name
            for row in rows:
                head = Head(conversation=row.conversation, seq=row.seq, head=row.hash.hex())
                file.write(msgspec.json.encode(head) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as failure:
        raise HoldfastError(
            f"{path!r} cannot be written: {failure.strerror or failure}", kind="write_failed"
        ) from failure
    finally:
        with suppress(OSError):
            os.unlink(temporary)


async def _load_rows(store: LogStore, conversation: str | None) -> list[ConversationRow]:
    if conversation is not None:
        row = await store.row(check_conversation_id(conversation))
        if row is None:
            raise NotFound(f"no conversation {conversation!r}")
        return [row]
    rows: list[ConversationRow] = []
    while page := await store.rows(cursor=rows[-1].conversation if rows else None, limit=PAGE_SIZE):
        rows += page
    return rows


def _describe_check(found: LogCheck) -> str:
    if found.problem is not None:
        return f"{found.conversation}: {found.problem.message}"
    artifacts = f", {found.artifacts} artifacts" if found.artifacts else ""
    if found.rebuilt:
        artifacts += ", caches rebuilt from the log"
    return f"{found.conversation}: ok, {found.events} events{artifacts}, head {found.head[:16]}"


def _print_progress(text: str) -> None:
    """Replace the progress line on a terminal."""
    click.echo(f"\r\x1b[K{text}", nl=False, err=True)


async def _check_conversation(
    store: LogStore, row: ConversationRow, kept: Head | None, rebuild_caches: bool
) -> LogCheck:
    """Check the log, then its head against the heads file, then the caches."""
    found = await check_log(store, row)
    if found.problem is not None:
        return found
    problem, rebuilt = await _head_problem(store, row, kept), False
    if problem is None:
        problem = await _cache_problem(store, row.conversation)
        if problem is not None and rebuild_caches:
            await rebuild_from_log(store, row.conversation, problem.message)
            await store.reset_index(row.conversation)  # a process that serves or searches builds it again
            problem, rebuilt = await _cache_problem(store, row.conversation), True
    return msgspec.structs.replace(found, ok=problem is None, problem=problem, rebuilt=rebuilt)


async def _head_problem(store: LogStore, row: ConversationRow, kept: Head | None) -> Problem | None:
    if kept is None:
        return None
    if row.seq < kept.seq:
        message = f"it ends at event {row.seq}, but the file of heads has {kept.seq}: the last events were removed"
        return Problem(message=message, seq=row.seq + 1)
    hashes = await store.hashes(row.conversation)
    if kept.seq < 1 or hashes[kept.seq - 1].hex() != kept.head:
        message = f"event {kept.seq}, or one before it, is not the one in the file of heads: the log was rewritten"
        return Problem(message=message, seq=kept.seq)
    return None


async def _cache_problem(store: LogStore, name: str) -> Problem | None:
    """Compare the caches with the folded log; return None if the log grows too fast to compare."""
    for _ in range(TRIES):
        loaded, entries, row = await store.load(name), await store.pending(name), await store.row(name)
        if loaded is not None and row is not None and row.seq == loaded.row.seq:
            break
    else:
        return None
    earlier = await fold_log(store, State(conversation=name), loaded.snapshot_seq)
    snapshot = codec.decode_state(loaded.snapshot) if loaded.snapshot is not None else None
    if loaded.intact is False or (snapshot is not None and snapshot != earlier):
        return _cache_mismatch("snapshot", "its snapshot differs from the state of its log")
    state = await fold_log(store, earlier, row.seq)
    for column, stored, folded in _columns(row, state):
        if stored != folded:
            return _cache_mismatch("row", f"its row says {column} {stored!r}, and its log {folded!r}")
    if row.intact is False:
        return _cache_mismatch("row", "its row does not fit its checksum")
    if row.intact and row.waiting is None:
        return None  # an incomplete copy has no pending entries yet
    waits = {entry.call: entry for entry in pending_entries(state)}
    for call in waits.keys() ^ {entry.call for entry in entries}:
        there = (
            "is not among the pending entries" if call in waits else "is among the pending entries and does not wait"
        )
        return _cache_mismatch("pending", f"call {call} {there}")
    for entry in entries:
        if (
            entry.intact is False
            or _decode_entry(entry.body) != waits[entry.call]
            or entry.deadline != max(waits[entry.call].deadline, waits[entry.call].starts_at or 0.0)
        ):
            return _cache_mismatch("pending", f"the pending entry of call {entry.call} differs from its log")
    for wrong in await check_rows(store, name):
        return _cache_mismatch("decisions", wrong)
    return None


def _columns(row: ConversationRow, state: State) -> Iterator[tuple[str, Any, Any]]:
    """Yield (column, stored value, value from the log)."""
    yield "status", row.status, status_of(state)
    yield "agent", row.agent, agent_of(state)
    if row.waiting is not None or not row.intact:
        yield "owes", row.owes, bool(owed(state))
    if row.waiting is not None:
        yield "waiting", row.waiting, len(pending_entries(state))


def _decode_entry(body: bytes) -> Pending | None:
    try:
        return _pending.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _cache_mismatch(cache: str, message: str) -> Problem:
    return Problem(
        message=f"{message}; the log is intact: `holdfast verify --rebuild` rebuilds its caches", cache=cache
    )
