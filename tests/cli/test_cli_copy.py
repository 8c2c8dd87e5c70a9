"""``assent copy``: from store to store and back, byte for byte, interrupted and resumed, refused where it differs."""

import asyncio
import re
import sys

import desk as agents
import pexpect
import pytest
from stores import SHIFT, ask, ledger, send, until_noted, until_over, url_of
from terminal import DESK, environment, refused, until
from test_cli_verify import change, reader

from assent import Agent, Runtime, ScriptedModel

WAYS = [("sqlite", "postgres"), ("postgres", "sqlite")]
ways = pytest.mark.parametrize(("one", "other"), WAYS)


def urls(desk, one, other):
    return url_of(one, desk, "a"), url_of(other, desk, "b")


def rest(url, name, agent, text="hi"):
    """A conversation at rest."""

    async def until_rest():
        async with Runtime(agent, store=url) as rt:
            await (await rt.send(name, text, by="customer")).rest()

    asyncio.run(until_rest())


def filled(url):
    """A store with conversations at rest, in the middle of something, and with an artifact."""
    for name in ("gated", "seat", "scales", "plain", "evil"):
        rest(url, name, getattr(agents, name))
    rest(url, "big", reader())
    send(url, "owed", agent="someone")
    return ["big", "evil", "gated", "owed", "plain", "scales", "seat"]


def bytes_of(desk, url, names):
    exports = [desk("export", name, "--store", url) for name in names]
    assert all(told.code == 0 for told in exports), [told.err for told in exports]
    return [told.raw for told in exports]


def indexes(url):
    async def look(rt):
        rows = [
            (row.conversation, row.seq, row.hash, row.status, row.agent, row.owes, row.updated)
            for row in await rt.store.rows()
        ]
        return rows, await rt.store.pending(), await rt.store.owing()

    return ask(url, look)


@ways
def test_every_conversation_arrives_byte_for_byte_with_its_artifacts_and_what_waits(desk, one, other):
    source, target = urls(desk, one, other)
    names = filled(source)
    told = desk("copy", source, target)
    assert told.code == 0, told.err
    assert told.out.startswith("copied 7 conversations (")
    assert "1 artifact" in told.out
    assert "every hash chain fits" in told.out
    assert bytes_of(desk, source, names) == bytes_of(desk, target, names)
    assert indexes(source) == indexes(target)
    assert desk("verify", "--store", target).code == 0
    again = desk("copy", source, target)
    assert (again.code, again.out.splitlines()[1:]) == (0, ["there already: 7"])
    assert again.out.startswith("copied 0 conversations (0 events)")


@ways
def test_what_was_copied_goes_on_there_and_comes_back(desk, one, other):
    source, target = urls(desk, one, other)
    rest(source, "gated", agents.gated)
    before = bytes_of(desk, source, ["gated"])
    assert desk("copy", source, target).code == 0
    [entry] = desk("pending", "--json", "--store", target).objects
    told = desk("approve", entry["call"], "--resume", f"{DESK}:gated", "--store", target)
    assert told.code == 0, told.err
    assert "turn completed" in told.out
    told = desk("copy", source, target)
    assert told.code == 0, told.err
    assert "gone on there, and left alone: gated" in told.out
    assert bytes_of(desk, source, ["gated"]) == before
    told = desk("copy", target, source)
    assert told.code == 0, told.err
    assert told.out.startswith("copied 0 conversations, continued 1 (")
    assert bytes_of(desk, source, ["gated"]) == bytes_of(desk, target, ["gated"])
    assert indexes(source) == indexes(target)
    assert desk("pending", "--json", "--store", source).objects == []


@ways
def test_a_log_that_differs_is_refused_and_nothing_is_overwritten(desk, one, other):
    source, target = urls(desk, one, other)
    for url in (source, target):
        rest(url, "c", agents.plain, text=f"to {url}")
        rest(url, "longer here" if url == source else "only there", agents.gated)
    rest(source, "longer", agents.gated)
    rest(target, "longer", agents.plain)
    before = bytes_of(desk, target, ["c", "longer", "only there"])
    refused(desk("copy", source, target), 3, "[conflict]", "c, longer", "not touched", "import --as")
    assert bytes_of(desk, target, ["c", "longer", "only there"]) == before
    assert bytes_of(desk, target, ["longer here"]) == bytes_of(desk, source, ["longer here"])


def talks(request):
    return [agents.REFUND] if request.messages[-1].content == "pay" else "x" * 1_000_000


LONG = Agent("long", model=ScriptedModel([talks] * 10, follow=True), tools=[agents.refund])


@ways
def test_a_copy_that_is_killed_is_taken_up_where_it_was_and_nobody_runs_half_of_a_log(desk, one, other):
    """Each part of a long log is an append of its own; until the last one it sleeps."""
    source, target = urls(desk, one, other)
    for text in [*["talk"] * 9, "pay"]:
        rest(source, "c", LONG, text)
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
    told = desk("copy", source, target)
    assert told.code == 0, told.err
    assert bytes_of(desk, source, ["c"]) == bytes_of(desk, target, ["c"])
    assert indexes(source) == indexes(target)


