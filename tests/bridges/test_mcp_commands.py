"""``holdfast mcp tools``, ``holdfast mcp call`` and ``holdfast doctor``, as a user runs them."""

import asyncio
import json
import shlex
import sys
from pathlib import Path

import pytest
from mcp_support import Ledger, shop_command

HOLDFAST = [sys.executable, "-m", "holdfast"]


async def run(*words: str, cwd: Path) -> tuple[int, str, str]:
    """Run a command; return its exit code, output and errors."""
    process = await asyncio.create_subprocess_exec(
        *HOLDFAST, *words, cwd=cwd, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


@pytest.fixture
def target(tmp_path) -> str:
    return shlex.join(shop_command(Ledger(tmp_path / "ledger.txt")))


async def test_the_tools_of_a_server_are_listed_as_an_agent_gets_them(tmp_path, target) -> None:
    code, output, _ = await run("mcp", "tools", target, "--json", cwd=tmp_path)
    found = {each["tool"]: each for each in map(json.loads, output.splitlines())}
    assert code == 0
    assert found["look"]["annotations"]["readOnlyHint"] is True
    assert (found["look"]["approval"], found["look"]["recovery"]) == ("required", "ask")
    assert found["refund"]["parameters"]["required"] == ["order"]


async def test_a_tool_is_called_and_a_question_is_printed(tmp_path, target) -> None:
    code, output, _ = await run("mcp", "call", target, "look", "--args", '{"order": 7}', cwd=tmp_path)
    assert (code, "order 7" in output) == (0, True)
    code, output, _ = await run("mcp", "call", target, "refund", "--args", '{"order": 7}', cwd=tmp_path)
    assert code == 75
    assert "Refund order 7?" in output
    code, _, errors = await run("mcp", "call", target, "look", "--args", '{"order": "x"}', cwd=tmp_path)
    assert code == 2
    assert "order" in errors


async def test_a_server_of_a_named_file_is_used(tmp_path, target) -> None:
    words = shlex.split(target)
    entry = {"command": words[0], "args": words[1:]}
    (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": {"shop": entry}}))
    code, output, _ = await run("mcp", "tools", "shop", "--config", "servers.json", cwd=tmp_path)
    assert code == 0
    assert "refund" in output
    code, _, errors = await run("mcp", "tools", "other", "--config", "servers.json", cwd=tmp_path)
    assert code == 2
    assert "'other'" in errors


async def test_the_doctor_names_a_server_that_cannot_be_reached(tmp_path) -> None:
    (tmp_path / "desk.py").write_text(
        "from holdfast import Agent, ScriptedModel\nfrom holdfast.bridges.mcp import MCP\n"
        "agent = Agent('desk', model=ScriptedModel([]), tools=[MCP('http://127.0.0.1:9/mcp', name='crm')])\n"
    )
    code, output, _ = await run("doctor", "desk:agent", "--json", "--store", "sqlite:///x.db", cwd=tmp_path)
    found = {each["id"]: each for each in map(json.loads, output.splitlines())}
    assert code == 1
    assert found["servers"]["status"] == "fail"
    assert "MCP server crm" in found["servers"]["detail"]
    code, _, errors = await run("tools", "desk:agent", cwd=tmp_path)
    assert code == 0
    assert "not reachable" in errors
