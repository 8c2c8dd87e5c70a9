"""The stage with tools that return what the workspace tools return: plans, results and a checklist. Nothing is changed.

``python workshop.py STORE PORT``: as stage.py, with these scenes.
"""

import difflib
import hashlib
import struct
import sys
import zlib
from typing import Any

import msgspec
import stage

from holdfast import Agent, Call, Result, tool

HIDDEN = "pay \u202e0001\u202c\u200b"
WORDS = {
    "write": ("nothing outside the workspace can be changed", "files outside the workspace can be changed"),
    "read": ("only the workspace and system directories can be read", "files outside the workspace can be read"),
    "net_tcp": ("no TCP and Unix-socket connections", "TCP and Unix-socket connections are possible"),
    "net_udp": ("no UDP and DNS", "UDP and DNS are possible"),
    "pids": ("no process is left behind, other processes are out of reach", "other processes are within reach"),
    "env": ("the server's environment cannot be read", "the server's environment can be read by a command that tries"),
    "protected": ("protected paths that exist cannot be changed", "protected paths can be changed"),
}
HELD = {"A": set(WORDS), "B": {"write", "read", "net_tcp", "pids"}, "none": set()}


def hash_of(text: str | None) -> str | None:
    return None if text is None else hashlib.sha256(text.encode()).hexdigest()


def plan_files(changes: dict[str, tuple[str | None, str | None]], call: Call, limit: int = 32_768) -> dict[str, Any]:
    """Return a plan as files.py describes it; path -> (content before, content after)."""
    files, text = [], ""
    for path, (old, new) in changes.items():
        names = (f"a/{path}" if old is not None else "/dev/null", f"b/{path}" if new is not None else "/dev/null")
        lines = list(
            difflib.unified_diff((old or "").splitlines(True), (new or "").splitlines(True), *names, lineterm="\n")
        )
        text += "".join(lines)
        marks = [line[0] for line in lines[2:]]
        action = "delete" if new is None else "create" if old is None else "replace"
        files.append(
            {
                "path": path,
                "action": action,
                "before": hash_of(old),
                "after": hash_of(new),
                "added": marks.count("+"),
                "removed": marks.count("-"),
            }
        )
    raw = text.encode()
    if len(raw) <= limit:
        return {"files": files, "diff": text}
    head = raw[: raw.rfind(b"\n", 0, limit) + 1]
    kept = call.keep(raw, "text/x-diff", name="write.diff")
    cut = f"the first {len(head)} of {len(raw)} bytes; diff_artifact is the whole diff"
    return {"files": files, "diff": head.decode(), "diff_cut": cut, "diff_artifact": msgspec.to_builtins(kept)}


OLD = "".join(f"line {n}\n" for n in range(1, 41))
NEW = OLD.replace("line 20\n", f"line twenty\n{HIDDEN}\n").replace("line 4\n", "-- line 4 is a remark\n")
LONG = "".join(f"value_{n} = {n * 7919}\n" for n in range(5000)) + f"the_end = 'seen'  # {HIDDEN}\n"
FILES: dict[str, dict[str, tuple[str | None, str | None]]] = {
    "src/app.py": {"src/app.py": (NEW.replace("line 9\n", "-- line 9\n"), NEW.replace("line 9\n", "line nine\n"))},
    "several": {
        "src/app.py": (OLD, NEW),
        "src/new module.py": (None, "def main():\n    return 1\n"),
        "docs/old.md": ("# Old\n\nNo longer true.\n", None),
        "empty.txt": (None, ""),
    },
    "long.py": {"long.py": (None, LONG)},
}


@tool(approval="required", prompt="Change {path}?", risk="medium")
async def edit(path: str, old: str = "", new: str = "") -> Result:
    """Change a file."""
    [name, (before, after)] = next(iter(FILES[path].items()))
    change = {"path": name, "before": hash_of(before), "after": hash_of(after), "kept": None}
    facts = {"path": name, "action": "replace", "version": change["after"], "added": 1, "removed": 1}
    return Result(facts, data={"changes": [change]})


@edit.preview
async def _(path: str, call: Call, old: str = "", new: str = "") -> dict[str, Any]:
    return plan_files(FILES[path], call)


def plan_command(command: str, argv: list[str] | str, level: str = "A", **more: Any) -> dict[str, Any]:
    """Return a plan as shell.py makes it."""
    held = {name: name in HELD[level] for name in WORDS}
    words = ["no sandbox" if level == "none" else f"sandbox level {level} (bubblewrap)"]
    words += [f"{'holds' if kept else 'DOES NOT HOLD'}: {WORDS[name][not kept]}" for name, kept in held.items()]
    plan = {
        "command": command,
        "argv": argv,
        "executable": "/usr/bin/bash",
        "executable_in_workspace": False,
        "cwd": ".",
        "environment": ["HOME", "LANG", "PATH"],
        "files": {},
        "timeout": 120.0,
        "workspace": "writable",
        "sandbox": level,
        "guarantees": held,
        "guarantees_in_words": [*words, "holds: at most 1024 processes (control group)"],
    }
    return plan | more


