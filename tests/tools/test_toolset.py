"""Sets of tools and the wrappers around them."""

from __future__ import annotations

from typing import Any

import pytest
import tool_samples
from tool_samples import Close, plain, refund

from holdfast.errors import DeclarationError
from holdfast.tools import Call, Toolset, filtered, gated, prefixed, provider_tool, tool


def make(name: str, **options: Any) -> Any:
    return tool(name=name, parameters={"type": "object"}, description="d", **options)(lambda args: name)


def test_tools_classes_instances_and_sets_are_flattened_in_order() -> None:
    inner = Toolset(plain, Close)
    tools = Toolset(refund, inner, tool_samples.bank)
    assert tools.names == ("refund", "plain", "close", "bank")
    assert [tool.spec.name for tool in tools] == list(tools.names)
    assert tools.get("plain") is plain
    assert tools.get("none") is None
    assert "close" in tools
    assert len(tools) == 4
    assert list(tools.specs) == list(tools.names)


def test_two_tools_of_one_name_are_refused_and_both_origins_are_named() -> None:
    """Two tools of the same name are refused [B7]."""

    @tool(name="plain")
    def other(a: int) -> None:
        """Another one."""

    with pytest.raises(DeclarationError) as caught:
        Toolset(plain, other)
    assert "tool_samples.plain" in caught.value.message
    assert "other" in caught.value.message
    with pytest.raises(DeclarationError, match="'plain'"):
        Toolset(Toolset(plain), Toolset(plain))


def test_a_preview_that_is_added_later_is_in_the_specs() -> None:
    late = make("late")
    tools = Toolset(late)
    late.preview(lambda args: "plan")
    assert tools.specs["late"].planned


def test_an_item_that_is_not_a_tool_is_refused_with_advice() -> None:
    with pytest.raises(DeclarationError, match="decorate it with @tool"):
        Toolset(test_a_preview_that_is_added_later_is_in_the_specs)
    for wrong in ("refund", 3, None, [plain], {"a": plain}):
        with pytest.raises(DeclarationError, match="is not a tool"):
            Toolset(wrong)


def test_prefixed_renames_copies_and_leaves_the_originals_unchanged() -> None:
    original = Toolset(refund, provider_tool("web_search"))
    crm = prefixed(original, "crm_")
    assert crm.names == ("crm_refund", "web_search")
    assert original.names == ("refund", "web_search")
    renamed = crm.get("crm_refund")
    assert renamed is not None
    assert renamed.handler is refund.handler
    assert renamed.planner is refund.planner
    with pytest.raises(DeclarationError, match="bad tool name"):
        prefixed(original, "no spaces ")


def test_filtered_keeps_the_tools_that_match_the_predicate() -> None:
    assert filtered(Toolset(plain, refund), lambda tool: tool.spec.risk == "high").names == ("refund",)


def test_gated_adds_an_approval_to_server_and_client_tools() -> None:
    original = [make("a"), make("b", executor="client"), make("c", executor="human"), provider_tool("web")]
    specs = gated(original).specs
    assert [spec.gate for spec in specs.values()] == ["required", "required", "auto", "auto"]
    assert original[0].spec.gate == "auto"


@pytest.mark.parametrize("wrong", ["human", "provider"])
def test_gated_refuses_a_selected_human_or_provider_tool(wrong: str) -> None:
    """Human and provider tools cannot have an approval [B3, B4]."""
    with pytest.raises(DeclarationError, match="illegal"):
        gated([make("a", executor=wrong)], lambda tool: True)


def test_gated_with_a_function_never_weakens_a_gate() -> None:
    def ask(args: dict[str, Any]) -> str:
        return "required"

    tools = gated([make("a"), make("b", approval="required"), refund], approval=ask)
    assert [spec.gate for spec in tools.specs.values()] == ["policy", "required", "policy"]
    a, kept = tools.get("a"), tools.get("refund")
    assert a is not None
    assert a.policy is not None
    assert a.policy({}, Call()) == "required"
    assert kept is not None
    assert kept.policy is refund.policy
    with pytest.raises(DeclarationError, match="auto"):
        gated([make("a")], approval="auto")


def test_wrappers_compose() -> None:
    tools = gated(prefixed(filtered([plain, refund], lambda tool: tool.spec.name != "refund"), "x-"))
    assert tools.names == ("x-plain",)
    assert tools.specs["x-plain"].gate == "required"
