"""The transcript: exact pairing, call order, partial replies; the same result incrementally as from scratch."""

import json
from itertools import pairwise

from test_machine import ANN, Log, RandomShell

from holdfast.core.decisions import Answer, Deny
from holdfast.core.events import AssistantSaid, MessageReceived, OutputRejected
from holdfast.core.inputs import BeginTurn, CancelTurn, EndTurn, ModelReplied, SendMessage
from holdfast.core.transcript import AssistantMessage, Message, Messages, ToolResult, Transcript, UserMessage


def build_transcript(events):
    transcript = Transcript()
    for event in events:
        transcript.apply(event)
    return transcript


def roles(messages):
    return [type(message).__name__.replace("Message", "").replace("ToolResult", "Result") for message in messages]


def check_legal(messages):
    """Check what every provider requires: the results follow the message with their calls, in call order."""
    position = 0
    while position < len(messages):
        message = messages[position]
        assert not isinstance(message, ToolResult), "a result without its call"
        position += 1
        if isinstance(message, AssistantMessage):
            for use in message.calls:
                result = messages[position]
                assert isinstance(result, ToolResult)
                assert (result.id, result.call, result.tool) == (use.id, use.call, use.name)
                position += 1
    uses = [use.id for m in messages if isinstance(m, AssistantMessage) for use in m.calls]
    assert len(set(uses)) == len(uses), "a provider would refuse a duplicate id"


def test_results_are_in_call_order_whatever_order_they_arrive_in():
    """Results have the order of their calls [B19]."""
    log = Log()
    a, b, c = log.start("human", "human", "human")
    for call, answer in ((c, "third"), (a, "first"), (b, "second")):
        log.resolve(call, Answer(answer))
    messages = build_transcript(log.events).messages
    assert roles(messages) == ["User", "Assistant", "Result", "Result", "Result"]
    assert [json.loads(m.content)["result"] for m in messages[2:]] == ["first", "second", "third"]
    assert [m.call for m in messages[2:]] == [a, b, c]


def test_results_of_an_incomplete_step_are_visible_to_people_and_not_to_the_model():
    """The model gets the results of a step together [B38]."""
    log = Log()
    a, b = log.start("human", "human")
    log.resolve(b, Answer("second"))
    transcript = build_transcript(log.events)
    assert roles(transcript.messages) == ["User", "Assistant"]
    assert roles(transcript.visible_messages()) == ["User", "Assistant", "Result"]
    log.resolve(a, Deny("no"))
    assert roles(build_transcript(log.events).messages) == ["User", "Assistant", "Result", "Result"]


def test_a_partial_reply_is_kept_and_marked_and_an_empty_one_is_left_out():
    """The text that came before a cancel stays in the conversation [B58]."""
    for text, expected in (("half a sen", ["User", "Assistant", "User"]), ("", ["User", "User"])):
        log = Log()
        log.tell(SendMessage(text="hi", by=ANN, agent="a"))
        log.tell(BeginTurn(steps=3))
        log.tell(CancelTurn(by=ANN))
        log.tell(EndTurn(text=text))
        log.tell(SendMessage(text="again", by=ANN))
        log.tell(BeginTurn(steps=3))
        messages = build_transcript(log.events).messages
        assert roles(messages) == expected
        if text:
            assert messages[1].partial
            assert messages[1].text.startswith(text)
            assert messages[1].text != text


def test_a_queued_message_appears_when_its_turn_begins():
    """It is not part of the turn that was open when it came [B13]."""
    log = Log()
    (a,) = log.start("human")
    log.tell(SendMessage(text="later", by=ANN, when_busy="queue"))
    assert roles(build_transcript(log.events).messages) == ["User", "Assistant"]
    log.resolve(a, Answer("x"))
    log.reply(text="done")
    log.tell(EndTurn())
    log.tell(BeginTurn(steps=3))
    messages = build_transcript(log.events).messages
    assert roles(messages) == ["User", "Assistant", "Result", "Assistant", "User"]
    said = next(event for event in log.events if isinstance(event, MessageReceived) and event.text == "later")
    assert (messages[-1].text, messages[-1].seq, messages[-1].turn) == ("later", said.seq, 2)


def test_a_rejected_answer_and_the_request_to_repair_it_are_replayed():
    """The model sees its answer and what is wrong with it [B24]."""
    log = Log()
    log.tell(SendMessage(text="hi", by=ANN, agent="a"))
    log.tell(BeginTurn(steps=3))
    rejected = OutputRejected(
        seq=log.state.seq + 1, at=0.0, by=ANN, v=1, turn=1, message="give an integer", text="five"
    )
    log.fold([rejected])
    messages = build_transcript(log.events).messages
    assert roles(messages) == ["User", "Assistant", "User"]
    assert [m.text for m in messages] == ["hi", "five", "give an integer"]


def test_a_transcript_that_grows_by_events_equals_one_built_at_once_and_is_legal():
    """A view that was taken earlier does not change [B54, B63]."""
    for seed in range(60):
        shell = RandomShell(seed, set())
        shell.play(60)
        shell.rest()
        events = shell.log.events
        growing = Transcript()
        views = []
        for n, event in enumerate(events, 1):
            growing.apply(event)
            if n % 7 == 0 or n == len(events):
                scratch = build_transcript(events[:n])
                assert growing.messages == scratch.messages
                assert growing.visible_messages() == scratch.visible_messages()
            if isinstance(event, AssistantSaid):
                views.append((growing.messages, list(growing.messages)))
        for view, copy in views:
            assert list(view) == copy
        check_legal(list(growing.messages))
        assert growing.seq == len(events)


def test_every_request_starts_with_the_messages_of_the_previous_one():
    """Messages are added and never changed [B63]."""
    for seed in range(20):
        shell = RandomShell(seed, set())
        shell.play(60)
        requests, transcript = [], Transcript()
        for event in shell.log.events:
            if isinstance(event, AssistantSaid):
                requests.append(list(transcript.messages))
            transcript.apply(event)
        for earlier, later in pairwise(requests):
            assert later[: len(earlier)] == earlier


def test_the_parts_of_a_providers_reply_are_replayed_verbatim():
    """Signatures go back to the provider as they came [B46]."""
    log = Log()
    log.tell(SendMessage(text="hi", by=ANN, agent="a"))
    log.tell(BeginTurn(steps=3))
    parts = [{"kind": "thinking", "data": {"signature": "abc=="}}]
    log.tell(ModelReplied(turn=1, step=1, text="x", parts=parts, provider="p"))
    message = build_transcript(log.events).messages[1]
    assert (message.parts, message.provider) == (parts, "p")


def test_a_view_of_messages_is_a_sequence_like_any_other():
    """A view is the first n items of an append-only list."""
    items: list[Message] = [UserMessage(text=str(n), seq=n, turn=1, by="ann") for n in range(5)]
    view = Messages(items, 3)
    items.append(items[0])
    assert len(view) == 3
    assert [m.text for m in view] == ["0", "1", "2"]
    assert (view[0].text, view[-1].text, [m.text for m in view[1:]]) == ("0", "2", ["1", "2"])
    assert view == items[:3]
    for index in (3, -4):
        try:
            view[index]
        except IndexError:
            continue
        raise AssertionError("past the end")
