"""What programs use without being told: files that they imply, code that they run, names that they compute."""

from __future__ import annotations

from holdfast.workspace.policy.analysis import INTERPRETERS, PACKAGE_MANAGERS, Piece, program_name
from holdfast.workspace.policy.harmless import TABLES
from holdfast.workspace.shell.words import MODULE

IMPLICIT = {
    "make": ("Makefile", "makefile", "GNUmakefile"),
    "gmake": ("Makefile", "makefile", "GNUmakefile"),
    "npm": ("package.json",),
    "npx": ("package.json",),
    "yarn": ("package.json",),
    "pnpm": ("package.json",),
    "bun": ("package.json",),
    "just": ("justfile", "Justfile"),
    "task": ("Taskfile.yml",),
    "rake": ("Rakefile",),
    "tox": ("tox.ini",),
    "nox": ("noxfile.py",),
    "pytest": ("conftest.py",),
    "docker": ("Dockerfile",),
}
"""Programs that run what a file in their directory says, without naming it."""
BUILTINS = frozenset(
    (
        ".", ":", "alias", "bg", "bind", "break", "builtin", "caller", "cd", "command", "compgen", "complete",
        "compopt", "continue", "declare", "dirs", "disown", "enable", "eval", "exec", "exit", "export", "fc",
        "fg", "getopts", "hash", "help", "history", "jobs", "let", "local", "logout", "mapfile", "popd",
        "pushd", "read", "readarray", "readonly", "return", "set", "shift", "shopt", "source", "suspend",
        "times", "trap", "type", "typeset", "ulimit", "umask", "unalias", "unset", "wait",
    )
)  # fmt: skip
"""Commands that only bash itself has."""
_COPIERS = "chmod cp echo ln mkdir mv printf rm rmdir tee test touch true ["
PLAIN = (frozenset(TABLES) | BUILTINS | frozenset(_COPIERS.split())) - {
    ".",
    "command",
    "eval",
    "exec",
    "find",
    "source",
}
"""Programs that read no other files than those that their arguments name."""
RUNNERS = PACKAGE_MANAGERS | frozenset(IMPLICIT)
COMPUTING = frozenset(("eval", "parallel", "xargs"))


def has_code(piece: Piece, at: int) -> bool:
    """Return whether an interpreter starts here that gets more than options: a script, code, a module, its input."""
    if program_name(piece.words[at]) not in INTERPRETERS:
        return False
    return piece.shell or any(not word.startswith("-") or MODULE.fullmatch(word) for word in piece.words[at + 1 :])
