"""``Workspace``: its tools in an agent, and what the log says of modes and rules."""

from __future__ import annotations

import asyncio
import os

import pytest

from holdfast import Agent, Approve, Runtime, ScriptedModel, ToolCall
from holdfast.errors import DeclarationError
from holdfast.workspace import Workspace

TOOLS = ("read", "write", "edit", "apply_patch", "bash", "grep", "glob", "list", "read_artifact", "update_plan")


def make_agent(ws, *calls):
    return Agent("dev", model=ScriptedModel([[call] for call in calls] + ["done"], follow=True), tools=[ws.tools])


@pytest.fixture
def root(tmp_path):
    made = tmp_path / "root"
    made.mkdir()
    (made / "a.txt").write_text("one\ntwo\n")
    return made


def test_a_workspace_has_ten_tools(root):
    assert sorted(Workspace(root).tools.names) == sorted(TOOLS)


def test_an_unknown_mode_is_refused_with_the_legal_ones(root):
    with pytest.raises(DeclarationError, match="'auto', 'edits', 'ask', 'read_only', 'plan'"):
        Workspace(root, mode="yolo")  # pyright: ignore[reportArgumentType]


async def test_in_ask_a_read_runs_and_an_edit_waits_with_its_diff(root):
    """The pending entry carries the dry run of the edit [B71, B73]."""
    edit = ToolCall("edit", {"path": "a.txt", "old": "two", "new": "three"})
    agent = make_agent(Workspace(root), ToolCall("read", {"path": "a.txt"}), edit)
    async with Runtime(agent) as rt:
        result = await rt.run("go")
        (waiting,) = result.pending
        assert waiting.tool == "edit"
        assert "-two\n+three" in waiting.preview["diff"]
        assert (root / "a.txt").read_text() == "one\ntwo\n"
        await rt.resolve(waiting, Approve(), by="boss")
        assert (await rt.wait(result.conversation)).text == "done"
    assert (root / "a.txt").read_text() == "one\nthree\n"


async def test_the_model_sees_a_whole_page_of_a_long_file(root):
    """A page has 48 KiB, and is not cut like other results [B74]."""
    text = "".join(f"line {n} of a long file\n" for n in range(1500))
    (root / "long.txt").write_text(text)
    agent = make_agent(Workspace(root), ToolCall("read", {"path": "long.txt"}))
    async with Runtime(agent) as rt:
        await rt.run("go")
    assert "line 1499 of a long file" in str(agent.model.requests[-1].messages[-1])


async def test_an_edit_whose_file_changed_after_the_approval_was_shown_asks_again(root):
    """A plan that changed between approval and run asks again [B73]."""
    agent = make_agent(Workspace(root), ToolCall("edit", {"path": "a.txt", "old": "two", "new": "three"}))
    async with Runtime(agent) as rt:
        result = await rt.run("go")
        (root / "a.txt").write_text("zero\none\ntwo\n")
        await rt.resolve(result.pending[0], Approve(), by="boss")
        again = await rt.wait(result.conversation)
        assert again.waiting
        assert again.pending[0].reason == "plan changed"
        assert (root / "a.txt").read_text() == "zero\none\ntwo\n"


async def test_a_script_that_changed_after_the_approval_was_shown_asks_again(root):
    """Only the file behind the command changed, and the approval no longer holds [B96]."""
    (root / "run.sh").write_text("echo first\n")
    agent = make_agent(Workspace(root), ToolCall("bash", {"command": "bash run.sh"}))
    async with Runtime(agent) as rt:
        result = await rt.run("go")
        (root / "run.sh").write_text("echo second\n")
        await rt.resolve(result.pending[0], Approve(), by="boss")
        again = await rt.wait(result.conversation)
        assert again.pending[0].reason == "plan changed"
        await rt.resolve(again.pending[0], Approve(), by="boss")
        assert (await rt.wait(result.conversation)).text == "done"
        events = await rt.history(result.conversation)
    returned = [event.value for event in events if type(event).__name__ == "CallReturned"]
    assert returned[0]["output"] == "second\n"


async def test_the_mode_and_the_rules_in_force_are_in_the_log(root):
    """The mode in force stands in the log [B98]."""
    ws = Workspace(root, mode="edits")
    agent = make_agent(ws, ToolCall("write", {"path": "b.txt", "content": "x"}))
    async with Runtime(agent) as rt:
        result = await rt.run("go")
        events = await rt.history(result.conversation)
    (verdict,) = [verdict for event in events for verdict in getattr(event, "verdicts", ()) if verdict.reason]
    assert verdict.reason.startswith(f"mode edits, rules {ws.policy.rules.hash[:8]}")


