"""Where strings become things: the one place, beside the command line, that names concrete stores and models.

Imports happen inside the functions, so that nothing is loaded that is not used.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from assent.errors import Invalid, install

if TYPE_CHECKING:
    from assent.models.base import Model
    from assent.stores.base import LogStore
    from assent.stores.upkeep import Health, Plan

STORES = (
    '"memory:", "sqlite:///assent.db" (relative), "sqlite:////var/lib/assent.db" (absolute) '
    'or "postgresql://user@host/database"'
)


def open_store(url: str) -> LogStore:
    """The store behind a URL; it is opened by the runtime."""
    if url == "memory:":
        from assent.stores.memory import MemoryStore

        return MemoryStore()
    if url.startswith("sqlite:///"):
        from assent.stores.sqlite import SQLiteStore

        return SQLiteStore(_file(url))
    _check_postgres(url)
    from assent.stores.postgres import PostgresStore

    return PostgresStore(url)


def place(url: str) -> str:
    """Where a store is, as people are told: no password in it."""
    if url == "memory:" or url.startswith("sqlite:///"):
        return url
    _check_postgres(url)
    from assent.stores.postgres.address import parse

    return parse(url).place


async def plan(url: str) -> Plan:
    """What ``migrate`` would do. Changes nothing."""
    return await _upkeep(url, None)


async def migrate(url: str, tell: Callable[[str], None]) -> Plan:
    """Bring a store to this version, or make it; returns what was done. Tells what is waited for."""
    return await _upkeep(url, tell)


async def _upkeep(url: str, tell: Callable[[str], None] | None) -> Plan:
    from assent.stores.upkeep import Plan

    if url == "memory:":
        raise Invalid("a store in memory has nothing to migrate: it ends with its process")
    if url.startswith("sqlite:///"):
        from assent.stores import database

        if tell is None:
            return database.plan(_file(url))
        tell(f"waiting for the processes that use {url}")
        return await asyncio.to_thread(database.migrate, _file(url))
    _check_postgres(url)
    from assent.stores.postgres import migrations

    found = await (migrations.plan(url) if tell is None else migrations.migrate(url, tell))
    steps = tuple(step.what for step in found.steps)
    return Plan(place=found.place, version=found.version, wanted=found.wanted, steps=steps)


async def health(url: str) -> Health | None:
    """How the store's server is; None: it has none."""
    if url == "memory:" or url.startswith("sqlite:///"):
        return None
    _check_postgres(url)
    from assent.stores.postgres.health import health

    return await health(url)


def _file(url: str) -> str:
    path = url.removeprefix("sqlite:///")
    if not path or "\0" in path or path == ":memory:":
        raise Invalid(f"store {url!r} names no file; use {STORES}")
    return path


def _check_postgres(url: str) -> None:
    if not url.startswith(("postgresql://", "postgres://")):
        raise Invalid(f"unknown store {_begins(url)!r}; use {STORES}")
    if find_spec("asyncpg") is None:
        raise Invalid(f"a PostgreSQL store needs asyncpg: {install('postgres')}", kind="resource_missing")


def _begins(url: str) -> str:
    """As much of it as can be shown: a password may be in what follows."""
    head = re.split(r"[^\w.+/-]", url, maxsplit=1)[0]
    return url if head == url else f"{url[: len(head) + 1]}..."


def check_model(name: str) -> None:
    """Raise ModelError where no model can be behind the string. Loads no provider's SDK, needs no key."""
    from assent.models.providers.names import parse

    parse(name)


@lru_cache(maxsize=64)
def open_model(name: str) -> Model:
    """The model behind a string such as "anthropic:..."."""
    from assent.models.providers import ProviderModel

    return ProviderModel(name)
