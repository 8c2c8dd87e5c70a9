"""The bash tool: results, plans, and runs that are bound to them."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import threading
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from rich.console import Console
from shell_world import Ruling, World
from support.runtimes import agent, of, sees

from holdfast import Approve, Call, Runtime, ScriptedModel, ToolCall, ToolError
from holdfast.cli.render.workspace import render_plan
from holdfast.core.events import CallReturned
from holdfast.workspace.files.root import Root
from holdfast.workspace.limits import Limits
from holdfast.workspace.sandbox.base import Launch
from holdfast.workspace.sandbox.probe import find_sandbox
from holdfast.workspace.shell import binder


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, find_sandbox("auto"))


def digest(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


# --- results ---


async def test_a_non_zero_exit_is_a_result(world: World) -> None:
    """Exit 3 is a successful result with ok false and exit_code 3 [B78]."""
    assert await world.run("echo out; echo err >&2; exit 3") == {
        "ok": False,
        "exit_code": 3,
        "output": "out\nerr\n",
        "output_bytes": 8,
    }
    assert (await world.run("true"))["ok"] is True
    assert (await world.run("kill -9 $$"))["exit_code"] == 137


async def test_output_that_is_no_utf_8_is_replaced_and_said_so(world: World) -> None:
    """The result has replacement characters, can be logged, and says so [B79]."""
    result = await world.run("printf 'a\\377\\376b'")
    assert result["output"] == "a\ufffd\ufffdb"
    assert result["encoding"] == "not UTF-8: 2 bytes were replaced by U+FFFD"
    assert "encoding" not in await world.run("printf 'größe'")


async def test_long_output_is_cut_and_kept_as_an_artifact(tmp_path: Path) -> None:
    """The model sees head and tail, and how to read the rest; the artifact has all of it."""
    call = Call()
    result = await World(tmp_path, find_sandbox("auto")).run("seq 20000", call)
    whole = "".join(f"{number}\n" for number in range(1, 20001))
    assert result["output_bytes"] == len(whole)
    assert result["output"].startswith("1\n2\n")
    assert result["output"].endswith("19999\n20000\n")
    assert result["cut"]["omitted_bytes"] == len(whole) - 16_000
    assert result["artifact"]["sha256"] in result["cut"]["next"]
    assert call.kept[result["artifact"]["sha256"]].decode() == whole


async def test_an_artifact_is_bounded(tmp_path: Path) -> None:
    call = Call()
    limits = Limits(output_bytes=100, kept_output_bytes=1000, output_artifact_bytes=5000)
    result = await World(tmp_path, find_sandbox("auto"), limits=limits).run("seq 20000", call)
    kept = call.kept[result["artifact"]["sha256"]]
    assert len(kept) < 5100
    assert b"bytes were not kept" in kept
    assert kept.endswith(b"20000\n")


async def test_output_is_reported_while_the_command_runs(tmp_path: Path) -> None:
    """Progress comes before the end of the command."""
    reports: list[dict[str, object]] = []
    seen = asyncio.Event()
    call = Call(sink=lambda report: (reports.append(report), seen.set()))
    task = asyncio.create_task(
        World(tmp_path, find_sandbox("auto")).run("echo first; until [ -e go ]; do sleep 0.02; done", call)
    )
    await seen.wait()
    (tmp_path / "go").touch()
    assert (await task)["ok"]
    assert reports[0] == {"output": "first\n", "output_bytes": 6}


async def test_each_call_begins_at_the_root_without_state(world: World) -> None:
    (world.root.path / "sub").mkdir()
    await world.run("cd sub; export KEPT=1; echo $PWD")
    assert await world.output("echo $PWD $KEPT") == f"{world.root.path}\n"
    assert await world.output("pwd", cwd="sub") == f"{world.root.path}/sub\n"
    assert await world.output("pwd", cwd=f"{world.root.path}/sub") == f"{world.root.path}/sub\n"


@pytest.mark.parametrize(
    ("args", "kind"),
    [
        ({"command": "ls", "cwd": ".."}, "outside_workspace"),
        ({"command": "ls", "cwd": "/etc"}, "outside_workspace"),
        ({"command": "ls", "cwd": "absent"}, "not_found"),
        ({"command": "no-such-program --x"}, "command_failed"),
        ({"command": "./absent.sh"}, "command_failed"),
        ({"command": "./plain.txt"}, "command_failed"),
        ({"command": "  "}, "invalid_args"),
        ({"command": "a\0b"}, "invalid_args"),
    ],
)
async def test_a_plan_fails_as_the_run_would(world: World, args: dict[str, str], kind: str) -> None:
    """The dry run gives the error that the run would give [B72]."""
    (world.root.path / "plain.txt").write_text("text")
    errors = []
    for attempt in (world.plan, world.run):
        with pytest.raises(ToolError) as caught:
            await attempt(**args)
        errors.append((caught.value.kind, caught.value.message))
    assert errors[0] == errors[1]
    assert errors[0][0] == kind


# --- literal words ---


async def test_a_command_of_literal_words_needs_no_shell(tmp_path: Path) -> None:
    """It runs by execve: it also runs where there is no bash [B97]."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "show").symlink_to("/usr/bin/printf")
    world = World(tmp_path, find_sandbox("none"), environment={"PATH": str(programs)})
    assert await world.output("show '%s;' '$HOME' \"a b\" x=y") == "$HOME;a b;x=y;"
    with pytest.raises(ToolError, match="no bash here") as caught:
        await world.run("show a; show b")
    assert caught.value.kind == "command_failed"


