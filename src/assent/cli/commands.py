"""The exact commands that answer a waiting call, as somebody types them in another terminal."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any, cast

from assent.cli.text import shown, value_text
from assent.cli.values import JSON, resolved
from assent.core.decisions import Pending

DEFAULT_STORE = "sqlite:///assent.db"
DEMO_STORE = "sqlite:///assent-demo.db"
DEMO = "demo"
"""The demo's conversation, unless it is told another."""
MEMORY = "memory:"
CHOICES = 5
"""So many answers are spelled out; with more, the card lists them and one command stands for all."""
DIGEST = 16
PASSWORD = re.compile(r"postgres(ql)?://([^/?@]*:[^/?]*@|.*[?&](ssl)?password=)")
"""A store's URL with a password in it."""


def program() -> str:
    """How this program is called here: ``assent`` where that finds us, else the path that does."""
    called = os.path.abspath(sys.argv[0]) if sys.argv and sys.argv[0] else ""
    found = shutil.which("assent")
    if found and (_same(found, called) or os.path.dirname(os.path.realpath(found)) == _bin()):
        return "assent"
    if os.path.basename(called) == "assent" and os.access(called, os.X_OK):
        return shlex.quote(_near(called))
    return f"{shlex.quote(_near(sys.executable))} -m assent"


def _bin() -> str:
    return os.path.realpath(os.path.dirname(sys.executable))


def _same(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _near(path: str) -> str:
    """Relative where it lies below the current directory: shorter to read."""
    here = os.getcwd()
    return os.path.relpath(path, here) if path.startswith(here + os.sep) else path


class Commands:
    """Writes commands for one store."""

    def __init__(self, store: str):
        self._program = program()
        self._url = store
        self._store = ["--store", store] if store != DEFAULT_STORE else []
        self._secret = PASSWORD.match(store) is not None

    def write(self, *words: str) -> str:
        return self._line(*words, *self._store)

    def _line(self, *words: str) -> str:
        return shown(" ".join([self._program, *map(self._quoted, words)]))

    def _quoted(self, word: str) -> str:
        # A password is not shown to whoever looks over a shoulder, or into a log.
        return '"$ASSENT_STORE"' if self._secret and word == self._url else shlex.quote(word)

    def go_on(self, named: Sequence[str] | None, conversation: str) -> str:
        """``named``: the words that name the agent."""
        return self.write("run", *(named or ("MODULE:AGENT",)), "--conversation", conversation)

    def pending(self, conversation: str) -> str:
        return self.write("pending", "--conversation", conversation)

    def demo(self, conversation: str) -> str:
        """The demo again, as it was started: it finds what is open by itself."""
        other = [] if conversation == DEMO else ["--conversation", conversation]
        other += [] if self._url == DEMO_STORE else ["--store", self._url]
        return "make demo" if os.environ.get("MAKELEVEL") and not other else self._line("demo", *other)

    def answers(self, entry: Pending, others: Iterable[Pending] = ()) -> list[str]:
        """Every way to answer this entry; ``others`` is all that waits, to tell whether its id is enough."""
        if self._store[1:] == [MEMORY]:
            return []  # nobody else can ever see it
        call = _name(entry, others)
        deny = self.write("deny", call, "--reason", "why not")
        match entry.kind:
            case "approval":
                shown_plan = ["--digest", entry.digest[:DIGEST]] if planned(entry) or entry.recovery else []
                yes = self.write("approve", call, *shown_plan)
                if entry.recovery:
                    return [yes, self.write("submit", call, "--json", '"what it returned"'), self.write("deny", call)]
                return [yes, deny]
            case "elicitation":
                return [*(self.write("answer", call, *words) for words in _examples(entry)), deny]
            case "client_exec" | "manual":
                return [
                    self.write("submit", call, "--json", json.dumps(_example(entry.schema, entry.schema))),
                    self.write("submit", call, "--error", "command_failed", "--message", "what went wrong"),
                ]


def planned(entry: Pending) -> bool:
    """It has a preview of its own, which says more than its arguments do."""
    plain = {"tool": entry.tool, "args": entry.args}
    return not entry.recovery and entry.preview is not None and entry.preview != plain


def _name(entry: Pending, others: Iterable[Pending]) -> str:
    alone = all(other.conversation == entry.conversation or other.call != entry.call for other in others)
    return entry.call if alone else f"{entry.conversation}/{entry.call}"


def options(entry: Pending) -> list[Any] | None:
    """The values that an answer can have, where they are few and known."""
    if entry.choices is not None:
        return entry.choices
    plain = resolved(entry.schema, entry.schema)
    if isinstance(plain.get("enum"), list):
        return cast("list[Any]", plain["enum"])
    if plain.get("type") == "boolean":
        return [True, False]
    return None


def _examples(entry: Pending) -> list[list[str]]:
    """The words after ``assent answer CALL``, one list a command."""
    known = options(entry)
    if known is not None:
        return [_spelled(value) for value in (known if len(known) <= CHOICES else known[:1])]
    plain = resolved(entry.schema, entry.schema)
    properties = plain.get("properties")
    if plain.get("type") == "object" and isinstance(properties, dict):
        words: list[str] = []
        needed = cast("list[str]", plain.get("required") or [])
        fields = cast("JSON", properties)
        for name in needed or list(fields)[:1]:
            value = _example(fields.get(name), entry.schema)
            words += ["--set", f"{name}={value_text(value)}"]
        return [words or ["--json", "{}"]]
    return [_spelled(_example(entry.schema, entry.schema))]


def _spelled(value: Any) -> list[str]:
    """One value as words; as JSON where it would not survive being looked at, or could be an option."""
    text = value_text(value)
    if not text or text.startswith("-") or shown(text) != text or isinstance(value, dict | list):
        return ["--json", json.dumps(value)]
    return [text]


def _example(schema: Any, root: Any, depth: int = 4) -> Any:
    """Something of the right shape."""
    plain = resolved(schema, root)
    if plain.get("enum"):
        return plain["enum"][0]
    if "const" in plain:
        return plain["const"]
    if "default" in plain:
        return plain["default"]
    for word in ("anyOf", "oneOf"):
        if plain.get(word) and depth:
            return _example(plain[word][0], root, depth - 1)
    kind: Any = plain.get("type")
    if isinstance(kind, list):
        kind = next(iter(cast("list[Any]", kind)), None)
    match kind:
        case "integer":
            return 1
        case "number":
            return 1.5
        case "boolean":
            return True
        case "null":
            return None
        case "array":
            return [_example(plain.get("items"), root, depth - 1)] if depth and "items" in plain else []
        case "object":
            fields = cast("JSON", plain.get("properties") or {})
            needed = cast("list[str]", plain.get("required") or [])
            return {name: _example(fields.get(name), root, depth - 1) for name in needed} if depth else {}
        case _:
            return "TEXT"
