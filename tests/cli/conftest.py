import pytest
from terminal import Desk, Zygote


@pytest.fixture(scope="session")
def zygote():
    ready = Zygote()
    yield ready
    ready.close()


@pytest.fixture
def desk(tmp_path, zygote):
    return Desk(tmp_path, zygote)
