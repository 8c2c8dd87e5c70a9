"""The delivery loop: which notices are made, when they are tried, and what becomes of them."""

import asyncio
import logging
from contextlib import closing
from typing import Any

import apsw
import pytest
from support.async_tests import until
from support.notices import (
    BatchRecorder,
    ChoosyRecorder,
    Recorder,
    locate,
    question_agent,
    refund_agent,
    rows_with_errors,
)
from support.receivers import SECRET, HTTPReceiver
from support.runtimes import Counting

from holdfast import Agent, Answer, Approve, Deny, Extend, Principal, Runtime, ScriptedModel, Stale, ToolCall, tool
from holdfast.channels import ReceiverGone, Route, TryLater, Undeliverable, Webhook
from holdfast.channels.card import title
from holdfast.channels.decide import explain_outcome
from holdfast.core.notice import NOTICE_KINDS
from holdfast.errors import DeclarationError
from holdfast.runtime.pending_calls import outbox
from holdfast.stores.memory import MemoryStore
from holdfast.testing import ManualClock


async def empty(store):
    return not await store.outbox()


async def test_a_channel_is_told_that_a_call_waits_how_it_was_decided_and_that_the_turn_ended():
    """Each notice has the facts of its event; the first has the pending call [B116]."""
    channel = Recorder()
    async with Runtime(refund_agent(), channels=[channel]) as rt:
        result = await rt.run("hi", conversation="c", by=Principal("ann", ("staff",)))
        await until(lambda: channel.sent)
        (first,) = channel.sent
        assert (first.kind, first.conversation, first.tool, first.risk) == ("suspended", "c", "refund", "high")
        assert first.pending == result.pending[0]
        assert first.suspension == first.pending.id == f"{first.call}:{first.seq}"
        assert (first.agent, first.principal.id, first.outcome) == ("desk", "ann", None)
        await rt.resolve(result.pending[0], Approve(), by="bo")
        await rt.wait("c")
        await until(lambda: len(channel.sent) == 3)
        _, decided, ended = channel.sent
        assert (decided.kind, decided.by.id, decided.outcome, decided.pending) == ("resolved", "bo", "approved", None)
        assert (decided.suspension, decided.tool, decided.prompt) == (first.suspension, "refund", first.prompt)
        assert (ended.kind, ended.outcome, ended.call, ended.principal.id) == ("turn_ended", "completed", None, "ann")
        await until(lambda: empty(rt.store))
        assert [notice.id for notice in channel.sent] == [f"c/{notice.seq}/recorder" for notice in channel.sent]


async def test_a_denial_an_answer_an_expiry_and_a_cancel_are_told_with_their_outcomes():
    clock, channel = ManualClock(), Recorder(kinds=("resolved", "expired"))
    async with Runtime(question_agent(), channels=[channel], clock=clock, expires="1h") as rt:
        for name in "abcd":
            await rt.run("hi", conversation=name)
        entries = {entry.conversation: entry for entry in await rt.pending()}
        await rt.resolve(entries["a"], Deny("not now"), by="ann")
        await rt.resolve(entries["b"], Answer("red"), by="ann")
        await rt.cancel("c", by="bo")
        await until(lambda: len(channel.sent) == 3)
        clock.advance("1h")
        await until(lambda: len(channel.sent) == 4)
    found = {notice.conversation: (notice.kind, notice.outcome, notice.reason) for notice in channel.sent}
    assert found == {
        "a": ("resolved", "denied", "not now"),
        "b": ("resolved", "answered", None),
        "c": ("resolved", "cancelled", None),
        "d": ("expired", "expired", None),
    }
    assert {notice.suspension for notice in channel.sent} == {entry.id for entry in entries.values()}


async def test_a_notice_of_a_process_whose_clock_was_ahead_is_delivered_when_it_is_retried():
    """Only a route postpones a notice; its event's time does not [B116]."""
    store, channel = MemoryStore(), Recorder()
    clock = ManualClock()
    async with Runtime(channels=[channel], store=store, clock=clock):
        async with Runtime(refund_agent(), store=store.sibling(), clock=lambda: clock() + 3600.0) as ahead:
            await ahead.run("hi", conversation="c")
        (row,) = await store.outbox()
        assert row.due == clock() + 3600.0
        await store.retry_notices([row.id], clock())
        await until(lambda: channel.sent)
        await until(lambda: empty(store))


