"""Requests for models, and replies as the runtime would log them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.transcript import AssistantMessage, ToolResult, ToolUse, UserMessage
from holdfast.models.base import (
    FinishPart,
    HostedPart,
    ProviderPart,
    Request,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolOffer,
    UsagePart,
)

ODD_SCHEMA = {
    "type": "object",
    "title": "An odd schema",
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$defs": {"Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}},
    "properties": {
        "node": {"$ref": "#/$defs/Node", "description": "goes round"},
        "word": {"type": ["string", "null"], "pattern": "^a+$", "minLength": 2, "default": None, "format": "uri"},
        "either": {"oneOf": [{"const": 1}, {"type": "array", "prefixItems": [{"type": "number"}], "maxItems": 1}]},
        "x-own": {"x-note": ["kept"], "examples": [{}]},
    },
    "required": ["word"],
    "patternProperties": {"^x": {}},
    "additionalProperties": {"type": "integer", "exclusiveMinimum": 0},
}
"""A valid JSON Schema that provider layers tend to rewrite."""


def user(text="hello"):
    return UserMessage(text=text, seq=1, turn=1, by="u")


def assistant(text="", *calls, **fields):
    return AssistantMessage(id="m", turn=1, text=text, calls=calls, **fields)


def use(name, id, args=None, raw=None):
    return ToolUse(id=id, call=id, name=name, args=args or {}, raw=raw)


def result(use, content='{"ok":true,"result":1}', ok=True, images=()):
    return ToolResult(id=use.id, call=use.call, tool=use.name, ok=ok, content=content, images=tuple(images))


def offer(name, schema=None, description=""):
    return ToolOffer(
        name=name, description=description, parameters=json.dumps(schema or {"type": "object", "properties": {}})
    )


def hosted_tool(name, **options):
    return ToolOffer(
        name=name,
        description="",
        parameters='{"type":"object"}',
        provider=True,
        metadata={"provider_options": options},
    )


def request(*messages, instructions="", **fields):
    given = [user(m) if isinstance(m, str) else m for m in messages] or [user()]
    return Request(conversation="c", turn=1, step=1, instructions=instructions, messages=given, **fields)


@dataclass
class CollectedReply:
    """A reply, assembled from its parts as the runtime does it."""

    parts: list[Any] = field(default_factory=list)

    def of(self, kind):
        return [part for part in self.parts if isinstance(part, kind)]

    @property
    def text(self):
        return "".join(part.text for part in self.of(TextPart))

    @property
    def thinking(self):
        return "".join(part.text for part in self.of(ThinkingPart))

    @property
    def calls(self):
        made: dict[int, ToolUse] = {}
        for index in sorted({part.index for part in self.of(ToolCallPart)}):
            pieces = [part for part in self.of(ToolCallPart) if part.index == index]
            whole = [piece.args for piece in pieces if isinstance(piece.args, dict)]
            text = "".join(piece.args for piece in pieces if isinstance(piece.args, str))
            id = next(piece.id for piece in pieces if piece.id)
            name = "".join(piece.name for piece in pieces if piece.name)
            made[index] = use(name, id, whole[0] if whole else json.loads(text or "{}"))
        return tuple(made.values())

    @property
    def hosted(self):
        return self.of(HostedPart)

    @property
    def records(self):
        return [{"kind": part.kind, "data": part.data} for part in self.of(ProviderPart)]

    @property
    def usage(self):
        return self.of(UsagePart)[-1].usage

    @property
    def finish(self):
        return self.of(FinishPart)[-1].reason

    def message(self, provider):
        """Return the reply as a message of the log, after a round trip through JSON."""
        return AssistantMessage(
            id="m",
            turn=1,
            text=self.text,
            thinking=self.thinking,
            calls=self.calls,
            parts=json.loads(json.dumps(self.records)) or None,
            provider=provider,
        )


async def ask(model, *messages, into=None, **fields):
    """Send a request to a model and return its reply."""
    sent = messages[0] if messages and isinstance(messages[0], Request) else request(*messages, **fields)
    got = CollectedReply() if into is None else into
    async for part in model.stream(sent):
        got.parts.append(part)
    return got
