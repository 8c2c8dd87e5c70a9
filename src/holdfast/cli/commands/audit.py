"""``holdfast audit``: list, check and export what was decided."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from datetime import datetime

import click
from rich.table import Table
from rich.text import Text

from holdfast.cli.options import MAX_INTEGER, Whole, conversation_option, example, json_option, store_option, store_url
from holdfast.cli.output import print_raw_lines, print_text, try_print
from holdfast.cli.render.console import make_console
from holdfast.cli.render.text import ellipsize, escape_control_characters, format_time, value_text
from holdfast.cli.store import is_store_missing, not_found_error
from holdfast.core.audit import DECISION_KINDS, DecisionKind
from holdfast.core.decisions import name_decider
from holdfast.errors import HoldfastError, Invalid, StoreDamaged
from holdfast.runtime.arguments import past_time
from holdfast.runtime.audit import DecisionFilters, DecisionPage, DecisionRecord
from holdfast.runtime.audit_export import CSV_COLUMNS, csv_line, export_lines
from holdfast.runtime.runtime import Runtime

PAGE_SIZE = 200
TABLE_LIMIT = 50
ABOUT_CHARS = 100
WORDS: dict[DecisionKind, str] = {
    "approve": "approved",
    "edit": "approved, edited",
    "deny": "denied",
    "answer": "answered",
    "client_result": "run by a client",
    "submit": "submitted",
    "failed": "reported as failed",
    "detached": "no client",
    "vote": "voted for",
    "extend": "extended",
    "take_back": "approval taken back",
    "cancel": "turn cancelled",
    "revoke": "grant revoked",
    "import": "log imported",
}
"""What the table says, where it is not the kind itself."""


@click.command(
    epilog=example(
        "holdfast audit --who ada --since 7d",
        "holdfast audit --tool refund --kind deny --kind refused",
        "holdfast audit --since 2027-01-01 --until 2027-02-01 --csv > january.csv",
        "holdfast audit --verify",
    )
)
@click.option("--who", metavar="ID", help="Decisions of this principal, and of its deputies for it.")
@click.option("--tool", metavar="NAME", help="Decisions about calls of this tool.")
@conversation_option("Decisions in this conversation.")
@click.option("--kind", "kinds", multiple=True, type=click.Choice(DECISION_KINDS), help="Decisions of this kind.")
@click.option("--since", metavar="TIME", help='From this time on: "2027-01-31", "2027-01-31T12:00", or "7d" ago.')
@click.option("--until", metavar="TIME", help="Before this time.")
@click.option("--text", metavar="TEXT", help="With all of these words in the arguments, the plan, the reason, ...")
@click.option("--limit", type=Whole(1, MAX_INTEGER), metavar="N", help="At most N; a table has 50 by default.")
@click.option("--verify", is_flag=True, help="Check the decisions and their logs; exit 1 if one does not fit.")
@click.option("--csv", "as_csv", is_flag=True, help="CSV that is safe to open in a spreadsheet.")
@json_option
@store_option
def audit(
    who: str | None,
    tool: str | None,
    conversation: str | None,
    kinds: tuple[DecisionKind, ...],
    since: str | None,
    until: str | None,
    text: str | None,
    limit: int | None,
    verify: bool,
    as_csv: bool,
    as_json: bool,
    store: str | None,
) -> int:
    """List what was decided, expired or refused, the latest first.

    Everything is read from the logs. With --verify, the hash chain of each conversation that is listed is verified, and
    its decisions are compared with the index that finds them. To check all conversations, use `holdfast verify`.
    """
    if as_csv and as_json:
        raise Invalid("give --csv or --json, not both")
    filters: DecisionFilters = {
        "who": who,
        "tool": tool,
        "conversation": conversation,
        "kinds": kinds,
        "since": _parse_time(since, "--since"),
        "until": _parse_time(until, "--until"),
        "text": text,
        "verify": verify,
    }
    form = "csv" if as_csv else "jsonl" if as_json else None
    return asyncio.run(list_decisions(store_url(store), filters, limit, form))


def _parse_time(text: str | None, option: str) -> datetime | str | None:
    """Return a time of the local time zone, or a duration that ``Runtime.decisions`` reads."""
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        pass
    try:
        past_time(text, option, 0.0)
    except HoldfastError:
        raise Invalid(
            f'{option} is a time such as "2027-01-31" or "2027-01-31T12:00", or how long ago such as "7d", not {text!r}'
        ) from None
    return text


async def list_decisions(url: str, filters: DecisionFilters, limit: int | None, form: str | None) -> int:
    if await is_store_missing(url):
        raise not_found_error(url, filters.get("conversation"))
    most = limit or (MAX_INTEGER if form else TABLE_LIMIT)
    shown: list[DecisionRecord] = []
    wrong: list[str] = []
    count, more = 0, False
    if form == "csv":
        click.echo(csv_line(CSV_COLUMNS).encode(), nl=False)
    async with Runtime(store=url) as rt, aclosing(rt.decision_pages(min(PAGE_SIZE, most), **filters)) as pages:
        async for page in pages:
            more = page.next is not None or len(page.decisions) > most - count
            page.decisions[most - count :] = []
            count += len(page.decisions)
            wrong += [problem for problem in _problems_of(page) if problem not in wrong]
            if form is None:
                shown += page.decisions
            else:
                _print_page(page, form)
            if count == most:
                break
    if form is None:
        _print_table(shown, more=more, verified=bool(filters.get("verify")))
    for problem in wrong[1:]:  # the first one is in the error
        try_print(problem, err=True)
    if wrong:
        rest = f"; {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise StoreDamaged(f"{wrong[0]}{rest}")
    return 0


def _problems_of(page: DecisionPage) -> list[str]:
    found = [
        f"conversation {record.conversation!r}: decision {record.seq}: {record.problem}"
        for record in page.decisions
        if record.problem and not page.problems
    ]
    return page.problems + found


def _print_page(page: DecisionPage, form: str) -> None:
    lines = export_lines(page, "csv" if form == "csv" else "jsonl")
    if form == "csv":
        click.echo("".join(lines).encode(), nl=False)
    else:
        print_raw_lines([line.rstrip("\n").encode() for line in lines])


def _print_table(records: list[DecisionRecord], *, more: bool, verified: bool) -> None:
    if not records:
        print_text("no decisions")
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("time", "decision", "tool", "by", "conversation"):
        table.add_column(name, overflow="fold")
    table.add_column("about", overflow="fold", ratio=1)
    for record in records:
        style = "red" if record.problem else "yellow" if record.kind == "refused" else "green" if verified else ""
        mark = "✗ " if record.problem else "✓ " if record.verified else ""
        table.add_row(
            Text(format_time(record.at)),
            Text(mark + WORDS.get(record.kind, record.kind), style=style),
            Text(escape_control_characters(record.tool)),
            Text(escape_control_characters(name_decider(record.by, record.on_behalf_of))),
            Text(f"{escape_control_characters(record.conversation)} {record.seq}"),
            Text(escape_control_characters(_describe(record)), style="red" if record.problem else "dim"),
        )
    make_console().print(table)
    if more:
        print_text(f"the latest {len(records)}; for more: --limit")
    if verified and not any(record.problem for record in records):
        print_text("verified: these decisions are as in their logs, and the hash chains of the logs are intact")


def _describe(record: DecisionRecord) -> str:
    """Return what there is to say about a decision in one line."""
    if record.problem:
        return f"does not fit: {record.problem}"
    parts = ["(imported)"] if record.imported else []
    plan = record.args if record.preview is None else record.preview
    parts += [record.prompt] if record.prompt else []
    parts += [ellipsize(value_text(plan), ABOUT_CHARS)] if plan else []
    parts += [f"edited: {ellipsize(value_text(record.edited), ABOUT_CHARS)}"] if record.edited is not None else []
    parts += [f"remembered for {record.remember} ({record.scope})"] if record.remember else []
    parts += [f"value: {ellipsize(value_text(record.value), ABOUT_CHARS)}"] if record.value is not None else []
    parts += [f"until {format_time(record.until)}"] if record.until is not None else []
    parts += [f"tried to: {record.attempted}"] if record.attempted else []
    parts += [f"votes: {', '.join(vote.voter for vote in record.votes)}"] if record.votes else []
    parts += [f"reason: {record.reason}"] if record.reason else []
    return "; ".join(parts)
