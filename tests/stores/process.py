"""Another process on a store, for the tests: ``python process.py VERB PATH ...``. Prints facts."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial

from holdfast.errors import Conflict, StoreError
from holdfast.stores.sqlite import writer
from holdfast.stores.sqlite.store import SQLiteStore
from holdfast.testing.store_contract import make_append


def say(*words):
    print(*words, flush=True)


async def opened(path, *agents):
    store = SQLiteStore(path)
    await store.open(agents)
    return store


async def visit(path):
    """Open and close."""
    await (await opened(path)).close()
    say("left")


async def contend(path, name, count):
    """Append ``count`` events to one conversation that others append to as well."""
    store = await opened(path)
    row = await store.row("shared")
    at, done = row.seq if row else 0, 0
    while done < int(count):
        try:
            await store.append(make_append("shared", at, f"{name} {done}".encode()))
        except Conflict as refusal:
            at = refusal.actual
        else:
            at, done = at + 1, done + 1
    await store.close()
    say("done")


async def hold(path):
    """Own a conversation until killed."""
    store = await opened(path, "agent")
    await store.append(make_append("c", 0, owes=True))
    say("claimed", await store.claim("c"), store.owner)
    await asyncio.Event().wait()


async def hold_with_child(path):
    """As ``hold``, with children that outlive this process: one forked, one started with open descriptors."""
    store = await opened(path, "agent")
    await store.append(make_append("c", 0, owes=True))
    epoch = await store.claim("c")
    say("claimed", epoch, store.owner, *children())
    await asyncio.Event().wait()


def children():
    started = subprocess.Popen(["sleep", "60"], close_fds=False)
    hear, tell = os.pipe()
    forked = os.fork()
    if forked == 0:
        os.write(tell, b".")
        signal.pause()
    os.read(hear, 1)  # it has begun, and let go of what it shared
    return forked, started.pid


async def append_for_ever(path):
    """Say each append once it is acknowledged, with several conversations in flight."""
    store = await opened(path)

    async def converse(n):
        version = 0
        while True:
            await store.append(make_append(f"c{n}", version, f"{n}/{version}".encode()))
            version += 1
            say(n, version)

    await asyncio.gather(*(converse(n) for n in range(8)))


async def die_at(path, point):
    """Append one event, then be killed at a crash point of the second append."""
    store = await opened(path)
    await store.append(make_append("c", 0))

    def crash(name):
        if name == point:
            os.kill(os.getpid(), signal.SIGKILL)

    writer.crash_hook = crash
    await store.append(make_append("c", 1))
    say("survived")


async def lock(path):
    """Hold the write lock until a line comes in."""
    import apsw

    db = apsw.Connection(path)
    db.execute("BEGIN IMMEDIATE")
    say("locked")
    sys.stdin.readline()
    db.execute("ROLLBACK")
    say("unlocked")


async def be_copied_by_python(path, target):
    """Append under load while Python's own SQLite copies the store and closes it; say what was acknowledged."""
    import sqlite3

    store = await opened(path)
    done = dict.fromkeys(range(8), 0)

    async def converse(n):
        while True:
            await store.append(make_append(f"c{n}", done[n], f"{n}/{done[n]}".encode()))
            done[n] += 1
            say("acknowledged", n, done[n])

    def copy():
        source, copied = sqlite3.connect(path), sqlite3.connect(target)
        source.backup(copied)
        source.close()

    tasks = [asyncio.create_task(converse(n)) for n in done]
    while min(done.values()) < 5:
        await asyncio.sleep(0)
    await asyncio.to_thread(copy)
    for task in tasks:
        with suppress(StoreError):
            await task
    say("stopped")
    os.kill(os.getpid(), signal.SIGKILL)


def use_in_child(store):
    child = os.fork()
    if child == 0:
        try:
            store.row("c").send(None)
        except Exception as error:
            say("refused", error)
        store._writer.abandon = store._reader.abandon = partial(say, "abandoned")
        store.__del__()
        try:
            store.close().send(None)
        except StopIteration:
            say("left alone")
        os._exit(0)
    os.waitpid(child, 0)


async def use_after_fork(path):
    store = await opened(path)
    await store.append(make_append("c", 0))
    use_in_child(store)
    await store.append(make_append("c", 1))
    say("parent at", (await store.row("c")).seq, [row.alive for row in await store.owners()])
    await store.close()


asyncio.run(globals()[sys.argv[1]](*sys.argv[2:]))
