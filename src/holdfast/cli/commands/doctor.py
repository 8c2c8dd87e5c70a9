"""``holdfast doctor``: check the installation, the store, the sandbox and the model keys, and suggest fixes.

The checks open the store without a runtime, so that no deadline passes and no conversation is resumed meanwhile.
They change nothing and send no request to a model.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from functools import partial
from importlib import metadata
from typing import Literal

import click
import msgspec
from rich.text import Text

from holdfast import urls
from holdfast.cli.agents import load_agent, missing_requirements, model_name
from holdfast.cli.command_lines import CommandWriter
from holdfast.cli.options import example, json_option, model_option_for, optional_spec_argument, store_option, store_url
from holdfast.cli.output import EXIT_FAILED, print_json_lines
from holdfast.cli.render.console import make_console
from holdfast.cli.render.text import escape_control_characters, format_duration, pluralize
from holdfast.cli.store import PAGE_SIZE, connect_to_store, is_file_missing
from holdfast.errors import HoldfastError, Invalid, StoreError, ToolError
from holdfast.models.providers import names
from holdfast.stores.base import Location, LogStore
from holdfast.stores.maintenance import DatabaseHealth, MigrationPlan
from holdfast.workspace.ripgrep import find_ripgrep
from holdfast.workspace.sandbox.probe import Sandbox, find_sandbox

SQLITE = (3, 51, 3)
"""The oldest version that this package requires."""
SKEW = 2.0
"""Seconds by which the clocks of the disk, or of the server, and this machine may differ."""
OVERDUE_SECONDS = 5.0
"""Seconds after which a process should have acted on a deadline, or picked up owed work."""
Status = Literal["ok", "warn", "fail"]
CONNECTIONS_WARN = 0.8
"""The share of used connections above which the check warns."""
ENTRIES = 5000
"""Pending entries in one read."""
VERSION_SECONDS = 10
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
_REQUIREMENT = re.compile(
    r"(?P<package>[\w.-]+)\s*(?:\[(?P<extras>[^\]]*)\])?[^;]*"  # name[extra,extra]>=1,<2
    r"(?:;\s*extra\s*==\s*['\"](?P<extra>[\w.-]+)['\"]\s*)?"
)


@click.command(
    epilog=example(
        "holdfast doctor",
        "holdfast doctor --model openai:gpt-5",
        "holdfast doctor --json | jq 'select(.status != \"ok\")'",
    )
)
@optional_spec_argument
@model_option_for("Check this model: its name, its package, its key.")
@json_option
@store_option
def doctor(spec: str | None, model: str | None, as_json: bool, store: str | None) -> int:
    """Check the store, the clock, overdue work, the sandbox and keys.

    Prints one line for each check, with a fix if something is wrong; exit code 1 if a check failed. No request goes to
    a model. With MODULE:AGENT, that agent's models are checked, else every provider that has a key or is installed.
    """
    return asyncio.run(run_doctor(store_url(store), as_json, model, spec))


class Finding(msgspec.Struct, kw_only=True, omit_defaults=False):
    id: str
    status: Status
    detail: str
    fix: str | None = None
    duration: float = 0.0
    """Seconds."""


class _Result(msgspec.Struct):
    status: Status
    detail: str
    fix: str | None = None


class HealthChecks:
    """The checks of one store, in order; those that need it open are left out if it does not open.

    model, spec:  the model and agent to check; by default, every provider that seems to be in use
    """

    def __init__(self, url: str, model: str | None = None, spec: str | None = None):
        self._url, self._commands = url, CommandWriter(url)
        self._model, self._spec = model, spec
        self._location: Location | None = None
        """None if the URL names no store: ``_check_server`` reports why."""
        with suppress(Invalid):
            self._location = urls.parse_location(url)
        self._file = self._location is not None and not self._location.shared
        """Whether the store needs no server."""
        self._barred: str | None = None
        """Why no file can be created in the store's directory."""
        self._health: DatabaseHealth | None = None
        self._plan: MigrationPlan | None = None
        self._store: LogStore | None = None
        self._stack = AsyncExitStack()

    @property
    def _in_memory(self) -> bool:
        return self._location is not None and self._location.kind == "memory"

    def _is_file_missing(self) -> bool:
        return self._location is not None and is_file_missing(self._location)

    async def run(self) -> list[Finding]:
        checks: list[tuple[str, Callable[[], Awaitable[_Result]]]] = [
            *((("sqlite", self._check_sqlite),) if self._file else (("server", self._check_server),)),
            ("extras", self._check_extras),
            ("clock", self._check_clock),
            ("schema", self._check_schema),
            ("store", self._check_store),
        ]
        async with self._stack:
            found = [await self._run_check(name, check) for name, check in checks]
            if self._health is not None:
                found += [_finding(name, result) for name, result in check_server_settings(self._health)]
            if self._store is not None:
                found += [
                    await self._run_check("leases", self._check_leases),
                    await self._run_check("deadlines", self._check_deadlines),
                ]
                found += [await self._run_check("caches", self._check_caches)]
        last = [("sandbox", self._check_sandbox), ("ripgrep", self._check_ripgrep), *self._model_checks()]
        return found + [await self._run_check(name, check) for name, check in last]

    async def _run_check(self, name: str, check: Callable[[], Awaitable[_Result]]) -> Finding:
        start = time.perf_counter()
        try:
            found = await check()
        except HoldfastError as failure:
            found = _Result("fail", f"[{failure.kind}] {failure.message}", self._suggest_fix(failure))
        except OSError as failure:
            found = _Result("fail", f"{failure.strerror or failure}", "check the path of --store and its permissions")
        took = round(time.perf_counter() - start, 6)
        return Finding(id=name, status=found.status, detail=found.detail, fix=found.fix, duration=took)

    def _suggest_fix(self, failure: HoldfastError) -> str | None:
        if not self._file:  # errors of a server include the fix
            return None
        return {
            "store_newer": "update Holdfast",
            "corrupt_log_line": "if it is the store, restore it from a copy; if it is not, see --store",
            "log_write_failed": "check free space, and that this user may write the file and its directory",
        }.get(failure.kind, "check --store" if isinstance(failure, StoreError) else None)

    # --- models ---

    def _model_checks(self) -> list[tuple[str, Callable[[], Awaitable[_Result]]]]:
        checks: list[tuple[str, Callable[[], Awaitable[_Result]]]] = []
        if self._spec is not None:
            checks.append(("agent", partial(self._check_agent, self._spec)))
            checks.append(("servers", partial(self._check_sources, self._spec)))
        if self._model is not None:
            checks.append(("model", partial(self._check_model, self._model)))
        if not checks:
            signs: dict[names.Provider, str] = {}
            for name, needs in names.PROVIDERS.items():
                if _is_configured(name, needs):
                    signs.setdefault(needs, name)  # of several with the same requirements, the first
            checks = [(name, partial(self._check_provider, name)) for name in signs.values()]
        return checks

    async def _check_agent(self, spec: str) -> _Result:
        agent = load_agent(spec)
        if agent.model is None:
            return _Result("fail", f"agent {agent.name} has no model", "give it one: Agent(model=...), or --model")
        models = [model_name(model) for model in (agent.model, *agent.fallbacks)]
        summary = f"agent {agent.name} uses {', then '.join(models)}"
        for model in (agent.model, *agent.fallbacks, agent.context.summary):
            if isinstance(model, str) and (lacks := missing_requirements(model)):
                missing = " and ".join(word for word, _ in lacks)
                severe = model is agent.model or any(word != "key" for word, _ in lacks)
                return _Result("fail" if severe else "warn", f"{summary}; {model} lacks its {missing}", _fixes(lacks))
        return _Result("ok", summary)

    async def _check_sources(self, spec: str) -> _Result:
        """Connect to the servers that the agent's tools come from, such as MCP servers."""
        agent = load_agent(spec)
        problems: list[str] = []
        for source in agent.sources:
            await source.open()
            try:
                if source.problem is not None:
                    problems.append(f"{source.name}: {source.problem}")
            finally:
                await source.close()
        if problems:
            return _Result("fail", "; ".join(problems), "start the server, or correct its address or command")
        return _Result("ok", f"{pluralize(len(agent.sources), 'server')} of tools, all reachable")

    async def _check_model(self, model: str) -> _Result:
        if lacks := missing_requirements(model):
            return _Result("fail", f"{model} lacks its {' and '.join(word for word, _ in lacks)}", _fixes(lacks))
        return _Result("ok", f"{model} is configured; no request was sent")

    async def _check_provider(self, name: str) -> _Result:
        if lacks := missing_requirements(f"{name}:any"):
            there = "installed" if lacks[0][0] == "key" else "a key is set"
            return _Result("warn", f"{there}, but no {' and no '.join(word for word, _ in lacks)}", _fixes(lacks))
        needs = names.PROVIDERS[name]
        key = next((variable for variable in needs.keys if os.environ.get(variable)), None)
        return _Result("ok", f"installed; {f'the key is in {key}' if key else f'the server is in {needs.url}'}")

    # --- without the store ---

    async def _check_sqlite(self) -> _Result:
        import apsw

        version = apsw.sqlite_lib_version()
        if tuple(int(part) for part in version.split(".")[:3]) < SQLITE:
            needed = ".".join(map(str, SQLITE))
            return _Result("warn", f"SQLite {version}, apsw {apsw.apsw_version()}", f"pip install 'apsw>={needed}'")
        return _Result("ok", f"SQLite {version}, apsw {apsw.apsw_version()}")

    async def _check_extras(self) -> _Result:
        names = [f"{name} {'yes' if there else 'no'}" for name, there in extras()]
        return _Result("ok", ", ".join(names) or "this version declares none")

    async def _check_sandbox(self) -> _Result:
        """Start a command in the sandbox that ``Workspace(sandbox="auto")`` would choose."""
        return describe_sandbox(await asyncio.to_thread(find_sandbox, "auto"))

    async def _check_ripgrep(self) -> _Result:
        try:
            program = find_ripgrep()
        except ToolError as missing:
            return _Result("warn", "not installed: the workspace tool grep fails", missing.message.partition(": ")[2])
        command = [program, "--no-config", "--version"]
        ran = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=VERSION_SECONDS)
        return _Result("ok", f"{ran.stdout.partition(chr(10))[0]}, {program}")

    async def _check_server(self) -> _Result:
        urls.parse_location(self._url)  # raises Invalid if the URL names no store
        self._health = found = await urls.store_health(self._url)
        assert found is not None
        return _Result("ok", f"PostgreSQL {found.version} answers in {found.within * 2000:.1f} ms")

    async def _check_clock(self) -> _Result:
        if not self._file:
            return self._check_server_clock()
        path = self._location.path if self._location is not None else None
        folder = os.path.dirname(path or "") or "."
        now = time.time()
        try:
            disk = _disk_time(folder)
        except OSError as barred:
            self._barred = f"no file can be created in {folder}: {barred.strerror or barred}"
            return _Result("warn", f"not compared with the disk's clock: {self._barred}")
        if abs(disk - now) > SKEW:
            detail = f"the disk of {folder} is {format_duration(abs(disk - now))} {'ahead' if disk > now else 'behind'}"
            return _Result("warn", detail, "set the clock (NTP): deadlines are kept by it")
        return _Result("ok", f"the disk agrees within {SKEW:.0f} s")

    def _check_server_clock(self) -> _Result:
        if self._health is None:
            return _Result("fail", "the server's clock is not known", "see the check of the server")
        off, within = self._health.ahead, self._health.within
        detail = f"the server is {abs(off):.3f} s {'ahead' if off > 0 else 'behind'} (known within {within:.3f} s)"
        if abs(off) - within > SKEW:
            return _Result("warn", detail, "set both clocks (NTP): deadlines are kept by the server's")
        return _Result("ok", detail)

    async def _check_schema(self) -> _Result:
        if self._in_memory or self._is_file_missing():
            return _Result("ok", "nothing is stored yet")
        self._plan = found = await urls.plan_migration(self._url)  # refuses a newer store, and other databases
        if found.version == 0:
            return _Result("ok", "nothing is stored yet")
        if found.steps:
            detail = f"version {found.version}; this Holdfast writes {found.wanted}"
            return _Result("warn", detail, self._commands.format_command("migrate"))
        return _Result("ok", f"version {found.version}")

    async def _check_store(self) -> _Result:
        if self._is_file_missing():
            if self._barred is not None:
                fix = "create the directory, let this user write to it, or see --store"
                return _Result("fail", f"there is no store {self._url} yet, and {self._barred}", fix)
            return _Result(
                "warn", f"there is no store {self._url} yet", "the first `holdfast run` creates it; or see --store"
            )
        if self._plan is not None and self._plan.steps:  # opening would migrate it
            detail = "it was not opened" if self._plan.version else "there is no store yet"
            return _Result("warn", detail, self._commands.format_command("migrate"))
        if self._plan is None and not self._file:
            return _Result("warn", "it was not opened")
        self._store = await self._stack.enter_async_context(connect_to_store(self._url))
        number, newest = await self._measure_store(self._store)
        users = [owner for owner in await self._store.owners() if owner.alive and owner.owner != self._store.owner]
        opened_by = pluralize(len(users), "other process has it open", "other processes have it open")
        detail = f"{pluralize(number, 'conversation')}, {opened_by}"
        now = self._store.now()
        if newest > now + SKEW:
            ahead = format_duration(newest - now)
            return _Result("warn", f"{detail}; its newest event is {ahead} in the future", "set the clock (NTP)")
        if self._in_memory:
            return _Result("warn", "in memory: it ends with the process", "use sqlite:///holdfast.db")
        return _Result("ok", detail)

    # --- with the store ---

    async def _measure_store(self, store: LogStore) -> tuple[int, float]:
        """Return the number of conversations and the time of the newest event."""
        number, newest, cursor = 0, 0.0, None
        while page := await store.rows(cursor=cursor, limit=PAGE_SIZE):
            number, cursor = number + len(page), page[-1].conversation
            newest = max(newest, *(row.updated for row in page))
        return number, newest

    async def _check_caches(self) -> _Result:
        """Compare rows and pending entries with their checksums; only verify compares them with the logs."""
        assert self._store is not None
        damaged, cursor, last = set(await self._store.find_miscounted()), None, None
        while page := await self._store.rows(cursor=cursor, limit=PAGE_SIZE):
            damaged |= {row.conversation for row in page if row.intact is False}
            cursor = page[-1].conversation
        while entries := await self._store.pending(after=last, limit=ENTRIES):
            damaged |= {entry.conversation for entry in entries if entry.intact is False}
            last = entries[-1]
        if not damaged:
            return _Result("ok", "rows and pending entries fit their checksums")
        names = ", ".join(sorted(damaged)[:5])
        detail = f"the caches of {pluralize(len(damaged), 'conversation')} do not fit: {names}"
        return _Result("warn", detail, self._commands.format_command("verify", "--rebuild"))

    async def _check_leases(self) -> _Result:
        assert self._store is not None
        late = self._store.now() - OVERDUE_SECONDS
        rows = [await self._store.row(name) for name in await self._store.list_owing()]
        stuck = [row for row in rows if row is not None and row.updated < late]
        if not stuck:
            busy = sum(owner.holds for owner in await self._store.owners())
            return _Result(
                "ok",
                pluralize(busy, "conversation is at work", "conversations are at work")
                if busy
                else "nothing is left undone",
            )
        first = stuck[0]
        fix = self._commands.continue_command(None, first.conversation)
        names = ", ".join(f"{row.conversation} (agent {row.agent})" for row in stuck[:5])
        undone = pluralize(
            len(stuck),
            "conversation has work to do and no process runs it",
            "conversations have work to do and no process runs them",
        )
        return _Result("warn", f"{undone}: {names}", fix)

    async def _check_deadlines(self) -> _Result:
        assert self._store is not None
        now = self._store.now()
        due, _ = await self._store.list_due(now - OVERDUE_SECONDS)
        late = [entry for entry in due if entry.deadline < now - OVERDUE_SECONDS]
        if not late:
            return _Result("ok", "no call is overdue")
        oldest = format_duration(now - min(entry.deadline for entry in late))
        overdue = pluralize(len(late), "call is overdue, by", "calls are overdue, the oldest by")
        detail = f"{overdue} {oldest}: no process has acted on it"
        return _Result("warn", detail, self._commands.format_command("pending", "--wait", "1"))


