"""The rules ``may_resolve`` and ``may_grant``: who may decide, have approvals remembered, preview and cancel."""

import asyncio
from typing import Any

import pytest
from support.async_tests import until
from support.runtimes import agent, of

from holdfast import (
    Approve,
    Call,
    Deny,
    Invalid,
    NotAllowed,
    Principal,
    Runtime,
    ScriptedModel,
    Submit,
    ToolCall,
    ToolError,
)
from holdfast import tool as declare
from holdfast.core.events import (
    CallResolved,
    CallStarted,
    CancelRequested,
    GrantGiven,
    MessageReceived,
    ResolutionRefused,
)
from holdfast.errors import DeclarationError, Stale
from holdfast.stores.memory import MemoryStore

CLERK = Principal("carl", roles=("clerk",))
BOSS = Principal("ann", roles=("boss",))


def refund_tool(ran, *, planned=False, **options):
    """Return a gated tool that notes the amounts it refunds; ``planned`` gives it a preview."""

    @declare(approval="required", prompt="Refund {amount}?", **options)
    async def refund(amount: int) -> int:
        """Give money back."""
        ran.append(amount)
        return amount

    if planned:

        @refund.preview
        async def _(amount: int, call: Call) -> dict:
            if amount < 0:
                raise ToolError("resource_missing", "there is nothing to take")
            return {"pays": amount, "for": call.id}

    return refund


def up_to_100(principal, pending, decision):
    """A clerk may approve refunds of up to 100, and deny any."""
    small = pending.args.get("amount", 0) <= 100
    return "boss" in principal.roles or isinstance(decision, Deny) or small


def refund_call(amount):
    return ToolCall("refund", {"amount": amount})


async def send_and_wait(rt, text="hi"):
    """Send a message; return its turn and its pending calls."""
    turn = await rt.send("c", text)
    return turn, (await turn.result()).pending


def refusals(events):
    """Return (principal, decision) of each refused decision in the log."""
    return [(event.by.id, event.decision) for event in of(events, ResolutionRefused)]


# --- edits ---


@pytest.mark.parametrize("planned", [False, True], ids=["without a preview", "with a preview"])
@pytest.mark.parametrize("bound", ["digest of the original", "digest of the edit", "no digest"])
async def test_a_principal_cannot_edit_a_call_into_one_that_they_may_not_approve(planned, bound):
    """``may_resolve`` judges the edited arguments, with their plan and digest [B36]."""

    ran, seen = [], []

    def may(principal, pending, decision):
        seen.append((pending, decision))
        return up_to_100(principal, pending, decision)

    async with Runtime(agent([[refund_call(5)], "done"], refund_tool(ran, planned=planned)), may_resolve=may) as rt:
        turn, (entry,) = await send_and_wait(rt)
        own = await rt.preview("c", entry.call, {"amount": 99999}, by=BOSS)
        digests = {"digest of the original": entry.digest, "digest of the edit": own.digest, "no digest": None}
        decision = Approve(args={"amount": 99999}, digest=digests[bound])
        with pytest.raises(NotAllowed, match="carl may not resolve refund"):
            await rt.resolve("c", entry.call, decision, by=CLERK)
        judged, judged_decision = seen[-1]
        assert judged_decision == decision
        assert (judged.args, judged.preview, judged.digest) == ({"amount": 99999}, own.preview, own.digest)
        assert judged.prompt == "Refund 99999?"
        events = await rt.history("c")
        assert (refusals(events), ran) == ([("carl", "Approve")], [])
        assert await rt.pending() == [entry]
        await rt.resolve("c", entry.call, decision, by=BOSS)
        await turn.final_result()
        assert ran == [99999]


async def test_a_principal_may_edit_a_call_into_one_that_they_may_approve():
    """The call that would run is judged, not the one that the model requested [B36]."""
    ran = []
    async with Runtime(agent([[refund_call(5000)], "done"], refund_tool(ran)), may_resolve=up_to_100) as rt:
        turn, (entry,) = await send_and_wait(rt)
        with pytest.raises(NotAllowed):
            await rt.resolve("c", entry.call, Approve(), by=CLERK)
        await rt.resolve("c", entry.call, Approve(args={"amount": 50}), by=CLERK)
        await turn.final_result()
        assert ran == [50]


