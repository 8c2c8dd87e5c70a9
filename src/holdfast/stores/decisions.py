"""The SQL of the index of decisions: the same table, columns and statement in SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.stores.base import DecisionFilter, DecisionPosition, DecisionRow

DECISION_COLUMNS = ("conversation", "seq", "at", "kind", "by_id", "behalf_id", "tool", "call", "suspension")
"""The columns of ``decisions`` that ``to_decision_row`` takes."""
_COLUMNS = ", ".join(DECISION_COLUMNS)
_ORDER = "ORDER BY at DESC, conversation DESC, seq DESC"


def to_decision_row(values: Sequence[Any]) -> DecisionRow:
    """Return the row that has these values of ``DECISION_COLUMNS``."""
    conversation, seq, at, kind, by, behalf, tool, call, suspension = values
    return DecisionRow(
        conversation=conversation,
        seq=seq,
        at=at,
        kind=kind,
        by=by,
        on_behalf_of=behalf,
        tool=tool,
        call=call,
        suspension=suspension,
    )


def decision_values(row: DecisionRow) -> tuple[Any, ...]:
    """Return the values of ``DECISION_COLUMNS``."""
    return (
        row.conversation,
        row.seq,
        row.at,
        row.kind,
        row.by,
        row.on_behalf_of,
        row.tool,
        row.call,
        row.suspension,
    )


def select_decisions(
    wanted: DecisionFilter, after: DecisionPosition | None, limit: int, mark: str
) -> tuple[str, list[Any]]:
    """Return the statement that lists decisions, and its parameters; ``mark``: what begins a parameter, ``?`` or ``$``.

    Decisions of a principal are two lists, its own and those of its deputies: each has an index in the list's order,
    and one condition with OR would have none.
    """
    values: list[Any] = []

    def bind(value: Any) -> str:
        values.append(value)
        return f"{mark}{len(values)}"

    conditions: list[str] = []
    if wanted.tool is not None:
        conditions.append(f"tool = {bind(wanted.tool)}")
    if wanted.conversation is not None:
        conditions.append(f"conversation = {bind(wanted.conversation)}")
    if wanted.kinds:
        conditions.append(f"kind IN ({', '.join(map(bind, wanted.kinds))})")
    if wanted.since is not None:
        conditions.append(f"at >= {bind(wanted.since)}")
    if wanted.until is not None:
        conditions.append(f"at < {bind(wanted.until)}")
    if after is not None:
        position = ", ".join(map(bind, (after.at, after.conversation, after.seq)))
        conditions.append(f"(at, conversation, seq) < ({position})")
    end = f"{_ORDER} LIMIT {bind(limit)}"
    if wanted.who is None:
        where = f"WHERE {' AND '.join(conditions)} " if conditions else ""
        return f"SELECT {_COLUMNS} FROM decisions {where}{end}", values
    who = bind(wanted.who)
    own, others = (
        f"SELECT {_COLUMNS} FROM decisions WHERE {' AND '.join([*conditions, condition])} {end}"
        for condition in (f"by_id = {who}", f"behalf_id = {who} AND by_id <> {who}")
    )
    return f"SELECT * FROM ({own}) AS own UNION ALL SELECT * FROM ({others}) AS others {end}", values
