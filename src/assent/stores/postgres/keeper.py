"""What keeps an owner alive, and what it knows of time and of the others: one connection, one task.

**The lease.** An owner's row says until when it lives, by the database's clock. The keeper moves that on every quarter
of a lease. Whoever finds that time passed may take what the owner ran; so the owner must know it first. It counts from
*before* its last successful renewal was sent, with a clock that goes on while the machine sleeps, and ends a margin
before the database does: then it has lapsed, whatever a late reply may say. It goes on under a new name, which holds
nothing. The database refuses it as well: its appends carry epochs that those who took over have raised.

**The time.** Each renewal brings the database's time; between them the same clock goes on. A reply takes its time to
arrive, so what is known here is behind the database's clock by that much, and never ahead of it. It does not go back,
unless by more than a reply's delay explains: then the database's clock was ahead and has been set right.

**The others.** Who has committed something says so with NOTIFY; not in the transaction itself, because PostgreSQL
commits those one by one, but shortly after, once for all that was committed in 20 ms. It is a hint: what is lost with
a connection is made good by counting each new connection as a sign, and by the runtime's looking from time to time.
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

from assent.stores.postgres.address import Address
from assent.stores.postgres.driver import FAREWELL_SECONDS, Away, Link, Lost, PostgresError, connect
from assent.stores.postgres.faults import explained
from assent.stores.signal import Signal

MARGIN = 0.1
"""Of a lease: by so much earlier than the database an owner counts itself as dead."""
RENEWALS = 4
"""In a lease."""
QUIET_SECONDS = 0.02
"""Between two notifications."""
SET_BACK_SECONDS = 2.0
"""By so much and more the time goes back: it would stand still for as long otherwise."""
FORGOTTEN_SECONDS = 3600.0
"""After so long a dead owner's row goes, unless something that it ran is still owed."""


_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

steady: Callable[[], float] = partial(time.clock_gettime, _CLOCK)
"""Seconds, which also pass while this process is stopped or the machine sleeps."""

_TIME = "extract(epoch FROM clock_timestamp())::float8"
REGISTER = f"""INSERT INTO owners (owner, agents, pid, host, since, until)
               VALUES ($1, $2, $3, $4, clock_timestamp(), clock_timestamp() + make_interval(secs => $5))
               RETURNING {_TIME}"""
RENEW = f"""UPDATE owners SET until = clock_timestamp() + make_interval(secs => $2)
            WHERE owner = $1 AND until > clock_timestamp() RETURNING {_TIME}"""
FORGET = """DELETE FROM owners o WHERE until < clock_timestamp() - make_interval(secs => $1)
            AND NOT EXISTS (SELECT FROM conversations c WHERE c.owes AND c.owner = o.owner)"""
# Whose owner's row is gone (it was forgotten, or struck out by hand) would never be found by who looks for the dead.
ORPHANS = """UPDATE conversations c SET owner = NULL FROM conversations s
             WHERE s.owes AND s.owner IS NOT NULL AND NOT EXISTS (SELECT FROM owners o WHERE o.owner = s.owner)
             AND c.id = s.id AND c.epoch = s.epoch"""
LEAVE_OWED = "UPDATE conversations SET owner = NULL WHERE owes AND owner = $1"
LEAVE_HELD = "UPDATE conversations SET owner = NULL WHERE name = ANY($2) AND owner = $1"
LEAVE = "DELETE FROM owners WHERE owner = $1"


