"""What people type, as the values that a schema asks for."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any, cast

from assent.core.results import ANSWER_LIMIT, MESSAGE_LIMIT
from assent.core.schema import check, check_plain, parse_json
from assent.core.strict_json import decode, refuse_duplicate_keys
from assent.errors import Invalid, TooLarge

JSON = dict[str, Any]


def message_text(given: str) -> str:
    """The message, or with ``-`` standard input; refused before anything is opened."""
    text = _utf8(read_stdin(MESSAGE_LIMIT), "standard input") if given == "-" else given
    if given == "-" and text.endswith("\n"):
        text = text.removesuffix("\n").removesuffix("\r")
    if not text.strip():
        raise Invalid("the message is empty", kind="no_prompt")
    if "\0" in text:
        raise Invalid("the message has a NUL character; remove it")
    check_plain(text, "message")
    if len(text.encode()) > MESSAGE_LIMIT:
        raise TooLarge(f"the message has more than {MESSAGE_LIMIT} bytes")
    return text


def read_stdin(limit: int) -> bytes:
    """At most so much of standard input; more is refused without reading it all."""
    if sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison]
        raise Invalid("standard input is closed", kind="stdin_error")
    try:
        data = sys.stdin.buffer.read(limit + 1)
    except (OSError, ValueError) as failure:
        raise Invalid(f"standard input cannot be read: {failure}", kind="stdin_error") from failure
    if len(data) > limit:
        raise TooLarge(f"standard input has more than the {limit} bytes that are taken")
    return data


def read_json(path: str, what: str) -> Any:
    """JSON from a file, or with ``-`` from standard input."""
    if path == "-":
        return decode(read_stdin(ANSWER_LIMIT), what)
    try:
        with open(path, "rb") as file:
            data = file.read(ANSWER_LIMIT + 1)
    except (OSError, ValueError) as failure:
        reason = getattr(failure, "strerror", None) or failure
        raise Invalid(f"{path!r} cannot be read: {reason}", kind="read_failed") from failure
    if len(data) > ANSWER_LIMIT:
        raise TooLarge(f"{path!r} has more than the {ANSWER_LIMIT} bytes that are taken")
    return decode(data, what)


def _utf8(data: bytes, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as failure:
        raise Invalid(f"{what} is not UTF-8 text (byte {failure.start})") from None


# --- by the schema ---


def typed(text: str, schema: JSON | bool | None, what: str, choices: list[Any] | None = None) -> Any:
    """What somebody typed, as the schema wants it: text where text fits, else what it says as JSON."""
    if choices is not None:
        return next((choice for choice in choices if _spelled(choice) == text), text)
    if schema is None or isinstance(schema, bool):
        return text
    if _fits(schema, text, what):
        return text
    try:
        value = parse_json(text, what)
    except Invalid:
        return text  # the runtime says what it should have been
    if not _fits(schema, value, what) and "string" in _types(schema):
        return text
    refuse_duplicate_keys(text, what)
    return value


def _spelled(choice: Any) -> str:
    from assent.cli.text import value_text

    return value_text(choice)


def _fits(schema: JSON, value: Any, what: str) -> bool:
    try:
        check(schema, value, what)
    except Invalid:
        return False
    return True


def _types(schema: JSON) -> set[str]:
    plain = resolved(schema, schema)
    kind = plain.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {str(each) for each in cast("list[Any]", kind)}
    if isinstance(plain.get("enum"), list):
        return {"string"} if any(isinstance(e, str) for e in cast("list[Any]", plain["enum"])) else set()
    return set()


def resolved(schema: Any, root: Any) -> JSON:
    """The schema behind local references; ``{}`` where there is none to see."""
    for _ in range(32):
        if not isinstance(schema, dict):
            return {}
        found = cast("JSON", schema)
        ref = found.get("$ref")
        if not isinstance(ref, str) or not ref.startswith("#"):
            return found
        schema = root
        for part in ref.removeprefix("#").split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            schema = cast("JSON", schema).get(key) if isinstance(schema, dict) else None
    return {}


def property_of(schema: Any, root: Any, name: str, depth: int = 8) -> Any:
    """The schema of one property, also where the object is one of several choices."""
    plain = resolved(schema, root)
    properties = plain.get("properties")
    if isinstance(properties, dict) and name in properties:
        return cast("JSON", properties)[name]
    for word in ("anyOf", "oneOf", "allOf"):
        for option in cast("list[Any]", plain.get(word) or []):
            found = property_of(option, root, name, depth - 1) if depth else None
            if found is not None:
                return found
    extra = plain.get("additionalProperties")
    return cast("JSON", extra) if isinstance(extra, dict) else None


def from_pairs(pairs: Iterable[str], schema: JSON | bool | None, what: str) -> JSON:
    """``--set k=v --set a.b=1`` as an object, each value as its schema wants it."""
    built: JSON = {}
    root = schema if isinstance(schema, dict) else None
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise Invalid(f"--set takes NAME=VALUE, not {pair!r}")
        literal = root is not None and property_of(root, root, key) is not None
        path = [key] if literal else key.split(".")
        if not all(path):
            raise Invalid(f"--set {pair!r}: {key!r} has an empty name in it")
        at, found = built, cast("Any", root)
        for name in path[:-1]:
            below = at.setdefault(name, {})
            if not isinstance(below, dict):
                raise Invalid(f"--set {key}: {name!r} was given a value already")
            at = cast("JSON", below)
            found = property_of(found, root, name)
        found = property_of(found, root, path[-1])
        if path[-1] in at:
            raise Invalid(f"--set {key} is given twice")
        at[path[-1]] = typed(text, _standalone(found, root), what)
    return built


def _standalone(schema: Any, root: JSON | None) -> JSON | None:
    """A part of a schema that can be checked by itself: with the definitions that it refers to."""
    if not isinstance(schema, dict):
        return None
    shared = {word: root[word] for word in ("$defs", "definitions") if root and word in root}
    return {**shared, **cast("JSON", schema)}


def login() -> str:
    """Who sits here, for the log."""
    import getpass

    try:
        return getpass.getuser() or "user"
    except (OSError, KeyError, ImportError):
        return os.environ.get("USER") or "user"
