"""How the server is: what it says of itself that matters to the store's promises. Nothing is changed."""

from __future__ import annotations

import time

from assent.stores.postgres.address import parse
from assent.stores.postgres.driver import Away, Lost, PostgresError, connect
from assent.stores.postgres.faults import CONNECTIONS, explained
from assent.stores.upkeep import Health

SETTINGS = ("fsync", "synchronous_commit", "full_page_writes")
TIME = "SELECT extract(epoch FROM clock_timestamp())::float8"
FACTS = """
SELECT current_setting('server_version'),
       (SELECT count(*) FROM pg_stat_activity WHERE application_name = 'assent'),
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
"""What limits us: its name, how many are used, how many may be. By what anybody may see of other users' sessions."""


async def health(url: str) -> Health:
    address = parse(url)
    try:
        link = await connect(address)
    except Away as fault:
        raise explained(fault, address, writing=False) from fault
    try:
        await link.fetch(TIME)  # prepared once, so that the next one is one round trip
        before = time.time()
        ((theirs,),) = await link.fetch(TIME)
        after = time.time()
        ((version, ours, standby, replicas, waits),) = await link.fetch(FACTS)
        limit, used, allowed = min(await link.fetch(LIMITS), key=lambda row: row[2] - row[1])
        settings = {name: (await link.fetch("SELECT current_setting($1)", name))[0][0] for name in SETTINGS}
    except (Lost, PostgresError) as fault:
        raise explained(fault, address, writing=False) from fault
    finally:
        await link.close()
    return Health(
        version=version,
        ahead=theirs - (before + after) / 2,
        within=(after - before) / 2,
        lease=address.lease,
        settings=settings,
        connections=used,
        allowed=allowed,
        limit=limit,
        ours=ours,
        each=CONNECTIONS,
        standby=standby,
        replicas=replicas,
        waits=waits,
    )
