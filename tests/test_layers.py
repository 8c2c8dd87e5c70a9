"""Who may import whom: the seven rules of the design, held by a walk over the syntax trees."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "assent"
PURE = {
    "__future__", "abc", "base64", "collections", "contextlib", "copy", "dataclasses", "datetime", "decimal",
    "enum", "functools", "hashlib", "inspect", "itertools", "json", "math", "operator", "re", "string", "struct",
    "sys", "textwrap", "types", "typing", "typing_extensions", "unicodedata", "uuid", "warnings",
}  # fmt: skip
CONCRETE = (
    "assent.stores.memory",
    "assent.stores.sqlite",
    "assent.stores.postgres",
    "assent.models.scripted",
    "assent.models.providers.model",
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
        "errors",
        "telemetry",
        "urls",
        "",
    ),
    "testing": ("testing", "runtime", "core", "tools", "stores", "models", "errors", "telemetry", "urls", ""),
}


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
    """`from assent.core import gate` imports a module; `from assent.errors import Stale` a name."""
    path = SRC.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def modules() -> list[tuple[str, Path]]:
    return [(path.relative_to(SRC).parts[0].removesuffix(".py"), path) for path in sorted(SRC.rglob("*.py"))]


def within(module: str, allowed: tuple[str, ...]) -> bool:
    """The empty name stands for the public package itself, and nothing inside it."""
    if module == "assent":
        return "" in allowed
    return any(f"{module}.".startswith(f"assent.{name}.") for name in allowed if name)


@pytest.mark.parametrize(("layer", "path"), modules(), ids=lambda value: str(value).replace(str(SRC), ""))
def test_a_module_imports_only_what_its_layer_may(layer: str, path: Path) -> None:
    if layer not in ALLOWED:
        return  # errors, urls, telemetry and the package itself have rules of their own, below
    for module in imports(path):
        assert not module.startswith("assent") or within(module, ALLOWED[layer]), f"{path.name} imports {module}"


def test_the_core_imports_nothing_impure() -> None:
    for path in (SRC / "core").rglob("*.py"):
        for module in imports(path):
            root = module.split(".")[0]
            assert root in PURE | {"msgspec", "jsonschema_rs", "assent"}, f"{path.name} imports {module}"


def test_errors_import_nothing_of_assent() -> None:
    assert not [m for m in imports(SRC / "errors.py") if m.startswith("assent")]


def test_telemetry_imports_only_the_core_so_that_all_but_the_core_may_import_it() -> None:
    for module in imports(SRC / "telemetry.py"):
        assert not module.startswith("assent") or within(module, ("core", "errors")), module
    assert [layer for layer, allowed in ALLOWED.items() if "telemetry" not in allowed] == ["core"]


def test_only_the_command_line_and_the_url_functions_name_concrete_stores_and_models() -> None:
    for layer, path in modules():
        if (path.name in ("urls.py", "__init__.py") and path.parent == SRC) or layer in ("testing", "stores", "models"):
            continue
        if path == SRC / "cli" / "main.py":
            continue
        for module in imports(path):
            assert not module.startswith(CONCRETE), f"{path.relative_to(SRC)} imports {module}"


def test_nothing_in_src_imports_testing() -> None:
    for layer, path in modules():
        if layer != "testing":
            assert not [m for m in imports(path) if m.startswith("assent.testing")], path


def test_only_telemetry_imports_opentelemetry() -> None:
    for _, path in modules():
        if path.name != "telemetry.py":
            assert not [m for m in imports(path) if m.startswith("opentelemetry")], path


def test_the_rules_can_fail(tmp_path: Path) -> None:
    """The walk sees imports inside functions, and ignores those for type checking only."""
    file = tmp_path / "x.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import asyncio\n"
        "def f():\n    from assent.stores.sqlite import SQLiteStore\n"
    )
    found = imports(file)
    assert "assent.stores.sqlite" in found
    assert "asyncio" not in found
    assert not within("assent.stores.sqlite", ALLOWED["runtime"])
    assert within("assent.stores.base", ALLOWED["runtime"])
