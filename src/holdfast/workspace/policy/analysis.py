"""What can be said about a command without running it: its literal words, and every place where a program may start.

Allow rules and the tables of harmless flags see only the literal words of the lexer. Ask and deny rules see more: a
command that is not made of literal words is cut at everything that can separate commands, and the words behind a
wrapper (``env``, ``timeout``, ``sh -c``) count as starts, too. This finds too much on purpose: a rule that denies
``rm`` also denies ``echo "a; rm b" | cat``. No parser of bash is used, because a deny rule must also hold for text that
a parser refuses.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache

import msgspec

from holdfast.workspace.policy.lexer import literal_words

__all__ = [
    "INTERPRETERS",
    "LONGEST",
    "PACKAGE_MANAGERS",
    "WRAPPERS",
    "Analysis",
    "Piece",
    "Start",
    "analyse_command",
    "analyse_words",
    "program_name",
]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LONGEST = 16 * 1024
"""A longer command, in bytes, is not analysed."""
DEEPEST = 6
"""Commands within commands (``sh -c 'sh -c ...'``) that are followed."""
_MOST_PIECES = 2000

SHELLS = _names("ash bash busybox csh dash fish ksh mksh nu pwsh powershell sh tcsh zsh cmd toybox")
INTERPRETERS = SHELLS | _names(
    "awk gawk mawk nawk bun deno elixir erl escript expect gdb ghci groovy guile java jshell julia lua luajit node "
    "nodejs ocaml octave osascript perl php pry psql python pypy ipython irb r racket rscript ruby sbcl scala sed "
    "sqlite swift tclsh ts-node tsx vim vi nvim emacs ed ex wish"
)
"""Programs that run the code in their arguments, or in the files that these name."""
WRAPPERS = _names(
    "alias bwrap caffeinate chroot chrt chpst command builtin coproc dbus-run-session direnv docker doas entr env "
    "eval exec fakeroot find firejail flock gosu ionice kubectl ltrace make nice nohup ninja nsenter parallel pkexec "
    "podman rlwrap rtx runuser script setarch setpriv setsid source ssh start-stop-daemon stdbuf strace su sudo "
    "systemd-run taskset tar time timeout trap unbuffer unshare valgrind watch xargs xvfb-run ."
)
"""Programs and builtins that run the command in their arguments."""
PACKAGE_MANAGERS = _names(
    "apk apt apt-get aptitude brew bundle bundler cargo choco composer conda corepack cpan dnf dotnet easy_install "
    "gem go gradle gradlew hatch mamba micromamba mix mvn mvnw nix nix-env nix-shell npm npx nuget opam pacman pdm "
    "pip pipenv pipx pkg pnpm poetry port rake rustup sbt scoop snap stack tox nox uv uvx winget yarn yum zypper "
    "just task"
)
"""Programs that fetch and run code of packages, or run what a file of the project names."""
_KEYWORDS = _names("! if then elif else do while until function { select case in for")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\[[^]]*\])?\+?=")
_COMPUTED = re.compile(r"[$`*?\[~]|\{[^}]*,")


class Piece(msgspec.Struct, frozen=True):
    """Words between two separators, and the positions at which a program may start."""

    words: tuple[str, ...]
    starts: tuple[int, ...]
    shell: bool = False
    """They are shell text: an expansion may add and remove words."""


Start = tuple[Piece, int]
"""A place where a program may start: a position in the words of a piece."""


class Analysis(msgspec.Struct, frozen=True, dict=True):
    """What is known about a command."""

    words: tuple[str, ...] | None
    """The argument list, if the command is made of literal words only."""
    pieces: tuple[Piece, ...]
    """Where programs may start; more than really do."""
    unread: str = ""
    """Why the analysis gave up; empty if it did not."""
    computed: bool = False
    """The name of a program is computed when the command runs, so that no rule can know it."""

    @cached_property
    def starts(self) -> dict[str, list[Start]]:
        """The starts by the program's name: as written and without its directory, both without case."""
        found: dict[str, list[Start]] = {}
        for piece in self.pieces:
            for at in piece.starts:
                for name in _find_names(piece.words[at]):
                    found.setdefault(name, []).append((piece, at))
        return found

    @cached_property
    def all_words(self) -> tuple[str, ...]:
        """Every word once, also of the commands within it."""
        return tuple(dict.fromkeys(word for piece in self.pieces for word in piece.words))


