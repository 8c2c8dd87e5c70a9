"""The test kit: ``run_to_rest``, the manual clock, and the assertions on the log."""

import asyncio

import pytest
from msgspec.structs import replace

import holdfast.testing
from holdfast import Agent, Answer, Approve, Deny, ScriptedModel, ToolCall, ToolError, tool
from holdfast.core.events import CallResolved, CallReturned, CallStarted
from holdfast.testing import (
    ManualClock,
    assert_effect_needs_approval,
    assert_paired,
    calls,
    results,
    run_to_rest,
    starts,
)


@tool(approval="required", expires="1h")
async def refund(order: int) -> str:
    """Refund an order."""
    return f"refunded {order}"


@tool
async def big(n: int) -> str:
    """A large result."""
    return "x" * n


@tool(executor="human", prompt="Which?")
def choose() -> str:
    """Choose."""
    raise NotImplementedError


def shop(*steps, tools=(refund, big, choose)):
    return Agent("shop", model=ScriptedModel([*steps, "done"]), tools=tools)


REFUND = [ToolCall("refund", {"order": 7})]


def test_run_to_rest_ends_idle_when_every_call_is_decided():
    rest = run_to_rest(shop(REFUND), "go", decisions={"refund": Approve()})
    assert (rest.state, rest.reason, rest.pending) == ("idle", "completed", [])
    assert rest.result("refund") == "refunded 7"
    assert rest.messages[-1].text == "done"
    assert_paired(rest.events)


def test_run_to_rest_stops_at_a_call_without_a_decision():
    rest = run_to_rest(shop([*REFUND, ToolCall("choose")]), "go", decisions={"choose": Answer("this")})
    assert (rest.state, rest.reason) == ("awaiting_input", None)
    (entry,) = rest.pending
    assert entry.tool == "refund"
    assert rest.result("choose") == "this"
    assert_paired(rest.events, waiting=[entry.call])
    with pytest.raises(AssertionError, match=r"refund .* has no result"):
        assert_paired(rest.events)
    with pytest.raises(AssertionError, match="refund has no result; tools with results: choose"):
        rest.result("refund")


def test_decisions_may_be_a_function():
    rest = run_to_rest(shop(REFUND), "go", decisions=lambda entry: Deny(f"not {entry.args['order']}"))
    with pytest.raises(ToolError, match="not 7"):
        rest.result("refund")


def test_a_large_result_is_returned_in_full():
    rest = run_to_rest(shop([ToolCall("big", {"n": 100_000})]), "go")
    assert rest.result("big") == "x" * 100_000


def test_run_to_rest_is_deterministic():
    twice = [run_to_rest(shop(REFUND), "go", decisions={"refund": Approve()}).events for _ in range(2)]
    assert twice[0] == twice[1]


def test_a_call_inside_an_event_loop_is_refused_with_the_reason():
    async def main():
        with pytest.raises(RuntimeError, match="plain `def` test"):
            run_to_rest(shop(), "go")

    asyncio.run(main())


def test_a_manual_clock_moves_only_when_it_is_advanced():
    clock = ManualClock(100.0)
    assert clock() == clock() == 100.0
    clock.advance("1h")
    clock.advance(1)
    assert clock() == 3701.0
    rest = run_to_rest(shop(REFUND), "go", clock=clock)
    assert rest.pending[0].deadline == 3701.0 + 3600.0


def test_calls_results_and_starts_select_the_events_of_a_tool():
    rest = run_to_rest(shop([*REFUND, ToolCall("big", {"n": 1})]), "go", decisions={"refund": Approve()})
    assert [made.tool for made in calls(rest.events)] == ["refund", "big"]
    assert [made.args for made in calls(rest.events, "refund")] == [{"order": 7}]
    assert [event.value for event in results(rest.events, "big")] == ["x"]
    assert [event.attempt for event in starts(rest.events, "refund")] == [1]


def test_assert_paired_fails_on_an_unpaired_log():
    events = run_to_rest(shop(REFUND), "go", decisions={"refund": Approve()}).events
    returned = next(event for event in events if isinstance(event, CallReturned))
    with pytest.raises(AssertionError, match="has no result"):
        assert_paired([event for event in events if event is not returned])
    with pytest.raises(AssertionError, match="has 2 results"):
        assert_paired([*events, returned])
    with pytest.raises(AssertionError, match="never called"):
        assert_paired([*events, replace(returned, call_id="nobody")])
    late = [event for event in events if event is not returned]
    with pytest.raises(AssertionError, match="the model was asked before refund"):
        assert_paired([*late, returned])
    with pytest.raises(AssertionError, match="turns began"):
        assert_paired(events[:-1])


def test_an_effect_without_an_approval_is_reported():
    events = run_to_rest(shop(REFUND), "go", decisions={"refund": Approve()}).events
    assert_effect_needs_approval(events, "refund")
    with pytest.raises(AssertionError, match="without an approval"):
        assert_effect_needs_approval([e for e in events if not isinstance(e, CallResolved)], "refund")
    started = next(event for event in events if isinstance(event, CallStarted))
    early = [started, *(event for event in events if event is not started)]
    with pytest.raises(AssertionError, match="without an approval"):
        assert_effect_needs_approval(early, "refund")


def test_a_grant_counts_as_an_approval():
    steps = [REFUND, [ToolCall("refund", {"order": 7}), ToolCall("refund", {"order": 8})]]
    events = run_to_rest(shop(*steps), "go", decisions={"refund": Approve(remember="args")}).events
    assert len(starts(events, "refund")) == 3
    assert_effect_needs_approval(events, "refund")
    with pytest.raises(AssertionError, match="without an approval"):
        assert_effect_needs_approval([e for e in events if e.type != "GrantGiven"], "refund")


def test_the_exported_names_are_sorted_and_exist():
    assert sorted(holdfast.testing.__all__) == holdfast.testing.__all__
    for name in holdfast.testing.__all__:
        assert getattr(holdfast.testing, name)
