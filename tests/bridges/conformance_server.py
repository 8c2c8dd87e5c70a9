"""The fixture of the official conformance suite: its tools as tools of an agent, served by ``AgentServer``.

Its prompts, resources and completions, and the tools that need sampling or roots, are plain handlers of the SDK's
server that ``AgentServer`` extends: Holdfast has nothing of its own to say about these.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import sys
from typing import Any

import mcp_types as types
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError

from holdfast import Agent, Ask, Call, Result, Runtime, ScriptedModel, ToolError, tool
from holdfast.bridges.mcp.server import AgentServer, direct_agent
from holdfast.server import app, process

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg=="
)
WAV = base64.b64decode("UklGRiYAAABXQVZFZm10IBAAAAABAAEAQB8AAIA+AAACABAAZGF0YQIAAAAAAA==")


# --- tools of the agent ---


@tool
async def test_simple_text() -> str:
    """Return text."""
    return "This is a simple text response for testing."


@tool
async def test_image_content(call: Call) -> Result:
    """Return an image."""
    image = call.keep(PNG, "image/png")
    return Result(image, images=[image])


@tool
async def test_audio_content(call: Call) -> Any:
    """Return audio."""
    return call.keep(WAV, "audio/wav")


@tool
async def test_embedded_resource(call: Call) -> Any:
    """Return a resource."""
    return call.keep("This is an embedded resource content.")


@tool
async def test_multiple_content_types(call: Call) -> Result:
    """Return text, an image and a resource."""
    image = call.keep(PNG, "image/png")
    return Result({"text": "Multiple content types test:", "data": call.keep("{}", "application/json")}, images=[image])


@tool
async def test_error_handling() -> str:
    """Fail."""
    raise ToolError("handler_failed", "This tool intentionally returns an error for testing")


@tool
async def test_tool_with_progress(call: Call) -> str:
    """Report progress."""
    for progress in (0, 50, 100):
        await call.progress({"progress": progress, "total": 100})
    return "done"


@tool
async def test_logging_tool() -> str:
    """Write to the log of the process."""
    logging.getLogger("conformance").info("a line that no client gets")
    return "done"


def form(title: str, **properties: Any) -> dict[str, Any]:
    return {"title": title, "type": "object", "properties": properties, "required": list(properties)}


TEXT, YES_NO = {"type": "string"}, {"type": "boolean"}


@tool
async def test_input_required_result_elicitation(call: Call) -> Any:
    """Ask for a name."""
    if not call.answers:
        return Ask("What is your name?", answer=form("user_name", name=TEXT), resume=True)
    return f"Hello, {call.answers[0]['name']}!"


@tool
async def test_streaming_elicitation(call: Call) -> Any:
    """Report progress, then ask."""
    await call.progress({"progress": 1})
    return Ask("What is your name?", answer=form("user_name", name=TEXT))


@tool
async def test_input_required_result_request_state(call: Call) -> Any:
    """Ask for a confirmation."""
    return "state-ok" if call.answers else Ask("Please confirm", answer=form("confirm", ok=YES_NO), resume=True)


@tool
async def test_input_required_result_tampered_state(call: Call) -> Any:
    """Ask for a confirmation."""
    return "state-ok" if call.answers else Ask("Please confirm", answer=form("confirm", ok=YES_NO), resume=True)


@tool
async def test_input_required_result_multi_round(call: Call) -> Any:
    """Ask twice."""
    match len(call.answers):
        case 0:
            return Ask("Step 1: What is your name?", answer=form("step1", name=TEXT), resume=True)
        case 1:
            return Ask("Step 2: What is your favourite colour?", answer=form("step2", color=TEXT), resume=True)
        case _:
            return f"{call.answers[0]['name']} likes {call.answers[1]['color']}"


def choices(*names: str) -> list[dict[str, str]]:
    return [{"const": name, "title": name.title()} for name in names]


@tool
async def test_elicitation(message: str) -> Any:
    """Ask for a user's name and address."""
    return Ask(message, answer=form("user", username=TEXT, email=TEXT))


