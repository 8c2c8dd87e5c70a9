"""What is typed into ``assent chat``: edited as everywhere else, and remembered. In a real terminal, with its keys."""

import os
import signal
import sys
from pathlib import Path

import pexpect
import pytest
from terminal import DESK, environment
from test_cli_chat import Talk

from assent.cli.editing import KEY, Line, place
from assent.cli.past import KEPT, Past

UP, DOWN, RIGHT, LEFT, HOME, END, DELETE = "\x1b[A", "\x1b[B", "\x1b[C", "\x1b[D", "\x1b[H", "\x1b[F", "\x1b[3~"
WORD_LEFT, WORD_RIGHT, BACK = "\x1b[1;5D", "\x1b[1;5C", "\x7f"
CTRL = {letter: chr(ord(letter) - 64) for letter in "ABCDEFKNPUWY"}


def typed(keys, said=()):
    """The line, with a bar where the cursor is."""
    line = Line(said)
    for key in KEY.findall(keys):
        line.press(key)
    return f"{line.text[: line.at]}|{line.text[line.at :]}"


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ("hallo" + LEFT * 3 + BACK + "e", "he|llo"),
        ("hello" + CTRL["A"] + DELETE + "J" + END + "!", "Jello!|"),
        ("hello" + HOME + CTRL["F"] + CTRL["D"], "h|llo"),
        ("one two  three" + WORD_LEFT * 2 + "X", "one X|two  three"),
        ("one two" + HOME + WORD_RIGHT + CTRL["K"] + "2", "one 2|"),
        ("one two three" + CTRL["W"] * 2 + CTRL["Y"], "one two |"),
        ("one two" + LEFT + CTRL["U"] + CTRL["E"] + CTRL["Y"], "oone tw|"),
        ("a\tb" + "\x1b[Z" + "\x1b[99~" + "\x0c", "a b|"),
        (BACK + LEFT + DELETE + CTRL["W"] + "日本" + LEFT + BACK, "|本"),
        ("👩\u200d💻\u00a0x", "👩\u200d💻\u00a0x|"),
    ],
)
def test_the_usual_keys_edit_the_line(keys, line):
    assert typed(keys) == line


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (UP, "second|"),
        (UP * 5, "first|"),
        (CTRL["P"] * 2 + CTRL["N"], "second|"),
        ("draft" + UP + DOWN, "draft|"),
        ("draft" + UP + "!" + UP + DOWN, "second!|"),
        (DOWN * 3 + "x", "x|"),
    ],
)
def test_the_arrows_go_through_what_was_said_and_back_to_what_was_begun(keys, line):
    said = ["first", "second"]
    assert typed(keys, said) == line
    assert said == ["first", "second"]


@pytest.mark.parametrize(
    ("text", "column", "width", "where"),
    [
        ("", 2, 10, (0, 2)),
        ("abc", 2, 10, (0, 5)),
        ("abcdefgh", 2, 10, (1, 0)),
        ("abcdefghij", 2, 10, (1, 2)),
        ("日本語", 5, 10, (1, 2)),  # the last one does not fit into the cell that is left
    ],
)
def test_the_cursor_stands_where_a_terminal_that_wraps_has_it(text, column, width, where):
    assert place(text, column, width) == where


@pytest.fixture
def talk(desk):
    open_talks = []

    def start(agent="plain", **env):
        open_talks.append(Talk(desk, agent, term="xterm", NO_COLOR="1", **env))
        open_talks[-1].sees("> ")
        return open_talks[-1]

    yield start
    for each in open_talks:
        each.child.close(force=True)


def says(chat, keys):
    chat.child.send(keys + "\r")
    chat.sees("turn completed")
    chat.sees("> ")


def messages(chat):
    return [e["text"] for e in chat.desk.log("c") if e["type"] == "MessageReceived"]


def test_a_line_is_edited_and_an_earlier_one_comes_back_with_an_arrow(talk):
    chat = talk()
    says(chat, "helo" + LEFT + "l")
    says(chat, UP + " again")
    assert chat.leaves() == 0
    assert messages(chat) == ["hello", "hello again"]


def test_the_next_session_remembers_and_only_its_owner_can_read_what(talk, desk):
    chat = talk()
    says(chat, "größer als 日本")
    assert chat.leaves() == 0
    file = desk.path / "state" / "assent" / "history"
    assert file.read_text() == "größer als 日本\n"
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    chat = talk()
    says(chat, UP + BACK * 2 + "hier")
    assert chat.leaves() == 0
    assert messages(chat)[1] == "größer als hier"
    assert file.read_text() == "größer als 日本\ngrößer als hier\n"


