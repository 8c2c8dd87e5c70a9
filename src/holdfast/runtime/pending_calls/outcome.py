"""What became of a call after a decision: it runs, has ended, or waits again."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import msgspec

from holdfast.core.decisions import PAST_TENSE, SYSTEM, Detached, Expired, Pending, name_decider, split_suspension
from holdfast.core.events import ApprovalTakenBack, AssistantSaid, CallMade, CallResolved, CallReturned, ErrorInfo
from holdfast.core.state import State, open_suspensions, pending_of
from holdfast.errors import NotFound
from holdfast.runtime.engine import Engine
from holdfast.runtime.event_log import read_events
from holdfast.runtime.view import wait_until

PAGE = 200
"""Events per read when the log is searched backwards."""

CallStatus = Literal["waiting", "approved", "running", "done", "failed"]


class CallOutcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What has become of a call so far."""

    conversation: str
    call: str
    tool: str
    status: CallStatus
    """``waiting`` for a decision; ``approved``, but its grace window has not passed; ``running`` or about to; ``done``
    with a result; ``failed`` with an error, also if it was denied, expired or was cancelled."""
    decision: str | None = None
    """The last decision as a past participle: "approved", "denied", "expired", ...; None: there was none yet."""
    by: str | None = None
    """Who took it: "bob", or "bob for ada" for a deputy."""
    value: Any = None
    """The result that the model sees."""
    error: ErrorInfo | None = None
    """The error of a call that has failed."""
    pending: Pending | None = None
    """The call as it waits now. Its ``reason`` says why it waits again after a decision, such as "plan changed"."""

    @property
    def final(self) -> bool:
        """Whether the call has its result."""
        return self.status in ("done", "failed")


async def find_outcome(engine: Engine, conversation: str, name: str, timeout: float | None) -> CallOutcome:
    """Return what became of a call, once it has ended or waits for a decision; see ``Runtime.outcome``."""
    call, _ = split_suspension(name)

    def is_settled(state: State) -> bool:
        found = state.turn.calls.get(call) if state.turn else None
        waits = found is not None and found.suspension is not None and found.window is None
        return found is None or found.phase == "done" or waits

    conv = await engine.load_conversation(conversation)
    await conv.ensure_latest()
    state = conv.state
    if timeout != 0 and not is_settled(state):
        try:
            async with asyncio.timeout(timeout):
                state = await wait_until(engine, conversation, is_settled)
        except TimeoutError:
            state = (await engine.load_conversation(conversation)).state
    return await _read_outcome(engine, state, call)


async def _read_outcome(engine: Engine, state: State, call: str) -> CallOutcome:
    """Return the outcome in this state. The log is read backwards up to the reply that made the call."""
    returned: CallReturned | None = None
    resolved: CallResolved | None = None
    taken_back: set[int] = set()
    end = state.seq
    while end > 0:
        page = await read_events(engine.store, state.conversation, after=max(end - PAGE, 0), before=end + 1)
        for event in reversed(page):
            match event:
                case CallReturned() if event.call_id == call:
                    returned = event
                case ApprovalTakenBack() if event.call_id == call:
                    taken_back.add(event.approval)
                case CallResolved() if event.call_id == call and event.seq not in taken_back:
                    resolved = resolved or event
                case AssistantSaid() if made := next((made for made in event.calls if made.id == call), None):
                    return _describe(state, made, returned, resolved)
                case _:
                    pass
        end -= PAGE
    raise NotFound(f"no call {call!r} in conversation {state.conversation!r}")


def _describe(
    state: State, made: CallMade, returned: CallReturned | None, resolved: CallResolved | None
) -> CallOutcome:
    waiting = None if returned is not None else open_suspensions(state).get(made.id)
    pending = pending_of(state, waiting) if waiting is not None else None
    status: CallStatus = "running"
    if returned is not None:
        status = "done" if returned.ok else "failed"
    elif pending is not None:
        status = "waiting" if pending.starts_at is None else "approved"
    return CallOutcome(
        conversation=state.conversation,
        call=made.id,
        tool=made.tool,
        status=status,
        decision=None if resolved is None else _past_tense(resolved),
        by=None if resolved is None or resolved.by == SYSTEM else name_decider(resolved.by, resolved.on_behalf_of),
        value=returned.value if returned is not None and returned.ok else None,
        error=returned.error if returned is not None else None,
        pending=pending,
    )


def _past_tense(resolved: CallResolved) -> str:
    words = PAST_TENSE | {Expired: "expired", Detached: "detached"}
    return words[type(resolved.decision)]
