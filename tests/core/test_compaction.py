"""What the model is sent: retention, summary, window, budget, ceiling; from mid-log the same as from the beginning."""

import json
import sys
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.example_logs import KEPT, Told, logs, result
from test_machine import Dice
from test_transcript import legal, roles

from holdfast.core.events import HistorySummarised, MessageReceived, TurnEnded, TurnStarted
from holdfast.core.prompt.compaction import PromptRenderer, next_summary_end, render_prompt, roundest
from holdfast.core.prompt.history import SUMMARY_HEADING, Context, History, message_weight
from holdfast.core.tool import Retention
from holdfast.core.transcript import AssistantMessage, ToolResult, Transcript, UserMessage
from holdfast.errors import DeclarationError, ModelError

FOREVER = Context(retention=Retention.forever(), window=10_000, budget=10_000_000)
contexts = st.builds(
    Context,
    window=st.integers(1, 9),
    budget=st.sampled_from([1, 100, 600, 1_500, 6_000, 100_000]),
    summary=st.sampled_from([None, "small"]),
)


def lived(events, context):
    history = History(context)
    for event in events:
        history.apply(event)
    return history


def envelopes(rendered):
    return {m.call: json.loads(m.content) for m in rendered.messages if isinstance(m, ToolResult)}


def removed(rendered):
    """Calls whose result is a stub."""
    told = envelopes(rendered).items()
    return [c for c, e in told if "removed" in (e["result"] if e["ok"] and isinstance(e.get("result"), dict) else {})]


def numbers(rendered):
    """The turns that are shown."""
    return sorted({m.turn for m in rendered.messages if not isinstance(m, ToolResult) and m.turn})


def requests(events, context, **fields):
    """Every request that was made: as it was when the model answered."""
    history = History(context)
    made = []
    for event in events:
        if event.type == "AssistantSaid":
            made.append(render_prompt(history, **fields))
        history.apply(event)
    return made


def in_bytes(rendered):
    return [msgspec.json.encode(message) for message in rendered.messages]


# --- retention ---


def test_a_result_is_seen_for_as_many_turns_as_its_tool_says_and_then_a_stub_stands_in_its_place():
    """B62"""
    told = Told()
    (call,) = told.turn([result("aged", 100)])
    told.turn()
    assert removed(render_prompt(lived(told.events, Context()))) == [], "the second of two turns"
    told.turn()
    rendered = render_prompt(lived(told.events, Context()))
    assert removed(rendered) == list(rendered.report.stubbed) == [call]
    about = envelopes(rendered)[call]["result"]
    assert about["tool"] == "aged"
    assert about["bytes"] == len('{"ok":true,"result":""}') + 100
    assert roles(rendered.messages[:4]) == ["User", "Assistant", "Result", "Assistant"]
    legal(rendered.messages)


def test_the_last_results_of_a_tool_are_seen_and_what_the_model_has_not_seen_yet_is_never_removed():
    """B62"""
    told = Told()
    first = told.turn([result("counted")], [result("counted"), result("kept")], [result("counted")])
    assert removed(render_prompt(lived(told.events, Context()))) == [first[0]]
    told.hear()
    told.begin()
    fresh = told.say("", *[result("counted")] * 3)
    rendered = render_prompt(lived(told.events, Context()))
    assert removed(rendered) == [first[0], first[1], first[3]]
    assert not set(fresh) & set(removed(rendered))
    told.say("thanks")
    assert removed(render_prompt(lived(told.events, Context()))) == [first[0], first[1], first[3], fresh[0]]


def test_results_of_a_turn_that_ended_before_the_model_saw_them_are_there_when_it_is_asked_again():
    """B62, B70: a halted turn's"""
    told = Told()
    told.hear()
    told.begin()
    unseen = told.say("", *[result("counted")] * 3)
    told.end()
    told.hear()
    told.begin()
    assert removed(render_prompt(lived(told.events, Context()))) == []
    told.say("I see")
    assert removed(render_prompt(lived(told.events, Context()))) == unseen[:1]


