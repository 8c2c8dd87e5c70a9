"""The official conformance suite of MCP against an agent that Holdfast serves."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.node import conformance_command, node_environment

HERE = Path(__file__).parent
NOT_CLAIMED = {
    "tasks-lifecycle",
    "tasks-capability-negotiation",
    "tasks-wire-fields",
    "tasks-request-state-removal",
    "tasks-mrtr-input",
    "tasks-request-headers",
    "tasks-dispatch-and-envelope",
    "tasks-required-task-error",
    "tasks-mrtr-composition",
    "json-schema-2020-12",
    "http-custom-header-server-validation",
}
"""Scenarios that the suite does not score, and that need tools which the fixture does not have."""


@pytest.fixture
def fixture_port() -> Iterator[int]:
    """Start the fixture, and return its port."""
    process = subprocess.Popen([sys.executable, str(HERE / "conformance_server.py")], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.terminate()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_the_required_server_scenarios_of_2026_07_28_pass(fixture_port: int, tmp_path: Path) -> None:
    """MCP conformance of revision 2026-07-28, as the official suite measures it [B146]."""
    run = subprocess.run(
        conformance_command(
            "server",
            *("--url", f"http://127.0.0.1:{fixture_port}/mcp"),
            *("--requirements", "2026-07-28"),
            *("--expected-failures", str(HERE / "expected-failures.yml")),
            *("-o", str(tmp_path / "results")),
        ),
        capture_output=True,
        text=True,
        env=node_environment(tmp_path),
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr
    passed = set(re.findall(r"^✓ ([\w-]+): [1-9]\d* passed, 0 failed", run.stdout, re.MULTILINE))
    failed = set(re.findall(r"^✗ ([\w-]+): ", run.stdout, re.MULTILINE))
    assert len(passed) >= 37, sorted(passed)
    assert failed <= NOT_CLAIMED, sorted(failed - NOT_CLAIMED)


def test_the_server_scenarios_of_2025_11_25_pass_but_for_those_that_are_not_mapped(
    fixture_port: int, tmp_path: Path
) -> None:
    """The same server speaks the revisions with a handshake, except for what expected-failures lists [B146]."""
    run = subprocess.run(
        conformance_command(
            "server",
            *("--url", f"http://127.0.0.1:{fixture_port}/mcp"),
            *("--requirements", "2025-11-25"),
            *("--expected-failures", str(HERE / "expected-failures-2025-11-25.yml")),
            *("-o", str(tmp_path / "results")),
        ),
        capture_output=True,
        text=True,
        env=node_environment(tmp_path),
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr
    assert "✓ tools-call-elicitation: 2 passed" in run.stdout
