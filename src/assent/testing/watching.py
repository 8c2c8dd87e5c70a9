"""Handlers that are watched: how often each call entered its handler, and how often it got to the end of it."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

from assent.models.scripted import ScriptedModel
from assent.runtime.agent import Agent
from assent.tools.call import Call
from assent.tools.declare import Tool
from assent.tools.handler import Handler
from assent.tools.toolset import Toolset


class Watch:
    """Counted by ``call.key``, over all lives of one run."""

    def __init__(self) -> None:
        self.entered: Counter[str] = Counter()
        self.returned: Counter[str] = Counter()
        self._lock = threading.Lock()

    def enter(self, key: str) -> None:
        with self._lock:
            self.entered[key] += 1

    def leave(self, key: str) -> None:
        """It returned: neither stopped nor failed."""
        with self._lock:
            self.returned[key] += 1


class Watched(Handler):
    """A handler in the place of another."""

    __slots__ = ("_inner", "_watch")

    def __init__(self, inner: Handler, watch: Watch):  # its parts are the inner one's: nothing is read anew
        self.fn, self.threaded, self.style, self.schema = inner.fn, inner.threaded, inner.style, inner.schema
        self.result = inner.result
        self._inner, self._watch = inner, watch

    def __call__(self, args: Mapping[str, Any], call: Call) -> Any:
        return self._run(args, call) if self.threaded else self._await(args, call)

    def _run(self, args: Mapping[str, Any], call: Call) -> Any:
        self._watch.enter(call.key)
        value = self._inner(args, call)
        self._watch.leave(call.key)
        return value

    async def _await(self, args: Mapping[str, Any], call: Call) -> Any:
        self._watch.enter(call.key)
        value = await self._inner(args, call)
        self._watch.leave(call.key)
        return value


def watched(agent: Agent, watch: Watch) -> Agent:
    """The same agent with watched handlers. The agent that was given is left alone."""
    twin = copy.copy(agent)
    twin.tools = Toolset(*(_watched(tool, watch) for tool in agent.tools))
    model = agent.model
    if isinstance(model, ScriptedModel):
        # A script is told by the log how far it has come: a fresh process goes on where the last one stopped.
        twin.model = copy.copy(model)
        twin.model._follow = True  # pyright: ignore[reportPrivateUsage]
    return twin


def _watched(tool: Tool, watch: Watch) -> Tool:
    twin = tool.replaced()
    if twin.handler is not None:
        twin.handler = Watched(twin.handler, watch)
    return twin
