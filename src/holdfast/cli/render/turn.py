"""Follow one turn of a conversation: messages, calls, cards and usage.

The view folds the log with ``evolve``, so it knows from recorded events when the turn is at rest, in any process.
Live events only add detail: see ``stream``.
"""

from __future__ import annotations

import asyncio

from holdfast.cli.output import EXIT_WAITING
from holdfast.cli.render.card import print_card
from holdfast.cli.render.console import Screen
from holdfast.cli.render.event import describe_decider, describe_event, describe_resolution
from holdfast.cli.render.stream import LiveOutput
from holdfast.cli.render.text import describe_coverage, describe_scope, ellipsize, format_time, value_text
from holdfast.cli.render.usage import TurnUsage
from holdfast.cli.render.workspace import Line, checklist_lines, describe_image, result_lines
from holdfast.core.effects import owed
from holdfast.core.events import (
    AnyEvent,
    ApprovalTakenBack,
    AsideAnswered,
    AssistantSaid,
    CallEscalated,
    CallResolved,
    CallReturned,
    CallStarted,
    CallSuspended,
    CancelRequested,
    DeadlineExtended,
    Event,
    GrantGiven,
    MessageReceived,
    OutputRejected,
    ReminderDue,
    ResolutionRefused,
    TurnEnded,
    TurnStarted,
    VoteCast,
)
from holdfast.core.live import AnyLive
from holdfast.core.state import State, continues, evolve, pending_entries
from holdfast.errors import Backpressure
from holdfast.runtime.agent_definition import AgentDefinition
from holdfast.runtime.runtime import Runtime

MAX_CHARS = 4000


