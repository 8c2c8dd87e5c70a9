"""Virtual time for the tests that are marked with it."""

import asyncio

from worlds import VirtualLoop


def pytest_asyncio_loop_factories(config, item):
    """Choose the event loop of an async test."""
    if item.get_closest_marker("virtual_time"):
        return {"virtual": VirtualLoop}
    return {"asyncio": asyncio.new_event_loop}