async def test_builtins_run_in_bash(world: World) -> None:
    """A command that only bash has is opaque, and works."""
    assert (await world.plan("cd ."))["argv"] == "opaque"
    assert (await world.run("cd ."))["ok"]
    assert await world.output("type cd") == "cd is a shell builtin\n"


async def test_start_up_files_of_bash_are_not_read(tmp_path: Path) -> None:
    """Neither .bashrc nor BASH_ENV of the server."""
    (tmp_path / ".bashrc").write_text("echo from-bashrc")
    world = World(tmp_path, find_sandbox("none"), environment={"HOME": str(tmp_path)})
    assert await world.output("echo a; echo b") == "a\nb\n"


async def test_a_script_without_a_first_line_runs(world: World) -> None:
    (world.root.path / "run").write_text("echo ran $1\n")
    (world.root.path / "run").chmod(0o755)
    assert await world.output("./run it") == "ran it\n"


# --- plans ---


async def test_a_plan_names_all_that_decides_what_runs(tmp_path: Path) -> None:
    """argv, executable, cwd, environment names, guarantees and the hashes of the files that it names [B96, B104]."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/run.sh").write_text("echo hi\n")
    sandbox = find_sandbox("required")
    world = World(tmp_path, sandbox, environment={"MINE": "secret value"})
    plan = await world.plan("bash run.sh --x", cwd="sub", timeout=5, description="why")
    assert plan["argv"] == ["bash", "run.sh", "--x"]
    assert os.path.basename(plan["executable"]) == "bash"
    assert plan["executable_in_workspace"] is False
    assert plan["cwd"] == "sub"
    assert {"PATH", "HOME", "MINE"} <= set(plan["environment"])
    assert "secret value" not in str(plan)
    assert plan["files"] == {"sub/run.sh": digest("echo hi\n")}
    assert plan["timeout"] == 5
    assert plan["guarantees"] == dict.fromkeys(
        ("write", "read", "net_tcp", "net_udp", "pids", "env", "protected"), True
    )
    assert "holds: nothing outside the workspace can be changed" in plan["guarantees_in_words"]
    assert plan == await world.plan("bash run.sh --x", cwd="sub", timeout=5), "the same facts, the same plan"
    assert not (tmp_path / "sub/x").exists()


@pytest.mark.parametrize(
    ("command", "files"),
    [
        ("./run.sh", {"run.sh"}),
        ("cd sub && bash inner.sh | tee out", {"sub/inner.sh"}),
        ('sh "$PWD/run.sh"; cat < data.txt', {"data.txt"}),
        ("python3 -m pack.tool", {"pack/tool.py"}),
        ("make all", {"Makefile"}),
        ("cat --file=data.txt", {"data.txt"}),
        ("cat ROOT/data.txt", {"data.txt"}),
        ("cat /etc/passwd ../x absent sub", set()),
    ],
)
async def test_a_plan_has_the_files_that_a_command_names(world: World, command: str, files: set[str]) -> None:
    """Also of opaque commands: every word that names an existing file of the workspace [B96]."""
    root = world.root.path
    (root / "sub").mkdir()
    (root / "pack").mkdir()
    for name in ("run.sh", "data.txt", "sub/inner.sh", "pack/tool.py", "Makefile"):
        (root / name).write_text(name)
        (root / name).chmod(0o755)
    plan = await world.plan(command.replace("ROOT", str(root)))
    assert set(plan["files"]) >= files
    assert plan["files"] == {name: digest(name) for name in plan["files"]}
    if not files:
        assert plan["files"] == {}


async def test_an_executable_of_the_workspace_is_marked(tmp_path: Path) -> None:
    """A program that lies in the workspace could be anything: the plan says so, with its hash [B96]."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/git").write_text("#!/bin/sh\necho mine\n")
    (tmp_path / "bin/git").chmod(0o755)
    world = World(tmp_path, find_sandbox("auto"), environment={"PATH": f"{tmp_path}/bin:/usr/bin:/bin"})
    plan = await world.plan("git status")
    assert plan["executable_in_workspace"] is True
    assert plan["files"]["bin/git"] == digest("#!/bin/sh\necho mine\n")
    assert await world.output("git status") == "mine\n"


