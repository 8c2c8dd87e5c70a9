"""A page for each kind of error, at ``/errors/KIND/``: where the ``type`` of a problem document leads."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from assent import errors
from assent.errors import KINDS
from assent.server.page import sheet
from assent.server.problems import HTTPProblem, page_of


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What there is to say about a kind beside its meaning, in Markdown."""

    when: str
    do: str


@cache
def notes() -> dict[str, Note]:
    """By kind; read when somebody asks, and once."""
    return msgspec.toml.decode(Path(errors.__file__).with_suffix(".toml").read_bytes(), type=dict[str, Note])


def page(scope: Mapping[str, Any], names: list[str]) -> bytes:
    """The page about a kind, or the list of all; ``names`` are the pieces of the path below ``/errors``."""
    match names:
        case [] | [""]:
            rows = [f'<li><a href="{page_of(scope, kind)}">{kind}</a>: {said}' for kind, said in KINDS.items()]
            return sheet("Errors", "\n".join(["<ul>", *rows, "</ul>"]))
        case [kind] | [kind, ""] if kind in KINDS:
            note, meaning = notes()[kind], KINDS[kind]
            said = [
                f"<p>{meaning[0].upper()}{meaning[1:]}.",
                f"<h2>When it comes</h2>\n<p>{_html(note.when)}",
                f"<h2>What to do</h2>\n<p>{_html(note.do)}",
                f'<p><a href="{page_of(scope)}">All kinds of errors</a>\n',
            ]
            return sheet(kind, "\n".join(said))
        case _:
            raise HTTPProblem(404, "not_found", f"there is no kind of error {'/'.join(names).rstrip('/')[:200]!r}")


def _html(text: str) -> str:
    """Code and words; what is linked in the documentation is not here."""
    plain = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", html.escape(text, quote=False))
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", plain)
