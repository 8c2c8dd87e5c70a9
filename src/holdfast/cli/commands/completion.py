"""``holdfast completion``: print the completion script of a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from holdfast.cli.completion import COMPLETE_VARIABLE
from holdfast.cli.options import example
from holdfast.errors import Invalid

SHELLS = ("bash", "zsh", "fish")


@click.command(
    epilog=example("holdfast completion fish | source", 'eval "$(holdfast completion bash)"   # in ~/.bashrc')
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> int:
    """Print the completion script for a shell.

    It completes commands, pending calls, conversations and model providers.
    """
    click.echo(completion_script(shell))
    return 0


def completion_script(shell: str) -> str:
    """Return the completion script for a shell."""
    found = get_completion_class(shell)
    if found is None:
        raise Invalid(f"no completion for {shell!r}; there is one for {', '.join(SHELLS)}")
    cli = click.get_current_context().find_root().command
    return found(cli, {}, "holdfast", COMPLETE_VARIABLE).source()
