"""The agent that runs single calls of an agent's tools, without its model: a protocol's client makes the calls.

``holdfast serve`` and ``holdfast worker`` run it beside the agent, so a call that is approved after the MCP server has
ended still runs.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Sequence
from typing import Any

from holdfast.core.transcript import UserMessage
from holdfast.errors import DeclarationError, ModelError
from holdfast.models.base import FinishPart, Request, StreamPart, TextPart, ToolCallPart
from holdfast.runtime.agent_definition import AgentDefinition

SUFFIX = ".mcp"
"""The end of the name of a direct agent: MCP clients make its calls."""
MAX_NAME = 64 - len(SUFFIX)


class DirectModel:
    """The model of a direct agent: it makes the call that the message names, and ends the turn when it has returned."""

    name = "mcp"

    async def stream(self, request: Request) -> AsyncIterator[StreamPart]:
        last = request.messages[-1]
        if isinstance(last, UserMessage) and not request.aside:
            tool, _, args = last.text.partition(" ")
            if not args:
                raise ModelError("this conversation runs one call of an MCP client", kind="invalid_response")
            yield ToolCallPart(0, None, tool, args)
            yield FinishPart("tool_calls")
        else:
            yield TextPart("The call has returned.")
            yield FinishPart()


def direct_agent(agent: AgentDefinition[Any]) -> AgentDefinition[Any]:
    """Return the agent that runs the calls of MCP clients: the tools and hooks of ``agent``, without its model.

    A runtime that serves MCP has both agents. The direct one never asks a model, so a call costs no tokens, unless the
    tool's own handler asks the model of ``agent`` (``call.ask_model``).
    """
    if len(agent.name) > MAX_NAME:
        raise DeclarationError(f"agent {agent.name!r}: to be served over MCP, a name has at most {MAX_NAME} characters")
    direct = copy.copy(agent)
    direct.name, direct.model, direct.fallbacks = f"{agent.name}{SUFFIX}", DirectModel(), ()
    direct.instructions, direct.output, direct.output_type = "", None, None
    direct.max_steps, direct.internal, direct.asked = 2, True, agent

    def take_tools() -> None:
        direct.tools, direct.offers, direct.weight = agent.tools, agent.offers, agent.weight

    sources: Sequence[Any] = getattr(agent, "sources", ())
    for source in sources:  # tools of other programs, which can change
        source.subscribe(take_tools)
    return direct


def with_direct_agents(agents: Sequence[AgentDefinition[Any]]) -> list[AgentDefinition[Any]]:
    """Return the agents and their direct agents. An agent whose name is too long for one cannot be served over MCP."""
    return [*agents, *(direct_agent(agent) for agent in agents if len(agent.name) <= MAX_NAME)]


def own_names(names: Sequence[str]) -> list[str]:
    """Return the names without those of direct agents: the agents that the application declared."""
    return [name for name in names if not (name.endswith(SUFFIX) and name.removesuffix(SUFFIX) in names)]
