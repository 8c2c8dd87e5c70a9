"""A tool that computes a quote, shows it, and charges after a yes.

Run `holdfast run rebooking:agent "Move booking 7 to Sunday"`. It prints the question, and the command that
answers it. The process may die at any moment: the answers and the quote are in the log.
"""

import json
from pathlib import Path

from holdfast import Agent, Ask, Call, ScriptedModel, ToolCall, tool

PAYMENTS = Path("payments.jsonl")


def quote(day: str) -> int:
    """Return the fee in euros: in a real program, the price that the airline asks for now."""
    return 40 if day == "Sunday" else 25


def charge(key: str, fee: int, way: str) -> None:
    """Charge the fee once per key, as a payment provider with idempotency keys does."""
    paid = PAYMENTS.read_text().splitlines() if PAYMENTS.exists() else []
    if not any(json.loads(line)["key"] == key for line in paid):
        with PAYMENTS.open("a") as file:
            file.write(json.dumps({"key": key, "fee": fee, "way": way}) + "\n")


@tool
def rebook(number: int, day: str, call: Call) -> str | Ask:
    """Move a booking to another day, for a fee that the passenger agrees to."""
    match call.answers:
        case ():
            fee = quote(day)
            question = f"Moving booking {number} to {day} costs {fee} euros. Go ahead?"
            return Ask(question, choices=["yes", "no"], resume={"fee": fee})
        case ("yes",):
            return Ask("How do you want to pay?", choices=["card", "invoice"], resume=call.state)
        case ("yes", way):
            charge(call.key, call.state["fee"], way)  # the fee that the passenger saw, not a new quote
            return f"booking {number} is on {day}; {call.state['fee']} euros by {way}"
        case _:
            return "the passenger does not agree to the fee; nothing has changed"


move = ToolCall("rebook", {"number": 7, "day": "Sunday"})
agent = Agent("rebooking", model=ScriptedModel([[move], "Booking 7 is on Sunday."], follow=True), tools=[rebook])
