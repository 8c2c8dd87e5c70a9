"""``holdfast undo``: files are put back from the log, as a user would do it."""

import asyncio
import os
import sys

import pexpect
import pytest
from terminal import assert_refused, environment

from holdfast import Agent, Runtime, ScriptedModel, ToolCall
from holdfast.workspace import Workspace

LIMITS = "bash) are not covered"


@pytest.fixture
def tree(desk):
    """A workspace beside the store, with a file."""
    root = desk.path / "app"
    root.mkdir()
    (root / "greet.py").write_text("print('hello')\n")
    (root / "greet.py").chmod(0o640)
    return root


def change(desk, tree, *calls, conversation="c", text="go"):
    """Run a turn in which the agent makes these calls one after the other, without asking."""
    rules = [{"tool": "bash", "argv": ["true"], "effect": "allow"}]
    ws = Workspace(tree, mode="edits", sandbox="none", rules=rules)
    agent = Agent("dev", model=ScriptedModel([*([call] for call in calls), "Done."]), tools=[ws.tools])
    assert desk.run_until_rest(conversation, agent, text) == []


def edit(old, new, path="greet.py"):
    return ToolCall("edit", {"path": path, "old": old, "new": new})


def write(path, content):
    return ToolCall("write", {"path": path, "content": content})


def test_undo_shows_the_diff_and_puts_the_files_back(desk, tree):
    """Contents and modes are put back, new files are removed, the diff comes first [B105]."""
    change(desk, tree, edit("hello", "bye"), write("notes/new.txt", "new\n"), edit("bye", "ciao"))
    shown = desk("undo", "c", "--dry-run")
    assert shown.code == 0, shown.err
    assert f"undo of turn 1 of c (events 6 to 12) in {tree}" in shown.out
    assert "-print('ciao')\n+print('hello')\n" in shown.out
    assert "--- a/notes/new.txt\n+++ /dev/null\n@@ -1 +0,0 @@\n-new\n" in shown.out
    assert shown.out.index("greet.py") < shown.out.index("new.txt"), "newest first"
    assert "2 files would be put back; nothing was done" in shown.out
    assert (tree / "greet.py").read_text() == "print('ciao')\n"
    done = desk("undo", "c", "--yes")
    assert done.code == 0, done.err
    assert done.out.endswith("put back greet.py\nremoved notes/new.txt\n")
    assert done.out.index("+print('hello')") < done.out.index("put back greet.py")
    assert (tree / "greet.py").read_text() == "print('hello')\n"
    assert (tree / "greet.py").stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tree.rglob("*")) == ["greet.py", "notes"]


def test_undo_again_goes_back_another_turn_and_to_0_undoes_everything(desk, tree):
    change(desk, tree, edit("hello", "one"))
    change(desk, tree, edit("one", "two"))
    change(desk, tree, edit("two", "three"))
    for turn, text in ((3, "two"), (2, "one")):
        result = desk("undo", "c", "--yes")
        assert f"undo of turn {turn} " in result.out
        assert text in (tree / "greet.py").read_text()
    assert "undo of turns 1 to 3 " in desk("undo", "c", "--to", "0", "--yes").out
    assert "hello" in (tree / "greet.py").read_text()
    for words in ((), ("--to", "0")):
        result = desk("undo", "c", "--yes", *words)
        assert (result.code, "nothing to undo" in result.out) == (0, True)


def test_undo_to_an_event_keeps_what_was_done_until_then(desk, tree):
    change(desk, tree, edit("hello", "one"), edit("one", "two"), edit("two", "three"))
    [first, *_] = [event["seq"] for event in desk.log("c") if event["type"] == "CallReturned"]
    assert desk("undo", "c", "--to", first, "--yes").code == 0
    assert (tree / "greet.py").read_text() == "print('one')\n"
    assert_refused(desk("undo", "c", "--to", 1000), 2, "there are only", "events in c")
    last = len(desk.log("c"))
    assert f"no file tool changed a file in c after event {last}" in desk("undo", "c", "--to", last).out


