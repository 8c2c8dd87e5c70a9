"""Alarms are for what has to be waited for."""

import asyncio

import pytest
from webdesk import story

from assent.server import patience
from assent.server.patience import within


async def soon(value):
    return value


async def later(value, turns=3):
    for _ in range(turns):
        await asyncio.sleep(0.001)
    return value


@story
async def test_what_is_there_at_once_sets_no_alarm(monkeypatch):
    monkeypatch.setattr(patience.asyncio, "timeout", None)
    assert await within(1, soon("there")) == "there"
    done = asyncio.get_running_loop().create_future()
    done.set_result("done")
    assert await within(1, done) == "done"
    with pytest.raises(ZeroDivisionError):
        await within(1, fails(soon))


async def fails(first):
    await first(None)
    raise ZeroDivisionError


@story
async def test_what_takes_a_while_comes_to_the_same():
    assert await within(10, later("there")) == "there"
    with pytest.raises(ZeroDivisionError):
        await within(10, fails(later))


@story
async def test_what_takes_too_long_is_given_up_and_can_clean_up():
    left = []

    async def never():
        await asyncio.sleep(0)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            left.append("in order")

    with pytest.raises(TimeoutError):
        await within(0.01, never())
    assert left == ["in order"]


@story
async def test_whoever_is_cancelled_while_waiting_is_cancelled_and_not_late():
    began = asyncio.Event()

    async def waits():
        began.set()
        await asyncio.Event().wait()

    task = asyncio.ensure_future(within(10, waits()))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
