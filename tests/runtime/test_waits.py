"""A call that waits: its name CALL:SEQ, more time, reminders and escalation. All of it survives every process."""

import pytest
from support.async_tests import until
from support.runtimes import Clock, agent, of

from holdfast import (
    Answer,
    Approve,
    Deny,
    Extend,
    Invalid,
    NotAllowed,
    Principal,
    Runtime,
    ScriptedModel,
    Stale,
    ToolCall,
    tool,
)
from holdfast.core.events import CallEscalated, CallResolved, CallReturned, DeadlineExtended, ReminderDue
from holdfast.stores.memory import MemoryStore

HOUR = 3600.0
DAY = 24 * HOUR
CLERK = Principal("carl", roles=("clerk",))
BOSS = Principal("ann", roles=("boss",))


def payments(ran=None, **options):
    @tool(approval="required", **options)
    async def pay(amount: int) -> int:
        """Pay an amount."""
        if ran is not None:
            ran.append(amount)
        return amount

    return agent(ScriptedModel([[ToolCall("pay", {"amount": 5})], "done"]), pay)


async def pending_call(rt):
    await (await rt.send("c", "go")).result()
    (entry,) = await rt.pending("c")
    return entry


async def count(rt, kind):
    return len(of(await rt.history("c"), kind))


async def wait_for(rt, kind, number=1):
    async def fact():
        return await count(rt, kind) >= number

    await until(fact)
    return of(await rt.history("c"), kind)


# --- names ---


async def test_a_decision_under_an_earlier_number_is_superseded_and_a_bare_call_means_the_current_one():
    """The error says which question waits now and what changed [B107]."""
    plan = ["a"]
    ran = []

    @tool(approval="required")
    async def pay(amount: int) -> int:
        """Pay an amount."""
        ran.append(amount)
        return amount

    @pay.preview
    async def _(amount: int) -> str:
        return plan[0]

    async with Runtime(agent(ScriptedModel([[ToolCall("pay", {"amount": 5})], "done"]), pay)) as rt:
        first = await pending_call(rt)
        assert first.id == f"{first.call}:{first.seq}"
        plan[0] = "b"
        await rt.resolve("c", first.id, Approve())

        async def waits_again():
            return [entry for entry in await rt.pending("c") if entry.seq != first.seq]

        await until(waits_again)
        (second,) = await rt.pending("c")
        for decision in (Approve(), Deny("no"), Approve(digest=first.digest)):
            with pytest.raises(Stale) as stale:
                await rt.resolve("c", first.id, decision)
            assert stale.value.reason == "superseded"
            assert stale.value.details["suspension"] == second.id
            assert stale.value.details["changed"] == ["preview"]
        await rt.resolve("c", first.call, Approve())
        await wait_for(rt, CallReturned)
        assert ran == [5]


async def test_a_number_under_which_the_call_never_waited_is_unknown():
    async with Runtime(payments()) as rt:
        entry = await pending_call(rt)
        with pytest.raises(Stale) as stale:
            await rt.resolve("c", f"{entry.call}:1", Approve())
        assert stale.value.reason == "unknown"
        for name in (f"{entry.call}:", f"{entry.call}:x", ":5", f"{entry.call}:-5"):
            with pytest.raises(Invalid, match="names no call"):
                await rt.resolve("c", name, Approve())
        with pytest.raises(Invalid, match="two decisions"):
            await rt.resolve_many("c", {entry.call: Approve(), entry.id: Deny()})
        assert [now.id for now in await rt.pending("c")] == [entry.id]


async def test_a_late_decision_under_the_number_that_was_decided_names_the_winner():
    async with Runtime(payments()) as rt:
        entry = await pending_call(rt)
        await rt.resolve("c", entry.id, Approve(), by="ada")
        with pytest.raises(Stale) as stale:
            await rt.resolve("c", entry.id, Deny(), by="bob")
        assert (stale.value.reason, stale.value.winner) == ("resolved", "ada")


# --- more time ---


