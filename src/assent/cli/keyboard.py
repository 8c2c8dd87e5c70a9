"""Lines that somebody types, without holding up the loop; and Ctrl-C, which means different things at different times.

Keys are taken one by one and the line is edited here: the standard ``readline`` blocks its thread, and nothing can call
it back. Where the terminal cannot move its cursor, its own line editing serves. Nothing is read before it is asked for,
and what was typed before a decision was shown is thrown away: nobody approves what they have not seen.
"""

from __future__ import annotations

import asyncio
import codecs
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

from rich.cells import cell_len

from assent.cli.editing import END, ENTER, KEY, Line, place
from assent.cli.past import Past

CHUNK = 65536


class Interrupted(Exception):
    """Ctrl-C at a prompt."""


class Keyboard:
    def __init__(self, show: Callable[[str], None], interrupted: Callable[[], None]):
        self._show, self._interrupted = show, interrupted
        self._file = sys.stdin.fileno()
        self._edits = os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._kept = ""
        self._ended = False
        self._hit = False
        """Ctrl-C, since the prompt was shown."""
        self._asking: asyncio.Future[None] | None = None
        self._again: Callable[[], None] | None = None
        """Shows the prompt and the line again, after a stop (Ctrl-Z)."""
        self.paused = False
        """Another program has the terminal, and Ctrl-C is meant for it."""

    def __enter__(self) -> Keyboard:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._pressed)
        loop.add_signal_handler(signal.SIGCONT, self._continued)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_signal_handler(signal.SIGINT)
        loop.remove_signal_handler(signal.SIGCONT)

    def _pressed(self) -> None:
        if self.paused:
            return
        self._interrupted()
        self._hit = True
        self._wake()

    def _continued(self) -> None:
        if self._again is not None:
            self._again()

    async def ask(self, prompt: str, *, fresh: bool = False, past: Past | None = None) -> str | None:
        """The next line, without its end; None at the end of input. fresh: only what is typed from now on.

        past: what the arrows go through, and what the line is added to.
        """
        self._hit = False
        said = await (self._edited(prompt, fresh, past) if self._edits else self._plain(prompt, fresh))
        if past is not None and said is not None:
            past.add(said)
        return said

    def _forget(self) -> None:
        self._kept = ""
        with suppress(termios.error):
            termios.tcflush(self._file, termios.TCIFLUSH)

    async def _plain(self, prompt: str, fresh: bool) -> str | None:
        if fresh:
            self._forget()
        self._show(prompt)
        while "\n" not in self._kept and not self._ended:
            await self._more()
        line, _, self._kept = self._kept.partition("\n")
        if self._ended and not line:
            return None
        return line.rstrip("\r")

    async def _edited(self, prompt: str, fresh: bool, past: Past | None) -> str | None:
        line, row = Line(past.lines if past is not None else ()), 0

        def draw(at: int) -> None:
            """The line anew, behind its prompt, with the cursor at this place in it."""
            nonlocal row
            width = _width(self._file)
            start = cell_len(prompt) % width
            end = place(line.text, start, width)
            new = place(line.text[:at], start, width)
            wrapped = "\n" if line.text and end == (end[0], 0) else ""
            _write(_move(-row, start), "\x1b[J", line.text, wrapped, _move(new[0] - end[0], new[1]))
            row = new[0]

        def show() -> None:
            nonlocal row
            self._show(prompt)
            if cell_len(prompt) % _width(self._file) == 0:
                _write("\n")
            row = 0

        def again() -> None:
            self._each_key()
            show()
            draw(line.at)

        with self._keys():
            if fresh:
                self._forget()
            show()
            self._again = again
            try:
                while (key := await self._key()) not in ENTER:
                    if key is None or (key == END and not line.text):
                        return None
                    line.press(key)
                    if not self._kept:  # of what is pasted, only the end is drawn
                        draw(line.at)
                draw(len(line.text))
                _write("\n")
                return line.text
            except Interrupted:
                draw(len(line.text))
                raise
            finally:
                self._again = None

    async def _key(self) -> str | None:
        """The next key; None: the terminal is gone."""
        while (found := KEY.match(self._kept)) is None:
            if self._ended:
                return None
            await self._more()
        self._kept = self._kept[found.end() :]
        return found[0]

    @contextmanager
    def _keys(self) -> Generator[None]:
        """Every key at once, and seen when it is drawn. Ctrl-C and Ctrl-Z are still signals."""
        before = None
        with suppress(termios.error):  # the terminal is gone, as the next look at it will say
            before = termios.tcgetattr(self._file)
            self._each_key()
        try:
            yield
        finally:
            if before is not None:
                with suppress(termios.error):
                    termios.tcsetattr(self._file, termios.TCSANOW, before)

    def _each_key(self) -> None:
        with suppress(termios.error):
            tty.setcbreak(self._file, termios.TCSANOW)

    async def _more(self) -> None:
        loop = asyncio.get_running_loop()
        self._asking = loop.create_future()
        loop.add_reader(self._file, self._wake)
        try:
            await self._asking
        finally:
            loop.remove_reader(self._file)
            self._asking = None
        if self._hit:
            raise Interrupted
        if not select.select([self._file], [], [], 0)[0]:
            return  # Ctrl-C at another moment: the terminal throws away what was typed before, and a read would block
        try:
            chunk = os.read(self._file, CHUNK)
        except OSError:  # the terminal is gone
            chunk = b""
        self._kept += self._decode(chunk)
        self._ended = not chunk

    def _wake(self) -> None:
        if self._asking is not None and not self._asking.done():
            self._asking.set_result(None)


def _width(file: int) -> int:
    try:
        return os.get_terminal_size(file).columns or 80
    except OSError:
        return 80


def _move(rows: int, column: int) -> str:
    """So many rows up (negative) or none, and to this column."""
    return (f"\x1b[{-rows}A" if rows < 0 else "") + "\r" + (f"\x1b[{column}C" if column else "")


def _write(*text: str) -> None:
    sys.stdout.write("".join(text))
    sys.stdout.flush()
