"""``Watch``: a live view of a conversation in a notebook."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Generator
from contextlib import suppress
from typing import Any, Protocol, cast

from holdfast.core.live import Snapshot
from holdfast.errors import Backpressure, HoldfastError, Invalid, install_command
from holdfast.runtime.engine import Engine
from holdfast.runtime.view import follow_events, is_at_rest, take_snapshot, wait_until

REDRAW_SECONDS = 0.1
"""Least seconds between two updates: each one reads the conversation and replaces the whole view."""
OUTSIDE_NOTEBOOK = (
    "watch shows a live view in a notebook, and this program does not run in IPython: "
    "read `rt.events(conversation)`, or run `holdfast tail` in a terminal"
)


class DisplayHandle(Protocol):
    """The part of IPython's DisplayHandle that is used here."""

    def update(self, obj: Any) -> None: ...


class View:
    """What the notebook shows: the latest card."""

    def __init__(self, html: str, text: str):
        self._html, self._text = html, text

    def _repr_html_(self) -> str:
        return self._html

    def __repr__(self) -> str:
        return self._text


class Watch:
    """A live view of a conversation in a notebook; ``Runtime.watch`` returns it.

    ``await`` it to wait until the conversation rests: its turns have ended, or a call waits for a decision.
    """

    def __init__(self, engine: Engine, conversation: str):
        self._engine, self._conversation = engine, conversation
        self._handle = open_display(render_message(conversation, ""))
        self._changed = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"holdfast:watch:{conversation}")

    @property
    def is_active(self) -> bool:
        """Whether the view is still updated."""
        return not self._task.done()

    def __await__(self) -> Generator[Any, Any, None]:
        return self.wait().__await__()

    async def wait(self) -> None:
        """Wait until the conversation rests, and show that state."""
        await wait_until(self._engine, self._conversation, is_at_rest)
        if self.is_active:
            await self._draw()

    def stop(self) -> None:
        """Stop the updates. The view stays as it is."""
        self._task.cancel()

    async def close(self) -> None:
        """Stop the updates, and wait until that is done."""
        self.stop()
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow(), name=f"holdfast:watch-events:{self._conversation}")
                tasks.create_task(self._redraw(), name=f"holdfast:watch-draw:{self._conversation}")
        except* HoldfastError as problems:
            self._handle.update(render_message(self._conversation, str(problems.exceptions[0])))

    async def _follow(self) -> None:
        """Note every event, from the latest one on."""
        while True:
            seq = (await take_snapshot(self._engine, self._conversation)).seq
            self._changed.set()
            with suppress(Backpressure):  # the next snapshot has what was missed
                async for _ in follow_events(self._engine, self._conversation, seq):
                    self._changed.set()

    async def _redraw(self) -> None:
        """Update the view after changes, but not more often than every ``REDRAW_SECONDS``."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._draw()
            await asyncio.sleep(REDRAW_SECONDS)

    async def _draw(self) -> None:
        snapshot = await take_snapshot(self._engine, self._conversation)
        self._handle.update(View(snapshot._repr_html_(), describe_snapshot(snapshot)))  # pyright: ignore[reportPrivateUsage]


def render_message(conversation: str, error: str) -> View:
    """Return a view without a snapshot: before the first one, or of an error."""
    from holdfast.core.text import html_card  # only notebooks need it

    color = html_card.RED if error else html_card.GREY
    head, text = html_card.heading(conversation, ""), html_card.paragraph(error, "error")
    return View(html_card.card(color, head, text), f"<{conversation}> {error}")


def describe_snapshot(snapshot: Snapshot) -> str:
    """Return the conversation in one line, for terminals."""
    latest = snapshot.partial or (snapshot.messages[-1].text if snapshot.messages else "")
    return f"<{snapshot.conversation}: {snapshot.state}, {len(snapshot.pending)} pending> {latest[-200:]!a}"


def open_display(view: View) -> DisplayHandle:
    """Show the view in the notebook's current output; return the handle that replaces it."""
    try:
        ipython: Any = importlib.import_module("IPython")
        display: Any = importlib.import_module("IPython.display")
    except ImportError:
        raise Invalid(f"watch needs IPython: {install_command('notebook')}", kind="resource_missing") from None
    if ipython.get_ipython() is None:
        raise Invalid(OUTSIDE_NOTEBOOK)
    return cast("DisplayHandle", display.display(view, display_id=True))
