"""``assent migrate``: what stands between a store and this version, and doing it."""

from __future__ import annotations

import asyncio

import click

from assent import urls
from assent.cli.output import say
from assent.cli.text import shown

SILENCE = 0.5
"""Seconds that something may take before it is said what that is."""


async def migrate(url: str, *, dry_run: bool) -> int:
    if dry_run:
        found = await urls.plan(url)
    else:
        progress = Progress()
        try:
            found = await urls.migrate(url, progress.tell)
        finally:
            progress.end()
    if not found.steps:
        say(f"{found.place}: schema {found.version}, nothing to do")
        return 0
    begins = f"schema {found.version}" if found.version else "no store yet"
    say(f"{found.place}: {begins}, {'would become' if dry_run else 'is now'} schema {found.wanted}")
    for number, what in enumerate(found.steps, found.version + 1):
        say(f"  {number}  {what}")
    return 0


class Progress:
    """Says once, on standard error, what takes longer than one likes to wait without a word."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None

    def tell(self, text: str) -> None:
        """What begins now; with it ends what was before."""
        self.end()
        self._timer = asyncio.get_running_loop().call_later(SILENCE, self._say, text)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            click.echo(f"{shown(text)} ...", err=True)
