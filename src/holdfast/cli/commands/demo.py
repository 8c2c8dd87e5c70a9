"""``holdfast demo``: scripted scenes, on the terminal or on the page."""

from __future__ import annotations

import functools
import os
from itertools import count
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.agent_run import AgentRun, follow_open_turn, print_ending, run_agent, run_job
from holdfast.cli.agents import ChosenAgent
from holdfast.cli.command_lines import DEMO_CONVERSATION, DEMO_STORE, MEMORY_STORE, CommandWriter
from holdfast.cli.commands.serve import PORT, check_installed, start_server
from holdfast.cli.options import Whole, example, store_url
from holdfast.cli.render.console import Screen
from holdfast.cli.render.turn import TurnView
from holdfast.core.state import State
from holdfast.errors import NotFound, install_command
from holdfast.runtime.runtime import Runtime

if TYPE_CHECKING:  # its import creates the files of the demo
    from holdfast.cli.demo import Scene


@click.command(
    epilog=example(
        "holdfast demo",
        f"holdfast pending --store {DEMO_STORE}          # in a second terminal",
        "holdfast demo --page                                      # the same in the browser",
        "holdfast demo --page --scene file                         # a change of a file, as a diff",
    )
)
@click.option(
    "--scene",
    type=click.Choice(("refund", "file", "form")),
    help="What a new conversation is about [default: the next one after each finished conversation].",
)
@click.option("--conversation", metavar="ID", help=f"The conversation [default: {DEMO_CONVERSATION}].")
@click.option("--page", is_flag=True, help=f"Show it on a web page; needs {install_command('server')}.")
@click.option(
    "--port",
    type=Whole(0, 65535),
    metavar="N",
    help=f"The port of the page [default: {PORT}, or any free one if that is in use].",
)
@click.option("--no-wait", is_flag=True, help="Exit with 75 instead of waiting for answers.")
@click.option("--store", metavar="URL", help=f"The store [default: $HOLDFAST_STORE or {DEMO_STORE}].")
def demo(
    scene: str | None, conversation: str | None, page: bool, port: int | None, no_wait: bool, store: str | None
) -> int:
    """Play a scene on a scripted model: no key needed.

    Three scenes: a refund that needs an approval, a change of a file that is shown as a diff, and a question with a
    form, followed by a tool in the browser. Answer on the page or from a second terminal. Kill it at any moment and
    start it again: it continues. Started again after the end, it plays the next scene.
    """
    from holdfast.cli.demo import AGENT_SPEC, CUSTOMER, agent  # creates its files

    url = store_url(store, DEMO_STORE)
    base = conversation or (DEMO_CONVERSATION if scene is None else f"{DEMO_CONVERSATION}-{scene}")
    if page:
        check_installed()
        begin = functools.partial(begin_demo, base, scene, CUSTOMER)
        return start_server(agent, url, CUSTOMER, port=port, begin=begin)
    again = CommandWriter(url).demo_command(base)
    chosen = ChosenAgent(agent, (AGENT_SPEC,), {"module": AGENT_SPEC})
    job = AgentRun(chosen, url, CUSTOMER, 0.0 if no_wait else None, base, again)
    return run_job(job, run_demo(job, base, scene, CUSTOMER))


async def run_demo(job: AgentRun, base: str, scene: str | None, by: str) -> int:
    """Continue the demo's conversation, or begin a new one if there is none or it has ended."""
    job.conversation = None
    async with Runtime(store=job.store) as rt:
        name, played = await _find_next(rt, base, scene)
    async with run_agent(job, name) as rt:
        state = await _open_demo(rt, name, played, by, metadata=job.chosen.metadata)
        job.conversation = name
        screen = job.make_screen()
        _print_intro(job, screen, played.hint)
        if state.turn is not None or state.queue:
            return print_ending(job, screen, await follow_open_turn(job, rt, screen, state))
        view = TurnView(rt, screen, state, wait=job.wait)
        try:
            await view.wait_until_ready()
            turn = await rt.send(name, played.message, by=by)
        except BaseException:
            await view.close()
            raise
        return print_ending(job, screen, await view.wait_for_turn(turn.seq))


async def begin_demo(base: str, scene: str | None, by: str, rt: Runtime) -> str:
    """Return the name of the demo's conversation for the page; start it if needed."""
    name, played = await _find_next(rt, base, scene)
    state = await _open_demo(rt, name, played, by)
    if state.turn is None and not state.queue and not (await rt.snapshot(name)).messages:
        await rt.send(name, played.message, by=by)
    return name


async def _open_demo(rt: Runtime, name: str, scene: Scene, by: str, **options: Any) -> State:
    """Return the state of the demo's conversation; open it, with the hint as its title, if it does not exist."""
    try:
        state = await rt.load_state(name)
    except NotFound:
        await rt.open(name, by=by, **options)
        state = await rt.load_state(name)
    if not state.title:
        await rt.rename(name, scene.hint, by=by)
        state = await rt.load_state(name)
    return state


async def _find_next(rt: Runtime, base: str, scene: str | None) -> tuple[str, Scene]:
    """Return the first of demo, demo-2, ... that has not ended, and its scene.

    Each of them plays the next one, unless one is given.
    """
    from holdfast.cli.demo import SCENES

    for number in count(1):
        name = base if number == 1 else f"{base}-{number}"
        played = SCENES[scene or list(SCENES)[(number - 1) % len(SCENES)]]
        try:
            snapshot = await rt.snapshot(name)
        except NotFound:
            return name, played
        if snapshot.state != "idle" or snapshot.queued or not snapshot.messages:
            return name, played
    raise AssertionError


def _print_intro(job: AgentRun, screen: Screen, hint: str) -> None:
    if job.store == MEMORY_STORE:
        screen.print_prose("A scripted model plays a scene, kept in memory: it ends with this process.")
    else:
        screen.print_prose(f"A scripted model plays a scene, kept in {job.store}.")
        screen.print_prose(
            "Answers are given from a second terminal in this directory, with the commands below each card."
        )
        screen.print_prose(f"{hint}:")
        screen.print_line(f"    kill -9 {os.getpid()}")
    screen.print_line()
