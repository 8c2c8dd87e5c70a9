"""The request to the model: retention, summary, window, budget, ceiling; the same from mid-log as from its start."""

import json
import sys
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.example_logs import KEPT, Told, logs, result
from test_machine import RandomShell
from test_transcript import check_legal, roles

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


def build_history(events, context):
    history = History(context)
    for event in events:
        history.apply(event)
    return history


def envelopes(rendered):
    return {m.call: json.loads(m.content) for m in rendered.messages if isinstance(m, ToolResult)}


def stubbed_calls(rendered):
    """Return the calls whose result is a stub."""
    sent = envelopes(rendered).items()
    return [c for c, e in sent if "removed" in (e["result"] if e["ok"] and isinstance(e.get("result"), dict) else {})]


def shown_turns(rendered):
    """Return the numbers of the turns in a request."""
    return sorted({m.turn for m in rendered.messages if not isinstance(m, ToolResult) and m.turn})


def render_requests(events, context, **fields):
    """Return the request before each reply of the model."""
    history = History(context)
    made = []
    for event in events:
        if event.type == "AssistantSaid":
            made.append(render_prompt(history, **fields))
        history.apply(event)
    return made


def encode_messages(rendered):
    return [msgspec.json.encode(message) for message in rendered.messages]


# --- retention ---


def test_a_result_becomes_a_stub_after_the_number_of_turns_that_its_tool_declares():
    """The stub has the tool and the size of the result [B62]."""
    log = Told()
    (call,) = log.turn([result("aged", 100)])
    log.turn()
    assert stubbed_calls(render_prompt(build_history(log.events, Context()))) == [], "the second of two turns"
    log.turn()
    rendered = render_prompt(build_history(log.events, Context()))
    assert stubbed_calls(rendered) == list(rendered.report.stubbed) == [call]
    about = envelopes(rendered)[call]["result"]
    assert about["tool"] == "aged"
    assert about["bytes"] == len('{"ok":true,"result":""}') + 100
    assert roles(rendered.messages[:4]) == ["User", "Assistant", "Result", "Assistant"]
    check_legal(rendered.messages)


def test_the_last_results_of_a_tool_are_kept_and_those_that_the_model_has_not_seen():
    """``Retention.last`` counts the results of a tool [B62]."""
    log = Told()
    first = log.turn([result("counted")], [result("counted"), result("kept")], [result("counted")])
    assert stubbed_calls(render_prompt(build_history(log.events, Context()))) == [first[0]]
    log.hear()
    log.begin()
    fresh = log.say("", *[result("counted")] * 3)
    rendered = render_prompt(build_history(log.events, Context()))
    assert stubbed_calls(rendered) == [first[0], first[1], first[3]]
    assert not set(fresh) & set(stubbed_calls(rendered))
    log.say("thanks")
    assert stubbed_calls(render_prompt(build_history(log.events, Context()))) == [
        first[0],
        first[1],
        first[3],
        fresh[0],
    ]


def test_results_that_the_model_did_not_see_in_their_turn_are_in_the_next_request():
    """A halted turn leaves such results [B62, B70]."""
    log = Told()
    log.hear()
    log.begin()
    unseen = log.say("", *[result("counted")] * 3)
    log.end()
    log.hear()
    log.begin()
    assert stubbed_calls(render_prompt(build_history(log.events, Context()))) == []
    log.say("I see")
    assert stubbed_calls(render_prompt(build_history(log.events, Context()))) == unseen[:1]


def test_a_partial_reply_while_calls_are_open_does_not_change_how_long_their_results_stay():
    """A reply that was cut off does not count as a step [B59, B62]."""
    log = Told()
    (call,) = log.turn([result("aged")])
    at = next(n for n, event in enumerate(log.events) if event.type == "AssistantSaid") + 1
    cut = msgspec.structs.replace(log.events[at - 1], text="", calls=(), partial=True)
    log.events.insert(at, cut)
    log.events[:] = [msgspec.structs.replace(event, seq=n) for n, event in enumerate(log.events, 1)]
    log.turn()
    log.turn()
    assert stubbed_calls(render_prompt(build_history(log.events, Context()))) == [call]