async def test_extend_moves_the_deadline_once_it_is_logged_and_the_call_expires_at_the_new_one_once():
    """The old deadline passes without effect [B113, B124]."""
    clock = Clock()
    async with Runtime(payments(expires="1h"), clock=clock) as rt:
        entry = await pending_call(rt)
        assert entry.extend_until == clock.now + 30 * DAY
        receipt = await rt.resolve(entry, Extend("3h"), by="ada")
        (event,) = of(await rt.history("c"), DeadlineExtended)
        assert (event.seq, event.by.id, event.until) == (receipt.seq, "ada", clock.now + 3 * HOUR)
        (now,) = await rt.pending("c")
        assert (now.id, now.deadline) == (entry.id, clock.now + 3 * HOUR)
        clock.now = entry.deadline + 1
        await rt.resolve("c", entry.call, Extend(now.deadline + HOUR), by="bob")  # it is still waiting
        clock.now = now.deadline + HOUR
        (resolved,) = await wait_for(rt, CallResolved)
        assert resolved.at == clock.now
        await wait_for(rt, CallReturned)
        assert await count(rt, CallResolved) == 1


async def test_a_deadline_never_moves_past_the_tools_limit_or_forward():
    """The refusal names the latest deadline and logs nothing [B113]."""
    clock = Clock()
    async with Runtime(payments(expires="1h", extend_limit="2h"), clock=clock) as rt:
        entry = await pending_call(rt)
        length = len(await rt.history("c"))
        for until_ in ("3h", clock.now + 2 * HOUR + 1, "10m", entry.deadline, float("inf"), float("nan"), "soon", True):
            with pytest.raises(Invalid):
                await rt.resolve("c", entry.call, Extend(until_))
        assert len(await rt.history("c")) == length
        await rt.resolve("c", entry.call, Extend("2h"))
        with pytest.raises(Invalid) as refusal:
            await rt.resolve("c", entry.call, Extend(clock.now + 2.5 * HOUR))
        assert refusal.value.details["extend_until"] == clock.now + 2 * HOUR


async def test_a_question_can_be_extended_and_a_client_call_cannot():
    @tool(executor="human", prompt="Which?", expires="1h")
    def choose() -> str: ...

    @tool(executor="client", expires="1h")
    def locate() -> str:
        """Locate the user."""
        raise NotImplementedError

    clock = Clock()
    model = ScriptedModel([[ToolCall("choose"), ToolCall("locate")], "done"])
    async with Runtime(agent(model, choose, locate), clock=clock) as rt:
        await (await rt.send("c", "go")).result()
        question, client = sorted(await rt.pending("c"), key=lambda entry: entry.tool)
        await rt.resolve(question, Extend("2h"))
        with pytest.raises(Invalid, match="waits for ClientResult or Failed"):
            await rt.resolve(client, Extend("2h"))
        clock.now += 1.5 * HOUR
        await rt.resolve("c", question.call, Answer("the window seat"))


# --- reminders ---


async def test_each_reminder_is_logged_once_at_its_time_and_survives_the_process():
    """The process that reminds need not run the agent or have been there before [B113]."""
    clock, store = Clock(), MemoryStore()
    async with Runtime(payments(expires="2d", remind=["1h", "1d"]), store=store, clock=clock) as rt:
        entry = await pending_call(rt)
        assert entry.next_reminder == entry.deadline - DAY
    async with Runtime(store=store.sibling(), clock=clock) as rt:
        clock.now = entry.deadline - DAY
        assert [event.before for event in await wait_for(rt, ReminderDue)] == [DAY]
    async with Runtime(store=store.sibling(), clock=clock) as rt:
        (entry,) = await rt.pending("c")
        assert entry.next_reminder == entry.deadline - HOUR
        clock.now = entry.deadline - HOUR
        assert [event.before for event in await wait_for(rt, ReminderDue, 2)] == [DAY, HOUR]
        (entry,) = await rt.pending("c")
        assert (entry.next_reminder, entry.due) == (None, entry.deadline)
        clock.now = entry.deadline
        await wait_for(rt, CallResolved)
        assert await count(rt, ReminderDue) == 2


