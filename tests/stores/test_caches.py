"""The caches beside the logs are verified when they are read, and rebuilt from the log if they do not match it [B11].

Each test runs on every store: it damages a cache while no process has the store open, then opens the store again.
"""

import asyncio
import logging

import apsw
import msgspec
import pytest
from support import pg

from holdfast import Agent, Approve, Deny, Runtime, ScriptedModel, ToolCall, tool
from holdfast.core import codec
from holdfast.core.decisions import Expired
from holdfast.core.state import Grant, State
from holdfast.runtime import commit, event_log
from holdfast.runtime.decision_rows import check_rows
from holdfast.runtime.pending_calls import inbox
from holdfast.stores.compression import compress_body, decompress_body
from holdfast.stores.memory import MemoryStore
from holdfast.stores.sqlite.store import SQLiteStore
from holdfast.testing.store_contract import make_grant

paid: list[int] = []


@tool(approval="required", prompt="Pay {amount}?")
def pay(amount: int) -> str:
    """Pay an amount."""
    paid.append(amount)
    return "paid"


def agent(*amounts):
    steps = [[ToolCall("pay", {"amount": amount})] for amount in amounts or (100,)]
    return Agent("till", model=ScriptedModel([*steps, "Done."], follow=True), tools=[pay])


class MemoryBackend:
    def __init__(self, tmp_path):
        self._first = MemoryStore()

    def make_store(self):
        return self._first.sibling()

    def _conversation(self):
        return self._first._data.conversations["c"]

    def change_snapshot(self, change):
        self._conversation().snapshot = change(self._conversation().snapshot)

    def change_pending(self, change):
        data = self._first._data
        for conversation in data.conversations.values():
            for call, row in conversation.calls.items():
                if row.conversation == "c":
                    conversation.calls[call] = msgspec.structs.replace(row, body=change(row.body))

    def move_deadline(self, later):
        for call, row in self._conversation().calls.items():
            self._conversation().calls[call] = msgspec.structs.replace(row, deadline=row.deadline + later)

    def delete_pending(self):
        data = self._first._data
        for conversation in data.conversations.values():
            for row in conversation.calls.values():
                data.remove_due(row)
            conversation.calls.clear()

    def set_status(self, status):
        self._conversation().status = status

    def set_title(self, title):
        self._conversation().title = title

    def change_words(self):
        self._conversation().texts[2] = ["something", "else"]

    def set_decider(self, who):
        rows = self._conversation().decisions
        for seq, row in rows.items():
            rows[seq] = msgspec.structs.replace(row, by=who)

    def delete_decisions(self):
        self._conversation().decisions.clear()

    def change_event(self, seq, change):
        events = self._conversation().events
        events[seq - 1] = change(events[seq - 1])


class SQLBackend:
    """A store whose tables are changed with SQL."""

    def change_snapshot(self, change):
        ((body,),) = self.sql("SELECT body FROM snapshots")
        self.write("UPDATE snapshots SET body = {}", change(body))

    def change_pending(self, change):
        ((key,),) = self.sql("SELECT id FROM conversations WHERE name = 'c'")
        ((body,),) = self.sql(f"SELECT body FROM pending WHERE conversation = {key}")
        self.write(
            f"UPDATE pending SET body = {{}} WHERE conversation = {key}", compress_body(change(decompress_body(body)))
        )

    def move_deadline(self, later):
        self.sql(f"UPDATE pending SET due = due + {later}, deadline = deadline + {later}")

    def delete_pending(self):
        self.sql("DELETE FROM pending")

    def set_status(self, status):
        self.sql(f"UPDATE conversations SET status = '{status}'")

    def set_title(self, title):
        self.sql(f"UPDATE conversations SET title = '{title}'")

    def set_decider(self, who):
        self.sql(f"UPDATE decisions SET by_id = '{who}'")

    def delete_decisions(self):
        self.sql("DELETE FROM decisions")

    def remove_checksums(self):
        for table in ("conversations", "snapshots", "pending"):
            self.sql(f"UPDATE {table} SET seal = NULL")
        self.sql("UPDATE conversations SET waiting = -1, title_seal = NULL, title = '', archived = NOT archived")


