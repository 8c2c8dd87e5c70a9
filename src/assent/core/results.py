"""What becomes of a result: the envelope that the model sees, the cut, and what is too big for the log.

The model sees ``{"ok": true, "result": ...}`` or ``{"ok": false, "error": {"kind", "message", "details"}}``.
The envelope is always ours: a handler's value that looks like one stands inside it and cannot forge a status.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from assent.core.events import CallReturned, ErrorInfo

MODEL_LIMIT = 16_000
"""Bytes of one result that the model sees."""
INLINE_LIMIT = 64 * 1024
"""Bytes of one result that stand in the event; above it, in an artifact."""
ANSWER_LIMIT = 1024 * 1024
"""Bytes of one decision or of one call's arguments."""
MESSAGE_LIMIT = 4 * 1024 * 1024
"""Bytes of one message."""
RESULT_LIMIT = 64 * 1024 * 1024
"""Bytes of one result, artifact included."""

_json = msgspec.json.Encoder()


def cut(text: str, limit: int = MODEL_LIMIT) -> str:
    """At most ``limit`` bytes, cut on a character boundary, with a marker that states limit and total."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= limit:
        return text
    marker = f"\n[cut: limit {limit} bytes, total {len(raw)} bytes; the full result is kept]"
    keep = max(0, limit - len(marker.encode()))
    return raw[:keep].decode("utf-8", "ignore") + marker


def unfenced(text: str) -> str:
    """JSON as models like to write it: a fence around it is not part of it."""
    body = text.strip()
    return body[body.index("\n") : -3] if body.startswith("```") and body.endswith("```") and "\n" in body else body


def answer(text: str) -> Any:
    """The object in a structured answer that was found to fit."""
    return msgspec.json.decode(unfenced(text))


def sized(value: Any) -> tuple[Any, str | None, int | None, bytes | None]:
    """(what stands in the event, artifact's SHA-256, total size, artifact's bytes)."""
    raw = _json.encode(value)
    if len(raw) <= INLINE_LIMIT:
        return value, None, None, None
    text = value if isinstance(value, str) else raw.decode()
    return cut(text), hashlib.sha256(raw).hexdigest(), len(raw), raw


def content(event: CallReturned, limit: int = MODEL_LIMIT) -> str:
    """The result as the model sees it: JSON text of the envelope."""
    envelope: dict[str, Any] = {"ok": event.ok}
    if event.error is not None:
        envelope["error"] = bounded(event.error, limit)
    elif event.artifact is not None:
        envelope["result"] = event.value  # cut when it was recorded
    elif isinstance(event.value, str):
        envelope["result"] = cut(event.value, limit)
    else:
        raw = _json.encode(event.value)
        envelope["result"] = event.value if len(raw) <= limit else cut(raw.decode(), limit)
    if event.edited is not None:
        raw = _json.encode(event.edited)
        envelope["edited_args"] = event.edited if len(raw) <= limit else cut(raw.decode(), limit)
        envelope["note"] = "The arguments were changed before it ran; it ran with edited_args."
    return _json.encode(envelope).decode()


def bounded(error: ErrorInfo, limit: int = MODEL_LIMIT) -> dict[str, Any]:
    details: Any = error.details
    half = limit // 2
    if len(_json.encode(details)) > half:
        details = {"cut": cut(_json.encode(details).decode(), half)}
    return {"kind": error.kind, "message": cut(error.message, half), "details": details}
