"""Waiting calls as tasks: the extension io.modelcontextprotocol/tasks. All of a task's state is in the log."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

import mcp_types as types
from mcp.shared.exceptions import MCPError

from holdfast.bridges.mcp.server_calls import Exchange, Progress, read_progress
from holdfast.bridges.mcp.server_results import call_result, turn_result
from holdfast.bridges.mcp.server_rounds import TASKS, Context, Rounds, Taken, fills_forms, split_call
from holdfast.core.decisions import Principal
from holdfast.core.events import AssistantSaid, ConversationOpened, TurnStarted
from holdfast.errors import HoldfastError, Invalid, NotFound

POLL_MS = 2000
"""How often a client should ask for the state of a task."""


class TaskParams(types.RequestParams):
    """The parameters of tasks/get and tasks/cancel."""

    task_id: str


class UpdateParams(TaskParams):
    """The parameters of tasks/update."""

    input_responses: dict[str, types.ElicitResult]


class Tasks:
    """The methods of the extension. The id of a task is the key of its call: CONVERSATION/CALL.

    The task of a message to the agent is CONVERSATION/SEQ, with the sequence number of the message.
    """

    def __init__(self, rounds: Rounds):
        self._rounds = rounds
        self._runtime = rounds.runtime

    def describe(self, ctx: Context, exchange: Exchange, progress: Progress, by: Principal) -> dict[str, Any]:
        """Return the task of an exchange, without its result."""
        task: dict[str, Any] = {
            "taskId": f"{exchange.conversation}/{progress.call or exchange.message}",
            "status": "working",
            "createdAt": _time(progress.began),
            "lastUpdatedAt": _time(progress.changed),
            "ttlMs": None,
            "pollIntervalMs": POLL_MS,
        }
        if progress.pending:
            soonest = min(entry.deadline for entry in progress.pending)
            task["ttlMs"] = int((soonest - progress.began) * 1000)
        asked = [entry for entry in progress.pending if self._rounds.may_ask(entry, by)]
        if asked and fills_forms(ctx):
            _, requests = self._rounds.make_requests(_keyed(exchange), asked, by, "form", Taken())
            task["status"] = "input_required"
            task["inputRequests"] = {
                key: request.model_dump(by_alias=True, mode="json", exclude_none=True)
                for key, request in requests.items()
            }
        elif progress.pending:
            explained = self._rounds.explain(progress.pending, by, Taken()).content[0]
            task["statusMessage"] = explained.text if isinstance(explained, types.TextContent) else ""
        return task

    def start(self, ctx: Context, exchange: Exchange, progress: Progress, by: Principal) -> dict[str, Any]:
        """Return the answer to a request with a waiting call: a task, to be asked for with tasks/get."""
        task = self.describe(ctx, exchange, progress, by)
        task.pop("inputRequests", None)
        return {"resultType": "task", **task}

    async def get(self, ctx: Context, params: TaskParams, by: Principal) -> dict[str, Any]:
        """Return the state of a task, with its questions or its result."""
        exchange = await self._find(params.task_id, by)
        progress = await read_progress(self._runtime, exchange)
        task = self.describe(ctx, exchange, progress, by)
        result: types.CallToolResult | None = None
        if progress.returned is not None:
            result = await call_result(self._runtime, exchange.conversation, progress.returned)
            cancelled = progress.returned.error is not None and progress.returned.error.kind == "cancelled"
            task["status"] = "cancelled" if cancelled else "completed"
        elif progress.turn is not None:
            result = turn_result(progress.turn)
            task["status"] = "cancelled" if progress.turn.reason == "cancelled" else "completed"
        if result is not None and task["status"] == "completed":
            dumped = result.model_dump(by_alias=True, mode="json", exclude_none=True)
            task["result"] = {"resultType": "complete", **dumped}
        return task

    async def update(self, ctx: Context, params: UpdateParams, by: Principal) -> dict[str, Any]:
        """Take the answers to a task's questions."""
        exchange = await self._find(params.task_id, by)
        progress = await read_progress(self._runtime, exchange)
        entries = [entry for entry in progress.pending if self._rounds.may_ask(entry, by)]
        asked, _ = self._rounds.make_requests(_keyed(exchange), entries, by, "form", Taken())
        taken = await self._rounds.take_answers(asked, params.input_responses, by, "form")
        for problem in (*taken.problems.values(), *taken.refused):
            raise MCPError(code=types.INVALID_PARAMS, message=problem)
        return {}

    async def cancel(self, ctx: Context, params: TaskParams, by: Principal) -> dict[str, Any]:
        """Cancel the turn of a task; one that has ended stays as it is."""
        exchange = await self._find(params.task_id, by)
        progress = await read_progress(self._runtime, exchange)
        if not progress.over:
            await self._runtime.cancel(exchange.conversation, by=by, reason="cancelled by the MCP client")
        return {}

    async def _find(self, task: str, by: Principal) -> Exchange:
        """Return the exchange of a task id; a task that the principal may not see does not exist."""
        try:
            conversation, tail = split_call(task)
            await self._rounds.check_visible(by, conversation)
            found = await self._find_exchange(conversation, tail)
        except (NotFound, Invalid):
            found = None
        if found is None:
            raise MCPError(code=types.INVALID_PARAMS, message=f"no task {task[:200]!r}")
        return found

    async def _find_exchange(self, conversation: str, tail: str) -> Exchange | None:
        message, direct = 0, False
        for event in await self._runtime.history(conversation):
            match event:
                case ConversationOpened():
                    direct = "tool" in (event.metadata.get("mcp") or {})
                case TurnStarted():
                    message = event.message
                    if tail == str(message):
                        return Exchange("ask", conversation, message)
                case AssistantSaid() if direct and any(made.id == tail for made in event.calls):
                    return Exchange("tool", conversation, message)
                case _:
                    pass
        return None


def _keyed(exchange: Exchange) -> Exchange:
    """Return the exchange with a kind of question that is named by its suspension.

    An answer under the name of an older suspension is then for nothing that came later.
    """
    kind: Literal["ask"] = "ask"
    return Exchange(kind, exchange.conversation, exchange.message)


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def check_extension(ctx: Context) -> None:
    """Raise the protocol's error if the client did not declare the extension in this request."""
    known = ctx.session.client_capabilities
    if known is None or TASKS not in (known.extensions or {}):
        raise MCPError(
            code=types.MISSING_REQUIRED_CLIENT_CAPABILITY,
            message=f"this method needs the client capability extensions.{TASKS}",
            data={"requiredCapabilities": {"extensions": {TASKS: {}}}},
        )


def to_protocol_error(problem: HoldfastError) -> MCPError:
    """Return an error of ours as an error of the protocol."""
    return MCPError(code=types.INVALID_PARAMS, message=problem.message, data={"kind": problem.kind})
