"""Processes that are killed (SIGKILL) while they deliver: nothing is lost, and ids stay the same."""

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from standardwebhooks import Webhook as Verifier
from support import pg
from support.async_tests import until
from support.notices import refund_agent
from support.receivers import SECRET, HTTPReceiver

from holdfast import Runtime

PROCESS = Path(__file__).parent.parent / "support" / "delivery_process.py"


@asynccontextmanager
async def process(*words):
    """Run the process, and kill it at the end."""
    tests = str(PROCESS.parent.parent)
    running = await asyncio.create_subprocess_exec(
        sys.executable, str(PROCESS), *words, stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": tests}
    )
    try:
        yield running
    finally:
        if running.returncode is None:
            running.send_signal(signal.SIGKILL)
        await running.wait()


async def line(running):
    return (await running.stdout.readline()).decode().strip()


@pytest.fixture(params=["sqlite", "postgres"])
def store(request, tmp_path):
    """Give the URL of a new store."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/holdfast.db"
    else:
        with pg.temporary() as url:
            yield url


@pytest.mark.parametrize("step", ["claimed", "sent"])
async def test_a_process_that_is_killed_while_it_delivers_loses_no_notice(store, step):
    """Between claim, send and settle: the next process sends it under the same id [B116]."""
    async with HTTPReceiver() as receiver:
        async with process(store, f"{receiver.url}/hook", step) as doomed:
            assert await line(doomed) == "ready"
            async with Runtime(refund_agent(), store=store) as rt:
                pending = (await rt.run("hi", conversation="c")).pending[0]
            assert await line(doomed) == step
            assert len(receiver.requests) == (step == "sent")
        async with process(store, f"{receiver.url}/hook") as heir:
            assert await line(heir) == "ready"
            await until(lambda: len(receiver.requests) == 1 + (step == "sent"))
            async with Runtime(store=store) as rt:
                await until(lambda: is_empty(rt.store))
        payloads = [Verifier(SECRET).verify(request.body, request.headers) for request in receiver.requests]
        assert {payload["data"]["suspension"] for payload in payloads} == {pending.id}
        assert len({request.headers["webhook-id"] for request in receiver.requests}) == 1


async def is_empty(store):
    return not await store.outbox()


async def test_two_processes_share_the_rows_and_send_each_once(store):
    """[B116]"""
    async with (
        HTTPReceiver() as receiver,
        process(store, f"{receiver.url}/hook") as one,
        process(store, f"{receiver.url}/hook") as two,
    ):
        assert await line(one) == await line(two) == "ready"
        async with Runtime(refund_agent(), store=store) as rt:
            for n in range(30):
                await rt.run("hi", conversation=f"c{n}")
            await until(lambda: is_empty(rt.store))
        ids = [request.headers["webhook-id"] for request in receiver.requests]
        assert len(ids) == len(set(ids)) == 30
