"""The transcript: events as messages, for the model and for viewers.

It is built incrementally, one event at a time. Calls and results are paired exactly: every call has one result, results
follow the message that made the calls, in call order, and a step's results are complete before the next model call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import msgspec

from holdfast.core.events import (
    AnyEvent,
    AsideAnswered,
    AssistantSaid,
    CallMade,
    CallReturned,
    MessageReceived,
    OutputRejected,
    TurnEnded,
    TurnStarted,
)
from holdfast.core.results import MODEL_LIMIT, encode_envelope
from holdfast.core.tool import Artifact

CUT_OFF_NOTE = "[cut off: this reply was stopped before its end]"
ASIDE_HEADING = "[While the calls above waited, and before their results were known, the user wrote:]"
ANSWER_HEADING = "[You answered then, without tools:]"


class UserMessage(
    msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True, tag="user", tag_field="role"
):
    """A message to the agent."""

    text: str
    seq: int
    turn: int
    by: str
    aside: bool = False
    """Sent while the turn waited for people, and answered without giving up the waiting calls."""


class ToolUse(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A call as it is sent back to the provider."""

    id: str
    """The provider's id; our id if the provider's is missing or a duplicate."""
    call: str
    """Our id."""
    name: str
    args: dict[str, Any]
    raw: str | None = None


class AssistantMessage(msgspec.Struct, frozen=True, gc=False, kw_only=True, tag="assistant", tag_field="role"):
    """A reply of the model with its calls."""

    id: str
    turn: int
    text: str
    thinking: str = ""
    calls: tuple[ToolUse, ...] = ()
    partial: bool = False
    parts: Any = None
    provider: str | None = None
    seq: int = 0


class ToolResult(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True, tag="tool", tag_field="role"):
    """The result of a call."""

    id: str
    """The same as in its ToolUse."""
    call: str
    tool: str
    ok: bool
    content: str
    """The envelope as JSON text, exactly as the model sees it."""
    seq: int = 0
    images: tuple[Artifact, ...] = ()
    """References to the images that the model sees after the envelope."""

    @property
    def text(self) -> str:
        """The same as ``content``: every message has a text."""
        return self.content


Message = UserMessage | AssistantMessage | ToolResult


class Messages(Sequence[Message]):
    """A read-only view of the first n messages of an append-only list; it does not copy and never changes."""

    __slots__ = ("_items", "_n")

    def __init__(self, items: list[Message], n: int | None = None):
        self._items, self._n = items, len(items) if n is None else n

    def __len__(self) -> int:
        return self._n

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> list[Message]: ...
    def __getitem__(self, index: int | slice) -> Message | list[Message]:
        if isinstance(index, slice):
            return [self._items[i] for i in range(*index.indices(self._n))]
        if not -self._n <= index < self._n:
            raise IndexError(index)
        return self._items[index if index >= 0 else self._n + index]

    def __iter__(self) -> Iterator[Message]:
        for i in range(self._n):
            yield self._items[i]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)  # pyright: ignore[reportUnknownArgumentType]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Messages({list(self)!r})"


class Aside:
    """An aside of the current step: the question, the rejected answers with their reasons, and the answer."""

    __slots__ = ("answer", "question", "rejected")

    def __init__(self, question: UserMessage):
        self.question = question
        self.rejected: list[Message] = []
        self.answer: AsideAnswered | None = None

    def for_viewers(self) -> list[Message]:
        """Return the question and the answer. A failed answer says so in its text."""
        answer = self.answer
        if answer is None:
            return [self.question]
        return [
            self.question,
            AssistantMessage(
                id=answer.id,
                turn=answer.turn,
                text="\n".join(filter(None, [answer.text, _no_answer(answer)])),
                thinking=answer.thinking,
                partial=answer.error is not None,
                seq=answer.seq,
            ),
        ]

    def for_model(self, answer: AsideAnswered) -> UserMessage:
        """Return one message that quotes the question and the answer.

        It follows the results of the step: no provider accepts other messages between calls and their results, and none
        continues after a reply of the model.
        """
        words = [ASIDE_HEADING, self.question.text]
        if answer.text:
            words += [ANSWER_HEADING, answer.text]
        if answer.error is not None:
            words.append(_no_answer(answer))
        return UserMessage(text="\n\n".join(words), seq=answer.seq, turn=answer.turn, by=self.question.by, aside=True)


def _no_answer(answer: AsideAnswered) -> str:
    if answer.error is None:
        return ""
    return f"[{'not completed' if answer.text else 'not answered'}: {answer.error.message}]"


def _rejected_messages(event: OutputRejected) -> list[Message]:
    """Return the rejected text, and the message about it."""
    reason = UserMessage(text=event.message, seq=event.seq, turn=event.turn, by=event.by.id)
    if not event.text:
        return [reason]
    return [AssistantMessage(id=f"rejected-{event.seq}", turn=event.turn, text=event.text, seq=event.seq), reason]


