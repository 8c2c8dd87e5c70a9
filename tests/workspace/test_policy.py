"""Modes and rulings: what runs, what asks and what is denied."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import shutil
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.policies import (
    COMMANDS,
    NOW,
    PATHS,
    RULES,
    FakeGuarantees,
    FakeSandbox,
    make_policy,
    one_rule,
)

from holdfast.errors import DeclarationError, ToolError
from holdfast.workspace import Workspace
from holdfast.workspace.policy import policy as policy_module
from holdfast.workspace.policy.harmless import TABLES, Reading, find_reading
from holdfast.workspace.policy.policy import MODES, PROGRAM_PATH, Mode, Ruling
from holdfast.workspace.policy.rules import EFFECTS, RuleSet

NEEDS_PROGRAMS = pytest.mark.skipif(not shutil.which("cat", path=PROGRAM_PATH), reason="no program in the fixed PATH")
ALLOW_ALL = [
    {"tool": "*", "path": "**", "effect": "allow"},
    {"tool": "bash", "argv": ["make", "test"], "effect": "allow"},
    {"tool": "bash", "argv": ["touch", "x"], "effect": "allow"},
]


def looseness(ruling: Ruling) -> int:
    return EFFECTS.index(ruling.effect)


# Modes


@pytest.mark.parametrize(
    ("mode", "read", "write", "command", "harmless"),
    [
        ("auto", "allow", "allow", "allow", "allow"),
        ("edits", "allow", "allow", "ask", "allow"),
        ("ask", "allow", "ask", "ask", "allow"),
        ("read_only", "allow", "deny", "deny", "allow"),
        ("plan", "allow", "deny", "deny", "allow"),
    ],
)
@NEEDS_PROGRAMS
def test_each_mode_does_as_declared(
    tmp_path: Path, mode: Mode, read: str, write: str, command: str, harmless: str
) -> None:
    """[B98]"""
    policy = make_policy(tmp_path, mode)
    assert policy.judge_paths("read", ["a.txt"], writes=False).effect == read
    assert policy.judge_paths("write", ["a.txt"], writes=True).effect == write
    assert policy.judge_paths("apply_patch", ["a", "b/c"], writes=True).effect == write
    assert policy.judge_command("touch x").effect == command
    assert policy.judge_command("cat a.txt").effect == harmless


@pytest.mark.parametrize("mode", ["read_only", "plan"])
@pytest.mark.parametrize("sandbox", ["A", "B", "none"])
def test_no_allow_rule_lets_anything_change_in_read_only_and_plan(tmp_path: Path, mode: Mode, sandbox: str) -> None:
    """[B98]"""
    policy = make_policy(tmp_path, mode, ALLOW_ALL, sandbox=sandbox)
    for ruling in (
        policy.judge_paths("write", ["a"], writes=True),
        policy.judge_command("make test"),
        policy.judge_command("touch x"),
        policy.judge_command("ls > x"),
    ):
        assert ruling.effect == "deny"
        assert f"mode {mode}" in ruling.reason
    assert make_policy(tmp_path, "ask", ALLOW_ALL, sandbox=sandbox).judge_command("touch x").effect == "allow"


def test_landlock_alone_asks_in_mode_auto(tmp_path: Path) -> None:
    """Level B leaves the store and .env open to commands, so a person is asked [B98]."""
    try:
        ws = Workspace(tmp_path, mode="auto", sandbox="landlock")
    except DeclarationError as error:
        pytest.skip(error.message)
    ruling = ws.policy.judge_command("cat .env")
    assert ruling.effect == "ask"
    assert "protected paths" in ruling.reason


@NEEDS_PROGRAMS
def test_a_command_that_is_asked_about_in_plan_stays_confined_after_the_approval(tmp_path: Path) -> None:
    """An ask rule does not open mode plan to a person's approval [B98]."""
    policy = make_policy(tmp_path, "plan", [{"tool": "bash", "argv": ["cat", "**"], "effect": "ask"}])
    ruling = policy.judge_command("cat a.txt")
    assert (ruling.effect, ruling.confined) == ("ask", True)


