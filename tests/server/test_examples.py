"""The examples that mount Holdfast in another application, with that application's own login."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.server.process import open_socket

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.mark.parametrize("name", ["with_fastapi:api", "with_django:application"])
def test_an_example_mounts_holdfast_below_its_own_pages_and_uses_its_own_login(name, tmp_path):
    with open_socket("127.0.0.1", 0) as listening:
        command = [sys.executable, "-m", "uvicorn", name, "--fd", str(listening.fileno()), "--log-level", "warning"]
        env = {**os.environ, "HOLDFAST_STORE": f"sqlite:///{tmp_path}/t.db", "PYTHONPATH": str(EXAMPLES)}
        base = f"http://127.0.0.1:{listening.getsockname()[1]}"
        server = subprocess.Popen(command, cwd=tmp_path, env=env, pass_fds=[listening.fileno()])
    try:
        with (
            httpx.Client(base_url=base, trust_env=False, timeout=60) as ada,
            httpx.Client(base_url=base, trust_env=False, timeout=60) as bo,
        ):
            assert ada.get("/holdfast/api/me").status_code == 401
            assert "hello ada" in ada.get("/login/ada").text
            bo.get("/login/bo")
            me = ada.get("/holdfast/api/me").json()
            assert (me["principal"], me["agents"]) == ("ada", ["hello"])
            assert "<script" in ada.get("/holdfast/").text
            assert ada.post("/holdfast/api/conversations", json={"id": "c"}).status_code == 201
            assert bo.get("/holdfast/api/conversations/c").status_code == 404
            assert ada.post("/holdfast/api/conversations/c/messages", json={"text": "hi"}).status_code == 202
            ends = time.monotonic() + 60
            while not (pending := ada.get("/holdfast/api/pending").json()["pending"]) and time.monotonic() < ends:
                time.sleep(0.01)
            [entry] = pending
            decision = {"decision": {"type": "approve", "digest": entry["digest"]}}
            path = f"/holdfast/api/conversations/c/calls/{entry['call']}/resolve"
            assert ada.post(path, json=decision).json()["status"] == "accepted"
            question = {"text": "Tell Ada that the build is green"}
            sent: dict[str, Any] = {"params": question} if "fastapi" in name else {"data": question}
            assert httpx.post(f"{base}/ask", **sent, trust_env=False, timeout=60).status_code == 401
            reply = bo.post("/ask", **sent).json()
            assert reply["waiting"] == ["Send this mail to ada@example.org?"]
            assert bo.get(f"/holdfast/api/conversations/{reply['conversation']}").status_code == 200
            assert ada.get(f"/holdfast/api/conversations/{reply['conversation']}").status_code == 404
    finally:
        server.terminate()
        assert server.wait(60) in (0, -15)
