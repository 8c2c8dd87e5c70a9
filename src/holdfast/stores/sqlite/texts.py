"""The indexes that follow the logs of the SQLite store: words (FTS5), decisions, and which conversations they lack.

The caller provides the transaction. Words are letters and digits (``core.text.words``), and are quoted all the same:
nothing that a user types is read as a query's syntax.
"""

from __future__ import annotations

from collections.abc import Collection

import apsw

from holdfast.stores.base import DecisionFilter, DecisionPosition, DecisionRow, FoundText, IndexedPart
from holdfast.stores.decisions import DECISION_COLUMNS, decision_values, select_decisions, to_decision_row
from holdfast.stores.sqlite.append import EVENT_ID_STRIDE
from holdfast.stores.sqlite.connection import Connection
from holdfast.stores.sqlite.migrations.m0004_titles import CREATE_TEXTS

MAX_ID = 2**63 - 1

UNINDEXED = """SELECT name, followed FROM conversations INDEXED BY conversations_unfollowed
               WHERE (unindexed OR followed < indexed) AND (unindexed OR followed < indexed) = 1
               ORDER BY id DESC LIMIT ?"""
IS_UNINDEXED = "SELECT name, followed FROM conversations WHERE name = ? AND (unindexed OR followed < indexed)"
HEAD = "SELECT id, seq, followed FROM conversations WHERE name = ?"
PUT_TEXT = "INSERT OR REPLACE INTO texts (rowid, words) VALUES (?, ?)"
PUT_DECISION = f"""INSERT OR REPLACE INTO decisions ({", ".join(DECISION_COLUMNS)})
                   VALUES ({", ".join("?" * len(DECISION_COLUMNS))})"""
ADVANCE = "UPDATE conversations SET followed = ?2, indexed = max(indexed, ?2) WHERE id = ?1"
CLEAR_MARK = "UPDATE conversations SET unindexed = 0 WHERE id = ?1"
FIND = """SELECT c.name, t.rowid & 0xffffff FROM texts t CROSS JOIN conversations c ON c.id = t.rowid >> 24
          WHERE t.texts MATCH ?1 AND t.rowid < ?2 ORDER BY t.rowid DESC LIMIT ?3"""
RESET = f"""
DROP TABLE IF EXISTS texts;
{CREATE_TEXTS}
DELETE FROM decisions;
UPDATE conversations SET indexed = 0, followed = 0, unindexed = 1 WHERE indexed OR NOT unindexed;"""
RESET_TEXTS_OF = "DELETE FROM texts WHERE rowid >= ?1 AND rowid < ?1 + 16777216"
RESET_DECISIONS_OF = "DELETE FROM decisions WHERE conversation = ?"
RESET_ROW = "UPDATE conversations SET indexed = 0, followed = 0, unindexed = 1 WHERE id = ?"


def list_unindexed(db: Connection, limit: int, conversation: str | None) -> dict[str, int]:
    if conversation is not None:
        return dict(db.execute(IS_UNINDEXED, (conversation,)).fetchall())
    return dict(db.execute(UNINDEXED, (limit,)).fetchall())


def index_parts(db: Connection, parts: Collection[IndexedPart]) -> bool:
    """Add words to the index; return False if it is damaged."""
    try:
        for part in parts:
            _index_part(db, part)
    except (apsw.CorruptError, apsw.SQLError):
        return False  # the caller resets the index, so a part that was written does no harm
    return True


def _index_part(db: Connection, part: IndexedPart) -> None:
    found = db.execute(HEAD, (part.conversation,)).get
    if found is None or found[2] != part.after:
        return
    key, seq, _ = found
    for text in part.texts:
        db.execute(PUT_TEXT, (key * EVENT_ID_STRIDE + text.seq, " ".join(text.words)))
    for row in part.decisions:
        db.execute(PUT_DECISION, decision_values(row))
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


def find_decisions(
    db: Connection, wanted: DecisionFilter, after: DecisionPosition | None, limit: int
) -> list[DecisionRow]:
    sql, values = select_decisions(wanted, after, limit, "?")
    return [to_decision_row(found) for found in db.execute(sql, values).fetchall()]


def reset_index(db: Connection, conversation: str | None) -> bool:
    """Empty the indexes; return False if that of texts is damaged, and can only be emptied as a whole."""
    if conversation is None:
        db.execute(RESET)
        return True
    found = db.execute(HEAD, (conversation,)).get
    if found is None:
        return True
    key = found[0]
    try:
        db.execute(RESET_TEXTS_OF, (key * EVENT_ID_STRIDE,))
    except (apsw.CorruptError, apsw.SQLError):
        return False
    db.execute(RESET_DECISIONS_OF, (conversation,))
    db.execute(RESET_ROW, (key,))
    return True
