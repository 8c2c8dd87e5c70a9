"""Rules: which calls of the workspace tools run, ask or are denied. They are data, and checked when they are loaded.

A rule is for paths (``path``, file tools) or for commands (``argv``, bash). Of all rules that match, the strictest
wins, whatever their order. The two kinds of effects match differently, each to the safe side:

- *allow* matches exactly: the literal words of a command, the path as written.
- *ask* and *deny* match generously: every place in a command where a program may start, names without case, and
  everything beneath a directory that matches.

Own code for the globs, because the standard ``fnmatch`` lets ``*`` match ``/``, and libraries for .gitignore files have
negation and one way of matching only.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import re
import tomllib
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, NoReturn, cast, get_args

import msgspec

from holdfast.errors import DeclarationError
from holdfast.workspace.policy.analysis import (
    INTERPRETERS,
    PACKAGE_MANAGERS,
    WRAPPERS,
    Analysis,
    Piece,
    Start,
    analyse_command,
    analyse_words,
    program_name,
)
from holdfast.workspace.policy.harmless import TABLES, Reading, find_reading

__all__ = ["EFFECTS", "TOOLS", "Effect", "Rule", "RuleSet", "Source", "narrow", "remember_command"]

Effect = Literal["allow", "ask", "deny"]
EFFECTS: tuple[Effect, ...] = get_args(Effect)
"""From the loosest to the strictest."""
TOOLS = ("read", "write", "edit", "apply_patch", "grep", "glob", "list")
"""The tools that a rule with a path may name; "*" is all of these, and words of bash commands that are paths."""
WRITERS = ("write", "edit", "apply_patch")
"""Ask and deny rules for ``write`` bind all of these. Allow rules do not: a patch can also delete and move files."""
ONE, REST = "*", "**"
MOST_OPTIONS = 32
"""Words between a program and its subcommand that may be options and their values."""

Token = str | tuple[str, ...]
Example = str | tuple[str, ...]


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One rule. ``RuleSet.load`` makes rules from dicts and files, and checks them."""

    tool: str
    """"bash", the name of a file tool, or "*" for all file tools."""
    effect: Effect
    argv: tuple[Token, ...] = ()
    """For bash: a token for each word of the command."""
    path: str = ""
    """For file tools: a glob relative to the workspace."""
    note: str = ""
    """For people: why there is this rule."""
    expires: datetime | None = None
    """The rule does not match from this time on."""
    match: tuple[Example, ...] = ()
    """Examples that the rule matches."""
    not_match: tuple[Example, ...] = ()
    """Examples that it does not match."""

    def __str__(self) -> str:
        what = self.path if self.path else json.dumps(self.argv, ensure_ascii=False)
        return f"{self.effect} {self.tool} {what}"

    @property
    def has_wildcard(self) -> bool:
        return ONE in self.argv or REST in self.argv

    def is_live(self, now: datetime) -> bool:
        return self.expires is None or now < self.expires

    def matches_path(self, path: str) -> bool:
        """Return whether the rule matches a path relative to the root (``Root.normalise``)."""
        if not self.path:
            return False
        if path == ".":
            return self.path.strip("/") == REST
        if self.effect == "allow":
            return _match_glob(self.path, path)
        parts = _fold(path).split("/")
        beneath = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
        return any(_match_glob(pattern, each) for pattern in _widen(_fold(self.path)) for each in beneath)

    def matches_command(self, command: Analysis) -> bool:
        """Return whether the rule matches a command: its literal words (allow), or any start in it (ask, deny)."""
        if not self.argv:
            return False
        if self.effect != "allow":
            return any(_match_start(self.argv, piece, at) for piece, at in self._find_starts(command))
        if command.words is None or not _match_argv(self.argv, command.words):
            return False
        return not self.has_wildcard or isinstance(find_reading(command.words), Reading)

    def _find_starts(self, command: Analysis) -> Iterable[Start]:
        """Return the starts of the programs that the first token names."""
        first = self.argv[0]
        if first in (ONE, REST):
            return [start for starts in command.starts.values() for start in starts]
        names = {name.casefold() for name in ([first] if isinstance(first, str) else first)}
        return [start for name in names for start in command.starts.get(name, ())]


