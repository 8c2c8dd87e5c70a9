"""A Markdown extension for the site: tables, the state diagram and help texts that are made from the code.

In a page, ``<!-- generated: NAME -->`` is replaced by what the function for NAME in PARTS returns, so that these parts
cannot differ from the code. ```` ```sh run ```` (a block that the tests execute) is shown as ```` ```sh ````. No plugin
that we found draws the state machine or reads the legal pairs; the API reference is made by mkdocstrings.
"""

from __future__ import annotations

import inspect
import re
import textwrap
import typing
from collections.abc import Callable
from typing import Any

import click
from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor

from holdfast import errors
from holdfast.cli.app import cli
from holdfast.core import decisions, state
from holdfast.core.decide import machine
from holdfast.core.log_counts import LOG_FAMILIES
from holdfast.core.tool import EXECUTORS, PAIR_RULES
from holdfast.runtime.metrics import PROCESS_FAMILIES, STORE_FAMILIES
from holdfast.server.static_files import error_notes

# --- the command line ---


def command_help() -> str:
    """Return the help text of every command, a section each."""
    out: list[str] = []

    def add(command: click.Command, path: str, parent: click.Context | None) -> None:
        settings = {**command.context_settings, "terminal_width": 88, "max_content_width": 88}
        settings["help_option_names"] = ["-h", "--help"]
        ctx = click.Context(command, parent=parent, info_name=path.split()[-1], **settings)
        out.append(f"## `{path}` {{ #{path.replace(' ', '-')} }}\n\n```text\n{command.get_help(ctx)}\n```")
        if isinstance(command, click.Group):
            for name in command.list_commands(ctx):
                inner = command.get_command(ctx, name)
                if inner is not None and not inner.hidden:
                    add(inner, f"{path} {name}", ctx)

    add(cli, "holdfast", None)
    return "\n\n".join(out)


# --- errors ---


def error_classes() -> dict[str, list[type[errors.HoldfastError]]]:
    """Return the classes of holdfast.errors by the kind that they raise."""
    found: dict[str, list[type[errors.HoldfastError]]] = {}
    for name in errors.__all__:
        cls = getattr(errors, name)
        if not inspect.isclass(cls) or cls in (errors.HoldfastError, errors.Refused):
            continue
        if "kind" in vars(cls) or cls in (errors.DeclarationError, errors.Invalid):  # these inherit the root's kind
            found.setdefault(cls.kind, []).append(cls)
    return found


def error_kinds() -> str:
    """Return a section for every error kind: when it occurs, what to do, and the classes that are raised."""
    notes, classes = error_notes(), error_classes()
    if set(notes) != set(errors.KINDS):
        raise ValueError(f"src/holdfast/errors.toml: {sorted(set(notes) ^ set(errors.KINDS))} do not fit errors.KINDS")
    out: list[str] = []
    for kind, meaning in errors.KINDS.items():
        out.append(f"## `{kind}` {{ #{kind} }}\n\n{meaning[0].upper()}{meaning[1:]}.")
        out.append(f"**When it happens.** {notes[kind].when.strip()}\n\n**What to do.** {notes[kind].do.strip()}")
        if kind in classes:
            rows = ["| raised as | meaning | exit code | HTTP |", "|---|---|---|---|"]
            for cls in classes[kind]:
                code, status = str(cls.exit_code), str(cls.http_status)
                if cls is errors.Stale:
                    code, status = "3, or 4 if it expired", "404, 409 or 410"
                doc = inspect.getdoc(cls) or ""
                rows.append(f"| `{cls.__name__}` | {doc.splitlines()[0]} | {code} | {status} |")
            out.append("\n".join(rows))
    return "\n\n".join(out)


def error_tree() -> str:
    """Return the tree of error classes from the docstring of holdfast.errors."""
    tree = inspect.cleandoc(errors.__doc__ or "").split("The tree::", 1)[1].split("A *kind*", 1)[0]
    return f"```text\n{textwrap.dedent(tree).strip()}\n```"


# --- tables and the diagram ---


