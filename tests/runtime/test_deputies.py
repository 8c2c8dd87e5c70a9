"""Deputies: a principal names another one, who decides for it during a period."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from support.runtimes import Clock, agent, of

from holdfast import Approve, Deny, Invalid, NotAllowed, Principal, Runtime, ScriptedModel, Stale, ToolCall
from holdfast import tool as declare
from holdfast.core.decide.deputies import DEPUTIES
from holdfast.core.events import CallResolved, CancelRequested, DeputyEnded, DeputyNamed, ResolutionRefused
from holdfast.stores.memory import MemoryStore

ADA = Principal("ada", roles=("finance",))


@declare(approval="required")
async def pay(amount: int) -> int:
    """Pay an amount."""
    return amount


def for_finance(by, pending, decision):
    return "finance" in by.roles


def runtime(clock, store: Any = "memory:", **rules: Any):
    model = ScriptedModel([[ToolCall("pay", {"amount": 1})], "ok"], follow=True)
    return Runtime(agent(model, pay), store=store, clock=clock, **{"may_resolve": for_finance, **rules})


async def ask(rt, conversation):
    turn = await rt.send(conversation, "pay", by="user")
    return turn, (await turn.result()).pending[0]


async def test_a_deputys_decision_names_both_and_ends_with_its_period():
    """The rules are asked about the deputy first, then about the principal with the roles as named [B126]."""
    clock = Clock(1000.0)
    async with runtime(clock) as rt:
        named = await rt.delegate("bob", "1h", by=ADA)
        assert (named.id, named.principal, named.deputy, named.until) == ("d2", ADA, "bob", 4600.0)
        assert await rt.deputies() == [named]
        turn, entry = await ask(rt, "c1")
        await rt.resolve(entry, Approve(), by="bob")
        assert (await turn.final_result()).text == "ok"
        (resolved,) = of(await rt.history("c1"), CallResolved)
        assert (resolved.by, resolved.on_behalf_of) == ("bob", ADA)
        _, entry = await ask(rt, "c2")
        clock.now = 4600.0
        assert await rt.deputies() == []
        with pytest.raises(NotAllowed, match="bob may not resolve pay"):
            await rt.resolve(entry, Approve(), by="bob")
        (refused,) = of(await rt.history("c2"), ResolutionRefused)
        assert refused.by == "bob"


async def test_a_principal_who_may_decide_alone_does_so_for_itself():
    """Also without rules: then every caller may decide [B126]."""
    async with runtime(Clock(1000.0)) as rt:
        await rt.delegate("bob", "1h", by=ADA)
        _, entry = await ask(rt, "c1")
        await rt.resolve(entry, Approve(), by=Principal("bob", roles=("finance",)))
        assert of(await rt.history("c1"), CallResolved)[0].on_behalf_of is None
    async with runtime(Clock(1000.0), may_resolve=None) as rt:
        await rt.delegate("bob", "1h", by=ADA)
        _, entry = await ask(rt, "c1")
        await rt.resolve(entry, Approve(), by="bob")
        assert of(await rt.history("c1"), CallResolved)[0].on_behalf_of is None


async def test_there_are_no_chains_of_deputies():
    """A deputy's deputy stands in for the deputy alone [B126]."""
    async with runtime(Clock(1000.0)) as rt:
        await rt.delegate("bob", "1h", by=ADA)
        await rt.delegate("cy", "1h", by="bob")
        rights = rt._engine.rights
        assert await rights.acting_principals(Principal("bob")) == ["bob", ADA]
        assert await rights.acting_principals(Principal("cy")) == ["cy", "bob"]
        _, entry = await ask(rt, "c1")
        with pytest.raises(NotAllowed):
            await rt.resolve(entry, Approve(), by="cy")


