"""``holdfast mcp serve`` as a process: killed in the middle, over both transports, and with the client mcpdo."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from mcp_wire import FORMS, META, TASKS, VERSION, WireClient, accept
from support.node import mcpdo_command, node_environment

from holdfast import Approve, Runtime
from holdfast.events import CallStarted

HERE = Path(__file__).parent
ORDER = {"order": 7}


class Place:
    """A directory with the store, the state directory and the file that the tool writes."""

    def __init__(self, path: Path):
        self.path, self.paid = path, path / "paid.txt"
        self.store = f"sqlite:///{path / 'desk.db'}"
        self.environment = {**os.environ, "XDG_STATE_HOME": str(path / "state"), "PAID_FILE": str(self.paid)}

    def command(self, *words: str) -> list[str]:
        spec = f"{HERE / 'mcp_desk.py'}:agent"
        return [sys.executable, "-m", "holdfast", "mcp", "serve", spec, "--store", self.store, "--by", "ann", *words]

    def lines_paid(self) -> list[str]:
        return self.paid.read_text().split() if self.paid.exists() else []

    @contextmanager
    def serve_http(self) -> Iterator[tuple[str, str, subprocess.Popen[str]]]:
        """Start the server; give its address, its token and the process."""
        process = subprocess.Popen(
            self.command("--http", "--port", "0"), stdout=subprocess.PIPE, text=True, env=self.environment
        )
        assert process.stdout is not None
        try:
            address = None
            while address is None:
                line = process.stdout.readline()
                assert line, "the server has ended"
                address = re.search(r"connect to (\S+) with .* Bearer (\S+)", line)
            yield address[1], address[2], process
        finally:
            process.kill()
            process.wait()
            process.stdout.close()

    @contextmanager
    def run_worker(self) -> Iterator[str]:
        """Start ``holdfast worker`` with the agent; give its first line."""
        command = [sys.executable, "-m", "holdfast", "worker", f"{HERE / 'mcp_desk.py'}:agent", "--store", self.store]
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=self.environment)
        assert worker.stdout is not None
        try:
            yield worker.stdout.readline()
        finally:
            worker.terminate()
            worker.communicate()

    async def count_runs(self) -> int:
        async with Runtime(store=self.store, only=()) as runtime:
            (conversation,) = await runtime.conversations()
            events = await runtime.history(conversation.conversation)
            return len([event for event in events if isinstance(event, CallStarted)])


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def kill(process: subprocess.Popen[Any]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


async def test_a_round_is_answered_after_the_server_was_killed(place: Place) -> None:
    """kill -9 between the question and its answer: a new process with the kept key goes on."""
    with place.serve_http() as (url, token, process):
        async with httpx.AsyncClient(base_url=url.removesuffix("/mcp")) as http:
            asked = await WireClient(http, token, FORMS).call("refund", ORDER)
        kill(process)
    assert place.lines_paid() == []
    with place.serve_http() as (url, token, _):
        async with httpx.AsyncClient(base_url=url.removesuffix("/mcp"), timeout=60) as http:
            client = WireClient(http, token, FORMS)
            done = await client.continue_call("refund", ORDER, asked, approval=accept(approve=True))
            again = await client.continue_call("refund", ORDER, asked, approval=accept(approve=True))
    assert done["structuredContent"] == again["structuredContent"] == {"paid": 7}
    assert place.lines_paid() == ["7"]
    assert await place.count_runs() == 1


async def test_a_task_is_answered_after_the_server_was_killed(place: Place) -> None:
    with place.serve_http() as (url, token, process):
        async with httpx.AsyncClient(base_url=url.removesuffix("/mcp")) as http:
            task = (await WireClient(http, token, TASKS).call("refund", ORDER))["taskId"]
        kill(process)
    with place.serve_http() as (url, token, _):
        async with httpx.AsyncClient(base_url=url.removesuffix("/mcp"), timeout=60) as http:
            client = WireClient(http, token, TASKS)
            (key,) = (await client.send("tasks/get", taskId=task))["result"]["inputRequests"]
            await client.send("tasks/update", taskId=task, inputResponses={key: accept(approve=True)})
            while (got := (await client.send("tasks/get", taskId=task))["result"])["status"] == "working":
                pass
    assert got["result"]["structuredContent"] == {"paid": 7}
    assert place.lines_paid() == ["7"]


async def test_a_call_that_is_approved_after_its_server_ended_is_run_by_a_worker(place: Place) -> None:
    with place.serve_http() as (url, token, process):
        async with httpx.AsyncClient(base_url=url.removesuffix("/mcp")) as http:
            await WireClient(http, token, FORMS).call("refund", ORDER)
            opened = await http.post("/api/conversations", json={}, headers={"Authorization": f"Bearer {token}"})
        kill(process)
    assert opened.status_code == 201, "the agent is the only one that people can choose"
    async with Runtime(store=place.store, only=()) as runtime:
        (pending,) = await runtime.pending()
        await runtime.resolve(pending, Approve(digest=pending.digest), by="boss")
    with place.run_worker() as first_line:
        assert " runs desk on " in first_line
        async with Runtime(store=place.store, only=()) as runtime:
            result = await runtime.wait(pending.conversation)
    assert result.reason == "completed"
    assert place.lines_paid() == ["7"]


class Pipe:
    """A server over standard input and output."""

    def __init__(self, place: Place, *words: str):
        self.process = subprocess.Popen(
            place.command(*words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=place.environment
        )

    def call(self, name: str, args: dict[str, Any], capabilities: dict[str, Any], **more: Any) -> dict[str, Any]:
        meta = {f"{META}/protocolVersion": VERSION, f"{META}/clientCapabilities": capabilities}
        params = {"name": name, "arguments": args, "_meta": meta, **more}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(
            json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}) + "\n"
        )
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())["result"]

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


async def test_over_stdio_a_round_is_answered_after_the_server_was_killed(place: Place) -> None:
    with Pipe(place) as first:
        asked = first.call("refund", ORDER, FORMS)
        kill(first.process)
    with Pipe(place) as second:
        more = {"inputResponses": {"approval": accept(approve=True)}, "requestState": asked["requestState"]}
        done = second.call("refund", ORDER, FORMS, **more)
    assert second.process.returncode == 0
    assert done["structuredContent"] == {"paid": 7}
    assert place.lines_paid() == ["7"]


def test_over_stdio_the_server_ends_on_sigterm_while_the_client_keeps_the_pipe_open(place: Place) -> None:
    with Pipe(place) as server:
        server.call("refund", ORDER, FORMS)
        server.process.terminate()
        assert server.process.wait(60) == 0


async def test_over_stdio_the_text_says_how_a_person_decides(place: Place) -> None:
    with Pipe(place) as bare:
        text = bare.call("refund", ORDER, {})["content"][0]["text"]
    assert "/l/" not in text
    assert "pending" in text
    with Pipe(place, "--base-url", "http://127.0.0.1:8642") as linked:
        assert "http://127.0.0.1:8642/l/" in linked.call("refund", ORDER, {})["content"][0]["text"]
    with Pipe(place, "--base-url", "http://127.0.0.1:8642", "--no-links") as unlinked:
        assert "/l/" not in unlinked.call("refund", ORDER, {})["content"][0]["text"]


class Mcpdo:
    """The official command line client: it keeps connections and open questions in a process of its own."""

    def __init__(self) -> None:
        self._home = tempfile.TemporaryDirectory()  # a short path: its socket is below it
        self._environment = node_environment(Path(self._home.name))

    def run(self, *words: str) -> dict[str, Any]:
        done = subprocess.run(
            mcpdo_command(*words, "--format", "json"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=self._environment,
        )
        found = json.JSONDecoder().raw_decode(done.stdout or done.stderr)[0]
        assert isinstance(found, dict), done
        return found

    def __enter__(self) -> Mcpdo:
        return self

    def __exit__(self, *_: object) -> None:
        stop = mcpdo_command("daemon", "stop")
        subprocess.run(stop, stdin=subprocess.DEVNULL, capture_output=True, env=self._environment)
        self._home.cleanup()


@pytest.mark.parametrize("era", ["modern", "legacy"])
def test_mcpdo_parks_a_gated_call_and_its_answer_finishes_it(place: Place, era: str) -> None:
    with place.serve_http() as (url, token, _), Mcpdo() as client:
        login = ("--header", f"Authorization: Bearer {token}")
        client.run("connect", "@a", url, "--transport", "http", "--era", era, *login)
        parked = client.run("--connection", "a", "tools/call", "refund", "order:=7")["elicitationPending"]
        assert parked["message"].startswith("Refund order 7?")
        assert place.lines_paid() == []
        done = client.run("--connection", "a", "elicitation/respond", parked["elicitationId"], "approve:=true")
        assert done["structuredContent"] == {"paid": 7}
        assert place.lines_paid() == ["7"]


def test_mcpdo_without_elicitation_gets_a_link_and_nothing_is_resolved(place: Place) -> None:
    with place.serve_http() as (url, token, _), Mcpdo() as client:
        login = ("--header", f"Authorization: Bearer {token}")
        client.run("connect", "@a", url, "--transport", "http", "--era", "modern", "--elicit", "off", *login)
        (waiting,) = client.run("--connection", "a", "tools/call", "refund", "order:=7")["structuredContent"]["waiting"]
        page = httpx.get(waiting["link"], headers={"accept": "text/html"})
        assert "Refund order 7?" in page.text
        assert place.lines_paid() == []
        httpx.post(waiting["link"], json={"decision": "approve"}).raise_for_status()
        while not place.lines_paid():
            client.run("--connection", "a", "tools/call", "result", f"call:={json.dumps(waiting['call'])}")
        assert place.lines_paid() == ["7"]


async def test_the_server_says_401_without_its_token(place: Place) -> None:
    """Nothing is open on loopback [B155]."""
    with place.serve_http() as (url, token, _):
        async with httpx.AsyncClient() as http:
            assert (await http.post(url, json={})).status_code == 401
            wrong = {"authorization": f"Bearer {token}x"}
            assert (await http.post(url, json={}, headers=wrong)).status_code == 401
