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

from assent import urls
from assent.cli.commands import MEMORY, Commands
from assent.cli.loading import lacking, load_agent
from assent.cli.output import FAILED, json_lines
from assent.cli.passing import named
from assent.cli.reading import no_file
from assent.cli.text import count, shown, span
from assent.cli.verification import PAGE, opened
from assent.errors import AssentError, StoreError
from assent.models.providers import names
from assent.stores.base import LogStore
from assent.stores.upkeep import Health, Plan

SQLITE = (3, 51, 3)
"""The oldest that this package asks for."""
SKEW = 2.0
"""Seconds that the clock of the disk and ours may differ."""
LATE = 5.0
"""Seconds after which somebody should have acted on a deadline, or taken up what is owed."""
Status = Literal["ok", "warn", "fail"]
NEARLY = 0.8
"""Of the connections: then it is time to think of more."""
ENTRIES = 5000
"""Pending entries that are read at a time."""
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
        self._file = self._path is not None or url == MEMORY
        """It needs no server."""
        self._barred: str | None = None
        """Why no file can be made where the store is to be."""
        self._health: Health | None = None
        self._plan: Plan | None = None
        self._store: LogStore | None = None
        self._stack = AsyncExitStack()

    async def run(self) -> list[Finding]:
        checks: list[tuple[str, Callable[[], Awaitable[_Result]]]] = [
            *((("sqlite", self._sqlite),) if self._file else (("server", self._server),)),
            ("extras", self._extras),
            ("clock", self._clock),
            ("schema", self._schema),
            ("store", self._opens),
        ]
        async with self._stack:
            found = [await self._timed(name, check) for name, check in checks]
            if self._health is not None:
                found += [_finding(name, result) for name, result in served(self._health)]
            if self._store is not None:
                found += [await self._timed("leases", self._leases), await self._timed("deadlines", self._deadlines)]
                found += [await self._timed("caches", self._caches)]
        return found + [await self._timed(name, check) for name, check in self._models()]

    async def _timed(self, name: str, check: Callable[[], Awaitable[_Result]]) -> Finding:
        start = time.perf_counter()
        try:
            found = await check()
        except AssentError as failure:
            found = _Result("fail", f"[{failure.kind}] {failure.message}", self._remedy(failure))
        except OSError as failure:
            found = _Result("fail", f"{failure.strerror or failure}", "check the path of --store and its permissions")
        took = round(time.perf_counter() - start, 6)
        return Finding(id=name, status=found.status, detail=found.detail, fix=found.fix, duration=took)

    def _remedy(self, failure: AssentError) -> str | None:
        if not self._file:  # what is said of a server says what to do, too
            return None
        return {
            "store_newer": "update Assent",
            "corrupt_log_line": "if it is the store, restore it from a copy; if it is not, see --store",
            "log_write_failed": "check free space, and that this user may write the file and its directory",
        }.get(failure.kind, "check --store" if isinstance(failure, StoreError) else None)

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

    async def _server(self) -> _Result:
        self._health = found = await urls.health(self._url)
        assert found is not None
        return _Result("ok", f"PostgreSQL {found.version} answers in {found.within * 2000:.1f} ms")

    async def _clock(self) -> _Result:
        if not self._file:
            return self._their_clock()
        folder = os.path.dirname(self._path or "") or "."
        now = time.time()
        try:
            disk = _disk_time(folder)
        except OSError as barred:
            self._barred = f"no file can be made in {folder}: {barred.strerror or barred}"
            return _Result("warn", f"it was not compared with the disk's: {self._barred}")
        if abs(disk - now) > SKEW:
            detail = f"the disk of {folder} is {span(abs(disk - now))} {'ahead' if disk > now else 'behind'}"
            return _Result("warn", detail, "set the clock (NTP): deadlines are kept by it")
        return _Result("ok", f"the disk agrees within {SKEW:.0f} s")

    def _their_clock(self) -> _Result:
        if self._health is None:
            return _Result("fail", "the server's clock is not known", "see the check of the server")
        off, within = self._health.ahead, self._health.within
        detail = f"the server is {abs(off):.3f} s {'ahead' if off > 0 else 'behind'} (known within {within:.3f} s)"
        if abs(off) - within > SKEW:
            return _Result("warn", detail, "set both clocks (NTP): deadlines are kept by the server's")
        return _Result("ok", detail)

    async def _schema(self) -> _Result:
        if self._url == MEMORY or no_file(self._url):
            return _Result("ok", "nothing is stored yet")
        self._plan = found = await urls.plan(self._url)  # refuses what is newer, or not ours
        if found.version == 0:
            return _Result("ok", "nothing is stored yet")
        if found.steps:
            detail = f"version {found.version}; this Assent writes {found.wanted}"
            return _Result("warn", detail, self._commands.write("migrate"))
        return _Result("ok", f"version {found.version}")

    async def _opens(self) -> _Result:
        if no_file(self._url):
            if self._barred is not None:
                fix = "make the directory, let this user write to it, or see --store"
                return _Result("fail", f"there is no store {self._url} yet, and {self._barred}", fix)
            return _Result(
                "warn", f"there is no store {self._url} yet", "the first `assent run` makes it; or see --store"
            )
        if self._plan is not None and self._plan.steps:  # to open it would be to change it
            detail = "it was not opened" if self._plan.version else "there is no store yet"
            return _Result("warn", detail, self._commands.write("migrate"))
        if self._plan is None and not self._file:
            return _Result("warn", "it was not opened")
        self._store = await self._stack.enter_async_context(opened(self._url))
        number, newest = await self._extent(self._store)
        others = [each for each in await self._store.owners() if each.alive and each.owner != self._store.owner]
        opened_by = count(len(others), "other process has it open", "other processes have it open")
        detail = f"{count(number, 'conversation')}, {opened_by}"
        now = self._store.now()
        if newest > now + SKEW:
            ahead = span(newest - now)
            return _Result("warn", f"{detail}; its newest event is {ahead} in the future", "set the clock (NTP)")
        if self._url == MEMORY:
            return _Result("warn", "in memory: it ends with the process", "use sqlite:///assent.db")
        return _Result("ok", detail)

    # --- with the store ---

    async def _extent(self, store: LogStore) -> tuple[int, float]:
        """How many conversations there are, and when one was last written to."""
        number, newest, cursor = 0, 0.0, None
        while page := await store.rows(cursor=cursor, limit=PAGE):
            number, cursor = number + len(page), page[-1].conversation
            newest = max(newest, *(row.updated for row in page))
        return number, newest

    async def _caches(self) -> _Result:
        """Do rows and pending entries fit their checksums? Whether they fit the logs, only verify says."""
        assert self._store is not None
        damaged, cursor, last = set(await self._store.miscounted()), None, None
        while page := await self._store.rows(cursor=cursor, limit=PAGE):
            damaged |= {row.conversation for row in page if row.intact is False}
            cursor = page[-1].conversation
        while entries := await self._store.pending(after=last, limit=ENTRIES):
            damaged |= {entry.conversation for entry in entries if entry.intact is False}
            last = entries[-1]
        if not damaged:
            return _Result("ok", "rows and pending entries fit their checksums")
        names = ", ".join(sorted(damaged)[:5])
        detail = f"the caches of {count(len(damaged), 'conversation')} do not fit: {names}"
        return _Result("warn", detail, self._commands.write("verify", "--rebuild"))

    async def _leases(self) -> _Result:
        assert self._store is not None
        late = self._store.now() - LATE
        rows = [await self._store.row(name) for name in await self._store.owing()]
        stuck = [row for row in rows if row is not None and row.updated < late]
        if not stuck:
            busy = sum(each.holds for each in await self._store.owners())
            return _Result(
                "ok",
                count(busy, "conversation is at work", "conversations are at work")
                if busy
                else "nothing is left undone",
            )
        first = stuck[0]
        fix = self._commands.go_on(None, first.conversation)
        names = ", ".join(f"{row.conversation} (agent {row.agent})" for row in stuck[:5])
        undone = count(
            len(stuck),
            "conversation has work to do and nobody runs it",
            "conversations have work to do and nobody runs them",
        )
        return _Result("warn", f"{undone}: {names}", fix)

    async def _deadlines(self) -> _Result:
        assert self._store is not None
        now = self._store.now()
        due, _ = await self._store.due(now - LATE)
        late = [entry for entry in due if entry.deadline < now - LATE]
        if not late:
            return _Result("ok", "no call is overdue")
        oldest = span(now - min(entry.deadline for entry in late))
        overdue = count(len(late), "call is overdue, by", "calls are overdue, the oldest by")
        detail = f"{overdue} {oldest}: no process was there to act"
        return _Result("warn", detail, self._commands.write("pending", "--wait", "1"))


