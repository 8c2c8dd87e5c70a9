"""A waiting call as a person sees it: the tool's own sentence, what it would do, by when, and how to answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from assent.cli.commands import Commands, options, planned
from assent.cli.text import shown, span, value_text
from assent.core.decisions import Pending
from assent.core.tool import Default

LINES = 40
CHARS = 4000
WIDTH = 96
FRAME = 6
"""What a title shares its line with: corners, a bit of the border, blanks."""
KINDS = {
    "approval": "wants approval",
    "elicitation": "asks",
    "client_exec": "waits for a client",
    "manual": "waits for somebody to run it",
}
RISK = {"high": "bold red", "medium": "yellow", "low": "dim"}


def console(*, stderr: bool = False) -> Console:
    """Prints what it is given: no markup, no emoji codes, no highlighting, and no color without a terminal."""
    return Console(markup=False, emoji=False, highlight=False, stderr=stderr)


def print_card(out: Console, entry: Pending, commands: Commands, others: Iterable[Pending], now: float) -> None:
    """The card, then the commands: outside the frame and on one line each, so that they can be copied."""
    width = min(out.width, WIDTH)
    out.print(card(entry, now, width), width=width)
    answers = commands.answers(entry, others)
    if answers:
        out.print(Text("  answer with:", style="dim"))
    for command in answers:
        out.print(Text(f"    {command}", style="bold cyan"), soft_wrap=True)
    out.print()


def card(entry: Pending, now: float, width: int = WIDTH) -> Panel:
    title, parts = _head(entry, width - FRAME)
    parts.append(Text(shown(entry.prompt, block=True), style="bold"))
    if entry.reason and entry.reason not in ("manual", "recovery"):
        parts.append(Text(shown(entry.reason), style="yellow"))
    if entry.args:
        parts += [Text(), _table(entry.args)]
    if entry.kind == "elicitation" and (known := options(entry)) is not None:
        listed = " · ".join(shown(value_text(value)) for value in known)
        parts += [Text(), Text.assemble(("one of  ", "dim"), _cut(listed))]
    if entry.preview_error is not None:
        parts += [Text(), Text(f"its preview failed: {shown(entry.preview_error, block=True)}", style="yellow")]
    elif planned(entry):
        parts += [Text(), Rule(Text("what it would do", style="dim"), style="dim", align="left"), _plan(entry.preview)]
    parts += [Text(), _footer(entry, now)]
    where = Text(f"{shown(entry.conversation)}/{shown(entry.call)}", style="dim")
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


def _head(entry: Pending, room: int) -> tuple[Text, list[RenderableType]]:
    """The title, and what comes first below it. However narrow it gets, the risk is not what is cut off."""
    title = Text.assemble((shown(entry.tool), "bold"), f" {KINDS[entry.kind]}", no_wrap=True, overflow="ellipsis")
    if entry.risk == "low":
        return title, []
    risk = Text(f"{entry.risk} risk", style=RISK[entry.risk])
    whole = Text.assemble(title, " · ", risk, no_wrap=True, overflow="ellipsis")
    return (whole, []) if whole.cell_len <= room else (title, [risk])


def _footer(entry: Pending, now: float) -> Text:
    asks = f"agent {shown(entry.agent)} asks" if entry.agent else "asked"
    return Text(f"{asks} for {shown(entry.principal.id)} · {deadline(entry, now)}", style="dim")


def deadline(entry: Pending, now: float) -> str:
    """When it expires, and what happens then."""
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
            then = f"then it is answered with {shown(value_text(value))}"
    left = entry.deadline - now
    return f"expires in {span(left)}, {then}" if left > 0 else f"its time is up: {then}"


def _table(values: dict[str, Any]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(style="dim", overflow="fold", max_width=24)
    table.add_column(overflow="fold")
    for name, value in values.items():
        table.add_row(Text(shown(name)), _cut(shown(value_text(value), block=True)))
    return table


def _plan(preview: Any) -> RenderableType:
    if isinstance(preview, dict) and preview:
        return _table(cast("dict[str, Any]", preview))
    text = shown(value_text(preview), block=True)
    return _diff(text) if _is_diff(text) else _cut(text)


def _is_diff(text: str) -> bool:
    lines = text.splitlines()
    return any(line.startswith("@@ ") for line in lines) or (
        any(line.startswith("--- ") for line in lines) and any(line.startswith("+++ ") for line in lines)
    )


def _diff(text: str) -> Text:
    styles = {"+": "green", "-": "red", "@": "cyan"}
    plain = _cut(text)
    colored = Text()
    for line in plain.plain.splitlines(keepends=True):
        head = line[:3] in ("+++", "---")
        colored.append(line, style="bold" if head else styles.get(line[:1], ""))
    return colored


def _cut(text: str) -> Text:
    """What fits on a card; what is left out is said, never silently dropped."""
    lines = text.splitlines()
    kept = "\n".join(lines[:LINES])[:CHARS]
    if len(kept) >= len(text.rstrip("\n")):
        return Text(kept)
    return Text.assemble(
        kept, ("\n… ", "dim"), (f"{len(text) - len(kept)} more characters: assent pending --json has them", "yellow")
    )
