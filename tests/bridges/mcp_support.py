"""Helpers for the tests of the MCP client: the shop server and workers as processes."""

import asyncio
import json
import sys
from contextlib import asynccontextmanager
from pathlib import Path

from support.async_tests import until

from holdfast import Agent, ScriptedModel, ToolCall

HERE = Path(__file__).parent
SHOP = HERE / "mcp_shop.py"
WORKER = HERE / "mcp_worker.py"


class Ledger:
    """The file to which the shop writes what it was asked to do."""

    def __init__(self, path: Path):
        self.path = path

    def lines(self, *starts: str) -> list[str]:
        """Return the lines, or those that start with one of these words."""
        found = self.path.read_text().splitlines() if self.path.exists() else []
        return [line for line in found if not starts or line.split()[0] in starts]

    async def has(self, word: str, count: int = 1) -> None:
        """Wait until the file has this many lines that start with a word."""
        await until(lambda: len(self.lines(word)) >= count)

    def finish_tasks(self) -> None:
        self.path.with_suffix(".finish").touch()


@asynccontextmanager
async def shop_server(ledger: Ledger):
    """Run the shop as a process with HTTP; give its URL."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(SHOP), str(ledger.path), "http", stdout=asyncio.subprocess.PIPE
    )
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def shop_command(ledger: Ledger) -> list[str]:
    """Return the command that runs the shop on its standard input and output."""
    return [sys.executable, str(SHOP), str(ledger.path), "stdio"]


@asynccontextmanager
async def worker(store: str, url: str, tool: str, args: dict, *texts: str):
    """Run a process with the agent; give it once it is open. It is killed at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(WORKER),
        store,
        url,
        tool,
        json.dumps(args),
        *texts,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert (await process.stdout.readline()) == b"open\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def desk(source, *calls: ToolCall, **options) -> Agent:
    """Return an agent with the tools of a source, whose model makes these calls and then says "Done."."""
    return Agent("desk", model=ScriptedModel([list(calls), "Done."], follow=True), tools=[source], **options)
