"""Titles and archived conversations in the rows, and the search index.

``title`` and ``archived`` have a checksum of their own; rows without one are rebuilt from the log when they are read.
Pending entries have the title, too: without their checksums they are rebuilt in the same way.
``unindexed`` says that the log has texts that the index ``texts`` lacks, ``indexed`` is the last event that it has. An
append sets the mark and never writes to the index; all conversations start with it, so the index of an older store is
built in the background. The index on ``archived`` makes a page of the list cost the same in a store with 100,000
conversations, whichever share of them is archived.

``texts`` has words only, no text: the row id is the event's id (with 0 as the sequence number for the title), and
snippets are cut from the log. The words are split by ``core.text.words``; the tokenizer only separates them at spaces.
"""

DESCRIPTION = "titles, archived conversations, and a search index"

CREATE_TEXTS = """
CREATE VIRTUAL TABLE texts USING fts5(words, content='', contentless_delete=1, detail=none, tokenize='ascii');
"""

SQL = f"""
ALTER TABLE conversations ADD COLUMN title TEXT NOT NULL DEFAULT '';
ALTER TABLE conversations ADD COLUMN archived INTEGER NOT NULL DEFAULT 0;
ALTER TABLE conversations ADD COLUMN title_seal BLOB;
ALTER TABLE conversations ADD COLUMN unindexed INTEGER NOT NULL DEFAULT 1;
ALTER TABLE conversations ADD COLUMN indexed INTEGER NOT NULL DEFAULT 0;
UPDATE pending SET seal = NULL;
CREATE INDEX conversations_archived ON conversations (archived);
CREATE INDEX conversations_unindexed ON conversations (unindexed) WHERE unindexed;
{CREATE_TEXTS}"""
