"""How a SQLite store got its tables, step by step.

Step n takes a store from schema version n-1 to n; the version stands in the file's ``user_version``. Steps
that were released are never changed: a change is a new step at the end. All that are missing run in one
transaction when the store is opened.
"""

from __future__ import annotations

from assent.stores.migrations import m0001_first, m0002_checksums

APPLICATION_ID = 0x41535354
"""``ASST``, in the header of every store: what tells one from any other SQLite database."""

_STEPS = (m0001_first, m0002_checksums)

STEPS: tuple[str, ...] = tuple(step.SQL for step in _STEPS)
WHAT: tuple[str, ...] = tuple(step.WHAT for step in _STEPS)
"""What each of them does, in a few words."""

VERSION = len(STEPS)
"""The schema version that this code reads and writes."""