@pytest.mark.parametrize(
    ("sandbox", "effect"),
    [("A", "allow"), (FakeSandbox("B", FakeGuarantees(protected=False)), "ask"), ("none", "ask")],
    ids=["A", "B", "none"],
)
def test_auto_runs_commands_only_in_a_sandbox_that_keeps_protected_paths(
    tmp_path: Path, sandbox: str | FakeSandbox, effect: str
) -> None:
    """[B98]"""
    ruling = make_policy(tmp_path, "auto", sandbox=sandbox).judge_command("for f in *; do rm $f; done")
    assert ruling.effect == effect
    assert not ruling.confined
    assert "sandbox" in ruling.reason


def test_the_reason_has_the_mode_and_the_hash_of_the_rules_in_a_fixed_form(tmp_path: Path) -> None:
    """The mode in force is in the log [B98]."""
    rules = RuleSet.load([{"tool": "write", "path": "docs/**", "effect": "deny", "note": "made by a program"}])
    policy = make_policy(tmp_path, "ask", rules)
    start = f"mode ask, rules {rules.hash[:8]}: "
    assert policy.judge_paths("write", ["a"], writes=True).reason == f"{start}no rule matches; asks"
    assert policy.judge_paths("write", ["docs/a"], writes=True).reason == (
        f"{start}rule 1 (made by a program) denies it; denied"
    )
    shape = re.compile(r"mode (\w+), rules [0-9a-f]{8}: .+; (runs|asks|denied)", re.S)
    for mode, command in itertools.product(MODES, ["ls", "make", "a | b", "x" * 20_000, "g\u200bit"]):
        assert shape.fullmatch(make_policy(tmp_path, mode).judge_command(command).reason)


def test_the_hash_is_of_mode_and_rules(tmp_path: Path) -> None:
    hashes = {make_policy(tmp_path, mode, rules).hash for mode in MODES for rules in ([], ALLOW_ALL)}
    assert len(hashes) == 2 * len(MODES)
    assert make_policy(tmp_path).hash == hashlib.sha256(f"ask\n{RuleSet().hash}".encode()).hexdigest()


def test_an_unknown_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DeclarationError, match="auto, edits, ask, read_only, plan"):
        make_policy(tmp_path, "yolo")  # pyright: ignore[reportArgumentType]


def test_a_call_outside_the_workspace_is_an_error_and_not_a_question(tmp_path: Path) -> None:
    policy = make_policy(tmp_path)
    with pytest.raises(ToolError, match="outside"):
        policy.judge_paths("write", ["../x"], writes=True)
    with pytest.raises(ToolError, match="outside"):
        policy.judge_command("ls", "..")


# Paths


def test_the_strictest_path_decides_and_an_allow_rule_must_cover_every_path(tmp_path: Path) -> None:
    policy = make_policy(
        tmp_path,
        "ask",
        [
            {"tool": "apply_patch", "path": "src/**", "effect": "allow"},
            {"tool": "*", "path": "src/generated/**", "effect": "deny"},
            {"tool": "*", "path": "src/api/**", "effect": "ask"},
        ],
    )
    for paths, effect in [
        (["src/a"], "allow"),
        (["src/a", "src/b"], "allow"),
        (["src/a", "docs/b"], "ask"),
        (["src/a", "src/api/b"], "ask"),
        (["src/a", "src/api/b", "src/generated/c"], "deny"),
    ]:
        assert policy.judge_paths("apply_patch", paths, writes=True).effect == effect, paths


@pytest.mark.parametrize("effect", ["ask", "deny"])
@pytest.mark.parametrize("tool", ["write", "edit", "apply_patch"])
def test_a_rule_for_write_binds_every_tool_that_writes(tmp_path: Path, tool: str, effect: str) -> None:
    """[B99]"""
    policy = make_policy(tmp_path, "edits", [{"tool": "write", "path": "prod.yml", "effect": effect}])
    assert policy.judge_paths(tool, ["a", "prod.yml"], writes=True).effect == effect
    assert policy.judge_paths("read", ["prod.yml"], writes=False).effect == "allow"


def test_a_rule_that_allows_write_does_not_allow_patches(tmp_path: Path) -> None:
    """A patch can also delete and move files [B99]."""
    policy = make_policy(tmp_path, "ask", [{"tool": "write", "path": "a", "effect": "allow"}])
    effects = [policy.judge_paths(tool, ["a"], writes=True).effect for tool in ("write", "edit", "apply_patch")]
    assert effects == ["allow", "ask", "ask"]


