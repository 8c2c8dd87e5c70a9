"""The decision about a call of a workspace tool: by the mode, the rules, and what is known about a command.

In this order, and the first that applies decides:

====================================================  ==================================================
a deny rule matches                                   denied
mode ``plan`` or ``read_only``, the call may change   denied, whatever the rules allow
an ask rule matches                                   asks
the analysis of a command gave up                     asks
mode ``auto`` and a command, in a sandbox that also   runs
keeps the protected paths (level A)
an allow rule matches                                 runs
the mode lets the call run                            runs
otherwise                                             asks
====================================================  ==================================================

A command that can only read runs *confined* in every mode but ``auto``: by execve of a program outside the workspace,
in a sandbox without a network whose root is read-only. There is no list of safe commands besides that. In ``auto`` it
runs as any other command does, unless an ask rule matches.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import shutil
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from holdfast.errors import DeclarationError, ToolError
from holdfast.workspace.policy.analysis import Analysis, analyse_command
from holdfast.workspace.policy.harmless import Reading, find_reading
from holdfast.workspace.policy.rules import EFFECTS, Effect, Rule, RuleSet, narrow

if TYPE_CHECKING:
    from holdfast.workspace.files.root import Root
    from holdfast.workspace.sandbox.probe import Sandbox

__all__ = ["MODES", "PROGRAM_PATH", "Mode", "Policy", "Ruling"]

Mode = Literal["auto", "edits", "ask", "read_only", "plan"]
MODES: tuple[Mode, ...] = get_args(Mode)
"""From the loosest to the strictest."""
PROGRAM_PATH = "/usr/local/bin:/usr/bin:/bin"
"""Where confined programs are looked up. The PATH of this process may lead into a workspace."""

_UNCHANGING = ("read_only", "plan")
_READERS = {"grep": ("grep", "read"), "bash": ("read",)}
"""Tools that show what is in files: rules for ``read`` hold for these, too."""
_VERBS: dict[Effect, str] = {"allow": "runs", "ask": "asks", "deny": "denied"}


class Ruling(msgspec.Struct, frozen=True):
    """What happens to a call, and why."""

    effect: Effect
    reason: str
    """In a fixed form: "mode ask, rules 1f3a9c0e: no rule matches; asks"."""
    confined: bool = False
    """The command can only read, and must run so, also after an approval: with a read-only root, by execve."""
    executable: str = ""
    """If it is confined: the file to execute. No other file of that name was judged."""


class _Harmless(msgspec.Struct, frozen=True):
    """A command that can only read, and the file to execute."""

    reading: Reading
    executable: str


class Policy:
    """Judges calls. Holds no state besides its settings: a ruling depends on these, the call and the clock."""

    def __init__(
        self,
        mode: Mode,
        rules: RuleSet,
        root: Root,
        sandbox: Sandbox,
        *,
        path: str = PROGRAM_PATH,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ):
        """Make a policy.

        path:  the PATH that commands get: an allow rule counts only if it leads to a program outside the workspace
        now:   the clock, for rules that expire
        """
        if mode not in MODES:
            raise DeclarationError(f"unknown mode {mode!r}: use one of {', '.join(MODES)}")
        self.mode: Mode = mode
        self.rules = rules
        self._root, self._sandbox, self._path, self._now = root, sandbox, path, now
        self._base = os.path.realpath(root.path)

    @property
    def hash(self) -> str:
        """The SHA-256 of the mode and of the rules' hash."""
        return hashlib.sha256(f"{self.mode}\n{self.rules.hash}".encode()).hexdigest()

    def narrow(self, mode: Mode | None = None, rules: RuleSet | None = None) -> Policy:
        """Return the policy of a child: the stricter of the two modes, and rules that only narrow these."""
        stricter = MODES[max(MODES.index(self.mode), MODES.index(mode or self.mode))]
        narrowed = narrow(self.rules, rules or RuleSet())
        return Policy(stricter, narrowed, self._root, self._sandbox, path=self._path, now=self._now)

    # Paths

    def judge_paths(self, tool: str, paths: Sequence[str], *, writes: bool) -> Ruling:
        """Return the ruling on a call of a file tool. Raises ToolError for a path outside the workspace.

        The strictest ruling on any of the paths holds; a rule allows the call only if each path is allowed by one.
        """
        found = [self._match_path(tool, path) for path in paths]
        strictest = max((rule for rule in found if rule), key=_strictness, default=None)
        if strictest and strictest.effect == "deny":
            return self._rule("deny", f"{self.rules.name(strictest)} denies it")
        if writes and self.mode in _UNCHANGING:
            return self._rule("deny", f"mode {self.mode} changes nothing, whatever the rules allow")
        if strictest and strictest.effect == "ask":
            return self._rule("ask", f"{self.rules.name(strictest)} asks")
        if strictest and None not in found:
            return self._rule("allow", f"{self.rules.name(strictest)} allows it")
        if not writes:
            return self._rule("allow", "no rule matches, and it only reads")
        return self._rule("allow" if self.mode in ("auto", "edits") else "ask", "no rule matches")

    def withholds(self, tool: str, path: str) -> bool:
        """Return whether a search must leave a path out of its results: a rule denies it, or would ask."""
        rule = self._match_path(tool, path)
        return rule is not None and rule.effect != "allow"

    def _match_path(self, tool: str, path: str) -> Rule | None:
        """Return the strictest rule for a path, by its name and by the file that its links lead to.

        An allow rule must match both. A link that is swapped later cannot lead out of the workspace (``Root``), but it
        can lead past a rule: rules are no protection against a program that runs at the same time.
        """
        name = self._root.normalise(path)
        if not self.rules.rules:
            return None
        tools, now = _READERS.get(tool, (tool,)), self._now()
        matched = [self.rules.match_path(tools, each, now) for each in self._find_names(name)]
        if None in matched:
            return _find_restrictive(matched)
        return max((rule for rule in matched if rule), key=_strictness)

    def _find_names(self, name: str) -> list[str]:
        """Return a path relative to the root, and that of the file that its links lead to, if this is another one."""
        real = self._resolve(name)
        return [name] if real in (None, name) else [name, real]

    def _resolve(self, name: str) -> str | None:
        """Return the path of the file that the links of a path lead to; None if it is outside or has no such path."""
        try:
            real = os.path.realpath(os.path.join(self._base, name))
        except ValueError:  # characters that the file system does not have
            return None
        return Path(os.path.relpath(real, self._base)).as_posix() if _is_beneath(real, self._base) else None

    # Commands

    def judge_command(self, command: str, cwd: str = ".") -> Ruling:
        """Return the ruling on a command. Raises ToolError for a directory outside the workspace."""
        read, start = analyse_command(command), self._root.normalise(cwd)
        restriction = self._find_restriction(read, start)
        harmless = self._find_harmless(read, start)
        confined = isinstance(harmless, _Harmless)
        executable = harmless.executable if confined else ""
        if restriction and restriction.effect == "deny":
            return self._rule("deny", f"{self.rules.name(restriction)} denies it")
        if self.mode in _UNCHANGING and not confined:
            return self._rule("deny", f"mode {self.mode} runs only commands that cannot change anything: {harmless}")
        if restriction:
            return self._rule("ask", f"{self.rules.name(restriction)} asks", executable)
        if read.unread:
            return self._rule("ask", f"the command was not analysed: {read.unread}")
        return self._allow_command(read, start, harmless)

    def _allow_command(self, read: Analysis, cwd: str, harmless: _Harmless | str) -> Ruling:
        """Return the ruling on a command that no rule restricts."""
        confined = isinstance(harmless, _Harmless)
        executable = harmless.executable if confined else ""
        if self.mode == "auto" and not self._find_gap():
            if read.computed and self.rules.restricts(["bash"], self._now()):
                return self._rule("ask", "the rules cannot be checked: the name of a program is computed")
            return self._rule(
                "allow", f"no rule restricts it, and a sandbox of level {self._sandbox.level} is in force"
            )
        rule = self.rules.match_command(read, self._now())
        if rule and read.words:
            problem = self._find_doubt(rule, read.words, cwd)
            if not problem:
                return self._rule("allow", f"{self.rules.name(rule)} allows it", executable)
            if not confined:
                return self._rule("ask", f"{self.rules.name(rule)} does not apply: {problem}")
        if confined:
            return self._rule("allow", "it can only read", executable)
        missing = f"{self._find_gap()}, and " if self.mode == "auto" else ""
        return self._rule("ask", f"{missing}no rule matches ({harmless})")

    def _find_gap(self) -> str:
        """Return why mode auto may not run commands unasked in this sandbox; empty if it may."""
        if self._sandbox.level == "none":
            return "no sandbox is in force"
        if not self._sandbox.guarantees.protected:
            return f"a sandbox of level {self._sandbox.level} does not keep protected paths such as .env and the store"
        return ""

    def _find_restriction(self, read: Analysis, cwd: str) -> Rule | None:
        """Return the strictest ask or deny rule for a command or for a path among its words."""
        now = self._now()
        found = [self.rules.match_command(read, now)]
        if self.rules.restricts(["*", *_READERS["bash"]], now):
            links = read.words is not None
            found += [self._match_word(_READERS["bash"], word, cwd, links=links) for word in read.all_words]
        return _find_restrictive(found)

    def _match_word(self, tools: Sequence[str], word: str, cwd: str, *, links: bool) -> Rule | None:
        """Return the ask or deny rule for a word that may be a path, or end in one: ``--file=src/a``, ``@src/a``.

        Links are followed for the few words of a literal command only: each costs system calls.
        """
        found: list[Rule | None] = []
        for part in dict.fromkeys([word, end := word.rpartition("=")[2], end.lstrip("@"), word.lstrip("@")]):
            try:
                name = self._root.normalise(_join(cwd, part))
            except ToolError:
                continue
            for each in self._find_names(name) if links else [name]:
                found.append(self.rules.match_path(tools, each, self._now()))
        return _find_restrictive(found)

    def _find_harmless(self, read: Analysis, cwd: str) -> _Harmless | str:
        """Return the harmless command, or why it is not known to be one or cannot be confined."""
        if read.unread or not read.words:
            return read.unread or "it is not made of literal words"
        reading = find_reading(read.words)
        if isinstance(reading, str):
            return reading
        executable = self._find_executable(read.words[0], PROGRAM_PATH)
        if not executable:
            return f"{read.words[0]!r:.60} is not a program outside the workspace"
        if problem := self._find_unreadable(reading, cwd):
            return problem
        held = self._sandbox.guarantees
        if self._sandbox.level != "A" or not (held.write and held.net_tcp and held.net_udp):
            return "no read-only sandbox without a network is in force"
        return _Harmless(reading, executable)

    def _find_unreadable(self, reading: Reading, cwd: str) -> str:
        """Return why a command may read what the read tool may not, or would ask about; empty if it does not."""
        if reading.recursive and self.rules.restricts(["*", *_READERS["bash"]], self._now()):
            return "it may read paths that rules restrict"
        for path in reading.paths:
            try:
                name = self._root.normalise(_join(cwd, path))
            except ToolError:
                return f"{path!r:.80} is outside the workspace"
            if ".." in path.split("/"):
                return f"{path!r:.80} has '..', which leads elsewhere behind a link"
            if any(self._root.is_protected(each) for each in self._find_names(name)):
                return f"{path!r:.80} is protected"
            if self._resolve(name) is None:
                return f"{path!r:.80} leads out of the workspace"
            if self._match_word(_READERS["bash"], path, cwd, links=True):
                return f"a rule restricts {path!r:.80}"
        return ""

    def _find_executable(self, name: str, path: str) -> str:
        """Return the file of a program; empty if there is none in ``path``, or if it belongs to the workspace."""
        found = None if "/" in name or "\\" in name else shutil.which(name, path=path)
        if found is None or not os.path.isabs(found):
            return ""
        inside = any(_is_beneath(each, self._base) for each in (os.path.abspath(found), os.path.realpath(found)))
        return "" if inside else found

    def _find_doubt(self, rule: Rule, words: Sequence[str], cwd: str) -> str:
        """Return why an allow rule may not mean what would run; empty if it does.

        Exact words mean one program, started in the root: in another directory they may run another file. A rule with
        a wildcard means harmless flags (``rules``) and paths that the read tool may read.
        """
        named_by_path = "/" in words[0] or "\\" in words[0]
        if not named_by_path and not self._find_executable(words[0], self._path):
            return f"{words[0]!r:.60} is not a program outside the workspace"
        reading = find_reading(words)
        if rule.has_wildcard:
            return reading if isinstance(reading, str) else self._find_unreadable(reading, cwd)
        if cwd != "." and isinstance(reading, str):
            return f"the command starts in {cwd!r:.80}, not in the root of the workspace"
        return ""

    def _rule(self, effect: Effect, why: str, executable: str = "") -> Ruling:
        reason = f"mode {self.mode}, rules {self.rules.hash[:8]}: {why}; {_VERBS[effect]}"
        return Ruling(effect, reason, confined=bool(executable), executable=executable)


def _strictness(rule: Rule) -> int:
    return EFFECTS.index(rule.effect)


def _find_restrictive(rules: Sequence[Rule | None]) -> Rule | None:
    """Return the strictest of the rules that ask or deny."""
    return max((rule for rule in rules if rule and rule.effect != "allow"), key=_strictness, default=None)


def _join(cwd: str, path: str) -> str:
    """Return a path of a command relative to the root. Absolute paths stay absolute."""
    return posixpath.join(cwd, path) if cwd != "." else path


def _is_beneath(path: str, root: str) -> bool:
    try:
        return os.path.commonpath([path, root]) == root
    except ValueError:  # on another drive
        return False
