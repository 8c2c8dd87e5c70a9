"""Plain JSON values: parsing, checking and writing the values that the log, the wire and digests hold.

Every value that enters (a model's arguments, a handler's result, a person's answer) passes ``check_plain`` or
``parse_json`` once. After that it can be encoded, decodes to itself, and is not nested deeply enough to overflow a
stack. ``label`` names the value in error messages. ``holdfast.core.schema.validation`` re-exports the main names.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from typing import Any, NoReturn, cast

import msgspec

from holdfast.errors import Invalid

MAX_DEPTH = 128
MAX_VALUES = 4_000_000
"""Values within one value. Stops values that contain themselves, or share parts so often that they never end."""
MAX_INT_BITS = 1024

_UNPAIRED_SURROGATE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)


def check_plain(value: Any, label: str) -> None:
    """Raise Invalid unless the value is plain JSON: no deeper than 128, finite numbers, real text."""
    if type(value) is str and value.isascii():
        return  # the common case
    # Level by level instead of recursively: the depth is known, and no input can exhaust the interpreter's stack.
    # By exact type: a subclass such as an IntEnum is not plain JSON, and this loop sees every value that is logged.
    level: list[Any] = [value]
    depth = seen = 0
    while level:
        below: list[Any] = []
        for item in level:
            kind = type(item)  # pyright: ignore[reportUnknownVariableType]
            if kind is str:
                if not item.isascii() and _has_surrogate(item):
                    _raise_not_plain(value, label)
            elif kind is bool or item is None:
                continue
            elif kind is int:
                if not -(2**63) <= item < 2**63 and item.bit_length() > MAX_INT_BITS:
                    _raise_not_plain(value, label)
            elif kind is float:
                if not math.isfinite(item):
                    _raise_not_plain(value, label)
            elif isinstance(item, dict):
                for key in item:  # pyright: ignore[reportUnknownVariableType]
                    if type(key) is not str or (not key.isascii() and _has_surrogate(key)):  # pyright: ignore[reportUnknownArgumentType]
                        _raise_not_plain(value, label)
                below.extend(item.values())  # pyright: ignore[reportUnknownArgumentType]
            elif isinstance(item, (list, tuple)):
                below.extend(item)  # pyright: ignore[reportUnknownArgumentType]
            else:
                _raise_not_plain(value, label)
        depth += 1
        seen += len(below)
        if depth > MAX_DEPTH and below:
            raise Invalid(f"{label}: nested deeper than {MAX_DEPTH} levels; flatten it")
        if seen > MAX_VALUES:
            raise Invalid(f"{label}: more than {MAX_VALUES:,} values, or a value that contains itself")
        level = below


def check_plain_no_nul(value: Any, label: str) -> None:
    """Raise Invalid unless the value, which a person or a caller gave, is plain JSON without NUL characters.

    PostgreSQL's text cannot hold NUL, and terminals and C programs cut text at it. Values from a model or a tool are
    stored unchanged, NUL included.
    """
    check_plain(value, label)
    if b"\\u0000" in msgspec.json.encode(value):  # may also be the six characters \u0000: _refuse_nul looks closer
        _refuse_nul(value, label)


def _refuse_nul(value: Any, label: str) -> None:
    waiting: list[tuple[tuple[str | int, ...], Any]] = [((), value)]
    while waiting:
        path, item = waiting.pop()
        inside: list[tuple[str | int, Any]] = []
        if isinstance(item, dict):
            inside = list(cast("dict[str, Any]", item).items())
        elif isinstance(item, (list, tuple)):
            inside = list(enumerate(cast("list[Any]", item)))
        keys = "".join(key for key, _ in inside if isinstance(key, str))
        if "\0" in keys or (isinstance(item, str) and "\0" in item):
            where = f" at {format_path(path)}" if path else ""
            raise Invalid(f"{label}: a NUL character{where}; remove it")
        waiting.extend(((*path, key), item) for key, item in inside)


def parse_json(text: str | bytes, label: str) -> Any:
    """Return the plain value of JSON text; raise Invalid, with the position, if the text is malformed."""
    try:
        value = msgspec.json.decode(text)
    except RecursionError:
        raise Invalid(f"{label}: nested deeper than {MAX_DEPTH} levels; flatten it") from None
    except msgspec.DecodeError as error:
        raise Invalid(f"{label}: not valid JSON: {_describe_malformed(text, str(error))}") from None
    except UnicodeError as error:
        raise Invalid(f"{label}: not valid JSON: {_describe_bad_encoding(text, error)}") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise Invalid(f"{label}: not valid JSON: {error}") from None
    check_plain(value, label)
    return value


def parse_object(raw: str | bytes | dict[str, Any] | None, label: str) -> dict[str, Any]:
    """Return a tool's arguments as a dict; None and blank text count as ``{}``."""
    if raw is None:
        return {}
    if isinstance(raw, dict):
        check_plain(raw, label)
        return raw
    value: Any = raw
    if isinstance(raw, str | bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
        if not raw.strip():
            return {}
        value = parse_json(raw, label)
    if isinstance(value, dict):
        return value  # pyright: ignore[reportUnknownVariableType]
    raise Invalid(
        f'{label}: expected a JSON object such as {{"field": 1}}, got {json_type(value)} {abbreviate_json(value)}'
    )


def parse_strict_json(text: bytes | str, label: str = "the JSON text") -> Any:
    """Return the plain value of JSON text; raise Invalid for malformed text and for a key given twice."""
    value: Any = parse_json(text, label)
    refuse_duplicate_keys(text, label)
    return value


def parse_strict_object(text: bytes | str | dict[str, Any] | None, label: str) -> dict[str, Any]:
    """Return a tool's arguments from JSON text, as ``parse_object`` does, but without keys given twice."""
    value = parse_object(text, label)
    if isinstance(text, str | bytes) and value:
        refuse_duplicate_keys(text, label)
    return value


def refuse_duplicate_keys(text: bytes | str, label: str) -> None:
    """Raise Invalid if an object in this well-formed JSON text has a key twice."""

    def check_pairs(pairs: list[tuple[str, Any]]) -> None:
        if len(dict(pairs)) == len(pairs):
            return
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise Invalid(f"{label}: the key {abbreviate_json(key)} appears twice in one object; keep one of them")
            seen.add(key)

    # Numbers stay text: only the keys matter, and Python limits the digits of an integer that it converts.
    json.loads(text, object_pairs_hook=check_pairs, parse_int=str, parse_float=str)


def sorted_json(value: Any) -> bytes:
    """Return the canonical JSON of a value, as used in digests: keys sorted, no whitespace."""
    try:
        return msgspec.json.encode(value, order="sorted")
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise Invalid(f"cannot be written as JSON: {error}") from None


def call_digest(tool: str, args: Any, preview: Any, fingerprint: str = "", *, failed: bool = False) -> str:
    """Return the digest of an approval: hex SHA-256 of sorted JSON ``[tool, fingerprint, args, preview]``.

    fingerprint:  of the tool's definition; left out if it is empty (a call that an older version logged)
    failed:       the preview failed: the list then ends with the arguments, so that a plan of None has another digest
    """
    parts = [tool, fingerprint, args, preview] if fingerprint else [tool, args, preview]
    if fingerprint and failed:
        parts.pop()
    return hashlib.sha256(sorted_json(parts)).hexdigest()


def json_type(value: Any) -> str:
    """Return the name of a plain value's JSON Schema type."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case dict():
            return "object"
        case list() | tuple():
            return "array"
        case _:
            return type(value).__name__


def abbreviate_json(value: Any, limit: int = 80) -> str:
    """Return the value as JSON, shortened for error messages."""
    try:
        text = msgspec.json.encode(value).decode()
    except Exception:  # the message that names the value must not fail on it
        text = repr(value) if isinstance(value, (str, int, float)) else f"a {type(value).__name__}"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def format_path(path: list[str | int] | tuple[str | int, ...]) -> str:
    """Return the path as text such as ``items[2].sku``; the empty string for the root."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif re.fullmatch(r"[\w$-]+", step):
            text += f".{step}" if text else step
        else:
            text += f"[{abbreviate_json(step)}]"
    return text


def _has_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _describe_malformed(text: str | bytes, message: str) -> str:
    source = text if isinstance(text, str) else bytes(text).decode(errors="replace")
    # msgspec calls an unpaired surrogate "truncated", which would point a model to the wrong place.
    if found := _UNPAIRED_SURROGATE.search(source):
        return f"unpaired surrogate {found[0]} (character {found.start()})"
    if "truncated" in message:
        return f"it ends too early (byte {len(source.encode(errors='replace'))})"
    return message.removeprefix("JSON is malformed: ")


def _describe_bad_encoding(text: str | bytes, error: UnicodeError) -> str:
    # msgspec counts from the start of the string that it was reading: find the position in the whole text.
    try:
        text.encode() if isinstance(text, str) else bytes(text).decode()
    except UnicodeError as found:
        error = found
    at: int = getattr(error, "start", 0)
    return f"an unpaired surrogate (character {at})" if isinstance(text, str) else f"not UTF-8 (byte {at})"


def _raise_not_plain(value: Any, label: str) -> NoReturn:
    """Raise Invalid with the path of the offending part. Paths are only tracked here, for refused values."""
    level: list[tuple[tuple[str | int, ...], Any]] = [((), value)]
    while level:
        below: list[tuple[tuple[str | int, ...], Any]] = []
        for path, item in level:
            if reason := _why_not_plain(item):
                where = f" at {format_path(path)}" if path else ""
                raise Invalid(f"{label}: not plain JSON{where}: {reason}")
            if isinstance(item, dict):
                below.extend(((*path, key), part) for key, part in item.items())  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
            elif isinstance(item, (list, tuple)):
                below.extend(((*path, index), part) for index, part in enumerate(item))  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
        level = below
    raise AssertionError("check_plain refused a value in which every part is plain")


def _why_not_plain(value: Any) -> str:
    kind: Any = value.__class__
    if kind is str:
        return f"text with an unpaired surrogate: {ascii(value)[:80]}" if _has_surrogate(value) else ""
    if kind is int:
        return f"an integer of {value.bit_length()} bits; send it as text" if value.bit_length() > MAX_INT_BITS else ""
    if kind is float:
        return "" if math.isfinite(value) else f"{value} has no JSON form; send null or text"
    if isinstance(value, dict):
        for key in value:  # pyright: ignore[reportUnknownVariableType]
            if type(key) is not str:  # pyright: ignore[reportUnknownArgumentType]
                return f"the key {key!r:.80} is not text"
            if _has_surrogate(key):
                return f"a key with an unpaired surrogate: {ascii(key)[:80]}"
        return ""
    if value is None or kind is bool or isinstance(value, (list, tuple)):
        return ""
    return f"a {kind.__name__}; use dict, list, str, int, float, bool or None"
