"""One call of a server's tool: requests, input rounds, tasks and live questions.

The state that a call carries from run to run is in the log, so any process with the agent can take the next step:

    {"inputs": .., "request_state": ..}   an input round: the next request has the responses and the same request state
    {"task": ..}                          a task that is polled
    {"task": .., "inputs": ..}            a task that asked: the responses go to it, then it is polled on
    {"live": ID, "inputs": ..}            a question on an open connection (revisions with a handshake)
    {.., "sample": "ask" | "auto"}        one of these three whose inputs need the agent's model, which is asked next
    {.., "sampled": ..}                   the same, with the model's responses: they are in the log before they are sent
    {.., "samples": N}                    the number of requests to the model that the server has made in this call
    {"links": true, "inputs": ..}         the server wants links to be opened before the call
    {"again": true}                       a person was asked whether the call is to be run again
    {"away": STATE, "answer": .., "denied": ..}   the server was away when the answer was to be passed on

Values that are too large for the log are artifacts: "inputs_artifact" instead of "inputs".
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mcp_types as types
import msgspec

from holdfast.bridges.mcp.call_state import carry_samples, is_polled, load_value, pack_value, without
from holdfast.bridges.mcp.connection import Away, Connection, LinksFirst, Lost, TaskParams, TaskRequest, clean_text
from holdfast.bridges.mcp.http import CALL_KEY
from holdfast.bridges.mcp.model_requests import Sampling
from holdfast.bridges.mcp.offers import Method, read_list, read_request
from holdfast.bridges.mcp.question import Round
from holdfast.bridges.mcp.result import prompt_result, resource_result, to_result
from holdfast.core.decisions import Principal
from holdfast.core.tool import Ask, Continue
from holdfast.errors import ToolError
from holdfast.tools.call import Call

log = logging.getLogger("holdfast")

MAX_SILENT_ROUNDS = 10
"""Rounds of one run that need no person."""
MAX_STATE, INLINE_STATE = 1024 * 1024, 32 * 1024
"""Characters of a request state; beyond the second limit it is stored as an artifact."""
MAX_SAMPLES = 100
"""Requests to the agent's model that a server can make in one call."""
REJECTED = -1
"""The protocol's error code for a request to the model that a person has declined."""
LEAST_POLL, MOST_POLL = 0.05, 60.0
"""Seconds between two polls of a task."""
POLL_TIMEOUT = 30.0
CANCEL_SECONDS, CLOSE_SECONDS = 60.0, 5.0
"""Seconds for which the cancellation of a task is tried while its server is away; less if the runtime closes."""
MOST_OUTAGE = 600.0
"""Seconds for which a task's server may be away before a person is asked whether to keep waiting."""
PROGRESS_INTERVAL = 0.1
"""Seconds between two progress reports that are passed on; those in between are dropped."""
MAX_LIVE = 100
"""Live questions that are kept open in one process."""
UNKNOWN = "whether it took effect is unknown"
DECLINED: Mapping[str, Any] = {"action": "decline"}
TRY_AGAIN, KEEP_WAITING, RUN_AGAIN = "try again", "keep waiting", "run again"


@dataclass(frozen=True, kw_only=True)
class ToolPlan:
    """What a call needs to know about its tool."""

    name: str
    """The server's name of the tool."""
    method: Method = "tools/call"
    output_schema: Any = None
    timeout: float | None = None
    """Seconds for one request. A person's time to answer does not count, and a task has its own limit."""
    recovery: str = "ask"


@dataclass
class LiveCall:
    """A request on a connection with a handshake: the server may ask before it answers."""

    id: str
    key: str
    """The key of the call: its conversation and its id."""
    words: str
    """The call for people: its tool and its arguments."""
    connection: Connection
    task: asyncio.Task[dict[str, Any]] | None = None
    questions: asyncio.Queue[tuple[Round, asyncio.Future[Any]]] = field(
        default_factory=lambda: asyncio.Queue[tuple[Round, asyncio.Future[Any]]](8)
    )
    open: tuple[Round, asyncio.Future[Any]] | None = None

    @property
    def is_asking(self) -> bool:
        """Whether the server still waits for the answer to the open question."""
        return not _is_done(self) and self.open is not None and not self.open[1].done()


