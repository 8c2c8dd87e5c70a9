"""The site builds with no network and every link in it leads somewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import typing
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import click
import pytest

import assent
from assent import models
from assent.cli.main import cli
from assent.core import events, live, machine
from assent.core.state import Phase
from assent.core.tool import LEGAL
from assent.errors import KINDS

ROOT = Path(__file__).parent.parent.parent


class Links(HTMLParser):
    """What a page has, loads and points at."""

    def __init__(self, text: str):
        super().__init__()
        self.ids: set[str] = set()
        self.loads: list[str] = []
        self.points: list[str] = []
        self.tagged: list[dict[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        has = dict(attrs)
        self.tagged.append(has)
        if has.get("id"):
            self.ids.add(str(has["id"]))
        for name in ("src", "srcset", "data", "poster"):
            if has.get(name) and tag != "meta":
                self.loads.append(str(has[name]))
        if tag == "link" and has.get("href"):
            self.loads.append(str(has["href"]))
        if tag == "a" and has.get("href"):
            self.points.append(str(has["href"]))


def start_build(root: Path, site: Path) -> subprocess.Popen[str]:
    nowhere = "http://127.0.0.1:9"  # whoever asks for something finds nobody there
    env = {**os.environ, "http_proxy": nowhere, "https_proxy": nowhere, "all_proxy": nowhere}
    command = [sys.executable, str(root / "scripts" / "docs"), "build", str(site)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


Built = tuple[int, str]


@pytest.fixture(scope="session")
def builds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Built, Built]:
    """The site, and one with a broken link, built at the same time."""
    place = tmp_path_factory.mktemp("docs")
    for part in ("docs", "scripts"):
        shutil.copytree(ROOT / part, place / "broken" / part)
    for part in ("mkdocs.yml", "pyproject.toml"):
        shutil.copy(ROOT / part, place / "broken" / part)
    with (place / "broken" / "docs" / "index.md").open("a") as index:
        index.write("\n[nowhere](nowhere.md)\n")
    whole, broken = start_build(ROOT, place / "site"), start_build(place / "broken", place / "broken-site")
    (said, _), (complained, _) = whole.communicate(timeout=60), broken.communicate(timeout=60)
    return place / "site", (whole.returncode, said), (broken.returncode, complained)


@pytest.fixture(scope="session")
def site(builds: tuple[Path, Built, Built]) -> Path:
    place, (code, said), _ = builds
    assert code == 0, said
    return place


@pytest.fixture(scope="session")
def pages(site: Path) -> dict[Path, Links]:
    return {page: Links(page.read_text()) for page in site.rglob("*.html") if page.name != "404.html"}


def test_every_error_kind_has_a_page_that_says_when_and_what_to_do(site: Path) -> None:
    for kind, meaning in KINDS.items():
        page = (site / "errors" / kind / "index.html").read_text()
        for part in (meaning[1:20], "When it comes.", "What to do."):
            assert part in page, kind
        assert f"errors/{kind}.md" in (site / "llms.txt").read_text()


def test_every_public_name_stands_in_the_reference(site: Path, pages: dict[Path, Links]) -> None:
    assert pages[site / "reference" / "python" / "index.html"].ids >= set(assent.__all__)


def test_every_command_stands_in_the_reference_with_its_help(site: Path, pages: dict[Path, Links]) -> None:
    context = click.Context(cli)
    wanted = {f"assent-{name}" for name in cli.list_commands(context)}
    assert pages[site / "reference" / "cli" / "index.html"].ids >= wanted
    assert "--remember" in (site / "reference" / "cli.md").read_text()


def test_every_event_stands_in_the_reference_with_its_fields(site: Path, pages: dict[Path, Links]) -> None:
    names = {event.__name__ for event in typing.get_args(events.AnyEvent)}
    assert pages[site / "reference" / "events" / "index.html"].ids >= names
    text = (site / "reference" / "events.md").read_text()
    for live_event in typing.get_args(live.AnyLive):
        assert f"Class `{live_event.__name__}`" in text
    for event in typing.get_args(events.AnyEvent):
        section = text.split(f"### `{event.__name__}`")[1].split("###")[0]
        own = set(event.__struct_fields__) - set(events.Event.__struct_fields__)
        assert {field for field in own if f"| `{field}` |" not in section} == set(), event.__name__


def test_every_name_that_a_model_needs_stands_in_the_reference(site: Path, pages: dict[Path, Links]) -> None:
    known = pages[site / "reference" / "models" / "index.html"].ids | set(assent.__all__)
    assert known >= set(models.__all__)


def test_the_state_diagram_has_every_phase_and_every_transition(site: Path, pages: dict[Path, Links]) -> None:
    drawn = pages[site / "concepts" / "states" / "index.html"].tagged
    assert {tag["data-phase"] for tag in drawn if "data-phase" in tag} == set(typing.get_args(Phase))
    moves = [(tag["data-from"] or None, tag["data-by"], tag["data-to"]) for tag in drawn if "data-by" in tag]
    assert sorted(moves, key=str) == sorted(machine.TRANSITIONS, key=str)


def test_the_legal_matrix_says_why_not(site: Path) -> None:
    text = (site / "concepts" / "two-axes.md").read_text()
    assert "<!-- generated" not in text
    for reason in filter(None, LEGAL.values()):
        assert reason in text


def test_no_page_needs_another_host(site: Path, pages: dict[Path, Links]) -> None:
    for page, links in pages.items():
        assert [each for each in links.loads if urlsplit(each).netloc] == [], page
        assert [each for each in links.points if urlsplit(each).netloc] == [], page
    for style in site.rglob("*.css"):
        assert not re.search(r"@import|url\(\s*[\"']?(https?:)?//", style.read_text()), style


def test_links_lead_somewhere_also_when_read_from_the_disk(site: Path, pages: dict[Path, Links]) -> None:
    for page, links in pages.items():
        for link in {*links.points, *links.loads}:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            assert target.is_file(), f"{page.relative_to(site)} -> {link}"
            if parts.fragment and target.suffix == ".html":
                assert unquote(parts.fragment) in pages[target].ids, f"{page.relative_to(site)} -> {link}"


def test_llms_txt_lists_every_page_in_one_line_each(site: Path) -> None:
    text = (site / "llms.txt").read_text()
    assert text.startswith("# Assent\n\n> ")
    listed = re.findall(r"(?m)^- \[[^\]]+\]\(([^)]+)\): \S", text)
    assert sorted(listed) == sorted(page.relative_to(site).as_posix() for page in site.rglob("*.md"))


def test_a_broken_link_fails_the_build_and_is_named(builds: tuple[Path, Built, Built]) -> None:
    _, _, (code, said) = builds
    assert code != 0
    assert "nowhere.md" in said
