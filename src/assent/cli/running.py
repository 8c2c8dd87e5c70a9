"""The commands that run an agent here: say something and see it through, or go on with what is owed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from assent.cli import inbox
from assent.cli.commands import MEMORY, Commands
from assent.cli.live import WAITING, Screen, View
from assent.core.decisions import Decision
from assent.core.state import State
from assent.errors import Invalid, NotFound
from assent.runtime.agent import Agent
from assent.runtime.runtime import Runtime


@dataclass
class Job:
    """What is run, where, and for whom; what is left to say when it is interrupted."""

    agent: Agent
    spec: str
    store: str
    by: str
    wait: float | None
    """Seconds to wait for people; None: for ever."""
    conversation: str | None = None
    """Set as soon as it is known."""

    def __post_init__(self) -> None:
        self.commands = Commands(self.store)
        if self.store == MEMORY:
            self.wait = 0.0  # nobody else can ever see it, so nobody can answer

    def screen(self, *, many: bool = False) -> Screen:
        from assent.cli.cards import console

        return Screen(console(), self.commands, many=many)

    def go_on(self) -> str:
        if self.conversation is None:
            return self.commands.write("run", self.spec)
        return self.commands.go_on(self.spec, self.conversation)


@asynccontextmanager
async def _running(job: Job) -> AsyncGenerator[Runtime]:
    async with Runtime(job.agent, store=job.store) as rt:
        yield rt


async def _state(rt: Runtime, name: str) -> State:
    return (await rt.loaded(name)).state


async def say(job: Job, text: str, **options: Any) -> int:
    """Send the message and see its turn through."""
    async with _running(job) as rt:
        try:
            state = await _state(rt, job.conversation) if job.conversation else None
        except NotFound:
            state = None
        screen = job.screen()
        if state is None:
            job.conversation = await rt.open(
                job.conversation, agent=job.agent.name, by=job.by, metadata={"module": job.spec}
            )
            state = await _state(rt, job.conversation)
        assert job.conversation is not None
        screen.line((f"conversation {job.conversation}", "dim"))
        view = View(rt, screen, state, wait=job.wait)
        try:
            await view.ready()
            turn = await rt.send(job.conversation, text, by=job.by, agent=job.agent.name, **options)
        except BaseException:
            await view.close()
            raise
        return _told(job, screen, await view.end(turn.seq))


async def go_on(job: Job) -> int:
    """See the open turn of one conversation through, or those of all conversations of the agent."""
    async with _running(job) as rt:
        if job.conversation is not None:
            names = [job.conversation]
        else:
            infos = await inbox.conversations(rt)
            names = [i.conversation for i in infos if i.agent == job.agent.name and i.state != "idle"]
        states = [await _state(rt, name) for name in names]
        states = [state for state in states if _mine(job, state)]
        screen = job.screen(many=len(states) > 1)
        if not states:
            where = f"in {job.conversation}" if job.conversation else f"for agent {job.agent.name}"
            screen.line(f"nothing is open {where}; give a MESSAGE to say something")
            return 0
        codes = await asyncio.gather(*(_join(job, rt, screen, state) for state in states))
        code = WAITING if WAITING in codes else max(codes)
        return _told(job, screen, code)


def _mine(job: Job, state: State) -> bool:
    agent = state.turn.agent if state.turn else state.queue[0].agent if state.queue else None
    if agent is None:
        return False
    if agent != job.agent.name:
        raise Invalid(f"conversation {state.conversation!r} is with agent {agent!r}, not {job.agent.name!r}")
    return True


async def _join(job: Job, rt: Runtime, screen: Screen, state: State) -> int:
    """From the message that the open turn answers, so that one can see what it is about."""
    message = state.turn.message if state.turn else state.queue[0].message
    screen.line((f"conversation {state.conversation}, going on", "dim"))
    return await View(rt, screen, state, wait=job.wait, since=message).end(message)


async def resume(job: Job, given: str, verb: str, make: Any) -> int:
    """Decide a call and see its turn through, right here."""
    async with _running(job) as rt:
        found = await inbox.find(rt, given, verb)
        job.conversation = found.conversation
        decision: Decision = make(found.entry)
        try:
            state = await _state(rt, found.conversation)
        except NotFound:
            state = None
        if state is None or state.turn is None or found.entry is None:
            await rt.resolve(found.conversation, found.call, decision, by=job.by)  # which says why not
            return 0
        if not _mine(job, state):
            return 0
        screen = job.screen()
        screen.line((f"conversation {found.conversation}", "dim"))
        view = View(rt, screen, state, wait=job.wait)
        try:
            await view.ready()
            await rt.resolve(found.conversation, found.call, decision, by=job.by)
        except BaseException:
            await view.close()
            raise
        return _told(job, screen, await view.end(state.turn.message))


async def demo(job: Job, message: str, by: str) -> int:
    """Go on with the demo's conversation, or begin one if there is none or it is over."""
    import os

    base = job.conversation or "demo"
    async with _running(job) as rt:
        number, name = 1, base
        while True:
            try:
                snapshot = await rt.snapshot(name)
            except NotFound:
                await rt.open(name, agent=job.agent.name, by=by, metadata={"module": job.spec})
                fresh = True
                break
            if snapshot.state != "idle" or snapshot.queued or not snapshot.messages:
                fresh = snapshot.turn is None and not snapshot.queued
                break
            number += 1
            name = f"{base}-{number}"
        job.conversation = name
        state = await _state(rt, name)
        screen = job.screen()
        screen.line((f"A support conversation on a scripted model, kept in {job.store}.", "dim"))
        screen.line((f"Kill it at any moment (kill -9 {os.getpid()}) and start it again: it goes on.", "dim"))
        screen.line()
        if not fresh:
            return _told(job, screen, await _join(job, rt, screen, state))
        view = View(rt, screen, state, wait=job.wait)
        try:
            await view.ready()
            turn = await rt.send(name, message, by=by, agent=job.agent.name)
        except BaseException:
            await view.close()
            raise
        return _told(job, screen, await view.end(turn.seq))


def _told(job: Job, screen: Screen, code: int) -> int:
    """The last word: how to go on, or where to read it all."""
    if code == WAITING and job.store == MEMORY:
        screen.line(("waiting for somebody who cannot see it: this store ends with this process", "yellow"))
    elif code == WAITING:
        screen.line(("at rest, waiting for somebody; to go on when it is answered:", "dim"))
        screen.line(f"    {job.go_on()}")
    elif job.conversation is not None and job.store != MEMORY:
        screen.line(("the whole log: ", "dim"), job.commands.write("log", job.conversation))
    return code
