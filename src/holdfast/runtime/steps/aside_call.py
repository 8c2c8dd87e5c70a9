"""Answer an aside: a model call without tools, made while the calls of the open turn wait for people."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from holdfast.core.decide.aside import make_aside_id
from holdfast.core.effects import AnswerAside, CallModel, budget_error
from holdfast.core.events import ErrorInfo
from holdfast.core.inputs import (
    AsideRejected,
    AsideReplied,
    ModelFailed,
    ModelHalted,
    ModelReplied,
    ReplyRejected,
    TimeLimitReached,
)
from holdfast.core.prompt.aside import ASIDE_PROMPT, stub_of
from holdfast.core.prompt.compaction import PromptRenderer, RenderedPrompt
from holdfast.core.state import TurnState, waited_seconds
from holdfast.models.base import Model, Request
from holdfast.runtime.agent_definition import AgentDefinition, smallest_window
from holdfast.runtime.services import RunContext
from holdfast.runtime.steps.model_call import ModelCall, ModelReport, make_call
from holdfast.runtime.steps.reply import Reply
from holdfast.runtime.steps.tasks import Run

ONLY_CALLS_ERROR = ErrorInfo(
    kind="invalid_response", message="the model made tool calls instead of an answer; tools are off in an aside"
)
TIME_ERROR = ErrorInfo(kind="usage_limit_reached", message="the turn's time limit is reached")


async def answer_aside(conv: RunContext, effect: AnswerAside, run: Run) -> None:
    """Call the model for one aside, and report its answer or failure."""
    turn = conv.state.turn
    if turn is None:
        return
    used_up = budget_error(turn)
    if used_up is not None:  # the answer to an earlier aside has used it up
        await conv.report(AsideReplied(message=effect.message, error=used_up), run)
        return
    agent = conv.services.agents[turn.agent]
    call = AsideCall(conv, effect, turn, agent)
    report = await make_call(conv, call, turn, turn.step, agent)
    await conv.report(_to_aside_report(effect.message, report), run)


class AsideCall(ModelCall):
    """The call of the model for one aside."""

    def __init__(self, conv: RunContext, effect: AnswerAside, turn: TurnState, agent: AgentDefinition):
        self._aside = effect
        super().__init__(conv, CallModel(turn.number, turn.step), turn, agent)

    def _new_reply(self) -> Reply:
        message = make_aside_id(self._aside.message, self._aside.rejected)
        return Reply(self._conv, message, self._agent.hooks, self._attempts, shows_calls=False)

    def time_left(self) -> float | None:
        """Return the seconds that the turn had left when it began to wait: an aside is part of the waiting."""
        left = super().time_left()
        turn, limits = self._turn, self._turn.limits
        if left is None or limits is None or limits.seconds is None:
            return left
        now = self._conv.services.now()
        used = now - turn.started - turn.waited - waited_seconds(turn, now)
        return max(0.0, limits.seconds - used)

    def _wanted_output(self) -> tuple[Any, bool]:
        return None, False

    def _prompts(self) -> tuple[str, ...]:
        return (ASIDE_PROMPT,)

    async def _render_history(self, models: list[Model]) -> RenderedPrompt:
        capacity = await smallest_window(models)
        history = await self._conv.history(self._agent)
        # No await from here on: the history and the turn's calls have to be those of one moment.
        asked = history.with_aside(self._aside.message, stub_of(self._conv.state.turn or self._turn))
        return self._render(asked, PromptRenderer(), capacity)

    def _build_request(self, rendered: RenderedPrompt, output: Any) -> Request:
        return replace(super()._build_request(rendered, output), aside=True)


def _to_aside_report(message: int, report: ModelReport) -> AsideReplied | AsideRejected:
    if isinstance(report, ReplyRejected):
        return AsideRejected(
            message=message,
            reason=report.reason,
            text=report.text,
            attempts=report.attempts,
            verdicts=report.verdicts,
            context=report.context,
            record=report.record,
        )
    return AsideReplied(
        message=message,
        text=report.text,
        thinking=report.thinking,
        attempts=report.attempts,
        error=_find_error(report),
        finish=report.finish if isinstance(report, ModelReplied) else None,
        verdicts=report.verdicts if isinstance(report, ModelReplied | ModelHalted) else (),
        context=report.context,
        record=report.record,
    )


def _find_error(report: ModelReplied | ModelFailed | ModelHalted | TimeLimitReached) -> ErrorInfo | None:
    match report:
        case ModelReplied():
            return ONLY_CALLS_ERROR if report.calls and not report.text.strip() else None
        case ModelFailed():
            return report.error
        case ModelHalted():
            return ErrorInfo(kind="denied", message=f"a hook stopped the answer: {report.reason}")
        case TimeLimitReached():
            return TIME_ERROR
