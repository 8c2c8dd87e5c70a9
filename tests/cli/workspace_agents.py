"""Agents whose tools return what the workspace tools return: plans, results and a checklist. Nothing is changed."""

from typing import Any

from desk import agent, last

from holdfast import Call, Result, ToolCall, tool

DIFF = """--- a/src/app.py
+++ b/src/app.py
@@ -1,3 +1,3 @@
 first
--- a remark
+pay \u202e0001\u202c
 third
"""
FILE = {"path": "src/app.py", "action": "replace", "before": "a" * 64, "after": "b" * 64, "added": 1, "removed": 1}
LEVEL_B = {
    "command": "bash run.sh | tail",
    "argv": "opaque",
    "executable": "/usr/bin/bash",
    "executable_in_workspace": False,
    "cwd": "packages",
    "environment": ["HOME", "PATH"],
    "files": {"run.sh": f"sha256:{'c' * 64}"},
    "timeout": 120.0,
    "workspace": "writable",
    "sandbox": "B",
    "guarantees": {"write": True, "net_udp": False},
}
LEVEL_A = LEVEL_B | {
    "command": "git log 'a] [b' ''",
    "argv": ["git", "log", "a] [b", ""],
    "sandbox": "A",
    "files": {},
    "guarantees_in_words": ["sandbox level A (bubblewrap)", "holds: no UDP and DNS", "holds: at most 9 processes"],
    "surprise": "a new field",
}


@tool(approval="required", prompt="Change {path}?")
async def edit(path: str) -> Result:
    """Change a file."""
    return Result(FILE, data={"changes": [{"path": path, "before": "a" * 64, "after": "b" * 64, "kept": None}]})


@edit.preview
async def _(path: str, call: Call) -> dict[str, Any]:
    files = [FILE, {"path": "new.py", "action": "create", "before": None, "after": "d" * 64, "added": 2, "removed": 0}]
    if path != "long.py":
        return {"files": files, "diff": DIFF}
    body = "".join(f"+line {n}\n" for n in range(1, 301))
    head = f"--- /dev/null\n+++ b/long.py\n@@ -0,0 +1,300 @@\n{body}"
    return {"files": files, "diff": head, "diff_artifact": {"sha256": "e" * 64, "size": 1_240_000}}


@tool(approval=lambda args: "auto" if args["command"].startswith("make") else "required", prompt="Run a command?")
async def bash(command: str) -> Result:
    """Run a command."""
    lines = [f"part {n}" for n in range(1, 31)] + ["pay \u202e0001"]
    artifact = {"sha256": "f" * 64, "size": 23_400}
    facts: dict[str, Any] = {"ok": False, "exit_code": 2, "output": "\n".join(lines), "artifact": artifact}
    facts |= {"protected_changed": [".git/hooks"], "quarantined": {"sub/.env": "sub/.env.quarantined-1"}}
    return Result(facts)


@bash.preview
async def _(command: str) -> dict[str, Any]:
    return LEVEL_A if command.startswith("git") else LEVEL_B


@tool
async def update_plan(done: int) -> Result:
    """Show the plan as a checklist."""
    states = ["completed"] * done + ["in_progress", "pending", "pending"]
    steps = [{"content": f"step {n}", "status": state, "priority": "medium"} for n, state in enumerate(states[:3], 1)]
    return Result(f"{done} of 3 completed", data={"checklist": steps})


@tool
async def read(path: str, call: Call) -> Result:
    """Read a file."""
    return Result({"path": path}, images=[call.keep(b"\x89PNG\r\n\x1a\n" + bytes(2000), "image/png", "a\u202eb.png")])


def worker(name: str, *calls: ToolCall):
    return agent(name, list(calls), last, tools=[edit, bash, update_plan])


editing = worker("editing", ToolCall("edit", {"path": "src/app.py"}))
rewriting = worker("rewriting", ToolCall("edit", {"path": "long.py"}))
script = worker("script", ToolCall("bash", {"command": "bash run.sh | tail"}))
literal = worker("literal", ToolCall("bash", {"command": "git log 'a] [b' ''"}))
building = worker("building", ToolCall("bash", {"command": "make all"}))
looking = agent("looking", [ToolCall("read", {"path": "b.png"})], last, tools=[read])
planning = agent(
    "planning",
    [ToolCall("update_plan", {"done": 1})],
    [ToolCall("update_plan", {"done": 1})],
    [ToolCall("update_plan", {"done": 3})],
    last,
    tools=[update_plan],
)
