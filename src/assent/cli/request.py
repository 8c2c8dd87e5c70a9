"""What the model was sent for one reply: the sizes that stand in the log and, where it was kept, the request itself."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from assent.cli.output import json_lines
from assent.cli.reading import missing, unknown
from assent.cli.replay import said
from assent.cli.text import cut, shown, value_text
from assent.cli.verification import PAGE, opened
from assent.core import codec
from assent.core.compaction import Report
from assent.core.events import AssistantSaid
from assent.core.transcript import Message
from assent.errors import NotFound, StoreDamaged
from assent.models.base import ToolOffer
from assent.runtime.intake import conversation_id
from assent.stores.base import LogStore

BAR = 30
LONG = 4000
PARTS = ("instructions", "tools", "summary", "history", "injections")


class Sent(msgspec.Struct, kw_only=True):
    """A request, as its artifact has it."""

    instructions: str
    messages: list[Message]
    tools: list[ToolOffer] = []
    output: Any = None
    injected: list[str] = []
    settings: dict[str, Any] = {}


class Found(msgspec.Struct, kw_only=True):
    conversation: str
    turn: int
    step: int
    seq: int
    """Of the reply."""
    model: str | None
    input_tokens: int | None
    """As the provider counted."""
    context: Report
    request: msgspec.Raw | None
    """All of it, where it was kept."""


async def request(url: str, conversation: str, turn: int | None, step: int | None, as_json: bool) -> int:
    name = conversation_id(conversation)
    if await missing(url):
        raise unknown(url, conversation)
    async with opened(url) as store:
        replies, tools = await _replies(store, name)
        reply = _chosen(replies, name, turn, step)
        found = await _found(store, name, reply)
    if as_json:
        json_lines([found])
    else:
        from assent.cli.cards import console

        _print(console(), found, tools)
    return 0


async def _replies(store: LogStore, name: str) -> tuple[list[AssistantSaid], dict[str, str]]:
    """All replies of a conversation, and call -> tool."""
    replies: list[AssistantSaid] = []
    after = 0
    while bodies := await store.read(name, after=after, limit=PAGE):
        after += len(bodies)
        replies += [event for body in bodies if isinstance(event := codec.decode(body), AssistantSaid)]
    if not after:
        raise NotFound(f"there is no conversation {name!r}")
    return replies, {call.id: call.tool for reply in replies for call in reply.calls}


def _chosen(replies: list[AssistantSaid], name: str, turn: int | None, step: int | None) -> AssistantSaid:
    if not replies:
        raise NotFound(f"no model has replied in {name} yet")
    number = replies[-1].turn if turn is None else turn
    those = [reply for reply in replies if reply.turn == number]
    if not those:
        known = sorted({reply.turn for reply in replies})
        raise NotFound(f"there is no reply in turn {turn} of {name}; replies are in {_numbers('turn', known)}")
    if step is None:
        return those[-1]
    if chosen := [reply for reply in those if reply.step == step]:
        return chosen[-1]
    raise NotFound(
        f"turn {number} of {name} has no reply at step {step}; it has {_numbers('step', [r.step for r in those])}"
    )


def _numbers(noun: str, numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    if len(numbers) == numbers[-1] - numbers[0] + 1:
        return f"{noun}s {numbers[0]} to {numbers[-1]}"
    return f"{noun}s {cut(', '.join(map(str, numbers)), 80)}"


async def _found(store: LogStore, name: str, reply: AssistantSaid) -> Found:
    context: dict[str, Any] = reply.context or {}
    if "tokens" not in context:  # record="off" leaves the estimate alone, which the next request needs
        why = "it is a reply that was cut off" if reply.partial else 'its agent has record="off"'
        raise NotFound(
            f"nothing was recorded of what was sent for turn {reply.turn}, step {reply.step} of {name} ({why}): "
            'Agent(record="metadata") keeps the size of each part, record="full" the whole request'
        )
    artifact = context.get("request")
    body = await store.artifact(artifact) if artifact else None
    if artifact and body is None:
        raise StoreDamaged(f"the artifact {artifact}, which holds the request, is missing")
    last = reply.attempts[-1] if reply.attempts else None
    return Found(
        conversation=name,
        turn=reply.turn,
        step=reply.step,
        seq=reply.seq,
        model=last.model if last else None,
        input_tokens=last.usage.input_tokens if last and last.usage else None,
        context=msgspec.convert(context, Report),
        request=msgspec.Raw(body) if body is not None else None,
    )


def _print(out: Console, found: Found, tools: dict[str, str]) -> None:
    def line(*parts: str | tuple[str, str], block: bool = False) -> None:
        safe = [shown(p, block=block) if isinstance(p, str) else (shown(p[0], block=block), p[1]) for p in parts]
        out.print(Text.assemble(*safe), soft_wrap=not out.is_terminal)

    report = found.context
    counted = f"; the provider counted {found.input_tokens:,}" if found.input_tokens is not None else ""
    line((f"{found.conversation}, turn {found.turn}, step {found.step}", "bold"), f": {found.model or 'no model'}")
    line((f"about {report.tokens.total:,} tokens{counted}", "dim"))
    line()
    out.print(_table(report))
    line()
    for text in _told(report, tools):
        line(text)
    if found.request is None:
        line(('the messages themselves were not kept: Agent(record="full") keeps them', "dim"))
        return
    sent = msgspec.json.decode(found.request, type=Sent)
    line()
    if sent.instructions:
        line(("instructions: ", "bold"), cut(sent.instructions, LONG), block=True)
    for message in sent.messages:
        for parts in said(message, "assistant"):
            line(*parts, block=True)
    for text in sent.injected:
        line(("injected: ", "bold yellow"), cut(text, LONG), block=True)
    line()
    if sent.tools:
        line(("tools: ", "bold"), ", ".join(offer.name for offer in sent.tools))
    if sent.output is not None:
        line(("output: ", "bold"), cut(value_text(sent.output), LONG))
    if sent.settings:
        line(("settings: ", "bold"), cut(value_text(sent.settings), LONG))


def _table(report: Report) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(no_wrap=True)
    whole = max(1, report.tokens.total)
    for part in PARTS:
        if size := getattr(report.tokens, part):
            table.add_row(part, f"{size:,}", Text("█" * max(1, round(BAR * size / whole)), style="cyan"))
    return table


def _told(report: Report, tools: dict[str, str]) -> list[str]:
    """What became of the rest of the conversation, in sentences."""
    lines = [f"{_count(report.turns, 'turn')} shown"]
    if report.dropped:
        rest = f", {_count(report.dropped, 'turn')} before {'it' if report.turns == 1 else 'them'} not"
        if report.summarised is None:
            rest += ": left out"
        else:
            rest += f": summarised up to event {report.summarised}" + (", the rest left out" if report.gap else "")
        lines[0] += rest
    for word, calls in (("stubbed", report.stubbed), ("cut short", report.cut)):
        if calls:
            names = ", ".join(f"{tools.get(call, '?')} ({call})" for call in calls)
            lines.append(f"{_count(len(calls), 'result')} {word}: {names}")
    lines += [f"injected by {each.hook}: {each.tokens:,} tokens" for each in report.injected]
    return lines


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
