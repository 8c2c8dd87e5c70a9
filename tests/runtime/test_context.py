"""What a model is sent: loading the history, keeping it up to date, and summaries."""

import asyncio
import sys
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.example_logs import ANN, Told, logs, result
from support.runtimes import lines_run

from holdfast.core import codec
from holdfast.core.events import HistorySummarised, TurnEnded, Usage
from holdfast.core.prompt.compaction import PromptRenderer, render_prompt
from holdfast.core.prompt.history import SUMMARY_HEADING, Context, History
from holdfast.core.state import Queued, State
from holdfast.core.tool import Retention
from holdfast.errors import ModelError
from holdfast.models.scripted import Hang, ScriptedModel, ToolCall
from holdfast.runtime.steps import prompt
from holdfast.runtime.steps.prompt import Window, load_history, render_messages, summarise, summary_due
from holdfast.stores.base import Append
from holdfast.stores.memory import MemoryStore


class CountingStore(MemoryStore):
    """A memory store that counts the events that are read."""

    def __init__(self):
        super().__init__()
        self.read_events = 0

    async def read(self, conversation, after=0, before=None, limit=None):
        found = await super().read(conversation, after, before, limit)
        self.read_events += len(found)
        return found


async def store_log(log, store=None):
    """Append the log to a store, by default a new one, and return the store."""
    if store is None:
        store = CountingStore()
        await store.open()
    row = await store.row("c")
    at = row.seq if row else 0
    await store.append(
        Append(
            conversation="c",
            expected=at,
            events=[codec.encode_event(event) for event in log.events[at:]],
            status="idle",
            agent="a",
            owes=False,
            at=0.0,
        )
    )
    return store


def state_of(log):
    queue = tuple(Queued(message=seq, by=ANN, agent="a") for seq in log.waiting)
    return State(conversation="c", seq=len(log.events), queue=queue)


def last_summary_seq(log):
    return max((event.seq for event in log.events if isinstance(event, HistorySummarised)), default=0)


def fold_history(log, wanted):
    history = History(wanted)
    for event in log.events:
        history.apply(event)
    return history


contexts = st.builds(Context, window=st.integers(1, 6), budget=st.sampled_from([1, 600, 2_000, 100_000]))


@settings(max_examples=150, deadline=None)
@given(logs(), contexts, st.sampled_from([1, 3, 20]))
def test_a_fresh_process_loads_the_same_history_as_the_old_one_and_both_continue_alike(log, wanted, page):
    """Another process sends the same request [B63]."""

    async def main():
        store = await store_log(log)
        with mock.patch.object(prompt, "PAGE", page):
            history = await load_history(store, state_of(log), wanted, summarised=last_summary_seq(log))
        await store.close()
        old = fold_history(log, wanted)
        assert render_prompt(history) == render_prompt(old)
        # Both histories stay equal, whether or not a message was queued.
        seen = len(log.events)
        if not isinstance(log.events[-1], TurnEnded | HistorySummarised):
            log.say("done")
            log.end()
        for tool in ("counted", "aged", "kept"):
            if not log.waiting:
                log.hear()
            log.begin()
            log.say("", *[result(tool, 400, "p")] * 2)
            log.say("done")
            log.end()
        for event in log.events[seen:]:
            history.apply(event)
            old.apply(event)
            assert render_prompt(history) == render_prompt(old)

    asyncio.run(main())


async def test_a_fresh_process_reads_only_the_window_of_a_long_conversation():
    log = Told()
    for _ in range(3_000):
        log.turn([result("default")])
    store = await store_log(log)
    history = await load_history(store, state_of(log), Context())
    assert store.read_events < 1_100, f"of {len(log.events)}"
    assert render_messages(history, PromptRenderer(), instructions="").report.turns > 30
    for budget in (200, 1_000):
        store.read_events = 0
        small = await load_history(store, state_of(log), Context(budget=budget))
        assert store.read_events <= 256
        assert render_messages(small, PromptRenderer(), instructions="").report.tokens.total <= budget
    await store.close()


