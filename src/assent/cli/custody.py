"""The commands on whole logs: are they what was written, as files and back, as they were at some event."""

from __future__ import annotations

import asyncio

import click

from assent.cli.group import (
    MANY,
    Whole,
    after_option,
    by_option,
    cli,
    complete_conversation,
    conversation_argument,
    example,
    json_option,
    login_or,
    maybe_conversation,
    store_option,
    store_url,
)
from assent.errors import Invalid


@cli.command(
    epilog=example(
        "assent verify",
        "assent verify support --json",
        "assent verify --write-heads heads.jsonl",
        "assent verify --heads heads.jsonl",
    )
)
@maybe_conversation
@click.option("--rebuild", is_flag=True, help="Write caches that do not fit anew, from the logs.")
@click.option("--heads", metavar="FILE", type=click.Path(), help="Compare with the heads that --write-heads wrote.")
@click.option("--write-heads", metavar="FILE", type=click.Path(), help="If all is well, write where each log ends.")
@json_option
@store_option
def verify(
    conversation: str | None,
    rebuild: bool,
    heads: str | None,
    write_heads: str | None,
    as_json: bool,
    store: str | None,
) -> int:
    """Check that logs are what was written.

    Recomputes the hash chain of a conversation, or of all, reads every event, checks the artifacts that they name,
    and compares snapshots, pending entries and the list of conversations with what the logs fold to. The first thing
    that does not fit is named; then the exit code is 1.

    By itself it sees damage, and edits that do not compute the hashes again. It cannot see that the last events of a
    log were cut off, that a log was rewritten with new hashes, or that a whole conversation is gone: that shows only
    against heads that were written earlier (--write-heads) and kept where the store's writers cannot change them.
    """
    from assent.cli import verification

    if write_heads is not None and conversation is not None:
        raise Invalid("--write-heads writes the heads of all conversations: leave CONVERSATION out")
    return asyncio.run(
        verification.verify(
            store_url(store), conversation, as_json, rebuild_caches=rebuild, heads=heads, write_heads=write_heads
        )
    )


@cli.command(epilog=example("assent export support support.jsonl", "assent export support | wc -l"))
@conversation_argument
@click.argument("file", default="-", type=click.Path())
@click.option("--force", is_flag=True, help="Replace FILE if it is there.")
@store_option
def export(conversation: str, file: str, force: bool, store: str | None) -> int:
    """Write a conversation to a file: one event a line.

    The events stand there byte for byte as they are stored, then the artifacts that they name, then one line
    that says how many there are and what they hash to. Without FILE, to standard output.
    """
    from assent.cli import exchange

    return asyncio.run(exchange.write(store_url(store), conversation, file, force=force))


@cli.command(
    "import",
    epilog=example(
        "assent import support.jsonl",
        "assent import support.jsonl --as copy --store sqlite:///b.db",
        "assent import support.jsonl --trust",
    ),
)
@click.argument("file", type=click.Path())
@click.option("--as", "name", metavar="NAME", help="What to call it here [default: as it was].")
@click.option("--trust", is_flag=True, help="Go on with it here: you answer for what the file says.")
@by_option
@store_option
def import_(file: str, name: str | None, trust: bool, by: str | None, store: str | None) -> int:
    """Read a conversation from a file that export wrote.

    All of it, or nothing: a line that is damaged, out of order or of a newer version is refused by its number,
    and a conversation that is there already is never touched. FILE may be "-".

    Anybody can write such a file, approvals included. So what is imported can be read, and nothing of it runs. With
    --trust (also later, with the same file) it goes on as soon as somebody runs its agent: do not let it go on in both
    places. What the file's calls had not begun is asked about again here; what it left running is asked about
    before it runs again; remembered approvals hold here. All of these are listed.
    """
    from assent.cli import exchange

    return asyncio.run(exchange.read(store_url(store), file, name, trust=trust, by=login_or(by)))


@cli.command(epilog=example("assent replay support --to 12", "assent replay support.jsonl --json | jq .pending"))
@click.argument("source", metavar="CONVERSATION|FILE", shell_complete=complete_conversation)
@click.option("--to", type=Whole(1, MANY), metavar="N", help="As it was right after this event.")
@json_option
@store_option
def replay(source: str, to: int | None, as_json: bool, store: str | None) -> int:
    """A conversation as it was at some event.

    Its state, what waited and what was said, from the log alone: nothing runs.
    """
    from assent.cli import replay as past

    return asyncio.run(past.replay(store_url(store), source, to, as_json))


@cli.command(epilog=example("assent request support", "assent request support --turn 3 --step 1 --json | jq .request"))
@conversation_argument
@click.option("--turn", type=Whole(1, MANY), metavar="N", help="Of this turn [default: the last].")
@click.option("--step", type=Whole(1, MANY), metavar="K", help="Of this step [default: the turn's last].")
@json_option
@store_option
def request(conversation: str, turn: int | None, step: int | None, as_json: bool, store: str | None) -> int:
    """What the model was sent for one of its replies.

    How much of it was instructions, tools and history; what was left out, stubbed or summarised; what hooks added.
    With Agent(record="full"), every message of it.
    """
    from assent.cli import request as sent

    return asyncio.run(sent.request(store_url(store), conversation, turn, step, as_json))


@cli.command(epilog=example("assent tail -f support", "assent tail -f support --after 20 --json | jq .type"))
@conversation_argument
@click.option("-f", "--follow", is_flag=True, help="Go on with what happens, until Ctrl-C.")
@after_option
@click.option("--live", is_flag=True, help="With -f: also what is not logged, where this store tells of it.")
@json_option
@store_option
def tail(conversation: str, follow: bool, after: int, live: bool, as_json: bool, store: str | None) -> int:
    """The log, and with -f what happens as it happens.

    Also what other processes do. Cut off, go on with --after and the last number that you saw.
    """
    from assent.cli import tail as lines

    return asyncio.run(lines.tail(store_url(store), conversation, after, follow, live, as_json))