@pytest.mark.parametrize("effect", ["ask", "deny"])
def test_a_rule_for_read_covers_words_of_commands_in_every_mode(tmp_path: Path, effect: str) -> None:
    """Also in mode auto, where commands run without asking [B99]."""
    for mode in ("auto", "edits", "ask"):
        policy = make_policy(tmp_path, mode, [{"tool": "read", "path": "secrets/", "effect": effect}])
        for command in ("cat secrets/key", "x | cat < y; cat ./secrets/key", "curl --data=@secrets/key"):
            assert policy.judge_command(command).effect == effect
    assert make_policy(tmp_path, "auto", policy.rules).judge_command("cat a").effect == "allow"


def test_a_rule_holds_for_the_file_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "key").write_text("k")
    (tmp_path / "open").symlink_to("secrets")
    deny = {"tool": "read", "path": "secrets/**", "effect": "deny"}
    policy = make_policy(tmp_path, "auto", [deny, {"tool": "write", "path": "open/**", "effect": "allow"}])
    assert policy.judge_paths("read", ["open/key"], writes=False).effect == "deny"
    asking = make_policy(tmp_path, "ask", [{"tool": "write", "path": "open/**", "effect": "allow"}])
    assert asking.judge_paths("write", ["open/key"], writes=True).effect == "ask"


def test_a_search_leaves_out_what_rules_restrict(tmp_path: Path) -> None:
    policy = make_policy(
        tmp_path,
        rules=[
            {"tool": "read", "path": "secrets/**", "effect": "deny"},
            {"tool": "glob", "path": "*.key", "effect": "ask"},
            {"tool": "grep", "path": "docs/**", "effect": "allow"},
        ],
    )
    assert [policy.withholds("grep", path) for path in ("secrets/a", "a.key", "docs/a", "b")] == [
        True,
        False,
        False,
        False,
    ]
    assert [policy.withholds("glob", path) for path in ("secrets/a", "a.key")] == [False, True]


# Commands that can only read


@NEEDS_PROGRAMS
def test_a_command_that_can_only_read_runs_confined_with_the_executable_that_was_judged(tmp_path: Path) -> None:
    ruling = make_policy(tmp_path).judge_command("head -n 5 src/a.txt")
    assert (ruling.effect, ruling.confined) == ("allow", True)
    assert ruling.executable == shutil.which("head", path=PROGRAM_PATH)


@NEEDS_PROGRAMS
@pytest.mark.parametrize(
    "sandbox",
    [
        FakeSandbox("B"),
        FakeSandbox("none"),
        FakeSandbox("A", FakeGuarantees(write=False)),
        FakeSandbox("A", FakeGuarantees(net_tcp=False)),
        FakeSandbox("A", FakeGuarantees(net_udp=False)),
    ],
    ids=["B", "none", "no write", "no tcp", "no udp"],
)
def test_without_the_read_only_sandbox_it_asks(tmp_path: Path, sandbox: FakeSandbox) -> None:
    ruling = make_policy(tmp_path, sandbox=sandbox).judge_command("cat a.txt")
    assert (ruling.effect, ruling.confined) == ("ask", False)
    assert "no read-only sandbox without a network" in ruling.reason


def test_an_executable_from_the_workspace_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "cat"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    (outside / "head").symlink_to(program)
    monkeypatch.setattr(policy_module, "PROGRAM_PATH", f"{program.parent}{os.pathsep}{PROGRAM_PATH}")
    assert make_policy(tmp_path).judge_command("cat a.txt").effect == "ask"
    monkeypatch.setattr(policy_module, "PROGRAM_PATH", f"{outside}{os.pathsep}{PROGRAM_PATH}")
    assert make_policy(tmp_path / "bin").judge_command("head a.txt").effect == "ask"
    assert make_policy(outside / "none").judge_command("head a.txt").effect == "allow"


@NEEDS_PROGRAMS
@pytest.mark.parametrize(
    "command",
    ["./cat a", "bin/cat a", "cat /etc/passwd", "cat ../x", "cat src/../a", "cat out/x", "cat .env", "cat out"],
)
def test_a_program_or_a_file_elsewhere_asks(tmp_path: Path, command: str) -> None:
    (tmp_path / "out").symlink_to("/etc")
    assert make_policy(tmp_path).judge_command(command).effect == "ask"


