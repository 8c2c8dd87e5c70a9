"""The commands that this program prints for users to copy into another terminal."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any, cast

from holdfast.cli.input.values import JSON, resolve_reference
from holdfast.cli.render.text import escape_control_characters, value_text
from holdfast.core.decisions import Pending

DEFAULT_STORE = "sqlite:///holdfast.db"
DEMO_STORE = "sqlite:///holdfast-demo.db"
DEMO_CONVERSATION = "demo"
"""The default conversation of the demo."""
MEMORY_STORE = "memory:"
MAX_CHOICES = 5
"""The most choices for which each gets its own command; above that, one command is an example for all."""
DIGEST_CHARS = 16
PASSWORD_URL = re.compile(r"postgres(ql)?://([^/?@]*:[^/?]*@|.*[?&](ssl)?password=)")
"""A store's URL with a password in it."""


def program() -> str:
    """Return the words that start this program: ``holdfast`` if the PATH finds it, else its path."""
    called = os.path.abspath(sys.argv[0]) if sys.argv and sys.argv[0] else ""
    found = shutil.which("holdfast")
    if found and (_same_file(found, called) or os.path.dirname(os.path.realpath(found)) == _bin()):
        return "holdfast"
    if os.path.basename(called) == "holdfast" and os.access(called, os.X_OK):
        return shlex.quote(_relative_path(called))
    return f"{shlex.quote(_relative_path(sys.executable))} -m holdfast"


def _bin() -> str:
    return os.path.realpath(os.path.dirname(sys.executable))


def _same_file(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _relative_path(path: str) -> str:
    """Return the path relative to the current directory if it lies below it."""
    here = os.getcwd()
    return os.path.relpath(path, here) if path.startswith(here + os.sep) else path


class CommandWriter:
    """Formats commands for one store."""

    def __init__(self, store: str):
        self._program = program()
        self._url = store
        self._store = ["--store", store] if store != DEFAULT_STORE else []
        self._secret = PASSWORD_URL.match(store) is not None

    def format_command(self, *words: str) -> str:
        return self._format_words(*words, *self._store)

    def _format_words(self, *words: str) -> str:
        return escape_control_characters(" ".join([self._program, *map(self._quote, words)]))

    def _quote(self, word: str) -> str:
        # Passwords stay off the screen and out of logs.
        return '"$HOLDFAST_STORE"' if self._secret and word == self._url else shlex.quote(word)

    def continue_command(self, named: Sequence[str] | None, conversation: str) -> str:
        """Return the command that continues a conversation; ``named`` are the words that name the agent."""
        return self.format_command("run", *(named or ("MODULE:AGENT",)), "--conversation", conversation)

    def pending_command(self, conversation: str) -> str:
        return self.format_command("pending", "--conversation", conversation)

    def demo_command(self, conversation: str) -> str:
        """Return the command that starts the demo again; it continues an open conversation."""
        other = [] if conversation == DEMO_CONVERSATION else ["--conversation", conversation]
        other += [] if self._url == DEMO_STORE else ["--store", self._url]
        return "make demo" if os.environ.get("MAKELEVEL") and not other else self._format_words("demo", *other)

    def answer_commands(self, entry: Pending, others: Iterable[Pending] = ()) -> list[str]:
        """Return the commands that answer this entry; ``others``, all pending entries, tell if its id is unique."""
        if self._store[1:] == [MEMORY_STORE]:
            return []  # no other process can answer
        call = _call_name(entry, others)
        if entry.starts_at is not None:
            return [self.format_command("take-back", call)]
        deny = self.format_command("deny", call, "--reason", "why not")
        match entry.kind:
            case "approval":
                shown_plan = ["--digest", entry.digest[:DIGEST_CHARS]] if has_preview(entry) or entry.recovery else []
                yes = self.format_command("approve", call, *shown_plan)
                if entry.recovery:
                    return [
                        yes,
                        self.format_command("submit", call, "--json", '"what it returned"'),
                        self.format_command("deny", call),
                    ]
                return [yes, deny]
            case "elicitation":
                return [*(self.format_command("answer", call, *words) for words in _examples(entry)), deny]
            case "client_exec" | "manual":
                return [
                    self.format_command("submit", call, "--json", json.dumps(_example(entry.schema, entry.schema))),
                    self.format_command("submit", call, "--error", "command_failed", "--message", "what went wrong"),
                ]


def has_preview(entry: Pending) -> bool:
    """Return whether the tool declares a preview, which shows more than its arguments."""
    if entry.kind != "approval" or entry.recovery or entry.preview_error is not None:
        return False
    return entry.preview != {"tool": entry.tool, "args": entry.args}


def _call_name(entry: Pending, others: Iterable[Pending]) -> str:
    alone = all(other.conversation == entry.conversation or other.call != entry.call for other in others)
    return entry.call if alone else f"{entry.conversation}/{entry.call}"


def known_answers(entry: Pending) -> list[Any] | None:
    """Return the possible values of an answer, if the schema lists them."""
    if entry.choices is not None:
        return entry.choices
    plain = resolve_reference(entry.schema, entry.schema)
    if isinstance(plain.get("enum"), list):
        return cast("list[Any]", plain["enum"])
    if plain.get("type") == "boolean":
        return [True, False]
    return None


def _examples(entry: Pending) -> list[list[str]]:
    """Return the words after ``holdfast answer CALL``, one list for each command."""
    known = known_answers(entry)
    if known is not None:
        return [_answer_words(value) for value in (known if len(known) <= MAX_CHOICES else known[:1])]
    plain = resolve_reference(entry.schema, entry.schema)
    properties = plain.get("properties")
    if plain.get("type") == "object" and isinstance(properties, dict):
        words: list[str] = []
        needed = cast("list[str]", plain.get("required") or [])
        fields = cast("JSON", properties)
        for name in needed or list(fields)[:1]:
            value = _example(fields.get(name), entry.schema)
            words += ["--set", f"{name}={value_text(value)}"]
        return [words or ["--json", "{}"]]
    return [_answer_words(_example(entry.schema, entry.schema))]


def _answer_words(value: Any) -> list[str]:
    """Return the words for one value: as JSON if it has invisible characters or looks like an option."""
    text = value_text(value)
    if not text or text.startswith("-") or escape_control_characters(text) != text or isinstance(value, dict | list):
        return ["--json", json.dumps(value)]
    return [text]


def _example(schema: Any, root: Any, depth: int = 4) -> Any:
    """Return an example value that fits the schema."""
    plain = resolve_reference(schema, root)
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