async def test_of_several_missed_reminders_only_the_last_is_given_and_none_after_the_deadline():
    clock, store = Clock(), MemoryStore()
    async with Runtime(payments(expires="2d", remind=["1d", "2h", "1h"]), store=store, clock=clock) as rt:
        entry = await pending_call(rt)
    clock.now = entry.deadline - 30 * 60
    async with Runtime(store=store.sibling(), clock=clock) as rt:
        assert [event.before for event in await wait_for(rt, ReminderDue)] == [HOUR]
        clock.now = entry.deadline
        await wait_for(rt, CallResolved)
        assert await count(rt, ReminderDue) == 1


async def test_a_reminder_that_lies_before_the_suspension_is_left_out():
    clock = Clock()
    async with Runtime(payments(expires="30m", remind=["1h", "10m"]), clock=clock) as rt:
        entry = await pending_call(rt)
        assert entry.next_reminder == entry.deadline - 600


async def test_a_new_deadline_has_reminders_of_its_own():
    clock = Clock()
    async with Runtime(payments(expires="2h", remind=["1h"]), clock=clock) as rt:
        entry = await pending_call(rt)
        clock.now = entry.deadline - HOUR
        await wait_for(rt, ReminderDue)
        await rt.resolve("c", entry.call, Extend("3h"))
        (now,) = await rt.pending("c")
        assert now.next_reminder == now.deadline - HOUR
        clock.now = now.next_reminder
        await wait_for(rt, ReminderDue, 2)


# --- escalation ---


async def test_escalation_widens_who_may_decide_at_its_time_also_if_no_process_ran_before():
    """The event is in the log and the card names the new deciders [B114]."""
    clock, store = Clock(), MemoryStore()
    options = {"approver_roles": ("clerk",), "escalate_to": ("boss",), "escalate_after": "4h"}
    async with Runtime(payments(**options), store=store, clock=clock) as rt:
        entry = await pending_call(rt)
        assert (entry.escalate_to, entry.escalate_at, entry.escalated_to) == (("boss",), clock.now + 4 * HOUR, ())
        with pytest.raises(NotAllowed):
            await rt.resolve(entry, Approve(), by=BOSS)
    clock.now += 4 * HOUR
    ran = []
    async with Runtime(payments(ran, **options), store=store.sibling(), clock=clock) as rt:
        (event,) = await wait_for(rt, CallEscalated)
        assert (event.by.id, event.to) == ("system", ("boss",))
        (now,) = await rt.pending("c")
        assert (now.id, now.escalate_at, now.escalated_to) == (entry.id, None, ("boss",))
        await rt.resolve(now, Approve(), by=BOSS)
        await wait_for(rt, CallReturned)
        assert ran == [5]


async def test_those_who_could_decide_before_an_escalation_still_can_and_a_name_counts_as_a_role():
    clock = Clock()
    options = {"approver_roles": ("clerk",), "escalate_to": ("ann",), "escalate_after": "1h"}
    async with Runtime(payments(**options), clock=clock) as rt:
        entry = await pending_call(rt)
        clock.now += HOUR
        await wait_for(rt, CallEscalated)
        with pytest.raises(NotAllowed):
            await rt.resolve(entry, Approve(), by=Principal("eve"))
        await rt.resolve(entry, Extend("8d"), by=Principal("ann"))
        await rt.resolve(entry, Approve(), by=CLERK)


async def test_an_escalated_extended_and_reminded_call_expires_exactly_once():
    """Each of these events happens once, in order of time [B124]."""
    clock = Clock()
    options = {"expires": "3h", "remind": ["1h"], "escalate_to": ("boss",), "escalate_after": "30m"}
    async with Runtime(payments(**options), clock=clock) as rt:
        entry = await pending_call(rt)
        clock.now += 30 * 60
        await wait_for(rt, CallEscalated)
        await rt.resolve(entry, Extend("4h"))
        (now,) = await rt.pending("c")
        clock.now = now.deadline - HOUR
        await wait_for(rt, ReminderDue)
        clock.now = now.deadline
        await wait_for(rt, CallReturned)
        clock.now += 100 * DAY
        kinds = (CallEscalated, DeadlineExtended, ReminderDue, CallResolved, CallReturned)
        log = [event.type for event in await rt.history("c") if isinstance(event, kinds)]
        assert log == [kind.__name__ for kind in kinds]