SCRIPT = 'set -e\nfor f in src/*.py; do python -m py_compile "$f"; done\nbash run.sh | tee out.log\u200b'
LITERAL = "git commit -m 'two words' --allow-empty-message ''"
PLANS = {
    LITERAL: plan_command(
        LITERAL,
        ["git", "commit", "-m", "two words", "--allow-empty-message", ""],
        executable="/usr/bin/git",
        cwd="packages/site",
        workspace="read-only",
    ),
    SCRIPT: plan_command(
        SCRIPT,
        "opaque",
        "B",
        files={
            "...": "more than 2 files: the others are not compared",
            "data.bin": "not compared by content: 99000000 bytes, changed at 5",
            "run.sh": f"sha256:{hash_of('run')}",
        },
    ),
    "./deploy --now": plan_command(
        "./deploy --now",
        ["./deploy", "--now"],
        "none",
        executable="/srv/work/deploy",
        executable_in_workspace=True,
        files={"deploy": f"sha256:{hash_of('deploy')}"},
        surprise="a field that the page does not know",
    ),
}


@tool(approval=lambda args: "required" if args["command"] in PLANS else "auto", streaming=True, prompt="Run a command?")
async def bash(command: str, call: Call) -> Result:
    """Run a command."""
    facts: dict[str, Any] = {"ok": True, "exit_code": 0, "output": "ok\n", "output_bytes": 3}
    if command == "make test":
        output = f"collected 3 items\n\ntest_app.py ..F\n\n1 failed, 2 passed {HIDDEN}\n"
        facts = {"ok": False, "exit_code": 2, "output": output, "output_bytes": len(output.encode())}
        facts["encoding"] = "not UTF-8: 2 bytes were replaced by U+FFFD"
    if command == "make all":
        lines = [f"compiling part {n} of 900\n" for n in range(1, 901)]
        whole = "".join(lines).encode()
        artifact = call.keep(whole, name="output.txt")
        omitted = len(whole) - 2 * len("".join(lines[:20]).encode())
        output = "".join([*lines[:20], f"\n[... {omitted} bytes omitted ...]\n", *lines[-20:]])
        cut = {"omitted_bytes": omitted, "kept_bytes": artifact.size, "next": "read_artifact pages through the output"}
        facts |= {"output": output, "output_bytes": len(whole), "cut": cut, "artifact": msgspec.to_builtins(artifact)}
    if command == "make wait":
        await call.progress({"output": "".join(f"step {n}\n" for n in range(1, 31)), "output_bytes": 231})
        await stage.cue("command-ended")
    guarantees = dict.fromkeys(WORDS, True)
    return Result(facts, data={"sandbox": "A", "guarantees": guarantees})


@bash.preview
async def _(command: str, call: Call) -> dict[str, Any]:
    return PLANS.get(command, {"command": command})


def make_png(width: int = 32, height: int = 16) -> bytes:
    """Return a PNG of one colour."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = b"".join(b"\0" + b"\xc0\x20\x20" * width for _ in range(height))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@tool
async def read(path: str, call: Call) -> Result:
    """Read a file."""
    return Result({"path": path}, images=[call.keep(make_png(), "image/png", path)])


@tool
async def update_plan(entries: list[dict[str, Any]]) -> Result:
    """Show the plan as a checklist."""
    done = sum(entry["status"] == "completed" for entry in entries)
    return Result(f"{done} of {len(entries)} completed", data={"checklist": entries})


STEPS = [
    "Read the failing test",
    "Find where the limit is checked",
    f"Change the comparison {HIDDEN}",
    "Run the tests again and look at the whole output, also of the slow ones that take more than a minute",
    "Write the change log",
]


def steps(done: int, doing: bool = True) -> dict[str, Any]:
    states = ["completed"] * done + ["in_progress"] * doing + ["pending"] * len(STEPS)
    entries = [{"content": text, "status": state} for text, state in zip(STEPS, states, strict=False)]
    return {"entries": [entry | {"priority": "high" if n == 2 else "medium"} for n, entry in enumerate(entries)]}


stage.CALLS |= {
    "edit": ("I would change one line.", [("edit", {"path": "src/app.py", "old": "-- line 9", "new": "line nine"})]),
    "several": ("", [("edit", {"path": "several"})]),
    "long": ("", [("edit", {"path": "long.py"})]),
    "literal": ("", [("bash", {"command": LITERAL})]),
    "script": ("", [("bash", {"command": SCRIPT})]),
    "deploy": ("", [("bash", {"command": "./deploy --now"})]),
    "test": ("", [("bash", {"command": "make test"})]),
    "build": ("", [("bash", {"command": "make all"})]),
    "picture": ("", [("read", {"path": "chart.png"})]),
    "running": ("", [("bash", {"command": "make wait"})]),
    "steps": ("", [("update_plan", steps(2)), ("edit", {"path": "src/app.py"})]),
    "begin": ("I begin.", [("update_plan", steps(0))]),
    "advance": ("I go on.", [("update_plan", steps(4))]),
    "finish": ("", [("update_plan", steps(5, False))]),
    "clear": ("", [("update_plan", {"entries": []})]),
    "many": ("", [("count", {"to": 1})] * 120),
}
stage.agent = Agent("developer", model=stage.Player(), tools=[edit, bash, read, update_plan, stage.count, stage.sign])

if __name__ == "__main__":
    stage.main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