def test_retention_forever_keeps_a_result_and_the_context_decides_for_tools_without_retention():
    """The tool's retention comes first, then that of the context [B62]."""
    log = Told()
    kept, silent = log.turn([result("kept"), result("default")])
    said = next(event for event in log.events if event.type == "AssistantSaid")
    unsaid = msgspec.structs.replace(said.calls[1], retention=None)
    log.events[log.events.index(said)] = msgspec.structs.replace(said, calls=(said.calls[0], unsaid))
    for n in range(2, 10):
        log.turn()
        assert stubbed_calls(render_prompt(build_history(log.events, Context()))) == ([silent] if n > 6 else [])
        sooner = Context(retention=Retention.turns(3))
        assert stubbed_calls(render_prompt(build_history(log.events, sooner))) == ([silent] if n > 3 else [])
    assert kept not in stubbed_calls(render_prompt(build_history(log.events, Context())))


def test_the_stub_of_an_error_keeps_its_kind_and_names_the_tool_that_recalls_the_result():
    """A stub says how the model can see the result again [B62]."""
    log = Told()
    (call,) = log.turn([result("aged", 500, ok=False)])
    log.turn()
    log.turn()
    rendered = render_prompt(build_history(log.events, Context()), again="recall")
    stub = envelopes(rendered)[call]
    assert (stub["ok"], stub["error"]["kind"]) == (False, "timeout")
    assert f'recall({{"call": "{call}"}})' in stub["error"]["message"]
    assert rendered.report.stubbed == (call,)


# --- the prefix ---


def test_with_retention_forever_every_request_starts_with_the_bytes_of_the_previous_one():
    """The provider can cache the prefix [B63]."""
    log = Told()
    for _ in range(30):
        log.turn([result("kept", 300, "p")], [result("kept", 10), result("kept", 10, "p")])
    for earlier, later in pairwise(render_requests(log.events, FOREVER)):
        assert encode_messages(later)[: len(earlier.messages)] == encode_messages(earlier)


def test_with_default_retention_requests_agree_up_to_the_first_result_that_aged_out():
    """Nothing else changes the prefix [B63]."""
    log = Told()
    for _ in range(20):
        log.turn([result("default"), result("kept")], [result("default")])
    changed = 0
    for earlier, later in pairwise(render_requests(log.events, Context())):
        aged = set(later.report.stubbed) - set(earlier.report.stubbed)
        calls = [getattr(m, "call", None) for m in earlier.messages]
        same = min([calls.index(call) for call in aged], default=len(calls))
        assert encode_messages(later)[:same] == encode_messages(earlier)[:same]
        assert bool(aged) == (encode_messages(later)[: len(calls)] != encode_messages(earlier))
        changed += bool(aged)
    assert changed == 14, "once a turn, from the seventh turn on"


def test_the_window_slides_by_many_turns_at_a_time():
    """A prefix that changed with every turn would never be in a cache [B63]."""
    log, history = Told(), History(Context())
    starts = []
    for n in range(1, 301):
        log.turn()
        for event in log.events[history.seq :]:
            history.apply(event)
        rendered = render_prompt(history)
        starts.append(shown_turns(rendered)[0])
        assert min(n, 30) <= rendered.report.turns <= 40
        assert rendered.report.dropped == starts[-1] - 1
        assert rendered.report.gap == (starts[-1] > 1)
    moves = [b - a for a, b in pairwise(starts) if a != b]
    assert starts == sorted(starts)
    assert len(moves) <= 300 / 7
    assert starts[:40] == [1] * 40


def test_the_budget_drops_whole_old_turns_several_at_a_time_and_never_the_current_one():
    """The budget changes the prefix rarely [B63]."""
    log = Told()
    starts = []
    for _ in range(120):
        log.turn(text="u" * 2_000)
        rendered = render_prompt(build_history(log.events, Context(budget=10_000)), instructions=500, tools=500)
        assert rendered.report.tokens.total <= 10_000
        assert rendered.report.tokens.total > 6_000 or rendered.report.dropped == 0
        assert rendered.report.gap == (rendered.report.dropped > 0)
        starts.append(shown_turns(rendered)[0])
    assert len({*starts}) < 60
    log.turn([result("kept", 15_000)] * 3, text="u" * 4_000)
    rendered = render_prompt(build_history(log.events, Context(budget=10_000)))
    assert shown_turns(rendered) == [121]
    assert rendered.report.tokens.total > 10_000


