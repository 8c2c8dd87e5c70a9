"""Several approvers, their roles, and the rule that nobody approves their own request."""

import asyncio

import pytest
from support.async_tests import until
from support.runtimes import agent, of

from holdfast import Approve, Call, Deny, Invalid, NotAllowed, Principal, Runtime, ScriptedModel, Stale, ToolCall, tool
from holdfast.core.events import CallReturned, CallStarted, CallSuspended, GrantGiven, ResolutionRefused, VoteCast
from holdfast.errors import DeclarationError
from holdfast.stores.memory import MemoryStore

ADA = Principal("ada", roles=("finance",))
BOB = Principal("bob", roles=("finance", "lead"))
CARL = Principal("carl", roles=("clerk",))


def payment_tool(ran, **options):
    """Return a gated tool that notes the amounts it pays."""

    @tool(approval="required", recovery="redispatch", **options)
    async def pay(amount: int, call: Call) -> str:
        """Pay an amount."""
        ran.append(amount)
        return f"paid after {call.approver}"

    return pay


def payments(ran, *amounts, **options):
    calls = [ToolCall("pay", {"amount": amount}) for amount in amounts]
    return agent(ScriptedModel([calls, "done"]), payment_tool(ran, **options))


async def pending_call(rt):
    await (await rt.send("c", "go", by="user")).result()
    (entry,) = await rt.pending("c")
    return entry


async def wait_until_idle(rt):
    await until(lambda: _is_idle(rt))
    return await rt.history("c")


async def _is_idle(rt):
    return (await rt.snapshot("c")).state == "idle"


async def test_the_second_persons_vote_runs_the_call_and_all_votes_are_logged():
    """Every voter is in the log, and the call runs once [B110]."""
    ran = []
    async with Runtime(payments(ran, 5, approvers=2)) as rt:
        entry = await pending_call(rt)
        assert (entry.approvers, entry.missing, entry.votes) == (2, 2, ())
        first = await rt.resolve(entry, Approve(), by=ADA)
        assert first.missing == 1
        (entry,) = await rt.pending("c")
        assert ([vote.by for vote in entry.votes], entry.missing, ran) == ([ADA], 1, [])
        second = await rt.resolve(entry, Approve(), by=BOB)
        assert second.missing == 0
        log = await wait_until_idle(rt)
        assert [(vote.by.id, vote.missing) for vote in of(log, VoteCast)] == [("ada", 1), ("bob", 0)]
        assert of(log, VoteCast)[0].seq == first.seq
        assert ran == [5]
        assert of(log, CallReturned)[0].value == "paid after bob"


async def test_one_person_who_approves_twice_counts_once():
    """The second approval has the receipt of the first and adds nothing to the log [B110]."""
    ran = []
    async with Runtime(payments(ran, 5, approvers=2)) as rt:
        entry = await pending_call(rt)
        first = await rt.resolve(entry, Approve(), by=ADA)
        length = len(await rt.history("c"))
        assert await rt.resolve(entry, Approve(), by=ADA) == first
        assert len(await rt.history("c")) == length
        assert ran == []


async def test_a_denial_ends_a_call_that_others_approved():
    """One denial suffices [B110]."""
    ran = []
    async with Runtime(payments(ran, 5, approvers=2)) as rt:
        entry = await pending_call(rt)
        await rt.resolve(entry, Approve(), by=ADA)
        await rt.resolve(entry, Deny("too much"), by=BOB)
        log = await wait_until_idle(rt)
        assert of(log, CallReturned)[0].error.kind == "denied"
        assert ran == []
        with pytest.raises(Stale) as stale:
            await rt.resolve(entry, Approve(), by=CARL)
        assert stale.value.reason == "resolved"


async def test_two_approvals_from_two_processes_at_the_same_time_count_twice():
    """The loser of the conflict decides again on the new state [B110]."""
    for _ in range(20):
        ran, store = [], MemoryStore()
        async with Runtime(payments(ran, 5, approvers=2), store=store) as rt, Runtime(store=store.sibling()) as other:
            entry = await pending_call(rt)
            receipts = await asyncio.gather(
                rt.resolve(entry, Approve(), by=ADA), other.resolve(entry, Approve(), by=BOB)
            )
            assert sorted(receipt.missing for receipt in receipts) == [0, 1]
            await wait_until_idle(rt)
            assert ran == [5]


async def test_one_persons_two_approvals_from_two_processes_at_the_same_time_count_once():
    ran, store = [], MemoryStore()
    async with Runtime(payments(ran, 5, approvers=2), store=store) as rt, Runtime(store=store.sibling()) as other:
        entry = await pending_call(rt)
        await asyncio.gather(rt.resolve(entry, Approve(), by=ADA), other.resolve(entry, Approve(), by=ADA))
        assert len(of(await rt.history("c"), VoteCast)) == 1
        (entry,) = await rt.pending("c")
        assert (entry.missing, ran) == (1, [])