def test_a_part_of_a_log_that_was_copied_sleeps_until_the_rest_has_come(desk, monkeypatch):
    """The same without the luck of the moment: the other store fails after the first part."""
    from assent.cli import copying
    from assent.errors import StoreError

    source, target = urls(desk, "sqlite", "sqlite")
    rest(source, "c", agents.gated)
    monkeypatch.setattr(copying, "PART_BYTES", 1)

    async def half():
        async with copying.opened(source) as ours, copying.opened(target) as theirs:
            append, parts = theirs.append, []

            async def failing(step):
                if len(parts) == 3:
                    raise StoreError("full")
                parts.append(step)
                await append(step)

            theirs.append = failing
            with pytest.raises(StoreError):
                await copying._copied(ours, theirs)
            return await theirs.row("c"), await theirs.pending(), await theirs.owing()

    row, waiting, owing = asyncio.run(half())
    assert (row.seq, row.owes, waiting, owing) == (3, False, [], [])
    assert desk("copy", source, target).code == 0
    assert bytes_of(desk, source, ["c"]) == bytes_of(desk, target, ["c"])
    assert indexes(source) == indexes(target)


@pytest.mark.parametrize(("one", "other"), WAYS)
def test_what_moves_meanwhile_is_named_and_the_next_run_catches_up(desk, one, other):
    source, target = urls(desk, one, other)
    with desk.start("worker", f"{SHIFT}:digger", "--store", source) as worker:
        worker.until(" on ")
        rest(source, "still", agents.plain)
        send(source, "c")
        until_noted(desk, "began", "c")
        assert desk("copy", source, target).code == 0  # as far as it has come
        (desk.path / "c").touch()
        until_over(source, "c")
    assert indexes(source) != indexes(target)
    told = desk("copy", source, target)
    assert told.code == 0, told.err
    assert told.out.startswith("copied 0 conversations, continued 1 (")
    assert indexes(source) == indexes(target)
    assert len(ledger(desk)) == 2


def test_conversations_that_moved_while_they_were_copied_are_named(desk):
    from assent.cli import copying

    source, target = urls(desk, "sqlite", "postgres")
    rest(source, "c", agents.plain)
    rest(source, "still", agents.plain)

    async def look():
        async with copying.opened(source) as ours, copying.opened(target) as theirs:
            tally = await copying._copied(ours, theirs)
            async with Runtime(store=source) as rt:
                await rt.send("c", "more", agent="plain")
                await rt.send("new", "hi", agent="plain")
            await copying._look_again(ours, theirs, tally)
            return tally.moved

    assert asyncio.run(look()) == ["c", "new"]


def test_whoever_watches_sees_how_far_it_is_and_a_pipe_gets_only_the_result(desk):
    source, target = urls(desk, "sqlite", "sqlite")
    for name in "abc":
        rest(source, name, agents.plain)
    child = pexpect.spawn(
        sys.executable,
        ["-m", "assent", "copy", source, target],
        env=environment(TERM="xterm", NO_COLOR="1"),
        dimensions=(24, 100),
        timeout=60,
        encoding="utf-8",
    )
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    assert re.search(r"copying .*3/3", child.before)
    assert "copied 3 conversations" in child.before
    told = desk("copy", source, target)
    assert (told.err, "copying" in told.out) == ("", False)


def test_agents_that_run_on_both_sides_keep_it_from_being_copied(desk):
    source, target = urls(desk, "sqlite", "sqlite")
    send(source, "c")
    send(target, "d")
    words = ("worker", f"{SHIFT}:digger", "--store")
    with desk.start(*words, source) as one, desk.start(*words, target) as two:
        one.until(" on ")
        two.until(" on ")
        refused(desk("copy", source, target), 3, "[busy]", f"process {two.process.pid} on", "stop those on")
        one.kill()
        assert desk("copy", source, target).code == 0
        assert until_noted(desk, "began", "c")  # whoever runs there goes on with it


def test_an_artifact_or_an_event_that_is_missing_here_is_said_and_not_copied(desk):
    source, target = urls(desk, "sqlite", "sqlite")
    rest(source, "c", reader())
    (desk.path / "a.db").rename(desk.path / "assent.db")
    change(desk, "DELETE FROM artifacts")
    refused(desk("copy", "sqlite:///assent.db", target), 1, "'c'", "is missing", "verify")
    assert desk("log", "--json", "--store", target).objects == []


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("sqlite:///a.db",), 2, "TO_URL"),
        (("sqlite:///none.db", "sqlite:///b.db"), 3, "no store"),
        (("sqlite:///a.db", "sqlite:///./a.db"), 2, "same store"),
        (("memory:", "sqlite:///b.db"), 2, "in memory"),
        (("sqlite:///a.db", "memory:"), 2, "in memory"),
        (("sqlite:///a.db", "mysql://b"), 2, "unknown store"),
    ],
)
def test_what_cannot_be_copied_is_refused_in_one_line_and_nothing_is_made(desk, words, code, said):
    (desk.path / "a.db").touch()
    refused(desk("copy", *words), code, said)
    assert not (desk.path / "b.db").exists()
