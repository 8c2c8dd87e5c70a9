"""A store in one SQLite file, for any number of processes on one machine."""

from holdfast.stores.sqlite.store import SQLiteStore

__all__ = ["SQLiteStore"]
