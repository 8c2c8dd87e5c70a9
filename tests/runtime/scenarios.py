"""Random scenarios for a ``World``: the calls of the model, the actions of people, the faults, and when they happen."""

import os

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from worlds import AUDITED, GRACED, NAMES, PEOPLE

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
number = st.integers(0, 8)
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
        verb("ask", process),
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

label_steps = st.lists(
    st.one_of(
        send,
        decide,
        verb("rename", process),
        verb("rename", process),
        verb("archive", process, st.booleans()),
        verb("find", process),
        verb("cancel", process),
        verb("kill", process, st.integers(1, 4), st.booleans()),
        verb("stall", process),
        verb("restart", process),
        verb("forget", st.booleans()),
    ),
    max_size=12,
)
labelled = st.fixed_dictionaries(
    {
        "script": script,
        "jitter": st.lists(st.integers(0, 3), min_size=1, max_size=3),
        "second": st.booleans(),
        "parallel": st.just(64),
        "steps": st.builds(lambda first, more: [first, *more], send, label_steps),
        "drain": st.sampled_from([None, 0, 1]),
    }
)
"""A scenario in which the conversation is renamed, archived and searched."""

person = st.sampled_from(sorted(PEOPLE))
deputy_steps = st.lists(
    st.one_of(
        verb("request", process, person),
        verb("name", process, person, person, st.sampled_from([30.0, 30.0, 5000.0])),
        verb("name", process, person, person, st.just(5000.0)),
        verb("end_deputy", process, number, person),
        verb("decide_as", process, number, st.sampled_from([0, 0, 0, 1, 5, 8]), person),
        verb("decide_as", process, st.just(0), st.just(0), person),
        verb("decide_as", process, st.just(0), st.just(0), person),
        verb("jump", st.sampled_from([1.0, 40.0, 2000.0])),
        verb("drift", st.none()),
        verb("kill", process, st.integers(1, 3), st.booleans()),
        verb("restart", process),
        verb("stall", process),
    ),
    max_size=14,
)
deputised = st.fixed_dictionaries(
    {
        "script": st.lists(
            st.lists(st.lists(st.tuples(st.sampled_from(AUDITED), st.integers(0, 4)), min_size=1, max_size=2)),
            min_size=1,
            max_size=2,
        ),
        "jitter": st.lists(st.integers(0, 3), min_size=1, max_size=3),
        "second": st.booleans(),
        "parallel": st.just(64),
        "rules": st.booleans(),
        "steps": st.builds(
            lambda first, deputies, more: [first, *deputies, *more],
            verb("request", process, person),
            st.lists(verb("name", process, person, person, st.just(5000.0)), max_size=3),
            deputy_steps,
        ),
        "drain": st.none(),
    }
)
"""A scenario in which people request calls that only some of them may decide about, and name deputies."""

graced_steps = st.lists(
    st.one_of(
        decide,
        verb("decide", process, st.just(0), st.sampled_from([0, 2, 3])),
        verb("take_back", process, number),
        verb("take_back", process, st.just(0)),
        verb("jump", st.sampled_from([1.0, 4.0, 6.0, 40.0])),
        verb("cancel", process),
        verb("revoke", process),
        verb("drift", st.none()),
        verb("deploy", process),
        verb("attach", process, st.booleans()),
        verb("ask", process),
        verb("kill", process, st.integers(1, 4), st.booleans()),
        verb("stall", process),
        verb("restart", process),
        verb("forget", st.booleans()),
        send,
    ),
    max_size=14,
)
graced = st.fixed_dictionaries(
    {
        "script": st.lists(
            st.lists(
                st.lists(st.tuples(st.sampled_from([*GRACED, "graced", "gated"]), number), min_size=1, max_size=3),
                max_size=2,
            ),
            min_size=1,
            max_size=2,
        ),
        "jitter": st.lists(st.integers(0, 3), min_size=1, max_size=3),
        "second": st.booleans(),
        "parallel": st.just(64),
        "rules": st.booleans(),
        "steps": st.builds(lambda first, more: [first, *more], send, graced_steps),
        "drain": st.sampled_from([None, 0, 2, 3]),
    }
)
"""A scenario in which approvals are taken back inside their grace windows, or too late."""