def test_dropped_turns_are_shown_again_once_large_results_have_aged_out():
    """A stub makes room in the budget [B62, B63]."""
    log = Told()
    for _ in range(3):
        log.turn()
    log.turn([result("aged", 15_000)] * 3)
    context = Context(budget=3_000)
    assert shown_turns(render_prompt(build_history(log.events, context))) == [4]
    log.turn()
    assert shown_turns(render_prompt(build_history(log.events, context))) == [5]
    log.turn()
    assert shown_turns(render_prompt(build_history(log.events, context))) == [1, 2, 3, 4, 5, 6]


def test_roundest_returns_the_number_with_the_largest_power_of_two_as_a_factor():
    for low in range(80):
        for high in range(low, 80):
            found = roundest(low, high)
            best = max(range(low, high + 1), key=lambda n: n & -n if n else 1 << 20)
            assert found == best, (low, high)


# --- summaries ---


def test_a_summary_is_the_first_message_and_replaces_the_turns_that_it_covers():
    """A summary leaves no gap in the request [B63]."""
    log = Told()
    for n in range(5):
        log.turn(text=f"say {n + 1}")
    ended = [event.seq for event in log.events if isinstance(event, TurnEnded)]
    log.add(HistorySummarised, upto=ended[2], text="They counted to three.")
    rendered = render_prompt(build_history(log.events, Context()))
    head = rendered.messages[0]
    assert isinstance(head, UserMessage)
    assert head.text == f"{SUMMARY_HEADING}\n\nThey counted to three."
    assert shown_turns(rendered) == [4, 5]
    assert (rendered.report.summarised, rendered.report.dropped, rendered.report.gap) == (ended[2], 3, False)
    assert rendered.report.tokens.summary == message_weight(head)


def test_a_turn_that_a_summary_covers_in_part_is_sent_whole():
    log = Told()
    log.turn()
    log.turn([result("kept")])
    log.add(HistorySummarised, upto=log.events[-3].seq, text="half")
    assert shown_turns(render_prompt(build_history(log.events, Context()))) == [2]


def test_a_summary_is_requested_before_turns_are_dropped_and_again_a_quarter_window_later():
    """No request waits for a summary [B63]."""
    log = Told()
    asked = []
    context = Context(summary="small")
    for n in range(1, 101):
        log.turn()
        history = build_history(log.events, context)
        upto = next_summary_end(history)
        if upto is not None:
            assert isinstance(log.events[upto - 1], TurnEnded)
            asked.append(n)
            log.add(HistorySummarised, upto=upto, text="so far")
            assert next_summary_end(build_history(log.events, context)) is None
        assert not render_prompt(build_history(log.events, context)).report.gap
    assert asked[0] == 31
    assert {b - a for a, b in pairwise(asked)} == {11}


def test_a_summary_is_requested_while_dropped_turns_have_none():
    log = Told()
    for _ in range(60):
        log.turn()
    assert next_summary_end(build_history(log.events, Context())) is None, "no model makes summaries"
    history = build_history(log.events, Context(summary="small"))
    assert render_prompt(history).report.gap
    log.add(HistorySummarised, upto=next_summary_end(history), text="so far")
    assert not render_prompt(build_history(log.events, Context(summary="small"))).report.gap


# --- tokens ---