@tool
async def test_elicitation_sep1034_defaults() -> Any:
    """Ask with default values."""
    fields = form(
        "defaults",
        name={"type": "string", "default": "John Doe"},
        age={"type": "integer", "default": 30},
        score={"type": "number", "default": 95.5},
        status={"type": "string", "enum": ["active", "inactive", "pending"], "default": "active"},
        verified={"type": "boolean", "default": True},
    )
    return Ask("Please check", answer=fields)


@tool
async def test_elicitation_sep1330_enums() -> Any:
    """Ask to choose."""
    options, values = ["option1", "option2", "option3"], choices("value1", "value2", "value3")
    fields = form(
        "enums",
        untitledSingle={"type": "string", "enum": options},
        titledSingle={"type": "string", "oneOf": values},
        legacyEnum={"type": "string", "enum": ["opt1", "opt2", "opt3"], "enumNames": ["One", "Two", "Three"]},
        untitledMulti={"type": "array", "items": {"type": "string", "enum": options}},
        titledMulti={"type": "array", "items": {"anyOf": values}},
    )
    return Ask("Please choose", answer=fields)


TOOLS = [
    test_elicitation,
    test_elicitation_sep1034_defaults,
    test_elicitation_sep1330_enums,
    test_simple_text,
    test_image_content,
    test_audio_content,
    test_embedded_resource,
    test_multiple_content_types,
    test_error_handling,
    test_tool_with_progress,
    test_logging_tool,
    test_streaming_elicitation,
    test_input_required_result_elicitation,
    test_input_required_result_request_state,
    test_input_required_result_tampered_state,
    test_input_required_result_multi_round,
]


# --- what the SDK's server has of its own ---

TEXT_RESOURCE = types.Resource(uri="test://static-text", name="text", mime_type="text/plain")
BINARY_RESOURCE = types.Resource(uri="test://static-binary", name="binary", mime_type="image/png")


def ask_name() -> types.ElicitRequest:
    schema = {"type": "object", "properties": {"name": TEXT}, "required": ["name"]}
    return types.ElicitRequest(
        params=types.ElicitRequestFormParams(message="What is your name?", requested_schema=schema)
    )


def sample(text: str) -> types.CreateMessageRequest:
    message = types.SamplingMessage(role="user", content=types.TextContent(text=text))
    return types.CreateMessageRequest(params=types.CreateMessageRequestParams(messages=[message], max_tokens=100))


SDK_ROUNDS: dict[str, Any] = {
    "test_input_required_result_sampling": lambda: {"capital_question": sample("What is the capital of France?")},
    "test_input_required_result_list_roots": lambda: {"client_roots": types.ListRootsRequest()},
    "test_input_required_result_multiple_inputs": lambda: {
        "user_name": ask_name(),
        "greeting": sample("Generate a greeting"),
        "client_roots": types.ListRootsRequest(),
    },
    "test_input_required_result_capabilities": lambda: {"capital_question": sample("What is the capital of France?")},
}
PROMPTS = (
    types.Prompt(name="test_simple_prompt", description="A prompt."),
    types.Prompt(
        name="test_prompt_with_arguments",
        description="A prompt.",
        arguments=[types.PromptArgument(name=name, required=True) for name in ("arg1", "arg2")],
    ),
    types.Prompt(
        name="test_prompt_with_embedded_resource",
        description="A prompt.",
        arguments=[types.PromptArgument(name="resourceUri", required=True)],
    ),
    types.Prompt(name="test_prompt_with_image", description="A prompt."),
    types.Prompt(name="test_input_required_result_prompt", description="A prompt."),
)


async def list_tools(ctx: Any, params: Any) -> types.ListToolsResult:
    names = [*SDK_ROUNDS, "test_missing_capability"]
    return types.ListToolsResult(
        tools=[types.Tool(name=name, description=name, input_schema={"type": "object"}) for name in names]
    )