def legal_matrix() -> str:
    approvals = tuple(dict.fromkeys(approval for _, approval in PAIR_RULES))
    rows = ["| executor | " + " | ".join(f'`approval="{each}"`' for each in approvals) + " |"]
    rows.append("|---|" + "---|" * len(approvals))
    for executor in EXECUTORS:
        cells = [
            f"refused: {PAIR_RULES[executor, each]}" if PAIR_RULES[executor, each] else "legal" for each in approvals
        ]
        rows.append(f"| `{executor}` | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def kinds_table() -> str:
    rows = ["| kind of suspension | decisions that it takes |", "|---|---|"]
    for kind, taken in decisions.ALLOWED_DECISIONS.items():
        links = ", ".join(f"[`{cls.__name__}`][holdfast.{cls.__name__}]" for cls in taken)
        rows.append(f"| `{kind}` | {links} |")
    return "\n".join(rows)


def metrics_tables() -> str:
    tables = [
        ("Metrics of the log", LOG_FAMILIES.values()),
        ("Metrics of the store", STORE_FAMILIES),
        ("Metrics of the process", PROCESS_FAMILIES),
    ]
    rows: list[str] = []
    for title, families in tables:
        rows += ["", f"| {title} | | labels | |", "|---|---|---|---|"]
        for family in families:
            labels = ", ".join(f"`{label}`" for label in family.labels)
            rows.append(f"| `{family.name}` | {family.kind} | {labels} | {family.help} |")
    return "\n".join(rows[1:])


def transition_table() -> str:
    rows = ["| from | by | to |", "|---|---|---|"]
    rows += [f"| {f'`{a}`' if a else '(the model calls)'} | `{by}` | `{b}` |" for a, by, b in machine.TRANSITIONS]
    return "\n".join(rows)


def state_diagram() -> str:
    """Return an SVG of machine.TRANSITIONS.

    `ready` and `done` are bars with one port for each move; the other phases stand between them. `running` stands in
    the middle, next to the phases that it can move to, so that no line crosses a box.
    """
    moves = machine.TRANSITIONS
    phases = [*typing.get_args(state.Phase)]
    between = [phase for phase in phases if phase not in ("ready", "done", "running")]
    near = [phase for phase in between if ("running", phase) in {(a, b) for a, _, b in moves}]
    far = [phase for phase in between if phase not in near]
    column = [*far[: len(far) // 2], *near[: len(near) // 2], "running", *near[len(near) // 2 :], *far[len(far) // 2 :]]
    step, half_w, half_h, mid = 112, 80, 20, 500
    y = {phase: 60 + step * at for at, phase in enumerate(column)}
    height = 60 + step * len(column) + 10
    top, low = y[column[0]] + 40, y[column[-1]] - 40
    ready_x, done_x = (110, 190), (800, 880)

    def ports(picked: list[tuple[Any, str, Any]], other: Callable[[Any], float]) -> dict[Any, float]:
        ordered = sorted(picked, key=other)
        gap = (low - top) / (len(ordered) + 1)
        return {move: top + gap * (at + 1) for at, move in enumerate(ordered)}

    left = [m for m in moves if (m[0] == "ready" and m[2] in y) or (m[2] == "ready" and m[0] in y)]
    right = [m for m in moves if m[0] in y and m[2] == "done"]
    left_port = ports(left, lambda m: y[m[2]] - 1 if m[0] == "ready" else y[m[0]] + 1)
    right_port = ports(right, lambda m: y[m[0]])
    out: list[str] = []

    def move(each: tuple[Any, str, Any], path: str, x: float, at: float, anchor: str = "start") -> None:
        source, by, to = each
        kind = "move resolved" if by == "CallResolved" else "move"
        out.append(
            f'<g class="{kind}" data-from="{source or ""}" data-by="{by}" data-to="{to}">'
            f"<title>{source or 'the model calls'}: {by}, then {to}</title>"
            f'<path d="{path}" marker-end="url(#tip)"/>'
            f'<text x="{x:g}" y="{at:g}" text-anchor="{anchor}">{by}</text></g>'
        )

    for each in moves:
        source, _, to = each
        if source is None:
            centre = (top + low) / 2
            move(each, f"M 8 {centre:g} H {ready_x[0] - 3}", 4, centre - 8)
        elif each in left_port:
            port, inner = left_port[each], mid - half_w
            level = y[to] - 9 if source == "ready" else y[source] + 9
            bend = (ready_x[1] + 60, ready_x[1] + 40)
            if to == "running":
                level = y[to]
            if source == "ready":
                curve = f"C {bend[0]} {port:g} {bend[1]} {level:g} {inner - 150} {level:g}"
                path = f"M {ready_x[1]} {port:g} {curve} H {inner - 3}"
                move(each, path, inner - 12, level - 5, "end")
            else:
                curve = f"C {bend[1]} {level:g} {bend[0]} {port:g} {ready_x[1] + 3} {port:g}"
                path = f"M {inner} {level:g} H {inner - 150} {curve}"
                move(each, path, inner - 12, level + 14, "end")
        elif each in right_port:
            port, outer, level = right_port[each], mid + half_w, y[source]
            curve = f"C {done_x[0] - 50} {level:g} {done_x[0] - 60} {port:g} {done_x[0] - 3} {port:g}"
            path = f"M {outer} {level:g} H {outer + 100} {curve}"
            move(each, path, outer + 12, level - 5)
        elif source == to:
            x, base = mid + 40, y[source] + half_h
            loop = f"c 0 34 {half_w - 8} 34 {half_w - 8} 2 V {y[source] + 12} H {mid + half_w + 3}"
            move(each, f"M {x} {base} {loop}", x + 78, base + 18)
        elif source == "running":
            up = y[to] < y[source]
            begin, end = (y[source] - half_h, y[to] + half_h + 3) if up else (y[source] + half_h, y[to] - half_h - 3)
            move(each, f"M {mid} {begin} V {end}", mid - 7, (begin + end) / 2 + 4, "end")
        else:
            base = height - 22
            begin, end = sum(ready_x) / 2, sum(done_x) / 2
            path = f"M {begin:g} {low:g} V {base - 14} q 0 14 14 14 H {end - 14:g} q 14 0 14 -14 V {low + 3:g}"
            move(each, path, mid, base - 6, "middle")

    def box(phase: str, x1: float, y1: float, x2: float, y2: float) -> None:
        out.append(
            f'<g class="phase" data-phase="{phase}">'
            f'<rect x="{x1:g}" y="{y1:g}" width="{x2 - x1:g}" height="{y2 - y1:g}" rx="8"/>'
            f'<text x="{(x1 + x2) / 2:g}" y="{(y1 + y2) / 2 + 5:g}">{phase}</text></g>'
        )

    box("ready", ready_x[0], top, ready_x[1], low)
    box("done", done_x[0], top, done_x[1], low)
    for phase, at in y.items():
        box(phase, mid - half_w, at - half_h, mid + half_w, at + half_h)
    assert {*y, "ready", "done"} == set(phases)
    assert sum('class="move' in line for line in out) == len(moves)
    tip = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="tip" d="M 0 0 L 8 4 L 0 8 z"/></marker></defs>'
    )
    label = "The phases of a call and the events that move it"
    return f'<svg class="states" viewBox="0 0 900 {height}" role="img" aria-label="{label}">{tip}{"".join(out)}</svg>'


# --- the extension ---

PARTS: dict[str, Callable[[], str]] = {
    "command-help": command_help,
    "error-kinds": error_kinds,
    "error-tree": error_tree,
    "kinds": kinds_table,
    "legal-matrix": legal_matrix,
    "metrics": metrics_tables,
    "state-diagram": state_diagram,
    "transitions": transition_table,
}


class FillIn(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        text = re.sub(r"(?m)^<!-- generated: ([\w-]+) -->$", lambda found: PARTS[found[1]](), "\n".join(lines))
        return re.sub(r"(?m)^(`{3,})sh run$", r"\1sh", text).split("\n")


class GeneratedParts(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(FillIn(md), "holdfast-generated-parts", 100)  # before code blocks are read


def makeExtension(**options: Any) -> GeneratedParts:
    return GeneratedParts(**options)
