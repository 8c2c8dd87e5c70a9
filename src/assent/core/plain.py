"""Plain JSON values: what the log, the wire and a digest can hold, and how text becomes one.

Whatever enters (a model's arguments, a handler's result, a person's answer) passes ``check_plain`` or
``parse_json`` once; behind that line a value encodes, decodes to itself and cannot overflow anybody's stack.
Re-exported by ``assent.core.schema``.
"""

from __future__ import annotations

import hashlib
import math
import re
from typing import Any, NoReturn, cast

import msgspec

from assent.errors import Invalid

MAX_DEPTH = 128
MAX_VALUES = 4_000_000
"""A value that contains itself, or shares its parts again and again, has no end that is worth waiting for."""
MAX_INT_BITS = 1024

_UNPAIRED = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)


def check_plain(value: Any, what: str) -> None:
    """Raise Invalid unless the value is plain JSON: no deeper than 128, finite numbers, real text."""
    if type(value) is str and value.isascii():
        return  # by far the most there is
    # Level by level: the depth costs nothing to know, and no input can exhaust the interpreter's stack.
    level: list[Any] = [value]
    depth = seen = 0
    while level:
        below: list[Any] = []
        for each in level:
            kind = type(each)  # pyright: ignore[reportUnknownVariableType]
            if kind is str:
                if not each.isascii() and _surrogate(each):
                    _refuse(value, what)
            elif kind is bool or each is None:
                continue
            elif kind is int:
                if not -(2**63) <= each < 2**63 and each.bit_length() > MAX_INT_BITS:
                    _refuse(value, what)
            elif kind is float:
                if not math.isfinite(each):
                    _refuse(value, what)
            elif isinstance(each, dict):
                for key in each:  # pyright: ignore[reportUnknownVariableType]
                    if type(key) is not str or (not key.isascii() and _surrogate(key)):  # pyright: ignore[reportUnknownArgumentType]
                        _refuse(value, what)
                below.extend(each.values())  # pyright: ignore[reportUnknownArgumentType]
            elif isinstance(each, (list, tuple)):
                below.extend(each)  # pyright: ignore[reportUnknownArgumentType]
            else:
                _refuse(value, what)
        depth += 1
        seen += len(below)
        if depth > MAX_DEPTH and below:
            raise Invalid(f"{what}: nested deeper than {MAX_DEPTH} levels; flatten it")
        if seen > MAX_VALUES:
            raise Invalid(f"{what}: more than {MAX_VALUES:,} values, or a value that contains itself")
        level = below


def check_given(value: Any, what: str) -> None:
    """Raise Invalid unless the value is plain JSON without NUL characters: what people and callers may give.

    PostgreSQL's text cannot hold NUL, and terminals and C programs cut text at it. What a model or a tool returned
    is kept as it is, NUL included.
    """
    check_plain(value, what)
    if b"\\u0000" in msgspec.json.encode(value):  # also where the text itself is \\u0000
        _refuse_nul(value, what)


def _refuse_nul(value: Any, what: str) -> None:
    waiting: list[tuple[tuple[str | int, ...], Any]] = [((), value)]
    while waiting:
        path, each = waiting.pop()
        inside: list[tuple[str | int, Any]] = []
        if isinstance(each, dict):
            inside = list(cast("dict[str, Any]", each).items())
        elif isinstance(each, (list, tuple)):
            inside = list(enumerate(cast("list[Any]", each)))
        keys = "".join(key for key, _ in inside if isinstance(key, str))
        if "\0" in keys or (isinstance(each, str) and "\0" in each):
            where = f" at {place(path)}" if path else ""
            raise Invalid(f"{what}: a NUL character{where}; remove it")
        waiting.extend(((*path, key), item) for key, item in inside)


def parse_json(text: str | bytes, what: str) -> Any:
    """A plain value from JSON text; whatever is wrong with the text is an Invalid that says where."""
    try:
        value = msgspec.json.decode(text)
    except RecursionError:
        raise Invalid(f"{what}: nested deeper than {MAX_DEPTH} levels; flatten it") from None
    except msgspec.DecodeError as error:
        raise Invalid(f"{what}: not valid JSON: {_malformed(text, str(error))}") from None
    except UnicodeError as error:
        raise Invalid(f"{what}: not valid JSON: {_not_text(text, error)}") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise Invalid(f"{what}: not valid JSON: {error}") from None
    check_plain(value, what)
    return value


