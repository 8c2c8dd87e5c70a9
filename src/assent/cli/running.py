"""The commands that run an agent here: say something and see it through, or go on with what is owed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import click

from assent.cli import inbox
from assent.cli.commands import DEMO, MEMORY, Commands
from assent.cli.live import WAITING, View
from assent.cli.loading import Chosen
from assent.cli.screen import Screen
from assent.cli.unfinished import unfinished_calls
from assent.core.decisions import Decision, Pending
from assent.core.machine import closed
from assent.core.state import State
from assent.errors import Busy, Invalid, NotFound
from assent.runtime.conversation import Conversation
from assent.runtime.intake import new_id
from assent.runtime.runtime import Runtime

Make = Callable[[Pending | None], Decision]
LEAVING = 0.5
"""Seconds of leaving after which we say what it takes so long for."""


@dataclass
class Job:
    """What is run, where, and for whom; what is left to say when it is interrupted."""

    chosen: Chosen
    store: str
    by: str
    wait: float | None
    """Seconds to wait for people; None: for ever."""
    conversation: str | None = None
    """Set as soon as it is known."""
    again: str | None = None
    """The command that goes on, where it is not ``assent run``."""

    active: list[Conversation] = field(default_factory=list[Conversation])
    """The conversations that ran here when the command began to stop."""

    def __post_init__(self) -> None:
        self.agent = self.chosen.agent
        self.commands = Commands(self.store)
        if self.store == MEMORY:
            self.wait = 0.0  # nobody else can ever see it, so nobody can answer

    def screen(self, *, many: bool = False) -> Screen:
        from assent.cli.cards import console

        return Screen(console(), self.commands, many=many)

    def go_on(self) -> str:
        if self.again is not None:
            return self.again
        if self.conversation is None:
            return self.commands.write("run", *self.chosen.words)
        return self.commands.go_on(self.chosen.words, self.conversation)

    def stopped(self) -> None:
        """The last word when somebody pressed Ctrl-C."""
        screen = self.screen()
        if self.conversation is not None:
            screen.out.print()
            self.print_unfinished(screen)
            screen.prose(f"stopped; conversation {self.conversation} is safe. To go on with it:", "")
            screen.line(f"    {self.go_on()}")
        else:
            self.print_unfinished(screen)

    def print_unfinished(self, screen: Screen) -> None:
        """Name the calls that were started and not finished: they may have taken effect."""
        for line in unfinished_calls(self.active, kept=self.store != MEMORY):
            screen.prose(line, "yellow")


@asynccontextmanager
async def run_agent(job: Job, conversation: str | None) -> AsyncGenerator[Runtime]:
    """The agent runs, in this conversation and no other; with None, in all of its conversations."""
    slow: asyncio.TimerHandle | None = None
    try:
        async with Runtime(job.agent, store=job.store, only=None if conversation is None else [conversation]) as rt:
            try:
                yield rt
            finally:
                job.active = rt.home.active()
                slow = asyncio.get_running_loop().call_later(LEAVING, _leaving, rt)
    finally:
        if slow is not None:
            slow.cancel()


def _leaving(rt: Runtime) -> None:
    if rt.home.begun():
        click.echo(
            "a tool still runs: leaving when it is done, in 10 s at the latest; Ctrl-C leaves at once",
            err=True,
        )


async def state_of(rt: Runtime, name: str) -> State:
    return (await rt.home.loaded(name)).state


async def say(job: Job, text: str, **options: Any) -> int:
    """Send the message and see its turn through."""
    name = job.conversation if job.conversation is not None else new_id()
    job.conversation = None
    async with run_agent(job, name) as rt:
        try:
            state = await state_of(rt, name)
        except NotFound:
            await rt.open(name, agent=job.agent.name, by=job.by, metadata=job.chosen.metadata)
            state = await state_of(rt, name)
        job.conversation = name
        screen = job.screen()
        screen.line((f"conversation {name}", "dim"))
        view = View(rt, screen, state, wait=job.wait)
        try:
            await view.ready()
            turn = await rt.send(name, text, by=job.by, agent=job.agent.name, **options)
        except Busy:
            await view.close()
            raise await _busy(job, rt, name) from None
        except BaseException:
            await view.close()
            raise
        return _told(job, screen, await view.end(turn.seq))


async def _busy(job: Job, rt: Runtime, name: str) -> Busy:
    """Why not, and what to do about it, in the words of the command line."""
    waiting = len(await rt.pending(name))
    if waiting:
        answers = "1 answer is awaited" if waiting == 1 else f"{waiting} answers are awaited"
        first = f"{answers}; give {'it' if waiting == 1 else 'them'} first ({job.commands.pending(name)})"
    elif await inbox.unattended(rt, name):
        first = f"nobody runs it: finish it first ({job.commands.go_on(await inbox.named_in(rt, name), name)})"
    else:
        first = "try again when it has ended"
    return Busy(f"a turn is in flight in {name}: {first}, or say it with --when-busy queue or --when-busy interrupt")


async def go_on(job: Job) -> int:
    """See the open turn of one conversation through, or those of all conversations of the agent."""
    async with run_agent(job, job.conversation) as rt:
        if job.conversation is not None:
            names = [job.conversation]
        else:
            infos = await inbox.conversations(rt)
            names = [i.conversation for i in infos if i.agent == job.agent.name and i.state != "idle"]
        states = [await state_of(rt, name) for name in names]
        states = [state for state in states if is_mine(job, state)]
        screen = job.screen(many=len(states) > 1)
        if not states:
            where = f"in {job.conversation}" if job.conversation else f"for agent {job.agent.name}"
            screen.line(f"nothing is open {where}; give a MESSAGE to say something")
            return 0
        codes = await asyncio.gather(*(_join(job, rt, screen, state) for state in states))
        code = WAITING if WAITING in codes else max(codes)
        return _told(job, screen, code)


def is_mine(job: Job, state: State) -> bool:
    if state.closed:
        raise closed(state.conversation)
    agent = state.turn.agent if state.turn else state.queue[0].agent if state.queue else None
    if agent is None:
        return False
    if agent != job.agent.name:
        raise _not_mine(job, state.conversation, agent)
    return True


def _not_mine(job: Job, conversation: str, agent: str) -> Invalid:
    return Invalid(f"conversation {conversation!r} is with agent {agent!r}, not {job.agent.name!r}")


async def _join(job: Job, rt: Runtime, screen: Screen, state: State) -> int:
    """From the message that the open turn answers, so that one can see what it is about."""
    message = state.turn.message if state.turn else state.queue[0].message
    screen.line((f"conversation {state.conversation}, going on", "dim"))
    return await View(rt, screen, state, wait=job.wait, since=message).end(message)


async def resume(job: Job, given: str, verb: str, make: Make) -> int:
    """Decide a call and see its turn through, right here. A decision that is refused runs nothing."""
    async with Runtime(store=job.store) as rt:
        found = await inbox.find(rt, given, verb)
        if found.entry is not None and found.entry.agent != job.agent.name:
            raise _not_mine(job, found.conversation, found.entry.agent)
        await _check_model(job, rt, found.conversation)
        decision = make(found.entry)
        try:
            before = await state_of(rt, found.conversation)
        except NotFound:
            before = None
        await rt.resolve(found.conversation, found.call, decision, by=job.by)
        after = await state_of(rt, found.conversation)
        if before is None or before.turn is None:  # it has come to wait just now
            before = after
    job.conversation = found.conversation
    async with run_agent(job, found.conversation) as rt:
        screen = job.screen()
        screen.line((f"conversation {found.conversation}", "dim"))
        message = before.turn.message if before.turn else before.seq
        view = View(rt, screen, before, wait=job.wait, known=after.seq)
        return _told(job, screen, await view.end(message))


async def _check_model(job: Job, rt: Runtime, conversation: str) -> None:
    """Refuse to go on with another model than the one that ``run --model`` named, unless one is named again.

    It is not simply taken from the log: whoever opens a conversation writes that entry, and a model's name says which
    server is sent the whole conversation.
    """
    try:
        named = await inbox.named_in(rt, conversation)
    except NotFound:
        return
    if named is not None and len(named) > 2 and "--model" not in job.chosen.words:
        raise Invalid(
            f"conversation {conversation!r} was started with --model {named[2]}, and {job.chosen.words[0]} by itself "
            f"asks another one: say which, with --model {named[2]} or another; nothing was recorded"
        )


async def demo(job: Job, message: str, by: str) -> int:
    """Go on with the demo's conversation, or begin one if there is none or it is over."""
    name = await _next(job)
    async with run_agent(job, name) as rt:
        try:
            state = await state_of(rt, name)
        except NotFound:
            await rt.open(name, agent=job.agent.name, by=by, metadata=job.chosen.metadata)
            state = await state_of(rt, name)
        job.conversation = name
        screen = job.screen()
        _intro(job, screen)
        if state.turn is not None or state.queue:
            return _told(job, screen, await _join(job, rt, screen, state))
        view = View(rt, screen, state, wait=job.wait)
        try:
            await view.ready()
            turn = await rt.send(name, message, by=by, agent=job.agent.name)
        except BaseException:
            await view.close()
            raise
        return _told(job, screen, await view.end(turn.seq))


