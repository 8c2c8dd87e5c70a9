"""The Flask and the Celery examples, each in its own process."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def test_the_flask_example_approves_a_call_in_a_second_request(tmp_path):
    env = {**os.environ, "HOLDFAST_STORE": f"sqlite:///{tmp_path}/t.db", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "flask", "--app", "app", "run", "--port", "0"]
    folder = EXAMPLES / "flask_app"
    with subprocess.Popen(command, cwd=folder, env=env, stderr=subprocess.PIPE, text=True) as server:
        try:
            found = next(filter(None, (re.search(r"http://127\.0\.0\.1:\d+", line) for line in server.stderr)))
            with httpx.Client(base_url=found[0], trust_env=False, timeout=60) as ann:
                assert ann.get("/pending").status_code == 401
                ann.post("/login/ann")
                waiting = ann.post("/messages", json={"text": "Tell Ada that the build is green"}).json()
                assert waiting["reason"] == "waiting"
                [pending] = ann.get("/pending").json()
                assert waiting["pending"] == [pending]
                assert pending["prompt"] == "Send this mail to ada@example.org?"
                path = f"/pending/{pending['conversation']}/{pending['call']}"
                other = ann.post(path, json={"approve": True, "digest": "0" * 64})
                assert (other.status_code, other.json()["kind"]) == (409, "stale")
                done = ann.post(path, json={"approve": True, "digest": pending["digest"]}).json()
                assert (done["reason"], done["text"]) == ("completed", "I have told Ada.")
        finally:
            server.send_signal(signal.SIGINT)
            server.communicate(timeout=60)


def test_the_celery_example_approves_in_one_job_the_call_of_another_job(tmp_path):
    env = {
        **os.environ,
        "HOLDFAST_STORE": f"sqlite:///{tmp_path}/t.db",
        "CELERY_FOLDER": f"{tmp_path}/files",
        "PYTHONUNBUFFERED": "1",
    }
    folder = EXAMPLES / "celery_jobs"
    options = ["--concurrency", "2", "--loglevel", "warning", "--without-mingle", "--without-gossip"]
    worker = [sys.executable, "-m", "celery", "-A", "jobs", "worker", *options]
    with subprocess.Popen(worker, cwd=folder, env=env, stderr=subprocess.STDOUT, stdout=subprocess.PIPE) as running:
        try:
            client = [sys.executable, "send_jobs.py"]
            ran = subprocess.run(client, cwd=folder, env=env, capture_output=True, text=True, timeout=150)
        finally:
            running.terminate()
            log, _ = running.communicate(timeout=60)
    assert ran.stdout in (folder / "README.md").read_text(), (ran.stderr, log.decode())
    assert ran.stdout.count("\n") == 2, (ran.stderr, log.decode())
