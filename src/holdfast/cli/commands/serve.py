"""``holdfast serve``: serve an agent over the HTTP API and the page, for one user with one token."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.util import find_spec
from ipaddress import ip_address
from typing import TYPE_CHECKING

import click

from holdfast.bridges.direct_agent import with_direct_agents
from holdfast.cli.agents import choose_agent
from holdfast.cli.command_lines import MEMORY_STORE
from holdfast.cli.commands.ui import OWN_DIRECTORY
from holdfast.cli.options import (
    Whole,
    by_option,
    by_or_login,
    example,
    instructions_option,
    model_option,
    optional_spec_argument,
    store_option,
    store_url,
)
from holdfast.cli.server_token import TOKEN_VARIABLE, derive_key, find_metrics_token, token_for
from holdfast.cli.store import retry_until_reachable, watch_store
from holdfast.core.notice import Channel
from holdfast.errors import Invalid, install_command
from holdfast.runtime.agent import Agent
from holdfast.runtime.runtime import Runtime
from holdfast.tools.protected import protect
from holdfast.urls import display_url

if TYPE_CHECKING:  # the server's packages are an extra
    from holdfast.channels.links import Links
    from holdfast.server.app import Mounted

HOST = "127.0.0.1"
WILDCARD_HOSTS = ("0.0.0.0", "::")
PORT = 8642
BROWSER_SECONDS = 3.0
"""An opener that finds no browser fails within this time; others stay as long as the browser."""
NEEDED = ("starlette", "uvicorn", "httptools")
HOST_PATTERN = re.compile(r"[\w-]+(\.[\w-]+)*|\*|[0-9a-f:]*:[0-9a-f:.]*", re.ASCII | re.IGNORECASE)


def check_host_names(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse names with a scheme, port or path: no Host header would ever match them."""
    for name in given:
        if not HOST_PATTERN.fullmatch(name):
            meant = re.sub(r"^\w+://|[:/].*", "", name)
            such = f", here {meant}" if HOST_PATTERN.fullmatch(meant) else ", such as desk.example"
            raise click.BadParameter(
                f"{name!r} is no host name: give it without scheme, port and path{such}", ctx=ctx, param=param
            )
    return given


@click.command(
    epilog=example(
        "holdfast serve hello:agent --open",
        "holdfast serve hello:agent --port 0                   # any free port",
        "holdfast serve --model openai:gpt-5 --store sqlite:///desk.db",
        "holdfast serve hello:agent --no-run --store postgresql://desk@db/desk",
    )
)
@optional_spec_argument
@model_option
@instructions_option
@click.option("--host", metavar="ADDRESS", default=HOST, show_default=True, help="The address to listen on.")
@click.option(
    "--port", type=Whole(0, 65535), metavar="N", default=PORT, show_default=True, help="The port; 0 for any free one."
)
@click.option(
    "--allow-host",
    "names",
    multiple=True,
    callback=check_host_names,
    metavar="NAME",
    help="Another host name of this server, such as desk.example.",
)
@click.option(
    "--allow-origin", "origins", multiple=True, metavar="URL", help="Another origin with pages that may use it."
)
@click.option("--open", "open_page", is_flag=True, help="Open the page in the browser.")
@click.option(
    "--no-run", is_flag=True, help="Only serve: `holdfast worker` elsewhere on the same store runs the agent."
)
@by_option
@store_option
def serve(
    spec: str | None,
    model: str | None,
    instructions: str | None,
    host: str,
    port: int,
    names: tuple[str, ...],
    origins: tuple[str, ...],
    open_page: bool,
    no_run: bool,
    by: str | None,
    store: str | None,
) -> int:
    """Serve an agent: the page and the HTTP API.

    Prints an address with a token: anyone with this address can act as you. For a SQLite store, the token is kept in
    your state directory (~/.local/state/holdfast), so that open pages reconnect after a restart; $HOLDFAST_TOKEN sets
    another. With --no-run, workers run the agent. The server then needs MODULE:AGENT only to open new conversations,
    and not the key of its model. Leave it out to only show existing conversations and decide their calls.

    Prometheus reads /metrics with the token in $HOLDFAST_METRICS_TOKEN, which is good for nothing else.

    A list `channels` in the agent's module (webhooks, mail, Slack) is used, too: see "Reach people".
    """
    check_installed()
    alone = no_run and spec is None and model is None
    chosen = None if alone else choose_agent(spec, model, instructions, runs=not no_run)
    return start_server(
        chosen.agent if chosen else None,
        store_url(store),
        by_or_login(by),
        host=host,
        port=port,
        names=names,
        origins=origins,
        open_page=open_page,
        runs=not no_run,
        channels=chosen.channels if chosen else (),
    )


def check_installed() -> None:
    """Raise Invalid, with the command to run, if the server extra is not installed."""

    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise Invalid(f"the server needs {', '.join(missing)}: {install_command('server')}", kind="resource_missing")


