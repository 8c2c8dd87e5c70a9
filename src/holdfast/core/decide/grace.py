"""Grace windows: the time between an approval and the run, in which the approval can be taken back.

The approval is in the log at once, with the end of its window. The call stays suspended meanwhile, so its entry in the
index of pending calls wakes any process when the window ends, as a deadline does. The log decides what came first: an
approval can be taken back until GraceEnded is in the log, also if no process ran when the window ended.
"""

from __future__ import annotations

from holdfast.core.decide.draft import Draft
from holdfast.core.decide.gate import record_grant
from holdfast.core.decisions import Approve, Principal, Vote
from holdfast.core.events import ApprovalTakenBack, CallResolved, CallSuspended, GraceEnded
from holdfast.core.state import CallState
from holdfast.errors import Stale


def window_end(log: Draft, suspension: CallSuspended) -> float | None:
    """Return when a call that is approved now may run; None: at once."""
    return log.now + suspension.grace if suspension.grace else None


def require_window(log: Draft, call_id: str) -> tuple[CallState, CallSuspended, CallResolved]:
    """Return a call whose approval can be taken back, its suspension and the approval; raise Stale otherwise."""
    turn = log.state.turn
    call = turn.calls.get(call_id) if turn else None
    if turn is None or call is None:
        raise Stale(f"no call {call_id!r} is waiting in conversation {log.state.conversation!r}", reason="unknown")
    if turn.cancelling or turn.halt is not None:
        raise Stale(f"call {call_id!r} is being cancelled", reason="cancelled")
    if call.window is None or call.suspension is None:
        if call.suspension is not None:
            raise Stale(f"call {call_id!r} waits: it has no approval that could be taken back", reason="phase")
        if call.winner is None:
            raise Stale(f"call {call_id!r} is {call.phase}: it has no approval to take back", reason="phase")
        words = {"ready": "is about to run", "running": "has started", "done": "is over"}.get(call.phase, call.phase)
        raise Stale(
            f"call {call_id!r} {words}: what {call.winner} has decided cannot be taken back any more",
            reason="resolved",
            winner=call.winner,
        )
    return call, call.suspension, call.window


def approved_error(call: CallState, window: CallResolved) -> Stale:
    """Return the error for a decision about a call that is approved already and has not started."""
    return Stale(
        f"call {call.made.id!r} was approved by {window.by.id} and has not started; "
        "to decide otherwise, take the approval back first",
        reason="resolved",
        winner=window.by.id,
        details={"starts_at": window.starts_at},
    )


def take_back(log: Draft, call_id: str, by: Principal, on_behalf_of: Principal | None) -> None:
    """Append that an approval was taken back. The time since the approval is added to the deadline.

    Of several votes one is withdrawn: that of the principal who takes it back, else the last. The others still count.
    """
    call, suspension, window = require_window(log, call_id)
    vote = _withdrawn_vote(call.wait.votes, by)
    log.add(
        ApprovalTakenBack,
        by,
        call_id=call_id,
        suspension=suspension.seq,
        approval=window.seq,
        deadline=suspension.deadline + max(0.0, log.now - window.at),
        vote=vote.seq if vote is not None else None,
        on_behalf_of=on_behalf_of,
    )


def _withdrawn_vote(votes: tuple[Vote, ...], by: Principal) -> Vote | None:
    return next((vote for vote in votes if by.id in vote.people), votes[-1] if votes else None)


def end_window(log: Draft, call_id: str) -> None:
    """Append the end of a window that has passed, and the grant of an approval that is remembered."""
    call, _, window = require_window(log, call_id)
    if window.starts_at is not None and log.now < window.starts_at:
        raise Stale("the grace window has not passed", reason="phase")
    log.add(
        GraceEnded,
        call_id=call_id,
        approval=window.seq,
        approver=window.by,
        on_behalf_of=window.on_behalf_of,
    )
    if isinstance(window.decision, Approve):
        record_grant(log, call, window.decision, window.by, window.on_behalf_of)
