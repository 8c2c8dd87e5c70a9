"""Store tests: opening, closing and reopening."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from itertools import pairwise

import pytest

from holdfast.errors import StoreError
from holdfast.testing.store_contract.harness import (
    StoreHarness,
    async_test,
    claim_lease,
    make_append,
    make_entry,
)


class LifecycleTests(StoreHarness):
    """Stores are opened once, and keep their data when they are closed."""

    @async_test
    async def test_a_store_survives_close_and_reopen(self) -> None:
        store = await self.open_store()
        name = sha256(b"artifact").hexdigest()
        await store.append(
            make_append(
                "c", 0, b"1", opened=[make_entry("c", "k", 3.0)], artifacts=[(name, b"artifact")], snapshot=b"s"
            )
        )
        epoch = await claim_lease(store, "c")
        await store.append(make_append("c", 1, b"2", epoch=epoch))
        loaded, hashes, pending = await store.load("c"), await store.hashes("c"), await store.pending()
        await store.close()
        again = await self.open_sibling(store)
        assert await again.hashes("c") == hashes
        assert await again.pending() == pending
        assert await again.artifact(name) == b"artifact"
        reloaded = await again.load("c")
        assert reloaded is not None
        assert loaded is not None
        assert (reloaded.snapshot, reloaded.events) == (loaded.snapshot, loaded.events)
        assert (reloaded.row.owner, reloaded.row.epoch) == (None, epoch)
        assert await again.claim("c") == epoch + 1

    @async_test
    async def test_appends_that_started_before_close_are_stored(self) -> None:
        store = await self.open_store()
        appends = [asyncio.ensure_future(store.append(make_append(f"c{n}", 0))) for n in range(20)]
        await asyncio.sleep(0)
        await store.close()
        await asyncio.gather(*appends)
        again = await self.open_sibling(store)
        assert len(await again.rows()) == 20

    @async_test
    async def test_close_is_idempotent_and_a_closed_store_raises_store_error(self) -> None:
        store = await self.open_store()
        await asyncio.gather(store.close(), store.close())
        await store.close()
        for attempt in (
            store.append(make_append("c", 0)),
            store.row("c"),
            store.claim("c"),
            store.wait_for_changes(0.1),
        ):
            with pytest.raises(StoreError):
                await attempt

    @async_test
    async def test_a_store_must_be_opened_exactly_once_before_use(self) -> None:
        store = self.make()
        with pytest.raises(StoreError):
            await store.row("c")
        await store.open()
        self.opened.append(store)
        with pytest.raises(StoreError):
            await store.open()
        await store.append(make_append("c", 0))

    @async_test
    async def test_successive_owners_never_share_a_name_or_an_epoch(self) -> None:
        store = await self.open_store()
        await store.append(make_append("c", 0))
        names, epochs = [store.owner], list[int]()
        for _ in range(4):
            other = await self.open_sibling(store)
            names.append(other.owner)
            epochs.append(await claim_lease(other, "c"))
            await other.close()
        assert len(set(names)) == len(names)
        assert all(later == earlier + 1 for earlier, later in pairwise(epochs))
