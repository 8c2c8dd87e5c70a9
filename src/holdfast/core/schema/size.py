"""The cost of a JSON Schema: its size with every reference expanded, and the steps that validating a value takes.

References let a small schema stand for a huge one: twenty definitions that each name the next one twice are a
million subschemas. Each definition is counted once, so counting is cheap even if expanding is not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, cast

MAX_SIZE = 10_000
"""Subschemas that a schema may have after its references are expanded; recursion is not expanded."""

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_CHOICES = ("allOf", "anyOf", "oneOf")
_SINGLE = ("not", "if", "then", "else")
_MAPS = ("properties", "patternProperties", "dependentSchemas", "dependencies")
_ITEMS = ("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains")
_FIELDS = ("additionalProperties", "unevaluatedProperties", "propertyNames")

Node = dict[str, Any]
_Visit = tuple[Node, Any]
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
    """Counts the subschemas and validation steps of one schema."""

    __slots__ = ("_anchors", "_root")

    def __init__(self, schema: Node):
        self._root = schema
        self._anchors = dict(_find_anchors(schema))

    def expanded_size(self) -> int:
        """Return the number of subschemas with references expanded; one that leads back to itself counts once."""
        size, _ = _count_visits(
            (self._root, None), lambda visit: ((child, None) for child in self._children(visit[0])), MAX_SIZE
        )
        return size

    def validation_steps(self, value: Any, limit: int) -> int:
        """Return how many times validation applies a subschema to the value or to a part of it.

        An alternative is left out if the value's fields already exclude it. Counting stops above the limit.
        """
        return _count_visits((self._root, value), lambda visit: self._applied_subschemas(*visit, True), limit)[0]

    def explanation_steps(self, value: Any, limit: int) -> tuple[int, int]:
        """Return the steps that listing every error takes, and the steps of the largest choice among them.

        Counting stops above the limit: then the first number exceeds the limit, and so does the second if the schema
        has choices.
        """
        return _count_visits((self._root, value), lambda visit: self._applied_subschemas(*visit, False), limit)

    def grows_with_depth(self) -> bool:
        """Whether the depth of a value can multiply the work: the schema refers to itself and has choices."""
        return any(key in node for node in _walk_subschemas(self._root) for key in _CHOICES) and self._is_recursive()

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
            for subschema in self._children(node):
                if id(subschema) in entered and id(subschema) not in left:
                    return True
                if id(subschema) not in entered:
                    stack.append(subschema)
        return False

    def _children(self, node: Node) -> Iterator[Node]:
        """Yield all direct subschemas of this one, regardless of the value."""
        yield from self._reference_targets(node)
        for key in (*_CHOICES, *_SINGLE, *_ITEMS, *_FIELDS):
            yield from _as_subschemas(node.get(key))
        for key in _MAPS:
            if isinstance(found := node.get(key), dict):
                yield from _as_subschemas(list(cast("Node", found).values()))

    def _applied_subschemas(self, node: Node, value: Any, by_fields: bool) -> Iterator[_Visit]:
        """Yield the subschemas that apply to this value or to its parts, each with the value that it applies to."""
        for subschema in self._reference_targets(node):
            yield subschema, value
        for key in (*_CHOICES, *_SINGLE):
            for subschema in _as_subschemas(node.get(key)):
                if key not in ("anyOf", "oneOf") or not self._is_excluded(subschema, value, by_fields):
                    yield subschema, value
        for key in ("dependentSchemas", "dependencies"):
            if isinstance(found := node.get(key), dict):
                for subschema in _as_subschemas(list(cast("Node", found).values())):
                    yield subschema, value
        if isinstance(value, dict):
            yield from _applied_to_fields(node, cast("Node", value))
        elif isinstance(value, (list, tuple)):
            yield from _applied_to_items(node, cast("list[Any]", value))

    def _is_excluded(self, node: Node, value: Any, by_fields: bool) -> bool:
        """Whether the alternative cannot apply: the value's type differs or, with ``by_fields``, its fields do."""
        seen: set[int] = set()
        schema: Node | None = node
        while schema is not None and id(schema) not in seen:
            seen.add(id(schema))
            kind = schema.get("type")
            if isinstance(kind, str) and kind in _TYPES and not isinstance(value, _TYPES[kind]):
                return True
            if by_fields and isinstance(value, dict) and _has_other_fields(schema, cast("Node", value)):
                return True
            schema = next(self._reference_targets(schema), None)
        return False

    def _reference_targets(self, node: Node) -> Iterator[Node]:
        for key in _REFERENCES:
            reference = node.get(key)
            if isinstance(reference, str) and (target := self._resolve(reference)) is not None:
                yield target

    def _resolve(self, reference: str) -> Node | None:
        """Return the subschema that ``#/...`` or ``#anchor`` names; None if there is none (the compiler reports it)."""
        fragment = re.sub(b"%([0-9a-fA-F]{2})", lambda found: bytes.fromhex(found[1].decode()), reference[1:].encode())
        return self._find_fragment(fragment.decode(errors="replace"))

    def _find_fragment(self, fragment: str) -> Node | None:
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