async def test_a_call_that_waits_for_a_browser_is_not_announced_to_people():
    channel = Recorder()
    model = ScriptedModel([[ToolCall("locate", {})], "done"])
    async with Runtime(Agent("desk", model=model, tools=[locate]), channels=[channel]) as rt:
        await rt.send("c", "hi")
        await until(lambda: rt.pending("c"))
        await rt.cancel("c")
        await until(lambda: channel.sent)
        assert channel.kinds_sent == ["turn_ended"]


async def test_rows_exist_exactly_for_committed_events_and_only_for_kinds_that_the_channel_wants():
    """An append that did not happen leaves no row [B116]."""
    store = Counting()
    channel = Recorder(kinds=("suspended",))
    channel.fails = [TryLater("no")] * 100
    async with Runtime(refund_agent(), store=store, channels=[channel]) as rt:
        result = await rt.run("hi", conversation="c")
        await until(lambda: channel.tried)
        with pytest.raises(Exception, match="no call"):
            await rt.resolve("c", "nothing", Approve())
        await rt.resolve(result.pending[0], Approve())
        await rt.wait("c")
        rows = await store.outbox()
        assert [(row.kind, row.seq) for row in rows] == [("suspended", result.pending[0].seq)]


async def test_without_channels_nothing_is_started_and_no_row_is_written():
    """The outbox costs nothing where no channel is set [B116]."""
    store = MemoryStore()
    async with Runtime(refund_agent(), store=store) as rt:
        await rt.run("hi", conversation="c")
        assert not [task for task in asyncio.all_tasks() if "outbox" in task.get_name()]
        assert await store.outbox() == []
        assert await store.channels() == []


async def test_a_process_without_the_channel_writes_the_rows_and_one_that_has_it_delivers_them():
    """The channels are in the store: no process needs to know those of another [B116]."""
    store = MemoryStore()
    channel = Recorder(kinds=("suspended",))
    async with Runtime(store=store.sibling(), channels=[channel]) as desk, Runtime(refund_agent(), store=store) as rt:
        await rt.run("hi", conversation="c")
        await until(lambda: channel.sent)
        assert channel.sent[0].pending == (await desk.pending())[0]


async def test_a_failed_attempt_is_repeated_on_the_schedule_under_the_same_id_and_then_given_up():
    """Immediately, 5 s, 5 min, 30 min, 2 h, 5 h, 10 h, 14 h, 20 h, 24 h; then the row is kept as failed [B116]."""
    clock, store, channel = ManualClock(), MemoryStore(), Recorder(kinds=("suspended",))
    channel.fails = [TryLater(f"down {n}") for n in range(20)]
    async with Runtime(refund_agent(), store=store, channels=[channel], clock=clock, expires="30d") as rt:
        await rt.run("hi", conversation="c")
        for tries, delay in enumerate(outbox.RETRY_SECONDS, 1):
            row = await until(lambda n=tries: waiting(store, n))
            assert f"down {tries - 1}" in row.error
            assert len(channel.tried) == tries
            assert delay <= row.due - clock() <= delay * (1 + outbox.JITTER) + 1
            clock.now = row.due - 0.5
            await asyncio.sleep(3 * outbox.MANUAL_CLOCK_SECONDS)
            assert len(channel.tried) == tries, "it was tried too early"
            clock.now = row.due
        row = await until(lambda: failed(store))
        assert row.attempts == len(channel.tried) == 10
        assert {notice.id for notice in channel.tried} == {row.id}
        channel.fails = []
        await store.retry_notices([row.id], clock())
        await until(lambda: channel.sent)
        await until(lambda: empty(store))
    assert outbox.RETRY_SECONDS == (5, 300, 1800, 7200, 18000, 36000, 50400, 72000, 86400)


async def waiting(store, attempts):
    rows = [row for row in await store.outbox() if row.attempts == attempts and row.error and not row.failed]
    return rows[0] if rows and f"{attempts - 1}" in rows[0].error else None


async def failed(store):
    return next((row for row in await store.outbox() if row.failed), None)


