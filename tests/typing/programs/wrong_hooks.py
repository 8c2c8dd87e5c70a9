"""Mistakes with hooks that type checkers find."""

from typing import Any

from holdfast import Call, Deny
from holdfast.hooks import ToolOutcome, after_model, after_tool, before_model, before_tool, on_stream
from holdfast.models import Request


@before_model  # error: pyright=reportArgumentType,reportCallIssue mypy=type-var
def remind(call: Call) -> str:
    return call.tool


@after_model  # error: pyright=reportArgumentType,reportCallIssue mypy=type-var
def refuse(reply: str) -> None: ...


@before_tool(tools=["refund"])  # error: pyright=reportArgumentType mypy=type-var
def limit(args: dict[str, Any]) -> Deny | None:
    return None


@after_tool  # error: pyright=reportArgumentType,reportCallIssue mypy=type-var
def log_outcome(call: Call, outcome: ToolOutcome) -> str:
    return call.tool


@on_stream  # error: pyright=reportArgumentType,reportCallIssue mypy=type-var
def shout() -> str:
    return "!"


@before_model(timeout=None)  # error: pyright=reportArgumentType mypy=call-overload
def greet(request: Request) -> str:
    return "Hello."


@before_model
def note(request: Request) -> str:
    return "Be brief."


note("request")  # error: pyright=reportArgumentType mypy=arg-type
