"""An agent as an MCP server: what clients see, and how calls that wait reach people."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import mcp_types as types
import pytest
from mcp import Client
from mcp_wire import FORMS, KEY, LINKS, TASKS, Desk, accept, serve_desk

from holdfast import (
    Agent,
    Approve,
    Ask,
    Call,
    Deny,
    Principal,
    Runtime,
    ScriptedModel,
    ToolCall,
    ToolError,
    tool,
)
from holdfast.bridges.mcp.server import PRINCIPAL, AgentServer, direct_agent
from holdfast.errors import DeclarationError
from holdfast.events import CallResolved, CallStarted, CallSuspended, MessageReceived, ResolutionRefused, TurnEnded
from holdfast.server import middleware
from holdfast.server.auth import OpenedBy

ORDER = {"order": 7}


@tool(metadata={"read_only": True})
async def look_up(order: int) -> str:
    """Look an order up."""
    return f"order {order}"


@tool(recovery="redispatch")
async def note(text: str) -> dict[str, str]:
    """Write a note."""
    return {"noted": text}


@tool(approval="required", risk="high", expires="1h", prompt="Refund order {order}?")
async def refund(order: int) -> dict[str, int]:
    """Pay money back."""
    return {"paid": order}


@tool(approval="required", not_requester=True, prompt="Delete order {order}?")
async def delete(order: int) -> str:
    """Delete an order."""
    return "deleted"


@tool(executor="human", prompt="Which colour?")
def colour() -> str:  # type: ignore[empty-body]
    """Ask a person for a colour."""


@tool(executor="client")
def locate() -> str:  # type: ignore[empty-body]
    """Runs in a page only."""


@tool
async def book(call: Call) -> Any:
    """Ask twice, then book."""
    match len(call.answers):
        case 0:
            seats = {"title": "seats", "type": "object", "properties": {"count": {"type": "integer", "minimum": 1}}}
            return Ask("How many seats?", answer={**seats, "required": ["count"]}, resume=True)
        case 1:
            return Ask("Which class?", choices=["first", "second"], resume=True)
        case _:
            return f"{call.answers[0]['count']} in {call.answers[1]}"


@tool
async def fail() -> str:
    """Fail."""
    raise ToolError("not_found", "there is no such order")


TOOLS = [look_up, note, refund, delete, colour, locate, book, fail]


def make_agent(*script: Any) -> Agent[Any]:
    return Agent("desk", model=ScriptedModel(list(script), follow=True), tools=TOOLS)


def with_desk(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Serve the agent for one test. (The suite wants a runtime to end within its test, so it is no fixture.)"""

    @functools.wraps(test)
    async def run(**given: Any) -> None:
        script = [ToolCall("refund", {"order": 1}), ToolCall("refund", {"order": 2})]
        async with serve_desk(make_agent(script, "done")) as desk:
            await test(desk, **given)

    declared = inspect.signature(test)
    others = [each for name, each in declared.parameters.items() if name != "desk"]
    run.__signature__ = declared.replace(parameters=others)  # type: ignore[attr-defined]
    return run


async def log_of(desk: Desk) -> list[Any]:
    """Return the events of the only conversation."""
    (conversation,) = await desk.runtime.conversations()
    return await desk.runtime.history(conversation.conversation)


# --- what is offered ---


@with_desk
async def test_tools_are_described_with_annotations_from_their_declarations(desk: Desk) -> None:
    listed = (await desk.client().send("tools/list"))["result"]["tools"]
    found = {each["name"]: each for each in listed}
    assert list(found) == [
        *("look_up", "note", "refund", "delete", "colour", "book", "fail"),
        *("ask_desk", "pending", "decide", "result"),
    ]
    assert found["look_up"]["annotations"]["readOnlyHint"] is True
    assert found["colour"]["annotations"]["readOnlyHint"] is True
    assert found["note"]["annotations"] == {"readOnlyHint": False, "destructiveHint": False, "idempotentHint": True}
    assert found["refund"]["annotations"] == {"readOnlyHint": False, "destructiveHint": True, "idempotentHint": False}
    assert found["refund"]["inputSchema"]["properties"] == {"order": {"type": "integer"}}


