"""The history of decisions: who decided what, over all conversations."""

import csv
import io
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from support.runtimes import Clock, agent

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
    ToolCall,
    blocking,
)
from holdfast import tool as declare
from holdfast.core.audit import DECISION_KINDS
from holdfast.core.events import TurnEnded
from holdfast.runtime import audit
from holdfast.runtime.audit_export import CSV_COLUMNS, csv_line, export_decisions, safe_cell
from holdfast.stores.memory import MemoryStore


@declare(
    approval="required",
    expires="1h",
    prompt="Pay {amount}?",
)
async def pay(amount: int, to: str = "") -> int:
    """Pay an amount."""
    return amount


@pay.preview
def plan(amount: int, to: str = "") -> dict[str, object]:
    return {"transfer": amount, "to": to}


@declare(approval="required", approvers=2)
async def wipe(disk: str) -> str:
    """Wipe a disk."""
    return disk


@declare(executor="human", prompt="Which colour?")
async def colour() -> str:  # pyright: ignore[reportReturnType]
    """Ask for a colour."""


def runtime(clock=None, *calls, store: Any = "memory:", **rules):
    steps = [[call] for call in calls or (ToolCall("pay", {"amount": 100, "to": "Zürich"}),)]
    model = ScriptedModel([*steps, "Done."], follow=True)
    return Runtime(agent(model, pay, wipe, colour), store=store, clock=clock or Clock(1000.0), **rules)


async def ask(rt, conversation="c", text="please"):
    """Start a turn and return its pending call."""
    turn = await rt.send(conversation, text, by="user")
    return (await turn.result()).pending[0]


async def decide(rt, conversation, decision, by="ada"):
    await rt.resolve(await ask(rt, conversation), decision, by=by)
    await rt.wait(conversation)


async def kinds_of(rt, **filters):
    return [record.kind for record in (await rt.decisions(**filters)).decisions]


async def names_of(rt, **filters):
    return [record.conversation for record in (await rt.decisions(**filters)).decisions]


async def test_a_decision_has_the_plan_the_arguments_the_edit_and_who_decided_when():
    """What was shown and what was decided are read from the log [B122]."""
    clock = Clock(1000.0)
    async with runtime(clock) as rt:
        entry = await ask(rt)
        clock.now = 1060.0
        boss = Principal("ada", roles=("finance",), claims={"mail": "ada@example.org"})
        await rt.resolve(entry, Approve(args={"amount": 50}, remember="args"), by=boss)
        await rt.wait("c")
        (record,) = (await rt.decisions(verify=True)).decisions
        assert (record.conversation, record.title, record.kind, record.tool) == ("c", "please", "edit", "pay")
        assert (record.at, record.asked, record.prompt) == (1060.0, 1000.0, "Pay 100?")
        assert record.by == Principal("ada", roles=("finance",))  # without the claims
        assert record.args == {"amount": 100, "to": "Zürich"}
        assert record.preview == {"transfer": 100, "to": "Zürich"}
        assert (record.digest, record.edited) == (entry.digest, {"amount": 50})
        assert (record.remember, record.scope, record.verified) == ("args", "conversation", True)
        await rt.revoke("c", (await rt.grants("c"))[0].id, by="bob")
        record = (await rt.decisions(verify=True)).decisions[0]
        assert (record.kind, record.tool, record.by.id, record.verified) == ("revoke", "pay", "bob", True)


async def test_every_way_in_which_a_call_ends_its_wait_is_in_the_history():
    clock = Clock(1000.0)
    ask_colour, pay_more = ToolCall("colour", {}), ToolCall("pay", {"amount": 1})
    async with runtime(clock, ask_colour, pay_more) as rt:
        await rt.resolve(await ask(rt), Answer("red"), by="ada")
        entry = (await rt.wait("c")).pending[0]
        await rt.resolve(entry, Extend("2h"), by="ada")
        await rt.cancel("c", by="bob", reason="too late")
        (cancelled, extended, answered) = (await rt.decisions(verify=True)).decisions
        assert (cancelled.kind, cancelled.by.id, cancelled.reason, cancelled.call) == ("cancel", "bob", "too late", "")
        assert (extended.kind, extended.tool, extended.until) == ("extend", "pay", 1000.0 + 7200)
        assert (answered.kind, answered.tool, answered.value, answered.args) == ("answer", "colour", "red", {})
    assert len(DECISION_KINDS) == len(set(DECISION_KINDS)) == 16


async def test_an_expired_call_is_decided_by_the_system():
    clock, store = Clock(1000.0), MemoryStore()
    async with runtime(clock, store=store) as rt:
        await ask(rt)
    clock.now = 1000.0 + 3600
    async with runtime(clock, store=store.sibling()) as rt:
        async for event in rt.events("c"):
            if isinstance(event, TurnEnded):
                break
        (record,) = (await rt.decisions()).decisions
        assert (record.kind, record.by.id, record.at, record.tool) == ("expired", "system", 4600.0, "pay")


