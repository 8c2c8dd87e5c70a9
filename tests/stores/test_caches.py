"""What a store keeps beside the logs is checked where it is read, and rebuilt from the log where it does not fit (B11).

The same for every store: each test damages a cache of a store that nobody has open, then opens it again.
"""

import asyncio
import logging

import apsw
import msgspec
import pytest
from support import pg

from holdfast import Agent, Approve, Runtime, ScriptedModel, ToolCall, tool
from holdfast.core import codec
from holdfast.core.decisions import Expired
from holdfast.core.state import Grant
from holdfast.runtime import commit, inbox
from holdfast.stores.compression import compress_body, decompress_body
from holdfast.stores.memory import MemoryStore
from holdfast.stores.sqlite.store import SQLiteStore

paid: list[int] = []


@tool(approval="required", prompt="Pay {amount}?")
def pay(amount: int) -> str:
    """Pay somebody."""
    paid.append(amount)
    return "paid"


def agent(*amounts):
    steps = [[ToolCall("pay", {"amount": amount})] for amount in amounts or (100,)]
    return Agent("till", model=ScriptedModel([*steps, "Done."], follow=True), tools=[pay])


class InMemory:
    def __init__(self, tmp_path):
        self._first = MemoryStore()

    def store(self):
        return self._first.sibling()

    def _one(self):
        return self._first._data.conversations["c"]

    def snapshot(self, change):
        self._one().snapshot = change(self._one().snapshot)

    def pending(self, change):
        data = self._first._data
        for conversation in data.conversations.values():
            for call, row in conversation.calls.items():
                if row.conversation == "c":
                    conversation.calls[call] = msgspec.structs.replace(row, body=change(row.body))

    def deadline(self, later):
        for call, row in self._one().calls.items():
            self._one().calls[call] = msgspec.structs.replace(row, deadline=row.deadline + later)

    def lose(self):
        data = self._first._data
        for conversation in data.conversations.values():
            for row in conversation.calls.values():
                data.remove_due(row)
            conversation.calls.clear()

    def row(self, status):
        self._one().status = status


class InSQL:
    """A store whose tables are changed with SQL."""

    def snapshot(self, change):
        ((body,),) = self.sql("SELECT body FROM snapshots")
        self.write("UPDATE snapshots SET body = {}", change(body))

    def pending(self, change):
        ((key,),) = self.sql("SELECT id FROM conversations WHERE name = 'c'")
        ((body,),) = self.sql(f"SELECT body FROM pending WHERE conversation = {key}")
        self.write(
            f"UPDATE pending SET body = {{}} WHERE conversation = {key}", compress_body(change(decompress_body(body)))
        )

    def deadline(self, later):
        self.sql(f"UPDATE pending SET due = due + {later}, deadline = deadline + {later}")

    def lose(self):
        self.sql("DELETE FROM pending")

    def row(self, status):
        self.sql(f"UPDATE conversations SET status = '{status}'")

    def unseal(self):
        for table in ("conversations", "snapshots", "pending"):
            self.sql(f"UPDATE {table} SET seal = NULL")
        self.sql("UPDATE conversations SET waiting = -1")


class OnSQLite(InSQL):
    def __init__(self, tmp_path):
        self._path = tmp_path / "holdfast.db"

    def store(self):
        return SQLiteStore(self._path)

    def sql(self, text, *values):
        db = apsw.Connection(str(self._path))
        try:
            return db.execute(text, values).fetchall()
        finally:
            db.close()

    def write(self, text, value):
        self.sql(text.format("?"), value)


class OnPostgres(InSQL):
    def __init__(self, tmp_path):
        self._url = pg.fresh()

    def store(self):
        from holdfast.stores.postgres import PostgresStore

        return PostgresStore(self._url)

    def sql(self, text, *values):
        return [tuple(found) for found in pg.sql(self._url, text, *values)]

    def write(self, text, value):
        self.sql(text.format("$1"), value)


@pytest.fixture(params=[InMemory, OnSQLite, OnPostgres])
def place(request, tmp_path):
    paid.clear()
    return request.param(tmp_path)


@pytest.fixture(params=[OnSQLite, OnPostgres])
def tables(request, tmp_path):
    paid.clear()
    return request.param(tmp_path)


def use(place, work, *agents):
    """Open the store, do something with a runtime on it, close it."""

    async def main():
        async with asyncio.timeout(60), Runtime(*agents, store=place.store()) as rt:
            return await work(rt)

    return asyncio.run(main())


def ask(place, *amounts, name="c"):
    """Have a call of ``pay`` wait in a conversation."""

    async def work(rt):
        await (await rt.send(name, "pay", by="ada")).result()

    use(place, work, agent(*amounts))


async def approve_all(rt):
    for entry in await rt.pending():
        await rt.resolve(entry.conversation, entry.call, Approve(), by="boss")
    async for event in rt.events("c"):
        if event.type == "TurnEnded":
            return


@pytest.fixture
def often(monkeypatch):
    """A snapshot with every append."""
    monkeypatch.setattr(commit, "SNAPSHOT_EVERY", 1)


