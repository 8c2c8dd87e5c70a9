"""Where the store is: a libpq URL with two options of ours, which the driver never sees.

``postgresql://user@host/database?assent_schema=assent&assent_lease=10``

What is wrong with a URL is said without showing it: a password that is not quoted can be in any part of it.
"""

from __future__ import annotations

import os
import re
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

import msgspec

from assent.errors import Invalid

SCHEMES = ("postgresql://", "postgres://")
LEASE_SECONDS = 10.0
SHORTEST_LEASE = 0.2
PORT = "5432"
SOCKETS = ("/run/postgresql", "/var/run/postgresql", "/tmp", "/private/tmp")
"""Where the driver looks for a socket, in this order, if it is told no host; then it tries localhost."""
HOST = re.compile(r"(\[[^\[\]]+\]|[^:\[\]]*)(:(?P<port>[0-9]*))?")
LIBPQ_ONLY: dict[str, tuple[str, ...] | None] = {
    "connect_timeout": None,
    "tcp_user_timeout": None,
    "keepalives": None,
    "keepalives_idle": None,
    "keepalives_interval": None,
    "keepalives_count": None,
    "client_encoding": None,
    "fallback_application_name": None,
    "load_balance_hosts": None,
    "sslcompression": None,
    "sslsni": None,
    "channel_binding": ("prefer", "disable"),
    "gssencmode": ("prefer", "disable"),
    "require_auth": ("",),
    "requirepeer": ("",),
}
"""libpq's options that the driver does not have; with these values nothing is lost without them (None: with any). How
long the network is waited for follows from the lease."""


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
    return Address(
        dsn=parts._replace(query=urlencode(_passed(options))).geturl(),
        schema=schema,
        lease=lease,
        place=f"PostgreSQL at {_server(parts, options)}{_database(parts, options)} (schema {schema})",
    )


def _server(parts: SplitResult, options: dict[str, str]) -> str:
    """Where the driver will connect: hosts or directories of sockets, with the port where it is not the usual one."""
    netloc = unquote(parts.netloc.rpartition("@")[2])
    hosts = netloc or options.get("host")
    if not hosts and "service" in options:
        return f"service {options['service']}"
    port = ("" if netloc else options.get("port")) or os.environ.get("PGPORT") or PORT
    sockets = (each for each in SOCKETS if os.path.exists(f"{each}/.s.PGSQL.{port}"))
    named = (hosts or os.environ.get("PGHOST") or next(sockets, "localhost")).split(",")
    return ",".join(
        host if re.search(r":\d+$", host) or its == PORT else f"{host}:{its}"
        for host, its in zip(named, port.split(",") * len(named), strict=False)
    )


def _database(parts: SplitResult, options: dict[str, str]) -> str:
    name = parts.path.removeprefix("/") or options.get("dbname") or os.environ.get("PGDATABASE")
    return f"/{name}" if name else ""


def _passed(options: dict[str, str]) -> dict[str, str]:
    """What the driver is given: its own options; the server takes the others as settings."""
    passed: dict[str, str] = {}
    for name, value in options.items():
        if not re.fullmatch(r"[A-Za-z_][\w.]*", name):
            raise _unreadable("an option's name has a character that no option has")
        if name.startswith("assent_"):
            raise Invalid(f"unknown option {name} in the store's URL; there are assent_schema and assent_lease")
        if name not in LIBPQ_ONLY:
            passed[name] = value
        elif (harmless := LIBPQ_ONLY[name]) is not None and value not in harmless:
            raise Invalid(f"{name}={value} in the store's URL cannot be kept by the driver; use sslmode=verify-full")
    return passed


def _split(url: str) -> SplitResult:
    if not url.startswith(SCHEMES):
        raise Invalid("a PostgreSQL store's URL begins with postgresql://")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise _unreadable("its host is none") from None
    if "@" in parts.path or parts.netloc.count("@") > 1 or "#" in url:
        raise _unreadable("there is an @ or a # where none belongs")
    hosts = parts.netloc.rpartition("@")[2].split(",")
    for each in hosts:
        found = HOST.fullmatch(each)
        if found is None or int(found["port"] or 0) > 65535 or (len(hosts) > 1 and not found[1]):
            raise _unreadable("a host or its port is none")
    return parts


def _unreadable(why: str) -> Invalid:
    return Invalid(
        f"the store's URL cannot be read: {why}; use postgresql://user:password@host:5432/database, "
        "and in the password %40 for @, %2F for /, %3A for :, %23 for #, %3F for ?"
    )
