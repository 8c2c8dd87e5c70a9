"""``holdfast copy``: byte for byte, resumable, and refused if logs differ."""

import asyncio
import re
import sys

import desk as agents
import pexpect
import pytest
from stores import SHIFT, ask, ledger, send, until_noted, until_over, url_of
from terminal import DESK, assert_refused, environment, until
from test_cli_verify import change_database, make_reader

from holdfast import Agent, Runtime, ScriptedModel
from holdfast.testing.store_contract import make_append, make_channel

OPENED = b'{"type":"ConversationOpened","seq":1,"at":1.0,"by":{"id":"user"},"v":1,"agent":"agent"}'
WAYS = [("sqlite", "postgres"), ("postgres", "sqlite")]
ways = pytest.mark.parametrize(("one", "other"), WAYS)


def make_urls(desk, one, other):
    return url_of(one, desk, "a"), url_of(other, desk, "b")


def run_until_rest(url, name, agent, text="hi"):
    """Run one turn of a conversation until it is at rest."""

    async def until_rest():
        async with Runtime(agent, store=url) as rt:
            await (await rt.send(name, text, by="customer")).result()

    asyncio.run(until_rest())


def fill_store(url):
    """Fill a store with conversations at rest, one that owes work and one with an artifact; return their names."""
    for name in ("gated", "seat", "scales", "plain", "evil"):
        run_until_rest(url, name, getattr(agents, name))
    run_until_rest(url, "big", make_reader())
    send(url, "owed", agent="someone")
    return ["big", "evil", "gated", "owed", "plain", "scales", "seat"]


def export_all(desk, url, names):
    exports = [desk("export", name, "--store", url) for name in names]
    assert all(result.code == 0 for result in exports), [result.err for result in exports]
    return [result.raw for result in exports]


def read_indexes(url):
    async def look(rt):
        rows = [
            (row.conversation, row.seq, row.hash, row.status, row.agent, row.owes, row.updated)
            for row in await rt.store.rows()
        ]
        return rows, await rt.store.pending(), await rt.store.list_owing()

    return ask(url, look)


@ways
def test_copy_keeps_every_byte_every_artifact_and_every_pending_call(desk, one, other):
    source, target = make_urls(desk, one, other)
    names = fill_store(source)
    result = desk("copy", source, target)
    assert result.code == 0, result.err
    assert result.out.startswith("copied 7 conversations (")
    assert "1 artifact" in result.out
    assert "every hash chain fits" in result.out
    assert export_all(desk, source, names) == export_all(desk, target, names)
    assert read_indexes(source) == read_indexes(target)
    assert desk("verify", "--store", target).code == 0
    again = desk("copy", source, target)
    assert (again.code, again.out.splitlines()[1:]) == (0, ["already there: 7"])
    assert again.out.startswith("copied 0 conversations (0 events)")


@ways
def test_copy_leaves_channels_and_undelivered_notices_in_the_source_and_tells_the_target_nothing(desk, one, other):
    """They are still delivered from there; the people behind the target's channels get no old messages [B116]."""
    source, target = make_urls(desk, one, other)
    run_until_rest(source, "plain", agents.plain)

    async def leave_notice(rt):
        await rt.store.put_channel(make_channel("mail"))
        await rt.store.append(make_append("noted", 0, OPENED, notices=[(1, "suspended")]))

    async def register(rt):
        await rt.store.put_channel(make_channel("slack"))

    async def look(rt):
        return [channel.name for channel in await rt.store.channels()], [row.id for row in await rt.store.outbox()]

    ask(source, leave_notice)
    ask(target, register)
    result = desk("copy", source, target)
    assert result.code == 0, result.err
    assert "undelivered notices stay in" in result.out
    assert ask(source, look) == (["mail"], ["noted/1/mail"])
    assert ask(target, look) == (["slack"], [])


