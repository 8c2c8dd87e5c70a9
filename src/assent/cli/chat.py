"""A conversation at the keyboard: say something, see the turn as it happens, decide what it asks, and so on."""

from __future__ import annotations

import asyncio
import sys

from rich.text import Text

from assent.cli.commands import MEMORY
from assent.cli.dialogue import Dialogue, Left
from assent.cli.keyboard import Interrupted, Keyboard
from assent.cli.live import WAITING, View
from assent.cli.output import INTERRUPTED
from assent.cli.past import Past
from assent.cli.running import Job, is_mine, run_agent, state_of
from assent.cli.values import message_text
from assent.core.decisions import Pending
from assent.core.events import AnyEvent, MessageReceived
from assent.core.state import State
from assent.errors import AssentError, Invalid, NotFound
from assent.runtime.intake import new_id
from assent.runtime.runtime import Runtime

PROMPT = "> "


def check_terminal() -> None:
    for stream in (sys.stdin, sys.stdout):
        if stream is None or not stream.isatty():  # pyright: ignore[reportUnnecessaryComparison]
            raise Invalid("chat needs a terminal; without one use `assent run`", kind="no_prompt")


class Quiet(View):
    """Cards are shown when they are asked about, and what was just typed is not said again."""

    mute: str | None = None

    async def _card(self, call: str) -> None:
        pass

    async def _canonical(self, event: AnyEvent) -> None:
        if not isinstance(event, MessageReceived) or event.text != self.mute:
            await super()._canonical(event)


class Chat:
    def __init__(self, job: Job, rt: Runtime, name: str):
        self._job, self._rt, self._name = job, rt, name
        self._screen = job.screen()
        self._keyboard = Keyboard(self._prompt, self._interrupted)
        self._past = Past()
        self._dialogue = Dialogue(rt, self._screen, self._keyboard)
        self._task = asyncio.current_task()
        self._presses = 0
        self._turn = self._asking = False
        """A turn is open, and Ctrl-C is about that; somebody is asked about a call of it."""
        self._cancelling: asyncio.Future[bool] | None = None
        self.left = False
        """They pressed Ctrl-C twice."""

    async def run(self) -> int:
        with self._keyboard:
            state = await self._state()
            more = True
            if is_mine(self._job, state):
                self._screen.line((f"conversation {self._name}, going on", "dim"))
                message = state.turn.message if state.turn else state.queue[0].message
                more = await self._see(self._view(state, since=message), message)
            else:
                self._screen.line((f"conversation {self._name}; Ctrl-C cancels a turn, Ctrl-D leaves", "dim"))
            while more:
                more = await self._next()
        return 0

    async def _state(self) -> State:
        return await state_of(self._rt, self._name)

    def _view(self, state: State, *, since: int | None = None, known: int = 0) -> Quiet:
        return Quiet(self._rt, self._screen, state, wait=0.0, since=since, known=known)

    async def _next(self) -> bool:
        """One message and its turn; False: they are gone."""
        try:
            text = await self._keyboard.ask(PROMPT, past=self._past)
        except Interrupted:
            self._screen.out.print()
            self._screen.line(("Ctrl-C again leaves, and so does Ctrl-D", "dim"))
            return True
        if text is None:
            self._screen.out.print()
            return False
        self._presses = 0
        state = await self._state()
        if not text.strip():
            return await self._see(self._view(state), state.turn.message) if state.turn is not None else True
        view = self._view(state)
        view.mute = text
        try:
            await view.ready()  # so that no word of the reply is missed
            said = message_text(text)
            sent = await self._rt.send(self._name, said, by=self._job.by, agent=self._job.agent.name, when_busy="queue")
        except AssentError as refusal:
            await view.close()
            self._dialogue.refused(refusal)
            return True
        if state.turn is not None:
            self._screen.line(("it is answered when the open turn has ended", "dim"))
        return await self._see(view, sent.seq)

    async def _see(self, view: Quiet, message: int) -> bool:
        """A turn, with all that it asks, to its end, or until what it asks is left pending. False: they are gone."""
        left: set[str] = set()
        self._turn = True
        try:
            while await view.end(message) == WAITING:
                before = await self._state()
                waiting = [entry for entry in await self._rt.pending(self._name) if entry.call not in left]
                if not waiting and left:
                    self._screen.line(("left pending; Enter asks again, or answer it from elsewhere:", "dim"))
                    self._screen.line(f"    {self._job.commands.pending(self._name)}")
                    return True
                try:
                    if waiting:
                        await self._decide(waiting[0])
                except Left:
                    left.add(waiting[0].call)
                except EOFError:
                    self._screen.out.print()
                    return False
                except Interrupted:
                    self._screen.out.print()
                    if self._cancelling is not None:
                        await self._cancelling
                view = self._view(before, known=(await self._state()).seq)
        finally:
            self._turn, self._presses = False, 0
        return True

    async def _decide(self, entry: Pending) -> None:
        """Until a decision is taken, or is too late."""
        while True:
            self._asking = True
            try:
                decision = await self._dialogue.decision(entry)
            finally:
                self._asking = False
            try:
                await self._rt.resolve(self._name, entry.call, decision, by=self._job.by)
                return
            except Invalid as refusal:
                self._dialogue.refused(refusal)  # and ask again
            except AssentError as refusal:
                self._dialogue.refused(refusal)
                return

    def _prompt(self, text: str) -> None:
        self._screen.end_line()
        self._screen.out.print(Text(text, style="bold"), end="", soft_wrap=True)
        self._screen.out.file.flush()

    def _interrupted(self) -> None:
        self._presses += 1
        if self._presses > 1:
            self.left = True
            if self._task is not None:
                self._task.cancel()
        elif self._turn:
            self._screen.end_line()
            if not self._asking:
                self._screen.line(("cancelling the turn; Ctrl-C again leaves", "dim"))
            self._cancelling = asyncio.ensure_future(self._rt.cancel(self._name, by=self._job.by, reason="Ctrl-C"))


async def chat(job: Job) -> int:
    name = job.conversation if job.conversation is not None else new_id()
    talk: Chat | None = None
    try:
        async with run_agent(job, name) as rt:
            try:
                await state_of(rt, name)
            except NotFound:
                await rt.open(name, agent=job.agent.name, by=job.by, metadata=job.chosen.metadata)
            job.conversation = name
            talk = Chat(job, rt, name)
            code = await talk.run()
    except asyncio.CancelledError:
        if talk is None or not talk.left:
            raise
        code = INTERRUPTED
    screen = job.screen()
    job.print_unfinished(screen)
    if job.store != MEMORY:
        screen.line(("to go on: ", "dim"), job.commands.write("chat", *job.chosen.words, "--conversation", name))
    return code
