"""A griffe extension for the API reference: it reads the two conventions of our code that griffe does not know.

- Docstrings list parameters and fields as ``name:  text`` lines, and begin code blocks with ``::``. They become
  sections and code blocks that mkdocstrings renders.
- Classes that derive from ``msgspec.Struct`` have no ``__init__`` to read: their signature is made from their fields,
  and their fields become one table instead of a heading each.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import Any

import griffe

ENTRY = re.compile(r"(\w+):\s{2,}(\S.*)")


class HoldfastDocstrings(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        listed: list[griffe.Attribute] = []
        for obj in list(walk(pkg)):
            text, entries = read_docstring(obj.docstring.value if obj.docstring else "")
            if isinstance(obj, griffe.Class) and is_struct(obj):
                fields = struct_fields(obj)
                set_signature(obj, fields)
                text += section("Attributes", describe(obj, fields, entries))
                listed += fields
            else:
                text += section("Parameters", entries)
            if obj.docstring:
                obj.docstring.value = text.strip()
        for field in listed:  # not before: subclasses list the same fields
            field.docstring = None


def walk(obj: griffe.Object) -> Iterator[griffe.Object]:
    """Yield an object and everything that is defined in it; imported names are left out."""
    yield obj
    for member in obj.members.values():
        if isinstance(member, griffe.Object):
            yield from walk(member)


def read_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """Return a docstring as Markdown, without its ``name:  text`` entries, and these entries."""
    out: list[str] = []
    entries: dict[str, str] = {}
    lines = doc.splitlines()
    while lines:
        line = lines.pop(0)
        if entry := ENTRY.fullmatch(line):
            entries[entry[1]] = " ".join([entry[2], *(each.strip() for each in take_indented(lines))])
        elif line.endswith("::"):
            code = textwrap.dedent("\n".join(take_indented(lines))).strip()
            out += [line[:-1], "", "```python", *code.splitlines(), "```", ""]
        else:
            out.append(line)
    return "\n".join(out), entries


def take_indented(lines: list[str]) -> Iterator[str]:
    """Remove the indented lines at the start, and yield them; a blank line belongs to them if more follow."""
    while lines and (lines[0].startswith("  ") or (not lines[0] and len(lines) > 1 and lines[1].startswith("  "))):
        yield lines.pop(0)


def section(title: str, entries: dict[str, str]) -> str:
    if not entries:
        return ""
    return f"\n\n{title}:\n" + "".join(f"    {name}: {text}\n" for name, text in entries.items())


def is_struct(cls: griffe.Class) -> bool:
    return any(getattr(base, "canonical_path", base) == "msgspec.Struct" for each in family(cls) for base in each.bases)


def family(cls: griffe.Class) -> list[griffe.Class]:
    """Return the base classes of our own, and the class itself, last."""
    return [*reversed(cls.mro()), cls]


def struct_fields(cls: griffe.Class) -> list[griffe.Attribute]:
    found = {
        member.name: member
        for each in family(cls)
        for member in each.members.values()
        if isinstance(member, griffe.Attribute)
        and member.annotation
        and "instance-attribute" in member.labels
        and not member.name.startswith("_")
        and "property" not in member.labels
    }
    return list(found.values())


def set_signature(cls: griffe.Class, fields: list[griffe.Attribute]) -> None:
    if "__init__" in cls.members:
        return
    keyword_only = any(str(each.keywords.get("kw_only")) == "True" for each in family(cls))
    kind = griffe.ParameterKind.keyword_only if keyword_only else griffe.ParameterKind.positional_or_keyword
    given = [griffe.Parameter(each.name, annotation=each.annotation, kind=kind, default=each.value) for each in fields]
    given.sort(key=lambda parameter: parameter.default is not None)
    itself = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
    made = griffe.Function("__init__", parameters=griffe.Parameters(itself, *given), parent=cls)
    cls.set_member("__init__", made)


def describe(cls: griffe.Class, fields: list[griffe.Attribute], entries: dict[str, str]) -> dict[str, str]:
    """Return the rows of the documented fields. An inherited field brings its type, which griffe would not find."""
    rows: dict[str, str] = {}
    for field in fields:
        if text := field.docstring.value if field.docstring else entries.get(field.name):
            name = field.name if field.name in cls.members else f"{field.name} ({field.annotation})"
            rows[name] = " ".join(text.split())
    return rows
