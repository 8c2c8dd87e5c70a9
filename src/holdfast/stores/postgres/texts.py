"""The indexes that follow the logs of the PostgreSQL store: word lists (tsvector), decisions, and what they lack.

The lists are made with ``array_to_tsvector`` from words that are split already (``core.text.words``), so that the
server's own parser and dictionaries have no part in it. A query is made from these words, quoted: nothing that a user
types is read as a query's syntax. Every statement can be repeated if its reply was lost.
"""

from __future__ import annotations

from collections.abc import Collection

from holdfast.stores.base import DecisionFilter, DecisionPosition, DecisionRow, FoundText, IndexedPart
from holdfast.stores.decisions import DECISION_COLUMNS, decision_values, select_decisions, to_decision_row
from holdfast.stores.postgres.connection import Link

UNINDEXED = """SELECT name, followed FROM conversations WHERE unindexed OR followed < indexed
               ORDER BY id DESC LIMIT $1"""
IS_UNINDEXED = "SELECT name, followed FROM conversations WHERE name = $1 AND (unindexed OR followed < indexed)"

# One statement: it moves each conversation that is where its part expects it, then writes the words of those only. The
# rows are locked in the order of names, as everywhere. An append that waits for such a lock finds what it compares
# (sequence number, hash, epoch) unchanged.
INDEX = """
WITH locked AS MATERIALIZED (
    SELECT id FROM conversations WHERE name = ANY($1::text[]) ORDER BY name FOR NO KEY UPDATE
), moved AS (
    UPDATE conversations c
    SET followed = i.upto, indexed = greatest(c.indexed, i.upto), unindexed = c.seq > i.upto
    FROM unnest($1::text[], $2::int[], $3::int[]) AS i (name, after, upto)
    WHERE c.name = i.name AND c.followed = i.after AND c.id = ANY (ARRAY (SELECT id FROM locked))
    RETURNING c.id, c.name
), decided AS (
    INSERT INTO decisions (conversation, seq, at, kind, by_id, behalf_id, tool, call, suspension)
    SELECT d.*
    FROM unnest($7::text[], $8::int[], $9::float8[], $10::text[], $11::text[], $12::text[], $13::text[], $14::text[],
                $15::int[]) AS d (conversation, seq, at, kind, by_id, behalf_id, tool, call, suspension)
    JOIN moved ON moved.name = d.conversation
    ON CONFLICT (conversation, seq) DO UPDATE
    SET at = excluded.at, kind = excluded.kind, by_id = excluded.by_id, behalf_id = excluded.behalf_id,
        tool = excluded.tool, call = excluded.call, suspension = excluded.suspension
)
INSERT INTO texts (conversation, seq, words)
SELECT moved.id, t.seq, array_to_tsvector(string_to_array(t.words, ' '))
FROM unnest($4::text[], $5::int[], $6::text[]) AS t (name, seq, words) JOIN moved ON moved.name = t.name
ON CONFLICT (conversation, seq) DO UPDATE SET words = excluded.words"""


async def list_unindexed(link: Link, limit: int, conversation: str | None) -> dict[str, int]:
    if conversation is not None:
        return dict(await link.fetch(IS_UNINDEXED, conversation))
    return dict(await link.fetch(UNINDEXED, limit))


async def index_parts(link: Link, parts: Collection[IndexedPart]) -> None:
    texts = [(part.conversation, text.seq, " ".join(text.words)) for part in parts for text in part.texts]
    columns = zip(*texts, strict=True) if texts else ((), (), ())
    rows = [decision_values(row) for part in parts for row in part.decisions]
    decided = zip(*rows, strict=True) if rows else ((),) * len(DECISION_COLUMNS)
    await link.fetch(
        INDEX,
        [part.conversation for part in parts],
        [part.after for part in parts],
        [part.upto for part in parts],
        *map(list, columns),
        *map(list, decided),
        size=sum(len(words) for _, _, words in texts),
    )


FIND = """SELECT c.name, t.seq FROM texts t JOIN conversations c ON c.id = t.conversation
          WHERE t.words @@ $1::text::tsquery AND (t.conversation, t.seq) < ($2::bigint, $3::int)
          ORDER BY t.conversation DESC, t.seq DESC LIMIT $4"""
MAX_POSITION = (2**63 - 1, 2**31 - 1)


async def find_texts(link: Link, words: Collection[str], after: FoundText | None, limit: int) -> list[FoundText]:
    position = MAX_POSITION
    if after is not None:
        found = await link.fetch("SELECT id FROM conversations WHERE name = $1", after.conversation)
        if not found:
            return []
        position = (found[0][0], after.seq)
    query = " & ".join(f"'{_quote(word)}':*" for word in words)
    return [FoundText(*values) for values in await link.fetch(FIND, query, *position, limit)]


def _quote(word: str) -> str:
    return word.replace("\\", "\\\\").replace("'", "''")


async def find_decisions(
    link: Link, wanted: DecisionFilter, after: DecisionPosition | None, limit: int
) -> list[DecisionRow]:
    sql, values = select_decisions(wanted, after, limit, "$")
    return [to_decision_row(found) for found in await link.fetch(sql, *values)]


RESET = """
WITH texts_gone AS (DELETE FROM texts), decisions_gone AS (DELETE FROM decisions)
UPDATE conversations SET indexed = 0, followed = 0, unindexed = true WHERE indexed > 0 OR NOT unindexed"""
RESET_ONE = """
WITH reset AS (
    UPDATE conversations SET indexed = 0, followed = 0, unindexed = true WHERE name = $1 RETURNING id
), texts_gone AS (DELETE FROM texts WHERE conversation IN (SELECT id FROM reset))
DELETE FROM decisions WHERE conversation = $1"""


async def reset_index(link: Link, conversation: str | None) -> None:
    if conversation is None:
        await link.fetch(RESET)
    else:
        await link.fetch(RESET_ONE, conversation)