async def test_an_edit_runs_only_with_the_plan_that_may_resolve_has_judged():
    """If the plan changes before the run, the call is suspended and judged again [B36]."""
    ran, plans = [], ["pays 5", "pays 7", "pays 9,000,000", "pays 9,000,000"]

    @declare(approval="required")
    async def refund(amount: int) -> int:
        """Give money back."""
        ran.append(amount)
        return amount

    @refund.preview
    async def _(amount: int) -> str:
        return plans.pop(0)

    def may(principal, pending, decision):
        return pending.preview != "pays 9,000,000"

    async with Runtime(agent([[refund_call(5)], "done"], refund), may_resolve=may) as rt:
        turn, (entry,) = await send_and_wait(rt)
        await rt.resolve("c", entry.call, Approve(args={"amount": 7}, digest=entry.digest), by=CLERK)
        (again,) = (await turn.result()).pending
        assert (again.reason, again.preview, ran) == ("plan changed", "pays 9,000,000", [])
        with pytest.raises(NotAllowed):
            await rt.resolve("c", again.call, Approve(digest=again.digest), by=CLERK)


async def test_an_edit_that_is_not_allowed_refuses_the_whole_batch():
    """``resolve_many`` judges edited arguments like ``resolve`` [B36, B67]."""
    ran = []
    async with Runtime(
        agent([[refund_call(5), refund_call(6)], "done"], refund_tool(ran)), may_resolve=up_to_100
    ) as rt:
        _, (first, second) = await send_and_wait(rt)
        with pytest.raises(NotAllowed):
            await rt.resolve_many("c", {first.call: Approve(), second.call: Approve(args={"amount": 99999})}, by=CLERK)
        assert of(await rt.history("c"), CallResolved) == []


async def test_the_right_to_edit_is_checked_before_the_edited_arguments():
    """Invalid arguments are Invalid for a principal with the right, and NotAllowed without it [B36, B34]."""

    def may(principal, pending, decision):
        return "boss" in principal.roles

    async with Runtime(agent([[refund_call(5)], "done"], refund_tool([], planned=True)), may_resolve=may) as rt:
        _, (entry,) = await send_and_wait(rt)
        wrong: list[Any] = [{"amount": "all"}, {"amount": 1, "more": object()}, [1]]
        for args in wrong:
            with pytest.raises(Invalid):
                await rt.resolve("c", entry.call, Approve(args=args), by=BOSS)
            with pytest.raises(NotAllowed):
                await rt.resolve("c", entry.call, Approve(args=args), by=CLERK)
        assert await rt.pending() == [entry]


async def test_may_resolve_sees_the_error_if_the_plan_of_an_edit_cannot_be_made():
    """The arguments are judged even if the preview fails or the tool does not run here [B36]."""
    store, seen = MemoryStore(), []

    def may(principal, pending, decision):
        seen.append((pending.args, pending.preview, pending.preview_error))
        return up_to_100(principal, pending, decision)

    async with Runtime(agent([[refund_call(5)], "done"], refund_tool([], planned=True)), store=store) as rt:
        _, (entry,) = await send_and_wait(rt)
        async with Runtime(store=store.sibling(), may_resolve=may) as guest:
            with pytest.raises(NotAllowed):
                await guest.resolve("c", entry.call, Approve(args={"amount": 101}), by=CLERK)
            ((args, preview, error),) = seen
            assert (args, preview) == ({"amount": 101}, None)
            assert "does not run here" in error
    async with Runtime(agent([[refund_call(5)], "done"], refund_tool([], planned=True)), may_resolve=may) as rt:
        _, (entry,) = await send_and_wait(rt)
        await rt.resolve("c", entry.call, Approve(args={"amount": -1}), by=CLERK)
        assert seen[-1] == ({"amount": -1}, None, "there is nothing to take")


# --- previews ---


