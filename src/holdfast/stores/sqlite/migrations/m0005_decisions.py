"""The index of decisions.

``followed`` is the last event that is in both indexes, that of texts and that of decisions. ``indexed`` is the last one
in the index of texts, as processes of an earlier version know it: they advance it alone. A conversation is unindexed if
it has the mark, or if ``followed`` is behind. So the decisions of an older store are indexed in the background.

``decisions`` is a cache without checksums: each row is compared with its event before it is shown.
"""

DESCRIPTION = "an index of decisions"

SQL = """
ALTER TABLE conversations ADD COLUMN followed INTEGER NOT NULL DEFAULT 0;
CREATE INDEX conversations_unfollowed ON conversations (unindexed OR followed < indexed)
    WHERE unindexed OR followed < indexed;
CREATE TABLE decisions (
    conversation TEXT NOT NULL,
    seq          INTEGER NOT NULL,
    at           REAL NOT NULL,
    kind         TEXT NOT NULL,
    by_id        TEXT NOT NULL,
    behalf_id    TEXT,
    tool         TEXT NOT NULL,
    call         TEXT NOT NULL,
    suspension   INTEGER NOT NULL,
    PRIMARY KEY (conversation, seq)
) WITHOUT ROWID;
CREATE INDEX decisions_time ON decisions (at, conversation, seq);
CREATE INDEX decisions_tool ON decisions (tool, at, conversation, seq);
CREATE INDEX decisions_by ON decisions (by_id, at, conversation, seq);
CREATE INDEX decisions_behalf ON decisions (behalf_id, at, conversation, seq) WHERE behalf_id IS NOT NULL;
"""
