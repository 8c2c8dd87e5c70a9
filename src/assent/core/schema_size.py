"""How much work a JSON Schema is: its size with every reference expanded, and the steps that one value takes.

References let a small schema stand for a huge one: twenty definitions that each name the next one twice are a
million subschemas. Both counts are computed once per definition, so counting is cheap where expanding is not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, cast

MAX_SIZE = 10_000
"""Subschemas that one schema may have once its references are expanded; recursion is not expanded."""

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_CHOICES = ("allOf", "anyOf", "oneOf")
_SINGLE = ("not", "if", "then", "else")
_MAPS = ("properties", "patternProperties", "dependentSchemas", "dependencies")
_ITEMS = ("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains")
_FIELDS = ("additionalProperties", "unevaluatedProperties", "propertyNames")

Node = dict[str, Any]
_Place = tuple[Node, Any]
"""A subschema, and the value that it is applied to."""
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list, tuple),
    "string": (str,),
    "number": (int, float),
    "integer": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


class SchemaSize:
    """Counts for one schema."""

    __slots__ = ("_anchors", "_root")

    def __init__(self, schema: Node):
        self._root = schema
        self._anchors = dict(_anchors(schema))

    def expanded(self) -> int:
        """Return the number of subschemas with references expanded; one that leads back to itself counts once."""
        return _count((self._root, None), lambda at: ((each, None) for each in self._below(at[0])), MAX_SIZE)[0]

    def validation_steps(self, value: Any, limit: int) -> int:
        """Return how many times validation applies a subschema to the value or to a part of it.

        An alternative is left out where the fields of the value already say that it is another one. Over the limit
        counting stops.
        """
        return _count((self._root, value), lambda at: self._applied(*at, True), limit)[0]

    def explanation_steps(self, value: Any, limit: int) -> tuple[int, int]:
        """Return how many steps it takes to list every error, and the steps of the largest choice among them.

        Over the limit counting stops: then the first number is larger than the limit, and the second one as well if
        the schema has choices.
        """
        return _count((self._root, value), lambda at: self._applied(*at, False), limit)

    def multiplies(self) -> bool:
        """Whether the depth of a value can multiply the work: the schema refers to itself and has choices."""
        return any(key in node for node in _subschemas(self._root) for key in _CHOICES) and self._is_recursive()

    def _is_recursive(self) -> bool:
        entered: set[int] = set()
        left: set[int] = set()
        stack = [self._root]
        while stack:
            node = stack[-1]
            if id(node) in entered:
                stack.pop()
                left.add(id(node))
                continue
            entered.add(id(node))
            for each in self._below(node):
                if id(each) in entered and id(each) not in left:
                    return True
                if id(each) not in entered:
                    stack.append(each)
        return False

    def _below(self, node: Node) -> Iterator[Node]:
        """The subschemas of this one, whatever the value is."""
        yield from self._targets(node)
        for key in (*_CHOICES, *_SINGLE, *_ITEMS, *_FIELDS):
            yield from _schemas(node.get(key))
        for key in _MAPS:
            if isinstance(found := node.get(key), dict):
                yield from _schemas(list(cast("Node", found).values()))

    def _applied(self, node: Node, value: Any, decided: bool) -> Iterator[_Place]:
        """The subschemas that are applied to this value and to its parts, each with what it is applied to."""
        for each in self._targets(node):
            yield each, value
        for key in (*_CHOICES, *_SINGLE):
            for each in _schemas(node.get(key)):
                if key not in ("anyOf", "oneOf") or not self._is_other(each, value, decided):
                    yield each, value
        for key in ("dependentSchemas", "dependencies"):
            if isinstance(found := node.get(key), dict):
                for each in _schemas(list(cast("Node", found).values())):
                    yield each, value
        if isinstance(value, dict):
            yield from _applied_to_fields(node, cast("Node", value))
        elif isinstance(value, (list, tuple)):
            yield from _applied_to_items(node, cast("list[Any]", value))

    def _is_other(self, node: Node, value: Any, decided: bool) -> bool:
        """Whether the alternative is for another type of value, or (``decided``) for other fields."""
        seen: set[int] = set()
        schema: Node | None = node
        while schema is not None and id(schema) not in seen:
            seen.add(id(schema))
            kind = schema.get("type")
            if isinstance(kind, str) and kind in _TYPES and not isinstance(value, _TYPES[kind]):
                return True
            if decided and isinstance(value, dict) and _has_other_fields(schema, cast("Node", value)):
                return True
            schema = next(self._targets(schema), None)
        return False

    def _targets(self, node: Node) -> Iterator[Node]:
        for key in _REFERENCES:
            reference = node.get(key)
            if isinstance(reference, str) and (target := self._resolve(reference)) is not None:
                yield target

    def _resolve(self, reference: str) -> Node | None:
        """The subschema that ``#/...`` or ``#anchor`` names; None where the compiler has to say that it is wrong."""
        fragment = re.sub(b"%([0-9a-fA-F]{2})", lambda found: bytes.fromhex(found[1].decode()), reference[1:].encode())
        return self._find(fragment.decode(errors="replace"))

    def _find(self, fragment: str) -> Node | None:
        if fragment and not fragment.startswith("/"):
            return self._anchors.get(fragment)
        node: Any = self._root
        for part in fragment.split("/")[1:]:
            step = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict):
                node = cast("Node", node).get(step)
            elif isinstance(node, list) and step.isdecimal() and int(step) < len(cast("list[Any]", node)):
                node = cast("list[Any]", node)[int(step)]
            else:
                return None
        return cast("Node", node) if isinstance(node, dict) else None


