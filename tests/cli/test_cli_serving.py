"""What ``assent serve`` tells whoever starts it, and what its page of the documentation promises."""

import asyncio
import os
import re
import socket
import sys
from pathlib import Path

import httpx
import pytest

from assent import Runtime
from assent.cli.loading import load_agent
from assent.cli.serve import abroad, open_browser
from assent.server import app

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.5", "::1", "localhost"])
def test_nothing_is_said_of_others_where_only_this_machine_reaches_it(host):
    assert abroad(host, 8642, ()) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_who_listens_everywhere_is_told_how_others_reach_it_and_who_reads_along(host):
    where, name, token = abroad(host, 8642, ())
    assert "http://ADDRESS:8642/" in where
    assert f"--allow-host {socket.gethostname()}" in name
    assert "no TLS" in token
    assert len(abroad(host, 8642, ("*",))) == 2


def test_who_listens_at_one_address_of_the_network_is_told_who_reads_along():
    assert "no TLS" in abroad("192.0.2.1", 8642, ())[-1]
    assert "no TLS" in abroad("desk.example", 8642, ())[-1]


@pytest.mark.parametrize(("code", "told"), [(0, ""), (3, "no browser could be opened: open the address yourself\n")])
def test_whoever_opens_the_page_is_not_heard_and_it_is_told_if_there_is_no_browser(
    tmp_path, monkeypatch, capfd, code, told
):
    program = tmp_path / ("open" if sys.platform == "darwin" else "xdg-open")
    program.write_text(f"#!/bin/sh\necho noise; echo noise >&2; echo $1 > {tmp_path}/opened; exit {code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    asyncio.run(open_browser("http://127.0.0.1:1/"))
    assert (tmp_path / "opened").read_text() == "http://127.0.0.1:1/\n"
    assert capfd.readouterr() == (told, "")


def test_without_a_program_that_opens_pages_it_is_told(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PATH", str(tmp_path))
    asyncio.run(open_browser("http://127.0.0.1:1/"))
    assert "open the address yourself" in capfd.readouterr().out


def test_the_page_about_serving_shows_the_reply_that_its_commands_get():
    shown = re.search(r"# (\{.*\}): durable", (ROOT / "docs" / "howto" / "serve.md").read_text())[1]

    async def followed():
        async with Runtime(load_agent(f"{ROOT}/examples/hello.py:agent")) as runtime:
            served = app(runtime)
            http = httpx.AsyncClient(
                transport=httpx.ASGITransport(served),
                base_url="http://127.0.0.1",
                headers={"authorization": f"Bearer {served.auth.token}"},
            )
            await http.post("/api/conversations", json={"id": "tea"})
            said = {"text": "Tell Ada that the build is green"}
            assert (await http.post("/api/conversations/tea/messages", json=said)).status_code == 202
            while not (waits := await runtime.pending()):
                await asyncio.sleep(0.01)
            yes = {"decision": {"type": "approve", "digest": waits[0].digest}}
            told = await http.post(f"/api/conversations/tea/calls/{waits[0].call}/resolve", json=yes)
            again = (await http.post("/api/conversations", json={"id": "tea"})).json()
            never = (await http.post("/api/conversations/tea/calls/never/resolve", json=yes)).json()
            await http.aclose()
            return told.text, again, never

    told, again, never = asyncio.run(followed())
    assert told == shown
    assert (again["status"], again["kind"], again["title"]) == (409, "conflict", "there is one of that name already")
    assert (never["status"], never["kind"]) == (404, "stale")
    assert never["title"] == "the thing that was named does not exist"