async def test_a_receiver_can_ask_for_a_later_attempt_and_refuse_a_notice_for_good():
    clock, store, channel = ManualClock(), MemoryStore(), Recorder(kinds=("suspended",))
    channel.fails = [TryLater("busy", 100.0), Undeliverable("no such address")]
    async with Runtime(refund_agent(), store=store, channels=[channel], clock=clock) as rt:
        await rt.run("hi", conversation="c")
        row = await until(lambda: waiting_any(store))
        assert row.due >= clock() + 100
        clock.now = row.due
        row = await until(lambda: failed(store))
        assert row.error == "Undeliverable: no such address"
        assert row.attempts == 2


async def waiting_any(store):
    return next((row for row in await store.outbox() if row.error and not row.failed), None)


async def test_a_receiver_that_is_gone_ends_the_channel_and_its_rows(caplog):
    """Nothing is queued for it any more [B116]."""
    store, gone, other = MemoryStore(), Recorder("gone"), Recorder("other")
    gone.fails = [ReceiverGone("410")]
    async with Runtime(refund_agent(), store=store, channels=[gone, other]) as rt:
        result = await rt.run("hi", conversation="c")
        await until(lambda: len(gone.tried) == 1)
        await until(lambda: no_channel(store, "gone"))
        await rt.resolve(result.pending[0], Approve())
        await rt.wait("c")
        await until(lambda: len(other.sent) == 3)
        await until(lambda: empty(store))
        assert len(gone.tried) == 1
    assert "wants no more notices" in caplog.text


async def no_channel(store, name):
    return name not in [row.name for row in await store.channels()]


async def test_a_channel_that_hangs_delays_no_other_channel_and_the_close_releases_its_rows(monkeypatch):
    """Its rows are due at once for the next process [B116]."""
    monkeypatch.setattr(outbox, "CLOSE_SECONDS", 0.05)
    store, other = MemoryStore(), Recorder("other")

    class Hanging(Recorder):
        async def send(self, notice):
            self.tried.append(notice)
            await asyncio.Event().wait()

    hanging = Hanging("hanging", kinds=("suspended",))
    later = store.sibling()
    async with Runtime(refund_agent(), store=store, channels=[hanging, other]) as rt:
        for n in range(20):
            await rt.run("hi", conversation=f"c{n}")
        await until(lambda: len(other.sent) == 20)
        await until(lambda: len(hanging.tried) == outbox.MAX_CONCURRENT)
    fresh = Recorder("hanging", kinds=("suspended",))
    async with Runtime(store=later, channels=[fresh]):
        await until(lambda: len(fresh.sent) == 20)
        await until(lambda: empty(later))
    assert {notice.id for notice in fresh.sent} >= {notice.id for notice in hanging.tried}


async def test_the_notices_of_a_conversation_are_delivered_in_the_order_of_their_events():
    class Slow(Recorder):
        async def send(self, notice):
            if notice.kind == "suspended":
                await asyncio.sleep(0.05)
            await super().send(notice)

    channel = Slow()
    async with Runtime(refund_agent(), channels=[channel]) as rt:
        for n in range(5):
            result = await rt.run("hi", conversation=f"c{n}")
            await rt.resolve(result.pending[0], Approve())
            await rt.wait(f"c{n}")
        await until(lambda: len(channel.sent) == 15)
    for n in range(5):
        mine = [notice.kind for notice in channel.sent if notice.conversation == f"c{n}"]
        assert mine == ["suspended", "resolved", "turn_ended"]


async def test_a_killed_process_loses_no_notice_and_the_next_one_sends_it_under_the_same_id(monkeypatch):
    """Killed between claim and send, and between send and settle [B116]."""
    monkeypatch.setattr(outbox, "LEASE_SECONDS", 0.2)
    monkeypatch.setattr(outbox, "SEND_SECONDS", 0.1)
    for method in ("claim_notices", "settle_notice"):
        store = MemoryStore()
        channel = Recorder(kinds=("suspended",))
        rt = Runtime(refund_agent(), store=store, channels=[channel])
        await rt.start()
        reached, original = asyncio.Event(), getattr(store, method)

        async def stop_after(*args, _original=original, _reached=reached, _method=method, **options):
            done = await _original(*args, **options) if _method == "claim_notices" else None
            if done is None or done[0]:
                _reached.set()
                await asyncio.Event().wait()
            return done

        setattr(store, method, stop_after)
        await rt.run("hi", conversation="c")
        await reached.wait()
        await asyncio.gather(*rt.kill(), return_exceptions=True)
        later = store.sibling()
        fresh = Recorder(kinds=("suspended",))
        async with Runtime(store=later, channels=[fresh]):
            await until(lambda fresh=fresh: fresh.sent)
            await until(lambda later=later: empty(later))
        ids = {notice.id for notice in [*channel.sent, *fresh.sent]}
        assert len(ids) == 1
        assert len(channel.sent) == (method == "settle_notice")


