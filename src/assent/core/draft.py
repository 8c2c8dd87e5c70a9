"""Events as they are decided, each stamped and folded at once, so that the next one builds on it."""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar, cast

from assent.core import codec
from assent.core.decisions import SYSTEM, Principal
from assent.core.events import VERSION, AnyEvent, CallReturned, ErrorInfo, Event, Source
from assent.core.results import sized
from assent.core.state import CallState, State, TurnState, evolve
from assent.errors import Stale

E = TypeVar("E", bound=Event)


class Draft:
    """What inputs lead to: events and their bytes, the state after each and after all, and their artifacts.

    An event is encoded here, once: one that cannot be is the refusal of the very input that led to it.
    """

    __slots__ = ("artifacts", "bodies", "events", "now", "state", "states")

    def __init__(self, state: State, now: float):
        self.state, self.now = state, now
        self.events: list[AnyEvent] = []
        self.bodies: list[bytes] = []
        self.states: list[State] = []
        self.artifacts: list[tuple[str, bytes]] = []

    def mark(self) -> tuple[State, int, int]:
        """Where to go back to if the next input is refused."""
        return self.state, len(self.events), len(self.artifacts)

    def back(self, mark: tuple[State, int, int]) -> None:
        self.state, events, artifacts = mark
        del self.events[events:], self.bodies[events:], self.states[events:], self.artifacts[artifacts:]

    def add(self, kind: type[E], by: Principal = SYSTEM, /, **fields: Any) -> E:
        event = kind(seq=self.state.seq + 1, at=self.now, by=by, v=VERSION, **fields)
        self.take(cast("AnyEvent", event))
        return event

    def take(self, event: AnyEvent) -> None:
        """One more event, as it is."""
        self.bodies.append(codec.encode(event))
        self.events.append(event)
        self.state = evolve(self.state, event)
        self.states.append(self.state)

    def keep(self, raw: bytes) -> str:
        """Bytes that stand beside the log, under their SHA-256."""
        sha256 = hashlib.sha256(raw).hexdigest()
        self.artifacts.append((sha256, raw))
        return sha256

    def turn(self) -> TurnState:
        if self.state.turn is None:
            raise Stale("no turn is open", reason="phase")
        return self.state.turn

    def returned(
        self,
        call: CallState,
        *,
        value: Any = None,
        data: Any = None,
        error: ErrorInfo | None = None,
        by: Principal = SYSTEM,
        source: Source = "server",
        **fields: Any,
    ) -> None:
        """The call's one result; what is too big for an event goes into an artifact."""
        ran = call.attempt > 0 or source in ("client", "manual")
        value, artifact, size = self._kept(value)
        data, data_artifact, data_size = self._kept(data)
        if data_artifact is not None:
            data = {"artifact": data_artifact, "size": data_size}
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
            edited=call.args if call.edited and ran else None,
            **fields,
        )

    def _kept(self, value: Any) -> tuple[Any, str | None, int | None]:
        if value is None:
            return None, None, None
        inline, sha256, size, raw = sized(value)
        if sha256 is not None and raw is not None:
            self.artifacts.append((sha256, raw))
        return inline, sha256, size
