"""Recorded exchanges with providers, and a server that plays them back in order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.http_provider import HTTPProvider, ReceivedRequest, Responder

RECORDINGS = Path(__file__).parents[1] / "models" / "recordings"


def load_exchanges(name: str) -> list[dict[str, Any]]:
    """Return the exchanges with a model, without file uploads and the like."""
    exchanges = json.loads((RECORDINGS / f"{name}.json").read_text())["exchanges"]
    asked = ("/v1/messages", "/responses", "/completions", "Content")
    return [e for e in exchanges if e["request"]["method"] == "POST" and any(a in e["request"]["path"] for a in asked)]


def playback(*exchanges: dict[str, Any]) -> HTTPProvider:
    """Return a server that gives these responses in order; streams come in chunks that split lines and events."""
    left = list(exchanges)

    async def answer(incoming: ReceivedRequest, response: Responder) -> None:
        recording = left.pop(0)["response"]
        body = recording["body"]
        if "event-stream" not in recording["content_type"]:
            await response.json(recording["status"], body)
            return
        await response.stream(recording["content_type"])
        for at in range(0, len(body), 997):
            await response.chunk(body[at : at + 997])
        await response.end()

    return HTTPProvider(answer)
