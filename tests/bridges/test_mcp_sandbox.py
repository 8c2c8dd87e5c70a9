"""Servers that are programs, in the sandbox of a workspace."""

import asyncio
import signal
import socket
import sys

import psutil
import pytest
from mcp_support import HERE
from support.async_tests import until
from support.runtimes import of

from holdfast import Agent, Runtime, ScriptedModel, ToolCall
from holdfast.bridges.mcp import MCP
from holdfast.core.events import AssistantSaid, CallReturned
from holdfast.errors import DeclarationError
from holdfast.workspace import Confinement, Workspace

PROBER = HERE / "mcp_prober.py"
PATIENCE = 120
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="bubblewrap needs Linux")


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "workspace"
    made.mkdir()
    (made / "note.txt").write_text("inside")
    (made / ".env").write_text("KEY=1")
    (tmp_path / "outside.txt").write_text("outside")
    return made


def make_workspace(folder, **options) -> Workspace:
    """Return a workspace whose sandbox shows the Python that runs the server."""
    readable = (sys.prefix, sys.base_prefix, str(HERE))
    return Workspace(folder, sandbox="required", confinement=Confinement(readable=readable), **options)


def find_servers(mark: str) -> list[int]:
    """Return the processes whose command line has the mark."""
    return [each.pid for each in psutil.process_iter(["cmdline"]) if mark in " ".join(each.info["cmdline"] or [])]


@LINUX
async def test_a_server_in_a_sandbox_works_and_reaches_nothing_outside(folder) -> None:
    """It reads the workspace; secrets, files outside, writing and the network are out of reach [B102]."""
    outside, escaped = folder.parent / "outside.txt", HERE / "escaped.txt"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        calls = [
            ToolCall("prober_read", {"path": "note.txt"}),
            ToolCall("prober_write", {"path": "/tmp/own.txt"}),
            ToolCall("prober_read", {"path": str(folder / ".env")}),
            ToolCall("prober_read", {"path": str(outside)}),
            ToolCall("prober_write", {"path": str(escaped)}),
            ToolCall("prober_write", {"path": "new.txt"}),
            ToolCall("prober_connect", {"port": listening.getsockname()[1]}),
        ]
        source = MCP(
            [sys.executable, str(PROBER), str(folder)],
            name="prober",
            approval="auto",
            sandbox=make_workspace(folder, network=True),
            connect_timeout=PATIENCE,
        )
        agent = Agent("desk", model=ScriptedModel([calls, "Done."]), tools=[source])
        async with Runtime(agent) as rt:
            result = await rt.run("go", conversation="c")
            history = await rt.history("c")
            assert find_servers(str(folder))
        await until(lambda: not find_servers(str(folder)))
    assert result.text == "Done."
    order = [call.id for call in of(history, AssistantSaid)[0].calls]
    found = sorted(of(history, CallReturned), key=lambda event: order.index(event.call_id))
    refusals = ["EACCES", "ENOENT", "EROFS", "EROFS", "ECONNREFUSED"]
    assert [event.value["result"] for event in found] == ["inside", "written", *refusals]
    assert not escaped.exists()
    assert sorted(path.name for path in folder.iterdir()) == [".env", "note.txt"]


@LINUX
async def test_a_server_in_a_sandbox_does_not_outlive_a_killed_process(folder) -> None:
    program = f"""
import asyncio, sys
from holdfast.bridges.mcp import MCP
from holdfast.workspace import Confinement, Workspace

async def main():
    ws = Workspace({str(folder)!r}, sandbox="required", confinement=Confinement(readable=tuple(sys.argv[1:])))
    source = MCP([sys.executable, {str(PROBER)!r}, {str(folder)!r}], name="prober", sandbox=ws, connect_timeout=120)
    await source.open()
    print(source.problem, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
    arguments = [program, sys.prefix, sys.base_prefix, str(HERE)]
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", *arguments, stdout=asyncio.subprocess.PIPE)
    assert (await process.stdout.readline()) == b"None\n"
    assert find_servers(str(folder))
    process.send_signal(signal.SIGKILL)
    await process.wait()
    await until(lambda: not find_servers(str(folder)))


async def test_a_sandbox_that_is_not_of_level_a_is_refused_before_anything_runs(folder) -> None:
    """The error says what to install [B103]."""
    with pytest.raises(DeclarationError, match="install a bubblewrap") as refused:
        MCP([sys.executable, str(PROBER)], name="prober", sandbox=Workspace(folder, sandbox="none"))
    assert refused.value.kind == "resource_missing"


@LINUX
async def test_a_program_that_the_sandbox_does_not_show_is_named(folder) -> None:
    hidden = folder.parent / "server"
    hidden.write_text("#!/bin/sh\n")
    hidden.chmod(0o755)
    source = MCP([str(hidden)], name="prober", sandbox=make_workspace(folder))
    await source.open()
    await source.close()
    assert "Confinement(readable=" in str(source.problem)


def test_a_server_with_a_url_has_no_sandbox(folder) -> None:
    with pytest.raises(DeclarationError, match="started by a command"):
        MCP("https://x.example", sandbox=Workspace(folder, sandbox="none"))