async def test_a_preview_of_edited_arguments_needs_the_right_to_approve_them():
    """A refused preview is not logged [B36]."""
    async with Runtime(agent([[refund_call(5)], "done"], refund_tool([], planned=True)), may_resolve=up_to_100) as rt:
        _, (entry,) = await send_and_wait(rt)
        before = await rt.history("c")
        with pytest.raises(NotAllowed):
            await rt.preview("c", entry.call, {"amount": 101}, by=CLERK)
        assert await rt.history("c") == before, "a refused preview is not logged"
        preview = await rt.preview("c", entry.call, {"amount": 100}, by=CLERK)
        assert preview.preview == {"pays": 100, "for": entry.call}


# --- remembered approvals ---


async def test_an_approval_cannot_be_remembered_for_a_whole_tool_without_may_grant():
    """With ``may_resolve`` alone, ``remember="tool"`` is refused, and the error names ``may_grant`` [B37]."""
    ran = []
    model = ScriptedModel([[refund_call(5)], "done", [refund_call(88888)], "done"])
    async with Runtime(agent(model, refund_tool(ran)), may_resolve=up_to_100) as rt:
        turn, (entry,) = await send_and_wait(rt)
        for by in (CLERK, BOSS):
            with pytest.raises(NotAllowed, match="may_grant"):
                await rt.resolve("c", entry.call, Approve(remember="tool"), by=by)
        events = await rt.history("c")
        assert refusals(events) == [("carl", "Approve"), ("ann", "Approve")]
        assert of(events, GrantGiven) == []
        await rt.resolve("c", entry.call, Approve(remember="args"), by=CLERK)
        await turn.final_result()
        _, (entry,) = await send_and_wait(rt)
        assert (entry.args, ran) == ({"amount": 88888}, [5])


@pytest.mark.parametrize("rules", [{}, {"may_resolve": up_to_100}], ids=["no rules", "may_resolve"])
async def test_an_approval_of_a_high_risk_tool_is_remembered_without_an_end_only_with_may_grant(rules):
    """Else it needs a duration; the refusal says so and is logged [B37]."""
    for allowed in (False, True):
        ran = []
        more: dict[str, Any] = {"may_grant": lambda *_: True} if allowed else {}
        model = ScriptedModel([[refund_call(5)], "done"])
        async with Runtime(agent(model, refund_tool(ran, risk="high")), **rules, **more) as rt:
            turn, (entry,) = await send_and_wait(rt)
            if allowed:
                await rt.resolve("c", entry.call, Approve(remember="args"), by=CLERK)
            else:
                with pytest.raises(NotAllowed, match='duration="1h"'):
                    await rt.resolve("c", entry.call, Approve(remember="args"), by=CLERK)
                with pytest.raises(NotAllowed, match='duration="1h"'):
                    await rt.resolve_many("c", {entry.call: Approve(remember="args")}, by=CLERK)
                assert of(await rt.history("c"), GrantGiven) == []
                assert refusals(await rt.history("c")) == [("carl", "Approve")] * 2
                await rt.resolve("c", entry.call, Approve(remember="args", duration="1h"), by=CLERK)
            await turn.final_result()
            (grant,) = of(await rt.history("c"), GrantGiven)
            assert ((grant.until is None), ran) == (allowed, [5])


async def test_may_grant_decides_who_may_have_an_approval_remembered():
    """``may_grant`` is asked about the edited call, for both scopes [B37]."""
    ran, seen = [], []

    async def may_grant(principal, pending, decision):
        seen.append((principal.id, pending.args, decision.remember))
        return "boss" in principal.roles

    async with Runtime(
        agent([[refund_call(5)], "done", [refund_call(7)], "done"], refund_tool(ran)),
        may_resolve=up_to_100,
        may_grant=may_grant,
    ) as rt:
        turn, (entry,) = await send_and_wait(rt)
        for scope in ("args", "tool"):
            with pytest.raises(NotAllowed, match="remembered"):
                await rt.resolve("c", entry.call, Approve(args={"amount": 6}, remember=scope), by=CLERK)
        assert seen == [("carl", {"amount": 6}, "args"), ("carl", {"amount": 6}, "tool")]
        assert refusals(await rt.history("c")) == [("carl", "Approve")] * 2
        await rt.resolve("c", entry.call, Approve(remember="tool"), by=BOSS)
        await turn.final_result()
        assert (await send_and_wait(rt))[1] == []
        assert ran == [5, 7]


