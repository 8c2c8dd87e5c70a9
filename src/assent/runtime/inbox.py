"""What waits to be decided: inputs, who asked, and what to say where an input itself is at fault."""

from __future__ import annotations

import asyncio

import msgspec

from assent.core.events import AnyEvent, ErrorInfo
from assent.core.inputs import (
    Cancel,
    ClientGone,
    DeadlinePassed,
    Erred,
    Finished,
    Input,
    ModelFailed,
    ModelHalted,
    ModelReplied,
    Open,
    Planned,
    Reconciled,
    RefuseResolution,
    ReplyRejected,
    Resolve,
    Revoke,
    Say,
    Summarised,
    TimeUp,
)
from assent.errors import AssentError, Stale
from assent.runtime.tasks import Run

GUESTS = (Resolve, Say, Open, RefuseResolution, DeadlinePassed, ClientGone, Cancel, Revoke, Summarised)
"""What any process may append what follows from."""


class Item(msgspec.Struct, eq=False):
    input: Input
    reply: asyncio.Future[list[AnyEvent]]
    epoch: int | None = None
    """The lease epoch of the run that submits it; None: a guest does."""
    ends: Run | None = None
    """The run that is over with it."""
    events: list[AnyEvent] = []
    refusal: AssentError | None = None

    def answer(self, failure: BaseException | None) -> None:
        if self.reply.done():
            return
        if failure is None:
            self.reply.set_result(self.events)
        else:
            self.reply.set_exception(failure)
            self.reply.exception()  # read, so that a caller that is gone costs no warning


def current(items: list[Item], epoch: int | None) -> list[Item]:
    """Return what may be appended under this epoch (None: without the lease); refuse the rest as stale.

    A run that was begun under an earlier epoch may report after this process has taken the lease again: by then
    the new owner has begun the next attempt, or asked the model again, and the report of the earlier one is void.
    """
    left: list[Item] = []
    for item in items:
        if isinstance(item.input, GUESTS) if item.epoch is None else item.epoch == epoch:
            left.append(item)
        else:
            item.answer(Stale("this process does not run it any more", reason="phase"))
    return left


def refused(items: list[Item]) -> bool:
    """One of them was, at least. Asked at every append: a generator for ``any`` would cost more than the answer."""
    found = False
    for item in items:
        found = found or item.refusal is not None
    return found


def instead(input: Input, problem: Exception) -> Input | None:
    """A report that cannot be recorded as it is: what is recorded in its place, so that the turn goes on."""
    words = f"it cannot be recorded: {problem}".encode("utf-8", "replace").decode()
    match input:
        case ModelReplied() | ModelFailed() | ReplyRejected() | ModelHalted() | TimeUp():
            error = ErrorInfo(kind="invalid_response", message=words)
            return ModelFailed(turn=input.turn, step=input.step, error=error)
        case Finished():
            outcome = Erred(error=ErrorInfo(kind="invalid_result", message=words))
            return Finished(call=input.call, attempt=input.attempt, outcome=outcome)
        case Reconciled():
            verdict = Erred(error=ErrorInfo(kind="interrupted", message=words))
            return Reconciled(call=input.call, epoch=input.epoch, verdict=verdict)
        case Planned():
            return Planned(call=input.call, failure=words)
        case _:
            return None
