"""examples/workers: three workers on PostgreSQL, one of which is killed; the commands of compose.yaml work."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from support.pg import drop, fresh
from support.programs import EXAMPLES, LIMIT_SECONDS, environment, read_to_end, run_command, start

FOLDER = EXAMPLES / "workers"
SERVICES: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]


@pytest.fixture
def url() -> Generator[str]:
    """A store on a real PostgreSQL server."""
    made = fresh()
    yield made
    drop(made)


def test_two_workers_go_on_when_the_third_is_killed(tmp_path: Path, url: str) -> None:
    with start("workers/three_workers.py", url, cwd=tmp_path) as program:
        said = read_to_end(program)
    workers = set(re.findall(r"workers: (\d+) (\d+) (\d+)", said)[0])
    [(killed, ran)] = re.findall(r"killed worker (\d+), which ran (\d+) of 12 conversations", said)
    assert killed in workers
    assert int(ran) > 0
    packed = re.findall(r"order (\d+) was packed by worker (\d+) at attempt (\d)", said)
    assert sorted(int(order) for order, _, _ in packed) == list(range(1, 13))
    assert {worker for _, worker, _ in packed} <= workers
    assert killed not in {worker for _, worker, attempt in packed if attempt == "2"}
    assert "12 of 12 orders are on their way" in said


def test_the_commands_of_the_compose_file_serve_the_page_and_run_the_agent(url: str) -> None:
    """Containers are not needed for this: each service's own command, with another database and a free port."""
    commands = {name: shlex.split(service["command"]) for name, service in SERVICES.items() if "command" in service}
    assert commands.keys() == {"migrate", "page", "worker"}
    assert SERVICES["worker"]["deploy"]["replicas"] == 3
    assert {command[0] for command in commands.values()} == {"holdfast"}
    run_command(*commands["migrate"], cwd=FOLDER, HOLDFAST_STORE=url)
    env = environment(HOLDFAST_STORE=url)
    page = subprocess.Popen(
        [sys.executable, "-m", *commands["page"], "--port", "0"],
        cwd=FOLDER,
        env={**env, "HOLDFAST_TOKEN": "a-long-secret-of-the-test"},
        stdout=subprocess.PIPE,
        text=True,
    )
    worker = subprocess.Popen(
        [sys.executable, "-m", *commands["worker"]], cwd=FOLDER, env=env, stdout=subprocess.DEVNULL
    )
    try:
        assert page.stdout is not None
        port = next(found[1] for line in page.stdout if (found := re.search(r"http://[^/:]+:(\d+)", line)))
        headers = {"Authorization": "Bearer a-long-secret-of-the-test"}
        base = f"http://localhost:{port}"
        with httpx.Client(base_url=base, headers=headers, trust_env=False, timeout=LIMIT_SECONDS) as client:
            client.post("/api/conversations", json={"id": "c"}).raise_for_status()
            client.post("/api/conversations/c/messages", json={"text": "Ship order 1"}).raise_for_status()
            while not (pending := client.get("/api/pending").json()["pending"]):
                assert worker.poll() is None
            assert pending[0]["prompt"] == "Hand the parcel of order 1 to the carrier?"
    finally:
        for process in (page, worker):
            process.terminate()
            process.wait()
        if page.stdout:
            page.stdout.close()


def test_the_image_has_the_files_that_its_commands_need() -> None:
    copied = re.findall(r"(?m)^COPY (.+) \S+$", (FOLDER / "Dockerfile").read_text())
    root = EXAMPLES.parent
    assert [path for line in copied for path in line.split() if not (root / path).exists()] == []
    assert SERVICES["worker"]["build"] == {"context": "../..", "dockerfile": "examples/workers/Dockerfile"}
