"""The memory store satisfies the contract; a killed one never responds, like a dead process."""

import asyncio

import pytest

from holdfast.stores.memory import MemoryStore
from holdfast.testing.store_contract import StoreContract, async_test, make_append


class TestMemoryStore(StoreContract):
    def make(self):
        return MemoryStore()

    def sibling(self, store):
        return store.sibling()

    def kill(self, store):
        store.kill()

    @async_test
    async def test_a_killed_store_never_answers_again(self):
        store = await self.open_store()
        self.kill_opened(store)
        for call in (store.append(make_append("c", 0)), store.row("c"), store.close(), store.wait_for_changes(0.0)):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(call, 0.02)

    def test_a_store_can_be_used_on_a_second_event_loop(self):
        store = MemoryStore()

        async def first():
            await store.open()
            assert not await store.wait_for_changes(0.01)
            await store.append(make_append("c", 0))

        async def second():
            assert not await store.wait_for_changes(0.01)
            await store.append(make_append("c", 1))
            await store.close()

        asyncio.run(first())
        asyncio.run(second())
