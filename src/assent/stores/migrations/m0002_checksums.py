"""Checksums of caches (see ``seals``), and how many calls of a conversation wait.

Rows that were there before have no checksum: they are rebuilt from the log when they are met. ``pending.seq`` is the
last event of the append that opened the entry. The index finds conversations whose pending entries were lost, without
reading all conversations; an append touches it only when a conversation begins or ends to wait.
"""

WHAT = "checksums of snapshots and indexes"

SQL = """
ALTER TABLE conversations ADD COLUMN waiting INTEGER NOT NULL DEFAULT -1;
ALTER TABLE conversations ADD COLUMN seal BLOB;
CREATE INDEX conversations_waiting ON conversations (waiting) WHERE waiting > 0;
ALTER TABLE snapshots ADD COLUMN seal BLOB;
ALTER TABLE pending ADD COLUMN seq INTEGER NOT NULL DEFAULT 0;
ALTER TABLE pending ADD COLUMN seal BLOB;
"""
