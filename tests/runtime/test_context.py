"""What the model is sent, in the shell: loading from where it matters, staying up to date, summarising."""

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
from holdfast.runtime import prompt
from holdfast.runtime.prompt import Window, load_history, render_messages, summarise, summary_due
from holdfast.stores.base import Append
from holdfast.stores.memory import MemoryStore


class Shelf(MemoryStore):
    """A memory store that counts what is read."""

    def __init__(self):
        super().__init__()
        self.read_events = 0

    async def read(self, conversation, after=0, before=None, limit=None):
        found = await super().read(conversation, after, before, limit)
        self.read_events += len(found)
        return found


async def stored(told, store=None):
    """The log in a store."""
    if store is None:
        store = Shelf()
        await store.open()
    row = await store.row("c")
    at = row.seq if row else 0
    await store.append(
        Append(
            conversation="c",
            expected=at,
            events=[codec.encode_event(event) for event in told.events[at:]],
            status="idle",
            agent="a",
            owes=False,
            at=0.0,
        )
    )
    return store


def state_of(told):
    queue = tuple(Queued(message=seq, by=ANN, agent="a") for seq in told.waiting)
    return State(conversation="c", seq=len(told.events), queue=queue)


def summarised(told):
    return max((event.seq for event in told.events if isinstance(event, HistorySummarised)), default=0)


def lived(told, wanted):
    history = History(wanted)
    for event in told.events:
        history.apply(event)
    return history


contexts = st.builds(Context, window=st.integers(1, 6), budget=st.sampled_from([1, 600, 2_000, 100_000]))


@settings(max_examples=150, deadline=None)
@given(logs(), contexts, st.sampled_from([1, 3, 20]))
def test_what_a_fresh_process_loads_is_what_the_old_one_had_and_goes_on_like_it(told, wanted, page):
    """B63: another process sends the same request"""

    async def main():
        store = await stored(told)
        with mock.patch.object(prompt, "PAGE", page):
            history = await load_history(store, state_of(told), wanted, summarised=summarised(told))
        await store.close()
        old = lived(told, wanted)
        assert render_prompt(history) == render_prompt(old)
        # and both go on alike, whatever was waiting
        seen = len(told.events)
        if not isinstance(told.events[-1], TurnEnded | HistorySummarised):
            told.say("done")
            told.end()
        for tool in ("counted", "aged", "kept"):
            if not told.waiting:
                told.hear()
            told.begin()
            told.say("", *[result(tool, 400, "p")] * 2)
            told.say("done")
            told.end()
        for event in told.events[seen:]:
            history.apply(event)
            old.apply(event)
            assert render_prompt(history) == render_prompt(old)

    asyncio.run(main())


async def test_a_fresh_process_reads_a_long_conversation_from_where_the_window_begins():
    told = Told()
    for _ in range(3_000):
        told.turn([result("default")])
    store = await stored(told)
    history = await load_history(store, state_of(told), Context())
    assert store.read_events < 1_100, f"of {len(told.events)}"
    assert render_messages(history, PromptRenderer(), instructions="").report.turns > 30
    for budget in (200, 1_000):
        store.read_events = 0
        small = await load_history(store, state_of(told), Context(budget=budget))
        assert store.read_events <= 256
        assert render_messages(small, PromptRenderer(), instructions="").report.tokens.total <= budget
    await store.close()


async def test_a_summary_from_long_before_the_window_is_still_at_the_head():
    told = Told()
    for _ in range(10):
        told.turn(text="early")
    told.add(HistorySummarised, upto=told.events[-1].seq, text="It began early.")
    for _ in range(200):
        told.turn()
    store = await stored(told)
    history = await load_history(store, state_of(told), Context(window=5), summarised=summarised(told))
    assert store.read_events <= 257
    rendered = render_messages(history, PromptRenderer(), instructions="")
    assert rendered.messages[0].text == f"{SUMMARY_HEADING}\n\nIt began early."
    assert rendered.report.gap
    await store.close()


async def test_a_message_that_waited_for_longer_than_the_window_is_found():
    """B13"""
    told = Told()
    told.turn()
    for n in range(30):
        told.hear(f"waiting {n}")
    for _ in range(20):
        told.begin()
        told.say("done")
        told.end()
    store = await stored(told)
    with mock.patch.object(prompt, "PAGE", 8):
        history = await load_history(store, state_of(told), Context(window=4))
    rendered = render_messages(history, PromptRenderer(), instructions="")
    assert rendered.messages[-2].text == "waiting 19"
    told.begin()
    history.apply(told.events[-1])
    assert render_messages(history, PromptRenderer(), instructions="").messages[-1].text == "waiting 20"
    await store.close()


async def test_a_conversation_of_which_nothing_is_there_yet_is_empty():
    store = Shelf()
    await store.open()
    history = await load_history(store, State(conversation="c"), Context())
    assert render_messages(history, PromptRenderer(), instructions="").messages == []
    told = Told()
    told.hear()
    await stored(told, store)
    history = await load_history(store, state_of(told), Context())
    told.begin()
    history.apply(told.events[-1])
    assert [message.text for message in render_messages(history, PromptRenderer(), instructions="").messages] == ["hi"]
    await store.close()


