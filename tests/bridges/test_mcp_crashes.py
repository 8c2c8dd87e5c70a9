"""Calls of an MCP server's tools, killed before and after each append to the log."""

from collections import Counter

import mcp_types as types
from mcp.server import MCPServer
from mcp.server.mcpserver import Context

from holdfast import Agent, Answer, Approve, ScriptedModel, ToolCall
from holdfast.bridges.mcp import MCP
from holdfast.testing import crash_everywhere

CALL_KEY = "holdfast/callKey"


def make_server(done: Counter[tuple[str, str]]) -> MCPServer:
    """Return a server that asks before it pays; ``done`` counts its rounds by the key of the call."""
    server = MCPServer("shop")

    @server.tool()
    def refund(order: int, ctx: Context) -> types.InputRequiredResult | str:
        """Give money back, after a yes."""
        key = str((ctx.request_context.meta or {}).get(CALL_KEY))
        if ctx.request_state is None:
            done[key, "asked"] += 1
            schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
            params = {"mode": "form", "message": "Pay?", "requestedSchema": schema}
            question = types.ElicitRequest.model_validate({"method": "elicitation/create", "params": params})
            return types.InputRequiredResult(input_requests={"ok": question}, request_state="asked")
        done[key, "paid"] += 1
        return "paid"

    return server


def test_a_server_that_asks_is_continued_once_wherever_the_process_is_killed() -> None:
    """Each kill is followed by a new process. What is unknown is asked about, never repeated by itself [B142]."""
    done: Counter[tuple[str, str]] = Counter()
    server = make_server(done)
    repeated: set[str] = set()

    def make_agent() -> Agent:
        model = ScriptedModel([[ToolCall("shop_refund", {"order": 7})], "Done."], follow=True)
        return Agent("desk", model=model, tools=[MCP(server, name="shop")])

    def decide(pending):
        if pending.recovery:
            repeated.add(f"{pending.conversation}/{pending.call}")
            return Approve()
        return Answer({"ok": True}) if pending.kind == "elicitation" else Approve()

    report = crash_everywhere(make_agent, "Refund order 7", decisions=decide, kills=2)
    assert set(report.turns) == {"completed"}, report
    assert len(report.crashes) >= 200
    for (key, what), count in done.items():
        assert count == 1 or key in repeated, f"{key}: {what} {count} times, and nobody was asked"
    assert sum(1 for key, what in done if what == "paid") == len(report.crashes) + 1