def describe_sandbox(found: Sandbox) -> _Result:
    """Return the level of the sandbox for commands of the workspace tools, and each guarantee."""
    held = msgspec.structs.asdict(found.guarantees)
    level = f"level {found.level} ({found.name})" if found.level != "none" else "none"
    guarantees = ", ".join(f"{name} {'yes' if kept else 'NO'}" for name, kept in held.items())
    limit = found.process_limit
    processes = f"processes limited by {limit}" if limit != "none" else "the number of processes is NOT limited"
    return _Result("ok" if found.level == "A" else "warn", f"{level}: {guarantees}; {processes}", found.missing or None)


def check_server_settings(health: DatabaseHealth) -> Iterator[tuple[str, _Result]]:
    """Check the settings of a server that the guarantees of the store depend on."""
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
    used = f"{health.connections} of {health.allowed} connections are used ({health.limit}); Holdfast has {health.ours}"
    if health.allowed - health.connections < health.each:
        fix = f"raise {health.limit}: a process needs {health.each}"
        yield "connections", _Result("fail", f"{used}; not enough are left for one more process", fix)
    elif health.connections > health.allowed * CONNECTIONS_WARN:
        yield (
            "connections",
            _Result("warn", used, f"raise {health.limit}, or share less: a process needs {health.each}"),
        )
    else:
        yield "connections", _Result("ok", used)
    yield "lease", _Result("ok", f"a process that is silent for {health.lease:g} s is taken over (holdfast_lease)")
    if health.standby:
        yield "standby", _Result("fail", "this server follows another and takes no writes", "connect to the primary")
    elif health.replicas and not health.waits:
        follow = pluralize(health.replicas, "standby follows", "standbys follow")
        detail = f"{follow}, and no commit waits for it: a failover loses the last commits"
        yield "standby", _Result("warn", detail, "set synchronous_standby_names to prevent that")
    else:
        follow = (
            pluralize(health.replicas, "standby follows", "standbys follow")
            if health.replicas
            else "no standby follows"
        )
        yield "standby", _Result("ok", follow)