@with_desk
async def test_a_call_is_a_conversation_with_a_log_of_its_own(desk: Desk) -> None:
    assert (await desk.client().call("note", {"text": "hi"}))["structuredContent"] == {"noted": "hi"}
    events = await log_of(desk)
    assert [event.text for event in events if isinstance(event, MessageReceived)] == ['note {"text":"hi"}']
    assert events[0].by == "ann"
    assert events[0].agent == "desk.mcp"


@with_desk
async def test_errors_of_tools_and_wrong_arguments_are_results_that_the_model_reads(desk: Desk) -> None:
    ann = desk.client()
    failed = await ann.call("fail")
    assert failed["isError"]
    assert failed["content"][0]["text"] == "not_found: there is no such order"
    assert "invalid_args" in (await ann.call("note", {"text": 1}))["content"][0]["text"]
    assert (await ann.send("tools/call", name="locate", arguments={}))["error"]["code"] == types.INVALID_PARAMS


def test_an_agent_whose_tools_have_the_names_of_the_servers_tools_is_refused() -> None:
    @tool
    async def decide() -> str:
        """Clash."""
        return ""

    agent = Agent("desk", model=None, tools=[decide])
    runtime = Runtime(agent, direct_agent(agent))
    with pytest.raises(DeclarationError, match="decide"):
        AgentServer(runtime, agent, keys=KEY)
    AgentServer(runtime, agent, keys=KEY, inbox=False)
    with pytest.raises(DeclarationError, match="direct_agent"):
        AgentServer(Runtime(agent), agent, keys=KEY)


def test_the_principal_is_where_the_http_server_puts_it() -> None:
    assert PRINCIPAL == middleware.PRINCIPAL


# --- input rounds ---


@with_desk
async def test_a_gated_call_asks_the_clients_user_and_runs_when_approved(desk: Desk) -> None:
    ann = desk.client()
    asked = await ann.call("refund", ORDER)
    assert asked["resultType"] == "input_required"
    form = asked["inputRequests"]["approval"]["params"]
    assert form["message"].startswith("Refund order 7?")
    assert form["requestedSchema"]["required"] == ["approve"]
    assert not [event for event in await log_of(desk) if isinstance(event, CallStarted)]
    done = await ann.continue_call("refund", ORDER, asked, approval=accept(approve=True))
    assert done["structuredContent"] == {"paid": 7}
    (resolved,) = [event for event in await log_of(desk) if isinstance(event, CallResolved)]
    assert resolved.by == "ann"


@pytest.mark.parametrize(
    "answer", [accept(approve=False, reason="too much"), {"action": "decline"}], ids=["no", "decline"]
)
@with_desk
async def test_a_user_who_does_not_approve_denies_the_call(desk: Desk, answer: dict[str, Any]) -> None:
    ann = desk.client()
    asked = await ann.call("refund", ORDER)
    denied = await ann.continue_call("refund", ORDER, asked, approval=answer)
    assert denied["isError"]
    assert denied["structuredContent"]["error"]["kind"] == "denied"


@with_desk
async def test_a_form_that_is_closed_leaves_the_call_waiting(desk: Desk) -> None:
    ann = desk.client()
    asked = await ann.call("refund", ORDER)
    closed = await ann.continue_call("refund", ORDER, asked, approval={"action": "cancel"})
    assert closed["isError"]
    (waiting,) = closed["structuredContent"]["waiting"]
    assert [entry.conversation + "/" + entry.id for entry in await desk.runtime.pending()] == [waiting["call"]]


