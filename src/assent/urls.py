"""Where strings become things: the one place, beside the command line, that names concrete stores and models.

Imports happen inside the functions, so that nothing is loaded that is not used.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from assent.errors import Invalid

if TYPE_CHECKING:
    from assent.models.base import Model
    from assent.stores.base import LogStore

STORES = '"memory:", "sqlite:///assent.db" (relative) or "sqlite:////var/lib/assent.db" (absolute)'


def open_store(url: str) -> LogStore:
    """The store behind a URL; it is opened by the runtime."""
    if url == "memory:":
        from assent.stores.memory import MemoryStore

        return MemoryStore()
    if url.startswith("sqlite:///"):
        from assent.stores.sqlite import SQLiteStore

        path = url.removeprefix("sqlite:///")
        if not path or "\0" in path or path == ":memory:":
            raise Invalid(f"store {url!r} names no file; use {STORES}")
        return SQLiteStore(path)
    raise Invalid(f"unknown store {url!r}; use {STORES}")


@lru_cache(maxsize=64)
def open_model(name: str) -> Model:
    """The model behind a string such as "anthropic:..."."""
    from assent.models.providers import ProviderModel

    return ProviderModel(name)
