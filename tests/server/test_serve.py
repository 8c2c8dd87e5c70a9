"""``holdfast serve`` as a process: killed, restarted, stopped in an orderly way, and started wrongly."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx
import pytest

from holdfast import Invalid
from holdfast.cli import server_token

AGENT = '''
from holdfast import Agent, ScriptedModel, ToolCall, tool

@tool(approval="required")
async def refund(order: int) -> str:
    """Give money back."""
    return f"refunded {order}"

agent = Agent(
    "desk", model=ScriptedModel([["one moment", ToolCall("refund", {"order": 7})], "done"], follow=True), tools=[refund]
)
'''
C = "/api/conversations/c"


class Process:
    def __init__(self, folder, *words, port=0):
        (folder / "shop.py").write_text(AGENT)
        self._command = [sys.executable, "-m", "holdfast", "serve", "shop:agent", "--port", str(port), *words]
        self.process = subprocess.Popen(
            self._command,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "HOLDFAST_STORE": ""},
        )
        line = self.process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/\?token=(\S+)", line)
        assert found, (line, self.process.stderr.read() if not line else "")
        self.url, self.port, self.token = found.group(), int(found[1]), found[2]

    def end(self, sig=signal.SIGKILL):
        self.process.send_signal(sig)
        code = self.process.wait(60)
        return code, self.process.communicate()[1]


@contextmanager
def process(folder, *words, port=0):
    running = Process(folder, *words, port=port)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.end()
        running.process.stdout.close()
        running.process.stderr.close()


def wait_for(fact, seconds=60):
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if value := fact():
            return value
        time.sleep(0.01)
    raise AssertionError("the condition did not become true in time")


def test_a_pending_approval_survives_kill_9_and_is_approved_with_the_same_cookie(tmp_path):
    """After a kill the pending entry is unchanged, and a late approval completes the turn [B31, B53]."""
    with httpx.Client(trust_env=False, follow_redirects=True, timeout=60) as http:
        with process(tmp_path) as first:
            base = f"http://127.0.0.1:{first.port}"
            http.get(first.url)
            assert http.get(f"{base}/api/me").status_code == 200
            assert http.post(f"{base}/api/conversations", json={"id": "c"}).status_code == 201
            assert http.post(f"{base}{C}/messages", json={"text": "hi"}).status_code == 202
            [entry] = wait_for(lambda: http.get(f"{base}/api/pending").json()["pending"])
            with http.stream("GET", f"{base}{C}/events") as stream:
                next(stream.iter_lines())
                first.end(signal.SIGKILL)
        with process(tmp_path, port=first.port) as second:
            assert second.token == first.token
            [same] = http.get(f"{base}/api/pending").json()["pending"]
            assert same == entry
            decision = {"decision": {"type": "approve", "digest": entry["digest"]}}
            path = f"{base}{C}/calls/{entry['call']}/resolve"
            accepted = http.post(path, json=decision).json()
            assert accepted["status"] == "accepted"
            assert http.post(path, json=decision).json() == accepted
            assert http.post(path, json={"decision": {"type": "deny"}}).status_code == 409
            snapshot = wait_for(lambda: (got := http.get(f"{base}{C}").json())["state"] == "idle" and got)
            assert [m["role"] for m in snapshot["messages"]] == ["user", "assistant", "tool", "assistant"]
            assert "refunded 7" in snapshot["messages"][2]["content"]


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_server_cleanly_while_streams_are_open(tmp_path, sig):
    with process(tmp_path) as server, httpx.Client(trust_env=False, timeout=60) as http:
        http.headers["authorization"] = f"Bearer {server.token}"
        base = f"http://127.0.0.1:{server.port}"
        http.post(f"{base}/api/conversations", json={"id": "c"})
        with http.stream("GET", f"{base}{C}/events") as one:
            lines = one.iter_lines()
            assert next(lines) == "retry: 1000"
            server.process.send_signal(sig)
            list(lines)  # the stream ends without an error
        assert server.process.wait(60) == 0
        assert server.process.stderr.read() == ""
        assert not [name for name in os.listdir(tmp_path) if name.endswith(("-wal", "-shm"))]


def test_the_token_file_is_in_the_state_directory_and_only_its_owner_can_read_it(tmp_path, monkeypatch):
    """Not next to the store, where tools look for files. Each store has one token, however its path is written."""
    state = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    with process(tmp_path, "--store", "sqlite:///desk.db") as server:
        [token_path] = (state / "holdfast" / "tokens").iterdir()
        assert token_path.read_text() == server.token
        assert token_path.stat().st_mode & 0o777 == 0o600
        assert token_path.parent.stat().st_mode & 0o777 == 0o700
    assert not list(tmp_path.glob("*.token"))
    with process(tmp_path, "--store", f"sqlite:///{tmp_path}/desk.db") as same:
        assert same.token == server.token
    with process(tmp_path, "--store", "sqlite:///other.db") as other:
        assert other.token != server.token


GUARDED = """
from holdfast.runtime.engine import Engine
from holdfast.tools.protected import protected_files