class Exchange:
    """Runs the calls of one server's tools.

    connect:  returns the connection for the calls of a principal
    """

    def __init__(
        self,
        server: str,
        connect: Callable[[Principal], Awaitable[Connection]],
        roots: Sequence[Mapping[str, str]],
        sampling: Sampling | None = None,
    ):
        self._server, self._connect, self._roots = server, connect, roots
        self._sampling: Sampling | None = sampling
        self._live: dict[str, LiveCall] = {}
        self._numbers = itertools.count(1)
        self._background: set[asyncio.Task[None]] = set()

    def tasks(self) -> list[asyncio.Task[Any]]:
        requests = [live.task for live in self._live.values() if live.task is not None]
        return [*requests, *self._background]

    async def close(self) -> None:
        """End the live calls, and wait for cancellations that are being passed on."""
        if self._background:
            await asyncio.wait(self._background, timeout=CLOSE_SECONDS)
        tasks = self.tasks()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._live.clear()

    # --- the steps of a call ---

    async def run(self, plan: ToolPlan, args: dict[str, Any], call: Call) -> Any:
        """Take the call's next step, and return what a handler returns: a result, a question or a checkpoint."""
        state: dict[str, Any] = call.state or {}
        if not state:
            return await self._begin(plan, args, call)
        answer: Any = call.answers[-1] if call.answers else None
        denied = call.denied is not None
        was_away = "away" in state
        if was_away:
            answer, denied, state = state["answer"], state["denied"], state["away"]
        if "again" in state:
            return await self._begin(plan, args, call)
        if is_polled(state):
            return await self._poll(plan, call, state["task"])
        if state.get("sample") == "auto" and self._sampling == "ask" and "live" not in state:
            return await self._ask_first(call, state)
        connection = await self._connect(call.principal)
        try:
            sampled = await self._sample(connection, plan, call, state, denied=denied)
            if sampled is not None and was_away:
                return Continue({"away": sampled, "answer": answer, "denied": denied})
            if sampled is not None:
                return Continue(sampled)
            return await self._pass_on(connection, plan, args, call, state, answer, denied=denied)
        except Away as gone:
            question = (
                f"{self._server} is not reachable, so the answer could not be passed on to it ({gone}). Try again?"
            )
            kept = {"away": state, "answer": answer, "denied": denied}
            return Ask(question, choices=[TRY_AGAIN], resume=kept)
        except Lost as lost:
            raise self._lost_error(plan, lost) from None

    async def run_absent(self, plan: ToolPlan, args: dict[str, Any], call: Call, reason: str) -> Any:
        """Take the next step of a call of an unknown tool: the server has been away since the start."""
        state: dict[str, Any] = call.state or {}
        if is_polled(state):
            return await self._poll(plan, call, state["task"])
        if not state:
            raise self.away_error(reason)
        answer: Any = call.answers[-1] if call.answers else None
        kept = state if "away" in state else {"away": state, "answer": answer, "denied": call.denied is not None}
        return self._ask_to_retry(reason, kept)

    def _ask_to_retry(self, reason: object, state: dict[str, Any]) -> Ask:
        question = f"{self._server} is not reachable, so the answer could not be passed on to it ({reason})."
        return Ask(f"{question} Try again?", choices=[TRY_AGAIN], resume=state)

    def away_error(self, reason: object) -> ToolError:
        return ToolError(
            "resource_missing",
            f"the MCP server {self._server} is not reachable ({reason}). Nothing was sent. Start the server or correct "
            "its address; its tools work again as soon as it answers",
            {"server": self._server},
        )

    def _lost_error(self, plan: ToolPlan, lost: Lost) -> ToolError:
        return ToolError(
            "network",
            f"the connection to {self._server} failed while {plan.name} ran ({lost}); {UNKNOWN}",
            {"server": self._server, "sent": True},
        )

    async def _begin(self, plan: ToolPlan, args: dict[str, Any], call: Call) -> Any:
        """Send the call. If it was not sent, it is tried once more; if it is unknown, only if it may be repeated."""
        for last in (False, True):
            try:
                connection = await self._connect(call.principal)
                await connection.session()
                if plan.method in ("resources/list", "prompts/list"):
                    return await read_list(connection, plan.method, plan.timeout)
                if not connection.is_modern:
                    return await self._begin_live(connection, plan, args, call)
                return await self._send(connection, plan, args, call)
            except LinksFirst as links:
                checked = Round(self._server, links.inputs)
                return checked.ask({"links": True, "inputs": links.inputs}, call)
            except Away as gone:
                if last:
                    raise self.away_error(gone) from None
            except Lost as lost:
                if last or plan.recovery != "redispatch":
                    raise self._lost_error(plan, lost) from None
        raise AssertionError("the last attempt returns or raises")

    async def _pass_on(
        self,
        connection: Connection,
        plan: ToolPlan,
        args: dict[str, Any],
        call: Call,
        state: dict[str, Any],
        answer: Any,
        *,
        denied: bool,
    ) -> Any:
        """Give the server a person's answer. Raise Away if it is not reachable: then nothing was sent."""
        if "live" in state:
            return await self._continue_live(plan, args, call, state, answer, denied=denied)
        if "links" in state:
            if denied:
                raise ToolError("denied", f"the links of {self._server} were not opened: {call.denied or 'declined'}")
            return await self._begin(plan, args, call)
        checked = await self._load_round(call, state)
        try:
            responses = checked.answer(answer, declined=denied, sampled=await load_value(call, state, "sampled"))
        except ToolError:
            self._give_up_task(call, state)
            raise
        await connection.probe()
        if "task" in state:
            await self._update_task(connection, state["task"], responses)
            return await self._poll(plan, call, state["task"])
        request_state = state.get("request_state")
        if request_state is None and "request_state_artifact" in state:
            content = await call.read_artifact(state["request_state_artifact"])
            request_state = None if content is None else content.decode()
        return await self._send(connection, plan, args, call, responses, request_state)

    async def _send(
        self,
        connection: Connection,
        plan: ToolPlan,
        args: dict[str, Any],
        call: Call,
        responses: dict[str, Any] | None = None,
        request_state: str | None = None,
    ) -> Any:
        """Send a request of a modern server, and go on until a person is needed or there is a result."""
        for n in range(MAX_SILENT_ROUNDS):
            request = _call_request(plan, args, call, responses, request_state)
            raw = await connection.send(request, timeout=plan.timeout, on_progress=ProgressFilter(call))
            if raw.get("resultType") != "input_required":
                return self._finish(plan, raw, call)
            inputs: Any = raw.get("inputRequests") or {}
            request_state = _check_request_state(self._server, raw.get("requestState"))
            checked = Round(self._server, inputs, self._roots, self._sampling)
            if checked.needs_person or checked.needs_model:
                return self._wait_for_inputs(checked, _round_state(request_state, call), inputs, call)
            responses = checked.answer(None) or None
            await asyncio.sleep(min(0.05 * 2**n, 1.0))  # without inputs the server asks to be asked again
        raise ToolError(
            "conflict",
            f"{self._server} asked to be called again {MAX_SILENT_ROUNDS} times without a result",
            {"server": self._server},
        )

    def _finish(self, plan: ToolPlan, raw: Mapping[str, Any], call: Call) -> Any:
        if raw.get("resultType") == "task":
            task = _read_task(self._server, raw)
            return Continue({"task": task, **carry_samples(call)})  # in the log before it is polled
        if plan.method == "resources/read":
            return resource_result(self._server, raw, call)
        if plan.method == "prompts/get":
            return prompt_result(self._server, raw, call)
        return to_result(self._server, raw, call, plan.output_schema)

    # --- questions ---

    def _wait_for_inputs(self, checked: Round, state: dict[str, Any], inputs: Any, call: Call) -> Ask | Continue:
        """Return the question to a person, or the checkpoint before the agent's model is asked."""
        resume = {**state, **pack_value(call, "inputs", inputs), **carry_samples(call, checked.count_samples)}
        if checked.needs_model:
            resume["sample"] = self._sampling
            if resume["samples"] > MAX_SAMPLES:
                words = f"asked for this agent's model more than {MAX_SAMPLES} times in one call"
                raise ToolError("conflict", f"{self._server} {words}", {"server": self._server})
        return checked.ask(resume, call) if checked.needs_person else Continue(resume)

    # --- requests to the agent's model ---

    async def _sample(
        self, connection: Connection, plan: ToolPlan, call: Call, state: dict[str, Any], *, denied: bool
    ) -> dict[str, Any] | None:
        """Ask the agent's model if the state says so; return the next state. None: there is nothing to ask it.

        Nothing is sent to the server in this run, so that it can be repeated. Raise Away if the server is not
        reachable: nothing was spent then.
        """
        live = self._find_live(state) if "live" in state else None
        if "sample" not in state or ("live" in state and (live is None or not live.is_asking)):
            return None
        checked = live.open[0] if live is not None and live.open is not None else await self._load_round(call, state)
        if denied and checked.needs_person:
            return None
        if live is None:
            await connection.probe()
        try:
            responses = await checked.sample(call)
        except ToolError as problem:
            if live is not None:
                # The server gets the kind only: the message may name limits of the turn, or a hook's reason.
                log.info("mcp server %s: a request to the model was refused: %s", self._server, problem.message)
                refusal = {"error": f"no answer of the model: {problem.kind}"}
                return {**without(state, "sample"), "sampled": {"question": refusal}}
            self._give_up_task(call, state)
            raise
        # The answer to the question is read as it was asked, also if the declaration has changed since.
        return {**without(state, "sample"), "asked": state["sample"], **pack_value(call, "sampled", responses)}

    async def _load_round(self, call: Call, state: dict[str, Any]) -> Round:
        asked: Any = state.get("sample", state.get("asked"))
        inputs = await load_value(call, state, "inputs")
        try:
            return Round(self._server, inputs, self._roots, self._sampling, asked)
        except ToolError:  # the declaration no longer allows what was asked
            self._give_up_task(call, state)
            raise

    async def _ask_first(self, call: Call, state: dict[str, Any]) -> Any:
        """Ask a person about a request to the model that was to be made without asking when it was logged."""
        inputs = await load_value(call, state, "inputs")
        checked = Round(self._server, inputs, self._roots, self._sampling)
        kept = ("task", "request_state", "request_state_artifact")
        return checked.ask(
            {key: value for key, value in state.items() if key in (*kept, "inputs", "inputs_artifact", "samples")}
            | {"sample": "ask"},
            call,
        )

    def _give_up_task(self, call: Call, state: Mapping[str, Any]) -> None:
        """Cancel a task that waits for a response which it will not get."""
        if "task" in state:
            self._start(self._cancel_task(call.principal, state["task"]))

    # --- tasks ---

    async def _poll(self, plan: ToolPlan, call: Call, task: dict[str, Any]) -> Any:
        """Poll a task until it is over, asks, or its time is up. The server may be away in between."""
        away_since: float | None = None
        try:
            while True:
                try:
                    connection = await self._connect(call.principal)
                    raw = await connection.send(_task_request("tasks/get", task["id"]), timeout=POLL_TIMEOUT)
                    away_since = None
                except (Away, Lost, ToolError) as problem:
                    if isinstance(problem, ToolError) and problem.kind not in ("timeout", "network"):
                        raise self._unknown_task(task, problem) from None
                    away_since = away_since or time.monotonic()
                    if time.monotonic() - away_since > MOST_OUTAGE:
                        question = f"{self._server} has been away for a while; its task {task['id']} may still run."
                        kept = {"task": task, **carry_samples(call)}
                        return Ask(f"{question} Keep waiting?", choices=[KEEP_WAITING], resume=kept)
                else:
                    outcome = await self._read_poll(connection, plan, call, task, raw)
                    if outcome is not None:
                        return outcome
                if task["until"] is not None and time.time() > task["until"]:
                    words = f"the task {task['id']} of {self._server} was not finished within its time to live"
                    raise ToolError("timeout", f"{words}; whether it took effect is unknown", {"server": self._server})
                await asyncio.sleep(task["interval"])
        except asyncio.CancelledError:
            # If only this process closes, another one polls on: the task must not be cancelled.
            if call.turn_cancelled:
                self._start(self._cancel_task(call.principal, task))
            raise

    async def _read_poll(
        self, connection: Connection, plan: ToolPlan, call: Call, task: dict[str, Any], raw: Mapping[str, Any]
    ) -> Any:
        """Return the outcome of a poll; None: poll again."""
        match raw.get("status"):
            case "completed":
                result: Any = raw.get("result")
                if not isinstance(result, dict):
                    raise ToolError("invalid_response", f"{self._server} finished task {task['id']} without a result")
                return to_result(self._server, cast("dict[str, Any]", result), call, plan.output_schema)
            case "failed":
                error: Any = raw.get("error")
                words: Any = cast("dict[str, Any]", error).get("message") if isinstance(error, dict) else None
                shown = clean_text(str(words or raw.get("statusMessage") or "no reason given"), 2_000)
                raise ToolError("handler_failed", f"{self._server}: {shown}", {"server": self._server})
            case "cancelled":
                raise ToolError("handler_failed", f"{self._server} cancelled the task {task['id']}")
            case "input_required":
                inputs: Any = raw.get("inputRequests") or {}
                try:
                    checked = Round(self._server, inputs, self._roots, self._sampling)
                    if checked.needs_person or checked.needs_model:
                        return self._wait_for_inputs(checked, {"task": task}, inputs, call)
                except ToolError:
                    self._give_up_task(call, {"task": task})
                    raise
                await self._update_task(connection, task, checked.answer(None))
            case _:
                if isinstance(raw.get("statusMessage"), str):
                    call.progress({"message": clean_text(raw["statusMessage"], 500)})
        return None

    async def _update_task(self, connection: Connection, task: dict[str, Any], responses: dict[str, Any]) -> None:
        """Give a task the responses to its questions, unless it no longer asks them: then it has them already."""
        raw = await connection.send(_task_request("tasks/get", task["id"]), timeout=POLL_TIMEOUT)
        asked: Any = raw.get("inputRequests") or {}
        missing = {key: value for key, value in responses.items() if key in asked}
        if raw.get("status") == "input_required" and missing:
            request = _task_request("tasks/update", task["id"], missing)
            await connection.send(request, timeout=POLL_TIMEOUT)

    def _unknown_task(self, task: dict[str, Any], problem: ToolError) -> ToolError:
        message = f"the task {task['id']} cannot be followed any more ({problem.message}); {UNKNOWN}"
        return ToolError("interrupted", message, {"server": self._server, "task": task["id"]})

    def abandon(self, state: Mapping[str, Any], principal: Principal) -> None:
        """End what a call has begun that will not continue: cancel its task, or its request on an open connection."""
        now: Mapping[str, Any] = state.get("away", state)
        if "task" in now:
            self._start(self._cancel_task(principal, now["task"]))
        live = self._live.pop(now["live"], None) if "live" in now else None
        if live is not None and live.task is not None:
            live.task.cancel()  # the session tells the server

    async def _cancel_task(self, principal: Principal, task: dict[str, Any]) -> None:
        """Cancel a task. A server that is away is tried again for a while."""
        deadline = time.monotonic() + CANCEL_SECONDS
        while True:
            try:
                connection = await self._connect(principal)
                await connection.send(_task_request("tasks/cancel", task["id"]), timeout=POLL_TIMEOUT)
                return
            except (Away, Lost, ToolError) as problem:
                away = not isinstance(problem, ToolError) or problem.kind in ("timeout", "network")
                if not away or time.monotonic() > deadline:
                    log.warning("the cancellation of task %s did not reach %s: %s", task["id"], self._server, problem)
                    return
            await asyncio.sleep(0.5)

    def _start(self, work: Any) -> None:
        started = asyncio.create_task(work, name=f"holdfast:mcp:{self._server}:cancel")
        self._background.add(started)
        started.add_done_callback(self._background.discard)

    # --- live questions ---

    async def answer_live(
        self, connection: Connection, params: Any, key: str | None
    ) -> types.ElicitResult | types.ErrorData:
        """Answer a question that a server asks on an open connection: wait for the person's answer."""
        answer = await self._ask_live(connection, "elicitation/create", params, key)
        return answer if isinstance(answer, types.ErrorData) else types.ElicitResult.model_validate(answer)

    async def sample_live(
        self, connection: Connection, params: Any, key: str | None
    ) -> types.CreateMessageResult | types.ErrorData:
        """Answer a request to the agent's model that a server makes on an open connection."""
        answer = await self._ask_live(connection, "sampling/createMessage", params, key)
        if isinstance(answer, types.ErrorData):
            return answer
        if answer.get("action") == "decline":
            return types.ErrorData(code=REJECTED, message="a person declined the request to the model")
        if "error" in answer:
            return types.ErrorData(code=types.INTERNAL_ERROR, message=answer["error"])
        return types.CreateMessageResult.model_validate(answer)

    async def _ask_live(
        self, connection: Connection, method: str, params: Any, key: str | None
    ) -> dict[str, Any] | types.ErrorData:
        """Ask a person or the model for a server that waits.

        key:  of the call that the question is about; None: unknown, then it is shown under the latest call
        """
        hosts = [live for live in self._live.values() if live.connection is connection and not _is_done(live)]
        hosts = [live for live in hosts if live.key == key] or hosts
        if not hosts:
            return types.ErrorData(code=types.INVALID_REQUEST, message="no call is running that the question is about")
        raw: dict[str, Any] = params.model_dump(by_alias=True, mode="json", exclude_none=True)
        question = {"question": {"method": method, "params": raw}}
        try:
            checked = Round(self._server, question, sampling=self._sampling, note=_describe_hosts(hosts))
        except ToolError as problem:
            return types.ErrorData(code=types.INVALID_PARAMS, message=problem.message)
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            hosts[-1].questions.put_nowait((checked, answered))
        except asyncio.QueueFull:
            return types.ErrorData(code=types.INVALID_REQUEST, message="too many questions at once")
        return await answered

    async def _begin_live(self, connection: Connection, plan: ToolPlan, args: dict[str, Any], call: Call) -> Any:
        """Send a call on a connection with a handshake."""
        if len(self._live) >= MAX_LIVE:
            raise ToolError("busy", f"{self._server}: {MAX_LIVE} calls are open; try again later")
        words = clean_text(f"{plan.name} {msgspec.json.encode(args).decode()}", 120)
        live = LiveCall(f"{next(self._numbers)}:{call.key}", call.key, words, connection)
        request = _call_request(plan, args, call)
        sent = connection.send(request, timeout=None, on_progress=ProgressFilter(call))
        live.task = asyncio.create_task(sent, name=f"holdfast:mcp:{self._server}:call")
        self._live[live.id] = live
        return await self._follow(live, plan, call)

    async def _follow(self, live: LiveCall, plan: ToolPlan, call: Call) -> Any:
        """Wait until the server answers the call, or asks."""
        assert live.task is not None
        question = asyncio.ensure_future(live.questions.get())
        try:
            await asyncio.wait({live.task, question}, timeout=plan.timeout, return_when=asyncio.FIRST_COMPLETED)
            if not live.task.done() and question.done():
                live.open = question.result()
                return self._wait_for_inputs(live.open[0], {"live": live.id}, {}, call)
            if not live.task.done():
                live.task.cancel()
                message = f"{self._server} did not answer within {plan.timeout or 0:g} s; {UNKNOWN}"
                raise ToolError("timeout", message, {"server": self._server})
            self._live.pop(live.id, None)
            return self._finish(plan, await live.task, call)
        except BaseException:
            self._live.pop(live.id, None)
            live.task.cancel()
            raise
        finally:
            question.cancel()

    def _find_live(self, state: Mapping[str, Any]) -> LiveCall | None:
        """Return the live call that waits for an answer; None if its connection is gone."""
        live = self._live.get(state["live"])
        usable = live is not None and live.task is not None and not _is_lost(live) and live.open is not None
        return live if usable else None

    async def _continue_live(
        self, plan: ToolPlan, args: dict[str, Any], call: Call, state: dict[str, Any], answer: Any, *, denied: bool
    ) -> Any:
        """Answer a live question. If its connection is gone, the tool's recovery decides."""
        live = self._find_live(state)
        if live is not None and live.open is not None:
            checked, answered = live.open
            live.open = None
            if not answered.done() and not _is_done(live):
                if denied and checked.needs_model and checked.needs_person:
                    answered.set_result(DECLINED)
                else:
                    sampled = await load_value(call, state, "sampled")
                    answered.set_result(checked.answer(answer, declined=denied, sampled=sampled)["question"])
            return await self._follow(live, plan, call)
        self._live.pop(state["live"], None)
        words = f"the connection on which {self._server} asked is gone, so the answer could not be passed on"
        match plan.recovery:
            case "redispatch":
                return await self._begin(plan, args, call)
            case "fail":
                raise ToolError("interrupted", f"{words}; whether {plan.name} took effect is unknown")
            case _:
                question = f"{words[0].upper()}{words[1:]}. Whether {plan.name} took effect is unknown. Run it again?"
                return Ask(question, choices=[RUN_AGAIN], resume={"again": True, **carry_samples(call)})


