"""JSON text written by people and programs outside: decoded once, and refused where it can be read in two ways.

JSON allows an object to name a key twice, and parsers differ on which value counts: a person can read
``{"amount": 5, "amount": 5000}`` as 5 while the program takes 5000. ``decode`` refuses such text.
"""

from __future__ import annotations

import json
from typing import Any

from assent.core.plain import parse_json, parse_object, shown
from assent.errors import Invalid


def decode(text: bytes | str, what: str = "the JSON text") -> Any:
    """Return the plain value of JSON text; raise Invalid for malformed text and for a key given twice.

    ``what`` names the text in the error message.
    """
    value: Any = parse_json(text, what)
    refuse_duplicate_keys(text, what)
    return value


def decode_object(text: bytes | str | dict[str, Any] | None, what: str) -> dict[str, Any]:
    """Return a tool's arguments from JSON text, as ``parse_object`` does, but without keys given twice."""
    value = parse_object(text, what)
    if isinstance(text, str | bytes) and value:
        refuse_duplicate_keys(text, what)
    return value


def refuse_duplicate_keys(text: bytes | str, what: str) -> None:
    """Raise Invalid where an object in this JSON text, which is known to be well-formed, has a key twice."""

    def check_pairs(pairs: list[tuple[str, Any]]) -> None:
        if len(dict(pairs)) == len(pairs):
            return
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise Invalid(f"{what}: the key {shown(key)} appears twice in one object; keep one of them")
            seen.add(key)

    # Numbers stay text here: only the keys matter, and Python limits the digits of an integer that it converts.
    json.loads(text, object_pairs_hook=check_pairs, parse_int=str, parse_float=str)
