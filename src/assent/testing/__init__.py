"""For your own tests: an agent run to rest, a clock moved by hand, assertions on the log, and kills at every boundary.

    report = crash_everywhere(make_agent, "refund order 7", decisions={"refund": Approve()})
    print(report)    # what happened to each of your tools
    report.check()   # fails if an effect happened twice for one call

Nothing in Assent imports this package. ``StoreContract`` needs pytest, the rest does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from assent.models.scripted import ScriptedModel, ToolCall
from assent.testing.clock import ManualClock
from assent.testing.crashes import crash_everywhere
from assent.testing.ledger import Ledger
from assent.testing.log import assert_effect_needs_approval, assert_paired, calls, results, starts
from assent.testing.report import Crash, Report
from assent.testing.rest import Rest, run_to_rest

if TYPE_CHECKING:
    from assent.testing.store_contract import StoreContract

__all__ = [
    "Crash",
    "Ledger",
    "ManualClock",
    "Report",
    "Rest",
    "ScriptedModel",
    "StoreContract",
    "ToolCall",
    "assert_effect_needs_approval",
    "assert_paired",
    "calls",
    "crash_everywhere",
    "results",
    "run_to_rest",
    "starts",
]


def __getattr__(name: str) -> Any:
    if name == "StoreContract":  # it imports pytest: only for who asks
        from assent.testing.store_contract import StoreContract

        return StoreContract
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
