"""A store in PostgreSQL, for any number of processes on any number of machines."""

from assent.stores.postgres.migrations import Plan, Step, migrate, plan
from assent.stores.postgres.store import PostgresStore

__all__ = ["Plan", "PostgresStore", "Step", "migrate", "plan"]
