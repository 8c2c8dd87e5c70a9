"""read_artifact and update_plan."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.schema.validation import validate_value
from holdfast.errors import Invalid, ToolError
from holdfast.tools.call import Call
from holdfast.workspace.artifacts import artifact_tools, read_page
from holdfast.workspace.checklist import checklist_tools
from holdfast.workspace.limits import Limits


async def test_an_artifact_is_read_in_pages():
    call = Call()
    kept = call.keep("x" * 100_000)
    (tool,) = artifact_tools(Limits())
    text, offset = "", 0
    while offset is not None:
        page = await tool.handler({"sha256": kept.sha256, "offset": offset}, call)
        text += page["text"]
        offset = page.get("next_offset")
    assert text == "x" * 100_000


async def test_an_unknown_artifact_is_not_found():
    (tool,) = artifact_tools(Limits())
    with pytest.raises(ToolError) as caught:
        await tool.handler({"sha256": "0" * 64}, Call())
    assert caught.value.kind == "not_found"


@given(st.text(), st.integers(4, 20))
def test_pages_of_text_show_every_character_once(text, limit):
    raw, found, offset = text.encode("utf-8", "replace"), "", 0
    while offset is not None and offset < len(raw):
        page = read_page(raw, offset, limit)
        found += page["text"]
        offset = page.get("next_offset")
    assert found == raw.decode()


@given(st.binary(), st.integers(1, 20))
def test_pages_of_any_bytes_advance_and_end(raw, limit):
    offset = 0
    while offset is not None and offset < len(raw):
        page = read_page(raw, offset, limit)
        assert page.get("next_offset", len(raw)) > offset
        offset = page.get("next_offset")


async def test_update_plan_replaces_the_checklist_and_says_how_far_it_is():
    """Each call gives the whole list [B106]."""
    (tool,) = checklist_tools()
    entries = [{"content": "read", "status": "completed"}, {"content": "write"}]
    made = await tool.handler({"entries": entries}, Call())
    assert made.output == "1 of 2 completed"
    assert made.data["checklist"] == [
        {"content": "read", "status": "completed", "priority": "medium"},
        {"content": "write", "status": "pending", "priority": "medium"},
    ]


def test_an_entry_without_content_is_refused():
    (tool,) = checklist_tools()
    with pytest.raises(Invalid):
        validate_value(tool.spec.parameters, {"entries": [{"content": ""}]}, "arguments")
