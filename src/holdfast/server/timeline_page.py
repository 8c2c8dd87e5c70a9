"""A timeline as one HTML file that opens offline: no script, no request, and every text escaped.

A bar is a link to its event, and the style sheet shows the JSON of the event that the address names. So the file needs
no script, and its policy allows none: even markup that slipped through the escaping could not run or load anything.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import html
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

import msgspec

from holdfast.core.events import Usage
from holdfast.core.text.hidden_characters import is_hidden
from holdfast.core.text.redaction import redact_secrets
from holdfast.core.timeline import WIDTH, Span, Timeline, TimelineEvent, TimeSpent, TurnTimeline, format_milliseconds
from holdfast.runtime.runtime import Runtime
from holdfast.server.api_types import public_body

MAX_EVENTS = 10_000
"""The file ends with the turn that has reached this many events, the newest first."""
MAX_TURNS = 1000
READ_BATCH = 100
"""Events read from the store at once."""
EVENT_CHARS = 20_000
"""Characters of one event's JSON in the file; one event may have several megabytes."""
FILE_CHARS = 16 * 1024 * 1024
"""Characters of all events' JSON in the file."""
LANE, BAR, COST = 24, 18, 28
"""Heights in pixels: of a lane, of its bars, and of the line of the cost."""

_STYLE = """
:root{color-scheme:light dark;--ink:light-dark(#22211d,#e9e8e3);--soft:light-dark(#5d5a51,#a9aaa3);
--line:light-dark(#e2dfd6,#363937);--paper:light-dark(#fbfaf7,#191a19);--sunken:light-dark(#f2f0ea,#222423);
--model:light-dark(#9fc3ee,#2f5f9a);--tool:light-dark(#a5d8b4,#2c6b45);--people:light-dark(#f3d79a,#75591b);
--preparation:light-dark(#d3d0c6,#4d504e);--bad:light-dark(#a3302a,#f09a91);--accent:light-dark(#2b6a59,#7cc5ad)}
*{box-sizing:border-box}
body{margin:0 auto;padding:1.2rem;max-width:76rem;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.4rem;margin:0}h2{font-size:1.1rem;margin:0}p{margin:.3rem 0}
.soft,dt{color:var(--soft)}section{border-top:1px solid var(--line);margin-top:1.4rem;padding-top:1rem}
dl{display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;margin:.4rem 0}dl div{display:flex;gap:.4rem}dd{margin:0}
.key::before{content:"";display:inline-block;width:.8em;height:.8em;margin-right:.4em;border-radius:2px}
.key.model::before{background:var(--model)}.key.tools::before{background:var(--tool)}
.key.people::before{background:var(--people)}.key.other::before{background:var(--preparation)}
svg{display:block}svg.lanes{width:100%;background:var(--sunken);border-radius:6px}
rect{stroke-width:1}.model rect{fill:var(--model);stroke:var(--model)}
.tool rect{fill:var(--tool);stroke:var(--tool)}.people rect{fill:var(--people);stroke:var(--people)}
.preparation rect{fill:var(--preparation);stroke:var(--preparation)}
.bad rect{stroke:var(--bad);stroke-width:2;stroke-dasharray:4 2}text{fill:var(--ink);font:12px system-ui,sans-serif}
a:focus-visible rect,a:hover rect{stroke:var(--ink);stroke-width:2}
polyline{fill:none;stroke:var(--accent);stroke-width:2;vector-effect:non-scaling-stroke}
ol{list-style:none;margin:.6rem 0;padding:0}li{padding:.15rem .3rem;border-radius:4px}
li .row{display:flex;flex-wrap:wrap;gap:0 .9rem}li:target{background:var(--sunken);outline:2px solid var(--accent)}
pre{display:none;margin:.4rem 0;white-space:pre-wrap;font:12.5px/1.45 ui-monospace,monospace}
li:target pre{display:block}
.n{color:var(--soft);font-variant-numeric:tabular-nums}a{color:var(--accent)}
@media print{pre{display:none}}
""".strip()
_POLICY = (
    f"default-src 'none'; style-src 'sha256-{base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()}'; "
    "base-uri 'none'; form-action 'none'"
)
"""Nothing but this style sheet: no script, no request, and no style of a text."""
_BAD = ("failed", "interrupted", "cancelled", "rejected", "expired", "denied", "no client")
_PEOPLE = ("approval", "question", "client", "manual")