async def test_a_program_that_the_sandbox_hides_is_refused(tmp_path: Path) -> None:
    """The message says that it is outside, not that it does not exist."""
    root, other = tmp_path / "root", tmp_path / "other"
    root.mkdir()
    other.mkdir()
    (other / "tool").write_text("#!/bin/sh\n")
    (other / "tool").chmod(0o755)
    world = World(root, find_sandbox("required"), environment={"PATH": f"{other}:/usr/bin:/bin"})
    with pytest.raises(ToolError, match="outside of what the sandbox shows"):
        await world.plan("tool")


async def test_a_run_that_differs_from_its_plan_is_a_conflict(world: World) -> None:
    """The handler compares the facts again just before it starts [B96]."""
    script = world.root.path / "run.sh"
    script.write_text("echo one > ran\n")
    plan = await world.plan("bash run.sh")
    script.write_text("echo two > ran\n")
    with pytest.raises(ToolError) as caught:
        await world.run("bash run.sh", Call(plan=plan))
    assert caught.value.kind == "conflict"
    assert caught.value.details == {"changed": ["files"]}
    assert not (world.root.path / "ran").exists()
    assert (await world.run("bash run.sh", Call(plan=await world.plan("bash run.sh"))))["ok"]


async def test_a_changed_script_is_asked_about_again(tmp_path: Path) -> None:
    """After an approval, a change of only the script behind the command asks again [B96, B73]."""
    (tmp_path / "run.sh").write_text("echo approved\n")
    world = World(tmp_path, find_sandbox("auto"), ruling=Ruling("ask"))
    model = ScriptedModel([[ToolCall("bash", {"command": "bash run.sh"})], "done"])
    async with Runtime(agent(model, world.tool)) as runtime:
        turn = await runtime.send("c", "go")
        (first,) = (await turn.result()).pending
        assert first.preview["files"] == {"run.sh": digest("echo approved\n")}
        (tmp_path / "run.sh").write_text("echo swapped\n")
        await runtime.resolve("c", first.call, Approve(), by="boss")
        (second,) = (await turn.result()).pending
        assert second.reason == "plan changed"
        await runtime.resolve("c", second.call, Approve(), by="boss")
        await turn.final_result()
        assert "swapped" in str(sees(model)[0])
        (returned,) = of(await runtime.history("c"), CallReturned)
        assert returned.data["guarantees"] == first.preview["guarantees"], "the log has what was in force [B104]"


