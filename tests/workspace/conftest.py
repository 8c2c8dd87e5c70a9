"""Helpers for the tests of the workspace: a tree, and the file tools on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from holdfast.core.tool import Result
from holdfast.tools.call import Call
from holdfast.workspace.files.beneath import KernelOpener, Opener, PortableOpener, WalkOpener, open_root
from holdfast.workspace.files.root import Root
from holdfast.workspace.files.tools import Seen, file_tools
from holdfast.workspace.limits import Limits

OPENERS: dict[str, type[Opener]] = {"kernel": KernelOpener, "walk": WalkOpener, "portable": PortableOpener}


class FixedRuling(NamedTuple):
    effect: str
    reason: str = "fixed for the test"


class FixedPolicy:
    """A policy that rules the same on every path, and remembers what it was asked."""

    def __init__(self, effect: str = "allow"):
        self.ruling = FixedRuling(effect)
        self.asked: list[tuple[str, list[str], bool]] = []

    def judge_paths(self, tool: str, paths: Sequence[str], *, writes: bool) -> FixedRuling:
        self.asked.append((tool, list(paths), writes))
        return self.ruling


class FileTools:
    """The file tools on a directory, and short ways to call them."""

    def __init__(self, path: Path, *, effect: str = "allow", limits: Limits | None = None, **options: Any):
        self.path = path
        self.root = Root(path, **options)
        self.limits, self.seen, self.policy = limits or Limits(), Seen(), FixedPolicy(effect)
        self.tools = {tool.spec.name: tool for tool in file_tools(self)}

    def approval(self, judge: Callable[[dict[str, Any], Call], Any]) -> Callable[[dict[str, Any], Call], Any]:
        def decide(args: dict[str, Any], call: Call) -> str:
            return {"allow": "auto"}.get(judge(args, call).effect, "required")

        return decide

    async def run(self, tool: str, call: Any = None, **args: Any) -> Any:
        """Run a tool's handler; return what the model sees."""
        return (await self.result(tool, call, **args)).output

    async def result(self, tool: str, call: Any = None, **args: Any) -> Result:
        return await self.tools[tool].handler(args, call or Call(tool=tool))

    async def plan(self, tool: str, call: Any = None, **args: Any) -> Any:
        return await self.tools[tool].planner(args, call or Call(tool=tool, dry_run=True))

    async def recover(self, tool: str, call: Any = None, **args: Any) -> Any:
        return await self.tools[tool].reconciler(args, call or Call(tool=tool, attempt=2))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A root with a few files, beside a directory that must not be reached."""
    root = tmp_path / "root"
    (root / "src").mkdir(parents=True)
    (root / "a.txt").write_bytes(b"one\ntwo\nthree\n")
    (root / "src" / "app.py").write_bytes(b"def main():\n    return 1\n")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_bytes(b"outside")
    (tmp_path / "root-sibling").mkdir()
    (tmp_path / "root-sibling" / "secret.txt").write_bytes(b"outside")
    return root


@pytest.fixture
def files(tree: Path) -> FileTools:
    return FileTools(tree)


def make_root(path: Path, opener: str, **options: Any) -> Root:
    """Return a root that opens paths in one of the three ways."""
    root = Root(path, opener=OPENERS[opener](), **options)
    if opener == "portable":  # as on a system without descriptors of directories
        root._directory.close()
        root._directory = type(open_root(str(path)))(".", base=str(root.path))
    return root


def snapshot(path: Path) -> dict[str, Any]:
    """Return every entry below a directory with its mode and content (or a link's target)."""
    found: dict[str, Any] = {}
    for name in sorted(path.rglob("*")):
        key = str(name.relative_to(path))
        if name.is_symlink():
            found[key] = os.readlink(name)
        elif name.is_file():
            found[key] = (name.stat().st_mode & 0o7777, name.read_bytes())
        else:
            found[key] = "directory" if name.is_dir() else "special"
    return found
