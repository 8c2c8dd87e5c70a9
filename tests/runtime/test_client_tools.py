"""Calls that a client (a page) runs: validated, leased, gated, and detached without a live client."""

import asyncio

import pytest
from support.async_tests import until
from support.runtimes import Clock, Counting, Tape, agent, looked, of, paired, sees

from holdfast import (
    Answer,
    Approve,
    ClientResult,
    Deny,
    Failed,
    Invalid,
    Runtime,
    ScriptedModel,
    Stale,
    Submit,
    ToolCall,
)
from holdfast import tool as declare
from holdfast.core.events import CallResolved, CallReturned, CallStarted, CallSuspended
from holdfast.models.scripted import Hang
from holdfast.stores.memory import MemoryStore


@declare(executor="client")
def locate(precise: bool = False) -> dict[str, float]:
    """Where is the user?"""
    raise NotImplementedError


@declare(executor="client", approval="required", expires="10m")
def share(what: str) -> str:
    """Share something from the page."""
    raise NotImplementedError


@declare(executor="human")
def choose() -> str:
    """Let the person choose."""
    raise NotImplementedError


LOCATE = ToolCall("locate", {"precise": True})
SHARE = ToolCall("share", {"what": "screen"})


async def test_a_client_call_is_offered_to_a_live_client_and_its_validated_output_is_the_result():
    """The client leases the call and sends its output [B41]."""
    model = ScriptedModel([[LOCATE], "done"])
    async with Runtime(agent(model, locate)) as rt:
        await rt.open("c")
        async with await rt.attach_client("c", by="ann") as page:
            turn = await rt.send("c", "hi")
            (entry,) = (await turn.result()).pending
            assert (entry.kind, entry.executor, entry.args) == ("client_exec", "client", {"precise": True})
            assert entry.schema == {"type": "object", "additionalProperties": {"type": "number"}}
            assert await page.lease(entry.call)
            await page.result(entry.call, {"lat": 1.5})
            await turn.final_result()
        assert sees(model) == [{"ok": True, "result": {"lat": 1.5}}]
        returned = of(await rt.history("c"), CallReturned)[0]
        assert (returned.source, returned.by) == ("client", "ann")
        assert of(await rt.history("c"), CallStarted) == []


async def test_an_error_from_a_client_is_the_error_of_the_call():
    """The model sees the kind and the message that the client reports [B41]."""
    model = ScriptedModel([[LOCATE], "done"])
    async with Runtime(agent(model, locate)) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        async with await rt.attach_client("c") as page:
            await page.failed(entry.call, "permission_denied", "the user said no")
            await turn.final_result()
        assert sees(model)[0]["error"] == {"kind": "permission_denied", "message": "the user said no", "details": {}}
        assert of(await rt.history("c"), CallReturned)[0].source == "client"


async def test_a_client_result_that_violates_its_schema_is_refused_and_the_call_stays_pending():
    """A decision of another type is refused, too; a valid result is still accepted [B34, B45]."""
    async with Runtime(agent([[LOCATE], "done"], locate)) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        async with await rt.attach_client("c") as page:
            for value in ("here", {"lat": "far"}, [1], None, {"lat": float("nan")}, object()):
                with pytest.raises(Invalid):
                    await page.result(entry.call, value)
            for decision in (Answer({"lat": 1.0}), Submit({"lat": 1.0}), Approve(), Deny("no")):
                with pytest.raises(Invalid, match="ClientResult or Failed"):
                    await rt.resolve("c", entry.call, decision)
            assert await rt.pending() == [entry]
            assert of(await rt.history("c"), CallResolved) == []
            await page.result(entry.call, {"lat": 1})
            await turn.final_result()


