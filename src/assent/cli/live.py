"""One conversation as it happens: what is said, calls, the cards of what waits, what it cost.

The view folds the log with the core's own ``evolve``, so that it knows when the turn rests from what is recorded,
whoever runs it. Live events only make it nicer to look at: see ``passing``.
"""

from __future__ import annotations

import asyncio

from assent.cli.cards import print_card
from assent.cli.passing import Passing
from assent.cli.screen import WIDE, Screen
from assent.cli.spending import Spending
from assent.cli.text import cut, value_text
from assent.core.decisions import Answer, Approve, ClientResult, Deny, Detached, Expired, Failed, Recorded, Submit
from assent.core.effects import owed
from assent.core.events import (
    AnyEvent,
    AssistantSaid,
    CallResolved,
    CallReturned,
    CallStarted,
    CallSuspended,
    CancelRequested,
    Event,
    GrantGiven,
    MessageReceived,
    OutputRejected,
    ResolutionRefused,
    TurnEnded,
    TurnStarted,
)
from assent.core.live import AnyLive
from assent.core.state import State, evolve, pending
from assent.errors import Backpressure
from assent.runtime.agent import Agent
from assent.runtime.runtime import Runtime

WAITING = 75
"""The exit code for: at rest, waiting for somebody."""
LONG = 4000


