"""Shell completion: the offered words, and the script in a real shell."""

import subprocess
import sys

import desk as agents
import pytest
from terminal import assert_refused, environment


def complete(desk, *words, store=None):
    """Return the completions of the last word in bash."""
    env = {
        "_HOLDFAST_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(["holdfast", *words]),
        "COMP_CWORD": str(len(words)),
    }
    result = desk(env=env | ({"HOLDFAST_STORE": store} if store else {}))
    assert result.err == ""
    return [each.partition(",")[2] for each in result.out.splitlines() if each.startswith("plain,")]


def test_completion_offers_the_calls_that_the_command_can_decide(desk):
    [gated] = desk.run_until_rest("c", agents.gated)
    [number] = desk.run_until_rest("n", agents.number)
    [scales] = desk.run_until_rest("s", agents.scales)
    assert complete(desk, "approve", "") == [gated.call]
    assert set(complete(desk, "deny", "")) == {gated.call, number.call}
    assert complete(desk, "answer", "") == [number.call]
    assert complete(desk, "submit", "") == [scales.call]
    assert complete(desk, "approve", gated.call[:3]) == [gated.call]
    assert complete(desk, "approve", "c/") == [f"c/{gated.call}"]
    assert complete(desk, "approve", "zzz") == []


def test_completion_offers_conversations_and_creates_no_store(desk):
    for verb in ("log", "cancel", "verify", "tail", "export", "replay", "request"):
        assert complete(desk, verb, "") == []
    assert list(desk.path.iterdir()) == []
    desk.run_until_rest("shop", agents.plain)
    desk.run_until_rest("bank", agents.plain)
    for verb in ("log", "cancel", "verify", "tail", "export", "replay", "request", "grants"):
        assert complete(desk, verb, "") == ["bank", "shop"]
    assert complete(desk, "log", "s") == ["shop"]
    assert complete(desk, "pending", "--conversation", "b") == ["bank"]
    assert complete(desk, "log", "--store", "sqlite:///no.db", "") == []
    assert complete(desk, "log", "", store="sqlite:///no.db") == []
    assert "verify" in complete(desk, "v")


def test_completion_offers_the_providers_of_models(desk):
    for verb in ("run", "chat", "doctor"):
        assert complete(desk, verb, "--model", "openai") == ["openai:", "openai-chat:"]


def test_completion_on_a_broken_store_offers_nothing_and_prints_no_error(desk):
    (desk.path / "holdfast.db").write_text("this is not a database, whatever its name may say" * 10)
    assert complete(desk, "approve", "") == []
    assert complete(desk, "log", "") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_of_each_shell_is_printed(desk, shell):
    result = desk("completion", shell)
    assert result.code == 0, result.err
    assert "_HOLDFAST_COMPLETE" in result.out
    assert_refused(desk("completion", "csh"), 2, "csh")


def test_tab_in_bash_completes_the_id_of_a_pending_call(desk):
    [entry] = desk.run_until_rest("c", agents.gated)
    (desk.path / "holdfast").write_text(f'#!/bin/sh\nexec {sys.executable} -m holdfast "$@"\n')
    (desk.path / "holdfast").chmod(0o755)
    line = (
        'eval "$(holdfast completion bash)"; COMP_WORDS=(holdfast approve ""); COMP_CWORD=2;'
        ' _holdfast_completion holdfast "" approve; echo "${COMPREPLY[@]}"'
    )
    env = environment()
    env["PATH"] = f"{desk.path}:{env['PATH']}"
    done = subprocess.run(["bash", "-c", line], cwd=desk.path, env=env, capture_output=True, text=True)
    assert done.stdout.split() == [entry.call], done.stderr
