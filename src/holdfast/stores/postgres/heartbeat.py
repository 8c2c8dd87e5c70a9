"""The heartbeat of an owner: its lease, the database's clock, and commit notifications. One connection, one task.

**The lease.** An owner's row holds the time until which it lives, by the database's clock. The heartbeat extends it
four times per lease. Another process that finds the time passed may take over the owner's conversations, so the owner
must notice first. It counts from *before* its last successful renewal was sent, with a clock that also runs while the
machine sleeps, and ends a margin before the database does. Then the lease has lapsed, even if a late reply confirms a
renewal: the owner continues under a new name, which holds no leases. The database refuses its old appends as well:
they carry epochs that the new owners have raised.

**The clock.** Each renewal returns the database's time; the local clock continues from there. The reply arrives with a
delay, so ``now()`` is behind the database's clock by that delay, and never ahead of it. It does not go back, unless
the difference is larger than a delay explains: then the database's clock was ahead and has been corrected.

**Commit notifications.** A process that has committed sends a NOTIFY: not in the transaction itself, because
PostgreSQL serialises the commits of such transactions, but shortly after, once for all commits within 20 ms. A
notification is only a hint: each new connection counts as one, and the runtime also polls from time to time.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from holdfast.stores.postgres.connection import (
    CLOSE_SECONDS,
    ConnectionLost,
    Link,
    PostgresError,
    Unreachable,
    connect,
    connect_while_opening,
)
from holdfast.stores.postgres.errors import to_store_error
from holdfast.stores.postgres.url import Address
from holdfast.stores.signal import Signal

LEASE_MARGIN = 0.1
"""The share of a lease by which an owner counts itself as dead earlier than the database does."""
RENEWALS_PER_LEASE = 4
"""How often the lease is renewed within its duration."""
NOTIFY_SECONDS = 0.02
"""The shortest time between two notifications."""
CLOCK_RESET_SECONDS = 2.0
"""``now()`` goes back by a difference of this much or more; for a smaller one it stands still."""
DEAD_OWNER_SECONDS = 3600.0
"""A dead owner's row is deleted after this time, unless one of its conversations still owes work."""


_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

boot_clock: Callable[[], float] = partial(time.clock_gettime, _CLOCK)
"""Return seconds of a clock that also runs while this process is stopped or the machine sleeps."""

_TIME = "extract(epoch FROM clock_timestamp())::float8"
REGISTER = f"""INSERT INTO owners (owner, agents, pid, host, since, until)
               VALUES ($1, $2, $3, $4, clock_timestamp(), clock_timestamp() + make_interval(secs => $5))
               RETURNING {_TIME}"""
RENEW = f"""UPDATE owners SET until = clock_timestamp() + make_interval(secs => $2)
            WHERE owner = $1 AND until > clock_timestamp() RETURNING {_TIME}"""
DELETE_DEAD_OWNERS = """DELETE FROM owners o WHERE until < clock_timestamp() - make_interval(secs => $1)
            AND NOT EXISTS (SELECT FROM conversations c WHERE c.owes AND c.owner = o.owner)"""
# A search for dead owners does not find conversations whose owner's row was deleted.
RELEASE_ORPHANS = """UPDATE conversations c SET owner = NULL FROM conversations s
             WHERE s.owes AND s.owner IS NOT NULL AND NOT EXISTS (SELECT FROM owners o WHERE o.owner = s.owner)
             AND c.id = s.id AND c.epoch = s.epoch"""
RELEASE_OWING = "UPDATE conversations SET owner = NULL WHERE owes AND owner = $1"
RELEASE_HELD = "UPDATE conversations SET owner = NULL WHERE name = ANY($2) AND owner = $1"
UNREGISTER = "DELETE FROM owners WHERE owner = $1"


