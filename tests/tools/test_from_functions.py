"""Tools from the functions of a module, or from a list of functions."""

from __future__ import annotations

import re
import sys
import types
from typing import Any

import functions_sample
import pytest

from holdfast.errors import DeclarationError
from holdfast.tools import Toolset, tool


def add(a: int) -> int:
    """Add one."""
    return a + 1


def undocumented(a: int) -> int:
    return a


def variadic(*numbers: int) -> None:
    """Do something."""


def unannotated(args) -> None:  # type: ignore[no-untyped-def]
    """Do something with a dict."""


def test_the_public_functions_and_tools_of_a_module_become_tools_and_imported_ones_do_not() -> None:
    tools = Toolset.from_functions(functions_sample)
    assert tools.names == ("add", "greet", "pay_out", "ping")
    assert tools.get("pay_out") is functions_sample.pay
    assert [one.spec.gate for one in tools] == ["auto", "auto", "required", "auto"]
    added = tools.get("add")
    assert added is not None
    assert added.spec.description == "Add two numbers."
    assert added(2, b=3) == 5


def test_dunder_all_restricts_the_functions_of_a_module() -> None:
    module = types.ModuleType("some_module")
    exec('__all__ = ["a"]\ndef a() -> int:\n    "A."\ndef b() -> int:\n    "B."', vars(module))
    assert Toolset.from_functions(module).names == ("a",)


def test_an_approval_applies_to_every_function_or_by_name_and_never_to_a_tool() -> None:
    gates = [one.spec.gate for one in Toolset.from_functions(functions_sample, approval="required")]
    assert gates == ["required", "required", "required", "auto"]
    by_name = Toolset.from_functions(functions_sample, approval={"greet": lambda args, call: True})
    assert [one.spec.gate for one in by_name] == ["auto", "policy", "required", "auto"]
    with pytest.raises(DeclarationError, match="'pay_out' is a Tool already"):
        Toolset.from_functions(functions_sample, approval={"pay_out": "auto"})
    with pytest.raises(DeclarationError, match="no 'nope'; it has add, greet"):
        Toolset.from_functions(functions_sample, approval={"nope": "auto"})
    with pytest.raises(DeclarationError, match="unknown approval 'yes'"):
        Toolset.from_functions([add], approval="yes")  # pyright: ignore[reportArgumentType]


def test_only_takes_names_or_a_function_of_the_name() -> None:
    assert Toolset.from_functions(functions_sample, only=["ping", "add"]).names == ("add", "ping")
    assert Toolset.from_functions(functions_sample, only=lambda name: name.startswith("g")).names == ("greet",)
    with pytest.raises(DeclarationError, match="functions_sample has no 'nope'"):
        Toolset.from_functions(functions_sample, only=["nope"])


def test_a_list_may_contain_functions_methods_and_tools() -> None:
    class Desk:
        def answer(self, question: str) -> str:
            """Answer."""
            return question.upper()

    named = tool(add, name="increment")
    tools = Toolset.from_functions([add, Desk().answer, named], approval="required")
    assert tools.names == ("add", "answer", "increment")
    assert tools.get("increment") is named


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (undocumented, "tool 'undocumented': no description"),
        (variadic, "variadic"),
        (unannotated, "tool 'unannotated'.*annotate each argument"),
        (lambda: 1, "lambda"),
    ],
)
def test_a_function_that_cannot_be_a_tool_gives_the_error_of_the_decorator(function: Any, message: str) -> None:
    with pytest.raises(DeclarationError, match=message) as ours:
        Toolset.from_functions([function])
    with pytest.raises(DeclarationError) as theirs:
        tool(function)
    assert ours.value.message == theirs.value.message


@pytest.mark.parametrize(
    ("package", "module", "make", "extra"),
    [
        ("httpx", "openapi", Toolset.from_openapi, "holdfast[openapi]"),
        ("langchain_core", "langchain", Toolset.from_langchain, "holdfast[langchain]"),
        ("pydantic_ai", "pydantic_ai", Toolset.from_pydantic_ai, "holdfast[openai]"),
    ],
)
def test_an_adapter_whose_package_is_missing_names_the_extra(
    package: str, module: str, make: Any, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(sys.modules):
        if name.split(".")[0] == package or name.startswith(f"holdfast.tools.{module}"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delattr(f"holdfast.tools.{module}", raising=False)
    with pytest.raises(DeclarationError, match=re.escape(extra)):
        make({})


@pytest.mark.parametrize("given", [add, "functions_sample", 7, [7], [dict], [add, add], types.ModuleType("empty")])
def test_a_value_other_than_a_module_or_a_list_of_distinct_functions_is_refused(given: Any) -> None:
    with pytest.raises(DeclarationError):
        Toolset.from_functions(given)
