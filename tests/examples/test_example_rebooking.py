"""examples/rebooking.py: a quote is shown, and charged once after a yes, whichever process continues."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from support.programs import EXAMPLES, LIMIT_SECONDS, environment, run_command

WAITING = 75


def run_agent(folder: Path) -> None:
    """Run the agent until it asks; the process has ended when this returns."""
    shutil.copy(EXAMPLES / "rebooking.py", folder)
    words = ("run", "rebooking:agent", "--conversation", "trip", "--no-wait", "Move booking 7 to Sunday")
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", *words], cwd=folder, env=environment(), timeout=LIMIT_SECONDS
    )
    assert done.returncode == WAITING


def pending(folder: Path) -> dict[str, object]:
    (line,) = run_command("holdfast", "pending", "--json", cwd=folder).splitlines()
    return json.loads(line)


def answer(folder: Path, *words: str) -> str:
    return run_command("holdfast", "answer", str(pending(folder)["call"]), *words, cwd=folder)


def test_the_quote_that_was_shown_is_charged_once_by_a_process_that_did_not_ask(tmp_path: Path) -> None:
    """Each answer is recorded by a process of its own, and the call continues in another one [B108]."""
    run_agent(tmp_path)
    first = pending(tmp_path)
    assert first["prompt"] == "Moving booking 7 to Sunday costs 40 euros. Go ahead?"
    answer(tmp_path, "yes")  # no process runs the agent: the answer waits in the log
    code = (tmp_path / "rebooking.py").read_text()
    (tmp_path / "rebooking.py").write_text(code.replace("return 40 if", "return 99 if"))  # the quote has changed
    again = subprocess.run(
        [sys.executable, "-m", "holdfast", "run", "rebooking:agent", "--conversation", "trip", "--no-wait"],
        cwd=tmp_path,
        env=environment(),
        timeout=LIMIT_SECONDS,
        capture_output=True,
        text=True,
    )
    assert again.returncode == WAITING, again.stdout + again.stderr
    assert "rebook continues" in again.stdout + again.stderr
    second = pending(tmp_path)
    assert (second["call"], second["prompt"]) == (first["call"], "How do you want to pay?")
    assert second["seq"] != first["seq"]
    assert not (tmp_path / "payments.jsonl").exists()
    said = answer(tmp_path, "invoice", "--resume", "rebooking:agent")
    assert "Booking 7 is on Sunday." in said
    paid = [json.loads(line) for line in (tmp_path / "payments.jsonl").read_text().splitlines()]
    assert paid == [{"key": f"trip/{first['call']}", "fee": 40, "way": "invoice"}]


def test_nothing_is_charged_after_a_no(tmp_path: Path) -> None:
    """The handler continues with the no, and ends without a payment [B108]."""
    run_agent(tmp_path)
    answer(tmp_path, "no", "--resume", "rebooking:agent")
    log = run_command("holdfast", "log", "trip", cwd=tmp_path)
    assert "the passenger does not agree to the fee" in log
    assert not (tmp_path / "payments.jsonl").exists()
