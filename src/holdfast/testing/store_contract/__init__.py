"""``StoreContract``: the test suite that every implementation of ``LogStore`` must pass.

To test a store of your own, subclass it in a test module::

    class TestMyStore(StoreContract):
        def make(self): return MyStore(...)             # new, empty, not opened
        def sibling(self, store): return MyStore(...)   # another owner on the same data, not opened
        def kill(self, store): ...                      # simulate a crash; without it those tests are skipped
        grace = 0.0                                     # seconds until siblings can detect the crash

Each test runs on its own event loop; the stores that it opens are closed afterwards.
"""

from __future__ import annotations

from holdfast.testing.store_contract.decisions import DecisionTests
from holdfast.testing.store_contract.harness import async_test, claim_lease, existing_row, make_append, make_entry
from holdfast.testing.store_contract.lifecycle import LifecycleTests
from holdfast.testing.store_contract.outbox import OutboxTests, make_channel, make_grant
from holdfast.testing.store_contract.ownership import OwnershipTests
from holdfast.testing.store_contract.records import RecordTests
from holdfast.testing.store_contract.search import SearchTests

__all__ = [
    "StoreContract",
    "async_test",
    "claim_lease",
    "existing_row",
    "make_append",
    "make_channel",
    "make_entry",
    "make_grant",
]


class StoreContract(RecordTests, SearchTests, DecisionTests, OwnershipTests, OutboxTests, LifecycleTests):
    """The tests of ``LogStore``. Subclass it in a test module; see the module's docstring."""
