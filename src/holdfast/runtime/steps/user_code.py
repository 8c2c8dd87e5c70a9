"""Run the application's functions (handlers, previews, hooks) in threads, and record their values and errors as JSON.

Importing this module also makes the ``holdfast`` logger redact secrets.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from holdfast.core.results import RESULT_LIMIT
from holdfast.core.schema.validation import check_plain
from holdfast.core.text.redaction import redact_exception, redact_secrets
from holdfast.errors import Invalid


class HandlerDied(Exception):
    """A handler has cancelled its own task or raised an exception such as SystemExit; the message says which."""


async def run_in_thread(work: Callable[[], Any], name: str, on_return: Callable[[], None] | None = None) -> Any:
    """Run ``work`` in a new thread and return its value. A thread cannot be stopped: cancellation abandons it.

    on_return:  called when the thread returns, even if it was abandoned
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def finish(value: Any, problem: BaseException | None) -> None:
        if on_return is not None:
            on_return()
        if not done.done():
            if problem is None:
                done.set_result(value)
            else:
                done.set_exception(problem)

    def run() -> None:
        value, problem = None, None
        try:
            value = context.run(work)
        except StopIteration as stop:
            problem = RuntimeError(f"the handler raised StopIteration({stop.value!r})")
        except BaseException as raised:
            problem = raised
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(finish, value, problem)

    # A daemon thread: a function that never returns must not keep the process from ending.
    threading.Thread(target=run, name=name, daemon=True).start()
    return await done


def to_plain_json(value: Any, name: str) -> Any:
    """Return the value as plain JSON data; raise Invalid if it cannot be recorded.

    name:  names the value in the error, such as "result"
    """
    if value is None or value is True or value is False:
        return value
    try:
        builtins = msgspec.to_builtins(value, str_keys=True, enc_hook=_dump_model)
        check_plain(builtins, name)
        if len(msgspec.json.encode(builtins)) > RESULT_LIMIT:
            raise invalid_result(f"the {name} is larger than {RESULT_LIMIT} bytes", "too_large")
    except Invalid as problem:
        raise invalid_result(
            problem.message, problem.kind if problem.kind == "too_large" else "invalid_result"
        ) from None
    except (TypeError, ValueError, RecursionError, OverflowError) as problem:
        raise invalid_result(f"the {name} cannot be recorded as JSON: {redact_secrets(str(problem))}") from None
    return builtins


def _dump_model(value: Any) -> Any:
    """Convert pydantic models, and other objects with ``model_dump``."""
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        return dump(mode="json")
    raise TypeError(f"{type(value).__name__} is not JSON")


def invalid_result(message: str, kind: str = "invalid_result") -> Invalid:
    """Return the error for a value that cannot be recorded."""
    return Invalid(message, kind=kind)


def describe_exception(problem: BaseException) -> str:
    """Return an exception's type and message for people and models, without secrets."""
    return str(problem) if isinstance(problem, HandlerDied) else redact_exception(problem)


def describe_value(value: Any) -> str:
    """Return a value's ``repr`` for an error message."""
    try:
        return storable_text(repr(value)[:1000])
    except Exception:
        return f"a {type(value).__name__}"


def storable_text(text: str) -> str:
    """Return the text with lone surrogates, which cannot be stored, replaced."""
    return text.encode("utf-8", "replace").decode()


class RedactingFilter(logging.Filter):
    """Redacts secrets in log records, tracebacks included; ``exc_info`` is kept for handlers that use it."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if (clean := redact_secrets(message)) != message:
            record.msg, record.args = clean, None
        if record.exc_info and record.exc_info[1] is not None and not record.exc_text:
            lines = "".join(traceback.format_exception(record.exc_info[1])).rstrip("\n")
            record.exc_text = redact_secrets(lines)
        return True


logging.getLogger("holdfast").addFilter(RedactingFilter("holdfast"))
