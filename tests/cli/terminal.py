"""Helpers that run commands as real processes with real files."""

import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from holdfast import Runtime

SRC = Path(__file__).resolve().parents[2] / "src"
ZYGOTE = Path(__file__).resolve().parent / "zygote.py"
DESK = Path(__file__).resolve().parent / "desk.py"
PATIENCE = 60.0
UNSET = ("NO_COLOR", "COLUMNS", "MAKELEVEL")
OURS = ("_API_KEY", "_BASE_URL")
"""Suffixes of variables that are removed: no test may use a real key, and messages about models depend on them."""


def environment(**more):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_") and k not in UNSET}
    kept = {k: v for k, v in kept.items() if not k.endswith(OURS)}
    # The printed commands depend on whether there is a `holdfast` on the PATH: remove it.
    places = [place for place in os.environ.get("PATH", "").split(os.pathsep) if not Path(place, "holdfast").exists()]
    return {**kept, "PATH": os.pathsep.join(places), "PYTHONPATH": str(SRC), **more}


class CommandResult:
    """The exit code and the output of a finished command."""

    def __init__(self, code, out, err):
        self.code, self.raw = code, out
        self.out, self.err = out.decode(errors="surrogateescape"), err.decode()

    @property
    def objects(self):
        """Standard output as JSON lines: fails if anything else is on it."""
        return [json.loads(line) for line in self.out.splitlines()]


class Zygote:
    """Starts commands as real processes that do not import everything again; see ``zygote.py``."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, ZYGOTE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(), text=True
        )

    def run(self, job):
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self):
        self._process.stdin.close()
        self._process.wait(PATIENCE)
        self._process.stdout.close()


class Desk:
    """A directory with a store in it, and commands run there."""

    def __init__(self, path, zygote):
        self.path, self._zygote = Path(path), zygote

    def __call__(self, *words, stdin=b"", env=None):
        """Run a command to its end."""
        with tempfile.TemporaryDirectory() as place:
            files = [f"{place}/{name}" for name in ("in", "out", "err")]
            Path(files[0]).write_bytes(stdin)
            job = {
                "files": files,
                "cwd": str(self.path),
                "env": environment(**(env or {})),
                "words": [os.fsencode(str(word)).hex() for word in words],
            }
            code = self._zygote.run(job)
            return CommandResult(code, Path(files[1]).read_bytes(), Path(files[2]).read_bytes())

    def shell(self, line):
        """Run a printed command in a shell."""
        done = subprocess.run(line, shell=True, cwd=self.path, capture_output=True, env=environment(), timeout=PATIENCE)
        return CommandResult(done.returncode, done.stdout, done.stderr)

    def start(self, *words, env=None):
        return Running([sys.executable, "-m", "holdfast", *map(str, words)], self.path, environment(**(env or {})))

    def run_until_rest(self, name, agent, text="hi", store="holdfast.db", **options):
        """Run one turn in a runtime that then closes; return the pending calls."""

        async def until_rest():
            async with Runtime(agent, store=f"sqlite:///{self.path}/{store}", **options) as rt:
                turn = await rt.send(name, text, by="customer")
                return (await turn.result()).pending

        return asyncio.run(until_rest())

    def log(self, name, *words):
        """Return the events of a conversation, as ``holdfast log --json`` prints them."""
        result = self("log", name, "--json", *words)
        assert result.code == 0, result.err
        return result.objects


class Running:
    """A command that is still running."""

    def __init__(self, words, cwd, env):
        self.process = subprocess.Popen(
            words,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
        )
        self.out = ""
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    def _read(self):
        while chunk := os.read(self.process.stdout.fileno(), 65536):
            with self._changed:
                self.out += chunk.decode(errors="replace")
                self._changed.notify_all()

    def until(self, text):
        """Wait until it has printed this text; return its output."""
        end = time.monotonic() + PATIENCE
        with self._changed:
            while text not in self.out:
                if not self._changed.wait(timeout=0.5) and time.monotonic() > end:
                    raise AssertionError(f"{text!r} is not in the output:\n{self.out}")
        return self.out

    def kill(self):
        """Send SIGKILL, wait for the end and return the output."""
        self.process.kill()
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        self.process.stdout.close()
        return self.out

    def end(self):
        """Wait for the end and return the exit code."""
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code


def assert_refused(result, code, *words):
    """Check the exit code, and that standard error is one error line with these words."""
    assert result.code == code, result.out + result.err
    assert result.err.startswith("holdfast: error ["), result.err
    assert result.err.count("\n") == 1
    for word in words:
        assert word in result.err, result.err


def until(fact):
    """Wait until the function returns a true value, and return it."""
    end = time.monotonic() + PATIENCE
    while not (found := fact()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def commands(text, verb):
    """Return the printed commands of this verb."""
    return [line.strip() for line in text.splitlines() if re.search(rf"\bholdfast {verb} ", line)]


def call_in(command):
    words = shlex.split(command)
    return words[words.index("holdfast") + 2]
