"""Who may decide what: the application's rules ``may_resolve`` and ``may_grant``."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from copy import deepcopy
from typing import Any

from assent.core.decisions import Approve, Decision, Pending, Principal
from assent.errors import DeclarationError

log = logging.getLogger("assent")

Rule = Callable[[Principal, Pending, Decision], bool | Awaitable[bool]]
"""A function of (principal, pending, decision). For an edit, ``pending`` has the edited arguments and their plan."""


class Rights:
    """The rules of one runtime. Without any, every caller may decide everything.

    may_resolve:  may the principal take this decision?
    may_grant:    may the principal have this approval remembered (``remember="args"`` or ``"tool"``)?
    """

    def __init__(self, may_resolve: Rule | None = None, may_grant: Rule | None = None):
        self._may_resolve = checked_rule("may_resolve", may_resolve)
        self._may_grant = checked_rule("may_grant", may_grant)

    @property
    def limited(self) -> bool:
        """Whether any rule has to be asked."""
        return self._may_resolve is not None or self._may_grant is not None

    async def refusal(self, by: Principal, entry: Pending, decision: Decision) -> str | None:
        """Return why the principal may not take this decision, or None if the principal may."""
        if self._may_resolve is not None:
            reason = await _asked("may_resolve", self._may_resolve, by, entry, decision, f"resolve {entry.tool}")
            if reason is not None:
                return reason
        if isinstance(decision, Approve) and decision.remember is not None:
            return await self._grant_refusal(by, entry, decision)
        return None

    async def _grant_refusal(self, by: Principal, entry: Pending, decision: Approve) -> str | None:
        if self._may_grant is not None:
            what = f"have an approval of {entry.tool} remembered"
            return await _asked("may_grant", self._may_grant, by, entry, decision, what)
        # may_resolve has judged these arguments. What it would say to others cannot be known: see decision 0022.
        if self._may_resolve is None or decision.remember == "args":
            return None
        return (
            f'{by.id} may not have approvals of {entry.tool} remembered for any arguments: remember="tool" needs '
            'Runtime(may_grant=...) beside may_resolve; approve without remember, or with remember="args"'
        )


async def _asked(name: str, rule: Rule, by: Principal, entry: Pending, decision: Decision, what: str) -> str | None:
    """Ask one rule; a rule that fails refuses."""
    try:
        verdict = rule(by, deepcopy(entry), deepcopy(decision))  # what it judges is what runs, whatever it does to it
        if inspect.isawaitable(verdict):
            verdict = await verdict
    except Exception as problem:
        log.exception("%s failed for %s on %s", name, by.id, entry.tool)
        return f"whether {by.id} may {what} could not be found out ({type(problem).__name__})"
    return None if verdict else f"{by.id} may not {what}"


def checked_rule(name: str, rule: Any) -> Any:
    """Return the rule; refuse what cannot be called with (principal, pending, decision)."""
    if rule is None:
        return None
    if not callable(rule):
        raise DeclarationError(f"{name} must be a function of (principal, pending, decision), not {rule!r:.80}")
    try:
        signature = inspect.signature(rule)
    except (TypeError, ValueError):
        return rule  # written in C: its signature is not known
    try:
        signature.bind(None, None, None)
    except TypeError:
        called = getattr(rule, "__name__", None) or repr(rule)
        raise DeclarationError(
            f"{name} is called as {name}(principal, pending, decision): "
            f"{called}{signature} does not take three positional arguments"
        ) from None
    return rule