def test_the_providers_token_count_corrects_the_estimate_unless_it_is_implausible():
    for counted, ratio in ((1_000, 1.0), (1_500, 1.5), (1_510, 1.625), (10, 1.0), (9_000, 1.0), (None, 1.0)):
        log = Told()
        log.hear("u" * 4_000)
        log.begin()
        log.say("", result("kept", 4_000), usage=counted, context={"estimate": 1_000})
        report = render_prompt(build_history(log.events, FOREVER), instructions=100, tools=50).report
        assert report.ratio == ratio
        assert report.tokens.total == round(report.estimate * ratio)
        assert report.estimate > 2_150
        log.say("done")
        log.end()
        log.turn()
        assert render_prompt(build_history(log.events, FOREVER)).report.ratio == ratio, "of the turn before"
        log.turn()
        assert render_prompt(build_history(log.events, FOREVER)).report.ratio == 1.0, "too long ago"


def test_fewer_turns_fit_if_the_provider_counts_more_tokens():
    log = Told()
    for _ in range(10):
        log.turn(text="u" * 4_000)
    log.hear()
    log.begin()
    plain = render_prompt(build_history(log.events, Context(budget=10_500)))
    log.say("", result("kept"), usage=2_000, context={"estimate": 1_000})
    costly = render_prompt(build_history(log.events, Context(budget=10_500)))
    assert plain.report.turns == 11
    assert costly.report.turns <= 5
    assert costly.report.tokens.total <= 10_500


def test_the_report_of_a_request_counts_the_changes_of_hooks():
    log = Told()
    log.turn(text="u" * 400)
    report = render_prompt(build_history(log.events, Context()), instructions=10, tools=20).report
    sent = report.as_sent([("weather", "w" * 40), ("clock", "t" * 4)])
    assert [(each.hook, each.tokens) for each in sent.injected] == [("weather", 10), ("clock", 1)]
    assert (sent.tokens.injections, sent.estimate) == (11, report.estimate + 11)
    shorter = report.as_sent(messages=[UserMessage(text="x" * 8, seq=1, turn=1, by="ann")])
    assert (shorter.estimate, shorter.tokens.history, shorter.tokens.total) == (32, 2, 32)
    assert msgspec.convert(report.to_data(), type(report)) == report


# --- the ceiling ---


def test_over_the_ceiling_the_oldest_results_of_the_current_turn_are_stubbed_several_at_a_time():
    log = Told()
    log.hear()
    log.begin()
    gone, seen = [], []
    for _ in range(40):
        seen += log.say("", result("kept", 3_900))
        rendered = render_prompt(build_history(log.events, Context()), instructions=100, capacity=16_000)
        assert rendered.report.tokens.total <= 12_000
        stubbed = list(rendered.report.stubbed)
        assert stubbed == seen[: len(stubbed)]
        assert seen[-1] not in stubbed
        gone.append(len(stubbed))
    assert gone == sorted(gone)
    assert gone[5] == 0
    assert len(set(gone)) < 20


def test_results_that_are_too_large_on_their_own_are_cut_and_marked():
    log = Told()
    log.hear()
    log.begin()
    (old,) = log.say("", result("kept", 9_000))
    large, small, failed = log.say("", result("kept", 15_000), result("kept", 50), result("kept", 7_000, ok=False))
    rendered = render_prompt(build_history(log.events, Context()), capacity=4_000)
    assert rendered.report.stubbed == (old,)
    assert rendered.report.cut == (large, failed)
    assert rendered.report.tokens.total <= 3_000
    sent = envelopes(rendered)
    assert "[cut: limit" in sent[large]["result"]
    assert sent[small]["result"] == "x" * 50
    assert sent[failed]["error"]["kind"] == "timeout"
    check_legal(rendered.messages)


def test_a_turn_that_cannot_be_made_to_fit_is_refused_as_too_large():
    log = Told()
    log.hear("u" * 20_000)
    log.begin()
    with pytest.raises(ModelError, match=r"more than 75% of the model's 4000") as refusal:
        render_prompt(build_history(log.events, Context()), capacity=4_000)
    assert refusal.value.kind == "too_large"
    assert refusal.value.details == {"tokens": 5_000, "window": 4_000, "ceiling": 0.75}
    assert render_prompt(build_history(log.events, Context()), capacity=8_000).report.tokens.total == 5_000
    with pytest.raises(ModelError):
        render_prompt(build_history(log.events, Context()), capacity=8_000, tail=4_000)


