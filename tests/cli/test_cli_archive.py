"""``holdfast export``, ``import`` and ``replay``."""

import asyncio
import json
import os
import stat
from hashlib import sha256

import desk as agents
import pytest
from terminal import DESK, assert_refused
from test_cli_verify import BIG, CHANGED, change_database, make_reader

from holdfast import Agent, Approve, Call, Runtime, ScriptedModel, ToolCall, ToolError, tool

OTHER = ("--store", "sqlite:///other.db")


def run_and_export(desk, name, agent, file="c.jsonl"):
    entries = desk.run_until_rest(name, agent)
    result = desk("export", name, file)
    assert result.code == 0, result.err
    return entries, (desk.path / file).read_bytes()


@pytest.mark.parametrize("agent", ["gated", "seat", "scales", "plain", "halting", "failing", "evil"])
def test_export_and_import_keep_every_byte_and_append_one_event_that_names_the_importer(desk, agent):
    _, body = run_and_export(desk, "c", getattr(agents, agent))
    assert desk("export", "c").raw == body
    assert body.splitlines()[:-1] == desk("log", "c", "--json").raw.splitlines()
    result = desk("import", "c.jsonl", "--by", "ada", *OTHER)
    assert result.code == 0, result.err
    *events, mark = desk("log", "c", "--json", *OTHER).raw.splitlines()
    assert events == body.splitlines()[:-1]
    mark = json.loads(mark)
    assert (mark["type"], mark["origin"], mark["by"]["id"]) == ("ConversationImported", "c", "ada")
    assert "trusted" not in mark
    assert desk("verify", *OTHER).code == 0


def test_a_conversation_imported_without_trust_is_readable_and_never_runs(desk):
    """An export is a file that anybody can write: an approval in it must not run anything."""
    [entry], _ = run_and_export(desk, "c", agents.gated)
    assert desk("approve", entry.call).code == 0
    assert desk("export", "c", "approved.jsonl").code == 0
    result = desk("import", "approved.jsonl", *OTHER)
    assert "without trust" in result.out
    env = {"LEDGER": str(desk.path / "l")}
    words = ("--conversation", "c", *OTHER)
    assert_refused(
        desk("run", f"{DESK}:gated", *words, env=env), 5, "[permission_denied]", "imported without trust", "--trust"
    )
    assert_refused(desk("run", f"{DESK}:gated", "go on", *words, env=env), 5, "[permission_denied]", "--trust")
    assert desk("run", f"{DESK}:gated", *OTHER, env=env).code == 0, "other conversations are not held up"
    assert_refused(desk("cancel", "c", *OTHER), 5, "[permission_denied]")
    assert desk("pending", "--json", *OTHER).objects == []
    assert not (desk.path / "l").exists()
    assert "without trust: nothing of it runs" in desk("log", "c", *OTHER).out
    assert desk("replay", "c", *OTHER).code == 0


