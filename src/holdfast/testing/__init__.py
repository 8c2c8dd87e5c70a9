"""Helpers for testing your own agents, tools and stores.

- ``run_to_rest`` sends a message to an agent and returns when the conversation comes to rest.
- ``ManualClock`` is a clock that only the test moves: deadlines pass without waiting.
- ``calls``, ``results``, ``starts``, ``assert_paired`` and ``assert_effect_needs_approval`` read and check the log.
- ``crash_everywhere`` kills the agent's process at every append to the log and reports the effects of each tool::

    report = crash_everywhere(make_agent, "refund order 7", decisions={"refund": Approve()})
    print(report)    # a table of all tools
    report.check()   # fails if an effect happened twice for one call

- ``StoreContract`` is the test suite for a store of your own. It needs pytest; the rest does not.

No other package of Holdfast imports this one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.models.scripted import ScriptedModel, ToolCall
from holdfast.testing.clock import ManualClock
from holdfast.testing.crashes import crash_everywhere
from holdfast.testing.ledger import Ledger
from holdfast.testing.log import assert_effect_needs_approval, assert_paired, calls, results, starts
from holdfast.testing.report import Crash, Report
from holdfast.testing.run import Rest, run_to_rest

if TYPE_CHECKING:
    from holdfast.testing.store_contract import StoreContract

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
    if name == "StoreContract":  # imported on demand: it needs pytest
        from holdfast.testing.store_contract import StoreContract

        return StoreContract
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
