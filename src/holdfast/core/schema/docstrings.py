"""Docstring parsing: the description and the parameter descriptions, in Google, NumPy or Sphinx style.

Our own parser instead of griffe's, because griffe only finds a section after a blank line: it would lose parameters
that models are sent today and that approvals are bound to (they are part of a tool's fingerprint).
"""

from __future__ import annotations

import re
from inspect import cleandoc

_SECTIONS = (
    "args|arguments|parameters|params|other parameters|keyword args|keyword arguments|attributes|returns?"
    "|yields?|raises|warns|examples?|notes?|references|see also|warnings?|todo"
)
_PARAMETERS = frozenset(
    {"args", "arguments", "parameters", "params", "other parameters", "keyword args", "keyword arguments"}
)
_GOOGLE = re.compile(rf"({_SECTIONS})\s*:\s*", re.IGNORECASE)
_NUMPY = re.compile(rf"({_SECTIONS})\s*", re.IGNORECASE)
_RULE = re.compile(r"-{3,}\s*")
_GOOGLE_ENTRY = re.compile(r"\*{0,2}(\w+)\s*(?:\(.*?\))?\s*:(?:\s+(.*)|\s*)$")
_NUMPY_ENTRY = re.compile(r"(\*{0,2}\w+(?:\s*,\s*\*{0,2}\w+)*)\s*(?::.*)?$")
_SPHINX = re.compile(r":(\w+)(?:\s+([^:]*))?:\s*(.*)$")
_SPHINX_PARAMETERS = frozenset({"param", "parameter", "arg", "argument", "key", "keyword"})
_SPHINX_FIELDS = _SPHINX_PARAMETERS | {
    "type", "return", "returns", "rtype", "raise", "raises", "except", "yield", "yields", "var", "ivar"
}  # fmt: skip


def parse_docstring(text: str | None) -> tuple[str, dict[str, str]]:
    """Return the description (the text before the first section) and the description of each parameter."""
    description: list[str] = []
    parameter_lines: dict[str, list[str]] = {}
    into: list[str] | None = description
    """The list that receives continuation lines; None: they are ignored."""
    section, numpy = "", False
    base = 0
    """Indentation of the entries in a Google section."""
    lines = cleandoc(text).splitlines() if text else []
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        stripped = line.strip()
        indent = len(line) - len(line.lstrip())
        below = lines[number] if number < len(lines) else ""
        if not indent and (found := _NUMPY.fullmatch(line)) and _RULE.fullmatch(below):
            section, numpy, into = found[1].lower(), True, None
            number += 1
        elif not indent and (found := _GOOGLE.fullmatch(line)):
            section, numpy, into, base = found[1].lower(), False, None, 0
        elif not indent and (found := _SPHINX.match(line)) and found[1] in _SPHINX_FIELDS:
            section, into = ":", None
            if found[1] in _SPHINX_PARAMETERS and found[2]:
                into = parameter_lines.setdefault(found[2].split()[-1].lstrip("*"), [])
                into.append(found[3].strip())
        elif not section:
            description.append(line)
        elif not stripped:
            continue
        elif section in _PARAMETERS and numpy and not indent:
            found = _NUMPY_ENTRY.match(stripped)
            into = []
            for name in found[1].split(",") if found else ():
                parameter_lines[name.strip().lstrip("*")] = into
        elif section in _PARAMETERS and not numpy and indent and indent <= (base or indent):
            base = indent
            if found := _GOOGLE_ENTRY.match(stripped):
                into = parameter_lines.setdefault(found[1], [])
                into.append(found[2] or "")
            elif into is not None:
                into.append(stripped)
        elif into is not None:
            into.append(stripped)
    parameters = {name: " ".join(part for part in parts if part) for name, parts in parameter_lines.items()}
    return "\n".join(description).strip(), {name: text for name, text in parameters.items() if text}
