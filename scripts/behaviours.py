#!/usr/bin/env python3
"""Write into docs/behaviours.md, below each behaviour, the tests that show it. Usage: scripts/behaviours.py [--check]

A test shows a behaviour if the docstring of the test, or of its class or module, names its number: ``[B27]`` or, for
several, ``[B27, B30]`` and ``B47-B51``. With --check nothing is written: the exit code is 1 if the page is out of date.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "behaviours.md"
TESTS = ROOT / "tests"
BEHAVIOUR = re.compile(r"(?m)^- \*\*B(\d+)\*\* .+$")
GENERATED = re.compile(r"(?m)^    <details>.*\n?|^\n(?=    <details>)")
NAMED = re.compile(r"\bB(\d{1,3})(?:\s*(?:-|to)\s*B(\d{1,3}))?\b")
MAX_LISTED = 12
"""Test names shown per behaviour and file; the rest is a number."""

Shown = dict[int, dict[str, list[str]]]
"""Behaviour -> test file -> names of tests; an empty list: the whole file."""


def numbers_in(text: str) -> list[int]:
    """Return the numbers of the behaviours that a docstring names, ranges expanded."""
    found: dict[int, None] = {}
    for first, last in NAMED.findall(text):
        found |= dict.fromkeys(range(int(first), int(last or first) + 1))
    return list(found)


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, docstring) of a test file's module (empty name), test classes and test functions."""
    tree = ast.parse(path.read_text())
    yield "", ast.get_docstring(tree) or ""
    for node in ast.walk(tree):
        is_test = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")
        if is_test or (isinstance(node, ast.ClassDef) and node.name.startswith("Test")):
            yield node.name, ast.get_docstring(node) or ""


def find_tests() -> Shown:
    """Return the tests that show each behaviour, in the order of files and lines."""
    shown: Shown = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        name = path.relative_to(ROOT).as_posix()
        for test, text in docstrings(path):
            for number in numbers_in(text):
                tests = shown.setdefault(number, {}).setdefault(name, [])
                if test and test not in tests:
                    tests.append(test)
    return shown


def numbers_on(page: str) -> list[int]:
    """Return the numbers of the behaviours that the page lists."""
    return [int(number) for number in BEHAVIOUR.findall(page)]


def format_tests(files: dict[str, list[str]]) -> str:
    """Return the tests of one behaviour as a folded list, on one line."""
    items: list[str] = []
    for name, tests in files.items():
        listed = [f"<code>{test}</code>" for test in tests[:MAX_LISTED]]
        if len(tests) > MAX_LISTED:
            listed.append(f"{len(tests) - MAX_LISTED} more")
        items.append(f"<li><code>{name}</code>{': ' if listed else ''}{', '.join(listed)}</li>")
    count = sum(max(len(tests), 1) for tests in files.values())
    summary = f"{count} test{'s' if count != 1 else ''} in {len(files)} file{'s' if len(files) != 1 else ''}"
    return f"    <details><summary>{summary}</summary><ul>{''.join(items)}</ul></details>"


def render(page: str, shown: Shown) -> str:
    """Return the page with the lists of tests as they are now."""

    def with_tests(found: re.Match[str]) -> str:
        files = shown.get(int(found[1]))
        return f"{found[0]}\n\n{format_tests(files)}" if files else found[0]

    return BEHAVIOUR.sub(with_tests, GENERATED.sub("", page))


def main(words: list[str]) -> int:
    if words not in ([], ["--check"]):
        print(__doc__)
        return 2
    page, shown = PAGE.read_text(), find_tests()
    if unknown := sorted(set(shown) - set(numbers_on(page))):
        print(f"docs/behaviours.md has no {', '.join(f'B{number}' for number in unknown)}, which tests name")
        return 1
    rendered = render(page, shown)
    if rendered == page:
        return 0
    if words:
        print("docs/behaviours.md is out of date: run python scripts/behaviours.py")
        return 1
    PAGE.write_text(rendered)
    print("wrote docs/behaviours.md")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