def test_a_reply_that_was_cut_off_while_calls_were_open_does_not_change_for_how_long_their_results_are_seen():
    """B59, B62"""
    told = Told()
    (call,) = told.turn([result("aged")])
    at = next(n for n, event in enumerate(told.events) if event.type == "AssistantSaid") + 1
    cut = msgspec.structs.replace(told.events[at - 1], text="", calls=(), partial=True)
    told.events.insert(at, cut)
    told.events[:] = [msgspec.structs.replace(event, seq=n) for n, event in enumerate(told.events, 1)]
    told.turn()
    told.turn()
    assert removed(render_prompt(lived(told.events, Context()))) == [call]


def test_a_result_that_is_kept_for_ever_is_never_removed_by_age_and_one_whose_tool_says_nothing_is_the_context_s():
    """B62"""
    told = Told()
    kept, silent = told.turn([result("kept"), result("default")])
    said = next(event for event in told.events if event.type == "AssistantSaid")
    unsaid = msgspec.structs.replace(said.calls[1], retention=None)
    told.events[told.events.index(said)] = msgspec.structs.replace(said, calls=(said.calls[0], unsaid))
    for n in range(2, 10):
        told.turn()
        assert removed(render_prompt(lived(told.events, Context()))) == ([silent] if n > 6 else [])
        sooner = Context(retention=Retention.turns(3))
        assert removed(render_prompt(lived(told.events, sooner))) == ([silent] if n > 3 else [])
    assert kept not in removed(render_prompt(lived(told.events, Context())))


def test_the_stub_of_an_error_is_an_error_of_the_same_kind_and_says_how_to_see_it_again_where_there_is_a_way():
    """B62"""
    told = Told()
    (call,) = told.turn([result("aged", 500, ok=False)])
    told.turn()
    told.turn()
    rendered = render_prompt(lived(told.events, Context()), again="recall")
    stub = envelopes(rendered)[call]
    assert (stub["ok"], stub["error"]["kind"]) == (False, "timeout")
    assert f'recall({{"call": "{call}"}})' in stub["error"]["message"]
    assert rendered.report.stubbed == (call,)


# --- the prefix ---


def test_with_retention_forever_every_request_starts_with_the_one_before_it_byte_for_byte():
    """B63"""
    told = Told()
    for _ in range(30):
        told.turn([result("kept", 300, "p")], [result("kept", 10), result("kept", 10, "p")])
    for earlier, later in pairwise(requests(told.events, FOREVER)):
        assert in_bytes(later)[: len(earlier.messages)] == in_bytes(earlier)


def test_with_default_retention_requests_agree_up_to_the_first_result_that_aged_out():
    """B63"""
    told = Told()
    for _ in range(20):
        told.turn([result("default"), result("kept")], [result("default")])
    changed = 0
    for earlier, later in pairwise(requests(told.events, Context())):
        aged = set(later.report.stubbed) - set(earlier.report.stubbed)
        calls = [getattr(m, "call", None) for m in earlier.messages]
        same = min([calls.index(call) for call in aged], default=len(calls))
        assert in_bytes(later)[:same] == in_bytes(earlier)[:same]
        assert bool(aged) == (in_bytes(later)[: len(calls)] != in_bytes(earlier))
        changed += bool(aged)
    assert changed == 14, "once a turn, from the seventh on"


def test_the_window_slides_by_many_turns_at_a_time():
    """B63: a prefix that changed at every turn would never be in a cache"""
    told, history = Told(), History(Context())
    starts = []
    for n in range(1, 301):
        told.turn()
        for event in told.events[history.seq :]:
            history.apply(event)
        rendered = render_prompt(history)
        starts.append(numbers(rendered)[0])
        assert min(n, 30) <= rendered.report.turns <= 40
        assert rendered.report.dropped == starts[-1] - 1
        assert rendered.report.gap == (starts[-1] > 1)
    moves = [b - a for a, b in pairwise(starts) if a != b]
    assert starts == sorted(starts)
    assert len(moves) <= 300 / 7
    assert starts[:40] == [1] * 40


