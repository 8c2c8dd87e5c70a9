"""``holdfast deny``, ``answer``, ``submit``, ``extend``, ``take-back``, ``cancel``: decide a call, or end a turn."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Callable
from typing import Any, assert_never

import click

from holdfast.cli.agent_run import AgentRun, print_ending, run_agent, run_job, wrong_agent_error
from holdfast.cli.agents import choose_agent
from holdfast.cli.command_lines import CommandWriter
from holdfast.cli.input.values import from_pairs, parse_value, read_json
from holdfast.cli.lookup import agent_words, find_call, print_next_steps
from holdfast.cli.options import (
    MODEL_KEY,
    by_option,
    by_or_login,
    call_argument,
    conversation_argument,
    example,
    principal_of,
    resume_option,
    role_option,
    store_option,
    store_url,
    wait_seconds,
)
from holdfast.cli.output import EXIT_WAITING, print_text
from holdfast.cli.render.event import describe_decision
from holdfast.cli.render.text import ellipsize, format_duration, value_text
from holdfast.cli.render.turn import TurnView
from holdfast.cli.store import is_store_missing, no_store_error, not_found_error
from holdfast.core.decisions import (
    Answer,
    ClientResult,
    Decision,
    Deny,
    Extend,
    Failed,
    Pending,
    Principal,
    Submit,
    TakeBack,
)
from holdfast.core.events import TurnEnded
from holdfast.core.json_values import parse_strict_json
from holdfast.errors import Invalid, NotFound
from holdfast.runtime.pending_calls.outcome import CallOutcome
from holdfast.runtime.runtime import Runtime

MAX_VALUE = 500
"""Characters of a result that are printed."""
MakeDecision = Callable[[Pending | None], Decision]


@click.command(epilog=example('holdfast deny dmfjs2 --reason "the customer was paid already"'))
@call_argument
@click.option("--reason", metavar="TEXT", default="", help="The reason, which the model sees.")
@click.option("--stop", is_flag=True, help="End the turn instead of letting the model continue.")
@by_option
@role_option
@resume_option
@store_option
def deny(
    call: str,
    reason: str,
    stop: bool,
    by: str | None,
    roles: tuple[str, ...],
    resume: str | None,
    store: str | None,
) -> int:
    """Deny a call; the model sees the reason and continues."""
    return run_decision(call, "deny", lambda _: Deny(reason, stop), principal_of(by, roles), resume, store)


@click.command(epilog=example("holdfast extend dmfjs2 2d", "holdfast extend dmfjs2 1h --role finance"))
@call_argument
@click.argument("duration", metavar="DURATION")
@by_option
@role_option
@store_option
def extend(call: str, duration: str, by: str | None, roles: tuple[str, ...], store: str | None) -> int:
    """Give a pending call more time: DURATION from now, such as "2d".

    A tool limits how long its calls can be extended in all; the default is 30 days.
    """
    return run_decision(call, "extend", lambda _: Extend(duration), principal_of(by, roles), None, store)


@click.command("take-back", epilog=example("holdfast take-back dmfjs2"))
@call_argument
@by_option
@role_option
@store_option
def take_back(call: str, by: str | None, roles: tuple[str, ...], store: str | None) -> int:
    """Take back an approval before its call has started: the call waits again.

    Only for tools with a grace window; `holdfast pending` lists their approved calls until they start.
    """
    return run_decision(call, "take-back", lambda _: TakeBack(), principal_of(by, roles), None, store)


@click.command(
    epilog=example(
        "holdfast answer ghrnl3 replacement",
        "holdfast answer ghrnl3 --set seat=12A --set meal.vegan=true",
        """holdfast answer ghrnl3 --json '{"seat": "12A"}'""",
    )
)
@call_argument
@click.argument("value", required=False)
@click.option("--set", "pairs", multiple=True, metavar="K=V", help="One field of the answer; a.b=1 for a nested one.")
@click.option("--json", "text", metavar="J", help="The answer as JSON.")
@click.option("--file", "path", metavar="PATH", help='The answer as JSON from a file; "-": standard input.')
@by_option
@role_option
@resume_option
@store_option
def answer(
    call: str,
    value: str | None,
    pairs: tuple[str, ...],
    text: str | None,
    path: str | None,
    by: str | None,
    roles: tuple[str, ...],
    resume: str | None,
    store: str | None,
) -> int:
    """Answer a question.

    Give VALUE if the answer is one word, number or choice, and --set for each field of a form.
    """
    given = [value is not None, bool(pairs), text is not None, path is not None]
    if sum(given) != 1:
        raise Invalid("give the answer once: as VALUE, with --set, with --json or with --file")
    ready = _read_json_option(text, path, value=True)

    def make(entry: Pending | None) -> Decision:
        schema = entry.schema if entry else None
        if value is not None:
            return Answer(parse_value(value, schema, "answer", entry.choices if entry else None))
        return Answer(from_pairs(pairs, schema, "answer") if pairs else ready)

    return run_decision(call, "answer", make, principal_of(by, roles), resume, store)


@click.command(
    epilog=example(
        "holdfast submit qrwcf2 --json '{\"refunded\": 12.5}'",
        'holdfast submit qrwcf2 --error command_failed --message "the till is closed"',
    )
)
@call_argument
@click.option("--json", "text", metavar="J", help="The result as JSON.")
@click.option("--file", "path", metavar="PATH", help='The result as JSON from a file; "-": standard input.')
@click.option("--error", "kind", metavar="KIND", help="Report a failure of this kind, such as command_failed.")
@click.option("--message", metavar="TEXT", help="The error message; goes with --error.")
@by_option
@role_option
@resume_option
@store_option
def submit(
    call: str,
    text: str | None,
    path: str | None,
    kind: str | None,
    message: str | None,
    by: str | None,
    roles: tuple[str, ...],
    resume: str | None,
    store: str | None,
) -> int:
    """Give the result of a call that ran elsewhere.

    The call ran by hand, in a client, or before it was interrupted.
    """
    if sum(option is not None for option in (text, path, kind)) != 1:
        raise Invalid("give the result once: with --json, with --file or with --error")
    if (kind is None) != (message is None):
        raise Invalid("--error and --message go together")
    failed = Failed(kind, message or "") if kind is not None else None
    ready = _read_json_option(text, path)

    def make(entry: Pending | None) -> Decision:
        if failed is not None:
            return failed
        return ClientResult(ready) if entry is not None and entry.kind == "client_exec" else Submit(ready)

    return run_decision(call, "submit", make, principal_of(by, roles), resume, store)


@click.command(epilog=example('holdfast cancel support --reason "asked twice"'))
@conversation_argument
@click.option("--reason", metavar="TEXT", help="The reason, for the log.")
@by_option
@store_option
def cancel(conversation: str, reason: str | None, by: str | None, store: str | None) -> int:
    """End the open turn of a conversation.

    Every open call is cancelled and can no longer be answered.
    """
    return asyncio.run(cancel_turn(store_url(store), conversation, reason, by_or_login(by)))


def _quoting_hint(text: str, value: bool) -> str:
    """Return the hint for text that was given as JSON without quotes."""
    quoted = shlex.quote(json.dumps(text, ensure_ascii=False))
    hint = f"quote text as JSON (--json {quoted})" if len(quoted) <= 80 else "quote text as JSON"
    return f"{hint}, or give it as VALUE, without --json" if value else hint


def _read_json_option(text: str | None, path: str | None, *, value: bool = False) -> Any:
    if text is not None:
        try:
            return parse_strict_json(text, "--json")
        except Invalid as problem:
            if text.lstrip()[:1] in ("", "{", "[", '"'):
                raise
            raise Invalid(f"{problem.message}; {_quoting_hint(text, value)}") from None
    return read_json(path, "--file") if path is not None else None


def run_decision(
    call: str,
    verb: str,
    make: MakeDecision,
    by: Principal,
    resume: str | None,
    store: str | None,
    *,
    wait: float | None = None,
) -> int:
    """Record one decision; with ``resume``, also run the agent until the turn ends.

    wait:  how many seconds to wait for what becomes of the call
    """
    url = store_url(store)
    model: str | None = click.get_current_context().meta.get(MODEL_KEY)
    if resume is None and model is not None:
        raise Invalid("--model goes with --resume: a decision alone uses no model")
    if asyncio.run(is_store_missing(url)):
        raise no_store_error(url, ", so nothing waits in it")
    if resume is None:
        return asyncio.run(record_decision(url, call, verb, make, by, wait))
    job = AgentRun(choose_agent(resume, model), url, by, wait_seconds(None, False))
    return run_job(job, resolve_and_continue(job, call, verb, make))


async def record_decision(
    url: str, call: str, verb: str, make: MakeDecision, by: Principal, wait: float | None = None
) -> int:
    """Record a decision and print which process continues; with ``wait``, print what became of the call instead."""
    async with Runtime(store=url) as rt:
        found = await find_call(rt, call, verb)
        decision = make(found.entry)
        owners = await rt.owners()
        done = await rt.resolve(found.conversation, found.call, decision, by=by)
        tool = found.entry.tool if found.entry else found.call
        print_text(f"{tool} ({found.conversation}/{found.call}) {describe_decision(decision)} by {by}")
        if done.starts_at is not None:
            left = format_duration(done.starts_at - rt.now())
            undo = CommandWriter(url).format_command("take-back", f"{found.conversation}/{found.call}")
            print_text(f"it runs in {left}; to take the approval back until then: {undo}")
        if wait is not None:
            return _print_outcome(await rt.outcome(found.conversation, found.call, timeout=wait), url)
        if not isinstance(decision, Extend | TakeBack):
            await print_next_steps(rt, found, owners, CommandWriter(url), print_text)
    return 0


def _print_outcome(outcome: CallOutcome, url: str) -> int:
    """Print what became of a call after its decision; return the exit code."""
    label = f"{outcome.tool} ({outcome.conversation}/{outcome.call})"
    match outcome.status:
        case "done":
            print_text(f"{label} returned {ellipsize(value_text(outcome.value), MAX_VALUE)}")
            return 0
        case "failed":
            error = outcome.error
            print_text(f"{label} failed: [{error.kind}] {error.message}" if error else f"{label} failed")
            return 1
        case "waiting":
            reason = outcome.pending.reason if outcome.pending is not None else None
            see = CommandWriter(url).pending_command(outcome.conversation)
            print_text(f"{label} waits for a decision{f' ({reason})' if reason else ''}: {see}")
        case "approved" | "running":
            print_text(f"{label} has not ended yet")
        case _:
            assert_never(outcome.status)
    return EXIT_WAITING


async def resolve_and_continue(job: AgentRun, given: str, verb: str, make: MakeDecision) -> int:
    """Decide a call, then run its turn to the end in this process. After a refused decision nothing runs."""
    async with Runtime(store=job.store) as rt:
        found = await find_call(rt, given, verb)
        if found.entry is not None and found.entry.agent != job.agent.name:
            raise wrong_agent_error(job, found.conversation, found.entry.agent)
        await _check_model(job, rt, found.conversation)
        decision = make(found.entry)
        try:
            before = await rt.load_state(found.conversation)
        except NotFound:
            before = None
        await rt.resolve(found.conversation, found.call, decision, by=job.by)
        after = await rt.load_state(found.conversation)
        if before is None or before.turn is None:  # the call became pending just now
            before = after
    job.conversation = found.conversation
    async with run_agent(job, found.conversation) as rt:
        screen = job.make_screen()
        screen.print_line((f"conversation {found.conversation}", "dim"))
        message = before.turn.message if before.turn else before.seq
        view = TurnView(rt, screen, before, wait=job.wait, known=after.seq)
        return print_ending(job, screen, await view.wait_for_turn(message))


async def _check_model(job: AgentRun, rt: Runtime, conversation: str) -> None:
    """Refuse to continue with another model than the one that ``run --model`` named, unless one is named again.

    The name is not taken from the log: its writer is not trusted to choose the server that gets the conversation.
    """
    try:
        named = await agent_words(rt, conversation)
    except NotFound:
        return
    if named is not None and len(named) > 2 and "--model" not in job.chosen.words:
        raise Invalid(
            f"conversation {conversation!r} was started with --model {named[2]}, and {job.chosen.words[0]} by itself "
            f"uses another one: choose with --model {named[2]} or another; nothing was recorded"
        )


async def cancel_turn(url: str, conversation: str, reason: str | None, by: str) -> int:
    if await is_store_missing(url):
        raise not_found_error(url, conversation)
    async with Runtime(store=url) as rt:
        state = await rt.load_state(conversation)
        if not await rt.cancel(conversation, by=by, reason=reason):
            print_text(f"nothing to cancel: no turn is open in {conversation}")
            return 0
        # The process that runs the conversation closes the turn, or this one does. Wait for it before exiting.
        try:
            async with asyncio.timeout(10):
                async for event in rt.events(conversation, after=state.seq):
                    if isinstance(event, TurnEnded):
                        break
        except TimeoutError:
            print_text(f"cancelled; the process that runs {conversation} has yet to close the turn")
            return 0
        print_text(f"cancelled the open turn of {conversation}")
    return 0
