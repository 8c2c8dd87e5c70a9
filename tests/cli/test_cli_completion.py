"""Tab: in a real shell, and what is offered."""

import subprocess
import sys

import desk as agents
import pytest
from terminal import environment, refused


def offered(desk, *words, store=None):
    """What bash would be offered for the last word."""
    env = {
        "_ASSENT_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(["assent", *words]),
        "COMP_CWORD": str(len(words)),
    }
    told = desk(env=env | ({"ASSENT_STORE": store} if store else {}))
    assert told.err == ""
    return [each.partition(",")[2] for each in told.out.splitlines() if each.startswith("plain,")]


def test_calls_that_wait_for_the_command_are_offered(desk):
    [gated] = desk.waiting("c", agents.gated)
    [number] = desk.waiting("n", agents.number)
    [scales] = desk.waiting("s", agents.scales)
    assert offered(desk, "approve", "") == [gated.call]
    assert set(offered(desk, "deny", "")) == {gated.call, number.call}
    assert offered(desk, "answer", "") == [number.call]
    assert offered(desk, "submit", "") == [scales.call]
    assert offered(desk, "approve", gated.call[:3]) == [gated.call]
    assert offered(desk, "approve", "c/") == [f"c/{gated.call}"]
    assert offered(desk, "approve", "zzz") == []


def test_conversations_are_offered_and_no_store_is_made(desk):
    for verb in ("log", "cancel", "verify", "tail", "export", "replay", "request"):
        assert offered(desk, verb, "") == []
    assert list(desk.path.iterdir()) == []
    desk.waiting("shop", agents.plain)
    desk.waiting("bank", agents.plain)
    for verb in ("log", "cancel", "verify", "tail", "export", "replay", "request", "grants"):
        assert offered(desk, verb, "") == ["bank", "shop"]
    assert offered(desk, "log", "s") == ["shop"]
    assert offered(desk, "pending", "--conversation", "b") == ["bank"]
    assert offered(desk, "log", "--store", "sqlite:///no.db", "") == []
    assert offered(desk, "log", "", store="sqlite:///no.db") == []
    assert "verify" in offered(desk, "v")


def test_the_providers_of_models_are_offered(desk):
    for verb in ("run", "chat", "doctor"):
        assert offered(desk, verb, "--model", "openai") == ["openai:", "openai-chat:"]


def test_a_broken_store_offers_nothing_and_says_nothing(desk):
    (desk.path / "assent.db").write_text("this is not a database, whatever its name may say" * 10)
    assert offered(desk, "approve", "") == []
    assert offered(desk, "log", "") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_printed(desk, shell):
    told = desk("completion", shell)
    assert told.code == 0, told.err
    assert "_ASSENT_COMPLETE" in told.out
    refused(desk("completion", "csh"), 2, "csh")


def test_in_bash_tab_completes_a_pending_id(desk):
    [entry] = desk.waiting("c", agents.gated)
    (desk.path / "assent").write_text(f'#!/bin/sh\nexec {sys.executable} -m assent "$@"\n')
    (desk.path / "assent").chmod(0o755)
    line = (
        'eval "$(assent completion bash)"; COMP_WORDS=(assent approve ""); COMP_CWORD=2;'
        ' _assent_completion assent "" approve; echo "${COMPREPLY[@]}"'
    )
    env = environment()
    env["PATH"] = f"{desk.path}:{env['PATH']}"
    done = subprocess.run(["bash", "-c", line], cwd=desk.path, env=env, capture_output=True, text=True)
    assert done.stdout.split() == [entry.call], done.stderr
