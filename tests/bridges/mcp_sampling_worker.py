"""A process with an agent whose server samples: ``python mcp_sampling_worker.py STORE URL MODE TOOL LEDGER [TEXT]``.

Its model writes a line to the file LEDGER when a server asks it, and does not answer while LEDGER.hang is there. With a
text it sends it first. It prints ``open`` when it is ready, and runs until it is killed or its input ends.
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

from holdfast import Agent, Limits, Runtime, ScriptedModel, ToolCall
from holdfast.bridges.mcp import MCP
from holdfast.events import Usage
from holdfast.models import Request

TURN_USAGE, SAMPLE_USAGE = Usage(100, 10, cost=0.02), Usage(50, 7, cost=0.01)


def make_agent(
    target: Any, sampling: Any, tool: str, ledger: Path, args: Any = None, limits: Limits | None = None, **options: Any
) -> Agent:
    """Return an agent that calls one tool of the server; its model also answers the server's own requests."""

    async def reply(request: Request) -> Any:
        if not request.call:
            return [ToolCall(f"sampler_{tool}", args or {}), TURN_USAGE]
        with ledger.open("a") as file:
            print(request.messages[-1].text.partition("\n")[0], file=file, flush=True)
        if ledger.with_suffix(".hang").exists():
            await asyncio.Event().wait()
        return ["A summary.", SAMPLE_USAGE]

    model = ScriptedModel([reply, ["Done.", TURN_USAGE]], follow=True)
    source = MCP(target, name="sampler", approval="auto", sampling=sampling, connect_timeout=120, **options)
    return Agent("desk", model=model, tools=[source], limits=limits)


async def main(store: str, url: str, mode: str, tool: str, ledger: str, *texts: str) -> None:
    # What the tools do may be repeated: then an interrupted continuation is sent again.
    overrides = {tool: {"recovery": "redispatch"}} if tool == "summarise" else {}
    async with Runtime(make_agent(url, mode, tool, Path(ledger), overrides=overrides), store=store) as rt:
        for text in texts:
            await rt.send("c", text, by="ada")
        print("open", flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
