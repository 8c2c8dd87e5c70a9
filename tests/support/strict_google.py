"""Google's Gemini API, as strict as the real one is with Gemini 3."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from support.strict_rules import NAME, check_image, check_tools, halves, must

from holdfast.models import Thinking, ToolCall

THOUGHT_SIGNATURE = base64.b64encode(b"thought so").decode()


GEMINI_IMAGES = ("image/png", "image/jpeg", "image/webp")


class Gemini:
    """Formats pieces as the chunks of a Gemini stream."""

    def __init__(self, new_id: Callable[[], str]):
        self._new_id = new_id

    def pieces(self, pieces: Sequence[Any]) -> Iterator[str]:
        yield self._chunk({"text": ""})
        signed = False
        for piece in pieces:
            match piece:
                case str():
                    for word in re.findall(r"\S*\s*", piece):
                        if word:
                            yield self._chunk({"text": word})
                case Thinking():
                    yield self._chunk({"text": piece.text, "thought": True})
                case ToolCall():
                    text = "".join(halves(piece))
                    try:
                        args = json.loads(text)
                    except ValueError:
                        args = None  # Gemini sends values, not text: they are always valid JSON
                    given = args if isinstance(args, dict) else {"odd": text}
                    call = {"id": piece.id or self._new_id(), "name": piece.name, "args": given}
                    signature = {} if signed else {"thoughtSignature": THOUGHT_SIGNATURE}
                    signed = True
                    yield self._chunk({"functionCall": call, **signature})

    def end(self, calls: bool) -> Iterator[str]:
        yield self._chunk({"text": "", **({} if calls else {"thoughtSignature": THOUGHT_SIGNATURE})}, "STOP")

    def error(self, type: str) -> str:
        return f"data: {json.dumps({'error': {'code': 503, 'message': 'it broke', 'status': type}})}\n\n"

    def _chunk(self, part: Any, finish: str | None = None) -> str:
        candidate: dict[str, Any] = {"content": {"role": "model", "parts": [part]}, "index": 0}
        if finish:
            candidate["finishReason"] = finish
        usage = {"promptTokenCount": 10, "candidatesTokenCount": 5, "totalTokenCount": 15}
        data = {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "gemini-3-pro", "responseId": "r"}
        return f"data: {json.dumps(data)}\n\n"


def count_google(body: Any) -> int:
    """Return how many replies a request holds."""
    return sum(content["role"] == "model" for content in body["contents"])


def check_google(body: Any) -> None:
    contents = body.get("contents")
    must(contents, "contents is not specified")
    for tools in body.get("tools") or []:
        declared = tools.get("functionDeclarations") or []
        check_tools(
            [(tool["name"], tool.get("parametersJsonSchema", tool.get("parameters_json_schema"))) for tool in declared]
        )
    must(contents[0]["role"] == "user", "Please ensure that multiturn requests begin with a user turn")
    must(contents[-1]["role"] == "user", "Please ensure that multiturn requests end with a user turn")
    asked = max(
        at
        for at, content in enumerate(contents)
        if content["role"] == "user" and not _function_parts(content, "Response")
    )
    due: list[tuple[str, str]] = []
    for at, content in enumerate(contents):
        where, parts = f"contents[{at}]", content.get("parts")
        must(parts, f"{where}: Unable to submit request because it must include at least one parts field")
        calls, responses = _function_parts(content, "Call"), _function_parts(content, "Response")
        if content["role"] == "user":
            given = [(response["id"], response["name"]) for response in responses]
            must(
                sorted(given) == sorted(due),
                f"{where}: Please ensure that the number of function response parts is equal to the number of function "
                f"call parts of the function call turn: {given} for {due}",
            )
            due = []
            must(not responses or len(responses) == len(parts), f"{where}: function responses stand by themselves")
            for part in parts:
                must("text" not in part or part["text"].strip(), f"{where}: text must not be empty")
                held = [part, *part.get("functionResponse", {}).get("parts", ())]
                blobs = [blob for blob in map(inline_data, held) if blob is not None]
                must(blobs or part.keys() & {"text", "functionResponse"}, f"{where}: required oneof field 'data'")
                for media_type, data in blobs:
                    check_image(where, media_type, data, GEMINI_IMAGES)
            continue
        must(content["role"] == "model", f"{where}: Please use a valid role: user, model.")
        must(not due, f"{where}: function calls without responses: {due}")
        must(
            calls or any(part.get("text", "").strip() and not part.get("thought") for part in parts),
            f"{where}: must include at least one parts field that is not a thought",
        )
        if not calls:
            continue
        must(
            contents[at - 1]["role"] == "user",
            f"{where}: Please ensure that function call turn comes immediately after a user turn or after a function "
            "response turn.",
        )
        first = next(part for part in parts if "functionCall" in part)
        must(
            at < asked or first.get("thoughtSignature"),
            f"{where}: Function call is missing a thought_signature in functionCall parts.",
        )
        for call in calls:
            must(NAME.fullmatch(call["name"]), f"{where}: Invalid function name {call['name']!r}")
            must(isinstance(call.get("args") or {}, dict), f"{where}: args must be a struct")
            due.append((call["id"], call["name"]))
    must(not due, f"function calls without responses: {due}")


def inline_data(part: Any) -> tuple[str, str] | None:
    """Return the media type and the base64 text of a part with bytes.

    Google reads both forms of a name, and both alphabets of base64; its SDK mixes them.
    """
    blob = part.get("inlineData", part.get("inline_data"))
    if blob is None:
        return None
    return blob.get("mimeType", blob.get("mime_type")), blob["data"].replace("-", "+").replace("_", "/")


def _function_parts(content: Any, kind: str) -> list[Any]:
    return [part[f"function{kind}"] for part in content["parts"] if f"function{kind}" in part]