async def test_the_same_failure_is_logged_once_until_the_channel_delivers_again(caplog):
    caplog.set_level(logging.WARNING, "holdfast")
    channel = Recorder(kinds=("suspended",))
    channel.fails = [TryLater("down")] * 5
    async with Runtime(refund_agent(), channels=[channel]) as rt:
        for n in range(6):
            await rt.run("hi", conversation=f"c{n}")
        await until(lambda: channel.sent)
    assert caplog.text.count("could not be delivered: TryLater: down") == 1
    assert caplog.text.count("delivers again") == 1


async def test_an_error_of_a_channel_is_recorded_without_its_secrets():
    store, channel = MemoryStore(), Recorder(kinds=("suspended",))
    channel.fails = [RuntimeError("password=hunter2 was refused")]
    async with Runtime(refund_agent(), store=store, channels=[channel]) as rt:
        await rt.run("hi", conversation="c")
        row = await until(lambda: waiting_any(store))
        assert row.error == "RuntimeError: password=[redacted] was refused"


async def test_a_route_leaves_out_what_it_does_not_want():
    channel = Recorder(route=Route(tools=("ref*",), risks=("high",), principals=("ann",), agents=("desk",)))
    everything = Recorder("all")
    async with Runtime(refund_agent(), refund_agent(name="other"), channels=[channel, everything]) as rt:
        for name, by, agent in (("a", "ann", "desk"), ("b", "bo", "desk"), ("c", "ann", "other")):
            await rt.run("hi", conversation=name, by=by, agent=agent)
        await until(lambda: len(everything.sent) == 3)
        await until(lambda: empty(rt.store))
        assert [notice.conversation for notice in channel.sent] == ["a"]


async def test_quiet_hours_delay_notices_but_neither_a_decision_nor_an_expiry():
    """What came in the quiet hours is delivered together at their end [B125]."""
    clock = ManualClock(1_700_000_000.0)  # 2023-11-14 22:13 UTC
    channel = BatchRecorder(route=Route(quiet=("22:00", "07:00", "UTC")))
    async with Runtime(question_agent(), channels=[channel], clock=clock, expires="1h") as rt:
        for name in "ab":
            await rt.run("hi", conversation=name)
        entries = {entry.conversation: entry for entry in await rt.pending()}
        await rt.resolve(entries["a"], Answer("red"))
        assert (await rt.wait("a")).text == "done"
        clock.advance("1h")
        await until(lambda: is_idle(rt, "b"))
        await until(lambda: all_due_at(rt.store, 1_700_031_600.0))  # 07:00
        assert channel.tried == []
        clock.now = 1_700_031_600.0
        await until(lambda: len(channel.sent) == 6)
        assert len(channel.digests) == 1
        outcomes = [(n.conversation, n.kind) for n in channel.sent if n.kind in ("resolved", "expired")]
        assert sorted(outcomes) == [("a", "resolved"), ("b", "expired")]


async def is_idle(rt, conversation):
    return (await rt.snapshot(conversation)).state == "idle"


async def all_due_at(store, due):
    rows = await store.outbox()
    return len(rows) == 6 and all(row.due == due for row in rows)


