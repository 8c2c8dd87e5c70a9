"""Remembered approvals that reach beyond the conversation in which they were given."""

import asyncio
from typing import Any

import msgspec
import pytest
from support.runtimes import Clock, agent, of

from holdfast import Approve, Invalid, NotAllowed, Runtime, ScriptedModel, Stale, ToolCall, hooks
from holdfast import tool as declare
from holdfast.core.events import CallResolved, CallStarted, CallSuspended, GrantGiven, ResolutionRefused
from holdfast.runtime.event_log import rebuild_from_log
from holdfast.stores.base import GrantRow
from holdfast.stores.memory import MemoryStore


def make_pay(ran, description="Pay an amount.", **options):
    async def pay(amount: int) -> int:
        ran.append(amount)
        return amount

    pay.__doc__ = description
    declared: Any = {"approval": "required", **options}
    return declare(**declared)(pay)


def pay_calls(*amounts):
    return [ToolCall("pay", {"amount": amount}) for amount in amounts]


def desk(ran, store: Any = "memory:", tool=None, replies=(), rules=None, clock=None, **options):
    """Return a runtime whose model pays 1 in every conversation, unless ``replies`` says otherwise."""
    model = ScriptedModel(list(replies) or [pay_calls(1), "ok"] * 8, follow=True)
    return Runtime(agent(model, tool or make_pay(ran, **options)), store=store, clock=clock, **(rules or {}))


async def ask(rt, conversation, by="ada"):
    """Send a message; return its turn and its pending calls."""
    turn = await rt.send(conversation, "pay", by=by)
    return turn, (await turn.result()).pending


async def grant_in(rt, conversation="c1", by="ada", boss="boss", **approval):
    """Run a turn that pays, have its approval remembered, and return the grant."""
    turn, (entry,) = await ask(rt, conversation, by)
    await rt.resolve(entry, Approve(**{"remember": "tool", "scope": "everyone", **approval}), by=boss)
    await turn.final_result()
    return (await rt.grants(conversation))[-1]


async def test_a_grant_for_everyone_covers_other_conversations_and_the_claim_names_it():
    """The grant's id in another conversation is CONVERSATION/ID [B115]."""
    ran = []
    async with desk(ran) as rt:
        given = await grant_in(rt)
        assert (given.scope, given.remember, given.user) == ("everyone", "tool", None)
        turn, pending = await ask(rt, "c2", by="bob")
        assert pending == []
        assert (await turn.final_result()).text == "ok"
        (started,) = of(await rt.history("c2"), CallStarted)
        assert started.grant == f"c1/{given.id}"
        assert ran == [1, 1]
        (listed,) = await rt.grants()
        assert (listed.id, listed.tool, listed.by.id) == (f"c1/{given.id}", "pay", "boss")
        assert await rt.grants("c2") == [], "a conversation lists the grants that were given in it"


async def test_a_grant_for_a_user_covers_turns_of_that_principal_only():
    """The user is the principal on whose behalf the turn runs, not the approver; also in one conversation [B115]."""
    async with desk([]) as rt:
        given = await grant_in(rt, scope="user")
        assert (given.scope, given.user) == ("user", "ada")
        assert (await ask(rt, "c2", by="ada"))[1] == []
        assert len((await ask(rt, "c3", by="boss"))[1]) == 1, "the approver is another principal"
        assert len((await ask(rt, "c1", by="bob"))[1]) == 1, "another principal in the conversation of the grant"


async def test_a_grant_for_arguments_covers_the_same_arguments_elsewhere():
    """Other arguments are asked about [B115]."""
    async with desk([], replies=[pay_calls(1, 2), "ok"]) as rt:
        turn, (first, second) = await ask(rt, "c1")
        await rt.resolve(first, Approve(remember="args", scope="everyone"), by="boss")
        await rt.resolve(second, Approve(), by="boss")
        await turn.final_result()
        (given,) = await rt.grants("c1")
        _, (entry,) = await ask(rt, "c2")
        assert entry.args == {"amount": 2}
        (made, other) = next(event.calls for event in await rt.history("c2") if event.type == "AssistantSaid")
        assert (made.grant, other.grant) == (f"c1/{given.id}", None)


