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
def test_the_laws_hold_in_every_classic_scenario(number):
    worlds.lived(CLASSICS[number])


@profile(1500)
@given(scenario)
def test_the_laws_hold_in_generated_scenarios(plot):
    worlds.lived(plot)


@pytest.mark.parametrize("number", range(len(IMPORTS)))
def test_the_laws_hold_in_every_import_scenario(number):
    worlds.lived(IMPORTS[number])


@profile(300)
@given(importing)
def test_an_imported_call_runs_only_with_trust_and_a_new_approval(plot):
    """Approvals, runs and clients of an imported log start nothing here."""
    worlds.lived(plot)


@profile(60)
@given(scenario)
def test_every_prefix_of_a_generated_log_is_a_legal_start(plot):
    """A new process revives each prefix, and the laws hold at its end [B54]."""
    world = worlds.lived(plot)
    events = world.events()
    for end in range(1, len(events) + 1):
        worlds.revived(plot["script"], events[:end], plot["drain"])


@pytest.mark.parametrize("after", [False, True], ids=["before the commit", "after the commit"])
@pytest.mark.parametrize("who", [0, 1])
def test_the_laws_hold_if_a_process_is_killed_at_any_of_its_writes(who, after):
    """There is one kill for each append and claim of a rich scenario [B47-B51]."""
    died = 0
    for writes in range(1, 60):
        plot = {**RICH, "steps": [("kill", who, writes, after, 0), *RICH["steps"]]}
        died += worlds.lived(plot).deaths
    assert died > 15, "the scenario has as many writes as that"


def test_every_prefix_of_a_rich_log_is_a_legal_start():
    """A log with more than 60 events is cut after each of them and revived [B54]."""
    events = worlds.lived(RICH).events()
    assert len(events) > 60
    for decide in (None, 0, 5):
        for end in range(1, len(events) + 1):
            worlds.revived(RICH["script"], events[:end], decide)
