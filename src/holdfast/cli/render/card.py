"""Render a pending call as a card: the prompt, the arguments, the preview, the deadline, and how to answer."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.text import Text

from holdfast.cli.command_lines import CommandWriter, has_preview, known_answers
from holdfast.cli.render.text import escape_control_characters, format_duration, value_text
from holdfast.cli.render.values import fit_on_card, render_table, render_value
from holdfast.cli.render.workspace import render_plan
from holdfast.core.decisions import KIND_LABELS, Pending, describe_deciders
from holdfast.core.tool import Default

CARD_WIDTH = 96
FRAME = 6
"""Columns of the title's line that the border takes."""
RISK_STYLES = {"high": "bold red", "medium": "yellow", "low": "dim"}


def print_card(out: Console, entry: Pending, commands: CommandWriter, others: Iterable[Pending], now: float) -> None:
    """Print the card, then the commands: outside the frame and on one line each, so that they can be copied."""
    width = min(out.width, CARD_WIDTH)
    out.print(render_card(entry, now, width), width=width)
    answers = commands.answer_commands(entry, others)
    if answers:
        out.print(Text("  answer with:", style="dim"))
    for command in answers:
        out.print(Text(f"    {command}", style="bold cyan"), soft_wrap=True)
    out.print()


def render_card(entry: Pending, now: float, width: int = CARD_WIDTH) -> Panel:
    """Return the card of a pending call, without the commands that answer it."""
    title, parts = _render_title(entry, width - FRAME)
    parts.append(Text(escape_control_characters(entry.prompt, block=True), style="bold"))
    if entry.reason and entry.reason not in ("manual", "recovery"):
        parts.append(Text(escape_control_characters(entry.reason), style="yellow"))
    if entry.args:
        parts += [Text(), render_table(entry.args)]
    if entry.kind == "elicitation" and (known := known_answers(entry)) is not None:
        listed = " · ".join(escape_control_characters(value_text(value)) for value in known)
        parts += [Text(), Text.assemble(("one of  ", "dim"), fit_on_card(listed))]
    if entry.preview_error is not None:
        parts += [
            Text(),
            Text(f"its preview failed: {escape_control_characters(entry.preview_error, block=True)}", style="yellow"),
        ]
    elif has_preview(entry):
        parts += [
            Text(),
            Rule(Text("what it would do", style="dim"), style="dim", align="left"),
            render_plan(entry.preview) or render_value(entry.preview),
        ]
    if entry.remember:
        names = escape_control_characters(", ".join(entry.remember))
        parts += [Text(), Text(f"remembered with --remember args: {names}", style="dim")]
    if deciders := describe_deciders(entry, lambda at: f"In {format_duration(max(at - now, 0))}"):
        parts += [Text(), *(Text(escape_control_characters(line)) for line in deciders)]
    parts += [Text(), _footer(entry, now)]
    where = Text(f"{escape_control_characters(entry.conversation)}/{escape_control_characters(entry.id)}", style="dim")
    border = {"high": "red", "medium": "yellow", "low": "blue"}[entry.risk]
    return Panel(
        Group(*parts),
        title=title,
        title_align="left",
        subtitle=where,
        subtitle_align="right",
        box=box.ROUNDED,
        border_style=border,
        padding=(0, 1),
    )


def _render_title(entry: Pending, width: int) -> tuple[Text, list[RenderableType]]:
    """Return the title and the first lines of the card: the risk moves there if the title is too wide for it."""
    title = Text.assemble(
        (escape_control_characters(entry.tool), "bold"),
        f" {KIND_LABELS[entry.kind]}",
        no_wrap=True,
        overflow="ellipsis",
    )
    if entry.risk == "low":
        return title, []
    risk = Text(f"{entry.risk} risk", style=RISK_STYLES[entry.risk])
    whole = Text.assemble(title, " · ", risk, no_wrap=True, overflow="ellipsis")
    return (whole, []) if whole.cell_len <= width else (title, [risk])


def _footer(entry: Pending, now: float) -> Text:
    asks = f"agent {escape_control_characters(entry.agent)} asks" if entry.agent else "asked"
    return Text(
        f"{asks} for {escape_control_characters(entry.principal.id)} · {describe_deadline(entry, now)}", style="dim"
    )


def describe_deadline(entry: Pending, now: float) -> str:
    """Describe when the call expires, and the outcome then; or when an approved call runs."""
    if entry.starts_at is not None:
        return f"runs in {format_duration(entry.starts_at - now)}"
    match "interrupted" if entry.recovery else entry.on_expiry:
        case "interrupted":
            then = "then it is reported as interrupted"
        case "error":
            then = "then it fails as timed out"
        case "deny":
            then = "then it counts as denied"
        case "halt":
            then = "then the turn stops"
        case Default(value=value):
            then = f"then it is answered with {escape_control_characters(value_text(value))}"
    left = entry.deadline - now
    return f"expires in {format_duration(left)}, {then}" if left > 0 else f"its time is up: {then}"