async def test_refused_attempts_are_in_the_history_and_have_a_filter():
    async with runtime(may_resolve=lambda by, pending, decision: by.id == "ada") as rt:
        entry = await ask(rt)
        with pytest.raises(NotAllowed):
            await rt.resolve(entry, Approve(), by="eve")
        await rt.resolve(entry, Deny("not today"), by="ada")
        await rt.wait("c")
        (refused,) = (await rt.decisions(kinds=["refused"], verify=True)).decisions
        assert (refused.by.id, refused.attempted, refused.tool) == ("eve", "Approve", "pay")
        assert "eve may not resolve pay" in refused.reason
        assert await kinds_of(rt) == ["deny", "refused"]
        assert [one.reason for one in (await rt.decisions(kinds=["deny"])).decisions] == ["not today"]


async def test_a_deputys_decision_is_found_under_both_names():
    """[B126]"""
    async with runtime(may_resolve=lambda by, pending, decision: by.id == "ada") as rt:
        await rt.delegate("bob", "1h", by="ada")
        await decide(rt, "c", Approve(), by="bob")
        for who in ("bob", "ada"):
            (record,) = (await rt.decisions(who=who, verify=True)).decisions
            assert (record.by.id, record.on_behalf_of) == ("bob", "ada")
        assert await kinds_of(rt, who="user") == []


async def test_votes_are_in_the_history_and_with_the_decision_that_they_led_to():
    async with runtime(None, ToolCall("wipe", {"disk": "sda"})) as rt:
        entry = await ask(rt)
        await rt.resolve(entry, Approve(), by="ada")
        await rt.resolve("c", entry.id, Approve(digest=entry.digest), by="bob")
        await rt.wait("c")
        page = await rt.decisions(verify=True)
        approved = next(one for one in page.decisions if one.kind == "approve")
        assert sorted(vote.by.id for vote in approved.votes) == ["ada", "bob"]
        assert (approved.preview, page.problems) == (None, [])  # the tool has no preview
        assert await kinds_of(rt, kinds=["vote"]) == ["vote", "vote"]


async def test_a_page_continues_where_the_one_before_ended():
    """Also while decisions are added: none is repeated or left out."""
    clock = Clock(1000.0)
    async with runtime(clock) as rt:
        for n in range(5):
            clock.now = 1000.0 + n // 2
            await decide(rt, f"c{n}", Deny())
        whole = await names_of(rt)
        assert whole == ["c4", "c3", "c2", "c1", "c0"]
        page = await rt.decisions(limit=2)
        found = [one.conversation for one in page.decisions]
        await decide(rt, "later", Deny())
        while page.next is not None:
            page = await rt.decisions(limit=2, cursor=page.next)
            found += [one.conversation for one in page.decisions]
        assert found == whole
        pages = [page async for page in rt.decision_pages(limit=4)]
        assert [len(page.decisions) for page in pages] == [4, 2]


async def test_decisions_are_filtered():
    clock = Clock(1000.0)
    async with runtime(clock, ToolCall("pay", {"amount": 7, "to": "Genève"})) as rt:
        await decide(rt, "a", Deny("twice paid"), by="ada")
        clock.now = 2000.0
        await decide(rt, "b", Approve(), by="bob")
        assert await names_of(rt, who="bob") == ["b"]
        assert await names_of(rt, tool="pay") == ["b", "a"]
        assert await names_of(rt, tool="wipe") == []
        assert await names_of(rt, conversation="a") == ["a"]
        assert await names_of(rt, kinds=["approve", "edit"]) == ["b"]
        assert await names_of(rt, since=2000.0) == ["b"]
        assert await names_of(rt, until=2000.0) == ["a"]
        assert await names_of(rt, since=timedelta(minutes=5)) == ["b"]
        assert await names_of(rt, since="1h", until=datetime.fromtimestamp(1500, UTC)) == ["a"]
        assert await names_of(rt, text="geneve") == ["b", "a"]
        assert await names_of(rt, text="twice") == ["a"]
        assert await names_of(rt, text="twice", who="bob") == []


async def test_a_search_in_the_history_reads_a_bounded_number_of_decisions(monkeypatch):
    monkeypatch.setattr(audit, "MAX_READ", 2)
    async with runtime() as rt:
        for n in range(3):
            await decide(rt, f"c{n}", Deny("first" if n == 0 else "other"))
        page = await rt.decisions(text="first")
        assert (page.decisions, page.next is None) == ([], False)
        page = await rt.decisions(text="first", cursor=page.next)
        assert [one.conversation for one in page.decisions] == ["c0"]


async def test_a_page_is_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr(audit, "MAX_PAGE_BYTES", 10)
    async with runtime() as rt:
        for n in range(3):
            await decide(rt, f"c{n}", Deny())
        assert [len(page.decisions) async for page in rt.decision_pages()] == [1, 1, 1, 0]