def test_earlier_turns_are_dropped_before_results_of_the_current_turn_are_stubbed():
    log = Told()
    for _ in range(4):
        log.turn(text="u" * 4_000)
    log.hear()
    log.begin()
    log.say("", result("kept", 8_000))
    rendered = render_prompt(build_history(log.events, Context()), capacity=4_000)
    assert shown_turns(rendered) == [5]
    assert rendered.report.stubbed == rendered.report.cut == ()


# --- from mid-log ---


def mid_log_starts(events):
    """Yield every position from which a history may be loaded, with the earlier events that it needs."""
    for n, event in enumerate(events):
        if isinstance(event, TurnEnded):
            begun = {each.message for each in events[:n] if isinstance(each, TurnStarted)}
            waiting = [e for e in events[:n] if isinstance(e, MessageReceived) and e.seq not in begun]
            summaries = [e for e in events[:n] if isinstance(e, HistorySummarised)]
            yield n, sorted([*waiting, *summaries[-1:]], key=lambda e: e.seq)


@settings(max_examples=300, deadline=None)
@given(logs(), contexts, st.integers(0, 400), st.sampled_from([None, 1_000, 8_000]))
def test_a_history_loaded_from_mid_log_equals_one_built_event_by_event(log, context, fixed, capacity):
    """Another process renders the same request [B63]."""
    events = log.events
    whole = build_history(events, context)
    shown = render_or_refuse(whole, fixed, capacity)
    for n, before in mid_log_starts(events):
        history = build_history([*before, *events[n:]], context)
        if history.is_sufficient:
            assert render_or_refuse(history, fixed, capacity) == shown
            assert next_summary_end(history, tools=fixed) == next_summary_end(whole, tools=fixed)
            assert history.seq == whole.seq


def render_or_refuse(history, fixed, capacity):
    try:
        return render_prompt(history, tools=fixed, capacity=capacity)
    except ModelError as refusal:
        return refusal.details


@settings(max_examples=150, deadline=None)
@given(logs(), contexts, st.sampled_from([None, 1_000, 8_000]))
def test_an_extended_rendering_equals_a_new_one(log, context, capacity):
    """Rendering event by event gives the same request as rendering once [B63]."""

    def rendered(way):
        try:
            made = way(history, instructions=10, tools=5, tail=7, capacity=capacity)
        except ModelError as refusal:
            return refusal.message
        return list(made.messages), made.report

    history, rendering = History(context), PromptRenderer()
    for event in log.events:
        history.apply(event)
        assert rendered(rendering.render) == rendered(render_prompt)


def test_a_turn_of_many_steps_extends_its_rendering():
    """No message is rendered again in a later step [B63]."""
    log, history, rendering = Told(), History(Context()), PromptRenderer()
    log.hear()
    log.begin()
    made = []
    for event in log.events:
        history.apply(event)
    for _ in range(50):
        log.say("", ("aged", None, "x", True))
        for event in log.events[history.seq :]:
            history.apply(event)
        made.append(rendering.render(history))
    assert [len(each.messages) for each in made] == [1 + 2 * n for n in range(1, 51)]
    assert all(one is other for one, other in zip(made[0].messages, made[-1].messages, strict=False))
    assert rendering._cached.messages is made[-1].messages._items  # the list is the same object


@settings(max_examples=200, deadline=None)
@given(logs(), contexts, st.sampled_from([None, 1_000, 8_000]))
def test_every_request_is_legal_within_its_limits_and_has_whole_turns_in_order(log, context, capacity):
    """Only stubs and cuts differ from the transcript [B62, B63]."""
    full = Transcript()
    for event in log.events:
        full.apply(event)
    history = build_history(log.events, context)
    try:
        rendered = render_prompt(history, capacity=capacity)
    except ModelError:
        assert capacity == 1_000
        return
    messages = rendered.messages[1 if history.leading else 0 :]
    check_legal(messages)
    assert rendered.report.turns <= context.window
    assert rendered.report.turns <= 1 or rendered.report.tokens.total <= context.budget
    assert capacity is None or rendered.report.tokens.total <= capacity * 0.75 + 2
    assert rendered.report.estimate == sum(message_weight(message) for message in rendered.messages)
    expected = [m for m in full.messages if turns_of_messages(full)[id(m)] in shown_turns(rendered)]
    assert [type(m) for m in messages] == [type(m) for m in expected]
    changed = {*rendered.report.stubbed, *rendered.report.cut}
    for shown, said in zip(messages, expected, strict=True):
        if isinstance(said, ToolResult):
            assert (shown.content != said.content) == (said.call in changed)
        elif isinstance(said, AssistantMessage):
            assert (shown.text, [use.call for use in shown.calls]) == (said.text, [use.call for use in said.calls])
        else:
            assert shown == said


