"""What is stored shorter comes back to the byte."""

import asyncio
import random

import msgspec
import pytest

from assent import Agent, Runtime, ScriptedModel, ToolCall, tool
from assent.core import codec
from assent.stores.base import GENESIS, chain
from assent.stores.packing import PACKED_FROM, packed, unpacked
from assent.stores.sqlite import SQLiteStore
from assent.testing.store_contract import step

LONG = b'{"text":"' + b"all work and no play " * 100 + b'"}'


@pytest.mark.parametrize(
    "body",
    [b"", b"x", b"{}", b"x" * 1000, LONG, packed(LONG), packed(LONG)[:50], b"{" * (PACKED_FROM - 1), bytes(100_000)],
)
def test_every_body_comes_back_to_the_byte(body):
    assert unpacked(packed(body)) == body


def test_bodies_of_any_bytes_and_length_come_back():
    dice = random.Random(7)
    for size in range(0, 3 * PACKED_FROM, 7):
        for body in (dice.randbytes(size), b"x" + dice.randbytes(size), bytes(dice.choices(b'{"type":}', k=size))):
            assert unpacked(packed(body)) == body


def test_short_bodies_are_stored_as_they_are_and_can_be_read_with_any_tool():
    body = b'{"type":"TurnStarted"}'
    assert packed(body) is body


def test_a_suspension_takes_less_than_half_of_its_bytes(tmp_path):
    @tool(approval="required", risk="high")
    async def refund(order: int, amount: float) -> str:
        """Give a customer their money back."""
        return "done"

    async def waiting():
        model = ScriptedModel([[ToolCall("refund", {"order": 4711, "amount": 12.5})]])
        async with Runtime(Agent("shop", model=model, tools=[refund]), store=f"sqlite:///{tmp_path}/a.db") as rt:
            await (await rt.send("c", "Refund it.")).rest()
            return (await rt.history("c"))[-1], (await rt.pending())[0]

    event, entry = asyncio.run(waiting())
    for body in (codec.encode(event), msgspec.json.encode(entry)):
        assert len(packed(body)) < len(body) / 2


def test_the_packed_form_is_pinned_for_it_is_read_for_ever():
    stored = bytes.fromhex("78bb51946e6bc3e917743b71fb7a54e5a8ca11af1200db612440")
    assert unpacked(stored) == b'{"type":"CallSuspended","kind":"approval"}' * 20


def test_a_byte_that_has_changed_is_noticed_wherever_it_is():
    stored = packed(LONG)
    for at in range(2, len(stored)):
        damaged = stored[:at] + bytes([stored[at] ^ 1]) + stored[at + 1 :]
        assert unpacked(damaged) == damaged
    assert unpacked(stored + b"more") == stored + b"more"
    assert unpacked(stored) == LONG


def test_damage_is_not_hidden_what_cannot_be_unpacked_fits_no_hash(tmp_path):
    async def run():
        store = SQLiteStore(tmp_path / "a.db")
        await store.open()
        await store.append(step("c", 0, LONG, LONG))
        damage = "UPDATE events SET body = CAST(substr(body, 1, 20) || 'no' AS BLOB) WHERE seq = 2"
        await store._writer.run(lambda db: db.execute(damage).fetchall())
        bodies, hashes = await store.read("c"), await store.hashes("c")
        await store.close()
        return bodies, hashes

    bodies, hashes = asyncio.run(run())
    assert bodies[0] == LONG
    assert [kept == due for kept, due in zip(hashes, chain(GENESIS, bodies), strict=True)] == [True, False]
