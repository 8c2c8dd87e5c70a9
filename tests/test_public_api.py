"""The public surface is small, sorted and pinned; importing it is cheap."""

from __future__ import annotations

import subprocess
import sys

import assent

PUBLIC = [
    "Accepted", "Agent", "Answer", "Approve", "Ask", "AssentError", "Busy", "Call", "ClientResult", "Default",
    "Deny", "Failed", "Halt", "Invalid", "NotAllowed", "NotFound", "Pending", "Principal", "Result", "Retention",
    "Runtime", "ScriptedModel", "Snapshot", "Stale", "Submit", "Tool", "ToolCall", "ToolError", "Toolset",
    "provider_tool", "tool",
]  # fmt: skip


def test_the_public_names_are_these_and_no_others() -> None:
    assert assent.__all__ == PUBLIC
    assert sorted(assent.__all__, key=lambda name: (name[0].islower(), name)) == assent.__all__
    assert len(assent.__all__) < 40
    for name in assent.__all__:
        assert getattr(assent, name) is not None


def test_every_public_name_says_what_it_is() -> None:
    for name in assent.__all__:
        assert (getattr(assent, name).__doc__ or "").strip(), f"{name} has no docstring"


def test_importing_assent_loads_no_provider_web_framework_database_driver_or_command_line() -> None:
    code = "import sys, assent; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    unwanted = {
        "openai", "anthropic", "google", "groq", "pydantic", "pydantic_ai", "starlette", "uvicorn", "asyncpg", "apsw",
        "click", "rich", "opentelemetry", "httpx", "sqlite3",
    }  # fmt: skip
    assert not loaded & unwanted
