"""The site builds without a network, is complete, and every link in it has a target."""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import sys
import typing
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import click
import pytest

import holdfast
import holdfast.events
from holdfast import hooks, models, server, testing, workspace
from holdfast.cli.app import cli
from holdfast.core import events, live
from holdfast.core.decide import machine
from holdfast.core.state import Phase
from holdfast.core.tool import PAIR_RULES
from holdfast.errors import KINDS

ROOT = Path(__file__).parent.parent.parent


class Links(HTMLParser):
    """The ids of a page, the files that it loads, and its links."""

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


def start_build(root: Path) -> subprocess.Popen[str]:
    """Start the command of `make docs` in a folder that has the site's sources."""
    nowhere = "http://127.0.0.1:9"  # every request to the network fails
    env = {**os.environ, "http_proxy": nowhere, "https_proxy": nowhere, "all_proxy": nowhere, "PYTHONPATH": "scripts"}
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    return subprocess.Popen(command, cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


Built = tuple[int, str]


@pytest.fixture(scope="session")
def builds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Built, Built]:
    """The site, and a small one with a broken link, built at the same time."""
    place = tmp_path_factory.mktemp("docs")
    for name in ("whole", "broken"):
        (place / name).mkdir()
        for part in ("scripts", "src"):
            (place / name / part).symlink_to(ROOT / part)
    shutil.copytree(ROOT / "docs", place / "whole" / "docs")
    shutil.copy(ROOT / "mkdocs.yml", place / "whole" / "mkdocs.yml")
    (place / "broken" / "docs").mkdir()
    (place / "broken" / "docs" / "index.md").write_text("# Home\n\n[nowhere](nowhere.md)\n")
    (place / "broken" / "mkdocs.yml").write_text("site_name: Broken\n")
    whole, broken = start_build(place / "whole"), start_build(place / "broken")
    (output, _), (broken_output, _) = whole.communicate(timeout=600), broken.communicate(timeout=600)
    return place / "whole" / "site", (whole.returncode, output), (broken.returncode, broken_output)


@pytest.fixture(scope="session")
def site(builds: tuple[Path, Built, Built]) -> Path:
    place, (code, output), _ = builds
    assert code == 0, output
    return place


@pytest.fixture(scope="session")
def pages(site: Path) -> dict[Path, Links]:
    return {page: Links(page.read_text()) for page in site.rglob("*.html") if page.name != "404.html"}


def section(site: Path, page: str, anchor: str) -> str:
    """Return the text of a reference page from a heading's anchor to the next heading of the same level."""
    text = (site / "reference" / f"{page}.html").read_text()
    found = re.search(rf'<h(\d) id="{re.escape(anchor)}".*?(?=<h\1|</article>)', text, re.S)
    assert found is not None, anchor
    return re.sub(r"<[^>]+>", "", found[0])


def test_every_error_kind_has_a_section_that_says_when_and_what_to_do(site: Path) -> None:
    for kind, meaning in KINDS.items():
        text = section(site, "errors", kind)
        for part in (meaning[1:20], "When it happens.", "What to do."):
            assert part in text, kind


@pytest.mark.parametrize(
    ("page", "module"),
    [
        ("python", holdfast), ("events", holdfast.events), ("hooks", hooks), ("models", models), ("server", server),
        ("testing", testing), ("workspace", workspace),
    ],
)  # fmt: skip
def test_every_public_name_is_in_the_reference(
    page: str, module: ModuleType, site: Path, pages: dict[Path, Links]
) -> None:
    shown = pages[site / "reference" / f"{page}.html"].ids
    exported = {name for name in module.__all__ if getattr(holdfast, name, None) is not getattr(module, name)}
    wanted = set(holdfast.__all__) if module is holdfast else exported
    assert {name for name in wanted if f"{module.__name__}.{name}" not in shown} == set()


def test_a_name_of_the_reference_has_its_signature_and_the_text_of_its_docstring(site: Path) -> None:
    approve = " ".join(section(site, "python", "holdfast.Approve").split())
    assert "Approve( args: dict[str, Any] | None = None, digest: str | None = None," in approve
    assert "Let the call run." in approve
    assert "the digest that was shown: the approval is refused as superseded if it has changed" in approve
    resolve = " ".join(section(site, "python", "holdfast.Runtime.resolve").split())
    assert "resolve( conversation: str, call: str, decision: Decision" in resolve


def test_every_command_is_in_the_reference_with_its_help(site: Path, pages: dict[Path, Links]) -> None:
    context = click.Context(cli)
    wanted = {f"holdfast-{name}" for name in cli.list_commands(context)}
    assert pages[site / "reference" / "cli.html"].ids >= wanted
    assert "--remember" in section(site, "cli", "holdfast-approve")


def test_every_event_is_in_the_reference_with_its_fields(site: Path) -> None:
    for event in (*typing.get_args(events.AnyEvent), *typing.get_args(live.AnyLive)):
        text = section(site, "events", f"holdfast.events.{event.__name__}")
        assert [field for field in event.__struct_fields__ if f"{field}:" not in text] == [], event.__name__


def test_the_state_diagram_has_every_phase_and_every_transition(site: Path, pages: dict[Path, Links]) -> None:
    drawn = pages[site / "concepts" / "states.html"].tagged
    assert {tag["data-phase"] for tag in drawn if "data-phase" in tag} == set(typing.get_args(Phase))
    moves = [(tag["data-from"] or None, tag["data-by"], tag["data-to"]) for tag in drawn if "data-by" in tag]
    assert sorted(moves, key=str) == sorted(machine.TRANSITIONS, key=str)


def test_the_table_of_legal_pairs_has_the_reason_of_every_refusal(site: Path) -> None:
    text = html.unescape((site / "concepts" / "two-axes.html").read_text())
    for reason in filter(None, PAIR_RULES.values()):
        assert reason in text


def test_every_marker_of_a_generated_part_is_replaced(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert "<!-- generated" not in page.read_text(), page


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r"[\w./-]+\.md", (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1])
    assert sorted(listed) == sorted(
        page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")
    )


def test_no_page_loads_from_or_links_to_another_host(site: Path, pages: dict[Path, Links]) -> None:
    for page, links in pages.items():
        assert [each for each in links.loads if urlsplit(each).netloc] == [], page
        assert [each for each in links.points if urlsplit(each).netloc] == [], page
    for style in site.rglob("*.css"):
        assert not re.search(r"@import|url\(\s*[\"']?(https?:)?//", style.read_text()), style


def test_every_link_leads_to_an_existing_file_and_anchor(site: Path, pages: dict[Path, Links]) -> None:
    for page, links in pages.items():
        for link in {*links.points, *links.loads}:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            assert target.is_file(), f"{page.relative_to(site)} -> {link}"
            if parts.fragment and target.suffix == ".html":
                assert unquote(parts.fragment) in pages[target].ids, f"{page.relative_to(site)} -> {link}"


def test_a_broken_link_fails_the_build_and_is_named(builds: tuple[Path, Built, Built]) -> None:
    _, _, (code, output) = builds
    assert code != 0
    assert "nowhere.md" in re.sub(r"\x1b\[[0-9;]*m", "", output)
