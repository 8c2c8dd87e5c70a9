"""The proof: whatever people do and whatever dies, in whatever order, the laws hold.

Scenarios are generated (``scenarios``), played in virtual time on two processes over one memory store (``worlds``)
and judged by laws that know nothing of the runtime (``chaos/laws``). ``ASSENT_EXAMPLES=20`` plays twenty times as
many. ``test_mutants`` shows that the judge sees what it should.
"""

import pytest
import worlds
from hypothesis import given
from scenarios import profile, scenario

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
"""A scenario with something of everything, for the kills at every single write."""


@profile(1500)
@given(scenario)
def test_the_laws_hold_whatever_people_do_and_whatever_dies(plot):
    worlds.lived(plot)


@profile(60)
@given(scenario)
def test_every_prefix_of_every_log_is_a_legal_start(plot):
    """B54"""
    world = worlds.lived(plot)
    events = world.events()
    for end in range(1, len(events) + 1):
        worlds.revived(plot["script"], events[:end], plot["drain"])


@pytest.mark.parametrize("after", [False, True], ids=["before the commit", "after the commit"])
@pytest.mark.parametrize("who", [0, 1])
def test_every_write_may_be_the_last_one_of_its_process(who, after):
    """B47-B51: a kill at each append and claim of a rich scenario, one after the other."""
    died = 0
    for writes in range(1, 60):
        plot = {**RICH, "steps": [("kill", who, writes, after, 0), *RICH["steps"]]}
        died += worlds.lived(plot).deaths
    assert died > 20, "the scenario has as many writes as that"


def test_every_prefix_of_a_rich_log_is_a_legal_start():
    """B54"""
    events = worlds.lived(RICH).events()
    assert len(events) > 60
    for decide in (None, 0, 5):
        for end in range(1, len(events) + 1):
            worlds.revived(RICH["script"], events[:end], decide)
