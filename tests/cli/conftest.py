import sys
from pathlib import Path

import pytest
from terminal import Desk, Zygote

sys.path.append(str(Path(__file__).resolve().parents[1] / "stores"))  # for its PostgreSQL server


@pytest.fixture(scope="session")
def zygote():
    ready = Zygote()
    yield ready
    ready.close()


@pytest.fixture
def desk(tmp_path, zygote):
    return Desk(tmp_path, zygote)