@with_desk
async def test_questions_are_forms_with_their_schema_and_a_wrong_answer_is_asked_again(desk: Desk) -> None:
    ann = desk.client()
    first = await ann.call("book")
    schema = first["inputRequests"]["seats"]["params"]["requestedSchema"]
    assert schema["properties"] == {"count": {"type": "integer", "minimum": 1}}
    again = await ann.continue_call("book", {}, first, seats=accept(count=0))
    assert "not accepted" in again["inputRequests"]["seats"]["params"]["message"]
    second = await ann.continue_call("book", {}, again, seats=accept(count=2))
    assert second["inputRequests"]["answer"]["params"]["requestedSchema"]["properties"]["answer"]["enum"] == [
        "first",
        "second",
    ]
    done = await ann.continue_call("book", {}, second, answer=accept(answer="second"))
    assert done["content"][0]["text"] == "2 in second"


@with_desk
async def test_a_message_to_the_agent_asks_about_all_of_its_calls_in_one_round(desk: Desk) -> None:
    ann = desk.client()
    asked = await ann.call("ask_desk", {"message": "refund both"})
    keys = list(asked["inputRequests"])
    assert keys == [entry.id for entry in await desk.runtime.pending()]
    answers = {keys[0]: accept(approve=True), keys[1]: accept(approve=False)}
    done = await ann.continue_call("ask_desk", {"message": "refund both"}, asked, **answers)
    assert done["content"][0]["text"] == "done"
    conversation = done["structuredContent"]["conversation"]
    outcomes = [type(e.decision) for e in await desk.runtime.history(conversation) if isinstance(e, CallResolved)]
    assert outcomes == [Approve, Deny]


async def test_a_round_is_continued_by_another_process_with_the_same_key(tmp_path: Any) -> None:
    """The first process is gone; the second knows only the store and the key."""
    store = f"sqlite:///{tmp_path}/desk.db"
    async with serve_desk(make_agent(), store=store) as first:
        asked = await first.client().call("refund", ORDER)
    async with serve_desk(make_agent(), store=store) as second:
        done = await second.client().continue_call("refund", ORDER, asked, approval=accept(approve=True))
        assert done["structuredContent"] == {"paid": 7}
        assert len(await second.runtime.conversations()) == 1


@with_desk
async def test_a_call_that_the_client_repeats_under_its_key_is_the_same_call(desk: Desk) -> None:
    """A client that lost the response repeats the request with the same callKey, and no second call is made."""
    ann, named = desk.client(), {"meta": {"holdfast/callKey": "c1/x1"}}
    asked = await ann.call("refund", ORDER, **named)
    again = await ann.call("refund", ORDER, **named)
    assert len(await desk.runtime.pending()) == 1
    await ann.continue_call("refund", ORDER, asked, approval=accept(approve=True))
    assert (await ann.call("refund", ORDER, **named))["structuredContent"] == {"paid": 7}
    assert again["resultType"] == "input_required"
    for client, args in ((desk.client("bob"), ORDER), (ann, {"order": 8})):
        assert (await client.call("refund", args, **named))["resultType"] == "input_required"
    assert len(await desk.runtime.conversations()) == 3


async def test_an_answer_after_the_deadline_runs_nothing() -> None:
    """The state holds as long as the call waits."""

    @tool(approval="required", expires="100ms")
    async def pay() -> str:
        """Pay."""
        return "paid"

    agent = Agent("desk", model=ScriptedModel([]), tools=[pay])
    async with serve_desk(agent) as desk:
        asked = await desk.client().call("pay")
        (conversation,) = await desk.runtime.conversations()
        async for event in desk.runtime.events(conversation.conversation):
            if isinstance(event, TurnEnded):
                break
        late = await desk.client().continue_call("pay", {}, asked, approval=accept(approve=True))
        assert late["structuredContent"]["error"]["kind"] == "timeout"
        assert not [event for event in await log_of(desk) if isinstance(event, CallStarted)]


# --- nothing that a client sends is trusted ---


@with_desk
async def test_an_approval_without_the_sealed_state_decides_nothing(desk: Desk) -> None:
    """A forged approval changes nothing [B141]."""
    forged = await desk.client().call("refund", ORDER, inputResponses={"approval": accept(approve=True)})
    assert forged["resultType"] == "input_required"
    assert not [event for event in await log_of(desk) if isinstance(event, CallResolved | CallStarted)]


