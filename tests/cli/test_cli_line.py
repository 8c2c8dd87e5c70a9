"""The lines that users type into ``holdfast chat``: editing, history, completion, pastes, and output meanwhile.

Each test runs the command in a pseudo-terminal and looks at the screen, as pyte draws it.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pexpect
import pyte
import pytest
from terminal import DESK, PATIENCE, environment

from holdfast.cli.input.prompt import HISTORY_CHARS, HISTORY_ENTRIES, PromptHistory

UP, DOWN, RIGHT, LEFT, HOME, END, DELETE = "\x1b[A", "\x1b[B", "\x1b[C", "\x1b[D", "\x1b[H", "\x1b[F", "\x1b[3~"
WORD_LEFT, WORD_RIGHT, BACK = "\x1b[1;5D", "\x1b[1;5C", "\x7f"
CTRL = {letter: chr(ord(letter) - 64) for letter in "ACDEFKLNPRUWYZ"}
ROWS, COLUMNS = 60, 120


def paste(text):
    """Return the bytes that a terminal sends for pasted text."""
    return f"\x1b[200~{text}\x1b[201~"


class ChatScreen:
    """A process in a pseudo-terminal, and the screen that its user sees."""

    def __init__(self, command, args, cwd, *, rows=ROWS, columns=COLUMNS, **env):
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.Stream(self.screen)
        self.child = pexpect.spawn(
            command,
            args,
            cwd=str(cwd),
            env=environment(**{"TERM": "xterm", "XDG_STATE_HOME": f"{cwd}/state", **env}),
            dimensions=(rows, columns),
            timeout=PATIENCE,
            encoding="utf-8",
        )

    @property
    def text(self):
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    @property
    def current_line(self):
        """The line of the cursor, with a bar where the cursor is."""
        line, at = self.screen.display[self.screen.cursor.y], self.screen.cursor.x
        return f"{line[:at]}|{line[at:].rstrip()}"

    def wait_until(self, condition):
        """Draw output until the condition holds; fail with the screen if it never does."""
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, self.text
            try:
                self._stream.feed(self.child.read_nonblocking(65536, timeout=0.2))
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                assert condition(), self.text

    def wait_for(self, text):
        self.wait_until(lambda: text in self.text)

    def wait_for_line(self, line):
        """Wait until the cursor's line is this one; a bar marks the cursor."""
        self.wait_until(lambda: self.current_line == line)

    def send(self, keys):
        self.child.send(keys)

    def exit(self):
        """Press Ctrl-D and return the exit code."""
        self.send(CTRL["D"])
        return self.wait_for_exit()

    def wait_for_exit(self):
        self.child.expect(pexpect.EOF)
        self.child.close()
        return self.child.exitstatus


@pytest.fixture
def start(desk):
    """Start a program and close it after the test."""
    opened = []

    def start_process(command, args, **options):
        opened.append(ChatScreen(command, args, desk.path, **options))
        return opened[-1]

    yield start_process
    for each in opened:
        each.child.close(force=True)


@pytest.fixture
def chat(start):
    """Start a chat and wait for its prompt."""

    def start_chat(agent="plain", **options):
        words = ["-m", "holdfast", "chat", f"{DESK}:{agent}", "--conversation", "c", "--by", "ada"]
        started = start(sys.executable, words, **options)
        started.wait_for_line("> |")
        return started

    return start_chat


def send_message(screen, keys):
    """Type a message, press Enter and wait for the next prompt."""
    screen.send(keys + "\r")
    screen.wait_until(lambda: "turn completed" in screen.text and screen.current_line == "> |")
    screen.send(CTRL["L"])  # clears the screen, so that the next message waits for its own turn
    screen.wait_until(lambda: screen.text.strip() == ">")


def messages(desk):
    return [event["text"] for event in desk.log("c") if event["type"] == "MessageReceived"]


def history_file(desk):
    return desk.path / "state" / "holdfast" / "history"


