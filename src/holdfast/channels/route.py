"""``Route``: which notices go to a channel, and when."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime, time, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec

from holdfast.core.notice import Notice
from holdfast.core.tool import Risk, parse_duration
from holdfast.errors import DeclarationError

RISKS: tuple[Risk, ...] = ("low", "medium", "high")
_CLOCK = re.compile(r"([01]\d|2[0-3]):([0-5]\d)")


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """Which notices go to a channel, and when. Every option that is given must fit; without options all notices go.

    Quiet hours and digests delay notices. They never delay a decision, a deadline or a reminder's event itself.

    tools:       names of tools; "mail_*" stands for all that begin with "mail_". The end of a turn has no tool: a route
                 with tools or risks leaves it out
    risks:       the risks of tools: "low", "medium", "high"
    principals:  ids of the principals on behalf of which the turn runs
    agents:      names of agents
    quiet:       (from, to, time zone), such as ("22:00", "07:00", "Europe/Vienna"): nothing is delivered in these
                 hours, and what came meanwhile is delivered at their end
    digest:      a duration, such as "15m": what came within it is delivered as one message
    """

    tools: tuple[str, ...] = ()
    risks: tuple[Risk, ...] = ()
    principals: tuple[str, ...] = ()
    agents: tuple[str, ...] = ()
    quiet: tuple[str, str, str] | None = None
    digest: str | float | None = None

    def __post_init__(self) -> None:
        for name in ("tools", "risks", "principals", "agents"):
            given: Sequence[str] = getattr(self, name)
            if isinstance(given, str) or not all(isinstance(each, str) for each in given):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise DeclarationError(f"Route: {name} is a list of names, not {given!r:.80}")
        if unknown := [risk for risk in self.risks if risk not in RISKS]:
            raise DeclarationError(f"Route: risks are some of {', '.join(RISKS)}, not {unknown[0]!r}")
        if self.quiet is not None:
            _read_quiet(self.quiet)
        if self.digest is not None and not parse_duration(self.digest) > 0:
            raise DeclarationError(f"Route: digest is a duration such as '15m', not {self.digest!r}")

    def wants(self, notice: Notice) -> bool:
        """Return whether the notice goes to the channel of this route."""
        if self.tools and (notice.tool is None or not any(_matches(each, notice.tool) for each in self.tools)):
            return False
        if self.risks and (notice.tool is None or notice.risk not in self.risks):
            return False
        if self.principals and notice.principal.id not in self.principals:
            return False
        return not self.agents or notice.agent in self.agents

    def due(self, at: float) -> float:
        """Return when a notice of this time is delivered at the earliest: at the end of its digest, not in quiet hours.

        The digests of all processes begin and end together: at multiples of their duration since the epoch.
        """
        if self.digest is not None:
            length = parse_duration(self.digest)
            at = math.floor(at / length + 1) * length
        return at if self.quiet is None else _end_of_quiet(self.quiet, at)

    @property
    def batches(self) -> bool:
        """Whether notices that are due together are delivered as one message: digests, and the end of quiet hours."""
        return self.digest is not None or self.quiet is not None


def _matches(pattern: str, tool: str) -> bool:
    return tool.startswith(pattern[:-1]) if pattern.endswith("*") else tool == pattern


def _read_quiet(quiet: tuple[str, str, str]) -> tuple[time, time, ZoneInfo]:
    try:
        start, end, zone = quiet
        hours = [_CLOCK.fullmatch(each) for each in (start, end)]
    except (TypeError, ValueError):
        hours = [None]
        start = end = zone = ""
    if None in hours or start == end:
        raise DeclarationError(
            f'Route: quiet is (from, to, time zone), such as ("22:00", "07:00", "UTC"), not {quiet!r}'
        )
    try:
        return time.fromisoformat(start), time.fromisoformat(end), ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError, OSError, TypeError):
        raise DeclarationError(f"Route: there is no time zone {zone!r}: use a name such as Europe/Vienna") from None


def _end_of_quiet(quiet: tuple[str, str, str], at: float) -> float:
    """Return the time itself, or the end of the quiet hours that it falls into."""
    start, end, zone = _read_quiet(quiet)
    here = datetime.fromtimestamp(at, UTC).astimezone(zone)
    clock = here.time()
    is_quiet = start <= clock < end if start < end else clock >= start or clock < end
    if not is_quiet:
        return at
    day = here.date() + timedelta(days=1) if start > end and clock >= start else here.date()
    return datetime.combine(day, end, zone).timestamp()
