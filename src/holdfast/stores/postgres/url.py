"""The store's URL: a libpq URL with two options of Holdfast, which the driver does not get.

``postgresql://user@host/database?holdfast_schema=holdfast&holdfast_lease=10``

Error messages never show the URL: a password that is not quoted can be in any part of it.
"""

from __future__ import annotations

import os
import re
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

import msgspec

from holdfast.errors import Invalid

SCHEMES = ("postgresql://", "postgres://")
LEASE_SECONDS = 10.0
MIN_LEASE_SECONDS = 0.2
DEFAULT_PORT = "5432"
SOCKET_DIRECTORIES = ("/run/postgresql", "/var/run/postgresql", "/tmp", "/private/tmp")
"""Where the driver looks for a socket, in this order, if no host is given; then it tries localhost."""
HOST_PATTERN = re.compile(r"(\[[^\[\]]+\]|[^:\[\]]*)(:(?P<port>[0-9]*))?")
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
"""libpq's options that the driver does not support, and the values with which they can be ignored (None: any value).
Network timeouts follow from the lease."""


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed store URL."""

    dsn: str
    """The URL for the driver."""
    schema: str
    """The schema of the tables, which holds no other tables."""
    lease: float
    """Seconds without a heartbeat after which an owner is dead."""
    place: str
    """Display text without a password."""

    @property
    def silence_timeout(self) -> float:
        """Seconds without a reply after which a connection counts as lost.

        At most half a lease, so that one lost connection does not cost the lease.
        """
        return min(self.lease / 2, 5.0)

    @property
    def retry_timeout(self) -> float:
        """Seconds for which a call retries an unreachable database before it fails."""
        return 2 * self.lease


def parse_address(url: str) -> Address:
    """Parse a store URL; raise Invalid without quoting it."""
    parts = _split_url(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    schema = options.pop("holdfast_schema", "holdfast")
    if not re.fullmatch(r"[a-z_][a-z0-9_]{0,40}", schema) or schema.startswith("pg_"):
        raise Invalid(f"holdfast_schema={schema!r}: use lower-case letters, digits and _ (at most 41), not pg_...")
    try:
        lease = float(options.pop("holdfast_lease", LEASE_SECONDS))
    except ValueError:
        lease = 0.0
    if not MIN_LEASE_SECONDS <= lease <= 3600:
        raise Invalid(f"holdfast_lease must be a number of seconds from {MIN_LEASE_SECONDS:g} to 3600, such as 10")
    return Address(
        dsn=parts._replace(query=urlencode(_driver_options(options))).geturl(),
        schema=schema,
        lease=lease,
        place=f"PostgreSQL at {_describe_server(parts, options)}{_describe_database(parts, options)} (schema {schema})",
    )


def _describe_server(parts: SplitResult, options: dict[str, str]) -> str:
    """Return the hosts or socket directories that the driver connects to, with ports that are not the default."""
    netloc = unquote(parts.netloc.rpartition("@")[2])
    hosts = netloc or options.get("host")
    if not hosts and "service" in options:
        return f"service {options['service']}"
    port = ("" if netloc else options.get("port")) or os.environ.get("PGPORT") or DEFAULT_PORT
    sockets = (folder for folder in SOCKET_DIRECTORIES if os.path.exists(f"{folder}/.s.PGSQL.{port}"))
    named = (hosts or os.environ.get("PGHOST") or next(sockets, "localhost")).split(",")
    return ",".join(
        host if re.search(r":\d+$", host) or host_port == DEFAULT_PORT else f"{host}:{host_port}"
        for host, host_port in zip(named, port.split(",") * len(named), strict=False)
    )


def _describe_database(parts: SplitResult, options: dict[str, str]) -> str:
    name = parts.path.removeprefix("/") or options.get("dbname") or os.environ.get("PGDATABASE")
    return f"/{name}" if name else ""


def _driver_options(options: dict[str, str]) -> dict[str, str]:
    """Return the options for the driver; it passes those that it does not know to the server as settings."""
    passed: dict[str, str] = {}
    for name, value in options.items():
        if not re.fullmatch(r"[A-Za-z_][\w.]*", name):
            raise _invalid_url("an option's name has a character that no option has")
        if name.startswith("holdfast_"):
            raise Invalid(f"unknown option {name} in the store's URL; there are holdfast_schema and holdfast_lease")
        if name not in LIBPQ_ONLY:
            passed[name] = value
        elif (harmless := LIBPQ_ONLY[name]) is not None and value not in harmless:
            raise Invalid(f"{name}={value} in the store's URL cannot be kept by the driver; use sslmode=verify-full")
    return passed


def _split_url(url: str) -> SplitResult:
    if not url.startswith(SCHEMES):
        raise Invalid("a PostgreSQL store's URL begins with postgresql://")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise _invalid_url("its host is none") from None
    if "@" in parts.path or parts.netloc.count("@") > 1 or "#" in url:
        raise _invalid_url("there is an @ or a # where none belongs")
    hosts = parts.netloc.rpartition("@")[2].split(",")
    for host in hosts:
        found = HOST_PATTERN.fullmatch(host)
        if found is None or int(found["port"] or 0) > 65535 or (len(hosts) > 1 and not found[1]):
            raise _invalid_url("a host or its port is none")
    return parts


def _invalid_url(reason: str) -> Invalid:
    return Invalid(
        f"the store's URL cannot be read: {reason}; use postgresql://user:password@host:5432/database, "
        "and in the password %40 for @, %2F for /, %3A for :, %23 for #, %3F for ?"
    )
