"""Waiting calls as elicitations: what a client shows to its user, and the decision that comes back."""

from __future__ import annotations

from typing import Any, cast

import mcp_types as types
import msgspec

from holdfast.channels.card import Field, answer_of, fields_of, shown_preview
from holdfast.core.decisions import Answer, Approve, Decision, Deny, Pending
from holdfast.core.text.hidden_characters import is_hidden
from holdfast.core.text.html_card import format_time
from holdfast.errors import Invalid

MAX_MESSAGE = 16_000
"""Characters of the message of an elicitation. A longer plan is cut, and the message says so."""
KEPT_KEYWORDS = (
    "type", "title", "description", "default", "format",
    "minLength", "maxLength", "minimum", "maximum", "minItems", "maxItems",
)  # fmt: skip
CHOICE_KEYWORDS = ("enum", "enumNames", "oneOf")
"""What of a property's schema goes into a form as it is. The answer is checked against the whole schema."""
TYPES = {"text": "string", "number": "number", "integer": "integer", "boolean": "boolean"}
WHOLE = "answer"
"""The name of the only field, if the answer is no object."""


def can_ask(entry: Pending) -> bool:
    """Return whether a form can carry the decision: an approval, or the answer to a question."""
    return entry.kind in ("approval", "elicitation")


def key_of(entry: Pending) -> str:
    """Return the key of a question in a round: the title of the answer's schema, or the kind of the decision."""
    if entry.kind == "approval":
        return "approval"
    title = entry.schema.get("title") if isinstance(entry.schema, dict) else None
    return title if isinstance(title, str) and title.isidentifier() else WHOLE


def make_form(entry: Pending, problem: str = "") -> types.ElicitRequestFormParams:
    """Return the form for a waiting call. ``problem`` says why an earlier answer was not accepted."""
    message = f"{problem}\n\n{describe(entry)}" if problem else describe(entry)
    return types.ElicitRequestFormParams(message=message, requested_schema=_schema(entry))


def describe(entry: Pending) -> str:
    """Return what a person has to know about a waiting call, as text with visible characters only."""
    parts = [entry.prompt or f"{entry.tool}?"]
    if entry.recovery:
        parts.append("It was interrupted while running and may have taken effect. Approving runs it again.")
    elif entry.reason:
        parts.append(f"Reason: {entry.reason}")
    if entry.preview_error:
        parts.append(f"No preview: {entry.preview_error}")
    preview = shown_preview(entry)
    if preview is not None:
        parts.append(f"What would happen:\n{preview if isinstance(preview, str) else _json(preview)}")
    if entry.kind == "approval":
        parts.append(f"Call: {entry.tool} {_json(entry.args)}")
    elif entry.args:
        parts.append(_json(entry.args))
    text = _visible("\n\n".join(parts))
    if len(text) > MAX_MESSAGE:
        text = f"{text[:MAX_MESSAGE]}…\n\n({len(text) - MAX_MESSAGE} more characters are not shown here.)"
    if entry.artifacts:
        names = ", ".join(each.name or each.sha256[:12] for each in entry.artifacts)
        text += f"\n\nNot shown here: {_visible(names)}."
    votes = f" {entry.missing} approvals are missing." if entry.missing > 1 else ""
    return f"{text}\n\n{entry.risk} risk, expires {format_time(entry.deadline)}.{votes}"


def _json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def _visible(text: str) -> str:
    return "".join(c if c in "\n\t" or not is_hidden(c) else f"<U+{ord(c):04X}>" for c in text)


def _schema(entry: Pending) -> dict[str, Any]:
    if entry.kind == "approval":
        label = "Run it again" if entry.recovery else "Approve"
        return {
            "type": "object",
            "properties": {
                "approve": {"type": "boolean", "title": label},
                "reason": {"type": "string", "title": "Reason, if you do not approve"},
            },
            "required": ["approve"],
        }
    fields = fields_of(entry)
    return {
        "type": "object",
        "properties": {field.name or WHOLE: _property(entry, field) for field in fields},
        "required": [field.name or WHOLE for field in fields if field.required],
    }


def _property(entry: Pending, field: Field) -> dict[str, Any]:
    """Return the schema of a field in a form, where only simple types are allowed."""
    simple = _simple_schema(entry, field)
    if simple is not None:
        return simple
    shown = {"title": field.label, **({"description": field.description} if field.description else {})}
    match field.type:
        case "choice":
            return {**shown, "type": "string", "enum": [_choice(each) for each in field.choices]}
        case "json":
            return {**shown, "type": "string", "description": f"{field.description} (as JSON)".strip()}
        case _:
            return {**shown, "type": TYPES[field.type]}


def _simple_schema(entry: Pending, field: Field) -> dict[str, Any] | None:
    """Return the schema of a field as it was declared, if forms allow it; None if its values have to be converted."""
    schema: dict[str, Any] = entry.schema if isinstance(entry.schema, dict) else {}
    properties: dict[str, Any] = schema.get("properties") or {}
    given: Any = properties.get(field.name) if field.name else schema
    if not isinstance(given, dict) or (field.name == "" and entry.choices):
        return None
    source = cast("dict[str, Any]", given)
    kept = {name: source[name] for name in KEPT_KEYWORDS if name in source}
    match source.get("type"):
        case "string" if all(isinstance(each, str) for each in source.get("enum") or ()):
            return kept | {name: source[name] for name in CHOICE_KEYWORDS if name in source}
        case "number" | "integer" | "boolean" if "enum" not in source:
            return kept
        case "array" if isinstance(source.get("items"), dict) and {"enum", "anyOf"} & set(source["items"]):
            return kept | {"items": source["items"]}
        case _:
            return None


def _choice(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def read_answer(entry: Pending, digest: str, given: types.ElicitResult) -> Decision | None:
    """Return the decision of a person, or None if the form was closed without one. Raise Invalid if it does not fit.

    digest:  that of the call as it was shown: an approval counts for nothing else
    """
    content = given.content or {}
    if given.action == "cancel":
        return None
    if given.action == "decline":
        return Deny(str(content.get("reason") or "declined"))
    if entry.kind == "approval":
        approved = content.get("approve")
        if not isinstance(approved, bool):
            raise Invalid("`approve` is true or false")
        return Approve(digest=digest) if approved else Deny(str(content.get("reason") or ""))
    decision = answer_of(entry, _value(entry, content))
    assert isinstance(decision, Answer)
    return decision


def _value(entry: Pending, content: dict[str, Any]) -> Any:
    fields = fields_of(entry)
    if [field.name for field in fields] == [""]:
        if WHOLE not in content:
            raise Invalid(f"`{WHOLE}` is missing")
        return _read(entry, fields[0], content[WHOLE])
    given = [field for field in fields if content.get(field.name) is not None]
    return {field.name: _read(entry, field, content[field.name]) for field in given}


def _read(entry: Pending, field: Field, value: Any) -> Any:
    if _simple_schema(entry, field) is not None:
        return value  # the schema of the answer checks it
    match field.type:
        case "choice":
            for each in field.choices:
                if value == _choice(each):
                    return each
            raise Invalid(f"{field.label}: choose one of the answers")
        case "json":
            try:
                return msgspec.json.decode(str(value))
            except msgspec.DecodeError:
                raise Invalid(f"{field.label}: this is not JSON") from None
        case _:
            return value