# --- what a plan binds ---

SHOWN, SWAPPED = "echo shown\n", "echo swapped\n"
MORE = "files that the scripts and programs read, source or start without the command naming them"


def real_world(path: Path) -> World:
    """Return a world with the root of the tools, which follows no absolute link."""
    world = World(path, find_sandbox("auto"))
    world.root = Root(path)  # pyright: ignore[reportAttributeAccessIssue]
    return world


def put(path: Path, text: str = SHOWN) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("command", "file"),
    [
        ("bash 'my run.sh' | cat", "my run.sh"),
        ("bash < 'my run.sh'", "my run.sh"),
        ("bash --rcfile='my run.sh' x | cat", "my run.sh"),
        ("bash run@2.sh | cat", "run@2.sh"),
        ("bash a,b.sh | cat", "a,b.sh"),
        ('bash "ru"n.sh | cat', "run.sh"),
        ("bash ru\\n.sh | cat", "run.sh"),
        ("bash $'run\\x2esh'", "run.sh"),
        ('sh -c "sh -c \'bash \\"my run.sh\\"\'"', "my run.sh"),
        ("cd a && cd b && bash run.sh", "a/b/run.sh"),
        ("cd a; cd b; cd ..; bash run.sh", "a/run.sh"),
        ("bash a/*.sh", "a/run.sh"),
        ("bash */b/r?n.sh", "a/b/run.sh"),
        ("cd a* && bash run.sh", "a/run.sh"),
        ("bash {run,walk}.sh", "run.sh"),
        ("python3 -mpkg", "pkg.py"),
        ("python3 -Im pack.tool", "pack/__init__.py"),
        (": " + " ".join(map(str, range(2100))) + "; bash run.sh", "run.sh"),
    ],
)
async def test_a_changed_file_changes_the_plan_however_it_is_named(tmp_path: Path, command: str, file: str) -> None:
    """Quotes, backslashes, blanks, patterns, directories and modules: what bash reads is what the plan has [B96]."""
    world = real_world(tmp_path)
    put(tmp_path / file)
    plan = await world.plan(command)
    assert plan["files"][file] == digest(SHOWN)
    put(tmp_path / file, SWAPPED)
    with pytest.raises(ToolError) as caught:
        await world.run(command, Call(plan=plan))
    assert caught.value.kind == "conflict"


@pytest.mark.parametrize("command", ["bash run.sh", "./run.sh", "bash run.sh | cat", "bash link/run.sh"])
@pytest.mark.parametrize("absolute", [True, False])
async def test_a_link_is_bound_with_its_target(tmp_path: Path, command: str, absolute: bool) -> None:
    """The plan has the real path and the hash of its content, also of an absolute link inside the root [B96]."""
    world = real_world(tmp_path)
    put(tmp_path / "real/run.sh")
    (tmp_path / "run.sh").symlink_to(tmp_path / "real/run.sh" if absolute else "real/run.sh")
    (tmp_path / "link").symlink_to(tmp_path / "real" if absolute else "real")
    plan = await world.plan(command)
    named = "link/run.sh" if "link" in command else "run.sh"
    assert plan["files"][named] == "leads to real/run.sh"
    assert plan["files"]["real/run.sh"] == digest(SHOWN)
    put(tmp_path / "real/run.sh", SWAPPED)
    with pytest.raises(ToolError, match="files"):
        await world.run(command, Call(plan=plan))


@pytest.mark.parametrize(
    ("command", "cwd"), [("find . -type f -delete", "cur"), ("find cur/ -type f -delete", "."), ("rm -r x", "cur")]
)
async def test_a_directory_that_is_a_link_is_bound(tmp_path: Path, command: str, cwd: str) -> None:
    """A link to another directory, as working directory or as argument, is another plan [B96]."""
    world = real_world(tmp_path)
    put(tmp_path / "a/x")
    put(tmp_path / "b/x")
    (tmp_path / "cur").symlink_to("a")
    plan = await world.plan(command, cwd=cwd)
    assert plan["files"]["cur"] == "leads to a"
    (tmp_path / "cur").unlink()
    (tmp_path / "cur").symlink_to("b")
    with pytest.raises(ToolError) as caught:
        await world.run(command, Call(plan=plan), cwd=cwd)
    assert caught.value.kind == "conflict"
    assert (tmp_path / "b/x").exists()


