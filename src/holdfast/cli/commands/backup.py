"""``holdfast backup``: copy a SQLite store into a file while it is in use."""

from __future__ import annotations

import asyncio

import click
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from holdfast.cli.options import example, store_option, store_url
from holdfast.cli.output import print_text
from holdfast.cli.render.console import make_console
from holdfast.cli.store import connect_to_store, is_store_missing, not_found_error

PAGE_BYTES = 4096


@click.command(
    epilog=example("holdfast backup monday.db", "holdfast backup latest.db --force --store sqlite:///holdfast.db")
)
@click.argument("target", metavar="FILE", type=click.Path())
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@store_option
def backup(target: str, force: bool, store: str | None) -> int:
    """Copy a SQLite store into FILE while it is in use.

    The copy is the store at one moment. It is checked (SQLite's own check, every hash chain and artifact) before
    it appears as FILE, and only its owner can read it. Other processes can use the store meanwhile. For PostgreSQL,
    use pg_dump.
    """
    return asyncio.run(back_up_store(store_url(store), target, overwrite=force))


async def back_up_store(url: str, target: str, *, overwrite: bool) -> int:
    """Copy the store, with a progress bar on a terminal; return the exit code."""

    if await is_store_missing(url):
        raise not_found_error(url, None)
    out = make_console(stderr=True)
    columns = (TextColumn("copying"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    async with connect_to_store(url) as store:
        with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as progress:
            bar = progress.add_task("", total=None)

            def show(done: int, pages: int) -> None:
                progress.update(bar, completed=done * PAGE_BYTES, total=pages * PAGE_BYTES)

            await store.backup(target, overwrite=overwrite, progress=show)
    print_text(f"copied to {target}, and checked: every hash chain fits")
    return 0