@pytest.mark.parametrize(
    "change",
    [
        lambda state: f"{state}x",
        lambda state: state[:-3],
        lambda state: "v1." + "A" * 200,
        lambda state: '["tool","other",1,{}]',
    ],
    ids=["longer", "cut", "made up", "plain"],
)
@with_desk
async def test_a_changed_request_state_is_refused(desk: Desk, change: Any) -> None:
    """A tampered requestState changes nothing [B141]."""
    ann = desk.client()
    asked = await ann.call("refund", ORDER)
    answer = await ann.send(
        "tools/call",
        name="refund",
        arguments=ORDER,
        inputResponses={"approval": accept(approve=True)},
        requestState=change(asked["requestState"]),
    )
    assert answer["error"]["code"] == types.INVALID_PARAMS
    assert not [event for event in await log_of(desk) if isinstance(event, CallResolved)]


@with_desk
async def test_a_request_state_holds_for_its_tool_its_arguments_and_its_principal_only(desk: Desk) -> None:
    """A requestState that is sent with another call or by another principal changes nothing [B141]."""
    asked = await desk.client().call("refund", ORDER)
    more = {"inputResponses": {"approval": accept(approve=True)}, "requestState": asked["requestState"]}
    for token, name, args in (("bob", "refund", ORDER), ("ann", "refund", {"order": 8}), ("ann", "delete", ORDER)):
        answer = await desk.client(token).send("tools/call", name=name, arguments=args, **more)
        assert answer["error"]["code"] == types.INVALID_PARAMS, (token, name, args)
    assert not [event for event in await log_of(desk) if isinstance(event, CallResolved)]


@with_desk
async def test_a_round_that_is_answered_twice_counts_once(desk: Desk) -> None:
    """A replayed requestState changes nothing: the second answer gets the outcome of the first [B141]."""
    ann = desk.client()
    asked = await ann.call("refund", ORDER)
    first = await ann.continue_call("refund", ORDER, asked, approval=accept(approve=True))
    second = await ann.continue_call("refund", ORDER, asked, approval=accept(approve=False))
    assert second["structuredContent"] == first["structuredContent"] == {"paid": 7}
    events = await log_of(desk)
    assert len([event for event in events if isinstance(event, CallResolved)]) == 1
    assert len([event for event in events if isinstance(event, CallStarted)]) == 1


@with_desk
async def test_a_decision_elsewhere_wins_over_a_later_answer(desk: Desk) -> None:
    ann = desk.client()
    asked = await ann.call("refund", ORDER)
    (entry,) = await desk.runtime.pending()
    await desk.runtime.resolve(entry, Deny("no"), by="boss")
    late = await ann.continue_call("refund", ORDER, asked, approval=accept(approve=True))
    assert late["structuredContent"]["error"]["kind"] == "denied"


async def test_may_resolve_judges_the_clients_principal_and_refusals_are_logged() -> None:
    async def only_boss(by: Principal, pending: Any, decision: Any) -> bool:
        return by.id == "boss"

    async with serve_desk(make_agent(), may_resolve=only_boss) as desk:
        ann = desk.client()
        asked = await ann.call("refund", ORDER)
        refused = await ann.continue_call("refund", ORDER, asked, approval=accept(approve=True))
        assert refused["isError"]
        events = await log_of(desk)
        assert [event.by.id for event in events if isinstance(event, ResolutionRefused)] == ["ann"]
        assert len(await desk.runtime.pending()) == 1


@with_desk
async def test_a_requester_who_may_not_decide_is_not_asked(desk: Desk) -> None:
    refused = await desk.client().call("delete", ORDER)
    assert "another person has to decide" in refused["content"][0]["text"]
    assert "link" not in refused["structuredContent"]["waiting"][0]


# --- tasks ---