class RuleSet(msgspec.Struct, frozen=True, dict=True):
    """Rules that apply together. Their order has no meaning."""

    rules: tuple[Rule, ...] = ()

    @classmethod
    def load(cls, source: Source = ()) -> RuleSet:
        """Return checked rules from dicts, or from a JSON or TOML file.

        Raises DeclarationError, and loads no rule at all, if one is malformed, unsafe, or contradicted by its own
        examples.
        """
        if isinstance(source, RuleSet):
            return source
        if isinstance(source, str | Path):
            return cls(_read_rules(_read_file(Path(source)), f"{source}: "))
        return cls(_read_rules(source, ""))

    @cached_property
    def hash(self) -> str:
        """The SHA-256 of the rules as canonical JSON. The order of the rules does not change it."""
        texts = sorted(_canonical(rule) for rule in self.rules)
        return hashlib.sha256(f"[{','.join(texts)}]".encode()).hexdigest()

    def match_path(self, tools: Iterable[str], path: str, now: datetime) -> Rule | None:
        """Return the strictest rule that matches a path for any of the tools; None if no rule does."""
        named = {*tools, ONE}
        writes = not named.isdisjoint(WRITERS)
        return _strictest(
            rule for rule in self._live(now) if _is_for(rule, named, writes=writes) and rule.matches_path(path)
        )

    def match_command(self, command: Analysis | str, now: datetime) -> Rule | None:
        """Return the strictest rule that matches a command; None if no rule does."""
        command = analyse_command(command) if isinstance(command, str) else command
        return _strictest(rule for rule in self._live(now) if rule.matches_command(command))

    def restricts(self, tools: Iterable[str], now: datetime) -> bool:
        """Return whether any rule for one of the tools asks or denies."""
        named = set(tools)
        return any(rule.effect != "allow" and rule.tool in named for rule in self._live(now))

    def name(self, rule: Rule) -> str:
        """Return how people find a rule: its number in the file, and its note or its pattern."""
        return f"rule {self.rules.index(rule) + 1} ({rule.note or str(rule):.120})"

    def _live(self, now: datetime) -> Iterable[Rule]:
        return (rule for rule in self.rules if rule.is_live(now))


Source = RuleSet | str | Path | Iterable[Mapping[str, Any] | Rule]
"""Rules, the path of a rule file, or rules as dicts."""


def narrow(parent: RuleSet, child: RuleSet) -> RuleSet:
    """Return the rules of a child (a sub-agent), which may only narrow those of its parent.

    The child's asks and denies are added. Its allows count only where the parent's rules allow, too, and there they
    change nothing: so they are left out.
    """
    return RuleSet(parent.rules + tuple(rule for rule in child.rules if rule.effect != "allow"))


def remember_command(words: Sequence[str], *, note: str = "", expires: datetime | None = None) -> RuleSet:
    """Return an allow rule for exactly this argument list: nothing longer, shorter or wrapped."""
    exact = [[word] if word in (ONE, REST) else word for word in words]  # alternatives are never wildcards
    rule: dict[str, Any] = {"tool": "bash", "argv": exact, "effect": "allow"}
    return RuleSet.load([rule | ({"note": note} if note else {}) | ({"expires": expires} if expires else {})])


def _strictest(rules: Iterable[Rule]) -> Rule | None:
    """Return the strictest rule; of several that allow a command, one with exact words, to which no doubts apply."""
    return max(rules, key=lambda rule: (EFFECTS.index(rule.effect), not rule.has_wildcard), default=None)