async def call_tool(ctx: Any, params: types.CallToolRequestParams) -> Any:
    if params.name == "test_missing_capability":
        known = ctx.session.client_capabilities
        if known is None or known.sampling is None:
            raise MCPError(
                code=types.MISSING_REQUIRED_CLIENT_CAPABILITY,
                message="sampling is missing",
                data={"requiredCapabilities": {"sampling": {}}},
            )
    elif params.name not in SDK_ROUNDS:
        raise MCPError(code=types.INVALID_PARAMS, message=f"Unknown tool: {params.name}")
    elif not params.input_responses:
        return types.InputRequiredResult(input_requests=SDK_ROUNDS[params.name](), request_state="asked")
    return types.CallToolResult(content=[types.TextContent(text="done")])


async def list_prompts(ctx: Any, params: Any) -> types.ListPromptsResult:
    return types.ListPromptsResult(prompts=list(PROMPTS))


async def get_prompt(ctx: Any, params: types.GetPromptRequestParams) -> Any:
    args = params.arguments or {}
    content: types.ContentBlock = types.TextContent(text="This is a simple prompt for testing.")
    match params.name:
        case "test_prompt_with_arguments":
            content = types.TextContent(text=f"Prompt with arguments: arg1='{args['arg1']}', arg2='{args['arg2']}'")
        case "test_prompt_with_embedded_resource":
            resource = types.TextResourceContents(uri=args["resourceUri"], mime_type="text/plain", text="Embedded.")
            content = types.EmbeddedResource(resource=resource)
        case "test_prompt_with_image":
            content = types.ImageContent(data=base64.b64encode(PNG).decode(), mime_type="image/png")
        case "test_input_required_result_prompt" if not params.input_responses:
            return types.InputRequiredResult(input_requests={"user_context": ask_name()})
        case _:
            pass
    return types.GetPromptResult(messages=[types.PromptMessage(role="user", content=content)])


async def list_resources(ctx: Any, params: Any) -> types.ListResourcesResult:
    return types.ListResourcesResult(resources=[TEXT_RESOURCE, BINARY_RESOURCE])


async def list_templates(ctx: Any, params: Any) -> types.ListResourceTemplatesResult:
    template = types.ResourceTemplate(uri_template="test://template/{id}/data", name="template")
    return types.ListResourceTemplatesResult(resource_templates=[template])


async def read_resource(ctx: Any, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
    uri = str(params.uri)
    contents: types.TextResourceContents | types.BlobResourceContents
    if uri == TEXT_RESOURCE.uri:
        contents = types.TextResourceContents(uri=uri, mime_type="text/plain", text="This is static text.")
    elif uri == BINARY_RESOURCE.uri:
        contents = types.BlobResourceContents(uri=uri, mime_type="image/png", blob=base64.b64encode(PNG).decode())
    elif uri.startswith("test://template/"):
        number = uri.split("/")[3]
        text = f'{{"id":"{number}","templateTest":true,"data":"Data for ID: {number}"}}'
        contents = types.TextResourceContents(uri=uri, mime_type="application/json", text=text)
    else:
        raise MCPError(code=types.INVALID_PARAMS, message="Resource not found", data={"uri": uri})
    return types.ReadResourceResult(contents=[contents])


async def complete(ctx: Any, params: Any) -> types.CompleteResult:
    return types.CompleteResult(completion=types.Completion(values=[], total=0, has_more=False))


def make_base() -> Server[Any]:
    """Return a server of the SDK with everything that the suite wants and Holdfast does not map."""
    return Server(
        "conformance",
        version="1",
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_list_prompts=list_prompts,
        on_get_prompt=get_prompt,
        on_list_resources=list_resources,
        on_list_resource_templates=list_templates,
        on_read_resource=read_resource,
        on_completion=complete,
    )


async def main() -> None:
    """Serve on a free port of loopback, and print it."""
    agent = Agent("conformance", model=ScriptedModel([]), tools=TOOLS)
    runtime = Runtime(agent, direct_agent(agent))
    server = AgentServer(runtime, agent, keys="a secret of at least 32 characters", base=make_base())
    # The suite sends no token, so every request has a principal here. holdfast mcp serve has no such mode.
    served = app(runtime, lambda request: "suite", mounts={"/mcp": server.http()})
    listening = process.open_socket("127.0.0.1", 0)
    print(listening.getsockname()[1], flush=True)
    await process.serve(served, listening, process.stop_on_signals)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