def served(health: Health) -> Iterator[tuple[str, _Result]]:
    """What a server's settings mean for what the store promises."""
    off = [name for name, value in health.settings.items() if value == "off"]
    if off:
        lost = "A POWER CUT LOSES WHAT WAS ACKNOWLEDGED, or the whole database"
        yield (
            "durable",
            _Result(
                "fail", f"{', '.join(off)} is off: {lost}", f"ALTER SYSTEM SET {off[0]} = on; SELECT pg_reload_conf()"
            ),
        )
    else:
        yield "durable", _Result("ok", ", ".join(f"{name} {value}" for name, value in health.settings.items()))
    used = f"{health.connections} of {health.allowed} connections are used ({health.limit}); Assent has {health.ours}"
    if health.allowed - health.connections < health.each:
        fix = f"raise {health.limit}: a process needs {health.each}"
        yield "connections", _Result("fail", f"{used}; not enough are left for one more process", fix)
    elif health.connections > health.allowed * NEARLY:
        yield (
            "connections",
            _Result("warn", used, f"raise {health.limit}, or share less: a process needs {health.each}"),
        )
    else:
        yield "connections", _Result("ok", used)
    yield "lease", _Result("ok", f"a process that is silent for {health.lease:g} s is taken over (assent_lease)")
    if health.standby:
        yield "standby", _Result("fail", "this server follows another and takes no writes", "connect to the primary")
    elif health.replicas and not health.waits:
        follow = count(health.replicas, "standby follows", "standbys follow")
        detail = f"{follow}, and no commit waits for that: a fail-over loses the last ones"
        yield "standby", _Result("warn", detail, "set synchronous_standby_names, if that must not be")
    else:
        follow = (
            count(health.replicas, "standby follows", "standbys follow") if health.replicas else "no standby follows"
        )
        yield "standby", _Result("ok", follow)