def history_entries(desk):
    """Return the lines of the history file, without the dates."""
    return [line[1:] for line in history_file(desk).read_text().splitlines() if line.startswith("+")]


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ("hallo" + LEFT * 3 + BACK + "e", "> he|llo"),
        ("hello" + CTRL["A"] + DELETE + "J" + END + "!", "> Jello!|"),
        ("hello" + HOME + CTRL["F"] + CTRL["D"], "> h|llo"),
        ("one two three" + WORD_LEFT * 2 + "X", "> one X|two three"),
        ("one two" + HOME + WORD_RIGHT + CTRL["K"] + "2", "> one2|"),
        ("one two three" + CTRL["W"] * 2 + CTRL["Y"], "> one two three|"),
        ("one two" + LEFT + CTRL["U"] + CTRL["E"] + CTRL["Y"], "> oone tw|"),
        ("a\tb", "> a b|"),
    ],
)
def test_the_usual_keys_edit_the_line(chat, keys, line):
    screen = chat()
    screen.send(keys)
    screen.wait_for_line(line)


def test_the_arrow_keys_browse_earlier_messages_and_return_to_the_draft(chat, desk):
    history_file(desk).parent.mkdir(parents=True)
    history_file(desk).write_text("\n# a date\n+first\n\n# a date\n+second\n")
    screen = chat()
    for keys, line in [
        ("draft" + UP, "> second|"),
        (UP, "> first|"),
        (UP, "> first|"),
        (DOWN, "> second|"),
        ("!", "> second!|"),
        (CTRL["P"] + CTRL["N"], "> second!|"),
        (DOWN, "> draft|"),
        (DOWN, "> draft|"),
    ]:
        screen.send(keys)
        screen.wait_for_line(line)
    assert history_entries(desk) == ["first", "second"]


def test_an_edited_line_is_sent_and_the_up_arrow_brings_it_back(chat, desk):
    screen = chat()
    send_message(screen, "helo" + LEFT + "l")
    send_message(screen, UP + " again")
    assert screen.exit() == 0
    assert messages(desk) == ["hello", "hello again"]


def test_a_dash_is_a_message_and_does_not_read_standard_input(chat, desk):
    screen = chat()
    send_message(screen, "-")
    assert screen.exit() == 0
    assert messages(desk) == ["-"]


def test_ctrl_r_searches_the_history(chat, desk):
    screen = chat()
    send_message(screen, "find me")
    screen.send(CTRL["R"] + "ind")
    screen.wait_for("find me")
    send_message(screen, "\r")
    assert screen.exit() == 0
    assert messages(desk) == ["find me", "find me"]


def test_the_next_session_has_the_history_and_only_its_owner_can_read_the_file(chat, desk):
    screen = chat()
    send_message(screen, "größer als 日本")
    assert screen.exit() == 0
    assert history_entries(desk) == ["größer als 日本"]
    file = history_file(desk)
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    screen = chat()
    send_message(screen, UP + BACK * 2 + "hier")
    assert screen.exit() == 0
    assert messages(desk)[1] == "größer als hier"
    assert history_entries(desk) == ["größer als 日本", "größer als hier"]


@pytest.mark.parametrize("state", ["/proc/none", "relative", ""])
def test_without_a_writable_state_directory_the_history_lasts_for_the_session(chat, desk, state):
    (desk.path / "home").touch()  # a file: no directory can be made in it
    screen = chat(XDG_STATE_HOME=state, HOME=str(desk.path / "home"))
    send_message(screen, "one")
    send_message(screen, UP)
    assert screen.exit() == 0
    assert messages(desk) == ["one", "one"]
    assert not (desk.path / "relative").exists()


def test_decisions_can_be_edited_and_are_not_in_the_history(chat, desk):
    screen = chat("gated")
    screen.send("hi\r")
    screen.wait_until(lambda: screen.current_line.endswith("pending: |"))
    screen.send(UP + "x" + BACK + "d\r")
    screen.wait_until(lambda: screen.current_line.startswith("why not"))
    screen.send("paid alredy" + LEFT * 2 + "a\r")
    screen.wait_for("denied (paid already) by ada")
    screen.wait_for_line("> |")
    assert screen.exit() == 0
    assert history_entries(desk) == ["hi"]


