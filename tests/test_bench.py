"""The bench runs: every measure is there, with a number. How fast it is, is no test's business."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_measure_is_reported_with_a_positive_number(tmp_path):
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run(
        [sys.executable, ROOT / "bench" / "run.py", "--quick", "--json"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert run.returncode == 0, run.stderr
    measures = json.loads(run.stdout)["measures"]
    assert len(measures) == 12
    for measure in measures:
        assert measure["value"] > 0, measure
        assert measure["limit"] > 0, measure
        assert measure["measured"], measure
    assert list(tmp_path.iterdir()) == []  # it leaves nothing behind
