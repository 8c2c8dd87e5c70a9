"""A process with an agent that uses an MCP server: ``python mcp_worker.py STORE URL TOOL ARGS [TEXT]``.

With a text it sends it first. It prints ``open`` when it is ready, and runs until it is killed or its input ends.
"""

import asyncio
import json
import sys

from holdfast import Agent, Runtime, ScriptedModel, ToolCall
from holdfast.bridges.mcp import MCP


def make_agent(url: str, tool: str, args: dict) -> Agent:
    model = ScriptedModel([[ToolCall(f"shop_{tool}", args)], "Done."], follow=True)
    return Agent("desk", model=model, tools=[MCP(url, name="shop", approval="auto")])


async def main(store: str, url: str, tool: str, args: str, *texts: str) -> None:
    async with Runtime(make_agent(url, tool, json.loads(args)), store=store) as rt:
        for text in texts:
            await rt.send("c", text, by="ada")
        print("open", flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