def test_keys_that_were_typed_before_the_question_decide_nothing(chat, desk):
    screen = chat("gated")
    screen.send("hi\ra\ra\ra\r")
    screen.wait_until(lambda: screen.current_line.endswith("pending: |"))
    screen.send("l\r")  # the first answer that counts
    screen.wait_for("left pending")
    screen.wait_for_line("> |")
    assert len(desk("pending", "--json").objects) == 1
    assert screen.exit() == 0


def test_tab_completes_choices_and_commands_at_a_question(chat):
    screen = chat("size")
    screen.send("hi\r")
    screen.wait_until(lambda: screen.current_line.endswith("/leave): |"))
    screen.send("/w\t")
    screen.wait_until(lambda: screen.current_line.endswith("/leave): /why|"))
    screen.send(CTRL["U"] + "\t")
    screen.wait_for("/deny\n")  # the menu is open
    screen.send("\t\t")
    screen.wait_until(lambda: screen.current_line.endswith("/leave): m|"))
    screen.send("\r")
    screen.wait_for("answered m by ada")
    screen.wait_for_line("> |")
    assert screen.exit() == 0


def test_pasted_lines_are_one_message_and_one_entry_of_the_history(chat, desk):
    screen = chat()
    send_message(screen, paste("def f():\n\treturn 1\r\nend"))
    send_message(screen, UP + "!")
    assert screen.exit() == 0
    assert messages(desk) == ["def f():\n\treturn 1\nend", "def f():\n\treturn 1\nend!"]


def test_ten_thousand_pasted_lines_are_one_message(chat, desk):
    """A message of that size is not written to the history file. [B167]"""
    text = "\n".join(f"line {n}" for n in range(10_000))
    screen = chat()
    sender = threading.Thread(target=screen.send, args=[paste(text)])  # it blocks until the chat has read
    sender.start()
    screen.wait_for("line 9999")
    sender.join()
    screen.send("\r")
    screen.wait_for("turn completed")
    screen.wait_for_line("> |")
    assert screen.exit() == 0
    assert messages(desk) == [text]
    assert len(text) > HISTORY_CHARS
    assert not history_file(desk).exists()


def test_output_that_arrives_while_a_user_types_is_printed_above_the_line(chat, desk):
    screen = chat("printing")
    screen.send("hi\r")
    screen.wait_until(lambda: screen.current_line.endswith("pending: |"))
    screen.send("l\r")
    screen.wait_for_line("> |")
    screen.send("half a")
    screen.wait_for_line("> half a|")
    call = desk("pending", "--json").objects[0]["call"]
    assert desk("approve", call).code == 0
    screen.wait_until(lambda: "the tool prints this\n> half a" in screen.text)
    screen.wait_for_line("> half a|")
    screen.send(" line")
    screen.wait_for_line("> half a line|")


def test_ctrl_c_discards_the_line_and_ctrl_d_deletes_a_character_or_exits(chat, desk):
    screen = chat()
    screen.send("not this")
    screen.wait_for_line("> not this|")
    screen.send(CTRL["C"])
    screen.wait_for("again exits")
    screen.wait_for_line("> |")
    send_message(screen, "xthis" + HOME + CTRL["D"])
    assert screen.exit() == 0
    assert messages(desk) == ["this"]


def test_a_second_ctrl_c_at_the_prompt_exits_with_130(chat):
    screen = chat()
    screen.send(CTRL["C"])
    screen.wait_for("again exits")
    screen.wait_for_line("> |")
    screen.send(CTRL["C"])
    screen.wait_for("to continue")
    assert screen.wait_for_exit() == 130


