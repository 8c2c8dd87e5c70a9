"""The guides for contributors name files, functions and commands that exist."""

from __future__ import annotations

import re
import typing
from pathlib import Path

import pytest

from holdfast.core import decisions, events, live, state
from holdfast.tools.options import OPTIONS

ROOT = Path(__file__).parent.parent.parent
GUIDES = ("ARCHITECTURE.md", "CONTRIBUTING.md")
LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]+)(?:#[^)]*)?\)")
FUNCTION = re.compile(r"`(?:\w+\.)?(\w+)`")


def links(guide: str) -> list[tuple[str, str]]:
    """Return (label, path) of every link of the guide that leads to a file of the repository."""
    return [(label, path) for label, path in LINK.findall((ROOT / guide).read_text()) if "://" not in path]


@pytest.mark.parametrize("guide", GUIDES)
def test_every_path_that_a_guide_links_exists(guide: str) -> None:
    assert links(guide)
    assert [path for _, path in links(guide) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("guide", GUIDES)
def test_every_function_that_a_guide_links_is_defined_in_that_file(guide: str) -> None:
    missing: list[str] = []
    for label, path in links(guide):
        name = FUNCTION.fullmatch(label)
        if name is None or not path.endswith(".py"):
            continue
        if not re.search(rf"(?m)^\s*(async def|def|class) {name[1]}\b", (ROOT / path).read_text()):
            missing.append(f"{label} in {path}")
    assert missing == []


@pytest.mark.parametrize("guide", GUIDES)
def test_every_path_in_code_font_that_begins_at_the_root_exists(guide: str) -> None:
    named = re.findall(r"`((?:src|tests|docs|scripts|bench|examples)/[\w./-]+)`", (ROOT / guide).read_text())
    assert [path for path in named if path != "src/holdfast/bridges/" and not (ROOT / path).exists()] == []


def test_the_page_of_stable_names_has_every_event_state_and_option_of_the_code() -> None:
    text = (ROOT / "docs" / "concepts" / "stable-names.md").read_text()
    names = {
        *(event.__name__ for event in typing.get_args(events.AnyEvent)),
        *(str(item.__struct_config__.tag) for item in typing.get_args(live.AnyLive)),
        *typing.get_args(state.Phase),
        *typing.get_args(state.Status),
        *decisions.ALLOWED_DECISIONS,
        *OPTIONS,
    }
    assert sorted(name for name in names if f"`{name}`" not in text) == []


def test_every_test_that_a_concept_page_names_exists() -> None:
    named = {
        name
        for page in (ROOT / "docs" / "concepts").glob("*.md")
        for name in re.findall(r"`(test_\w+)`", page.read_text())
    }
    code = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert named
    assert sorted(name for name in named if f"def {name}(" not in code) == []
