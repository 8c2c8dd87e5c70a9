"""Rules of the workspace: their format, what they match, and what is refused when they are loaded."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.policies import COMMANDS, NOW, PATHS, RULES, one_rule

from holdfast.errors import DeclarationError
from holdfast.workspace.policy.analysis import analyse_command
from holdfast.workspace.policy.rules import EFFECTS, RuleSet, narrow, remember_command

PUSH = {"tool": "bash", "argv": ["git", "push", "**"], "effect": "deny"}


def rule_for(command: str, *rules: dict[str, Any], now: datetime = NOW) -> str | None:
    found = RuleSet.load(rules).match_command(command, now)
    return found and found.effect


def rule_at(path: str, *rules: dict[str, Any], tool: str = "write") -> str | None:
    found = RuleSet.load(rules).match_path([tool], path, NOW)
    return found and found.effect


def strictness(effect: str | None) -> int:
    return -1 if effect is None else EFFECTS.index(effect)


# Files


TOML = """
[[rules]]
tool = "bash"
argv = ["git", ["push", "fetch"], "**"]
effect = "deny"
note = "by hand"
expires = 2027-01-31T12:00:00Z
match = ["git push origin main", ["git", "fetch"]]
not_match = ["git status"]

[[rules]]
tool = "write"
path = "docs/**"
effect = "allow"
match = ["docs/a/b.md"]
"""


def test_dicts_json_and_toml_give_the_same_rules_and_hash(tmp_path: Path) -> None:
    rules: list[dict[str, Any]] = [
        {
            "tool": "bash",
            "argv": ["git", ["push", "fetch"], "**"],
            "effect": "deny",
            "note": "by hand",
            "expires": "2027-01-31T12:00:00Z",
            "match": ["git push origin main", ["git", "fetch"]],
            "not_match": ["git status"],
        },
        {"tool": "write", "path": "docs/**", "effect": "allow", "match": ["docs/a/b.md"]},
    ]
    (tmp_path / "rules.toml").write_text(TOML)
    (tmp_path / "rules.json").write_text(json.dumps({"rules": rules}))
    (tmp_path / "list.json").write_text(json.dumps(rules))
    loaded = [
        RuleSet.load(source)
        for source in (rules, str(tmp_path / "rules.json"), tmp_path / "list.json", tmp_path / "rules.toml")
    ]
    assert {each.rules for each in loaded} == {loaded[0].rules}
    assert {each.hash for each in loaded} == {loaded[0].hash}
    assert RuleSet.load(loaded[0]) is loaded[0]
    assert RuleSet.load(loaded[0].rules) == loaded[0]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("r.yaml", "", "named *.json or *.toml"),
        ("r.json", "{", "cannot be parsed"),
        ("r.toml", "rules", "cannot be parsed"),
        ("r.json", '{"rule": []}', 'the one key "rules"'),
        ("r.json", '{"rules": {}}', "must be a list"),
        ("r.json", '[{"tool": "bash", "argv": ["rm"], "effect": "deny", "effect": "allow"}]', "a key is repeated"),
        ("missing.json", None, "cannot be read"),
    ],
)
def test_a_file_that_is_no_rule_file_is_refused(tmp_path: Path, name: str, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(DeclarationError) as refusal:
        RuleSet.load(tmp_path / name)
    assert said in refusal.value.message
    assert name in refusal.value.message


def test_the_hash_is_of_the_content_and_not_of_the_order() -> None:
    first, second = PUSH, {"tool": "read", "path": "a", "effect": "ask"}
    assert RuleSet.load([first, second]).hash == RuleSet.load([second, first]).hash
    assert len({RuleSet.load(rules).hash for rules in ([], [first], [second], [first | {"note": "x"}])}) == 4


# Refusals


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"agrv": ["x"]}, "unknown keys ['agrv']"),
        ({"effect": "permit"}, "effect='permit' must be one of allow, ask, deny"),
        ({"effect": None}, "effect=None"),
        ({"tool": "shell"}, "tool='shell' must be"),
        ({"tool": "read"}, "a rule for 'read' has 'path' and not 'argv'"),
        ({"path": "src/**"}, "a rule for 'bash' has 'argv' and not 'path'"),
        ({"argv": "git push"}, "argv must be a list of words"),
        ({"argv": []}, "argv must be a list of words"),
        ({"argv": ["git", 1]}, "a token of argv is a word or a list of alternatives"),
        ({"argv": ["git", []]}, "a token of argv"),
        ({"argv": ["git", [["push"]]]}, "an alternative of argv must be text"),
        ({"argv": ["**", "push"]}, '"**" may only be the last token'),
        ({"note": 1}, "note must be text"),
        ({"expires": "tomorrow"}, "must be a time with its zone"),
        ({"expires": "2027-01-31"}, "must be a time with its zone"),
        ({"expires": datetime(2027, 1, 31)}, "must be a time with its zone"),
        ({"match": "git push"}, "match must be a list of examples"),
        ({"not_match": [1]}, "an example of not_match"),
    ],
)
def test_a_malformed_rule_is_refused_with_its_number_and_the_reason(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(DeclarationError) as refusal:
        RuleSet.load([PUSH, PUSH | changes])
    assert said in refusal.value.message
    assert refusal.value.message.startswith("rule 2")
    assert "No rule was loaded" in refusal.value.message


@pytest.mark.parametrize("path", ["", "/", "../x", "a/../b", "a//b", "./a", "!a", "a\\b", "a**/b", "a\0"])
def test_a_path_that_is_no_glob_within_the_workspace_is_refused(path: str) -> None:
    with pytest.raises(DeclarationError, match="path"):
        RuleSet.load([{"tool": "read", "path": path, "effect": "deny"}])


def test_rules_must_be_a_list_of_dicts() -> None:
    with pytest.raises(DeclarationError, match="a list of rules"):
        RuleSet.load(PUSH)  # pyright: ignore[reportArgumentType]
    with pytest.raises(DeclarationError, match="rule 1 must be a dict"):
        RuleSet.load(["deny rm"])  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["python3.12", "**"], "'python' is an interpreter"),
        (["/usr/bin/bash", "-c", "*"], "'bash' is an interpreter"),
        (["awk", "**"], "an interpreter"),
        (["sed", "*", "a.txt"], "an interpreter"),
        (["env", "**"], "'env' is a wrapper"),
        (["timeout", "5", "**"], "a wrapper"),
        (["make", "*"], "a wrapper"),
        (["sudo.exe", "**"], "a wrapper"),
        (["npm", "run", "*"], "'npm' is a package manager"),
        (["pip3", "install", "**"], "'pip' is a package manager"),
        ([["ls", "npx"], "**"], "'npx' is a package manager"),
        (["git", "log", "**"], "'git' has no table of harmless flags"),
        (["./ls", "**"], "no table of harmless flags"),
        (["*"], "name the program"),
        (["**"], "name the program"),
    ],
)
def test_an_allow_rule_with_a_wildcard_is_refused_where_it_could_run_anything(argv: list[Any], said: str) -> None:
    """Prefixes are never for interpreters, wrappers and package managers [B101]."""
    with pytest.raises(DeclarationError) as refusal:
        RuleSet.load([{"tool": "bash", "argv": argv, "effect": "allow"}])
    assert said in refusal.value.message
    assert RuleSet.load([{"tool": "bash", "argv": argv, "effect": effect} for effect in ("ask", "deny")])


def test_an_exact_allow_rule_is_accepted_for_every_program() -> None:
    for argv in (["python", "-c", "print(1)"], ["npm", "test"], ["git", ["status", "diff"]], ["env"]):
        assert RuleSet.load([{"tool": "bash", "argv": argv, "effect": "allow"}])


# Examples


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (PUSH | {"match": ["git status"]}, 'the example "git status" is in match, but the rule does not match it'),
        (PUSH | {"not_match": ["cd x && git push"]}, "is in not_match, but the rule matches it"),
        (PUSH | {"match": [["git", "pull"]]}, 'the example ["git", "pull"] is in match'),
        ({"tool": "bash", "argv": ["ls", "**"], "effect": "allow", "match": ["ls | wc"]}, "does not match it"),
        ({"tool": "bash", "argv": ["sort", "**"], "effect": "allow", "match": ["sort -o a b"]}, "does not match it"),
        ({"tool": "write", "path": "src/*", "effect": "allow", "match": ["src/a/b"]}, "does not match it"),
        ({"tool": "write", "path": "src/*", "effect": "deny", "not_match": ["src/a/b"]}, "matches it"),
    ],
)
def test_an_example_that_is_wrong_refuses_the_whole_file(tmp_path: Path, rule: dict[str, Any], said: str) -> None:
    """The message names the rule, the example and what the rule did [B99]."""
    (tmp_path / "rules.json").write_text(json.dumps([PUSH, rule]))
    with pytest.raises(DeclarationError) as refusal:
        RuleSet.load(tmp_path / "rules.json")
    assert said in refusal.value.message
    assert "rule 2 (" in refusal.value.message
    right = {"match": "not_match", "not_match": "match"}
    swapped = {right.get(key, key): value for key, value in rule.items()}
    assert RuleSet.load([PUSH, swapped])


def test_the_examples_of_an_expired_rule_are_checked_too() -> None:
    with pytest.raises(DeclarationError, match="the example"):
        RuleSet.load([PUSH | {"expires": "2020-01-01T00:00:00Z", "match": ["ls"]}])


# What matches


@pytest.mark.parametrize(
    ("argv", "matching", "others"),
    [
        (
            ["git", "status"],
            ["git status", "git  'status'"],
            ["git", "git status -s", "env git status", "git status | cat"],
        ),
        (["git", ["status", "diff"]], ["git status", "git diff"], ["git log"]),
        (["ls", "*"], ["ls src", "ls -l"], ["ls", "ls -l src", "/bin/ls src"]),
        (["ls", "**"], ["ls", "ls -l src"], ["ls --hyper", "ls src > x"]),
        (["sort", "*", "**"], ["sort -u a", "sort a"], ["sort", "sort -u a -o a", "sort -oa"]),
        (["find", "**"], ["find . -name '*.py'"], ["find . -delete", "find . -exec rm '{}' +"]),
        (["grep", "**"], ["grep -rn x src"], ["grep -P x src"]),
        (["echo", ["*"]], ["echo '*'"], ["echo a", "echo *"]),
    ],
)
def test_an_allow_rule_matches_literal_words_only(argv: list[Any], matching: list[str], others: list[str]) -> None:
    rule = {"tool": "bash", "argv": argv, "effect": "allow"}
    assert [rule_for(command, rule) for command in matching] == ["allow"] * len(matching)
    assert [rule_for(command, rule) for command in others] == [None] * len(others)


DENIED = [
    "git push",
    "git push origin main",
    "/usr/bin/git push",
    "GIT push",
    'g"i"t push',
    "g\\it push",
    "git pu\\\nsh",
    "cd x && git push",
    "ls;git push",
    "ls & git push",
    "ls | git push",
    "ls\ngit push",
    "(git push)",
    "{ git push; }",
    "echo $(git push)",
    "echo `git push`",
    'echo "$(git push)"',
    "cat <(git push)",
    "git 2>/dev/null push",
    ">x git push",
    "X=1 Y=2 git push",
    "if true; then git push; fi",
    "! git push",
    "time git push",
    "env -i X=1 git push",
    "timeout -s KILL 5 git push",
    "nice -n 5 nohup setsid git push",
    "sudo -u root git push",
    "command git push",
    "exec git push",
    "echo origin | xargs git push",
    "sh -c 'git push'",
    'bash -lc "cd x; git push"',
    "sudo bash -c 'env sh -c \"git push\"'",
    "env -S'git push'",
    "eval 'git push'",
    "trap 'git push' EXIT",
    "busybox sh -c 'git push'",
    "find . -exec git push ';'",
    "tar -x --to-command='git push'",
    "python -c \"import os; os.system('git push')\"",
    "$'g\\x69t' push",
    "{git,push}",
    "git push # to the server",
    "git push $EMPTY",
    "'git push",
    "f() { git push; }; f",
    "g\u200bit push",
    "git -C docs push",
    "git -c user.name=x --no-pager push",
    "cd x; git --git-dir x push",
]


@pytest.mark.parametrize("command", DENIED)
def test_ask_and_deny_rules_match_every_place_where_a_program_may_start(command: str) -> None:
    """Deny rules hold also for commands that are not made of literal words [B100]."""
    for effect in ("ask", "deny"):
        assert rule_for(command, PUSH | {"effect": effect}) == effect
        assert rule_for(command, PUSH | {"effect": effect, "argv": ["git", "push"]}) == (
            effect if "origin main" not in command else None
        )
        assert rule_for(command, PUSH | {"effect": effect, "argv": ["*", ["push", "pull"], "**"]}) == effect


@pytest.mark.parametrize(
    "command", ["git status", "echo git push", "git log push", "cd git && ls push", "gitk push", "X=1 echo git push"]
)
def test_a_deny_rule_does_not_match_other_commands(command: str) -> None:
    assert rule_for(command, PUSH) is None


def test_a_deny_rule_for_everything_matches_everything() -> None:
    assert rule_for("ls | wc", {"tool": "bash", "argv": ["**"], "effect": "deny"}) == "deny"
    assert rule_for("ls", {"tool": "bash", "argv": ["*"], "effect": "deny"}) == "deny"
    assert rule_for("ls -l", {"tool": "bash", "argv": ["*"], "effect": "deny"}) is None


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("src/**", ["src/a", "src/a/b.py"], ["src", "lib/src/a", "srcs/a", "Src/a"]),
        ("src/*", ["src/a"], ["src/a/b", "src"]),
        ("*.md", ["a.md", "docs/a/b.md"], ["a.mdx", "a.md/b"]),
        ("/*.md", ["a.md"], ["docs/a.md"]),
        ("docs/**/a.md", ["docs/a.md", "docs/x/y/a.md"], ["a.md", "docs/a.mdx"]),
        ("**/test_*.py", ["test_a.py", "x/y/test_b.py"], ["x/atest_b.py"]),
        ("data/", ["data/a", "x/data/a/b"], ["data", "xdata/a"]),
        ("a?c", ["abc", "x/abc"], ["ac", "a/c"]),
        ("[ab].py", ["a.py"], ["c.py"]),
        ("**", ["a", "a/b", "."], []),
        (".*", [".env"], [".", "a"]),
    ],
)
def test_a_path_is_a_glob_as_in_gitignore(pattern: str, matching: list[str], others: list[str]) -> None:
    rule = {"tool": "write", "path": pattern, "effect": "allow"}
    assert [rule_at(path, rule) for path in matching] == ["allow"] * len(matching)
    assert [rule_at(path, rule) for path in others] == [None] * len(others)
    assert [rule_at(path, rule | {"effect": "deny"}) for path in matching] == ["deny"] * len(matching)


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("src/**", ["src", "SRC/a", "src/A"], ["lib/src/a", "srcs"]),
        ("src/*", ["src/a/b/c"], ["src"]),
        ("secrets", ["secrets", "x/Secrets/key"], ["secrets2"]),
        ("data/", ["data", "x/data"], ["mydata"]),
        ("stra\u00dfe", ["STRASSE", "stra\u00dfe"], []),
        ("caf\u00e9", ["cafe\u0301/x"], ["cafe"]),
    ],
)
def test_ask_and_deny_match_without_case_and_all_that_is_beneath(
    pattern: str, matching: list[str], others: list[str]
) -> None:
    rule = {"tool": "write", "path": pattern, "effect": "deny"}
    assert [rule_at(path, rule) for path in matching] == ["deny"] * len(matching)
    assert [rule_at(path, rule) for path in others] == [None] * len(others)


def test_a_rule_for_one_tool_is_not_for_another_and_the_star_is_for_all() -> None:
    deny = {"tool": "write", "path": "a", "effect": "deny"}
    assert rule_at("a", deny, tool="read") is None
    assert rule_at("a", deny | {"tool": "*"}, tool="read") == "deny"


def test_a_glob_with_many_stars_is_matched_in_linear_time() -> None:
    pattern = "/".join(["**", "a*a*a*a*b"] * 30)
    assert rule_at("/".join(["a" * 50] * 80), {"tool": "write", "path": pattern, "effect": "deny"}) is None


# Several rules


def test_the_strictest_of_all_matching_rules_wins_in_any_order() -> None:
    """[B99]"""
    rules = [{"tool": "bash", "argv": ["git", "push"], "effect": effect} for effect in EFFECTS]
    for order in (rules, rules[::-1], rules[1:] + rules[:1]):
        assert rule_for("git push", *order) == "deny"
    assert rule_for("git push", *rules[:2]) == "ask"


def test_rules_that_expired_do_not_match() -> None:
    """The clock is passed in [B99]."""
    rule = PUSH | {"expires": NOW}
    assert rule_for("git push", rule, now=NOW - timedelta(seconds=1)) == "deny"
    assert rule_for("git push", rule, now=NOW) is None
    assert rule_for("git push", PUSH | {"expires": "2027-01-01T01:00:00+01:00"}, now=NOW) is None
    assert not RuleSet.load([rule]).restricts(["bash"], NOW)
    assert RuleSet.load([rule]).restricts(["bash"], datetime(2026, 1, 1, tzinfo=UTC))


def test_a_child_only_narrows() -> None:
    allow = {"tool": "bash", "argv": ["make", "test"], "effect": "allow"}
    parent = RuleSet.load([allow, {"tool": "*", "path": "secrets/**", "effect": "ask"}])
    more = {"tool": "bash", "argv": ["git", "pull"], "effect": "allow"}
    child = narrow(parent, RuleSet.load([allow, more, PUSH, {"tool": "*", "path": "secrets/**", "effect": "allow"}]))
    assert [
        rule.effect if (rule := child.match_command(analyse_command(command), NOW)) else None
        for command in ("make test", "git pull", "git push")
    ] == ["allow", None, "deny"]
    assert child.match_path(["read"], "secrets/a", NOW) in parent.rules
    assert child.hash != parent.hash


def test_a_remembered_command_is_exactly_that_argument_list() -> None:
    """Nothing longer, shorter or wrapped [B101]."""
    remembered = remember_command(["git", "log", "--format=%h"], note="asked on Monday")
    for command, effect in {
        "git log --format=%h": "allow",
        "git log '--format=%h'": "allow",
        "git log": None,
        "git log --format=%h -p": None,
        "git log --format=%H": None,
        "/usr/bin/git log --format=%h": None,
        "env git log --format=%h": None,
        "git log --format=%h; ls": None,
        "git log --format=%h > x": None,
        "X=1 git log --format=%h": None,
        "sh -c 'git log --format=%h'": None,
    }.items():
        found = remembered.match_command(analyse_command(command), NOW)
        assert (found and found.effect) == effect, command


def test_a_remembered_star_is_a_word_and_no_wildcard() -> None:
    """[B101]"""
    remembered = remember_command(["python", "*", "**"], expires=NOW)
    before = NOW - timedelta(days=1)
    assert remembered.match_command(analyse_command("python '*' '**'"), before)
    assert not remembered.match_command(analyse_command("python a b"), before)
    assert not remembered.match_command(analyse_command("python '*' '**'"), NOW)


# Properties


def judge(rules: Iterable[Any], command: str, path: str) -> tuple[int, int]:
    loaded = RuleSet.load(rules)
    found = loaded.match_command(analyse_command(command), NOW), loaded.match_path(["write"], path, NOW)
    first, second = (strictness(rule and rule.effect) for rule in found)
    return first, second


@given(RULES, COMMANDS.map(" ".join), PATHS, st.randoms())
def test_the_order_of_rules_never_changes_what_they_say(rules, command, path, random) -> None:
    """[B99]"""
    shuffled = random.sample(rules, len(rules))
    assert judge(rules, command, path) == judge(shuffled, command, path)
    assert RuleSet.load(rules).hash == RuleSet.load(shuffled).hash


@given(RULES, one_rule(st.sampled_from(["ask", "deny"])), COMMANDS.map(" ".join), PATHS)
def test_adding_a_rule_that_asks_or_denies_never_loosens(rules, more, command, path) -> None:
    """[B99]"""
    before, after = judge(rules, command, path), judge([*rules, more], command, path)
    assert all(old <= new for old, new in zip(before, after, strict=True))


@given(RULES, RULES, COMMANDS.map(" ".join), PATHS)
def test_the_rules_of_a_child_are_never_looser(rules, more, command, path) -> None:
    parent, child = RuleSet.load(rules), RuleSet.load(more)
    pairs = list(zip(judge(rules, command, path), judge(narrow(parent, child).rules, command, path), strict=True))
    assert all(old <= new for old, new in pairs)
    assert all(old == new for old, new in pairs if new == EFFECTS.index("allow"))
