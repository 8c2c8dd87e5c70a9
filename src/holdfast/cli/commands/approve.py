"""``holdfast approve``: approve one call, or all pending calls that match.

A batch is listed before it is approved, and each approval is bound to the digest that was listed.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any

import click

from holdfast.cli.command_lines import DIGEST_CHARS, CommandWriter
from holdfast.cli.commands.decide import run_decision
from holdfast.cli.lookup import MAX_LISTED, describe_unattended
from holdfast.cli.options import (
    by_option,
    example,
    optional_call_argument,
    principal_of,
    resume_option,
    role_option,
    store_option,
    store_url,
)
from holdfast.cli.output import print_text
from holdfast.cli.render.text import ellipsize, escape_control_characters, pluralize, value_text
from holdfast.cli.store import is_store_missing, no_store_error
from holdfast.core.decisions import GRANT_SCOPES, Approve, Decision, Pending, Principal
from holdfast.core.json_values import parse_strict_object
from holdfast.core.tool import parse_duration
from holdfast.errors import HoldfastError, Invalid, NotFound, Stale
from holdfast.runtime.pending_calls.resolve import gather_by_conversation
from holdfast.runtime.runtime import Runtime

KEYS = ("tool", "conversation", "agent", "risk", "for")
MAX_CHARS = 120
BATCH_SIZE = 50
"""Calls that are approved together; their results are printed before the next batch."""
Matches = dict[str, list[str]]


@click.command(
    epilog=example(
        "holdfast approve dmfjs2",
        """holdfast approve support/dmfjs2 --args '{"order": 1042, "amount": 5}'""",
        "holdfast approve --match tool=refund --match 'conversation=shop-*' --dry-run",
    )
)
@optional_call_argument
@click.option("--args", metavar="JSON", help="Approve the call with these arguments instead.")
@click.option("--digest", metavar="D", help="Approve only if the plan still has this digest (16 characters or more).")
@click.option(
    "--remember", type=click.Choice(["args", "tool"]), help="Do not ask again for these arguments, or at all."
)
@click.option(
    "--scope",
    type=click.Choice(GRANT_SCOPES),
    help="With --remember: where. In this conversation (the default), in all turns of its user, or for everyone.",
)
@click.option("--for", "duration", metavar="DURATION", help='With --remember: for how long, such as "1h".')
@click.option(
    "--match",
    "pairs",
    multiple=True,
    metavar="K=V",
    help="Instead of CALL: all pending calls with this tool, conversation, agent, risk or principal (for=NAME); "
    "V may have a *.",
)
@click.option("--dry-run", is_flag=True, help="With --match: only list them.")
@click.option("--yes", is_flag=True, help="With --match: do not ask.")
@click.option("--wait", metavar="DURATION", help='Wait up to this long ("1m"), and print what became of the call.')
@by_option
@role_option
@resume_option
@store_option
def approve(
    call: str | None,
    args: str | None,
    digest: str | None,
    remember: Any,
    scope: Any,
    duration: str | None,
    pairs: tuple[str, ...],
    dry_run: bool,
    yes: bool,
    wait: str | None,
    by: str | None,
    roles: tuple[str, ...],
    resume: str | None,
    store: str | None,
) -> int:
    """Approve a call. CALL is [CONVERSATION/]ID, or the beginning of an ID; ID:SEQ names one of its suspensions."""

    if args is not None and not args.strip():
        raise Invalid("--args: not valid JSON: it is empty")
    if duration is not None and remember is None:
        raise Invalid("--for goes with --remember args or --remember tool")
    if scope is not None and remember is None:
        raise Invalid("--scope goes with --remember args or --remember tool")
    scope = scope or "conversation"
    if wait is not None and (pairs or resume is not None):
        raise Invalid("--wait goes with one CALL, and without --resume, which waits anyhow")
    seconds = None if wait is None else parse_duration(wait)
    if pairs:
        if call is not None or args is not None or digest is not None or resume is not None:
            raise Invalid("--match stands alone: without CALL, --args, --digest and --resume")
        matches, decision = parse_matches(pairs), Approve(remember=remember, duration=duration, scope=scope)
        return asyncio.run(
            approve_matching(store_url(store), matches, decision, principal_of(by, roles), dry_run=dry_run, yes=yes)
        )
    if call is None:
        raise Invalid("give the CALL to approve, as `holdfast pending` shows it, or --match")
    if dry_run or yes:
        raise Invalid("--dry-run and --yes go with --match")
    edited = None if args is None else parse_strict_object(args, "--args")

    def make(entry: Pending | None) -> Decision:
        whole = digest
        if digest is not None and entry is not None:
            shown = len(digest) >= DIGEST_CHARS and entry.digest.startswith(digest)
            if not shown and edited is None:
                raise Stale(
                    f"the digest does not match the plan of {entry.tool} ({entry.call}): the plan has changed since "
                    f"it was shown, or these are not {DIGEST_CHARS} or more characters "
                    "of the digest that `holdfast pending --json` shows",
                    reason="superseded",
                )
            whole = entry.digest if shown else digest  # may be the digest of the plan for the edited arguments
        return Approve(args=edited, digest=whole, remember=remember, duration=duration, scope=scope)

    return run_decision(call, "approve", make, principal_of(by, roles), resume, store, wait=seconds)


def parse_matches(pairs: Iterable[str]) -> Matches:
    """Parse pairs such as ``tool=refund``: every key must match, with any one of its values."""
    found: Matches = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or key not in KEYS or not value:
            raise Invalid(f"--match takes KEY=VALUE with one of the keys {', '.join(KEYS)}, not {pair!r}")
        found.setdefault(key, []).append(value)
    return found


def _entry_matches(entry: Pending, matches: Matches) -> bool:
    own = {
        "tool": entry.tool,
        "conversation": entry.conversation,
        "agent": entry.agent,
        "risk": entry.risk,
        "for": entry.principal.id,
    }
    return all(any(fnmatchcase(own[key], value) for value in values) for key, values in matches.items())


async def approve_matching(
    url: str, matches: Matches, decision: Approve, by: Principal, *, dry_run: bool, yes: bool
) -> int:
    """List the matching calls, confirm, approve each; return the highest exit code."""
    if await is_store_missing(url):
        raise no_store_error(url, ", so nothing matches")
    async with Runtime(store=url) as rt:
        found = [entry for entry in await rt.pending() if entry.kind == "approval" and _entry_matches(entry, matches)]
        # An interrupted call may have taken effect: each needs its own decision.
        entries = [entry for entry in found if not entry.recovery]
        for entry in entries:
            print_text(_describe_entry(entry))
        if left := len(found) - len(entries):
            more = " more" if entries else ""
            print_text(f"{left}{more} matched, but {'was' if left == 1 else 'were'} interrupted: decide each one alone")
        if not entries:
            raise _no_match_error(url, matches, "other call" if left else "call")
        if dry_run:
            print_text(f"{pluralize(len(entries), 'call')} would be approved; nothing was done")
            return 0
        if not yes and not _confirm(entries):
            print_text("nothing was done")
            return 0

        async def approve_one(entry: Pending) -> tuple[int, str]:
            where = f"{entry.tool} ({entry.conversation}/{entry.call})"
            try:
                done = await rt.resolve(entry, decision, by=by)
            except HoldfastError as refusal:
                return (
                    refusal.exit_code,
                    f"{where} not approved: [{refusal.kind}] {escape_control_characters(refusal.message)}",
                )
            more = f"; {pluralize(done.missing, 'more approval')} needed" if done.missing else ""
            return 0, f"{where} approved by {by}{more}"

        codes: list[int] = []
        for start in range(0, len(entries), BATCH_SIZE):
            for code, line in await gather_by_conversation(
                entries[start : start + BATCH_SIZE], attrgetter("conversation"), approve_one
            ):
                codes.append(code)
                print_text(line)
        touched = {entry.conversation for entry in entries}
        for name in sorted(touched) if 0 in codes and len(touched) <= MAX_LISTED else []:
            for line in await describe_unattended(rt, name, CommandWriter(url)):
                print_text(line)
    return max(codes)


def _no_match_error(url: str, matches: Matches, call: str) -> NotFound:
    """Return the error for a pattern without matches: a mistyped pattern must not look like success."""
    wanted = ", ".join(" or ".join(f"{key}={value}" for value in values) for key, values in matches.items())
    see = CommandWriter(url).format_command("pending")
    return NotFound(
        f"no {call} that waits for an approval matches {ellipsize(wanted, MAX_CHARS)}; to list pending calls: {see}"
    )


def _describe_entry(entry: Pending) -> str:
    risk = f", {entry.risk} risk" if entry.risk != "low" else ""
    args = " ".join(f"{name}={value_text(value)}" for name, value in entry.args.items())
    return escape_control_characters(
        f"{entry.tool} ({entry.conversation}/{entry.call}{risk}): {entry.prompt}  {ellipsize(args, MAX_CHARS)}".rstrip()
    )


def _confirm(entries: list[Pending]) -> bool:
    if sys.stdin is None or not sys.stdin.isatty() or not sys.stdout.isatty():  # pyright: ignore[reportUnnecessaryComparison]
        raise Invalid("there is no terminal to confirm it: give --yes, or --dry-run to list the calls")
    return click.confirm(f"Approve {'this call' if len(entries) == 1 else f'these {len(entries)} calls'}?")
