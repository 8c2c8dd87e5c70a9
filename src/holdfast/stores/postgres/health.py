"""A health check of the database server: the facts that the store's guarantees depend on. Read-only."""

from __future__ import annotations

import time

from holdfast.stores.maintenance import DatabaseHealth
from holdfast.stores.postgres.connection import (
    ConnectionLost,
    PostgresError,
    Unreachable,
    connect,
    connect_while_opening,
)
from holdfast.stores.postgres.errors import CONNECTIONS_PER_STORE, to_store_error
from holdfast.stores.postgres.url import parse_address

SETTINGS = ("fsync", "synchronous_commit", "full_page_writes")
TIME = "SELECT extract(epoch FROM clock_timestamp())::float8"
FACTS = """
SELECT current_setting('server_version'),
       (SELECT count(*) FROM pg_stat_activity WHERE application_name = 'holdfast'),
       pg_is_in_recovery(),
       (SELECT count(*) FROM pg_stat_replication),
       current_setting('synchronous_standby_names') <> ''"""
LIMITS = """
SELECT 'max_connections', (SELECT sum(numbackends) FROM pg_stat_database)::int,
       current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
       - coalesce(current_setting('reserved_connections', true)::int, 0)
UNION ALL
SELECT 'the connection limit of database ' || d.datname, s.numbackends, d.datconnlimit
FROM pg_database d JOIN pg_stat_database s ON s.datid = d.oid
WHERE d.datname = current_database() AND d.datconnlimit >= 0
UNION ALL
SELECT 'the connection limit of user ' || r.rolname,
       (SELECT count(*) FROM pg_stat_activity a WHERE a.usesysid = r.oid)::int, r.rolconnlimit
FROM pg_roles r WHERE r.rolname = session_user AND r.rolconnlimit >= 0"""
"""The limits on connections: name, connections in use, connections allowed. Needs no privileges."""


async def database_health(url: str) -> DatabaseHealth:
    """Return the server's version, clock difference, settings, connections and replication."""
    address = parse_address(url)
    try:
        link = await connect_while_opening(address, lambda timeout: connect(address, connect_timeout=timeout))
    except Unreachable as fault:
        raise to_store_error(fault, address, writing=False) from fault
    try:
        await link.fetch(TIME)  # prepares the statement, so that the next fetch is one round trip
        before = time.time()
        ((theirs,),) = await link.fetch(TIME)
        after = time.time()
        ((version, ours, standby, replicas, waits),) = await link.fetch(FACTS)
        limit, used, allowed = min(await link.fetch(LIMITS), key=lambda row: row[2] - row[1])
        settings = {name: (await link.fetch("SELECT current_setting($1)", name))[0][0] for name in SETTINGS}
    except (ConnectionLost, PostgresError) as fault:
        raise to_store_error(fault, address, writing=False) from fault
    finally:
        await link.close()
    return DatabaseHealth(
        version=version,
        ahead=theirs - (before + after) / 2,
        within=(after - before) / 2,
        lease=address.lease,
        settings=settings,
        connections=used,
        allowed=allowed,
        limit=limit,
        ours=ours,
        each=CONNECTIONS_PER_STORE,
        standby=standby,
        replicas=replicas,
        waits=waits,
    )
