"""Schema migrations of the SQLite store.

Step n takes a store from schema version n-1 to n; the file's ``user_version`` holds the version. Released steps are
never changed: a change is a new step at the end. All missing steps run in one transaction when the store is opened.
"""

from __future__ import annotations

from holdfast.stores.sqlite.migrations import m0001_first, m0002_checksums, m0003_outbox, m0004_titles, m0005_decisions

APPLICATION_ID = 0x484C4446
"""``HLDF``, in the header of every store: it distinguishes a store from other SQLite databases."""

_STEPS = (m0001_first, m0002_checksums, m0003_outbox, m0004_titles, m0005_decisions)

STEPS: tuple[str, ...] = tuple(step.SQL for step in _STEPS)
STEP_DESCRIPTIONS: tuple[str, ...] = tuple(step.DESCRIPTION for step in _STEPS)
"""A short description of each step."""

VERSION = len(STEPS)
"""The schema version that this code reads and writes."""