class LeaseManager:
    """Keeps this owner's lease.

    ``until``: the end of the lease, by ``boot_clock``; 0 while the owner is not registered.
    ``held``: the epochs of the conversations that this process knows it has leased.
    """

    def __init__(self, address: Address, on_rename: Callable[[str], None]):
        self._address = address
        self._on_rename = on_rename
        self._base = f"{os.getpid()}-{secrets.token_hex(6)}"
        self._names = 1
        self.owner = self._base
        on_rename(self.owner)
        self.held: dict[str, int] = {}
        self.commits_elsewhere = Signal()
        self.lapses = Signal()
        self._agents: list[str] = []
        self._channel = f"{address.schema}_log"
        self._link: Link | None = None
        self._task: asyncio.Task[None] | None = None
        self._wake = Signal()  # there is something to send, or the connection has ended
        self._notify_due = False
        self._stopping = False
        self._end = float("inf")  # when to give up if the database is unreachable, by ``boot_clock``
        self._registered = False
        self._cleanup_due = False
        self.until = 0.0
        self._renew_at = 0.0
        self._time = (0.0, 0.0)  # the database's time, and ``boot_clock`` when it arrived
        self._latest = 0.0
        self._timer: asyncio.TimerHandle | None = None

    # --- for the store -----------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        return boot_clock() < self.until

    def is_current(self, owner: str) -> bool:
        """Return whether this name is still the owner's, and its lease lives."""
        return owner == self.owner and self.is_alive

    def now(self) -> float:
        database_time, arrived = self._time
        now = database_time + boot_clock() - arrived
        if not now < self._latest < now + CLOCK_RESET_SECONDS:
            self._latest = now
        return self._latest

    def notify_commit(self) -> None:
        """Notify other processes of a commit, soon."""
        if not self._notify_due:
            self._notify_due = True
            asyncio.get_running_loop().call_soon(self._wake.set)  # after the callers that wait for the commit

    def record_leases(self, owner: str, epochs: Mapping[str, int]) -> Mapping[str, int]:
        """Record leases acquired under this name and return them; none if the name has lapsed since."""
        if not self.is_current(owner):
            return {}
        self.held.update(epochs)
        return epochs

    def forget_lease(self, name: str, epoch: int) -> None:
        if self.held.get(name) == epoch:
            del self.held[name]

    async def wait_until_registered(self) -> None:
        """Wait until the database knows this owner: it returns at once, unless the lease has just lapsed."""
        until = boot_clock() + self._address.retry_timeout
        while not self.is_alive:
            if boot_clock() > min(until, self._end):
                fault = Unreachable("it cannot be reached")
                raise to_store_error(fault, self._address, writing=True)
            await asyncio.sleep(self._address.lease / 50)

    # --- start and stop ----------------------------------------------------------------------------------------

    async def start(self, agents: tuple[str, ...]) -> None:
        self._agents = list(agents)
        try:
            await connect_while_opening(self._address, self._connect_and_register)
        except BaseException as fault:
            self.kill()
            if isinstance(fault, (Unreachable, ConnectionLost, PostgresError)):
                raise to_store_error(fault, self._address, writing=True) from fault
            raise
        self._task = asyncio.create_task(self._run(), name="holdfast:heartbeat")

    async def _connect_and_register(self, connect_timeout: float) -> None:
        self._link = await self._connect(connect_timeout)
        try:
            await self._register(self._link)
        except BaseException:
            self._link.drop()
            raise

    def shorten_timeouts(self) -> None:
        """Stop retrying soon if the database is unreachable."""
        self._end = min(self._end, boot_clock() + self._address.silence_timeout)

    async def stop(self) -> None:
        """Release every lease and unregister this owner."""
        self._stopping = True
        self._wake.set()
        if self._task:
            await asyncio.wait([self._task], timeout=CLOSE_SECONDS)
            if not self._task.done():
                self.kill()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._timer:
            self._timer.cancel()
        with suppress(Unreachable, ConnectionLost, PostgresError):  # then the lease expires by itself
            link = self._link
            if link is None or link.is_closed:
                link = self._link = await connect(self._address, timeout=CLOSE_SECONDS)
            await link.fetch(RELEASE_OWING, self.owner)
            await link.fetch(RELEASE_HELD, self.owner, list(self.held))
            await link.fetch(UNREGISTER, self.owner)
            await self._send_notification(link)
        if self._link:
            await self._link.close()

    def kill(self) -> None:
        if self._link:
            self._link.drop()
        if self._timer:
            self._timer.cancel()
        if self._task:
            self._task.cancel()

    async def _connect(self, connect_timeout: float | None = None) -> Link:
        link = await connect(self._address, connect_timeout=connect_timeout)
        try:
            await link.listen(self._channel, self._on_notification, self._wake.set)
        except BaseException:
            link.drop()
            raise
        self.commits_elsewhere.set()  # commits before this connection listened were not notified
        return link

    def _on_notification(self, sender: str) -> None:
        if sender != self._base:
            self.commits_elsewhere.set()

    async def _run(self) -> None:
        pause = self._address.lease / 100
        while not self._stopping:
            try:
                if self._link is None or self._link.is_closed:
                    self._link = await self._connect()
                await self._serve_connection(self._link)
                pause = self._address.lease / 100
            except (Unreachable, ConnectionLost, PostgresError):
                if self._link:
                    self._link.drop()
                if not self._stopping:
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, self._address.lease / 10)

    async def _serve_connection(self, link: Link) -> None:
        notified = 0.0
        while not (self._stopping or link.is_closed):
            now = boot_clock()
            if not self._registered:
                await self._register(link)
            elif now >= self._renew_at:
                await self._renew(link)
            elif self._cleanup_due:
                await self._remove_dead_owners(link)
            elif self._notify_due and now >= notified + NOTIFY_SECONDS:
                self._notify_due = False
                await self._send_notification(link)
                notified = boot_clock()
            else:
                next_ = notified + NOTIFY_SECONDS if self._notify_due else self._renew_at
                await self._wake.wait(max(min(next_, self._renew_at) - now, 0.0))

    async def _register(self, link: Link) -> None:
        name, sent, lease = self.owner, boot_clock(), self._address.lease
        row = (name, self._agents, os.getpid(), socket.gethostname(), lease)
        try:
            ((database_time,),) = await link.fetch(REGISTER, *row)
        except ConnectionLost:
            if self.owner == name:
                self._rename()  # the old name may be registered: its lease expires unused
            raise
        self._registered = True
        self._cleanup_due = True
        self._extend_lease(database_time, sent)

    async def _remove_dead_owners(self, link: Link) -> None:
        self._cleanup_due = False
        with suppress(PostgresError):  # the server is too busy: the next process that starts does it
            await link.fetch(DELETE_DEAD_OWNERS, max(DEAD_OWNER_SECONDS, 10 * self._address.lease))
            await link.fetch(RELEASE_ORPHANS)

    async def _renew(self, link: Link) -> None:
        name, sent = self.owner, boot_clock()
        found = await link.fetch(RENEW, name, self._address.lease)
        if not self.is_current(name):
            return  # the lease has lapsed in the meantime
        if found:
            self._extend_lease(found[0][0], sent)
        else:
            self._lapse()  # the row was deleted, or the database's clock was moved

    def _extend_lease(self, database_time: float, sent: float) -> None:
        lease = self._address.lease
        self._time = (database_time, boot_clock())
        self.until = sent + lease * (1 - LEASE_MARGIN)
        self._renew_at = sent + lease / RENEWALS_PER_LEASE
        self._set_expiry_timer()

    def _set_expiry_timer(self) -> None:
        """Check the clock when the lease ends, unless it is renewed before."""
        if self._timer:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(self.until - boot_clock(), 0.0) + 0.001, self._check_expiry)

    def _check_expiry(self) -> None:
        if boot_clock() >= self.until:
            self._lapse()
        else:
            self._set_expiry_timer()

    def _lapse(self) -> None:
        if self._registered:
            self._rename()
            self._registered = False
            self.until = 0.0
            self.held.clear()
            self.lapses.set()
            self._wake.set()

    def _rename(self) -> None:
        self._names += 1
        self.owner = f"{self._base}-{self._names}"
        self._on_rename(self.owner)

    async def _send_notification(self, link: Link) -> None:
        await link.run(f"BEGIN; SET LOCAL synchronous_commit TO off; NOTIFY {self._channel}, '{self._base}'; COMMIT")
