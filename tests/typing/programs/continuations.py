"""A handler that asks and continues: ``Ask`` stays part of its return type, and any JSON value is a state."""

from __future__ import annotations

from typing import Any, assert_type

from holdfast import Ask, Call, tool


@tool
def rebook(day: str, call: Call) -> str | Ask:
    """Move a booking, for a fee that the passenger agrees to."""
    assert_type(call.answers, tuple[Any, ...])
    assert_type(call.state, Any)
    if not call.answers:
        return Ask(f"{day} costs 40. Go ahead?", choices=["yes", "no"], resume={"fee": 40})
    return f"charged {call.state['fee']}"


assert_type(rebook("Sunday", Call()), str | Ask)
assert_type(rebook("Sunday", Call(answers=["yes"], state={"fee": 40})), str | Ask)
assert Ask("Well?", resume=None).continues
assert not Ask("Well?").continues
