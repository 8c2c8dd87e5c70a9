"""``assent migrate``: what stands between a store and this version, and doing it."""

from __future__ import annotations

from assent import urls
from assent.cli.output import say


async def migrate(url: str, *, dry_run: bool) -> int:
    found = await (urls.plan if dry_run else urls.migrate)(url)
    if not found.steps:
        say(f"{found.place}: schema {found.version}, nothing to do")
        return 0
    begins = f"schema {found.version}" if found.version else "no store yet"
    say(f"{found.place}: {begins}, {'would become' if dry_run else 'is now'} schema {found.wanted}")
    for number, what in enumerate(found.steps, found.version + 1):
        say(f"  {number}  {what}")
    return 0