def test_undo_refuses_where_a_file_was_changed_since_and_shows_what_differs(desk, tree):
    """A file that somebody changed since stops the undo of all files [B105]."""
    change(desk, tree, edit("hello", "bye"), write("new.txt", "new\n"))
    (tree / "greet.py").write_text("print('bye')\nprint('mine')\n")
    result = desk("undo", "c", "--yes")
    assert_refused(result, 1, "[conflict]", "cannot undo: greet.py", "Nothing was changed")
    assert "✗ greet.py: it was changed since event 6\n" in result.out
    assert " print('bye')\n+print('mine')\n" in result.out
    assert (tree / "greet.py").read_text() == "print('bye')\nprint('mine')\n"
    assert (tree / "new.txt").exists()


def test_undo_says_that_the_changes_of_commands_stay(desk, tree):
    change(desk, tree, ToolCall("bash", {"command": "true"}), edit("hello", "bye"))
    result = desk("undo", "c", "--yes")
    assert "note: 1 command ran since event 3; what bash changed is not undone" in result.out
    assert LIMITS in " ".join(desk("undo", "--help").out.split())
    assert "The undo is not recorded in the log" in " ".join(desk("undo", "--help").out.split())


def test_undo_does_not_change_the_log(desk, tree):
    change(desk, tree, edit("hello", "bye"))
    before = desk("log", "c", "--json").raw
    assert desk("undo", "c", "--yes").code == 0
    assert desk("log", "c", "--json").raw == before


def test_undo_without_a_terminal_needs_yes(desk, tree):
    change(desk, tree, edit("hello", "bye"))
    result = desk("undo", "c")
    assert_refused(result, 2, "no terminal", "--yes")
    assert "+print('hello')" in result.out
    assert "bye" in (tree / "greet.py").read_text()


@pytest.mark.parametrize(("answer", "text"), [("n", "bye"), ("y", "hello")])
def test_undo_asks_on_a_terminal(desk, tree, answer, text):
    change(desk, tree, edit("hello", "bye"))
    program = pexpect.spawn(
        sys.executable,
        ["-m", "holdfast", "undo", "c"],
        cwd=str(desk.path),
        env=environment(TERM="dumb"),
        encoding="utf-8",
        timeout=60,
    )
    program.expect("hello")
    program.expect(r"Put 1 file back\? \[y/N\]: ")
    program.sendline(answer)
    program.expect(pexpect.EOF)
    program.close()
    assert program.exitstatus == 0
    assert text in (tree / "greet.py").read_text()


def test_undo_refuses_another_root_and_takes_one_that_was_moved(desk, tree):
    change(desk, tree, edit("hello", "bye"))
    assert_refused(desk("undo", "c", "--root", desk.path, "--yes"), 2, "is not where this conversation changed files")
    assert desk("undo", "c", "--root", tree, "--dry-run").code == 0
    moved = tree.rename(desk.path / "moved")
    assert_refused(desk("undo", "c", "--yes"), 3, "is not on this machine", "--root")
    assert desk("undo", "c", "--root", "moved", "--yes").code == 0
    assert (moved / "greet.py").read_text() == "print('hello')\n"


def test_undo_does_not_follow_a_link_out_of_the_workspace(desk, tree):
    change(desk, tree, edit("hello", "bye"))
    (tree / "greet.py").rename(desk.path / "outside.py")
    (tree / "greet.py").symlink_to("../outside.py")
    result = desk("undo", "c", "--yes")
    assert_refused(result, 1, "[conflict]")
    assert "leads out of the workspace" in result.out
    assert (desk.path / "outside.py").read_text() == "print('bye')\n"


