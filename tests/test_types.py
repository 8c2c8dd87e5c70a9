"""The type checker is part of the suite, so that it runs beside the other tests and is reported like them."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_types_are_right():
    ran = subprocess.run([sys.executable, "-m", "pyright"], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