@NEEDS_PROGRAMS
def test_reading_by_a_command_obeys_the_rules_for_reading(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "link").symlink_to("secrets")
    rules = [{"tool": "read", "path": "secrets/**", "effect": "deny"}]
    policy = make_policy(tmp_path, "ask", rules)
    for command, cwd, effect in [
        ("cat src/a", ".", "allow"),
        ("cat secrets/a", ".", "deny"),
        ("cat link/a", ".", "deny"),
        ("cat a", "secrets", "deny"),
        ("grep -f secrets/a b", ".", "deny"),
        ("grep -r x src", ".", "ask"),
        ("grep x src/a", ".", "allow"),
        ("diff src src2", ".", "ask"),
    ]:
        assert policy.judge_command(command, cwd).effect == effect, command
    everywhere = make_policy(tmp_path, "auto", [rules[0] | {"tool": "*"}])
    for command in (
        "cat secrets/a",
        "cat < secrets/a",
        "cp --target-directory=secrets x",
        "sh -c 'cat secrets/a | wc'",
    ):
        assert everywhere.judge_command(command).effect == "deny", command


HARMLESS = [
    "basename -a x/y", "cat -n a b", "cmp -s a b", "comm -12 a b", "cut -d, -f1,2 a", "cut -d , -f 1 a", "date +%F",
    "date -u -d yesterday +%s",
    "df -h .", "diff -u a b", "diff --unified=3 a b", "dirname x", "du -sh src", "echo -n hi",
    "false", "file -b a", "find . -name '*.py' -type f -print", "find src -newer a -maxdepth 2", "find",
    "find . '(' -name a -o -name b ')' -prune", "grep -rn --include='*.py' -e x src", "grep -5 x a", "grep -- -x a",
    "head -20 a", "head -n20 a", "head -c 5 -- -a", "jq -r .a a.json", "jq --arg x 1 '.a == $x' a.json", "ls",
    "ls -la src",
    "ls --color=never", "md5sum a", "nl -ba a", "od -A x -t x1z a", "printf %s --x", "pwd", "readlink -f a",
    "realpath a",
    "rg -n --glob '*.py' x src", "rg --files", "sha256sum a", "sort -k2,2n -t: a", "sort -u a b", "stat -c %s a",
    "tail -n +5 a", "tail -5 a", "tr a-z A-Z", "tree -L 2 src", "true", "uniq -c a", "wc -l a b", "which ls",
]  # fmt: skip

HARMFUL = {
    "sort -o a b": "writes a",
    "sort -uo a b": "writes a",
    "sort -oa b": "writes a",
    "sort b --output=a": "writes a",
    "sort --outp=a b": "an abbreviation of --output",
    "sort --compress-program=./x a": "runs ./x",
    "sort -T. a": "writes temporary files",
    "sort --files0-from=a": "reads the files that a names",
    "uniq a b": "writes b",
    "date 010100002030": "sets the clock",
    "date -s now": "sets the clock",
    "find . -delete": "removes",
    "find . -exec sh '{}' ';'": "runs sh",
    "find . -ok sh": "runs sh",
    "find . -fprintf a x": "writes a",
    "find . -fls a": "writes a",
    "find -files0-from a": "reads the paths that a names",
    "find . -name": "lacks its value",
    "rg --pre ./x y": "runs ./x",
    "rg --pre=./x y": "runs ./x",
    "rg --hostname-bin ./x y": "runs ./x",
    "rg -z y": "runs decompressors",
    "rg -nz y": "runs decompressors",
    "grep -P x a": "can take for ever",
    "tail -f a": "never ends",
    "diff -l a b": "runs pr",
    "diff a b c": "three operands",
    "file -C -m a": "writes a database",
    "file -z a": "runs decompressors",
    "tree -o a": "writes a",
    "tree -R -L 1": "writes 00Tree.html",
    "jq -f prog.jq a": "a program in a file may name other files",
    "jq -L lib .a a": "a library may name other files",
    "jq 'import \"a\" as $a; $a'": "reads another file",
    "sha256sum -c a": "reads the files that a names",
    "du --files0-from=a": "reads the paths that a names",
    "head -n": "lacks its value",
    "head --lines": "lacks its value",
    "cat --number=3 a": "takes no value",
    "pwd x": "no operand",
    "git status": "runs what the repository's configuration names",
    "less a": "a pager runs programs",
    "sed -n 1p a": "an interpreter",
    "awk 1 a": "an interpreter",
    "python -V": "an interpreter",
    "env": "a wrapper",
    "xargs": "a wrapper",
    "tee a": "writes",
}


@pytest.mark.parametrize("command", HARMLESS)
def test_flags_of_the_table_are_harmless(command: str) -> None:
    words = policy_module.analyse_command(command).words
    assert words is not None
    assert isinstance(find_reading(words), Reading)