def test_undo_reads_results_that_were_too_large_for_the_event(desk, tree):
    files = {f"{'long' * 40}{number}.txt": f"{number}\n" for number in range(300)}
    patch = "".join(f"*** Add File: {name}\n+{content}" for name, content in files.items())
    call = ToolCall("apply_patch", {"patch": f"*** Begin Patch\n{patch}*** End Patch"})
    change(desk, tree, call)
    [result] = [event for event in desk.log("c") if event["type"] == "CallReturned"]
    assert set(result["data"]) == {"artifact", "size"}
    assert desk("undo", "c", "--yes").code == 0
    assert os.listdir(tree) == ["greet.py"]


def test_undo_escapes_what_a_terminal_would_obey(desk, tree):
    change(desk, tree, edit("hello", "\x1b[2Jgone"))
    result = desk("undo", "c", "--dry-run")
    assert "\x1b" not in result.out
    assert "gone" in result.out


def test_undo_without_a_store_or_conversation_or_changes(desk, tree):
    assert_refused(desk("undo", "c"), 3, "[not_found]", "no store")
    change(desk, tree, write("greet.py", "print('hello')\n"))
    assert_refused(desk("undo", "d"), 3, "[not_found]", "there is no conversation 'd'")
    result = desk("undo", "c")
    assert (result.code, result.out) == (0, "nothing to undo: no file tool changed a file in c\n")


def test_undo_of_an_imported_conversation_needs_trust_and_a_root(desk, tree):
    """A log from elsewhere may be forged: it cannot choose the directory that an undo writes to."""
    change(desk, tree, edit("hello", "bye"))
    (desk.path / "c.jsonl").write_bytes(desk("export", "c").raw)
    assert desk("import", "c.jsonl", "--store", "sqlite:///other.db").code == 0
    other = ("undo", "c", "--yes", "--store", "sqlite:///other.db")
    assert_refused(desk(*other, "--root", tree), 5, "[permission_denied]", "imported without --trust")
    assert desk("import", "c.jsonl", "--trust", "--store", "sqlite:///other.db").code == 0
    assert_refused(desk(*other), 2, "give --root")
    assert (tree / "greet.py").read_text() == "print('bye')\n"
    result = desk(*other, "--root", tree)
    assert result.code == 0, result.err
    assert (tree / "greet.py").read_text() == "print('hello')\n"


@pytest.mark.parametrize("restarted", [True, False])
def test_undo_works_while_a_call_waits_and_the_call_then_overwrites_nothing(desk, tree, restarted):
    """An approval is bound to the file's version. After an undo a new process asks again; one that has seen the file
    tells the model of the conflict [B73, B94]."""
    calls = [[edit("hello", "bye")], [write("greet.py", "print('new')\n")], "Done."]
    rules = [{"tool": "edit", "path": "greet.py", "effect": "allow"}]

    def make_agent():
        ws = Workspace(tree, mode="ask", sandbox="none", rules=rules)
        return Agent("dev", model=ScriptedModel(calls, follow=True), tools=[ws.tools])

    agent = make_agent()
    [waiting] = desk.run_until_rest("c", agent)
    assert "a turn of this conversation is open" in desk("undo", "c", "--yes").out
    assert desk("approve", waiting.call).code == 0
    pending = resume(desk, make_agent() if restarted else agent)
    assert [entry["preview"]["diff"].splitlines()[-2:] for entry in pending] == (
        [["-print('hello')", "+print('new')"]] if restarted else []
    )
    results = [event for event in desk.log("c") if event["type"] == "CallReturned"]
    assert [event.get("error", {}).get("kind") for event in results] == [None, *([] if restarted else ["conflict"])]
    assert (tree / "greet.py").read_text() == "print('hello')\n"


def resume(desk, agent):
    """Continue the conversation until it rests; return its pending calls."""

    async def wait():
        async with Runtime(agent, store=f"sqlite:///{desk.path}/holdfast.db") as rt:
            await rt.wait("c")

    asyncio.run(wait())
    return desk("pending", "--json").objects
