"""The commands for who runs many processes on one store: workers, who does what, new versions, moving house."""

from __future__ import annotations

import asyncio

import click

from assent.cli.group import Whole, cli, example, json_option, seconds, store_option, store_url


@cli.command(
    epilog=example(
        "assent worker shop:agent --store postgresql://desk@db/desk",
        "assent worker shop:support shop:billing --at-once 50 --drain 60",
    )
)
@click.argument("specs", metavar="MODULE:AGENT...", nargs=-1, required=True)
@click.option(
    "--at-once", type=Whole(1), metavar="N", help="Run at most so many conversations at a time [default: all]."
)
@click.option(
    "--drain",
    type=float,
    callback=seconds,
    metavar="SECONDS",
    default=10.0,
    show_default=True,
    help="How long running tools have to end when it is stopped.",
)
@store_option
def worker(specs: tuple[str, ...], at_once: int | None, drain: float, store: str | None) -> int:
    """Run agents: whatever is owed in the store, without a page.

    Start as many as you like, on SQLite on one machine, on PostgreSQL on any number: each conversation is run by one
    of them, and when one dies another goes on. SIGTERM (or Ctrl-C) ends it in order: it begins nothing more, what runs
    has --drain seconds, and the others take over at once; a second signal does not wait.
    """
    from assent.cli import worker as works
    from assent.cli.loading import choose

    agents = [choose(spec).agent for spec in specs]
    return asyncio.run(works.work(agents, store_url(store), at_once, drain))


@cli.command(epilog=example("assent workers", "assent workers --json | jq 'select(.alive)'"))
@json_option
@store_option
def workers(as_json: bool, store: str | None) -> int:
    """Who has the store open, what they run, and what nobody runs.

    A worker that shows no sign of life for a lease is dead, and what it ran is taken over.
    """
    from assent.cli import workers as crew

    return asyncio.run(crew.workers(store_url(store), as_json))


@cli.command(epilog=example("assent migrate --dry-run", "assent migrate --store postgresql://desk@db/desk"))
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@store_option
def migrate(dry_run: bool, store: str | None) -> int:
    """Bring a store to this version, or make it.

    Opening a store does the same by itself; with this it is done before the first new process starts. On PostgreSQL,
    processes of the version before that run go on, meanwhile and afterwards; they cannot be started anew.
    """
    from assent.cli import migrating

    return asyncio.run(migrating.migrate(store_url(store), dry_run=dry_run))


@cli.command(epilog=example("assent copy sqlite:///assent.db postgresql://desk@db/desk"))
@click.argument("source", metavar="FROM_URL")
@click.argument("target", metavar="TO_URL")
def copy(source: str, target: str) -> int:
    """Copy every conversation from one store to another.

    Logs byte for byte, with artifacts and what waits; each is checked against its hash chain. Run it again after an
    interruption, or to catch up: what is there is not copied twice, and what differs is never touched. Unlike an
    import it takes everything as it is, approvals included: whoever can write to a store may decide in it.
    """
    from assent.cli import copying

    return asyncio.run(copying.copy(source, target))
