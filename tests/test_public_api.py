"""The public API is small, sorted and pinned, and importing it loads few packages."""

from __future__ import annotations

import inspect
import subprocess
import sys
import typing
from types import ModuleType

import pytest

import holdfast
from holdfast import blocking, channels, events, hooks, models

PUBLIC = [
    "Accepted", "Agent", "Allow", "Answer", "Approve", "Artifact", "Ask", "Busy", "Call", "ClientResult", "Context",
    "Continue", "Decision", "Default", "Deny", "Extend", "Failed", "Halt", "HoldfastError", "Invalid", "Limits",
    "NotAllowed", "NotFound", "Pending", "Previewed", "Principal", "RequireApproval", "Result", "Retention", "Retry",
    "Runtime", "ScriptedModel", "Snapshot", "Stale", "Submit", "TakeBack", "Tool", "ToolCall", "ToolError", "Toolset",
    "Turn", "TurnError", "TurnResult", "provider_tool", "tool",
]  # fmt: skip


def test_the_public_names_are_these_and_no_others() -> None:
    assert holdfast.__all__ == PUBLIC
    assert sorted(holdfast.__all__, key=lambda name: (name[0].islower(), name)) == holdfast.__all__
    assert len(holdfast.__all__) <= 45
    for name in holdfast.__all__:
        assert getattr(holdfast, name) is not None


def test_every_public_name_has_a_docstring() -> None:
    for name in holdfast.__all__:
        assert (getattr(holdfast, name).__doc__ or "").strip(), f"{name} has no docstring"


@pytest.mark.parametrize("module", [blocking, channels, events, hooks, models])
def test_a_public_module_is_sorted_documented_and_exports_every_member_of_its_unions(module: ModuleType) -> None:
    assert (module.__doc__ or "").strip()
    assert sorted(module.__all__) == module.__all__
    for name in module.__all__:
        thing = getattr(module, name)
        if members := typing.get_args(thing):
            assert {each.__name__ for each in members} <= {*module.__all__, *holdfast.__all__}, name
        else:
            doc = vars(thing).get("__doc__") if isinstance(thing, type) else thing.__doc__
            assert (doc or "").strip(), f"{name} has no docstring"


@pytest.mark.parametrize(
    ("cls", "names"),
    [
        (
            holdfast.Runtime,
            "agents archive artifact attach_client backup call_result cancel channels close conversations "
            "count_running_calls decision_pages decisions delegate deputies dry_run end_delegation events "
            "find_client grant_scopes grants has_grant_rule history is_open keep_index keep_metrics kill "
            "load_state metrics now open outcome owners pending pending_changes pending_pages preview rename "
            "resolve resolve_many revoke run search send skip_drain snapshot start store stream take_back "
            "timeline unfinished_states wait watch",
        ),
        (holdfast.Agent, "from_json run run_sync to_json"),
        (holdfast.Turn, "final_result result stream"),
    ],
)
def test_the_public_attributes_of_a_class_are_pinned_and_documented(cls: type, names: str) -> None:
    public = [name for name in dir(cls) if not name.startswith("_")]
    assert public == names.split()
    for name in public:
        assert (inspect.getattr_static(cls, name).__doc__ or "").strip(), f"{cls.__name__}.{name}"


def test_importing_holdfast_loads_no_provider_web_framework_database_driver_or_command_line() -> None:
    code = "import sys, holdfast; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    unwanted = {
        "openai", "anthropic", "google", "groq", "pydantic", "pydantic_ai", "starlette", "uvicorn", "asyncpg", "apsw",
        "click", "rich", "prompt_toolkit", "opentelemetry", "httpx", "httpx2", "genai_prices", "sqlite3",
        "langchain_core",
    }  # fmt: skip
    assert not loaded & unwanted


def test_typing_extensions_is_for_type_checkers_only() -> None:
    """It is not a dependency of Holdfast, even if another dependency installs it."""
    code = "import sys; sys.modules['typing_extensions'] = None; import holdfast, holdfast.hooks, holdfast.events"
    subprocess.run([sys.executable, "-c", code], check=True)