async def test_the_window_is_read_once_and_then_fed_what_is_appended_also_while_it_is_being_read():
    told = Told()
    told.turn()
    store = await stored(told)
    states = [state_of(told)]
    told.turn(text="meanwhile")
    await stored(told, store)
    states.append(state_of(told))
    window = Window()
    window.apply_events(told.events)  # not read yet: nothing to feed
    history = await window.current_history(store, lambda: states.pop(0) if len(states) > 1 else states[0], Context())
    assert [m.text for m in render_messages(history, PromptRenderer(), instructions="").messages] == [
        "hi",
        "done",
        "meanwhile",
        "done",
    ]
    seen, read = len(told.events), store.read_events
    told.turn(text="then")
    await stored(told, store)
    window.apply_events(told.events[seen:])
    window.apply_events(told.events[seen:])  # it has them
    states[:] = [state_of(told)]
    assert await window.current_history(store, lambda: states[0], Context()) is history
    assert store.read_events == read
    said = ["hi", "done", "meanwhile", "done", "then", "done"]
    assert [m.text for m in render_messages(history, PromptRenderer(), instructions="").messages] == said
    other = await window.current_history(store, lambda: states[0], Context(window=1))
    assert render_messages(other, PromptRenderer(), instructions="").report.turns == 1
    window.forget()
    again = await window.current_history(store, lambda: states[0], Context(window=1))
    assert again is not other
    assert render_messages(again, PromptRenderer(), instructions="") == render_messages(
        other, PromptRenderer(), instructions=""
    )
    await store.close()


def test_instructions_and_tools_are_part_of_what_is_counted():
    told = Told()
    told.turn(text="u" * 400)
    report = render_messages(lived(told, Context()), PromptRenderer(), instructions="i" * 100, tools=111).report
    assert (report.tokens.instructions, report.tokens.tools, report.tokens.history) == (25, 111, 101)
    assert report.tokens.total == 25 + 111 + 101


# --- summaries ---


async def test_a_summary_is_made_of_the_one_before_it_and_of_what_was_said_since():
    """B63"""
    told = Told()
    told.turn(text="the first thing")
    previous = told.add(HistorySummarised, upto=told.events[-1].seq, text="First, something was said.")
    told.turn([result("kept", 20)], text="book a flight", answer="booked")
    upto = told.events[-1].seq
    told.turn(text="not yet")
    store = await stored(told)
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


async def test_a_summary_is_made_of_a_bounded_piece_of_history_and_is_bounded_itself():
    told = Told()
    for n in range(400):
        told.turn([result("kept", 3_000)], text=f"{n} " + "u" * 3_000)
    store = await stored(told)
    model = ScriptedModel(["s" * 50_000])
    made = await summarise(store, "c", model, upto=len(told.events), previous=None)
    (request,) = model.requests
    text = request.messages[0].text
    assert 50_000 < len(text) < 105_000
    assert "left out]" in text.splitlines()[1]
    assert "User: 399 " in text
    assert "User: 3 " not in text
    assert len(made.text.encode()) <= 6_000
    assert store.read_events < 1_500
    await store.close()


async def test_a_summary_that_fails_is_logged_and_left_out():
    """A turn is never hurt by it"""
    told = Told()
    told.turn()
    store = await stored(told)
    for entry in (ModelError("no", kind="rate_limited"), RuntimeError("bug"), "", [ToolCall("x")], Hang()):
        model = ScriptedModel([entry])
        with mock.patch.object(prompt, "SUMMARY_SECONDS", 0.05), mock.patch.object(prompt.log, "warning") as warned:
            assert await summarise(store, "c", model, upto=len(told.events), previous=None) is None
        assert warned.call_count == 1
    await store.close()


async def test_who_cancels_a_summary_is_obeyed():
    told = Told()
    told.turn()
    store = await stored(told)
    task = asyncio.create_task(summarise(store, "c", ScriptedModel([Hang()]), upto=len(told.events), previous=None))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await store.close()


async def test_a_conversation_with_summaries_never_shows_a_gap_and_stays_within_its_budget():
    """B63: due, made, recorded, shown"""
    told = Told()
    store = Shelf()
    await store.open()
    wanted = Context(budget=3_000, window=20, summary="small", retention=Retention.turns(2))
    model = ScriptedModel([f"summary {n}" for n in range(100)])
    window = Window()
    made = 0
    for n in range(150):
        seen = len(told.events)
        told.turn([result("default", 300)], text=f"{n} " + "u" * (n % 5) * 200)
        await stored(told, store)
        window.apply_events(told.events[seen:])
        history = await window.current_history(store, lambda: state_of(told), wanted)
        rendered = render_messages(history, PromptRenderer(), instructions="i" * 400)
        assert rendered.report.tokens.total <= 3_000
        assert not rendered.report.gap
        upto = summary_due(history, instructions="i" * 400)
        if upto is not None:
            summary = await summarise(store, "c", model, upto=upto, previous=history.summary)
            assert summary is not None
            seen = len(told.events)
            told.add(HistorySummarised, **msgspec.structs.asdict(summary))
            await stored(told, store)
            window.apply_events(told.events[seen:])
            made += 1
    assert 5 < made < 50
    await store.close()


def test_what_a_long_window_costs_grows_with_the_turns_and_no_faster():
    def folded(turns):
        told = Told()
        for n in range(turns):
            told.turn(text=f"question {n}")
        return lines_run(lambda: lived(told, Context(window=10**6, budget=10**9)), sys.modules[History.__module__])

    few, many = folded(200), folded(800)
    assert many < 6 * few, "four times as many turns, about four times the work"
