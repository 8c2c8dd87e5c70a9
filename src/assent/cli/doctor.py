"""Is all well: one check a line, with what to do about it. It looks and mends nothing.

The checks use the store itself, with no runtime on it: no deadline passes and nothing is revived while we look.
Of models it says what can be said without asking anybody: no token is spent.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from importlib import metadata
from typing import Literal

import msgspec
from rich.text import Text

from assent.cli.commands import MEMORY, Commands
from assent.cli.loading import lacking, load_agent
from assent.cli.output import FAILED, json_lines
from assent.cli.passing import named
from assent.cli.reading import missing
from assent.cli.text import shown, span
from assent.cli.verification import PAGE, opened
from assent.errors import AssentError, StoreError
from assent.models.providers import names
from assent.stores.base import LogStore, Row

SQLITE = (3, 51, 3)
"""The oldest that this package asks for."""
SKEW = 2.0
"""Seconds that the clock of the disk and ours may differ."""
LATE = 5.0
"""Seconds after which somebody should have acted on a deadline, or taken up what is owed."""
Status = Literal["ok", "warn", "fail"]
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


class Finding(msgspec.Struct, kw_only=True, omit_defaults=False):
    id: str
    status: Status
    detail: str
    fix: str | None = None
    duration: float = 0.0
    """Seconds that the check took."""


class _Result(msgspec.Struct):
    status: Status
    detail: str
    fix: str | None = None


class Examination:
    """The checks of one store, in order; those that need it open are left out where it does not open.

    model, spec:  what is to run; without them, every provider of which there is a sign
    """

    def __init__(self, url: str, model: str | None = None, spec: str | None = None):
        self._url, self._commands = url, Commands(url)
        self._model, self._spec = model, spec
        self._path = url.removeprefix("sqlite:///") if url.startswith("sqlite:///") else None
        self._store: LogStore | None = None
        self._stack = AsyncExitStack()

    async def run(self) -> list[Finding]:
        checks: list[tuple[str, Callable[[], Awaitable[_Result]]]] = [
            ("sqlite", self._sqlite),
            ("extras", self._extras),
            ("clock", self._clock),
            ("schema", self._schema),
            ("store", self._opens),
        ]
        async with self._stack:
            found = [await _timed(name, check) for name, check in checks]
            if self._store is not None:
                found += [await _timed("leases", self._leases), await _timed("deadlines", self._deadlines)]
        return found + [await _timed(name, check) for name, check in self._models()]

    # --- models ---

    def _models(self) -> list[tuple[str, Callable[[], Awaitable[_Result]]]]:
        checks: list[tuple[str, Callable[[], Awaitable[_Result]]]] = []
        if self._spec is not None:
            checks.append(("agent", partial(self._agent, self._spec)))
        if self._model is not None:
            checks.append(("model", partial(self._named, self._model)))
        if not checks:
            signs: dict[names.Provider, str] = {}
            for name, needs in names.PROVIDERS.items():
                if _sign(name, needs):
                    signs.setdefault(needs, name)  # several need the same: the first stands for them
            checks = [(name, partial(self._provider, name)) for name in signs.values()]
        return checks

    async def _agent(self, spec: str) -> _Result:
        agent = load_agent(spec)
        if agent.model is None:
            return _Result("fail", f"agent {agent.name} has no model", "give it one: Agent(model=...), or --model")
        models = [named(model) for model in (agent.model, *agent.fallbacks)]
        told = f"agent {agent.name} asks {', then '.join(models)}"
        for model in (agent.model, *agent.fallbacks, agent.context.summary):
            if isinstance(model, str) and (lacks := lacking(model)):
                what = " and ".join(word for word, _ in lacks)
                severe = model is agent.model or any(word != "key" for word, _ in lacks)
                return _Result("fail" if severe else "warn", f"{told}; {model} lacks its {what}", _fixes(lacks))
        return _Result("ok", told)

    async def _named(self, model: str) -> _Result:
        if lacks := lacking(model):
            return _Result("fail", f"{model} lacks its {' and '.join(what for what, _ in lacks)}", _fixes(lacks))
        return _Result("ok", f"{model} can be asked; whether it answers was not tried")

    async def _provider(self, name: str) -> _Result:
        if lacks := lacking(f"{name}:any"):
            there = "installed" if lacks[0][0] == "key" else "a key is set"
            return _Result("warn", f"{there}, but no {' and no '.join(what for what, _ in lacks)}", _fixes(lacks))
        needs = names.PROVIDERS[name]
        key = next((variable for variable in needs.keys if os.environ.get(variable)), None)
        return _Result("ok", f"installed; {f'the key is in {key}' if key else f'the server is in {needs.url}'}")

    # --- without the store ---

    async def _sqlite(self) -> _Result:
        import apsw

        version = apsw.sqlite_lib_version()
        if tuple(int(part) for part in version.split(".")[:3]) < SQLITE:
            needed = ".".join(map(str, SQLITE))
            return _Result("warn", f"SQLite {version}, apsw {apsw.apsw_version()}", f"pip install 'apsw>={needed}'")
        return _Result("ok", f"SQLite {version}, apsw {apsw.apsw_version()}")

    async def _extras(self) -> _Result:
        names = [f"{name} {'yes' if there else 'no'}" for name, there in extras()]
        return _Result("ok", ", ".join(names) or "this version declares none")

    async def _clock(self) -> _Result:
        folder = os.path.dirname(self._path or "") or "."
        now, disk = time.time(), _disk_time(folder)
        if abs(disk - now) > SKEW:
            detail = f"the disk of {folder} is {span(abs(disk - now))} {'ahead' if disk > now else 'behind'}"
            return _Result("warn", detail, "set the clock (NTP): deadlines are kept by it")
        return _Result("ok", f"the disk agrees within {SKEW:.0f} s")

    async def _schema(self) -> _Result:
        if self._path is None or missing(self._url):
            return _Result("ok", "nothing is stored yet")
        from assent.stores.database import checked_path, inspect, reader_connection
        from assent.stores.migrations import VERSION

        path = checked_path(self._path)
        inspect(path)  # refuses what is newer, or not ours
        db = reader_connection(path)
        try:
            version = int(db.execute("PRAGMA user_version").get)
        finally:
            db.close()
        if version < VERSION:
            return _Result("warn", f"version {version}; this Assent writes {VERSION}", "the next command migrates it")
        return _Result("ok", f"version {version}")

    async def _opens(self) -> _Result:
        if missing(self._url):
            return _Result(
                "warn", f"there is no store {self._url} yet", "the first `assent run` makes it; or see --store"
            )
        self._store = await self._stack.enter_async_context(opened(self._url))
        rows = await self._rows()
        others = [each for each in await self._store.owners() if each.alive and each.owner != self._store.owner]
        newest = max((row.updated for row in rows), default=0.0)
        detail = f"{len(rows)} conversations, {len(others)} other processes have it open"
        if newest > time.time() + SKEW:
            ahead = span(newest - time.time())
            return _Result("warn", f"{detail}; its newest event is {ahead} in the future", "set the clock (NTP)")
        if self._url == MEMORY:
            return _Result("warn", "in memory: it ends with the process", "use sqlite:///assent.db")
        return _Result("ok", detail)

    # --- with the store ---

    async def _rows(self) -> list[Row]:
        assert self._store is not None
        rows: list[Row] = []
        while page := await self._store.rows(cursor=rows[-1].conversation if rows else None, limit=PAGE):
            rows += page
        return rows

    async def _leases(self) -> _Result:
        assert self._store is not None
        alive = {each.owner for each in await self._store.owners() if each.alive}
        late = time.time() - LATE
        rows = await self._rows()
        stuck = [row for row in rows if row.owes and row.owner not in alive and row.updated < late]
        if not stuck:
            busy = sum(row.owes for row in rows)
            return _Result("ok", f"{busy} conversations are at work" if busy else "nothing is left undone")
        first = stuck[0]
        fix = self._commands.go_on(None, first.conversation)
        names = ", ".join(f"{row.conversation} (agent {row.agent})" for row in stuck[:5])
        return _Result("warn", f"{len(stuck)} conversations have work to do and nobody runs them: {names}", fix)

    async def _deadlines(self) -> _Result:
        assert self._store is not None
        now = time.time()
        waiting = await self._store.pending()
        late = [entry for entry in waiting if entry.deadline < now - LATE]
        if not late:
            return _Result("ok", f"{len(waiting)} calls wait, none of them too long")
        oldest = span(now - min(entry.deadline for entry in late))
        detail = f"{len(late)} of {len(waiting)} calls are overdue, the oldest by {oldest}: no process was there to act"
        return _Result("warn", detail, self._commands.write("pending", "--wait", "1"))


def _sign(name: str, needs: names.Provider) -> bool:
    """Somebody means to use this provider: there is a key, or a package that is for nothing else."""
    keyed = any(os.environ.get(variable) for variable in needs.keys)
    return keyed or (needs.extra == name and names.installed(names.Name(name, "any")))


def _fixes(lacks: list[tuple[str, str]]) -> str:
    return "; ".join(fix for _, fix in lacks)


def extras() -> Iterator[tuple[str, bool]]:
    """What can be installed beside Assent, and whether all of it is there. The tools of its developers aside."""
    try:
        wanted = metadata.requires("assent") or []
    except metadata.PackageNotFoundError:
        wanted = []
    found: dict[str, list[str]] = {}
    for line in wanted:
        package, extra = re.match(r"[\w.-]+", line), re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        if package and extra and extra[1] != "dev":
            found.setdefault(extra[1], []).append(package[0])
    for name, packages in found.items():
        yield name, all(_there(package) for package in packages)


def _there(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _disk_time(folder: str) -> float:
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".assent-") as file:
        return os.stat(file.name).st_mtime


async def _timed(name: str, check: Callable[[], Awaitable[_Result]]) -> Finding:
    start = time.perf_counter()
    try:
        found = await check()
    except AssentError as failure:
        found = _Result("fail", f"[{failure.kind}] {failure.message}", _remedy(failure))
    except OSError as failure:
        found = _Result("fail", f"{failure.strerror or failure}", "check the path of --store and its permissions")
    took = round(time.perf_counter() - start, 6)
    return Finding(id=name, status=found.status, detail=found.detail, fix=found.fix, duration=took)


def _remedy(failure: AssentError) -> str | None:
    return {
        "store_newer": "update Assent",
        "corrupt_log_line": "restore the file from a copy; `assent verify` says what is damaged",
        "log_write_failed": "check free space, and that this user may write the file and its directory",
    }.get(failure.kind, "check --store" if isinstance(failure, StoreError) else None)


async def doctor(url: str, as_json: bool, model: str | None = None, spec: str | None = None) -> int:
    found = await Examination(url, model, spec).run()
    if as_json:
        json_lines(found)
    else:
        _print(found)
    return FAILED if any(each.status == "fail" for each in found) else 0


def _print(found: list[Finding]) -> None:
    from assent.cli.cards import console

    out = console()
    for each in found:
        head = Text.assemble((f"{each.status:<5}", STYLES[each.status]), f"{each.id:<10} ", shown(each.detail))
        out.print(head.append(f"  {each.duration * 1000:.0f} ms", style="dim"), soft_wrap=True)
        if each.fix is not None:
            out.print(Text(f"     → {shown(each.fix)}", style="bold"), soft_wrap=True)
