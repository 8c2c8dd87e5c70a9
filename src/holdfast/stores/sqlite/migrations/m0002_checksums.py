"""Checksums of caches (see ``checksums``), and the number of waiting calls of a conversation.

Older rows have no checksum: they are rebuilt from the log when they are read. ``pending.seq`` is the last event of the
append that opened the entry. The index finds conversations that lost pending entries, without reading all
conversations; an append touches it only when a conversation starts or stops waiting.
"""

DESCRIPTION = "checksums of snapshots and indexes"

SQL = """
ALTER TABLE conversations ADD COLUMN waiting INTEGER NOT NULL DEFAULT -1;
ALTER TABLE conversations ADD COLUMN seal BLOB;
CREATE INDEX conversations_waiting ON conversations (waiting) WHERE waiting > 0;
ALTER TABLE snapshots ADD COLUMN seal BLOB;
ALTER TABLE pending ADD COLUMN seq INTEGER NOT NULL DEFAULT 0;
ALTER TABLE pending ADD COLUMN seal BLOB;
"""