async def test_a_decision_that_remembers_nothing_does_not_ask_may_grant():
    """``may_grant`` is asked only about approvals with ``remember`` [B37]."""

    def never(principal, pending, decision):
        raise AssertionError("may_grant was asked")

    async with Runtime(agent([[refund_call(5)], "done"], refund_tool([])), may_grant=never) as rt:
        turn, (entry,) = await send_and_wait(rt)
        await rt.resolve("c", entry.call, Approve(), by=CLERK)
        await turn.final_result()


async def test_an_approval_with_remember_is_refused_if_may_grant_raises():
    """The call stays pending [B37, B33]."""

    def may(*_) -> bool:
        raise ZeroDivisionError

    async with Runtime(agent([[refund_call(5)], "done"], refund_tool([])), may_grant=may) as rt:
        _, (entry,) = await send_and_wait(rt)
        with pytest.raises(NotAllowed, match="ZeroDivisionError"):
            await rt.resolve("c", entry.call, Approve(remember="args"), by=CLERK)
        assert await rt.pending() == [entry]


async def test_without_rules_any_principal_may_have_an_approval_remembered():
    """The approval of a whole tool becomes a grant [B37]."""
    async with Runtime(agent([[refund_call(5)], "done"], refund_tool([]))) as rt:
        turn, (entry,) = await send_and_wait(rt)
        await rt.resolve("c", entry.call, Approve(remember="tool"), by=CLERK)
        await turn.final_result()
        assert len(await rt.grants("c")) == 1


# --- cancels ---


def boss_denies_large(principal, pending, decision):
    """Only a boss may take any decision on more than 100."""
    return "boss" in principal.roles or pending.args["amount"] <= 100


async def test_a_cancel_needs_the_right_to_deny_every_pending_call_of_the_turn():
    """A refused cancel is logged, and the calls stay pending [B33, B60]."""
    judged = []

    def may(principal, pending, decision):
        judged.append((pending.args["amount"], decision))
        return boss_denies_large(principal, pending, decision)

    async with Runtime(agent([[refund_call(5), refund_call(500)], "done"], refund_tool([])), may_resolve=may) as rt:
        turn, entries = await send_and_wait(rt)
        with pytest.raises(NotAllowed, match="carl may not resolve refund"):
            await rt.cancel("c", by=CLERK, reason="changed my mind")
        assert judged == [(5, Deny("changed my mind", stop=True)), (500, Deny("changed my mind", stop=True))]
        events = await rt.history("c")
        assert of(events, CancelRequested) == []
        assert [(e.by.id, e.call_id, e.decision) for e in of(events, ResolutionRefused)] == [
            ("carl", entries[1].call, "Cancel")
        ]
        assert await rt.pending() == entries
        assert await rt.cancel("c", by=BOSS)
        assert (await turn.final_result()).reason == "cancelled"


async def test_an_interrupting_message_needs_the_right_to_deny_every_pending_call_of_the_turn():
    """A queued message needs no such right [B13, B33]."""
    model = ScriptedModel([[refund_call(500)], "done", "done"])
    async with Runtime(agent(model, refund_tool([])), may_resolve=boss_denies_large) as rt:
        turn, (entry,) = await send_and_wait(rt)
        with pytest.raises(NotAllowed):
            await rt.send("c", "stop that", by=CLERK, when_busy="interrupt")
        events = await rt.history("c")
        assert refusals(events) == [("carl", "Interrupt")]
        assert len(of(events, MessageReceived)) == 1
        await rt.send("c", "later", by=CLERK, when_busy="queue")
        assert await rt.pending() == [entry]
        await rt.send("c", "stop that", by=BOSS, when_busy="interrupt")
        assert (await turn.final_result()).reason == "cancelled"