async def test_a_path_with_two_dots_behind_a_link_is_bound_as_the_kernel_reads_it(tmp_path: Path) -> None:
    """The directory above a link's target, not the one that has the link [B96]."""
    world = real_world(tmp_path)
    put(tmp_path / "run.sh", "echo other\n")
    put(tmp_path / "deep/run.sh")
    (tmp_path / "deep/inner").mkdir()
    (tmp_path / "cur").symlink_to("deep/inner")
    files = (await world.plan("bash cur/../run.sh"))["files"]
    assert files["deep/run.sh"] == digest(SHOWN)
    assert files["run.sh"] == digest("echo other\n"), "cd cur/.. in bash leads here"


async def test_a_program_of_the_workspace_is_bound_in_shell_text(tmp_path: Path) -> None:
    """A program on the PATH that lies in the workspace, although bash finds it and not the plan [B96]."""
    put(tmp_path / "bin/mine")
    world = World(tmp_path, find_sandbox("auto"), environment={"PATH": f"{tmp_path}/bin:/usr/bin:/bin"})
    plan = await world.plan("mine | cat")
    assert plan["files"] == {"bin/mine": digest(SHOWN)}


@pytest.mark.parametrize(
    ("command", "sentences"),
    [
        ("git log --oneline", []),
        ("echo run.sh-not", []),
        ("cat run.sh", []),
        ("python3 --version", []),
        ("bash run.sh", [MORE]),
        ("./run.sh", [MORE]),
        ("make all", [MORE]),
        ("pytest", [MORE]),
        ("python3 app.py", [MORE, "Python modules beside app.py"]),
        ("python3 -c 'import json'", [MORE, "Python modules in the directory in which the command starts"]),
        ("cat *.sh", ["files that the pattern *.sh matches later"]),
        ("cat $NAME", ["files whose names the command computes when it runs"]),
        ("ls | xargs cat", ["files whose names the command computes when it runs"]),
        ("rm -r sub", ["files in sub that the command does not name"]),
        ("cat outside", ["the content of /etc/hostname, outside of the workspace"]),
        ("cat pipe", ["what pipe gives: it is no regular file"]),
        ("cat 'run.sh", ["files that a part of the command names which was not read: a quote is not closed"]),
    ],
)
async def test_a_plan_says_what_it_does_not_bind(tmp_path: Path, command: str, sentences: list[str]) -> None:
    """A plain program with plain arguments has nothing to say; scripts, patterns and directories have [B96]."""
    world = real_world(tmp_path)
    for name in ("run.sh", "app.py", "Makefile", "sub/x", "bin/pytest", "bin/make"):
        put(tmp_path / name)
    (tmp_path / "outside").symlink_to("/etc/hostname")
    os.mkfifo(tmp_path / "pipe")
    world.environment = world.environment | {"PATH": f"/usr/bin:/bin:{tmp_path}/bin"}
    assert (await world.plan(command))["not_bound"] == sentences


