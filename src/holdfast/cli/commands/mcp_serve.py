"""``holdfast mcp serve``: serve an agent's tools, the agent and its inbox to MCP clients."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.agents import ChosenAgent, choose_agent
from holdfast.cli.command_lines import CommandWriter
from holdfast.cli.commands.serve import HOST, PORT, check_host_names, check_installed, start_server
from holdfast.cli.options import Whole, by_option, by_or_login, example, spec_argument, store_option, store_url
from holdfast.cli.server_token import derive_key, token_for
from holdfast.errors import Invalid, install_command
from holdfast.runtime.runtime import Runtime
from holdfast.tools.protected import protect

if TYPE_CHECKING:  # both are extras
    from holdfast.channels.links import Links
    from holdfast.server.app import Mounted


@click.command(
    epilog=example(
        "holdfast mcp serve hello:agent                        # for a client that starts it",
        "holdfast mcp serve hello:agent --http --port 8642     # the page, the API, and /mcp",
    )
)
@spec_argument
@click.option("--http", is_flag=True, help="Serve streamable HTTP at /mcp, with the page and the API beside it.")
@click.option("--host", metavar="ADDRESS", default=HOST, show_default=True, help="With --http: the address.")
@click.option(
    "--port", type=Whole(0, 65535), metavar="N", default=PORT, show_default=True, help="With --http: the port."
)
@click.option(
    "--allow-host", "names", multiple=True, callback=check_host_names, metavar="NAME", help="As in holdfast serve."
)
@click.option("--allow-origin", "origins", multiple=True, metavar="URL", help="As in holdfast serve.")
@click.option(
    "--base-url",
    metavar="URL",
    help="Where users reach `holdfast serve` on this store: links for clients that cannot ask their users lead there.",
)
@click.option(
    "--no-links", is_flag=True, help="Give clients no links: their users decide on the page or with a command."
)
@click.option("--no-inbox", is_flag=True, help="Do not offer the tools pending, decide and result.")
@by_option
@store_option
def serve(
    spec: str,
    http: bool,
    host: str,
    port: int,
    names: tuple[str, ...],
    origins: tuple[str, ...],
    base_url: str | None,
    no_links: bool,
    no_inbox: bool,
    by: str | None,
    store: str | None,
) -> int:
    """Serve an agent to MCP clients: its tools, and the agent itself as the tool ask_NAME.

    Without --http it serves the client that started it, over standard input and output, as --by. With --http, clients
    send the token of `holdfast serve` as a bearer token. A call that needs a decision is kept in the store, and the
    client's user is asked; it can also be decided anywhere else.
    """
    check_mcp_installed()
    url, principal = store_url(store), by_or_login(by)
    if not http:
        return serve_stdio(choose_agent(spec), url, principal, base_url, links=not no_links, inbox=not no_inbox)
    check_installed()
    chosen = choose_agent(spec)
    from holdfast.bridges.mcp.server import AgentServer

    def mount(runtime: Runtime[Any], links: Links, token: str) -> Mapping[str, Mounted]:
        server = AgentServer(
            runtime,
            chosen.agent,
            keys=derive_key(token, "mcp state"),
            links=None if no_links else links,
            note="Your user can also decide on the page.",
            inbox=not no_inbox,
        )
        return {"/mcp": server.http()}

    return start_server(
        chosen.agent,
        url,
        principal,
        host=host,
        port=port,
        names=names,
        origins=origins,
        channels=chosen.channels,
        mount=mount,
        base_url=base_url,
    )


def check_mcp_installed() -> None:
    """Raise Invalid, with the command to run, if the extra is not installed."""
    if find_spec("mcp") is None:
        raise Invalid(f"MCP needs a package: {install_command('mcp')}", kind="resource_missing")


def serve_stdio(chosen: ChosenAgent, url: str, by: str, base_url: str | None, *, links: bool, inbox: bool) -> int:
    """Serve the process that started this one, until it closes standard input."""
    from holdfast.bridges.mcp.server import AgentServer, direct_agent
    from holdfast.channels.links import Links

    token = token_for(url)
    signed = Links(derive_key(token.value, "links"), base_url) if base_url is not None and links else None
    listing = CommandWriter(url).format_command("pending")

    async def run() -> None:
        async with Runtime(chosen.agent, direct_agent(chosen.agent), store=url, channels=chosen.channels) as runtime:
            server = AgentServer(
                runtime,
                chosen.agent,
                keys=derive_key(token.value, "mcp state"),
                by=by,
                links=signed,
                note=f"Your user can decide in a terminal: `{listing}` shows how.",
                inbox=inbox,
            )
            _stop_on_signals(runtime)
            await server.run_stdio()

    end_protection = protect(token.file) if token.file is not None else None
    try:
        asyncio.run(run())
    finally:
        if end_protection is not None:
            end_protection()
    return 0


def _stop_on_signals(runtime: Runtime[Any]) -> None:
    """Close the runtime on SIGINT and SIGTERM, and leave.

    A thread reads standard input, and nothing can stop it: a normal exit would wait until the client closes its end.
    """
    loop = asyncio.get_running_loop()
    closing: list[asyncio.Task[None]] = []

    async def close(code: int) -> None:
        await runtime.close()
        os._exit(code)

    def stop(code: int) -> None:
        runtime.skip_drain() if closing else closing.append(loop.create_task(close(code)))

    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 0)):
        loop.add_signal_handler(number, stop, code)