class SQLiteBackend(SQLBackend):
    def __init__(self, tmp_path):
        self._path = tmp_path / "holdfast.db"

    def make_store(self):
        return SQLiteStore(self._path)

    def sql(self, text, *values):
        db = apsw.Connection(str(self._path))
        try:
            return db.execute(text, values).fetchall()
        finally:
            db.close()

    def write(self, text, value):
        self.sql(text.format("?"), value)

    def change_words(self):
        self.sql("UPDATE texts SET words = 'something else' WHERE rowid & 0xffffff = 2")

    def change_event(self, seq, change):
        ((body,),) = self.sql(f"SELECT body FROM events WHERE id & 0xffffff = {seq}")
        assert isinstance(body, bytes)
        body = compress_body(change(decompress_body(body)))
        self.write(f"UPDATE events SET body = {{}} WHERE id & 0xffffff = {seq}", body)


class PostgresBackend(SQLBackend):
    def __init__(self, tmp_path):
        self._url = pg.fresh()

    def make_store(self):
        from holdfast.stores.postgres import PostgresStore

        return PostgresStore(self._url)

    def sql(self, text, *values):
        return [tuple(found) for found in pg.sql(self._url, text, *values)]

    def write(self, text, value):
        self.sql(text.format("$1"), value)

    def change_words(self):
        self.sql("UPDATE texts SET words = array_to_tsvector(ARRAY['something', 'else']) WHERE seq = 2")

    def change_event(self, seq, change):
        ((body,),) = self.sql(f"SELECT body FROM events WHERE seq = {seq}")
        self.write(f"UPDATE events SET body = {{}} WHERE seq = {seq}", compress_body(change(decompress_body(body))))


@pytest.fixture(params=[MemoryBackend, SQLiteBackend, PostgresBackend])
def backend(request, tmp_path):
    paid.clear()
    return request.param(tmp_path)


@pytest.fixture(params=[SQLiteBackend, PostgresBackend])
def sql_backend(request, tmp_path):
    paid.clear()
    return request.param(tmp_path)


def with_runtime(backend, work, *agents):
    """Run ``work`` with a runtime on the store; the store is opened before and closed after."""

    async def main():
        async with asyncio.timeout(60), Runtime(*agents, store=backend.make_store()) as rt:
            return await work(rt)

    return asyncio.run(main())


def suspend_payment(backend, *amounts, name="c"):
    """Start a conversation in which a call of ``pay`` is suspended."""

    async def work(rt):
        await (await rt.send(name, "pay", by="ada")).result()

    with_runtime(backend, work, agent(*amounts))


async def approve_all(rt):
    for entry in await rt.pending():
        await rt.resolve(entry.conversation, entry.call, Approve(), by="boss")
    async for event in rt.events("c"):
        if event.type == "TurnEnded":
            return


@pytest.fixture
def snapshot_every_append(monkeypatch):
    """Write a snapshot with every append."""
    monkeypatch.setattr(commit, "SNAPSHOT_EVERY", 1)


def test_an_edited_snapshot_is_ignored_and_the_approved_arguments_run(backend, snapshot_every_append, caplog):
    """The snapshot says 900, the approver approved 100: 100 is paid, and a warning is logged."""
    suspend_payment(backend)
    backend.change_snapshot(lambda body: body.replace(b"100", b"900"))
    with caplog.at_level(logging.WARNING, "holdfast"):
        with_runtime(backend, approve_all, agent())
    assert paid == [100]
    assert "its snapshot does not fit its checksum" in caplog.text


def test_a_grant_that_was_added_to_a_snapshot_is_ignored(backend, snapshot_every_append):
    suspend_payment(backend, 4_000_000)

    def add_grant(body):
        state = codec.decode_state(body)
        assert state is not None
        by = state.turn.by
        grant = Grant(id="g", tool="pay", remember="tool", by=by, at=1.0)
        return codec.encode_state(msgspec.structs.replace(state, grants=(*state.grants, grant)))

    backend.change_snapshot(add_grant)
    assert with_runtime(backend, lambda rt: rt.grants("c"), agent()) == []


