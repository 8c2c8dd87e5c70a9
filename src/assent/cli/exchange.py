"""A conversation as a file: one stored event a line, byte for byte, then its artifacts, then what it should add up to.

    {"type":"ConversationOpened",...}                     the events as they are stored
    {"artifact":"<sha256>","body":"<base64>"}             what they name, in the order in which they do
    {"conversation":"support","events":12,"head":"..."}   the last line: without it, nobody knows that it is whole

A file of events alone is read too, such as ``assent log --json`` writes.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
import sys
import tempfile
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import reduce
from hashlib import sha256
from typing import IO, Any

import msgspec

from assent.cli.commands import Commands
from assent.cli.output import raw_lines, say
from assent.cli.reading import missing, unknown
from assent.cli.text import cut
from assent.cli.verification import PAGE, artifacts_of, checked, opened
from assent.core import codec
from assent.core.decisions import Principal
from assent.core.draft import Draft
from assent.core.effects import owed
from assent.core.events import AnyEvent
from assent.core.inputs import Import
from assent.core.machine import decide_into
from assent.core.state import State, evolve, pending
from assent.errors import AssentError, Conflict, Invalid, NotFound, StoreDamaged
from assent.runtime.intake import conversation_id
from assent.runtime.record import appended
from assent.stores.base import GENESIS, Append, LogStore, Row, chain


class ArtifactLine(msgspec.Struct, frozen=True):
    artifact: str
    body: str


class EndLine(msgspec.Struct, frozen=True):
    conversation: str
    events: int
    head: str


_artifacts = msgspec.json.Decoder(ArtifactLine)
_ends = msgspec.json.Decoder(EndLine)


# --- out ---


async def write(url: str, conversation: str, path: str, *, force: bool) -> int:
    if await missing(url):
        raise unknown(url, conversation)
    if path != "-":
        _free(path, force)
    async with opened(url) as store:
        row = await store.row(conversation_id(conversation))
        if row is None:
            raise NotFound(f"no conversation {conversation!r}")
        found = await checked(store, row)
        if found.problem is not None:
            raise StoreDamaged(f"conversation {conversation!r} is not exported: {found.problem.message}")
        end = EndLine(conversation, row.seq, row.hash.hex())
        if path == "-":
            async for line in _lines(store, end):
                raw_lines([line])
            return 0
        await _file(path, _lines(store, end))
    artifacts = f" and {found.artifacts} artifacts" if found.artifacts else ""
    say(f"exported {row.seq} events{artifacts} of {conversation} to {path}")
    return 0


def _free(path: str, force: bool) -> None:
    if os.path.lexists(path) and not os.path.isfile(path):
        raise Invalid(f"{path!r} is not a file; give the path of one, or none for standard output", kind="write_failed")
    if os.path.lexists(path) and not force:
        raise Invalid(f"{path!r} is there already; --force replaces it", kind="write_failed")


async def _lines(store: LogStore, end: EndLine) -> AsyncGenerator[bytes]:
    after = 0
    names: dict[str, None] = {}
    while bodies := await store.read(end.conversation, after=after, before=end.events + 1, limit=PAGE):
        after += len(bodies)
        for body in bodies:
            names |= dict.fromkeys(artifacts_of(codec.decode(body)))
            yield body
    for name in names:
        raw = await store.artifact(name)
        if raw is None:
            raise StoreDamaged(f"artifact {name} is missing")
        yield msgspec.json.encode(ArtifactLine(name, base64.b64encode(raw).decode()))
    yield msgspec.json.encode(end)


async def _file(path: str, lines: AsyncGenerator[bytes]) -> None:
    """All of it or nothing: written beside, then moved into place."""
    temporary = ""
    try:
        with tempfile.NamedTemporaryFile(dir=os.path.dirname(path) or ".", prefix=".assent-", delete=False) as file:
            temporary = file.name
            async for line in lines:
                file.write(line + b"\n")
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileNotFoundError):  # a new file stays readable for its owner alone, as it was made
            os.chmod(temporary, stat.S_IMODE(os.stat(path).st_mode))
        os.replace(temporary, path)
    except OSError as failure:
        raise AssentError(
            f"{path!r} cannot be written: {failure.strerror or failure}", kind="write_failed"
        ) from failure
    finally:
        with suppress(OSError):
            os.unlink(temporary)


# --- in ---


class Archive:
    """What a file holds, checked line by line."""

    def __init__(self, name: str, lines: Iterable[bytes]):
        self.path = name
        self.bodies: list[bytes] = []
        self.events: list[AnyEvent] = []
        self.artifacts: dict[str, bytes] = {}
        self.end: EndLine | None = None
        self._wanted: dict[str, int] = {}
        self._line = 0
        for line in lines:
            self._line += 1
            body = line.rstrip(b"\r\n")
            if body.strip():
                self._take(body)
        if not self.events:
            raise Invalid(f"{name} has no events in it")
        lost = next((item for item in self._wanted.items() if item[0] not in self.artifacts), None)
        if lost is not None:
            self._line = lost[1]
            raise self._damaged(f"it names the artifact {lost[0]}, which is not in the file")

    @property
    def name(self) -> str:
        """What the conversation was called, or else the file."""
        if self.end is not None:
            return self.end.conversation
        return os.path.basename(self.path).removesuffix(".jsonl")

    def _damaged(self, what: str) -> StoreDamaged:
        return StoreDamaged(f"{self.path}, line {self._line}: {what}")

    def _take(self, body: bytes) -> None:
        if self.end is not None:
            raise self._damaged("there is more after the last line")
        try:
            found: Any = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
            raise self._damaged(f"not JSON: {problem}") from None
        if not isinstance(found, dict):
            raise self._damaged("not a JSON object")
        if "type" in found:
            self._event(body)
        elif "artifact" in found:
            self._artifact(body)
        elif "head" in found:
            self._ended(body)
        else:
            raise self._damaged("neither an event nor an artifact")

    def _event(self, body: bytes) -> None:
        try:
            event = codec.decode(body)
        except AssentError as problem:
            raise type(problem)(f"{self.path}, line {self._line}: {problem.message}") from problem
        expected = len(self.events) + 1
        if self.artifacts:
            raise self._damaged("an event after an artifact")
        if event.seq != expected:
            raise self._damaged(f"event {event.seq} ({event.type}) where event {expected} should be")
        for name in artifacts_of(event):
            self._wanted.setdefault(name, self._line)
        self.bodies.append(body)
        self.events.append(event)

    def _artifact(self, body: bytes) -> None:
        try:
            found = _artifacts.decode(body)
            raw = base64.b64decode(found.body, validate=True)
        except (msgspec.DecodeError, binascii.Error) as problem:
            raise self._damaged(f"not an artifact: {problem}") from None
        if sha256(raw).hexdigest() != found.artifact:
            raise self._damaged(f"artifact {cut(found.artifact, 64)} does not hold what its name says")
        if found.artifact not in self._wanted:
            raise self._damaged(f"no event names the artifact {found.artifact}")
        self.artifacts[found.artifact] = raw

    def _ended(self, body: bytes) -> None:
        try:
            self.end = _ends.decode(body)
        except msgspec.DecodeError as problem:
            raise self._damaged(f"not a last line: {problem}") from None
        if self.end.events != len(self.events):
            raise self._damaged(f"there should be {self.end.events} events before it, but there are {len(self.events)}")
        if chain(GENESIS, self.bodies)[-1:] != [_bytes(self.end.head)]:
            raise self._damaged("the events before it are not those that were exported: their hashes do not add up")


def _bytes(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


def read_archive(path: str) -> Archive:
    """A file, or with ``-`` standard input."""
    if path == "-":
        return Archive("standard input", _input(sys.stdin.buffer))
    try:
        with open(path, "rb") as file:
            return Archive(path, file)
    except (OSError, ValueError) as failure:
        if isinstance(failure, AssentError):
            raise
        reason = getattr(failure, "strerror", None) or failure
        raise Invalid(f"{path!r} cannot be read: {reason}", kind="read_failed") from failure


def _input(stream: IO[bytes]) -> Iterator[bytes]:
    try:
        yield from stream
    except (OSError, ValueError) as failure:
        raise Invalid(f"standard input cannot be read: {failure}", kind="stdin_error") from failure


async def read(url: str, path: str, name: str | None, *, trust: bool, by: str) -> int:
    """Import: all of it in one append, with the indexes that the log leads to, or nothing.

    The importer's own ConversationImported stands behind the last event of the file, so that the file itself cannot
    say whether it is trusted.
    """
    archive = read_archive(path)
    if name is None and archive.end is None and path == "-":
        raise Invalid("standard input does not say what the conversation is called: give --as NAME")
    conversation = conversation_id(archive.name if name is None else name)
    state = reduce(evolve, archive.events, State(conversation=conversation))
    if not state.agent:
        raise StoreDamaged(f"{archive.path}: no event says which agent the conversation is with")
    mark = Import(by=Principal(by), trusted=trust, origin=archive.name)
    async with opened(url) as store:
        row = await store.row(conversation)
        if row is not None:
            if not trust or not await _imported_before(store, row, archive):
                raise _taken(conversation, row.seq)
            before = State(conversation=conversation)
            for body in await store.read(conversation):
                before = evolve(before, codec.decode(body))
            if not before.closed:
                raise _taken(conversation, row.seq)
            bodies: list[bytes] = []
        else:
            before, bodies = State(conversation=conversation), archive.bodies
        draft = Draft(before if row is not None else state, store.now())
        decide_into(draft, mark, {})
        draft.bodies[:0] = bodies
        draft.artifacts.extend(archive.artifacts.items() if row is None else ())
        try:
            owes = bool(owed(draft.state))
            await store.append(appended(before, draft, owes=owes, epoch=None, release=False))
        except Conflict as lost:
            raise _taken(conversation, lost.actual) from lost
    _told(archive, state, draft.state, url)
    return 0


async def _imported_before(store: LogStore, row: Row, archive: Archive) -> bool:
    """Is it this very file that was imported under this name, and nothing more?"""
    if row.seq != len(archive.bodies) + 1:
        return False
    return (await store.hashes(row.conversation))[-2] == chain(GENESIS, archive.bodies)[-1]


def recorded(state: State, bodies: list[bytes], artifacts: Mapping[str, bytes], *, at: float) -> Append:
    """A log that comes from elsewhere, as the store takes it: its bytes as they were written, whatever version that
    was, and the indexes that all of it leads to."""
    draft = Draft(state, at)
    draft.bodies.extend(bodies)
    draft.artifacts.extend(artifacts.items())
    owes = bool(owed(state))
    return appended(State(conversation=state.conversation), draft, owes=owes, epoch=None, release=False)


def _taken(conversation: str, seq: int) -> Conflict:
    refusal = Conflict(conversation, expected=0, actual=seq)
    refusal.message = f"there is a conversation {conversation!r} already ({seq} events); import it --as another name"
    return refusal


def _told(archive: Archive, before: State, state: State, url: str) -> None:
    artifacts = f" and {len(archive.artifacts)} artifacts" if archive.artifacts else ""
    say(f"imported {len(archive.events)} events{artifacts} as {state.conversation}")
    if archive.end is None:
        say("its last line was missing: whether these are all the events, nobody can tell")
    if state.closed:
        say("without trust: it can be read, and nothing of it runs; to go on with it, import the file with --trust")
        return
    _print_taken_over(before, state)
    if waiting := len(pending(state)):
        count = "1 answer" if waiting == 1 else f"{waiting} answers"
        say(f"it waits for {count}: {Commands(url).pending(state.conversation)}")
    elif owed(state):
        say(f"its turn is open: whoever runs agent {state.agent} on this store goes on with it")


def _print_taken_over(before: State, state: State) -> None:
    """What the file says that others had decided, and what becomes of it here."""
    asked = state.turn.calls if state.turn else {}
    for call_id, call in (before.turn.calls if before.turn else {}).items():
        if call.phase == "done" or not asked[call_id].imported:
            continue
        who = f", approved by {call.approver.id}" if call.approver else ", let through by a grant" if call.grant else ""
        if call.phase == "running" or call.recovering:
            then = "may have run; a person decides here whether it runs again"
        else:
            then = "has not started, and is asked about again here"
        say(f"  {call.made.tool} ({call_id}){who}: {then}")
    for grant in state.grants:
        covers = "these arguments" if grant.scope == "args" else "any arguments"
        say(f"  grant {grant.id}: {grant.tool} with {covers}, given by {grant.by.id}: holds here from now on")
    for queued in state.queue:
        say(f"  the message of {queued.by.id} (event {queued.message}) is answered next")
