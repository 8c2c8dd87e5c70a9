"""``assent chat`` in a real terminal."""

import sys

import pexpect
import pytest
from terminal import DESK, environment, refused

WIDE = (50, 120)


class Talk:
    """A chat in a pseudo-terminal."""

    def __init__(self, desk, agent, *words, term="dumb", **env):
        self.desk = desk
        self.child = pexpect.spawn(
            sys.executable,
            ["-m", "assent", "chat", f"{DESK}:{agent}", "--conversation", "c", "--by", "ada", *words],
            cwd=str(desk.path),
            env=environment(TERM=term, **{"XDG_STATE_HOME": str(desk.path / "state"), **env}),
            dimensions=WIDE,
            timeout=60,
            encoding="utf-8",
        )

    def sees(self, text):
        self.child.expect_exact(text)

    def says(self, text):
        self.child.sendline(text)

    def leaves(self):
        self.child.sendeof()
        self.child.expect(pexpect.EOF)
        self.child.close()
        return self.child.exitstatus

    def types(self):
        return [e["type"] for e in self.desk.log("c")]


@pytest.fixture
def talk(desk):
    open_talks = []

    def start(agent, first="> ", **env):
        open_talks.append(Talk(desk, agent, **env))
        open_talks[-1].sees(first)
        return open_talks[-1]

    yield start
    for each in open_talks:
        each.child.close(force=True)


def test_without_a_terminal_it_is_refused(desk):
    refused(desk("chat", f"{DESK}:gated"), 2, "[no_prompt]", "assent run")
    assert not (desk.path / "assent.db").exists()


def test_messages_and_replies_until_ctrl_d(talk):
    chat = talk("plain")
    chat.says("hello")
    chat.sees("plain: Good day.")
    chat.sees("turn completed")
    chat.sees("> ")
    chat.says("again")
    chat.sees("plain: And again.")
    chat.sees("> ")
    assert chat.leaves() == 0
    assert chat.types().count("TurnEnded") == 2


def test_an_approval_is_asked_for_inline_with_its_reasons(talk):
    chat = talk("gated")
    chat.says("hi")
    chat.sees("Give 2.5 back?")
    chat.sees("(l)eave it pending: ")
    chat.says("x")
    chat.sees("type one of a, e, d, w, l")
    chat.says("w")
    chat.sees("low risk")
    chat.sees("for ada")
    chat.sees("expires")
    chat.sees("this tool asks before it runs")
    chat.sees("digest")
    chat.sees("(l)eave it pending: ")
    chat.says("a")
    chat.sees("approved by ada")
    chat.sees('It said {"ok":true,"result":{"refunded":2.5}}')
    chat.sees("> ")
    assert chat.leaves() == 0


def test_deny_with_a_reason(talk):
    chat = talk("gated")
    chat.says("hi")
    chat.sees("pending: ")
    chat.says("d")
    chat.sees("why not")
    chat.says("paid already")
    chat.sees("denied (paid already) by ada")
    chat.sees("> ")
    assert chat.leaves() == 0


def test_edit_in_the_editor_shows_the_diff_before_it_is_sent(talk, desk):
    editor = desk.path / "editor"
    editor.write_text("#!/bin/sh\nsed -i 's/2.5/1.25/' \"$1\"\n")
    editor.chmod(0o755)
    chat = talk("gated", EDITOR=str(editor))
    chat.says("hi")
    chat.sees("pending: ")
    chat.says("e")
    chat.sees('-  "amount": 2.5')
    chat.sees('+  "amount": 1.25')
    chat.sees("(n)o: ")
    chat.says("n")
    chat.sees("pending: ")
    chat.says("e")
    chat.sees("(n)o: ")
    chat.says("y")
    chat.sees('"refunded":1.25')
    chat.sees("> ")
    assert chat.leaves() == 0


