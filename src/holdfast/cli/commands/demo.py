"""``holdfast demo``: the scripted support conversation, on the terminal or on the page."""

from __future__ import annotations

import functools
import os

import click

from holdfast.cli.agent_run import AgentRun, follow_open_turn, print_ending, run_agent, run_job
from holdfast.cli.agents import ChosenAgent
from holdfast.cli.command_lines import DEMO_CONVERSATION, DEMO_STORE, MEMORY_STORE, CommandWriter
from holdfast.cli.commands.serve import PORT, check_installed, start_server
from holdfast.cli.demo import AGENT_SPEC, CUSTOMER, MESSAGE, agent
from holdfast.cli.options import Whole, example, store_url
from holdfast.cli.render.console import Screen
from holdfast.cli.render.turn import TurnView
from holdfast.errors import NotFound, install_command
from holdfast.runtime.runtime import Runtime


@click.command(
    epilog=example(
        "holdfast demo",
        f"holdfast pending --store {DEMO_STORE}          # in a second terminal",
        "holdfast demo --page                                      # the same in the browser",
    )
)
@click.option("--conversation", metavar="ID", default=DEMO_CONVERSATION, show_default=True)
@click.option("--page", is_flag=True, help=f"Show it on a web page; needs {install_command('server')}.")
@click.option(
    "--port",
    type=Whole(0, 65535),
    metavar="N",
    help=f"The port of the page [default: {PORT}, or any free one if that is in use].",
)
@click.option("--no-wait", is_flag=True, help="Exit with 75 instead of waiting for answers.")
@click.option("--store", metavar="URL", help=f"The store [default: $HOLDFAST_STORE or {DEMO_STORE}].")
def demo(conversation: str, page: bool, port: int | None, no_wait: bool, store: str | None) -> int:
    """Run a support conversation on a scripted model: no key needed.

    It looks up an order, asks the customer a question and wants a refund approved; answer from a second
    terminal. Kill it at any moment and start it again: it continues.
    """
    url = store_url(store, DEMO_STORE)
    if page:
        check_installed()
        begin = functools.partial(begin_demo, conversation, MESSAGE, CUSTOMER)
        return start_server(agent, url, CUSTOMER, port=port, begin=begin)
    again = CommandWriter(url).demo_command(conversation)
    chosen = ChosenAgent(agent, (AGENT_SPEC,), {"module": AGENT_SPEC})
    job = AgentRun(chosen, url, CUSTOMER, 0.0 if no_wait else None, conversation, again)
    return run_job(job, run_demo(job, MESSAGE, CUSTOMER))


async def run_demo(job: AgentRun, message: str, by: str) -> int:
    """Continue the demo's conversation, or begin a new one if there is none or it has ended."""
    name = await _next_demo_name(job)
    async with run_agent(job, name) as rt:
        try:
            state = await rt.load_state(name)
        except NotFound:
            await rt.open(name, agent=job.agent.name, by=by, metadata=job.chosen.metadata)
            state = await rt.load_state(name)
        job.conversation = name
        screen = job.make_screen()
        _print_intro(job, screen)
        if state.turn is not None or state.queue:
            return print_ending(job, screen, await follow_open_turn(job, rt, screen, state))
        view = TurnView(rt, screen, state, wait=job.wait)
        try:
            await view.wait_until_ready()
            turn = await rt.send(name, message, by=by, agent=job.agent.name)
        except BaseException:
            await view.close()
            raise
        return print_ending(job, screen, await view.wait_for_turn(turn.seq))


async def begin_demo(base: str, message: str, by: str, rt: Runtime) -> str:
    """Return the name of the demo's conversation for the page; start it if needed."""
    name = await _first_open_name(rt, base)
    try:
        begun = bool((await rt.snapshot(name)).messages)
    except NotFound:
        begun = False
    if not begun:
        await rt.send(name, message, by=by)
    return name


async def _next_demo_name(job: AgentRun) -> str:
    base = job.conversation or DEMO_CONVERSATION
    job.conversation = None
    async with Runtime(store=job.store) as rt:
        return await _first_open_name(rt, base)


async def _first_open_name(rt: Runtime, base: str) -> str:
    """Return the first of demo, demo-2, ... that has not ended."""
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


def _print_intro(job: AgentRun, screen: Screen) -> None:
    if job.store == MEMORY_STORE:
        screen.print_prose("A support conversation on a scripted model, kept in memory: it ends with this process.")
    else:
        screen.print_prose(f"A support conversation on a scripted model, kept in {job.store}.")
        screen.print_prose(
            "Answers are given from a second terminal in this directory, with the commands below each card."
        )
        screen.print_prose("Kill it at any moment and start it again: it continues.")
        screen.print_line(f"    kill -9 {os.getpid()}")
    screen.print_line()
