"""The snippets of the documentation run and print the output that the pages show."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE

import pytest

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
RUNNER = Path(__file__).parent / "run_page.py"
ON_POSTGRES = ("howto/run-on-postgres.md",)
"""Pages that need a PostgreSQL server; they may leave processes running."""
TESTED_ELSEWHERE = {
    "howto/test-your-agent-under-crashes.md": "tests/testing/test_howto.py",
    "coming-from/langgraph.md": "tests/coming_from/test_coming_from.py",
    "coming-from/openai-agents.md": "tests/coming_from/test_coming_from.py",
    "coming-from/pydantic-ai.md": "tests/coming_from/test_coming_from.py",
    "coming-from/vercel-ai-sdk.md": "tests/coming_from/test_coming_from.py",
}
"""Pages whose snippets have a test of their own."""


def runs_something(page: Path) -> bool:
    text = page.read_text()
    return "```python" in text or "```sh run" in text


PAGES = sorted(
    name
    for page in DOCS.rglob("*.md")
    if runs_something(page) and (name := page.relative_to(DOCS).as_posix()) not in TESTED_ELSEWHERE
)
Run = subprocess.CompletedProcess[str]
ENVIRONMENT = dict(os.environ)
"""A copy: pages run in threads, and pytest changes a variable of ``os.environ`` for each test."""


def postgres() -> dict[str, str]:
    """Return the variables by which libpq and Holdfast find the tests' server."""
    from support import pg

    found = pg.server()
    return {"PGHOST": str(found.home), "PGPORT": str(found.port), "PGUSER": "postgres", "PATH": str(found.programs)}


def run_page(page: Path, place: Path, more: dict[str, str] | None = None) -> Run:
    env = {name: value for name, value in ENVIRONMENT.items() if not name.startswith("HOLDFAST")}
    env |= {"LOGNAME": "you", "COLUMNS": "80", "PYTHONUTF8": "1", "NO_COLOR": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    path = [str(Path(sys.executable).parent), *([more.pop("PATH")] if more else []), env.get("PATH", os.defpath)]
    env |= {"PATH": os.pathsep.join(path), **(more or {})}
    command = [sys.executable, "-W", "error", str(RUNNER), str(page)]
    with subprocess.Popen(
        command, cwd=place, env=env, stdout=PIPE, stderr=PIPE, text=True, start_new_session=True
    ) as ran:
        try:
            out, err = ran.communicate(timeout=300)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(ran.pid, signal.SIGKILL)  # also ends the processes that the page started
    return Run(command, ran.returncode, out, err)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Run]]]:
    """The runs of all pages, each in its own process and folder, a few at a time."""
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        yield {
            name: pool.submit(
                run_page, DOCS / name, tmp_path_factory.mktemp("page"), postgres() if name in ON_POSTGRES else None
            )
            for name in PAGES
        }


@pytest.mark.parametrize("name", PAGES)
def test_the_snippets_of_a_page_run_and_print_the_output_that_it_shows(name: str, runs: dict[str, Future[Run]]) -> None:
    ran = runs[name].result()
    assert ran.returncode == 0, ran.stderr + ran.stdout
    assert int(ran.stdout.split()[-1]) > 0, "the page shows no output"


def test_pages_without_a_run_here_are_named_in_another_test() -> None:
    for page, test in TESTED_ELSEWHERE.items():
        if (DOCS / page).exists():
            assert Path(page).stem in (ROOT / test).read_text()


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("```python\nprint(1)\n```\n\n```text\n2\n```\n", "x.md:5: the page shows"),
        ("```python\n1 / 0\n```\n", "ZeroDivisionError"),
        ("```sh run\nexit 3\n```\n", "exits with 3"),
        ("```text\nhello\n```\n", "follows nothing that runs"),
    ],
)
def test_a_page_whose_snippets_fail_or_print_other_output_is_reported(page: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.md").write_text(page)
    ran = run_page(tmp_path / "x.md", tmp_path)
    assert ran.returncode == 1
    assert message in ran.stderr


def test_dots_match_any_text_and_a_marked_block_is_not_run(tmp_path: Path) -> None:
    page = "```python\nprint('a', 1, 'b')\n```\n\n```text\na ... b\n```\n\n<!-- not run -->\n```python\n1 / 0\n```\n"
    (tmp_path / "x.md").write_text(page)
    ran = run_page(tmp_path / "x.md", tmp_path)
    assert (ran.returncode, ran.stdout.strip()) == (0, "1"), ran.stderr