async def test_mode_plan_refuses_a_write_that_a_grant_covers(root):
    """Nothing changes in mode plan, whatever rules or grants say [B98]."""
    write = ToolCall("write", {"path": "b.txt", "content": "x"})
    asking, planning = Workspace(root), Workspace(root, mode="plan")
    async with Runtime(make_agent(asking, write, write), store="memory:") as rt:
        result = await rt.run("go")
        await rt.resolve(result.pending[0], Approve(remember="tool"), by="boss")
        await rt.wait(result.conversation)
        assert (root / "b.txt").exists()
    (root / "b.txt").unlink()
    async with Runtime(make_agent(planning, write)) as rt:
        result = await rt.run("go")
        assert result.text == "done"
        (returned,) = [e for e in await rt.history(result.conversation) if type(e).__name__ == "CallReturned"]
    assert returned.error.kind == "permission_denied"
    assert not (root / "b.txt").exists()


async def test_an_invalid_call_is_not_asked_about(root):
    agent = make_agent(Workspace(root), ToolCall("write", {"path": "../out.txt", "content": "x"}))
    async with Runtime(agent) as rt:
        result = await rt.run("go")
        assert not result.waiting
        (returned,) = [e for e in await rt.history(result.conversation) if type(e).__name__ == "CallReturned"]
    assert returned.error.kind == "outside_workspace"


async def test_a_remembered_command_runs_again_whatever_its_description_and_no_other_does(root):
    """The grant covers that exact command and nothing longer [B101]."""
    first = ToolCall("bash", {"command": "sleep 0", "description": "once"})
    same = ToolCall("bash", {"command": "sleep 0", "description": "twice"})
    longer = ToolCall("bash", {"command": "sleep 0 0"})
    async with Runtime(make_agent(Workspace(root), first, same, longer)) as rt:
        result = await rt.run("go")
        await rt.resolve(result.pending[0], Approve(remember="args"), by="boss")
        waiting = await rt.wait(result.conversation)
        assert [pending.args["command"] for pending in waiting.pending] == ["sleep 0 0"]


async def test_a_remembered_approval_does_not_count_for_a_command_that_names_a_file(root):
    """The approver saw the content of the script; a later content is another command [B96, B101]."""
    (root / "run.sh").write_text("echo first\n")
    run = ToolCall("bash", {"command": "bash run.sh"})
    async with Runtime(make_agent(Workspace(root, mode="edits"), run, run)) as rt:
        result = await rt.run("go")
        await rt.resolve(result.pending[0], Approve(remember="args"), by="boss")
        again = await rt.wait(result.conversation)
        assert [pending.args["command"] for pending in again.pending] == ["bash run.sh"]
        assert "remembered approval does not count" in (again.pending[0].reason or "")


async def test_the_store_cannot_be_read_or_changed_through_the_tools(root):
    """The audit log is out of reach in every mode [B80]."""
    store = root / "log.db"
    calls = [
        ToolCall("read", {"path": "log.db"}),
        ToolCall("write", {"path": "log.db", "content": "x"}),
        ToolCall("bash", {"command": "sh -c 'echo x > log.db'"}),
    ]
    async with Runtime(make_agent(Workspace(root, mode="auto"), *calls), store=f"sqlite:///{store}") as rt:
        result = await rt.run("go")
        assert result.text == "done"
        returned = [e for e in await rt.history(result.conversation) if type(e).__name__ == "CallReturned"]
    assert [event.error.kind for event in returned[:2]] == ["protected_path", "protected_path"]
    assert returned[2].value["ok"] is False


async def test_a_rule_file_in_the_workspace_is_protected(root):
    (root / "rules.json").write_text("[]")
    ws = Workspace(root, mode="auto", rules=root / "rules.json")
    agent = make_agent(ws, ToolCall("write", {"path": "rules.json", "content": "x"}))
    async with Runtime(agent) as rt:
        result = await rt.run("go")
        (returned,) = [e for e in await rt.history(result.conversation) if type(e).__name__ == "CallReturned"]
    assert returned.error.kind == "protected_path"


async def test_a_link_in_the_workspace_to_the_rule_file_is_protected(root, tmp_path):
    """Whoever replaces the link chooses the rules of the next start [B92]."""
    (tmp_path / "rules.json").write_text("[]")
    (root / "rules.json").symlink_to(tmp_path / "rules.json")
    ws = Workspace(root, mode="auto", rules=root / "rules.json")
    assert ws.root.is_protected("rules.json")
    assert "rules.json" in ws.root.protected_paths()