@lru_cache(maxsize=1024)
def _find_names(word: str) -> tuple[str, ...]:
    name = word.casefold()
    return tuple({name, re.split(r"[/\\]", name)[-1]})


def program_name(word: str) -> str:
    """Return the bare name of a program: ``/usr/bin/Python3.12`` is ``python``, as is ``python.exe``."""
    name = re.split(r"[/\\]", word)[-1].casefold().removesuffix(".exe")
    return re.sub(r"(?<=[a-z])[-_]?[0-9][0-9.]*$", "", name) or name


def analyse_command(text: str) -> Analysis:
    """Return the analysis of a command. Never raises: what cannot be read is said in ``unread``."""
    unread = _find_obstacle(text)
    if len(text) > LONGEST or len(text.encode(errors="replace")) > LONGEST:
        # Each word may start a program: one pass over the text, so that deny rules hold for a text of any length.
        pieces = ([_bare(word) for word in piece.split()] for piece in _SEPARATORS.split(_join_lines(text)))
        starts = tuple(Piece(tuple(words), tuple(range(len(words))), shell=True) for words in pieces if words)
        return Analysis(None, starts, f"it is longer than {LONGEST} bytes")
    words = None if unread else literal_words(text)
    if words:
        return analyse_words(words)
    scan = _Scan()
    scan.add_text(text, 0)
    return Analysis(None, tuple(scan.pieces), unread or scan.unread, scan.computed)


def analyse_words(words: Sequence[str]) -> Analysis:
    """Return the analysis of an argument list."""
    scan = _Scan()
    scan.add_words(words, 0, literal=True)
    return Analysis(tuple(words), tuple(scan.pieces), scan.unread, scan.computed)


_INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs")
"""Unicode categories of characters that are not seen, or that change how others are seen."""
_BLANKS = frozenset("\u034f\u115f\u1160\u3164\uffa0\u2800")
"""Letters and marks that are drawn as nothing."""
_SELECTORS = re.compile("[\u180b-\u180d\u180f\ufe00-\ufe0f\U000e0100-\U000e01ef]")
"""Variation selectors: marks that are drawn as nothing, and can carry hidden text."""


def _find_obstacle(text: str) -> str:
    """Return why a text may not be what an approver sees: characters that are invisible or control the display."""
    for character in text:
        if character in "\n\t" or " " <= character <= "~":
            continue
        drawn = unicodedata.category(character) not in _INVISIBLE and character not in _BLANKS
        if not drawn or _SELECTORS.match(character):
            return f"it has the invisible character U+{ord(character):04X}"
    return ""


_SEPARATORS = re.compile(r"[;&|\n\r(){}`<>]")
_QUOTED_ANSI = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.S)
_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{1,2}|u[0-9A-Fa-f]{1,4}|U[0-9A-Fa-f]{1,8}|[0-7]{1,3}|.)", re.S)
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "a": "", "b": "", "e": "", "E": "", "f": " ", "v": " "}


def _join_lines(text: str) -> str:
    return text.replace("\\\r\n", "").replace("\\\n", "")


def _decode_ansi(text: str) -> str:
    r"""Replace ``$'\x72m'`` by the characters it stands for."""

    def decode_escape(found: re.Match[str]) -> str:
        code = found[1]
        if code[0] in "xuU" and len(code) > 1:
            value = int(code[1:], 16)
            return chr(value) if value < 0x110000 else ""
        if code[0] in "01234567":
            return chr(int(code, 8) & 0xFF)
        return _LETTERS.get(code, code)

    return _QUOTED_ANSI.sub(lambda found: _ESCAPE.sub(decode_escape, found[1]), text)


def _bare(word: str) -> str:
    r"""Return a word without quotes, backslashes and invisible characters: ``r\m`` and ``"rm"`` are ``rm``."""
    if word.isalnum() and word.isascii():
        return word
    bare = re.sub(r"""[\\'"]""", "", word)
    return bare if bare.isascii() else "".join(c for c in bare if unicodedata.category(c) not in ("Cf", "Cc"))


