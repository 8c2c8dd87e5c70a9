"""The benchmarks run and report a number for every measure. Their speed is not tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.workspace.sandbox.probe import find_sandbox

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(("store", "count"), [("sqlite", 32), ("postgres", 14)])
def test_every_measure_is_reported_with_a_positive_number(tmp_path, store, count):
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run(
        [sys.executable, ROOT / "bench" / "run.py", "--quick", "--json", "--store", store],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stderr
    measures = json.loads(run.stdout)["measures"]
    if store == "sqlite" and find_sandbox().level != "A":
        count -= 1  # the sandboxed command
    assert len(measures) == count
    for measure in measures:
        assert measure["value"] > 0, measure
        assert measure["limit"] is None or measure["limit"] > 0, measure
        assert measure["measured"], measure
    assert list(tmp_path.iterdir()) == []  # no files are left


WITHOUT_SDK = """
import runpy, sys
sys.modules["anthropic"] = None
sys.path.insert(0, sys.argv[1])
sys.argv = ["run.py", "--quick", "--json", "provider_chunk", "long_request"]
runpy.run_path(sys.path[0] + "/run.py", run_name="__main__")
"""


def test_measures_of_a_provider_without_its_sdk_are_skipped_with_a_message(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_SDK, ROOT / "bench"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    assert "skipped: provider_chunk long_request: anthropic not installed: pip install 'holdfast[" in run.stderr
    assert json.loads(run.stdout)["measures"] == []
