"""A process that uses a SQLite store, for the tests: ``python process.py VERB PATH ...``. It prints what it did."""

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
from holdfast.testing.store_contract import make_append, make_channel


def print_line(*words):
    print(*words, flush=True)


async def open_store(path, *agents):
    store = SQLiteStore(path)
    await store.open(agents)
    return store


async def visit(path):
    """Open the store and close it."""
    await (await open_store(path)).close()
    print_line("closed")


async def contend(path, name, count):
    """Append ``count`` events to a conversation that other processes append to as well."""
    store = await open_store(path)
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
    print_line("done")


async def hold(path):
    """Own a conversation until killed."""
    store = await open_store(path, "agent")
    await store.append(make_append("c", 0, owes=True))
    print_line("claimed", await store.claim("c"), store.owner)
    await asyncio.Event().wait()


async def hold_with_child(path):
    """Like ``hold``, with children that outlive this process: one forked, one started with open descriptors."""
    store = await open_store(path, "agent")
    await store.append(make_append("c", 0, owes=True))
    epoch = await store.claim("c")
    print_line("claimed", epoch, store.owner, *start_children())
    await asyncio.Event().wait()


def start_children():
    started = subprocess.Popen(["sleep", "60"], close_fds=False)
    read_end, write_end = os.pipe()
    forked = os.fork()
    if forked == 0:
        os.write(write_end, b".")
        signal.pause()
    os.read(read_end, 1)  # the child runs: its fork handlers have released the inherited lock
    return forked, started.pid


async def append_for_ever(path):
    """Print each append once it is acknowledged; several conversations append at the same time, with notices."""
    store = await open_store(path)
    await store.put_channel(make_channel("mail"))

    async def converse(n):
        version = 0
        while True:
            notices = [(version + 1, "suspended")]
            await store.append(make_append(f"c{n}", version, f"{n}/{version}".encode(), notices=notices))
            version += 1
            print_line(n, version)

    await asyncio.gather(*(converse(n) for n in range(8)))


async def die_at(path, point):
    """Append one event, then die at a crash point of the second append."""
    store = await open_store(path)
    await store.put_channel(make_channel("mail"))
    await store.append(make_append("c", 0, notices=[(1, "suspended")]))

    def crash(name):
        if name == point:
            os.kill(os.getpid(), signal.SIGKILL)

    writer.crash_hook = crash
    await store.append(make_append("c", 1, notices=[(2, "resolved")]))
    print_line("survived")


async def die_with_claim(path):
    """Claim the notices of a channel, then die before they are settled."""
    store = await open_store(path)
    rows, _ = await store.claim_notices(["mail"], 10.0, 40.0)
    print_line(*(row.id for row in rows))
    os.kill(os.getpid(), signal.SIGKILL)


async def lock(path):
    """Hold the write lock until a line is read from standard input."""
    import apsw

    db = apsw.Connection(path)
    db.execute("BEGIN IMMEDIATE")
    print_line("locked")
    sys.stdin.readline()
    db.execute("ROLLBACK")
    print_line("unlocked")


async def append_during_copy(path, target):
    """Append under load while Python's own SQLite copies the store and closes it; print each acknowledged append."""
    import sqlite3

    store = await open_store(path)
    done = dict.fromkeys(range(8), 0)

    async def converse(n):
        while True:
            await store.append(make_append(f"c{n}", done[n], f"{n}/{done[n]}".encode()))
            done[n] += 1
            print_line("acknowledged", n, done[n])

    def copy():
        source, copied = sqlite3.connect(path), sqlite3.connect(target)
        source.backup(copied)
        source.close()

    tasks = [asyncio.create_task(converse(n)) for n in done]
    while min(done.values()) < 5:
        await asyncio.sleep(0)
    print_line("opening")
    await asyncio.to_thread(copy)
    for task in tasks:
        with suppress(StoreError):
            await task
    print_line("stopped")
    os.kill(os.getpid(), signal.SIGKILL)


def use_in_child(store):
    child = os.fork()
    if child == 0:
        try:
            store.row("c").send(None)
        except Exception as error:
            print_line("refused", error)
        store._writer.abandon = store._reader.abandon = partial(print_line, "abandoned")
        store.__del__()
        try:
            store.close().send(None)
        except StopIteration:
            print_line("close did nothing")
        os._exit(0)
    os.waitpid(child, 0)


async def use_after_fork(path):
    store = await open_store(path)
    await store.append(make_append("c", 0))
    use_in_child(store)
    await store.append(make_append("c", 1))
    print_line("parent at", (await store.row("c")).seq, [row.alive for row in await store.owners()])
    await store.close()


asyncio.run(globals()[sys.argv[1]](*sys.argv[2:]))