def _canonical(rule: Rule) -> str:
    plain = msgspec.to_builtins(rule)
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


# Matching


def _is_for(rule: Rule, tools: set[str], *, writes: bool) -> bool:
    return rule.tool in tools or (writes and rule.tool == "write" and rule.effect != "allow")


def _match_token(token: Token, word: str) -> bool:
    if isinstance(token, tuple):
        return word in token
    return token in (ONE, word)


def _match_argv(argv: Sequence[Token], words: Sequence[str]) -> bool:
    if argv and argv[-1] == REST:
        argv, words = argv[:-1], words[: len(argv) - 1]
    return len(argv) == len(words) and all(map(_match_token, argv, words))


def _match_start(argv: Sequence[Token], piece: Piece, at: int) -> bool:
    """Return whether the words of a piece match from a position on. The first token has been compared by name.

    Words that follow do not matter in shell text, where they may vanish (``$EMPTY``) or be a comment, and behind a
    wrapper, where they may be its own (``find -exec CMD ;``). Options of the program may stand before the other tokens,
    with values that are not known here: ``git -C docs push``.
    """
    longer = argv[-1] == REST or piece.shell or at > 0
    tokens = argv[1:] if argv[-1] != REST else argv[1:-1]
    first = at + 1
    has_options = first < len(piece.words) and piece.words[first].startswith("-")
    places = range(first, min(len(piece.words), first + MOST_OPTIONS)) if has_options else (first,)
    return any(_match_tokens(tokens, piece.words, place, longer=longer) for place in places)


def _match_tokens(tokens: Sequence[Token], words: Sequence[str], place: int, *, longer: bool) -> bool:
    left = len(words) - place
    if left < len(tokens) or (left > len(tokens) and not longer):
        return False
    return all(_match_token(token, words[place + index]) for index, token in enumerate(tokens))


