"""Tools as data: from one process to another, with or without their code."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tool_samples

from holdfast.errors import DeclarationError
from holdfast.tools import Call, Tool, gated, prefixed, provider_tool, tool

OBJECT = {"type": "object"}
CALL = Call()


def through_text(data: Any) -> Any:
    return json.loads(json.dumps(data))


def refusal(run: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(DeclarationError) as caught:
        run(*args, **kwargs)
    return caught.value.message


def every_kind() -> list[Tool]:
    return [
        tool_samples.refund,
        tool_samples.plain,
        tool_samples.Close(),
        tool_samples.bank,
        Tool.declare(name="echo", parameters=OBJECT, handler="tool_samples:echo"),
        tool("tool_samples:typed_echo", name="again", approval="required"),
        tool(tool_samples.echo, name="echo2", parameters=OBJECT),
        Tool.declare(name="by_hand", description="d", parameters=OBJECT, manual=True, result={"enum": [1]}),
        provider_tool("web_search", max_uses=3),
        next(iter(prefixed([tool_samples.refund], "crm_"))),
        next(iter(gated([tool_samples.plain], approval=tool_samples.risky))),
    ]


@pytest.mark.parametrize("made", every_kind(), ids=lambda made: made.spec.name)
def test_a_tool_is_restored_from_its_data_with_its_spec_and_code(made: Tool) -> None:
    """A tool with import paths round-trips through JSON [B10]."""
    back = Tool.from_data(through_text(made.to_data()))
    assert back.spec == made.spec
    assert back.to_data() == made.to_data()
    for part in ("handler", "planner", "policy", "reconciler"):
        was, now = getattr(made, part), getattr(back, part)
        assert (was is None) == (now is None)
        if was is not None:
            assert (was.style, was.threaded) == (now.style, now.threaded)
            assert was.fn == now.fn or type(was.fn.__self__) is type(now.fn.__self__)


LOADER = """
import asyncio, json, sys
from holdfast.tools import Call, Tool
call = Call(id="c", conversation="v")
args = json.loads(sys.argv[1])
for data in json.load(sys.stdin):
    made = Tool.from_data(data)
    got = made.handler(args[made.spec.name], call)
    if not made.handler.threaded:
        got = asyncio.run(got)
    print(made.spec.name, got)
"""


def test_tools_run_in_another_process_that_has_only_their_data() -> None:
    """A tool with import paths runs in another process [B10]."""
    names = {
        "refund": {"order": 7, "day": "2024-01-02"},
        "plain": {"text": "a"},
        "close": {"id": 3},
        "bank": {"query": "q"},
        "echo": {"x": 1},
        "again": {"word": "hi"},
    }
    data = [made.to_data() for made in every_kind() if made.spec.name in names][:6]
    here = Path(__file__).parent
    run = subprocess.run(
        [sys.executable, "-c", LOADER, json.dumps(names)],
        input=json.dumps(data),
        env={**os.environ, "PYTHONPATH": f"{here}:{here.parent.parent / 'src'}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.splitlines() == [
        "refund Receipt(order=7, day=datetime.date(2024, 1, 2))",
        "plain A",
        "close closed 3",
        "bank https://bank?q",
        "echo {'args': {'x': 1}, 'key': 'v/c'}",
        "again hihi",
    ]


def tools_without_import_path() -> list[Tool]:
    @tool
    def local(n: int) -> int:
        """Local."""
        return n

    def echo(args: dict[str, Any]) -> None: ...

    echo.__module__, echo.__qualname__ = "__main__", "echo"
    in_main = tool(echo, name="main", parameters=OBJECT, description="d")

    def impostor(args: dict[str, Any]) -> None: ...

    impostor.__module__, impostor.__qualname__ = "tool_samples", "echo"  # the path belongs to another function
    return [
        Tool.declare(name="fn", description="d", parameters=OBJECT, handler=lambda args: args),
        local,
        in_main,
        tool(impostor, name="impostor", parameters=OBJECT, description="d"),
        tool(tool_samples.echo, name="policy", parameters=OBJECT, approval=lambda args: "auto"),
        Tool.declare(name="plan", parameters=OBJECT, handler="tool_samples:echo", preview=lambda args: 1),
        tool_samples.Bank("https://other"),
    ]


@pytest.mark.parametrize("made", tools_without_import_path(), ids=lambda made: made.spec.name)
def test_code_without_an_import_path_is_refused_with_advice(made: Tool) -> None:
    """A lambda, a local function or an unnamed instance is refused [B10]."""
    message = refusal(made.to_data)
    assert '"package.module:function"' in message
    assert f"handlers={{{made.spec.name!r}: fn}}" in message
    made.to_data(handlers=False)


def test_code_that_was_left_out_must_be_given_at_load() -> None:
    """A tool stored without handlers gets them when it is loaded [B86]."""
    data = through_text(tool_samples.plain.to_data(handlers=False))
    assert "handlers" not in data
    assert "must be given at load" in refusal(Tool.from_data, data)

    def loud(text: str) -> str:
        return text + "!"

    data["planned"] = False
    back = Tool.from_data(data, handler=loud)
    assert back.handler is not None
    assert back.handler({"text": "a"}, CALL) == "a!"
    assert back.spec.parameters == tool_samples.plain.spec.parameters


def test_a_tool_given_at_load_provides_all_of_its_functions() -> None:
    """Handler, preview, approval and reconcile functions come from the given tool [B86]."""
    data = through_text(tool_samples.refund.to_data(handlers=False))
    message = refusal(Tool.from_data, data, tool_samples.echo)
    for missing in ("preview", "approval function", "reconcile function"):
        assert missing in message
    back = Tool.from_data(data, tool_samples.refund)
    assert back.planner is not None
    assert asyncio.run(back.planner({"order": 1, "amount": 2.0}, CALL)) == "refund 2.0 for 1"
    assert back.policy is tool_samples.refund.policy


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("tool_samples", "package.module:function"),
        ("tool_samples:nothing", "has no 'nothing'"),
        ("no_such_module_anywhere:fn", "cannot import"),
        (":fn", "package.module:function"),
    ],
)
def test_an_import_path_that_cannot_be_resolved_is_refused_at_declaration(path: str, expected: str) -> None:
    """The message names the path [B10]."""
    message = refusal(Tool.declare, name="t", description="d", parameters=OBJECT, handler=path)
    assert expected in message
    assert repr(path) in message


@pytest.mark.parametrize("data", [{}, {"name": "x"}, {"name": 3, "description": "", "parameters": "{}"}])
def test_malformed_tool_data_is_refused(data: dict[str, Any]) -> None:
    assert "not a tool's data" in refusal(Tool.from_data, data)
