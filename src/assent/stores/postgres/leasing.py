"""Who runs what: claim, take and release, each for many conversations in one statement.

A lease is alive while its owner is (``keeper``). Every acquisition is a new epoch, and the epoch that was read must
still be there when it is raised: a statement that had to wait for a row compares again, but sees the owners as they
were when it began, and would take one who has just come for dead.

A lost reply to a claim needs no reading back, because a claim may be made twice. A lost take has left leases that
nobody here knows of: the next one takes these too. Both want the first statement to be over, and the writer sees to
that.

Others are told of what was given up. Not of what was taken: that makes no work for anybody, and two who wake each other
by looking would never rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from assent.stores.postgres.driver import Link
from assent.stores.postgres.jobs import Job
from assent.stores.postgres.keeper import Keeper

_I_LIVE = "EXISTS (SELECT FROM owners o WHERE o.owner = $1 AND o.until > clock_timestamp())"

CLAIM = f"""
UPDATE conversations c SET owner = $1, epoch = c.epoch + 1
FROM unnest($2::text[]) AS i (name) JOIN conversations s ON s.name = i.name
WHERE c.id = s.id AND c.epoch = s.epoch AND {_I_LIVE}
  AND (c.owner IS NULL OR c.owner = $1
       OR NOT EXISTS (SELECT FROM owners o WHERE o.owner = c.owner AND o.until > clock_timestamp()))
RETURNING c.name, c.epoch"""

SAMPLE = 200
"""So many of an agent's are looked at: who has waited longest of these comes first. No index has the order, since every
append would have to move its entry."""

_WANTED = "c.owes AND c.agent = ANY($2) AND c.name <> ALL($4) AND ($5::text[] IS NULL OR c.name = ANY($5))"

# What is taken at last is named in an array, not joined: a row that has changed since the statement began is looked at
# once more, and a join would then look for what is free once more, too.
TAKE = f"""
WITH gone AS MATERIALIZED (
    SELECT owner FROM owners WHERE until <= clock_timestamp() UNION ALL SELECT $1 WHERE $6
), found AS MATERIALIZED (
    SELECT s.* FROM unnest($2::text[]) AS a (agent) CROSS JOIN LATERAL (
        SELECT c.id, c.epoch, c.updated FROM conversations c
        WHERE {_WANTED} AND c.owner IS NULL AND c.agent = a.agent LIMIT greatest($3, {SAMPLE})
    ) s
    UNION ALL
    (SELECT c.id, c.epoch, c.updated FROM gone JOIN conversations c ON c.owner = gone.owner
     WHERE {_WANTED} LIMIT greatest($3, {SAMPLE}))
), mine AS MATERIALIZED (
    SELECT c.id FROM found f JOIN conversations c ON c.id = f.id
    WHERE c.owes AND c.epoch = f.epoch AND (c.agent = ANY($2)) IS TRUE
    ORDER BY f.updated LIMIT $3 FOR NO KEY UPDATE OF c SKIP LOCKED
)
UPDATE conversations c SET owner = $1, epoch = c.epoch + 1
WHERE c.id = ANY (ARRAY (SELECT id FROM mine)) AND {_I_LIVE}
RETURNING c.name, c.epoch"""

RELEASE = """
UPDATE conversations c SET owner = NULL FROM unnest($1::text[], $2::int[]) AS i (name, epoch)
WHERE c.name = i.name AND c.epoch = i.epoch AND c.owner IS NOT NULL"""


class _Leasing:
    def __init__(self, keeper: Keeper):
        self._keeper = keeper

    def admit(self, what: Any) -> int:
        return 0

    def void(self, job: Job) -> None:
        return None


class Claiming(_Leasing):
    """The kind of job that ``claim`` is; its outcome is the new epoch, or None."""

    async def write(self, link: Link, jobs: Sequence[Job]) -> dict[str, Any]:
        owner = self._keeper.owner
        found = await link.fetch(CLAIM, owner, [job.conversation for job in jobs])
        epochs = self._keeper.got(owner, dict(found))
        return {job.conversation: epochs.get(job.conversation) for job in jobs}


class Wanted(NamedTuple):
    """What ``take`` is asked for."""

    agents: tuple[str, ...]
    limit: int
    only: list[str] | None
    but: list[str]


class Taking(_Leasing):
    """The kind of job that ``take`` is; its outcome is the epochs."""

    async def write(self, link: Link, jobs: Sequence[Job]) -> dict[str, Any]:
        owner = self._keeper.owner
        outcomes: dict[str, Any] = {}
        for job in jobs:  # there is one: all of them are of the same "conversation"
            wanted: Wanted = job.what
            but = [*wanted.but, *self._keeper.held] if job.doubt else wanted.but
            found = await link.fetch(TAKE, owner, list(wanted.agents), wanted.limit, but, wanted.only, job.doubt)
            outcomes[job.conversation] = self._keeper.got(owner, dict(found))
        return outcomes


class Releasing(_Leasing):
    """The kind of job that ``release`` is. What is given up twice is given up."""

    async def write(self, link: Link, jobs: Sequence[Job]) -> dict[str, Any]:
        await link.fetch(RELEASE, [job.conversation for job in jobs], [job.what for job in jobs])
        for job in jobs:
            self._keeper.gave_up(job.conversation, job.what)
        self._keeper.tell()
        return dict.fromkeys([job.conversation for job in jobs])
