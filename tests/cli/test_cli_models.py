"""Real models on the command line: named, checked, shown as they think and stumble, what they cost and were sent."""

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pexpect
import pytest
from terminal import DESK, environment, refused

from assent import ToolCall
from assent.cli import doctor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
from strict import Status, StrictServer

BUSY = Path(__file__).resolve().parent / "thinker.py"
WIDE, NARROW = (50, 120), (50, 50)


def terminal(desk, *words, size=WIDE):
    """A command in a pseudo-terminal, to its end: what was on the screen."""
    child = pexpect.spawn(
        sys.executable,
        ["-m", "assent", *words],
        cwd=str(desk.path),
        env=environment(TERM="vt100"),
        dimensions=size,
        timeout=60,
        encoding="utf-8",
    )
    child.expect(pexpect.EOF)
    child.close()
    return child.exitstatus, re.sub(r"\x1b\[[\d;]*m", "", child.before.replace("\r\n", "\n"))


# --- a model alone ---


def test_a_model_needs_no_code_and_goes_on_with_the_conversation(desk):
    with StrictServer(["Three minutes.", "Four."]) as server:
        words = ("--model", server.openai, "--conversation", "tea")
        told = desk("run", *words, "--system", "Be brief.", "How long does tea take?")
        assert told.code == 0, told.out + told.err
        assert "assistant: Three minutes." in told.out
        assert "10 tokens in, 5 out" in told.out
        assert server.openai in told.out
        again = desk("run", *words, "And black tea?")
        assert again.code == 0, again.out + again.err
        assert "assistant: Four." in again.out
        first, second = (heard.body["messages"] for heard in server.requests)
        assert server.refused == []
    assert [each["content"] for each in first] == ["Be brief.", "How long does tea take?"]
    assert [each["role"] for each in second] == ["user", "assistant", "user"]
    assert {event["agent"] for event in desk.log("tea") if "agent" in event} == {"assistant"}


def test_a_model_takes_the_place_of_an_agents_own(desk):
    with StrictServer(["Not Good day."]) as server:
        told = desk("run", f"{DESK}:plain", "hi", "--model", server.anthropic, env={"ANTHROPIC_API_KEY": "k"})
        assert told.code == 0, told.out + told.err
    assert "plain: Not Good day." in told.out


def test_approve_with_resume_does_not_change_the_model_without_a_word(desk):
    """``run --model`` began it: going on with the agent's own model has to be said."""
    script = [[ToolCall("refund", {"order": 1, "amount": 2.5})], "Done by the named one.", "Not asked."]
    with StrictServer(script) as server:
        agent = f"{DESK}:gated"
        assert desk("run", agent, "hi", "--model", server.openai, "--conversation", "c", "--no-wait").code == 75
        [entry] = desk("pending", "--json").objects
        before = desk.log("c")
        refused(
            desk("approve", entry["call"], "--resume", agent), 2, f"--model {server.openai}", "nothing was recorded"
        )
        assert desk.log("c") == before
        refused(desk("approve", entry["call"], "--model", server.openai), 2, "--model goes with --resume")
        told = desk("approve", entry["call"], "--resume", agent, "--model", server.openai)
        assert told.code == 0, told.err
        assert "Done by the named one." in told.out


def test_the_way_to_go_on_names_the_model_too(desk):
    with StrictServer([[ToolCall("refund", {"order": 1, "amount": 2.5})]]) as server:
        words = ("hi", "--model", server.openai, "--conversation", "c", "--no-wait")
        assert desk("run", f"{DESK}:gated", *words).code == 75
        [entry] = desk("pending", "--json").objects
        told = desk("approve", entry["call"])
        assert f"run {DESK}:gated --model {server.openai} --conversation c" in told.out


def test_doctor_says_that_an_extra_is_there_only_if_all_of_it_is(monkeypatch):
    """pydantic-ai-slim comes with every provider; the provider's own package does not."""
    asks = {
        "assent": [
            "msgspec>=1",
            "layer[left]<3,>=2; extra == 'left'",
            "layer[right, Up_Down]<3,>=2; extra == 'right'",
            "away>=1; extra == 'gone'",
            "pytest; extra == 'dev'",
        ],
        "layer": ["left-sdk>=1; extra == 'left'", "up-sdk; extra == 'up-down'", "win; os_name == 'nt'"],
        "left-sdk": [],
    }

    def version(package):
        if package not in asks:
            raise metadata.PackageNotFoundError(package)
        return "1"

    monkeypatch.setattr(doctor.metadata, "version", version)
    monkeypatch.setattr(doctor.metadata, "requires", lambda package: asks[package])
    assert dict(doctor.extras()) == {"left": True, "right": False, "gone": False}