async def test_the_programs_that_the_server_runs_are_protected(root, monkeypatch):
    """A command that changes the supervisor or ripgrep would leave the sandbox with the next call [B92, B102]."""
    for path in ("venv/bin/python", "venv/lib/holdfast/supervisor.py", "sub/venv/python"):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("original")
    monkeypatch.setattr("sys.prefix", str(root / "venv"))
    ws = Workspace(root, mode="auto", sandbox="auto")
    assert ws.root.is_protected("VENV/lib/holdfast/supervisor.py")
    assert not ws.root.is_protected("sub/venv/python"), "only the one that runs"
    write = ToolCall("write", {"path": "venv/bin/python", "content": "x"})
    change = "echo x > venv/bin/python; rm -r venv/lib; mv venv v; echo x > sub/venv/python"
    calls = [write] + [ToolCall("bash", {"command": change})] * (ws.sandbox.level == "A")
    async with Runtime(make_agent(ws, *calls)) as rt:
        result = await rt.run("go")
        first, *_ = [e for e in await rt.history(result.conversation) if type(e).__name__ == "CallReturned"]
    assert first.error.kind == "protected_path"
    assert (root / "venv/bin/python").read_text() == "original"
    assert (root / "venv/lib/holdfast/supervisor.py").exists()
    assert (root / "sub/venv/python").read_text() == ("x\n" if ws.sandbox.level == "A" else "original")


def test_the_server_s_own_environment_cannot_be_the_workspace(root, monkeypatch):
    """Everything in it would have to be protected [B92]."""
    monkeypatch.setattr("sys.prefix", str(root))
    with pytest.raises(DeclarationError, match="own programs run from"):
        Workspace(root)


async def test_the_workspace_of_a_sub_agent_may_only_narrow(root):
    """The stricter mode holds, an allow rule of the child changes nothing, a deny rule holds [B98, B99]."""
    allow = {"tool": "write", "path": "a.txt", "effect": "allow"}
    deny = {"tool": "edit", "path": "*.txt", "effect": "deny"}
    parent = Workspace(root, mode="ask")
    child = parent.narrow("auto", [allow, deny])
    assert (child.mode, parent.mode) == ("ask", "ask")
    write = ToolCall("write", {"path": "a.txt", "content": "x"})
    edit = ToolCall("edit", {"path": "a.txt", "old": "one", "new": "x"})
    async with Runtime(make_agent(child, edit, write)) as rt:
        (waiting,) = (await rt.run("go")).pending
    assert waiting.tool == "write", "the edit was denied, the write asks"
    async with Runtime(make_agent(parent, edit)) as rt:
        (waiting,) = (await rt.run("go")).pending
    assert waiting.tool == "edit", "the parent is as it was"
    with pytest.raises(DeclarationError, match="unknown mode"):
        parent.narrow("yolo")  # pyright: ignore[reportArgumentType]


def test_a_workspace_whose_path_cannot_be_logged_is_refused(tmp_path):
    """A change would be made, and its result could not be recorded [B76]."""
    path = tmp_path / os.fsdecode(b"r\xff")
    path.mkdir()
    with pytest.raises(DeclarationError, match="not UTF-8"):
        Workspace(path)


async def test_a_search_leaves_out_what_a_rule_denies(root):
    (root / "secret").mkdir()
    (root / "secret" / "key.txt").write_text("one secret\n")
    rules = [{"tool": "read", "path": "secret/**", "effect": "deny", "note": "keys"}]
    agent = make_agent(Workspace(root, rules=rules), ToolCall("grep", {"pattern": "one"}))
    async with Runtime(agent) as rt:
        result = await rt.run("go")
        (returned,) = [e for e in await rt.history(result.conversation) if type(e).__name__ == "CallReturned"]
    assert returned.value["lines"] == "a.txt:1:one"


async def test_an_interrupted_command_whose_plan_changed_is_asked_again_with_the_fresh_plan(root, tmp_path):
    """Its first run wrote a file that it names: the approver sees the hash that it has now [B96]."""
    store = f"sqlite:///{tmp_path / 'log.db'}"
    call = ToolCall("bash", {"command": "echo x >> a.txt; [ -e go ] || sleep 60"})
    first = Runtime(make_agent(Workspace(root), call), store=store)
    await first.start()
    result = await first.run("go")
    (shown,) = result.pending
    await first.resolve(shown, Approve(), by="boss")
    while (root / "a.txt").read_text() != "one\ntwo\nx\n":
        await asyncio.sleep(0.01)
    await asyncio.gather(*first.kill(), return_exceptions=True)
    await first.store.close()
    (root / "go").touch()
    async with Runtime(make_agent(Workspace(root), call), store=store) as second:
        (interrupted,) = (await second.wait(result.conversation)).pending
        await second.resolve(interrupted, Approve(), by="boss")
        (again,) = (await second.wait(result.conversation)).pending
        assert (again.recovery, again.reason) == (True, "its plan has changed since it was interrupted")
        assert again.preview["plan"]["command"] == shown.preview["command"]
        assert again.preview["plan"]["files"]["a.txt"] != shown.preview["files"]["a.txt"]
        assert (root / "a.txt").read_text() == "one\ntwo\nx\n", "nothing ran without the approval"
        await second.resolve(again, Approve(), by="boss")
        assert (await second.wait(result.conversation)).text == "done"
    assert (root / "a.txt").read_text() == "one\ntwo\nx\nx\n"
