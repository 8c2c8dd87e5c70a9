"""The file format of ``holdfast export``: one stored event a line, then the artifacts, then one line of totals.

    {"type":"ConversationOpened",...}                     the events, byte for byte as they are stored
    {"artifact":"<sha256>","body":"<base64>"}             the artifacts that the events name, in order
    {"conversation":"support","events":12,"head":"..."}   the last line, which shows that the file is complete

A file of events alone, such as ``holdfast log --json`` writes, can be read, too.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
import sys
import tempfile
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import suppress
from hashlib import sha256
from typing import IO, Any

import msgspec

from holdfast.cli.render.text import ellipsize
from holdfast.cli.store import PAGE_SIZE
from holdfast.core import codec
from holdfast.core.artifacts import artifacts_of
from holdfast.core.events import AnyEvent
from holdfast.errors import HoldfastError, Invalid, StoreDamaged
from holdfast.stores.base import GENESIS, LogStore, hash_chain


class ArtifactLine(msgspec.Struct, frozen=True):
    artifact: str
    body: str


class EndLine(msgspec.Struct, frozen=True):
    conversation: str
    events: int
    head: str


_artifacts = msgspec.json.Decoder(ArtifactLine)
_ends = msgspec.json.Decoder(EndLine)


async def archive_lines(store: LogStore, end: EndLine) -> AsyncGenerator[bytes]:
    after = 0
    names: dict[str, None] = {}
    while bodies := await store.read(end.conversation, after=after, before=end.events + 1, limit=PAGE_SIZE):
        after += len(bodies)
        for body in bodies:
            names |= dict.fromkeys(artifacts_of(codec.decode_event(body)))
            yield body
    for name in names:
        raw = await store.artifact(name)
        if raw is None:
            raise StoreDamaged(f"artifact {name} is missing")
        yield msgspec.json.encode(ArtifactLine(name, base64.b64encode(raw).decode()))
    yield msgspec.json.encode(end)


async def write_archive(path: str, lines: AsyncGenerator[bytes]) -> None:
    """Write the file atomically: to a temporary file first, then renamed."""
    temporary = ""
    try:
        with tempfile.NamedTemporaryFile(dir=os.path.dirname(path) or ".", prefix=".holdfast-", delete=False) as file:
            temporary = file.name
            async for line in lines:
                file.write(line + b"\n")
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileNotFoundError):  # a new file stays readable by its owner only
            os.chmod(temporary, stat.S_IMODE(os.stat(path).st_mode))
        os.replace(temporary, path)
    except OSError as failure:
        raise HoldfastError(
            f"{path!r} cannot be written: {failure.strerror or failure}", kind="write_failed"
        ) from failure
    finally:
        with suppress(OSError):
            os.unlink(temporary)


class Archive:
    """The content of a file, checked line by line."""

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
                self._read_line(body)
        if not self.events:
            raise Invalid(f"{name} has no events in it")
        lost = next((item for item in self._wanted.items() if item[0] not in self.artifacts), None)
        if lost is not None:
            self._line = lost[1]
            raise self._damaged_error(f"it names the artifact {lost[0]}, which is not in the file")

    @property
    def name(self) -> str:
        """The name of the conversation, or the file's name without .jsonl."""
        if self.end is not None:
            return self.end.conversation
        return os.path.basename(self.path).removesuffix(".jsonl")

    def _damaged_error(self, problem: str) -> StoreDamaged:
        return StoreDamaged(f"{self.path}, line {self._line}: {problem}")

    def _read_line(self, body: bytes) -> None:
        if self.end is not None:
            raise self._damaged_error("there is more after the last line")
        try:
            found: Any = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
            raise self._damaged_error(f"not JSON: {problem}") from None
        if not isinstance(found, dict):
            raise self._damaged_error("not a JSON object")
        if "type" in found:
            self._read_event(body)
        elif "artifact" in found:
            self._read_artifact(body)
        elif "head" in found:
            self._read_end(body)
        else:
            raise self._damaged_error("neither an event nor an artifact")

    def _read_event(self, body: bytes) -> None:
        try:
            event = codec.decode_event(body)
        except HoldfastError as problem:
            raise type(problem)(f"{self.path}, line {self._line}: {problem.message}") from problem
        expected = len(self.events) + 1
        if self.artifacts:
            raise self._damaged_error("an event after an artifact")
        if event.seq != expected:
            raise self._damaged_error(f"event {event.seq} ({event.type}) where event {expected} should be")
        for name in artifacts_of(event):
            self._wanted.setdefault(name, self._line)
        self.bodies.append(body)
        self.events.append(event)

    def _read_artifact(self, body: bytes) -> None:
        try:
            found = _artifacts.decode(body)
            raw = base64.b64decode(found.body, validate=True)
        except (msgspec.DecodeError, binascii.Error) as problem:
            raise self._damaged_error(f"not an artifact: {problem}") from None
        if sha256(raw).hexdigest() != found.artifact:
            raise self._damaged_error(f"artifact {ellipsize(found.artifact, 64)} does not match its hash")
        if found.artifact not in self._wanted:
            raise self._damaged_error(f"no event names the artifact {found.artifact}")
        self.artifacts[found.artifact] = raw

    def _read_end(self, body: bytes) -> None:
        try:
            self.end = _ends.decode(body)
        except msgspec.DecodeError as problem:
            raise self._damaged_error(f"not a last line: {problem}") from None
        if self.end.events != len(self.events):
            raise self._damaged_error(
                f"there should be {self.end.events} events before it, but there are {len(self.events)}"
            )
        if hash_chain(GENESIS, self.bodies)[-1:] != [_bytes(self.end.head)]:
            raise self._damaged_error(
                "the events before it are not those that were exported: their hashes do not add up"
            )


def _bytes(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


def read_archive(path: str) -> Archive:
    """Read an archive from a file, or with ``-`` from standard input."""
    if path == "-":
        return Archive("standard input", _input(sys.stdin.buffer))
    try:
        with open(path, "rb") as file:
            return Archive(path, file)
    except (OSError, ValueError) as failure:
        if isinstance(failure, HoldfastError):
            raise
        reason = getattr(failure, "strerror", None) or failure
        raise Invalid(f"{path!r} cannot be read: {reason}", kind="read_failed") from failure


def _input(stream: IO[bytes]) -> Iterator[bytes]:
    try:
        yield from stream
    except (OSError, ValueError) as failure:
        raise Invalid(f"standard input cannot be read: {failure}", kind="stdin_error") from failure