class Keeper:
    """This owner's life: ``until`` then, by the steady clock; zero while the database does not know it.
    ``held``: what it has the lease of, as far as it was told, with the epochs."""

    def __init__(self, address: Address, renamed: Callable[[str], None]):
        self._address = address
        self._renamed = renamed
        self._base = f"{os.getpid()}-{secrets.token_hex(6)}"
        self._names = 1
        self.owner = self._base
        renamed(self.owner)
        self.held: dict[str, int] = {}
        self.foreign = Signal()
        self.lapses = Signal()
        self._agents: list[str] = []
        self._channel = f"{address.schema}_log"
        self._link: Link | None = None
        self._task: asyncio.Task[None] | None = None
        self._stir = Signal()  # something to say, or the connection has ended
        self._telling = False
        self._stopping = False
        self._end = float("inf")  # by the steady clock: when to give up a database that is away
        self._registered = False
        self._untidy = False
        self.until = 0.0
        self._renew_at = 0.0
        self._time = (0.0, 0.0)  # the database's, and the steady clock's when it arrived
        self._latest = 0.0
        self._alarm: asyncio.TimerHandle | None = None

    # --- what the store asks -----------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return steady() < self.until

    def holds(self, owner: str) -> bool:
        """Can what was asked under this name still be done?"""
        return owner == self.owner and self.alive

    def now(self) -> float:
        told, arrived = self._time
        now = told + steady() - arrived
        if not now < self._latest < now + SET_BACK_SECONDS:
            self._latest = now
        return self._latest

    def tell(self) -> None:
        """Something was committed that others may want to know."""
        if not self._telling:
            self._telling = True
            asyncio.get_running_loop().call_soon(self._stir.set)  # after those who waited for that commit

    def got(self, owner: str, epochs: Mapping[str, int]) -> Mapping[str, int]:
        """Leases that were acquired under this name: none of them counts if it has lapsed since."""
        if not self.holds(owner):
            return {}
        self.held.update(epochs)
        return epochs

    def gave_up(self, name: str, epoch: int) -> None:
        if self.held.get(name) == epoch:
            del self.held[name]

    async def ready(self) -> None:
        """Wait until this owner is known to the database: right away, unless it has just lapsed."""
        until = steady() + self._address.endurance
        while not self.alive:
            if steady() > min(until, self._end):
                fault = Away("it cannot be reached")
                raise explained(fault, self._address, writing=True)
            await asyncio.sleep(self._address.lease / 50)

    # --- its life ----------------------------------------------------------------------------------------

    async def start(self, agents: tuple[str, ...]) -> None:
        self._agents = list(agents)
        try:
            self._link = await self._connected()
            await self._register(self._link)
        except BaseException as fault:
            self.kill()
            if isinstance(fault, (Away, Lost, PostgresError)):
                raise explained(fault, self._address, writing=True) from fault
            raise
        self._task = asyncio.create_task(self._live(), name="assent:keeper")

    def hurry(self) -> None:
        """Do not wait long for a database that is away."""
        self._end = min(self._end, steady() + self._address.patience)

    async def stop(self) -> None:
        """Leave: every lease is given up, and this owner's name is struck out."""
        self._stopping = True
        self._stir.set()
        if self._task:
            await asyncio.wait([self._task], timeout=FAREWELL_SECONDS)
            if not self._task.done():
                self.kill()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._alarm:
            self._alarm.cancel()
        with suppress(Away, Lost, PostgresError):  # then it runs out by itself
            link = self._link
            if link is None or link.closed:
                link = self._link = await connect(self._address, patience=FAREWELL_SECONDS)
            await link.fetch(LEAVE_OWED, self.owner)
            await link.fetch(LEAVE_HELD, self.owner, list(self.held))
            await link.fetch(LEAVE, self.owner)
            await self._say(link)
        if self._link:
            await self._link.close()

    def kill(self) -> None:
        if self._link:
            self._link.drop()
        if self._alarm:
            self._alarm.cancel()
        if self._task:
            self._task.cancel()

    async def _connected(self) -> Link:
        link = await connect(self._address)
        try:
            await link.listen(self._channel, self._heard, self._stir.set)
        except BaseException:
            link.drop()
            raise
        self.foreign.set()  # before this connection listened, anything may have happened
        return link

    def _heard(self, who: str) -> None:
        if who != self._base:
            self.foreign.set()

    async def _live(self) -> None:
        pause = self._address.lease / 100
        while not self._stopping:
            try:
                if self._link is None or self._link.closed:
                    self._link = await self._connected()
                await self._serve(self._link)
                pause = self._address.lease / 100
            except (Away, Lost, PostgresError):
                if self._link:
                    self._link.drop()
                if not self._stopping:
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, self._address.lease / 10)

    async def _serve(self, link: Link) -> None:
        said = 0.0
        while not (self._stopping or link.closed):
            now = steady()
            if not self._registered:
                await self._register(link)
            elif now >= self._renew_at:
                await self._renew(link)
            elif self._untidy:
                await self._tidy(link)
            elif self._telling and now >= said + QUIET_SECONDS:
                self._telling = False
                await self._say(link)
                said = steady()
            else:
                next_ = said + QUIET_SECONDS if self._telling else self._renew_at
                await self._stir.wait(max(min(next_, self._renew_at) - now, 0.0))

    async def _register(self, link: Link) -> None:
        name, sent, lease = self.owner, steady(), self._address.lease
        row = (name, self._agents, os.getpid(), socket.gethostname(), lease)
        try:
            ((told,),) = await link.fetch(REGISTER, *row)
        except Lost:
            if self.owner == name:
                self._rename()  # it may have been entered: then it is nobody's, and runs out
            raise
        self._registered = True
        self._untidy = True
        self._renewed(told, sent)

    async def _tidy(self, link: Link) -> None:
        self._untidy = False
        with suppress(PostgresError):  # a server too busy for it: whoever starts next does it
            await link.fetch(FORGET, max(FORGOTTEN_SECONDS, 10 * self._address.lease))
            await link.fetch(ORPHANS)

    async def _renew(self, link: Link) -> None:
        name, sent = self.owner, steady()
        found = await link.fetch(RENEW, name, self._address.lease)
        if not self.holds(name):
            return  # too late: it has lapsed in the meantime
        if found:
            self._renewed(found[0][0], sent)
        else:
            self._lapse()  # the database has lost our row, or its clock was moved

    def _renewed(self, told: float, sent: float) -> None:
        lease = self._address.lease
        self._time = (told, steady())
        self.until = sent + lease * (1 - MARGIN)
        self._renew_at = sent + lease / RENEWALS
        self._watch()

    def _watch(self) -> None:
        """Look at the clock when this owner's time is over, if nothing renews it before."""
        if self._alarm:
            self._alarm.cancel()
        loop = asyncio.get_running_loop()
        self._alarm = loop.call_later(max(self.until - steady(), 0.0) + 0.001, self._look)

    def _look(self) -> None:
        if steady() >= self.until:
            self._lapse()
        else:
            self._watch()

    def _lapse(self) -> None:
        if self._registered:
            self._rename()
            self._registered = False
            self.until = 0.0
            self.held.clear()
            self.lapses.set()
            self._stir.set()

    def _rename(self) -> None:
        self._names += 1
        self.owner = f"{self._base}-{self._names}"
        self._renamed(self.owner)

    async def _say(self, link: Link) -> None:
        await link.run(f"BEGIN; SET LOCAL synchronous_commit TO off; NOTIFY {self._channel}, '{self._base}'; COMMIT")
