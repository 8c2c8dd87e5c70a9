"""Deputies: principals who decide for another principal during a period.

They are facts of the whole store, so they have a log of their own: a reserved conversation that takes no other input.
"""

from __future__ import annotations

from holdfast.core.decide.draft import Draft
from holdfast.core.events import ConversationOpened, DeputyEnded, DeputyNamed
from holdfast.core.inputs import EndDeputy, NameDeputy
from holdfast.errors import Invalid, NotAllowed, Stale

DEPUTIES = "holdfast:deputies"
"""The conversation with the log of deputies. Its name is refused to every other input."""


def check_conversation(conversation: str, *, deputies: bool) -> None:
    """Raise Invalid for another input to the log of deputies, or for one about deputies to a conversation."""
    if (conversation == DEPUTIES) != deputies:
        raise Invalid(
            f"deputies are named in {DEPUTIES!r}, not in conversation {conversation!r}"
            if deputies
            else f"{DEPUTIES!r} is the log of deputies, which is not a conversation: choose another id"
        )


def name_deputy(log: Draft, input: NameDeputy) -> None:
    if input.to == input.by.id:
        raise Invalid(f"{input.to!r} cannot be its own deputy: name another principal")
    if not input.until > log.now:
        raise Invalid("a deputy is named for a period that ends in the future: give a later `until`")
    if log.state.seq == 0:
        log.add(ConversationOpened, input.by, agent="")
    log.add(DeputyNamed, input.by, delegation=f"d{log.state.seq + 1}", deputy=input.to, until=input.until)


def end_deputy(log: Draft, input: EndDeputy) -> None:
    found = next((one for one in log.state.delegations if one.id == input.delegation), None)
    if found is None or log.now >= found.until:
        raise Stale(f"no delegation {input.delegation!r} is in force", reason="unknown")
    if input.by.id not in (found.principal.id, found.deputy):
        raise NotAllowed(f"{found.principal.id} named {found.deputy}: only these two may end it, not {input.by.id}")
    log.add(DeputyEnded, input.by, delegation=found.id)
