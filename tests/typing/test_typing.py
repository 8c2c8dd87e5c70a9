"""Type checkers see the types of the public API: the programs in ``programs/`` have the errors that they expect.

A program is one file, written as a user would write it. ``# error: pyright=RULE mypy=CODE`` at the end of a line
expects these errors there, several separated by commas; every other line must have none. Both checkers run in strict
mode.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PROGRAMS = sorted((Path(__file__).parent / "programs").glob("*.py"))
PAGE = ROOT / "docs" / "howto" / "types.md"
CHECKERS = ("pyright", "mypy")
EXPECTED = re.compile(r"# error: (.+)$", re.MULTILINE)
FOLLOW_UPS = frozenset(
    {
        "reportUnknownArgumentType",
        "reportUnknownMemberType",
        "reportUnknownVariableType",
        "reportUntypedFunctionDecorator",
        "no-any-return",
        "untyped-decorator",
    }
)
"""Errors that follow from another error of the same line; they are compared only where they are alone."""

Errors = dict[int, set[str]]
"""The rules that are violated, by line."""


def expected_errors(program: Path, checker: str) -> Errors:
    """Return the errors that the comments of a program expect of a checker."""
    expected: Errors = {}
    for number, line in enumerate(program.read_text().splitlines(), 1):
        if found := EXPECTED.search(line):
            rules = dict(each.split("=") for each in found[1].split())
            if unknown := rules.keys() - set(CHECKERS):
                raise ValueError(f"{program.name}:{number}: unknown checkers {unknown}")
            if checker in rules:
                expected[number] = set(rules[checker].split(","))
    return expected


def run_pyright(files: list[Path]) -> dict[str, Errors]:
    """Return what pyright reports, by file name. The files are all those of one folder."""
    config = files[0].parent / "pyrightconfig.json"
    config.write_text(json.dumps({"typeCheckingMode": "strict", "pythonVersion": "3.11"}))
    ran = run_checker("pyright", "--outputjson", "--project", str(config), "--pythonpath", sys.executable)
    report = json.loads(ran)
    assert report["summary"]["filesAnalyzed"] == len(files), report["summary"]
    return group_errors(
        (each["file"], each["range"]["start"]["line"] + 1, each.get("rule", each["message"]))
        for each in report["generalDiagnostics"]
    )


def run_mypy(files: list[Path]) -> dict[str, Errors]:
    """Return what mypy reports, by file name."""
    ran = run_checker("mypy", "--output", "json", *map(str, files))
    reports = [json.loads(line) for line in ran.splitlines()]
    return group_errors(
        (each["file"], each["line"], each["code"] or each["message"]) for each in reports if each["severity"] == "error"
    )


def run_checker(*command: str) -> str:
    """Run a checker; return its output. Exit code 1 means that it found errors, a greater one that it failed."""
    env = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    ran = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, env=env, capture_output=True, text=True)
    assert ran.returncode in (0, 1), ran.stderr + ran.stdout
    return ran.stdout


def group_errors(errors: Iterable[tuple[str, int, str]]) -> dict[str, Errors]:
    """Group (file, line, rule) by file name and line, without follow-ups of other errors."""
    grouped: dict[str, Errors] = defaultdict(lambda: defaultdict(set))
    for file, line, rule in errors:
        grouped[Path(file).name][line].add(rule)
    return {
        file: {line: rules - FOLLOW_UPS or rules for line, rules in lines.items()} for file, lines in grouped.items()
    }


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[dict[str, Errors]]]:
    """Each checker, run once over all programs and the page's code, side by side."""
    place = tmp_path_factory.mktemp("typing")
    page = place / "page_about_types.py"
    page.write_text("\n".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)))
    files = [*(Path(shutil.copy(program, place)) for program in PROGRAMS), page]
    with ThreadPoolExecutor() as pool:
        return {"pyright": pool.submit(run_pyright, files), "mypy": pool.submit(run_mypy, files)}


@pytest.mark.parametrize("checker", CHECKERS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_a_program_has_exactly_the_type_errors_that_it_expects(
    program: Path, checker: str, reports: dict[str, Future[dict[str, Errors]]]
) -> None:
    assert reports[checker].result().get(program.name, {}) == expected_errors(program, checker)


@pytest.mark.parametrize("checker", CHECKERS)
def test_the_page_about_types_has_no_type_errors(checker: str, reports: dict[str, Future[dict[str, Errors]]]) -> None:
    assert "page_about_types.py" not in reports[checker].result()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_a_program_needs_no_cast_and_ignores_no_error(program: Path) -> None:
    assert not re.search(r"\bcast\(|type: *ignore|pyright:|mypy:", program.read_text())


@pytest.mark.parametrize(
    "program", [each for each in PROGRAMS if not EXPECTED.search(each.read_text())], ids=lambda program: program.stem
)
def test_a_program_without_type_errors_also_runs(program: Path) -> None:
    """The declarations that type checkers accept are legal at run time."""
    runpy.run_path(str(program))


def test_the_checkers_report_errors_in_wrong_programs() -> None:
    """A checker that finds nothing would pass every program without expected errors."""
    for checker in CHECKERS:
        assert sum(len(expected_errors(program, checker)) for program in PROGRAMS) > 20


def test_the_package_says_that_it_is_typed() -> None:
    """Without this file type checkers take every name of the package for Any."""
    assert (ROOT / "src" / "holdfast" / "py.typed").is_file()