def turns_of_messages(transcript):
    """Return the turn of each message, by the identity of the message."""
    turn, found = 0, {}
    for message in transcript.messages:
        turn = getattr(message, "turn", turn)
        found[id(message)] = turn
    return found


def test_without_limits_a_request_has_every_message_of_the_transcript():
    """This holds for random logs of the machine, after every event [B63]."""
    for seed in range(40):
        shell = RandomShell(seed, set())
        shell.play(60)
        shell.rest()
        history, full = History(FOREVER), Transcript()
        for event in shell.log.events:
            history.apply(event)
            full.apply(event)
            ours = [m for m in render_prompt(history).messages if not isinstance(m, ToolResult)]
            assert ours == [m for m in full.messages if not isinstance(m, ToolResult)]
            assert len(render_prompt(history).messages) == len(full.messages)


def test_random_logs_of_the_machine_render_the_same_from_mid_log():
    for seed in range(60):
        shell = RandomShell(seed, set())
        shell.play(120)
        events = shell.log.events
        for context in (Context(window=2), Context(window=3, budget=60)):
            shown = render_prompt(build_history(events, context))
            for n, before in mid_log_starts(events):
                history = build_history([*before, *events[n:]], context)
                assert not history.is_sufficient or render_prompt(history) == shown


# --- cost ---


def test_memory_is_bounded_by_the_window_and_the_budget_and_not_by_history():
    """A turn that no later request can show is dropped."""
    history, log = History(Context(window=10, budget=2_000)), Told()
    most = 0
    for n in range(400):
        log.turn([result("default", 2_000)], text="u" * (4_000 if n % 7 == 0 else 10))
        for event in log.events[history.seq :]:
            history.apply(event)
        most = max(most, len(history.turns))
        assert sum(turn.least for turn in history.turns) <= 2 * 2_000 + 1_200
    assert most <= 10


def test_rendering_after_one_more_step_calls_few_functions_for_each_message():
    """No message is rendered again, which would take about 100 calls for each."""
    log = Told()
    for _ in range(250):
        log.turn([result("default", 2_000, "p")])
    context = Context(window=1_000, budget=10_000_000)
    history = build_history(log.events, context)
    render_prompt(history)
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event == "call"

    for _ in range(3):
        log.turn([result("default", 2_000, "p")])
        calls = 0
        sys.setprofile(count)
        try:
            for event in log.events[history.seq :]:
                history.apply(event)
            messages = render_prompt(history).messages
        finally:
            sys.setprofile(None)
        assert len(messages) > 1_000
        assert calls < 15 * len(messages)


def test_a_message_that_is_sent_again_is_the_same_object():
    """Models cache what they rendered by the identity of the message."""
    log = Told()
    for _ in range(10):
        log.turn([result("default", 100, "p"), result("counted", 10, "p")])
    log.add(HistorySummarised, upto=log.events[6].seq, text="s")
    history = build_history(log.events, Context())
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
def test_invalid_settings_are_refused_at_their_declaration(fields, words):
    with pytest.raises(DeclarationError, match=words):
        Context(**fields)


def test_the_default_settings_are_the_documented_ones():
    context = Context()
    assert (context.window, context.budget, context.reserve, context.ceiling) == (40, 30_000, 4_000, 0.75)
    assert context.retention == Retention.turns(6) == KEPT["default"]
    assert context == Context()
