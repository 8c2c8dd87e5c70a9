"""examples/email_triage: mails are read once, and a reply is sent only after a person has seen and approved it."""

from __future__ import annotations

import json
import mailbox
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from support.programs import LIMIT_SECONDS, environment, find_free_port, kill, read_to_end, run_command, start

PROGRAM = "email_triage/triage.py"
STORE = "sqlite:///triage.db"


@pytest.fixture
def port(tmp_path: Path) -> Generator[str]:
    """The port of a real SMTP server, which delivers into the folder `sent`."""
    number = find_free_port()
    listen = ["--nosetuid", "--listen", f"127.0.0.1:{number}", "--class", "aiosmtpd.handlers.Mailbox", "sent"]
    server = subprocess.Popen([sys.executable, "-m", "aiosmtpd", *listen], cwd=tmp_path, env=environment())
    try:
        while True:
            assert server.poll() is None, "the mail server has ended"
            try:
                socket.create_connection(("127.0.0.1", number)).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.02)
        yield str(number)
    finally:
        server.terminate()
        server.wait()


def sent(folder: Path) -> list[mailbox.MaildirMessage]:
    return list(mailbox.Maildir(folder / "sent"))


def test_questions_survive_a_kill_and_a_mail_is_sent_once_after_its_approval(tmp_path: Path, port: str) -> None:
    with start(PROGRAM, cwd=tmp_path, SMTP_PORT=port) as first:
        first.expect("1-late-parcel.eml: a reply waits for you")
        first.expect("2-invoice.eml: a reply waits for you")
        first.expect("3-newsletter.eml: A newsletter: it needs no reply.")
        first.expect("for later: ")
        kill(first)
    assert sent(tmp_path) == []
    lines = run_command("holdfast", "pending", "--json", "--store", STORE, cwd=tmp_path).splitlines()
    assert {json.loads(line)["preview"]["To"] for line in lines} == {
        "ada@customers.example",
        "billing@suppliers.example",
    }

    with start(PROGRAM, cwd=tmp_path, SMTP_PORT=port) as second:
        for _ in range(2):
            answer = ["y", "n"][second.expect(["To: ada@customers.example", "To: billing@suppliers.example"])]
            second.expect("for later: ")
            second.sendline(answer)
            second.expect(["Answered: sent to ada@customers.example.", "Not answered: denied"])
        read_to_end(second)
    [mail] = sent(tmp_path)
    assert (mail["From"], mail["To"]) == ("desk@shop.example", "ada@customers.example")
    assert mail["Subject"] == "Re: Where is my parcel?"
    assert mail["In-Reply-To"] == "<late-1@customers.example>"
    assert "Your parcel is on its way and arrives on Friday." in mail.get_payload()

    with start(PROGRAM, cwd=tmp_path, SMTP_PORT=port) as third:
        said = read_to_end(third)
    assert "1-late-parcel.eml: Answered: sent to ada@customers.example." in said
    assert "waits" not in said
    assert len(sent(tmp_path)) == 1


def test_a_reply_can_be_corrected_and_approved_from_another_terminal(tmp_path: Path, port: str) -> None:
    with start(PROGRAM, cwd=tmp_path, SMTP_PORT=port) as first:
        first.expect("for later: ")
        kill(first)
    lines = run_command("holdfast", "pending", "--json", "--store", STORE, cwd=tmp_path).splitlines()
    [ada] = [entry for entry in map(json.loads, lines) if "late-parcel" in entry["args"]["file"]]
    args = json.dumps({"file": ada["args"]["file"], "text": "It arrives today."})
    resume = ["--resume", f"{Path(__file__).parents[2]}/examples/{PROGRAM}:agent", "--store", STORE]
    run_command("holdfast", "approve", ada["call"], "--args", args, *resume, cwd=tmp_path, SMTP_PORT=port)
    [mail] = sent(tmp_path)
    assert mail.get_payload().strip() == "It arrives today."


def test_a_kill_while_a_mail_is_sent_leads_to_a_question_and_not_to_a_second_mail(tmp_path: Path, port: str) -> None:
    silent = socket.create_server(("127.0.0.1", 0))  # accepts connections, and never answers
    silent.settimeout(LIMIT_SECONDS)
    with silent, start(PROGRAM, cwd=tmp_path, SMTP_PORT=str(silent.getsockname()[1])) as first:
        first.expect("for later: ")
        first.sendline("y")
        with silent.accept()[0]:
            kill(first)
    with start(PROGRAM, cwd=tmp_path, SMTP_PORT=port) as second:
        interrupted = 0
        for _ in range(2):
            question = second.expect(["Send this reply", "send_reply was interrupted while it ran"])
            second.expect("for later: ")
            second.sendline("y" if question else "")
            interrupted += question
        read_to_end(second)
    assert interrupted == 1
    assert len(sent(tmp_path)) == 1


def test_without_a_mail_server_the_agent_reports_that_the_reply_was_not_sent(tmp_path: Path) -> None:
    with start(PROGRAM, cwd=tmp_path, SMTP_PORT=str(find_free_port())) as program:
        program.expect("for later: ")
        program.sendline("y")
        program.expect("Not answered: no mail server listens on port")
        program.expect("for later: ")
        program.sendline("")
        read_to_end(program)
