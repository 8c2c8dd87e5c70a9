"""Code that is not ours (handlers, previews, hooks): a thread to run it in; what it gave or raised, as plain data."""

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

from assent.core.redaction import foreign_text, redact_secrets
from assent.core.results import RESULT_LIMIT
from assent.core.schema import check_plain
from assent.errors import Invalid


class Died(Exception):
    """It took its own task down; why, is the message."""


async def in_thread(work: Callable[[], Any], name: str, left: Callable[[], None] | None = None) -> Any:
    """What ``work`` returns. It cannot be stopped: when we are cancelled it is abandoned.

    left:  called when it really returns, whether or not anybody waits for it
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def finish(value: Any, problem: BaseException | None) -> None:
        if left is not None:
            left()
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
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(finish, value, problem)

    # A daemon: what never returns must not keep the process from ending.
    threading.Thread(target=run, name=name, daemon=True).start()
    return await done


def recordable(value: Any, what: str) -> Any:
    """As plain JSON; what cannot be recorded is an ``invalid_result`` that says why."""
    if value is None or value is True or value is False:
        return value
    try:
        builtins = msgspec.to_builtins(value, str_keys=True, enc_hook=_model)
        check_plain(builtins, what)
        if len(msgspec.json.encode(builtins)) > RESULT_LIMIT:
            raise unfit(f"the {what} is larger than {RESULT_LIMIT} bytes", "too_large")
    except Invalid as problem:
        raise unfit(problem.message, problem.kind if problem.kind == "too_large" else "invalid_result") from None
    except (TypeError, ValueError, RecursionError, OverflowError) as problem:
        raise unfit(f"the {what} cannot be recorded as JSON: {redact_secrets(str(problem))}") from None
    return builtins


def _model(value: Any) -> Any:
    """pydantic models, and whatever else knows how to become plain data."""
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        return dump(mode="json")
    raise TypeError(f"{type(value).__name__} is not JSON")


def unfit(message: str, kind: str = "invalid_result") -> Invalid:
    return Invalid(message, kind=kind)


def shown(problem: BaseException) -> str:
    """An exception as people and models see it: its type and its words, without secrets."""
    return str(problem) if isinstance(problem, Died) else foreign_text(problem)


def written(value: Any) -> str:
    """Any value as people read it in a message."""
    try:
        return text(repr(value)[:1000])
    except Exception:
        return f"a {type(value).__name__}"


def text(words: str) -> str:
    """What can be stored of it."""
    return words.encode("utf-8", "replace").decode()


class RedactRecords(logging.Filter):
    """Redacts what our log records say, tracebacks included; ``exc_info`` stays for handlers that want it."""

    def filter(self, record: logging.LogRecord) -> bool:
        said = record.getMessage()
        if (clean := redact_secrets(said)) != said:
            record.msg, record.args = clean, None
        if record.exc_info and record.exc_info[1] is not None and not record.exc_text:
            lines = "".join(traceback.format_exception(record.exc_info[1])).rstrip("\n")
            record.exc_text = redact_secrets(lines)
        return True


logging.getLogger("assent").addFilter(RedactRecords("assent"))
