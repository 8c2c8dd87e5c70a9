"""Summaries of what the model is no longer shown: made when a turn has ended, off the way, and lost without harm.

A summary moves nothing and starts nothing, so it needs no lease: whoever made one appends it, and one that reaches no
further than the last is refused. The next turn's end asks again for what was not made.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from assent.core.decisions import Principal
from assent.core.events import AnyEvent, TurnEnded
from assent.errors import AssentError, ModelError
from assent.models.base import Model
from assent.runtime.agent import Agent, capacity, ready_models
from assent.runtime.context import summarise, summary_due
from assent.urls import open_model

if TYPE_CHECKING:
    from assent.runtime.conversation import Conversation

log = logging.getLogger("assent")


class Summaries:
    """One at a time for each conversation."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def appended(self, conv: Conversation, events: list[AnyEvent], by: Principal | None) -> None:
        """This process appended these, in a turn on somebody's behalf."""
        agent = conv.home.agents.get(conv.state.agent)
        if agent is None or agent.context.summary is None or conv.name in self._tasks or conv.home.closing:
            return
        if any(isinstance(event, TurnEnded) for event in events):
            task = asyncio.get_running_loop().create_task(
                self._make(conv, agent, by.id if by else ""), name=f"assent:{conv.name}:summary"
            )
            self._tasks[conv.name] = task
            task.add_done_callback(lambda _: self._tasks.pop(conv.name, None))

    async def _make(self, conv: Conversation, agent: Agent, principal: str) -> None:
        with suppress(AssentError):  # somebody else was first, or the store is gone: the next turn's end asks again
            history = await conv.history(agent)
            size = await capacity(ready_models(agent))
            due = summary_due(history, instructions=agent.instructions, tools=agent.weight, capacity=size)
            if due is None:
                return
            try:
                model: Model = agent.context.summary
                model = open_model(model) if isinstance(model, str) else model
            except ModelError as problem:
                log.warning("conversation %s was not summarised: %s", conv.name, problem)
                return
            made = await summarise(
                conv.home.store, conv.name, model, upto=due, previous=history.summary, principal=principal
            )
            if made is not None:
                await conv.submit(made)

    def tasks(self) -> list[asyncio.Task[None]]:
        return list(self._tasks.values())

    async def close(self, patience: float) -> None:
        """Let those under way be finished, for a while."""
        if patience > 0 and self._tasks:
            await asyncio.wait(self.tasks(), timeout=patience)
        tasks = self.tasks()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
