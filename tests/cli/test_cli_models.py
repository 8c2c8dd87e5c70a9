"""Models on the command line: names and keys, streamed output, retries, usage and recorded requests."""

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pexpect
import pytest
from support.strict_server import Status, StrictServer
from terminal import DESK, assert_refused, environment

from holdfast import ToolCall
from holdfast.cli.commands import doctor

BUSY = Path(__file__).resolve().parent / "thinker.py"
WIDE, NARROW = (50, 120), (50, 50)


def run_in_terminal(desk, *words, size=WIDE):
    """Run a command in a pseudo-terminal; return its exit code and its output without styles."""
    child = pexpect.spawn(
        sys.executable,
        ["-m", "holdfast", *words],
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


def test_run_with_a_model_needs_no_code_and_continues_the_conversation(desk):
    with StrictServer(["Three minutes.", "Four."]) as server:
        words = ("--model", server.openai, "--conversation", "tea")
        result = desk("run", *words, "--system", "Be brief.", "How long does tea take?")
        assert result.code == 0, result.out + result.err
        assert "assistant: Three minutes." in result.out
        assert "10 tokens in, 5 out" in result.out
        assert server.openai in result.out
        again = desk("run", *words, "And black tea?")
        assert again.code == 0, again.out + again.err
        assert "assistant: Four." in again.out
        first, second = (heard.body["messages"] for heard in server.requests)
        assert server.refused == []
    assert [each["content"] for each in first] == ["Be brief.", "How long does tea take?"]
    assert [each["role"] for each in second] == ["user", "assistant", "user"]
    assert {event["agent"] for event in desk.log("tea") if "agent" in event} == {"assistant"}


def test_the_model_option_replaces_the_model_of_the_agent(desk):
    with StrictServer(["Not Good day."]) as server:
        result = desk("run", f"{DESK}:plain", "hi", "--model", server.anthropic, env={"ANTHROPIC_API_KEY": "k"})
        assert result.code == 0, result.out + result.err
    assert "plain: Not Good day." in result.out


def test_approve_with_resume_refuses_to_change_the_model_silently(desk):
    """``run --model`` began it: going on with the agent's own model has to be said."""
    script = [[ToolCall("refund", {"order": 1, "amount": 2.5})], "Done by the named one.", "Not asked."]
    with StrictServer(script) as server:
        agent = f"{DESK}:gated"
        assert desk("run", agent, "hi", "--model", server.openai, "--conversation", "c", "--no-wait").code == 75
        [entry] = desk("pending", "--json").objects
        before = desk.log("c")
        assert_refused(
            desk("approve", entry["call"], "--resume", agent), 2, f"--model {server.openai}", "nothing was recorded"
        )
        assert desk.log("c") == before
        assert_refused(desk("approve", entry["call"], "--model", server.openai), 2, "--model goes with --resume")
        result = desk("approve", entry["call"], "--resume", agent, "--model", server.openai)
        assert result.code == 0, result.err
        assert "Done by the named one." in result.out


def test_the_printed_continue_command_includes_the_model(desk):
    with StrictServer([[ToolCall("refund", {"order": 1, "amount": 2.5})]]) as server:
        words = ("hi", "--model", server.openai, "--conversation", "c", "--no-wait")
        assert desk("run", f"{DESK}:gated", *words).code == 75
        [entry] = desk("pending", "--json").objects
        result = desk("approve", entry["call"])
        assert f"run {DESK}:gated --model {server.openai} --conversation c" in result.out


def test_doctor_reports_an_extra_as_installed_only_if_all_its_packages_are(monkeypatch):
    """pydantic-ai-slim comes with every provider; the provider's own package does not."""
    asks = {
        "holdfast": [
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
        assert_refused(desk("run", "--model", server.openai, "nowhere:agent"), 2, "no module 'nowhere'")
        assert len(server.requests) == 1


def test_run_without_an_agent_and_a_model_is_refused_and_names_both(desk):
    assert_refused(desk("run"), 2, "MODULE:AGENT", "--model openai:gpt-5")
    assert_refused(desk("run", "hello"), 2, "names no agent", "--model")
    assert_refused(
        desk("run", f"{DESK}:plain", "hi", "--instructions", "x"), 2, "--instructions goes with --model alone"
    )
    status, shown = run_in_terminal(desk, "chat")
    assert (status, "--model openai:gpt-5" in shown) == (2, True)
    assert not (desk.path / "holdfast.db").exists()


def test_a_chat_with_a_model_prints_the_command_that_continues_it(desk):
    with StrictServer(["Good day."]) as server:
        child = pexpect.spawn(
            sys.executable,
            ["-m", "holdfast", "chat", "--model", server.openai, "--conversation", "c"],
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


def test_a_missing_key_is_reported_before_anything_is_logged(desk):
    (desk.path / "far.py").write_text("from holdfast import *\nagent = Agent('far', model='groq:llama')\n")
    (desk.path / "none.py").write_text("from holdfast import *\nagent = Agent('none', model=None)\n")
    assert_refused(
        desk("run", "--model", "openai:gpt-5", "hi"), 1, "[not_authenticated]", "export OPENAI_API_KEY=YOUR_KEY"
    )
    assert_refused(desk("run", "far:agent", "hi"), 1, "[not_authenticated]", "export GROQ_API_KEY=YOUR_KEY")
    assert_refused(desk("run", "none:agent", "hi"), 1, "[model_not_supported]", "--model")
    assert_refused(desk("run", "--model", "nobody:gpt", "hi"), 1, "[model_not_supported]", "openai-chat")
    assert not (desk.path / "holdfast.db").exists()


def test_a_missing_package_is_named_with_the_command_that_installs_it(desk):
    hidden = (
        "import sys\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'groq': raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Hide())\n"
        "from holdfast.cli.app import main\n"
        "sys.exit(main(['run', '--model', 'groq:llama', 'hi']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", hidden], cwd=desk.path, env=environment(GROQ_API_KEY="k"), capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "pip install 'holdfast[groq]'" in done.stderr
    assert not (desk.path / "holdfast.db").exists()


def test_doctor_checks_keys_and_never_prints_one(desk):
    (desk.path / "two.py").write_text(
        "from holdfast import *\nagent = Agent('two', model='openai:gpt-5', fallbacks=['groq:llama'])\n"
    )
    secret = "k-very-secret"
    result = desk("doctor", "--json", env={"OPENAI_API_KEY": secret})
    assert secret not in result.out
    found = {each["id"]: each for each in result.objects}
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
    assert "agent two uses openai:gpt-5, then groq:llama; groq:llama lacks its key" in other.out
    assert "export GROQ_API_KEY=YOUR_KEY" in other.out
    assert desk("doctor", f"{DESK}:plain").code == 0
    assert "no module 'nope'" in desk("doctor", "nope:agent").out


# --- as it happens ---


def test_a_rate_limited_provider_is_retried_and_the_retry_is_printed(desk):
    with StrictServer([Status(429, "too fast", retry_after=0.2), "Here."]) as server:
        result = desk("run", "--model", server.openai, "hi")
        assert result.code == 0, result.out + result.err
        assert f"attempt 2 of {server.openai} in " in result.out
    assert "[rate_limited]" in result.out
    assert result.out.index("attempt 2") < result.out.index("assistant: Here.")


def test_reasoning_is_streamed_on_a_wide_terminal_and_is_one_line_elsewhere(desk):
    status, wide = run_in_terminal(desk, "run", f"{BUSY}:agent", "hi")
    assert status == 0, wide
    assert wide.count("I could look it up") == 1
    assert "thought:" not in wide
    assert wide.index("I could look it up") < wide.index("thinker: I will look it up.")
    status, narrow = run_in_terminal(desk, "run", f"{BUSY}:agent", "hi", size=NARROW)
    assert "  … thought: Let me think" in narrow
    assert narrow.index("thought: ") < narrow.index("thinker: I will look it up.")
    piped = desk("run", f"{BUSY}:agent", "hi").out
    assert piped.count("I could look it up") == 1
    assert piped.index("  … thought: Let me think") < piped.index("thinker: I will look it up.")


def test_hosted_tools_and_the_fallback_model_are_printed(desk):
    result = desk("run", f"{BUSY}:agent", "hi")
    assert "  → web_search, at the provider  query=tea" in result.out
    assert "  ✓ web_search, at the provider" in result.out
    assert "  ✗ code, at the provider  [handler_failed] no room" in result.out
    assert "attempt 2 of thinker-2, in place of thinker-1: [not_authenticated] no such key" in result.out


def test_a_notice_is_printed_while_a_model_writes_long_arguments(desk):
    result = desk("run", f"{BUSY}:slow", "hi")
    assert result.code == 0, result.out
    assert "  … look: " in result.out
    assert "characters of arguments so far" in result.out


def test_a_structured_answer_is_one_line_of_json_and_pretty_on_a_terminal(desk):
    result = desk("run", f"{BUSY}:agent", "hi")
    assert result.out.count('"minutes"') == 1
    assert [json.loads(line) for line in result.out.splitlines() if line.startswith("{")] == [{"minutes": 3}]
    _, shown = run_in_terminal(desk, "run", f"{BUSY}:agent", "hi")
    assert '\n{\n  "minutes": 3\n}\n' in shown


def test_the_usage_of_a_turn_is_one_line_and_an_unknown_cost_is_not_printed_as_zero(desk):
    result = desk("run", f"{BUSY}:agent", "hi")
    assert "  2,408 tokens in (1,024 cached), 174 out · $0.0062 · thinker-2\n" in result.out
    assert "  7 tokens out · cost unknown · scripted\n" in desk("run", f"{BUSY}:unpriced", "hi").out
    assert "at least $0.5 · scripted\n" in desk("run", f"{BUSY}:half", "hi").out
    assert "cost" not in desk("run", f"{DESK}:plain", "hi").out


# --- what was sent ---


def test_request_shows_the_sizes_of_its_parts_and_the_full_text_if_it_was_recorded(desk):
    assert desk("run", f"{BUSY}:agent", "How long?", "--conversation", "c", "--by", "ada").code == 0
    result = desk("request", "c")
    assert result.code == 0, result.err
    assert "c, turn 1, step 2: thinker-2" in result.out
    assert "the provider counted 1,204" in result.out
    for part in ("instructions", "tools", "history"):
        assert any(line.startswith(part) and "█" in line for line in result.out.splitlines()), part
    assert "injected by today: " in result.out
    assert "instructions: Be brief." in result.out
    assert "ada: How long?" in result.out
    assert "injected: It is Monday." in result.out
    [found] = desk("request", "c", "--turn", "1", "--step", "1", "--json").objects
    assert (found["turn"], found["step"], found["context"]["turns"]) == (1, 1, 1)
    assert [each["text"] for each in found["request"]["messages"]] == ["How long?"]
    assert_refused(desk("request", "c", "--turn", "4"), 3, "[not_found]", "replies are in turn 1")
    assert_refused(desk("request", "c", "--step", "9"), 3, "[not_found]", "steps 1 to 2")
    assert_refused(desk("request", "nope"), 3, "[not_found]")


def test_a_recorded_request_is_verified_and_exported_with_its_conversation(desk):
    assert desk("run", f"{BUSY}:agent", "How long?", "--conversation", "c").code == 0
    assert "2 artifacts" in desk("verify", "c").out
    assert desk("export", "c", "c.jsonl").code == 0
    result = desk("import", "c.jsonl", "--store", "sqlite:///b.db")
    assert result.code == 0, result.err
    assert "How long?" in desk("request", "c", "--store", "sqlite:///b.db").out


@pytest.mark.parametrize(("agent", "code", "words"), [("sizes", 0, ('record="full"',)), ("unkept", 3, ("metadata",))])
def test_request_says_how_to_record_more_if_little_was_recorded(desk, agent, code, words):
    assert desk("run", f"{BUSY}:{agent}", "hi", "--conversation", "c").code == 0
    result = desk("request", "c")
    assert result.code == code
    for word in words:
        assert word in result.out + result.err
