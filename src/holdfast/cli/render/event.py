"""Render events, messages and the list of conversations as lines of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.cli.render.console import DETAIL_CHARS
from holdfast.cli.render.text import (
    describe_coverage,
    describe_finish,
    describe_scope,
    ellipsize,
    escape_control_characters,
    format_duration,
    format_time,
    value_text,
)
from holdfast.cli.render.workspace import Line, checklist_lines, describe_image
from holdfast.core.decisions import (
    Answer,
    Approve,
    ClientResult,
    Decision,
    Deny,
    Detached,
    Expired,
    Extend,
    Failed,
    Recorded,
    Submit,
    TakeBack,
    name_decider,
)
from holdfast.core.events import (
    AnyEvent,
    ApprovalTakenBack,
    AsideAnswered,
    AssistantSaid,
    CallEscalated,
    CallResolved,
    CallReturned,
    CallStarted,
    CallSuspended,
    CancelRequested,
    ConversationArchived,
    ConversationImported,
    ConversationOpened,
    ConversationRenamed,
    DeadlineExtended,
    DeputyEnded,
    DeputyNamed,
    GraceEnded,
    GrantGiven,
    GrantRevoked,
    HistorySummarised,
    MessageReceived,
    OutputRejected,
    ReminderDue,
    ResolutionRefused,
    TurnEnded,
    TurnStarted,
    Usage,
    VoteCast,
)
from holdfast.core.state import Grant
from holdfast.core.transcript import AssistantMessage, Message, ToolResult, UserMessage
from holdfast.runtime.runtime import ConversationInfo

MAX_CHARS = 500
STYLES = {"TurnEnded": "dim", "TurnStarted": "dim", "CallSuspended": "yellow", "CallResolved": "cyan"}
MESSAGE_CHARS = 2000


def print_event(out: Console, event: AnyEvent, tools: Mapping[str, str]) -> None:
    at = format_time(event.at)
    # Lines are cut to the terminal's width; --json has the whole events.
    by = ellipsize(escape_control_characters(event.by.id), 14)
    head = f"{event.seq:>5}  {at[5:] if out.width < 100 else at}  {by:<14}  "
    room = max(20, out.width - len(head)) if out.is_terminal else MAX_CHARS
    text = Text(head, style="dim")
    text.append(
        ellipsize(escape_control_characters(describe_event(event, tools)), room), style=STYLES.get(event.type, "")
    )
    out.print(text, soft_wrap=True)
    for line in checklist_lines(event.data) or [] if isinstance(event, CallReturned) else []:
        out.print(_checklist_text(line, len(head), room), soft_wrap=True)


def _checklist_text(line: Line, indent: int, room: int) -> Text:
    parts = [(part, "") if isinstance(part, str) else part for part in line]
    escaped = [(ellipsize(escape_control_characters(words), room), style) for words, style in parts]
    return Text.assemble(" " * indent, *escaped)


def describe_event(event: AnyEvent, tools: Mapping[str, str]) -> str:
    """Describe an event; ``tools`` maps calls to tools. The result is not escaped."""
    call_id: str = getattr(event, "call_id", "")
    call = f"{tools.get(call_id, '?')}({call_id})"
    match event:
        case ConversationOpened():
            return f"opened for agent {event.agent}"
        case MessageReceived(aside=True):
            return f"asked aside: {ellipsize(event.text, MAX_CHARS)}"
        case AsideAnswered():
            why = f"[{event.error.kind}] {event.error.message}" if event.error else ""
            words = [ellipsize(event.text, MAX_CHARS)] if event.text else []
            return (
                f"aside {event.message} {'failed' if why else 'answered'}: {' — '.join([*words, *filter(None, [why])])}"
            )
        case MessageReceived():
            return f"said: {ellipsize(event.text, MAX_CHARS)}"
        case TurnStarted():
            return f"turn {event.turn} started" + (" (manual)" if event.mode == "manual" else "")
        case AssistantSaid():
            calls = ", ".join(f"{call.tool}({call.id})" for call in event.calls)
            words = [ellipsize(event.text, MAX_CHARS)] if event.text else []
            words += [f"calls {calls}"] if calls else []
            return f"assistant{f' ({early})' if (early := describe_finish(event)) else ''}: {' — '.join(words)}"
        case OutputRejected(aside=int()):
            return f"answer to aside {event.aside} rejected: {event.message}"
        case OutputRejected():
            return f"answer rejected: {event.message}"
        case CallSuspended():
            return f"{call} waits: {event.kind}: {event.prompt}"
        case VoteCast():
            left = f"; {event.missing} more must approve" if event.missing else ""
            return f"{call} approved by {describe_decider(event)}{left}"
        case DeadlineExtended():
            return f"{call} extended to {format_time(event.until)} by {describe_decider(event)}"
        case ReminderDue():
            return f"{call} reminder: {format_duration(event.before)} left"
        case CallEscalated():
            return f"{call} escalated to {', '.join(event.to)}"
        case CallResolved():
            grace = f"; it can be taken back until {format_time(event.starts_at)}" if event.starts_at else ""
            return f"{call} {describe_resolution(event)}{grace}"
        case ApprovalTakenBack():
            return f"{call} waits again: {describe_decider(event)} took the approval back"
        case GraceEnded():
            return f"{call} may run: the approval can no longer be taken back"
        case CallStarted():
            return f"{call} started, attempt {event.attempt}" + (
                f" (granted: {event.grant})"
                if event.grant and "/" in event.grant
                else " (granted)"
                if event.grant
                else _describe_asked(event)
            )
        case CallReturned():
            if event.error is not None:
                return f"{call} failed: [{event.error.kind}] {event.error.message}"
            images = "".join(f", {describe_image(image)}" for image in event.images)
            asked = _describe_asked(event)
            return f"{call} returned {ellipsize(value_text(event.value), MAX_CHARS)}{images}{asked}"
        case CancelRequested():
            deputy = f" for {event.on_behalf_of.id}" if event.on_behalf_of else ""
            return f"turn {event.turn} cancelled{deputy}" + (f": {event.reason}" if event.reason else "")
        case HistorySummarised():
            return f"history up to {event.upto} summarised"
        case TurnEnded():
            why = f": [{event.error.kind}] {event.error.message}" if event.error else ""
            value = f": {ellipsize(value_text(event.value), MAX_CHARS)}" if event.value not in (None, "") else ""
            return f"turn {event.turn} ended: {event.reason}{why or value}"
        case GrantGiven():
            covered = f", {describe_coverage(event)}" if event.compares else ""
            where = f", for {describe_scope(event)}" if event.scope != "conversation" else ""
            return f"{call} allowed from now on ({event.remember}{covered}{where}), grant {event.grant}"
        case GrantRevoked():
            return f"grant {event.grant} revoked"
        case ResolutionRefused():
            return f"{call} {event.decision.lower()} refused: {event.reason}"
        case ConversationImported():
            then = "it may go on here" if event.trusted else "without trust: nothing of it runs"
            return f"imported from {event.origin or 'a file'}; {then}"
        case ConversationRenamed():
            return f"renamed: {event.title}"
        case ConversationArchived():
            return "archived" if event.archived else "unarchived"
        case DeputyNamed():
            until = format_time(event.until)
            return f"{event.deputy} decides for {event.by.id} until {until}, delegation {event.delegation}"
        case DeputyEnded():
            return f"delegation {event.delegation} ended"
        case _:
            assert_never(event)


def _describe_asked(event: CallStarted | CallReturned) -> str:
    """Return a note if the handler asked the model in the run before this event."""
    if not event.attempts:
        return ""
    usage = sum((attempt.usage for attempt in event.attempts if attempt.usage), Usage())
    return f" (after asking {', '.join([event.attempts[-1].model, *usage.describe()])})"


def print_conversations(out: Console, infos: list[ConversationInfo]) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("conversation", "state", "agent"):
        table.add_column(name, overflow="fold")
    table.add_column("events", justify="right")
    table.add_column("updated")
    table.add_column("title", overflow="ellipsis", no_wrap=True)
    for info in infos:
        state = Text(info.state, style="yellow" if info.state == "awaiting_input" else "")
        table.add_row(
            Text(escape_control_characters(info.conversation)),
            state,
            Text(escape_control_characters(info.agent)),
            Text(str(info.seq)),
            Text(format_time(info.updated)),
            Text(
                ("(archived) " if info.archived else "") + escape_control_characters(info.title),
                style="dim" if info.archived else "",
            ),
        )
    out.print(table)


def describe_resolution(event: CallResolved) -> str:
    """Describe a decision and its principal."""
    words = describe_decision(event.decision)
    return words if event.by.id == "system" else f"{words} by {describe_decider(event)}"


def describe_decider(
    event: CallResolved | CancelRequested | GrantGiven | Grant | VoteCast | DeadlineExtended | ApprovalTakenBack,
) -> str:
    """Return who decided, and for whom, if it was a deputy."""
    return name_decider(event.by, event.on_behalf_of)


def describe_decision(decision: Recorded | Decision) -> str:
    match decision:
        case Extend(until=until):
            return f"extended by {until}" if isinstance(until, str) else f"extended to {format_time(until)}"
        case TakeBack():
            return "waits again: its approval was taken back"
        case Approve(args=None):
            return "approved"
        case Approve(args=args):
            return f"approved as {ellipsize(value_text(args), DETAIL_CHARS)}"
        case Deny(reason=reason, stop=stop):
            words = "denied, and the turn stopped," if stop else "denied"
            return f"{words} ({ellipsize(reason, DETAIL_CHARS)})" if reason else words
        case Answer(value=value):
            return f"answered {ellipsize(value_text(value), DETAIL_CHARS)}"
        case ClientResult(value=value) | Submit(value=value):
            return f"was given its result {ellipsize(value_text(value), DETAIL_CHARS)}"
        case Failed():
            return f"was reported as failed ([{decision.kind}] {decision.message})"
        case Expired():
            return "expired: no answer came"
        case Detached():
            return "failed: no client is attached"


def message_lines(message: Message, agent: str) -> list[list[str | tuple[str, str]]]:
    match message:
        case UserMessage():
            return [[(f"{message.by}: ", "bold"), ellipsize(message.text, MESSAGE_CHARS)]]
        case AssistantMessage():
            said: list[list[str | tuple[str, str]]] = []
            if message.text:
                said.append([(f"{agent}: ", "bold green"), ellipsize(message.text, MESSAGE_CHARS)])
            for use in message.calls:
                args = " ".join(f"{name}={value_text(value)}" for name, value in use.args.items())
                said.append([("  → ", "cyan"), (use.name, "bold"), (f"  {ellipsize(args, MESSAGE_CHARS)}", "dim")])
            return said
        case ToolResult():
            mark = ("  ✓ ", "green") if message.ok else ("  ✗ ", "red")
            return [[mark, message.tool, (f"  {ellipsize(message.content, MESSAGE_CHARS)}", "dim")]]