class TurnView:
    """Follows one turn of one conversation until it ends, or is at rest for longer than ``wait`` seconds.

    since:  print events from this one on; by default, those after ``state``
    known:  the log is at least this long; up to there the turn does not count as at rest
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
        """The first event that is printed."""
        self._after = max(0, min(self._from, self._start) - 1)
        self._wait = wait
        self._message: int | None = None
        self._numbers: dict[int, int] = {}
        """message -> turn"""
        if state.turn is not None:
            self._numbers[state.turn.message] = state.turn.number
        self._ended: dict[int, TurnEnded] = {}
        self._answers: dict[int, AsideAnswered] = {}
        """aside -> its answer"""
        calls = state.turn.calls if state.turn else {}
        self._tools = {call_id: call.made.tool for call_id, call in calls.items()}
        """call -> tool"""
        self._asked = set(calls if since is None else ())
        self._continuing = {call_id for call_id, call in calls.items() if continues(call)}
        self._live = LiveOutput(screen, self._print_line, self._print_speaker, self._answering_agent)
        self._usage = TurnUsage()
        self._checklist: list[Line] | None = None
        """The last one that was printed."""
        self._resting = self._time_up = self._announced = False
        self._ready = asyncio.Event()
        self.ended: TurnEnded | None = None
        self._outcome: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._task = asyncio.get_running_loop().create_task(self._consume())

    @property
    def state(self) -> State:
        """The state after the last event that was printed."""
        return self._state

    async def wait_until_ready(self) -> None:
        """Wait until the view has read the log, so that it misses no later event."""
        ready = asyncio.ensure_future(self._ready.wait())
        await asyncio.wait({ready, self._outcome}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()

    async def wait_for_turn(self, message: int) -> int:
        """Return the exit code when the turn that answers this message has ended, or is at rest for too long."""
        self._message = message
        try:
            await self.wait_until_ready()
            self._check_outcome()
            return await self._outcome
        finally:
            await self.close()

    async def close(self) -> None:
        self._task.cancel()
        self._live.close()
        await asyncio.gather(self._task, return_exceptions=True)
        self._screen.end_line()

    async def _consume(self) -> None:
        try:
            while True:
                try:
                    async for event in self._rt.events(self.name, after=self._after):
                        await self._handle_event(event)
                except Backpressure as behind:
                    self._after = max(self._after, behind.after)
        except Exception as failure:
            if not self._outcome.done():
                self._outcome.set_exception(failure)

    async def _handle_event(self, event: AnyEvent | AnyLive) -> None:
        if not isinstance(event, Event):
            if self._ready.is_set():
                self._live.handle_event(event, self._tools)
            return
        self._after = event.seq
        if event.seq >= self._from:
            await self._show_event(event)
        if event.seq > self._start:
            # Evolve after printing: a turn at rest may close the view, and its card must be printed before that.
            self._state = evolve(self._state, event)
        if event.seq == self._start:
            for entry in pending_entries(self._state) if self._from <= self._start else []:
                await self._print_card(entry.call)
        if event.seq >= self._known:
            self._ready.set()
            self._check_outcome()

    # --- the outcome ---

    def _check_outcome(self) -> None:
        if self._message is None or self._outcome.done():
            return
        number = self._numbers.get(self._message, 0)
        if number in self._ended:
            self.ended = self._ended[number]
            self._outcome.set_result(0 if self.ended.reason == "completed" or self.ended.halted else 1)
            return
        if (answer := self._answers.get(self._message)) is not None:
            self._outcome.set_result(1 if answer.error else 0)
            return
        self._resting = not owed(self._state) and bool(pending_entries(self._state))
        if not self._resting:
            self._announced = False
            return
        if self._time_up or self._wait == 0:
            self._outcome.set_result(EXIT_WAITING)
            return
        if not self._announced:
            self._announced = True
            count = len(pending_entries(self._state))
            self._print_dim(f"waiting for {count} answer{'s' if count > 1 else ''}; Ctrl-C exits, and nothing is lost")
            if self._wait is not None:
                asyncio.get_running_loop().call_later(self._wait, self._on_timeout)

    def _on_timeout(self) -> None:
        self._time_up = True
        if self._resting and not self._outcome.done():
            self._outcome.set_result(EXIT_WAITING)

    # --- printing ---

    def _print_dim(self, *parts: str) -> None:
        self._print_line(*((part, "dim") for part in parts))

    def _print_line(self, *parts: str | tuple[str, str]) -> None:
        where = [(f"[{self.name}] ", "dim")] if self._screen.many else []
        self._screen.print_line(*where, *parts)

    async def _print_card(self, call: str) -> None:
        waiting = await self._rt.pending()
        for entry in waiting:
            if entry.conversation == self.name and entry.call == call:
                self._screen.end_line()
                self._screen.out.print()
                print_card(self._screen.out, entry, self._screen.commands, waiting, self._rt.now())

    async def _show_event(self, event: AnyEvent) -> None:
        match event:
            case MessageReceived():
                self._print_name(event.by.id, "bold")
                self._screen.stream(ellipsize(event.text, MAX_CHARS))
                self._screen.end_line()
            case TurnStarted():
                self._numbers[event.message] = event.turn
            case AssistantSaid():
                self._show_reply(event)
            case AsideAnswered():
                self._usage.add(event.attempts)
                self._answers[event.message] = event
                self._live.print_aside(event)
            case OutputRejected():
                self._usage.add(event.attempts)
                self._print_dim("  reply rejected: ", event.message)
            case CallStarted():
                self._usage.add(event.attempts)
                if event.seq > self._start:
                    self._live.start_timer(event.call_id, self._tools.get(event.call_id, event.call_id))
                if event.attempt > 1 or event.call_id in self._asked:
                    again = f"runs again (attempt {event.attempt})" if event.attempt > 1 else "runs"
                    verb = "continues" if event.call_id in self._continuing or event.state is not None else again
                    self._print_dim(f"  … {self._tools.get(event.call_id, event.call_id)} {verb}")
                self._continuing.discard(event.call_id)
            case CallSuspended():
                self._usage.add(event.attempts)
                self._asked.add(event.call_id)
                if event.continues:
                    self._continuing.add(event.call_id)  # its next run continues it
                self._tools.setdefault(event.call_id, event.tool)
                if event.seq > self._start:
                    await self._print_card(event.call_id)
            case VoteCast() | DeadlineExtended() | ReminderDue() | CallEscalated() | ApprovalTakenBack():
                self._print_dim(f"  {describe_event(event, self._tools)}")
            case CallResolved():
                grace = f", runs at {format_time(event.starts_at)}" if event.starts_at else ""
                tool = self._tools.get(event.call_id, event.call_id)
                self._print_line(("  ● ", "cyan"), f"{tool} {describe_resolution(event)}{grace}")
            case CallReturned():
                self._usage.add(event.attempts)
                self._live.stop_timer(event.call_id)
                self._show_result(event)
            case GrantGiven():
                covered = describe_coverage(event)
                where = "in this conversation" if event.scope == "conversation" else f"for {describe_scope(event)}"
                self._print_dim(f"  {describe_decider(event)} allowed {event.tool} with {covered} {where} from now on")
            case ResolutionRefused():
                self._print_dim(f"  refused: {event.reason}")
            case CancelRequested():
                self._print_dim(
                    f"  {describe_decider(event)} cancelled the turn", f": {event.reason}" if event.reason else ""
                )
            case TurnEnded():
                self._ended[event.turn] = event
                self._show_turn_end(event)
            case _:
                pass

    def _show_reply(self, event: AssistantSaid) -> None:
        self._usage.add(event.attempts)
        self._live.print_reply(event)
        for call in event.calls:
            self._tools[call.id] = call.tool
            args = " ".join(f"{name}={value_text(value)}" for name, value in call.args.items())
            self._print_line(("  → ", "cyan"), (call.tool, "bold"), (f"  {ellipsize(args, self._screen.room)}", "dim"))

    def _show_result(self, event: CallReturned) -> None:
        if event.error is not None:
            if event.source != "human":
                self._print_line(("  ✗ ", "red"), event.tool, (f"  [{event.error.kind}] {event.error.message}", "dim"))
        elif event.source == "server":
            text = ellipsize(value_text(event.value), self._screen.room)
            first, *more = result_lines(event.value, self._screen.room) or [[(text, "dim")]]
            self._print_line(("  ✓ ", "green"), event.tool, "  ", *first)
            for line in more:
                self._print_line(*line)
            for image in event.images:
                self._print_dim(f"    {describe_image(image)}; the page shows it: holdfast ui")
            self._show_checklist(event)

    def _show_checklist(self, event: CallReturned) -> None:
        lines = checklist_lines(event.data)
        if lines is not None and lines != self._checklist:
            self._checklist = lines
            for line in lines:
                self._print_line(*line)

    def _show_turn_end(self, event: TurnEnded) -> None:
        turn = self._state.turn
        if turn is not None and turn.number == event.turn and (spent := self._usage.describe_usage(turn.usage)):
            self._print_dim(f"  {spent}")
        self._usage = TurnUsage()
        if event.error is not None:
            self._print_line(("  ✗ ", "red"), f"the turn failed: [{event.error.kind}] {event.error.message}")
        elif event.reason == "completed":
            self._print_dim("  turn completed")
        else:
            value = f": {value_text(event.value)}" if event.value not in (None, "") else ""
            self._print_dim(f"  turn ended: {event.reason}{value}")

    def _print_speaker(self) -> None:
        self._print_name(self._state.turn.agent if self._state.turn else self._state.agent, "bold green")

    def _print_name(self, name: str, style: str) -> None:
        self._screen.end_line()
        if self._screen.many:
            self._screen.stream(f"[{self.name}] ", "dim")
        self._screen.stream(f"{name}: ", style)

    def _answering_agent(self) -> tuple[AgentDefinition | None, bool]:
        """Return the agent that answers, if it runs here, and whether its next text is a structured answer."""
        turn = self._state.turn
        agent = self._rt.agents.get(turn.agent) if turn else None
        if turn is None or agent is None:
            return agent, False
        wanted = turn.output is not None or agent.output is not None
        return agent, wanted and not (agent.output_mode == "separate" and bool(agent.offers) and not turn.drafted)