async def test_a_digest_sends_what_came_within_its_time_as_one_message():
    """Retries of a digest keep the whole schedule: waiting for it is no attempt [B125]."""
    clock = ManualClock(1_700_000_000.0)
    channel = BatchRecorder(kinds=("suspended",), route=Route(digest="15m"))
    channel.fails = [TryLater("down")]
    async with Runtime(refund_agent(), channels=[channel], clock=clock) as rt:
        for name in "abc":
            await rt.run("hi", conversation=name)
        end = await until(lambda: digest_end(rt.store))
        assert clock() < end <= clock() + 900
        assert end % 900 == 0
        assert channel.tried == []
        clock.now = end
        rows = await until(lambda: all_failed_once(rt.store))
        assert [len(digest) for digest in channel.digests] == [3]
        assert all(5 <= row.due - clock() <= 6 for row in rows)
        clock.now = end + 6
        await until(lambda: len(channel.sent) == 3)


async def digest_end(store, count=3) -> Any:
    """Return the end of the digest, once all of these rows wait for it."""
    rows = await store.outbox()
    dues = {row.due for row in rows}
    return dues.pop() if len(rows) == count and len(dues) == 1 and all(row.attempts for row in rows) else None


async def all_failed_once(store):
    rows = await store.outbox()
    return rows if rows and all(row.error for row in rows) else None


async def test_a_notice_of_a_digest_that_is_refused_fails_alone_and_the_others_are_not_sent_again():
    """Each row is settled by its own outcome [B116]."""
    clock, store = ManualClock(1_700_000_000.0), MemoryStore()
    channel = ChoosyRecorder(kinds=("suspended",), route=Route(digest="15m"))
    channel.refuses = {"b": Undeliverable("too long"), "c": TryLater("busy", 60.0), "d": TryLater("busy", 60.0)}
    async with Runtime(refund_agent(), store=store, channels=[channel], clock=clock) as rt:
        for name in "abcde":
            await rt.run("hi", conversation=name)
        clock.now = await until(lambda: digest_end(store, 5))
        rows = {row.conversation: row for row in await until(lambda: rows_with_errors(store, 3))}
        assert {notice.conversation for notice in channel.sent} == {"a", "e"}
        assert (rows["b"].failed, rows["b"].error) == (True, "Undeliverable: too long")
        assert not rows["c"].failed
        assert rows["c"].due >= clock() + 60
        assert rows["c"].due == rows["d"].due, "the rest of a digest is retried as one digest"
        channel.refuses = {}
        clock.now = rows["c"].due
        await until(lambda: len(channel.sent) == 4)
    assert [sorted(n.conversation for n in digest) for digest in channel.digests] == [list("abcde"), ["c", "d"]]


async def test_a_receiver_that_is_gone_in_the_middle_of_a_digest_ends_the_channel():
    clock, store = ManualClock(1_700_000_000.0), MemoryStore()
    channel = ChoosyRecorder(kinds=("suspended",), route=Route(digest="15m"))
    channel.refuses = {"b": ReceiverGone("410")}
    async with Runtime(refund_agent(), store=store, channels=[channel], clock=clock) as rt:
        for name in "abc":
            await rt.run("hi", conversation=name)
        clock.now = await until(lambda: digest_end(store))
        await until(lambda: no_channel(store, "recorder"))
        assert await empty(store)


async def test_a_conversation_that_cannot_be_read_does_not_hold_up_the_others_of_its_digest(tmp_path):
    """Its notice is retried on the schedule, as after any other failure."""
    clock, path = ManualClock(1_700_000_000.0), tmp_path / "holdfast.db"
    first = ChoosyRecorder(kinds=("suspended",), route=Route(digest="15m"))
    async with Runtime(refund_agent(), store=f"sqlite:///{path}", channels=[first], clock=clock) as rt:
        for name in "abc":
            await rt.run("hi", conversation=name)
        end = await until(lambda: digest_end(rt.store))
    with closing(apsw.Connection(str(path))) as db:
        db.execute("DELETE FROM events WHERE seq = 2 AND conversation = 2")  # the second one: "b"
        assert db.changes() == 1
    clock.now = end
    channel = ChoosyRecorder(kinds=("suspended",), route=Route(digest="15m"))
    async with Runtime(store=f"sqlite:///{path}", channels=[channel], clock=clock) as rt:
        (row,) = await until(lambda: rows_with_errors(rt.store, 1))
        assert (row.conversation, row.failed) == ("b", False)
        assert {notice.conversation for notice in channel.sent} == {"a", "c"}


