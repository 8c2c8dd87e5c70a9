"""Print live events: text and reasoning deltas, tool arguments, progress and retries.

Live events can be lost. The text that was missed is printed once, when the reply is in the log.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from holdfast.cli.agents import model_name
from holdfast.cli.render.console import Screen
from holdfast.cli.render.text import describe_finish, ellipsize, value_text
from holdfast.core.events import AsideAnswered, AssistantSaid
from holdfast.core.live import (
    AnyLive,
    Retrying,
    TextDelta,
    ThinkingDelta,
    ToolArgsDelta,
    ToolCallErrored,
    ToolCallResolved,
    ToolCallStarted,
    ToolProgress,
)
from holdfast.core.results import strip_fence
from holdfast.runtime.agent_definition import AgentDefinition

PROGRESS_EVERY = 0.1
ARGUMENTS_NOTICE_SECONDS = 1.0
"""Seconds before the first notice that a model still writes arguments; the interval doubles after each."""
RUNNING_NOTICE_SECONDS = 5.0
"""The same for a tool that runs and reports no progress."""
JSON_STARTS = '{[`"'
"""The first characters of a structured answer, also of a fenced one."""
NARROW = 60
"""Columns below which reasoning is printed as one line."""


class LiveOutput:
    """Prints the live events of one conversation.

    line:   prints one line
    speak:  prints the name of the agent before its text
    asked:  returns the agent that answers, if it runs here, and whether its next text is a structured answer
    """

    def __init__(
        self,
        screen: Screen,
        line: Callable[..., None],
        speak: Callable[[], None],
        asked: Callable[[], tuple[AgentDefinition | None, bool]],
    ):
        self._screen, self._line, self._speak, self._asked = screen, line, speak, asked
        self._held: set[str] = set()
        """Messages that look like a structured answer: printed when they are complete."""
        self._printed: dict[str, str] = {}
        """message -> the part of its text that is printed"""
        self._thought: dict[str, str] = {}
        self._folded: set[str] = set()
        """Messages with printed reasoning."""
        self._open: Literal["text", "thinking"] | None = None
        """The kind of text on the unfinished last line."""
        self._written: dict[tuple[str, int], _ArgumentProgress] = {}
        self._hosted: set[str] = set()
        self._progressed: dict[str, float] = {}
        self._running: dict[str, asyncio.TimerHandle] = {}
        self._model = ""
        """The model of the current attempt, after a retry."""

    def close(self) -> None:
        for timer in self._running.values():
            timer.cancel()
        self._running.clear()

    # --- from the log ---

    def print_reply(self, event: AssistantSaid) -> None:
        """Print the rest of a complete reply: the part that was not printed from live events."""
        self._written = {key: progress for key, progress in self._written.items() if key[0] != event.id}
        self._print_rest(event)
        if event.partial or event.finish:
            self._print_dim(f"  ({describe_finish(event)})")

    def _print_rest(self, event: AssistantSaid | AsideAnswered) -> None:
        printed = self._printed.pop(event.id, "")
        self._model = ""
        self._print_thought(event.id, event.thinking)
        if isinstance(event, AssistantSaid) and event.structured and not printed:
            self._speak()
            self._screen.print_block(_format_json(event.text, pretty=self._screen.out.is_terminal))
        elif event.text != printed:
            if not event.text.startswith(printed) or not printed:
                self._speak()
                printed = ""
            self._screen.stream(event.text[len(printed) :])
        self._screen.end_line()
        self._open = None

    def print_aside(self, event: AsideAnswered) -> None:
        """Print the rest of the answer to an aside, or why there is none."""
        self._print_rest(event)
        if event.error is not None:
            self._print_entry(("  ✗ ", "red"), f"not answered: [{event.error.kind}] {event.error.message}")

    def start_timer(self, call: str, tool: str) -> None:
        """Print notices that a tool is running, at doubling intervals, until it returns."""
        self._schedule_notice(call, tool, time.monotonic(), RUNNING_NOTICE_SECONDS)

    def stop_timer(self, call: str) -> None:
        if (timer := self._running.pop(call, None)) is not None:
            timer.cancel()

    def _schedule_notice(self, call: str, tool: str, since: float, after: float) -> None:
        def print_notice() -> None:
            self._print_dim(f"  … {tool} runs, {time.monotonic() - since:.0f} s so far")
            self._schedule_notice(call, tool, since, 2 * after)

        self.stop_timer(call)
        self._running[call] = asyncio.get_running_loop().call_later(after, print_notice)

    # --- as it comes ---

    def handle_event(self, event: AnyLive, tools: dict[str, str]) -> None:
        """Print one live event; ``tools`` maps calls to tools."""
        match event:
            case TextDelta():
                self._print_text(event)
            case ThinkingDelta():
                self._print_thinking(event)
            case ToolArgsDelta():
                self._count_arguments(event)
            case ToolCallStarted(executor="provider"):
                self._hosted.add(event.call_id)
                args = " ".join(f"{name}={value_text(value)}" for name, value in event.args.items())
                where = f", at the provider  {ellipsize(args, self._screen.room)}".rstrip()
                self._print_entry(("  → ", "cyan"), (event.tool, "bold"), (where, "dim"))
            case ToolCallResolved() if event.call_id in self._hosted:
                self._print_entry(("  ✓ ", "green"), event.tool, (", at the provider", "dim"))
            case ToolCallErrored() if event.call_id in self._hosted:
                problem = f", at the provider  [{event.error.kind}] {event.error.message}"
                self._print_entry(("  ✗ ", "red"), event.tool, (ellipsize(problem, 2 * self._screen.room), "dim"))
            case ToolProgress():
                now = time.monotonic()
                if now - self._progressed.get(event.call_id, 0.0) >= PROGRESS_EVERY:
                    self._progressed[event.call_id] = now
                    tool = tools.get(event.call_id, event.call_id)
                    self.stop_timer(event.call_id)  # the tool reports its own progress
                    self._print_dim(f"  … {tool}: {ellipsize(value_text(event.payload), self._screen.room)}")
            case Retrying():
                self._print_retry(event)
            case _:
                pass

    @property
    def _streams_thinking(self) -> bool:
        """Whether reasoning is printed as it arrives."""
        return self._screen.out.is_terminal and self._screen.out.width >= NARROW and not self._screen.many

    def _print_text(self, event: TextDelta) -> None:
        if self._screen.many or event.message_id in self._held:
            return
        if event.message_id not in self._printed and self._asked()[1] and event.text.lstrip()[:1] in ("", *JSON_STARTS):
            self._held.add(event.message_id)  # half a JSON document is hard to read
            return
        if self._open == "thinking":
            self._screen.end_line()
        if event.n == 1 and self._printed.pop(event.message_id, None) is not None:
            self._print_dim("  (restarted: the previous worker died)")
        self._print_thought(event.message_id, self._thought.get(event.message_id, ""))
        if event.message_id not in self._printed:
            self._printed[event.message_id] = ""
            self._speak()
        self._open = "text"
        self._printed[event.message_id] += event.text
        self._screen.stream(event.text)

    def _print_thinking(self, event: ThinkingDelta) -> None:
        self._thought[event.message_id] = self._thought.get(event.message_id, "") + event.text
        if not self._streams_thinking:
            return
        self._folded.add(event.message_id)
        if self._open != "thinking":
            self._screen.end_line()
            self._screen.stream("  … ", "dim")
        self._open = "thinking"
        self._screen.stream(event.text, "dim italic")

    def _print_thought(self, message: str, text: str) -> None:
        """Print reasoning that was not streamed, as one line."""
        if text and message not in self._folded:
            self._folded.add(message)
            self._print_dim(f"  … thought: {ellipsize(' '.join(text.split()), self._screen.room)}")

    def _count_arguments(self, event: ToolArgsDelta) -> None:
        now = time.monotonic()
        written = self._written.setdefault((event.message_id, event.index), _ArgumentProgress(now))
        written.tool = written.tool or event.tool or ""
        written.size += len(event.text)
        if now >= written.next:
            written.next = now + 2 * (now - written.since)
            self._print_dim(f"  … {written.tool or 'a call'}: {written.size:,} characters of arguments so far")

    def _print_retry(self, event: Retrying) -> None:
        agent, _ = self._asked()
        before = self._model or (model_name(agent.model) if agent is not None else event.model)
        self._model = event.model
        model = f"of {event.model or 'the model'}"
        how = f"{model} in {event.delay:.1f} s" if event.model == before else f"{model}, in place of {before}"
        why = ellipsize(f"[{event.error.kind}] {event.error.message}", 2 * self._screen.room)
        self._print_dim(f"  … attempt {event.attempt + 1} {how}: {why}")

    def _print_dim(self, text: str) -> None:
        self._print_entry((text, "dim"))

    def _print_entry(self, *parts: str | tuple[str, str]) -> None:
        self._line(*parts)
        self._open = None


class _ArgumentProgress:
    """The size of a call's arguments while the model writes them."""

    def __init__(self, now: float):
        self.since, self.next = now, now + ARGUMENTS_NOTICE_SECONDS
        self.tool, self.size = "", 0


def _format_json(text: str, *, pretty: bool) -> str:

    try:
        return msgspec.json.format(strip_fence(text), indent=2 if pretty else -1)
    except msgspec.DecodeError:
        return text