async def test_the_principal_and_the_deputy_may_end_it_and_nobody_else():
    """What has ended cannot be ended again [B126]."""
    async with runtime(Clock(1000.0)) as rt:
        first, second = await rt.delegate("bob", "1h", by=ADA), await rt.delegate("cy", "1h", by=ADA)
        with pytest.raises(NotAllowed, match="ada named bob"):
            await rt.end_delegation(first.id, by="cy")
        await rt.end_delegation(first.id, by="bob")
        await rt.end_delegation(second.id, by="ada")
        assert await rt.deputies() == []
        with pytest.raises(Stale):
            await rt.end_delegation(first.id, by="ada")
        _, entry = await ask(rt, "c1")
        with pytest.raises(NotAllowed):
            await rt.resolve(entry, Deny("no"), by="bob")
        log = await rt.history(DEPUTIES)
        assert [type(event) for event in log[1:]] == [DeputyNamed, DeputyNamed, DeputyEnded, DeputyEnded]
        assert [event.by.id for event in of(log, DeputyEnded)] == ["bob", "ada"]


async def test_a_deputy_may_cancel_a_turn_and_have_an_approval_remembered_for_the_principal():
    """Every decision goes the same way; the cancellation names both, too [B126]."""
    async with runtime(Clock(1000.0), may_grant=for_finance) as rt:
        await rt.delegate("bob", "1h", by=ADA)
        _, entry = await ask(rt, "c1")
        assert (await rt.grant_scopes("c1", entry.call, by="bob"))["tool"] == ("conversation", "user", "everyone")
        await rt.resolve(entry, Approve(remember="tool", scope="everyone"), by="bob")
        assert [grant.by.id for grant in await rt.grants()] == ["bob"]
        await rt.revoke((await rt.grants())[0].id)
        await ask(rt, "c2")
        await rt.cancel("c2", by="bob")
        (cancelled,) = of(await rt.history("c2"), CancelRequested)
        assert (cancelled.by, cancelled.on_behalf_of) == ("bob", ADA)


@pytest.mark.parametrize(
    ("to", "until", "words"),
    [
        ("ada", "1h", "another principal"),
        ("system", "1h", "runtime's own"),
        ("bob", 999.0, "in the future"),
        ("bob", datetime(2030, 1, 1), "time zone"),
        ("bob", "soon", "bad duration"),
        ("bob", True, "a time, or a duration"),
    ],
    ids=["self", "system", "past", "no zone", "no duration", "no time"],
)
async def test_a_delegation_names_another_principal_and_an_end_in_the_future(to, until, words):
    """Anything else is refused, and nothing is logged [B126]."""
    async with runtime(Clock(1000.0)) as rt:
        with pytest.raises(Invalid, match=words):
            await rt.delegate(to, until, by=ADA)
        assert await rt.deputies() == []
        later = datetime.fromtimestamp(1000.0, UTC) + timedelta(hours=2)
        assert (await rt.delegate("bob", later, by=ADA)).until == 8200.0


async def test_the_log_of_deputies_is_no_conversation():
    """It takes no message and is in no list; it can be read, and another process sees it [B126]."""
    store = MemoryStore()
    async with runtime(Clock(1000.0), store) as rt:
        for name in ("a", "z"):
            await ask(rt, name)
        for _ in range(2):
            with pytest.raises(Invalid, match="log of deputies"):
                await rt.send(DEPUTIES, "hi", agent="a")
            with pytest.raises(Invalid, match="log of deputies"):
                await rt.open(DEPUTIES, agent="a")
            await rt.delegate("bob", "1h", by=ADA)
        assert [info.conversation for info in await rt.conversations()] == ["a", "z"]
        assert [info.conversation for info in await rt.conversations(limit=1)] == ["a"]
        assert [info.conversation for info in await rt.conversations(cursor="a", limit=1)] == ["z"]
        assert len(await rt.history(DEPUTIES)) == 3
        async with runtime(Clock(1000.0), store.sibling()) as other:
            assert len(await other.deputies()) == 2
            await other.end_delegation("d2", by="ada")
            assert [one.id for one in await rt.deputies()] == ["d3"]