def test_a_word_beside_a_model_is_the_message_unless_it_names_an_agent(desk):
    with StrictServer(["Yes.", "No."]) as server:
        assert "assistant: Yes." in desk("run", "--model", server.openai, "at 12:30").out
        refused(desk("run", "--model", server.openai, "nowhere:agent"), 2, "no module 'nowhere'")
        assert len(server.requests) == 1


def test_without_agent_and_model_it_says_what_is_missing(desk):
    refused(desk("run"), 2, "MODULE:AGENT", "--model openai:gpt-5")
    refused(desk("run", "hello"), 2, "names no agent", "--model")
    refused(desk("run", f"{DESK}:plain", "hi", "--instructions", "x"), 2, "--instructions goes with --model alone")
    status, shown = terminal(desk, "chat")
    assert (status, "--model openai:gpt-5" in shown) == (2, True)
    assert not (desk.path / "assent.db").exists()


def test_a_chat_with_a_model_says_how_to_go_on(desk):
    with StrictServer(["Good day."]) as server:
        child = pexpect.spawn(
            sys.executable,
            ["-m", "assent", "chat", "--model", server.openai, "--conversation", "c"],
            cwd=str(desk.path),
            env=environment(TERM="dumb", XDG_STATE_HOME=str(desk.path / "state")),
            dimensions=(50, 200),
            timeout=60,
            encoding="utf-8",
        )
        child.expect_exact("> ")
        child.sendline("hello")
        child.expect_exact("assistant: Good day.")
        child.expect_exact("> ")
        child.sendeof()
        child.expect_exact(f"chat --model {server.openai} --conversation c")
        child.expect(pexpect.EOF)
        child.close()
        assert child.exitstatus == 0


# --- what is missing ---


def test_a_missing_key_is_noticed_before_anything_is_logged(desk):
    (desk.path / "far.py").write_text("from assent import *\nagent = Agent('far', model='groq:llama')\n")
    (desk.path / "none.py").write_text("from assent import *\nagent = Agent('none', model=None)\n")
    refused(desk("run", "--model", "openai:gpt-5", "hi"), 1, "[not_authenticated]", "export OPENAI_API_KEY=YOUR_KEY")
    refused(desk("run", "far:agent", "hi"), 1, "[not_authenticated]", "export GROQ_API_KEY=YOUR_KEY")
    refused(desk("run", "none:agent", "hi"), 1, "[model_not_supported]", "--model")
    refused(desk("run", "--model", "nobody:gpt", "hi"), 1, "[model_not_supported]", "openai-chat")
    assert not (desk.path / "assent.db").exists()


def test_a_missing_package_is_named_with_the_command_that_installs_it(desk):
    hidden = (
        "import sys\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'groq': raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Hide())\n"
        "from assent.cli.main import main\n"
        "sys.exit(main(['run', '--model', 'groq:llama', 'hi']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", hidden], cwd=desk.path, env=environment(GROQ_API_KEY="k"), capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "pip install 'assent[groq]'" in done.stderr
    assert not (desk.path / "assent.db").exists()


def test_the_doctor_looks_at_keys_and_never_shows_one(desk):
    (desk.path / "two.py").write_text(
        "from assent import *\nagent = Agent('two', model='openai:gpt-5', fallbacks=['groq:llama'])\n"
    )
    secret = "k-very-secret"
    told = desk("doctor", "--json", env={"OPENAI_API_KEY": secret})
    assert secret not in told.out
    found = {each["id"]: each for each in told.objects}
    assert (found["openai"]["status"], "OPENAI_API_KEY" in found["openai"]["detail"]) == ("ok", True)
    assert found["anthropic"]["fix"] == "export ANTHROPIC_API_KEY=YOUR_KEY"
    assert "deepseek" not in found
    assert "deepseek" in desk("doctor", env={"DEEPSEEK_API_KEY": secret}).out
    named = desk("doctor", "--model", "openai:gpt-5", "--json")
    assert named.code == 1
    assert [each["fix"] for each in named.objects if each["id"] == "model"] == ["export OPENAI_API_KEY=YOUR_KEY"]
    assert desk("doctor", "two:agent").code == 1
    other = desk("doctor", "two:agent", env={"OPENAI_API_KEY": secret})
    assert other.code == 0, other.out
    assert "agent two asks openai:gpt-5, then groq:llama; groq:llama lacks its key" in other.out
    assert "export GROQ_API_KEY=YOUR_KEY" in other.out
    assert desk("doctor", f"{DESK}:plain").code == 0
    assert "no module 'nope'" in desk("doctor", "nope:agent").out


# --- as it happens ---


def test_a_provider_that_has_no_time_is_asked_again_and_that_is_said(desk):
    with StrictServer([Status(429, "too fast", retry_after=0.2), "Here."]) as server:
        told = desk("run", "--model", server.openai, "hi")
        assert told.code == 0, told.out + told.err
        assert f"attempt 2 of {server.openai} in " in told.out
    assert "[rate_limited]" in told.out
    assert told.out.index("attempt 2") < told.out.index("assistant: Here.")