class View:
    """Follows one turn of one conversation until it ends, or rests for longer than ``wait`` seconds.

    since:  show events from this one on; without it, those after ``state``
    known:  the log is at least this long; whether the turn rests is not asked before
    """

    def __init__(
        self,
        rt: Runtime,
        screen: Screen,
        state: State,
        *,
        wait: float | None,
        since: int | None = None,
        known: int = 0,
    ):
        self._rt, self._screen, self._state = rt, screen, state
        self.name = state.conversation
        self._start = state.seq
        self._known = max(known, state.seq)
        self._from = state.seq + 1 if since is None else since
        """The first event that is shown."""
        self._after = max(0, min(self._from, self._start) - 1)
        self._wait = wait
        self._message: int | None = None
        self._numbers: dict[int, int] = {}
        """message -> turn"""
        if state.turn is not None:
            self._numbers[state.turn.message] = state.turn.number
        self._ended: dict[int, TurnEnded] = {}
        calls = state.turn.calls if state.turn else {}
        self._tools = {call_id: call.made.tool for call_id, call in calls.items()}
        """call -> tool"""
        self._asked = set(calls if since is None else ())
        self._passing = Passing(screen, self._line, self._speaker, self._answering)
        self._spending = Spending()
        self._resting = self._time_up = self._announced = False
        self._ready = asyncio.Event()
        self.ended: TurnEnded | None = None
        self._outcome: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._task = asyncio.get_running_loop().create_task(self._consume())

    async def ready(self) -> None:
        """Wait until nothing that happens from now on can be missed."""
        ready = asyncio.ensure_future(self._ready.wait())
        await asyncio.wait({ready, self._outcome}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()

    async def end(self, message: int) -> int:
        """The exit code, once the turn that answers this message has ended or rests for too long."""
        self._message = message
        try:
            await self.ready()
            self._check()
            return await self._outcome
        finally:
            await self.close()

    async def close(self) -> None:
        self._task.cancel()
        self._passing.close()
        await asyncio.gather(self._task, return_exceptions=True)
        self._screen.end_line()

    async def _consume(self) -> None:
        try:
            while True:
                try:
                    async for event in self._rt.events(self.name, after=self._after):
                        await self._take(event)
                except Backpressure as behind:
                    self._after = max(self._after, behind.after)
        except Exception as failure:
            if not self._outcome.done():
                self._outcome.set_exception(failure)

    async def _take(self, event: AnyEvent | AnyLive) -> None:
        if not isinstance(event, Event):
            if self._ready.is_set():
                self._passing.take(event, self._tools)
            return
        self._after = event.seq
        if event.seq >= self._from:
            await self._canonical(event)
        if event.seq > self._start:
            # Only now: whoever sees that the turn rests may end the view, and what it waits for must be shown first.
            self._state = evolve(self._state, event)
        if event.seq == self._start:
            for entry in pending(self._state) if self._from <= self._start else []:
                await self._card(entry.call)
        if event.seq >= self._known:
            self._ready.set()
            self._check()

    # --- when is it over ---

    def _check(self) -> None:
        if self._message is None or self._outcome.done():
            return
        number = self._numbers.get(self._message, 0)
        if number in self._ended:
            self.ended = self._ended[number]
            self._outcome.set_result(0 if self.ended.reason == "completed" or self.ended.halted else 1)
            return
        self._resting = not owed(self._state) and bool(pending(self._state))
        if not self._resting:
            self._announced = False
            return
        if self._time_up or self._wait == 0:
            self._outcome.set_result(WAITING)
            return
        if not self._announced:
            self._announced = True
            count = len(pending(self._state))
            self._say(f"waiting for {count} answer{'s' if count > 1 else ''}; Ctrl-C leaves, and nothing is lost")
            if self._wait is not None:
                asyncio.get_running_loop().call_later(self._wait, self._too_long)

    def _too_long(self) -> None:
        self._time_up = True
        if self._resting and not self._outcome.done():
            self._outcome.set_result(WAITING)

    # --- what is shown ---

    def _say(self, *parts: str) -> None:
        self._line(*((part, "dim") for part in parts))

    def _line(self, *parts: str | tuple[str, str]) -> None:
        where = [(f"[{self.name}] ", "dim")] if self._screen.many else []
        self._screen.line(*where, *parts)

    async def _card(self, call: str) -> None:
        waiting = await self._rt.pending()
        for entry in waiting:
            if entry.conversation == self.name and entry.call == call:
                self._screen.end_line()
                self._screen.out.print()
                print_card(self._screen.out, entry, self._screen.commands, waiting, self._rt.home.now())

    async def _canonical(self, event: AnyEvent) -> None:
        match event:
            case MessageReceived():
                self._voice(event.by.id, "bold")
                self._screen.stream(cut(event.text, LONG))
                self._screen.end_line()
            case TurnStarted():
                self._numbers[event.message] = event.turn
            case AssistantSaid():
                self._said(event)
            case OutputRejected():
                self._spending.add(event.attempts)
                self._say("  this reply is not taken: ", event.message)
            case CallStarted():
                if event.seq > self._start:
                    self._passing.started(event.call_id, self._tools.get(event.call_id, event.call_id))
                if event.attempt > 1 or event.call_id in self._asked:
                    again = f" again (attempt {event.attempt})" if event.attempt > 1 else ""
                    self._say(f"  … {self._tools.get(event.call_id, event.call_id)} runs{again}")
            case CallSuspended():
                self._asked.add(event.call_id)
                self._tools.setdefault(event.call_id, event.tool)
                if event.seq > self._start:
                    await self._card(event.call_id)
            case CallResolved():
                self._line(("  ● ", "cyan"), f"{self._tools.get(event.call_id, event.call_id)} {decided(event)}")
            case CallReturned():
                self._passing.returned(event.call_id)
                self._returned(event)
            case GrantGiven():
                scope = "with these arguments" if event.scope == "args" else "with any arguments"
                self._say(f"  {event.by.id} allowed {event.tool} {scope} in this conversation from now on")
            case ResolutionRefused():
                self._say(f"  refused: {event.reason}")
            case CancelRequested():
                self._say(f"  {event.by.id} cancelled the turn", f": {event.reason}" if event.reason else "")
            case TurnEnded():
                self._ended[event.turn] = event
                self._over(event)
            case _:
                pass

    def _said(self, event: AssistantSaid) -> None:
        self._spending.add(event.attempts)
        self._passing.said(event)
        for call in event.calls:
            self._tools[call.id] = call.tool
            args = " ".join(f"{name}={value_text(value)}" for name, value in call.args.items())
            self._line(("  → ", "cyan"), (call.tool, "bold"), (f"  {cut(args, self._screen.room)}", "dim"))

    def _returned(self, event: CallReturned) -> None:
        if event.error is not None:
            if event.source != "human":
                self._line(("  ✗ ", "red"), event.tool, (f"  [{event.error.kind}] {event.error.message}", "dim"))
        elif event.source == "server":
            self._line(("  ✓ ", "green"), event.tool, (f"  {cut(value_text(event.value), self._screen.room)}", "dim"))

    def _over(self, event: TurnEnded) -> None:
        turn = self._state.turn
        if turn is not None and turn.number == event.turn and (spent := self._spending.told(turn.usage)):
            self._say(f"  {spent}")
        self._spending = Spending()
        if event.error is not None:
            self._line(("  ✗ ", "red"), f"the turn failed: [{event.error.kind}] {event.error.message}")
        elif event.reason == "completed":
            self._say("  turn completed")
        else:
            value = f": {value_text(event.value)}" if event.value not in (None, "") else ""
            self._say(f"  turn ended: {event.reason}{value}")

    def _speaker(self) -> None:
        self._voice(self._state.turn.agent if self._state.turn else self._state.agent, "bold green")

    def _voice(self, who: str, style: str) -> None:
        self._screen.end_line()
        if self._screen.many:
            self._screen.stream(f"[{self.name}] ", "dim")
        self._screen.stream(f"{who}: ", style)

    def _answering(self) -> tuple[Agent | None, bool]:
        """The agent that answers, if it runs here, and whether its next words are a structured answer."""
        turn = self._state.turn
        agent = self._rt.agents.get(turn.agent) if turn else None
        if turn is None or agent is None:
            return agent, False
        wanted = turn.output is not None or agent.output is not None
        return agent, wanted and not (agent.answer == "separate" and bool(agent.offers) and not turn.drafted)


def decided(event: CallResolved) -> str:
    """Who decided what, in words."""
    return f"{verdict(event.decision)} by {event.by.id}" if event.by.id != "system" else verdict(event.decision)


def verdict(decision: Recorded) -> str:
    match decision:
        case Approve(args=None):
            return "approved"
        case Approve(args=args):
            return f"approved as {cut(value_text(args), WIDE)}"
        case Deny(reason=reason, stop=stop):
            words = "denied, and the turn stopped," if stop else "denied"
            return f"{words} ({cut(reason, WIDE)})" if reason else words
        case Answer(value=value):
            return f"answered {cut(value_text(value), WIDE)}"
        case ClientResult(value=value) | Submit(value=value):
            return f"was given its result {cut(value_text(value), WIDE)}"
        case Failed():
            return f"was reported as failed ([{decision.kind}] {decision.message})"
        case Expired():
            return "expired: nobody answered"
        case Detached():
            return "failed: no client is attached"