async def test_what_a_viewer_may_not_see_is_not_in_its_history():
    """Nothing tells that it exists: no decision, no cursor, no problem."""
    async with runtime() as rt:
        for name in ("open1", "secret1", "open2", "secret2"):
            await decide(rt, name, Deny("reason"))

        async def visible(conversation):
            return conversation.startswith("open")

        everything = {"visible": visible, "verify": True}
        assert sorted(await names_of(rt, **everything)) == ["open1", "open2"]
        assert await names_of(rt, conversation="secret1", **everything) == []
        page = await rt.decisions(limit=1, **everything)
        assert "secret" not in (page.next or "")
        assert [len(page.decisions) async for page in rt.decision_pages(limit=1, **everything)] == [1, 1, 0]


async def test_wrong_filters_are_refused():
    async with runtime() as rt:
        with pytest.raises(Invalid, match="a kind of decision is one of approve, edit"):
            await rt.decisions(kinds=["approved"])  # pyright: ignore[reportArgumentType]
        with pytest.raises(Invalid, match=r'`kinds` is a list, such as \["deny"\]'):
            await rt.decisions(kinds="deny")  # pyright: ignore[reportArgumentType]
        for cursor in ("", "x", "1.0:2", "nan:1:c", "1.0:-1:c", "inf:1:c"):
            with pytest.raises(Invalid, match="is no cursor of the history of decisions"):
                await rt.decisions(cursor=cursor)
        with pytest.raises(Invalid, match="`since` needs a time zone"):
            await rt.decisions(since=datetime(2027, 1, 1))
        with pytest.raises(Invalid, match="`who` is text"):
            await rt.decisions(who=3)  # pyright: ignore[reportArgumentType]


async def test_a_history_of_a_store_that_was_not_indexed_yet_is_complete_later(monkeypatch):
    """The logs of an older version are indexed when the history is asked for."""
    async with runtime() as rt:
        for n in range(3):
            await decide(rt, f"c{n}", Deny())
        await rt.decisions()
        await rt.store.reset_index()
        assert sorted(await names_of(rt)) == ["c0", "c1", "c2"]


async def test_decisions_long_after_their_call_are_indexed_with_its_tool(monkeypatch):
    """A part of the log that is indexed may begin between a call and its decision."""
    monkeypatch.setattr("holdfast.runtime.decision_rows.PAGE", 1)
    async with runtime() as rt:
        entry = await ask(rt)
        assert await kinds_of(rt) == []  # everything so far is indexed
        await rt.resolve(entry, Deny(), by="ada")
        await rt.wait("c")
        (record,) = (await rt.decisions(tool="pay", verify=True)).decisions
        assert (record.args, record.verified) == ({"amount": 100, "to": "Zürich"}, True)


def test_the_history_is_there_without_asyncio():
    with blocking.Runtime(agent(ScriptedModel([[ToolCall("pay", {"amount": 1})], "ok"]), pay), store="memory:") as rt:
        entry = rt.send("c", "pay").result().pending[0]
        rt.resolve(entry, Deny("no"), by="ada")
        rt.wait("c")
        assert [one.kind for one in rt.decisions(who="ada").decisions] == ["deny"]
        with rt.decision_pages() as pages:
            assert [len(page.decisions) for page in pages] == [1]


# --- export ---


async def text_of(rt, format, **filters):
    return "".join([part async for part in export_decisions(rt.decision_pages(**filters), format)])


async def test_an_export_has_every_decision_as_csv_or_json_lines():
    async with runtime() as rt:
        for n in range(3):
            await decide(rt, f"c{n}", Deny(f"no, {n}\nreally"))
        rows = list(csv.DictReader(io.StringIO(await text_of(rt, "csv", limit=2), newline="")))
        assert [row["conversation"] for row in rows] == ["c2", "c1", "c0"]
        assert tuple(rows[0]) == CSV_COLUMNS
        assert (rows[0]["reason"], rows[0]["time"]) == ("no, 2\nreally", "1970-01-01T00:16:40.000+00:00")
        assert json.loads(rows[0]["plan"]) == {"transfer": 100, "to": "Zürich"}
        assert rows[0]["verified"] == ""
        lines = (await text_of(rt, "jsonl", limit=2, verify=True)).splitlines()
        records = [msgspec.json.decode(line, type=audit.DecisionRecord) for line in lines]
        assert [(one.conversation, one.verified) for one in records] == [(f"c{n}", True) for n in (2, 1, 0)]


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", " =1", "\n=1", "\u00a0=1", "＝1"])
def test_no_cell_of_an_export_is_a_formula(text):
    """A spreadsheet runs what begins with these characters; names, reasons and arguments come from outside."""
    assert safe_cell(text) == "'" + text
    ((cell, other),) = csv.reader(io.StringIO(csv_line([text, 'say "hi", then = 1']), newline=""))
    assert (cell, other) == ("'" + text, 'say "hi", then = 1')


async def test_a_reason_that_is_a_formula_is_exported_as_text():
    async with runtime() as rt:
        await decide(rt, "c", Deny('=HYPERLINK("http://evil.example","click")'), by="=cmd")
        (row,) = csv.DictReader(io.StringIO(await text_of(rt, "csv"), newline=""))
        assert row["reason"].startswith("'=HYPERLINK")
        assert row["by"] == "'=cmd"
