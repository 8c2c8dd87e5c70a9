"""Run an agent in this process for one command, and follow its turns on the terminal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import click

from holdfast.cli.agents import ChosenAgent
from holdfast.cli.command_lines import MEMORY_STORE, CommandWriter
from holdfast.cli.output import EXIT_WAITING
from holdfast.cli.render.console import Screen, make_console
from holdfast.cli.render.turn import TurnView
from holdfast.core.decide.machine import read_only_error
from holdfast.core.decisions import Principal
from holdfast.core.state import CallState, State
from holdfast.errors import Invalid
from holdfast.runtime.runtime import Runtime

EXIT_NOTICE_SECONDS = 0.5
"""Seconds of shutdown after which a notice is printed."""
NEXT = {
    "redispatch": "the next run starts it again, with the same call.key",
    "fail": "the next run reports it as interrupted and does not start it again",
    "ask": "the next run asks a person before it starts it again",
    "reconcile": "the next run asks the tool's recovery function what happened",
}


@dataclass
class AgentRun:
    """One run of an agent for a command: the agent, the store and the user."""

    chosen: ChosenAgent
    store: str
    by: str | Principal
    wait: float | None
    """Seconds to wait for answers; None means without a limit."""
    conversation: str | None = None
    """Set as soon as the conversation exists."""
    again: str | None = None
    """The command that continues, if it is not ``holdfast run``."""

    runtime: Runtime | None = None
    """The runtime of this command; set when the command begins to stop."""

    def __post_init__(self) -> None:
        self.agent = self.chosen.agent
        self.commands = CommandWriter(self.store)
        if self.store == MEMORY_STORE:
            self.wait = 0.0  # no other process can answer

    def make_screen(self, *, many: bool = False) -> Screen:
        return Screen(make_console(), self.commands, many=many)

    def continue_command(self) -> str:
        if self.again is not None:
            return self.again
        if self.conversation is None:
            return self.commands.format_command("run", *self.chosen.words)
        return self.commands.continue_command(self.chosen.words, self.conversation)

    def print_stopped(self) -> None:
        """Print how to continue, after Ctrl-C."""
        screen = self.make_screen()
        if self.conversation is not None:
            screen.out.print()
            self.print_unfinished(screen)
            screen.print_prose(f"stopped; conversation {self.conversation} is safe. To continue it:", "")
            screen.print_line(f"    {self.continue_command()}")
        else:
            self.print_unfinished(screen)

    def print_unfinished(self, screen: Screen) -> None:
        """Print the calls that were started and not finished: they may have taken effect."""
        states = self.runtime.unfinished_states() if self.runtime is not None else []
        for line in describe_unfinished(states, kept=self.store != MEMORY_STORE):
            screen.print_prose(line, "yellow")


@asynccontextmanager
async def run_agent(job: AgentRun, conversation: str | None) -> AsyncGenerator[Runtime]:
    """Start a runtime for the agent, limited to one conversation; with None, for all of its conversations."""
    slow: asyncio.TimerHandle | None = None
    try:
        async with Runtime(job.agent, store=job.store, only=None if conversation is None else [conversation]) as rt:
            try:
                yield rt
            finally:
                job.runtime = rt
                slow = asyncio.get_running_loop().call_later(EXIT_NOTICE_SECONDS, _print_exit_notice, rt)
    finally:
        if slow is not None:
            slow.cancel()


def _print_exit_notice(rt: Runtime) -> None:
    if rt.count_running_calls():
        click.echo(
            "a tool is still running: exiting when it is done, in 10 s at the latest; Ctrl-C exits at once",
            err=True,
        )


def run_job(job: AgentRun, work: Coroutine[Any, Any, int]) -> int:
    """Run the command and return its exit code; after Ctrl-C, print how to continue."""
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        job.print_stopped()
        raise


def has_open_turn(job: AgentRun, state: State) -> bool:
    """Return whether a turn is open or queued; refuse a read-only conversation and one of another agent."""
    if state.closed:
        raise read_only_error(state.conversation)
    agent = state.turn.agent if state.turn else state.queue[0].agent if state.queue else None
    if agent is None:
        return False
    if agent != job.agent.name:
        raise wrong_agent_error(job, state.conversation, agent)
    return True


def wrong_agent_error(job: AgentRun, conversation: str, agent: str) -> Invalid:
    return Invalid(f"conversation {conversation!r} is with agent {agent!r}, not {job.agent.name!r}")


async def follow_open_turn(job: AgentRun, rt: Runtime, screen: Screen, state: State) -> int:
    """Follow the open turn, shown from the message that it answers."""
    message = state.turn.message if state.turn else state.queue[0].message
    screen.print_line((f"conversation {state.conversation}, continued", "dim"))
    return await TurnView(rt, screen, state, wait=job.wait, since=message).wait_for_turn(message)


def print_ending(job: AgentRun, screen: Screen, code: int) -> int:
    """Print how to continue, or how to read the log; return the exit code."""
    if code == EXIT_WAITING and job.store == MEMORY_STORE:
        screen.print_prose("waiting for an answer that cannot come: this store ends with this process", "yellow")
    elif code == EXIT_WAITING:
        screen.print_prose("waiting for an answer; to continue when it is given:")
        screen.print_line(f"    {job.continue_command()}")
    elif job.conversation is not None and job.store != MEMORY_STORE:
        screen.print_line(("the whole log: ", "dim"), job.commands.format_command("log", job.conversation))
    return code


def describe_unfinished(states: Iterable[State], *, kept: bool = True) -> list[str]:
    """Return one line for each call that was started and has no result; ``kept=False``: the store ends here."""
    return [
        _line(state, call, kept)
        for state in states
        if state.turn is not None
        for call in state.turn.calls.values()
        if call.phase == "running"
    ]


def _line(state: State, call: CallState, kept: bool) -> str:
    text = f"{call.made.tool} ({state.conversation}/{call.made.id}) was running and may have taken effect"
    return f"{text}; {_describe_next_run(state, call)}" if kept else text


def _describe_next_run(state: State, call: CallState) -> str:
    turn = state.turn
    if turn is not None and turn.cancelling:
        return "the next run reports it as cancelled"
    if turn is not None and turn.halt is not None:
        return NEXT["fail"]
    approved = call.made.ask_if_approved and call.approver is not None
    return NEXT["ask" if approved else call.made.recovery]
