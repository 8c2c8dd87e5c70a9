"""The commands. Each is a thin layer over ``Runtime``; every mistake is one line and an exit code.

The exit codes stand in ``group.CODES``. Commands on whole logs are in ``custody``,
those beside the conversations in ``workbench``, those on whole stores in ``operations``.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import click

from assent.cli import backup, custody, operations, output, serve, server_token, ui, workbench
from assent.cli.commands import DEMO, DEMO_STORE, Commands
from assent.cli.group import (
    MANY,
    MODEL,
    F,
    Whole,
    after_option,
    by_option,
    call_argument,
    cli,
    conversation_argument,
    conversation_option,
    example,
    instructions_option,
    json_option,
    login_or,
    maybe_call,
    maybe_conversation,
    model_option,
    model_option_for,
    patience,
    real_text,
    store_option,
    store_url,
    wait_option,
)
from assent.core.decisions import Answer, Approve, ClientResult, Decision, Deny, Failed, Pending, Submit
from assent.errors import Invalid, Stale

Make = Callable[[Pending | None], Decision]
DIGEST = 16
MODULES = (backup, custody, operations, serve, ui, workbench)
"""Where the other commands are: importing them adds them to the group."""


def resume_option(command: F) -> F:
    """``--resume`` and the ``--model`` that goes with it, which ``_decide`` reads from the context."""
    command = model_option_for("With --resume: ask this model in place of the agent's own.", keep=True)(command)
    return click.option("--resume", metavar="MODULE:AGENT", help="Run the agent here and finish the turn.")(command)


# --- running ---


@cli.command(
    epilog=example(
        'assent run hello:agent "Tell Ada that the build is green"',
        "assent run hello:agent                  # goes on with what is owed",
        'assent run --model anthropic:claude-sonnet-4-5 --conversation tea "How long does tea keep?"',
    )
)
@click.argument("spec", metavar="[MODULE:AGENT]", required=False)
@click.argument("message", required=False)
@model_option
@instructions_option
@conversation_option("Which one; a new one is made up for a message.")
@by_option
@wait_option("How long to wait for people [default: for ever on a terminal, else 0]; then exit 75.")
@click.option("--no-wait", is_flag=True, help="The same as --wait 0.")
@click.option(
    "--when-busy",
    type=click.Choice(["refuse", "queue", "interrupt"]),
    default="refuse",
    show_default=True,
    help="If a turn is in flight.",
)
@click.option("--mode", type=click.Choice(["auto", "manual"]), help="manual: run no tool, every call surfaces.")
@store_option
def run(
    spec: str | None,
    message: str | None,
    model: str | None,
    instructions: str | None,
    conversation: str | None,
    by: str | None,
    wait: float | None,
    no_wait: bool,
    when_busy: str,
    mode: str | None,
    store: str | None,
) -> int:
    """Say something to an agent, or to a model, and see it through.

    With --model alone no code is needed: the model answers as the agent "assistant", which has no tools. MESSAGE
    may be "-": then it is read from standard input. Without MESSAGE, go on with what is owed, in one
    conversation or in all of the agent's. On a terminal it keeps running until what waits for people is
    answered; elsewhere it exits with 75.
    """
    from assent.cli import running, values
    from assent.cli.loading import SPEC, choose

    if model is not None and message is None and spec is not None and not SPEC.fullmatch(spec):
        spec, message = None, spec
    text = None if message is None else values.message_text(message)
    chosen = choose(spec, model, instructions)
    job = running.Job(chosen, store_url(store), login_or(by), patience(wait, no_wait), conversation)
    if text is None:
        return _finish(job, running.go_on(job))
    return _finish(job, running.say(job, text, when_busy=when_busy, mode=mode))


@cli.command(
    epilog=example(
        "assent demo",
        f"assent pending --store {DEMO_STORE}          # in a second terminal",
        "assent demo --page                                      # the same in the browser",
    )
)
@click.option("--conversation", metavar="ID", default=DEMO, show_default=True)
@click.option("--page", is_flag=True, help="On a web page: needs pip install 'assent[server]'.")
@click.option(
    "--port",
    type=Whole(0, 65535),
    metavar="N",
    help=f"Of the page [default: {serve.PORT}, or any free one if that is in use].",
)
@click.option("--no-wait", is_flag=True, help="Exit with 75 instead of waiting for answers.")
@click.option("--store", metavar="URL", help=f"The store [default: $ASSENT_STORE or {DEMO_STORE}].")
def demo(conversation: str, page: bool, port: int | None, no_wait: bool, store: str | None) -> int:
    """A support conversation on a scripted model: no key needed.

    It looks an order up, asks the customer a question and wants a refund approved; answer from a second
    terminal. Kill it at any moment and start it again: it goes on.
    """
    from assent.cli import demo as shop
    from assent.cli import running
    from assent.cli.loading import Chosen

    url = store_url(store, DEMO_STORE)
    if page:
        serve.check_installed()
        begin = functools.partial(running.begin_demo, conversation, shop.MESSAGE, shop.CUSTOMER)
        return serve.start(shop.agent, url, shop.CUSTOMER, port=port, begin=begin)
    again = Commands(url).demo(conversation)
    chosen = Chosen(shop.agent, (shop.SPEC,), {"module": shop.SPEC})
    job = running.Job(chosen, url, shop.CUSTOMER, 0.0 if no_wait else None, conversation, again)
    return _finish(job, running.demo(job, shop.MESSAGE, shop.CUSTOMER))


def _finish(job: Any, work: Coroutine[Any, Any, int]) -> int:
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        job.stopped()
        raise


# --- deciding ---


@cli.command(
    epilog=example(
        "assent approve dmfjs2",
        """assent approve support/dmfjs2 --args '{"order": 1042, "amount": 5}'""",
        "assent approve --match tool=refund --match 'conversation=shop-*' --dry-run",
    )
)
@maybe_call
@click.option("--args", metavar="JSON", help="Run it with these arguments instead.")
@click.option("--digest", metavar="D", help="Only if what was shown (16 characters or more) is still the plan.")
@click.option("--remember", type=click.Choice(["args", "tool"]), help="Do not ask again in this conversation.")
@click.option("--for", "duration", metavar="DURATION", help='How long that holds, such as "1h".')
@click.option(
    "--match",
    "pairs",
    multiple=True,
    metavar="K=V",
    help="Instead of CALL: all that wait with this tool, conversation, agent, risk or (for whom) for; V may have a *.",
)
@click.option("--dry-run", is_flag=True, help="With --match: only list them.")
@click.option("--yes", is_flag=True, help="With --match: do not ask.")
@by_option
@resume_option
@store_option
def approve(
    call: str | None,
    args: str | None,
    digest: str | None,
    remember: Any,
    duration: str | None,
    pairs: tuple[str, ...],
    dry_run: bool,
    yes: bool,
    by: str | None,
    resume: str | None,
    store: str | None,
) -> int:
    """Let a call run. CALL is [CONVERSATION/]ID, or the beginning of an ID."""
    from assent.core.strict_json import decode_object

    if args is not None and not args.strip():
        raise Invalid("--args: not valid JSON: it is empty")
    if duration is not None and remember is None:
        raise Invalid("--for goes with --remember args or --remember tool")
    if pairs:
        from assent.cli import batch

        if call is not None or args is not None or digest is not None or resume is not None:
            raise Invalid("--match stands alone: without CALL, --args, --digest and --resume")
        matches, decision = batch.parsed(pairs), Approve(remember=remember, duration=duration)
        return asyncio.run(batch.approve(store_url(store), matches, decision, login_or(by), dry_run=dry_run, yes=yes))
    if call is None:
        raise Invalid("give the CALL to approve, as `assent pending` shows it, or --match")
    if dry_run or yes:
        raise Invalid("--dry-run and --yes go with --match")
    edited = None if args is None else decode_object(args, "--args")

    def make(entry: Pending | None) -> Decision:
        whole = digest
        if digest is not None and entry is not None:
            shown = len(digest) >= DIGEST and entry.digest.startswith(digest)
            if not shown and edited is None:
                raise Stale(
                    f"the digest does not match what {entry.tool} ({entry.call}) waits to do now: it has changed since "
                    f"it was shown, or these are not {DIGEST} or more characters of what `assent pending --json` shows",
                    reason="superseded",
                )
            whole = entry.digest if shown else digest  # else it may be that of the edited arguments' plan
        return Approve(args=edited, digest=whole, remember=remember, duration=duration)

    return _decide(call, "approve", make, by, resume, store)


@cli.command(epilog=example('assent deny dmfjs2 --reason "the customer was paid already"'))
@call_argument
@click.option("--reason", metavar="TEXT", default="", help="The model sees it.")
@click.option("--stop", is_flag=True, help="End the turn instead of letting the model go on.")
@by_option
@resume_option
@store_option
def deny(call: str, reason: str, stop: bool, by: str | None, resume: str | None, store: str | None) -> int:
    """Say no to a call; the model sees the reason and goes on."""
    return _decide(call, "deny", lambda _: Deny(reason, stop), by, resume, store)


@cli.command(
    epilog=example(
        "assent answer ghrnl3 replacement",
        "assent answer ghrnl3 --set seat=12A --set meal.vegan=true",
        """assent answer ghrnl3 --json '{"seat": "12A"}'""",
    )
)
@call_argument
@click.argument("value", required=False)
@click.option("--set", "pairs", multiple=True, metavar="K=V", help="One field of the answer; a.b=1 for inner ones.")
@click.option("--json", "text", metavar="J", help="The answer as JSON.")
@click.option("--file", "path", metavar="PATH", help='The answer as JSON from a file; "-": standard input.')
@by_option
@resume_option
@store_option
def answer(
    call: str,
    value: str | None,
    pairs: tuple[str, ...],
    text: str | None,
    path: str | None,
    by: str | None,
    resume: str | None,
    store: str | None,
) -> int:
    """Answer a question. VALUE where one word, number or choice is asked for, --set for forms."""
    from assent.cli import values

    given = [value is not None, bool(pairs), text is not None, path is not None]
    if sum(given) != 1:
        raise Invalid("give the answer once: as VALUE, with --set, with --json or with --file")
    ready = _given_json(text, path, value=True)

    def make(entry: Pending | None) -> Decision:
        schema = entry.schema if entry else None
        if value is not None:
            return Answer(values.typed(value, schema, "answer", entry.choices if entry else None))
        return Answer(values.from_pairs(pairs, schema, "answer") if pairs else ready)

    return _decide(call, "answer", make, by, resume, store)


@cli.command(
    epilog=example(
        "assent submit qrwcf2 --json '{\"refunded\": 12.5}'",
        'assent submit qrwcf2 --error command_failed --message "the till is closed"',
    )
)
@call_argument
@click.option("--json", "text", metavar="J", help="The result as JSON.")
@click.option("--file", "path", metavar="PATH", help='The result as JSON from a file; "-": standard input.')
@click.option("--error", "kind", metavar="KIND", help="It failed: a kind such as command_failed.")
@click.option("--message", metavar="TEXT", help="What went wrong; goes with --error.")
@by_option
@resume_option
@store_option
def submit(
    call: str,
    text: str | None,
    path: str | None,
    kind: str | None,
    message: str | None,
    by: str | None,
    resume: str | None,
    store: str | None,
) -> int:
    """Give the result of a call that ran elsewhere.

    That is: by hand, by a client, or before it was interrupted.
    """
    if sum(each is not None for each in (text, path, kind)) != 1:
        raise Invalid("give the result once: with --json, with --file or with --error")
    if (kind is None) != (message is None):
        raise Invalid("--error and --message go together")
    failed = Failed(kind, message or "") if kind is not None else None
    ready = _given_json(text, path)

    def make(entry: Pending | None) -> Decision:
        if failed is not None:
            return failed
        return ClientResult(ready) if entry is not None and entry.kind == "client_exec" else Submit(ready)

    return _decide(call, "submit", make, by, resume, store)


def _quoted(text: str, value: bool) -> str:
    """How to give what somebody gave as JSON and meant as text."""
    import json
    import shlex

    quoted = shlex.quote(json.dumps(text, ensure_ascii=False))
    hint = f"quote text as JSON (--json {quoted})" if len(quoted) <= 80 else "quote text as JSON"
    return f"{hint}, or give it as VALUE, without --json" if value else hint


def _given_json(text: str | None, path: str | None, *, value: bool = False) -> Any:
    from assent.cli import values
    from assent.core.strict_json import decode

    if text is not None:
        try:
            return decode(text, "--json")
        except Invalid as problem:
            if text.lstrip()[:1] in ("", "{", "[", '"'):
                raise
            raise Invalid(f"{problem.message}; {_quoted(text, value)}") from None
    return values.read_json(path, "--file") if path is not None else None


def _decide(call: str, verb: str, make: Make, by: str | None, resume: str | None, store: str | None) -> int:
    from assent.cli import reading

    url, who = store_url(store), login_or(by)
    model: str | None = click.get_current_context().meta.get(MODEL)
    if resume is None and model is not None:
        raise Invalid("--model goes with --resume: a decision alone asks no model")
    if asyncio.run(reading.missing(url)):
        raise reading.no_store(url, ", so nothing waits in it")
    if resume is None:
        return asyncio.run(reading.record(url, call, verb, make, who))
    from assent.cli import running
    from assent.cli.loading import choose

    job = running.Job(choose(resume, model), url, who, patience(None, False))
    return _finish(job, running.resume(job, call, verb, make))


@cli.command(epilog=example('assent cancel support --reason "asked twice"'))
@conversation_argument
@click.option("--reason", metavar="TEXT")
@by_option
@store_option
def cancel(conversation: str, reason: str | None, by: str | None, store: str | None) -> int:
    """End the open turn of a conversation.

    Every open call is cancelled; nothing can be answered any more.
    """
    from assent.cli import reading

    return asyncio.run(reading.cancel(store_url(store), conversation, reason, login_or(by)))


# --- reading ---


@cli.command(epilog=example("assent pending", "assent pending --json --wait 60 | jq .call"))
@json_option
@wait_option("Wait for something; 75 if nothing came.")
@conversation_option("Only what waits in this one.")
@store_option
def pending(as_json: bool, wait: float | None, conversation: str | None, store: str | None) -> int:
    """What waits for somebody, and how to answer it.

    The next to expire comes first; each card ends with the exact commands that answer it.
    """
    from assent.cli import reading

    return asyncio.run(reading.pending(store_url(store), as_json, wait, conversation))


@cli.command(epilog=example("assent log", "assent log support --after 20", "assent log support --json"))
@maybe_conversation
@json_option
@after_option
@click.option("--limit", type=Whole(1, MANY), metavar="N", help="At most so many.")
@store_option
def log(conversation: str | None, as_json: bool, after: int, limit: int | None, store: str | None) -> int:
    """What happened in a conversation.

    Without CONVERSATION, the list of conversations.
    """
    from assent.cli import reading

    return asyncio.run(reading.log(store_url(store), conversation, as_json, after, limit))


def main(argv: list[str] | None = None) -> int:
    """The entry point: the exit code of the command, or of what went wrong."""
    output.prepare()
    server_token.take_from_environment()
    try:
        words = [real_text(word, "an argument") for word in (sys.argv[1:] if argv is None else argv)]
        code = cli.main(words, prog_name="assent", standalone_mode=False)
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        return output.failed(error)
    return code if isinstance(code, int) else 0
