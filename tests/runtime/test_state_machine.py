"""Generated scenarios: whatever callers do and whichever process dies, the laws of a log hold.

The scenarios (``scenarios``) are played in virtual time by two processes on one memory store (``worlds``) and checked
against laws that do not depend on the runtime (``chaos/laws``). ``HOLDFAST_EXAMPLES=20`` plays twenty times as many.
``test_mutants`` shows that the laws detect defects.
"""

from collections import Counter

import pytest
import worlds
from hypothesis import given
from scenarios import (
    CLASSICS,
    DEPUTISED,
    GRACED_SCENES,
    IMPORTS,
    LABELLED,
    RICH,
    deputised,
    graced,
    importing,
    labelled,
    profile,
    scenario,
)

from holdfast.core.events import CallResolved, VoteCast


@pytest.mark.parametrize("number", range(len(CLASSICS)))
def test_the_laws_hold_in_every_classic_scenario(number):
    worlds.play_scenario(CLASSICS[number])


@profile(1500)
@given(scenario)
def test_the_laws_hold_in_generated_scenarios(plot):
    worlds.play_scenario(plot)


@pytest.mark.parametrize("number", range(len(IMPORTS)))
def test_the_laws_hold_in_every_import_scenario(number):
    worlds.play_scenario(IMPORTS[number])


@profile(300)
@given(importing)
def test_an_imported_call_runs_only_with_trust_and_a_new_approval(plot):
    """Approvals, runs and clients of an imported log start nothing here."""
    worlds.play_scenario(plot)


def test_the_laws_hold_in_every_deputy_scenario():
    """Deputies decide for others, and for no one after their period [B126]."""
    met = Counter[tuple[str, bool]]()
    for plot in DEPUTISED:
        for event in worlds.play_scenario(plot).events():
            if isinstance(event, CallResolved | VoteCast) and event.by.id in worlds.PEOPLE:
                met[event.type, event.on_behalf_of is not None] += 1
    assert len(met) == 4, f"deputies decide and vote, and people in their own name: {met}"


@profile(300)
@given(deputised)
def test_the_laws_hold_if_people_name_deputies_who_decide_for_them(plot):
    """Whoever names whom, requests and decides, in two processes that are killed [B126]."""
    worlds.play_scenario(plot)


def test_the_laws_hold_in_every_scenario_with_titles_and_archives():
    """The row, the pending entries and the search have the title, the archive and the messages of the log."""
    met = Counter[str]()
    for plot in LABELLED:
        met.update(event.type for event in worlds.play_scenario(plot).events())
    assert {"ConversationRenamed", "ConversationArchived"} <= met.keys()


@profile(150)
@given(labelled)
def test_the_laws_hold_if_conversations_are_renamed_archived_and_searched(plot):
    """Whoever renames, archives and searches, in two processes that are killed."""
    worlds.play_scenario(plot)


def test_the_laws_hold_in_every_scenario_with_grace_windows():
    """Approvals are taken back or pass their window, whatever is killed meanwhile; nothing starts before."""
    met = Counter[str]()
    for plot in GRACED_SCENES:
        met.update(event.type for event in worlds.play_scenario(plot).events())
    assert {"ApprovalTakenBack", "GraceEnded", "GrantGiven", "CallStarted"} <= met.keys()


@profile(200)
@given(graced)
def test_the_laws_hold_if_approvals_are_taken_back(plot):
    """Whoever approves and takes back when, in two processes that are killed."""
    worlds.play_scenario(plot)


@profile(60)
@given(scenario)
def test_every_prefix_of_a_generated_log_is_a_legal_start(plot):
    """A new process revives each prefix, and the laws hold at its end [B54]."""
    world = worlds.play_scenario(plot)
    events = world.events()
    for end in range(1, len(events) + 1):
        worlds.revive_log(plot["script"], events[:end], plot["drain"])


@pytest.mark.parametrize("after", [False, True], ids=["before the commit", "after the commit"])
@pytest.mark.parametrize("process", [0, 1])
def test_the_laws_hold_if_a_process_is_killed_at_any_of_its_writes(process, after):
    """There is one kill for each append and claim of a rich scenario [B47-B51]."""
    deaths = 0
    for writes in range(1, 60):
        plot = {**RICH, "steps": [("kill", process, writes, after, 0), *RICH["steps"]]}
        deaths += worlds.play_scenario(plot).deaths
    assert deaths > 15, "the scenario has more than 15 writes"


def test_every_prefix_of_a_rich_log_is_a_legal_start():
    """A log with more than 60 events is cut after each of them and revived [B54]."""
    events = worlds.play_scenario(RICH).events()
    assert len(events) > 60
    for decide in (None, 0, 5):
        for end in range(1, len(events) + 1):
            worlds.revive_log(RICH["script"], events[:end], decide)