async def begin_demo(base: str, message: str, by: str, rt: Runtime) -> str:
    """The demo's conversation, begun if it has yet to be: for a page."""
    name = await _first(rt, base)
    try:
        begun = bool((await rt.snapshot(name)).messages)
    except NotFound:
        begun = False
    if not begun:
        await rt.send(name, message, by=by)
    return name


async def _next(job: Job) -> str:
    base = job.conversation or DEMO
    job.conversation = None
    async with Runtime(store=job.store) as rt:
        return await _first(rt, base)


async def _first(rt: Runtime, base: str) -> str:
    """The first of demo, demo-2, ... that is not over."""
    name, number = base, 1
    while True:
        try:
            snapshot = await rt.snapshot(name)
        except NotFound:
            return name
        if snapshot.state != "idle" or snapshot.queued or not snapshot.messages:
            return name
        number += 1
        name = f"{base}-{number}"


def _intro(job: Job, screen: Screen) -> None:
    if job.store == MEMORY:
        screen.prose("A support conversation on a scripted model, kept in memory: it ends with this process.")
    else:
        screen.prose(f"A support conversation on a scripted model, kept in {job.store}.")
        screen.prose("Answers are given from a second terminal in this directory, with the commands below each card.")
        screen.prose("Kill it at any moment and start it again: it goes on.")
        screen.line(f"    kill -9 {os.getpid()}")
    screen.line()


def _told(job: Job, screen: Screen, code: int) -> int:
    """The last word: how to go on, or where to read it all."""
    if code == WAITING and job.store == MEMORY:
        screen.prose("waiting for somebody who cannot see it: this store ends with this process", "yellow")
    elif code == WAITING:
        screen.prose("at rest, waiting for somebody; to go on when it is answered:")
        screen.line(f"    {job.go_on()}")
    elif job.conversation is not None and job.store != MEMORY:
        screen.line(("the whole log: ", "dim"), job.commands.write("log", job.conversation))
    return code
