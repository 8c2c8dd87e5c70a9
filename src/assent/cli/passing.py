"""What passes by while a model writes and tools run: text and reasoning as they come, arguments, progress, retries.

Live events, of which each may be lost: whatever was not seen coming is made up for from the log, once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from assent.cli.screen import Screen
from assent.cli.text import cut, ended, value_text
from assent.core.events import AssistantSaid
from assent.core.live import (
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
from assent.runtime.agent import Agent

PROGRESS_EVERY = 0.1
SLOW = 1.0
"""Seconds that arguments may take to be written before it is worth a word; the next word takes twice as long."""
LONG = 5.0
"""The same for a tool that runs and says nothing."""
JSON = '{[`"'
"""How a structured answer begins; also one in a fence."""
NARROW = 60
"""Columns below which reasoning is one line."""


class Passing:
    """Of one conversation, on one screen.

    line:   prints a line of it
    speak:  prints whose words follow
    asked:  the agent that answers, if it runs here, and whether its next words are a structured answer
    """

    def __init__(
        self,
        screen: Screen,
        line: Callable[..., None],
        speak: Callable[[], None],
        asked: Callable[[], tuple[Agent | None, bool]],
    ):
        self._screen, self._line, self._speak, self._asked = screen, line, speak, asked
        self._held: set[str] = set()
        """Messages that look like a structured answer: shown when they are whole."""
        self._told: dict[str, str] = {}
        """message -> its text, as far as it is printed"""
        self._thought: dict[str, str] = {}
        self._folded: set[str] = set()
        """Messages whose reasoning was shown."""
        self._open: Literal["text", "thinking"] | None = None
        """What the last line is in the middle of."""
        self._written: dict[tuple[str, int], _Written] = {}
        self._hosted: set[str] = set()
        self._progressed: dict[str, float] = {}
        self._running: dict[str, asyncio.TimerHandle] = {}
        self._model = ""
        """Which is being asked, where another had to be asked before."""

    def close(self) -> None:
        for timer in self._running.values():
            timer.cancel()
        self._running.clear()

    # --- from the log ---

    def said(self, event: AssistantSaid) -> None:
        """The reply is whole: what was not printed as it came is printed now."""
        told = self._told.pop(event.id, "")
        self._written = {key: each for key, each in self._written.items() if key[0] != event.id}
        self._model = ""
        self._fold(event.id, event.thinking)
        if event.structured and not told:
            self._speak()
            self._screen.block(_json(event.text, pretty=self._screen.out.is_terminal))
        elif event.text != told:
            if not event.text.startswith(told) or not told:
                self._speak()
                told = ""
            self._screen.stream(event.text[len(told) :])
        self._screen.end_line()
        self._open = None
        if event.partial or event.finish:
            self._dim(f"  ({ended(event)})")

    def started(self, call: str, tool: str) -> None:
        """A tool runs: said again and again, ever more rarely, until it has returned."""
        self._later(call, tool, time.monotonic(), LONG)

    def returned(self, call: str) -> None:
        if (timer := self._running.pop(call, None)) is not None:
            timer.cancel()

    def _later(self, call: str, tool: str, since: float, after: float) -> None:
        def still() -> None:
            self._dim(f"  … {tool} runs, {time.monotonic() - since:.0f} s so far")
            self._later(call, tool, since, 2 * after)

        self.returned(call)
        self._running[call] = asyncio.get_running_loop().call_later(after, still)

    # --- as it comes ---

    def take(self, event: AnyLive, tools: dict[str, str]) -> None:
        """``tools``: call -> tool"""
        match event:
            case TextDelta():
                self._text(event)
            case ThinkingDelta():
                self._thinking(event)
            case ToolArgsDelta():
                self._args(event)
            case ToolCallStarted(executor="provider"):
                self._hosted.add(event.call_id)
                args = " ".join(f"{name}={value_text(value)}" for name, value in event.args.items())
                where = f", at the provider  {cut(args, self._screen.room)}".rstrip()
                self._entry(("  → ", "cyan"), (event.tool, "bold"), (where, "dim"))
            case ToolCallResolved() if event.call_id in self._hosted:
                self._entry(("  ✓ ", "green"), event.tool, (", at the provider", "dim"))
            case ToolCallErrored() if event.call_id in self._hosted:
                problem = f", at the provider  [{event.error.kind}] {event.error.message}"
                self._entry(("  ✗ ", "red"), event.tool, (cut(problem, 2 * self._screen.room), "dim"))
            case ToolProgress():
                now = time.monotonic()
                if now - self._progressed.get(event.call_id, 0.0) >= PROGRESS_EVERY:
                    self._progressed[event.call_id] = now
                    tool = tools.get(event.call_id, event.call_id)
                    self.returned(event.call_id)  # it speaks for itself
                    self._dim(f"  … {tool}: {cut(value_text(event.payload), self._screen.room)}")
            case Retrying():
                self._retrying(event)
            case _:
                pass

    @property
    def _flows(self) -> bool:
        """There is room for reasoning as it comes."""
        return self._screen.out.is_terminal and self._screen.out.width >= NARROW and not self._screen.many

    def _text(self, event: TextDelta) -> None:
        if self._screen.many or event.message_id in self._held:
            return
        if event.message_id not in self._told and self._asked()[1] and event.text.lstrip()[:1] in ("", *JSON):
            self._held.add(event.message_id)  # nobody wants to read half of it
            return
        if self._open == "thinking":
            self._screen.end_line()
        if event.n == 1 and self._told.pop(event.message_id, None) is not None:
            self._dim("  (begun anew: who said this is gone)")
        self._fold(event.message_id, self._thought.get(event.message_id, ""))
        if event.message_id not in self._told:
            self._told[event.message_id] = ""
            self._speak()
        self._open = "text"
        self._told[event.message_id] += event.text
        self._screen.stream(event.text)

    def _thinking(self, event: ThinkingDelta) -> None:
        self._thought[event.message_id] = self._thought.get(event.message_id, "") + event.text
        if not self._flows:
            return
        self._folded.add(event.message_id)
        if self._open != "thinking":
            self._screen.end_line()
            self._screen.stream("  … ", "dim")
        self._open = "thinking"
        self._screen.stream(event.text, "dim italic")

    def _fold(self, message: str, text: str) -> None:
        """Reasoning that did not flow, in one line."""
        if text and message not in self._folded:
            self._folded.add(message)
            self._dim(f"  … thought: {cut(' '.join(text.split()), self._screen.room)}")

    def _args(self, event: ToolArgsDelta) -> None:
        now = time.monotonic()
        written = self._written.setdefault((event.message_id, event.index), _Written(now))
        written.tool = written.tool or event.tool or ""
        written.size += len(event.text)
        if now >= written.next:
            written.next = now + 2 * (now - written.since)
            self._dim(f"  … {written.tool or 'a call'}: {written.size:,} characters of arguments so far")

    def _retrying(self, event: Retrying) -> None:
        agent, _ = self._asked()
        before = self._model or (named(agent.model) if agent is not None else event.model)
        self._model = event.model
        whom = f"of {event.model or 'the model'}"
        how = f"{whom} in {event.delay:.1f} s" if event.model == before else f"{whom}, in place of {before}"
        why = cut(f"[{event.error.kind}] {event.error.message}", 2 * self._screen.room)
        self._dim(f"  … attempt {event.attempt + 1} {how}: {why}")

    def _dim(self, text: str) -> None:
        self._entry((text, "dim"))

    def _entry(self, *parts: str | tuple[str, str]) -> None:
        self._line(*parts)
        self._open = None


class _Written:
    """The arguments of a call, while the model writes them."""

    def __init__(self, now: float):
        self.since, self.next = now, now + SLOW
        self.tool, self.size = "", 0


def named(model: Any) -> str:
    return model if isinstance(model, str) else str(getattr(model, "name", ""))


def _json(text: str, *, pretty: bool) -> str:
    from assent.core.results import unfenced

    try:
        return msgspec.json.format(unfenced(text), indent=2 if pretty else -1)
    except msgspec.DecodeError:
        return text