def _fold(path: str) -> str:
    """Return a path without case and in one Unicode form: file systems may treat the variants as one file."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())


def _widen(pattern: str) -> list[str]:
    """Return the patterns of an ask or deny rule: ``dir/**`` and ``dir/`` also mean the directory itself."""
    if pattern.endswith("/"):
        return [pattern, pattern.rstrip("/")]
    if pattern.endswith("/**") and pattern != "/**":
        return [pattern, "/" + pattern.removeprefix("/").removesuffix("/**")]
    return [pattern]


def _match_glob(pattern: str, path: str) -> bool:
    """Return whether a gitignore-like glob matches a whole path."""
    segments = pattern.strip("/").split("/")
    if len(segments) == 1 and not pattern.startswith("/") and segments[0] != REST:
        segments = [REST, *segments]  # a bare name, at any depth
    if pattern.endswith("/"):
        segments = [*segments, REST]
    parts = path.split("/")
    # reached[i]: the segments so far match the first i parts. Linear in both: no backtracking on many "**".
    reached = [True] + [False] * len(parts)
    for at, segment in enumerate(segments):
        if segment == REST:
            least = 1 if at == len(segments) - 1 else 0  # a final ** is at least one name
            first = reached.index(True) if True in reached else len(reached)
            reached = [index >= first + least for index in range(len(reached))]
        else:
            fits = _compile_segment(segment)
            reached = [False] + [reached[index] and bool(fits(part)) for index, part in enumerate(parts)]
    return reached[-1]


@lru_cache(maxsize=4096)
def _compile_segment(segment: str) -> Callable[[str], re.Match[str] | None]:
    return re.compile(fnmatch.translate(segment)).match


# Loading


def _refuse(where: str, why: str) -> NoReturn:
    raise DeclarationError(f"{where}{why}. No rule was loaded")


def _read_file(path: Path) -> Iterable[Any]:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            data: Any = tomllib.loads(text)
        elif path.suffix == ".json":
            data = json.loads(text, object_pairs_hook=_refuse_repeated)
        else:
            _refuse(f"{path}: ", "a rule file is named *.json or *.toml")
    except OSError as error:
        _refuse(f"{path}: ", f"cannot be read: {error.strerror}")
    except ValueError as error:
        if isinstance(error, DeclarationError):
            raise
        _refuse(f"{path}: ", f"cannot be parsed: {error}")
    if isinstance(data, dict):
        fields = cast("dict[str, Any]", data)
        if list(fields) != ["rules"]:
            _refuse(f"{path}: ", f'a rule file has the one key "rules", not {sorted(fields)}')
        data = fields["rules"]
    if not isinstance(data, list):
        _refuse(f"{path}: ", "rules must be a list")
    return cast("list[Any]", data)


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError(f"a key is repeated among {[key for key, _ in pairs]}")
    return made


def _read_rules(source: Iterable[Any], where: str) -> tuple[Rule, ...]:
    if isinstance(source, Mapping):
        _refuse(where, "rules must be a list of rules, not a single one")
    return tuple(_read_rule(given, f"{where}rule {number}") for number, given in enumerate(source, 1))


def _read_rule(given: Any, where: str) -> Rule:
    if isinstance(given, Rule):
        given = {key: value for key, value in msgspec.structs.asdict(given).items() if value not in ("", (), None)}
    if not isinstance(given, Mapping):
        _refuse(where, f" must be a dict, not {given!r:.80}")
    fields = dict(cast("Mapping[str, Any]", given))
    if unknown := sorted(set(fields) - set(Rule.__struct_fields__)):
        _refuse(where, f" has unknown keys {unknown}; the keys are {', '.join(Rule.__struct_fields__)}")
    rule = Rule(
        tool=_read_tool(fields, where),
        effect=_read_effect(fields.get("effect"), where),
        argv=_read_argv(fields["argv"], where) if "argv" in fields else (),
        path=_read_path(fields["path"], where) if "path" in fields else "",
        note=_read_text(fields.get("note", ""), "note", where),
        expires=_read_expires(fields.get("expires"), where),
        match=_read_examples(fields, "match", where),
        not_match=_read_examples(fields, "not_match", where),
    )
    _refuse_unsafe_allow(rule, f"{where} ({rule})")
    _check_examples(rule, f"{where} ({rule})")
    return rule


def _read_tool(fields: Mapping[str, Any], where: str) -> str:
    tool = fields.get("tool")
    if tool != "bash" and tool != ONE and tool not in TOOLS:
        _refuse(where, f': tool={tool!r:.80} must be "bash", "*" or one of {", ".join(TOOLS)}')
    needed, other = ("argv", "path") if tool == "bash" else ("path", "argv")
    if needed not in fields or other in fields:
        _refuse(where, f": a rule for {tool!r} has {needed!r} and not {other!r}")
    return cast("str", tool)


def _read_effect(given: Any, where: str) -> Effect:
    if given not in EFFECTS:
        _refuse(where, f": effect={given!r:.80} must be one of {', '.join(EFFECTS)}")
    return given


def _read_text(given: Any, key: str, where: str) -> str:
    if not isinstance(given, str) or "\0" in given:
        _refuse(where, f": {key} must be text, not {given!r:.80}")
    return given


def _read_argv(given: Any, where: str) -> tuple[Token, ...]:
    if not isinstance(given, list | tuple) or not given:
        _refuse(where, f': argv must be a list of words such as ["git", "status"], not {given!r:.80}')
    tokens = [_read_token(each, where) for each in cast("Sequence[Any]", given)]
    if REST in tokens[:-1]:
        _refuse(where, ': "**" may only be the last token of argv')
    return tuple(tokens)


def _read_token(given: Any, where: str) -> Token:
    if isinstance(given, str):
        return _read_text(given, "argv", where)
    if not isinstance(given, list | tuple) or not given:
        _refuse(where, f": a token of argv is a word or a list of alternatives, not {given!r:.80}")
    return tuple(_read_text(each, "an alternative of argv", where) for each in cast("Sequence[Any]", given))


def _read_path(given: Any, where: str) -> str:
    pattern = _read_text(given, "path", where)
    parts = pattern.removeprefix("/").removesuffix("/").split("/")
    if pattern.startswith("!"):
        _refuse(where, f': path={pattern!r} begins with "!"; write a second rule with another effect instead')
    if "\\" in pattern:
        _refuse(where, f': path={pattern!r} contains a backslash; separate names with "/"')
    if not parts[0] or any(part in ("", ".", "..") for part in parts):
        _refuse(where, f": path={pattern!r} must be a glob relative to the workspace, without empty names, . and ..")
    if any(REST in part and part != REST for part in parts):
        _refuse(where, f': path={pattern!r}: "**" must be a whole name, as in "src/**"')
    return pattern


def _read_expires(given: Any, where: str) -> datetime | None:
    when: Any = given
    if isinstance(given, str):
        try:
            when = datetime.fromisoformat(given)
        except ValueError:
            when = given
    if when is None or (isinstance(when, datetime) and when.tzinfo is not None):
        return when
    _refuse(where, f": expires={given!r:.80} must be a time with its zone, such as 2027-01-31T12:00:00Z")


def _read_examples(fields: Mapping[str, Any], key: str, where: str) -> tuple[Example, ...]:
    given = fields.get(key, ())
    if not isinstance(given, list | tuple):
        _refuse(where, f": {key} must be a list of examples, not {given!r:.80}")
    return tuple(_read_example(each, key, fields["tool"] == "bash", where) for each in cast("Sequence[Any]", given))


def _read_example(given: Any, key: str, is_command: bool, where: str) -> Example:
    if isinstance(given, str):
        return _read_text(given, key, where)
    if not is_command or not isinstance(given, list | tuple) or not given:
        _refuse(where, f": an example of {key} is a command, a list of words or a path, not {given!r:.80}")
    return tuple(_read_text(each, key, where) for each in cast("Sequence[Any]", given))


# Checks


def _refuse_unsafe_allow(rule: Rule, where: str) -> None:
    """Refuse an allow rule that covers more than its author can know."""
    if rule.effect != "allow" or not rule.argv or not rule.has_wildcard:
        return
    first = rule.argv[0]
    for name in first if isinstance(first, tuple) else (first,):
        bare = program_name(name)
        if name in (ONE, REST) and isinstance(first, str):
            _refuse(where, f": allow cannot begin with {name!r}: name the program")
        for kind, names in _NEVER:
            if bare in names:
                _refuse(where, f': {bare!r} is {kind}: allow exact words, without "*" and "**"')
        if name not in TABLES and name != "find":
            _refuse(
                where,
                f': {name!r} has no table of harmless flags, so "*" and "**" would allow flags that write or run '
                "programs: allow exact words, or lists of alternatives",
            )


_NEVER = (
    ("an interpreter, which runs the code in its arguments", INTERPRETERS),
    ("a wrapper, which runs the command in its arguments", WRAPPERS - {"find"}),
    ("a package manager, which runs the code of packages", PACKAGE_MANAGERS),
)


def _check_examples(rule: Rule, where: str) -> None:
    for key, wanted in (("match", True), ("not_match", False)):
        for example in getattr(rule, key):
            if _matches_example(rule, example) is not wanted:
                did = "does not match it" if wanted else "matches it"
                _refuse(where, f": the example {_show(example)} is in {key}, but the rule {did}")


def _matches_example(rule: Rule, example: Example) -> bool:
    if rule.path:
        return rule.matches_path(cast("str", example).removeprefix("./"))
    if isinstance(example, str):
        return rule.matches_command(analyse_command(example))
    return rule.matches_command(analyse_words(example))


def _show(example: Example) -> str:
    return json.dumps(example, ensure_ascii=False)
