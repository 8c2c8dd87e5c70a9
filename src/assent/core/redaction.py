"""Secrets out of texts that are not ours: exceptions of handlers, drivers and libraries, before anybody sees them.

``foreign_text`` is the one way from a foreign exception to a text: for the log, the model, viewers and the command
line. It leaves the rest of the sentence as it is. A ToolError's message is its author's own and is not touched.

Every pattern takes time linear in the text: what repeats without bound starts at a literal and cannot run over the
next one.
"""

from __future__ import annotations

import re
from typing import Final

REDACTED: Final = "[redacted]"

SECRETS = re.compile(
    r"(?<![A-Za-z0-9])sk-[A-Za-z0-9_-]{16,}"  # OpenAI, Anthropic and others; "risk-averse-investments" is none
    r"|gsk_[A-Za-z0-9]{16,}|AIza[A-Za-z0-9_-]{30,}|A(?:KIA|SIA)[A-Z0-9]{16}"
    r"|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{30,}|xox[abprs]-[A-Za-z0-9-]{10,}"
    r"|(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"  # a JWT
    r"|(?<=[Bb]earer )[A-Za-z0-9._~+/-]{16,}=*"
    r"|-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----(?:[^-]|-(?!----))*(?:-----END [A-Z ]{0,40}PRIVATE KEY-----)?",
    re.DOTALL,
)
"""Keys and tokens that can be told by their own shape."""

_USERINFO = re.compile(r"(?<=://)([^\s:/@]*):(?:(?:[^\s/@]*@)*[^\s/@]+|[^/@\n]{1,128}|\S{1,128})@")
"""The password in ``scheme://user:password@host``; one that is not quoted as it should be has up to 128 characters."""

_VALUE = r"(?!\[redacted\])(b?'(?:[^'\\]|\\.)*'?|b?\"(?:[^\"\\]|\\.)*\"?|[^\s\"'&,;)}\]]+)"
"""A value: in quotes, as Python or JSON writes it, or up to a space or the next separator."""

_ASSIGNED = r"(?:[\"']\s{0,8}[:=,]|\s{0,8}[:=])\s{0,8}"
"""What stands between a name and its value: ``=``, ``:``, or the comma of a pair whose name is in quotes."""

_HEADER = re.compile(rf"(?i)((?:authorization|cookie){_ASSIGNED})(?:(?:basic|bearer|digest|token)\s)?{_VALUE}")
"""``Authorization: Basic dXNlcjpwYXNz``, ``(b'authorization', b'Basic dXNlcjpwYXNz')``"""

_NAMED = re.compile(
    r"(?i)((?:passw(?:or)?d|passphrase|api[_-]?key|access[_-]?key|private[_-]?key|[_-]token|[_-]secret"
    rf"|accesstoken|authtoken|refreshtoken|clientsecret){_ASSIGNED}"
    rf"|\b(?:pwd|token|secret|key)=){_VALUE}"
)
"""``password=...``, ``"api_key": "..."``; bare ``token`` only before ``=``: "unexpected token: }" is none."""


def redact_secrets(text: str) -> str:
    """Return the text with ``[redacted]`` in the place of whatever looks like a password, a key or a token."""
    text = SECRETS.sub(REDACTED, text)
    text = _USERINFO.sub(rf"\1:{REDACTED}@", text)
    text = _HEADER.sub(_without_value, text)
    return _NAMED.sub(_without_value, text)


def _without_value(found: re.Match[str]) -> str:
    name, value = found[1], found[2]
    quote = value.lstrip("b")[:1]
    if quote not in ("'", '"'):
        return f"{name}{REDACTED}"
    start = value[: value.index(quote) + 1]
    end = quote if len(value) > len(start) and value.endswith(quote) else ""
    return f"{name}{start}{REDACTED}{end}"


def foreign_text(error: BaseException) -> str:
    """Return an exception's type and words, without secrets, as text that can be stored."""
    try:
        words = str(error)
    except Exception:
        words = "its message could not be read"
    kind = type(error).__name__
    return redact_secrets(f"{kind}: {words}" if words else kind).encode("utf-8", "replace").decode()