def test_a_rebuilt_snapshot_is_written_and_used_from_then_on(backend, snapshot_every_append, caplog):
    suspend_payment(backend)
    backend.change_snapshot(lambda body: body.replace(b"100", b"900"))
    with_runtime(backend, lambda rt: rt.snapshot("c"))
    caplog.clear()
    with caplog.at_level(logging.INFO, "holdfast"):
        with_runtime(backend, lambda rt: rt.snapshot("c"))
    assert "rebuilt" not in caplog.text

    async def load():
        store = backend.make_store()
        await store.open()
        loaded = await store.load("c")
        await store.close()
        return loaded

    loaded = asyncio.run(load())
    assert loaded.intact
    assert loaded.snapshot_seq == loaded.row.seq


def test_an_altered_pending_entry_is_shown_as_the_log_has_it(backend, caplog):
    suspend_payment(backend)
    backend.change_pending(lambda body: body.replace(b"100", b"900"))
    with caplog.at_level(logging.WARNING, "holdfast"):
        (entry,) = with_runtime(backend, lambda rt: rt.pending())
    assert (entry.prompt, entry.args) == ("Pay 100?", {"amount": 100})
    assert "a pending entry does not fit its checksum" in caplog.text


def test_an_unreadable_pending_entry_does_not_break_the_list_of_pending_calls(backend):
    suspend_payment(backend)
    suspend_payment(backend, 7, name="d")
    backend.change_pending(lambda body: b"\x00 damaged")
    found = with_runtime(backend, lambda rt: rt.pending())
    assert sorted((entry.conversation, entry.args["amount"]) for entry in found) == [("c", 100), ("d", 7)]
    with_runtime(backend, approve_all, agent())
    assert 100 in paid


def test_an_altered_deadline_is_restored_from_the_log(backend):
    """Otherwise the call would expire at another time than the one that its approver saw."""
    suspend_payment(backend)
    before = with_runtime(backend, lambda rt: rt.store.pending())
    backend.move_deadline(1000.0)
    (shown,) = with_runtime(backend, lambda rt: rt.pending())
    assert shown.deadline == before[0].deadline
    assert with_runtime(backend, lambda rt: rt.store.pending()) == before


def test_lost_pending_entries_are_restored_when_pending_calls_are_listed(backend, caplog):
    """The pending list can be deleted, as the page on the log says."""
    suspend_payment(backend)
    before = with_runtime(backend, lambda rt: rt.pending())
    backend.delete_pending()
    with caplog.at_level(logging.WARNING, "holdfast"):
        assert with_runtime(backend, lambda rt: rt.pending()) == before
    assert "pending entries were lost" in caplog.text
    backend.delete_pending()
    assert with_runtime(backend, lambda rt: rt.pending("c")) == before


def test_lost_pending_entries_are_restored_in_every_conversation(backend, monkeypatch):
    """They are restored in batches, until none is missing."""
    monkeypatch.setattr(inbox, "RESTORE_BATCH", 1)
    for name in ("c", "d", "e"):
        suspend_payment(backend, name=name)
    before = with_runtime(backend, lambda rt: rt.pending())
    backend.delete_pending()
    assert with_runtime(backend, lambda rt: rt.pending()) == before


def test_a_call_whose_pending_entry_was_lost_still_expires(backend):
    """The next process restores lost entries before it waits for deadlines."""
    suspend_payment(backend)
    backend.delete_pending()

    async def main():
        async with asyncio.timeout(60), Runtime(agent(), store=backend.make_store(), clock=lambda: 9e9) as rt:
            async for event in rt.events("c"):
                if event.type == "CallResolved":
                    assert isinstance(event.decision, Expired)
                    return

    asyncio.run(main())


