"""``holdfast chat``: talk to an agent at the terminal, watch its turns, and decide the calls that it asks about."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import click

from holdfast.cli.agent_run import AgentRun, has_open_turn, run_agent
from holdfast.cli.agents import choose_agent
from holdfast.cli.command_lines import MEMORY_STORE
from holdfast.cli.input.dialogue import AskedAside, Dialogue, LeftPending
from holdfast.cli.input.values import check_message
from holdfast.cli.options import (
    by_option,
    by_or_login,
    conversation_option,
    example,
    instructions_option,
    model_option,
    optional_spec_argument,
    store_option,
    store_url,
)
from holdfast.cli.output import EXIT_INTERRUPTED, EXIT_WAITING
from holdfast.cli.render.turn import TurnView
from holdfast.core.decisions import Pending
from holdfast.core.events import AnyEvent, MessageReceived
from holdfast.core.inputs import WhenBusy
from holdfast.core.state import State, status_of
from holdfast.errors import Busy, HoldfastError, Invalid, NotFound
from holdfast.runtime.arguments import new_id
from holdfast.runtime.runtime import Runtime
from holdfast.runtime.turn import Turn

PROMPT = "> "


@click.command(
    epilog=example(
        "holdfast chat hello:agent",
        "holdfast chat hello:agent --conversation support",
        'holdfast chat --model openai:gpt-5 --instructions "Answer in one sentence."',
    )
)
@optional_spec_argument
@model_option
@instructions_option
@conversation_option("The conversation to continue, or the name of a new one.")
@by_option
@store_option
def chat(
    spec: str | None,
    model: str | None,
    instructions: str | None,
    conversation: str | None,
    by: str | None,
    store: str | None,
) -> int:
    """Talk to an agent or a model, and decide its calls right there.

    Ctrl-C cancels the turn, a second Ctrl-C exits; Ctrl-D exits. Calls that you leave pending are not lost. While a
    call waits for you, /ask TEXT asks the agent about it, and so does a message after you left it pending.
    """
    check_terminal()
    job = AgentRun(choose_agent(spec, model, instructions), store_url(store), by_or_login(by), 0.0, conversation)
    return asyncio.run(run_chat(job))


def check_terminal() -> None:
    for stream in (sys.stdin, sys.stdout):
        if stream is None or not stream.isatty():  # pyright: ignore[reportUnnecessaryComparison]
            raise Invalid("chat needs a terminal; without one use `holdfast run`", kind="no_prompt")


class ChatView(TurnView):
    """A turn view without cards, which the dialogue shows, and without the message that was just typed."""

    mute: str | None = None

    async def _print_card(self, call: str) -> None:
        pass

    async def _show_event(self, event: AnyEvent) -> None:
        if not isinstance(event, MessageReceived) or event.text != self.mute:
            await super()._show_event(event)


class Chat:
    def __init__(self, job: AgentRun, rt: Runtime, name: str):
        self._job, self._rt, self._name = job, rt, name
        self._screen = job.make_screen()
        from holdfast.cli.input.prompt import Prompt  # imports prompt_toolkit, which other commands do not need

        self._prompt = Prompt(self._screen, self._on_interrupt)
        self._dialogue = Dialogue(rt, self._screen, self._prompt)
        self._task = asyncio.current_task()
        self._presses = 0
        self._turn = self._asking = False
        """Whether a turn is open, which Ctrl-C cancels; whether the user is asked about one of its calls."""
        self._cancelling: asyncio.Future[bool] | None = None
        self.left = False
        """The user pressed Ctrl-C twice."""

    async def run(self) -> int:
        with self._prompt:
            state = await self._load_state()
            more = True
            if has_open_turn(self._job, state):
                self._screen.print_line((f"conversation {self._name}, continued", "dim"))
                message = state.turn.message if state.turn else state.queue[0].message
                more = await self._follow_turn(self._view(state, since=message), message)
            else:
                self._screen.print_line((f"conversation {self._name}; Ctrl-C cancels a turn, Ctrl-D exits", "dim"))
            while more:
                more = await self._ask_and_send()
        return 0

    async def _load_state(self) -> State:
        return await self._rt.load_state(self._name)

    def _view(self, state: State, *, since: int | None = None, known: int = 0) -> ChatView:
        return ChatView(self._rt, self._screen, state, wait=0.0, since=since, known=known)

    async def _ask_and_send(self) -> bool:
        """Read one message and follow its turn; return False at the end of input."""
        try:
            text = await self._prompt.ask_message(PROMPT)
        except KeyboardInterrupt:
            self._screen.print_line(("Ctrl-C again exits, and so does Ctrl-D", "dim"))
            return True
        except EOFError:
            return False
        self._presses = 0
        state = await self._load_state()
        if not text.strip():
            return await self._follow_turn(self._view(state), state.turn.message) if state.turn is not None else True
        view = self._view(state)
        view.mute = text
        try:
            await view.wait_until_ready()  # so that the view misses no part of the reply
            waits = status_of(state) == "awaiting_input"
            sent = await (self._send_aside_or_queue(text) if waits else self._send(text, "queue"))
        except HoldfastError as refusal:
            await view.close()
            self._dialogue.print_refusal(refusal)
            return True
        if sent.aside:
            await view.wait_for_turn(sent.seq)
            return True
        if state.turn is not None:
            self._screen.print_line(("it is answered when the open turn has ended", "dim"))
        return await self._follow_turn(view, sent.seq)

    async def _send(self, text: str, when_busy: WhenBusy) -> Turn[Any]:
        return await self._rt.send(
            self._name, check_message(text), by=self._job.by, agent=self._job.agent.name, when_busy=when_busy
        )

    async def _send_aside_or_queue(self, text: str) -> Turn[Any]:
        """Ask while the turn waits; if it has begun to work, or has no budget left, answer after it."""
        try:
            return await self._send(text, "aside")
        except Busy:
            return await self._send(text, "queue")

    async def _ask_aside(self, state: State, text: str) -> State:
        """Send an aside and print its answer; return the state up to which events are printed."""
        view = self._view(state)
        view.mute = text
        try:
            await view.wait_until_ready()
            sent = await self._send(text, "aside")
        except HoldfastError as refusal:
            await view.close()
            self._dialogue.print_refusal(refusal)
        else:
            await view.wait_for_turn(sent.seq)
        return view.state

    async def _follow_turn(self, view: ChatView, message: int) -> bool:
        """Follow a turn to its end, asking about its calls, or until they are left pending.

        Returns False at the end of input.
        """
        left: set[str] = set()
        self._turn = True
        try:
            while await view.wait_for_turn(message) == EXIT_WAITING:
                before = await self._load_state()
                waiting = [entry for entry in await self._rt.pending(self._name) if entry.id not in left]
                if not waiting and left:
                    self._screen.print_line(("left pending; Enter asks again, or answer it from elsewhere:", "dim"))
                    self._screen.print_line(f"    {self._job.commands.pending_command(self._name)}")
                    return True
                try:
                    if waiting:
                        await self._ask_and_resolve(waiting[0])
                except AskedAside as asked:
                    before = await self._ask_aside(before, asked.text)
                except LeftPending:
                    left.add(waiting[0].id)
                except EOFError:
                    return False
                except KeyboardInterrupt:
                    if self._cancelling is not None:
                        await self._cancelling
                view = self._view(before, known=(await self._load_state()).seq)
        finally:
            self._turn, self._presses = False, 0
        return True

    async def _ask_and_resolve(self, entry: Pending) -> None:
        """Ask until a decision is recorded, or comes too late."""
        while True:
            self._asking = True
            try:
                decision = await self._dialogue.ask_decision(entry)
            finally:
                self._asking = False
            try:
                await self._rt.resolve(self._name, entry.call, decision, by=self._job.by)
                return
            except Invalid as refusal:
                self._dialogue.print_refusal(refusal)
            except HoldfastError as refusal:
                self._dialogue.print_refusal(refusal)
                return

    def _on_interrupt(self) -> None:
        self._presses += 1
        if self._presses > 1:
            self.left = True
            if self._task is not None:
                self._task.cancel()
        elif self._turn:
            self._screen.end_line()
            if not self._asking:
                self._screen.print_line(("cancelling the turn; Ctrl-C again exits", "dim"))
            self._cancelling = asyncio.ensure_future(self._rt.cancel(self._name, by=self._job.by, reason="Ctrl-C"))


async def run_chat(job: AgentRun) -> int:
    name = job.conversation if job.conversation is not None else new_id()
    chat_session: Chat | None = None
    try:
        async with run_agent(job, name) as rt:
            try:
                await rt.load_state(name)
            except NotFound:
                await rt.open(name, agent=job.agent.name, by=job.by, metadata=job.chosen.metadata)
            job.conversation = name
            chat_session = Chat(job, rt, name)
            code = await chat_session.run()
    except asyncio.CancelledError:
        if chat_session is None or not chat_session.left:
            raise
        code = EXIT_INTERRUPTED
    screen = job.make_screen()
    job.print_unfinished(screen)
    if job.store != MEMORY_STORE:
        screen.print_line(
            ("to continue: ", "dim"), job.commands.format_command("chat", *job.chosen.words, "--conversation", name)
        )
    return code