@pytest.mark.parametrize("state", ["/proc/none", "relative", ""])
def test_where_nothing_can_be_written_the_session_alone_remembers(talk, desk, state):
    (desk.path / "home").touch()  # a file: nothing can be made in it
    chat = talk(XDG_STATE_HOME=state, HOME=str(desk.path / "home"))
    says(chat, "one")
    says(chat, UP)
    assert chat.leaves() == 0
    assert messages(chat) == ["one", "one"]
    assert not (desk.path / "relative").exists()


def test_what_is_decided_is_edited_but_not_remembered(talk, desk):
    chat = talk("gated")
    chat.child.send("hi\r")
    chat.sees("pending: ")
    chat.child.send(UP + "x" + BACK + "d\r")
    chat.sees("why not")
    chat.child.send("paid alredy" + LEFT * 2 + "a\r")
    chat.sees("denied (paid already) by ada")
    chat.sees("> ")
    assert chat.leaves() == 0
    assert (desk.path / "state" / "assent" / "history").read_text() == "hi\n"


def test_what_was_typed_before_the_question_decides_nothing_also_key_by_key(talk, desk):
    chat = talk("gated")
    chat.child.send("hi\ra\ra\ra\r")
    chat.sees("pending: ")
    chat.child.expect(pexpect.TIMEOUT, timeout=0.5)
    assert len(desk("pending", "--json").objects) == 1
    chat.child.send("l\r")
    chat.sees("> ")
    assert chat.leaves() == 0


def test_ctrl_c_drops_the_line_ctrl_d_deletes_in_it_and_leaves_when_it_is_empty(talk):
    chat = talk()
    chat.child.send("not this")
    chat.sees("not this")
    chat.child.sendintr()
    chat.sees("again leaves")
    chat.sees("> ")
    says(chat, "xthis" + HOME + CTRL["D"])
    assert chat.leaves() == 0
    assert messages(chat) == ["this"]


def test_keys_and_ctrl_c_that_come_at_once_do_not_hold_it_up(talk):
    """The terminal throws away what was typed before a Ctrl-C: a read of it would wait for the next key."""
    chat = talk()
    chat.child.kill(signal.SIGSTOP)
    chat.child.send("x")
    chat.child.sendintr()
    chat.child.kill(signal.SIGCONT)
    chat.sees("again leaves")
    chat.sees("> ")
    assert chat.leaves() == 0


def test_a_stopped_session_goes_on_with_its_line(talk):
    chat = talk()
    chat.child.send("half a ")
    chat.sees("half a ")
    chat.child.kill(signal.SIGSTOP)
    chat.child.kill(signal.SIGCONT)
    chat.sees("> ")
    chat.sees("half a ")
    says(chat, "line")
    assert chat.leaves() == 0
    assert messages(chat) == ["half a line"]


def test_the_terminal_is_left_as_it_was(desk):
    """Whoever reads the next line of the same terminal sees what they type."""
    words = f"{sys.executable} -m assent chat {DESK}:plain --conversation c"
    script = f"trap : INT; stty -a > before; {words}; stty -a > after; echo END"
    child = pexpect.spawn("sh", ["-c", script], cwd=str(desk.path), env=environment(TERM="xterm"), timeout=60)
    child.expect_exact("> ")
    child.send("x")
    child.expect_exact("x")  # it reads keys now: a Ctrl-C before that may be lost
    child.sendintr()
    child.expect_exact("again leaves")
    child.sendintr()
    child.expect_exact("END")
    child.close()
    assert (desk.path / "before").read_text() == (desk.path / "after").read_text()


def test_the_file_does_not_grow_for_ever(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    file = Path(tmp_path, "assent", "history")
    file.parent.mkdir()
    file.write_text("".join(f"line {n}\n" for n in range(2 * KEPT + 1)) + "\x1b[2J evil\n")
    past = Past()
    assert (len(past.lines), past.lines[-1]) == (KEPT, f"line {2 * KEPT}")
    for line in ("next", "next", " "):  # the same twice is remembered once, and nothing is not
        past.add(line)
    assert past.lines[-2:] == [f"line {2 * KEPT}", "next"]
    assert file.read_text().splitlines() == past.lines
    assert os.listdir(file.parent) == ["history"]