@pytest.mark.parametrize("command", HARMFUL)
def test_any_other_flag_is_not(command: str) -> None:
    words = policy_module.analyse_command(command).words
    assert words is not None
    assert isinstance(find_reading(words), str), HARMFUL[command]


def test_every_program_with_a_table_has_an_example() -> None:
    assert {command.split()[0] for command in HARMLESS} == {*TABLES, "find"}


@pytest.mark.parametrize(
    ("command", "paths", "recursive"),
    [
        ("cat a -- -b -", ("a", "-b"), False),
        ("grep -e x -f p a", ("p", "a"), False),
        ("grep x a", ("a",), False),
        ("grep -R x", (), True),
        ("rg x", (".",), True),
        ("rg --files src", ("src",), True),
        ("find a b -newer c -newermt now", ("a", "b", "c"), True),
        ("date -r a +%F", ("a",), False),
        ("ls", (".",), False),
        ("ls -lR a", ("a",), True),
        ("realpath --relative-to=a b", ("a", "b"), False),
        ("echo a", (), False),
        ("jq --arg a b . c", ("c",), False),
    ],
)
def test_the_paths_that_a_command_reads_are_known(command: str, paths: tuple[str, ...], recursive: bool) -> None:
    words = policy_module.analyse_command(command).words
    assert words is not None
    assert find_reading(words) == Reading(paths, recursive)


@NEEDS_PROGRAMS
def test_no_harmless_command_changes_the_workspace(tmp_path: Path) -> None:
    """The real programs run on real files: nothing is added, removed or written."""
    (tmp_path / "src").mkdir()
    for name in ("a", "b", "-a", "a.json", "src/x.py"):
        (tmp_path / name).write_text('{"a": 1}\n')

    def look() -> dict[str, Any]:
        return {str(path): (path.stat().st_mtime_ns, path.stat().st_mode) for path in sorted(tmp_path.rglob("*"))}

    before, ran = look(), 0
    for command in HARMLESS:
        words = list(policy_module.analyse_command(command).words or ())
        if shutil.which(words[0], path=PROGRAM_PATH):
            subprocess.run(words, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=False)
            ran += 1
    assert look() == before
    assert ran > 30


# Rules for commands


@NEEDS_PROGRAMS
@pytest.mark.parametrize("sandbox", ["A", "none"])
def test_an_exact_allow_rule_lets_that_command_run_from_the_root_only(tmp_path: Path, sandbox: str) -> None:
    """A directory that the model chose can hold other files for the same words [B101]."""
    (tmp_path / "sub").mkdir()
    rules = [
        {"tool": "bash", "argv": ["touch", "x"], "effect": "allow"},
        {"tool": "bash", "argv": ["./run.sh"], "effect": "allow"},
        {"tool": "bash", "argv": ["cat", "**"], "effect": "allow"},
    ]
    policy = make_policy(tmp_path, "ask", rules, sandbox=sandbox)
    for command, cwd, effect in [
        ("touch x", ".", "allow"),
        ("touch x", "sub", "ask"),
        ("touch x y", ".", "ask"),
        ("./run.sh", ".", "allow"),
        ("./run.sh", "sub", "ask"),
        ("cat a", "sub", "allow"),
        ("cat a > b", ".", "ask"),
    ]:
        assert policy.judge_command(command, cwd).effect == effect, (command, cwd)


