"""The report of ``crash_everywhere``: the fate of every call, and a table with one row per tool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Crash:
    """A point at which a process was killed: before or after the commit of its n-th append to the log."""

    append: int
    moment: Literal["before", "after"]
    events: tuple[str, ...]
    """The types of the events in that append."""
    then: Crash | None = None
    """The kill of the process that recovered from this one; its appends are counted from 1."""

    def __str__(self) -> str:
        here = f"{self.moment} append {self.append} ({', '.join(self.events)})"
        return f"{here}, then {self.then}" if self.then else here


@dataclass(frozen=True)
class Fate:
    """The outcome of one call in one run."""

    crash: Crash | None
    """None for the run without a kill."""
    tool: str
    key: str
    runs: int
    """How often its handler was started."""
    effects: int
    """How often its effect happened."""
    between: bool
    """Whether the process was killed after the effect and before the result was in the log."""
    ended: str
    """"ok", the error's kind ("interrupted", "denied", ...), "asked" (whether to run it again) or "waiting"."""


@dataclass(frozen=True)
class ToolFate:
    """The fates of one tool's calls, over all runs."""

    tool: str
    recovery: str
    """The tool's recovery; ``-`` if the runtime does not run a handler for it."""
    fates: tuple[Fate, ...]

    @property
    def runs(self) -> int:
        return sum(fate.runs for fate in self.fates)

    @property
    def between(self) -> int:
        """How many kills came between an effect and the log entry of its result: the critical moment."""
        return sum(fate.between for fate in self.fates)

    @property
    def effects(self) -> Counter[int]:
        """Number of effects -> number of calls that had so many."""
        return Counter(fate.effects for fate in self.fates)

    @property
    def outcomes(self) -> Counter[str]:
        """Outcome -> number of calls that ended with it."""
        return Counter(fate.ended for fate in self.fates)

    @property
    def twice(self) -> tuple[Fate, ...]:
        """The calls with more than one effect."""
        return tuple(fate for fate in self.fates if fate.effects > 1)


@dataclass(frozen=True)
class Report:
    """The result of ``crash_everywhere``. ``print(report)`` shows a table; ``report.check()`` asserts."""

    crashes: tuple[Crash, ...]
    """The kills, one entry per run."""
    tools: dict[str, ToolFate]
    turns: Counter[str]
    """The reason for which the turn ended, or ``waiting`` -> number of runs."""

    @property
    def twice(self) -> list[str]:
        """The tools that had more than one effect for a call."""
        return [name for name, tool in self.tools.items() if tool.twice]

    def check(self, *, repeatable: Iterable[str] = ()) -> None:
        """Raise AssertionError, with the table, if an effect happened more than once for one call.

        repeatable:  tools that may run any number of times, such as those that only read
        """
        exempt = set(repeatable)
        unknown = exempt - set(self.tools)
        if unknown:
            raise ValueError(f"no such tool: {', '.join(sorted(unknown))}; there are: {', '.join(self.tools)}")
        found = [name for name in self.twice if name not in exempt]
        if found:
            summary = f"{', '.join(found)}: the effect happened more than once for one call"
            raise AssertionError(f"{summary}\n\n{self}\n\n{ADVICE}")

    def __str__(self) -> str:
        head = ("tool", "recovery", "calls", "runs", "killed after effect", "effects per call", "ended")
        rows = [head, *(_table_row(tool) for tool in self.tools.values())]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        table.insert(1, "  ".join("-" * width for width in widths))
        appends = len({crash.append for crash in self.crashes})
        again = ", and again during recovery" if any(crash.then for crash in self.crashes) else ""
        title = (
            f"run once as it is, then killed {len(self.crashes)} times: before and after each of {appends} appends"
            f"{again}; turns: {_format_counts(self.turns)}"
        )
        repeated = [_describe_fate(fate) for tool in self.tools.values() for fate in tool.twice]
        return "\n".join([title, "", *table, *(["", *repeated] if repeated else [])])


ADVICE = """\
For a tool without an approval, a run that a crash interrupted is repeated by default, with the same call.key. Choose:
  - pass call.key on as the idempotency key, and call ledger.note(call) where the effect really happens; or
  - recovery="fail" (not repeated; the model sees `interrupted`) or recovery="ask" (a person decides); or
  - recovery=a function that finds out whether the effect happened; or
  - report.check(repeatable=[...]) for a tool that may run any number of times."""


def _table_row(tool: ToolFate) -> tuple[str, ...]:
    if not tool.fates:
        return (tool.tool, tool.recovery, "0", "0", "-", "-", "never called")
    ended = _format_counts(tool.outcomes)
    if tool.recovery == "-":
        return (tool.tool, "-", str(len(tool.fates)), "-", "-", "-", ended)
    effects = ", ".join(f"{n} in {calls}" for n, calls in sorted(tool.effects.items()))
    return (tool.tool, tool.recovery, str(len(tool.fates)), str(tool.runs), str(tool.between), effects, ended)


def _format_counts(words: Counter[str]) -> str:
    return ", ".join(f"{word} {n}" for word, n in words.most_common())


def _describe_fate(fate: Fate) -> str:
    return f"{fate.tool}: {fate.effects} effects for one call, killed {fate.crash or 'nowhere'}"
