"""The log as people read it: one line an event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

from rich.console import Console
from rich.table import Table
from rich.text import Text

from assent.cli.live import decided
from assent.cli.text import cut, ended, moment, shown, value_text
from assent.core.events import (
    AnyEvent,
    AssistantSaid,
    CallResolved,
    CallReturned,
    CallStarted,
    CallSuspended,
    CancelRequested,
    ConversationImported,
    ConversationOpened,
    GrantGiven,
    GrantRevoked,
    HistorySummarised,
    MessageReceived,
    OutputRejected,
    ResolutionRefused,
    TurnEnded,
    TurnStarted,
)
from assent.runtime.runtime import ConversationInfo

LONG = 500
STYLES = {"TurnEnded": "dim", "TurnStarted": "dim", "CallSuspended": "yellow", "CallResolved": "cyan"}


def print_event(out: Console, event: AnyEvent, tools: Mapping[str, str]) -> None:
    at = moment(event.at)
    # On a terminal a line is a line; elsewhere there is room, and --json has everything in any case.
    head = f"{event.seq:>5}  {at[5:] if out.width < 100 else at}  {cut(shown(event.by.id), 14):<14}  "
    room = max(20, out.width - len(head)) if out.is_terminal else LONG
    text = Text(head, style="dim")
    text.append(cut(shown(told(event, tools)), room), style=STYLES.get(event.type, ""))
    out.print(text, soft_wrap=True)


def told(event: AnyEvent, tools: Mapping[str, str]) -> str:
    """What happened; ``tools`` is call -> tool. Not escaped yet."""
    call_id: str = getattr(event, "call_id", "")
    call = f"{tools.get(call_id, '?')}({call_id})"
    match event:
        case ConversationOpened():
            return f"opened for agent {event.agent}"
        case MessageReceived():
            return f"said: {cut(event.text, LONG)}"
        case TurnStarted():
            return f"turn {event.turn} started" + (" (manual)" if event.mode == "manual" else "")
        case AssistantSaid():
            calls = ", ".join(f"{call.tool}({call.id})" for call in event.calls)
            words = [cut(event.text, LONG)] if event.text else []
            words += [f"calls {calls}"] if calls else []
            return f"assistant{f' ({early})' if (early := ended(event)) else ''}: {' — '.join(words)}"
        case OutputRejected():
            return f"answer rejected: {event.message}"
        case CallSuspended():
            return f"{call} waits: {event.kind}: {event.prompt}"
        case CallResolved():
            return f"{call} {decided(event)}"
        case CallStarted():
            return f"{call} started, attempt {event.attempt}" + (" (granted)" if event.grant else "")
        case CallReturned():
            if event.error is not None:
                return f"{call} failed: [{event.error.kind}] {event.error.message}"
            return f"{call} returned {cut(value_text(event.value), LONG)}"
        case CancelRequested():
            return f"turn {event.turn} cancelled" + (f": {event.reason}" if event.reason else "")
        case HistorySummarised():
            return f"history up to {event.upto} summarised"
        case TurnEnded():
            why = f": [{event.error.kind}] {event.error.message}" if event.error else ""
            value = f": {cut(value_text(event.value), LONG)}" if event.value not in (None, "") else ""
            return f"turn {event.turn} ended: {event.reason}{why or value}"
        case GrantGiven():
            return f"{call} allowed from now on ({event.scope}), grant {event.grant}"
        case GrantRevoked():
            return f"grant {event.grant} revoked"
        case ResolutionRefused():
            return f"{call} {event.decision.lower()} refused: {event.reason}"
        case ConversationImported():
            then = "it may go on here" if event.trusted else "without trust: nothing of it runs"
            return f"imported from {event.origin or 'a file'}; {then}"
        case _:
            assert_never(event)


def print_conversations(out: Console, infos: list[ConversationInfo]) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("conversation", "state", "agent"):
        table.add_column(name, overflow="fold")
    table.add_column("events", justify="right")
    table.add_column("updated")
    for info in infos:
        state = Text(info.state, style="yellow" if info.state == "awaiting_input" else "")
        table.add_row(
            Text(shown(info.conversation)),
            state,
            Text(shown(info.agent)),
            Text(str(info.seq)),
            Text(moment(info.updated)),
        )
    out.print(table)