async def test_votes_survive_the_process_that_took_them():
    store = MemoryStore()
    async with Runtime(payments([], 5, approvers=2), store=store) as rt:
        entry = await pending_call(rt)
        await rt.resolve(entry, Approve(), by=ADA)
    ran = []
    async with Runtime(agent(["done"], payment_tool(ran, approvers=2)), store=store.sibling()) as rt:
        (entry,) = await rt.pending("c")
        assert [vote.by.id for vote in entry.votes] == ["ada"]
        await rt.resolve(entry, Approve(), by=BOB)
        await wait_until_idle(rt)
        assert ran == [5]


async def test_a_plan_that_changed_after_the_last_vote_voids_the_votes_and_says_so():
    """Everybody has to approve the new plan [B111]."""
    ran, price = [], [10]
    pay = payment_tool(ran, approvers=2)

    @pay.preview
    async def _(amount: int) -> dict:
        return {"amount": amount, "price": price[0]}

    async with Runtime(agent(ScriptedModel([[ToolCall("pay", {"amount": 5})], "done"]), pay)) as rt:
        entry = await pending_call(rt)
        await rt.resolve(entry, Approve(), by=ADA)
        price[0] = 12
        await rt.resolve(entry, Approve(), by=BOB)

        async def waits_again():
            return [now for now in await rt.pending("c") if now.seq != entry.seq]

        await until(waits_again)
        (again,) = await rt.pending("c")
        assert (again.reason, again.voided, again.votes, again.missing) == ("plan changed", ("ada", "bob"), (), 2)
        assert ran == []
        with pytest.raises(Stale) as stale:
            await rt.resolve("c", entry.id, Approve(), by=CARL)
        assert (stale.value.reason, stale.value.details["changed"]) == ("superseded", ["preview"])
        await rt.resolve(again, Approve(), by=BOB)
        await rt.resolve(again, Approve(), by=ADA)
        await wait_until_idle(rt)
        assert ran == [5]


async def test_a_call_that_needs_two_approvers_can_be_neither_edited_nor_remembered():
    """Two people would have approved different things, or a third call would run without them."""
    async with Runtime(payments([], 5, approvers=2)) as rt:
        entry = await pending_call(rt)
        for decision in (Approve(args={"amount": 6}), Approve(remember="tool"), Approve(remember="args")):
            with pytest.raises(Invalid, match="neither edited nor remembered"):
                await rt.resolve("c", entry.call, decision, by=ADA)
        assert (await rt.pending("c"))[0].votes == ()


async def test_only_principals_with_one_of_the_roles_may_approve_or_deny():
    """A refused attempt is logged, and the call still waits."""
    ran = []
    async with Runtime(payments(ran, 5, approver_roles=("finance",))) as rt:
        entry = await pending_call(rt)
        for decision in (Approve(), Deny("no")):
            with pytest.raises(NotAllowed, match="has none of the roles"):
                await rt.resolve(entry, decision, by=CARL)
        refusals = of(await rt.history("c"), ResolutionRefused)
        assert [(event.by.id, event.decision) for event in refusals] == [("carl", "Approve"), ("carl", "Deny")]
        assert (await rt.pending("c"))[0].id == entry.id
        await rt.resolve(entry, Approve(), by=ADA)
        await wait_until_idle(rt)
        assert ran == [5]


async def test_the_requester_is_refused_even_with_the_right_role_and_the_attempt_is_logged():
    """The core itself refuses, so no door lets the requester through [B112]."""
    ran = []
    async with Runtime(payments(ran, 5, not_requester=True, approver_roles=("finance",))) as rt:
        await (await rt.send("c", "go", by=ADA)).result()
        (entry,) = await rt.pending("c")
        with pytest.raises(NotAllowed, match="ada requested this call"):
            await rt.resolve(entry, Approve(), by=ADA)
        with pytest.raises(NotAllowed):
            await rt.resolve_many("c", {entry.call: Approve()}, by=ADA)
        assert [event.by.id for event in of(await rt.history("c"), ResolutionRefused)] == ["ada", "ada"]
        await rt.resolve(entry, Approve(), by=BOB)
        await wait_until_idle(rt)
        assert ran == [5]


async def test_the_rules_stand_in_the_event_and_hold_when_the_code_has_changed():
    """What a suspension says about its approvers is what holds [B89]."""
    store = MemoryStore()
    async with Runtime(payments([], 5, approvers=2, approver_roles=("finance",)), store=store) as rt:
        entry = await pending_call(rt)
        (suspended,) = of(await rt.history("c"), CallSuspended)
        assert (suspended.approvers, suspended.approver_roles) == (2, ("finance",))
    ran = []
    async with Runtime(payments(ran, 5), store=store.sibling()) as rt:
        with pytest.raises(NotAllowed):
            await rt.resolve(entry, Approve(), by=CARL)
        assert (await rt.resolve(entry, Approve(), by=ADA)).missing == 1
        assert of(await rt.history("c"), CallStarted) == []


