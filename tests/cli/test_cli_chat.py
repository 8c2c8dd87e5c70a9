"""``holdfast chat`` in a real terminal."""

import sys

import pexpect
import pytest
from terminal import DESK, assert_refused, environment

WIDE = (50, 120)


class ChatSession:
    """A chat in a pseudo-terminal."""

    def __init__(self, desk, agent, *words, term="dumb", **env):
        self.desk = desk
        self.child = pexpect.spawn(
            sys.executable,
            ["-m", "holdfast", "chat", f"{DESK}:{agent}", "--conversation", "c", "--by", "ada", *words],
            cwd=str(desk.path),
            env=environment(TERM=term, **{"XDG_STATE_HOME": str(desk.path / "state"), **env}),
            dimensions=WIDE,
            timeout=60,
            encoding="utf-8",
        )

    def expect(self, text):
        self.child.expect_exact(text)

    def send_line(self, text):
        self.child.sendline(text)

    def exit(self):
        """Press Ctrl-D and return the exit code."""
        self.child.sendeof()
        self.child.expect(pexpect.EOF)
        self.child.close()
        return self.child.exitstatus

    def event_types(self):
        return [e["type"] for e in self.desk.log("c")]


@pytest.fixture
def start_chat(desk):
    sessions = []

    def start(agent, first="> ", **env):
        sessions.append(ChatSession(desk, agent, **env))
        sessions[-1].expect(first)
        return sessions[-1]

    yield start
    for each in sessions:
        each.child.close(force=True)


def test_chat_without_a_terminal_is_refused(desk):
    assert_refused(desk("chat", f"{DESK}:gated"), 2, "[no_prompt]", "holdfast run")
    assert not (desk.path / "holdfast.db").exists()


def test_a_chat_exchanges_messages_and_replies_until_ctrl_d(start_chat):
    chat = start_chat("plain")
    chat.send_line("hello")
    chat.expect("plain: Good day.")
    chat.expect("turn completed")
    chat.expect("> ")
    chat.send_line("again")
    chat.expect("plain: And again.")
    chat.expect("> ")
    assert chat.exit() == 0
    assert chat.event_types().count("TurnEnded") == 2


def test_a_call_is_approved_in_the_chat_after_its_reasons_were_shown(start_chat):
    chat = start_chat("gated")
    chat.send_line("hi")
    chat.expect("Give 2.5 back?")
    chat.expect("(l)eave it pending: ")
    chat.send_line("x")
    chat.expect("type one of a, e, d, w, l")
    chat.send_line("w")
    chat.expect("low risk")
    chat.expect("for ada")
    chat.expect("expires")
    chat.expect("this tool asks before it runs")
    chat.expect("digest")
    chat.expect("(l)eave it pending: ")
    chat.send_line("a")
    chat.expect("approved by ada")
    chat.expect('It said {"ok":true,"result":{"refunded":2.5}}')
    chat.expect("> ")
    assert chat.exit() == 0


def test_a_question_about_a_waiting_call_is_answered_before_the_decision(start_chat):
    """The card is shown again after the answer; a message at the prompt asks, too [B120]."""
    chat = start_chat("explaining")
    chat.send_line("hi")
    chat.expect("pending: ")
    chat.send_line("/ask")
    chat.expect("needs a question")
    chat.expect("pending: ")
    chat.send_line("/ask Why this amount?")
    chat.expect("explaining: It came late.")
    chat.expect("Give 2.5 back?")
    chat.expect("pending: ")
    chat.send_line("l")
    chat.expect("> ")
    chat.send_line("And why at all?")
    chat.expect("explaining: It was broken.")
    chat.expect("> ")
    chat.send_line("")
    chat.expect("Give 2.5 back?")
    chat.expect("pending: ")
    chat.send_line("a")
    chat.expect("approved by ada")
    chat.expect("turn completed")
    chat.expect("> ")
    assert chat.exit() == 0
    types = chat.event_types()
    assert (types.count("AsideAnswered"), types.count("TurnEnded"), types.count("CallReturned")) == (2, 1, 1)


def test_a_call_is_denied_in_the_chat_with_a_reason(start_chat):
    chat = start_chat("gated")
    chat.send_line("hi")
    chat.expect("pending: ")
    chat.send_line("d")
    chat.expect("why not")
    chat.send_line("paid already")
    chat.expect("denied (paid already) by ada")
    chat.expect("> ")
    assert chat.exit() == 0


def test_edited_arguments_are_shown_as_a_diff_and_confirmed_before_they_are_sent(start_chat, desk):
    editor = desk.path / "editor"
    editor.write_text("#!/bin/sh\nsed -i 's/2.5/1.25/' \"$1\"\n")
    editor.chmod(0o755)
    chat = start_chat("gated", EDITOR=str(editor))
    chat.send_line("hi")
    chat.expect("pending: ")
    chat.send_line("e")
    chat.expect('-  "amount": 2.5')
    chat.expect('+  "amount": 1.25')
    chat.expect("(n)o: ")
    chat.send_line("n")
    chat.expect("pending: ")
    chat.send_line("e")
    chat.expect("(n)o: ")
    chat.send_line("y")
    chat.expect('"refunded":1.25')
    chat.expect("> ")
    assert chat.exit() == 0