def test_an_entry_of_the_index_of_shared_grants_that_the_log_does_not_have_is_removed_by_a_rebuild(backend):
    suspend_payment(backend)

    async def add_grant(rt):
        row = await rt.store.row("c")
        state = await event_log.fold_log(rt.store, State(conversation="c"), row.seq)
        append = commit.build_reindex(state, row.updated, [], [])
        await rt.store.append(msgspec.structs.replace(append, grants=[make_grant("c", "g")]))

    async def rebuild(rt):
        assert await rt.store.list_shared_grants() == [make_grant("c", "g")]
        await event_log.rebuild_from_log(rt.store, "c", "a test")
        return await rt.store.list_shared_grants()

    with_runtime(backend, add_grant)
    assert with_runtime(backend, rebuild) == []


def test_an_altered_conversation_row_is_listed_as_the_log_has_it(backend, caplog):
    suspend_payment(backend)
    backend.set_status("idle")
    with caplog.at_level(logging.WARNING, "holdfast"):
        (info,) = with_runtime(backend, lambda rt: rt.conversations())
    assert info.state == "awaiting_input"
    assert "its row does not fit its checksum" in caplog.text


def test_an_altered_title_is_listed_as_the_log_has_it(backend, caplog):
    suspend_payment(backend)
    backend.set_title("Approved by the board")
    with caplog.at_level(logging.WARNING, "holdfast"):
        (info,) = with_runtime(backend, lambda rt: rt.conversations())
    assert (info.title, info.archived) == ("pay", False)
    assert "its row does not fit its checksum" in caplog.text


def test_a_search_shows_nothing_that_the_log_does_not_have(backend):
    """The words of an altered index lead to no hit."""
    suspend_payment(backend)
    assert [hit.seq for hit in with_runtime(backend, lambda rt: rt.search("pay")).hits] == [2]
    backend.change_words()
    assert with_runtime(backend, lambda rt: rt.search("something else")).hits == []


@pytest.mark.parametrize("damage", ["DROP TABLE texts", "DELETE FROM texts_data", "DELETE FROM texts_idx"])
def test_a_damaged_search_index_is_built_again(tmp_path, damage):
    backend = SQLiteBackend(tmp_path)
    suspend_payment(backend)
    assert [hit.snippet for hit in with_runtime(backend, lambda rt: rt.search("pay")).hits] == ["pay"]
    backend.sql(damage)

    async def search_twice(rt):
        await rt.search("pay")  # it meets the damage, and the index is built again
        return await rt.search("pay")

    results = with_runtime(backend, search_twice)
    assert ([hit.snippet for hit in results.hits], results.complete) == (["pay"], True)


def decide_payment(backend):
    """Suspend a payment, approve it, and list the decision."""
    suspend_payment(backend)
    with_runtime(backend, approve_all, agent())
    (record,) = with_runtime(backend, lambda rt: rt.decisions(verify=True)).decisions
    assert (record.kind, record.by.id, record.verified, record.problem) == ("approve", "boss", True, None)
    return record


def test_an_edited_row_of_the_index_of_decisions_is_found_out(backend):
    """The decision is shown as the log has it, and the row that says something else is named [B122]."""
    decide_payment(backend)
    backend.set_decider("mallory")
    (found,) = with_runtime(backend, lambda rt: rt.decisions(who="mallory")).decisions
    assert (found.by.id, found.verified) == ("boss", False)
    assert found.problem == "the index says who 'mallory', and the log 'boss'"
    page = with_runtime(backend, lambda rt: rt.decisions(verify=True))
    assert [each.verified for each in page.decisions] == [False]
    assert page.problems == [f"conversation 'c': decision {found.seq}: {found.problem}"]


def test_an_edited_log_is_found_out_when_its_decisions_are_verified(backend):
    """Without verification nothing is claimed; with it, the hash chain does not fit [B122]."""
    record = decide_payment(backend)
    backend.change_event(record.seq, lambda body: body.replace(b'"boss"', b'"evil"'))
    (shown,) = with_runtime(backend, lambda rt: rt.decisions(kinds=["approve"])).decisions
    assert shown.verified is not True
    page = with_runtime(backend, lambda rt: rt.decisions(verify=True))
    assert [each.verified for each in page.decisions] == [False]
    assert f"event {record.seq} (CallResolved) was changed: its hash does not fit" in page.decisions[0].problem
    assert len(page.problems) == 1


