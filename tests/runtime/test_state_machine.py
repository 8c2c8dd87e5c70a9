"""The proof: whatever people do and whatever dies, in whatever order, the laws hold.

Scenarios are generated (``scenarios``), played in virtual time on two processes over one memory store (``worlds``)
and judged by laws that know nothing of the runtime (``chaos/laws``). ``HOLDFAST_EXAMPLES=20`` plays twenty times as
many. ``test_mutants`` shows that the judge sees what it should.
"""

import pytest
import worlds
from hypothesis import given
from scenarios import CLASSICS, IMPORTS, RICH, importing, profile, scenario


@pytest.mark.parametrize("number", range(len(CLASSICS)))
def test_the_laws_hold_in_the_classics(number):
    worlds.lived(CLASSICS[number])


@profile(1500)
@given(scenario)
def test_the_laws_hold_whatever_people_do_and_whatever_dies(plot):
    worlds.lived(plot)


@pytest.mark.parametrize("number", range(len(IMPORTS)))
def test_the_laws_hold_in_an_import_at_a_moment_that_matters(number):
    worlds.lived(IMPORTS[number])


@profile(300)
@given(importing)
def test_an_import_runs_nothing_without_trust_and_asks_again_with_it(plot):
    """Whatever happens before and after it: what the file says of approvals, runs and clients starts nothing here."""
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
    assert died > 15, "the scenario has as many writes as that"


def test_every_prefix_of_a_rich_log_is_a_legal_start():
    """B54"""
    events = worlds.lived(RICH).events()
    assert len(events) > 60
    for decide in (None, 0, 5):
        for end in range(1, len(events) + 1):
            worlds.revived(RICH["script"], events[:end], decide)
