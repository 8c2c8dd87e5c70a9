"""A process that delivers notices: ``python delivery_process.py STORE URL [STEP]``.

With a STEP it prints it and freezes at this step of the delivery: ``claimed`` (before the request), ``sent`` (after the
response, before the row is settled). It is then killed. Its claim is short: the next process waits for its end.
"""

import asyncio
import sys
import time

from support.receivers import SECRET

from holdfast import Runtime
from holdfast.channels import Webhook
from holdfast.runtime.pending_calls import outbox
from holdfast.urls import open_store


async def main(store: str, url: str, step: str = "") -> None:
    opened = open_store(store)
    channel = Webhook(url, SECRET, allow_private=True, kinds=("suspended",))

    if step:
        outbox.LEASE_SECONDS, outbox.SEND_SECONDS = 4.0, 2.0

    def stop() -> None:
        print(step, flush=True)
        time.sleep(3600)  # with the whole process: the attempt must not time out before the kill

    send = channel.send

    async def stopping_send(notice) -> None:
        if step == "claimed":
            stop()
        await send(notice)
        if step == "sent":
            stop()

    channel.send = stopping_send
    async with Runtime(store=opened, channels=[channel]):
        print("ready", flush=True)
        await asyncio.Event().wait()


asyncio.run(main(*sys.argv[1:]))