def test_invalid_json_from_the_editor_sends_nothing(start_chat, desk):
    editor = desk.path / "editor"
    editor.write_text('#!/bin/sh\necho nonsense > "$1"\n')
    editor.chmod(0o755)
    chat = start_chat("gated", EDITOR=str(editor))
    chat.send_line("hi")
    chat.expect("pending: ")
    chat.send_line("e")
    chat.expect("not valid JSON")
    chat.expect("pending: ")
    chat.send_line("l")
    chat.expect("left pending")
    chat.expect("> ")
    assert chat.exit() == 0
    assert len(desk("pending", "--json").objects) == 1


def test_a_call_left_pending_is_asked_again_after_enter_and_after_a_restart(start_chat, desk):
    chat = start_chat("gated")
    chat.send_line("hi")
    chat.expect("pending: ")
    chat.send_line("l")
    chat.expect("left pending")
    chat.expect("> ")
    chat.send_line("")
    chat.expect("Give 2.5 back?")
    chat.expect("pending: ")
    assert chat.exit() == 0
    chat = start_chat("gated", first="pending: ")
    chat.send_line("a")
    chat.expect("approved by ada")
    chat.expect("> ")
    assert chat.exit() == 0


def test_a_question_lists_its_choices_and_is_asked_again_after_an_invalid_answer(start_chat):
    chat = start_chat("size")
    chat.send_line("hi")
    chat.expect("Which size?")
    chat.expect("/leave): ")
    chat.send_line("xl")
    chat.expect("none of the choices")
    chat.expect("/leave): ")
    chat.send_line("2")
    chat.expect("answered m by ada")
    chat.expect("> ")
    assert chat.exit() == 0


def test_an_answer_is_parsed_by_the_type_that_the_question_asks_for(start_chat):
    chat = start_chat("number")
    chat.send_line("hi")
    chat.expect("/leave): ")
    chat.send_line("many")
    chat.expect("integer")
    chat.expect("/leave): ")
    chat.send_line("/why")
    chat.expect("the answer is the result")
    chat.expect("/leave): ")
    chat.send_line("7")
    chat.expect("answered 7 by ada")
    chat.expect("> ")
    assert chat.exit() == 0


def test_a_form_is_asked_field_by_field_and_enter_skips_optional_fields(start_chat):
    chat = start_chat("seat")
    chat.send_line("hi")
    for field, text in [
        ("row (integer", "12"),
        ("window (boolean", "true"),
        ("name (text", "Ada"),
        ("skips it): ", ""),
    ]:
        chat.expect(field)
        chat.send_line(text)
    chat.expect('answered {"row":12,"window":true,"name":"Ada"} by ada')
    chat.expect("> ")
    assert chat.exit() == 0


def test_the_result_of_a_manual_call_is_typed_in_the_chat(start_chat):
    chat = start_chat("scales")
    chat.send_line("hi")
    chat.expect("pending: ")
    chat.send_line("s")
    chat.expect("its result: ")
    chat.send_line("1.5")
    chat.expect('"result":1.5')
    chat.expect("> ")
    assert chat.exit() == 0


def test_ctrl_c_at_an_approval_cancels_the_turn(start_chat):
    chat = start_chat("gated")
    chat.send_line("hi")
    chat.expect("pending: ")
    chat.child.sendintr()
    chat.expect("turn ended: cancelled")
    chat.expect("> ")
    assert chat.exit() == 0
    assert chat.event_types()[-1] == "TurnEnded"


def test_ctrl_c_cancels_a_running_tool_and_ctrl_c_twice_at_the_prompt_exits(start_chat):
    chat = start_chat("bank")
    chat.send_line("hi")
    chat.expect("wire")
    chat.child.sendintr()
    chat.expect("cancelling the turn")
    chat.expect("turn ended: cancelled")
    chat.expect("> ")
    chat.child.sendintr()
    chat.expect("again exits")
    chat.expect("> ")
    chat.child.sendintr()
    chat.expect("to continue")
    chat.child.expect(pexpect.EOF)
    chat.child.close()
    assert chat.child.exitstatus == 130


def test_lines_that_were_typed_before_the_question_decide_nothing(start_chat, desk):
    chat = start_chat("gated")
    chat.child.send("hi\na\na\na\n")
    chat.expect("pending: ")
    chat.child.expect(pexpect.TIMEOUT, timeout=0.5)
    assert len(desk("pending", "--json").objects) == 1
    chat.send_line("l")
    chat.expect("> ")
    assert chat.exit() == 0