def test_the_budget_drops_whole_old_turns_several_at_a_time_and_never_the_current_one():
    """B63"""
    told = Told()
    starts = []
    for _ in range(120):
        told.turn(text="u" * 2_000)
        rendered = render_prompt(lived(told.events, Context(budget=10_000)), instructions=500, tools=500)
        assert rendered.report.tokens.total <= 10_000
        assert rendered.report.tokens.total > 6_000 or rendered.report.dropped == 0
        assert rendered.report.gap == (rendered.report.dropped > 0)
        starts.append(numbers(rendered)[0])
    assert len({*starts}) < 60
    told.turn([result("kept", 15_000)] * 3, text="u" * 4_000)
    rendered = render_prompt(lived(told.events, Context(budget=10_000)))
    assert numbers(rendered) == [121]
    assert rendered.report.tokens.total > 10_000


def test_dropped_turns_are_shown_again_once_large_results_have_aged_out():
    """B62, B63"""
    told = Told()
    for _ in range(3):
        told.turn()
    told.turn([result("aged", 15_000)] * 3)
    context = Context(budget=3_000)
    assert numbers(render_prompt(lived(told.events, context))) == [4]
    told.turn()
    assert numbers(render_prompt(lived(told.events, context))) == [5]
    told.turn()
    assert numbers(render_prompt(lived(told.events, context))) == [1, 2, 3, 4, 5, 6]


def test_the_roundest_number_stays_for_as_long_as_it_can():
    for low in range(80):
        for high in range(low, 80):
            found = roundest(low, high)
            best = max(range(low, high + 1), key=lambda n: n & -n if n else 1 << 20)
            assert found == best, (low, high)


# --- summaries ---


def test_a_summary_stands_at_the_head_for_all_turns_that_it_covers():
    """B63"""
    told = Told()
    for n in range(5):
        told.turn(text=f"say {n + 1}")
    ended = [event.seq for event in told.events if isinstance(event, TurnEnded)]
    told.add(HistorySummarised, upto=ended[2], text="They counted to three.")
    rendered = render_prompt(lived(told.events, Context()))
    head = rendered.messages[0]
    assert isinstance(head, UserMessage)
    assert head.text == f"{SUMMARY_HEADING}\n\nThey counted to three."
    assert numbers(rendered) == [4, 5]
    assert (rendered.report.summarised, rendered.report.dropped, rendered.report.gap) == (ended[2], 3, False)
    assert rendered.report.tokens.summary == message_weight(head)


def test_a_turn_that_a_summary_cuts_in_two_is_shown_whole():
    told = Told()
    told.turn()
    told.turn([result("kept")])
    told.add(HistorySummarised, upto=told.events[-3].seq, text="half")
    assert numbers(render_prompt(lived(told.events, Context()))) == [2]


def test_a_summary_is_wanted_before_anything_has_to_go_and_again_a_quarter_of_the_window_later():
    """B63: off the critical path"""
    told = Told()
    asked = []
    context = Context(summary="small")
    for n in range(1, 101):
        told.turn()
        history = lived(told.events, context)
        upto = next_summary_end(history)
        if upto is not None:
            assert isinstance(told.events[upto - 1], TurnEnded)
            asked.append(n)
            told.add(HistorySummarised, upto=upto, text="so far")
            assert next_summary_end(lived(told.events, context)) is None
        assert not render_prompt(lived(told.events, context)).report.gap
    assert asked[0] == 31
    assert {b - a for a, b in pairwise(asked)} == {11}


def test_dropped_turns_ask_for_a_summary_until_there_is_one():
    told = Told()
    for _ in range(60):
        told.turn()
    assert next_summary_end(lived(told.events, Context())) is None, "nobody to make it"
    history = lived(told.events, Context(summary="small"))
    assert render_prompt(history).report.gap
    told.add(HistorySummarised, upto=next_summary_end(history), text="so far")
    assert not render_prompt(lived(told.events, Context(summary="small"))).report.gap


# --- tokens ---


