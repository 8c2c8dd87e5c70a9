"""Removal of secrets from the messages of exceptions that handlers, drivers and libraries raise.

``redact_exception`` converts every such exception to text, before it reaches the log, the model, viewers or the command
line. The rest of the message stays unchanged. The message of a ToolError is written for the model and is not redacted.

Every pattern takes time linear in the text: an unbounded repetition starts at a literal and cannot match across the
next one.
"""

from __future__ import annotations

import re
from typing import Final

REDACTED: Final = "[redacted]"

SECRETS = re.compile(
    r"(?<![A-Za-z0-9])sk-[A-Za-z0-9_-]{16,}"  # OpenAI, Anthropic, ...; does not match "risk-averse-investments"
    r"|gsk_[A-Za-z0-9]{16,}|AIza[A-Za-z0-9_-]{30,}|A(?:KIA|SIA)[A-Z0-9]{16}"
    r"|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{30,}|xox[abprs]-[A-Za-z0-9-]{10,}"
    r"|(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"  # a JWT
    r"|(?<=[Bb]earer )[A-Za-z0-9._~+/-]{16,}=*"
    r"|-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----(?:[^-]|-(?!----))*(?:-----END [A-Z ]{0,40}PRIVATE KEY-----)?",
    re.DOTALL,
)
"""Keys and tokens with a recognizable format."""

_USERINFO = re.compile(r"(?<=://)([^\s:/@]*):(?:(?:[^\s/@]*@)*[^\s/@]+|[^/@\n]{1,128}|\S{1,128})@")
"""The password in ``scheme://user:password@host``; up to 128 characters if it is not percent-encoded."""

_VALUE = r"(?!\[redacted\])(b?'(?:[^'\\]|\\.)*'?|b?\"(?:[^\"\\]|\\.)*\"?|[^\s\"'&,;)}\]]+)"
"""A value: in quotes, as in Python or JSON, or up to a space or the next separator."""

_ASSIGNMENT = r"(?:[\"']\s{0,8}[:=,]|\s{0,8}[:=])\s{0,8}"
"""The separator of a name and its value: ``=``, ``:``, or the comma after a name in quotes."""

_HEADER = re.compile(rf"(?i)((?:authorization|cookie){_ASSIGNMENT})(?:(?:basic|bearer|digest|token)\s)?{_VALUE}")
"""``Authorization: Basic dXNlcjpwYXNz``, ``(b'authorization', b'Basic dXNlcjpwYXNz')``"""

_NAMED_SECRET = re.compile(
    r"(?i)((?:passw(?:or)?d|passphrase|api[_-]?key|access[_-]?key|private[_-]?key|[_-]token|[_-]secret"
    rf"|accesstoken|authtoken|refreshtoken|clientsecret){_ASSIGNMENT}"
    rf"|\b(?:pwd|token|secret|key)=){_VALUE}"
)
"""``password=...``, ``"api_key": "..."``; bare ``token`` only before ``=``, because of "unexpected token: }"."""


def redact_secrets(text: str) -> str:
    """Return the text with ``[redacted]`` in place of everything that looks like a password, a key or a token."""
    text = SECRETS.sub(REDACTED, text)
    text = _USERINFO.sub(rf"\1:{REDACTED}@", text)
    text = _HEADER.sub(_redact_match, text)
    return _NAMED_SECRET.sub(_redact_match, text)


def _redact_match(found: re.Match[str]) -> str:
    name, value = found[1], found[2]
    quote = value.lstrip("b")[:1]
    if quote not in ("'", '"'):
        return f"{name}{REDACTED}"
    start = value[: value.index(quote) + 1]
    end = quote if len(value) > len(start) and value.endswith(quote) else ""
    return f"{name}{start}{REDACTED}{end}"


def redact_exception(error: BaseException) -> str:
    """Return an exception's type and message without secrets, as text that can be encoded as UTF-8."""
    try:
        message = str(error)
    except Exception:
        message = "its message could not be read"
    kind = type(error).__name__
    return redact_secrets(f"{kind}: {message}" if message else kind).encode("utf-8", "replace").decode()
