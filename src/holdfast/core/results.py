"""Results: the envelope that the model sees, the truncation of long ones, and artifacts for values too large to log.

The model sees ``{"ok": true, "result": ...}`` or ``{"ok": false, "error": {"kind", "message", "details"}}``.
A handler's value is always inside our envelope, so a value that looks like an envelope cannot forge a status.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from holdfast.core.events import CallReturned, ErrorInfo

MODEL_LIMIT = 16_000
"""Bytes of one result that the model sees, unless its tool declares ``result_bytes``."""
INLINE_LIMIT = 64 * 1024
"""Bytes of one result that are stored in the event; a larger result becomes an artifact."""
ANSWER_LIMIT = 1024 * 1024
"""Bytes of one decision or of one call's arguments."""
MESSAGE_LIMIT = 4 * 1024 * 1024
"""Bytes of one message."""
RESULT_LIMIT = 64 * 1024 * 1024
"""Bytes of one result, artifact included."""

_json = msgspec.json.Encoder()


def truncate_text(text: str, limit: int = MODEL_LIMIT) -> str:
    """Return at most ``limit`` bytes of the text, cut at a character, with a marker that states limit and total."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= limit:
        return text
    marker = f"\n[cut: limit {limit} bytes, total {len(raw)} bytes; the full result is kept]"
    keep = max(0, limit - len(marker.encode()))
    return raw[:keep].decode("utf-8", "ignore") + marker


def strip_fence(text: str) -> str:
    """Return JSON text without the Markdown fence that models like to put around it."""
    body = text.strip()
    return body[body.index("\n") : -3] if body.startswith("```") and body.endswith("```") and "\n" in body else body


def parse_answer(text: str) -> Any:
    """Return the value of a structured answer that was validated before."""
    return msgspec.json.decode(strip_fence(text))


def split_large_value(value: Any, limit: int = MODEL_LIMIT) -> tuple[Any, str | None, int | None, bytes | None]:
    """Return (inline value, SHA-256, size, bytes); the last three are None unless the value becomes an artifact.

    limit:  bytes of the inline value of an artifact: its head, as the model sees it
    """
    raw = _json.encode(value)
    if len(raw) <= INLINE_LIMIT:
        return value, None, None, None
    text = value if isinstance(value, str) else raw.decode()
    return truncate_text(text, limit), hashlib.sha256(raw).hexdigest(), len(raw), raw


def encode_envelope(event: CallReturned, limit: int = MODEL_LIMIT) -> str:
    """Return the JSON text of the envelope, as the model sees it."""
    envelope: dict[str, Any] = {"ok": event.ok}
    if event.error is not None:
        envelope["error"] = truncate_error(event.error, limit)
    elif event.artifact is not None:
        envelope["result"] = event.value  # truncated when it was logged
    elif isinstance(event.value, str):
        envelope["result"] = truncate_text(event.value, limit)
    else:
        raw = _json.encode(event.value)
        envelope["result"] = event.value if len(raw) <= limit else truncate_text(raw.decode(), limit)
    if event.edited is not None:
        raw = _json.encode(event.edited)
        envelope["edited_args"] = event.edited if len(raw) <= limit else truncate_text(raw.decode(), limit)
        envelope["note"] = "The arguments were changed before it ran; it ran with edited_args."
    return _json.encode(envelope).decode()


def truncate_error(error: ErrorInfo, limit: int = MODEL_LIMIT) -> dict[str, Any]:
    """Return the error for an envelope, with message and details each cut to half the limit."""
    details: Any = error.details
    half = limit // 2
    if len(_json.encode(details)) > half:
        details = {"cut": truncate_text(_json.encode(details).decode(), half)}
    return {"kind": error.kind, "message": truncate_text(error.message, half), "details": details}
