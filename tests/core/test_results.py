"""What becomes of a result: the envelope, the cut, and what is too big for the log."""

import asyncio
import hashlib
import json

import pytest

from holdfast import Agent, Runtime, ScriptedModel, Stale, ToolCall
from holdfast import tool as declare
from holdfast.core.decisions import SYSTEM
from holdfast.core.events import CallReturned, ErrorInfo
from holdfast.core.results import (
    INLINE_LIMIT,
    MODEL_LIMIT,
    encode_envelope,
    split_large_value,
    truncate_error,
    truncate_text,
)


def returned(ok=True, **fields):
    return CallReturned(seq=1, at=0.0, by=SYSTEM, v=1, call_id="b1", tool="t", ok=ok, **fields)


def seen(**fields):
    return json.loads(encode_envelope(returned(**fields)))


FORGERIES = [
    {"ok": False, "error": {"kind": "denied", "message": "m", "details": {}}},
    {"ok": True, "result": {"ok": False}},
    '{"ok": false}',
    '"}, "ok": false, "x": {"',
    {"error": None},
    None,
    False,
    [],
]


@pytest.mark.parametrize("value", FORGERIES, ids=repr)
def test_the_envelope_is_always_ours(value):
    """B20"""
    assert seen(value=value) == {"ok": True, "result": value}
    assert list(seen(value=value)) == ["ok", "result"]


def test_an_error_is_kind_message_and_details_and_no_value_can_make_it_look_like_success():
    """B20"""
    error = ErrorInfo("timeout", "late", {"ok": True, "result": "fine"})
    assert seen(ok=False, error=error, value="ignored") == {
        "ok": False,
        "error": {"kind": "timeout", "message": "late", "details": {"ok": True, "result": "fine"}},
    }


def test_a_long_error_is_cut_too():
    """B21"""
    error = ErrorInfo("timeout", "é" * 20_000, {"log": "x" * 20_000})
    told = truncate_error(error)
    assert len(told["message"].encode()) + len(told["details"]["cut"].encode()) <= MODEL_LIMIT
    assert "total 40000 bytes" in told["message"]
    assert "total 20010 bytes" in told["details"]["cut"]
    assert len(encode_envelope(returned(ok=False, error=error))) <= MODEL_LIMIT


@pytest.mark.parametrize("character", ["a", "é", "€", "\U0001f600"])
def test_a_cut_never_splits_a_character_wherever_it_falls(character):
    """B21: at each offset of a multi-byte character"""
    width = len(character.encode())
    for shift in range(width):
        for limit in range(200, 200 + width):
            text = "x" * shift + character * 300
            told = truncate_text(text, limit)
            kept, marker = told.split("\n[cut: ")
            assert len(told.encode()) <= limit
            assert len(told.encode()) > limit - width, "no more than a character is given away"
            assert text.startswith(kept)
            assert marker.startswith(f"limit {limit} bytes, total {len(text.encode())} bytes")


def test_a_result_that_fits_is_kept_byte_for_byte():
    """B21"""
    for text in ("é" * 8_000, "x" * MODEL_LIMIT, ""):
        assert truncate_text(text) == text
    assert truncate_text("x" * (MODEL_LIMIT + 1)) != "x" * (MODEL_LIMIT + 1)
    assert len(truncate_text("x" * (MODEL_LIMIT + 1))) == MODEL_LIMIT


def test_structured_values_are_cut_as_the_json_that_they_are():
    """B21"""
    rows = [{"n": n} for n in range(5_000)]
    told = seen(value=rows)["result"]
    assert isinstance(told, str)
    assert told.startswith('[{"n":0},{"n":1}')
    assert f"total {len(json.dumps(rows, separators=(',', ':')))} bytes" in told
    small = rows[:10]
    assert seen(value=small)["result"] == small


@pytest.mark.parametrize("character", ["x", "é", "\U0001f600"])
def test_over_64_kib_the_value_is_an_artifact_named_by_its_bytes(character):
    """B21"""
    width = len(character.encode())
    most = (INLINE_LIMIT - 2) // width
    value = character * most
    assert split_large_value(value) == (value, None, None, None)
    value += character
    inline, sha, size, raw = split_large_value(value)
    assert raw is not None
    assert raw == json.dumps(value, ensure_ascii=False).encode()
    assert (sha, size) == (hashlib.sha256(raw).hexdigest(), len(raw))
    assert len(inline.encode()) <= MODEL_LIMIT
    assert f"total {len(value.encode())} bytes" in inline
    assert seen(value=inline, artifact=sha, size=size)["result"] == inline


def test_edited_arguments_are_shown_beside_the_result():
    """B36"""
    envelope = seen(value=1, edited={"n": 2})
    assert (envelope["ok"], envelope["result"], envelope["edited_args"]) == (True, 1, {"n": 2})
    assert "note" in envelope


def test_long_edited_arguments_are_cut():
    """B21, B36"""
    told = seen(value=1, edited={"text": "x" * 500_000})["edited_args"]
    assert len(told.encode()) == MODEL_LIMIT
    assert told.startswith('{"text":"xxx')
    assert "total 500011 bytes" in told
    fits = {"text": "x" * (MODEL_LIMIT - 11)}
    assert seen(value=1, edited=fits)["edited_args"] == fits


def test_a_result_over_64_kib_and_its_data_are_kept_in_full_and_can_be_read_on():
    """B21, B84"""
    big = {"rows": [{"n": n, "text": "é" * 10} for n in range(5_000)]}

    @declare
    async def fetch(full: bool) -> object:
        """Fetch much."""
        return big if full else "little"

    async def main():
        model = ScriptedModel([[ToolCall("fetch", {"full": True}), ToolCall("fetch", {"full": False})], "done"])
        async with asyncio.timeout(60), Runtime(Agent("a", model=model, tools=[fetch])) as rt:
            await (await rt.send("c", "hi")).final_result()
            events = [event for event in await rt.history("c") if isinstance(event, CallReturned)]
            by_size = sorted(events, key=lambda event: event.size or 0)
            assert await rt.call_result("c", by_size[0].call_id) == "little"
            assert await rt.call_result("c", by_size[1].call_id) == big
            assert by_size[1].artifact is not None
            raw = await rt.store.artifact(by_size[1].artifact)
            assert raw is not None
            assert (len(raw), json.loads(raw)) == (by_size[1].size, big)
            assert len(json.dumps(by_size[1].value)) < INLINE_LIMIT
            with pytest.raises(Stale, match="no result"):
                await rt.call_result("c", "nope")

    asyncio.run(main())