def _count(start: _Place, below: Callable[[_Place], Iterable[_Place]], limit: int) -> tuple[int, int]:
    """Count the places that are reached, once for each path, and those below the largest choice.

    Each place is computed once. A place within itself counts 1. More places than the limit are not looked at: counting
    must not cost what it is there to prevent.
    """
    totals: dict[tuple[int, int], int] = {}
    parts: dict[tuple[int, int], list[tuple[int, int]]] = {}
    done: set[tuple[int, int]] = set()
    largest = 0
    stack = [start]  # not recursive: a schema and a value may each be deeper than Python's stack
    while stack:
        place = stack[-1]
        key = (id(place[0]), id(place[1]))
        if key not in parts:
            found = list(islice(below(place), 10 * limit + 1))
            if len(parts) > limit or len(found) > 10 * limit:
                choices = any(key in node for node in _subschemas(start[0]) for key in ("anyOf", "oneOf"))
                return limit + 1, limit + 1 if choices else 0
            totals[key] = 1
            parts[key] = [(id(node), id(value)) for node, value in found]
            stack.extend(each for each, its_key in zip(found, parts[key], strict=True) if its_key not in parts)
            continue
        stack.pop()
        if key not in done:
            done.add(key)
            totals[key] = 1 + sum(totals[part] for part in parts[key])
            if "anyOf" in place[0] or "oneOf" in place[0]:
                largest = max(largest, totals[key])
    return totals[(id(start[0]), id(start[1]))], largest


def _applied_to_fields(node: Node, value: Node) -> Iterator[_Place]:
    properties = cast("Node", node.get("properties") or {})
    patterns = _schemas(list(cast("Node", node.get("patternProperties") or {}).values()))
    others = [*patterns, *(each for key in _FIELDS for each in _schemas(node.get(key)))]
    for name, item in value.items():
        if isinstance(schema := properties.get(name), dict):
            yield cast("Node", schema), item
        for each in others:
            yield each, item


def _applied_to_items(node: Node, value: list[Any]) -> Iterator[_Place]:
    for key in _ITEMS:
        found = node.get(key)
        if isinstance(found, list):
            listed = cast("list[Any]", found)
            yield from ((schema, item) for schema, item in zip(listed, value, strict=False) if isinstance(schema, dict))
        elif isinstance(found, dict):
            yield from ((cast("Node", found), item) for item in value)


def _schemas(found: Any) -> list[Node]:
    """The subschema, or the subschemas, that a keyword holds; ``true`` and ``false`` are no work."""
    listed = cast("list[Any]", found) if isinstance(found, list) else [found]
    return [cast("Node", each) for each in listed if isinstance(each, dict)]


def _has_other_fields(schema: Node, value: Node) -> bool:
    properties = cast("Node", schema.get("properties") or {})
    if any(name not in value for name in cast("list[Any]", schema.get("required") or ())):
        return True
    if schema.get("additionalProperties") is False and "patternProperties" not in schema and value.keys() - properties:
        return True
    for name, field in properties.items():
        if name in value and isinstance(field, dict):
            constant = cast("Node", field)
            allowed: Any = [constant["const"]] if "const" in constant else constant.get("enum")
            if isinstance(allowed, list) and value[name] not in cast("list[Any]", allowed):
                return True
    return False


def _subschemas(schema: Any) -> Iterator[Node]:
    waiting: list[Any] = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield cast("Node", node)
            waiting.extend(cast("Node", node).values())
        elif isinstance(node, list):
            waiting.extend(cast("list[Any]", node))


def _anchors(schema: Node) -> Iterator[tuple[str, Node]]:
    for node in _subschemas(schema):
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(name := node.get(key), str):
                yield name, node
        if isinstance(name := node.get("$id"), str) and name.startswith("#"):
            yield name[1:], node