@ways
def test_a_copied_conversation_continues_in_the_target_and_can_be_copied_back(desk, one, other):
    source, target = make_urls(desk, one, other)
    run_until_rest(source, "gated", agents.gated)
    before = export_all(desk, source, ["gated"])
    assert desk("copy", source, target).code == 0
    [entry] = desk("pending", "--json", "--store", target).objects
    result = desk("approve", entry["call"], "--resume", f"{DESK}:gated", "--store", target)
    assert result.code == 0, result.err
    assert "turn completed" in result.out
    result = desk("copy", source, target)
    assert result.code == 0, result.err
    assert "longer there, and left alone: gated" in result.out
    assert export_all(desk, source, ["gated"]) == before
    result = desk("copy", target, source)
    assert result.code == 0, result.err
    assert result.out.startswith("copied 0 conversations, continued 1 (")
    assert export_all(desk, source, ["gated"]) == export_all(desk, target, ["gated"])
    assert read_indexes(source) == read_indexes(target)
    assert desk("pending", "--json", "--store", source).objects == []


@ways
def test_copy_refuses_a_different_log_of_the_same_name_and_overwrites_nothing(desk, one, other):
    source, target = make_urls(desk, one, other)
    for url in (source, target):
        run_until_rest(url, "c", agents.plain, text=f"to {url}")
        run_until_rest(url, "longer here" if url == source else "only there", agents.gated)
    run_until_rest(source, "longer", agents.gated)
    run_until_rest(target, "longer", agents.plain)
    before = export_all(desk, target, ["c", "longer", "only there"])
    assert_refused(desk("copy", source, target), 3, "[conflict]", "c, longer", "not changed", "import --as")
    assert export_all(desk, target, ["c", "longer", "only there"]) == before
    assert export_all(desk, target, ["longer here"]) == export_all(desk, source, ["longer here"])


def reply(request):
    return [agents.REFUND] if request.messages[-1].content == "pay" else "x" * 1_000_000


LONG = Agent("long", model=ScriptedModel([reply] * 10, follow=True), tools=[agents.refund])


@ways
def test_a_killed_copy_resumes_where_it_stopped_and_no_worker_runs_a_partial_log(desk, one, other):
    """Each part of a long log is an append of its own; until the last one it sleeps."""
    source, target = make_urls(desk, one, other)
    for text in [*["talk"] * 9, "pay"]:
        run_until_rest(source, "c", LONG, text)
    whole = len(ask(source, lambda rt: rt.history("c")))

    def so_far():
        async def look(rt):
            return await rt.store.row("c")

        row = ask(target, look)
        return row is not None and row

    ask(target, lambda rt: rt.store.rows())
    copying = desk.start("copy", source, target)
    until(lambda: so_far() or copying.process.poll() is not None)
    copying.kill()
    row = so_far()
    if row.seq < whole:
        assert not row.owes
        assert desk("pending", "--json", "--store", target).objects == []
    result = desk("copy", source, target)
    assert result.code == 0, result.err
    assert export_all(desk, source, ["c"]) == export_all(desk, target, ["c"])
    assert read_indexes(source) == read_indexes(target)


def test_a_partly_copied_log_owes_no_work_until_it_is_complete(desk, monkeypatch):
    """The same without the luck of the moment: the other store fails after the first part."""
    from holdfast.cli.commands import copy
    from holdfast.errors import StoreError

    source, target = make_urls(desk, "sqlite", "sqlite")
    run_until_rest(source, "c", agents.gated)
    monkeypatch.setattr(copy, "PART_BYTES", 1)

    async def half():
        async with copy.connect_to_store(source) as ours, copy.connect_to_store(target) as theirs:
            append, parts = theirs.append, []

            async def failing(step):
                if len(parts) == 3:
                    raise StoreError("full")
                parts.append(step)
                await append(step)

            theirs.append = failing
            with pytest.raises(StoreError):
                await copy._copy_conversations(ours, theirs)
            return await theirs.row("c"), await theirs.pending(), await theirs.list_owing()

    row, waiting, owing = asyncio.run(half())
    assert (row.seq, row.owes, waiting, owing) == (3, False, [], [])
    assert desk("copy", source, target).code == 0
    assert export_all(desk, source, ["c"]) == export_all(desk, target, ["c"])
    assert read_indexes(source) == read_indexes(target)