@with_desk
async def test_a_gated_call_of_a_client_with_tasks_is_a_task(desk: Desk) -> None:
    ann = desk.client(capabilities=TASKS)
    task = await ann.call("refund", ORDER)
    (entry,) = await desk.runtime.pending()
    assert task["resultType"] == "task"
    assert task["taskId"] == f"{entry.conversation}/{entry.call}"
    assert abs(task["ttlMs"] - 3_600_000) < 60_000
    got = (await ann.send("tasks/get", taskId=task["taskId"]))["result"]
    assert got["status"] == "input_required"
    assert list(got["inputRequests"]) == [entry.id]
    await ann.send("tasks/update", taskId=task["taskId"], inputResponses={entry.id: accept(approve=True)})
    await desk.runtime.wait(entry.conversation)
    over = (await ann.send("tasks/get", taskId=task["taskId"]))["result"]
    assert over["status"] == "completed"
    assert over["result"]["structuredContent"] == {"paid": 7}


@with_desk
async def test_a_task_can_be_cancelled(desk: Desk) -> None:
    ann = desk.client(capabilities=TASKS)
    task = (await ann.call("refund", ORDER))["taskId"]
    await ann.send("tasks/cancel", taskId=task)
    assert (await ann.send("tasks/get", taskId=task))["result"]["status"] == "cancelled"
    assert not await desk.runtime.pending()


@with_desk
async def test_an_answer_to_another_suspension_of_a_task_is_ignored(desk: Desk) -> None:
    """A forged or old answer changes nothing [B141]."""
    ann = desk.client(capabilities=TASKS)
    task = (await ann.call("refund", ORDER))["taskId"]
    (entry,) = await desk.runtime.pending()
    wrong = {f"{entry.call}:{entry.seq - 1}": accept(approve=True), "approval": accept(approve=True)}
    await ann.send("tasks/update", taskId=task, inputResponses=wrong)
    assert await desk.runtime.pending() == [entry]


@with_desk
async def test_a_message_to_the_agent_is_a_task_too(desk: Desk) -> None:
    ann = desk.client(capabilities=TASKS)
    task = (await ann.call("ask_desk", {"message": "refund both"}))["taskId"]
    entries = await desk.runtime.pending()
    answers = {entry.id: accept(approve=True) for entry in entries}
    await ann.send("tasks/update", taskId=task, inputResponses=answers)
    await desk.runtime.wait(entries[0].conversation)
    over = (await ann.send("tasks/get", taskId=task))["result"]
    assert over["result"]["content"][0]["text"] == "done"


@with_desk
async def test_methods_of_tasks_need_the_extension(desk: Desk) -> None:
    answer = await desk.client(capabilities=FORMS).send("tasks/get", taskId="x/y")
    assert answer["error"]["code"] == types.MISSING_REQUIRED_CLIENT_CAPABILITY


# --- clients that cannot ask ---


@with_desk
async def test_a_client_without_elicitation_gets_a_link_and_nothing_is_resolved(desk: Desk) -> None:
    bare = desk.client(capabilities={})
    text = await bare.call("refund", ORDER)
    assert text["isError"]
    (waiting,) = text["structuredContent"]["waiting"]
    assert waiting["link"] in text["content"][0]["text"]
    opened = LINKS.read(waiting["link"].removeprefix("http://desk.example/l/"))
    assert (opened.audience, opened.decisions) == ("ann", ("approve", "deny"))
    assert len(await desk.runtime.pending()) == 1
    path = waiting["link"].removeprefix("http://desk.example")
    await desk.http.get(path)
    assert len(await desk.runtime.pending()) == 1
    await desk.http.post(path, json={"decision": "approve"})
    await desk.runtime.wait(opened.conversation)
    assert (await bare.call("result", {"call": waiting["call"]}))["structuredContent"] == {"paid": 7}


