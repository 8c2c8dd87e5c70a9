"""Build the cards that notebooks show for pending calls, results and snapshots.

Every function escapes the text that it is given, and shows characters that a reader cannot see by their code. Styles
are inline, since notebooks remove style sheets from outputs that they do not trust. Colours are inherited from the
notebook or of medium brightness, to be readable on light and dark backgrounds.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NewType, cast

import msgspec

from holdfast.core.text.hidden_characters import is_hidden

Html = NewType("Html", str)
"""Markup that is safe to show."""

MAX_CHARS = 4000
"""Characters of one text that a card shows."""

GREY, BLUE, GREEN, AMBER, RED = "#8888", "#4c8dff", "#2da160", "#d08700", "#e5484d"
COLORS = {
    "low risk": BLUE,
    "medium risk": AMBER,
    "high risk": RED,
    "completed": GREEN,
    "waiting": AMBER,
    "awaiting_input": AMBER,
    "failed": RED,
    "preparing": BLUE,
    "streaming": BLUE,
    "executing_tools": BLUE,
}
"""Colours of risks, of the reasons of a turn's end and of a conversation's states; others are grey."""

_BOX = "border:1px solid #8886;border-left:4px solid {color};border-radius:6px;padding:8px 12px;margin:6px 0;"
_FONT = "max-width:60em;font:14px/1.45 system-ui,sans-serif;color:inherit;text-align:left"
_BADGE = "border:1px solid {color};border-radius:9px;padding:0 7px;margin-left:6px;font-size:12px;color:{color}"
_BLOCK = "white-space:pre-wrap;overflow-wrap:anywhere;max-height:24em;overflow:auto"
_CODE = f"{_BLOCK};font:12.5px/1.45 ui-monospace,monospace"
_DIM = "opacity:.7;font-size:12.5px"
_CELL = (
    "font:13px/1.45 system-ui,sans-serif;color:inherit;padding:1px 12px 1px 0;vertical-align:top;text-align:left;"
    "background:none;border:0"
)
_HIDDEN = f"border:1px solid {AMBER};border-radius:3px;padding:0 2px;margin:0 1px;font:11px ui-monospace,monospace"


def escape(text: str, limit: int = MAX_CHARS) -> Html:
    """Return the text as markup, with hidden characters shown by their code. A long text is cut, with a note."""
    shown = "".join(_escape_char(char) for char in text[:limit])
    more = len(text) - limit
    return Html(shown if more <= 0 else f'{shown}<span style="{_DIM}"> … {more} more characters</span>')


def _escape_char(char: str) -> str:
    if char in "\n\t" or not is_hidden(char):
        return html.escape(char)
    return f'<span style="{_HIDDEN}" title="hidden character">U+{ord(char):04X}</span>'


def card(color: str, *parts: Html) -> Html:
    """Return a card with a coloured edge."""
    return Html(f'<div style="{_BOX.format(color=color)}{_FONT}">{"".join(parts)}</div>')


def heading(title: str, label: str, *badges: str) -> Html:
    """Return the first line of a card; each badge has the colour of its word."""
    shown = "".join(
        f'<span style="{_BADGE.format(color=COLORS.get(each, "inherit"))}">{escape(each)}</span>' for each in badges
    )
    return Html(f'<div><b>{escape(title)}</b> <span style="opacity:.7">{escape(label)}</span>{shown}</div>')


def paragraph(text: str, label: str = "") -> Html:
    """Return a text, if there is one, with a label before it."""
    if not text:
        return Html("")
    named = f'<span style="{_DIM}">{escape(label)} </span>' if label else ""
    return Html(f'<div dir="auto" style="{_BLOCK};margin-top:4px">{named}{escape(text)}</div>')


def values(title: str, value: Any) -> Html:
    """Return a value: an object as a table of its fields, other values as text or JSON."""
    head = f'<div style="{_DIM};margin-top:6px">{escape(title)}</div>' if title else ""
    if isinstance(value, Mapping):
        rows = "".join(
            f'<tr style="background:none"><td style="{_CELL};opacity:.7">{escape(str(name))}</td>'
            f'<td style="{_CELL}"><div dir="auto" style="{_CODE}">{escape(_value_text(item))}</div></td></tr>'
            for name, item in cast("Mapping[Any, Any]", value).items()
        )
        return Html(f'{head}<table style="border-collapse:collapse;margin:2px 0;border:0">{rows}</table>')
    return Html(f'{head}<div dir="auto" style="{_CODE}">{escape(_value_text(value))}</div>')


def footer(*facts: str) -> Html:
    """Return the last line of a card: the facts that are not empty."""
    return Html(f'<div style="{_DIM};margin-top:6px">{escape(" · ".join(fact for fact in facts if fact))}</div>')


def format_time(at: float) -> str:
    """Return a time in UTC: the reader's time zone may differ from the program's."""
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, ValueError, OSError):
        return f"{at:.0f}"


def format_start(at: float) -> str:
    """Return the beginning of a sentence about something that starts at this time."""
    return f"From {format_time(at)}"


def _value_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return msgspec.json.encode(value).decode()
    except Exception:  # an output of a type that only the application can encode
        return repr(value)