def test_the_providers_token_count_corrects_the_estimate_unless_it_is_absurd():
    for counted, ratio in ((1_000, 1.0), (1_500, 1.5), (1_510, 1.625), (10, 1.0), (9_000, 1.0), (None, 1.0)):
        told = Told()
        told.hear("u" * 4_000)
        told.begin()
        told.say("", result("kept", 4_000), usage=counted, context={"estimate": 1_000})
        report = render_prompt(lived(told.events, FOREVER), instructions=100, tools=50).report
        assert report.ratio == ratio
        assert report.tokens.total == round(report.estimate * ratio)
        assert report.estimate > 2_150
        told.say("done")
        told.end()
        told.turn()
        assert render_prompt(lived(told.events, FOREVER)).report.ratio == ratio, "of the turn before"
        told.turn()
        assert render_prompt(lived(told.events, FOREVER)).report.ratio == 1.0, "too long ago"


def test_fewer_turns_fit_where_the_provider_counts_more():
    told = Told()
    for _ in range(10):
        told.turn(text="u" * 4_000)
    told.hear()
    told.begin()
    plain = render_prompt(lived(told.events, Context(budget=10_500)))
    told.say("", result("kept"), usage=2_000, context={"estimate": 1_000})
    dear = render_prompt(lived(told.events, Context(budget=10_500)))
    assert plain.report.turns == 11
    assert dear.report.turns <= 5
    assert dear.report.tokens.total <= 10_500


def test_the_report_of_a_request_counts_the_changes_of_hooks():
    told = Told()
    told.turn(text="u" * 400)
    report = render_prompt(lived(told.events, Context()), instructions=10, tools=20).report
    sent = report.as_sent([("weather", "w" * 40), ("clock", "t" * 4)])
    assert [(each.hook, each.tokens) for each in sent.injected] == [("weather", 10), ("clock", 1)]
    assert (sent.tokens.injections, sent.estimate) == (11, report.estimate + 11)
    shorter = report.as_sent(messages=[UserMessage(text="x" * 8, seq=1, turn=1, by="ann")])
    assert (shorter.estimate, shorter.tokens.history, shorter.tokens.total) == (32, 2, 32)
    assert msgspec.convert(report.to_data(), type(report)) == report


# --- the ceiling ---


def test_over_the_ceiling_the_current_turn_s_oldest_results_go_first_and_several_at_a_time():
    told = Told()
    told.hear()
    told.begin()
    gone, seen = [], []
    for _ in range(40):
        seen += told.say("", result("kept", 3_900))
        rendered = render_prompt(lived(told.events, Context()), instructions=100, capacity=16_000)
        assert rendered.report.tokens.total <= 12_000
        stubbed = list(rendered.report.stubbed)
        assert stubbed == seen[: len(stubbed)]
        assert seen[-1] not in stubbed
        gone.append(len(stubbed))
    assert gone == sorted(gone)
    assert gone[5] == 0
    assert len(set(gone)) < 20


def test_results_that_are_too_large_on_their_own_are_cut_and_still_labelled():
    told = Told()
    told.hear()
    told.begin()
    (old,) = told.say("", result("kept", 9_000))
    large, small, failed = told.say("", result("kept", 15_000), result("kept", 50), result("kept", 7_000, ok=False))
    rendered = render_prompt(lived(told.events, Context()), capacity=4_000)
    assert rendered.report.stubbed == (old,)
    assert rendered.report.cut == (large, failed)
    assert rendered.report.tokens.total <= 3_000
    told = envelopes(rendered)
    assert "[cut: limit" in told[large]["result"]
    assert told[small]["result"] == "x" * 50
    assert told[failed]["error"]["kind"] == "timeout"
    legal(rendered.messages)


def test_a_turn_that_cannot_be_made_to_fit_is_refused_as_too_large():
    told = Told()
    told.hear("u" * 20_000)
    told.begin()
    with pytest.raises(ModelError, match=r"more than 75% of the model's 4000") as refusal:
        render_prompt(lived(told.events, Context()), capacity=4_000)
    assert refusal.value.kind == "too_large"
    assert refusal.value.details == {"tokens": 5_000, "window": 4_000, "ceiling": 0.75}
    assert render_prompt(lived(told.events, Context()), capacity=8_000).report.tokens.total == 5_000
    with pytest.raises(ModelError):
        render_prompt(lived(told.events, Context()), capacity=8_000, tail=4_000)


