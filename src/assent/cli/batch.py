"""Approvals by the many: what matches is listed first, each is bound to what was listed, each has its own result."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from fnmatch import fnmatchcase
from operator import attrgetter

import click
from msgspec.structs import replace

from assent.cli import inbox
from assent.cli.commands import Commands
from assent.cli.output import say
from assent.cli.reading import missing, no_store
from assent.cli.text import count, cut, shown, value_text
from assent.core.decisions import Approve, Pending
from assent.errors import AssentError, Invalid, NotFound
from assent.runtime.deciding import each_of
from assent.runtime.runtime import Runtime

KEYS = ("tool", "conversation", "agent", "risk", "for")
LONG = 120
AT_ONCE = 50
"""Calls that are approved together: what became of them is said before the next."""
Matches = dict[str, list[str]]


def parsed(pairs: Iterable[str]) -> Matches:
    """``tool=refund``: all keys must match; of one key given twice, one of the values."""
    found: Matches = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or key not in KEYS or not value:
            raise Invalid(f"--match takes KEY=VALUE with one of the keys {', '.join(KEYS)}, not {pair!r}")
        found.setdefault(key, []).append(value)
    return found


def _fits(entry: Pending, matches: Matches) -> bool:
    own = {
        "tool": entry.tool,
        "conversation": entry.conversation,
        "agent": entry.agent,
        "risk": entry.risk,
        "for": entry.principal.id,
    }
    return all(any(fnmatchcase(own[key], value) for value in values) for key, values in matches.items())


async def approve(url: str, matches: Matches, decision: Approve, by: str, *, dry_run: bool, yes: bool) -> int:
    """List, ask, approve each. The exit code is the worst of all."""
    if await missing(url):
        raise no_store(url, ", so nothing matches")
    async with Runtime(store=url) as rt:
        found = [entry for entry in await rt.pending() if entry.kind == "approval" and _fits(entry, matches)]
        # Running an interrupted call again is a question of its own: never in a batch.
        entries = [entry for entry in found if not entry.recovery]
        for entry in entries:
            say(_listed(entry))
        if left := len(found) - len(entries):
            more = " more" if entries else ""
            say(f"{left}{more} matched, but {'was' if left == 1 else 'were'} interrupted: decide each by itself")
        if not entries:
            raise _none(url, matches, "other call" if left else "call")
        if dry_run:
            say(f"{count(len(entries), 'call')} would be approved; nothing was done")
            return 0
        if not yes and not _confirmed(entries):
            say("nothing was done")
            return 0

        async def approved(entry: Pending) -> tuple[int, str]:
            where = f"{entry.tool} ({entry.conversation}/{entry.call})"
            try:
                await rt.resolve(entry.conversation, entry.call, replace(decision, digest=entry.digest), by=by)
            except AssentError as refusal:
                return refusal.exit_code, f"{where} not approved: [{refusal.kind}] {shown(refusal.message)}"
            return 0, f"{where} approved by {by}"

        codes: list[int] = []
        for start in range(0, len(entries), AT_ONCE):
            for code, line in await each_of(entries[start : start + AT_ONCE], attrgetter("conversation"), approved):
                codes.append(code)
                say(line)
        touched = {entry.conversation for entry in entries}
        for name in sorted(touched) if 0 in codes and len(touched) <= inbox.LISTED else []:
            for line in await inbox.idle_work(rt, name, Commands(url)):
                say(line)
    return max(codes)


def _none(url: str, matches: Matches, call: str) -> NotFound:
    """A pattern that was mistyped must not look like work that is done: neither to people nor to a script."""
    wanted = ", ".join(" or ".join(f"{key}={value}" for value in values) for key, values in matches.items())
    see = Commands(url).write("pending")
    return NotFound(f"no {call} that waits for an approval matches {cut(wanted, LONG)}; to see what waits: {see}")


def _listed(entry: Pending) -> str:
    risk = f", {entry.risk} risk" if entry.risk != "low" else ""
    args = " ".join(f"{name}={value_text(value)}" for name, value in entry.args.items())
    return shown(f"{entry.tool} ({entry.conversation}/{entry.call}{risk}): {entry.prompt}  {cut(args, LONG)}".rstrip())


def _confirmed(entries: list[Pending]) -> bool:
    if sys.stdin is None or not sys.stdin.isatty() or not sys.stdout.isatty():  # pyright: ignore[reportUnnecessaryComparison]
        raise Invalid("nobody is at a terminal to confirm it: give --yes, or --dry-run to see what it would do")
    return click.confirm(f"Approve {'this call' if len(entries) == 1 else f'these {len(entries)} calls'}?")