def test_an_edited_snapshot_is_not_used_and_what_was_shown_runs(place, often, caplog):
    """900 stood in the snapshot, 100 was shown and approved: 100 runs, and a warning says what happened."""
    ask(place)
    place.snapshot(lambda body: body.replace(b"100", b"900"))
    with caplog.at_level(logging.WARNING, "holdfast"):
        use(place, approve_all, agent())
    assert paid == [100]
    assert "its snapshot does not fit its checksum" in caplog.text


def test_a_grant_that_was_planted_in_a_snapshot_approves_nothing(place, often):
    ask(place, 4_000_000)

    def plant(body):
        state = codec.decode_state(body)
        assert state is not None
        by = state.turn.by
        grant = Grant(id="g", tool="pay", scope="tool", by=by, at=1.0)
        return codec.encode_state(msgspec.structs.replace(state, grants=(*state.grants, grant)))

    place.snapshot(plant)
    assert use(place, lambda rt: rt.grants("c"), agent()) == []


def test_a_rebuilt_snapshot_is_written_and_used_from_then_on(place, often, caplog):
    ask(place)
    place.snapshot(lambda body: body.replace(b"100", b"900"))
    use(place, lambda rt: rt.snapshot("c"))
    caplog.clear()
    with caplog.at_level(logging.INFO, "holdfast"):
        use(place, lambda rt: rt.snapshot("c"))
    assert "rebuilt" not in caplog.text

    async def look():
        store = place.store()
        await store.open()
        loaded = await store.load("c")
        await store.close()
        return loaded

    loaded = asyncio.run(look())
    assert loaded.intact
    assert loaded.snapshot_seq == loaded.row.seq


def test_an_altered_pending_entry_is_shown_as_the_log_has_it(place, caplog):
    ask(place)
    place.pending(lambda body: body.replace(b"100", b"900"))
    with caplog.at_level(logging.WARNING, "holdfast"):
        (entry,) = use(place, lambda rt: rt.pending())
    assert (entry.prompt, entry.args) == ("Pay 100?", {"amount": 100})
    assert "a pending entry does not fit its checksum" in caplog.text


def test_a_pending_entry_that_cannot_be_read_does_not_take_the_inbox_down(place):
    ask(place)
    ask(place, 7, name="d")
    place.pending(lambda body: b"\x00 damaged")
    found = use(place, lambda rt: rt.pending())
    assert sorted((entry.conversation, entry.args["amount"]) for entry in found) == [("c", 100), ("d", 7)]
    use(place, approve_all, agent())
    assert 100 in paid


def test_a_deadline_that_was_moved_is_put_back(place):
    """Else the call would expire when somebody wants it to, and not when it was said to."""
    ask(place)
    before = use(place, lambda rt: rt.store.pending())
    place.deadline(1000.0)
    (shown,) = use(place, lambda rt: rt.pending())
    assert shown.deadline == before[0].deadline
    assert use(place, lambda rt: rt.store.pending()) == before


def test_pending_entries_that_were_lost_come_back_when_the_store_is_listed(place, caplog):
    """The pending list can be thrown away, as the page on the log says."""
    ask(place)
    before = use(place, lambda rt: rt.pending())
    place.lose()
    with caplog.at_level(logging.WARNING, "holdfast"):
        assert use(place, lambda rt: rt.pending()) == before
    assert "pending entries were lost" in caplog.text
    place.lose()
    assert use(place, lambda rt: rt.pending("c")) == before


def test_all_lost_entries_come_back_however_many_conversations_had_them(place, monkeypatch):
    """They are looked for some at a time, until none is left."""
    monkeypatch.setattr(inbox, "RESTORE_BATCH", 1)
    for name in ("c", "d", "e"):
        ask(place, name=name)
    before = use(place, lambda rt: rt.pending())
    place.lose()
    assert use(place, lambda rt: rt.pending()) == before


def test_a_deadline_whose_entry_was_lost_still_passes(place):
    """The process that starts next finds the loss before it waits for deadlines."""
    ask(place)
    place.lose()

    async def main():
        async with asyncio.timeout(60), Runtime(agent(), store=place.store(), clock=lambda: 9e9) as rt:
            async for event in rt.events("c"):
                if event.type == "CallResolved":
                    assert isinstance(event.decision, Expired)
                    return

    asyncio.run(main())


def test_a_row_that_was_altered_is_listed_as_the_log_has_it(place, caplog):
    ask(place)
    place.row("idle")
    with caplog.at_level(logging.WARNING, "holdfast"):
        (info,) = use(place, lambda rt: rt.conversations())
    assert info.state == "awaiting_input"
    assert "its row does not fit its checksum" in caplog.text


def test_caches_without_checksums_are_rebuilt_without_a_warning(tables, often, caplog):
    """An older version wrote them: nothing is wrong, and nothing of them is used."""
    ask(tables)
    before = use(tables, lambda rt: rt.pending())
    tables.snapshot(lambda body: body.replace(b"100", b"900"))
    tables.unseal()
    with caplog.at_level(logging.WARNING, "holdfast"):
        assert use(tables, lambda rt: rt.pending()) == before
        use(tables, approve_all, agent())
    assert paid == [100]
    assert caplog.text == ""


def test_pages_of_pending_entries_are_in_order_and_have_each_of_them_once(place):
    """``pending(after=, limit=)`` goes through what ``pending()`` has."""

    async def main():
        async with Runtime(agent(), store=place.store()) as rt:
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
