"""The page behind a signed link: the card of one call with the page's styles, as HTML that needs no script."""

from __future__ import annotations

import html
import time
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from holdfast.channels.card import Field, deciders, fields_of, shown_preview
from holdfast.channels.links import OpenedLink
from holdfast.core.decisions import Pending
from holdfast.core.text.hidden_characters import is_hidden
from holdfast.core.text.html_card import format_time
from holdfast.server.static_files import CONTENT_TYPES, content_policy

HEADERS = {
    "content-type": CONTENT_TYPES[".html"],
    "cache-control": "no-store",
    # The origin alone: with no-referrer browsers would send the form with the origin "null", which is refused.
    "referrer-policy": "strict-origin",
    "content-security-policy": content_policy().replace("form-action 'none'", "form-action 'self'"),
}
MAX_DEPTH = 4
ON_EXPIRY = {"error": "the agent is told that nobody answered", "deny": "it counts as denied", "halt": "the turn ends"}


def render_card(link: OpenedLink, pending: Pending, problem: str = "", refusal: str | None = None) -> bytes:
    """Return the page with the card and the buttons that the link allows.

    problem:  what was wrong with the decision that was sent
    refusal:  why the link's principal may not decide; there are no buttons then
    """
    prompt = pending.prompt or (f"Run {pending.tool}?" if pending.kind == "approval" else pending.tool)
    kind = "approval" if pending.kind == "approval" else f"question {pending.kind}"
    chip = f"{pending.risk} risk" if pending.kind == "approval" else {"manual": "manual"}.get(pending.kind, "question")
    alert = f'<p class="notice bad" role="alert">{text(problem)}</p>' if problem else ""
    role = "You decide as" if refusal is None else "This link is for"
    body = (
        f'<article class="card {kind} risk-{pending.risk}" aria-labelledby="title">'
        f'<header><h1 id="title">{text(prompt)}</h1></header>'
        f'<div class="facts"><p class="about"><span class="chip risk {pending.risk}">{text(chip)}</span> '
        f"<span><code>{text(pending.tool)}</code> for <b>{text(pending.principal.id)}</b>"
        f"{f', asked by <b>{text(pending.agent)}</b>' if pending.agent else ''}</span></p>{_warnings(pending)}"
        f"{_deciders(pending)}</div>"
        f"{_content(pending)}"
        f"{alert}"
        f"{_actions(link, pending) if refusal is None else _not_allowed(refusal)}"
        f"<footer><span>{_expiry(pending)}</span>"
        f"<span>{role} <b>{text(link.audience)}</b>.</span></footer></article>"
    )
    return _page(prompt, body)


def _expiry(pending: Pending) -> str:
    """Return when the call expires and what happens then, or when it runs if it is approved."""
    if pending.starts_at is not None:
        return f"Runs {text(_until(pending.starts_at))}."
    then = ON_EXPIRY.get(str(pending.on_expiry), "its declared result is used")
    return f"Expires {text(_until(pending.deadline))} ({text(format_time(pending.deadline))}). After that {then}."


def render_message(title: str, *paragraphs: str) -> bytes:
    """Return the page without a card: the outcome, or why there is nothing to decide."""
    inside = "".join(f"<p>{text(each)}</p>" for each in paragraphs)
    return _page(title, f'<article class="card"><h1>{text(title)}</h1>{inside}</article>')


def _page(title: str, body: str) -> bytes:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1, viewport-fit=cover">'
        '<meta name="color-scheme" content="light dark"><meta name="robots" content="noindex">'
        f"<title>{html.escape(title[:100])} - Holdfast</title>"
        '<link rel="icon" href="assets/icon.svg" type="image/svg+xml"><link rel="stylesheet" href="assets/style.css">'
        f'</head><body><main class="alone">{body}</main></body></html>'
    ).encode("utf-8", "replace")


