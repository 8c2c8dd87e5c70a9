"""What was said at the prompt, in this session and the ones before: a file in the user's state directory.

It is a convenience: where it cannot be read or written, a session remembers what was said in it, and nobody is told.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from assent.cli.editing import plain

KEPT = 1000
"""Lines. The file may have twice as many before the oldest are dropped."""


def state_directory() -> Path:
    """``XDG_STATE_HOME``, which counts only if it is absolute, or where that is by default."""
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (given if given.is_absolute() else Path(os.path.expanduser("~"), ".local", "state")) / "assent"


class Past:
    def __init__(self) -> None:
        self._file = state_directory() / "history"
        self.lines: list[str] = []
        """The oldest first."""
        with suppress(OSError):
            self.lines = self._read()

    def add(self, line: str) -> None:
        if not line.strip() or self.lines[-1:] == [line]:
            return
        self.lines.append(line)
        if not self._file.is_absolute():  # nobody knows where their home is
            return
        with suppress(OSError):
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._write(self._file, f"{line}\n", os.O_APPEND)

    def _read(self) -> list[str]:
        if not self._file.is_file():
            return []
        found = self._file.read_text("utf-8", "replace").split("\n")
        lines = [line for line in found if line and all(map(plain, line))]
        if len(lines) > 2 * KEPT:
            shorter = self._file.with_name(f"history.{os.getpid()}")
            self._write(shorter, "".join(f"{line}\n" for line in lines[-KEPT:]), os.O_TRUNC)
            shorter.replace(self._file)
        return lines[-KEPT:]

    @staticmethod
    def _write(path: Path, text: str, flags: int) -> None:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