async def test_a_file_that_cannot_be_read_is_said_to_be_unbound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not left out of the plan [B96]."""
    world = real_world(tmp_path)
    put(tmp_path / "run.sh")

    def refuse(path: str) -> str:
        raise ToolError("read_failed", f"{path}: permission denied")

    monkeypatch.setattr(world.root, "hash_file", refuse)
    plan = await world.plan("cat run.sh")
    assert plan["files"] == {"run.sh": "cannot be read: not bound"}
    assert plan["not_bound"] == ["the content of run.sh: cannot be read"]


@pytest.mark.parametrize("command", ["sh *.sh", "sh link", "sh run.sh $'\\ud800'*", "cat *.sh $'\\udcff'"])
async def test_a_name_that_is_no_text_does_not_keep_a_plan_from_being_stored(tmp_path: Path, command: str) -> None:
    """A plan that cannot be stored binds nothing: the approval would hold for any content of the script [B96]."""
    raw = tmp_path / os.fsdecode(b"d\xff.sh")
    raw.write_text("echo 1\n")
    (tmp_path / "d\\xff.sh").write_text("echo written alike\n")
    (tmp_path / "run.sh").write_text("echo 1\n")
    (tmp_path / "link").symlink_to(raw.name)
    world = World(tmp_path)
    plan = await world.plan(command)
    assert msgspec.json.decode(msgspec.json.encode(plan)) == plan
    changed = tmp_path / ("run.sh" if "run.sh" in command else raw.name)
    changed.write_text("echo 2\n")
    assert (await world.plan(command))["files"] != plan["files"]


async def test_the_files_of_a_plan_share_one_budget_of_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large files are named with size and time once the budget is used; the small ones come first."""
    monkeypatch.setattr(binder, "MOST_BYTES", 1000)
    world = real_world(tmp_path)
    for number in range(8):
        put(tmp_path / f"large{number}", "x" * (400 + number))
    put(tmp_path / "run.sh")
    read: list[str] = []
    hash_file = world.root.hash_file
    monkeypatch.setattr(world.root, "hash_file", lambda path: (read.append(path), hash_file(path))[1])
    plan = await world.plan("cat " + " ".join(f"large{number}" for number in range(8)) + " run.sh")
    assert read == ["run.sh", "large0", "large1"]
    assert plan["files"]["run.sh"] == digest(SHOWN)
    assert plan["files"]["large2"].startswith("not compared by content: 402 bytes, changed at ")
    assert plan["not_bound"] == [
        "the content of large2, large3, large4, large5, large6 and 1 more: too large to compare"
    ]


async def test_files_beyond_those_that_a_plan_shows_are_bound_too(tmp_path: Path) -> None:
    """More than a hundred files: the others have one hash together [B96]."""
    world = real_world(tmp_path)
    for number in range(150):
        put(tmp_path / f"s{number:03}.sh")
    plan = await world.plan("cat *.sh")
    assert len(plan["files"]) == 101
    assert plan["files"]["..."].startswith("50 more files, compared by one hash: sha256:")
    put(tmp_path / "s149.sh", SWAPPED)
    with pytest.raises(ToolError) as caught:
        await world.run("cat *.sh", Call(plan=plan))
    assert caught.value.kind == "conflict"


async def test_the_card_in_the_terminal_warns_of_what_is_not_bound(tmp_path: Path) -> None:
    """The approver reads what can change without a new question; a plan that binds all has no warning [B96]."""
    world = real_world(tmp_path)
    put(tmp_path / "run.sh")
    cards: list[str] = []
    for command in ("bash run.sh", "cat run.sh"):
        console = Console(file=io.StringIO(), width=200)
        console.print(render_plan(await world.plan(command)))
        cards.append(cast("io.StringIO", console.file).getvalue())
    assert f"you are not asked again if these change:\n! {MORE}\n" in cards[0]
    assert "asked again if these change" not in cards[1]
    assert "not_bound" not in "".join(cards)


@pytest.mark.parametrize(
    "command",
    ["echo " + "{.." * 4000, "echo " + "{a,b}" * 3000, "echo {" + "," * 15000, "echo " + "[" * 15000 + "; true"],
)
async def test_a_hostile_word_does_not_hold_up_the_plan(tmp_path: Path, command: str) -> None:
    """Words that a careless expression needs minutes for; the time limit of the test run is the check."""
    plan = await real_world(tmp_path).plan(command)
    assert plan["files"] == {}
    assert bool(plan["not_bound"]) == ("{" in command)


