"""What comes in at the door is checked here, once: names, texts, counts."""

from __future__ import annotations

import base64
import secrets

from assent.core.decisions import SYSTEM, Principal
from assent.core.results import MESSAGE_LIMIT
from assent.core.schema import check_plain
from assent.errors import DeclarationError, Invalid, TooLarge

NAME_LIMIT = 200


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


def count(n: int) -> int:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DeclarationError(f"a limit is a whole number of at least 1, not {n!r}")
    return n
