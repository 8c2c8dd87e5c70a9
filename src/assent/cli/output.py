"""What goes to standard output as it is, and the one line that every mistake becomes."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

import click

from assent.cli.text import shown, shown_json
from assent.core.redaction import foreign_text
from assent.errors import AssentError

FAILED = 1
USAGE = 2
INTERRUPTED = 130
PIPE = 141
"""As a program that SIGPIPE ended: the reader had enough, and nothing is wrong."""


class ReaderGone(Exception):
    """Whoever read our output has closed it."""


def say(text: str) -> None:
    click.echo(shown(text, block=True))


def is_terminal() -> bool:
    return sys.stdout.isatty()


def json_lines(values: list[Any]) -> None:
    import msgspec

    raw_lines([msgspec.json.encode(value) for value in values])


def raw_lines(bodies: list[bytes]) -> None:
    """Byte for byte into pipes and files; on a terminal what is invisible is escaped, as JSON allows."""
    safe = is_terminal()
    for body in bodies:
        click.echo(shown_json(body) if safe else body)


def debugging() -> bool:
    return os.environ.get("ASSENT_DEBUG", "") not in ("", "0")


def prepare() -> None:
    """Streams that are there and take any character; no chatter of libraries between the lines."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if not debugging():
        import logging
        import warnings

        warnings.simplefilter("ignore")
        logging.getLogger("assent").addHandler(logging.NullHandler())
        logging.getLogger("assent").propagate = False
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)


def failed(error: BaseException) -> int:
    """Say what went wrong in one line; the exit code."""
    if debugging() and not isinstance(error, click.ClickException):
        import traceback

        traceback.print_exception(error)
    match error:
        case AssentError():
            return _line(error.kind, error.message, error.exit_code)
        case click.UsageError():
            where = f"; see {error.ctx.command_path} --help" if error.ctx is not None else ""
            return _line("invalid_args", error.format_message().rstrip(".") + where, USAGE)
        case click.ClickException():
            return _line("invalid_args", error.format_message(), USAGE)
        case KeyboardInterrupt() | click.Abort():
            return INTERRUPTED
        case BrokenPipeError() | ReaderGone():
            return hushed()
        case MemoryError():
            return _line("too_large", "out of memory", FAILED)
        case OSError():
            return _line("write_failed", f"{error.strerror or error}", FAILED)
        case _:
            what = f"a bug in assent: {foreign_text(error)}; ASSENT_DEBUG=1 shows where"
            return _line("handler_failed", what, FAILED)


def hushed() -> int:
    """Nobody reads any more: also what the interpreter flushes at the end must go nowhere."""
    null = os.open(os.devnull, os.O_WRONLY)
    with suppress(OSError, ValueError):
        os.dup2(null, sys.stdout.fileno())
    os.close(null)
    return PIPE


def _line(kind: str, message: str, code: int) -> int:
    with suppress(OSError):
        click.echo(f"assent: error [{kind}]: {shown(message)}", err=True)
    return code
