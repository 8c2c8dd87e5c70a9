"""Mistakes with events that type checkers find."""

from typing import assert_never

from holdfast.events import AnyEvent, AnyLive, StateChanged, TextDelta, TurnEnded


def show(event: AnyEvent | AnyLive) -> str:
    match event:
        case TextDelta():
            return event.tekst  # error: pyright=reportAttributeAccessIssue mypy=attr-defined
        case TurnEnded():
            return event.error.message  # error: pyright=reportOptionalMemberAccess mypy=union-attr
        case _:
            return event.text  # error: pyright=reportAttributeAccessIssue mypy=union-attr


def title(event: AnyLive) -> str:
    match event:
        case StateChanged():
            return event.state
        case _:
            assert_never(event)  # error: pyright=reportArgumentType mypy=arg-type