async def test_a_revoked_or_expired_grant_covers_nothing_that_starts_afterwards():
    """It is revoked by its conversation and id, or by the two in one [B115]."""
    clock, ran = Clock(1000.0), []
    async with desk(ran, clock=clock) as rt:
        first = await grant_in(rt)
        await rt.revoke(f"c1/{first.id}", by="auditor")
        assert await rt.grants() == []
        assert len((await ask(rt, "c2"))[1]) == 1
        second = await grant_in(rt, "c3", duration="1h")
        assert (await ask(rt, "c4"))[1] == []
        clock.now += 3600
        assert len((await ask(rt, "c5"))[1]) == 1
        assert await rt.grants() == []
        with pytest.raises(Stale):
            await rt.revoke("c1", first.id)
        for wrong in [("c3",), ("c4", f"c3/{second.id}")]:
            with pytest.raises(Invalid):
                await rt.revoke(*wrong)
    assert ran == [1, 1, 1]


async def test_a_grant_that_ends_between_the_reply_and_the_claim_asks_again_with_the_reason():
    """The claim reads the shared grants again [B115]."""
    ran, store = [], MemoryStore()
    reached, go = asyncio.Event(), asyncio.Event()

    @declare(approval="required", recovery="redispatch")
    async def pay(amount: int) -> int:
        """Pay an amount."""
        if ran:
            reached.set()
            await go.wait()
        ran.append(amount)
        return amount

    async with Runtime(
        agent(ScriptedModel([pay_calls(1), "ok", pay_calls(1, 2), "ok"]), pay), store=store, parallel=1
    ) as rt:
        given = await grant_in(rt)
        turn = await rt.send("c2", "pay", by="bob")
        await reached.wait()  # the first call runs, and the second waits for the only slot
        await rt.revoke("c1", given.id)
        go.set()
        (entry,) = (await turn.result()).pending
        assert (entry.args, entry.reason) == ({"amount": 2}, "the grant no longer holds")
        assert ran == [1, 1]


async def test_an_interrupted_call_is_not_repeated_after_its_shared_grant_was_revoked():
    """The next owner reads the shared grants before it recovers calls [B115]."""
    store, ran = MemoryStore(), []
    reached = asyncio.Event()

    @declare(approval="required", recovery="redispatch")
    async def pay(amount: int) -> int:
        """Pay an amount."""
        ran.append(amount)
        if len(ran) == 2:
            reached.set()
            await asyncio.Event().wait()
        return amount

    def runtime(replies, owner):
        return Runtime(agent(ScriptedModel(replies, follow=True), pay), store=owner)

    rt = runtime([pay_calls(1), "ok"], store)
    await rt.start()
    given = await grant_in(rt)
    await rt.send("c2", "pay", by="bob")
    await reached.wait()
    await asyncio.gather(*rt.kill(), return_exceptions=True)
    store.kill()
    async with Runtime(store=store.sibling()) as elsewhere:
        await elsewhere.revoke(f"c1/{given.id}")
    async with runtime([pay_calls(1), "ok"], store.sibling()) as again:
        (entry,) = (await again.wait("c2")).pending
        assert (entry.recovery, ran) == (True, [1, 1])


@pytest.mark.parametrize(
    "change",
    [{"description": "Pay any amount."}, {"version": "2"}, {"risk": "medium"}, {"metadata": {"destructive": True}}],
    ids=["description", "version", "risk", "metadata"],
)
async def test_a_grant_never_covers_another_definition_of_the_tool(change):
    """The fingerprint, and the executor, the risk and the metadata [B115]."""
    store = MemoryStore()
    async with desk([], store) as rt:
        given = await grant_in(rt)
    ran = []
    async with desk(ran, store.sibling(), **change) as rt:
        _, (entry,) = await ask(rt, "c2")
        assert entry.reason == (
            f"the tool's definition changed since boss had an approval remembered (grant c1/{given.id})"
        )
        assert ran == []


async def test_a_planted_or_changed_index_row_gives_nothing():
    """The log of the grant's conversation is the truth [B115]."""
    store, ran = MemoryStore(), []
    async with desk(ran, store) as rt:
        given = await grant_in(rt, scope="user")  # for ada
        row = GrantRow(
            conversation="c1",
            grant=given.id,
            tool="pay",
            user=None,
            until=None,
            body=msgspec.json.encode({**msgspec.to_builtins(given), "scope": "everyone"}),
        )
        store._data.grants.clear()
        store._data.grants["c1", given.id] = row
        assert len((await ask(rt, "c2", by="bob"))[1]) == 1, "the log says that it is ada's"
        store._data.grants["c1", "g99"] = msgspec.structs.replace(row, grant="g99")
        store._data.grants["nowhere", "g1"] = msgspec.structs.replace(row, conversation="nowhere", grant="g1")
        assert len((await ask(rt, "c3", by="bob"))[1]) == 1
        assert [grant.id for grant in await rt.grants()] == [f"c1/{given.id}"]
        await rt.revoke("c1", given.id)
        store._data.grants["c1", given.id] = row
        assert len((await ask(rt, "c4"))[1]) == 1, "the log says that it was revoked"
        assert await rt.grants() == []