def test_earlier_turns_make_room_before_the_current_one_has_to():
    told = Told()
    for _ in range(4):
        told.turn(text="u" * 4_000)
    told.hear()
    told.begin()
    told.say("", result("kept", 8_000))
    rendered = render_prompt(lived(told.events, Context()), capacity=4_000)
    assert numbers(rendered) == [5]
    assert rendered.report.stubbed == rendered.report.cut == ()


# --- from mid-log ---


def heads(events):
    """Every place from which a history may be read, with what came before it and matters all the same."""
    for n, event in enumerate(events):
        if isinstance(event, TurnEnded):
            begun = {each.message for each in events[:n] if isinstance(each, TurnStarted)}
            waiting = [e for e in events[:n] if isinstance(e, MessageReceived) and e.seq not in begun]
            summaries = [e for e in events[:n] if isinstance(e, HistorySummarised)]
            yield n, sorted([*waiting, *summaries[-1:]], key=lambda e: e.seq)


@settings(max_examples=300, deadline=None)
@given(logs(), contexts, st.integers(0, 400), st.sampled_from([None, 1_000, 8_000]))
def test_a_history_loaded_from_mid_log_equals_one_built_event_by_event(told, context, fixed, capacity):
    """B63: another process renders the same request"""
    events = told.events
    whole = lived(events, context)
    shown = attempt(whole, fixed, capacity)
    for n, before in heads(events):
        history = lived([*before, *events[n:]], context)
        if history.is_sufficient:
            assert attempt(history, fixed, capacity) == shown
            assert next_summary_end(history, tools=fixed) == next_summary_end(whole, tools=fixed)
            assert history.seq == whole.seq


def attempt(history, fixed, capacity):
    try:
        return render_prompt(history, tools=fixed, capacity=capacity)
    except ModelError as refusal:
        return refusal.details


@settings(max_examples=150, deadline=None)
@given(logs(), contexts, st.sampled_from([None, 1_000, 8_000]))
def test_an_extended_rendering_equals_a_new_one(told, context, capacity):
    """B63"""

    def rendered(way):
        try:
            made = way(history, instructions=10, tools=5, tail=7, capacity=capacity)
        except ModelError as refusal:
            return refusal.message
        return list(made.messages), made.report

    history, rendering = History(context), PromptRenderer()
    for event in told.events:
        history.apply(event)
        assert rendered(rendering.render) == rendered(render_prompt)


def test_a_turn_of_many_steps_extends_its_rendering():
    """B63"""
    told, history, rendering = Told(), History(Context()), PromptRenderer()
    told.hear()
    told.begin()
    made = []
    for event in told.events:
        history.apply(event)
    for _ in range(50):
        told.say("", ("aged", None, "x", True))
        for event in told.events[history.seq :]:
            history.apply(event)
        made.append(rendering.render(history))
    assert [len(each.messages) for each in made] == [1 + 2 * n for n in range(1, 51)]
    assert all(one is other for one, other in zip(made[0].messages, made[-1].messages, strict=False))
    assert rendering._cached.messages is made[-1].messages._items  # and the list is one and the same


@settings(max_examples=200, deadline=None)
@given(logs(), contexts, st.sampled_from([None, 1_000, 8_000]))
def test_every_request_is_legal_within_its_limits_and_shows_whole_turns_in_their_order(told, context, capacity):
    """B62, B63"""
    full = Transcript()
    for event in told.events:
        full.apply(event)
    history = lived(told.events, context)
    try:
        rendered = render_prompt(history, capacity=capacity)
    except ModelError:
        assert capacity == 1_000
        return
    messages = rendered.messages[1 if history.leading else 0 :]
    legal(messages)
    assert rendered.report.turns <= context.window
    assert rendered.report.turns <= 1 or rendered.report.tokens.total <= context.budget
    assert capacity is None or rendered.report.tokens.total <= capacity * 0.75 + 2
    assert rendered.report.estimate == sum(message_weight(message) for message in rendered.messages)
    expected = [m for m in full.messages if places(full)[id(m)] in numbers(rendered)]
    assert [type(m) for m in messages] == [type(m) for m in expected]
    changed = {*rendered.report.stubbed, *rendered.report.cut}
    for shown, said in zip(messages, expected, strict=True):
        if isinstance(said, ToolResult):
            assert (shown.content != said.content) == (said.call in changed)
        elif isinstance(said, AssistantMessage):
            assert (shown.text, [use.call for use in shown.calls]) == (said.text, [use.call for use in said.calls])
        else:
            assert shown == said


