#!/usr/bin/env python3
"""``make bench``: the cost of Holdfast as ratios to minimal baselines, all from one run.

Each measure alternates with its baseline, round by round, so that other load on the machine slows both. A ratio is the
median of the rounds' ratios, a time the median of the rounds, and "quietest" the same over each side's fastest fifth. A
goal is met only if both values meet it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import platform
import sys
import time
from datetime import UTC, datetime

import apsw
import measures
import models
import page
import postgres
import server
import workspace

ALL = {"sqlite": (*measures.ALL, *models.ALL, *server.ALL, *page.ALL, *workspace.ALL), "postgres": postgres.ALL}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it works, not how fast")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a goal is missed")
    parser.add_argument("--store", choices=tuple(ALL), default="sqlite", help="what is measured of it, and on it")
    known = "; ".join(f"{store}: {' '.join(each.__name__ for each in those)}" for store, those in ALL.items())
    parser.add_argument("only", nargs="*", help=f"of {known}")
    options = parser.parse_args()
    those = ALL[options.store]
    if unknown := set(options.only) - {each.__name__ for each in those}:
        parser.error(f"no such measure: {', '.join(sorted(unknown))}")
    logging.basicConfig(level=logging.ERROR)
    size = measures.QUICK if options.quick else measures.FULL
    chosen = [each for each in those if not options.only or each.__name__ in options.only]
    for part in (models, server, page, workspace, postgres):
        if (lacking := part.missing()) and (skipped := [each for each in chosen if each in part.ALL]):
            chosen = [each for each in chosen if each not in skipped]
            print(f"skipped: {' '.join(each.__name__ for each in skipped)}: {lacking}", file=sys.stderr)
    rows: list[measures.Row] = []
    began = time.perf_counter()
    for n, each in enumerate(chosen, 1):
        rows += asyncio.run(each(size, progress(f"[{n}/{len(chosen)}] {each.__name__}")))
    clear()
    took = time.perf_counter() - began
    if options.json:
        print(json.dumps(as_json(rows, options.quick, took), indent=2))
    else:
        print(table(rows))
        print(f"\n{about()}; {took:.0f} s" + ("; --quick: too short to mean anything" if options.quick else ""))
    return 1 if options.strict and not all(row.holds for row in rows) else 0


def progress(what: str) -> measures.Progress:
    def show(detail: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{what}: {detail}", end="", file=sys.stderr, flush=True)
        elif show_once not in seen:
            seen.add(show_once)
            print(what, file=sys.stderr, flush=True)

    seen: set[object] = set()
    show_once = object()
    return show


def clear() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def about() -> str:
    with open("/proc/loadavg") if os.path.exists("/proc/loadavg") else open(os.devnull) as file:
        load = file.read().split(" ")[0] or "?"
    return (
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {os.cpu_count()} cores, load {load}, {platform.machine()}, "
        f"Python {platform.python_version()}, SQLite {apsw.sqlite_lib_version()}"
    )


def table(rows: list[measures.Row]) -> str:
    cells = [("measure", "goal", "measured", "quietest", "holds")]
    for row in rows:
        best = "" if row.best is None else f"{row.best:.2f}"
        holds = "" if row.limit is None else "yes" if row.holds else "NO"
        cells.append((row.name, row.goal, row.measured, best, holds))
    widths = [max(len(line[n]) for line in cells) for n in range(5)]
    lines = [f"| {' | '.join(map(str.ljust, line, widths))} |" for line in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def as_json(rows: list[measures.Row], quick: bool, took: float) -> dict[str, object]:
    return {
        "machine": about(),
        "quick": quick,
        "seconds": round(took, 1),
        "measures": [
            {
                "name": row.name,
                "goal": row.goal,
                "limit": row.limit,
                "value": row.value,
                "quietest": row.best,
                "measured": row.measured,
                "holds": row.holds,
            }
            for row in rows
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
