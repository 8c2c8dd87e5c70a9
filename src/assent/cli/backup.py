"""``assent backup``: copy a SQLite store into a file while it is in use."""

from __future__ import annotations

import asyncio

import click

from assent.cli.group import cli, example, store_option, store_url

PAGE_BYTES = 4096


@cli.command(epilog=example("assent backup monday.db", "assent backup latest.db --force --store sqlite:///assent.db"))
@click.argument("target", metavar="FILE", type=click.Path())
@click.option("--force", is_flag=True, help="Replace FILE if it is there.")
@store_option
def backup(target: str, force: bool, store: str | None) -> int:
    """Copy a SQLite store into FILE while it is in use.

    The copy is the store at one moment. It is checked (SQLite's own check, every hash chain and artifact) before
    it appears as FILE, and only its owner can read it. The processes that use the store go on meanwhile. PostgreSQL:
    use pg_dump.
    """
    return asyncio.run(back_up(store_url(store), target, overwrite=force))


async def back_up(url: str, target: str, *, overwrite: bool) -> int:
    """Copy the store, with a progress bar on a terminal; returns the exit code."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from assent.cli.cards import console
    from assent.cli.output import say
    from assent.cli.reading import missing, unknown
    from assent.cli.verification import opened

    if await missing(url):
        raise unknown(url, None)
    out = console(stderr=True)
    columns = (TextColumn("copying"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    async with opened(url) as store:
        with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as progress:
            bar = progress.add_task("", total=None)

            def show(done: int, pages: int) -> None:
                progress.update(bar, completed=done * PAGE_BYTES, total=pages * PAGE_BYTES)

            await store.backup(target, overwrite=overwrite, progress=show)
    say(f"copied to {target}, and checked: every hash chain fits")
    return 0