def start_server(
    agent: Agent | None,
    store: str,
    by: str,
    *,
    host: str = HOST,
    port: int | None = PORT,
    names: tuple[str, ...] = (),
    origins: tuple[str, ...] = (),
    open_page: bool = False,
    runs: bool = True,
    channels: Sequence[Channel] = (),
    begin: Callable[[Runtime], Awaitable[str]] | None = None,
    mount: Callable[[Runtime, Links, str], Mapping[str, Mounted]] | None = None,
    base_url: str | None = None,
) -> int:
    """Serve this agent until a signal stops it.

    port:      None means the default port, or a free one if that is in use
    begin:     called first; returns the conversation at which the page opens
    mount:     returns applications to serve beside the page, from the runtime, the signed links and the token
    base_url:  the address of this server for its users, if a proxy gives it another one
    """
    from holdfast.channels.links import Links
    from holdfast.server import process
    from holdfast.server.app import LOOPBACK, App, app
    from holdfast.server.auth import TokenAuth

    if store == MEMORY_STORE and not runs:
        raise Invalid("workers elsewhere do not see a store in memory: give --store, or leave --no-run out")
    token = token_for(store)
    metrics_token = find_metrics_token(token)
    auth = TokenAuth(token.value, by)

    def make_app(address: str) -> App:
        links = Links(derive_key(auth.token, "links"), base_url or address.partition("/?")[0])
        agents = with_direct_agents([] if agent is None else [agent])
        runtime = Runtime(*agents, store=store, only=None if runs else (), channels=channels)
        return app(
            runtime,
            auth,
            hosts=(*LOOPBACK, host, *names),
            origins=origins,
            ui=OWN_DIRECTORY,
            links=links,
            mounts=mount(runtime, links, auth.token) if mount else None,
            metrics_token=metrics_token,
        )

    make_app(page_address(host, PORT, ""))  # an invalid configuration is refused before the port is taken
    listening = _listen_default(host) if port is None else process.open_socket(host, port)
    address = page_address(host, listening.getsockname()[1], auth.token)

    tasks: list[asyncio.Task[None]] = []

    async def start_app() -> App:
        desk = make_app(address)
        await desk.runtime.start()
        return desk

    async def show(runtime: Runtime) -> None:
        shown = f"{address}#/c/{await begin(runtime)}" if begin is not None else address
        click.echo(f"{agent.name if agent else display_url(store)} is served at {shown}")
        if mount is not None:
            where = address.partition("/?")[0]
            click.echo(f"MCP clients connect to {where}/mcp with the header: Authorization: Bearer {auth.token}")
        for line in network_notes(host, listening.getsockname()[1], names):
            click.echo(line)
        if store != MEMORY_STORE and not token.lasting:
            click.echo(f"Its token changes at each start: ${TOKEN_VARIABLE} sets a permanent one.")
        click.echo(
            "Ctrl-C stops it; pending calls are kept." if runs else "It runs nothing: workers on the same store do."
        )
        if open_page:
            await open_browser(shown)

    async def run() -> None:
        desk = await retry_until_reachable(start_app)

        def ready(stop: process.Stop) -> None:
            loop = asyncio.get_running_loop()
            watching = loop.create_task(watch_store(desk.runtime.store, store))
            tasks.extend((loop.create_task(show(desk.runtime)), watching))

            def end() -> None:
                watching.cancel()  # a closed store is expected now
                stop()

            process.stop_on_signals(end)

        await process.serve(desk, listening, ready)

    end_protection = protect(token.file) if token.file is not None else None
    try:
        asyncio.run(run())
    finally:
        if end_protection is not None:
            end_protection()
    return 0


def _listen_default(host: str) -> socket.socket:
    from holdfast.server import process

    try:
        return process.open_socket(host, PORT)
    except Invalid:
        found = process.open_socket(host, 0)
        click.echo(f"port {PORT} is in use; using another")
        return found


def page_address(host: str, port: int, token: str) -> str:
    """Return the address of the page; a wildcard address becomes the loopback address."""
    shown = {WILDCARD_HOSTS[0]: HOST, WILDCARD_HOSTS[1]: "[::1]", "": HOST}.get(
        host, f"[{host}]" if ":" in host else host
    )
    return f"http://{shown}:{port}/?token={token}"


def network_notes(host: str, port: int, names: tuple[str, ...]) -> list[str]:
    """Return notes on access from other machines; none for a loopback address."""
    try:
        here = ip_address(host or WILDCARD_HOSTS[0])
    except ValueError:
        here = None  # a host name
    if host == "localhost" or (here is not None and here.is_loopback):
        return []
    own = socket.gethostname()
    lines: list[str] = []
    if here is not None and here.is_unspecified:
        lines.append(f"From other machines: http://ADDRESS:{port}/ with any address of this one, and the same token.")
    if here is not None and not {own, "*"} & set(names):
        lines.append(f"Requests by host name are answered only for allowed names, such as: --allow-host {own}")
    lines.append("There is no TLS: the token can be read on the network. Put a proxy with TLS in front.")
    return lines


async def open_browser(address: str) -> None:
    """Open the address in the user's browser, if there is one. The browser's output is discarded."""

    program = "open" if sys.platform == "darwin" else "xdg-open"
    nothing = subprocess.DEVNULL
    try:
        opening = subprocess.Popen(  # noqa: ASYNC220  (asyncio would end it with us)
            [program, address], stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True
        )
        ends = time.monotonic() + BROWSER_SECONDS
        while (failed := opening.poll()) is None and time.monotonic() < ends:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    except OSError:
        failed = True
    if failed:
        click.echo("no browser could be opened: open the address yourself")
