"""The output of a command in bounded memory: its beginning, its end and its size, however much there is."""

from __future__ import annotations

import msgspec

from holdfast.workspace.limits import Limits


class Shown(msgspec.Struct, frozen=True):
    """The part of the output that the model sees."""

    text: str
    omitted: int
    """Bytes left out between the head and the tail."""
    replaced: int
    """Bytes that are no UTF-8, and were replaced."""


class Output:
    """Collects output. It keeps all of it up to the size of an artifact, then the beginning and the end."""

    def __init__(self, limits: Limits):
        self._limits = limits
        self._head_bytes = max(limits.output_bytes, limits.output_artifact_bytes - limits.kept_output_bytes)
        self._head = bytearray()
        self._tail = bytearray()
        self.size = 0
        """Bytes that the command wrote."""

    @property
    def is_over(self) -> bool:
        """Whether there was more than is kept."""
        return self.size > self._head_bytes + self._limits.kept_output_bytes

    def add(self, chunk: bytes) -> None:
        self.size += len(chunk)
        room = self._head_bytes - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        self._tail += chunk
        if len(self._tail) > 2 * self._limits.kept_output_bytes:
            del self._tail[: -self._limits.kept_output_bytes]

    def _last(self, size: int) -> bytes:
        """Return up to this many of the last bytes."""
        tail = bytes(self._tail[-size:])
        missing = size - len(tail)
        return bytes(self._head[-missing:]) + tail if missing > 0 else tail

    def latest(self, size: int = 2000) -> str:
        """Return the last characters so far, for progress."""
        return trim_start(self._last(size), self.size > size).decode(errors="replace")

    def kept(self) -> bytes:
        """Return all that is kept, with a line that says how much is missing."""
        tail = self._tail[-self._limits.kept_output_bytes :]
        missing = self.size - len(self._head) - len(tail)
        mark = f"\n[... {missing} bytes were not kept ...]\n".encode() if missing > 0 else b""
        return b"".join((self._head, mark, tail))

    def shown(self) -> Shown:
        """Return the head and the tail as text, or all of it if it is short. Cuts are between characters."""
        size = self._limits.output_bytes
        if self.size <= 2 * size:
            whole = self.kept()
            return Shown(whole.decode(errors="replace"), 0, count_invalid(whole))
        head = trim_end(bytes(self._head[:size]))
        tail = trim_start(self._last(size), True)
        omitted = self.size - len(head) - len(tail)
        text = f"{head.decode(errors='replace')}\n[... {omitted} bytes omitted ...]\n{tail.decode(errors='replace')}"
        return Shown(text, omitted, count_invalid(head) + count_invalid(tail))


def trim_end(raw: bytes) -> bytes:
    """Drop an incomplete character at the end."""
    for back in range(1, min(4, len(raw) + 1)):
        byte = raw[-back]
        if byte & 0xC0 != 0x80:
            length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
            return raw[:-back] if length > back else raw
    return raw


def trim_start(raw: bytes, was_cut: bool) -> bytes:
    """Drop the rest of a character at the start of a cut."""
    start = 0
    while was_cut and start < min(3, len(raw)) and raw[start] & 0xC0 == 0x80:
        start += 1
    return raw[start:]


def count_invalid(raw: bytes) -> int:
    """Return how many bytes are not UTF-8."""
    count = 0
    while raw:
        try:
            raw.decode()
        except UnicodeDecodeError as error:
            count += error.end - error.start
            raw = raw[error.end :]
        else:
            break
    return count
