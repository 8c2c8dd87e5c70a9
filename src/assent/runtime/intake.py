"""What comes in at the door is checked here, once: names, texts, counts."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any, cast, get_args

from assent.core.decisions import SYSTEM, Decision, Pending, Principal
from assent.core.results import MESSAGE_LIMIT
from assent.core.schema import check_plain
from assent.core.state import Status
from assent.errors import DeclarationError, Invalid, TooLarge

NAME_LIMIT = 200
DECISIONS = cast("tuple[type, ...]", get_args(Decision))
STATUSES: tuple[str, ...] = get_args(Status)


def new_id() -> str:
    """Return an id that nobody guesses: 128 random bits as 26 lower-case letters and digits."""
    return base64.b32encode(secrets.token_bytes(16)).decode().rstrip("=").lower()


def conversation_id(name: str) -> str:
    if not isinstance(name, str) or not 1 <= len(name) <= NAME_LIMIT or not name.isprintable():  # pyright: ignore[reportUnnecessaryIsInstance]
        raise Invalid(f"bad conversation id {str(name)[:60]!r}: 1-{NAME_LIMIT} printable characters")
    check_plain(name, "conversation id")
    return name


def caller(by: str | Principal) -> Principal:
    """Who asks. The system never does: in the log its name stands for deadlines that passed and the like."""
    who = Principal.of(by)
    if who.id == SYSTEM.id:
        raise Invalid(f"`by` cannot be {SYSTEM.id!r}: that name is the runtime's own; say who it is")
    return who


def message(text: str) -> str:
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise Invalid(f"a message is text, not {type(text).__name__}")
    if not text.strip():
        raise Invalid("the message is empty", kind="no_prompt")
    if len(text) > MESSAGE_LIMIT:
        raise TooLarge(f"the message has {len(text)} characters; at most {MESSAGE_LIMIT} bytes are taken")
    if "\0" in text:
        raise Invalid("the message has a NUL character; remove it")
    check_plain(text, "message")
    if (size := len(text.encode())) > MESSAGE_LIMIT:
        raise TooLarge(f"the message has {size} bytes; at most {MESSAGE_LIMIT} are taken")
    return text


def tool_names(tools: tuple[str, ...] | list[str]) -> tuple[str, ...]:
    if isinstance(tools, str) or not all(isinstance(name, str) for name in tools):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise Invalid(f"a client's tools are a list of names, not {tools!r:.80}")
    return tuple(tools)


def call_id(call: str) -> str:
    if isinstance(call, Pending):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise Invalid(f"a call is given by its id, here {call.call!r}: pass pending.call, not the Pending itself")
    if not isinstance(call, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise Invalid(f"a call is given by its id, which is text (pending.call), not {type(call).__name__}")
    return call


def decided(decisions: Mapping[str, Decision]) -> dict[str, Decision]:
    """Return the decisions by call id; refuse what are none."""
    if not isinstance(decisions, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise Invalid(f"decisions are given as {{call id: decision}}, not as {type(decisions).__name__}")
    if not decisions:
        raise Invalid("no decisions were given")
    for call, decision in decisions.items():
        if not isinstance(decision, DECISIONS):
            names = ", ".join(each.__name__ for each in DECISIONS)
            raise Invalid(f"call {call_id(call)!r}: {decision!r} is no decision; use {names}")
    # Copies: a caller may change its dict while a rule is asked, and what was judged must be what runs.
    return {call_id(call): deepcopy(decision) for call, decision in decisions.items()}


def status_name(status: str | None) -> str | None:
    if status is not None and status not in STATUSES:
        raise Invalid(f"status is one of {', '.join(STATUSES)}, not {status!r}")
    return status


def function(value: Any, name: str, takes: str) -> Any:
    """Return an option of the runtime that is a function, or None; refuse anything else."""
    if value is not None and not callable(value):
        raise DeclarationError(f"{name} is a function of {takes}, not {value!r:.80}")
    return value


def drain_seconds(drain: float) -> float:
    if isinstance(drain, bool) or not isinstance(drain, int | float) or not drain >= 0:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DeclarationError(f"drain is a number of seconds, 0 or more, not {drain!r}")
    return drain


def conversation_ids(only: Iterable[str] | None) -> frozenset[str] | None:
    if only is None:
        return None
    if isinstance(only, str) or not isinstance(only, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DeclarationError(f"only is a list of conversations, not {only!r:.80}")
    return frozenset(conversation_id(name) for name in only)


def count(n: int) -> int:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DeclarationError(f"a limit is a whole number of at least 1, not {n!r}")
    return n
