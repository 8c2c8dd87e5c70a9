"""The group that all commands belong to, and the options, arguments and small words that they share."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from assent import __version__
from assent.cli import output
from assent.cli.commands import DEFAULT_STORE
from assent.cli.text import cut
from assent.errors import Invalid

MANY = 2**53
F = TypeVar("F", bound=Callable[..., Any])
CODES = """\b
Exit codes:
  0  done                              4  expired
  1  turn not completed, other errors  5  not allowed
  2  invalid, usage                   75  at rest, waiting for somebody
  3  unknown, stale, busy            130  interrupted

"""
SECTIONS = {
    "Run": ("run", "chat", "serve", "worker", "demo"),
    "Answer": ("pending", "approve", "deny", "answer", "submit", "cancel", "grants"),
    "Look": ("log", "tail", "replay", "request", "workers"),
    "Keep": ("verify", "backup", "export", "import", "copy", "migrate", "doctor"),
    "Build": ("tools", "dry-run", "ui", "completion"),
}
"""The order of ``assent --help``. A command that is in none comes last."""


class Whole(click.IntRange):
    """click calls it an integer range, which nobody has typed wrongly."""

    name = "whole number"


@dataclass
class Settings:
    store: str | None


def example(*lines: str) -> str:
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)


def seconds(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    if value is not None and not 0 <= value <= 1e9:  # which NaN is not either
        raise click.BadParameter(f"{value} is not a number of seconds", ctx=ctx, param=param)
    return value


def wait_option(help: str) -> Callable[[F], F]:
    return click.option("--wait", type=float, callback=seconds, metavar="SECONDS", help=help)


def store_option(command: F) -> F:
    return click.option("--store", metavar="URL", help=f"The store [default: $ASSENT_STORE or {DEFAULT_STORE}].")(
        command
    )


by_option = click.option("--by", metavar="NAME", help="Who you are, for the log [default: your login name].")
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object a line, nothing else.")
after_option = click.option("--after", type=Whole(0, MANY), default=0, metavar="N", help="Only events after this one.")


def _calls(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from assent.cli.completion import calls

    return calls(ctx, incomplete)


def complete_conversation(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from assent.cli.completion import conversations

    return conversations(ctx, incomplete)


def _models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from assent.cli.completion import models

    return models(incomplete)


MODEL = "assent.model"
"""Where ``model_option_for(keep=True)`` leaves its value in the context."""


def model_option_for(help: str, *, keep: bool = False) -> Callable[[F], F]:
    """``--model``; with ``keep`` its value is left in the context, and the command takes no such argument."""

    def kept(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
        ctx.meta[MODEL] = value
        return value

    return click.option(
        "--model",
        metavar="PROVIDER:MODEL",
        shell_complete=_models,
        help=help,
        expose_value=not keep,
        callback=kept if keep else None,
    )


model_option = model_option_for("Ask this model: alone, or in place of the agent's own.")
instructions_option = click.option(
    "--instructions", "--system", "instructions", metavar="TEXT", help="What a model alone is told beforehand."
)
call_argument = click.argument("call", metavar="CALL", shell_complete=_calls)
maybe_call = click.argument("call", metavar="[CALL]", required=False, shell_complete=_calls)
conversation_argument = click.argument("conversation", shell_complete=complete_conversation)
maybe_conversation = click.argument("conversation", required=False, shell_complete=complete_conversation)


def conversation_option(help: str) -> Callable[[F], F]:
    return click.option("--conversation", metavar="ID", help=help, shell_complete=complete_conversation)


class Commands(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as gone:
            raise output.ReaderGone from gone  # click would exit with 1, as if something were wrong

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        known = {name: command for name, command in self.commands.items() if not command.hidden}
        listed = [name for names in SECTIONS.values() for name in names]
        rest = tuple(name for name in known if name not in listed)
        width = formatter.width - 6 - max(map(len, known), default=0)
        for title, names in {**SECTIONS, "Other": rest}.items():
            rows = [(name, known[name].get_short_help_str(width)) for name in names if name in known]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


@click.group(
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=CODES
    + example(
        'assent run hello:agent "Tell Ada that the build is green"',
        "assent pending                          # in a second terminal",
        "assent approve CALL                     # as pending shows it",
    ),
)
@click.version_option(__version__, prog_name="assent", message="%(prog)s %(version)s")
@store_option
@click.pass_context
def cli(ctx: click.Context, store: str | None) -> None:
    """Agents whose tool calls people, browsers and servers can answer."""
    ctx.obj = Settings(store)
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def store_url(given: str | None, default: str = DEFAULT_STORE) -> str:
    settings = click.get_current_context().obj
    before = settings.store if isinstance(settings, Settings) else None
    url = given or before or os.environ.get("ASSENT_STORE") or default
    return real_text(url, "the store's name")


def login_or(by: str | None) -> str:
    from assent.cli.values import login

    return login() if by is None else by


def patience(wait: float | None, no_wait: bool) -> float | None:
    if no_wait:
        return 0.0
    return wait if wait is not None else None if output.is_terminal() else 0.0


def real_text(text: str, what: str) -> str:
    """Text as it was typed: in a locale without UTF-8, Python hands its bytes over undecoded."""
    if not any("\ud800" <= char <= "\udfff" for char in text):
        return text
    try:
        return os.fsencode(text).decode()
    except UnicodeError:
        raise Invalid(f"{what} is not UTF-8 text: {cut(ascii(text), 80)}") from None