async def test_the_index_is_rebuilt_from_the_log():
    """Rows that the log does not have disappear, missing ones come back [B115]."""
    store = MemoryStore()
    async with desk([], store) as rt:
        given = await grant_in(rt)
        rows = await store.list_shared_grants()
        store._data.grants.clear()
        store._data.grants["c1", "g99"] = msgspec.structs.replace(rows[0], grant="g99")
        await rebuild_from_log(store, "c1", "a test")
        assert await store.list_shared_grants() == rows
        assert [row.grant for row in rows] == [given.id]


async def test_hooks_and_approval_functions_see_shared_grants_at_the_claim():
    """A grant counts where an approval function or a hook requires one, unless it says otherwise [B115]."""

    def asks(args, call):
        return True

    ran = []
    async with desk(ran, approval=asks) as rt:
        given = await grant_in(rt)
        assert (await ask(rt, "c2", by="bob"))[1] == []
        (started,) = of(await rt.history("c2"), CallStarted)
        assert started.grant == f"c1/{given.id}"

    @hooks.before_tool()
    def fresh(call, args):
        return hooks.RequireApproval("look at each one", grants=False)

    model = ScriptedModel([pay_calls(1), "ok"] * 2)
    async with Runtime(agent(model, make_pay(ran), hooks=[fresh])) as rt:
        await grant_in(rt)
        (entry,) = (await ask(rt, "c2"))[1]
        assert entry.reason == "look at each one"


async def test_the_truth_is_the_grant_in_the_log_and_the_decision_says_what_was_given():
    """GrantGiven has what is covered, where it holds, and for whom [B115]."""
    async with desk([]) as rt:
        await grant_in(rt, scope="user", remember="args", duration="1h")
        history = await rt.history("c1")
        (given,), (resolved,) = of(history, GrantGiven), of(history, CallResolved)
        assert (given.v, given.remember, given.scope, given.user) == (2, "args", "user", "ada")
        assert (resolved.decision.scope, resolved.decision.remember) == ("user", "args")
        assert given.annotations
        assert given.fingerprint == of(history, CallSuspended)[0].fingerprint


@pytest.mark.parametrize(
    ("rules", "risk", "allowed"),
    [
        ({}, "medium", True),
        ({}, "high", False),
        ({"may_resolve": lambda *_: True}, "low", False),
        ({"may_grant": lambda *_: True}, "high", True),
        ({"may_resolve": lambda *_: True, "may_grant": lambda *_: True}, "high", True),
        ({"may_grant": lambda by, entry, decision: decision.scope == "conversation"}, "low", False),
    ],
    ids=["no rules", "high risk", "may_resolve", "may_grant", "both", "may_grant refuses"],
)
@pytest.mark.parametrize("scope", ["user", "everyone"])
async def test_a_scope_beyond_the_conversation_needs_its_own_right(rules, risk, allowed, scope):
    """Without rules every caller may give it, except for a high risk; with may_resolve it needs may_grant [B115]."""
    async with desk([], rules=rules, risk=risk) as rt:
        _, (entry,) = await ask(rt, "c1")
        offered = await rt.grant_scopes("c1", entry.call, by="boss")
        assert (scope in offered["args"], "conversation" in offered["args"]) == (allowed, True)
        decision = Approve(remember="args", scope=scope)
        if allowed:
            await rt.resolve(entry, decision, by="boss")
            return
        with pytest.raises(NotAllowed, match=r"may_grant|may not have an approval") as refused:
            await rt.resolve(entry, decision, by="boss")
        assert "still pending" in refused.value.message
        (logged,) = of(await rt.history("c1"), ResolutionRefused)
        assert logged.by.id == "boss"
        await rt.resolve(entry, Approve(remember="args", duration="1h"), by="boss")


async def test_a_scope_goes_with_remember_and_is_one_of_three():
    """Anything else is refused before it is recorded [B115]."""
    async with desk([]) as rt:
        _, (entry,) = await ask(rt, "c1")
        unknown: Any = "world"
        for wrong in (Approve(scope="everyone"), Approve(remember="tool", scope=unknown)):
            with pytest.raises(Invalid, match="scope"):
                await rt.resolve(entry, wrong)
        assert [one.call for one in await rt.pending()] == [entry.call]
