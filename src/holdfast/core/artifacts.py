"""The artifacts that events name: bytes beside the log, which are stored in the append of the event that names them."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.core.events import AnyEvent, AssistantSaid, CallReturned, CallStarted, CallSuspended
from holdfast.core.results import INLINE_LIMIT
from holdfast.core.tool import Artifact


def artifacts_of(event: AnyEvent) -> Iterator[str]:
    """Yield the SHA-256 of every artifact that an event names: an export, a copy and a check need them all."""
    for reference in call_artifacts(event):
        yield reference.sha256
    if isinstance(event, CallReturned):
        match event.data:  # a tool could return data of this shape, but hardly with such a size
            case {"artifact": str(name), "size": int(size)} if size > INLINE_LIMIT and len(name) == 64:
                yield name
            case _:
                pass
    elif isinstance(event, AssistantSaid):
        match event.context:
            case {"request": str(name)}:
                yield name
            case _:
                pass


def call_artifacts(event: AnyEvent) -> Iterator[Artifact]:
    """Yield the references to a call's artifacts: those that its functions kept, and its result if that is one.

    These are the artifacts that a reader of the conversation may read. A recorded request is not among them, because it
    contains the agent's instructions. Data that only looks like a reference is not either: a tool could name another
    conversation's artifact.
    """
    if isinstance(event, CallReturned | CallSuspended | CallStarted):
        yield from event.artifacts
    if isinstance(event, CallReturned) and event.artifact is not None:
        yield Artifact(event.artifact, event.size or 0, "application/json")
