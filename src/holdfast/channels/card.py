"""What channels show of a notice: the words that all of them share, and the fields of a question's answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import msgspec

from holdfast.core.decisions import Answer, Decision, Failed, Pending, Principal, Submit, describe_deciders
from holdfast.core.notice import Notice
from holdfast.core.text.hidden_characters import is_hidden
from holdfast.core.text.html_card import format_start, format_time
from holdfast.core.text.redaction import redact_secrets
from holdfast.errors import DeclarationError, Invalid

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_LINE = 150
"""Characters of a subject or a title."""


def check_name(name: str) -> str:
    """Return the name of a channel, which is also a part of addresses; refuse other characters."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DeclarationError(f"a channel's name has 1-64 letters, digits, '.', '_' and '-', not {name!r:.80}")
    return name


def public_principal(principal: Principal) -> Principal:
    """Return a principal without the claims of its sign-in."""
    return Principal(principal.id, principal.roles) if principal.claims else principal


def public_pending(pending: Pending) -> Pending:
    """Return a pending call without the claims of the requester and of the people who have voted."""
    votes = tuple(
        msgspec.structs.replace(
            vote, by=public_principal(vote.by), on_behalf_of=vote.on_behalf_of and public_principal(vote.on_behalf_of)
        )
        for vote in pending.votes
    )
    return msgspec.structs.replace(pending, principal=public_principal(pending.principal), votes=votes)