def test_an_edited_plan_is_found_out_when_its_decision_is_verified(backend):
    """The arguments that were shown are those of another event, which the chain covers, too [B122]."""
    record = decide_payment(backend)
    backend.change_event(5, lambda body: body.replace(b"100", b"900"))
    page = with_runtime(backend, lambda rt: rt.decisions(verify=True))
    assert [(each.verified, each.seq) for each in page.decisions] == [(False, record.seq)]
    assert "event 5 (CallSuspended) was changed" in page.decisions[0].problem


def test_decisions_that_a_worker_of_an_earlier_version_passed_over_are_indexed(sql_backend):
    """Such a worker indexes texts only, and takes the conversation's mark away."""
    suspend_payment(sql_backend)
    with_runtime(sql_backend, approve_all, agent())
    sql_backend.sql("UPDATE conversations SET indexed = seq, unindexed = false")
    page = with_runtime(sql_backend, lambda rt: rt.decisions(verify=True))
    assert ([each.kind for each in page.decisions], page.complete) == (["approve"], True)
    assert [hit.seq for hit in with_runtime(sql_backend, lambda rt: rt.search("pay")).hits] == [2]


def test_a_deleted_decision_is_found_out_when_its_conversation_is_verified(backend):
    """Another decision of the conversation leads to it [B122]."""
    suspend_payment(backend, 100, 200)

    async def deny_both(rt):
        for _ in range(2):
            async for page in rt.pending_pages():
                for entry in page:
                    await rt.resolve(entry, Deny("no"), by="boss")
            await rt.wait("c")

    with_runtime(backend, deny_both, agent(100, 200))
    first, second = with_runtime(backend, lambda rt: rt.decisions()).decisions
    backend.delete_decisions()
    assert with_runtime(backend, lambda rt: rt.decisions(verify=True)).decisions == []
    problems = with_runtime(backend, lambda rt: check_rows(rt.store, "c"))
    assert [text.partition(" (")[0] for text in problems] == [f"decision {second.seq}", f"decision {first.seq}"]
    with_runtime(backend, lambda rt: rt.store.reset_index("c"))
    assert with_runtime(backend, lambda rt: check_rows(rt.store, "c")) == []
    page = with_runtime(backend, lambda rt: rt.decisions(verify=True))
    assert ([each.seq for each in page.decisions], page.problems) == ([first.seq, second.seq], [])


def test_caches_without_checksums_are_rebuilt_without_a_warning(sql_backend, snapshot_every_append, caplog):
    """An older version wrote them: they are not damaged, but they are not used."""
    suspend_payment(sql_backend)
    before = with_runtime(sql_backend, lambda rt: rt.pending())
    sql_backend.change_snapshot(lambda body: body.replace(b"100", b"900"))
    sql_backend.remove_checksums()
    with caplog.at_level(logging.WARNING, "holdfast"):
        assert with_runtime(sql_backend, lambda rt: rt.pending()) == before
        with_runtime(sql_backend, approve_all, agent())
    assert paid == [100]
    assert caplog.text == ""


def test_pages_of_pending_entries_are_in_order_and_contain_each_entry_once(backend):
    """The pages of ``pending(after=, limit=)`` are the list that ``pending()`` returns."""

    async def main():
        async with Runtime(agent(), store=backend.make_store()) as rt:
            for n in range(7):
                await (await rt.send(f"c{n}", "pay", by="ada")).result()
            store, rows, last = rt.store, [], None
            while page := await store.pending(after=last, limit=3):
                assert len(page) <= 3
                rows, last = rows + page, page[-1]
            assert rows == await store.pending()
            assert len(rows) == 7
            assert await store.pending("c3", limit=5) == await store.pending("c3")
            assert await store.find_miscounted() == []

    asyncio.run(main())