async def test_a_grant_of_one_person_covers_no_call_once_two_approvers_are_declared():
    """One person's remembered approval does not stand in for two people."""
    ran, store = [], MemoryStore()
    async with Runtime(payments(ran, 5), store=store) as rt:
        entry = await pending_call(rt)
        await rt.resolve(entry, Approve(remember="tool"), by="mallory")
        await wait_until_idle(rt)
    script = [[ToolCall("pay", {"amount": 1_000_000})], "done"]
    strict = agent(ScriptedModel(script), payment_tool(ran, approvers=2, not_requester=True))
    async with Runtime(strict, store=store.sibling()) as rt:
        (entry,) = (await rt.run("more", conversation="c", by="mallory")).pending
        assert (entry.approvers, entry.not_requester, ran) == (2, True, [5])


@pytest.mark.parametrize("scope", ["conversation", "everyone"])
@pytest.mark.parametrize("approver", [ADA, Principal("dan")], ids=["own", "deputy"])
async def test_a_remembered_approval_covers_no_request_of_the_person_who_gave_it(scope, approver):
    """Nobody approves their own request beforehand either, nor has a deputy do it [B112]."""
    ran = []
    script = [[ToolCall("pay", {"amount": 5})], "done"] * 3
    payer = agent(ScriptedModel(script), payment_tool(ran, not_requester=True, approver_roles=("finance",)))
    async with Runtime(payer) as rt:
        entry = await pending_call(rt)
        await rt.delegate(to="dan", until="1h", by=ADA)
        await rt.resolve(entry, Approve(remember="tool", scope=scope), by=approver)
        await wait_until_idle(rt)
        (given,) = of(await rt.history("c"), GrantGiven)
        assert (given.by, given.on_behalf_of) == (approver, None if approver is ADA else ADA)
        (grant,) = await rt.grants("c")
        assert not (await rt.run("more", conversation="c", by="carl")).waiting
        where = "c" if scope == "conversation" else "elsewhere"
        (own,) = (await rt.run("mine", conversation=where, by="ada")).pending
        shown = grant.id if scope == "conversation" else f"c/{grant.id}"
        assert own.reason == (
            f"the remembered approval (grant {shown}) is the requester's own, so another person has to decide"
        )
        assert ran == [5, 5]


async def test_a_call_that_is_asked_again_for_a_changed_definition_has_the_new_approvers():
    ran, store = [], MemoryStore()
    async with Runtime(payments(ran, 5), store=store) as rt:
        entry = await pending_call(rt)
    strict = agent(["done"], payment_tool(ran, version="2", approvers=2, not_requester=True))
    async with Runtime(strict, store=store.sibling()) as rt:
        await rt.resolve(entry, Approve(), by="boss")

        async def asks_again():
            return [now for now in await rt.pending("c") if now.seq != entry.seq]

        await until(asks_again)
        (again,) = await rt.pending("c")
        assert (again.approvers, again.not_requester, ran) == (2, True, [])


async def test_a_repeated_vote_beside_the_last_one_has_the_receipt_of_the_first():
    """Also if both are in one append: the call no longer waits when the receipt is made."""
    ran = []
    async with Runtime(payments(ran, 5, approvers=2)) as rt:
        entry = await pending_call(rt)
        first = await rt.resolve(entry, Approve(), by=ADA)
        repeated, _ = await asyncio.gather(rt.resolve(entry, Approve(), by=ADA), rt.resolve(entry, Approve(), by=BOB))
        assert repeated == first


async def test_a_deputy_votes_for_the_principal_who_has_not_voted():
    """A deputy and the principal for whom it votes count as one person [B110, B126]."""
    ran = []
    async with Runtime(payments(ran, 5, approvers=2, approver_roles=("finance",))) as rt:
        entry = await pending_call(rt)
        for principal in (ADA, BOB):
            await rt.delegate(to="dan", until="1h", by=principal)
        await rt.resolve(entry, Approve(), by=ADA)
        await rt.resolve(entry, Approve(), by="dan")
        log = await wait_until_idle(rt)
        votes = [(vote.by.id, vote.on_behalf_of and vote.on_behalf_of.id) for vote in of(log, VoteCast)]
        assert votes == [("ada", None), ("dan", "bob")]
        assert ran == [5]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"approvers": 0}, "from 1 to 20"),
        ({"approvers": True}, "from 1 to 20"),
        ({"approvers": "two"}, "from 1 to 20"),
        ({"approver_roles": "finance"}, "must be a list of names"),
        ({"approver_roles": ()}, "must be a list of names"),
        ({"not_requester": "yes"}, "must be True or False"),
        ({"escalate_to": ("boss",)}, "go together"),
        ({"escalate_after": "1h"}, "go together"),
        ({"remind": "1h"}, "must be a list of durations"),
        ({"remind": ["soon"]}, "bad duration"),
        ({"extend_limit": "for ever"}, "bad duration"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_at_declaration(options, words):
    with pytest.raises(DeclarationError, match=words):
        payment_tool([], **options)


def test_approvers_of_a_tool_that_asks_for_no_approval_are_refused_at_declaration():
    with pytest.raises(DeclarationError, match="this tool asks for none"):

        @tool(approvers=2)
        async def look() -> str:
            """Look."""
            return ""