def places(transcript):
    """Which turn each message is of."""
    turn, found = 0, {}
    for message in transcript.messages:
        turn = getattr(message, "turn", turn)
        found[id(message)] = turn
    return found


def test_with_room_for_everything_it_is_the_transcript():
    """B63: logs of the machine itself, cut anywhere"""
    for seed in range(40):
        dice = Dice(seed, set())
        dice.play(60)
        dice.rest()
        history, full = History(FOREVER), Transcript()
        for event in dice.log.events:
            history.apply(event)
            full.apply(event)
            ours = [m for m in render_prompt(history).messages if not isinstance(m, ToolResult)]
            assert ours == [m for m in full.messages if not isinstance(m, ToolResult)]
            assert len(render_prompt(history).messages) == len(full.messages)


def test_the_machine_s_own_logs_render_the_same_from_mid_log():
    for seed in range(60):
        dice = Dice(seed, set())
        dice.play(120)
        events = dice.log.events
        for context in (Context(window=2), Context(window=3, budget=60)):
            shown = render_prompt(lived(events, context))
            for n, before in heads(events):
                history = lived([*before, *events[n:]], context)
                assert not history.is_sufficient or render_prompt(history) == shown


# --- cost ---


def test_memory_is_bounded_by_the_window_and_the_budget_and_not_by_history():
    """A turn that no later request can show is gone"""
    history, told = History(Context(window=10, budget=2_000)), Told()
    most = 0
    for n in range(400):
        told.turn([result("default", 2_000)], text="u" * (4_000 if n % 7 == 0 else 10))
        for event in told.events[history.seq :]:
            history.apply(event)
        most = max(most, len(history.turns))
        assert sum(turn.least for turn in history.turns) <= 2 * 2_000 + 1_200
    assert most <= 10


def test_rendering_after_one_more_step_calls_few_functions_for_each_message():
    """Each message is looked at, and none is rendered again: it would be some 100 calls a message."""
    told = Told()
    for _ in range(250):
        told.turn([result("default", 2_000, "p")])
    context = Context(window=1_000, budget=10_000_000)
    history = lived(told.events, context)
    render_prompt(history)
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event == "call"

    for _ in range(3):
        told.turn([result("default", 2_000, "p")])
        calls = 0
        sys.setprofile(count)
        try:
            for event in told.events[history.seq :]:
                history.apply(event)
            messages = render_prompt(history).messages
        finally:
            sys.setprofile(None)
        assert len(messages) > 1_000
        assert calls < 15 * len(messages)


def test_a_message_that_is_sent_again_is_the_same_object():
    """Models remember what they rendered by identity"""
    told = Told()
    for _ in range(10):
        told.turn([result("default", 100, "p"), result("counted", 10, "p")])
    told.add(HistorySummarised, upto=told.events[6].seq, text="s")
    history = lived(told.events, Context())
    first, second = render_prompt(history), render_prompt(history)
    assert all(a is b for a, b in zip(first.messages, second.messages, strict=True))
    assert first.report.stubbed


# --- settings ---


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"retention": 6}, "Retention.turns"),
        ({"window": 0}, "window is a whole number of at least 1"),
        ({"window": True}, "window"),
        ({"budget": 1.5}, "budget"),
        ({"reserve": -1}, "reserve is a whole number of at least 0"),
        ({"ceiling": 0}, "ceiling"),
        ({"ceiling": 75}, "above 0 and up to 1"),
        ({"ceiling": "much"}, "ceiling"),
        ({"summary": 5}, "summary is a Model"),
    ],
)
def test_settings_that_cannot_work_are_refused_where_they_are_written(fields, words):
    with pytest.raises(DeclarationError, match=words):
        Context(**fields)


def test_the_settings_are_those_of_the_design():
    context = Context()
    assert (context.window, context.budget, context.reserve, context.ceiling) == (40, 30_000, 4_000, 0.75)
    assert context.retention == Retention.turns(6) == KEPT["default"]
    assert context == Context()
