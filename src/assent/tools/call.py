"""What a handler is told about the call that it serves."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from assent.core.decisions import SYSTEM, Principal


class _Done:
    """An awaitable that is over already: awaiting it costs nothing, dropping it warns of nothing."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, Any, None]:
        return
        yield


_DONE = _Done()


class Call:
    """One call of a tool. Handlers, previews, approval and reconcile functions get one.

    Every argument has a default, so that a test can make one: ``Call(scope=my_database)``.
    """

    __slots__ = (
        "_cancelled",
        "_sink",
        "agent",
        "approver",
        "attempt",
        "conversation",
        "dry_run",
        "id",
        "principal",
        "scope",
        "tool",
        "workspace",
    )

    def __init__(
        self,
        *,
        id: str = "call",
        conversation: str = "conversation",
        tool: str = "tool",
        attempt: int = 1,
        dry_run: bool = False,
        agent: str = "",
        principal: str | Principal = SYSTEM,
        scope: Any = None,
        approver: str | Principal | None = None,
        workspace: Any = None,
        sink: Callable[[Any], object] | None = None,
    ):
        self.id = id
        """Unique within the conversation."""
        self.conversation = conversation
        self.tool = tool
        """The name of the tool that is called."""
        self.attempt = attempt
        """1 for the first run; more where an earlier one was interrupted."""
        self.dry_run = dry_run
        """True in a preview: change nothing."""
        self.agent = agent
        """The agent's name."""
        self.principal = Principal.of(principal)
        """On whose behalf the turn runs."""
        self.scope = scope
        """What ``Runtime(scope=...)`` made for the principal; never persisted."""
        self.approver = None if approver is None else Principal.of(approver)
        """Who approved this call, where somebody did."""
        self.workspace = workspace
        self._sink = sink
        self._cancelled = False

    @property
    def key(self) -> str:
        """The idempotency key: the same on every attempt, unique in the store."""
        return f"{self.conversation}/{self.id}"

    @property
    def cancelled(self) -> bool:
        """Nobody waits for the result any more. A plain ``def`` cannot be stopped: let it look here."""
        return self._cancelled

    def progress(self, payload: Any) -> _Done:
        """Tell viewers how far it is, at once. ``await`` it in ``async def``, just call it in ``def``."""
        if self._sink is not None:
            self._sink(payload)
        return _DONE

    def _cancel(self) -> None:
        # One store into a slot, which every thread sees whole: no lock is needed.
        self._cancelled = True

    def __repr__(self) -> str:
        return f"Call({self.key!r}, attempt={self.attempt}{', dry_run=True' if self.dry_run else ''})"
