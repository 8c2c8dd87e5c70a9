"""Run the tests that are marked with ``virtual_time`` on an event loop with virtual time."""

import asyncio

from worlds import VirtualLoop


def pytest_asyncio_loop_factories(config, item):
    """Choose the event loop of an async test."""
    if item.get_closest_marker("virtual_time"):
        return {"virtual": VirtualLoop}
    return {"asyncio": asyncio.new_event_loop}
