"""Events to messages: exact pairing, call order, marks, and the same incrementally as from scratch."""

import json
from itertools import pairwise

from test_machine import ANN, Dice, Log

from holdfast.core.decisions import Answer, Deny
from holdfast.core.events import AssistantSaid, MessageReceived, OutputRejected
from holdfast.core.inputs import BeginTurn, CancelTurn, EndTurn, ModelReplied, SendMessage
from holdfast.core.transcript import AssistantMessage, Message, Messages, ToolResult, Transcript, UserMessage


def read(events):
    transcript = Transcript()
    for event in events:
        transcript.apply(event)
    return transcript


def roles(messages):
    return [type(message).__name__.replace("Message", "").replace("ToolResult", "Result") for message in messages]


def legal(messages):
    """What every provider wants: each call answered right behind the message that made it, in call order."""
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
    assert len(set(uses)) == len(uses), "a provider would refuse an id that is there twice"


def test_results_stand_in_call_order_whatever_order_they_came_in():
    """B19"""
    log = Log()
    a, b, c = log.start("human", "human", "human")
    for call, answer in ((c, "third"), (a, "first"), (b, "second")):
        log.resolve(call, Answer(answer))
    messages = read(log.events).messages
    assert roles(messages) == ["User", "Assistant", "Result", "Result", "Result"]
    assert [json.loads(m.content)["result"] for m in messages[2:]] == ["first", "second", "third"]
    assert [m.call for m in messages[2:]] == [a, b, c]


def test_until_a_step_is_complete_the_model_would_see_none_of_its_results_and_people_those_that_are_there():
    """B38"""
    log = Log()
    a, b = log.start("human", "human")
    log.resolve(b, Answer("second"))
    transcript = read(log.events)
    assert roles(transcript.messages) == ["User", "Assistant"]
    assert roles(transcript.visible_messages()) == ["User", "Assistant", "Result"]
    log.resolve(a, Deny("no"))
    assert roles(read(log.events).messages) == ["User", "Assistant", "Result", "Result"]


def test_a_reply_that_was_cut_off_is_kept_and_marked_and_an_empty_one_leaves_no_trace():
    """B58"""
    for text, expected in (("half a sen", ["User", "Assistant", "User"]), ("", ["User", "User"])):
        log = Log()
        log.tell(SendMessage(text="hi", by=ANN, agent="a"))
        log.tell(BeginTurn(steps=3))
        log.tell(CancelTurn(by=ANN))
        log.tell(EndTurn(text=text))
        log.tell(SendMessage(text="again", by=ANN))
        log.tell(BeginTurn(steps=3))
        messages = read(log.events).messages
        assert roles(messages) == expected
        if text:
            assert messages[1].partial
            assert messages[1].text.startswith(text)
            assert messages[1].text != text


def test_a_queued_message_is_said_when_its_turn_begins():
    """B13"""
    log = Log()
    (a,) = log.start("human")
    log.tell(SendMessage(text="later", by=ANN, when_busy="queue"))
    assert roles(read(log.events).messages) == ["User", "Assistant"]
    log.resolve(a, Answer("x"))
    log.reply(text="done")
    log.tell(EndTurn())
    log.tell(BeginTurn(steps=3))
    messages = read(log.events).messages
    assert roles(messages) == ["User", "Assistant", "Result", "Assistant", "User"]
    said = next(event for event in log.events if isinstance(event, MessageReceived) and event.text == "later")
    assert (messages[-1].text, messages[-1].seq, messages[-1].turn) == ("later", said.seq, 2)


def test_a_rejected_answer_and_the_request_to_repair_it_are_replayed():
    """B24: what the model is sent back"""
    log = Log()
    log.tell(SendMessage(text="hi", by=ANN, agent="a"))
    log.tell(BeginTurn(steps=3))
    rejected = OutputRejected(
        seq=log.state.seq + 1, at=0.0, by=ANN, v=1, turn=1, message="give an integer", text="five"
    )
    log.fold([rejected])
    messages = read(log.events).messages
    assert roles(messages) == ["User", "Assistant", "User"]
    assert [m.text for m in messages] == ["hi", "five", "give an integer"]


def test_one_event_at_a_time_is_the_same_as_all_at_once_and_every_request_is_legal():
    """B54, B63: incremental = from scratch, and a view never changes behind its reader's back"""
    for seed in range(60):
        dice = Dice(seed, set())
        dice.play(60)
        dice.rest()
        events = dice.log.events
        growing = Transcript()
        views = []
        for n, event in enumerate(events, 1):
            growing.apply(event)
            if n % 7 == 0 or n == len(events):
                scratch = read(events[:n])
                assert growing.messages == scratch.messages
                assert growing.visible_messages() == scratch.visible_messages()
            if isinstance(event, AssistantSaid):
                views.append((growing.messages, list(growing.messages)))
        for view, copy in views:
            assert list(view) == copy
        legal(list(growing.messages))
        assert growing.seq == len(events)


def test_what_is_sent_to_the_model_grows_and_never_changes():
    """B63: request t+1 starts with request t"""
    for seed in range(20):
        dice = Dice(seed, set())
        dice.play(60)
        requests, transcript = [], Transcript()
        for event in dice.log.events:
            if isinstance(event, AssistantSaid):
                requests.append(list(transcript.messages))
            transcript.apply(event)
        for earlier, later in pairwise(requests):
            assert later[: len(earlier)] == earlier


def test_provider_s_parts_are_replayed_verbatim():
    """B46"""
    log = Log()
    log.tell(SendMessage(text="hi", by=ANN, agent="a"))
    log.tell(BeginTurn(steps=3))
    parts = [{"kind": "thinking", "data": {"signature": "abc=="}}]
    log.tell(ModelReplied(turn=1, step=1, text="x", parts=parts, provider="p"))
    message = read(log.events).messages[1]
    assert (message.parts, message.provider) == (parts, "p")


def test_a_view_of_messages_is_a_sequence_like_any_other():
    """The first n of an append-only list"""
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
