"""Lines that somebody types, without holding up the loop; and Ctrl-C, which means different things at different times.

The terminal's own line editing is used. Nothing is read before it is asked for, and what was typed before a
decision was shown is thrown away: nobody approves what they have not seen.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
from collections.abc import Callable
from contextlib import suppress

CHUNK = 65536


class Interrupted(Exception):
    """Ctrl-C at a prompt."""


class Keyboard:
    def __init__(self, show: Callable[[str], None], interrupted: Callable[[], None]):
        self._show, self._interrupted = show, interrupted
        self._file = sys.stdin.fileno()
        self._kept = b""
        self._ended = False
        self._asking: asyncio.Future[None] | None = None
        self.paused = False
        """Another program has the terminal, and Ctrl-C is meant for it."""

    def __enter__(self) -> Keyboard:
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._pressed)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)

    def _pressed(self) -> None:
        if self.paused:
            return
        self._interrupted()
        if self._asking is not None and not self._asking.done():
            self._asking.set_exception(Interrupted())

    async def ask(self, prompt: str, *, fresh: bool = False) -> str | None:
        """The next line, without its end; None at the end of input. fresh: only what is typed from now on."""
        if fresh:
            self._kept = b""
            with suppress(termios.error):
                termios.tcflush(self._file, termios.TCIFLUSH)
        self._show(prompt)
        while b"\n" not in self._kept and not self._ended:
            await self._more()
        line, _, self._kept = self._kept.partition(b"\n")
        if self._ended and not line:
            return None
        return line.decode("utf-8", "replace").rstrip("\r")

    async def _more(self) -> None:
        loop = asyncio.get_running_loop()
        self._asking = loop.create_future()
        loop.add_reader(self._file, self._readable)
        try:
            await self._asking
        finally:
            loop.remove_reader(self._file)
            self._asking = None
        try:
            chunk = os.read(self._file, CHUNK)
        except OSError:  # the terminal is gone
            chunk = b""
        self._kept += chunk
        self._ended = not chunk

    def _readable(self) -> None:
        if self._asking is not None and not self._asking.done():
            self._asking.set_result(None)
