"""The files that an approval of a command is bound to."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from itertools import islice

import msgspec

from holdfast.errors import ToolError
from holdfast.workspace.files.root import storable_text
from holdfast.workspace.policy.analysis import Analysis, analyse_command, analyse_words, program_name
from holdfast.workspace.shell.command import Command, ShellRoot
from holdfast.workspace.shell.programs import COMPUTING, IMPLICIT, PLAIN, RUNNERS, has_code
from holdfast.workspace.shell.words import MODULE, PATTERN, expand_braces, is_computed, module_files, split_word

MOST_SHOWN = 100
"""Files whose content a plan names one by one; the others have one hash together."""
MOST_BYTES = 256 * 1024 * 1024
"""Bytes that one plan reads, smallest files first. The others are named with size and time instead of their content."""
MOST_FILES = 5000
MOST_PLACES = 64
"""Directories in which the names of a command are looked up."""
MOST_LOOKUPS = 30_000
MOST_PROGRAMS = 200


class Binder:
    """Finds what a command names in the workspace, and what it may use without naming it.

    It looks up too much on purpose: every word, and every part of a word, in every directory that is named.
    """

    def __init__(self, root: ShellRoot, command: Command):
        self._root, self._base, self._command = root, str(root.path), command
        self._analysis = _analyse(command)
        self._pieces = list(self._analysis.pieces)
        if command.words is None and ("<" in command.text or ">" in command.text):
            # The analysis leaves out the targets of redirections.
            self._pieces += analyse_command(re.sub("[<>]", " ", command.text)).pieces
        self._files: dict[str, int] = {}  # sizes, by the path without links
        self._links: dict[str, str] = {}  # paths without links, by the named one
        self._directories: dict[str, None] = {}
        self._patterns: dict[str, None] = {}
        self._notes: dict[str, None] = {}
        self._lookups = 0

    def programs(self) -> Iterator[str]:
        """Yield the program, and the names of those that the command may start from the PATH."""
        yield self._command.executable
        names = dict.fromkeys(piece.words[at] for piece in self._pieces for at in piece.starts)
        yield from islice((name for name in names if name and "/" not in name), MOST_PROGRAMS)
        if len(names) > MOST_PROGRAMS:
            self._notes[f"programs of the workspace after the first {MOST_PROGRAMS} words"] = None

    def bind(self) -> tuple[dict[str, str], list[str]]:
        """Return the versions by path, and the sentences."""
        self._look_everywhere()
        versions = self._hash_files()
        self._add_notes()
        return _shorten(versions), list(map(storable_text, self._notes))

    # --- what the command names ---

    def _look_everywhere(self) -> None:
        names = list(dict.fromkeys(name for name in self._names() if name))
        places = list(dict.fromkeys(self.look(".", self._command.cwd)))
        self._directories.clear()  # the working directory is not named by the command itself
        for place in places:  # grows: cd a && cd b
            for name in (*names, *self._match_patterns(place)):
                if self._is_full():
                    return
                for found in self.look(place, name):
                    if found in places:
                        continue
                    if len(places) == MOST_PLACES:
                        self._notes[f"files in directories after the first {MOST_PLACES}"] = None
                    else:
                        places.append(found)

    def _is_full(self) -> bool:
        return self._lookups >= MOST_LOOKUPS or len(self._files) >= MOST_FILES

    def _names(self) -> Iterator[str]:
        """Yield all that may name a file: words, parts of words, modules of ``-m``, files that programs imply."""
        for piece in self._pieces:
            before = ""
            for word in piece.words:
                for each in self._expand(word) if piece.shell else (word,):
                    yield from split_word(each)
                yield from IMPLICIT.get(program_name(word), ())
                if (module := MODULE.fullmatch(before)) and not module[1]:
                    yield from module_files(word)
                elif (module := MODULE.fullmatch(word)) and module[1]:
                    yield from module_files(module[1])
                before = word

    def _expand(self, word: str) -> Iterator[str]:
        """Yield what a word of shell text stands for: braces and the home directory. Patterns are kept for later."""
        for each in expand_braces(word):
            if PATTERN.search(each):
                self._patterns[each] = None
            yield each
            if each.startswith("~/"):
                yield self._command.env.get("HOME", "~") + each[1:]

    def look(self, place: str, name: str) -> list[str]:
        """Note what a name in a directory stands for; return the path if it is a directory of the workspace."""
        raw = os.path.join(self._base, place, name)
        plain = os.path.normpath(raw)
        # For the kernel a/.. is the directory above the target of a link; for cd in bash it is the one that has a.
        paths = (raw, plain) if ".." in name else (plain,)
        return [found for path in paths if (found := self._look_up(path, plain)) is not None]

    def _look_up(self, path: str, plain: str) -> str | None:
        self._lookups += 1
        try:
            facts = os.stat(path)
        except (OSError, ValueError):
            return None
        whole = os.path.realpath(path)
        named = self._relative(plain if os.path.realpath(plain) == whole else path)
        real = self._relative(whole)
        if os.path.isabs(named) and os.path.isabs(real):
            return None
        if named != real:
            self._links[named] = real
        if stat.S_ISDIR(facts.st_mode):
            self._directories[real] = None
            return None if os.path.isabs(real) else named
        if os.path.isabs(real):
            self._notes[f"the content of {real}, outside of the workspace"] = None
        elif stat.S_ISREG(facts.st_mode):
            self._files[real] = facts.st_size
        else:
            self._notes[f"what {named} gives: it is no regular file"] = None
        return None

    def _relative(self, path: str) -> str:
        """Return the path relative to the root; an absolute one if it is outside."""
        if path == self._base:
            return "."
        above = self._base.rstrip(os.sep) + os.sep
        return path.removeprefix(above).replace(os.sep, "/") if path.startswith(above) else path

    # --- patterns ---

    def _match_patterns(self, place: str) -> Iterator[str]:
        """Yield the names that the patterns stand for now, without their last slash."""
        for pattern in self._patterns:
            found = [""]
            for part in pattern.replace("[^", "[!").split("/"):
                if PATTERN.search(part):
                    found = [f"{above}{name}/" for above in found for name in self._list(place, above, part)]
                else:
                    found = [f"{above}{part}/" for above in found]
            yield from (name.rstrip("/") for name in found)

    def _list(self, place: str, above: str, part: str) -> list[str]:
        """Return the entries of a directory of the workspace that match one part of a pattern."""
        path = os.path.normpath(os.path.join(self._base, place, above))
        if os.path.isabs(self._relative(path)):
            return []
        try:
            with os.scandir(path) as entries:
                names = [entry.name for entry in islice(entries, max(0, MOST_LOOKUPS - self._lookups))]
        except (OSError, ValueError):
            return []
        self._lookups += len(names) + 1
        hidden = part.startswith(".")
        return sorted(n for n in names if n.startswith(".") <= hidden and fnmatch.fnmatchcase(n, part))

    # --- contents ---

    def _hash_files(self) -> dict[str, str]:
        """Return the versions of all files, smallest first, so that a large one does not keep out a script."""
        versions = {name: f"leads to {real}" for name, real in self._links.items()}
        left, large, unread = MOST_BYTES, list[str](), list[str]()
        for name, size in sorted(self._files.items(), key=lambda item: (item[1], item[0])):
            if size > left:
                large.append(name)
                versions[name] = self._describe_large(name, size)
                continue
            left -= size
            try:
                digest = self._root.hash_file(name)
            except ToolError:
                unread.append(name)
                versions[name] = "cannot be read: not bound"
                continue
            if digest is not None:
                versions[name] = f"sha256:{digest}"
        if large:
            self._notes[f"the content of {_enumerate(large)}: too large to compare"] = None
        if unread:
            self._notes[f"the content of {_enumerate(unread)}: cannot be read"] = None
        return versions

    def _describe_large(self, name: str, size: int) -> str:
        try:
            changed = os.stat(self._root.path / name).st_mtime_ns
        except OSError:
            changed = 0
        return f"not compared by content: {size} bytes, changed at {changed}"

    # --- what is not bound ---

    def _add_notes(self) -> None:
        if self._is_full():
            self._notes["files that were not looked up, because the command names too many"] = None
        if self._analysis.unread:
            self._notes[f"files that a part of the command names which was not read: {self._analysis.unread}"] = None
        if self._computes():
            self._notes["files whose names the command computes when it runs"] = None
        if self._patterns:
            self._notes[f"files that the pattern {_enumerate(self._patterns)} matches later"] = None
        if self._directories:
            self._notes[f"files in {_enumerate(self._directories)} that the command does not name"] = None
        if not self._runs_more():
            return
        self._notes["files that the scripts and programs read, source or start without the command naming them"] = None
        modules = [name for name in self._files if name.endswith(".py")]
        if modules:
            self._notes[f"Python modules beside {_enumerate(modules)}"] = None
        elif "python" in self._started():
            self._notes["Python modules in the directory in which the command starts"] = None

    def _started(self) -> set[str]:
        return {program_name(piece.words[at]) for piece in self._pieces for at in piece.starts}

    def _computes(self) -> bool:
        shell = (word for piece in self._pieces if piece.shell for word in piece.words)
        return any(is_computed(word) for word in shell) or bool(self._started() & COMPUTING)

    def _runs_more(self) -> bool:
        """Return whether something that the command starts may use files that it does not name."""
        started = self._started()
        if started & RUNNERS or (self._files and started - PLAIN):
            return True
        return any(has_code(piece, at) for piece in self._pieces for at in piece.starts)


def _analyse(command: Command) -> Analysis:
    return analyse_command(command.text) if command.words is None else analyse_words(command.words)


def _shorten(versions: dict[str, str]) -> dict[str, str]:
    """Return the versions by path; of very many, one hash for those that are not shown."""
    ordered = [(storable_text(name), storable_text(version)) for name, version in sorted(versions.items())]
    shown: dict[str, str] = {}
    for name, version in ordered[:MOST_SHOWN]:  # two names may be written alike
        shown[name] = f"{shown[name]}, {version}" if name in shown else version
    if rest := ordered[MOST_SHOWN:]:
        digest = hashlib.sha256(msgspec.json.encode(rest)).hexdigest()
        shown["..."] = f"{len(rest)} more files, compared by one hash: sha256:{digest}"
    return shown


def _enumerate(names: Iterable[str], most: int = 5) -> str:
    every = [name if len(name) <= 80 else f"{name[:77]}..." for name in names]
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join("the workspace" if name == "." else name for name in every[:most]) + more
