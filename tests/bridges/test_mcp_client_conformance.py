"""The official conformance suite's client scenarios, with our client [B146].

Not claimed: the scenarios of OAuth (``auth/...``) and of extensions (``sep-2640-...``).
"""

import asyncio
import sys
from pathlib import Path

import pytest
from support.node import conformance_command, node_environment

CLIENT = Path(__file__).with_name("conformance_client.py")
SCENARIOS = [
    ("2026-07-28", "tools_call"),
    ("2026-07-28", "request-metadata"),
    ("2026-07-28", "http-standard-headers"),
    ("2026-07-28", "http-custom-headers"),
    ("2026-07-28", "http-invalid-tool-headers"),
    ("2026-07-28", "json-schema-ref-no-deref"),
    ("2026-07-28", "json-schema-2020-12-preservation"),
    ("2026-07-28", "sep-2322-client-request-state"),
    ("2025-11-25", "initialize"),
    ("2025-11-25", "tools_call"),
    ("2025-11-25", "elicitation-sep1034-client-defaults"),
    ("2025-11-25", "sse-retry"),
]


@pytest.mark.parametrize(("version", "scenario"), SCENARIOS)
async def test_a_client_scenario_of_the_conformance_suite_passes(version, scenario, tmp_path) -> None:
    """[B146]"""
    words = ["client", "--command", f"{sys.executable} {CLIENT}", "--scenario", scenario, "--spec-version", version]
    process = await asyncio.create_subprocess_exec(
        *conformance_command(*words, "--timeout", "120000", "-o", str(tmp_path)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=node_environment(tmp_path),
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
