"""An MCP server on the official SDK that samples, as a program: ``python mcp_sampler.py LEDGER http``.

Its tools append a line to the file LEDGER, as those of ``mcp_shop`` do. While the file LEDGER.hold is there, a
continuation does not return.
"""

import asyncio
import base64
import json
import warnings
from typing import Any

import mcp_shop
import mcp_types as types
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.request_state import RequestStateSecurity
from mcp_shop import LEDGER, Tasks, form, write_line

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def sample(text: str, **params: Any) -> types.CreateMessageRequest:
    message = {"role": "user", "content": {"type": "text", "text": text}}
    given = {"messages": [message], "maxTokens": 100, "systemPrompt": "Be brief.", **params}
    return types.CreateMessageRequest.model_validate({"method": "sampling/createMessage", "params": given})


class SamplingTasks(Tasks):
    """``print_book`` is a task that asks for the model instead of a person's answer."""

    async def get(self, ctx: Any, params: Any) -> dict[str, Any]:
        found = await super().get(ctx, params)
        if "inputRequests" in found:
            found["inputRequests"] = {"title": sample("Find a title.").model_dump(by_alias=True, mode="json")}
        return found


server = MCPServer(
    "sampler",
    request_state_security=RequestStateSecurity(keys=[b"k" * 32], ttl=3600),
    extensions=[SamplingTasks()],
)


async def ask(ctx: Context, requests: dict[str, Any]) -> Any:
    """Return a round with these inputs, and after it the texts of the responses."""
    capabilities = (
        ctx.request_context.session.client_params.capabilities if ctx.request_context.session.client_params else None
    )
    if ctx.request_state is None:
        write_line("asked", "sampling" if capabilities is not None and capabilities.sampling is not None else "-")
        return types.InputRequiredResult(input_requests=requests, request_state="s1")
    found = {
        key: each.model_dump(by_alias=True, mode="json", exclude_none=True)
        for key, each in (ctx.input_responses or {}).items()
    }
    write_line("continued", json.dumps(found, sort_keys=True))
    while LEDGER.with_suffix(".hold").exists():
        await asyncio.sleep(0.05)
    return found


@server.tool()
async def summarise(ctx: Context, text: str = "A long text.") -> Any:
    """Sample in an input round."""
    preferences = {"hints": [{"name": "big-model"}], "costPriority": 0.25}
    extras = {"temperature": 0.5, "stopSequences": ["END"], "modelPreferences": preferences}
    return await ask(ctx, {"summary": sample(f"Summarise: {text}", **extras)})


@server.tool()
async def describe(ctx: Context) -> Any:
    """Sample with an image."""
    image = {"type": "image", "mimeType": "image/png", "data": base64.b64encode(PIXEL).decode()}
    message = {"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]}
    return await ask(ctx, {"picture": sample("", messages=[message])})


@server.tool()
async def both(ctx: Context) -> Any:
    """Ask a person and the model at once."""
    return await ask(ctx, {"ok": form("Go on?"), "summary": sample("Summarise.")})


@server.tool()
async def unsupported(ctx: Context, params: dict[str, Any]) -> Any:
    """Sample in a way that this client does not offer."""
    return await ask(ctx, {"summary": sample("Summarise.", **params)})


@server.tool()
async def greedy(ctx: Context) -> Any:
    """Sample for ever."""
    write_line("greedy")
    return types.InputRequiredResult(input_requests={"more": sample("More.")}, request_state="more")


@server.tool()
async def crowd(ctx: Context) -> Any:
    """Sample for ever, sixteen times in each round."""
    requests = {f"n{n}": sample(f"More {n}.") for n in range(16)}
    return types.InputRequiredResult(input_requests=dict(requests), request_state="more")


@server.tool()
async def name_input(ctx: Context, key: str) -> Any:
    """Ask a person and the model; the key of one input is given."""
    return await ask(ctx, {"ok": form("Go on?"), key: sample("Summarise.")})


@server.tool()
def print_book() -> str:
    """A task that samples."""
    raise NotImplementedError


@server.tool()
async def live(ctx: Context) -> str:
    """Sample on the open connection (revisions with a handshake)."""
    write_line("live")
    message = types.SamplingMessage(role="user", content=types.TextContent(text="Summarise now."))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated, for use with older revisions only
            answering = ctx.session.create_message(messages=[message], max_tokens=100)
        answer = await answering
    except Exception as problem:
        write_line("refused", problem)
        return f"without a summary: {problem}"
    text = answer.content.text if isinstance(answer.content, types.TextContent) else "?"
    write_line("answered", text, answer.model)
    return text


@server.tool()
async def impatient(ctx: Context) -> str:
    """Sample on the open connection, and give up when the file LEDGER.late is there."""
    write_line("live")
    message = types.SamplingMessage(role="user", content=types.TextContent(text="Summarise now."))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        asking = asyncio.create_task(ctx.session.create_message(messages=[message], max_tokens=100))
    while not mcp_shop.LEDGER.with_suffix(".late").exists():
        await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    write_line("gave-up")
    return "without a summary"


if __name__ == "__main__":
    mcp_shop.server = server
    mcp_shop.main()