class _Scan:
    """Collects the pieces of a command and of the commands within it."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.unread = ""
        self.computed = False

    def add_text(self, text: str, depth: int) -> None:
        """Add the pieces of shell text, read in two ways: with quotes as bash takes them, and as if there were none."""
        if depth > DEEPEST:
            self.unread = self.unread or f"it has more than {DEEPEST} commands within each other"
            depth = -1  # no further, but the words of this level still count
        text = _decode_ansi(_join_lines(text))
        for words in self._split_quoted(text):
            self.add_words(words, depth)
        for piece in _SEPARATORS.split(text):
            words = [_bare(word) for word in piece.split()]
            self.add_words(words, depth, nested=False)
            if "," in piece and "{" in text:  # brace expansion
                self.add_words([part for word in words for part in word.split(",") if part], depth, nested=False)
            if "<" in text or ">" in text:  # a redirection before the name: >F rm
                self.add_words(words[1:], depth, nested=False)

    def add_words(self, words: Sequence[str], depth: int, *, nested: bool = True, literal: bool = False) -> None:
        """Add one simple command; with ``nested``, also the commands in its arguments.

        literal:  nothing in the words expands
        """
        if not words:
            return
        if len(self.pieces) >= _MOST_PIECES:
            self.unread = self.unread or f"it has more than {_MOST_PIECES} parts"
            nested = False
        first = 0
        while first < len(words) - 1 and (words[first] in _KEYWORDS or _ASSIGNMENT.match(words[first])):
            first += 1
        name = program_name(words[first])
        runs_others = name in WRAPPERS or name in INTERPRETERS or bool(_ASSIGNMENT.match(name))
        starts = range(first, len(words)) if runs_others else range(first, first + 1)
        self.pieces.append(Piece(tuple(words), (*range(first), *starts), not literal))
        self.computed = self.computed or (not literal and _is_computed(words, starts))
        if runs_others and nested and depth >= 0:
            for word in words[first + 1 :]:
                self._add_argument(word, depth + 1)

    def _add_argument(self, word: str, depth: int) -> None:
        """Add the command in an argument of a wrapper: ``sh -c 'CMD'``, ``env -SCMD``, ``--to-command=CMD``."""
        if word.startswith("-S"):
            self.add_text(word[2:], depth)
        if "=" in word:
            self.add_text(word.rpartition("=")[2], depth)
        if re.search(r"[\s;&|()`$]", word):
            self.add_text(word, depth)

    def _split_quoted(self, text: str) -> Iterator[list[str]]:
        """Yield the words between separators that are not quoted, without redirections."""
        words: list[str] = []
        word: str | None = None
        skip = False  # the next word is the target of a redirection
        at = 0
        while at <= len(text):
            character = text[at] if at < len(text) else "\n"
            if character in "'\"":
                inner, at = self._read_quotes(text, at)
                word = (word or "") + inner
                continue
            if character == "\\" and at + 1 < len(text):
                word = (word or "") + text[at + 1]
                at += 2
                continue
            ends = character in " \t;&|\n\r()<>"
            if not ends:
                word = (word or "") + character
            elif character in "<>" and word is not None and word.isdigit():
                word = None  # 2>F
            elif word is not None:
                if not skip:
                    words.append(word)
                word, skip = None, False
            if character in "<>":
                while at + 1 < len(text) and text[at + 1] in "<>&|":
                    at += 1
                skip = True
            elif ends and character not in " \t":
                yield words
                words, skip = [], False
            at += 1

    def _read_quotes(self, text: str, at: int) -> tuple[str, int]:
        """Return what a quoted string stands for, and the position behind it."""
        quote, at, inner = text[at], at + 1, ""
        while at < len(text) and text[at] != quote:
            if quote == '"' and text[at] == "\\" and text[at + 1 : at + 2] in ('"', "\\", "$", "`"):
                at += 1
            inner += text[at : at + 1]
            at += 1
        if at >= len(text):
            self.unread = self.unread or "a quote is not closed"
        return inner, at + 1


def _is_computed(words: Sequence[str], starts: Sequence[int]) -> bool:
    """Return whether the name of a program is unknown until the command runs: ``$x -rf``, ``sudo $x``, ``... | sh``."""
    name, *others = (words[at] for at in starts)
    if _COMPUTED.search(name) or any("$" in word or "`" in word for word in others):
        return True
    return program_name(name) in INTERPRETERS and all(word.startswith("-") for word in others)
