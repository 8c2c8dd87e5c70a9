"""Calling the model: one request, a stream of parts, one reply. Deltas go to viewers only."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from assent.core.effects import CallModel
from assent.core.events import Attempt, ErrorInfo, Usage
from assent.core.inputs import CallWanted, ModelFailed, ModelReplied
from assent.core.live import TextDelta, ThinkingDelta
from assent.core.machine import message_id
from assent.core.schema import check_plain
from assent.errors import AssentError, Invalid, ModelError
from assent.models.base import (
    FinishPart,
    ProviderPart,
    Request,
    StreamPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    UsagePart,
)

if TYPE_CHECKING:
    from assent.runtime.agent import Agent
    from assent.runtime.conversation import Conversation


async def run(conv: Conversation, effect: CallModel) -> None:
    turn = conv.state.turn
    if turn is None:
        return
    agent = conv.home.agents[turn.agent]
    model_name = agent.model if isinstance(agent.model, str) else getattr(agent.model, "name", "none")
    reply = Reply(conv, message_id(effect.turn, effect.step), _clean(str(model_name)))
    try:
        request = await _request(conv, agent, effect, turn.output)
        model = agent.ready_model()
        async for part in model.stream(request):
            reply.take(part)
        if not reply.finished:
            raise ModelError("the stream ended before the reply was complete", kind="network")
        calls = reply.calls()
    except asyncio.CancelledError:
        if not conv.wants(asyncio.current_task()):
            raise  # ours: the turn was cancelled, or the process stops
        await _failed(conv, effect, reply, ModelError("the model's own task was cancelled", kind="network"))
        return
    except Exception as problem:
        await _failed(conv, effect, reply, problem)
        return
    replied = ModelReplied(
        turn=effect.turn,
        step=effect.step,
        text=reply.text,
        thinking=reply.thinking,
        calls=calls,
        attempts=(Attempt(reply.model, reply.usage),),
        parts=reply.parts or None,
        provider=reply.model if reply.parts else None,
        expires=conv.home.expires,
    )
    await conv.report(replied, effect)


async def _failed(conv: Conversation, effect: CallModel, reply: Reply, problem: Exception) -> None:
    kind = problem.kind if isinstance(problem, AssentError) else "provider_http_error"
    words = str(problem) if isinstance(problem, AssentError) else f"{type(problem).__name__}: {problem}"
    error = ErrorInfo(kind=kind, message=_clean(words))
    failed = ModelFailed(
        turn=effect.turn,
        step=effect.step,
        error=error,
        text=reply.text,
        thinking=reply.thinking,
        attempts=(Attempt(reply.model, reply.usage, error),),
    )
    await conv.report(failed, effect)


async def _request(conv: Conversation, agent: Agent, effect: CallModel, output: Any) -> Request:
    transcript = await conv.transcript()
    return Request(
        conversation=conv.name,
        turn=effect.turn,
        step=effect.step,
        instructions=agent.instructions,
        messages=transcript.messages,
        tools=agent.offers,
        output=output if output is not None else agent.output,
    )


class Reply:
    """Parts as they come in."""

    def __init__(self, conv: Conversation, message: str, model: str):
        self._conv, self._message, self.model = conv, message, model
        self._pieces: dict[int, list[ToolCallPart]] = {}
        self.parts: list[Any] = []
        self.usage: Usage | None = None
        self.finished = False
        self._partial = conv.partial = type(conv.partial)(message_id=message)

    @property
    def text(self) -> str:
        return "".join(self._partial.text)

    @property
    def thinking(self) -> str:
        return "".join(self._partial.thinking)

    def take(self, part: StreamPart) -> None:
        conv = self._conv
        if conv.partial is not self._partial:
            raise ModelError("this reply is no longer wanted", kind="network")  # its cancel was ignored
        if not conv.partial.streaming:
            conv.announce_streaming()
        match part:
            case TextPart(text=text):
                text = _clean(text)
                conv.partial.text.append(text)
                if conv.home.bus.heard(conv.name):
                    delta = TextDelta(conversation=conv.name, message_id=self._message, text=text)
                    conv.home.bus.publish(conv.name, delta)
            case ThinkingPart(text=text):
                text = _clean(text)
                conv.partial.thinking.append(text)
                if conv.home.bus.heard(conv.name):
                    thought = ThinkingDelta(conversation=conv.name, message_id=self._message, text=text)
                    conv.home.bus.publish(conv.name, thought)
            case ToolCallPart():
                if not isinstance(part.index, int):  # pyright: ignore[reportUnnecessaryIsInstance]
                    raise ModelError(f"a call's index is a number, not {part.index!r:.80}", kind="invalid_response")
                self._pieces.setdefault(part.index, []).append(part)
            case ProviderPart():
                self.parts.append({"kind": _clean(part.kind), "data": _verbatim(part.data)})
            case UsagePart(usage=usage):
                self.usage = usage = _usage(usage)
                conv.partial.attempts = (Attempt(self.model, usage),)
            case FinishPart():
                self.finished = True

    def calls(self) -> tuple[CallWanted, ...]:
        made: list[CallWanted] = []
        for _, pieces in sorted(self._pieces.items()):
            whole = [piece.args for piece in pieces if not isinstance(piece.args, str)]
            text = "".join(piece.args for piece in pieces if isinstance(piece.args, str))
            made.append(
                CallWanted(
                    provider_id=next((_clean(piece.id) for piece in pieces if piece.id), None),
                    tool="".join(_clean(piece.name) for piece in pieces if piece.name),
                    args=whole[0] if whole else _clean(text),
                )
            )
        return tuple(made)


def _verbatim(data: Any) -> Any:
    try:
        plain = msgspec.to_builtins(data, str_keys=True)
        check_plain(plain, "data")
    except (TypeError, ValueError, Invalid) as problem:
        raise ModelError(f"the provider's part cannot be kept: {problem}", kind="invalid_response") from None
    return plain


def _usage(usage: Any) -> Usage:
    """As the log can give it back: nobody could ever load a conversation with another one."""
    try:
        return msgspec.convert(msgspec.to_builtins(usage if isinstance(usage, Usage) else None), Usage)
    except (TypeError, ValueError):
        raise ModelError(
            f"usage is reported as Usage(...) with numbers, not {usage!r:.80}", kind="invalid_response"
        ) from None


def _clean(text: str) -> str:
    """Lone surrogates cannot be stored: they are replaced, and nothing is lost but them."""
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ModelError(f"the stream has {text!r:.80} where text is due", kind="invalid_response")
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