async def test_an_approved_client_call_is_suspended_again_in_the_same_append_with_a_fresh_deadline():
    """The approval and the client execution are two suspensions under one call id [B42]."""
    clock, store = Clock(1000.0), Counting()
    model = ScriptedModel([[SHARE], "done"])
    async with Runtime(agent(model, share), store=store, clock=clock) as rt:
        await rt.open("c")
        async with await rt.attach_client("c") as page:
            turn = await rt.send("c", "hi")
            (approval,) = (await turn.result()).pending
            assert (approval.kind, approval.deadline) == ("approval", 1600.0)
            assert not await page.lease(approval.call), "a client cannot lease it before its approval"
            with pytest.raises(Invalid):
                await page.result(approval.call, "forged")
            clock.now += 300
            await page.beat()
            await rt.resolve("c", approval.call, Approve(), by="boss")
            (execution,) = await rt.pending()
            assert execution.call == approval.call
            assert (execution.kind, execution.deadline, execution.schema) == ("client_exec", 1900.0, {"type": "string"})
            assert ["CallResolved", "CallSuspended"] in store.types()
            with pytest.raises(Stale) as twice:
                await rt.resolve("c", approval.call, Approve(), by="bob")
            assert (twice.value.reason, twice.value.winner) == ("resolved", "boss")
            with pytest.raises(Stale):
                await rt.resolve("c", approval.call, Deny("too late"), by="bob")
            assert await page.lease(execution.call)
            await page.result(execution.call, "shared")
            await turn.final_result()
        assert sees(model) == [{"ok": True, "result": "shared"}]
        paired(await rt.history("c"))


async def test_a_client_call_that_a_guest_approved_waits_for_a_client_after_a_restart():
    """A restart between the two suspensions continues in the second [B42]."""
    store = MemoryStore()
    async with Runtime(agent([[SHARE], "done"], share), store=store) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
    async with Runtime(store=store.sibling()) as guest:  # a process without the agent
        await guest.resolve("c", entry.call, Approve(), by="boss")
    model = ScriptedModel([[SHARE], "done"], follow=True)
    async with Runtime(agent(model, share), store=store.sibling()) as rt:
        (waiting,) = await rt.pending()
        assert (waiting.call, waiting.kind) == (entry.call, "client_exec")
        await rt.resolve("c", entry.call, ClientResult("shared"))
        await until(lambda: model.requests)
        assert sees(model) == [{"ok": True, "result": "shared"}]


async def test_the_client_gets_the_arguments_that_the_approver_edited_and_the_model_sees_them():
    """An approval with edited arguments changes the client execution [B36, B42]."""
    model = ScriptedModel([[SHARE], "done"])
    async with Runtime(agent(model, share)) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        await rt.resolve("c", entry.call, Approve(args={"what": "window"}))
        (execution,) = await rt.pending()
        assert execution.args == {"what": "window"}
        await rt.resolve("c", entry.call, ClientResult("shared"))
        await turn.final_result()
        assert sees(model)[0]["edited_args"] == {"what": "window"}


async def test_a_denied_client_call_never_reaches_a_client():
    """A denied call has no client execution [B35, B42]."""
    model = ScriptedModel([[SHARE], "done"])
    async with Runtime(agent(model, share)) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        await rt.resolve("c", entry.call, Deny("no"))
        await turn.final_result()
        assert [event.kind for event in of(await rt.history("c"), CallSuspended)] == ["approval"]


async def test_without_a_live_client_a_call_fails_as_detached_after_the_grace_and_the_turn_continues():
    """A later result is stale [B43]."""
    clock = Clock(1000.0)
    model = ScriptedModel([[LOCATE], "done"])
    async with Runtime(agent(model, locate), clock=clock) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        clock.now += 4.9
        await looked(rt.store)
        assert await rt.pending() == [entry]
        clock.now += 0.1
        assert (await turn.final_result()).reason == "completed"
        assert sees(model)[0]["error"]["kind"] == "detached"
        with pytest.raises(Stale) as late:
            await rt.resolve("c", entry.call, ClientResult({"lat": 1.0}))
        assert late.value.reason == "expired"
        resolved = of(await rt.history("c"), CallResolved)[0]
        assert resolved.by == "system"


async def test_the_grace_starts_when_the_last_able_client_detaches_or_stops_its_heartbeat():
    """A client that does not offer the tool does not count [B43]."""
    clock = Clock(1000.0)
    model = ScriptedModel([[LOCATE], "done", [LOCATE], "done"])
    async with Runtime(agent(model, locate), clock=clock) as rt:
        await rt.open("c")
        await rt.attach_client("c", ["other_tool"])  # attached, but not for this tool
        page = await rt.attach_client("c", ["locate"])
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        clock.now += 60
        await looked(rt.store)
        assert await rt.pending() == [entry], "a client is attached"
        await page.detach()
        clock.now += 4.9
        await looked(rt.store)
        assert await rt.pending() == [entry]
        clock.now += 0.2
        await turn.final_result()
        assert sees(model)[-1]["error"]["kind"] == "detached"

        await rt.attach_client("c", ["locate"], keep=False)  # a client that stops without detaching
        turn = await rt.send("c", "again")
        (entry,) = (await turn.result()).pending
        clock.now += 79
        await looked(rt.store)
        assert await rt.pending() == [entry]
        clock.now += 2
        await turn.final_result()
        assert sees(model)[-1]["error"]["kind"] == "detached"


