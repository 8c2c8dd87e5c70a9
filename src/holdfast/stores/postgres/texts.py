"""The search index of the PostgreSQL store: a table of word lists (tsvector), and which conversations it lacks.

The lists are made with ``array_to_tsvector`` from words that are split already (``core.text.words``), so that the
server's own parser and dictionaries have no part in it. A query is made from these words, quoted: nothing that a user
types is read as a query's syntax. Every statement can be repeated if its reply was lost.
"""

from __future__ import annotations

from collections.abc import Collection

from holdfast.stores.base import FoundText, IndexedTexts
from holdfast.stores.postgres.connection import Link

UNINDEXED = "SELECT name, indexed FROM conversations WHERE unindexed ORDER BY id DESC LIMIT $1"

# One statement: it moves each conversation that is where its part expects it, then writes the words of those only. The
# rows are locked in the order of names, as everywhere. An append that waits for such a lock finds what it compares
# (sequence number, hash, epoch) unchanged.
INDEX = """
WITH locked AS MATERIALIZED (
    SELECT id FROM conversations WHERE name = ANY($1::text[]) ORDER BY name FOR NO KEY UPDATE
), moved AS (
    UPDATE conversations c SET indexed = i.upto, unindexed = c.seq > i.upto
    FROM unnest($1::text[], $2::int[], $3::int[]) AS i (name, after, upto)
    WHERE c.name = i.name AND c.indexed = i.after AND c.id = ANY (ARRAY (SELECT id FROM locked))
    RETURNING c.id, c.name
)
INSERT INTO texts (conversation, seq, words)
SELECT moved.id, t.seq, array_to_tsvector(string_to_array(t.words, ' '))
FROM unnest($4::text[], $5::int[], $6::text[]) AS t (name, seq, words) JOIN moved ON moved.name = t.name
ON CONFLICT (conversation, seq) DO UPDATE SET words = excluded.words"""


async def list_unindexed(link: Link, limit: int) -> dict[str, int]:
    return dict(await link.fetch(UNINDEXED, limit))


async def index_texts(link: Link, parts: Collection[IndexedTexts]) -> None:
    texts = [(part.conversation, text.seq, " ".join(text.words)) for part in parts for text in part.texts]
    columns = zip(*texts, strict=True) if texts else ((), (), ())
    await link.fetch(
        INDEX,
        [part.conversation for part in parts],
        [part.after for part in parts],
        [part.upto for part in parts],
        *map(list, columns),
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


RESET = """
WITH emptied AS (DELETE FROM texts)
UPDATE conversations SET indexed = 0, unindexed = true WHERE indexed > 0 OR NOT unindexed"""


async def reset_texts(link: Link) -> None:
    await link.fetch(RESET)
