"""Every user error is one line with a known kind and exit code, never a traceback."""

import re
import subprocess
import sys

import pytest
from terminal import DESK, environment

from holdfast.errors import KINDS

MODULES = {
    "boom.py": "raise RuntimeError('no luck')\n",
    "leaves.py": "import sys\nsys.exit(3)\n",
    "needs.py": "import not_installed_at_all\n",
    "broken.py": "def (\n",
    "bare.py": "from holdfast import tool\n@tool\ndef f(): pass\n",
    "three.py": "x = 3\n",
}


def assert_refused(result, code, kind, *words):
    found = re.fullmatch(r"holdfast: error \[(\w+)\]: .+\n", result.err)
    assert found, result.err
    assert found[1] == kind, result.err
    assert kind in KINDS
    assert result.code == code
    assert result.out == ""
    for word in words:
        assert word in result.err


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
def test_an_agent_that_cannot_be_loaded_is_refused_with_the_reason(desk, spec, kind, word):
    for name, text in MODULES.items():
        (desk.path / name).write_text(text)
    assert_refused(desk("run", spec, "hi"), 2, kind, word)
    assert not (desk.path / "holdfast.db").exists()


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
def test_invalid_arguments_are_refused_with_their_exit_code_and_kind(desk, words, code, kind):
    assert_refused(desk(*words), code, kind)
    assert not (desk.path / "none.db").exists()


@pytest.mark.parametrize("given", ["http://desk.example", "https://desk.example:8642/", "desk.example/x", "nö://x y"])
def test_a_host_name_given_as_a_url_is_refused_with_the_expected_form(desk, given):
    meant = "here desk.example" if "desk" in given else "such as desk.example"
    result = desk("serve", "--no-run", "--allow-host", given)
    assert_refused(result, 2, "invalid_args", "--allow-host", f"without scheme, port and path, {meant}")


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
def test_an_invalid_message_is_refused(desk, data, kind):
    assert_refused(desk("run", f"{DESK}:plain", "-", stdin=data), 2, kind)
    assert not (desk.path / "holdfast.db").exists()


def test_a_closed_standard_input_is_refused(desk):
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m holdfast run {DESK}:plain - <&-"],
        cwd=desk.path,
        env=environment(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(b"holdfast: error [stdin_error]: ")


def test_a_damaged_foreign_newer_or_read_only_store_is_refused(desk):
    (desk.path / "text.db").write_text("this is not a database, whatever its name says\n" * 10)
    assert_refused(desk("pending", "--store", "sqlite:///text.db"), 1, "corrupt_log_line")
    assert desk("run", f"{DESK}:plain", "hi", "--conversation", "c").code == 0
    with open(desk.path / "holdfast.db", "r+b") as file:
        file.seek(60)
        file.write((2**20).to_bytes(4, "big"))
    assert_refused(desk("log", "c"), 1, "store_newer")
    result = desk("run", f"{DESK}:plain", "hi", "--store", "sqlite:////proc/holdfast.db")
    assert result.code == 1
    assert re.fullmatch(r"holdfast: error \[log_\w+\]: .+\n", result.err)


def test_deeply_nested_and_malformed_json_arguments_are_refused(desk):
    import desk as agents

    [entry] = desk.run_until_rest("c", agents.gated)
    for text in ("[" * 10_000, "{" * 10_000, '{"a":' * 10_000 + "1" + "}" * 10_000, "nul", "", '"\\ud800"', "[1]"):
        assert_refused(desk("approve", entry.call, "--args", text), 2, "invalid_args")
    assert [e["call"] for e in desk("pending", "--json").objects] == [entry.call]


def test_debugging_shows_the_traceback_of_a_module_that_raises(desk):
    (desk.path / "boom.py").write_text(MODULES["boom.py"])
    result = desk("run", "boom:a", "hi", env={"HOLDFAST_DEBUG": "1"})
    assert result.code == 2
    assert "Traceback" in result.err
    assert "RuntimeError: no luck" in result.err


def test_reading_commands_report_a_missing_store_and_do_not_create_it(desk):
    for words in (["pending"], ["pending", "--json"], ["log"], ["grants"], ["verify", "--json"]):
        assert_refused(
            desk(*words), 3, "not_found", "there is no store sqlite:///holdfast.db", "$HOLDFAST_STORE", "migrate"
        )
    assert desk("pending", "--json", "--wait", "0.1").code == 75  # somebody may make it meanwhile
    assert list(desk.path.iterdir()) == []
