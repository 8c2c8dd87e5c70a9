"""Hook decorators keep the type of their function."""

from typing import Any, assert_type

from holdfast import Agent, Call, Deny, Halt, Result, ScriptedModel, ToolError, tool
from holdfast.hooks import (
    Edit,
    Hook,
    ModelReply,
    Reject,
    RequireApproval,
    ToolOutcome,
    Transformer,
    after_model,
    after_tool,
    before_model,
    before_tool,
    on_stream,
    redact,
)
from holdfast.models import Request


class Database:
    pass


@tool
def refund(order: str, cents: int) -> str:
    """Give money back."""
    return f"{order}: {cents}"


@before_model
def remind(request: Request) -> str:
    return f"Step {request.step}: be brief."


@before_model(parallel=True, timeout="2s")
async def recall(request: Request) -> list[str] | None:
    return ["The customer is called Ada."] if request.step == 1 else None


@after_model
def refuse_promises(reply: ModelReply) -> Reject | Halt | None:
    return Reject("make no promises") if "promise" in reply.text else None


@before_tool
def limit(call: Call[Database], args: dict[str, Any]) -> Deny | Edit | RequireApproval | None:
    return RequireApproval("large") if args.get("cents", 0) > 1000 else None


@before_tool(tools=[refund], name="log_calls")
async def log_calls(call: Call, args: dict[str, Any]) -> None:
    print(call.tool, args)


@after_tool
def shorten(call: Call, outcome: ToolOutcome) -> ToolOutcome | Result | ToolError | None:
    return outcome.redacted(r"\d{16}")


class Shout:
    def feed(self, text: str, /) -> str:
        return text.upper()

    def end(self) -> str:
        return ""


@on_stream
def shout() -> Shout:
    return Shout()


on_stream(Shout, name="shout_again")
assert_type(redact("secret")(), Transformer)


async def main(request: Request, call: Call[Database]) -> None:
    assert_type(remind(request), str)
    assert_type(remind(request=request), str)
    assert_type(await recall(request), list[str] | None)
    assert_type(limit(call, {}), Deny | Edit | RequireApproval | None)
    assert_type(limit.name, str)
    await log_calls(call, {})
    assert_type(shorten(call, ToolOutcome()), ToolOutcome | Result | ToolError | None)
    assert_type(shout(), Shout)


def names_of(hooks: list[Hook]) -> list[str]:
    return [hook.name for hook in hooks]


names_of([remind, recall, limit])
HOOKS = [remind, recall, refuse_promises, limit, log_calls, shorten, shout, redact("secret")]
Agent("shop", model=ScriptedModel(["Hello."]), tools=[refund], hooks=HOOKS)
