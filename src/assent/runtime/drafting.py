"""What the inputs that wait lead to, all of it in one append: with the next moves of the owner that need no work."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from assent.core import gate
from assent.core.draft import Draft
from assent.core.effects import CallModel, CloseTurn, Effect, RunPreview, RunTool, StartTurn
from assent.core.inputs import BeginTurn, Claim, Close, Input, ModelReplied
from assent.core.machine import decide_into
from assent.core.redaction import foreign_text
from assent.core.state import State
from assent.core.tool import ToolSpec
from assent.errors import AssentError, Refused
from assent.runtime import dispatch
from assent.runtime.inbox import Item, instead
from assent.runtime.slots import Need

if TYPE_CHECKING:
    from assent.runtime.conversation import Conversation

log = logging.getLogger("assent")


def drafted(conv: Conversation, items: list[Item]) -> tuple[Draft, dict[str, Need]]:
    """Decide these, one on top of the other; and the slots that were taken for it, by call."""
    draft = Draft(conv.state, conv.home.now())
    for item in items:
        start = len(draft.events)
        item.refusal = _try(conv, draft, item.input)
        if item.refusal is not None and not isinstance(item.refusal, Refused):
            report = instead(item.input, item.refusal)
            if report is not None:
                item.refusal = _try(conv, draft, report)
        item.events = draft.events[start:]
    return draft, _chase(conv, draft)


def give_back(conv: Conversation, held: dict[str, Need]) -> None:
    """It could not be appended: the slots are free again."""
    for need in held.values():
        conv.home.slots.give(*need)


def _try(conv: Conversation, draft: Draft, input: Input) -> AssentError | None:
    """Decide one input; whatever is wrong with it is its own affair."""
    mark = draft.mark()
    try:
        decide_into(draft, input, _specs(conv, draft.state) if type(input) is ModelReplied else {})
    except AssentError as refusal:
        draft.back(mark)
        return refusal
    except Exception as bug:
        draft.back(mark)
        log.exception("%s: %s could not be decided", conv.name, type(input).__name__)
        return AssentError(foreign_text(bug), kind="log_encode_failed")
    return None


def _specs(conv: Conversation, state: State) -> Mapping[str, ToolSpec]:
    agent = conv.home.agents.get(state.turn.agent) if state.turn else None
    return agent.hooks.marked(agent.tools.specs) if agent else {}


def _chase(conv: Conversation, draft: Draft) -> dict[str, Need]:
    """The owner's next moves that need no work: in the same append as what led to them."""
    held: dict[str, Need] = {}
    if conv.epoch is None or conv.home.closing:
        return held
    effects = conv.owed(draft.state)
    while (move := _move(conv, draft.state, effects)) is not None:
        decide_into(draft, move, {})
        effects = conv.owed(draft.state)
    _claim(conv, draft, effects, conv.epoch, held)
    return held


def _move(conv: Conversation, state: State, effects: frozenset[Effect]) -> Input | None:
    """Begin a turn, or close it."""
    for effect in effects:
        match effect:
            case StartTurn():
                name = state.queue[0].agent
                if conv.home.runs(conv.name, name):
                    agent = conv.home.agents[name]
                    return BeginTurn(steps=agent.steps, mode=agent.mode, limits=agent.limits)
            case CloseTurn():
                if conv.tasks.none:
                    partial = conv.partial
                    return Close(
                        text="".join(partial.text),
                        thinking="".join(partial.thinking),
                        attempts=partial.attempts,
                        stopped=conv.handlers_in("idle", "stopped"),
                        abandoned=conv.handlers_in("running"),
                    )
            case CallModel() | RunPreview() | RunTool():
                break  # a turn is under way
    return None


def _claim(conv: Conversation, draft: Draft, effects: frozenset[Effect], epoch: int, held: dict[str, Need]) -> None:
    """Every call that may run at once: one start has no say in whether another may, so all in one pass."""
    turn = draft.state.turn
    for call_id, call in turn.calls.items() if turn else ():
        if not dispatch.plain(call) or call.grant is not None:
            continue
        definition = dispatch.definition(conv, call)
        if gate.lapsed(draft.state, call, draft.now, definition):
            continue  # its plan may have to be made before somebody is asked again
        effect = RunTool(call_id)
        if effect not in effects or effect in conv.tasks:
            continue
        need = dispatch.need(conv, draft.state, call)
        if conv.home.slots.take(*need):
            held[call_id] = need
            decide_into(draft, Claim(call=call_id, epoch=epoch, definition=definition), {})
