"""The notes that ``holdfast serve`` prints, and the commands of its guide."""

import asyncio
import os
import re
import socket
import sys
from pathlib import Path

import httpx
import pytest

from holdfast import Runtime
from holdfast.cli.agents import load_agent
from holdfast.cli.commands.serve import network_notes, open_browser
from holdfast.server import app

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.5", "::1", "localhost"])
def test_no_network_notes_are_printed_for_a_loopback_address(host):
    assert network_notes(host, 8642, ()) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_the_notes_for_all_interfaces_explain_how_to_reach_it_and_that_traffic_is_readable(host):
    where, name, token = network_notes(host, 8642, ())
    assert "http://ADDRESS:8642/" in where
    assert f"--allow-host {socket.gethostname()}" in name
    assert "no TLS" in token
    assert len(network_notes(host, 8642, ("*",))) == 2


def test_the_notes_for_one_network_address_say_that_traffic_is_readable():
    assert "no TLS" in network_notes("192.0.2.1", 8642, ())[-1]
    assert "no TLS" in network_notes("desk.example", 8642, ())[-1]


@pytest.mark.parametrize(("code", "notice"), [(0, ""), (3, "no browser could be opened: open the address yourself\n")])
def test_the_output_of_the_browser_command_is_hidden_and_its_failure_is_reported(
    tmp_path, monkeypatch, capfd, code, notice
):
    program = tmp_path / ("open" if sys.platform == "darwin" else "xdg-open")
    program.write_text(f"#!/bin/sh\necho noise; echo noise >&2; echo $1 > {tmp_path}/opened; exit {code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    asyncio.run(open_browser("http://127.0.0.1:1/"))
    assert (tmp_path / "opened").read_text() == "http://127.0.0.1:1/\n"
    assert capfd.readouterr() == (notice, "")


def test_a_missing_browser_command_is_reported(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PATH", str(tmp_path))
    asyncio.run(open_browser("http://127.0.0.1:1/"))
    assert "open the address yourself" in capfd.readouterr().out


def test_the_commands_in_the_serve_guide_get_the_reply_that_it_shows():
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
            output = {"text": "Tell Ada that the build is green"}
            assert (await http.post("/api/conversations/tea/messages", json=output)).status_code == 202
            while not (waits := await runtime.pending()):
                await asyncio.sleep(0.01)
            yes = {"decision": {"type": "approve", "digest": waits[0].digest}}
            notice = await http.post(f"/api/conversations/tea/calls/{waits[0].call}/resolve", json=yes)
            again = (await http.post("/api/conversations", json={"id": "tea"})).json()
            never = (await http.post("/api/conversations/tea/calls/never/resolve", json=yes)).json()
            await http.aclose()
            return notice.text, again, never

    notice, again, never = asyncio.run(followed())
    assert notice == shown
    assert (again["status"], again["kind"], again["title"]) == (409, "conflict", "a conversation with this id exists")
    assert (never["status"], never["kind"]) == (404, "stale")
    assert never["title"] == "the thing that was named does not exist"