async def test_a_client_that_attaches_within_the_grace_keeps_the_call_pending():
    """The client can still send the result [B43]."""
    clock = Clock(1000.0)
    async with Runtime(agent([[LOCATE], "done"], locate), clock=clock) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        clock.now += 4
        async with await rt.attach_client("c", keep=False) as page:
            clock.now += 30
            await looked(rt.store)
            assert await rt.pending() == [entry]
            await page.result(entry.call, {})
            await turn.final_result()


async def test_a_client_that_detaches_does_not_shorten_the_deadline_of_a_human_call():
    """The grace applies to client calls only [B43, B57]."""
    clock = Clock(1000.0)
    async with Runtime(agent([[ToolCall("choose")], "done"], choose), clock=clock) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        page = await rt.attach_client("c")
        await page.detach()
        (row,) = await rt.store.pending("c")
        assert row.due == entry.deadline


async def test_a_client_that_attaches_twice_at_once_is_one_client_and_detaches_completely():
    store = MemoryStore()
    put = store.put_client

    async def put_slowly(client):
        await asyncio.sleep(0)
        await put(client)

    store.put_client = put_slowly
    async with Runtime(agent(["hi"], locate), store=store) as rt:
        await rt.open("c")
        one, two = await asyncio.gather(*(rt.attach_client("c", client="page") for _ in range(2)))
        for page in (one, two):
            await page.detach()
        await until(lambda: not [t for t in asyncio.all_tasks() if t.get_name() == "holdfast:client:page"])
        assert [row.until <= rt._engine.now() for row in await rt.store.clients("c")] == [True]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["in one process", "in two processes"])
async def test_a_principal_cannot_replace_another_principals_client_of_the_same_id(elsewhere):
    """Presence, tools and leases belong to the client of one principal [B45]."""

    store = MemoryStore()
    guest = Runtime(store=store.sibling())
    async with Runtime(agent([[LOCATE], "done"], locate), store=store) as rt, guest as other:
        await rt.open("c")
        page = await rt.attach_client("c", client="page", by="ann")
        (entry,) = (await (await rt.send("c", "hi")).result()).pending
        assert await page.lease(entry.call)
        taken = await (other if elsewhere else rt).attach_client("c", ["other"], client="page", by="eve")
        assert (page.id, taken.id) == ("page", "page")
        assert len(await rt.store.clients("c")) == 2
        assert not await taken.lease(entry.call)
        await taken.detach()
        mine = next(row for row in await rt.store.clients("c") if row.client == page.stored)
        assert (mine.tools, mine.until > rt._engine.now()) == ((), True)
        again = await rt.attach_client("c", client="page", by="ann")
        assert await again.lease(entry.call), "the same principal continues with its client"
        await again.result(entry.call, {"lat": 1.0})


async def test_of_two_clients_one_gets_the_lease_and_the_result_of_the_other_is_stale():
    """The refusal names the principal whose result was accepted [B44]."""
    clock = Clock(1000.0)
    async with Runtime(agent([[LOCATE], Hang()], locate), clock=clock) as rt:
        await rt.open("c")
        one, two = [await rt.attach_client("c", by=name) for name in ("one", "two")]
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        leases = await asyncio.gather(one.lease(entry.call), two.lease(entry.call))
        assert leases == [True, False]
        assert await one.lease(entry.call), "a second request renews the lease"
        await one.result(entry.call, {"lat": 1.0})
        with pytest.raises(Stale) as late:
            await two.result(entry.call, {"lat": 2.0})
        assert (late.value.reason, late.value.winner) == ("resolved", "one")
        assert not await two.lease(entry.call), "the call has its result"
        assert not await two.lease("unknown call")
        assert [event.value for event in of(await rt.history("c"), CallReturned)] == [{"lat": 1.0}]


