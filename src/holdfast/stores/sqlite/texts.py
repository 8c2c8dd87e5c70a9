"""The search index of the SQLite store: a full-text table (FTS5) of words, and which conversations it lacks.

The caller provides the transaction. Words are letters and digits (``core.text.words``), and are quoted all the same:
nothing that a user types is read as a query's syntax.
"""

from __future__ import annotations

from collections.abc import Collection

import apsw

from holdfast.stores.base import FoundText, IndexedTexts
from holdfast.stores.sqlite.append import EVENT_ID_STRIDE
from holdfast.stores.sqlite.connection import Connection
from holdfast.stores.sqlite.migrations.m0004_titles import CREATE_TEXTS

MAX_ID = 2**63 - 1

UNINDEXED = """SELECT name, indexed FROM conversations INDEXED BY conversations_unindexed
               WHERE unindexed AND unindexed = 1 ORDER BY id DESC LIMIT ?"""
HEAD = "SELECT id, seq, indexed FROM conversations WHERE name = ?"
PUT_TEXT = "INSERT OR REPLACE INTO texts (rowid, words) VALUES (?, ?)"
ADVANCE = "UPDATE conversations SET indexed = ?2 WHERE id = ?1"
CLEAR_MARK = "UPDATE conversations SET unindexed = 0 WHERE id = ?1"
FIND = """SELECT c.name, t.rowid & 0xffffff FROM texts t CROSS JOIN conversations c ON c.id = t.rowid >> 24
          WHERE t.texts MATCH ?1 AND t.rowid < ?2 ORDER BY t.rowid DESC LIMIT ?3"""
RESET = f"""
DROP TABLE IF EXISTS texts;
{CREATE_TEXTS}
UPDATE conversations SET indexed = 0, unindexed = 1 WHERE indexed OR NOT unindexed;"""


def list_unindexed(db: Connection, limit: int) -> dict[str, int]:
    return dict(db.execute(UNINDEXED, (limit,)).fetchall())


def index_texts(db: Connection, parts: Collection[IndexedTexts]) -> bool:
    """Add words to the index; return False if it is damaged."""
    try:
        for part in parts:
            _index_part(db, part)
    except (apsw.CorruptError, apsw.SQLError):
        return False  # the caller resets the index, so a part that was written does no harm
    return True


def _index_part(db: Connection, part: IndexedTexts) -> None:
    found = db.execute(HEAD, (part.conversation,)).get
    if found is None or found[2] != part.after:
        return
    key, seq, _ = found
    for text in part.texts:
        db.execute(PUT_TEXT, (key * EVENT_ID_STRIDE + text.seq, " ".join(text.words)))
    db.execute(ADVANCE, (key, part.upto))
    if seq == part.upto:
        db.execute(CLEAR_MARK, (key,))


def find_texts(db: Connection, words: Collection[str], after: FoundText | None, limit: int) -> list[FoundText] | None:
    """Return the texts that have these words; None if the index is damaged."""
    before = MAX_ID
    if after is not None:
        key = db.execute("SELECT id FROM conversations WHERE name = ?", (after.conversation,)).get
        if key is None:
            return []
        before = key * EVENT_ID_STRIDE + after.seq
    query = " AND ".join(f'"{word.replace(chr(34), "")}"*' for word in words)
    try:
        return [FoundText(*values) for values in db.execute(FIND, (query, before, limit)).fetchall()]
    except (apsw.CorruptError, apsw.SQLError):
        return None


def reset_texts(db: Connection) -> None:
    db.execute(RESET)
