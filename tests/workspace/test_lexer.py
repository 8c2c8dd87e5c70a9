"""The lexer accepts only what bash would split the same way."""

from __future__ import annotations

import os
import random
import subprocess

import pytest

from holdfast.workspace.policy.lexer import LONGEST, literal_words

CASES = int(os.environ.get("HOLDFAST_LEXER_CASES", "2000"))
"""Accepted commands that are compared with bash; the chaos run raises it."""


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("ls", ["ls"]),
        ("  git   status  ", ["git", "status"]),
        ("git commit -m 'a  b'", ["git", "commit", "-m", "a  b"]),
        ("grep -n \"a b\"c'd e' x.py", ["grep", "-n", "a bcd e", "x.py"]),
        ("make CC=gcc", ["make", "CC=gcc"]),
        ("echo ''", ["echo", ""]),
        ("echo 'a\nb'\n", ["echo", "a\nb"]),
        ("echo '$HOME `id` \\ * ~'", ["echo", "$HOME `id` \\ * ~"]),
        ('echo "größe" user@host:22 50%', ["echo", "größe", "user@host:22", "50%"]),
    ],
)
def test_literal_words_are_split(command: str, words: list[str]) -> None:
    """A command of literal words has an argument list [B97]."""
    assert literal_words(command) == words


@pytest.mark.parametrize(
    "command",
    [
        "", "   ", "''", "a;b", "a&b", "a|b", "a>b", "a<b", "a\nb", "a\tb", "a\rb", "$a", "a$b", '"$a"', "`a`",
        '"`a`"', "a\\ b", '"a\\nb"', "$'a'", '$"a"', "a*", "a?", "[a]", "{a,b}", "a{1..3}", "~", "~/x", "a=~",
        "A=b c", "A+=b", "A=b", "=ls", "#a", "a #b", "!a", "^a^b", "(a)", "a()", "'a", '"a', "if a", "time ls",
        "{ a", "! a", "[[ a ]]", "coproc a", "%1", "-x", "a <(b)", "a >(b)", "a 2>&1", "a\0b", "a\x1bb", "'a\x1bb'",
        "'a\x7fb'", "ls\u00a0-l", "ls\u200b", "'a\u202eb'", "'\ud800'", "größe", "a" * (LONGEST + 1),
    ],
)  # fmt: skip
def test_all_else_is_refused(command: str) -> None:
    """Whatever needs a shell, or hides something from the reader, is not literal [B97]."""
    assert literal_words(command) is None


PIECES = (
    *"abz09_-./:,@%+=-  ''\"\"", " ", " ", "'", '"', "a b", "--x=y", "x=", "é", "名", "\\", "$", "$x", "`", "*", "?",
    "[", "]", "{", "}", "{a,b}", "~", "#", "!", "^", "&", "|", ";", "<", ">", "(", ")", "\n", "\t", "$'a'", "if",
    "time", "in", "do", "[[", "%1", "=", "+=", "'$x'", "'a\nb'", '"a b"', "'~'", '"*"', '"!x"', "'\\'", "''", '""',
    "\u00a0", "\u200b",
)  # fmt: skip
SAFE = (
    "a",
    "b0",
    "-x",
    "./c",
    "x.py",
    "'q r'",
    '"s t"',
    " ",
    " ",
    "=",
    ":",
    "''",
    '"$"',
    "%",
    "@",
    "+",
    ",",
    "é",
    "'é'",
)


def random_command(rng: random.Random) -> str:
    pieces = SAFE if rng.random() < 0.7 else PIECES
    text = "".join(rng.choice(pieces) for _ in range(rng.randint(1, 12)))
    if rng.random() < 0.3:  # one wild character in a tame command
        at = rng.randint(0, len(text))
        text = text[:at] + rng.choice(PIECES) + text[at:]
    return text


HANDLERS = r"""
show() { builtin printf '%s\0' "$number" "$#" "$@"; }
command_not_found_handle() { show "$@"; }
PATH=/nowhere
"""
OWN = frozenset(
    subprocess.run(["bash", "-c", "compgen -b"], capture_output=True, text=True, check=True).stdout.split()
) | {"show"}


def bash_words(commands: list[str], locale: str) -> list[list[str]]:
    """Return the words that one bash makes of each command. Nothing is run: no program is on its PATH."""
    lines = [HANDLERS]
    for number, command in enumerate(commands):
        first = (literal_words(command) or [""])[0]
        # A path or a builtin would be started, so it is shown as an argument.
        prefix = "show " if "/" in first or first in OWN else ""
        lines.append(f"number={number}\n{prefix}{command.lstrip() if prefix else command}\n")
    done = subprocess.run(
        ["bash", "--norc", "--noprofile"],
        input="".join(lines).encode(),
        capture_output=True,
        env={"LC_ALL": locale},
        check=False,
    )
    fields = done.stdout.decode().split("\0")
    found: list[list[str]] = [["(nothing was shown)", done.stderr.decode()[-300:]] for _ in commands]
    at = 0
    while at + 1 < len(fields):
        count = int(fields[at + 1])
        found[int(fields[at])] = fields[at + 2 : at + 2 + count]
        at += 2 + count
    return found


def test_bash_splits_what_the_lexer_accepts_in_the_same_way() -> None:
    """What the lexer calls literal, real bash splits into the same words [B97]."""
    rng = random.Random(os.environ.get("HOLDFAST_LEXER_SEED", "literal"))
    accepted: dict[str, list[str]] = {}
    while len(accepted) < CASES:
        command = random_command(rng)
        words = literal_words(command)
        if words is not None:
            accepted[command] = words
    commands = list(accepted)
    for start in range(0, len(commands), 10_000):
        batch = commands[start : start + 10_000]
        for command, words in zip(batch, bash_words(batch, "C.UTF-8"), strict=True):
            assert words == accepted[command], command


def test_the_comparison_with_bash_can_fail() -> None:
    """An assignment, a glob and an expansion are seen as different."""
    assert bash_words(["A=b c", "x {a,b}", "x $number"], "C.UTF-8") == [["c"], ["x", "a", "b"], ["x", "2"]]