def _finding(name: str, result: _Result) -> Finding:
    return Finding(id=name, status=result.status, detail=result.detail, fix=result.fix)


def _sign(name: str, needs: names.Provider) -> bool:
    """Somebody means to use this provider: there is a key, or a package that is for nothing else."""
    keyed = any(os.environ.get(variable) for variable in needs.keys)
    return keyed or (needs.extra == name and names.installed(names.Name(name, "any")))


def _fixes(lacks: list[tuple[str, str]]) -> str:
    return "; ".join(fix for _, fix in lacks)


def extras() -> Iterator[tuple[str, bool]]:
    """What can be installed beside Assent, and whether all of it is there. The tools of its developers aside."""
    found: dict[str, list[re.Match[str]]] = {}
    for needed in _requirements("assent"):
        if needed["extra"] and needed["extra"] != "dev":
            found.setdefault(needed["extra"], []).append(needed)
    for name, packages in found.items():
        yield name, all(_there(needed) for needed in packages)


_REQUIREMENT = re.compile(
    r"(?P<package>[\w.-]+)\s*(?:\[(?P<extras>[^\]]*)\])?[^;]*"  # name[extra,extra]>=1,<2
    r"(?:;\s*extra\s*==\s*['\"](?P<extra>[\w.-]+)['\"]\s*)?"
)


def _requirements(package: str) -> list[re.Match[str]]:
    """What a package asks for; without what depends on more than an extra, such as on the operating system."""
    try:
        lines = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return []
    return [found for line in lines if (found := _REQUIREMENT.fullmatch(line.strip()))]


def _there(needed: re.Match[str]) -> bool:
    """It is installed, and so is what its own extras ask for: groq is more than pydantic-ai-slim."""
    try:
        metadata.version(needed["package"])
    except metadata.PackageNotFoundError:
        return False
    wanted = {_normal(extra) for extra in (needed["extras"] or "").split(",")} - {""}
    inner = [each for each in _requirements(needed["package"]) if each["extra"] and _normal(each["extra"]) in wanted]
    return all(_there(each) for each in inner)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _disk_time(folder: str) -> float:
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".assent-") as file:
        return os.stat(file.name).st_mtime


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
    width = max(len(each.id) for each in found)
    for each in found:
        head = Text.assemble((f"{each.status:<5}", STYLES[each.status]), f"{each.id:<{width}} ", shown(each.detail))
        out.print(head.append(f"  {each.duration * 1000:.0f} ms", style="dim"), soft_wrap=True)
        if each.fix is not None:
            out.print(Text(f"     → {shown(each.fix)}", style="bold"), soft_wrap=True)