start = Engine.start


async def noted(self):
    await start(self)
    open("guarded", "w").write("\\n".join(map(str, protected_files())))


Engine.start = noted
"""


def test_the_file_of_the_token_and_the_store_are_protected_from_tools_while_it_serves(tmp_path, monkeypatch):
    """Tools that work on files refuse them wherever they are."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "guarded_files.py").write_text(GUARDED)
    monkeypatch.setitem(globals(), "AGENT", f"import guarded_files\n{AGENT}")
    with process(tmp_path, "--store", "sqlite:///desk.db"):
        [kept] = (tmp_path / "state" / "holdfast" / "tokens").iterdir()
        guarded = (tmp_path / "guarded").read_text().splitlines()
        assert {str(kept), f"{tmp_path}/desk.db", f"{tmp_path}/desk.db-owners"} <= set(guarded)


SPY = """
import os, subprocess
child = subprocess.run("echo $HOLDFAST_TOKEN", shell=True, capture_output=True, text=True)
open("seen", "w").write(repr([os.environ.get("HOLDFAST_TOKEN"), child.stdout]))
"""


def test_tools_do_not_find_the_token_in_their_environment(tmp_path, monkeypatch):
    """Neither the code of tools, at its import, nor the programs that they start; also not in ``holdfast tools``."""
    monkeypatch.setenv("HOLDFAST_TOKEN", "a-token-from-the-environment")
    (tmp_path / "spy.py").write_text(SPY)
    monkeypatch.setitem(globals(), "AGENT", f"import spy\n{AGENT}")
    with process(tmp_path) as server:
        assert server.token == "a-token-from-the-environment"
        assert (tmp_path / "seen").read_text() == repr([None, "\n"])
    (tmp_path / "seen").unlink()
    run(tmp_path, "-m", "holdfast", "tools", "shop:agent")
    assert (tmp_path / "seen").read_text() == repr([None, "\n"])


def test_prometheus_has_a_token_of_its_own_from_the_environment(tmp_path, monkeypatch):
    """$HOLDFAST_METRICS_TOKEN reads /metrics and nothing else; tools do not find it in their environment [B123]."""
    monkeypatch.setenv("HOLDFAST_METRICS_TOKEN", "a-token-for-prometheus")
    (tmp_path / "spy.py").write_text(SPY.replace("HOLDFAST_TOKEN", "HOLDFAST_METRICS_TOKEN"))
    monkeypatch.setitem(globals(), "AGENT", f"import spy\n{AGENT}")
    with process(tmp_path) as server:
        assert (tmp_path / "seen").read_text() == repr([None, "\n"])
        headers = {"authorization": "Bearer a-token-for-prometheus"}
        with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", headers=headers, trust_env=False) as http:
            assert "holdfast_running_conversations 0\n" in http.get("/metrics").text
            assert http.get("/api/pending").status_code == 401
            assert http.get("/metrics", headers={"authorization": "Bearer x"}).status_code == 401
    same = {"HOLDFAST_TOKEN": "one-token-for-both", "HOLDFAST_METRICS_TOKEN": "one-token-for-both"}
    code, stderr = run(tmp_path, "-m", "holdfast", "serve", "shop:agent", "--port", "0", **same)
    assert code != 0
    assert "can approve calls: choose another" in stderr


def run(folder, *words, **env):
    (folder / "shop.py").write_text(AGENT)
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=60, env={**os.environ, **env}
    )
    return done.returncode, done.stderr


