"""A store as a whole, for whoever keeps it: what stands between it and this version, and how its server is."""

from __future__ import annotations

import msgspec


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What stands between a store and this version."""

    place: str
    """Where it is, as people are told: no password in it."""
    version: int
    """The schema's; 0: there is no store yet."""
    wanted: int
    """The one that this version reads and writes."""
    steps: tuple[str, ...]
    """What is done to get there, in this order; none: there is nothing to do."""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """A database server, as far as it matters to what a store promises."""

    version: str
    ahead: float
    """Seconds by which its clock is ahead of this machine's."""
    within: float
    """How exactly that is known: half a round trip."""
    lease: float
    """Seconds after which a process that shows no sign of life has lost its leases."""
    settings: dict[str, str]
    """Those that decide whether what was acknowledged survives a power cut."""
    connections: int
    """Those that count towards the limit that is nearest."""
    allowed: int
    limit: str
    """Which one that is: the server's, the database's or the user's."""
    ours: int
    """How many connections Assent has, all in all."""
    each: int
    """How many a process of Assent holds."""
    standby: bool
    """It only follows another server, and takes no writes."""
    replicas: int
    """Standbys that follow it now."""
    waits: bool
    """A commit waits for a standby."""
