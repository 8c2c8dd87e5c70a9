"""Print to standard output, and report every error as one line on standard error."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

import click

from holdfast.cli.render.text import escape_control_characters, escape_json
from holdfast.core.text.redaction import redact_exception
from holdfast.errors import HoldfastError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_WAITING = 75
"""At rest, with pending calls."""
EXIT_INTERRUPTED = 130
EXIT_PIPE = 141
"""As of a program that SIGPIPE ended: the reader closed the pipe, which is no error."""


class ReaderGone(Exception):
    """The reader of standard output closed the pipe."""


def print_text(text: str) -> None:
    click.echo(escape_control_characters(text, block=True))


def is_terminal() -> bool:
    return sys.stdout.isatty()


def print_json_lines(values: list[Any]) -> None:
    import msgspec

    print_raw_lines([msgspec.json.encode(value) for value in values])


def print_raw_lines(bodies: list[bytes]) -> None:
    """Print JSON lines, unchanged into pipes and files; on a terminal, invisible characters become JSON escapes."""
    safe = is_terminal()
    for body in bodies:
        click.echo(escape_json(body) if safe else body)


def is_debugging() -> bool:
    return os.environ.get("HOLDFAST_DEBUG", "") not in ("", "0")


def prepare_streams() -> None:
    """Replace closed streams, make the others accept any character, and silence the warnings of libraries."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if not is_debugging():
        import logging
        import warnings

        warnings.simplefilter("ignore")
        logging.getLogger("holdfast").addHandler(logging.NullHandler())
        logging.getLogger("holdfast").propagate = False
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)


def report_error(error: BaseException) -> int:
    """Print an error as one line and return its exit code."""
    if is_debugging() and not isinstance(error, click.ClickException):
        import traceback

        traceback.print_exception(error)
    match error:
        case HoldfastError():
            return _print_error(error.kind, error.message, error.exit_code)
        case click.UsageError():
            where = f"; see {error.ctx.command_path} --help" if error.ctx is not None else ""
            return _print_error("invalid_args", error.format_message().rstrip(".") + where, EXIT_USAGE)
        case click.ClickException():
            return _print_error("invalid_args", error.format_message(), EXIT_USAGE)
        case KeyboardInterrupt() | click.Abort():
            return EXIT_INTERRUPTED
        case BrokenPipeError() | ReaderGone():
            return silence_stdout()
        case MemoryError():
            return _print_error("too_large", "out of memory", EXIT_FAILED)
        case OSError():
            _discard_unwritable_output()
            return _print_error("write_failed", f"{error.strerror or error}", EXIT_FAILED)
        case _:
            message = f"a bug in holdfast: {redact_exception(error)}; HOLDFAST_DEBUG=1 shows where"
            return _print_error("handler_failed", message, EXIT_FAILED)


def silence_stdout() -> int:
    """Redirect standard output to the null device, so that the interpreter's last flush does not fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    with suppress(OSError, ValueError):
        os.dup2(null, sys.stdout.fileno())
    os.close(null)
    return EXIT_PIPE


def _discard_unwritable_output() -> None:
    """Drop buffered output that cannot be written: the interpreter's last flush would fail on it again."""
    try:
        sys.stdout.flush()
    except OSError:
        silence_stdout()


def _print_error(kind: str, message: str, code: int) -> int:
    with suppress(OSError):
        click.echo(f"holdfast: error [{kind}]: {escape_control_characters(message)}", err=True)
    return code


def try_print(text: str, *, err: bool = False) -> None:
    """Print a line, and ignore a closed or full output: a server goes on without it."""
    with suppress(OSError):
        click.echo(escape_control_characters(text), err=err)