class _Escapes(dict[int, str]):
    """Escapes of characters, each computed once."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        hidden = is_hidden(char) and char not in "\n\t"
        self[code] = escaped = f"[U+{code:04X}]" if hidden else html.escape(char)
        return escaped


_escapes = _Escapes()


def escape(text: str) -> str:
    """Return the text as markup; characters that a reader cannot see become their codes."""
    return text.translate(_escapes)


async def export_timeline(runtime: Runtime, conversation: str) -> bytes:
    """Return the newest turns of a conversation as an HTML file."""
    timeline = await runtime.timeline(conversation, turns=MAX_TURNS, max_events=MAX_EVENTS)
    bodies: dict[int, str] = {}
    left = FILE_CHARS
    for turn in timeline.turns:
        seq, last = turn.events[0].seq, turn.events[-1].seq
        while seq <= last and left > 0:
            for body in await runtime.store.read(conversation, after=seq - 1, before=last + 1, limit=READ_BATCH):
                bodies[seq] = shown = show_event(body, min(left, EVENT_CHARS))
                left -= len(shown)
                seq += 1
            await asyncio.sleep(0)
    return await asyncio.to_thread(render_timeline, timeline, bodies, runtime.now())  # it may take a second


def show_event(body: bytes, limit: int) -> str:
    """Return a stored event as readable JSON without claims and secrets, with at most so many characters."""
    text = redact_secrets(msgspec.json.format(public_body(body), indent=2).decode())
    return text if len(text) <= limit else f"{text[:limit]}\n… shortened: the whole event has {len(text):,} characters"


def render_timeline(timeline: Timeline, bodies: Mapping[int, str], now: float) -> bytes:
    """Return the file. ``bodies`` has the JSON of the events."""
    name = timeline.title or timeline.conversation
    facts = [f"conversation {timeline.conversation}", f"made {_date(round(now * 1000))}", *timeline.usage.describe()]
    earlier = "<p>Earlier turns are left out.</p>" if timeline.earlier else ""
    turns = "\n".join(_render_turn(turn, bodies) for turn in timeline.turns) or "<p>No turn has begun.</p>"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(_POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Timeline: {escape(name)}</title>\n<style>{_STYLE}</style></head>\n<body><main>"
        f'<h1>{escape(name)}</h1><p class="soft">{escape(" · ".join(facts))}</p>{_render_spent(timeline.spent)}\n'
        f"{turns}\n{earlier}</main></body></html>\n"
    ).encode()


def _render_spent(spent: TimeSpent) -> str:
    """Return the list of the four parts of a duration, which is the legend of the colours, too."""
    parts = (("model", spent.model), ("tools", spent.tools), ("people", spent.people), ("other", spent.other))
    items = (
        f'<div><dt class="key {name}">{name}</dt><dd>{format_milliseconds(value)}</dd></div>' for name, value in parts
    )
    total = f"<div><dt>together</dt><dd>{format_milliseconds(spent.total)}</dd></div>"
    return f"<dl>{''.join(items)}{total}</dl>"


def _render_turn(turn: TurnTimeline, bodies: Mapping[int, str]) -> str:
    state = "open" if turn.open else turn.reason
    facts = [turn.agent, _date(turn.start), *turn.usage.describe()]
    if turn.queued is not None and turn.queued >= 1000:
        facts.append(f"queued for {format_milliseconds(turn.queued)}")
    message = f"<p>{escape(turn.by)}: {escape(turn.text)}</p>" if turn.text else ""
    heading = f"Turn {turn.turn}: {state}, {format_milliseconds(turn.duration)}"
    return (
        f'<section><h2>{escape(heading)}</h2><p class="soft">{escape(" · ".join(facts))}</p>{message}'
        f"{_render_spent(turn.spent)}\n{_render_lanes(turn)}\n"
        f"<ol>{''.join(_render_events(turn, bodies))}</ol></section>"
    )


def _render_lanes(turn: TurnTimeline) -> str:
    places = {event.seq: event.place for event in turn.events}
    line = cost_line(turn)
    height = turn.lanes * LANE + (COST if line else 0) + 6
    bars = "\n".join(_render_bar(span, places, turn.start) for span in turn.spans)
    cost = ""
    if line:
        cost = (
            f'<svg y="{turn.lanes * LANE + 4}" width="100%" height="{COST}" viewBox="0 0 {WIDTH} {COST}" '
            f'preserveAspectRatio="none"><polyline points="{line}"/></svg>'
        )
    return f'<svg class="lanes" height="{height}" role="group" aria-label="Bars">{bars}{cost}</svg>'


def _render_bar(span: Span, places: Mapping[int, int], start: int) -> str:
    left = places[span.first]
    width = (WIDTH if span.last is None else places[span.last]) - left
    box = f'x="{left / 10:g}%" y="{span.lane * LANE + 4}" width="{width / 10:g}%" height="{BAR}"'
    kind = "people" if span.kind in _PEOPLE else span.kind
    bad = " bad" if span.outcome.startswith(_BAD) else ""
    label = escape(span.label or span.kind)
    return (
        f'<a class="{kind}{bad}" href="#e{span.last or span.first}"><title>{escape(describe_span(span, start))}</title>'
        f'<rect {box} rx="3"/><svg {box}><text x="4" y="13">{label}</text></svg></a>'
    )


def cost_line(turn: TurnTimeline) -> str:
    """Return the points of the cost so far, or of the tokens if no cost is known; empty if neither is."""
    steps = [(event.place, _figure(event.usage, turn.usage)) for event in turn.events if event.usage]
    total = sum(figure for _, figure in steps)
    if not total:
        return ""
    points, sum_ = [(0, COST - 2.0)], 0.0
    for place, figure in steps:
        points.append((place, points[-1][1]))
        sum_ += figure
        points.append((place, COST - 2 - (COST - 4) * sum_ / total))
    points.append((WIDTH, points[-1][1]))
    return " ".join(f"{x},{y:.1f}" for x, y in points)


def _figure(usage: Usage, total: Usage) -> float:
    if total.cost:
        return usage.cost or 0.0
    return float((usage.input_tokens or 0) + (usage.output_tokens or 0))


def describe_span(span: Span, start: int) -> str:
    """Describe a bar in one line; ``start`` is that of the turn."""
    attempt = f", run {span.attempt}" if span.attempt and span.attempt > 1 else ""
    failed = [request.error.kind for request in span.requests if request.error]
    facts = [
        f"{span.kind} {span.label}".strip() + attempt,
        f"+{format_milliseconds(span.start - start)}",
        format_milliseconds(span.duration),
        (span.outcome or "goes on") + (f" by {', '.join(span.by)}" if span.by else ""),
        f"failed requests: {', '.join(failed)}" if failed else "",
        *(span.usage.describe() if span.usage else ()),
    ]
    return " · ".join(fact for fact in facts if fact)


def _render_events(turn: TurnTimeline, bodies: Mapping[int, str]) -> Iterable[str]:
    cost = Usage()
    for event in turn.events:
        cost = cost + event.usage
        yield _render_event(event, turn.start, cost, bodies.get(event.seq, ""))


def _render_event(event: TimelineEvent, start: int, cost: Usage, body: str) -> str:
    about = " ".join(part for part in (event.tool, event.call) if part)
    spent = f"then {event.category} {format_milliseconds(event.duration)}" if event.duration else ""
    so_far = f"{', '.join(cost.describe())} so far" if event.usage else ""
    cells = "".join(f"<span>{escape(cell)}</span>" for cell in (event.by, about, spent, so_far) if cell)
    return (
        f'<li id="e{event.seq}"><div class="row"><span class="n">{event.seq}</span>'
        f'<time class="n" title="{_date(event.at)}">+{format_milliseconds(event.at - start)}</time>'
        f'<a href="#e{event.seq}">{event.type}</a>{cells}</div><pre>{escape(body)}</pre></li>\n'
    )


def _date(at: int) -> str:
    try:
        return datetime.fromtimestamp(at / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{at} ms"