def one_line(text: str, limit: int = MAX_LINE) -> str:
    """Return the text in one line without hidden characters, cut at the limit."""
    line = " ".join("".join(" " if is_hidden(char) else char for char in text).split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def redact_value(value: Any) -> Any:
    """Return a JSON value with ``[redacted]`` in place of everything that looks like a secret."""
    match value:
        case str():
            return redact_secrets(value)
        case dict():
            return {str(k): redact_value(v) for k, v in cast("dict[Any, Any]", value).items()}
        case list() | tuple():
            return [redact_value(each) for each in cast("Sequence[Any]", value)]
        case _:
            return value


def value_text(value: Any, limit: int) -> str:
    """Return a value as text or indented JSON: without secrets, hidden characters by their code, cut at the limit."""
    shown = redact_value(value)
    text = shown if isinstance(shown, str) else msgspec.json.format(msgspec.json.encode(shown), indent=2).decode()
    visible = "".join(char if char in "\n\t" or not is_hidden(char) else f"<U+{ord(char):04X}>" for char in text)
    more = len(visible) - limit
    return visible if more <= 0 else f"{visible[:limit]}\n… {more} more characters"


def title(notice: Notice) -> str:
    """Return what the notice is about in one line, such as "Approve refund: Give 5 EUR back?"."""
    what = one_line(redact_secrets(notice.prompt or notice.tool or notice.conversation))
    match notice.kind:
        case "suspended" | "reminder" | "escalated" | "taken_back":
            entry = notice.pending
            verb = {"approval": "Approve", "elicitation": "Answer", "manual": "Do"}.get(entry.kind if entry else "", "")
            marks = {"reminder": "Reminder: ", "escalated": "Escalated: ", "taken_back": "Taken back: "}
            late = marks.get(notice.kind, "")
            return one_line(f"{late}{verb} {notice.tool}: {what}" if notice.prompt else f"{late}{verb} {notice.tool}?")
        case "turn_ended":
            return one_line(f"Turn {notice.outcome}: {notice.conversation}")
        case "resolved" if notice.by.id == "system":
            return one_line(f"{notice.tool} was {notice.outcome}: {what}")
        case "resolved":
            return one_line(f"{notice.tool} was {notice.outcome} by {notice.decider}: {what}")
        case "expired":
            return one_line(f"{notice.tool} has expired: {what}")
        case "voted":
            return one_line(f"{notice.decider} approved {notice.tool}: {what}")
        case "approved":
            return one_line(f"{notice.decider} approved {notice.tool}, which runs soon: {what}")
        case "extended":
            return one_line(f"{notice.decider} extended the deadline of {notice.tool}: {what}")


def facts(notice: Notice) -> list[str]:
    """Return facts about the call or the turn, for the last line of a message."""
    found = [f"agent {notice.agent} for {notice.principal.id}" if notice.agent else ""]
    if notice.pending is not None:
        starts_at = notice.pending.starts_at
        when = (
            f"expires {format_time(notice.pending.deadline)}" if starts_at is None else f"runs {format_time(starts_at)}"
        )
        found += [f"{notice.pending.risk} risk", when]
    found.append(f"{notice.conversation}/{notice.suspension}" if notice.suspension else notice.conversation)
    return [one_line(each) for each in found if each]


def deciders(pending: Pending) -> list[str]:
    """Return sentences that say who may decide, who has approved and who is missing."""
    return [one_line(line, 500) for line in describe_deciders(pending, format_start)]


def shown_preview(pending: Pending) -> Any:
    """Return the plan of a call if it says more than its arguments; else None."""
    plain = {"tool": pending.tool, "args": pending.args}
    return None if pending.kind != "approval" or pending.preview == plain else pending.preview


# --- answers by form: on the page behind a link, and in Slack's modals ---


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """One field of a form. Values that have no type of their own are entered as JSON."""

    name: str
    """Empty: the field is the whole value."""
    label: str
    type: Literal["text", "number", "integer", "boolean", "choice", "json"]
    required: bool = True
    description: str = ""
    choices: tuple[Any, ...] = ()


def fields_of(pending: Pending) -> list[Field]:
    """Return the fields of the form for the answer to a question, or for the result of a manual call."""
    schema: Any = pending.schema if isinstance(pending.schema, dict) else {}
    if pending.choices:
        return [Field(name="", label="Your answer", type="choice", choices=tuple(pending.choices))]
    label = "Result" if pending.kind in ("manual", "approval") else "Answer"
    whole = _field("", label, schema, required=True)
    properties: dict[str, Any] = schema.get("properties") or {}
    if whole.type != "json" or not properties or schema.get("type") != "object":
        return [whole]
    needed: list[str] = schema.get("required") or []
    return [_field(name, name, each, required=name in needed) for name, each in properties.items()]


def _field(name: str, label: str, schema: Any, *, required: bool) -> Field:
    if not isinstance(schema, dict):
        return Field(name=name, label=label, type="json", required=required)
    given = cast("dict[str, Any]", schema)
    shown: dict[str, Any] = {
        "label": str(given.get("title") or label),
        "description": str(given.get("description") or ""),
    }
    if isinstance(given.get("enum"), list):
        return Field(name=name, type="choice", choices=tuple(given["enum"]), required=required, **shown)
    types = {"string": "text", "number": "number", "integer": "integer", "boolean": "boolean"}
    return Field(name=name, type=cast("Any", types.get(str(given.get("type")), "json")), required=required, **shown)


def read_fields(pending: Pending, given: Mapping[str, str]) -> Any:
    """Return the value of a form; ``given`` has the texts by field name. Raise Invalid where one has the wrong type."""
    fields = fields_of(pending)
    if [field.name for field in fields] == [""]:
        return _read_field(fields[0], given.get("", ""))
    value: dict[str, Any] = {}
    for field in fields:
        text = given.get(field.name, "")
        if text or field.type == "boolean" or (field.required and field.type == "text"):
            value[field.name] = _read_field(field, text)
    return value


def _read_field(field: Field, text: str) -> Any:
    where = field.label
    match field.type:
        case "text":
            return text
        case "boolean":
            return text in ("true", "on", "yes", "1")
        case "choice":
            if text.isdigit() and int(text) < len(field.choices):
                return field.choices[int(text)]
            raise Invalid(f"{where}: choose one of the answers")
        case "number" | "integer":
            try:
                return int(text) if field.type == "integer" else float(text)
            except ValueError:
                raise Invalid(f"{where}: {text[:40]!r} is not a number") from None
        case "json":
            try:
                return msgspec.json.decode(text)
            except (msgspec.DecodeError, UnicodeError):
                raise Invalid(f"{where}: this is not JSON") from None


def answer_of(pending: Pending, value: Any) -> Decision:
    """Return the decision that gives this value."""
    return Answer(value) if pending.kind == "elicitation" else Submit(value)


def failure_of(reason: str) -> Decision:
    """Return the decision that a manual call could not be done."""
    return Failed("handler_failed", reason or "it could not be done")
