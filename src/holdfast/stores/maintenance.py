"""Reports about a store for its administrator: its migration plan, and its server's health."""

from __future__ import annotations

import msgspec


class MigrationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The migration steps that a store lacks."""

    place: str
    """The store's location as display text, without a password."""
    version: int
    """The store's schema version; 0: there is no store yet."""
    wanted: int
    """The schema version that this code reads and writes."""
    steps: tuple[str, ...]
    """Descriptions of the missing steps, in order; empty if the store is up to date."""


class DatabaseHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a database server that a store's guarantees depend on."""

    version: str
    ahead: float
    """Seconds by which its clock is ahead of this machine's."""
    within: float
    """The error of ``ahead``: half a round trip."""
    lease: float
    """Seconds without a heartbeat after which a process loses its leases."""
    settings: dict[str, str]
    """The settings that decide whether acknowledged writes survive a power cut."""
    connections: int
    """Connections that count towards ``limit``."""
    allowed: int
    limit: str
    """The name of the limit with the fewest free connections: the server's, the database's or the user's."""
    ours: int
    """Connections of all Holdfast processes together."""
    each: int
    """Connections per Holdfast process."""
    standby: bool
    """The server is a standby and refuses writes."""
    replicas: int
    """The number of standbys that are connected."""
    waits: bool
    """Whether a commit waits for a standby."""
