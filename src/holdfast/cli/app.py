"""The ``holdfast`` command: the group of all commands, and the entry point.

Commands are imported when they are called: ``holdfast log`` loads nothing that only ``holdfast serve`` needs.
Every failure ends as one line on standard error and an exit code (``output.report_error``).
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import click

from holdfast import __version__
from holdfast.cli import server_token
from holdfast.cli.environment import decode_argument
from holdfast.cli.options import Settings, example, store_option
from holdfast.cli.output import ReaderGone, prepare_streams, report_error

CODES = """\b
Exit codes:
  0  done                              4  expired
  1  turn not completed, other errors  5  not allowed
  2  invalid, usage                   75  waiting for an answer
  3  unknown, stale, busy            130  interrupted

"""
SECTIONS = {
    "Run": {"run": "run", "chat": "chat", "serve": "serve", "worker": "worker", "mcp": "mcp", "demo": "demo"},
    "Answer": {
        "pending": "pending_list",
        "approve": "approve",
        "deny": "decide",
        "answer": "decide",
        "submit": "decide",
        "extend": "decide",
        "take-back": "decide",
        "cancel": "decide",
        "grants": "grants",
        "revoke": "grants",
        "deputies": "deputies",
        "undo": "undo",
    },
    "Look": {
        "conversations": "conversations",
        "audit": "audit",
        "log": "log",
        "tail": "log",
        "replay": "replay",
        "timeline": "timeline",
        "request": "request",
        "workers": "worker",
        "outbox": "outbox",
    },
    "Keep": {
        "rename": "conversations",
        "archive": "conversations",
        "verify": "verify",
        "backup": "backup",
        "export": "archive",
        "import": "archive",
        "copy": "copy",
        "migrate": "migrate",
        "doctor": "doctor",
    },
    "Build": {"tools": "tools", "dry-run": "tools", "ui": "ui", "completion": "completion"},
}
"""Command -> its module in ``holdfast.cli.commands``, in the sections and the order of ``holdfast --help``."""
MODULES = {name: module for section in SECTIONS.values() for name, module in section.items()}


class LazyGroup(click.Group):
    """Imports the module of a command when the command is looked up."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in MODULES:
            return None
        module = import_module(f"holdfast.cli.commands.{MODULES[cmd_name]}")
        found = {command.name: command for command in vars(module).values() if isinstance(command, click.Command)}
        return found[cmd_name]

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as gone:
            raise ReaderGone from gone  # click would exit with 1

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = formatter.width - 6 - max(map(len, MODULES))
        for title, names in SECTIONS.items():
            commands = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(title):
                formatter.write_dl([(name, command.get_short_help_str(width)) for name, command in commands if command])


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=CODES
    + example(
        'holdfast run hello:agent "Tell Ada that the build is green"',
        "holdfast pending                          # in a second terminal",
        "holdfast approve CALL                     # as pending shows it",
    ),
)
@click.version_option(__version__, prog_name="holdfast", message="%(prog)s %(version)s")
@store_option
@click.pass_context
def cli(ctx: click.Context, store: str | None) -> None:
    """Agents whose tool calls can be answered by people, browsers and servers."""
    ctx.obj = Settings(store)
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code, or the exit code of the error that it raised."""
    prepare_streams()
    server_token.take_from_environment()
    try:
        words = [decode_argument(word, "an argument") for word in (sys.argv[1:] if argv is None else argv)]
        code = cli.main(words, prog_name="holdfast", standalone_mode=False)
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        return report_error(error)
    return code if isinstance(code, int) else 0
