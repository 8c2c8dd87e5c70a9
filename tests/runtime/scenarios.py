"""Random scenarios for a ``World``: the calls of the model, the actions of people, the faults, and when they happen."""

import os

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from worlds import NAMES

EXAMPLES = float(os.environ.get("HOLDFAST_EXAMPLES", "1"))
"""Factor on the number of examples: ``HOLDFAST_EXAMPLES=100`` for an overnight run."""


def profile(examples, **options):
    """Return settings with the same examples on every run, so that failures repeat; ``EXAMPLES`` adds more."""
    return settings(
        max_examples=max(1, int(examples * EXAMPLES)),
        deadline=None,
        derandomize=EXAMPLES == 1,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
        **options,
    )


def hunting(examples):
    """Return settings for mutants: find a failing example and do not shrink it."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
    )


process = st.sampled_from([0, 1])
number = st.integers(0, 7)
pause = st.sampled_from([0, 0, 0.001, 0.003, 0.006, 0.02, None])
"""Seconds until the next step; None: until all conversations are at rest."""

call = st.tuples(st.sampled_from(NAMES), number)
step = st.lists(call, min_size=1, max_size=4)
turn = st.lists(step, max_size=3)
script = st.lists(turn, min_size=1, max_size=3)


def verb(name, *args):
    return st.tuples(st.just(name), *args, pause)


send = verb(
    "send", process, st.sampled_from(["refuse", "queue", "interrupt"]), st.sampled_from([None, None, None, "manual"])
)
decide = verb("decide", process, number, number)
steps = st.lists(
    st.one_of(
        send,
        decide,
        decide,
        verb("submit", process, number),
        verb("race", number, number),
        verb("cancel", process),
        verb("jump", st.sampled_from([1.0, 6.0, 40.0, 4000.0])),
        verb("kill", process, st.integers(1, 6), st.booleans()),
        verb("kill", process, st.integers(1, 3), st.booleans()),
        verb("stall", process),
        verb("restart", process),
        verb("deploy", process),
        verb("drift", st.none()),
        verb("forget", st.booleans()),
        verb("revoke", process),
        verb("look", process),
        verb("attach", process, st.booleans()),
    ),
    max_size=12,
)

scenario = st.fixed_dictionaries(
    {
        "script": script,
        "jitter": st.lists(st.integers(0, 3), min_size=1, max_size=5),
        "second": st.booleans(),
        "parallel": st.sampled_from([64, 64, 2, 1]),
        "steps": st.builds(lambda first, more: [first, *more], send, steps),
        "drain": st.sampled_from([None, 0, 1, 4, 5]),
    }
)


def _with_copy(plot, at, step):
    return {**plot, "steps": [*plot["steps"][:at], step, *plot["steps"][at:]]}


importing = st.builds(_with_copy, scenario, st.integers(1, 13), verb("copy", process, st.booleans()))
"""A scenario in which the conversation is exported at some step and imported under another name."""

RICH = {
    "script": [
        [
            [("auto", 1), ("once", 2), ("asked", 2), ("gated", 1)],
            [("planned_once", 1), ("policy", 1), ("human", 0), ("gated_client", 0)],
        ],
        [[("known", 1), ("asks", 1), ("manual", 0), ("nope", 0)], [("halts", 1), ("gated_once", 1)]],
    ],
    "jitter": [0, 1],
    "second": True,
    "parallel": 2,
    "steps": [
        ("send", 0, "refuse", None, 0.003),
        ("send", 1, "queue", None, None),
        ("submit", 1, 0, 0.003),
        ("drift", None, None),
        ("submit", 0, 2, None),
        ("submit", 1, 0, None),
        ("submit", 0, 1, 0.002),
        ("submit", 0, 0, None),
        ("cancel", 1, 0.001),
        ("send", 0, "interrupt", "manual", 0.002),
        ("jump", 4000.0, None),
    ],
    "drain": 0,
}
"""A scenario with most tools and steps, for kills at every append."""


def _classics():
    """Yield scenarios with kills and take-overs at critical moments, which find most faults soon."""
    once = {**RICH, "script": [[[("gated", 1)]]], "jitter": [0], "second": False, "parallel": 64, "drain": None}
    go = ("send", 0, "refuse", None, None)
    yield {**once, "steps": [go, ("submit", 0, 0, 0), ("decide", 0, 0, 0, 0)]}  # two decisions
    yield {**once, "steps": [go, ("decide", 0, 0, 2, None), go, ("revoke", 0, None), go]}  # a grant and its revocation
    yield {**once, "steps": [go, ("decide", 0, 0, 5, None)]}  # a denial
    yield {**once, "steps": [go, ("deploy", 0, None), ("decide", 0, 0, 0, None)]}  # redefined before the approval
    yield {**once, "steps": [go, ("decide", 0, 0, 2, None), ("deploy", 0, None), go]}  # redefined after the grant
    planned = {**once, "script": [[[("planned_once", 1)]]]}
    yield {**planned, "steps": [go, ("decide", 0, 0, 4, None)]}  # an edit whose plan the approver did not see
    again = [("kill", 0, 3, True, 0), ("decide", 0, 0, 0, None), ("decide", 0, 0, 0, None)]
    yield {**once, "script": [[[("planned", 1)]]], "steps": [go, *again]}  # interrupted, and repeated
    for writes in range(2, 26, 3):
        yield {**RICH, "steps": [("kill", 0, writes, True, 0), *RICH["steps"]]}
    first, second, *more = RICH["steps"]
    for moment in (0.001, 0.004, 0.005, 0.006, 0.008):
        for jitter in ([0, 0, 1], [2, 0, 3]):
            steps = [(*first[:-1], moment), ("stall", 0, 0), second, ("stall", 1, moment), *more]
            yield {**RICH, "steps": steps, "jitter": jitter, "parallel": 64}


CLASSICS = list(_classics())


def _imports():
    """Yield scenarios with imports at critical moments: a call waits, is approved, runs, or is for a client."""
    once = {**RICH, "jitter": [0], "second": False, "parallel": 64, "drain": None}
    go = ("send", 0, "refuse", None, None)
    for trusted in (True, False):
        copy = ("copy", 0, trusted, None)
        for name in ("auto", "gated", "client", "gated_client", "planned_once", "asked", "human"):
            for decide in (None, 0):
                plot = {**once, "script": [[[(name, 3)]]], "drain": decide}
                yield {**plot, "steps": [go, copy]}
                yield {**plot, "steps": [(*go[:-1], 0.006), copy]}
                yield {**plot, "steps": [go, ("decide", 0, 0, 0, 0.004), copy]}


IMPORTS = list(_imports())
