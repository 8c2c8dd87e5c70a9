"""Many decisions at once: each has its own outcome, and what goes wrong is what it was."""

import asyncio
from operator import itemgetter

import pytest

from holdfast.runtime.resolve import gather_by_conversation

MANY = [("a", 1), ("b", 2), ("a", 3), ("c", 4)]


async def test_different_conversations_are_decided_at_once_and_those_of_one_in_their_order():
    under_way, most, seen = 0, 0, []

    async def decide(item):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        seen.append(item)
        return item[1] * 10

    assert await gather_by_conversation(MANY, itemgetter(0), decide) == [10, 20, 30, 40]
    assert most == 3
    assert [item for item in seen if item[0] == "a"] == [("a", 1), ("a", 3)]


async def test_what_fails_is_raised_as_it_is_once_the_others_are_done():
    for failure in (BrokenPipeError, asyncio.CancelledError):
        done = []

        async def decide(item, failure=failure, done=done):
            if item[0] == "b":
                raise failure
            await asyncio.sleep(0)
            done.append(item)

        with pytest.raises(failure):
            await gather_by_conversation(MANY, itemgetter(0), decide)
        assert sorted(done) == [("a", 1), ("a", 3), ("c", 4)]