def parse_object(raw: str | bytes | dict[str, Any] | None, what: str) -> dict[str, Any]:
    """A tool's arguments as a model sent them: an object, or nothing at all, which counts as ``{}``."""
    if raw is None:
        return {}
    if isinstance(raw, dict):
        check_plain(raw, what)
        return raw
    value: Any = raw
    if isinstance(raw, str | bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
        if not raw.strip():
            return {}
        value = parse_json(raw, what)
    if isinstance(value, dict):
        return value  # pyright: ignore[reportUnknownVariableType]
    raise Invalid(f'{what}: expected a JSON object such as {{"field": 1}}, got {kind_of(value)} {shown(value)}')


def sorted_json(value: Any) -> bytes:
    """The one way to write a value: keys sorted, no blanks. What a digest is made of."""
    try:
        return msgspec.json.encode(value, order="sorted")
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise Invalid(f"cannot be written as JSON: {error}") from None


def digest(tool: str, args: Any, preview: Any, fingerprint: str = "") -> str:
    """What an approval is an approval of: hex SHA-256 of sorted JSON ``[tool, fingerprint, args, preview]``.

    fingerprint:  of the tool's definition; without one (a call that an older version logged) it is left out
    """
    what = [tool, fingerprint, args, preview] if fingerprint else [tool, args, preview]
    return hashlib.sha256(sorted_json(what)).hexdigest()


def kind_of(value: Any) -> str:
    """The JSON Schema type of a plain value."""
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


def shown(value: Any, limit: int = 80) -> str:
    """The value as JSON, shortened: for messages."""
    try:
        text = msgspec.json.encode(value).decode()
    except Exception:  # what cannot be encoded is still to be named in an error
        text = repr(value) if isinstance(value, (str, int, float)) else f"a {type(value).__name__}"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def place(path: list[str | int] | tuple[str | int, ...]) -> str:
    """``items[2].sku``; the empty string for the value itself."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif re.fullmatch(r"[\w$-]+", step):
            text += f".{step}" if text else step
        else:
            text += f"[{shown(step)}]"
    return text


def _surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _malformed(text: str | bytes, said: str) -> str:
    source = text if isinstance(text, str) else bytes(text).decode(errors="replace")
    # msgspec calls an unpaired surrogate "truncated", which would send a model looking in the wrong place.
    if found := _UNPAIRED.search(source):
        return f"unpaired surrogate {found[0]} (character {found.start()})"
    if "truncated" in said:
        return f"it ends too early (byte {len(source.encode(errors='replace'))})"
    return said.removeprefix("JSON is malformed: ")


def _not_text(text: str | bytes, error: UnicodeError) -> str:
    # msgspec counts from the start of the string that it was reading, so the place is looked for again.
    try:
        text.encode() if isinstance(text, str) else bytes(text).decode()
    except UnicodeError as found:
        error = found
    at: int = getattr(error, "start", 0)
    return f"an unpaired surrogate (character {at})" if isinstance(text, str) else f"not UTF-8 (byte {at})"


def _refuse(value: Any, what: str) -> NoReturn:
    """Walk again, slowly, to say where: only a refused value pays for paths."""
    level: list[tuple[tuple[str | int, ...], Any]] = [((), value)]
    while level:
        below: list[tuple[tuple[str | int, ...], Any]] = []
        for path, each in level:
            if reason := _unfit(each):
                where = f" at {place(path)}" if path else ""
                raise Invalid(f"{what}: not plain JSON{where}: {reason}")
            if isinstance(each, dict):
                below.extend(((*path, key), item) for key, item in each.items())  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
            elif isinstance(each, (list, tuple)):
                below.extend(((*path, index), item) for index, item in enumerate(each))  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
        level = below
    raise AssertionError("refused, but nothing wrong was found")


def _unfit(value: Any) -> str:
    kind: Any = value.__class__
    if kind is str:
        return f"text with an unpaired surrogate: {ascii(value)[:80]}" if _surrogate(value) else ""
    if kind is int:
        return f"an integer of {value.bit_length()} bits; send it as text" if value.bit_length() > MAX_INT_BITS else ""
    if kind is float:
        return "" if math.isfinite(value) else f"{value} has no JSON form; send null or text"
    if isinstance(value, dict):
        for key in value:  # pyright: ignore[reportUnknownVariableType]
            if type(key) is not str:  # pyright: ignore[reportUnknownArgumentType]
                return f"the key {key!r:.80} is not text"
            if _surrogate(key):
                return f"a key with an unpaired surrogate: {ascii(key)[:80]}"
        return ""
    if value is None or kind is bool or isinstance(value, (list, tuple)):
        return ""
    return f"a {kind.__name__}; use dict, list, str, int, float, bool or None"
