"""Batches of decisions: each decision has its own result, and an error is raised unchanged."""

import asyncio
from operator import itemgetter

import pytest

from holdfast.runtime.pending_calls.resolve import gather_by_conversation

DECISIONS = [("a", 1), ("b", 2), ("a", 3), ("c", 4)]


async def test_decisions_of_different_conversations_run_concurrently_and_those_of_one_in_order():
    running, most_running, order = 0, 0, []

    async def decide(item):
        nonlocal running, most_running
        running += 1
        most_running = max(most_running, running)
        await asyncio.sleep(0)
        running -= 1
        order.append(item)
        return item[1] * 10

    assert await gather_by_conversation(DECISIONS, itemgetter(0), decide) == [10, 20, 30, 40]
    assert most_running == 3
    assert [item for item in order if item[0] == "a"] == [("a", 1), ("a", 3)]


async def test_an_error_of_one_decision_is_raised_after_the_other_decisions_are_done():
    for failure in (BrokenPipeError, asyncio.CancelledError):
        done = []

        async def decide(item, failure=failure, done=done):
            if item[0] == "b":
                raise failure
            await asyncio.sleep(0)
            done.append(item)

        with pytest.raises(failure):
            await gather_by_conversation(DECISIONS, itemgetter(0), decide)
        assert sorted(done) == [("a", 1), ("a", 3), ("c", 4)]