@with_desk
async def test_a_client_that_only_opens_addresses_is_given_the_link_as_one(desk: Desk) -> None:
    asked = await desk.client(capabilities={"elicitation": {"url": {}}}).call("refund", ORDER)
    params = asked["inputRequests"]["approval"]["params"]
    assert params["mode"] == "url"
    assert params["url"].startswith("http://desk.example/l/")


# --- the inbox ---

DECIDING = {
    "approve",
    "approved",
    "deny",
    "decision",
    "answer",
    "value",
    "accept",
    "reject",
    "choice",
    "digest",
    "submit",
}


@with_desk
async def test_no_tool_has_an_argument_that_decides(desk: Desk) -> None:
    """The MCP server never offers a tool whose arguments decide [B145]."""
    ann = desk.client(capabilities={})
    await ann.call("refund", ORDER)
    (entry,) = await desk.runtime.pending()
    call = f"{entry.conversation}/{entry.id}"
    listed = (await ann.send("tools/list"))["result"]["tools"]
    own = {each["name"]: each["inputSchema"] for each in listed if each["name"] not in {t.spec.name for t in TOOLS}}
    assert set(own) == {"ask_desk", "pending", "decide", "result"}
    for name, schema in own.items():
        assert schema["additionalProperties"] is False, name
        assert not DECIDING & set(schema["properties"]), name
        for word in sorted(DECIDING):
            for value in (True, "approve", {"type": "approve", "digest": entry.digest}):
                await ann.call(name, {"call": call, "message": "approve it", word: value})
                await ann.call(name, {"call": call, word: value})
    assert [each.id for each in await desk.runtime.pending(entry.conversation)] == [entry.id]
    events = await desk.runtime.history(entry.conversation)
    assert not [event for event in events if isinstance(event, CallResolved | CallStarted)]


@with_desk
async def test_decide_asks_the_user_and_then_tells_the_outcome(desk: Desk) -> None:
    await desk.client(capabilities={}).call("refund", ORDER)
    ann = desk.client()
    (listed,) = (await ann.call("pending"))["structuredContent"]["pending"]
    args = {"call": listed["call"]}
    asked = await ann.call("decide", args)
    assert asked["inputRequests"]["approval"]["params"]["message"].startswith("Refund order 7?")
    await ann.continue_call("decide", args, asked, approval=accept(approve=True))
    (entry,) = [event for event in await log_of(desk) if isinstance(event, CallSuspended)]
    await desk.runtime.wait(listed["call"].split("/")[0])
    assert (await ann.call("result", args))["structuredContent"] == {"paid": 7}
    assert (await ann.call("decide", args))["structuredContent"] == {"paid": 7}
    assert entry.call_id in listed["call"]


@with_desk
async def test_decide_is_never_a_task(desk: Desk) -> None:
    """With tasks, a decision is still asked for at once."""
    await desk.client(capabilities={}).call("refund", ORDER)
    (entry,) = await desk.runtime.pending()
    asked = await desk.client(capabilities=TASKS).call("decide", {"call": f"{entry.conversation}/{entry.call}"})
    assert asked["resultType"] == "input_required"


# --- who sees what ---


async def test_what_a_principal_may_not_see_does_not_exist_for_it() -> None:
    """A client without rights gets the same answers as for ids that do not exist [B155]."""
    agent = make_agent([ToolCall("refund", {"order": 1})], "done")
    seen: list[OpenedBy] = []

    async def may_see(by: Principal, conversation: str) -> bool:
        return await seen[0](by, conversation)

    async with serve_desk(agent, may_see=may_see) as desk:
        seen.append(OpenedBy(desk.runtime))
        ann, bob = desk.client("ann", TASKS), desk.client("bob", TASKS)
        task = (await ann.call("refund", ORDER))["taskId"]
        (entry,) = await desk.runtime.pending()
        assert (await bob.call("pending"))["structuredContent"]["pending"] == []
        assert len((await ann.call("pending"))["structuredContent"]["pending"]) == 1
        for method in ("tasks/get", "tasks/cancel"):
            hidden = await bob.send(method, taskId=task)
            assert hidden["error"]["message"] == f"no task {task!r}"
            assert (await bob.send(method, taskId="no/such"))["error"]["message"] == "no task 'no/such'"
        await bob.send("tasks/update", taskId=task, inputResponses={entry.id: accept(approve=True)})
        for name in ("decide", "result"):
            hidden = await bob.call(name, {"call": task})
            assert hidden["structuredContent"]["error"]["kind"] == "not_found"
        talk = (await ann.call("ask_desk", {"message": "hello"}))["taskId"].split("/")[0]
        hidden = await bob.call("ask_desk", {"message": "hello", "conversation": talk})
        assert hidden["structuredContent"]["error"]["kind"] == "not_found"
        assert entry in await desk.runtime.pending()


