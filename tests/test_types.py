"""The type checker is a test, so that it runs in parallel with the other tests and is reported like them."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_pyright_reports_no_error():
    ran = subprocess.run([sys.executable, "-m", "pyright"], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
