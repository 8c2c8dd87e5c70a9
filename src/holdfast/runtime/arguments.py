"""Checks of the arguments that callers pass to ``Runtime``, and the making of random ids."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Iterable, Mapping
from copy import deepcopy
from datetime import datetime, timedelta
from typing import Any, cast, get_args

from holdfast.core.audit import DECISION_KINDS
from holdfast.core.decisions import SYSTEM, Decision, Pending, Principal, split_suspension
from holdfast.core.results import MESSAGE_LIMIT
from holdfast.core.schema.validation import check_plain, check_plain_no_nul
from holdfast.core.state import Status
from holdfast.core.tool import parse_duration
from holdfast.errors import DeclarationError, Invalid, TooLarge

NAME_LIMIT = 200
"""Characters of a conversation id."""
DECISIONS = cast("tuple[type, ...]", get_args(Decision))
STATUSES: tuple[str, ...] = get_args(Status)


def new_id() -> str:
    """Return an unguessable id: 128 random bits as 26 lower-case letters and digits."""
    return base64.b32encode(secrets.token_bytes(16)).decode().rstrip("=").lower()


def check_conversation_id(name: str) -> str:
    """Return the conversation id; refuse one that is too long or not printable."""
    if not isinstance(name, str) or not 1 <= len(name) <= NAME_LIMIT or not name.isprintable():  # pyright: ignore[reportUnnecessaryIsInstance]
        raise Invalid(f"bad conversation id {str(name)[:60]!r}: 1-{NAME_LIMIT} printable characters")
    check_plain(name, "conversation id")
    return name


def check_caller(by: str | Principal) -> Principal:
    """Return the principal of a caller. The runtime's own is refused: it stands in the log for deadlines."""
    principal = Principal.of(by)
    if principal.id == SYSTEM.id:
        raise Invalid(f"`by` cannot be {SYSTEM.id!r}: that name is the runtime's own; pass the id of the caller")
    return principal


def check_message(text: str) -> str:
    """Return the text of a message; refuse one that is empty, too large or not storable."""
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


def check_tool_names(tools: tuple[str, ...] | list[str]) -> tuple[str, ...]:
    """Return the names of a client's tools."""
    if isinstance(tools, str) or not all(isinstance(name, str) for name in tools):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise Invalid(f"a client's tools are a list of names, not {tools!r:.80}")
    return tuple(tools)


def check_call_id(call: str) -> str:
    """Return the call id; refuse a Pending, which is a likely mistake."""
    if isinstance(call, Pending):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise Invalid(f"a call is given by its id, here {call.call!r}: pass pending.call, not the Pending itself")
    if not isinstance(call, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise Invalid(f"a call is given by its id, which is text (pending.call), not {type(call).__name__}")
    return call


def check_decisions(decisions: Mapping[str, Decision]) -> dict[str, Decision]:
    """Return copies of the decisions by call id; refuse anything that is no decision."""
    if not isinstance(decisions, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise Invalid(f"decisions are given as {{call id: decision}}, not as {type(decisions).__name__}")
    if not decisions:
        raise Invalid("no decisions were given")
    for call, decision in decisions.items():
        if not isinstance(decision, DECISIONS):
            names = ", ".join(f"{cls.__name__}(...)" for cls in DECISIONS)
            raise Invalid(f"call {check_call_id(call)!r}: {decision!r} is no decision; use {names}")
    # Copies: the caller may change its objects while a rule is asked, and the judged decision must be the recorded one.
    return {check_call_id(call): deepcopy(decision) for call, decision in decisions.items()}


def split_names(decisions: Mapping[str, Decision]) -> tuple[dict[str, Decision], dict[str, int]]:
    """Return decisions under CALL or CALL:SEQ by call, and the suspensions that were named, by call."""
    by_call: dict[str, Decision] = {}
    named: dict[str, int] = {}
    for name, decision in decisions.items():
        call, seq = split_suspension(name)
        if call in by_call:
            raise Invalid(f"two decisions about call {call!r}: give one")
        by_call[call] = decision
        if seq is not None:
            named[call] = seq
    return by_call, named


def check_status(status: str | None) -> str | None:
    """Return the status to filter by; refuse an unknown one."""
    if status is not None and status not in STATUSES:
        raise Invalid(f"status is one of {', '.join(STATUSES)}, not {status!r}")
    return status


def check_function(value: Any, name: str, takes: str) -> Any:
    """Return an option of the runtime that is a function, or None; refuse anything else."""
    if value is not None and not callable(value):
        raise DeclarationError(f"{name} is a function of {takes}, not {value!r:.80}")
    return value


def check_drain(drain: float) -> float:
    """Return the seconds that ``close`` waits."""
    if isinstance(drain, bool) or not isinstance(drain, int | float) or not drain >= 0:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DeclarationError(f"drain is a number of seconds, 0 or more, not {drain!r}")
    return drain


def check_conversation_ids(only: Iterable[str] | None) -> frozenset[str] | None:
    """Return the ids of ``Runtime(only=...)`` as a set."""
    if only is None:
        return None
    if isinstance(only, str) or not isinstance(only, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DeclarationError(f"only is a list of conversations, not {only!r:.80}")
    return frozenset(check_conversation_id(name) for name in only)


def until_time(until: str | float | timedelta | datetime, now: float) -> float:
    """Return the end of a period in seconds since the epoch, from a time or a duration such as "14d"."""
    if isinstance(until, datetime):
        if until.tzinfo is None:
            raise Invalid(f"`until` needs a time zone: {until.isoformat()} could be any of several times")
        return until.timestamp()
    if isinstance(until, str | timedelta):
        return now + parse_duration(until)
    if isinstance(until, bool) or not isinstance(until, int | float) or not 0 < until < 1e12:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise Invalid(f'`until` is a time, or a duration such as "14d", not {until!r:.80}')
    return float(until)


def past_time(at: float | str | timedelta | datetime | None, name: str, now: float) -> float | None:
    """Return a time in seconds since the epoch, from a time or from how long ago it was, such as "7d"."""
    if at is None:
        return None
    if isinstance(at, datetime):
        if at.tzinfo is None:
            raise Invalid(f"`{name}` needs a time zone: {at.isoformat()} could be any of several times")
        return at.timestamp()
    if isinstance(at, str | timedelta):
        return now - parse_duration(at)
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < 1e12:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise Invalid(f'`{name}` is a time, or how long ago it was such as "7d", not {at!r:.80}')
    return float(at)


def check_filter(value: str | None, name: str) -> str | None:
    """Return a text to filter by, or None."""
    if value is not None:
        if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise Invalid(f"`{name}` is text, not {type(value).__name__}")
        check_plain_no_nul(value, name)
    return value


def check_kinds(kinds: Iterable[str] | None) -> tuple[str, ...]:
    """Return the kinds of decisions to filter by, empty for all; refuse an unknown one."""
    if isinstance(kinds, str):
        raise Invalid(f'`kinds` is a list, such as ["{kinds[:40]}"]')
    found = tuple(dict.fromkeys(kinds or ()))
    for kind in found:
        if kind not in DECISION_KINDS:
            raise Invalid(f"a kind of decision is one of {', '.join(DECISION_KINDS)}, not {kind!r:.80}")
    return found


def check_count(n: int) -> int:
    """Return a limit of at least 1."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DeclarationError(f"a limit is a whole number of at least 1, not {n!r}")
    return n