def test_a_broken_editor_or_bad_json_sends_nothing(talk, desk):
    editor = desk.path / "editor"
    editor.write_text('#!/bin/sh\necho nonsense > "$1"\n')
    editor.chmod(0o755)
    chat = talk("gated", EDITOR=str(editor))
    chat.says("hi")
    chat.sees("pending: ")
    chat.says("e")
    chat.sees("not valid JSON")
    chat.sees("pending: ")
    chat.says("l")
    chat.sees("left pending")
    chat.sees("> ")
    assert chat.leaves() == 0
    assert len(desk("pending", "--json").objects) == 1


def test_what_is_left_pending_is_asked_again_with_enter_and_after_a_restart(talk, desk):
    chat = talk("gated")
    chat.says("hi")
    chat.sees("pending: ")
    chat.says("l")
    chat.sees("left pending")
    chat.sees("> ")
    chat.says("")
    chat.sees("Give 2.5 back?")
    chat.sees("pending: ")
    assert chat.leaves() == 0
    chat = talk("gated", first="pending: ")
    chat.says("a")
    chat.sees("approved by ada")
    chat.sees("> ")
    assert chat.leaves() == 0


def test_questions_are_asked_from_the_schema_and_again_when_the_answer_does_not_fit(talk):
    chat = talk("size")
    chat.says("hi")
    chat.sees("Which size?")
    chat.sees("/leave): ")
    chat.says("xl")
    chat.sees("none of the choices")
    chat.sees("/leave): ")
    chat.says("2")
    chat.sees("answered m by ada")
    chat.sees("> ")
    assert chat.leaves() == 0


def test_a_typed_answer(talk):
    chat = talk("number")
    chat.says("hi")
    chat.sees("/leave): ")
    chat.says("many")
    chat.sees("integer")
    chat.sees("/leave): ")
    chat.says("/why")
    chat.sees("the answer is the result")
    chat.sees("/leave): ")
    chat.says("7")
    chat.sees("answered 7 by ada")
    chat.sees("> ")
    assert chat.leaves() == 0


def test_a_form_field_by_field(talk):
    chat = talk("seat")
    chat.says("hi")
    for field, said in [
        ("row (integer", "12"),
        ("window (boolean", "true"),
        ("name (text", "Ada"),
        ("skips it): ", ""),
    ]:
        chat.sees(field)
        chat.says(said)
    chat.sees('answered {"row":12,"window":true,"name":"Ada"} by ada')
    chat.sees("> ")
    assert chat.leaves() == 0


def test_a_result_by_hand(talk):
    chat = talk("scales")
    chat.says("hi")
    chat.sees("pending: ")
    chat.says("s")
    chat.sees("its result: ")
    chat.says("1.5")
    chat.sees('"result":1.5')
    chat.sees("> ")
    assert chat.leaves() == 0


def test_ctrl_c_cancels_the_turn_at_a_prompt_and_while_a_tool_runs(talk):
    chat = talk("gated")
    chat.says("hi")
    chat.sees("pending: ")
    chat.child.sendintr()
    chat.sees("turn ended: cancelled")
    chat.sees("> ")
    assert chat.leaves() == 0
    assert chat.types()[-1] == "TurnEnded"


def test_ctrl_c_while_a_tool_runs_and_twice_leaves(talk):
    chat = talk("bank")
    chat.says("hi")
    chat.sees("wire")
    chat.child.sendintr()
    chat.sees("cancelling the turn")
    chat.sees("turn ended: cancelled")
    chat.sees("> ")
    chat.child.sendintr()
    chat.sees("again leaves")
    chat.sees("> ")
    chat.child.sendintr()
    chat.sees("to go on")
    chat.child.expect(pexpect.EOF)
    chat.child.close()
    assert chat.child.exitstatus == 130


def test_what_was_typed_before_the_question_decides_nothing(talk, desk):
    chat = talk("gated")
    chat.child.send("hi\na\na\na\n")
    chat.sees("pending: ")
    chat.child.expect(pexpect.TIMEOUT, timeout=0.5)
    assert len(desk("pending", "--json").objects) == 1
    chat.says("l")
    chat.sees("> ")
    assert chat.leaves() == 0
