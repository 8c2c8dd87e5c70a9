"""Votes, more time, reminders and escalations: the events of a call that keeps waiting."""

from __future__ import annotations

import math
from typing import Any

from holdfast.core.decide.draft import Draft
from holdfast.core.decisions import Extend, Principal
from holdfast.core.events import CallEscalated, CallSuspended, DeadlineExtended, ReminderDue, VoteCast
from holdfast.core.state import next_reminder
from holdfast.core.tool import parse_duration
from holdfast.errors import Invalid, Stale


def add_vote(log: Draft, suspension: CallSuspended, by: Principal, on_behalf_of: Principal | None) -> bool:
    """Append the approval of one of several people; return whether it was the last that was missing.

    A person who approves twice counts once: the second approval appends nothing. A deputy and the principal for whom
    it votes count as one person, too.
    """
    votes = log.require_turn().calls[suspension.call_id].wait.votes
    if any(vote.by.id == by.id for vote in votes):
        return False
    people = {by.id} if on_behalf_of is None else {by.id, on_behalf_of.id}
    for vote in votes:
        if twice := people & vote.people:
            raise Stale(
                f"{vote.by.id} has already approved call {suspension.call_id!r} for {', '.join(twice)}: it counts once",
                reason="resolved",
                winner=vote.by.id,
            )
    missing = suspension.approvers - len(votes) - 1
    log.add(
        VoteCast,
        by,
        call_id=suspension.call_id,
        suspension=suspension.seq,
        digest=suspension.digest,
        missing=missing,
        on_behalf_of=on_behalf_of,
    )
    return missing == 0


def check_extension(log: Draft, suspension: CallSuspended, decision: Extend) -> None:
    """Raise Invalid, with the legal range, for a deadline that the call cannot be given."""
    until, limit = _new_deadline(log, decision), suspension.extend_until
    label = f"Extend for {suspension.tool}"
    if limit is None:
        raise Invalid(f"{label}: its deadline cannot be extended")
    details = {"deadline": suspension.deadline, "extend_until": limit}
    if until <= suspension.deadline:
        raise Invalid(
            f"{label}: its deadline is already later than that; a deadline can only be postponed", details=details
        )
    if until > limit:
        over = format(until - limit, ".0f")
        raise Invalid(
            f"{label}: that is {over} s later than its tool allows; the latest deadline is {limit:.0f} (Unix time)",
            details=details,
        )


def extend_deadline(
    log: Draft, suspension: CallSuspended, decision: Extend, by: Principal, on_behalf_of: Principal | None
) -> None:
    """Append the new deadline of a waiting call."""
    until, seq = _new_deadline(log, decision), suspension.seq
    log.add(DeadlineExtended, by, call_id=suspension.call_id, suspension=seq, until=until, on_behalf_of=on_behalf_of)


def _new_deadline(log: Draft, decision: Extend) -> float:
    until: Any = decision.until
    if isinstance(until, str):
        return log.now + parse_duration(until)
    if isinstance(until, bool) or not isinstance(until, int | float) or not math.isfinite(until):
        raise Invalid(f'Extend takes a time in seconds since the Unix epoch, or a duration such as "2d", not {until!r}')
    return float(until)


def apply_timer(log: Draft, suspension: CallSuspended) -> None:
    """Append the escalation and the reminder that are due now. Of several overdue reminders only the last is given."""
    call = log.require_turn().calls[suspension.call_id]
    acted = False
    if suspension.escalate_at is not None and not call.wait.escalated and log.now >= suspension.escalate_at:
        log.add(CallEscalated, call_id=suspension.call_id, suspension=suspension.seq, to=suspension.escalate_to)
        acted = True
    due: float | None = None
    while (reminder := next_reminder(call, after=due)) is not None and log.now >= reminder[0]:
        due = reminder[1]
    if due is not None:
        log.add(ReminderDue, call_id=suspension.call_id, suspension=suspension.seq, before=due)
        acted = True
    if not acted:
        raise Stale("no reminder or escalation is due", reason="phase")