async def test_a_summary_from_long_before_the_window_is_the_first_message():
    log = Told()
    for _ in range(10):
        log.turn(text="early")
    log.add(HistorySummarised, upto=log.events[-1].seq, text="It began early.")
    for _ in range(200):
        log.turn()
    store = await store_log(log)
    history = await load_history(store, state_of(log), Context(window=5), summarised=last_summary_seq(log))
    assert store.read_events <= 257
    rendered = render_messages(history, PromptRenderer(), instructions="")
    assert rendered.messages[0].text == f"{SUMMARY_HEADING}\n\nIt began early."
    assert rendered.report.gap
    await store.close()


async def test_a_queued_message_that_is_older_than_the_window_is_found():
    """A message may wait in the queue for more turns than the window has [B13]."""
    log = Told()
    log.turn()
    for n in range(30):
        log.hear(f"waiting {n}")
    for _ in range(20):
        log.begin()
        log.say("done")
        log.end()
    store = await store_log(log)
    with mock.patch.object(prompt, "PAGE", 8):
        history = await load_history(store, state_of(log), Context(window=4))
    rendered = render_messages(history, PromptRenderer(), instructions="")
    assert rendered.messages[-2].text == "waiting 19"
    log.begin()
    history.apply(log.events[-1])
    assert render_messages(history, PromptRenderer(), instructions="").messages[-1].text == "waiting 20"
    await store.close()


async def test_a_history_loaded_before_the_first_turn_is_empty_until_that_turn_starts():
    store = CountingStore()
    await store.open()
    history = await load_history(store, State(conversation="c"), Context())
    assert render_messages(history, PromptRenderer(), instructions="").messages == []
    log = Told()
    log.hear()
    await store_log(log, store)
    history = await load_history(store, state_of(log), Context())
    log.begin()
    history.apply(log.events[-1])
    assert [message.text for message in render_messages(history, PromptRenderer(), instructions="").messages] == ["hi"]
    await store.close()


async def test_the_window_is_read_once_and_then_updated_with_events_appended_during_and_after_the_read():
    log = Told()
    log.turn()
    store = await store_log(log)
    states = [state_of(log)]
    log.turn(text="meanwhile")
    await store_log(log, store)
    states.append(state_of(log))
    window = Window()
    window.apply_events(log.events)  # ignored: the window was not read yet
    history = await window.current_history(store, lambda: states.pop(0) if len(states) > 1 else states[0], Context())
    assert [m.text for m in render_messages(history, PromptRenderer(), instructions="").messages] == [
        "hi",
        "done",
        "meanwhile",
        "done",
    ]
    seen, read = len(log.events), store.read_events
    log.turn(text="then")
    await store_log(log, store)
    window.apply_events(log.events[seen:])
    window.apply_events(log.events[seen:])  # a second time: no effect
    states[:] = [state_of(log)]
    assert await window.current_history(store, lambda: states[0], Context()) is history
    assert store.read_events == read
    expected = ["hi", "done", "meanwhile", "done", "then", "done"]
    assert [m.text for m in render_messages(history, PromptRenderer(), instructions="").messages] == expected
    other = await window.current_history(store, lambda: states[0], Context(window=1))
    assert render_messages(other, PromptRenderer(), instructions="").report.turns == 1
    window.forget()
    again = await window.current_history(store, lambda: states[0], Context(window=1))
    assert again is not other
    assert render_messages(again, PromptRenderer(), instructions="") == render_messages(
        other, PromptRenderer(), instructions=""
    )
    await store.close()


def test_the_token_report_counts_instructions_tools_and_history():
    log = Told()
    log.turn(text="u" * 400)
    report = render_messages(fold_history(log, Context()), PromptRenderer(), instructions="i" * 100, tools=111).report
    assert (report.tokens.instructions, report.tokens.tools, report.tokens.history) == (25, 111, 101)
    assert report.tokens.total == 25 + 111 + 101


# --- summaries ---


