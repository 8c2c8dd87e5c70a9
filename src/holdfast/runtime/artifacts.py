"""Read the artifacts of a conversation: bytes beside its log, which only a reader of that log may read."""

from __future__ import annotations

import asyncio
import re

from holdfast.core import codec
from holdfast.core.artifacts import call_artifacts
from holdfast.core.tool import Artifact
from holdfast.errors import StoreDamaged
from holdfast.stores.base import LogStore

PAGE = 100
"""Events per read; one event may have several megabytes."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


async def find_artifact(store: LogStore, conversation: str, sha256: str) -> Artifact | None:
    """Return the newest reference of this conversation's calls to an artifact; None if its log names no such one.

    The log is searched backwards, a page at a time: an artifact is mostly read soon after it was made. Only events that
    contain the hash as text are decoded. There is no index, so an old artifact of a long log costs a read of that log.
    """
    row = await store.row(conversation) if _SHA256.fullmatch(sha256) else None
    end = row.seq + 1 if row else 1
    needle = sha256.encode()
    while end > 1:
        start = max(0, end - 1 - PAGE)
        for body in reversed(await store.read(conversation, after=start, before=end, limit=PAGE)):
            if needle in body:
                for reference in call_artifacts(codec.decode_event(body)):
                    if reference.sha256 == sha256:
                        return reference
        end = start + 1
        await asyncio.sleep(0)  # a store in memory never waits, and would block the event loop
    return None


async def load_artifact(store: LogStore, conversation: str, reference: Artifact) -> bytes:
    """Return the bytes of a reference that ``find_artifact`` has found."""
    content = await store.artifact(reference.sha256)
    if content is None:
        raise StoreDamaged(f"artifact {reference.sha256}, which conversation {conversation!r} names, is missing")
    return content


async def read_artifact(store: LogStore, conversation: str, sha256: str) -> bytes | None:
    """Return the bytes of an artifact of this conversation's calls; None if its log names no such one."""
    reference = await find_artifact(store, conversation, sha256)
    return None if reference is None else await load_artifact(store, conversation, reference)
