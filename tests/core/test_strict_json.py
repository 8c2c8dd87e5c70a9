"""JSON text from outside is decoded in one way, or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.json_values import parse_strict_json
from holdfast.errors import Invalid

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"amount": 5, "amount": 5000}', '"amount"'),
        (b'{"order": [{"id": 1, "sku": "x", "id": 1}]}', '"id"'),
        (r'{"a": 1, "\u0061": 2}', '"a"'),  # the same key, written differently
        ('[{"": 1, "": 2}]', '""'),
    ],
)
def test_a_duplicate_key_in_an_object_is_refused_and_named(text: str | bytes, key: str) -> None:
    with pytest.raises(Invalid, match=rf"the body: the key {key} appears twice in one object"):
        parse_strict_json(text, "the body")


def test_the_same_key_in_different_objects_is_not_a_duplicate() -> None:
    assert parse_strict_json('[{"a": 1}, {"a": {"a": 2}}]') == [{"a": 1}, {"a": {"a": 2}}]


@pytest.mark.parametrize(
    "text",
    ["", "{", '{"a": NaN}', "[1,]", '"\\ud800"', b"\xff", b"\xef\xbb\xbf{}", "[" * 100_000, f"[1{'0' * 5000}]"],
)
def test_malformed_text_is_refused(text: str | bytes) -> None:
    with pytest.raises(Invalid, match="the JSON text: "):
        parse_strict_json(text)


@given(VALUES)
def test_text_without_duplicate_keys_decodes_to_its_value(value: Any) -> None:
    assert parse_strict_json(json.dumps(value)) == value