def test_an_allow_rule_does_not_mean_a_program_of_that_name_in_the_workspace(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "deploy"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    rules = [{"tool": "bash", "argv": ["deploy"], "effect": "allow"}]
    inside = make_policy(tmp_path, "ask", rules, path=str(program.parent))
    assert inside.judge_command("deploy").effect == "ask"
    assert "not a program outside the workspace" in inside.judge_command("deploy").reason
    relative = make_policy(tmp_path / "bin" / "x", "ask", rules, path=os.path.relpath(program.parent))
    assert relative.judge_command("deploy").effect == "ask"
    elsewhere = make_policy(tmp_path / "other", "ask", rules, path=str(program.parent))
    assert elsewhere.judge_command("deploy").effect == "allow"


@NEEDS_PROGRAMS
def test_an_exact_allow_rule_counts_beside_one_with_a_wildcard_in_any_order(tmp_path: Path) -> None:
    """A wildcard means paths in the workspace, exact words mean what they say [B99]."""
    wide = {"tool": "bash", "argv": ["cat", "**"], "effect": "allow"}
    exact = {"tool": "bash", "argv": ["cat", "/etc/hostname"], "effect": "allow"}
    for rules, effect in [([wide], "ask"), ([exact], "allow"), ([wide, exact], "allow"), ([exact, wide], "allow")]:
        assert make_policy(tmp_path, "ask", rules).judge_command("cat /etc/hostname").effect == effect


@NEEDS_PROGRAMS
def test_an_allow_rule_that_does_not_apply_leaves_a_confined_command_as_it_is(tmp_path: Path) -> None:
    rules = [{"tool": "bash", "argv": ["cat", "a"], "effect": "allow"}]
    ruling = make_policy(tmp_path, "ask", rules, path="/nowhere").judge_command("cat a")
    assert (ruling.effect, ruling.confined) == ("allow", True)
    assert make_policy(tmp_path, "ask", rules, path="/nowhere", sandbox="none").judge_command("cat a").effect == "ask"


def test_rules_that_expire_stop_to_count_at_that_time(tmp_path: Path) -> None:
    """[B99]"""
    rules = [{"tool": "write", "path": "a", "effect": "allow", "expires": NOW + timedelta(hours=1)}]
    assert make_policy(tmp_path, rules=rules).judge_paths("write", ["a"], writes=True).effect == "allow"
    later = make_policy(tmp_path, rules=rules, now=NOW + timedelta(hours=1))
    assert later.judge_paths("write", ["a"], writes=True).effect == "ask"


# Analysis that gives up


def nest(depth: int, command: str) -> str:
    for _ in range(depth):
        command = "sh -c '" + command.replace("'", "'\\''") + "'"
    return command


UNREAD = {
    "too long": "echo " + "x" * 16 * 1024 + "; {}",
    "too long in bytes": "echo " + "\u00e9" * 8 * 1024 + "; {}",
    "invisible": "echo \u200b; {}",
    "direction": "echo \u202e; {}",
    "control": "echo \x1b[8m; {}",
    "return": "echo\r; {}",
    "unclosed": "echo '; {}",
    "surrogate": "echo \udc80; {}",
    "too many parts": "sh -c '" + "true;" * 2500 + "{}'",
}


@pytest.mark.parametrize("mode", ["auto", "edits", "ask"])
@pytest.mark.parametrize("kind", UNREAD)
def test_analysis_that_gives_up_asks_and_deny_rules_still_deny(tmp_path: Path, mode: Mode, kind: str) -> None:
    """[B100]"""
    policy = make_policy(tmp_path, mode, [{"tool": "bash", "argv": ["rm", "**"], "effect": "deny"}])
    asked = policy.judge_command(UNREAD[kind].replace("{}", "true"))
    assert (asked.effect, asked.confined) == ("ask", False)
    assert "not analysed" in asked.reason
    assert policy.judge_command(UNREAD[kind].replace("{}", "rm -r x")).effect == "deny"
    assert policy.judge_command(UNREAD[kind].replace("{}", "sudo /bin/rm x")).effect == "deny"


def test_commands_too_deep_within_each_other_ask_and_deny_rules_still_deny(tmp_path: Path) -> None:
    """[B100]"""
    policy = make_policy(tmp_path, "auto", [{"tool": "bash", "argv": ["rm", "**"], "effect": "deny"}])
    for depth in (1, 3):
        assert policy.judge_command(nest(depth, "true")).effect == "allow"
        assert policy.judge_command(nest(depth, "rm x")).effect == "deny"
    deep = policy.judge_command(nest(7, "true; true"))
    assert deep.effect == "ask"
    assert "commands within each other" in deep.reason
    assert policy.judge_command(nest(7, "rm x")).effect == "deny"


def test_a_command_of_a_megabyte_is_judged(tmp_path: Path) -> None:
    """[B100]"""
    rules = [
        *({"tool": "bash", "argv": [f"program{n}", "**"], "effect": "deny"} for n in range(50)),
        {"tool": "bash", "argv": ["rm", "-rf", "/"], "effect": "deny"},
        {"tool": "*", "path": "secrets/**", "effect": "deny"},
    ]
    policy = make_policy(tmp_path, "auto", rules)
    padding = "env word " * 60_000
    assert policy.judge_command(padding).effect == "ask"
    assert policy.judge_command(padding + "rm -rf /").effect == "deny"
    assert policy.judge_command(padding + "secrets/a").effect == "deny"


@pytest.mark.parametrize(
    "command", ["$x y", "x=rm; $x y", "`cat a` y", "$(cat a) y", "sudo $x", "cat a | sh", "/bin/r? y", "{r,}m y"]
)
def test_a_computed_name_asks_where_rules_restrict_commands(tmp_path: Path, command: str) -> None:
    """No rule can know which program runs [B100]."""
    rules = [{"tool": "bash", "argv": ["rm", "**"], "effect": "deny"}]
    assert make_policy(tmp_path, "auto", rules).judge_command(command).effect in ("ask", "deny")
    assert make_policy(tmp_path, "auto").judge_command(command).effect == "allow"
    assert make_policy(tmp_path, "auto", rules).judge_command("for f in *; do cat $f; done").effect == "allow"


# A child


def test_a_child_has_the_stricter_mode_and_narrower_rules(tmp_path: Path) -> None:
    parent = make_policy(tmp_path, "edits", [{"tool": "bash", "argv": ["touch", "x"], "effect": "allow"}])
    child = parent.narrow("auto", RuleSet.load([{"tool": "write", "path": "docs/**", "effect": "deny"}]))
    assert child.mode == "edits"
    assert child.judge_paths("write", ["docs/a"], writes=True).effect == "deny"
    assert parent.narrow("plan").judge_command("touch x").effect == "deny"
    assert parent.narrow().hash == parent.hash


# Properties

HERE = Path("/nowhere/workspace")
MODE = st.sampled_from(MODES)
SANDBOX = st.sampled_from(["A", "B", "none"])


def judge_all(mode: Mode, rules: list[Any], sandbox: str, command: str, path: str) -> list[Ruling]:
    policy = make_policy(HERE, mode, rules, sandbox=sandbox)
    return [
        policy.judge_command(command),
        policy.judge_paths("write", [path], writes=True),
        policy.judge_paths("read", [path], writes=False),
        policy.judge_paths("grep", [path], writes=False),
    ]


@given(MODE, RULES, SANDBOX, COMMANDS.map(" ".join), PATHS, st.randoms())
def test_the_order_of_rules_never_changes_the_ruling(mode, rules, sandbox, command, path, random) -> None:
    """[B99]"""
    one = judge_all(mode, rules, sandbox, command, path)
    other = judge_all(mode, random.sample(rules, len(rules)), sandbox, command, path)
    assert [(each.effect, each.confined) for each in one] == [(each.effect, each.confined) for each in other]


@given(MODE, RULES, one_rule(st.sampled_from(["ask", "deny"])), SANDBOX, COMMANDS.map(" ".join), PATHS)
def test_adding_a_stricter_rule_never_loosens_the_ruling(mode, rules, more, sandbox, command, path) -> None:
    """[B99]"""
    before = judge_all(mode, rules, sandbox, command, path)
    after = judge_all(mode, [*rules, more], sandbox, command, path)
    assert all(looseness(old) <= looseness(new) for old, new in zip(before, after, strict=True))


@given(st.sampled_from(["plan", "read_only"]), RULES, SANDBOX, COMMANDS.map(" ".join), PATHS)
def test_plan_never_lets_anything_change_whatever_the_rules(mode, rules, sandbox, command, path) -> None:
    """[B98]"""
    ran, written, *_ = judge_all(mode, rules, sandbox, command, path)
    assert written.effect == "deny"
    assert ran.effect == "deny" or (ran.confined and sandbox == "A")


@given(RULES, SANDBOX, COMMANDS.map(" ".join), PATHS)
def test_a_stricter_mode_is_never_looser(rules, sandbox, command, path) -> None:
    """[B98]"""
    for looser, stricter in itertools.pairwise(MODES):
        before = judge_all(looser, rules, sandbox, command, path)
        after = judge_all(stricter, rules, sandbox, command, path)
        assert all(looseness(old) <= looseness(new) for old, new in zip(before, after, strict=True)), (looser, stricter)


@given(MODE, MODE, RULES, RULES, SANDBOX, COMMANDS.map(" ".join))
def test_a_child_is_never_looser_than_its_parent(mode, other, rules, more, sandbox, command) -> None:
    parent = make_policy(HERE, mode, rules, sandbox=sandbox)
    child = parent.narrow(other, RuleSet.load(more))
    assert looseness(parent.judge_command(command)) <= looseness(child.judge_command(command))