@pytest.mark.parametrize("token", ["", "guest"])
@with_desk
async def test_nothing_is_served_without_a_principal(desk: Desk, token: str) -> None:
    """Requests without a valid token get 401, also on loopback [B155]."""
    for method in ("GET", "POST", "DELETE"):
        response = await desk.http.request(
            method, "/mcp", headers={"authorization": f"Bearer {token}"} if token else {}
        )
        assert response.status_code == 401


@with_desk
async def test_a_session_of_another_principal_does_not_exist(desk: Desk) -> None:
    """Sessions of the older revisions belong to the principal that opened them [B155]."""
    hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
    body = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
    headers = {"accept": "application/json, text/event-stream", "authorization": "Bearer ann"}
    opened = await desk.http.post("/mcp", json=body, headers=headers)
    session = {"mcp-session-id": opened.headers["mcp-session-id"]}
    ping = {"jsonrpc": "2.0", "id": 2, "method": "ping"}
    assert (await desk.http.post("/mcp", json=ping, headers=headers | session)).status_code == 200
    other = headers | session | {"authorization": "Bearer bob"}
    assert (await desk.http.post("/mcp", json=ping, headers=other)).status_code == 404


# --- revisions with a handshake, over the official client ---


async def test_older_revisions_are_asked_on_their_connection() -> None:
    agent = make_agent()
    async with Runtime(agent, direct_agent(agent)) as runtime:
        server = AgentServer(runtime, agent, keys=KEY, by="ann")
        shown: list[str] = []

        async def answer(context: Any, params: Any) -> types.ElicitResult:
            shown.append(params.message)
            return types.ElicitResult(action="accept", content={"approve": True})

        async with Client(server.server, mode="legacy", elicitation_callback=answer) as client:
            assert (await client.call_tool("refund", ORDER)).structured_content == {"paid": 7}
        assert [text.splitlines()[0] for text in shown] == ["Refund order 7?"]


async def test_a_client_that_refuses_the_question_is_told_that_the_call_waits() -> None:
    agent = make_agent()
    async with Runtime(agent, direct_agent(agent)) as runtime:
        server = AgentServer(runtime, agent, keys=KEY, by="ann")

        async def refuse(context: Any, params: Any) -> types.ErrorData:
            return types.ErrorData(code=-32600, message="no")

        async with Client(server.server, mode="legacy", elicitation_callback=refuse) as client:
            waits = await client.call_tool("refund", ORDER)
        assert waits.is_error
        assert len(await runtime.pending()) == 1


async def test_an_open_question_ends_when_the_call_is_decided_elsewhere() -> None:
    agent = make_agent()
    async with Runtime(agent, direct_agent(agent)) as runtime:
        server = AgentServer(runtime, agent, keys=KEY, by="ann")

        async def decide_elsewhere(context: Any, params: Any) -> types.ElicitResult:
            (entry,) = await runtime.pending()
            await runtime.resolve(entry, Deny("no"), by="boss")
            return types.ElicitResult(action="accept", content={"approve": True})

        async with Client(server.server, mode="legacy", elicitation_callback=decide_elsewhere) as client:
            denied = await client.call_tool("refund", ORDER)
        assert denied.is_error
        assert denied.structured_content["error"]["kind"] == "denied"
