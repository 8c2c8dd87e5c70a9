"""OpenAI's Responses API, as strict as the real one.

Its rule for reasoning: "Item 'rs_...' of type 'reasoning' was provided without its required following item", and the
other way round "Item 'fc_...' of type 'function_call' was provided without its required 'reasoning' item". The ids that
this server generates show what belongs together: ``rs_7`` is followed by ``msg_7_1``, then ``fc_7_2``. ``0`` means no
reasoning: ``msg_0_9``.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from support.strict_rules import NAME, check_image_url, check_tools, halves, must

from holdfast.models import Thinking, ToolCall

_IDS = itertools.count(1)
_ITEM = re.compile(r"[a-z]+_(\d+)_(\d+)")


class Responses:
    """Formats pieces as events of a Responses stream."""

    def __init__(self, new_id: Callable[[], str]):
        self._new_id, self._output, self._n = new_id, [], 0
        self._group, self._place = 0, 0

    def pieces(self, pieces: Sequence[Any]) -> Iterator[str]:
        yield self._event("response.created", response=self._response("in_progress"))
        for piece in pieces:
            match piece:
                case str():
                    yield from self._text(piece)
                case Thinking():
                    yield from self._reasoning(piece.text)
                case ToolCall():
                    yield from self._call(piece)

    def end(self, calls: bool) -> Iterator[str]:
        yield self._event("response.completed", response=self._response("completed"))

    def error(self, type: str) -> str:
        return self._event("error", code=type, message="it broke", param=None)

    def _reasoning(self, text: str) -> Iterator[str]:
        self._group, self._place = next(_IDS), 0
        about = {"item_id": f"rs_{self._group}", "output_index": len(self._output), "summary_index": 0}
        item = {"id": about["item_id"], "type": "reasoning", "summary": [], "encrypted_content": "sealed"}
        yield self._added(item)
        part = {"type": "summary_text", "text": ""}
        yield self._event("response.reasoning_summary_part.added", **about, part=part)
        yield self._event("response.reasoning_summary_text.delta", **about, delta=text)
        part = {"type": "summary_text", "text": text}
        yield self._event("response.reasoning_summary_text.done", **about, text=text)
        yield self._event("response.reasoning_summary_part.done", **about, part=part)
        yield self._done({**item, "summary": [part]})

    def _text(self, text: str) -> Iterator[str]:
        item = {"id": self._item("msg"), "type": "message", "role": "assistant", "content": []}
        about = {"item_id": item["id"], "output_index": len(self._output), "content_index": 0}
        yield self._added({**item, "status": "in_progress"})
        part = {"type": "output_text", "text": "", "annotations": []}
        yield self._event("response.content_part.added", **about, part=part)
        for word in re.findall(r"\S*\s*", text):
            if word:
                yield self._event("response.output_text.delta", **about, delta=word, logprobs=[])
        part = {**part, "text": text}
        yield self._event("response.output_text.done", **about, text=text, logprobs=[])
        yield self._event("response.content_part.done", **about, part=part)
        yield self._done({**item, "status": "completed", "content": [part]})

    def _call(self, call: ToolCall) -> Iterator[str]:
        item = {
            "id": self._item("fc"),
            "type": "function_call",
            "name": call.name,
            "call_id": call.id or self._new_id(),
        }
        about = {"item_id": item["id"], "output_index": len(self._output)}
        yield self._added({**item, "status": "in_progress", "arguments": ""})
        for half in halves(call):
            yield self._event("response.function_call_arguments.delta", **about, delta=half)
        arguments = "".join(halves(call))
        yield self._event("response.function_call_arguments.done", **about, arguments=arguments, name=call.name)
        yield self._done({**item, "status": "completed", "arguments": arguments})

    def _item(self, kind: str) -> str:
        if not self._group:
            return f"{kind}_0_{next(_IDS)}"
        self._place += 1
        return f"{kind}_{self._group}_{self._place}"

    def _added(self, item: Any) -> str:
        return self._event("response.output_item.added", output_index=len(self._output), item=item)

    def _done(self, item: Any) -> str:
        self._output.append(item)
        return self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _response(self, status: str) -> Any:
        usage = {"input_tokens": 10, "output_tokens": 5, "total_tokens": 15}
        details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        about = {"id": "resp_1", "object": "response", "created_at": 1, "status": status, "model": "gpt-5"}
        asked = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
        return {**about, **asked, "output": list(self._output), "error": None, "usage": {**usage, **details}}

    def _event(self, type: str, **data: Any) -> str:
        self._n += 1
        return f"event: {type}\ndata: {json.dumps({'type': type, 'sequence_number': self._n, **data})}\n\n"


def count_responses(body: Any) -> int:
    """Return how many replies a request holds: runs of items that the model wrote."""
    own = [_is_own(item) for item in body["input"]]
    return sum(here and not before for before, here in zip([False, *own], own, strict=False))


def _is_own(item: Any) -> bool:
    return item.get("role") == "assistant" or item.get("type") in ("reasoning", "function_call")


def check_responses(body: Any) -> None:
    items = body.get("input")
    must(items, "Missing required parameter: 'input'.")
    check_tools([(tool["name"], tool.get("parameters")) for tool in body.get("tools") or [] if "name" in tool])
    ids = [item["id"] for item in items if item.get("id")]
    must(len(set(ids)) == len(ids), f"Duplicate item found with id {ids}. Remove duplicate items.")
    due: list[str] = []
    thought: set[str] = set()
    for at, item in enumerate(items):
        where = f"input[{at}]"
        match item.get("type", "message"):
            case "reasoning":
                id = item["id"]
                thought.add(id.removeprefix("rs_"))
                follows = items[at + 1].get("id") if at + 1 < len(items) else None
                named = _ITEM.fullmatch(follows or "")
                must(
                    named is not None and named[1] == id.removeprefix("rs_"),
                    f"Item {id!r} of type 'reasoning' was provided without its required following item.",
                )
                must(named is not None and named[2] == "1", f"Item {id!r} has another item behind it: {follows!r}")
            case "message":
                must(item["role"] in ("user", "assistant", "system", "developer"), f"{where}: role {item['role']!r}")
                content = item["content"]
                must(content, f"{where}: content must not be empty")
                _check_content(where, content)
            case "function_call":
                id = item["call_id"]
                must(0 < len(id) <= 64, f"{where}: string too long: {id!r}, maximum length 64")
                must(id not in due, f"{where}: duplicate call_id {id!r}")
                must(NAME.fullmatch(item["name"]), f"{where}: bad name {item['name']!r}")
                must(isinstance(json.loads(item["arguments"]), dict), f"{where}: arguments must be an object")
                due.append(id)
            case "function_call_output":
                id = item["call_id"]
                must(id in due, f"No tool call found for function call output with call_id {id}.")
                due.remove(id)
                _check_content(where, item["output"])
            case other:
                must(other.endswith("_call"), f"{where}: Invalid value: {other!r}")
        group = _ITEM.fullmatch(item.get("id") or "")
        must(
            group is None or group[1] == "0" or group[1] in thought,
            f"Item {item.get('id')!r} was provided without its required 'reasoning' item.",
        )
    must(not due, f"No tool output found for function call {due}.")


def _check_content(where: str, content: str | list[Any]) -> None:
    """Check the content of a message or of a function's output: text, or a list of texts and images."""
    for part in [{"type": "input_text", "text": content}] if isinstance(content, str) else content:
        match part["type"]:
            case "input_text" | "output_text":
                must(part["text"].strip(), f"{where}: content must not be empty")
            case "input_image":
                check_image_url(where, part["image_url"])
            case other:
                must(False, f"{where}: Invalid value: {other!r}")