class ProgressFilter:
    """Passes a server's progress on as ours, at most ten times a second."""

    def __init__(self, call: Call):
        self._call, self._next = call, 0.0

    async def __call__(self, progress: float, total: float | None, message: str | None) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + PROGRESS_INTERVAL
        report: dict[str, Any] = {"progress": progress}
        if total is not None:
            report["total"] = total
        if message is not None:
            report["message"] = clean_text(message, 500)
        self._call.progress(report)


def _describe_hosts(hosts: Sequence[LiveCall]) -> str:
    """Return a note for a question that may be about several calls. Calls of other conversations are not shown."""
    if len(hosts) < 2:
        return ""
    conversation = hosts[-1].key.rpartition("/")[0]
    mine = [live.words for live in hosts if live.key.rpartition("/")[0] == conversation]
    more = len(hosts) - len(mine)
    others = [f"{more} of other conversations"] if more else []
    return f"The server does not say which of {len(hosts)} running calls this is about: {', '.join([*mine, *others])}."


def _is_done(live: LiveCall) -> bool:
    return live.task is None or live.task.done()


def _is_lost(live: LiveCall) -> bool:
    """Whether the request ended because its connection did."""
    task = live.task
    return task is None or (task.done() and (task.cancelled() or isinstance(task.exception(), Away | Lost)))


