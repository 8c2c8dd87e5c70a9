"""One Chromium and one server for the tests of a file: leftovers of other files would fill the inbox."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser
from support.browser import Stage, Visitor, browser


@pytest.fixture(scope="module")  # while it runs, no other test of this process can run an event loop
def chromium() -> Iterator[Browser]:
    with browser(scrollbars=True) as launched:
        yield launched


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("page"))
    stage.start()
    yield stage
    stage.kill()


@pytest.fixture
def visit(chromium: Browser, stage: Stage):
    """Open a browser context for a user. At the end, no request has left the origin and no script has failed."""
    visitors: list[Visitor] = []

    def visit(who: str = "alice", stage: Stage = stage, **options) -> Visitor:
        visitors.append(Visitor(chromium, stage, who, **options))
        return visitors[-1]

    yield visit
    for visitor in visitors:
        visitor.context.close()
        assert visitor.foreign_requests == [], "a request has left the origin"
        assert visitor.script_errors == []
