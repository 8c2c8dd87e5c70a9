"""``holdfast run``: send a message and follow its turn, or continue open turns."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from holdfast.cli.agent_run import (
    AgentRun,
    follow_open_turn,
    has_open_turn,
    print_ending,
    run_agent,
    run_job,
)
from holdfast.cli.agents import SPEC_PATTERN, choose_agent
from holdfast.cli.input.values import read_message
from holdfast.cli.lookup import agent_words, list_conversations, list_unattended
from holdfast.cli.options import (
    by_option,
    by_or_login,
    conversation_option,
    example,
    instructions_option,
    model_option,
    store_option,
    store_url,
    wait_option,
    wait_seconds,
)
from holdfast.cli.output import EXIT_WAITING
from holdfast.cli.render.turn import TurnView
from holdfast.errors import Busy, NotFound
from holdfast.runtime.arguments import new_id
from holdfast.runtime.runtime import Runtime


@click.command(
    epilog=example(
        'holdfast run hello:agent "Tell Ada that the build is green"',
        "holdfast run hello:agent                  # continues open turns",
        'holdfast run --model anthropic:claude-sonnet-4-5 --conversation tea "How long does tea keep?"',
    )
)
@click.argument("spec", metavar="[MODULE:AGENT]", required=False)
@click.argument("message", required=False)
@model_option
@instructions_option
@conversation_option("The conversation [default: a new one; without MESSAGE, all of the agent's].")
@by_option
@wait_option("How long to wait for answers [default: without limit on a terminal, else 0]; then exit 75.")
@click.option("--no-wait", is_flag=True, help="The same as --wait 0.")
@click.option(
    "--when-busy",
    type=click.Choice(["refuse", "queue", "interrupt", "aside"]),
    default="refuse",
    show_default=True,
    help="What to do if a turn is already in progress; aside: ask while it waits for an answer.",
)
@click.option("--mode", type=click.Choice(["auto", "manual"]), help="manual: run no tool, every call waits for you.")
@store_option
def run(
    spec: str | None,
    message: str | None,
    model: str | None,
    instructions: str | None,
    conversation: str | None,
    by: str | None,
    wait: float | None,
    no_wait: bool,
    when_busy: str,
    mode: str | None,
    store: str | None,
) -> int:
    """Send a message to an agent or a model, and run its turn.

    With --model alone no code is needed: the model answers as the agent "assistant", which has no tools. MESSAGE
    may be "-": then it is read from standard input. Without MESSAGE, continue the open turns of one conversation, or
    of all conversations of the agent. If a call needs an answer, the command waits for it on a terminal; otherwise it
    exits with 75.
    """
    if model is not None and message is None and spec is not None and not SPEC_PATTERN.fullmatch(spec):
        spec, message = None, spec
    text = None if message is None else read_message(message)
    chosen = choose_agent(spec, model, instructions)
    job = AgentRun(chosen, store_url(store), by_or_login(by), wait_seconds(wait, no_wait), conversation)
    if text is None:
        return run_job(job, continue_turns(job))
    return run_job(job, send_message(job, text, when_busy=when_busy, mode=mode))


async def send_message(job: AgentRun, text: str, **options: Any) -> int:
    """Send the message and follow its turn to the end."""
    name = job.conversation if job.conversation is not None else new_id()
    job.conversation = None
    async with run_agent(job, name) as rt:
        try:
            state = await rt.load_state(name)
        except NotFound:
            await rt.open(name, agent=job.agent.name, by=job.by, metadata=job.chosen.metadata)
            state = await rt.load_state(name)
        job.conversation = name
        screen = job.make_screen()
        screen.print_line((f"conversation {name}", "dim"))
        view = TurnView(rt, screen, state, wait=job.wait)
        try:
            await view.wait_until_ready()
            turn = await rt.send(name, text, by=job.by, agent=job.agent.name, **options)
        except Busy as refusal:
            await view.close()
            if options["when_busy"] == "aside" and refusal.kind != "busy":
                raise  # it says which limit is reached
            raise await _busy_error(job, rt, name) from None
        except BaseException:
            await view.close()
            raise
        return print_ending(job, screen, await view.wait_for_turn(turn.seq))


async def _busy_error(job: AgentRun, rt: Runtime, name: str) -> Busy:
    """Return the error for a turn in flight, with the command that gets past it."""
    waiting = len(await rt.pending(name))
    if waiting:
        answers = "1 answer is awaited" if waiting == 1 else f"{waiting} answers are awaited"
        first = (
            f"{answers}; give {'it' if waiting == 1 else 'them'} first ({job.commands.pending_command(name)}), "
            "or ask meanwhile with --when-busy aside"
        )
    elif await list_unattended(rt, name):
        command = job.commands.continue_command(await agent_words(rt, name), name)
        first = f"no process runs it: finish it first ({command})"
    else:
        first = "try again when it has ended"
    return Busy(f"a turn is in flight in {name}: {first}, or send it with --when-busy queue or --when-busy interrupt")


async def continue_turns(job: AgentRun) -> int:
    """Follow the open turn of one conversation, or those of all conversations of the agent, to the end."""
    async with run_agent(job, job.conversation) as rt:
        if job.conversation is not None:
            names = [job.conversation]
        else:
            infos = await list_conversations(rt)
            names = [i.conversation for i in infos if i.agent == job.agent.name and i.state != "idle"]
        states = [await rt.load_state(name) for name in names]
        states = [state for state in states if has_open_turn(job, state)]
        screen = job.make_screen(many=len(states) > 1)
        if not states:
            where = f"in {job.conversation}" if job.conversation else f"for agent {job.agent.name}"
            screen.print_line(f"no turn is open {where}; give a MESSAGE to start one")
            return 0
        codes = await asyncio.gather(*(follow_open_turn(job, rt, screen, state) for state in states))
        code = EXIT_WAITING if EXIT_WAITING in codes else max(codes)
        return print_ending(job, screen, code)
