"""Open the store of a command, report a missing one, and watch one that stops responding."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from holdfast import urls
from holdfast.cli.command_lines import CommandWriter
from holdfast.cli.output import try_print
from holdfast.errors import NotFound, StoreError
from holdfast.stores.base import Location, LogStore
from holdfast.urls import display_url

PAGE_SIZE = 500
T = TypeVar("T")
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0
"""Seconds between two attempts to reach a store at the start."""
POLL_SECONDS = 2.0
UNRESPONSIVE_SECONDS = 3.0
"""Seconds without a response after which a notice is printed; the store has its own, longer timeout."""


async def watch_store(store: LogStore, url: str) -> None:
    """Print one notice when the store stops responding and one when it is back. The runtime itself keeps retrying."""
    away = False
    while True:
        asked = asyncio.ensure_future(store.heads([]))
        await asyncio.wait([asked], timeout=UNRESPONSIVE_SECONDS)
        if not asked.done() and not away:
            away = True
            try_print(f"{display_url(url)} is not responding; retrying", err=True)
        try:
            await asked
        except StoreError as failure:
            if not away:
                away = True
                try_print(failure.message if "gone" in failure.details else f"{failure.message}; retrying", err=True)
        else:
            if away:
                away = False
                try_print(f"{display_url(url)} is back", err=True)
        await asyncio.sleep(POLL_SECONDS)


async def retry_until_reachable(attempt: Callable[[], Awaitable[T]]) -> T:
    """Return the result of the attempt. While the store is starting or unreachable, print that and retry."""
    pause = FIRST_PAUSE
    while True:
        try:
            return await attempt()
        except StoreError as failure:
            if not failure.temporary:
                raise
            try_print(f"{failure.message}; retrying in {pause:g} s", err=True)
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def is_file_missing(location: Location) -> bool:
    """Return whether the store is a SQLite file that does not exist."""
    return location.path is not None and not os.path.lexists(location.path)


async def is_store_missing(url: str) -> bool:
    """Return whether there is no store yet: commands that only read or decide do not create one.

    They do not migrate one either, because older processes may use it: a store with an older schema raises StoreError.
    """
    location = urls.parse_location(url)
    if location.kind == "memory":
        return False
    if is_file_missing(location):
        return True
    found = await urls.plan_migration(url)
    if found.version and found.steps:
        raise StoreError(
            f"{found.place} has schema {found.version}, and this Holdfast reads {found.wanted}; to migrate it: "
            f"{CommandWriter(url).format_command('migrate')}",
            kind="log_read_failed",
        )
    return not found.version


def no_store_error(url: str, so: str = "") -> NotFound:
    """Return the error for a store that does not exist; ``so`` is appended as the consequence."""
    return NotFound(
        f"there is no store {display_url(url)}{so}; check --store and $HOLDFAST_STORE, or create it: "
        f"{CommandWriter(url).format_command('migrate')}"
    )


def not_found_error(url: str, conversation: str | None) -> NotFound:
    return no_store_error(url, "" if conversation is None else f", so there is no conversation {conversation!r}")


@asynccontextmanager
async def connect_to_store(url: str) -> AsyncGenerator[LogStore]:
    """Open the store without a runtime, so that no deadline passes meanwhile."""
    store = urls.open_store(url)
    await store.open()
    try:
        yield store
    finally:
        await store.close()
