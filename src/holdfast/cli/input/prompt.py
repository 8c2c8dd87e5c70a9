"""Read lines from the user at the terminal: line editing, history and completion by prompt_toolkit, and Ctrl-C.

On a terminal that cannot move its cursor, the terminal's own line editing is used. Importing prompt_toolkit takes a
tenth of a second, so commands import this module only when they ask.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import termios
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import DummyHistory, FileHistory, History
from prompt_toolkit.input import create_input
from prompt_toolkit.input.typeahead import clear_typeahead
from prompt_toolkit.key_binding import KeyBindings, KeyBindingsBase, KeyPressEvent, merge_key_bindings
from prompt_toolkit.layout.processors import TabsProcessor
from prompt_toolkit.output import ColorDepth
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.patch_stdout import patch_stdout

from holdfast.cli.environment import state_directory
from holdfast.cli.render.console import Screen

HISTORY_ENTRIES = 1000
"""The entries that are read. The file may have twice as many before the oldest are dropped."""
HISTORY_CHARS = 10_000
"""Longer messages are kept for this session only."""
CHUNK = 65536


class Prompt:
    """Asks for messages and answers. ``interrupted`` is called at every Ctrl-C, also while no question is open.

    Both ``ask`` methods raise KeyboardInterrupt after Ctrl-C and EOFError at the end of input. Text that other code
    prints meanwhile appears above the line that is being typed.
    """

    def __init__(self, screen: Screen, interrupted: Callable[[], None]):
        self._screen, self._interrupted = screen, interrupted
        self._reader: EditedReader | PlainReader = PlainReader()
        self.paused = False
        """Another program, such as an editor, uses the terminal and gets Ctrl-C."""

    def __enter__(self) -> Prompt:
        if os.environ.get("TERM", "dumb").lower() not in ("dumb", "unknown", ""):
            self._reader = EditedReader(self._interrupt)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        loop.add_signal_handler(signal.SIGCONT, self._reader.redraw)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_signal_handler(signal.SIGINT)
        loop.remove_signal_handler(signal.SIGCONT)

    def _interrupt(self) -> None:
        if not self.paused:
            self._interrupted()
            self._reader.interrupt()

    async def ask_message(self, question: str) -> str:
        """Return the next line. The arrow keys browse the messages of this and of earlier sessions."""
        self._screen.end_line()
        return await self._reader.read_message(question)

    async def ask_answer(self, question: str, words: Iterable[str] = ()) -> str:
        """Return the next line; Tab completes these words.

        Input that was typed before the question is discarded, so that users approve only calls that they have seen.
        """
        self._screen.end_line()
        with suppress(termios.error):  # the terminal is closed: the next read reports it
            termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)
        return await self._reader.read_answer(question, words)


class EditedReader:
    """Reads lines with prompt_toolkit. ``interrupted`` is called for the key Ctrl-C, which sends no signal here."""

    def __init__(self, interrupted: Callable[[], None]):
        self._input = create_input()
        self._output = Vt100_Output.from_pty(
            sys.stdout, term=os.environ.get("TERM"), default_color_depth=ColorDepth.from_env()
        )
        # Cursor position reports are requested for menus that open while typing. A terminal that answers late
        # would print its report into the next output.
        self._output.enable_cpr = False
        keys = _key_bindings(interrupted)
        self._messages = self._make_session(PromptHistory(), merge_key_bindings([keys, _tab_as_space()]))
        self._answers = self._make_session(DummyHistory(), keys)

    def _make_session(self, history: History, keys: KeyBindingsBase) -> PromptSession[str]:
        return PromptSession(
            history=history,
            input=self._input,
            output=self._output,
            key_bindings=keys,
            input_processors=[TabsProcessor(char1=" ", char2=" ")],
            complete_while_typing=False,
        )

    async def read_message(self, question: str) -> str:
        return await self._read(self._messages, question)

    async def read_answer(self, question: str, words: Iterable[str]) -> str:
        clear_typeahead(self._input)
        self._answers.completer = WordCompleter([*words], sentence=True)
        return await self._read(self._answers, question)

    async def _read(self, session: PromptSession[str], question: str) -> str:
        with patch_stdout(raw=True):
            line = await session.prompt_async([("bold", question)], set_exception_handler=False, handle_sigint=False)
        return line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")

    def interrupt(self) -> None:
        """End the question, if one is open."""
        for session in (self._messages, self._answers):
            future = session.app.future
            if future is not None and not future.done():
                session.app.exit(exception=KeyboardInterrupt)

    def redraw(self) -> None:
        """Draw the question and the line again, after Ctrl-Z and ``fg``: the shell has reset the terminal."""
        for session in (self._messages, self._answers):
            if session.app.is_running:
                self._input.raw_mode().__enter__()  # the outer one restores the terminal at the end of the question
                session.app.renderer.reset()
                session.app.invalidate()


def _key_bindings(interrupted: Callable[[], None]) -> KeyBindings:
    keys = KeyBindings()

    @keys.add("c-c")
    def _(event: KeyPressEvent) -> None:
        interrupted()

    @keys.add("c-z")
    def _(event: KeyPressEvent) -> None:
        with event.app.input.cooked_mode():
            os.kill(0, signal.SIGTSTP)

    return keys


def _tab_as_space() -> KeyBindings:
    """Return the binding for messages, which have no completion: words that a tab separates stay apart."""
    keys = KeyBindings()

    @keys.add("tab")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text(" ")

    return keys


class PlainReader:
    """Reads lines that the terminal edits itself, without blocking the event loop."""

    def __init__(self) -> None:
        self._typed = ""
        self._chunk: asyncio.Future[bytes] | None = None

    async def read_message(self, question: str) -> str:
        sys.stdout.write(question)
        sys.stdout.flush()
        try:
            while "\n" not in self._typed:
                if not (chunk := await self._read_chunk()):
                    return self._end_input()
                self._typed += chunk.decode("utf-8", "replace")
        except (EOFError, KeyboardInterrupt):
            sys.stdout.write("\n")
            raise
        line, _, self._typed = self._typed.partition("\n")
        return line.rstrip("\r")

    async def read_answer(self, question: str, words: Iterable[str]) -> str:
        self._typed = ""
        return await self.read_message(question)

    def _end_input(self) -> str:
        """Return what was typed before a Ctrl-D in the middle of a line."""
        line, self._typed = self._typed, ""
        if not line:
            raise EOFError
        return line

    async def _read_chunk(self) -> bytes:
        loop, file = asyncio.get_running_loop(), sys.stdin.fileno()
        self._chunk = loop.create_future()
        loop.add_reader(file, self._read_available, file)
        try:
            return await self._chunk
        finally:
            loop.remove_reader(file)
            self._chunk = None

    def _read_available(self, file: int) -> None:
        # After Ctrl-C the terminal discards the input that made the file readable: a read would block.
        if self._chunk is None or self._chunk.done() or not select.select([file], [], [], 0)[0]:
            return
        try:
            self._chunk.set_result(os.read(file, CHUNK))
        except OSError:  # the terminal is closed
            self._chunk.set_result(b"")

    def interrupt(self) -> None:
        """End the question, if one is open."""
        if self._chunk is not None and not self._chunk.done():
            self._chunk.set_exception(KeyboardInterrupt)

    def redraw(self) -> None:
        """Do nothing: the terminal shows its own line again."""


class PromptHistory(FileHistory):
    """The messages of this and of earlier sessions, in a file in the user's state directory.

    A file that cannot be read or written is ignored: the history then lasts for this session only.
    """

    def __init__(self) -> None:
        self._path = state_directory() / "history"
        super().__init__(self._path)

    def load_history_strings(self) -> Iterable[str]:
        """Return the entries, newest first, and shorten a file that has become too long."""
        entries: list[str] = []
        with suppress(OSError):
            entries = list(super().load_history_strings())
            if len(entries) > 2 * HISTORY_ENTRIES:
                self._write_file(entries[HISTORY_ENTRIES - 1 :: -1])
        return entries[:HISTORY_ENTRIES]

    def append_string(self, string: str) -> None:
        if string.strip():
            super().append_string(string)

    def store_string(self, string: str) -> None:
        if not self._path.is_absolute() or len(string) > HISTORY_CHARS:  # not absolute: the home directory is unknown
            return
        with suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _create_private(self._path)
            super().store_string(string)

    def _write_file(self, entries: Iterable[str]) -> None:
        """Replace the file by one with these entries, oldest first."""
        path = self._path.with_name(f"history.{os.getpid()}")
        _create_private(path)
        shorter = FileHistory(path)
        for entry in entries:
            shorter.store_string(entry)
        path.replace(self._path)


def _create_private(path: Path) -> None:
    """Create the file if it does not exist, readable by its owner only."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
