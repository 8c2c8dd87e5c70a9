"""The options and arguments that commands share, and the functions that resolve their values."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from holdfast.cli.command_lines import DEFAULT_STORE
from holdfast.cli.environment import decode_argument, login_name
from holdfast.cli.output import is_terminal
from holdfast.core.decisions import Principal

MAX_INTEGER = 2**53
F = TypeVar("F", bound=Callable[..., Any])
MODEL_KEY = "holdfast.model"
"""The key of the context's ``meta`` in which ``model_option_for(keep=True)`` stores its value."""


class Whole(click.IntRange):
    """An integer range that error messages call a whole number."""

    name = "whole number"


@dataclass
class Settings:
    """The options of ``holdfast`` itself, before the command."""

    store: str | None


def example(*lines: str) -> str:
    """Return the examples at the end of a help text."""
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)


def check_seconds(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    if value is not None and not 0 <= value <= 1e9:  # also refuses NaN
        raise click.BadParameter(f"{value} is not a number of seconds", ctx=ctx, param=param)
    return value


def wait_option(help: str) -> Callable[[F], F]:
    return click.option("--wait", type=float, callback=check_seconds, metavar="SECONDS", help=help)


def store_option(command: F) -> F:
    return click.option("--store", metavar="URL", help=f"The store [default: $HOLDFAST_STORE or {DEFAULT_STORE}].")(
        command
    )


by_option = click.option("--by", metavar="NAME", help="Your name in the log [default: your login name].")
role_option = click.option(
    "--role",
    "roles",
    multiple=True,
    metavar="ROLE",
    help="A role of yours, for a tool that asks for one. Who can open the store is trusted with it.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object a line, nothing else.")
after_option = click.option(
    "--after", type=Whole(0, MAX_INTEGER), default=0, metavar="N", help="Only events after this one."
)


def _complete_call(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from holdfast.cli.completion import complete_calls

    return complete_calls(ctx, incomplete)


def complete_conversation(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from holdfast.cli.completion import complete_conversations

    return complete_conversations(ctx, incomplete)


def _complete_model(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from holdfast.cli.completion import complete_models

    return complete_models(incomplete)


def model_option_for(help: str, *, keep: bool = False) -> Callable[[F], F]:
    """Return the ``--model`` option; with ``keep`` its value is stored in the context and not passed to the command."""

    def keep_value(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
        ctx.meta[MODEL_KEY] = value
        return value

    return click.option(
        "--model",
        metavar="PROVIDER:MODEL",
        shell_complete=_complete_model,
        help=help,
        expose_value=not keep,
        callback=keep_value if keep else None,
    )


model_option = model_option_for("Use this model: alone, or in place of the agent's own.")


def resume_option(command: F) -> F:
    """Add ``--resume``, and the ``--model`` that ``run_decision`` reads from the context."""
    command = model_option_for("With --resume: use this model in place of the agent's own.", keep=True)(command)
    return click.option("--resume", metavar="MODULE:AGENT", help="Run the agent here and finish the turn.")(command)


instructions_option = click.option(
    "--instructions", "--system", "instructions", metavar="TEXT", help="Instructions for a model without an agent."
)
call_argument = click.argument("call", metavar="CALL", shell_complete=_complete_call)
optional_call_argument = click.argument("call", metavar="[CALL]", required=False, shell_complete=_complete_call)
conversation_argument = click.argument("conversation", shell_complete=complete_conversation)
optional_conversation_argument = click.argument("conversation", required=False, shell_complete=complete_conversation)


def conversation_option(help: str) -> Callable[[F], F]:
    return click.option("--conversation", metavar="ID", help=help, shell_complete=complete_conversation)


spec_argument = click.argument("spec", metavar="MODULE:AGENT")
optional_spec_argument = click.argument("spec", metavar="[MODULE:AGENT]", required=False)


def store_url(given: str | None, default: str = DEFAULT_STORE) -> str:
    """Return the store of a command: its own ``--store``, that of ``holdfast``, $HOLDFAST_STORE, or the default."""
    settings = click.get_current_context().obj
    before = settings.store if isinstance(settings, Settings) else None
    url = given or before or os.environ.get("HOLDFAST_STORE") or default
    return decode_argument(url, "the store's name")


def by_or_login(by: str | None) -> str:
    return login_name() if by is None else by


def principal_of(by: str | None, roles: Sequence[str]) -> Principal:
    """Return the principal of a command, with the roles that were given."""
    return Principal(by_or_login(by), tuple(roles))


def wait_seconds(wait: float | None, no_wait: bool) -> float | None:
    """Return the seconds to wait for answers; None means without a limit, the default on a terminal."""
    if no_wait:
        return 0.0
    return wait if wait is not None else None if is_terminal() else 0.0