def _warnings(pending: Pending) -> str:
    found: list[str] = []
    if pending.recovery:
        warning = "It was interrupted while running and may have taken effect. Approving runs it again."
        found.append(f'<p class="notice warn">{warning}</p>')
    elif pending.reason:
        found.append(f'<p class="notice">Reason: {text(pending.reason)}</p>')
    if pending.preview_error:
        found.append(f'<p class="notice bad">No preview: {text(pending.preview_error)}</p>')
    if pending.artifacts:
        names = ", ".join(artifact.name or artifact.sha256[:12] for artifact in pending.artifacts)
        found.append(f'<p class="notice warn">Not shown here: {text(names)}. Sign in to read it.</p>')
    return "".join(found)


def _deciders(pending: Pending) -> str:
    return "".join(f'<p class="about">{text(line)}</p>' for line in deciders(pending))


def _content(pending: Pending) -> str:
    preview = shown_preview(pending)
    sections: list[str] = []
    if preview is not None:
        sections.append(
            f'<section><h2>What would happen</h2><div class="preview">{value(preview, True)}</div></section>'
        )
    if pending.args:
        sections.append(f"<section><h2>Arguments</h2>{value(pending.args)}</section>")
    inside = "".join(sections)
    if not inside:
        return ""
    return f'<div class="content" tabindex="0" role="group" aria-label="What would happen"><div>{inside}</div></div>'


def _not_allowed(refusal: str) -> str:
    return f'<p class="notice warn">You may not decide: {text(refusal)}.</p>'


def _actions(link: OpenedLink, pending: Pending) -> str:
    """Return the forms. Each decision has its own, so that Enter in a text field never approves."""
    forms: list[str] = []
    if pending.starts_at is not None:
        if "approve" not in link.decisions:
            return ""
        return (
            '<form method="post" class="actions"><button class="undo" name="decision" value="take_back">'
            "Undo</button></form>"
        )
    vote = next((vote for vote in pending.votes if link.audience in vote.people), None)
    if vote is not None:
        approved = "You have approved it" if vote.by.id == link.audience else f"{vote.by.id} has approved it for you"
        forms.append(f'<p class="notice good">{text(approved)}.</p>')
    elif "approve" in link.decisions:
        once = "Approve" if pending.approvers > 1 else "Approve once"
        label = "Run it again" if pending.recovery else once
        forms.append(
            f'<form method="post" class="actions"><button class="primary approve" name="decision" value="approve">'
            f"{label}</button></form>"
        )
    tag = next((tag for tag in ("answer", "submit") if tag in link.decisions), None)
    if tag is not None:
        fields = "".join(_form_field(n, field) for n, field in enumerate(fields_of(pending)))
        label = "Send the answer" if tag == "answer" else "Submit the result"
        button = f'<div class="actions"><button class="primary" name="decision" value="{tag}">{label}</button></div>'
        form = f'<form method="post" class="given">{fields}{button}</form>'
        forms.append(f"<details><summary>Enter its result</summary>{form}</details>" if pending.recovery else form)
    refusal = next((tag for tag in ("deny", "failed") if tag in link.decisions), None)
    if refusal is not None:
        label = "It failed" if refusal == "failed" else "Deny" if pending.kind == "approval" else "Decline"
        forms.append(
            f'<details class="denial"><summary>{label}</summary><form method="post" class="actions">'
            '<label class="grow">Reason <span class="optional">the model sees it</span> '
            '<input class="reason" name="reason" maxlength="2000" autocomplete="off"></label>'
            f'<button class="danger" name="decision" value="{refusal}">{label}</button></form></details>'
        )
    return "".join(forms)


