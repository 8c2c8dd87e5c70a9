"""What the kills did to each tool: the facts, and the table that people read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Crash:
    """One point at which the process was killed: before or after the commit of the n-th append to the log."""

    append: int
    moment: Literal["before", "after"]
    events: tuple[str, ...]
    """The types of the events in that append."""
    then: Crash | None = None
    """Where the process that went on was killed as well; its appends are counted from 1."""

    def __str__(self) -> str:
        here = f"{self.moment} append {self.append} ({', '.join(self.events)})"
        return f"{here}, then {self.then}" if self.then else here


@dataclass(frozen=True)
class Fate:
    """What became of one call in one run."""

    crash: Crash | None
    """None: the run without a kill."""
    tool: str
    key: str
    runs: int
    """How often its handler was entered."""
    effects: int
    """How often its effect happened."""
    between: bool
    """The kill came after its effect, and before its result was in the log."""
    ended: str
    """ok, the error's kind (interrupted, denied, ...), asked (whether to run it again), or waiting."""


@dataclass(frozen=True)
class ToolFate:
    """One tool over all runs."""

    tool: str
    recovery: str
    """As declared; ``-`` where no handler of ours runs."""
    fates: tuple[Fate, ...]

    @property
    def runs(self) -> int:
        return sum(fate.runs for fate in self.fates)

    @property
    def between(self) -> int:
        """Kills that came after its effect and before its result was in the log: the moment that matters."""
        return sum(fate.between for fate in self.fates)

    @property
    def effects(self) -> Counter[int]:
        """How often the effect happened for one call -> in how many calls."""
        return Counter(fate.effects for fate in self.fates)

    @property
    def ended(self) -> Counter[str]:
        return Counter(fate.ended for fate in self.fates)

    @property
    def twice(self) -> tuple[Fate, ...]:
        return tuple(fate for fate in self.fates if fate.effects > 1)


@dataclass(frozen=True)
class Report:
    """``print(report)`` is the table; ``report.check()`` is the test."""

    crashes: tuple[Crash, ...]
    """Every point at which the agent was killed."""
    tools: dict[str, ToolFate]
    turns: Counter[str]
    """How the runs came to rest: why the turn ended, or ``waiting``."""

    @property
    def twice(self) -> list[str]:
        """The tools whose effect happened more than once for one call."""
        return [name for name, tool in self.tools.items() if tool.twice]

    def check(self, *, repeatable: Iterable[str] = ()) -> None:
        """AssertionError, with the table, if an effect happened twice for one call.

        repeatable:  tools that may run as often as they like, such as those that only read
        """
        fine = set(repeatable)
        unknown = fine - set(self.tools)
        if unknown:
            raise ValueError(f"no such tool: {', '.join(sorted(unknown))}; there are: {', '.join(self.tools)}")
        found = [name for name in self.twice if name not in fine]
        if found:
            what = f"{', '.join(found)}: the effect happened more than once for one call"
            raise AssertionError(f"{what}\n\n{self}\n\n{ADVICE}")

    def __str__(self) -> str:
        head = ("tool", "recovery", "calls", "runs", "killed after effect", "effects per call", "ended")
        rows = [head, *(_row(tool) for tool in self.tools.values())]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        table.insert(1, "  ".join("-" * width for width in widths))
        appends = len({crash.append for crash in self.crashes})
        again = ", and again in what followed" if any(crash.then for crash in self.crashes) else ""
        title = (
            f"run once as it is, then killed {len(self.crashes)} times: before and after each of {appends} appends"
            f"{again}; turns: {_counted(self.turns)}"
        )
        told = [_told(fate) for tool in self.tools.values() for fate in tool.twice]
        return "\n".join([title, "", *table, *(["", *told] if told else [])])


ADVICE = """\
Without an approval, a run that a crash interrupted is repeated by default, with the same call.key. Choose:
  - pass call.key on as the idempotency key, and ledger.note(call) where the effect really happens; or
  - recovery="fail" (never again; the model sees `interrupted`) or recovery="ask" (a person decides); or
  - recovery=a function that finds out whether it was done; or
  - report.check(repeatable=[...]) for a tool that may run any number of times."""


def _row(tool: ToolFate) -> tuple[str, ...]:
    if not tool.fates:
        return (tool.tool, tool.recovery, "0", "0", "-", "-", "never called")
    ended = _counted(tool.ended)
    if tool.recovery == "-":
        return (tool.tool, "-", str(len(tool.fates)), "-", "-", "-", ended)
    effects = ", ".join(f"{n} in {calls}" for n, calls in sorted(tool.effects.items()))
    return (tool.tool, tool.recovery, str(len(tool.fates)), str(tool.runs), str(tool.between), effects, ended)


def _counted(words: Counter[str]) -> str:
    return ", ".join(f"{word} {n}" for word, n in words.most_common())


def _told(fate: Fate) -> str:
    return f"{fate.tool}: {fate.effects} effects for one call, killed {fate.crash or 'nowhere'}"
