"""The import rules between the layers, checked on the syntax trees of the source."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "holdfast"
PURE = {
    "__future__", "abc", "base64", "bisect", "collections", "contextlib", "copy", "dataclasses", "datetime", "decimal",
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
        "channels",
        "runtime",
        "core",
        "tools",
        "stores.base",
        "models.base",
        "errors",
        "telemetry",
        "urls",
    ),
    "channels": ("channels", "runtime", "core", "errors", "telemetry"),
    "bridges": ("bridges", "channels", "runtime", "core", "tools", "models.base", "errors", "telemetry"),
    "cli": (
        "cli",
        "runtime",
        "core",
        "tools",
        "stores",
        "models",
        "server",
        "channels",
        "bridges",
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
"""Entry points, and modules with a test of their own below. A new module outside the layers is added here or above."""


@cache
def imports(path: Path) -> frozenset[str]:
    """Return the modules that a file imports, also inside functions, but not those for type checking only."""
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


def reachable_modules(path: Path) -> set[str]:
    """Return the modules of holdfast that a file imports, directly or indirectly."""
    found: set[str] = set()
    queue = [path]
    while queue:
        for module in imports(queue.pop()):
            if module.startswith("holdfast.") and module not in found:
                found.add(module)
                file = SRC.parent.joinpath(*module.split("."))
                queue.append(file / "__init__.py" if file.is_dir() else file.with_suffix(".py"))
    return found


def modules() -> list[tuple[str, Path]]:
    return [(path.relative_to(SRC).parts[0].removesuffix(".py"), path) for path in sorted(SRC.rglob("*.py"))]


def is_allowed(module: str, allowed: tuple[str, ...]) -> bool:
    """Return whether a module is in one of these packages. The empty name stands for the public package itself."""
    if module == "holdfast":
        return "" in allowed
    return any(f"{module}.".startswith(f"holdfast.{name}.") for name in allowed if name)


@pytest.mark.parametrize(("layer", "path"), modules(), ids=lambda value: str(value).replace(str(SRC), ""))
def test_a_module_imports_only_the_packages_that_its_layer_may_import(layer: str, path: Path) -> None:
    if layer in OWN_RULES:
        return
    for module in imports(path):
        assert not module.startswith("holdfast") or is_allowed(module, ALLOWED[layer]), f"{path.name} imports {module}"


def test_the_core_imports_only_pure_modules() -> None:
    for path in (SRC / "core").rglob("*.py"):
        for module in imports(path):
            root = module.split(".")[0]
            assert root in PURE | {"msgspec", "jsonschema_rs", "holdfast"}, f"{path.name} imports {module}"


def test_errors_import_nothing_of_holdfast() -> None:
    assert not [m for m in imports(SRC / "errors.py") if m.startswith("holdfast")]


def test_telemetry_imports_only_the_core_and_the_core_does_not_import_telemetry() -> None:
    for module in imports(SRC / "telemetry.py"):
        assert not module.startswith("holdfast") or is_allowed(module, ("core", "errors")), module
    users = {layer for layer, path in modules() if "holdfast.telemetry" in imports(path)}
    assert users, "no module imports telemetry: this test would check nothing"
    below = reachable_modules(SRC / "telemetry.py")
    assert "holdfast.telemetry" not in below, "telemetry imports something that imports it"
    assert not users & {"core", "errors"}


def test_only_urls_and_the_public_package_import_concrete_stores_and_models() -> None:
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
    """Return the modules that a file imports, including those for type checking only."""
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


def test_there_is_no_import_cycle() -> None:
    """Imports for type checking count too: a module that needs a type of a higher layer defines a Protocol."""
    names = {path: ".".join(path.relative_to(SRC.parent).with_suffix("").parts) for _, path in modules()}
    graph = {name.removesuffix(".__init__"): all_imports(path) for path, name in names.items()}
    cycle = find_cycle({name: imported & set(graph) - {name} for name, imported in graph.items()})
    assert not cycle, " imports ".join(cycle)


def test_find_cycle_finds_a_cycle_of_type_checking_imports(tmp_path: Path) -> None:
    """Imports for type checking only are part of the graph."""
    file = tmp_path / "x.py"
    file.write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import holdfast.runtime.engine\n")
    assert "holdfast.runtime.engine" in all_imports(file)
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_the_import_rules_find_a_forbidden_import_inside_a_function(tmp_path: Path) -> None:
    """Imports for type checking only are ignored."""
    file = tmp_path / "x.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import asyncio\n"
        "def f():\n    from holdfast.stores.sqlite.store import SQLiteStore\n"
    )
    found = imports(file)
    assert "holdfast.stores.sqlite.store" in found
    assert "asyncio" not in found
    assert not is_allowed("holdfast.stores.sqlite.store", ALLOWED["runtime"])
    assert is_allowed("holdfast.stores.base", ALLOWED["runtime"])