async def test_a_denial_with_stop_needs_the_right_to_deny_every_pending_call_of_the_turn():
    """``Deny(stop=True)`` also ends the other calls [B33]."""
    async with Runtime(
        agent([[refund_call(5), refund_call(500)], "done"], refund_tool([])), may_resolve=boss_denies_large
    ) as rt:
        turn, entries = await send_and_wait(rt)
        with pytest.raises(NotAllowed):
            await rt.resolve("c", entries[0].call, Deny("stop", stop=True), by=CLERK)
        assert [(e.call_id, e.decision) for e in of(await rt.history("c"), ResolutionRefused)] == [
            (entries[1].call, "Deny")
        ]
        await rt.resolve("c", entries[0].call, Deny("not this"), by=CLERK)
        await rt.resolve("c", entries[1].call, Deny("stop", stop=True), by=BOSS)
        assert (await turn.final_result()).reason == "halted"


async def test_a_cancel_or_interrupt_of_an_idle_conversation_does_not_ask_may_resolve():
    """Without a pending call there is nothing to judge [B58]."""

    def never(principal, pending, decision):
        raise AssertionError("may_resolve was asked")

    async with Runtime(agent(["done"]), may_resolve=never) as rt:
        await (await rt.send("c", "hi", by=CLERK)).final_result()
        assert not await rt.cancel("c", by=CLERK)
        turn = await rt.send("c", "hi", by=CLERK, when_busy="interrupt")
        await turn.final_result()


@pytest.mark.parametrize("verb", ["cancel", "interrupt", "stop"])
async def test_a_call_that_is_suspended_while_a_cancel_is_judged_is_judged_too(verb):
    """Every call that is pending when the cancel is recorded has been judged [B33]."""

    @declare(approval="required")
    async def large(amount: int) -> int:
        """Give much back."""
        return amount

    plans = []

    @large.preview
    async def _(amount: int) -> str:
        plans.append(amount)
        await released.wait()
        return "much"

    released = asyncio.Event()
    asked = []

    async def both_are_pending():
        return len(await rt.pending()) == 2

    async def may(principal, pending, decision):
        asked.append(pending.tool)
        if pending.tool == "refund":  # while this is judged, the other call is suspended
            released.set()
            await until(both_are_pending)
            return True
        return False

    calls = [refund_call(5), ToolCall("large", {"amount": 500})]
    async with Runtime(agent([calls, "done"], refund_tool([]), large), may_resolve=may) as rt:
        await rt.send("c", "hi")
        await until(lambda: plans)
        (entry,) = await until(rt.pending)
        verbs = {
            "cancel": lambda: rt.cancel("c", by=CLERK),
            "interrupt": lambda: rt.send("c", "stop", by=CLERK, when_busy="interrupt"),
            "stop": lambda: rt.resolve("c", entry.call, Deny("no", stop=True), by=CLERK),
        }
        with pytest.raises(NotAllowed):
            await verbs[verb]()
        assert asked == ["refund", "refund", "large"]
        events = await rt.history("c")
        assert of(events, CancelRequested) == of(events, CallResolved) == []


@pytest.mark.parametrize("verb", ["submit", "deny and stop", "cancel", "interrupt"])
async def test_a_decision_that_was_judged_on_an_approval_is_judged_again_on_the_manual_call_after_it(verb):
    """Both suspensions of the call have one digest, and each is judged by itself [B33]."""

    @declare(approval="required", manual=True)
    async def wire(amount: int) -> int:
        """Wire money, by hand."""
        raise AssertionError("a person runs it")

    asked = []

    async def may(principal, pending, decision):
        if principal == BOSS:
            return True
        asked.append(pending.kind)
        if pending.kind == "approval":  # while the clerk is judged on the approval, the boss approves
            await rt.resolve("c", pending.call, Approve(), by=BOSS)
        return pending.kind == "approval"

    async with Runtime(agent([[ToolCall("wire", {"amount": 5})], "done"], wire), may_resolve=may) as rt:
        turn, (entry,) = await send_and_wait(rt)
        verbs = {
            "submit": lambda: rt.resolve("c", entry.call, Submit(5), by=CLERK),
            "deny and stop": lambda: rt.resolve("c", entry.call, Deny("no", stop=True), by=CLERK),
            "cancel": lambda: rt.cancel("c", by=CLERK),
            "interrupt": lambda: rt.send("c", "stop", by=CLERK, when_busy="interrupt"),
        }
        with pytest.raises(NotAllowed):
            await verbs[verb]()
        assert asked == ["approval", "manual"]
        (manual,) = await rt.pending()
        assert (manual.kind, manual.digest) == ("manual", entry.digest)
        events = await rt.history("c")
        assert [type(event.decision) for event in of(events, CallResolved)] == [Approve]
        assert of(events, CancelRequested) == []
        await rt.resolve("c", entry.call, Submit(5), by=BOSS)
        await turn.final_result()


