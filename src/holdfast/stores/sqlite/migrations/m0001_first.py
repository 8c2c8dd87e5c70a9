"""The first schema.

An event's id is one integer, conversation * 2^24 + seq: the log of a conversation is stored together in the table's
own order, without a second index, and a row may fill most of a page before it spills into overflow pages (in a WITHOUT
ROWID table it spills from a quarter of a page on: a reply of 1 KB would take 4.5). The generated columns
``conversation`` and ``seq`` take no space. Long bodies of events and pending entries are compressed (see
``compression``); hashes are of the original bodies.

Indexes are partial where that excludes conversations at rest. An index costs a page in each transaction that touches
it: there are only those that a loop queries all the time (owing, due, close).
"""

DESCRIPTION = "the first tables"

SQL = """
CREATE TABLE conversations (
    id      INTEGER PRIMARY KEY,
    name    TEXT NOT NULL UNIQUE,
    seq     INTEGER NOT NULL,
    hash    BLOB NOT NULL,
    status  TEXT NOT NULL,
    agent   TEXT NOT NULL,
    owes    INTEGER NOT NULL,
    owner   TEXT,
    epoch   INTEGER NOT NULL,
    updated REAL NOT NULL
) STRICT;
CREATE INDEX conversations_owing ON conversations (agent, owner) WHERE owes;
CREATE INDEX conversations_held ON conversations (owner) WHERE owner IS NOT NULL;

CREATE TABLE events (
    id           INTEGER PRIMARY KEY,
    conversation INTEGER GENERATED ALWAYS AS (id >> 24) VIRTUAL,
    seq          INTEGER GENERATED ALWAYS AS (id & 0xffffff) VIRTUAL,
    hash         BLOB NOT NULL,
    body         BLOB NOT NULL
) STRICT;

CREATE TABLE snapshots (
    conversation INTEGER PRIMARY KEY,
    seq          INTEGER NOT NULL,
    body         BLOB NOT NULL
) STRICT;

CREATE TABLE pending (
    id           INTEGER PRIMARY KEY,
    conversation INTEGER NOT NULL,
    call         TEXT NOT NULL,
    due          REAL NOT NULL,
    deadline     REAL NOT NULL,
    body         BLOB NOT NULL,
    UNIQUE (conversation, call)
) STRICT;
CREATE INDEX pending_due ON pending (due);

CREATE TABLE artifacts (
    sha256 BLOB NOT NULL UNIQUE,
    body   BLOB NOT NULL
) STRICT;

CREATE TABLE owners (
    owner  TEXT PRIMARY KEY,
    agents TEXT NOT NULL,
    pid    INTEGER NOT NULL,
    host   TEXT NOT NULL,
    since  REAL NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE clients (
    conversation TEXT NOT NULL,
    client       TEXT NOT NULL,
    tools        TEXT NOT NULL,
    until        REAL NOT NULL,
    PRIMARY KEY (conversation, client)
) STRICT, WITHOUT ROWID;

CREATE TABLE call_leases (
    conversation TEXT NOT NULL,
    call         TEXT NOT NULL,
    client       TEXT NOT NULL,
    until        REAL NOT NULL,
    PRIMARY KEY (conversation, call)
) STRICT, WITHOUT ROWID;
"""