def test_thinking_flows_where_there_is_room_and_is_one_line_elsewhere(desk):
    status, wide = terminal(desk, "run", f"{BUSY}:agent", "hi")
    assert status == 0, wide
    assert wide.count("I could look it up") == 1
    assert "thought:" not in wide
    assert wide.index("I could look it up") < wide.index("thinker: I will look it up.")
    status, narrow = terminal(desk, "run", f"{BUSY}:agent", "hi", size=NARROW)
    assert "  … thought: Let me think" in narrow
    assert narrow.index("thought: ") < narrow.index("thinker: I will look it up.")
    piped = desk("run", f"{BUSY}:agent", "hi").out
    assert piped.count("I could look it up") == 1
    assert piped.index("  … thought: Let me think") < piped.index("thinker: I will look it up.")


def test_what_the_provider_runs_and_who_answers_instead_is_said(desk):
    told = desk("run", f"{BUSY}:agent", "hi")
    assert "  → web_search, at the provider  query=tea" in told.out
    assert "  ✓ web_search, at the provider" in told.out
    assert "  ✗ code, at the provider  [handler_failed] no room" in told.out
    assert "attempt 2 of thinker-2, in place of thinker-1: [not_authenticated] no such key" in told.out


def test_arguments_that_take_long_to_write_are_said_to_come(desk):
    told = desk("run", f"{BUSY}:slow", "hi")
    assert told.code == 0, told.out
    assert "  … look: " in told.out
    assert "characters of arguments so far" in told.out


def test_a_structured_answer_is_one_line_of_json_and_pretty_on_a_terminal(desk):
    told = desk("run", f"{BUSY}:agent", "hi")
    assert told.out.count('"minutes"') == 1
    assert [json.loads(line) for line in told.out.splitlines() if line.startswith("{")] == [{"minutes": 3}]
    _, shown = terminal(desk, "run", f"{BUSY}:agent", "hi")
    assert '\n{\n  "minutes": 3\n}\n' in shown


def test_what_a_turn_used_is_one_line_and_an_unknown_cost_is_never_nothing(desk):
    told = desk("run", f"{BUSY}:agent", "hi")
    assert "  2,408 tokens in (1,024 cached), 174 out · $0.0062 · thinker-2\n" in told.out
    assert "  7 tokens out · cost unknown · scripted\n" in desk("run", f"{BUSY}:unpriced", "hi").out
    assert "at least $0.5 · scripted\n" in desk("run", f"{BUSY}:half", "hi").out
    assert "cost" not in desk("run", f"{DESK}:plain", "hi").out


# --- what was sent ---


def test_a_request_is_shown_with_the_size_of_its_parts_and_in_full_where_it_was_kept(desk):
    assert desk("run", f"{BUSY}:agent", "How long?", "--conversation", "c", "--by", "ada").code == 0
    told = desk("request", "c")
    assert told.code == 0, told.err
    assert "c, turn 1, step 2: thinker-2" in told.out
    assert "the provider counted 1,204" in told.out
    for part in ("instructions", "tools", "history"):
        assert any(line.startswith(part) and "█" in line for line in told.out.splitlines()), part
    assert "injected by today: " in told.out
    assert "instructions: Be brief." in told.out
    assert "ada: How long?" in told.out
    assert "injected: It is Monday." in told.out
    [found] = desk("request", "c", "--turn", "1", "--step", "1", "--json").objects
    assert (found["turn"], found["step"], found["context"]["turns"]) == (1, 1, 1)
    assert [each["text"] for each in found["request"]["messages"]] == ["How long?"]
    refused(desk("request", "c", "--turn", "4"), 3, "[not_found]", "replies are in turn 1")
    refused(desk("request", "c", "--step", "9"), 3, "[not_found]", "steps 1 to 2")
    refused(desk("request", "nope"), 3, "[not_found]")


def test_a_kept_request_is_verified_and_exported_with_its_conversation(desk):
    assert desk("run", f"{BUSY}:agent", "How long?", "--conversation", "c").code == 0
    assert "2 artifacts" in desk("verify", "c").out
    assert desk("export", "c", "c.jsonl").code == 0
    told = desk("import", "c.jsonl", "--store", "sqlite:///b.db")
    assert told.code == 0, told.err
    assert "How long?" in desk("request", "c", "--store", "sqlite:///b.db").out


@pytest.mark.parametrize(("agent", "code", "words"), [("sizes", 0, ('record="full"',)), ("unkept", 3, ("metadata",))])
def test_where_less_was_recorded_it_says_how_to_record_more(desk, agent, code, words):
    assert desk("run", f"{BUSY}:{agent}", "hi", "--conversation", "c").code == 0
    told = desk("request", "c")
    assert told.code == code
    for word in words:
        assert word in told.out + told.err