# --- declaration of a rule ---


def two_arguments(principal, pending):
    return True


def keyword_only(principal, pending, *, decision):
    return True


@pytest.mark.parametrize("rule", [two_arguments, keyword_only, lambda: True, lambda a, b, c, d: True, 7, "boss"])
@pytest.mark.parametrize("name", ["may_resolve", "may_grant"])
def test_a_rule_that_does_not_take_three_positional_arguments_is_refused(name, rule):
    """The message names the three arguments [B5]."""
    with pytest.raises(DeclarationError, match=rf"{name}.*\(principal, pending, decision\)"):
        Runtime(**{name: rule})


class Rules:
    def may(self, principal, pending, decision):
        return True

    def __call__(self, principal, pending, decision=None, *more):
        return True


@pytest.mark.parametrize("rule", [Rules().may, Rules(), lambda *_: True, lambda a, b, c, d=1: True])
def test_any_callable_that_takes_three_positional_arguments_is_a_rule(rule):
    Runtime(may_resolve=rule, may_grant=rule)


async def test_may_resolve_also_sees_decisions_that_are_not_approvals():
    """It can refuse a submitted result [B33]."""
    seen = []

    def may(principal, pending, decision):
        seen.append(decision)
        return not isinstance(decision, Submit)

    @declare(manual=True)
    def by_hand() -> int:
        """Run it by hand."""
        raise NotImplementedError

    async with Runtime(agent([[ToolCall("by_hand")], "done"], by_hand), may_resolve=may) as rt:
        _, (entry,) = await send_and_wait(rt)
        with pytest.raises(NotAllowed):
            await rt.resolve("c", entry.call, Submit(1), by=CLERK)
        assert seen == [Submit(1)]
        assert of(await rt.history("c"), CallStarted) == []


# --- the judged call is the call that runs ---


async def test_changing_a_pending_entry_or_a_decision_afterwards_does_not_change_the_call_that_runs():
    """Callers and rules get copies [B35]."""
    ran = []

    def meddling(principal, pending, decision):
        pending.args["amount"] = 4242
        return True

    async with Runtime(agent([[refund_call(5), refund_call(6)], "done"], refund_tool(ran)), may_resolve=meddling) as rt:
        turn, (first, second) = await send_and_wait(rt)
        first.args["amount"] = 5000
        await rt.resolve("c", first.call, Approve(digest=first.digest), by=CLERK)
        edit = {"amount": 7}
        await rt.resolve("c", second.call, Approve(args=edit), by=CLERK)
        edit["amount"] = 9999
        await turn.final_result()
        assert sorted(ran) == [5, 7]


async def test_an_approval_with_arguments_and_a_made_up_digest_is_stale():
    """It is stale with edited and with unchanged arguments; the entry keeps its digest [B36]."""
    async with Runtime(agent([[refund_call(5)], "done"], refund_tool([], planned=True)), may_resolve=up_to_100) as rt:
        _, (entry,) = await send_and_wait(rt)
        for args in ({"amount": 7}, dict(entry.args)):
            with pytest.raises(Stale) as refused:
                await rt.resolve("c", entry.call, Approve(args=args, digest="0" * 64), by=CLERK)
            assert refused.value.reason == "superseded"
        assert (await rt.pending("c"))[0].digest == entry.digest
