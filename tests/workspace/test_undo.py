"""Undo: what the log says about changes of files, and putting them back."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from workspace.conftest import FileTools, snapshot

from holdfast import Agent, Runtime, ScriptedModel, ToolCall
from holdfast.core.events import AnyEvent, CallReturned
from holdfast.errors import Invalid, NotFound, ToolError
from holdfast.tools.call import Call
from holdfast.workspace import Workspace
from holdfast.workspace.files.root import Root
from holdfast.workspace.files.text import hash_content
from holdfast.workspace.files.undo import (
    FileChanged,
    Undo,
    choose_root,
    find_commands,
    plan_undo,
    read_changes,
    select_turn,
)

Contents = dict[str, bytes]


async def run_turns(tree: Path, *turns: list[list[ToolCall]], **options: Any) -> tuple[list[AnyEvent], Contents]:
    """Run a turn for each list of replies; return the log and the artifacts that it names."""
    ws = Workspace(tree, **{"mode": "auto", "sandbox": "none", **options})
    replies: list[Any] = [reply for turn in turns for reply in [*turn, "Done."]]
    async with Runtime(Agent("dev", model=ScriptedModel(replies), tools=[ws.tools])) as rt:
        for _ in turns:
            (await rt.run("go", conversation="c")).raise_for_reason()
        events = await rt.history("c")
        failed = [event.error for event in events if isinstance(event, CallReturned) and event.error]
        assert not failed, failed
        kept = {one.sha256 for event in events for one in getattr(event, "artifacts", ())}
        return events, {name: await rt.artifact("c", name) for name in kept}


def write(path: str, content: str, over: str | None = None) -> ToolCall:
    """Return a call; ``over``: the content that it replaces."""
    expected = {} if over is None else {"expected": hash_content(over.encode())}
    return ToolCall("write", {"path": path, "content": content, **expected})


def edit(path: str, old: str, new: str) -> ToolCall:
    return ToolCall("edit", {"path": path, "old": old, "new": new})


def patch(text: str) -> ToolCall:
    return ToolCall("apply_patch", {"patch": text})


def plan(tree: Path, changes: Iterable[FileChanged], contents: Contents) -> Undo:
    with Root(tree) as root:
        return plan_undo(root, list(changes), contents)


def commit(tree: Path, undo: Undo) -> None:
    with Root(tree) as root:
        undo.commit(root)


def last_turn(tree: Path, events: list[AnyEvent]) -> list[FileChanged]:
    with Root(tree) as root:
        return select_turn(root, read_changes(events))


async def test_every_change_of_the_file_tools_is_put_back_with_its_mode(tree: Path) -> None:
    """`undo` puts contents back: replaced, deleted, created and moved files, and their modes [B105]."""
    (tree / "run.sh").write_text("echo 1\n")
    (tree / "run.sh").chmod(0o750)
    before = snapshot(tree)
    moved = "*** Begin Patch\n*** Update File: a.txt\n*** Move to: b.txt\n@@\n one\n-two\n+zwei\n*** End Patch"
    mode = "diff --git a/src/app.py b/src/app.py\nold mode 100644\nnew mode 100755\n"
    events, contents = await run_turns(
        tree,
        [
            [edit("src/app.py", "return 1", "return 2")],
            [patch("*** Begin Patch\n*** Delete File: run.sh\n*** End Patch"), write("new.txt", "new\n")],
            [patch(moved)],
            [patch(mode)],
            [write("src/app.py", "print()\n")],
        ],
    )
    after = snapshot(tree)
    assert after["b.txt"][1] == b"one\nzwei\nthree\n"
    assert after["src/app.py"][0] & 0o100
    undo = plan(tree, read_changes(events), contents)
    assert snapshot(tree) == after, "a plan changes nothing"
    assert undo.problems == []
    assert "-print()\n+def main():\n+    return 1\n" in undo.diff()
    assert "--- /dev/null\n+++ b/run.sh" in undo.diff()
    assert "mode of src/app.py: 755 -> 644" in undo.diff()
    commit(tree, undo)
    assert snapshot(tree) == before


async def test_the_newest_file_comes_first_and_one_file_is_put_back_once(tree: Path) -> None:
    """Changes of one file are undone in one step, newest file first [B105]."""
    events, contents = await run_turns(
        tree, [[edit("a.txt", "one", "1")], [edit("src/app.py", "1", "2")], [edit("a.txt", "two", "2")]]
    )
    undo = plan(tree, read_changes(events), contents)
    assert [change.path for change in undo.changes] == ["a.txt", "src/app.py"]
    assert undo.changes[0].content == b"one\ntwo\nthree\n"


async def test_a_file_that_was_changed_since_is_refused_with_what_differs(tree: Path) -> None:
    """A file that somebody changed since is named, with the difference, and nothing is put back anywhere [B105]."""
    calls = [edit("a.txt", "two", "zwei"), write("new.txt", "new\n"), edit("src/app.py", "return 1", "return 2")]
    events, contents = await run_turns(tree, [[call] for call in calls])
    (tree / "a.txt").write_text("one\nzwei\nthree\nby hand\n")
    (tree / "new.txt").unlink()
    before = snapshot(tree)
    undo = plan(tree, read_changes(events), contents)
    found = {problem.path: problem for problem in undo.problems}
    assert set(found) == {"a.txt"}, "new.txt was made by the tool, and is gone as before"
    assert undo.unchanged == ["new.txt"]
    assert "was changed since event" in found["a.txt"].message
    added = [line for line in found["a.txt"].diff.splitlines() if line[0] in "+-" and line[:3] not in ("+++", "---")]
    assert added == ["+by hand"]
    with pytest.raises(ToolError) as refused:
        commit(tree, undo)
    assert refused.value.kind == "conflict"
    assert snapshot(tree) == before


@pytest.mark.parametrize("tool", ["write", "edit", "apply_patch"])
async def test_what_differs_is_shown_for_each_tool(tree: Path, tool: str) -> None:
    calls = {
        "write": write("a.txt", "1\n", over=(tree / "a.txt").read_text()),
        "edit": edit("a.txt", "one\ntwo\nthree", "1"),
        "apply_patch": patch("*** Begin Patch\n*** Update File: a.txt\n@@\n-one\n-two\n-three\n+1\n*** End Patch"),
    }
    events, contents = await run_turns(tree, [[calls[tool]]])
    (tree / "a.txt").write_text("1\n2\n")
    [problem] = plan(tree, read_changes(events), contents).problems
    assert problem.diff == "--- a/a.txt\n+++ b/a.txt\n@@ -1 +1,2 @@\n 1\n+2\n"


async def test_a_file_that_changes_after_the_plan_is_a_conflict_and_nothing_is_changed(tree: Path) -> None:
    events, contents = await run_turns(
        tree, [[edit("a.txt", "two", "2"), write("src/app.py", "x\n", over=(tree / "src/app.py").read_text())]]
    )
    undo = plan(tree, read_changes(events), contents)
    (tree / "a.txt").write_text("other\n")
    before = snapshot(tree)
    with pytest.raises(ToolError) as refused:
        commit(tree, undo)
    assert refused.value.kind == "conflict"
    assert snapshot(tree) == before


async def test_a_change_of_something_else_between_two_calls_is_not_lost(tree: Path) -> None:
    """A hand-made change between two changes of tools stops the undo, and --to is suggested [B105]."""
    first, contents = await run_turns(tree, [[edit("a.txt", "two", "2")]])
    (tree / "a.txt").write_text("one\n2\nthree\nby hand\n")
    second, more = await run_turns(tree, [[edit("a.txt", "three", "3")]])
    changes = [*read_changes(first), *(_later(change) for change in read_changes(second))]
    undo = plan(tree, changes, contents | more)
    [problem] = undo.problems
    assert problem.message == (
        f"something else changed it before event {changes[1].seq}, which an undo would lose. "
        f"--to {changes[1].seq - 1} puts back only what came later"
    )
    commit(tree, plan(tree, changes[1:], contents | more))
    assert (tree / "a.txt").read_text() == "one\n2\nthree\nby hand\n"


def _later(change: FileChanged) -> FileChanged:
    return msgspec.structs.replace(change, seq=change.seq + 100, turn=change.turn + 1, reply=change.reply + 100)


async def test_undo_again_undoes_the_turn_before_and_then_nothing(tree: Path) -> None:
    """The log has no record of an undo: a turn whose files are as before counts as undone [B105]."""
    before = snapshot(tree)
    events, contents = await run_turns(tree, [[edit("a.txt", "one", "1")]], [[edit("a.txt", "two", "2")]])
    turns: list[int] = []
    while chosen := last_turn(tree, events):
        turns.append(chosen[0].turn)
        commit(tree, plan(tree, chosen, contents))
    assert turns == [2, 1]
    assert snapshot(tree) == before


async def test_everything_is_put_back_also_after_a_part_was_undone(tree: Path) -> None:
    before = snapshot(tree)
    events, contents = await run_turns(tree, [[edit("a.txt", "one", "1")]], [[edit("a.txt", "two", "2")]])
    commit(tree, plan(tree, last_turn(tree, events), contents))
    assert (tree / "a.txt").read_text() == "1\ntwo\nthree\n"
    commit(tree, plan(tree, read_changes(events), contents))
    assert snapshot(tree) == before


async def test_calls_of_one_reply_that_are_recorded_in_another_order_are_undone(tree: Path) -> None:
    """Parallel calls end in any order; the versions tell in which order they changed the file."""
    events, contents = await run_turns(tree, [[edit("a.txt", "one", "1")], [edit("a.txt", "two", "2")]])
    one, two = read_changes(events)
    assert plan(tree, [_at(two, one), _at(one, two)], contents).problems != [], "of different replies"
    undo = plan(tree, [_at(two, one, reply=5), _at(one, two, reply=5)], contents)
    assert undo.problems == []
    assert undo.changes[0].content == b"one\ntwo\nthree\n"


def _at(change: FileChanged, place: FileChanged, reply: int | None = None) -> FileChanged:
    return msgspec.structs.replace(change, seq=place.seq, reply=reply or change.reply)


async def test_a_link_that_leads_out_is_not_followed(tree: Path) -> None:
    """A file that was replaced by a link out of the root is refused, and its target stays [B75, B105]."""
    events, contents = await run_turns(tree, [[edit("a.txt", "two", "2"), edit("src/app.py", "1", "2")]])
    outside = tree.parent / "outside"
    (outside / "app.py").write_bytes((tree / "src" / "app.py").read_bytes())
    (tree / "src" / "app.py").unlink()
    (tree / "src").rmdir()
    (tree / "src").symlink_to(outside)
    before = (outside / "app.py").read_bytes()
    undo = plan(tree, read_changes(events), contents)
    [problem] = undo.problems
    assert problem.path == "src/app.py"
    assert "leads out of the workspace" in problem.message
    assert (outside / "app.py").read_bytes() == before


async def test_protected_paths_are_refused(tree: Path) -> None:
    """A log that names a protected path puts nothing there [B92, B105]."""
    (tree / ".git").mkdir()
    events, contents = await run_turns(tree, [[write("hook", "#!/bin/sh\n")]])
    [made] = read_changes(events)
    forged = msgspec.structs.replace(made, path=".git/hooks/pre-commit")
    [problem] = plan(tree, [forged], contents).problems
    assert "protected" in problem.message


async def test_a_change_whose_process_died_is_named_as_not_covered(tree: Path) -> None:
    """After a crash the old content is not kept: the undo says so and changes nothing [B105]."""
    events, contents = await run_turns(
        tree, [[write("a.txt", "1\n", over=(tree / "a.txt").read_text())], [edit("a.txt", "1", "2")]]
    )
    first, second = read_changes(events)
    lost = msgspec.structs.replace(first, kept=None, before=None, lost=True)
    [problem] = plan(tree, [lost, second], contents).problems
    assert f"--to {first.seq} puts back only what came later" in problem.message
    commit(tree, plan(tree, [second], contents))
    assert (tree / "a.txt").read_text() == "1\n"


async def test_a_recovered_write_without_a_plan_never_counts_as_a_new_file(tree: Path) -> None:
    """Whether the file existed before is not known then, so an undo must not delete it."""
    files = FileTools(tree)
    (tree / "a.txt").write_text("1\n")
    recovered = await files.recover("write", path="a.txt", content="1\n")
    assert recovered.data["changes"][0]["lost"] is True
    planned: Any = {"files": [{"path": "new.txt", "before": None, "after": None}]}
    made = await files.recover("write", Call(tool="write", attempt=2, plan=planned), path="new.txt", content="")
    assert made.data["changes"][0]["lost"] is False


async def test_only_results_of_file_tools_with_contents_that_they_stored_count(tree: Path) -> None:
    events, _ = await run_turns(tree, [[edit("a.txt", "two", "2")]])
    [at] = [number for number, event in enumerate(events) if isinstance(event, CallReturned)]
    result: Any = events[at]

    def changed(**fields: Any) -> list[FileChanged]:
        return read_changes([*events[:at], msgspec.structs.replace(result, **fields), *events[at + 1 :]])

    assert len(changed()) == 1
    assert changed(source="client") == []
    assert changed(data={"changes": "many"}) == []
    assert changed(data=None) == []
    assert [change.lost for change in changed(artifacts=())] == [True]
    entry = result.data["changes"][0]
    assert changed(data={**result.data, "changes": [{**entry, "before": "../x"}]}) == []


def move(directory: Path, name: str) -> Path:
    return directory.rename(directory.parent / name)


async def test_the_directory_comes_from_the_log_and_another_one_is_refused(tree: Path) -> None:
    events, _ = await run_turns(tree, [[edit("a.txt", "two", "2")]])
    changes = read_changes(events)
    assert choose_root(changes) == (tree, changes)
    assert choose_root(changes, f"{tree}/src/..")[1] == changes
    with pytest.raises(Invalid, match="is not where this conversation changed files"):
        choose_root(changes, tree.parent)
    with pytest.raises(NotFound, match="no such directory"):
        choose_root(changes, tree / "nowhere")
    moved = move(tree, "moved")
    with pytest.raises(NotFound, match="is not on this machine: give the directory with --root"):
        choose_root(changes)
    assert choose_root(changes, moved) == (moved, changes)


async def test_commands_are_counted_because_their_changes_are_not_covered(tree: Path) -> None:
    events, _ = await run_turns(
        tree,
        [[ToolCall("bash", {"command": "true"})], [edit("a.txt", "two", "2")]],
        rules=[{"tool": "bash", "argv": ["true"], "effect": "allow"}],
    )
    [command] = find_commands(events, 0)
    assert find_commands(events, command.seq) == []


async def test_two_names_of_one_file_are_one_file(tree: Path) -> None:
    """A file that was changed under its own name and through a link is put back once."""
    (tree / "link").symlink_to("src")
    before = snapshot(tree)
    events, contents = await run_turns(
        tree, [[edit("src/app.py", "return 1", "return 2")], [edit("link/app.py", "return 2", "return 3")]]
    )
    undo = plan(tree, read_changes(events), contents)
    assert len(undo.changes) == 1
    commit(tree, undo)
    assert snapshot(tree) == before
