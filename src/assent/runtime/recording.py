"""A request as it was sent, kept beside the log where an agent says so: exact, but for secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Literal, cast

import msgspec

from assent.core.redaction import SECRETS
from assent.models.base import Request

Record = Literal["off", "metadata", "full"]
RECORDS: tuple[Record, ...] = ("off", "metadata", "full")

NAMED = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS)$")
SHORTEST = 8
"""A shorter value of such a variable may be a word of the language."""
_json = msgspec.json.Encoder()


def recorded(request: Request) -> bytes:
    """The request as JSON: what the model was told, in the order in which it was told."""
    told = {
        "instructions": request.instructions,
        "messages": list(request.messages),
        "tools": request.tools,
        "output": request.output,
        "injected": request.injected,
        "settings": request.settings,
    }
    return _json.encode(_within(msgspec.to_builtins(told), _named(os.environ)))


def redacted(text: str, environment: Mapping[str, str]) -> str:
    """Without what looks like a key, and without the values of variables that are called one."""
    return _redacted(text, _named(environment))


def _named(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """(secret, its name): also as it stands in JSON, since a result is JSON within a text."""
    named: list[tuple[str, str]] = []
    for name, value in environment.items():
        if len(value) >= SHORTEST and NAMED.search(name.upper()):
            named += [(way, name) for way in {value, _json.encode(value).decode()[1:-1]}]
    return named


def _redacted(text: str, named: list[tuple[str, str]]) -> str:
    for secret, name in named:
        text = text.replace(secret, f"[redacted: {name}]")
    return SECRETS.sub("[redacted]", text)


def _within(value: Any, named: list[tuple[str, str]]) -> Any:
    match value:
        case str():
            return _redacted(value, named)
        case dict():
            return {_redacted(key, named): _within(each, named) for key, each in cast("dict[str, Any]", value).items()}
        case list() | tuple():
            return [_within(each, named) for each in cast("list[Any]", value)]
        case _:
            return value
