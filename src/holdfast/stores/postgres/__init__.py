"""A store in PostgreSQL, for any number of processes on any number of machines."""

from holdfast.stores.postgres.migrations import MigrationStep, PostgresMigrationPlan, migrate, plan_migration
from holdfast.stores.postgres.store import PostgresStore

__all__ = ["MigrationStep", "PostgresMigrationPlan", "PostgresStore", "migrate", "plan_migration"]
