"""The ``Call`` object that a handler receives."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any, Generic, cast

from holdfast.core.decisions import SYSTEM, Principal
from holdfast.core.inputs import Kept
from holdfast.core.json_values import check_plain_no_nul
from holdfast.core.model_messages import ModelAnswer, ModelMessage, ModelQuestion, check_question
from holdfast.core.results import RESULT_LIMIT
from holdfast.core.tool import MEDIA_TYPE, Artifact
from holdfast.errors import Invalid, ToolError

# Covariant: handlers read the scope and do not replace it. The default makes plain ``Call`` mean ``Call[Any]``;
# Python 3.11 has no defaults of type variables, so only type checkers see it.
if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Scope_co = TypeVar("Scope_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    Scope_co = TypeVar("Scope_co", covariant=True)


MAX_KEPT = 10_000
"""References that one run may keep: each is part of the event."""


class _Completed:
    """An awaitable that is already complete. Unlike a coroutine, it may be dropped without a warning."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, Any, None]:
        return
        yield


_COMPLETED = _Completed()


class Call(Generic[Scope_co]):
    """One call of a tool: its identity, principal and progress channel.

    Handlers, previews, approval functions and reconcile functions receive one. In ``Call[Database]`` the parameter is
    the type of ``scope``. Every argument has a default, so a test can create one directly:
    ``Call(scope=my_database)``.
    """

    __slots__ = (
        "_asker",
        "_cancelled",
        "_kept_bytes",
        "_reader",
        "_references",
        "_sink",
        "_turn_cancelled",
        "agent",
        "answers",
        "approver",
        "attempt",
        "conversation",
        "denied",
        "dry_run",
        "id",
        "kept",
        "model",
        "plan",
        "principal",
        "scope",
        "state",
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
        scope: Scope_co = cast("Any", None),  # noqa: B008
        approver: str | Principal | None = None,
        workspace: Any = None,
        plan: Any = None,
        answers: Iterable[Any] = (),
        state: Any = None,
        denied: str | None = None,
        sink: Callable[[Any], object] | None = None,
        reader: Callable[[str], Awaitable[bytes | None]] | None = None,
        turn_cancelled: Callable[[], bool] | None = None,
        model: str = "",
        asker: Callable[[ModelQuestion], Awaitable[ModelAnswer]] | None = None,
    ):
        self.id = id
        """Unique within the conversation."""
        self.conversation = conversation
        self.tool = tool
        """The tool's name."""
        self.attempt = attempt
        """1 for the first run; higher if an earlier run was interrupted, or asked with ``Ask(resume=...)``, or returned
        ``Continue``."""
        self.dry_run = dry_run
        """True in a preview: change nothing."""
        self.agent = agent
        """The agent's name."""
        self.principal = Principal.of(principal)
        """The principal that the turn runs for."""
        self.scope: Scope_co = scope
        """The object that ``Runtime(scope=...)`` created for the principal; never persisted."""
        self.approver = None if approver is None else Principal.of(approver)
        """The principal that approved this call; None if the call needed no approval."""
        self.workspace = workspace
        self.plan = plan
        """The preview's value that this run is bound to: the approved plan, or the plan that was made just before the
        run. None in previews and approval functions, and if no preview was made."""
        self.answers: tuple[Any, ...] = tuple(answers)
        """The answers to this call's questions that were asked with ``Ask(resume=...)``, oldest first. Empty before
        the first one: then the handler has not asked yet."""
        self.state = state
        """What the handler passed on: as ``resume`` with the last of these questions, or with ``Continue``. None before
        the first time."""
        self.denied = denied
        """The reason, if a person declined the last of these questions, which was asked with ``on_deny="continue"``;
        its entry in ``answers`` is None. None: it was answered."""
        self.kept: dict[str, bytes] = {}
        """The bytes that ``keep`` took, by SHA-256. They are stored with the result, or with a preview's suspension."""
        self.model = model
        """The name of the agent's model, which ``ask_model`` asks; empty if there is none."""
        self._asker = asker
        self._references: dict[Artifact, None] = {}
        self._kept_bytes = 0
        self._sink, self._reader, self._turn_cancelled = sink, reader, turn_cancelled
        self._cancelled = False

    @property
    def key(self) -> str:
        """The idempotency key: the same on every attempt, unique in the store."""
        return f"{self.conversation}/{self.id}"

    @property
    def cancelled(self) -> bool:
        """Whether the call was cancelled or timed out, so that its result will be discarded.

        A plain ``def`` runs in a thread, which cannot be stopped: a long one should check this and return early.
        """
        return self._cancelled

    @property
    def turn_cancelled(self) -> bool:
        """Whether the turn was cancelled, and not only this run, because its process closes and another one continues.

        A handler that waits for work elsewhere, such as a job on a server, cancels it there only if this is true.
        """
        return self._turn_cancelled is not None and self._turn_cancelled()

    def keep(self, content: bytes | str, media_type: str = "text/plain", name: str = "") -> Artifact:
        """Store bytes beside the log, in the append that records this call's result. Return the reference to them.

        Use it for content that is too large for the model or that is needed later: put the reference into the result.
        They are also stored if the handler then raises. In a preview they are stored with the suspension. Nothing is
        stored if the process dies before. One run may keep 64 MiB in all; beyond that, ToolError ``too_large``.

        name:  a file name for people who download it
        """
        if not MEDIA_TYPE.fullmatch(media_type):
            raise Invalid(f"{media_type!r:.80} is not a media type, such as 'text/plain' or 'image/png'")
        check_plain_no_nul(name, "name")
        if len(name) > 255:
            raise Invalid("the name of an artifact has at most 255 characters")
        raw = content.encode() if isinstance(content, str) else bytes(content)
        sha256 = hashlib.sha256(raw).hexdigest()
        found = Artifact(sha256, len(raw), media_type, name)
        total = self._kept_bytes + (0 if sha256 in self.kept else len(raw))
        if total > RESULT_LIMIT or len(self._references) >= MAX_KEPT:
            limits = f"{RESULT_LIMIT} bytes or {MAX_KEPT} artifacts"
            raise ToolError("too_large", f"a call keeps at most {limits}; this would be {total} bytes: keep less")
        self.kept[sha256], self._kept_bytes = raw, total
        self._references[found] = None
        return found

    async def read_artifact(self, sha256: str) -> bytes | None:
        """Return the bytes of an artifact that this conversation's log names; None if there is no such artifact."""
        if sha256 in self.kept:
            return self.kept[sha256]
        return None if self._reader is None else await self._reader(sha256)

    async def ask_model(
        self,
        messages: str | Iterable[ModelMessage],
        *,
        instructions: str = "",
        max_tokens: int | None = None,
        temperature: float | None = None,
        stop: Iterable[str] = (),
    ) -> ModelAnswer:
        """Send one request to the agent's model, and return its answer. Only an ``async def`` handler can.

        The model sees these messages and instructions: neither the conversation nor any tools. The agent's retries,
        fallbacks and hooks apply; texts that hooks inject are left out. Tokens and cost are logged with the outcome of
        this run, count toward the turn's limits, and are part of its usage. If the process dies before that outcome is
        logged, they are not counted and the next run asks again: return ``Continue`` with the answer to keep it.

        Raises ToolError ``usage_limit_reached`` if a limit of the turn is reached or the request would exceed it, and
        other kinds if no model answers.

        max_tokens:  the most tokens of the answer; never more than the turn's limit leaves
        stop:        texts at which the answer ends
        """
        if self._asker is None:
            why = "a preview, an approval function and a reconcile function cannot ask the model"
            raise ToolError("invalid_args", f"{why}; only a running handler can")
        question = check_question(
            messages, instructions=instructions, max_tokens=max_tokens, temperature=temperature, stop=stop
        )
        return await self._asker(question)

    def progress(self, payload: Any) -> _Completed:
        """Send a progress report to the viewers immediately. ``await`` it in ``async def``; just call it in ``def``."""
        if self._sink is not None:
            self._sink(payload)
        return _COMPLETED

    def _kept_content(self) -> tuple[Kept, ...]:
        return tuple(Kept(reference, self.kept[reference.sha256]) for reference in list(self._references))

    def _cancel(self) -> None:
        # A single attribute assignment is atomic: no lock is needed between the threads.
        self._cancelled = True

    def __repr__(self) -> str:
        return f"Call({self.key!r}, attempt={self.attempt}{', dry_run=True' if self.dry_run else ''})"