async def test_the_expired_lease_of_a_client_is_taken_over_by_another_client():
    """A lease expires after 30 seconds without renewal [B44]."""
    clock = Clock(1000.0)
    async with Runtime(agent([[LOCATE], Hang()], locate), clock=clock) as rt:
        await rt.open("c")
        one, two = [await rt.attach_client("c") for _ in range(2)]
        (entry,) = (await (await rt.send("c", "hi")).result()).pending
        assert await one.lease(entry.call)
        clock.now += 29
        assert not await two.lease(entry.call)
        clock.now += 2
        assert await two.lease(entry.call)
        assert not await one.lease(entry.call)


async def test_a_client_cannot_forge_a_status_another_call_or_another_conversation():
    """Fields with these names in a client's payload are plain data [B45]."""

    @declare(executor="client")
    def anything() -> object:
        """Return anything."""

    model = ScriptedModel([[ToolCall("anything"), ToolCall("choose")], "done"], follow=True)
    async with Runtime(agent(model, anything, choose)) as rt:
        turns = {name: await rt.send(name, "hi") for name in ("mine", "yours")}
        mine = {p.tool: p for p in (await turns["mine"].result()).pending}
        yours = {p.tool: p for p in (await turns["yours"].result()).pending}
        page = await rt.attach_client("mine", by="eve")
        forged = {"ok": False, "source": "system", "call_id": yours["anything"].call, "conversation": "yours"}
        with pytest.raises(Stale) as unknown:
            await page.result(yours["anything"].call, forged)
        assert unknown.value.reason == "unknown"
        with pytest.raises(Invalid):
            await page.result(mine["choose"].call, "a person's answer")
        await page.result(mine["anything"].call, forged)
        await rt.resolve("mine", mine["choose"].call, Answer("b"))
        await turns["mine"].final_result()
        assert sees(model) == [{"ok": True, "result": forged}, {"ok": True, "result": "b"}]
        returned = of(await rt.history("mine"), CallReturned)[0]
        assert (returned.ok, returned.source, returned.by) == (True, "client", "eve")
        assert of(await rt.history("yours"), CallReturned) == []
        assert len(await rt.pending("yours")) == 2
        with pytest.raises(ValueError, match="unknown error kind"):
            await page.failed(yours["anything"].call, "my_own", "x")
        await page.detach()


async def test_client_progress_is_live_and_in_the_snapshot_and_dropped_after_the_result():
    """The snapshot has the latest progress; progress of a human call is dropped [B83]."""
    model = ScriptedModel([[LOCATE, ToolCall("choose")], "done"])
    async with Runtime(agent(model, locate, choose)) as rt:
        await rt.open("c")
        page = await rt.attach_client("c")
        async with Tape(rt, "c") as tape:
            turn = await rt.send("c", "hi")
            client, ask = sorted((await turn.result()).pending, key=lambda p: p.kind)
            await page.progress(client.call, {"at": 1})
            await page.progress(client.call, {"at": 2})
            await page.progress(ask.call, "not a client call")
            in_flight = (await rt.snapshot("c")).in_flight
            assert [(f.call_id, f.progress) for f in in_flight] == [(client.call, {"at": 2})]
            with pytest.raises(Invalid):
                await page.progress(client.call, object())
            await page.result(client.call, {})
            await page.progress(client.call, "late")
            assert (await rt.snapshot("c")).in_flight == []
            await rt.resolve("c", ask.call, Answer("a"))
            await turn.final_result()
            await page.progress(client.call, "later still")
        progress = [(item.n, item.payload) for item in tape.live if item.type == "tool_progress"]
        assert progress == [(1, {"at": 1}), (2, {"at": 2})]
        await page.detach()


async def test_the_model_sees_the_details_of_a_failed_client_call():
    """Details that are not JSON are refused [B41]."""
    model = ScriptedModel([[LOCATE], "done"])
    async with Runtime(agent(model, locate)) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        with pytest.raises(Invalid):
            await rt.resolve("c", entry.call, Failed("timeout", "x", {"a": object()}))
        with pytest.raises(Invalid):
            await rt.resolve("c", entry.call, Failed("timeout", 5))  # type: ignore[arg-type]
        await rt.resolve("c", entry.call, Failed("timeout", "no signal", {"tries": 3}))
        await turn.final_result()
        assert sees(model)[0]["error"] == {"kind": "timeout", "message": "no signal", "details": {"tries": 3}}
