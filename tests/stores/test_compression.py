"""Compressed bodies are restored byte for byte."""

import asyncio
import random

import msgspec
import pytest

from holdfast import Agent, Runtime, ScriptedModel, ToolCall, tool
from holdfast.core import codec
from holdfast.stores.base import GENESIS, hash_chain
from holdfast.stores.compression import MIN_COMPRESSED_BYTES, compress_body, decompress_body
from holdfast.stores.sqlite.store import SQLiteStore
from holdfast.testing.store_contract import make_append

LONG = b'{"text":"' + b"all work and no play " * 100 + b'"}'


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"x",
        b"{}",
        b"x" * 1000,
        LONG,
        compress_body(LONG),
        compress_body(LONG)[:50],
        b"{" * (MIN_COMPRESSED_BYTES - 1),
        bytes(100_000),
    ],
)
def test_a_compressed_body_is_restored_byte_for_byte(body):
    assert decompress_body(compress_body(body)) == body


def test_random_bodies_of_any_length_are_restored():
    rng = random.Random(7)
    for size in range(0, 3 * MIN_COMPRESSED_BYTES, 7):
        for body in (rng.randbytes(size), b"x" + rng.randbytes(size), bytes(rng.choices(b'{"type":}', k=size))):
            assert decompress_body(compress_body(body)) == body


def test_short_bodies_are_stored_uncompressed():
    body = b'{"type":"TurnStarted"}'
    assert compress_body(body) is body


def test_a_suspension_compresses_to_less_than_half_its_size(tmp_path):
    @tool(approval="required", risk="high")
    async def refund(order: int, amount: float) -> str:
        """Give a customer their money back."""
        return "done"

    async def suspend_call():
        model = ScriptedModel([[ToolCall("refund", {"order": 4711, "amount": 12.5})]])
        async with Runtime(Agent("shop", model=model, tools=[refund]), store=f"sqlite:///{tmp_path}/a.db") as rt:
            await (await rt.send("c", "Refund it.")).result()
            return (await rt.history("c"))[-1], (await rt.pending())[0]

    event, entry = asyncio.run(suspend_call())
    for body in (codec.encode_event(event), msgspec.json.encode(entry)):
        assert len(compress_body(body)) < len(body) / 2


def test_bodies_in_the_current_compressed_format_stay_readable():
    stored = bytes.fromhex("78bb51946e6bc3e917743b71fb7a54e5a8ca11af1200db612440")
    assert decompress_body(stored) == b'{"type":"CallSuspended","kind":"approval"}' * 20


def test_a_compressed_body_with_a_changed_byte_is_not_decompressed():
    stored = compress_body(LONG)
    for at in range(2, len(stored)):
        damaged = stored[:at] + bytes([stored[at] ^ 1]) + stored[at + 1 :]
        assert decompress_body(damaged) == damaged
    assert decompress_body(stored + b"more") == stored + b"more"
    assert decompress_body(stored) == LONG


def test_a_damaged_compressed_body_does_not_match_its_hash(tmp_path):
    async def run():
        store = SQLiteStore(tmp_path / "a.db")
        await store.open()
        await store.append(make_append("c", 0, LONG, LONG))
        damage = "UPDATE events SET body = CAST(substr(body, 1, 20) || 'no' AS BLOB) WHERE seq = 2"
        await store._writer.run(lambda db: db.execute(damage).fetchall())
        bodies, hashes = await store.read("c"), await store.hashes("c")
        await store.close()
        return bodies, hashes

    bodies, hashes = asyncio.run(run())
    assert bodies[0] == LONG
    assert [kept == due for kept, due in zip(hashes, hash_chain(GENESIS, bodies), strict=True)] == [True, False]
