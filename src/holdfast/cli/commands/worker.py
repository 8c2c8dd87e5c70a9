"""``holdfast worker`` and ``holdfast workers``: run agents on a shared store, and list the processes that do."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

import click
import msgspec
from rich.table import Table
from rich.text import Text

from holdfast.bridges.direct_agent import SUFFIX, own_names, with_direct_agents
from holdfast.cli.agent_run import describe_unfinished
from holdfast.cli.agents import choose_agent
from holdfast.cli.command_lines import MEMORY_STORE, CommandWriter
from holdfast.cli.options import Whole, check_seconds, example, json_option, store_option, store_url
from holdfast.cli.output import print_json_lines, print_text, try_print
from holdfast.cli.render.console import make_console
from holdfast.cli.render.text import escape_control_characters, format_duration, pluralize
from holdfast.cli.store import connect_to_store, is_store_missing, no_store_error, retry_until_reachable, watch_store
from holdfast.core.notice import Channel
from holdfast.errors import Invalid
from holdfast.runtime import gc_tuning
from holdfast.runtime.agent import Agent
from holdfast.runtime.runtime import Runtime
from holdfast.stores.base import LogStore, OwnerRow
from holdfast.urls import display_url

MAX_COUNTED = 1000
"""The most unheld conversations that are counted."""


@click.command(
    epilog=example(
        "holdfast worker shop:agent --store postgresql://desk@db/desk",
        "holdfast worker shop:support shop:billing --max-conversations 50 --drain 60",
    )
)
@click.argument("specs", metavar="MODULE:AGENT...", nargs=-1, required=True)
@click.option(
    "--max-conversations", type=Whole(1), metavar="N", help="Run at most N conversations at a time [default: all]."
)
@click.option(
    "--drain",
    type=float,
    callback=check_seconds,
    metavar="SECONDS",
    default=10.0,
    show_default=True,
    help="How long running tools may take to finish at shutdown.",
)
@store_option
def worker(specs: tuple[str, ...], max_conversations: int | None, drain: float, store: str | None) -> int:
    """Run agents on a shared store, without a page.

    Start as many workers as you like: with SQLite on one machine, with PostgreSQL on any number. Each conversation is
    run by one worker, and if it dies, another takes over. SIGTERM (or Ctrl-C) stops a worker gracefully: it starts
    nothing new, running tools have --drain seconds, and the other workers take over at once; a second signal does not
    wait. Notices go to the list `channels` of the agents' modules.
    """
    chosen = [choose_agent(spec) for spec in specs]
    channels = {id(channel): channel for each in chosen for channel in each.channels}
    agents = [each.agent for each in chosen]
    return asyncio.run(run_worker(agents, store_url(store), max_conversations, drain, tuple(channels.values())))


@click.command(epilog=example("holdfast workers", "holdfast workers --json | jq 'select(.alive)'"))
@json_option
@store_option
def workers(as_json: bool, store: str | None) -> int:
    """List the processes on a store, and unattended work.

    A worker without a heartbeat for the length of a lease is dead, and its conversations are taken over.
    """
    return asyncio.run(list_workers(store_url(store), as_json))


async def run_worker(
    agents: Sequence[Agent],
    url: str,
    max_conversations: int | None,
    drain: float,
    channels: Sequence[Channel] = (),
) -> int:
    if url == MEMORY_STORE:
        raise Invalid("a worker shares its store with other processes, which cannot see one in memory: give --store")
    stopped = asyncio.Event()

    async def start_runtime() -> Runtime:
        runs = with_direct_agents(agents)
        runtime = Runtime(*runs, store=url, max_conversations=max_conversations, drain=drain, channels=channels)
        await runtime.start()
        return runtime

    runtime = await retry_until_reachable(start_runtime)
    gc_tuning.tune_process()
    watching = asyncio.create_task(watch_store(runtime.store, url))
    try:
        _on_signals(runtime, stopped, drain)
        most = "" if max_conversations is None else f", {pluralize(max_conversations, 'conversation')} at once"
        names = ", ".join(agent.name for agent in agents)
        try_print(f"worker {runtime.store.owner} runs {names} on {display_url(url)}{most}")
        await stopped.wait()
    finally:
        watching.cancel()
        await runtime.close()
    for line in describe_unfinished(runtime.unfinished_states()):
        try_print(line)
    try_print("stopped; unfinished work is in the store")
    return 0


def _on_signals(runtime: Runtime, stopped: asyncio.Event, drain: float) -> None:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if stopped.is_set():
            runtime.skip_drain()
            return
        calls = runtime.count_running_calls()
        limit = f", at most {drain:g} s; a second signal stops at once" if calls else ""
        try_print(f"finishing {pluralize(calls, 'running call')}{limit}")
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)


class Worker(msgspec.Struct, kw_only=True):
    """One line of ``--json``."""

    owner: str
    host: str
    pid: int
    agents: tuple[str, ...]
    since: float
    alive: bool
    lapses_in: float | None
    """Seconds until its leases end without another heartbeat; null if the store detects death otherwise."""
    holds: int


class Unheld(msgspec.Struct, kw_only=True):
    """The last line of ``--json``: conversations that owe work and that no process holds."""

    unheld: int
    """At most 1000."""
    lag: float
    """Seconds since the last event of the conversation that has waited longest."""
    agents: tuple[str, ...]
    """The agents of these conversations."""


async def list_workers(url: str, as_json: bool) -> int:
    if await is_store_missing(url):
        raise no_store_error(url, ", so no worker runs on it")
    async with connect_to_store(url) as store:
        now = store.now()
        found = [_worker(row, now) for row in await store.owners() if row.owner != store.owner]
        left = await count_unheld(store)
    if as_json:
        print_json_lines([*found, left])
        return 0
    # Dead processes stay in the store for a while; those that hold nothing are only counted.
    listed = [worker for worker in found if worker.alive or worker.holds]
    if listed:
        _print(listed, now)
    else:
        print_text("no process has the store open")
    if gone := len(found) - len(listed):
        print_text(f"{gone} {'is' if gone == 1 else 'are'} dead and held nothing")
    print_text(_describe_unheld(left))
    if left.unheld and not _has_runner(found, left):
        wanted = ", ".join(dict.fromkeys(name.removesuffix(SUFFIX) for name in left.agents))
        print_text(f"no process runs {wanted}: {CommandWriter(url).format_command('worker', 'MODULE:AGENT')}")
    return 0


async def count_unheld(store: LogStore) -> Unheld:
    """Count the conversations that owe work and that no process holds."""
    names = await store.list_owing(limit=MAX_COUNTED)
    rows = [row for row in await asyncio.gather(*(store.row(name) for name in names)) if row is not None]
    lag = max((store.now() - row.updated for row in rows), default=0.0)
    return Unheld(unheld=len(rows), lag=max(0.0, lag), agents=tuple(sorted({row.agent for row in rows})))


def _worker(row: OwnerRow, now: float) -> Worker:
    return Worker(
        owner=row.owner,
        host=row.host,
        pid=row.pid,
        agents=tuple(own_names(row.agents)),
        since=row.since,
        alive=row.alive,
        lapses_in=None if row.until is None else row.until - now,
        holds=row.holds,
    )


def _describe_unheld(left: Unheld) -> str:
    if not left.unheld:
        return "no conversation is unattended"
    waited = format_duration(left.lag)
    if left.unheld == 1:
        return f"1 conversation has work to do and no process holds it; it has waited {waited}"
    count = f"{left.unheld} or more" if left.unheld >= MAX_COUNTED else str(left.unheld)
    return f"{count} conversations have work to do and no process holds them; the oldest has waited {waited}"


def _has_runner(found: list[Worker], left: Unheld) -> bool:
    running = {agent for worker in found if worker.alive for agent in worker.agents}
    return running >= {name.removesuffix(SUFFIX) for name in left.agents}


def _alive(worker: Worker) -> Text:
    left = worker.lapses_in
    if worker.alive:
        return Text("yes" if left is None else f"yes, {max(left, 0):.1f} s left", "green")
    return Text("dead" if left is None else f"dead for {format_duration(-left)}", "bold red")


def _print(found: list[Worker], now: float) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("pid", justify="right", no_wrap=True)
    table.add_column("host", overflow="fold")
    table.add_column("agents", overflow="fold")
    table.add_column("since", no_wrap=True)
    table.add_column("alive", no_wrap=True)
    table.add_column("holds", justify="right", no_wrap=True)
    for worker in found:
        table.add_row(
            str(worker.pid),
            escape_control_characters(worker.host),
            escape_control_characters(", ".join(worker.agents)) or "-",
            format_duration(now - worker.since),
            _alive(worker),
            str(worker.holds),
        )
    make_console().print(table)
