"""Serves recorded exchanges with providers, in their order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.http_provider import Heard, Say, Wire

RECORDINGS = Path(__file__).parents[1] / "models" / "recordings"


def recorded(name: str) -> list[dict[str, Any]]:
    """The exchanges with a model (not those that uploaded files and the like)."""
    exchanges = json.loads((RECORDINGS / f"{name}.json").read_text())["exchanges"]
    asked = ("/v1/messages", "/responses", "/completions", "Content")
    return [e for e in exchanges if e["request"]["method"] == "POST" and any(a in e["request"]["path"] for a in asked)]


def playback(*exchanges: dict[str, Any]) -> Wire:
    """Answers with these, streams in small pieces that respect neither lines nor events."""
    left = list(exchanges)

    async def answer(heard: Heard, say: Say) -> None:
        response = left.pop(0)["response"]
        body = response["body"]
        if "event-stream" not in response["content_type"]:
            await say.json(response["status"], body)
            return
        await say.stream(response["content_type"])
        for at in range(0, len(body), 997):
            await say.chunk(body[at : at + 997])
        await say.end()

    return Wire(answer)
