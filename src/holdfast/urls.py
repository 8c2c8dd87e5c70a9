"""Stores and models by URL or name: the only module outside their packages that imports concrete ones.

Imports happen inside the functions, so that only the modules in use are loaded.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from holdfast.errors import Invalid, install_command

if TYPE_CHECKING:
    from holdfast.models.base import Model
    from holdfast.stores.base import Location, LogStore
    from holdfast.stores.maintenance import DatabaseHealth, MigrationPlan

STORE_EXAMPLES = (
    '"memory:", "sqlite:///holdfast.db" (relative), "sqlite:////var/lib/holdfast.db" (absolute) '
    'or "postgresql://user@host/database"'
)


def open_store(url: str) -> LogStore:
    """Return the store behind a URL; the runtime opens it."""
    if url == "memory:":
        from holdfast.stores.memory import MemoryStore

        return MemoryStore()
    if url.startswith("sqlite:///"):
        from holdfast.stores.sqlite.store import SQLiteStore

        return SQLiteStore(_sqlite_path(url))
    _check_postgres(url)
    from holdfast.stores.postgres import PostgresStore

    return PostgresStore(url)


def parse_location(url: str) -> Location:
    """Return where the store behind a URL lives; raise Invalid if no store can be there. Opens nothing."""
    from holdfast.stores.base import Location

    if url == "memory:":
        return Location(kind="memory", text=url)
    if url.startswith("sqlite:///"):
        return Location(kind="sqlite", text=url, path=_sqlite_path(url))
    _check_postgres(url)
    from holdfast.stores.postgres.url import parse_address

    return Location(kind="postgres", text=parse_address(url).place, shared=True)


def display_url(url: str) -> str:
    """Return the store's location as display text, without a password."""
    if url.startswith("sqlite:///"):
        return url  # also if it names no file: the error that follows says so
    return parse_location(url).text


async def plan_migration(url: str) -> MigrationPlan:
    """Return the steps that ``migrate`` would run. Changes nothing."""
    return await _plan_or_migrate(url, None)


async def migrate(url: str, tell: Callable[[str], None]) -> MigrationPlan:
    """Create the store, or bring it to this version; return the steps that were run. ``tell`` gets the progress."""
    return await _plan_or_migrate(url, tell)


async def _plan_or_migrate(url: str, tell: Callable[[str], None] | None) -> MigrationPlan:
    from holdfast.stores.maintenance import MigrationPlan

    if url == "memory:":
        raise Invalid("a store in memory has nothing to migrate: it ends with its process")
    if url.startswith("sqlite:///"):
        from holdfast.stores.sqlite import file

        if tell is None:
            return file.plan_migration(_sqlite_path(url))
        tell(f"waiting for the processes that use {url}")
        return await asyncio.to_thread(file.migrate, _sqlite_path(url))
    _check_postgres(url)
    from holdfast.stores.postgres import migrations

    found = await (migrations.plan_migration(url) if tell is None else migrations.migrate(url, tell))
    steps = tuple(step.what for step in found.steps)
    return MigrationPlan(place=found.place, version=found.version, wanted=found.wanted, steps=steps)


async def store_health(url: str) -> DatabaseHealth | None:
    """Return the health of the store's server; None if it has no server."""
    if url == "memory:" or url.startswith("sqlite:///"):
        return None
    _check_postgres(url)
    from holdfast.stores.postgres.health import database_health

    return await database_health(url)


def _sqlite_path(url: str) -> str:
    path = url.removeprefix("sqlite:///")
    if not path or "\0" in path or path == ":memory:":
        raise Invalid(f"store {url!r} names no file; use {STORE_EXAMPLES}")
    return path


def _check_postgres(url: str) -> None:
    if not url.startswith(("postgresql://", "postgres://")):
        raise Invalid(f"unknown store {_safe_prefix(url)!r}; use {STORE_EXAMPLES}")
    if find_spec("asyncpg") is None:
        raise Invalid(f"a PostgreSQL store needs asyncpg: {install_command('postgres')}", kind="resource_missing")


def _safe_prefix(url: str) -> str:
    """Return the part of a URL that is safe to show: the rest may contain a password."""
    head = re.split(r"[^\w.+/-]", url, maxsplit=1)[0]
    return url if head == url else f"{url[: len(head) + 1]}..."


def check_model(name: str) -> None:
    """Raise ModelError if the name cannot be a model's. Loads no provider's SDK, needs no key."""
    from holdfast.models.providers.names import parse_model_name

    parse_model_name(name)


@lru_cache(maxsize=64)
def open_model(name: str) -> Model:
    """Return the model behind a name such as "anthropic:..."."""
    from holdfast.models.providers import ProviderModel

    return ProviderModel(name)
