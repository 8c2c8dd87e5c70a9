"""Prometheus for tests: a strict parser of its text format, and the names and labels that a query uses."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r"[a-zA-Z_][a-zA-Z0-9_]*"
_SAMPLE = re.compile(rf"({NAME})(?:\{{(.*)\}})? (\S+)")
_PAIR = re.compile(rf'({LABEL})="((?:[^"\\\n]|\\["\\n])*)"(?:,|$)')
_VALUE = re.compile(r"[+-]?(?:Inf|[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)|NaN")
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}


class Metric(NamedTuple):
    kind: str
    help: str
    samples: dict[tuple[str, tuple[tuple[str, str], ...]], float]
    """(name, sorted labels) -> value."""


def parse_exposition(text: str) -> dict[str, Metric]:
    """Return the metrics of a scrape by name; fail on anything that the format forbids.

    Checked, too: HELP and TYPE come once and before the samples of the same metric, all samples of a metric are
    together, no sample is repeated, counters are not negative, and buckets are cumulative and end with +Inf.
    """
    assert text.endswith("\n")
    assert "\r" not in text
    metrics: dict[str, Metric] = {}
    helped = typed = ""
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            helped, _, about = line.removeprefix("# HELP ").partition(" ")
            assert re.fullmatch(NAME, helped), line
            assert about, line
            assert helped not in metrics, line
            assert not re.search(r"\\[^\\n]", about), line
            metrics[helped] = Metric("", about, {})
        elif line.startswith("# TYPE "):
            typed, kind = line.removeprefix("# TYPE ").split(" ")
            assert typed == helped, line
            assert kind in SUFFIXES, line
            assert not metrics[typed].kind, line
            metrics[typed] = metrics[typed]._replace(kind=kind)
        else:
            match = _SAMPLE.fullmatch(line)
            assert match is not None, f"not a sample: {line!r}"
            name, labels, value = match.groups()
            pairs = _PAIR.findall(labels or "")
            assert "".join(f'{key}="{content}",' for key, content in pairs).rstrip(",") == (labels or ""), line
            assert len({key for key, _ in pairs}) == len(pairs), f"a label twice: {line!r}"
            assert _VALUE.fullmatch(value), line
            family = metrics[typed]
            assert name in [typed + suffix for suffix in SUFFIXES[family.kind]], f"out of place: {line!r}"
            key = name, tuple(sorted(pairs))
            assert key not in family.samples, f"twice: {line!r}"
            family.samples[key] = float(value)
            assert family.kind == "gauge" or float(value) >= 0, line
    for name, metric in metrics.items():
        assert metric.kind, f"{name} has no TYPE"
        assert metric.kind != "counter" or name.endswith("_total"), name
        if metric.kind == "histogram":
            _check_buckets(name, metric)
    return metrics


def _check_buckets(name: str, metric: Metric) -> None:
    series: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
    for (sample, labels), value in metric.samples.items():
        if sample == f"{name}_bucket":
            bound = float(dict(labels)["le"])
            series.setdefault(tuple(pair for pair in labels if pair[0] != "le"), []).append((bound, value))
    for labels, buckets in series.items():
        assert buckets == sorted(buckets), name
        assert [count for _, count in buckets] == sorted(count for _, count in buckets), name
        assert buckets[-1] == (math.inf, metric.samples[f"{name}_count", labels])
        assert (f"{name}_sum", labels) in metric.samples


class Use(NamedTuple):
    """The metrics of a query, each with the labels that it is selected by, and the labels that it groups by."""

    selected: list[tuple[str, frozenset[str]]]
    grouped: frozenset[str]


_TOKEN = re.compile(rf'\s*(?:(?P<word>{NAME})|(?P<text>"[^"]*")|(?P<mark>=~|!~|!=|==|[-+*/%^(){{}}\[\],=<>.0-9]))')
GROUPING = ("by", "without", "on", "ignoring", "group_left", "group_right")
OPERATORS = ("and", "or", "unless", "bool", "offset")


def parse_query(query: str) -> Use:
    """Return the metrics and labels of a PromQL expression; fail on a token that is not PromQL."""
    tokens: list[tuple[str, str]] = []
    place = 0
    query = re.sub(r"\[[0-9]+[smhd]\]", "", query).strip()  # ranges
    while place < len(query):
        match = _TOKEN.match(query, place)
        assert match is not None, f"not PromQL at {query[place:]!r}"
        tokens.append((match.lastgroup or "", match[match.lastgroup or 0]))
        place = match.end()
    selected: list[tuple[str, frozenset[str]]] = []
    grouped: set[str] = set()
    at = 0
    while at < len(tokens):
        kind, text = tokens[at]
        following = tokens[at + 1][1] if at + 1 < len(tokens) else ""
        if kind == "word" and text in GROUPING:
            assert following == "(", query
            end = next(n for n in range(at, len(tokens)) if tokens[n][1] == ")")
            grouped |= {word for kind, word in tokens[at + 2 : end] if kind == "word"}
            at = end
        elif kind == "word" and text not in OPERATORS and following not in ("(", *GROUPING):
            labels: set[str] = set()
            if following == "{":
                end = next(n for n in range(at, len(tokens)) if tokens[n][1] == "}")
                inside = tokens[at + 2 : end]
                labels = {word for kind, word in inside if kind == "word"}
                assert len(labels) == sum(kind == "text" for kind, _ in inside), query
                at = end
            selected.append((text, frozenset(labels)))
        at += 1
    assert query.count("(") == query.count(")"), query
    assert selected, query
    return Use(selected, frozenset(grouped))