class Transcript:
    """Builds messages from events: ``apply`` every event in order, then read ``messages``."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._queued: dict[int, MessageReceived] = {}
        self._open: dict[str, ToolUse] = {}
        self._results: dict[str, ToolResult] = {}
        self._limits: dict[str, int] = {}
        self._ids: set[str] = set()
        self._asides: dict[int, Aside] = {}
        """The asides that are not part of ``_messages`` yet, by the sequence number of the question."""
        self._shown: dict[int, list[Message]] = {}
        """The seq of a message that quotes an aside -> the messages that viewers see in its place."""
        self.turn = 0
        self.seq = 0

    def apply(self, event: AnyEvent) -> None:
        self.seq = event.seq
        match event:
            case AssistantSaid():
                self._add_reply(event)
            case CallReturned():
                self._add_result(event)
            case MessageReceived(aside=True):
                question = UserMessage(text=event.text, seq=event.seq, turn=self.turn, by=event.by.id, aside=True)
                self._asides[event.seq] = Aside(question)
            case MessageReceived():
                self._queued[event.seq] = event  # shown when its turn begins
            case TurnStarted():
                self.turn = event.turn
                message = self._queued.pop(event.message, None)
                if message is not None:
                    self._messages.append(
                        UserMessage(text=message.text, seq=message.seq, turn=event.turn, by=message.by.id)
                    )
            case OutputRejected(aside=int() as message):
                if (aside := self._asides.get(message)) is not None:
                    aside.rejected += _rejected_messages(event)
            case AsideAnswered():
                if (aside := self._asides.get(event.message)) is not None:
                    aside.answer = event
                    self._add_asides()
            case OutputRejected():
                self._messages += _rejected_messages(event)
            case TurnEnded():
                self._flush()  # an older version may have ended a turn with open calls
            case _:
                pass  # control events, and summaries: the transcript keeps all messages

    def _add_reply(self, event: AssistantSaid) -> None:
        if event.partial and not event.text:
            return
        text = f"{event.text}\n{CUT_OFF_NOTE}" if event.partial else event.text
        uses = tuple(self._tool_use(made) for made in event.calls)
        self._messages.append(
            AssistantMessage(
                id=event.id,
                turn=event.turn,
                text=text,
                thinking=event.thinking,
                calls=uses,
                partial=event.partial,
                parts=event.parts,
                provider=event.provider,
                seq=event.seq,
            )
        )
        self._open, self._results = {use.call: use for use in uses}, {}
        self._limits = {made.id: made.result_bytes for made in event.calls if made.result_bytes is not None}

    def _tool_use(self, made: CallMade) -> ToolUse:
        # Some providers reuse call ids in every reply. Ids must be unique within a request: use ours instead.
        sent_id = made.id if made.provider_id in self._ids else made.provider_id
        self._ids.add(sent_id)
        return ToolUse(id=sent_id, call=made.id, name=made.tool, args=made.args, raw=made.raw)

    def _add_result(self, event: CallReturned) -> None:
        use = self._open.get(event.call_id)
        if use is None:
            return
        self._results[use.call] = ToolResult(
            id=use.id,
            call=use.call,
            tool=use.name,
            ok=event.ok,
            content=encode_envelope(event, self._limits.get(event.call_id, MODEL_LIMIT)),
            seq=event.seq,
            images=tuple(image for image in event.images if image in event.artifacts) if event.images else (),
        )
        if len(self._results) == len(self._open):
            self._flush()

    def _flush(self) -> None:
        self._messages.extend(self._results_so_far())
        self._open, self._results = {}, {}
        if self._asides:
            self._add_asides()

    def _add_asides(self) -> None:
        """Add the answered asides, unless a call of the step has no result yet."""
        if self._open:
            return
        for message, aside in list(self._asides.items()):
            if aside.answer is not None:
                self._messages.append(aside.for_model(aside.answer))
                self._shown[aside.answer.seq] = aside.for_viewers()
                del self._asides[message]

    def _results_so_far(self) -> list[ToolResult]:
        return [self._results[c] for c in self._open if c in self._results]

    @property
    def messages(self) -> Messages:
        """The messages for the model; the current step's results are included once they are complete."""
        return Messages(self._messages)

    def take_messages(self) -> list[Message]:
        """Remove and return the messages since the last take. The caller keeps call ids unique among them."""
        taken, self._messages = self._messages, []
        self._ids.clear()
        self._shown.clear()
        return taken

    def messages_for_aside(self, message: int, stub: Callable[[ToolUse], ToolResult]) -> list[Message]:
        """Return what a request that answers this aside has after ``messages``.

        These are the results so far of the current step, a stub in place of each missing result, the step's earlier
        asides, and the question with its rejected answers.
        """
        results: list[Message] = [self._results.get(use.call) or stub(use) for use in self._open.values()]
        quoted = [each.for_model(each.answer) for each in self._asides.values() if each.answer is not None]
        aside = self._asides.get(message)
        return [*results, *quoted, *([aside.question, *aside.rejected] if aside else [])]

    def visible_messages(self) -> list[Message]:
        """Return the messages for viewers, including the results so far of an incomplete step."""
        messages: list[Message] = self._messages
        if self._shown:
            messages = [each for message in messages for each in self._shown.get(message.seq, (message,))]
        asides = [each for aside in self._asides.values() for each in aside.for_viewers()]
        return [*messages, *self._results_so_far(), *asides]