def _finding(name: str, result: _Result) -> Finding:
    return Finding(id=name, status=result.status, detail=result.detail, fix=result.fix)


def _is_configured(name: str, needs: names.Provider) -> bool:
    """Return whether a provider seems to be in use: its key is set, or its own package is installed."""
    keyed = any(os.environ.get(variable) for variable in needs.keys)
    return keyed or (needs.extra == name and names.is_installed(names.ModelName(name, "any")))


def _fixes(lacks: list[tuple[str, str]]) -> str:
    return "; ".join(fix for _, fix in lacks)


def extras() -> Iterator[tuple[str, bool]]:
    """Yield the optional extras of Holdfast, except dev, and whether each is completely installed."""
    found: dict[str, list[re.Match[str]]] = {}
    for needed in _requirements("holdfast"):
        if needed["extra"] and needed["extra"] != "dev":
            found.setdefault(needed["extra"], []).append(needed)
    for name, packages in found.items():
        yield name, all(_is_installed(needed) for needed in packages)


def _requirements(package: str) -> list[re.Match[str]]:
    """Return the requirements of a package, without those with other markers than an extra."""
    try:
        lines = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return []
    return [found for line in lines if (found := _REQUIREMENT.fullmatch(line.strip()))]


def _is_installed(needed: re.Match[str]) -> bool:
    """Return whether a package and its requested extras are installed: groq needs more than pydantic-ai-slim."""
    try:
        metadata.version(needed["package"])
    except metadata.PackageNotFoundError:
        return False
    wanted = {_normal(extra) for extra in (needed["extras"] or "").split(",")} - {""}
    inner = [
        found for found in _requirements(needed["package"]) if found["extra"] and _normal(found["extra"]) in wanted
    ]
    return all(_is_installed(found) for found in inner)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _disk_time(folder: str) -> float:
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".holdfast-") as file:
        return os.stat(file.name).st_mtime


async def run_doctor(url: str, as_json: bool, model: str | None = None, spec: str | None = None) -> int:
    found = await HealthChecks(url, model, spec).run()
    if as_json:
        print_json_lines(found)
    else:
        _print(found)
    return EXIT_FAILED if any(finding.status == "fail" for finding in found) else 0


def _print(found: list[Finding]) -> None:
    out = make_console()
    width = max(len(finding.id) for finding in found)
    for finding in found:
        head = Text.assemble(
            (f"{finding.status:<5}", STYLES[finding.status]),
            f"{finding.id:<{width}} ",
            escape_control_characters(finding.detail),
        )
        out.print(head.append(f"  {finding.duration * 1000:.0f} ms", style="dim"), soft_wrap=True)
        if finding.fix is not None:
            out.print(Text(f"     → {escape_control_characters(finding.fix)}", style="bold"), soft_wrap=True)