def test_a_sigint_at_the_prompt_counts_as_ctrl_c(chat):
    screen = chat()
    screen.child.kill(signal.SIGINT)
    screen.wait_for("again exits")
    screen.wait_for_line("> |")
    assert screen.exit() == 0


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_keys_followed_by_ctrl_c_in_one_read_do_not_block_the_prompt(start, term):
    """On a dumb terminal Ctrl-C discards the keys before it, so a read would wait for the next key."""
    words = ["-m", "holdfast", "chat", f"{DESK}:plain", "--conversation", "c"]
    screen = start(sys.executable, words, TERM=term)
    screen.wait_for_line("> |")
    screen.child.kill(signal.SIGSTOP)
    screen.send("x")
    screen.child.sendintr()
    screen.child.kill(signal.SIGCONT)
    screen.wait_for("again exits")
    screen.wait_for_line("> |")
    assert screen.exit() == 0


def test_a_stopped_session_shows_its_prompt_and_line_again_when_it_continues(chat, desk):
    screen = chat()
    screen.send("half a ")
    screen.wait_for_line("> half a |")
    screen.child.kill(signal.SIGSTOP)
    screen.screen.reset()
    screen.child.kill(signal.SIGCONT)
    screen.wait_for_line("> half a |")
    send_message(screen, "line")
    assert screen.exit() == 0
    assert messages(desk) == ["half a line"]


def test_ctrl_z_returns_to_the_shell_and_fg_continues_with_the_line(start, desk):
    screen = start("bash", ["--norc", "--noprofile", "-i"], PS1="shell$ ")
    screen.wait_for_line("shell$ |")
    screen.send(f"{sys.executable} -m holdfast chat {DESK}:plain --conversation c\r")
    screen.wait_for_line("> |")
    screen.send("half a ")
    screen.wait_for_line("> half a |")
    screen.send(CTRL["Z"])
    screen.wait_for("Stopped")
    screen.wait_for_line("shell$ |")
    screen.send("echo $((6 * 7))\r")
    screen.wait_for("\n42\n")
    screen.send("fg\r")
    screen.wait_for_line("> half a |")
    send_message(screen, "line")
    screen.send(CTRL["D"])
    screen.wait_for_line("shell$ |")
    assert messages(desk) == ["half a line"]


def test_the_terminal_has_its_settings_back_after_the_command(start, desk):
    words = f"{sys.executable} -m holdfast chat {DESK}:plain --conversation c"
    screen = start("sh", ["-c", f"trap : INT; stty -a > before; {words}; stty -a > after; echo END"])
    screen.wait_for_line("> |")
    screen.send("x" + CTRL["C"])
    screen.wait_for("again exits")
    screen.wait_for_line("> |")
    screen.send(CTRL["C"])
    screen.wait_for("END")
    assert (desk.path / "before").read_text() == (desk.path / "after").read_text()


def test_a_narrow_terminal_wraps_the_line_and_the_question(chat):
    screen = chat("gated", columns=40, NO_COLOR="1")
    screen.send("word " * 20)
    screen.wait_until(lambda: screen.text.replace("\n", "").count("word") == 20)
    screen.send("\r")
    screen.wait_until(lambda: screen.current_line.endswith("pending: |"))
    screen.send("a\r")
    screen.wait_for("approved by ada")
    screen.wait_for_line("> |")
    assert screen.exit() == 0


def test_only_chat_imports_prompt_toolkit():
    """It takes a tenth of a second, also for ``holdfast --help``, which imports all commands."""
    code = "import sys; from holdfast.cli.app import main; main(['--help']); print('prompt_toolkit' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert done.stdout.splitlines()[-1] == "False"


def test_the_history_file_is_shortened_when_it_is_twice_too_long(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    file = Path(tmp_path, "holdfast", "history")
    file.parent.mkdir()
    file.write_text("".join(f"\n# a date\n+line {n}\n" for n in range(2 * HISTORY_ENTRIES + 1)))
    entries = list(PromptHistory().load_history_strings())
    assert entries == [f"line {n}" for n in range(2 * HISTORY_ENTRIES, HISTORY_ENTRIES, -1)]
    assert list(PromptHistory().load_history_strings()) == entries
    assert file.stat().st_mode & 0o777 == 0o600
    assert os.listdir(file.parent) == ["history"]


def test_blank_lines_are_not_in_the_history(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    history = PromptHistory()
    for line in ("next", "  ", ""):
        history.append_string(line)
    assert list(PromptHistory().load_history_strings()) == ["next"]