RICH = {
    "script": [
        [
            [("auto", 1), ("once", 2), ("asked", 2), ("gated", 1)],
            [("planned_once", 1), ("policy", 1), ("human", 0), ("gated_client", 0)],
        ],
        [
            [("known", 1), ("asks", 1), ("manual", 0), ("nope", 0), ("continues_once", 0)],
            [("halts", 1), ("gated_once", 1)],
        ],
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
    two = {**once, "script": [[[("paired", 1)]]]}
    vote = ("decide", 0, 0, 0, None)
    yield {**two, "steps": [go, vote, vote]}  # two approvers
    yield {**two, "steps": [go, vote, ("drift", None, None), vote, vote, vote]}  # a plan that changed after the votes
    yield {**two, "steps": [go, ("jump", 40.0, None), ("jump", 1.0, None), vote, ("decide", 0, 0, 8, None), vote]}
    yield {**once, "steps": [go, ("deploy", 0, None), ("decide", 0, 0, 0, None)]}  # redefined before the approval
    yield {**once, "steps": [go, ("decide", 0, 0, 2, None), ("deploy", 0, None), go]}  # redefined after the grant
    planned = {**once, "script": [[[("planned_once", 1)]]]}
    yield {**planned, "steps": [go, ("decide", 0, 0, 4, None)]}  # an edit whose plan the approver did not see
    again = [("kill", 0, 3, True, 0), ("decide", 0, 0, 0, None), ("decide", 0, 0, 0, None)]
    yield {**once, "script": [[[("planned", 1)]]], "steps": [go, *again]}  # interrupted, and repeated
    answer = ("decide", 0, 0, 0, None)
    asks = {**once, "script": [[[("continues", 1), ("continues_once", 1)]]], "drain": 0}
    yield {**asks, "steps": [go]}  # two questions each
    for writes, after in ((1, True), (2, False), (2, True), (3, False), (3, True), (4, False)):
        for name in ("continues", "continues_once"):  # killed between the answer and the next question
            killed = [go, ("kill", 0, writes, after, 0), answer]
            yield {**asks, "script": [[[(name, 1)]]], "steps": killed}
    gated = {**once, "script": [[[("gated_continues", 1)]]], "drain": 0}
    yield {**gated, "steps": [go, answer, ("deploy", 0, None), answer, answer]}  # redefined while it asks
    granted = [go, ("decide", 0, 0, 2, None), answer, answer, go]
    yield {**gated, "steps": [*granted, ("revoke", 0, None), answer, answer]}  # revoked while it asks
    ask = [("ask", 0, 0.002), ("ask", 1, 0)]
    yield {**once, "steps": [go, *ask, ("decide", 0, 0, 0, None)]}  # decided while an aside is answered
    yield {**once, "steps": [go, *ask, ("cancel", 0, None)]}
    yield {**once, "steps": [go, *ask, ("decide", 0, 0, 6, None)]}  # a denial that stops the turn
    yield {**once, "script": [[[("gated", 1), ("halts", 1)]]], "steps": [(*go[:-1], 0.006), *ask]}
    for writes in range(1, 6):
        for after in (False, True):
            yield {**once, "steps": [go, ("kill", 0, writes, after, 0), *ask, ("decide", 0, 0, 0, None)]}
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
        for name in (
            "auto",
            "gated",
            "client",
            "gated_client",
            "planned_once",
            "asked",
            "human",
            "continues",
            "gated_continues",
        ):
            for decide in (None, 0):
                plot = {**once, "script": [[[(name, 3)]]], "drain": decide}
                yield {**plot, "steps": [go, copy]}
                yield {**plot, "steps": [(*go[:-1], 0.006), copy]}
                yield {**plot, "steps": [go, ("decide", 0, 0, 0, 0.004), copy]}


IMPORTS = list(_imports())


def _deputies():
    """Yield scenarios in which each law of deputies matters."""

    def decide_as(person, which=0, process=0, decision=0):
        return ("decide_as", process, which, decision, person, None)

    def name(person, deputy, seconds=5000.0):
        return ("name", 0, person, deputy, seconds, None)

    go = ("request", 0, "dan", None)
    base = {**RICH, "jitter": [0], "second": True, "parallel": 64, "drain": None}
    for rules in (False, True):
        one = {**base, "script": [[[("audited", 1)]]], "rules": rules}
        two = {**base, "script": [[[("audited_pair", 1)]]], "rules": rules}
        bob = decide_as("bob")
        yield {**one, "steps": [go, bob, name("ada", "bob"), bob]}
        yield {**one, "steps": [go, name("ada", "bob", 30.0), ("jump", 40.0, None), bob]}  # lapsed
        for process in (0, 1):  # ended there or in the other process, by one of the two
            ended = ("end_deputy", process, 0, "bob" if process else "ada", None)
            yield {**two, "steps": [go, name("ada", "bob"), name("cleo", "bob"), bob, ended, bob]}
            yield {**two, "steps": [go, name("ada", "bob"), decide_as("cleo"), ended, bob]}
            yield {**one, "steps": [go, bob, name("ada", "bob"), ended, bob]}
        refused = ("end_deputy", 0, 0, "dan", None)
        yield {**one, "steps": [go, name("ada", "bob"), refused, bob]}  # not one of the two
        yield {**one, "steps": [go, name("dan", "bob"), bob]}  # represents a person without rights
        yield {**one, "steps": [go, name("ada", "bob"), name("bob", "cleo"), name("bob", "dan"), decide_as("dan")]}
        mine = ("request", 0, "ada", None)
        yield {**one, "steps": [mine, decide_as("ada"), name("ada", "bob"), bob]}  # the requester's deputy
        yield {**one, "steps": [mine, name("cleo", "ada"), decide_as("ada")]}  # the requester is a deputy
        yield {**one, "steps": [("request", 0, "bob", None), name("ada", "bob"), bob, decide_as("cleo")]}
        yield {**two, "steps": [go, name("ada", "bob"), bob, decide_as("ada"), decide_as("cleo")]}  # both vote
        yield {**two, "steps": [go, name("ada", "bob"), decide_as("ada"), bob, decide_as("cleo")]}
        yield {**two, "steps": [go, name("ada", "bob"), name("cleo", "bob"), bob, bob, decide_as("cleo")]}
        yield {**two, "steps": [go, name("ada", "bob"), name("ada", "cleo"), bob, decide_as("cleo")]}
        yield {**two, "steps": [go, name("ada", "bob"), name("cleo", "ada"), decide_as("ada"), bob]}
        for remember in (2, 3):  # the person who had it remembered, or whose deputy had, is the next requester
            yield {**one, "steps": [go, decide_as("ada", decision=remember), mine]}
            yield {**one, "steps": [go, name("ada", "bob"), decide_as("bob", decision=remember), mine]}


DEPUTISED = list(_deputies())


def _labels():
    """Yield scenarios with new titles and archives at critical moments: before, during and after a wait."""
    once = {**RICH, "jitter": [0], "second": False, "parallel": 64, "drain": None}
    go = ("send", 0, "queue", None, None)
    rename, archive = ("rename", 0, None), ("archive", 0, True, None)
    for name in ("auto", "gated"):
        one = {**once, "script": [[[(name, 1)]]]}
        yield {**one, "steps": [go, rename]}
        yield {**one, "steps": [go, archive]}
        yield {**one, "steps": [go, rename, archive, go]}
        yield {**one, "steps": [go, archive, ("archive", 1, False, None), ("rename", 1, None)]}
        yield {**one, "steps": [go, ("find", 0, None), rename, ("find", 1, None), ("kill", 0, 1, True, None), go]}


LABELLED = list(_labels())


def _graced():
    """Yield scenarios in which each law of grace windows matters."""
    go, approve = ("send", 0, "queue", None, None), ("decide", 0, 0, 0, None)
    undo, later = ("take_back", 1, 0, None), ("jump", 6.0, None)
    for rules in (False, True):
        once = {**RICH, "jitter": [0], "second": True, "parallel": 64, "drain": None, "rules": rules}
        for name in GRACED:
            one = {**once, "script": [[[(name, 1)]]]}
            votes = [approve] * (2 if name == "graced_pair" else 1)
            yield {**one, "steps": [go, *votes, ("jump", 1.0, None), later]}
            yield {**one, "steps": [go, *votes, undo, later]}
            yield {**one, "steps": [go, *votes, undo, undo, *votes, later, undo]}
            yield {**one, "steps": [go, *votes, ("cancel", 0, None), later, undo]}
            yield {**one, "steps": [go, *votes, ("jump", 4.0, None), undo, ("jump", 4.0, None), *votes]}
            yield {**one, "steps": [go, *votes, ("restart", 0, None), ("restart", 1, None), later]}
            for writes in (1, 2, 3):
                yield {**one, "steps": [go, ("kill", 0, writes, True, 0), *votes, *votes, later, ("jump", 1.0, None)]}
        remembered = {**once, "script": [[[("graced", 1)], [("graced", 1)]]]}
        yield {**remembered, "steps": [go, ("decide", 0, 0, 2, None), undo, approve, later]}
        yield {**remembered, "steps": [go, ("decide", 0, 0, 2, None), later]}
        both = {**once, "script": [[[("graced", 1), ("gated", 1)]]]}
        yield {**both, "steps": [go, approve, ("decide", 0, 1, 6, None), later]}


GRACED_SCENES = list(_graced())
