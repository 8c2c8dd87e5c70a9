"""Create many conversations that wait for an approval, and measure the memory of a process that serves them.

``python parked.py STORE FIRST`` opens a runtime on that store, lets it poll, resolves a few pending calls from number
FIRST on, and prints its resident memory in bytes. The benchmark starts it as a separate process.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import msgspec

from holdfast import Agent, Approve, Pending, Runtime, ScriptedModel, ToolCall, tool
from holdfast.core.events import AnyEvent, AssistantSaid, MessageReceived
from holdfast.stores.base import Append, PendingRow
from holdfast.stores.sqlite.store import SQLiteStore

MESSAGE = "Please give order 4711 its money back, it arrived broken. " * 4
BATCH = 400


@tool(approval="required", risk="high")
async def refund(order: int, amount: float) -> str:
    """Give a customer their money back."""
    return f"refunded {amount} for {order}"


def agent() -> Agent:
    script = [[ToolCall("refund", {"order": 4711, "amount": 12.5})], "It is on its way."]
    return Agent("shop", model=ScriptedModel(script, follow=True), tools=[refund])


async def record_parked_conversation(directory: Path) -> tuple[list[bytes], list[AnyEvent], Pending]:
    """Run one conversation until it waits; return its events (stored and decoded) and its pending entry."""
    async with Runtime(agent(), store=f"sqlite:///{directory}/original.db") as rt:
        await (await rt.send("original", MESSAGE)).result()
        return await rt.store.read("original"), await rt.history("original"), (await rt.pending())[0]


def text_size(events: list[AnyEvent]) -> int:
    """Return the bytes of the messages' text and arguments alone, without the encoding around them."""
    size = 0
    for event in events:
        if isinstance(event, MessageReceived):
            size += len(event.text.encode())
        elif isinstance(event, AssistantSaid):
            size += len(event.text.encode()) + sum(len(msgspec.json.encode(made.args)) for made in event.calls)
    return size


async def park(path: Path, first: int, last: int, bodies: list[bytes], entry: Pending) -> None:
    """Store the conversations first..last, each a copy of the recorded one under a new name."""
    store = SQLiteStore(path, synchronous="OFF")
    await store.open()
    deadline = time.time() + 7 * 86400
    for start in range(first, last, BATCH):
        appends = []
        for n in range(start, min(start + BATCH, last)):
            name = f"conversation-{n}"
            body = msgspec.json.encode(msgspec.structs.replace(entry, conversation=name, deadline=deadline + n))
            row = PendingRow(conversation=name, call=entry.call, body=body, due=deadline + n, deadline=deadline + n)
            appends.append(
                Append(
                    conversation=name,
                    expected=0,
                    events=bodies,
                    status="awaiting_input",
                    agent="shop",
                    owes=False,
                    at=time.time(),
                    opened=[row],
                )
            )
        await asyncio.gather(*(store.append(each) for each in appends))
    await store.close()


def resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


async def weigh(store: str, first: int, decide: int = 20) -> int:
    async with Runtime(agent(), store=store) as rt:
        await asyncio.sleep(1.2)  # two polls for owing conversations and due calls
        for n in range(decide):
            name = f"conversation-{first + n * 7}"
            waiting = await rt.pending(name)
            await rt.resolve(name, waiting[0].call, Approve(), by="boss")
        await asyncio.sleep(1.2)
        return resident()


if __name__ == "__main__":
    print(asyncio.run(weigh(sys.argv[1], int(sys.argv[2]))))
