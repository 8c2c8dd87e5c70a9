"""The commands around an agent: talk to it, its tools, remembered approvals, whether all is well."""

from __future__ import annotations

import asyncio
import shlex

import click

from assent.cli.group import (
    by_option,
    cli,
    complete_conversation,
    conversation_option,
    example,
    instructions_option,
    json_option,
    login_or,
    model_option,
    model_option_for,
    store_option,
    store_url,
)
from assent.errors import Invalid

spec_argument = click.argument("spec", metavar="MODULE:AGENT")
maybe_spec = click.argument("spec", metavar="[MODULE:AGENT]", required=False)


@cli.command(epilog=example("assent tools hello:agent", "assent tools hello:agent --json | jq .parameters"))
@spec_argument
@json_option
def tools(spec: str, as_json: bool) -> int:
    """An agent's tools: who runs them, who is asked, what a crash means."""
    from assent.cli.loading import load_agent
    from assent.cli.toolbox import print_tools

    return print_tools(load_agent(spec), as_json)


@cli.command(
    "dry-run",
    context_settings={"allow_extra_args": True},
    epilog=example("""assent dry-run hello:agent send_mail --args '{"to": "ada@x.org", "text": "Hi"}'"""),
)
@spec_argument
@click.argument("tool")
@click.option("--args", metavar="JSON", default="{}", help="The arguments, as the model would give them.")
@by_option
@json_option
@click.pass_context
def dry_run(ctx: click.Context, spec: str, tool: str, args: str, by: str | None, as_json: bool) -> int:
    """What a call would do, without doing it.

    That is its preview, on a store in memory; the error that the run would give is given here, too.
    """
    from assent.cli import toolbox
    from assent.cli.loading import load_agent
    from assent.core.strict_json import decode_object

    if ctx.args:
        raise Invalid(f"the arguments are given with --args: --args {shlex.quote(' '.join(ctx.args))}")
    given = decode_object(args, "--args")
    return asyncio.run(toolbox.dry_run(load_agent(spec), tool, given, login_or(by), as_json))


@cli.command(epilog=example("assent grants", "assent grants support", "assent grants revoke support g11"))
@click.argument(
    "words", nargs=-1, metavar="[CONVERSATION | revoke CONVERSATION GRANT]", shell_complete=complete_conversation
)
@by_option
@json_option
@store_option
def grants(words: tuple[str, ...], by: str | None, as_json: bool, store: str | None) -> int:
    """Approvals that are remembered, and taking one back.

    Without CONVERSATION, those of all conversations. GRANT may be the beginning of its id.
    """
    from assent.cli import grants as remembered

    match words:
        case ("revoke", conversation, grant):
            return asyncio.run(remembered.revoke(store_url(store), conversation, grant, login_or(by)))
        case () | (_,) if words != ("revoke",):
            return asyncio.run(remembered.listed(store_url(store), words[0] if words else None, as_json))
        case _:
            raise Invalid("give nothing, a CONVERSATION, or: revoke CONVERSATION GRANT")


@cli.command(
    epilog=example(
        "assent doctor",
        "assent doctor --model openai:gpt-5",
        "assent doctor --json | jq 'select(.status != \"ok\")'",
    )
)
@maybe_spec
@model_option_for("Can this model be asked: its name, its package, its key.")
@json_option
@store_option
def doctor(spec: str | None, model: str | None, as_json: bool, store: str | None) -> int:
    """Is all well: the store, the clock, what is overdue, keys.

    One line a check, with what to do where something is wrong; exit code 1 if a check failed. No model is asked.
    With MODULE:AGENT, that agent's models are looked at, else every provider that has a key or is installed.
    """
    from assent.cli import doctor as checks

    return asyncio.run(checks.doctor(store_url(store), as_json, model, spec))


@cli.command(
    epilog=example(
        "assent chat hello:agent",
        "assent chat hello:agent --conversation support",
        'assent chat --model openai:gpt-5 --instructions "Answer in one sentence."',
    )
)
@maybe_spec
@model_option
@instructions_option
@conversation_option("Which one to go on with, or what to call a new one.")
@by_option
@store_option
def chat(
    spec: str | None,
    model: str | None,
    instructions: str | None,
    conversation: str | None,
    by: str | None,
    store: str | None,
) -> int:
    """Talk to an agent, or to a model, and answer what it asks right there.

    Ctrl-C cancels the turn, a second one leaves; Ctrl-D leaves. What you leave pending is not lost.
    """
    from assent.cli import chat as talk
    from assent.cli.loading import choose
    from assent.cli.running import Job

    talk.check_terminal()
    job = Job(choose(spec, model, instructions), store_url(store), login_or(by), 0.0, conversation)
    return asyncio.run(talk.chat(job))


@cli.command(epilog=example("assent completion fish | source", 'eval "$(assent completion bash)"   # in ~/.bashrc'))
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> int:
    """Print what a shell needs to complete our commands.

    At Tab it then offers calls that wait and conversations that exist, too.
    """
    from assent.cli.completion import script

    click.echo(script(shell))
    return 0
