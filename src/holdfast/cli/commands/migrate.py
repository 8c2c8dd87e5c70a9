"""``holdfast migrate``: bring a store to the schema of this version."""

from __future__ import annotations

import asyncio

import click

from holdfast import urls
from holdfast.cli.options import example, store_option, store_url
from holdfast.cli.output import print_text
from holdfast.cli.render.text import escape_control_characters

NOTICE_SECONDS = 0.5
"""Seconds before a step that is still running is printed."""


@click.command(epilog=example("holdfast migrate --dry-run", "holdfast migrate --store postgresql://desk@db/desk"))
@click.option("--dry-run", is_flag=True, help="Only list the steps.")
@store_option
def migrate(dry_run: bool, store: str | None) -> int:
    """Bring a store to the schema of this version, or create it.

    Opening a store migrates it, too; this command does it before the first new process starts. On PostgreSQL,
    running processes of the previous version keep working, during and after it; they cannot be restarted.
    """
    return asyncio.run(migrate_store(store_url(store), dry_run=dry_run))


async def migrate_store(url: str, *, dry_run: bool) -> int:
    if dry_run:
        found = await urls.plan_migration(url)
    else:
        progress = ProgressNotice()
        try:
            found = await urls.migrate(url, progress.start_step)
        finally:
            progress.stop()
    if not found.steps:
        print_text(f"{found.place}: schema {found.version}, nothing to do")
        return 0
    begins = f"schema {found.version}" if found.version else "no store yet"
    print_text(f"{found.place}: {begins}, {'would become' if dry_run else 'is now'} schema {found.wanted}")
    for number, step in enumerate(found.steps, found.version + 1):
        print_text(f"  {number}  {step}")
    return 0


class ProgressNotice:
    """Prints each slow step once, on standard error."""

    def __init__(self) -> None:
        self._printed: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None

    def start_step(self, text: str) -> None:
        """Start a step; the previous one has ended."""
        self.stop()
        self._timer = asyncio.get_running_loop().call_later(NOTICE_SECONDS, self._print_step, text)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _print_step(self, text: str) -> None:
        if text not in self._printed:
            self._printed.add(text)
            click.echo(f"{escape_control_characters(text)} ...", err=True)
