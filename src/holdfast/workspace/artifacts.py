"""read_artifact: page through output, diffs and old contents that were too long for a result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from holdfast.errors import ToolError
from holdfast.tools.call import Call
from holdfast.tools.declare import Tool

if TYPE_CHECKING:
    from holdfast.workspace.limits import Limits

MAX_CHARACTER = 4
"""Bytes of the longest character in UTF-8."""

Offset = Annotated[int, msgspec.Meta(ge=0)]
Size = Annotated[int, msgspec.Meta(ge=1)]


def artifact_tools(limits: Limits) -> list[Tool]:
    """Return the tool read_artifact, which runs in every mode."""

    async def read_artifact(
        sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")],
        call: Call,
        offset: Offset = 0,
        limit: Size = limits.read_bytes,
    ) -> dict[str, Any]:
        """Read a part of a result that was cut: the whole output of a command, a long diff.

        sha256:  the artifact that the result names
        offset:  the first byte; pass next_offset to read on
        limit:   the largest number of bytes
        """
        raw = await call.read_artifact(sha256)
        if raw is None:
            raise ToolError("not_found", f"this conversation has no artifact {sha256}; use one that a result names")
        return read_page(raw, offset, min(limit, limits.read_bytes))

    return [Tool.declare(name="read_artifact", handler=read_artifact, recovery="redispatch")]


def read_page(raw: bytes, offset: int, limit: int) -> dict[str, Any]:
    """Return a page of text. Pages that follow each other by next_offset show every byte once."""
    page: dict[str, Any] = {"total_bytes": len(raw), "offset": offset}
    if offset >= len(raw):
        return page | {"text": "", "note": f"offset {offset} is past the end: there are {len(raw):,} bytes"}
    end = min(len(raw), offset + limit)
    if end < len(raw):
        end = _character_start(raw, end, offset)
    text = raw[offset:end].decode(errors="replace")
    page["text"] = text
    if "\ufffd" in text and "\ufffd".encode() not in raw[offset:end]:
        page["replaced"] = "bytes that are not UTF-8 are shown as \ufffd"
    if end < len(raw):
        page["next_offset"] = end
    return page


def _character_start(raw: bytes, end: int, offset: int) -> int:
    """Return the last start of a character at or before ``end``, if one is near."""
    for start in range(end, max(offset, end - MAX_CHARACTER), -1):
        if raw[start] & 0xC0 != 0x80:
            return start
    return end
