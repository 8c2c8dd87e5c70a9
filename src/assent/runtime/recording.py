"""A request as it was sent, kept beside the log where an agent says so: exact, but for secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from assent.models.base import Request

Record = Literal["off", "metadata", "full"]
RECORDS: tuple[Record, ...] = ("off", "metadata", "full")

SECRETS = re.compile(
    r"(?<![A-Za-z0-9])sk-[A-Za-z0-9_-]{16,}"  # OpenAI, Anthropic and others; "risk-averse-investments" is none
    r"|gsk_[A-Za-z0-9]{16,}|AIza[A-Za-z0-9_-]{30,}|AKIA[A-Z0-9]{16}"
    r"|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{30,}|xox[abprs]-[A-Za-z0-9-]{10,}"
    r"|(?<=Bearer )[A-Za-z0-9._~+/-]{16,}=*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----",
    re.DOTALL,
)
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
    return redacted(_json.encode(told).decode()).encode()


def redacted(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Without what looks like a key, and without the values of variables that are called one."""
    for name, value in (os.environ if environment is None else environment).items():
        if len(value) >= SHORTEST and NAMED.search(name.upper()):
            text = text.replace(_json.encode(value).decode()[1:-1], f"[redacted: {name}]")
    return SECRETS.sub("[redacted]", text)