def test_a_port_in_use_is_an_error_that_says_what_to_do(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, stderr = run(tmp_path, "-m", "holdfast", "serve", "shop:agent", "--port", str(port))
    assert code == 2
    assert stderr == (
        f"holdfast: error [resource_missing]: port {port} of 127.0.0.1 is in use: stop the program that uses it, "
        "or choose another with --port (0: any)\n"
    )


@pytest.fixture
def token_path(tmp_path, monkeypatch):
    """The path of the token file for holdfast.db in the temporary directory; only its directory exists."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = server_token.token_file(f"{tmp_path}/holdfast.db")
    path.parent.mkdir(mode=0o700, parents=True)
    return path


def run_serve(folder):
    return run(folder, "-m", "holdfast", "serve", "shop:agent", "--port", "0", HOLDFAST_STORE="")


def test_the_error_about_an_invalid_token_file_names_the_file(tmp_path, token_path):
    for contents in (
        b"",
        b"x",
        "sixteen letters é".encode(),
        "a-token-of-windows".encode("utf-16"),
        b"a token of many words",
    ):
        token_path.write_bytes(contents)
        token_path.chmod(0o600)
        assert run_serve(tmp_path) == (
            2,
            f"holdfast: error [invalid_args]: {token_path} must hold 16 or more letters, digits, '-', '_' and '.'\n",
        )
    token_path.unlink()
    token_path.mkdir()
    code, stderr = run_serve(tmp_path)
    assert code == 2
    assert stderr.startswith("holdfast: error [resource_missing]: the token cannot be read: ")
    assert str(token_path) in stderr


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_a_token_file_that_others_can_read_or_write_is_refused(tmp_path, token_path, mode):
    token_path.write_text("a-token-of-sixteen-letters")
    token_path.chmod(mode)
    code, stderr = run_serve(tmp_path)
    assert code == 2
    assert f"other users can read or change it (mode {mode:o}): run `chmod 600 {token_path}`" in stderr


def test_a_token_directory_that_others_can_write_is_refused(tmp_path, token_path):
    token_path.parent.chmod(0o777)
    code, stderr = run_serve(tmp_path)
    assert code == 2
    assert f"run `chmod 700 {token_path.parent}`" in stderr


def test_a_token_file_of_another_user_is_refused(token_path, monkeypatch):
    token_path.write_text("a-token-of-sixteen-letters")
    token_path.chmod(0o600)
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.raises(Invalid, match="belongs to another user"):
        server_token._read(token_path)


def test_a_token_file_that_is_a_symbolic_link_is_refused(tmp_path, token_path):
    (tmp_path / "theirs").write_text("a-token-of-sixteen-letters")
    token_path.symlink_to(tmp_path / "theirs")
    code, stderr = run_serve(tmp_path)
    assert code == 2
    assert f"remove {token_path}" in stderr


def test_a_server_that_cannot_store_its_token_says_how_to_set_a_permanent_one(tmp_path, monkeypatch):
    (tmp_path / "state").write_text("no directory")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with process(tmp_path) as server:
        assert "$HOLDFAST_TOKEN sets a permanent one" in server.process.stdout.readline()


def test_an_index_page_of_the_project_replaces_ours_only_if_it_has_a_holdfast_element(tmp_path):
    (tmp_path / "ui").mkdir()
    (tmp_path / "ui" / "index.html").write_text("the project's own")
    (tmp_path / "ui" / "style.css").write_text("/* ours */")
    with process(tmp_path) as server, httpx.Client(trust_env=False) as http:
        http.headers["authorization"] = f"Bearer {server.token}"
        base = f"http://127.0.0.1:{server.port}"
        assert "the project's own" not in http.get(f"{base}/").text
        assert http.get(f"{base}/static/style.css").text == "/* ours */"
        (tmp_path / "ui" / "index.html").write_text("<holdfast-app></holdfast-app> of the project's own")
        assert "the project's own" in http.get(f"{base}/").text


def test_allow_origin_accepts_writes_from_that_origin_and_refuses_a_malformed_one(tmp_path):
    with process(tmp_path, "--allow-origin", "https://desk.example") as server, httpx.Client(trust_env=False) as http:
        http.headers["authorization"] = f"Bearer {server.token}"
        path = f"http://127.0.0.1:{server.port}/api/conversations"
        assert http.post(path, json={}, headers={"origin": "https://desk.example"}).status_code == 201
        assert http.post(path, json={}, headers={"origin": "https://other.example"}).status_code == 403
    code, stderr = run(
        tmp_path, "-m", "holdfast", "serve", "shop:agent", "--port", "0", "--allow-origin", "desk.example"
    )
    assert code == 2
    assert "an origin looks like https://desk.example" in stderr


def test_an_address_of_another_machine_and_a_short_token_are_refused(tmp_path):
    code, stderr = run(tmp_path, "-m", "holdfast", "serve", "shop:agent", "--port", "0", "--host", "192.0.2.1")
    assert code == 2
    assert "--host" in stderr
    code, stderr = run(tmp_path, "-m", "holdfast", "serve", "shop:agent", "--port", "0", HOLDFAST_TOKEN="short")
    assert code == 2
    assert "HOLDFAST_TOKEN" in stderr


def test_without_the_server_extra_the_error_has_the_pip_command(tmp_path):
    hide = (
        "import sys, importlib.util as u\n"
        "real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name in ('uvicorn', 'httptools') else real(name, *a)\n"
        "from holdfast.cli.app import main\n"
        "sys.exit(main(['serve', 'shop:agent']))\n"
    )
    code, stderr = run(tmp_path, "-c", hide)
    assert code == 2
    assert stderr == (
        "holdfast: error [resource_missing]: the server needs uvicorn, httptools: "
        "pip install 'holdfast[server]' (in a clone: pip install '.[server]')\n"
    )


def test_without_a_home_directory_the_token_is_not_kept_in_the_working_directory(tmp_path, monkeypatch):
    """Tools work there, so each start makes a new token instead."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("HOLDFAST_TOKEN", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as on a system without a home directory
    assert not server_token.token_for("sqlite:///a.db").lasting
    assert list(tmp_path.iterdir()) == []
