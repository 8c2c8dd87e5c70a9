"""``Draft``: the events that ``decide`` is about to append. Each is folded into the state before the next is added."""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar, cast

from holdfast.core import codec
from holdfast.core.decisions import SYSTEM, Principal
from holdfast.core.events import AnyEvent, CallReturned, ErrorInfo, Event, Source
from holdfast.core.inputs import Kept
from holdfast.core.results import MODEL_LIMIT, split_large_value
from holdfast.core.state import CallState, Grant, State, TurnState, evolve
from holdfast.core.tool import Artifact
from holdfast.errors import Stale

E = TypeVar("E", bound=Event)


class Draft:
    """New events with their encoded bytes, the state after each of them, and their artifacts.

    Events are encoded here, once, so that an event that cannot be encoded refuses the input that caused it.
    """

    __slots__ = ("artifacts", "bodies", "events", "now", "shared", "state", "states")

    def __init__(self, state: State, now: float):
        self.state, self.now = state, now
        self.events: list[AnyEvent] = []
        self.bodies: list[bytes] = []
        self.states: list[State] = []
        self.artifacts: list[tuple[str, bytes]] = []
        self.shared: tuple[Grant, ...] = ()
        """Grants of other conversations that may cover calls of the input that is being decided."""

    def mark(self) -> tuple[State, int, int]:
        """Return a mark for ``roll_back``, taken before an input that may be refused."""
        return self.state, len(self.events), len(self.artifacts)

    def roll_back(self, mark: tuple[State, int, int]) -> None:
        self.state, events, artifacts = mark
        del self.events[events:], self.bodies[events:], self.states[events:], self.artifacts[artifacts:]

    def add(self, kind: type[E], by: Principal = SYSTEM, /, **fields: Any) -> E:
        event = kind(seq=self.state.seq + 1, at=self.now, by=by, v=kind.VERSION, **fields)
        self.add_event(cast("AnyEvent", event))
        return event

    def add_event(self, event: AnyEvent) -> None:
        """Append a complete event and fold it into the state."""
        self.bodies.append(codec.encode_event(event))
        self.events.append(event)
        self.state = evolve(self.state, event)
        self.states.append(self.state)

    def add_artifact(self, raw: bytes) -> str:
        """Store bytes beside the log and return their SHA-256, which is their key."""
        sha256 = hashlib.sha256(raw).hexdigest()
        self.artifacts.append((sha256, raw))
        return sha256

    def add_kept(self, kept: tuple[Kept, ...]) -> tuple[Artifact, ...]:
        """Store the bytes that a tool's function kept; return the references for the event that names them."""
        self.artifacts.extend({item.reference.sha256: item.content for item in kept}.items())
        return tuple(item.reference for item in kept)

    def require_turn(self) -> TurnState:
        if self.state.turn is None:
            raise Stale("no turn is open", reason="phase")
        return self.state.turn

    def add_result(
        self,
        call: CallState,
        *,
        value: Any = None,
        data: Any = None,
        error: ErrorInfo | None = None,
        by: Principal = SYSTEM,
        source: Source = "server",
        kept: tuple[Kept, ...] = (),
        **fields: Any,
    ) -> None:
        """Append the call's result; a value that is too large for an event becomes an artifact."""
        ran = call.attempt > 0 or source in ("client", "manual")
        value, artifact, size = self._store_value(value, call.made.result_bytes or MODEL_LIMIT)
        data, data_artifact, data_size = self._store_value(data)
        artifacts = self.add_kept(kept)
        if data_artifact is not None and data_size is not None:
            data = {"artifact": data_artifact, "size": data_size}
            artifacts = (*artifacts, Artifact(data_artifact, data_size, "application/json", "data"))
        self.add(
            CallReturned,
            by,
            call_id=call.made.id,
            tool=call.made.tool,
            ok=error is None,
            value=value,
            data=data,
            error=error,
            artifact=artifact,
            size=size,
            source=source,
            artifacts=artifacts,
            edited=call.args if call.edited and ran else None,
            **fields,
        )

    def _store_value(self, value: Any, limit: int = MODEL_LIMIT) -> tuple[Any, str | None, int | None]:
        if value is None:
            return None, None, None
        inline, sha256, size, raw = split_large_value(value, limit)
        if sha256 is not None and raw is not None:
            self.artifacts.append((sha256, raw))
        return inline, sha256, size
