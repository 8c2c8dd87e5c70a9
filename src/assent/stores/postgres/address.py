"""Where the store is: a libpq URL with two options of ours, which the driver never sees.

``postgresql://user@host/database?assent_schema=assent&assent_lease=10``
"""

from __future__ import annotations

import re
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit

import msgspec

from assent.errors import Invalid

SCHEMES = ("postgresql://", "postgres://")
LEASE_SECONDS = 10.0
SHORTEST_LEASE = 0.2


class Address(msgspec.Struct, frozen=True, kw_only=True):
    dsn: str
    """What the driver is given."""
    schema: str
    """The tables are in this schema, and no others."""
    lease: float
    """Seconds after which an owner that shows no sign of life is dead."""
    place: str
    """What people are told: no password in it."""

    @property
    def patience(self) -> float:
        """Seconds of silence after which a connection counts as lost: twice within a lease, so that one lost
        connection does not cost the lease."""
        return min(self.lease / 2, 5.0)

    @property
    def endurance(self) -> float:
        """Seconds for which a call tries to reach a database that is away before it says so."""
        return 2 * self.lease


def parse(url: str) -> Address:
    parts = _split(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    schema = options.pop("assent_schema", "assent")
    if not re.fullmatch(r"[a-z_][a-z0-9_]{0,40}", schema) or schema.startswith("pg_"):
        raise Invalid(f"assent_schema={schema!r}: use lower-case letters, digits and _ (at most 41), not pg_...")
    try:
        lease = float(options.pop("assent_lease", LEASE_SECONDS))
    except ValueError:
        lease = 0.0
    if not SHORTEST_LEASE <= lease <= 3600:
        raise Invalid(f"assent_lease must be a number of seconds from {SHORTEST_LEASE:g} to 3600, such as 10")
    ours = [name for name in options if name.startswith("assent_")]
    if ours:
        raise Invalid(f"unknown option {ours[0]} in the store's URL; there are assent_schema and assent_lease")
    host = options.get("host") or parts.netloc.rpartition("@")[2] or "localhost"
    return Address(
        dsn=parts._replace(query=urlencode(options)).geturl(),
        schema=schema,
        lease=lease,
        place=f"PostgreSQL at {host}{parts.path} (schema {schema})",
    )


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port  # says whether it is a number
    except ValueError as fault:
        raise Invalid(f"the store's URL cannot be read ({fault}); use postgresql://user@host/database") from fault
    if not url.startswith(SCHEMES):
        raise Invalid("a PostgreSQL store's URL begins with postgresql://")
    return parts
