"""Leases: claim, claim owing conversations, and release, each for many conversations in one statement.

A lease lives as long as its owner (``heartbeat``). Every acquisition is a new epoch, and the epoch that was read must
still be current when it is raised: a statement that waited for a row compares it again, but sees the table of owners
as it was when the statement began, and would take a newly registered owner for dead.

After a lost reply a claim is simply repeated. A lost reply to a ``claim_owing`` leaves leases that this process does
not know of: the next ``claim_owing`` claims these again. Both need the first statement to be over; the writer ensures
that.

Other processes are notified of releases. They are not notified of claims: a claim makes no work for them, and two
processes that wake each other by looking would never become idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from holdfast.stores.postgres.connection import Link
from holdfast.stores.postgres.heartbeat import LeaseManager
from holdfast.stores.postgres.jobs import Job

_OWNER_IS_ALIVE = "EXISTS (SELECT FROM owners o WHERE o.owner = $1 AND o.until > clock_timestamp())"

# ``seen`` is the row as the statement first saw it, ``c`` the row after the lock was acquired.
CLAIM = f"""
WITH free AS MATERIALIZED (
    SELECT c.id FROM conversations seen JOIN conversations c ON c.id = seen.id
    WHERE seen.name = ANY($2::text[]) AND c.epoch = seen.epoch AND {_OWNER_IS_ALIVE}
      AND (c.owner IS NULL OR c.owner = $1
           OR NOT EXISTS (SELECT FROM owners o WHERE o.owner = c.owner AND o.until > clock_timestamp()))
    ORDER BY c.name FOR NO KEY UPDATE OF c
)
UPDATE conversations c SET owner = $1, epoch = c.epoch + 1
WHERE c.id = ANY (ARRAY (SELECT id FROM free))
RETURNING c.name, c.epoch"""

SAMPLE_SIZE = 200
"""Conversations of one agent that are considered; of these the longest waiting come first. No index has that order,
because every append would have to move its entry."""

_WANTED = "c.owes AND c.agent = ANY($2) AND c.name <> ALL($4) AND ($5::text[] IS NULL OR c.name = ANY($5))"

# The last step selects by array, not by join: PostgreSQL checks a row that changed since the statement began again, and
# would then run the joined query again, too.
CLAIM_OWING = f"""
WITH gone AS MATERIALIZED (
    SELECT owner FROM owners WHERE until <= clock_timestamp() UNION ALL SELECT $1 WHERE $6
), found AS MATERIALIZED (
    SELECT s.* FROM unnest($2::text[]) AS a (agent) CROSS JOIN LATERAL (
        SELECT c.id, c.epoch, c.updated FROM conversations c
        WHERE {_WANTED} AND c.owner IS NULL AND c.agent = a.agent LIMIT greatest($3, {SAMPLE_SIZE})
    ) s
    UNION ALL
    (SELECT c.id, c.epoch, c.updated FROM gone JOIN conversations c ON c.owner = gone.owner
     WHERE {_WANTED} LIMIT greatest($3, {SAMPLE_SIZE}))
), mine AS MATERIALIZED (
    SELECT c.id FROM found f JOIN conversations c ON c.id = f.id
    WHERE c.owes AND c.epoch = f.epoch AND c.agent = ANY($2)
    ORDER BY f.updated LIMIT $3 FOR NO KEY UPDATE OF c SKIP LOCKED
)
UPDATE conversations c SET owner = $1, epoch = c.epoch + 1
WHERE c.id = ANY (ARRAY (SELECT id FROM mine)) AND {_OWNER_IS_ALIVE}
RETURNING c.name, c.epoch"""

RELEASE = """
WITH held AS MATERIALIZED (
    SELECT c.id FROM conversations c JOIN unnest($1::text[], $2::int[]) AS i (name, epoch) ON i.name = c.name
    WHERE c.epoch = i.epoch AND c.owner IS NOT NULL
    ORDER BY c.name FOR NO KEY UPDATE OF c
)
UPDATE conversations c SET owner = NULL WHERE c.id = ANY (ARRAY (SELECT id FROM held))"""


class _LeaseKind:
    def __init__(self, heartbeat: LeaseManager):
        self._heartbeat = heartbeat

    def admit(self, payload: Any) -> int:
        return 0

    def recheck(self, job: Job) -> None:
        return None


class ClaimKind(_LeaseKind):
    """Jobs of ``claim``; their outcome is the new epoch, or None."""

    async def write(self, link: Link, jobs: Sequence[Job]) -> dict[str, Any]:
        owner = self._heartbeat.owner
        found = await link.fetch(CLAIM, owner, [job.conversation for job in jobs])
        epochs = self._heartbeat.record_leases(owner, dict(found))
        return {job.conversation: epochs.get(job.conversation) for job in jobs}


class ClaimOwingRequest(NamedTuple):
    """The arguments of ``claim_owing``."""

    agents: tuple[str, ...]
    limit: int
    only: list[str] | None
    but: list[str]


class ClaimOwingKind(_LeaseKind):
    """Jobs of ``claim_owing``; their outcome is the epochs by conversation."""

    async def write(self, link: Link, jobs: Sequence[Job]) -> dict[str, Any]:
        owner = self._heartbeat.owner
        outcomes: dict[str, Any] = {}
        for job in jobs:  # at most one: all of them have the same, empty, conversation name
            wanted: ClaimOwingRequest = job.payload
            but = [*wanted.but, *self._heartbeat.held] if job.uncertain else wanted.but
            found = await link.fetch(
                CLAIM_OWING, owner, list(wanted.agents), wanted.limit, but, wanted.only, job.uncertain
            )
            outcomes[job.conversation] = self._heartbeat.record_leases(owner, dict(found))
        return outcomes


class ReleaseKind(_LeaseKind):
    """Jobs of ``release``, which may be repeated."""

    async def write(self, link: Link, jobs: Sequence[Job]) -> dict[str, Any]:
        await link.fetch(RELEASE, [job.conversation for job in jobs], [job.payload for job in jobs])
        for job in jobs:
            self._heartbeat.forget_lease(job.conversation, job.payload)
        self._heartbeat.notify_commit()
        return dict.fromkeys([job.conversation for job in jobs])
