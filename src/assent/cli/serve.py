"""``assent serve``: an agent behind the HTTP API and the page, for one person with one token."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from ipaddress import ip_address
from typing import TYPE_CHECKING

import click

from assent.cli import server_token
from assent.cli.commands import MEMORY
from assent.cli.group import (
    Whole,
    by_option,
    cli,
    example,
    instructions_option,
    login_or,
    model_option,
    store_option,
    store_url,
)
from assent.cli.workbench import maybe_spec
from assent.errors import Invalid, install
from assent.urls import place

if TYPE_CHECKING:
    import socket

    from assent.runtime.agent import Agent
    from assent.runtime.runtime import Runtime

HOST = "127.0.0.1"
ANYWHERE = ("0.0.0.0", "::")
PORT = 8642
BROWSER_SECONDS = 3.0
"""So soon whoever opens it has found none; some stay as long as the browser."""
NEEDED = ("starlette", "uvicorn", "httptools")
NAME = re.compile(r"[\w-]+(\.[\w-]+)*|\*|[0-9a-f:]*:[0-9a-f:.]*", re.ASCII | re.IGNORECASE)


def host_names(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    """As the Host header has them, without the port; another would never be met, and nobody would know why."""
    for each in given:
        if not NAME.fullmatch(each):
            meant = re.sub(r"^\w+://|[:/].*", "", each)
            such = f", here {meant}" if NAME.fullmatch(meant) else ", such as desk.example"
            raise click.BadParameter(
                f"{each!r} is no host name: give it without scheme, port and path{such}", ctx=ctx, param=param
            )
    return given


@cli.command(
    epilog=example(
        "assent serve hello:agent --open",
        "assent serve hello:agent --port 0                   # any free port",
        "assent serve --model openai:gpt-5 --store sqlite:///desk.db",
        "assent serve hello:agent --no-run --store postgresql://desk@db/desk",
    )
)
@maybe_spec
@model_option
@instructions_option
@click.option("--host", metavar="ADDRESS", default=HOST, show_default=True, help="Where to listen.")
@click.option("--port", type=Whole(0, 65535), metavar="N", default=PORT, show_default=True, help="0: any free one.")
@click.option(
    "--allow-host",
    "names",
    multiple=True,
    callback=host_names,
    metavar="NAME",
    help="A name that it is reached under, too, such as desk.example.",
)
@click.option("--allow-origin", "origins", multiple=True, metavar="URL", help="Another origin whose pages may use it.")
@click.option("--open", "open_page", is_flag=True, help="Open the page in the browser.")
@click.option("--no-run", is_flag=True, help="Only serve: `assent worker` elsewhere on the same store runs the agent.")
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

    Prints an address with a token: whoever has it is you. The token of a store on SQLite is kept in your state
    directory (~/.local/state/assent), so that open pages find their way back after a restart; $ASSENT_TOKEN gives
    another. With --no-run the agent is needed only to open
    new conversations, and its model's key not at all; without it, the page shows and decides what others run.
    """
    from assent.cli.loading import choose

    check_installed()
    alone = no_run and spec is None and model is None
    return start(
        None if alone else choose(spec, model, instructions, runs=not no_run).agent,
        store_url(store),
        login_or(by),
        host=host,
        port=port,
        names=names,
        origins=origins,
        open_page=open_page,
        runs=not no_run,
    )


def check_installed() -> None:
    """The extra is there; else the command that gets it."""
    from importlib.util import find_spec

    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise Invalid(f"the server needs {', '.join(missing)}: {install('server')}", kind="resource_missing")


def start(
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
    begin: Callable[[Runtime], Awaitable[str]] | None = None,
) -> int:
    """Serve this agent until it is stopped. ``port=None``: the usual one, or another that is free. ``begin``: what is
    done first; the page opens at the conversation."""
    from assent.cli.ui import OWN
    from assent.cli.vigil import retry_while_away, watch
    from assent.runtime.runtime import Runtime
    from assent.server import serving
    from assent.server.app import LOOPBACK, App, app
    from assent.server.auth import TokenAuth

    if store == MEMORY and not runs:
        raise Invalid("workers elsewhere do not see a store in memory: give --store, or leave --no-run out")
    token = server_token.token_for(store)
    auth = TokenAuth(token.value, by)

    def served() -> App:
        runtime = Runtime(*([] if agent is None else [agent]), store=store, only=None if runs else ())
        return app(runtime, auth, hosts=(*LOOPBACK, host, *names), origins=origins, ui=OWN)

    served()  # what cannot be served is refused before the port is taken
    listening = _usual(host) if port is None else serving.listen(host, port)
    address = page_address(host, listening.getsockname()[1], auth.token)

    tasks: list[asyncio.Task[None]] = []

    async def started() -> App:
        desk = served()
        await desk.runtime.start()
        return desk

    async def show(runtime: Runtime) -> None:
        shown = f"{address}#/c/{await begin(runtime)}" if begin is not None else address
        click.echo(f"{agent.name if agent else place(store)} is served at {shown}")
        for line in abroad(host, listening.getsockname()[1], names):
            click.echo(line)
        if store != MEMORY and not token.lasting:
            click.echo(f"Its token is another at each start: ${server_token.VARIABLE} gives one that stays.")
        click.echo("Ctrl-C stops it; what waits is kept." if runs else "It runs nothing: workers on the same store do.")
        if open_page:
            await open_browser(shown)

    async def run() -> None:
        desk = await retry_while_away(started)

        def ready(stop: serving.Stop) -> None:
            loop = asyncio.get_running_loop()
            watching = loop.create_task(watch(desk.runtime.store, store))
            tasks.extend((loop.create_task(show(desk.runtime)), watching))

            def end() -> None:
                watching.cancel()  # that it is closed is no news
                stop()

            serving.until_signalled(end)

        await serving.serve(desk, listening, ready)

    asyncio.run(run())
    return 0


def _usual(host: str) -> socket.socket:
    from assent.server import serving

    try:
        return serving.listen(host, PORT)
    except Invalid:
        found = serving.listen(host, 0)
        click.echo(f"port {PORT} is in use; this is another")
        return found


def page_address(host: str, port: int, token: str) -> str:
    """The address to open; one that stands for all addresses is reached on this machine."""
    shown = {ANYWHERE[0]: HOST, ANYWHERE[1]: "[::1]", "": HOST}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}/?token={token}"


def abroad(host: str, port: int, names: tuple[str, ...]) -> list[str]:
    """What to know where others than this machine can reach it."""
    import socket

    try:
        here = ip_address(host or ANYWHERE[0])
    except ValueError:
        here = None  # a name: of whatever address it is
    if host == "localhost" or (here is not None and here.is_loopback):
        return []
    own = socket.gethostname()
    lines: list[str] = []
    if here is not None and here.is_unspecified:
        lines.append(f"From other machines: http://ADDRESS:{port}/ with any address of this one, and the same token.")
    if here is not None and not {own, "*"} & set(names):
        lines.append(f"A name is answered only where it was given, such as: --allow-host {own}")
    lines.append("There is no TLS: whoever listens on the way reads the token. Put a proxy with TLS in front.")
    return lines


async def open_browser(address: str) -> None:
    """In the browser of whoever sits here, if there is one. What it has to say does not belong on our terminal."""
    import subprocess
    import sys

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
