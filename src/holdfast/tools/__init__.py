"""Declare tools (``@tool``, ``Tool``, ``provider_tool``) and combine them (``Toolset`` and its wrappers).

Modules, in the order in which a declaration passes through them:

    declare.py     the public forms: ``@tool``, ``Tool.declare``, a subclass of ``Tool``, ``provider_tool``
    options.py     the options: their types, defaults and checks
    definition.py  the build: options and a function become a ``ToolSpec`` and its handlers
    handler.py     the handler: calls the function with validated arguments
    call.py        the ``Call`` that handlers receive
    toolset.py     a set of tools with unique names; ``prefixed``, ``filtered``, ``gated``; ``ToolSource``

Tools from elsewhere, behind ``Toolset.from_functions`` and its siblings, which import them when they are called:

    adapters.py     ``only=`` and ``approval=``, which all of them take; tools from functions
    openapi/        tools from an OpenAPI document (httpx)
    langchain.py    tools from LangChain tools
    pydantic_ai.py  tools from pydantic-ai tools
"""

from holdfast.core.model_messages import ModelAnswer, ModelMessage
from holdfast.tools.call import Call
from holdfast.tools.declare import Declaration, Tool, as_tool, provider_tool, tool
from holdfast.tools.handler import Handler
from holdfast.tools.toolset import Toolset, ToolSource, filtered, gated, prefixed

__all__ = [
    "Call",
    "Declaration",
    "Handler",
    "ModelAnswer",
    "ModelMessage",
    "Tool",
    "ToolSource",
    "Toolset",
    "as_tool",
    "filtered",
    "gated",
    "prefixed",
    "provider_tool",
    "tool",
]
