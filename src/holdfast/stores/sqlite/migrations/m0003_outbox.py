"""The outbox, and the index of shared grants.

An append writes its outbox rows from ``channels``, so it needs no knowledge of the channels that other processes
registered. The index of the outbox leaves out rows that were given up: they stay until someone retries or drops them.
"""

DESCRIPTION = "the outbox, and an index of shared grants"

SQL = """
CREATE TABLE channels (
    name  TEXT PRIMARY KEY,
    kinds TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE outbox (
    id           TEXT PRIMARY KEY,
    channel      TEXT NOT NULL,
    conversation TEXT NOT NULL,
    seq          INTEGER NOT NULL,
    kind         TEXT NOT NULL,
    at           REAL NOT NULL,
    due          REAL NOT NULL,
    attempts     INTEGER NOT NULL DEFAULT 0,
    error        TEXT,
    failed       INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;
CREATE INDEX outbox_due ON outbox (channel, due) WHERE failed = 0;

CREATE TABLE channel_references (
    channel TEXT NOT NULL,
    key     TEXT NOT NULL,
    value   TEXT NOT NULL,
    PRIMARY KEY (channel, key)
) STRICT, WITHOUT ROWID;

CREATE TABLE shared_grants (
    conversation TEXT NOT NULL,
    grant_id     TEXT NOT NULL,
    tool         TEXT NOT NULL,
    user_id      TEXT,
    until        REAL,
    body         BLOB NOT NULL,
    PRIMARY KEY (conversation, grant_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX shared_grants_tool ON shared_grants (tool, user_id);
"""