async def test_a_digest_has_no_more_notices_than_its_channel_takes_and_the_next_one_follows():
    """The rows of the next digest are claimed after this one has ended: waiting costs them no attempt."""
    clock, store = ManualClock(1_700_000_000.0), MemoryStore()

    class Small(ChoosyRecorder):
        digest_limit = 2

        async def send_many(self, notices):
            claimed.append(sum(row.due > clock() for row in await store.outbox()))
            return await super().send_many(notices)

    claimed: list[int] = []
    channel = Small(kinds=("suspended",), route=Route(digest="15m"))
    async with Runtime(refund_agent(), store=store, channels=[channel], clock=clock) as rt:
        for name in "abcde":
            await rt.run("hi", conversation=name)
        clock.now = await until(lambda: digest_end(store, 5))
        await until(lambda: len(channel.sent) == 5)
        await until(lambda: empty(store))
    assert [len(digest) for digest in channel.digests] == [2, 2]
    assert claimed == [2, 2]


NO_KINDS: Any = ("nothing",)


@pytest.mark.parametrize(
    "wrong",
    [object(), Recorder(""), Recorder(kinds=()), Recorder(kinds=NO_KINDS)],
    ids=["object", "no name", "no kinds", "unknown kind"],
)
def test_an_object_that_is_no_channel_is_refused(wrong):
    with pytest.raises(DeclarationError):
        Runtime(refund_agent(), channels=[wrong])


def test_two_channels_of_one_name_are_refused():
    with pytest.raises(DeclarationError, match="two channels"):
        Runtime(refund_agent(), channels=[Recorder(), Recorder()])


def finance_decides(by, pending, decision):
    return "finance" in by.roles


async def test_messages_name_the_principal_for_whom_a_deputy_decided_voted_or_extended():
    """In the notice, and so in the words of every channel, and in the body of a webhook [B126]."""

    @tool(approval="required", approvers=2, approver_roles=("finance",), prompt="Pay?")
    def pay() -> str:
        """Pay."""
        return "paid"

    agent = Agent("a", model=ScriptedModel([[ToolCall("pay")], "done"]), tools=[pay])
    channel = Recorder(kinds=("voted", "extended", "resolved"))
    async with Runtime(agent, channels=[channel], may_resolve=finance_decides) as rt, HTTPReceiver() as receiver:
        entry = (await rt.run("hi", conversation="c")).pending[0]
        await rt.delegate("bob", "1h", by=Principal("ada", roles=("finance",)))
        await rt.delegate("cy", "1h", by=Principal("dan", roles=("finance",), claims={"token": "sign-in secret"}))
        await rt.resolve(entry, Extend(entry.deadline + 60), by="bob")
        await rt.resolve(entry, Approve(), by="bob")
        await rt.resolve(entry, Approve(), by="cy")
        await until(lambda: len(channel.sent) == 4)
        webhook = Webhook(receiver.url, SECRET, allow_private=True, full=True)
        for notice in channel.sent:
            await webhook.send(notice)
        with pytest.raises(Stale, match="was approved by cy for dan") as late:
            await rt.resolve(entry, Approve(), by="bob")
        assert late.value.winner == "cy"
        assert "was approved by cy for dan" in str(await explain_outcome(rt, "c", entry.id))
    assert sorted(title(notice) for notice in channel.sent) == [
        "bob for ada approved pay: Pay?",
        "bob for ada extended the deadline of pay: Pay?",
        "cy for dan approved pay: Pay?",
        "pay was approved by cy for dan: Pay?",
    ]
    sent = [request.json["data"] for request in receiver.requests]
    assert {(data["by"], data["on_behalf_of"]) for data in sent} == {("bob", "ada"), ("cy", "dan")}
    assert not any(b"sign-in secret" in request.body for request in receiver.requests)


def test_every_kind_of_notice_has_words():
    from holdfast.core.decisions import SYSTEM
    from holdfast.core.notice import Notice

    for kind in NOTICE_KINDS:
        facts = {"id": "x", "kind": kind, "conversation": "c", "seq": 1, "at": 0.0, "by": SYSTEM, "principal": SYSTEM}
        assert "\n" not in title(Notice(**facts, agent="a", tool="refund", prompt="a\nb", outcome="approved"))