async def test_a_summary_is_made_from_the_previous_summary_and_the_messages_since():
    """The summary model gets both in one message, without tools [B63]."""
    log = Told()
    log.turn(text="the first thing")
    previous = log.add(HistorySummarised, upto=log.events[-1].seq, text="First, something was said.")
    log.turn([result("kept", 20)], text="book a flight", answer="booked")
    upto = log.events[-1].seq
    log.turn(text="not yet")
    store = await store_log(log)
    usage = Usage(input_tokens=100, output_tokens=10)
    model = ScriptedModel([["  A flight was booked. ", usage]], name="small")
    made = await summarise(store, "c", model, upto=upto, previous=previous)
    assert (made.upto, made.text) == (upto, "A flight was booked.")
    assert [(attempt.model, attempt.usage) for attempt in made.attempts] == [("small", usage)]
    (request,) = model.requests
    (message,) = request.messages
    assert request.tools == ()
    assert message.text.splitlines() == [
        "Summary so far:",
        "First, something was said.",
        "",
        "What was said after it:",
        "User: book a flight",
        'Assistant called kept: {"n":1}',
        'kept returned: {"ok":true,"result":"xxxxxxxxxxxxxxxxxxxx"}',
        "Assistant: booked",
    ]
    await store.close()


async def test_the_input_and_the_length_of_a_summary_are_bounded():
    log = Told()
    for n in range(400):
        log.turn([result("kept", 3_000)], text=f"{n} " + "u" * 3_000)
    store = await store_log(log)
    model = ScriptedModel(["s" * 50_000])
    made = await summarise(store, "c", model, upto=len(log.events), previous=None)
    (request,) = model.requests
    text = request.messages[0].text
    assert 50_000 < len(text) < 105_000
    assert "left out]" in text.splitlines()[1]
    assert "User: 399 " in text
    assert "User: 3 " not in text
    assert len(made.text.encode()) <= 6_000
    assert store.read_events < 1_500
    await store.close()


async def test_a_failed_summary_is_logged_as_a_warning_and_skipped():
    """``summarise`` returns None instead of raising, so that the turn continues."""
    log = Told()
    log.turn()
    store = await store_log(log)
    for entry in (ModelError("no", kind="rate_limited"), RuntimeError("bug"), "", [ToolCall("x")], Hang()):
        model = ScriptedModel([entry])
        with mock.patch.object(prompt, "SUMMARY_SECONDS", 0.05), mock.patch.object(prompt.log, "warning") as warned:
            assert await summarise(store, "c", model, upto=len(log.events), previous=None) is None
        assert warned.call_count == 1
    await store.close()


async def test_a_summary_can_be_cancelled():
    log = Told()
    log.turn()
    store = await store_log(log)
    task = asyncio.create_task(summarise(store, "c", ScriptedModel([Hang()]), upto=len(log.events), previous=None))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await store.close()


async def test_a_conversation_with_summaries_has_no_gap_and_stays_within_its_token_budget():
    """A summary is made whenever one is due [B63]."""
    log = Told()
    store = CountingStore()
    await store.open()
    wanted = Context(budget=3_000, window=20, summary="small", retention=Retention.turns(2))
    model = ScriptedModel([f"summary {n}" for n in range(100)])
    window = Window()
    made = 0
    for n in range(150):
        seen = len(log.events)
        log.turn([result("default", 300)], text=f"{n} " + "u" * (n % 5) * 200)
        await store_log(log, store)
        window.apply_events(log.events[seen:])
        history = await window.current_history(store, lambda: state_of(log), wanted)
        rendered = render_messages(history, PromptRenderer(), instructions="i" * 400)
        assert rendered.report.tokens.total <= 3_000
        assert not rendered.report.gap
        upto = summary_due(history, instructions="i" * 400)
        if upto is not None:
            summary = await summarise(store, "c", model, upto=upto, previous=history.summary)
            assert summary is not None
            seen = len(log.events)
            log.add(HistorySummarised, **msgspec.structs.asdict(summary))
            await store_log(log, store)
            window.apply_events(log.events[seen:])
            made += 1
    assert 5 < made < 50
    await store.close()


def test_the_work_to_fold_a_history_grows_linearly_with_its_turns():
    def count_lines(turns):
        log = Told()
        for n in range(turns):
            log.turn(text=f"question {n}")
        return lines_run(
            lambda: fold_history(log, Context(window=10**6, budget=10**9)), sys.modules[History.__module__]
        )

    few, many = count_lines(200), count_lines(800)
    assert many < 6 * few, "four times as many turns, about four times the work"
