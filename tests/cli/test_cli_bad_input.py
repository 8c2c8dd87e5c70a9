"""Every mistake is one clear line of a known kind with its exit code, and never a traceback."""

import re
import subprocess
import sys

import pytest
from terminal import DESK, environment

from assent.errors import KINDS

MODULES = {
    "boom.py": "raise RuntimeError('no luck')\n",
    "leaves.py": "import sys\nsys.exit(3)\n",
    "needs.py": "import not_installed_at_all\n",
    "broken.py": "def (\n",
    "bare.py": "from assent import tool\n@tool\ndef f(): pass\n",
    "three.py": "x = 3\n",
}


def refused(told, code, kind, *words):
    found = re.fullmatch(r"assent: error \[(\w+)\]: .+\n", told.err)
    assert found, told.err
    assert found[1] == kind, told.err
    assert kind in KINDS
    assert told.code == code
    assert told.out == ""
    for word in words:
        assert word in told.err


@pytest.mark.parametrize(
    ("spec", "kind", "word"),
    [
        ("nope:agent", "not_found", "nope"),
        ("three", "invalid_args", "MODULE:AGENT"),
        ("three:y", "not_found", "no agents"),
        ("three:x", "invalid_args", "an int"),
        ("boom:a", "handler_failed", "RuntimeError: no luck (boom.py, line 1)"),
        ("leaves:a", "handler_failed", "SystemExit"),
        ("needs:a", "handler_failed", "not_installed_at_all"),
        ("broken.py:a", "handler_failed", "SyntaxError"),
        ("bare:a", "invalid_args", "description"),
        ("no/such.py:a", "not_found", "no/such.py"),
    ],
)
def test_an_agent_that_cannot_be_loaded(desk, spec, kind, word):
    for name, text in MODULES.items():
        (desk.path / name).write_text(text)
    refused(desk("run", spec, "hi"), 2, kind, word)
    assert not (desk.path / "assent.db").exists()


@pytest.mark.parametrize(
    ("words", "code", "kind"),
    [
        (["bogus"], 2, "invalid_args"),
        (["run"], 2, "invalid_args"),
        (["run", f"{DESK}:plain", "hi", "--wait", "nan"], 2, "invalid_args"),
        (["run", f"{DESK}:plain", ""], 2, "no_prompt"),
        (["run", f"{DESK}:plain", " \n"], 2, "no_prompt"),
        (["run", f"{DESK}:plain", "hi", "--conversation", "a\x1bb"], 2, "invalid_args"),
        (["run", f"{DESK}:plain", "hi", "--by", ""], 2, "invalid_args"),
        (["run", f"{DESK}:plain", b"\xff".decode(errors="surrogateescape")], 2, "invalid_args"),
        (["approve", ""], 3, "not_found"),
        (["pending", "--store", "redis://x"], 2, "invalid_args"),
        (["log", "--store", "sqlite:///"], 2, "invalid_args"),
        (["log", "c", "--after", "9" * 30], 2, "invalid_args"),
        (["log", "c", "--store", "sqlite:///none.db"], 3, "not_found"),
        (["approve", "x", "--store", "sqlite:///none.db"], 3, "not_found"),
        (["run", f"{DESK}:plain", "hi", "--store", "sqlite:////nowhere/x.db"], 1, "log_read_failed"),
        (["pending", "--store", "sqlite:////"], 1, "log_read_failed"),
        (["serve", "--no-run", "--store", "memory:"], 2, "invalid_args"),
        (["serve", "--no-run", "--allow-host", "*", "--allow-host", "desk.example:80"], 2, "invalid_args"),
    ],
)
def test_a_command_that_cannot_be_followed(desk, words, code, kind):
    refused(desk(*words), code, kind)
    assert not (desk.path / "none.db").exists()


@pytest.mark.parametrize("given", ["http://desk.example", "https://desk.example:8642/", "desk.example/x", "nö://x y"])
def test_a_host_that_is_given_as_an_address_is_refused_and_it_is_said_what_is_meant(desk, given):
    meant = "here desk.example" if "desk" in given else "such as desk.example"
    told = desk("serve", "--no-run", "--allow-host", given)
    refused(told, 2, "invalid_args", "--allow-host", f"without scheme, port and path, {meant}")


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "no_prompt"),
        (b"a\0b", "invalid_args"),
        (b"\xff\xfe", "invalid_args"),
        (b"\xed\xa0\x80", "invalid_args"),
        (b"x" * 50_000_000, "too_large"),
    ],
)
def test_a_message_that_cannot_be_taken(desk, data, kind):
    refused(desk("run", f"{DESK}:plain", "-", stdin=data), 2, kind)
    assert not (desk.path / "assent.db").exists()


def test_standard_input_that_is_closed(desk):
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m assent run {DESK}:plain - <&-"],
        cwd=desk.path,
        env=environment(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(b"assent: error [stdin_error]: ")


def test_a_store_that_is_damaged_foreign_newer_or_cannot_be_written(desk):
    (desk.path / "text.db").write_text("this is not a database, whatever its name says\n" * 10)
    refused(desk("pending", "--store", "sqlite:///text.db"), 1, "corrupt_log_line")
    assert desk("run", f"{DESK}:plain", "hi", "--conversation", "c").code == 0
    with open(desk.path / "assent.db", "r+b") as file:
        file.seek(60)
        file.write((2**20).to_bytes(4, "big"))
    refused(desk("log", "c"), 1, "store_newer")
    told = desk("run", f"{DESK}:plain", "hi", "--store", "sqlite:////proc/assent.db")
    assert told.code == 1
    assert re.fullmatch(r"assent: error \[log_\w+\]: .+\n", told.err)


def test_deep_and_malformed_json_where_arguments_are_given(desk):
    import desk as agents

    [entry] = desk.waiting("c", agents.gated)
    for text in ("[" * 10_000, "{" * 10_000, '{"a":' * 10_000 + "1" + "}" * 10_000, "nul", "", '"\\ud800"', "[1]"):
        refused(desk("approve", entry.call, "--args", text), 2, "invalid_args")
    assert [e["call"] for e in desk("pending", "--json").objects] == [entry.call]


def test_debugging_shows_the_traceback_of_a_module_that_raises(desk):
    (desk.path / "boom.py").write_text(MODULES["boom.py"])
    told = desk("run", "boom:a", "hi", env={"ASSENT_DEBUG": "1"})
    assert told.code == 2
    assert "Traceback" in told.err
    assert "RuntimeError: no luck" in told.err


def test_who_looks_into_a_store_that_is_not_there_is_told_so_and_creates_none(desk):
    for words in (["pending"], ["pending", "--json"], ["log"], ["grants"], ["verify", "--json"]):
        refused(desk(*words), 3, "not_found", "there is no store sqlite:///assent.db", "$ASSENT_STORE", "migrate")
    assert desk("pending", "--json", "--wait", "0.1").code == 75  # somebody may make it meanwhile
    assert list(desk.path.iterdir()) == []
