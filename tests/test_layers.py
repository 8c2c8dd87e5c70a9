"""Who may import whom: the seven rules of the design, held by a walk over the syntax trees."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "holdfast"
PURE = {
    "__future__", "abc", "base64", "collections", "contextlib", "copy", "dataclasses", "datetime", "decimal",
    "enum", "functools", "hashlib", "html", "inspect", "itertools", "json", "math", "operator", "re", "string",
    "struct", "sys", "textwrap", "types", "typing", "typing_extensions", "unicodedata", "uuid", "warnings",
}  # fmt: skip
CONCRETE = (
    "holdfast.stores.memory",
    "holdfast.stores.sqlite.store",
    "holdfast.stores.postgres",
    "holdfast.models.scripted",
    "holdfast.models.providers.model",
)

ALLOWED: dict[str, tuple[str, ...]] = {
    "core": ("core", "errors"),
    "tools": ("tools", "core", "errors", "telemetry"),
    "stores": ("stores", "core", "errors", "telemetry"),
    "models": ("models", "core", "errors", "telemetry"),
    "runtime": ("runtime", "core", "tools", "stores.base", "models.base", "errors", "telemetry", "urls"),
    "workspace": ("workspace", "core", "tools", "errors", "telemetry"),
    "server": (
        "server",
        "runtime",
        "core",
        "tools",
        "stores.base",
        "models.base",
        "errors",
        "telemetry",
        "urls",
    ),
    "bridges": ("bridges", "runtime", "core", "tools", "errors", "telemetry"),
    "cli": (
        "cli",
        "runtime",
        "core",
        "tools",
        "stores",
        "models",
        "server",
        "workspace",
        "errors",
        "telemetry",
        "urls",
        "",
    ),
    "blocking": ("runtime", "core", "stores.base", "errors"),
    "testing": ("testing", "runtime", "core", "tools", "stores", "models", "errors", "telemetry", "urls", ""),
}

OWN_RULES = ("__init__", "__main__", "errors", "events", "hooks", "telemetry", "urls")
"""Entry points, and modules with tests of their own below. A new module beside the layers is entered here or above."""


@cache
def imports(path: Path) -> frozenset[str]:
    """Every module that a file imports, also inside functions, but not for type checking only."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            found |= {full if is_module(full := f"{module}.{alias.name}") else module for alias in node.names}
    return frozenset(found)


def is_module(name: str) -> bool:
    """`from holdfast.core import gate` imports a module; `from holdfast.errors import Stale` a name."""
    path = SRC.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def reached(path: Path) -> set[str]:
    """Every module of holdfast that a file imports, directly or by what it imports."""
    found: set[str] = set()
    waiting = [path]
    while waiting:
        for module in imports(waiting.pop()):
            if module.startswith("holdfast.") and module not in found:
                found.add(module)
                file = SRC.parent.joinpath(*module.split("."))
                waiting.append(file / "__init__.py" if file.is_dir() else file.with_suffix(".py"))
    return found


def modules() -> list[tuple[str, Path]]:
    return [(path.relative_to(SRC).parts[0].removesuffix(".py"), path) for path in sorted(SRC.rglob("*.py"))]


def within(module: str, allowed: tuple[str, ...]) -> bool:
    """The empty name stands for the public package itself, and nothing inside it."""
    if module == "holdfast":
        return "" in allowed
    return any(f"{module}.".startswith(f"holdfast.{name}.") for name in allowed if name)


@pytest.mark.parametrize(("layer", "path"), modules(), ids=lambda value: str(value).replace(str(SRC), ""))
def test_a_module_imports_only_what_its_layer_may(layer: str, path: Path) -> None:
    if layer in OWN_RULES:
        return
    for module in imports(path):
        assert not module.startswith("holdfast") or within(module, ALLOWED[layer]), f"{path.name} imports {module}"


def test_the_core_imports_nothing_impure() -> None:
    for path in (SRC / "core").rglob("*.py"):
        for module in imports(path):
            root = module.split(".")[0]
            assert root in PURE | {"msgspec", "jsonschema_rs", "holdfast"}, f"{path.name} imports {module}"


def test_errors_import_nothing_of_holdfast() -> None:
    assert not [m for m in imports(SRC / "errors.py") if m.startswith("holdfast")]


def test_telemetry_imports_only_the_core_so_that_all_but_the_core_may_import_it() -> None:
    for module in imports(SRC / "telemetry.py"):
        assert not module.startswith("holdfast") or within(module, ("core", "errors")), module
    users = {layer for layer, path in modules() if "holdfast.telemetry" in imports(path)}
    assert users, "nothing imports it: this test would prove nothing"
    below = reached(SRC / "telemetry.py")
    assert "holdfast.telemetry" not in below, "telemetry imports something that imports it"
    assert not users & {"core", "errors"}


def test_only_the_url_functions_and_the_public_package_name_concrete_stores_and_models() -> None:
    for layer, path in modules():
        if (path.name in ("urls.py", "__init__.py") and path.parent == SRC) or layer in ("testing", "stores", "models"):
            continue
        for module in imports(path):
            assert not module.startswith(CONCRETE), f"{path.relative_to(SRC)} imports {module}"


def test_nothing_in_src_imports_testing() -> None:
    for layer, path in modules():
        if layer != "testing":
            assert not [m for m in imports(path) if m.startswith("holdfast.testing")], path


def test_only_telemetry_imports_opentelemetry() -> None:
    for _, path in modules():
        if path.name != "telemetry.py":
            assert not [m for m in imports(path) if m.startswith("opentelemetry")], path


def all_imports(path: Path) -> set[str]:
    """Every module that a file imports, those for type checking only included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found |= {full if is_module(full := f"{module}.{alias.name}") else module for alias in node.names}
    return found


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of one import cycle, the first one repeated at the end; an empty list if there is none."""
    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> list[str]:
        if module in trail:
            return [*trail[trail.index(module) :], module]
        if module not in done:
            for imported in sorted(graph.get(module, ())):
                if cycle := visit(imported, [*trail, module]):
                    return cycle
            done.add(module)
        return []

    return next((cycle for module in sorted(graph) if (cycle := visit(module, []))), [])


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports for type checking count, too: a module that needs a type from above defines a Protocol."""
    names = {path: ".".join(path.relative_to(SRC.parent).with_suffix("").parts) for _, path in modules()}
    graph = {name.removesuffix(".__init__"): all_imports(path) for path, name in names.items()}
    cycle = find_cycle({name: imported & set(graph) - {name} for name, imported in graph.items()})
    assert not cycle, " imports ".join(cycle)


def test_the_search_for_cycles_can_fail(tmp_path: Path) -> None:
    """An import for type checking only closes a cycle, and the cycle is named."""
    file = tmp_path / "x.py"
    file.write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import holdfast.runtime.engine\n")
    assert "holdfast.runtime.engine" in all_imports(file)
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_the_rules_can_fail(tmp_path: Path) -> None:
    """The walk sees imports inside functions, and ignores those for type checking only."""
    file = tmp_path / "x.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import asyncio\n"
        "def f():\n    from holdfast.stores.sqlite.store import SQLiteStore\n"
    )
    found = imports(file)
    assert "holdfast.stores.sqlite.store" in found
    assert "asyncio" not in found
    assert not within("holdfast.stores.sqlite.store", ALLOWED["runtime"])
    assert within("holdfast.stores.base", ALLOWED["runtime"])