def _form_field(number: int, field: Field) -> str:
    id, name = f"field{number}", html.escape(f"value.{field.name}")
    required = " required" if field.required else ""
    optional = "" if field.required else ' <span class="optional">optional</span>'
    help = f'<span class="help">{text(field.description)}</span>' if field.description else ""
    label = f"{text(field.label)}{optional}"
    match field.type:
        case "choice":
            radios = "".join(
                f'<label><input type="radio" name="{name}" value="{n}"{required}> <span>{shown}</span></label>'
                for n, shown in enumerate(text(_brief(each)) for each in field.choices)
            )
            options = f'<div class="options">{radios}</div>{help}'
            return f'<fieldset class="field choices"><legend>{label}</legend>{options}</fieldset>'
        case "boolean":
            box = f'<input type="checkbox" name="{name}" value="true">'
            return f'<div class="field check"><label>{box} {label}</label>{help}</div>'
        case "number" | "integer":
            mode = "numeric" if field.type == "integer" else "decimal"
            box = f'<input id="{id}" name="{name}" inputmode="{mode}" autocomplete="off"{required}>'
        case "text":
            box = f'<textarea id="{id}" name="{name}" rows="3"{required}></textarea>'
        case "json":
            label += ' <span class="optional">JSON</span>'
            box = f'<textarea id="{id}" name="{name}" class="mono" rows="4" spellcheck="false"{required}></textarea>'
    return f'<div class="field"><label for="{id}">{label}</label>{box}{help}</div>'


# --- values, as elements/values.js renders them ---


def text(given: str) -> str:
    """Return text as markup, with invisible characters made visible."""
    return "".join(
        html.escape(char)
        if char in "\n\t" or not is_hidden(char)
        else f'<span class="unseen" title="invisible character">U+{ord(char):04X}</span>'
        for char in given
    )


def value(it: Any, from_tool: bool = False, depth: int = 0) -> str:
    """Return a JSON value as markup: text as text, objects as tables, and diffs that a tool has made as such."""
    match it:
        case None:
            return '<span class="null">null</span>'
        case str():
            if from_tool and it.startswith(("--- ", "diff ")) and "\n@@ " in it:
                return _diff(it)
            if not it:
                return '<span class="null">empty</span>'
            return f'<pre class="text">{text(it)}</pre>' if "\n" in it else f'<span class="text">{text(it)}</span>'
        case dict() | list() if depth >= MAX_DEPTH:
            return f'<pre class="text">{text(msgspec.json.encode(it).decode())}</pre>'
        case dict():
            rows = "".join(
                f'<tr><th scope="row">{text(str(name))}</th><td>{value(each, from_tool, depth + 1)}</td></tr>'
                for name, each in cast("Mapping[Any, Any]", it).items()
            )
            return f'<table class="values"><tbody>{rows}</tbody></table>' if rows else '<span class="null">none</span>'
        case list():
            items = "".join(f"<li>{value(each, from_tool, depth + 1)}</li>" for each in cast("list[Any]", it))
            return f'<ol class="values">{items}</ol>' if items else '<span class="null">none</span>'
        case _:
            return f'<span class="scalar">{text(_brief(it))}</span>'


_DIFF_LINES = {"+": ("added", "added: "), "-": ("removed", "removed: "), "@": ("about", "")}


def _diff(given: str) -> str:
    lines: list[str] = []
    for line in given.splitlines():
        about = line.startswith(("--- ", "+++ ", "@@ ", "diff "))
        mark = "@" if about else line[:1]
        kind, aloud = _DIFF_LINES.get(mark, ("kept", ""))
        spoken = f'<span class="sr">{aloud}</span>' if aloud else ""
        shown = line if about else line[1:]
        lines.append(
            f'<div class="{kind}"><span class="mark" aria-hidden="true">{"" if about else text(mark)}</span>{spoken}'
            f"<code>{text(shown)}</code></div>"
        )
    return f'<div class="diff" role="group" aria-label="Differences"><div class="block">{"".join(lines)}</div></div>'


def _brief(it: Any) -> str:
    return it if isinstance(it, str) else msgspec.json.encode(it).decode()


def _until(deadline: float) -> str:
    left = max(0.0, deadline - time.time())
    for size, word in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if left >= size:
            count = round(left / size)
            return f"in {count} {word}{'s' if count > 1 else ''}"
    return "in less than a minute"
