"""The shape of the log: every field of every event, and of the structs in an event, as plain data."""

from __future__ import annotations

import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from holdfast.core.events import VERSION, AnyEvent


def shape() -> dict[str, Any]:
    found: dict[str, Any] = {}
    todo = list(get_args(AnyEvent))
    while todo:
        struct = todo.pop(0)
        if struct.__name__ in found:
            continue
        hints = get_type_hints(struct)
        tag = struct.__struct_config__.tag
        found[struct.__name__] = {
            **({"tag": {struct.__struct_config__.tag_field: tag}} if tag is not None else {}),
            "fields": {f.encode_name: _field(hints[f.name], f) for f in msgspec.structs.fields(struct)},
        }
        for hint in hints.values():
            todo += _structs(hint)
    return {"version": VERSION, "structs": dict(sorted(found.items()))}


def events() -> list[str]:
    return [event.__name__ for event in get_args(AnyEvent)]


def _field(hint: Any, field: msgspec.structs.FieldInfo) -> dict[str, Any]:
    described: dict[str, Any] = {"type": type_text(hint)}
    if field.default is not msgspec.NODEFAULT:
        described["default"] = msgspec.to_builtins(field.default)
    elif field.default_factory is not msgspec.NODEFAULT:
        described["default"] = msgspec.to_builtins(field.default_factory())
    return described


def type_text(hint: Any) -> str:
    """Return a type as text, the same on every version of Python."""
    if hint in (None, type(None)):
        return "null"
    if hint is Any:
        return "any"
    if hint is Ellipsis:
        return "..."
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " | ".join(repr(arg) for arg in args)
    if origin in (Union, types.UnionType):
        return " | ".join(type_text(arg) for arg in args)
    if origin is not None:
        return f"{origin.__name__}[{', '.join(type_text(arg) for arg in args)}]"
    return hint.__name__


def _structs(hint: Any) -> list[type]:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return [hint]
    return [struct for arg in get_args(hint) for struct in _structs(arg)]


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    if old["version"] != new["version"]:
        return [f"version {old['version']} -> {new['version']}"]
    found: list[str] = []
    for name in sorted({*old["structs"], *new["structs"]}):
        if name not in new["structs"] or name not in old["structs"]:
            found.append(f"{name}: {'gone' if name in old['structs'] else 'new'}")
            continue
        before, after = old["structs"][name], new["structs"][name]
        if before.get("tag") != after.get("tag"):
            found.append(f"{name}: tag {before.get('tag')} -> {after.get('tag')}")
        for field in sorted({*before["fields"], *after["fields"]}):
            was, now = before["fields"].get(field), after["fields"].get(field)
            if was != now:
                found.append(f"{name}.{field}: {was or 'was not there'} -> {now or 'gone'}")
    return found


def incompatible_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return the changes that logs of the old shape do not allow: all but additions with a default."""
    wrong: list[str] = []
    for change in differences(old, new):
        name, _, field = change.partition(": ")[0].partition(".")
        added = name not in old["structs"] or (field and field not in old["structs"][name]["fields"])
        described = new["structs"].get(name, {}).get("fields", {}).get(field, {})
        if not added or (name in old["structs"] and "default" not in described):
            wrong.append(change)
    return wrong