async def test_a_plan_is_made_in_bounded_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command of very many names says that not all were looked up."""
    monkeypatch.setattr(binder, "MOST_LOOKUPS", 50)
    plan = await real_world(tmp_path).plan("cat " + " ".join(map(str, range(200))))
    assert plan["not_bound"] == ["files that were not looked up, because the command names too many"]


# --- rulings ---


async def test_a_denied_command_does_not_run_in_the_handler_either(tmp_path: Path) -> None:
    """A grant does not walk around a denial."""
    world = World(tmp_path, find_sandbox("auto"), ruling=Ruling("deny", "mode plan"))
    for attempt in (world.plan, world.run):
        with pytest.raises(ToolError, match="mode plan") as caught:
            await attempt("touch x")
        assert caught.value.kind == "permission_denied"
    assert os.listdir(tmp_path) == []


async def test_a_confined_command_cannot_change_the_workspace(tmp_path: Path) -> None:
    """It runs with a read-only root, without a network even if the workspace shares it, and the plan says so."""
    (tmp_path / "a").write_text("content\n")
    (tmp_path / ".git").mkdir()
    world = World(
        tmp_path,
        find_sandbox("required", network=True),
        ruling=Ruling(confined=True),
        protected=[".git/hooks", ".idea"],
    )
    plan = await world.plan("cat a")
    assert plan["workspace"] == "read-only"
    assert plan["guarantees"]["net_tcp"] is True
    result = await world.run(
        "cat a; echo x > b; echo x > .git/x; echo x > a; ls /sys/class/net; cat /proc/net/dev | wc -l"
    )
    assert result["output"].startswith("content\n")
    assert "Read-only file system" in result["output"]
    assert result["output"].endswith("3\n"), "only the loopback interface"
    assert sorted(os.listdir(tmp_path)) == [".git", "a"]
    assert (tmp_path / "a").read_text() == "content\n"


async def test_a_confined_command_needs_level_a(tmp_path: Path) -> None:
    world = World(tmp_path, find_sandbox("none"), ruling=Ruling(confined=True))
    with pytest.raises(ToolError) as caught:
        await world.run("true")
    assert caught.value.kind == "permission_denied"


async def test_too_many_commands_at_once_are_refused(tmp_path: Path) -> None:
    """One more than may run and wait: backpressure."""
    limits = Limits(commands=1, queued_commands=0)
    world = World(tmp_path, find_sandbox("auto"), limits=limits)
    task = asyncio.create_task(world.run("touch up; until [ -e go ]; do sleep 0.02; done"))
    while not (tmp_path / "up").exists():
        await asyncio.sleep(0.01)
    with pytest.raises(ToolError) as caught:
        await world.run("true")
    assert caught.value.kind == "backpressure"
    (tmp_path / "go").touch()
    assert (await task)["ok"]


async def test_a_call_that_is_cancelled_before_its_command_starts_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stub of a protected path, a control group and open files would stay otherwise."""
    sandbox = find_sandbox("auto")
    if sandbox.level != "A":
        pytest.skip("only level A makes stubs")
    world = World(tmp_path, sandbox, protected=[".bashrc"])
    await world.run("true")
    open_before = len(os.listdir("/proc/self/fd"))
    made, go, wrap = threading.Event(), threading.Event(), sandbox.wrap

    def wrap_slowly(*args: Any, **options: Any) -> Launch:
        launch = wrap(*args, **options)
        made.set()
        go.wait()
        return launch

    monkeypatch.setattr(sandbox, "wrap", wrap_slowly)
    task = asyncio.create_task(world.run("touch ran"))
    while not made.is_set():
        await asyncio.sleep(0.005)
    assert os.listdir(tmp_path) == [".bashrc"]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()
    while os.listdir(tmp_path):
        await asyncio.sleep(0.005)
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_the_declaration_is_written_for_a_model(world: World) -> None:
    """The schema bounds the timeout, and the description says what a sandboxed command can do."""
    spec = world.tool.spec
    assert spec.streaming
    assert spec.recovery == "ask"
    assert spec.planned
    assert '"maximum":600' in spec.parameters
    assert "read_artifact" in spec.description