def _call_request(
    plan: ToolPlan,
    args: dict[str, Any],
    call: Call,
    responses: dict[str, Any] | None = None,
    request_state: str | None = None,
) -> Any:
    params = {"name": plan.name, "arguments": args} if plan.method == "tools/call" else dict(args)
    params["_meta"] = {CALL_KEY: call.key}
    if responses is not None:
        params["inputResponses"] = responses
    if request_state is not None:
        params["requestState"] = request_state
    return read_request(plan.method, params)


def _task_request(method: Any, task: str, responses: dict[str, Any] | None = None) -> TaskRequest:
    return TaskRequest(method=method, params=TaskParams(task_id=task, input_responses=responses))


def _check_request_state(server: str, given: Any) -> str | None:
    if given is None:
        return None
    if not isinstance(given, str) or len(given) > MAX_STATE:
        raise ToolError("too_large", f"{server} sent a request state that is no text of at most {MAX_STATE} characters")
    return given


def _round_state(request_state: str | None, call: Call) -> dict[str, Any]:
    if request_state is not None and len(request_state) > INLINE_STATE:
        kept = call.keep(request_state, "text/plain", "request-state.txt")
        return {"request_state_artifact": kept.sha256}
    return {"request_state": request_state}


def _read_task(server: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a task that are logged: its id, when its time is up, and how often it is polled."""
    task = raw.get("taskId")
    if not isinstance(task, str) or not 0 < len(task) <= 1_000:
        raise ToolError("invalid_response", f"{server} started a task without an id; whether it took effect is unknown")
    ttl, interval = raw.get("ttlMs"), raw.get("pollIntervalMs")
    seconds = interval / 1000 if isinstance(interval, int | float) and not isinstance(interval, bool) else 1.0
    known = isinstance(ttl, int | float) and not isinstance(ttl, bool) and ttl > 0
    return {
        "id": task,
        "until": time.time() + cast("float", ttl) / 1000 if known else None,
        "interval": min(max(seconds, LEAST_POLL), MOST_POLL),
    }
