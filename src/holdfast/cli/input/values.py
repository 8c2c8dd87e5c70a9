"""Parse the values that users type: messages, JSON, and answers that must fit a schema."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, cast

from holdfast.cli.render.text import value_text
from holdfast.core.json_values import parse_strict_json, refuse_duplicate_keys
from holdfast.core.results import ANSWER_LIMIT, MESSAGE_LIMIT
from holdfast.core.schema.validation import check_plain, parse_json, validate_value
from holdfast.errors import Invalid, TooLarge

JSON = dict[str, Any]


def read_message(given: str) -> str:
    """Return the message, or with ``-`` standard input; an invalid one is refused before the store is opened."""
    text = _utf8(read_stdin(MESSAGE_LIMIT), "standard input") if given == "-" else given
    if given == "-" and text.endswith("\n"):
        text = text.removesuffix("\n").removesuffix("\r")
    return check_message(text)


def check_message(text: str) -> str:
    """Return the message; refuse an empty, invalid or too long one."""
    if not text.strip():
        raise Invalid("the message is empty", kind="no_prompt")
    if "\0" in text:
        raise Invalid("the message has a NUL character; remove it")
    check_plain(text, "message")
    if len(text.encode()) > MESSAGE_LIMIT:
        raise TooLarge(f"the message has more than {MESSAGE_LIMIT} bytes")
    return text


def read_stdin(limit: int) -> bytes:
    """Return standard input; more than ``limit`` bytes are refused without reading them all."""
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
    """Return JSON from a file, or with ``-`` from standard input."""
    if path == "-":
        return parse_strict_json(read_stdin(ANSWER_LIMIT), what)
    try:
        with open(path, "rb") as file:
            data = file.read(ANSWER_LIMIT + 1)
    except (OSError, ValueError) as failure:
        reason = getattr(failure, "strerror", None) or failure
        raise Invalid(f"{path!r} cannot be read: {reason}", kind="read_failed") from failure
    if len(data) > ANSWER_LIMIT:
        raise TooLarge(f"{path!r} has more than the {ANSWER_LIMIT} bytes that are taken")
    return parse_strict_json(data, what)


def _utf8(data: bytes, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as failure:
        raise Invalid(f"{what} is not UTF-8 text (byte {failure.start})") from None


def parse_value(text: str, schema: JSON | bool | None, what: str, choices: list[Any] | None = None) -> Any:
    """Return typed text as a value that fits the schema: as text if that is valid, else parsed as JSON."""
    if choices is not None:
        return next((choice for choice in choices if _choice_text(choice) == text), text)
    if schema is None or isinstance(schema, bool):
        return text
    if _is_valid(schema, text, what):
        return text
    try:
        value = parse_json(text, what)
    except Invalid:
        return text  # the runtime refuses it, with the reason
    if not _is_valid(schema, value, what) and "string" in _types(schema):
        return text
    refuse_duplicate_keys(text, what)
    return value


def _choice_text(choice: Any) -> str:
    return value_text(choice)


def _is_valid(schema: JSON, value: Any, what: str) -> bool:
    try:
        validate_value(schema, value, what)
    except Invalid:
        return False
    return True


def _types(schema: JSON) -> set[str]:
    plain = resolve_reference(schema, schema)
    kind = plain.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {str(name) for name in cast("list[Any]", kind)}
    if isinstance(plain.get("enum"), list):
        return {"string"} if any(isinstance(e, str) for e in cast("list[Any]", plain["enum"])) else set()
    return set()


def resolve_reference(schema: Any, root: Any) -> JSON:
    """Return the schema with local references resolved; ``{}`` if it is missing or not an object."""
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
    """Return the schema of one property, also inside anyOf, oneOf and allOf."""
    plain = resolve_reference(schema, root)
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
    """Return ``--set k=v --set a.b=1`` as an object, with each value parsed by its schema."""
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
        at[path[-1]] = parse_value(text, _standalone(found, root), what)
    return built


def _standalone(schema: Any, root: JSON | None) -> JSON | None:
    """Return a part of a schema with the definitions that it refers to, so that it can be validated alone."""
    if not isinstance(schema, dict):
        return None
    shared = {word: root[word] for word in ("$defs", "definitions") if root and word in root}
    return {**shared, **cast("JSON", schema)}
