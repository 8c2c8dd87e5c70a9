"""``holdfast deputies``: list, name and end deputies."""

from __future__ import annotations

import asyncio

import click
import msgspec
from rich.table import Table
from rich.text import Text

from holdfast.cli.options import by_option, by_or_login, example, json_option, store_option, store_url
from holdfast.cli.output import print_json_lines, print_text
from holdfast.cli.render.console import make_console
from holdfast.cli.render.text import escape_control_characters, format_time
from holdfast.cli.store import is_store_missing, no_store_error
from holdfast.core.decisions import Principal
from holdfast.core.state import Delegation
from holdfast.errors import Invalid
from holdfast.runtime.runtime import Runtime


@click.command(
    epilog=example(
        "holdfast deputies",
        "holdfast deputies name bob --for 14d --by ada --role finance",
        "holdfast deputies end d2 --by ada",
    )
)
@click.argument("words", nargs=-1, metavar="[name DEPUTY | end DELEGATION]")
@click.option("--for", "duration", metavar="DURATION", help='With name: for how long, such as "14d".')
@click.option("--role", "roles", multiple=True, metavar="ROLE", help="With name: a role of --by, for the rules.")
@by_option
@json_option
@store_option
def deputies(
    words: tuple[str, ...],
    duration: str | None,
    roles: tuple[str, ...],
    by: str | None,
    as_json: bool,
    store: str | None,
) -> int:
    """List deputies, name one, or end a delegation.

    During the period, DEPUTY may decide what --by may decide; the log names both. A deputy cannot pass this on.
    """
    url = store_url(store)
    if (duration is not None or roles) and words[:1] != ("name",):
        raise Invalid("--for and --role go with: name DEPUTY")
    match words:
        case ():
            return asyncio.run(list_deputies(url, as_json))
        case ("name", deputy):
            if duration is None:
                raise Invalid("a deputy is named for a period: give --for, such as --for 14d")
            return asyncio.run(name_deputy(url, deputy, duration, Principal(by_or_login(by), roles)))
        case ("end", delegation):
            return asyncio.run(end_delegation(url, delegation, by_or_login(by)))
        case _:
            raise Invalid("give nothing, or: name DEPUTY --for DURATION, or: end DELEGATION")


async def list_deputies(url: str, as_json: bool) -> int:
    if await is_store_missing(url):
        raise no_store_error(url, ", so it has no deputies")
    async with Runtime(store=url) as rt:
        found = await rt.deputies()
    if as_json:
        print_json_lines([msgspec.to_builtins(one) for one in found])
    elif found:
        _print_deputies(found)
    else:
        print_text("nobody has a deputy")
    return 0


def _print_deputies(found: list[Delegation]) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("delegation", "deputy", "decides for", "until"):
        table.add_column(name, overflow="fold")
    for one in found:
        table.add_row(
            Text(one.id, style="bold"),
            Text(escape_control_characters(one.deputy)),
            Text(escape_control_characters(one.principal.id)),
            Text(format_time(one.until)),
        )
    make_console().print(table)


async def name_deputy(url: str, deputy: str, duration: str, by: Principal) -> int:
    async with Runtime(store=url) as rt:
        named = await rt.delegate(deputy, duration, by=by)
    print_text(f"{deputy} decides for {by.id} until {format_time(named.until)}, delegation {named.id}")
    return 0


async def end_delegation(url: str, delegation: str, by: str) -> int:
    if await is_store_missing(url):
        raise no_store_error(url, ", so it has no deputies")
    async with Runtime(store=url) as rt:
        await rt.end_delegation(delegation, by=by)
    print_text(f"ended delegation {delegation}")
    return 0
