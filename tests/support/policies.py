"""Policies of the workspace for tests: a root and a sandbox that only answer questions, and rules as random data."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from hypothesis import strategies as st

from holdfast.errors import ToolError
from holdfast.workspace.policy.policy import PROGRAM_PATH, Mode, Policy
from holdfast.workspace.policy.rules import RuleSet

NOW = datetime(2027, 1, 1, tzinfo=UTC)


@dataclass
class FakeRoot:
    """The questions that a policy asks its root; paths are resolved as text."""

    path: Path

    def normalise(self, path: str) -> str:
        if not path or "\0" in path:
            raise ToolError("invalid_args", "no path")
        whole = posixpath.normpath(posixpath.join(self.path.as_posix(), path))
        name = posixpath.relpath(whole, self.path.as_posix())
        if name == ".." or name.startswith("../"):
            raise ToolError("outside_workspace", f"{path} is outside")
        return name

    def is_protected(self, path: str) -> bool:
        return path.casefold().startswith((".env", ".git/hooks"))


@dataclass
class FakeGuarantees:
    write: bool = True
    read: bool = True
    net_tcp: bool = True
    net_udp: bool = True
    pids: bool = True
    env: bool = True
    protected: bool = True


@dataclass
class FakeSandbox:
    level: str = "A"
    guarantees: FakeGuarantees = field(default_factory=FakeGuarantees)


def make_policy(
    root: Path,
    mode: Mode = "ask",
    rules: RuleSet | Iterable[Any] = (),
    *,
    sandbox: str | FakeSandbox = "A",
    path: str = PROGRAM_PATH,
    now: datetime = NOW,
) -> Policy:
    """Return a policy at a fixed time, with a sandbox of a level."""
    held = cast("Any", FakeSandbox(sandbox) if isinstance(sandbox, str) else sandbox)
    return Policy(mode, RuleSet.load(rules), cast("Any", FakeRoot(root)), held, path=path, now=lambda: now)


# Random rules and calls over few words, so that rules often match.

WORDS = st.sampled_from(["git", "make", "ls", "rm", "status", "push", "test", "-l", "a.md", "src", "/etc"])
READERS = st.sampled_from([["ls", "**"], ["ls", "*"], ["ls", "/etc"], ["ls", "*", "**"]])
TOKENS = st.one_of(WORDS, st.just("*"), st.lists(WORDS, min_size=1, max_size=2))
PATHS = st.lists(st.sampled_from(["src", "docs", "a.md", "b.py", "Secret"]), min_size=1, max_size=3).map("/".join)
GLOBS = st.lists(st.sampled_from(["src", "docs", "*", "**", "*.md", "secret", "b.py"]), min_size=1, max_size=3).map(
    "/".join
)
EFFECTS = st.sampled_from(["allow", "ask", "deny"])
FILE_TOOLS = st.sampled_from(["read", "write", "edit", "grep", "*"])
EXPIRES = st.sampled_from([None, "2026-01-01T00:00:00Z", "2028-01-01T00:00:00Z"])
PARTS = st.one_of(WORDS, st.sampled_from(["&&", "|", "env", "sh", "-c", "$x", "'rm x'"]))
COMMANDS = st.one_of(
    st.lists(PARTS, min_size=1, max_size=5), st.sampled_from([["ls", "/etc"], ["ls", "src"], ["ls", "-l", "/etc"]])
)


@st.composite
def one_rule(draw: st.DrawFn, effects: st.SearchStrategy[str] = EFFECTS) -> dict[str, Any]:
    """A rule that is accepted: an allow rule has wildcards only for ls."""
    effect = draw(effects)
    rule: dict[str, Any] = {"effect": effect, "expires": draw(EXPIRES)}
    if draw(st.booleans()):
        return rule | {"tool": draw(FILE_TOOLS), "path": draw(GLOBS)}
    if effect == "allow":
        return rule | {"tool": "bash", "argv": draw(st.one_of(READERS, st.lists(WORDS, min_size=1, max_size=3)))}
    argv = draw(st.lists(TOKENS, min_size=1, max_size=3))
    return rule | {"tool": "bash", "argv": argv + (["**"] if draw(st.booleans()) else [])}


RULES = st.lists(one_rule(), max_size=6)