def _count_visits(start: _Visit, below: Callable[[_Visit], Iterable[_Visit]], limit: int) -> tuple[int, int]:
    """Count the visits that are reachable, once for each path, and the visits below the largest choice.

    Each visit is computed once. A visit within itself counts 1. Counting stops above the limit, so that it stays cheap
    for the schemas that it is meant to refuse.
    """
    totals: dict[tuple[int, int], int] = {}
    parts: dict[tuple[int, int], list[tuple[int, int]]] = {}
    done: set[tuple[int, int]] = set()
    largest = 0
    stack = [start]  # a loop, because schemas and values may be deeper than Python's stack
    while stack:
        visit = stack[-1]
        key = (id(visit[0]), id(visit[1]))
        if key not in parts:
            found = list(islice(below(visit), 10 * limit + 1))
            if len(parts) > limit or len(found) > 10 * limit:
                choices = any(key in node for node in _walk_subschemas(start[0]) for key in ("anyOf", "oneOf"))
                return limit + 1, limit + 1 if choices else 0
            totals[key] = 1
            parts[key] = [(id(node), id(value)) for node, value in found]
            stack.extend(child for child, child_key in zip(found, parts[key], strict=True) if child_key not in parts)
            continue
        stack.pop()
        if key not in done:
            done.add(key)
            totals[key] = 1 + sum(totals[part] for part in parts[key])
            if "anyOf" in visit[0] or "oneOf" in visit[0]:
                largest = max(largest, totals[key])
    return totals[(id(start[0]), id(start[1]))], largest


def _applied_to_fields(node: Node, value: Node) -> Iterator[_Visit]:
    properties = cast("Node", node.get("properties") or {})
    patterns = _as_subschemas(list(cast("Node", node.get("patternProperties") or {}).values()))
    for_every_field = [*patterns, *(subschema for key in _FIELDS for subschema in _as_subschemas(node.get(key)))]
    for name, item in value.items():
        if isinstance(schema := properties.get(name), dict):
            yield cast("Node", schema), item
        for subschema in for_every_field:
            yield subschema, item


def _applied_to_items(node: Node, value: list[Any]) -> Iterator[_Visit]:
    for key in _ITEMS:
        found = node.get(key)
        if isinstance(found, list):
            listed = cast("list[Any]", found)
            yield from ((schema, item) for schema, item in zip(listed, value, strict=False) if isinstance(schema, dict))
        elif isinstance(found, dict):
            yield from ((cast("Node", found), item) for item in value)


def _as_subschemas(found: Any) -> list[Node]:
    """Return the subschemas that a keyword's value holds; ``true`` and ``false`` cost nothing and are left out."""
    listed = cast("list[Any]", found) if isinstance(found, list) else [found]
    return [cast("Node", subschema) for subschema in listed if isinstance(subschema, dict)]


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


def _walk_subschemas(schema: Any) -> Iterator[Node]:
    waiting: list[Any] = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield cast("Node", node)
            waiting.extend(cast("Node", node).values())
        elif isinstance(node, list):
            waiting.extend(cast("list[Any]", node))


def _find_anchors(schema: Node) -> Iterator[tuple[str, Node]]:
    for node in _walk_subschemas(schema):
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(name := node.get(key), str):
                yield name, node
        if isinstance(name := node.get("$id"), str) and name.startswith("#"):
            yield name[1:], node