@pytest.mark.parametrize(("one", "other"), WAYS)
def test_events_appended_after_a_copy_are_added_by_the_next_copy(desk, one, other):
    source, target = make_urls(desk, one, other)
    with desk.start("worker", f"{SHIFT}:digger", "--store", source) as worker:
        worker.until(" on ")
        run_until_rest(source, "still", agents.plain)
        send(source, "c")
        until_noted(desk, "began", "c")
        assert desk("copy", source, target).code == 0  # as far as it has come
        (desk.path / "c").touch()
        until_over(source, "c")
    assert read_indexes(source) != read_indexes(target)
    result = desk("copy", source, target)
    assert result.code == 0, result.err
    assert result.out.startswith("copied 0 conversations, continued 1 (")
    assert read_indexes(source) == read_indexes(target)
    assert len(ledger(desk)) == 2


def test_conversations_that_changed_while_they_were_copied_are_listed(desk):
    from holdfast.cli.commands import copy

    source, target = make_urls(desk, "sqlite", "postgres")
    run_until_rest(source, "c", agents.plain)
    run_until_rest(source, "still", agents.plain)

    async def look():
        async with copy.connect_to_store(source) as ours, copy.connect_to_store(target) as theirs:
            tally = await copy._copy_conversations(ours, theirs)
            async with Runtime(store=source) as rt:
                await rt.send("c", "more", agent="plain")
                await rt.send("new", "hi", agent="plain")
            await copy._find_changed(ours, theirs, tally)
            return tally.moved

    assert asyncio.run(look()) == ["c", "new"]


def test_copy_shows_progress_on_a_terminal_and_only_the_result_in_a_pipe(desk):
    source, target = make_urls(desk, "sqlite", "sqlite")
    for name in "abc":
        run_until_rest(source, name, agents.plain)
    child = pexpect.spawn(
        sys.executable,
        ["-m", "holdfast", "copy", source, target],
        env=environment(TERM="xterm", NO_COLOR="1"),
        dimensions=(24, 100),
        timeout=60,
        encoding="utf-8",
    )
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    assert child.before is not None
    assert re.search(r"copying .*3/3", child.before)
    assert "copied 3 conversations" in child.before
    result = desk("copy", source, target)
    assert (result.err, "copying" in result.out) == ("", False)


def test_copy_is_refused_while_agents_run_on_both_stores(desk):
    source, target = make_urls(desk, "sqlite", "sqlite")
    send(source, "c")
    send(target, "d")
    words = ("worker", f"{SHIFT}:digger", "--store")
    with desk.start(*words, source) as one, desk.start(*words, target) as two:
        one.until(" on ")
        two.until(" on ")
        assert_refused(desk("copy", source, target), 3, "[busy]", f"process {two.process.pid} on", "stop those on")
        one.kill()
        assert desk("copy", source, target).code == 0
        assert until_noted(desk, "began", "c")  # whoever runs there goes on with it


def test_copy_reports_a_missing_artifact_or_event_and_does_not_copy_the_conversation(desk):
    source, target = make_urls(desk, "sqlite", "sqlite")
    run_until_rest(source, "c", make_reader())
    (desk.path / "a.db").rename(desk.path / "holdfast.db")
    change_database(desk, "DELETE FROM artifacts")
    assert_refused(desk("copy", "sqlite:///holdfast.db", target), 1, "'c'", "is missing", "verify")
    assert desk("log", "--json", "--store", target).objects == []


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("sqlite:///a.db",), 2, "TO_URL"),
        (("sqlite:///none.db", "sqlite:///b.db"), 3, "no store"),
        (("sqlite:///a.db", "sqlite:///./a.db"), 2, "same store"),
        (("memory:", "sqlite:///b.db"), 2, "in memory"),
        (("sqlite:///a.db", "memory:"), 2, "in memory"),
        (("sqlite:///a.db", "mysql://b"), 2, "unknown store"),
    ],
)
def test_copy_refuses_invalid_stores_in_one_line_and_creates_nothing(desk, words, code, message):
    (desk.path / "a.db").touch()
    assert_refused(desk("copy", *words), code, message)
    assert not (desk.path / "b.db").exists()