def write_forged_export(desk, entry, **made):
    """Write an export without an end line, in which "boss" approved a call, with other settings of the call."""
    assert desk("approve", entry.call, "--by", "boss").code == 0
    lines = desk("log", "c", "--json").objects
    for line in lines:
        for call in line.get("calls", ()):
            call.update(made)
    (desk.path / "forged.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("made", [{}, {"gate": "auto", "recovery": "redispatch"}], ids=["approved", "gate: auto"])
def test_with_trust_calls_that_had_not_started_need_approval_again(desk, made):
    [entry], _ = run_and_export(desk, "c", agents.gated)
    write_forged_export(desk, entry, **made)
    env = {"LEDGER": str(desk.path / "l")}
    result = desk("import", "forged.jsonl", "--as", "d", "--trust", *OTHER)
    assert result.code == 0, result.err
    assert f"refund ({entry.call}), approved by boss: has not started, and is asked about again here" in result.out
    assert desk("run", f"{DESK}:gated", "--conversation", "d", *OTHER, env=env).code == 75
    assert not (desk.path / "l").exists(), "it ran on the word of a file"
    result = desk("approve", f"d/{entry.call}", "--resume", f"{DESK}:gated", *OTHER, env=env)
    assert result.code == 0, result.err
    assert (desk.path / "l").read_text() == "refund 1 2.5\n"


def test_an_imported_call_that_was_running_does_not_run_again_without_approval(desk):
    """Whatever recovery the file names: a forged CallStarted with "redispatch" would be an approval."""
    [entry], _ = run_and_export(desk, "c", agents.gated)
    write_forged_export(desk, entry, gate="auto", recovery="redispatch")
    lines = (desk.path / "forged.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    started = {"type": "CallStarted", "call_id": entry.call, "attempt": 1, "epoch": 10**15, "seq": last["seq"] + 1}
    (desk.path / "forged.jsonl").write_text("\n".join([*lines, json.dumps({**last, **started})]))
    env = {"LEDGER": str(desk.path / "l")}
    result = desk("import", "forged.jsonl", "--as", "d", "--trust", *OTHER)
    assert "may have run; a person decides here whether it runs again" in result.out, result.err
    assert desk("run", f"{DESK}:gated", "--conversation", "d", *OTHER, env=env).code == 75
    [waits] = desk("pending", "--json", *OTHER).objects
    assert (waits["call"], waits["recovery"]) == (entry.call, True)
    assert not (desk.path / "l").exists()


def test_grants_of_a_trusted_file_are_listed(desk):
    [entry], _ = run_and_export(desk, "c", agents.gated)
    assert desk("approve", entry.call, "--remember", "tool", "--by", "boss", "--resume", f"{DESK}:gated").code == 0
    assert desk("export", "c", "c.jsonl", "--force").code == 0
    result = desk("import", "c.jsonl", "--trust", *OTHER)
    assert "refund with any arguments, given by boss: holds here from now on" in result.out
    assert len(desk("grants", "--json", *OTHER).objects) == 1


def make_keeper():
    """An agent whose tool keeps bytes: in its preview, and in its handler before it fails."""

    @tool(approval="required")
    async def write(text: str, call: Call) -> None:
        """Write."""
        call.keep(b"\x00its output", "application/octet-stream")
        raise ToolError("command_failed", "exit 1")

    @write.preview
    async def _(text: str, call: Call) -> str:
        return call.keep(f"+{text}", "text/x-diff").sha256

    return Agent("keeper", model=ScriptedModel([[ToolCall("write", {"text": "a"})], "done"]), tools=[write])


def test_kept_bytes_are_exported_imported_copied_and_checked(desk):
    """The bytes of a preview and of a failed run travel with the log; a file or a store without them is refused."""

    async def play():
        async with Runtime(make_keeper(), store=f"sqlite:///{desk.path}/holdfast.db") as rt:
            result = await rt.run("hi", conversation="c")
            await rt.resolve(result.pending[0], Approve())
            await rt.wait("c")

    async def read(store):
        async with Runtime(store=f"sqlite:///{desk.path}/{store}.db") as rt:
            events = await rt.history("c")
            return [await rt.artifact("c", one.sha256) for event in events for one in getattr(event, "artifacts", ())]

    asyncio.run(play())
    assert desk("export", "c", "c.jsonl").code == 0
    assert desk("import", "c.jsonl", *OTHER).code == 0
    copied = desk("copy", "sqlite:///holdfast.db", "sqlite:///third.db")
    assert copied.code == 0, copied.err
    assert "2 artifacts" in copied.out
    for store in ("holdfast", "other", "third"):
        assert asyncio.run(read(store)) == [b"+a", b"\x00its output"]
        assert "2 artifacts" in desk("verify", "--store", f"sqlite:///{store}.db").out
    body = (desk.path / "c.jsonl").read_bytes()
    lines = [line for line in body.splitlines(keepends=True) if b"AGl0cyBvdXRwdXQ=" not in line]
    (desk.path / "less.jsonl").write_bytes(b"".join(lines))
    assert_refused(desk("import", "less.jsonl", "--as", "d"), 1, "which is not in the file")
    change_database(desk, "DELETE FROM artifacts WHERE sha256 = ?", sha256(b"+a").digest())
    assert_refused(desk("verify"), 1, "CallSuspended", "missing")


def test_the_arguments_that_a_grant_compares_are_shown(desk):
    """In the list of grants, in the log and by an import."""

    @tool(approval="required", remember=("command", "cwd"))
    async def bash(command: str, cwd: str = ".", note: str = "") -> None:
        """Run a command."""

    model = ScriptedModel([[ToolCall("bash", {"command": "ls\x1b[31m", "note": "x"})], "done"])

    async def play():
        async with Runtime(Agent("sh", model=model, tools=[bash]), store=f"sqlite:///{desk.path}/holdfast.db") as rt:
            result = await rt.run("hi", conversation="c")
            assert "command, cwd" in desk("pending").out
            await rt.resolve(result.pending[0], Approve(remember="args"))
            await rt.wait("c")

    asyncio.run(play())
    shown = 'command="ls\\u001b[31m", no cwd'
    assert shown in " ".join(desk("grants", "c").out.split())
    assert shown in desk("log", "c").out
    assert desk("export", "c", "c.jsonl").code == 0
    assert f"bash with {shown}, given by user" in desk("import", "c.jsonl", "--trust", *OTHER).out


def test_a_grant_beyond_the_conversation_is_imported_only_if_it_is_named(desk):
    """Without --grant it is listed and dropped; a copy of the store keeps it [B115]."""
    [entry] = desk.run_until_rest("c", agents.gated)
    assert desk("approve", f"c/{entry.call}", "--remember", "tool", "--scope", "everyone", "--by", "boss").code == 0
    [grant] = desk("grants", "--shared", "--json").objects
    assert desk("export", "c", "c.jsonl").code == 0
    assert_refused(desk("import", "c.jsonl", "--grant", grant["id"], *OTHER), 2, "--grant goes with --trust")
    assert_refused(desk("import", "c.jsonl", "--trust", "--grant", "g99", *OTHER), 2, "no such grant")
    listed = desk("import", "c.jsonl", "--as", "read", *OTHER)
    assert f"--trust --grant {grant['id']}" in listed.out
    dropped = desk("import", "c.jsonl", "--as", "dropped", "--trust", *OTHER)
    assert "does not hold for everyone here" in dropped.out
    assert desk("grants", "--shared", "--json", *OTHER).objects == []
    kept = desk("import", "c.jsonl", "--as", "kept", "--trust", "--grant", grant["id"], *OTHER)
    assert "holds for everyone from now on" in kept.out, kept.err
    [here] = desk("grants", "--shared", "--json", *OTHER).objects
    assert (here["conversation"], here["id"]) == ("kept", grant["id"])
    assert desk("copy", "sqlite:///holdfast.db", "sqlite:///copy.db").code == 0
    [copied] = desk("grants", "--shared", "--json", "--store", "sqlite:///copy.db").objects
    assert (copied["conversation"], copied["id"]) == ("c", grant["id"])


def test_trust_can_be_given_later_with_the_same_file_and_with_no_other(desk):
    run_and_export(desk, "c", agents.gated)
    run_and_export(desk, "b", agents.gated, "b.jsonl")
    assert desk("import", "c.jsonl", *OTHER).code == 0
    assert_refused(desk("import", "c.jsonl", *OTHER), 3, "[conflict]")
    assert_refused(desk("import", "b.jsonl", "--as", "c", "--trust", *OTHER), 3, "[conflict]")
    assert desk("pending", "--json", *OTHER).objects == []
    result = desk("import", "c.jsonl", "--trust", *OTHER)
    assert result.code == 0, result.err
    assert "is asked about again here" in result.out
    assert_refused(desk("import", "c.jsonl", "--trust", *OTHER), 3, "[conflict]")
    assert desk("verify", *OTHER).code == 0


def test_artifacts_are_exported_and_imported(desk):
    _, body = run_and_export(desk, "c", make_reader())
    assert desk("import", "c.jsonl", *OTHER).code == 0
    assert [line for line in desk("export", "c", *OTHER).raw.splitlines() if b'"artifact":"' in line[:13]] == [
        line for line in body.splitlines() if b'"artifact":"' in line[:13]
    ]
    assert "1 artifact" in desk("verify", *OTHER).out

    async def result():
        async with Runtime(store=f"sqlite:///{desk.path}/other.db") as rt:
            call = next(e.call_id for e in await rt.history("c") if e.type == "CallReturned")
            return await rt.call_result("c", call)

    assert asyncio.run(result()) == BIG
    lines = body.splitlines(keepends=True)
    (desk.path / "less.jsonl").write_bytes(b"".join([*lines[:-2], lines[-1]]))
    assert_refused(desk("import", "less.jsonl", "--as", "d"), 1, "line 6", "artifact")
    (desk.path / "lie.jsonl").write_bytes(b"".join([*lines[:-2], lines[-2].replace(b"eHh4", b"eXh4", 1), lines[-1]]))
    assert_refused(desk("import", "lie.jsonl", "--as", "d"), 1, f"line {len(lines) - 1}", "does not match its hash")


def test_an_imported_conversation_can_be_continued(desk):
    [entry], _ = run_and_export(desk, "c", agents.gated)
    result = desk("import", "c.jsonl", "--as", "copy", "--trust", *OTHER)
    assert "its turn is open: a process that runs agent gated on this store continues it" in result.out
    assert desk("pending", "--json", *OTHER).objects == [], "its own tool is asked first: for hooks, plan and prompt"
    result = desk("run", f"{DESK}:gated", "--conversation", "copy", "--wait", "0", *OTHER)
    assert result.code == 75, result.err
    (again,) = desk("pending", "--json", *OTHER).objects
    assert again["reason"] == "imported, and asked again here"
    result = desk("approve", f"copy/{entry.call}", "--resume", f"{DESK}:gated", *OTHER)
    assert result.code == 0, result.err
    assert "turn completed" in result.out
    assert desk("verify", *OTHER).code == 0


def test_an_import_never_changes_an_existing_conversation(desk):
    run_and_export(desk, "c", agents.gated)
    before = desk("export", "c").raw
    assert_refused(desk("import", "c.jsonl"), 3, "[conflict]", "'c'", "--as")
    assert desk("export", "c").raw == before
    assert desk("import", "c.jsonl", "--as", "d").code == 0
    assert {o["conversation"] for o in desk("log", "--json").objects} == {"c", "d"}
    assert_refused(desk("export", "c", "c.jsonl"), 2, "--force")
    assert desk("export", "c", "c.jsonl", "--force").code == 0
    assert_refused(desk("export", "c", ".", "--force"), 2, "not a file")
    assert_refused(desk("export", "c", "no/where.jsonl"), 1, "[write_failed]")
    assert sorted(p.name for p in desk.path.iterdir() if "holdfast-" in p.name) in ([], ["holdfast.db-owners"])


@pytest.mark.parametrize(
    ("line", "change", "code", "message"),
    [
        (3, lambda body: body[:40], 1, "not JSON"),
        (3, lambda body: b"\xff\xfe", 1, "not JSON"),
        (3, lambda body: b"[1]", 1, "not a JSON object"),
        (3, lambda body: b"{}", 1, "neither"),
        (3, lambda body: b'{"type":"TurnStarted","v":1}', 1, "TurnStarted"),
        (3, lambda body: b'{"type":"Unheard","v":1}', 1, "Unheard"),
        (3, lambda body: body.replace(b'"v":1', b'"v":99'), 1, "upgrade"),
        (3, lambda body: body.replace(b'"seq":3', b'"seq":4'), 1, "event 4"),
        (3, lambda body: b"", 1, None),
        (3, lambda body: body.replace(b'"at":1', b'"at":2'), 1, None),
        (3, lambda body: b'{"artifact":"x","body":"?"}', 1, "not an artifact"),
        (3, lambda body: b"[" * 100_000, 1, "not JSON"),
    ],
)
def test_a_bad_line_is_refused_by_its_number_and_nothing_is_imported(desk, line, change, code, message):
    _, body = run_and_export(desk, "c", agents.gated)
    lines = body.split(b"\n")
    lines[line - 1] = change(lines[line - 1])
    (desk.path / "bad.jsonl").write_bytes(b"\n".join(lines))
    result = desk("import", "bad.jsonl", *OTHER)
    assert_refused(result, code, "bad.jsonl, line ", *([f"line {line}: ", message] if message else []))
    assert desk("log", "--json", *OTHER).objects == []


def test_a_file_of_events_alone_can_be_replayed_and_its_missing_parts_are_reported(desk):
    _, body = run_and_export(desk, "c", agents.gated)
    events = b"\r\n".join(body.splitlines()[:-1])
    result = desk("import", "-", stdin=events)
    assert_refused(result, 2, "--as")
    result = desk("import", "-", "--as", "d", stdin=events)
    assert result.code == 0, result.err
    assert "last line was missing" in result.out
    assert desk("log", "d", "--json").raw.startswith(desk("log", "c", "--json").raw)
    assert_refused(desk("import", "-", "--as", "e", stdin=b"\n\n"), 2, "no events")
    assert_refused(desk("import", "nope.jsonl"), 2, "[read_failed]", "nope.jsonl")
    assert_refused(desk("import", "-", "--as", "a\nb", stdin=events), 2, "bad conversation id")
    assert_refused(desk("import", "-", "--as", "e", stdin=body + body), 1, "more after the last line")


def test_exporting_a_damaged_conversation_fails(desk):
    desk.run_until_rest("c", agents.gated)
    change_database(desk, f"UPDATE events SET body = {CHANGED}")
    assert_refused(desk("export", "c", "c.jsonl"), 1, "[corrupt_log_line]")
    assert not (desk.path / "c.jsonl").exists()
    assert_refused(desk("export", "nope"), 3, "[not_found]")


# --- replay ---


def test_replay_shows_the_state_after_any_event_and_changes_nothing(desk):
    [entry] = desk.run_until_rest("c", agents.gated)
    desk("approve", entry.call, "--resume", f"{DESK}:gated")
    log = desk("log", "c", "--json").raw
    at = {e["type"]: e["seq"] for e in reversed(desk.log("c"))}
    waiting = desk("replay", "c", "--to", at["CallSuspended"], "--json").objects
    assert [(o["state"], o["seq"], [p["call"] for p in o["pending"]]) for o in waiting] == [
        ("awaiting_input", at["CallSuspended"], [entry.call])
    ]
    [running] = desk("replay", "c", "--to", at["CallStarted"], "--json").objects
    assert (running["state"], running["pending"], running["in_flight"][0]["phase"]) == (
        "executing_tools",
        [],
        "running",
    )
    [end] = desk("replay", "c", "--json").objects
    assert (end["state"], len(end["messages"])) == ("idle", 4)
    result = desk("replay", "c", "--to", at["CallSuspended"])
    assert "awaiting_input" in result.out
    assert "Give 2.5 back?" in result.out
    assert "It said" not in result.out
    assert "It said" in desk("replay", "c").out
    assert desk("log", "c", "--json").raw == log


def test_replay_works_for_every_prefix_of_a_log_from_a_store_and_from_a_file(desk):
    _, body = run_and_export(desk, "c", agents.evil)
    for seq in range(1, len(body.splitlines())):
        result = desk("replay", "c", "--to", seq, "--json")
        assert result.code == 0, result.err
        assert desk("replay", "c.jsonl", "--to", seq, "--json").raw == result.raw
    text = desk("replay", "c").out
    assert not set(text) & {"\x1b", "\x07", "\u202e", "\u200b", "\x9b"}
    assert "[bold]not bold[/bold] :smile:" in text
    assert json.loads(desk("replay", "-", "--json", stdin=body).out)["conversation"] == "c"


def test_replay_refuses_unknown_conversations_files_and_events(desk):
    assert_refused(desk("replay", "nope"), 2, "nope")
    desk.run_until_rest("c", agents.plain)
    assert_refused(desk("replay", "nope"), 3, "[not_found]", "nope")
    assert_refused(desk("replay", "no.jsonl"), 2, "[read_failed]")
    assert_refused(desk("replay", "c", "--to", "9999"), 2, "only")
    assert_refused(desk("replay", "c", "--to", "0"), 2, "--to")


def test_only_the_owner_can_read_an_exported_file_and_a_replaced_file_keeps_its_mode(desk):
    desk.run_until_rest("a", agents.plain)
    umask = os.umask(0o022)
    try:
        assert desk("export", "a", "a.jsonl").code == 0
        assert stat.S_IMODE((desk.path / "a.jsonl").stat().st_mode) == 0o600
        (desk.path / "a.jsonl").chmod(0o644)
        assert desk("export", "a", "a.jsonl", "--force").code == 0
        assert stat.S_IMODE((desk.path / "a.jsonl").stat().st_mode) == 0o644
    finally:
        os.umask(umask)
