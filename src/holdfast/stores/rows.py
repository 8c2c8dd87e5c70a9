"""The rows of SQL tables as values: the same columns, in the same order, in SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.stores.base import GrantRow, OutboxRow

OUTBOX_COLUMNS = ("id", "channel", "conversation", "seq", "kind", "at", "due", "attempts", "error", "failed")
"""The columns of ``outbox`` that ``to_outbox_row`` takes."""
GRANT_COLUMNS = ("conversation", "grant_id", "tool", "user_id", "until", "body")
"""The columns of ``shared_grants`` that ``to_grant_row`` takes."""


def to_outbox_row(values: Sequence[Any]) -> OutboxRow:
    """Return the row that has these values of ``OUTBOX_COLUMNS``."""
    id, channel, conversation, seq, kind, at, due, attempts, error, failed = values
    return OutboxRow(
        id=id,
        channel=channel,
        conversation=conversation,
        seq=seq,
        kind=kind,
        at=at,
        due=due,
        attempts=attempts,
        error=error,
        failed=bool(failed),  # SQLite stores 0 or 1
    )


def to_grant_row(values: Sequence[Any]) -> GrantRow:
    """Return the row that has these values of ``GRANT_COLUMNS``."""
    conversation, grant, tool, user, until, body = values
    return GrantRow(conversation=conversation, grant=grant, tool=tool, user=user, until=until, body=body)
