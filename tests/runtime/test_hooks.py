"""Hooks: their verdicts, their failures, and that a replay does not run them again."""

import asyncio
import random
import re
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace
from support.runtimes import Counting, agent, of, paired, sees

from holdfast import (
    Agent,
    Approve,
    Ask,
    Deny,
    Halt,
    Result,
    Runtime,
    ScriptedModel,
    ToolCall,
    ToolError,
    tool,
)
from holdfast.core.events import CallReturned, CallStarted, CallSuspended, TurnEnded, Verdict
from holdfast.core.inputs import CallWanted
from holdfast.core.schema.validation import call_digest
from holdfast.errors import DeclarationError, HoldfastError
from holdfast.hooks import (
    Edit,
    ModelReply,
    Reject,
    RequireApproval,
    ToolOutcome,
    after_model,
    after_tool,
    before_model,
    before_tool,
    on_stream,
    redact,
)
from holdfast.models import Request
from holdfast.runtime.steps.hook_runner import StreamHooks, run_after_model, run_before_model
from holdfast.runtime.steps.hooks import Hooks

SECRET = "sk-9f8e7d6c5b4a"


def make_pay_tool(ran, **options):
    @tool(**options)
    async def pay(amount: int, to: str = "shop") -> dict:
        """Pay a recipient."""
        ran.append((amount, to))
        return {"paid": amount, "to": to}

    return pay


async def run_turn(*hooks, tools=None, calls=None, ran=None):
    """Run one turn, by default with one call of pay; return the log, the model's results, the runs and the end."""
    ran = [] if ran is None else ran
    model = ScriptedModel([calls or [ToolCall("pay", {"amount": 5})], "done"])
    async with Runtime(agent(model, *(tools or [make_pay_tool(ran)]), hooks=hooks)) as rt:
        end = await (await rt.send("c", "pay")).final_result()
        log = await rt.history("c")
    paired(log)
    seen = sees(model) if len(model.requests) > 1 else []
    return log, seen, ran, end


def verdicts(event):
    return [(verdict.name, verdict.outcome, verdict.reason) for verdict in event.verdicts]


# --- before a tool ---


async def test_a_before_tool_hook_that_returns_none_lets_the_call_run_and_its_verdict_is_logged():
    seen = []

    @before_tool
    async def look(call, args):
        seen.append((call.tool, call.key, call.principal.id, call.dry_run, args))

    log, (result,), ran, _ = await run_turn(look)
    (started,) = of(log, CallStarted)
    assert result == {"ok": True, "result": {"paid": 5, "to": "shop"}}
    assert verdicts(started) == [("look", "allowed", None)]
    assert seen == [("pay", f"c/{started.call_id}", "user", True, {"amount": 5})]
    assert ran == [(5, "shop")]


async def test_a_hooks_denial_is_the_calls_error_and_names_the_hook():
    @before_tool
    def budget(call, args):
        return Deny("over budget")

    log, (result,), ran, end = await run_turn(budget)
    (returned,) = of(log, CallReturned)
    assert result["error"] == {
        "kind": "denied",
        "message": "hook 'budget' denied: over budget",
        "details": {"hook": "budget"},
    }
    assert verdicts(returned) == [("budget", "denied", "over budget")]
    assert (ran, of(log, CallStarted), end.reason) == ([], [], "completed")


@pytest.mark.parametrize(
    ("outcome", "reason", "value"),
    [
        (Deny("enough", stop=True), "halted", "enough"),
        (Halt("handed_over", {"to": "desk"}), "handed_over", {"to": "desk"}),
    ],
)
async def test_a_before_tool_hook_can_end_the_turn(outcome, reason, value):
    @before_tool
    async def stop(call, args):
        return outcome

    log, seen, ran, end = await run_turn(stop)
    assert (end.reason, end.value, end.halted) == (reason, value, True)
    (returned,) = of(log, CallReturned)
    assert (returned.error.kind, seen, ran) == ("denied", [], [])


async def test_a_call_runs_with_the_arguments_that_a_hook_edited_and_the_model_sees_them():
    @before_tool
    async def cap(call, args):
        return Edit({**args, "amount": 3}, "at most 3")

    log, (result,), ran, _ = await run_turn(cap)
    (started,) = of(log, CallStarted)
    assert (started.args, ran) == ({"amount": 3}, [(3, "shop")])
    assert verdicts(started) == [("cap", "edited", "at most 3")]
    assert of(log, CallReturned)[0].edited == result["edited_args"] == {"amount": 3}


@pytest.mark.parametrize(
    ("args", "complaint"),
    [({"amount": "much"}, "amount"), ({"sum": 3}, "amount"), ([3], "must be an object"), ({"amount": {3}}, "amount")],
)
async def test_an_edit_that_does_not_fit_the_tools_schema_is_an_error_that_names_the_hook(args, complaint):
    @before_tool
    async def clumsy(call, args_):
        return Edit(args)

    log, (result,), ran, _ = await run_turn(clumsy)
    assert (result["error"]["kind"], ran) == ("invalid_args", [])
    assert result["error"]["message"].startswith("hook 'clumsy' does not fit: ")
    assert complaint in result["error"]["message"]
    (returned,) = of(log, CallReturned)
    assert verdicts(returned)[0][:2] == ("clumsy", "failed")


async def test_an_approver_sees_and_approves_the_arguments_that_a_hook_edited():
    """Hooks run before the gate, also if the tool always needs an approval."""

    @before_tool
    async def cap(call, args):
        return Edit({"amount": 3})

    ran = []
    model = ScriptedModel([[ToolCall("pay", {"amount": 5})], "done"])
    async with Runtime(agent(model, make_pay_tool(ran, approval="required"), hooks=[cap])) as rt:
        turn = await rt.send("c", "pay")
        (entry,) = (await turn.result()).pending
        assert (entry.kind, entry.args, entry.preview["args"]) == ("approval", {"amount": 3}, {"amount": 3})
        assert verdicts(of(await rt.history("c"), CallSuspended)[0]) == [("cap", "edited", None)]
        await rt.resolve("c", entry.call, Approve(digest=entry.digest))
        await turn.final_result()
        assert ran == [(3, "shop")]
        assert of(await rt.history("c"), CallReturned)[0].edited == {"amount": 3}


async def test_a_before_tool_hook_does_not_run_for_arguments_that_an_approver_edited():
    """As documented: a hook runs once, with the model's arguments."""
    seen, ran = [], []

    @before_tool
    async def cap(call, args):
        seen.append(args)
        return Deny("too much") if args["amount"] > 100 else None

    model = ScriptedModel([[ToolCall("pay", {"amount": 5})], "done"])
    async with Runtime(agent(model, make_pay_tool(ran, approval="required"), hooks=[cap])) as rt:
        turn = await rt.send("c", "pay")
        (entry,) = (await turn.result()).pending
        await rt.resolve("c", entry.call, Approve(args={"amount": 900}))
        await turn.final_result()
        assert seen == [{"amount": 5}]
        assert ran == [(900, "shop")]


async def test_the_preview_of_a_hooked_call_is_made_from_the_edited_arguments():
    pay = make_pay_tool([], approval="required")

    @pay.preview
    async def _(amount: int, to: str = "shop") -> str:
        return f"{amount} will go to {to}"

    @before_tool
    async def cap(call, args):
        return Edit({"amount": 3})

    model = ScriptedModel([[ToolCall("pay", {"amount": 5})], "done"])
    async with Runtime(agent(model, pay, hooks=[cap])) as rt:
        turn = await rt.send("c", "pay")
        (entry,) = (await turn.result()).pending
        assert entry.preview == "3 will go to shop"
        assert entry.digest == call_digest("pay", {"amount": 3}, "3 will go to shop", entry.fingerprint)
        await rt.resolve("c", entry.call, Approve(digest=entry.digest))
        assert (await turn.final_result()).reason == "completed"


async def test_a_hook_can_require_an_approval_and_a_grant_covers_the_next_call():
    @before_tool
    async def careful(call, args):
        return RequireApproval("more than 4") if args["amount"] > 4 else None

    ran = []
    script = [[ToolCall("pay", {"amount": 5})], "done", [ToolCall("pay", {"amount": 5})], "done"]
    async with Runtime(agent(script, make_pay_tool(ran), hooks=[careful])) as rt:
        turn = await rt.send("c", "pay")
        (entry,) = (await turn.result()).pending
        assert (entry.kind, entry.reason, entry.prompt, ran) == ("approval", "more than 4", "Pay a recipient.", [])
        await rt.resolve("c", entry.call, Approve(remember="args"))
        await turn.final_result()
        assert (await (await rt.send("c", "again")).final_result()).reason == "completed"
        first, second = of(await rt.history("c"), CallStarted)
        assert (first.grant, second.grant is None, ran) == (None, False, [(5, "shop"), (5, "shop")])
        assert verdicts(second) == [("careful", "required", "more than 4")]


async def test_hooks_run_in_order_each_on_the_edit_of_the_previous_one_and_none_after_a_denial():
    seen = []

    def hook(name, outcome):
        @before_tool(name=name)
        async def one(call, args):
            seen.append((name, args["amount"]))
            return outcome

        return one

    hooks = [hook("a", Edit({"amount": 4})), hook("b", None), hook("c", Deny("no")), hook("d", None)]
    log, _, ran, _ = await run_turn(*hooks)
    assert (seen, ran) == ([("a", 4 + 1), ("b", 4), ("c", 4)], [])
    (returned,) = of(log, CallReturned)
    assert [v[:2] for v in verdicts(returned)] == [("a", "edited"), ("b", "allowed"), ("c", "denied")]


async def test_the_approval_function_runs_after_the_hooks_and_sees_their_edit():
    seen = []

    def risky(args, call):
        seen.append(args)
        return args["amount"] > 4

    @before_tool
    async def cap(call, args):
        return Edit({"amount": 3})

    ran = []
    log, *_ = await run_turn(cap, tools=[make_pay_tool(ran, approval=risky)])
    assert (seen, ran) == ([{"amount": 3}], [(3, "shop")])
    (started,) = of(log, CallStarted)
    assert [v[:2] for v in verdicts(started)] == [("cap", "edited"), ("approval", "auto")]


async def test_a_hook_runs_only_for_its_tools_and_other_calls_start_in_the_append_of_the_reply():
    @tool
    async def look() -> str:
        """Look."""
        return "seen"

    @before_tool(tools=["pay"])
    async def guard(call, args):
        return Deny(f"not {call.tool}")

    store = Counting()
    script = [[ToolCall("pay", {"amount": 1}), ToolCall("look")], "done"]
    async with Runtime(agent(script, make_pay_tool([]), look, hooks=[guard]), store=store) as rt:
        await (await rt.send("c", "go")).final_result()
        pay, other = of(await rt.history("c"), CallReturned)
        assert sorted([(pay.tool, pay.ok), (other.tool, other.ok)]) == [("look", True), ("pay", False)]
    (kinds,) = [kinds for kinds in store.types() if "AssistantSaid" in kinds and "CallStarted" in kinds]
    assert kinds == ["AssistantSaid", "CallStarted"]


@pytest.mark.parametrize("executor", ["human", "client"])
async def test_hooks_run_before_a_person_or_client_gets_the_call(executor):
    @tool(executor=executor)
    def choose(options: list[str]) -> str:
        """Choose one."""
        raise NotImplementedError

    @before_tool
    async def shorten(call, args):
        return Edit({"options": args["options"][:1]})

    script = [[ToolCall("choose", {"options": ["a", "b"]})], "done"]
    async with Runtime(agent(script, choose, hooks=[shorten])) as rt:
        turn = await rt.send("c", "go")
        (entry,) = (await turn.result()).pending
        assert entry.args == {"options": ["a"]}
        assert verdicts(of(await rt.history("c"), CallSuspended)[0]) == [("shorten", "edited", None)]
        await rt.cancel("c")
        await turn.final_result()


async def test_no_hook_runs_in_manual_mode():
    runs = []

    @before_tool
    async def look(call, args):
        runs.append(1)

    async with Runtime(agent([[ToolCall("pay", {"amount": 5})]], make_pay_tool([]), hooks=[look], mode="manual")) as rt:
        turn = await rt.send("c", "go")
        (entry,) = (await turn.result()).pending
        assert (entry.kind, runs) == ("manual", [])
        await rt.cancel("c")
        await turn.final_result()


def raises(call, args):
    raise RuntimeError("broken")


async def hangs(call, args):
    await asyncio.sleep(60)


def blocks(call, args):
    while not call.cancelled:
        time.sleep(0.01)


async def exits(call, args):
    raise SystemExit(3)


async def cancels(call, args):
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


async def returns_text(call, args):
    return "fine"


@pytest.mark.parametrize(
    ("fn", "kind", "complaint"),
    [
        (raises, "handler_failed", "raised RuntimeError: broken"),
        (hangs, "timeout", "took longer than 0.05 s"),
        (blocks, "timeout", "took longer than 0.05 s"),
        (exits, "handler_failed", "raised SystemExit: 3"),
        (cancels, "handler_failed", "cancelled its own task"),
        (returns_text, "handler_failed", "returned 'fine'; it may return None, Deny, Edit"),
    ],
)
async def test_a_before_tool_hook_that_fails_keeps_the_call_from_running(fn, kind, complaint):
    guard = before_tool(name="guard", timeout=0.05 if kind == "timeout" else 5)(fn)
    log, (result,), ran, end = await run_turn(guard)
    assert (result["error"]["kind"], result["error"]["details"], ran) == (kind, {"hook": "guard"}, [])
    assert result["error"]["message"].startswith(f"hook 'guard' {complaint}")
    (returned,) = of(log, CallReturned)
    assert [v[:2] for v in verdicts(returned)] == [("guard", "failed")]
    assert end.reason == "completed"


async def test_a_scope_that_fails_keeps_a_hooked_call_from_running():
    @before_tool
    async def look(call, args):
        pass

    @asynccontextmanager
    async def broken(principal):
        raise ConnectionError("no database")
        yield

    ran = []
    model = ScriptedModel([[ToolCall("pay", {"amount": 5})], "done"])
    async with Runtime(agent(model, make_pay_tool(ran), hooks=[look]), scope=broken) as rt:
        await (await rt.send("c", "go")).final_result()
    assert (ran, sees(model)[0]["error"]["kind"]) == ([], "handler_failed")
    assert "no database" in sees(model)[0]["error"]["message"]


async def test_a_hook_that_modifies_its_arguments_in_place_does_not_change_the_call():
    @before_tool
    async def careless(call, args):
        args["amount"] = 99

    _, _, ran, _ = await run_turn(careless)
    assert ran == [(5, "shop")]


# --- after a tool ---


async def test_an_after_tool_hook_can_replace_the_result():
    @after_tool
    def brief(call, outcome):
        return Result(f"{call.tool} did it", data=outcome.value)

    log, (result,), _, _ = await run_turn(brief)
    (returned,) = of(log, CallReturned)
    assert result == {"ok": True, "result": "pay did it"}
    assert returned.data == {"paid": 5, "to": "shop"}
    assert verdicts(returned) == [("brief", "changed", None)]


async def test_an_after_tool_hook_sees_errors_and_can_turn_a_result_into_an_error():
    seen = []

    @tool
    async def fetch(ok: bool) -> str:
        """Fetch it."""
        if ok:
            return "<html>"
        raise ToolError("not_found", f"no such page for {SECRET}", {"key": SECRET})

    @after_tool
    async def judge(call, outcome):
        seen.append((outcome.ok, outcome.value, outcome.error and outcome.error.kind))
        if outcome.ok:
            raise ToolError("invalid_result", "no HTML here")
        return outcome.redacted("sk-[0-9a-f]+")

    calls = [ToolCall("fetch", {"ok": True}), ToolCall("fetch", {"ok": False})]
    log, results, _, _ = await run_turn(judge, tools=[fetch], calls=calls)
    assert sorted(seen, key=str) == [(False, None, "not_found"), (True, "<html>", None)]
    assert [r["error"]["kind"] for r in results] == ["invalid_result", "not_found"]
    assert results[1]["error"]["message"] == "no such page for [redacted]"
    assert results[1]["error"]["details"] == {"key": "[redacted]"}
    assert SECRET not in str(log)


@pytest.mark.parametrize("fn", [raises, hangs, returns_text], ids=lambda fn: fn.__name__)
async def test_the_result_is_withheld_when_an_after_tool_hook_fails(fn):
    @tool
    async def read() -> str:
        """Read it."""
        return SECRET

    log, (result,), _, _ = await run_turn(
        after_tool(name="mask", timeout=0.05 if fn is hangs else 5)(fn), tools=[read], calls=[ToolCall("read")]
    )
    assert result["error"]["message"].startswith("read has run; its result is withheld: hook 'mask' ")
    assert result["error"]["details"] == {"hook": "mask"}
    assert SECRET not in str(log)


async def test_an_after_tool_hook_redacts_the_value_of_a_halt_and_does_not_run_for_a_question():
    seen = []

    @tool
    async def hand_over(to: str) -> str | Halt | Ask:
        """Hand over."""
        return Halt("handed_over", {"key": SECRET}) if to == "desk" else Ask("Which one?")

    @after_tool
    async def mask(call, outcome):
        seen.append(outcome)
        return outcome.redacted("sk-[0-9a-f]+")

    model = ScriptedModel([[ToolCall("hand_over", {"to": "person"}), ToolCall("hand_over", {"to": "desk"})]])
    async with Runtime(agent(model, hand_over, hooks=[mask])) as rt:
        end = await (await rt.send("c", "go")).final_result()
        assert (end.reason, end.value) == ("handed_over", {"key": "[redacted]"})
        assert SECRET not in str(await rt.history("c"))
    assert seen == [ToolOutcome(value={"key": SECRET})]


def file_bytes(path):
    """Return the bytes of all files, read by another process: closing an SQLite file here would drop its locks."""
    code = (
        "import sys, pathlib; files = [p for p in pathlib.Path(sys.argv[1]).rglob('*') if p.is_file()];"
        "sys.stdout.buffer.write(b''.join(p.read_bytes() for p in files))"
    )
    return subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, check=True).stdout


async def test_a_redacted_secret_is_never_in_the_files_of_the_store(tmp_path):
    """Also in a result that is so large that it is stored as an artifact."""

    @tool
    async def read(lines: int) -> Result:
        """Read it."""
        return Result([f"line {n}: {SECRET}" for n in range(lines)], data={SECRET: SECRET})

    @after_tool
    def mask(call, outcome):
        return outcome.redacted(re.compile("sk-[0-9a-f]+"))

    async def run(name, *hooks):
        (tmp_path / name).mkdir()
        script = [[ToolCall("read", {"lines": 1}), ToolCall("read", {"lines": 5000})], "done"]
        store = f"sqlite:///{tmp_path / name / 'holdfast.db'}"
        async with Runtime(agent(script, read, hooks=hooks), store=store) as rt:
            await (await rt.send("c", "go")).final_result()
            while_open = file_bytes(tmp_path / name)
        return while_open + file_bytes(tmp_path / name)

    assert SECRET.encode() in await run("bare")
    masked = await run("masked", mask)
    assert SECRET.encode() not in masked
    assert b"[redacted]" in masked


# --- crashes ---

CRASHING_PROGRAM = """
import asyncio, os, sys
from holdfast import Agent, Call, Runtime, ScriptedModel, ToolCall, tool
from holdfast.hooks import Edit, RequireApproval, before_tool

where, store, ledger = sys.argv[1:]

def note(what):
    with open(ledger, "a") as file:
        file.write(what + "\\n")

def die(here):
    if here == where and open(ledger).read().count(here) == 1:
        os._exit(9)

@tool
def pay(amount: int, call: Call) -> str:
    \"\"\"Pay.\"\"\"
    note(f"handler {amount}")
    die("handler")
    return "paid"

@before_tool
def guard(call, args):
    note("hook")
    die("hook")
    return RequireApproval("look") if where == "approval" else Edit({"amount": 3})

async def main():
    script = [[ToolCall("pay", {"amount": 5})], "done"]
    agent = Agent("a", model=ScriptedModel(script, follow=True), tools=[pay], hooks=[guard])
    async with Runtime(agent, store=store) as rt:
        if not await rt.conversations():
            await rt.send("c", "go")
        while (await rt.snapshot("c")).state not in ("idle", "awaiting_input"):
            await asyncio.sleep(0.01)
        if where == "approval":
            os._exit(9)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("where", "again"),
    [
        ("hook", ["hook", "hook", "handler 3"]),  # its verdict was not in the log
        ("handler", ["hook", "handler 3", "handler 3"]),  # its edit was in the log
        ("approval", ["hook", "handler 5"]),  # its requirement of an approval was in the log
    ],
)
async def test_after_a_crash_a_hook_runs_again_only_if_its_verdict_was_not_logged(tmp_path, where, again):
    ledger, store = tmp_path / "ledger", f"sqlite:///{tmp_path / 'holdfast.db'}"

    def process():
        return subprocess.run(
            [sys.executable, "-c", CRASHING_PROGRAM, where, store, str(ledger)], timeout=60
        ).returncode

    assert process() == 9
    if where == "approval":
        async with Runtime(store=store) as rt:
            (entry,) = await rt.pending()
            await rt.resolve("c", entry.call, Approve())
        assert process() == 9  # the program ends with this code in this case
    else:
        assert process() == 0
    assert ledger.read_text().splitlines() == again

    async with Runtime(store=store) as rt:
        log = await rt.history("c")
    paired(log)
    judged = [event for event in log if getattr(event, "verdicts", ())]
    assert [v[:2] for event in judged for v in verdicts(event)] == [
        ("guard", "required" if where == "approval" else "edited")
    ]
    assert of(log, TurnEnded)[0].reason == "completed"


# --- declaration ---


def nothing(*_):
    return None


WRONG: dict[str, Any] = {
    "too few arguments": lambda call: None,
    "a number": 3,
    "a function": nothing,
    "one hook": before_tool(nothing),
}


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: before_tool(lambda call, args: None), "give name="),
        (lambda: before_tool(name="x")(WRONG["too few arguments"]), r"takes a function of \(call, args\)"),
        (lambda: before_model(WRONG["a number"]), "takes a function"),
        (lambda: before_tool(timeout=0)(nothing), "bad duration"),
        (lambda: before_tool(tools="pay")(nothing), "a list of tools"),
        (lambda: redact("x*"), "matches the empty text"),
        (lambda: redact("x", longest=0), "at least 1"),
        (lambda: Agent("a", model=None, hooks=[WRONG["a function"]]), "is no hook"),
        (lambda: Agent("a", model=None, hooks=WRONG["one hook"]), "must be a list of hooks"),
        (lambda: Agent("a", model=None, hooks=[before_tool(nothing), after_tool(nothing)]), "two hooks are called"),
        (lambda: Agent("a", model=None, hooks=[before_tool(tools=["pai"])(nothing)]), "unknown tools: pai"),
    ],
)
def test_a_hook_that_cannot_work_is_refused_at_declaration(make, complaint):
    with pytest.raises(DeclarationError, match=complaint):
        make()


def test_an_agent_saved_with_hooks_cannot_be_loaded_without_them():
    data = Agent("a", model=None, hooks=[before_tool(nothing)]).to_json()
    with pytest.raises(DeclarationError, match="saved with the hooks nothing"):
        Agent.from_json(data)
    assert Agent.from_json(data, hooks=[before_tool(nothing)]).to_json() == data


def test_a_hook_can_be_called_as_a_plain_function():
    @before_tool
    def guard(call, args):
        return Deny("no") if args["amount"] > 4 else None

    assert (guard(None, {"amount": 5}), guard(None, {"amount": 1})) == (Deny("no"), None)


# --- before the model ---


def request(**fields):
    return Request(conversation="c", turn=1, step=1, instructions="Be kind.", messages=(), **fields)


def hooks_of(*hooks):
    return Hooks(hooks, (), "test")


async def test_ordered_hooks_transform_the_request_one_after_the_other():
    """Each ordered hook gets the request of the previous one [B64]."""

    @before_model
    async def first(request):
        return replace(request, instructions=request.instructions + " Be brief.")

    @before_model
    def second(request):
        return [f"({len(request.instructions)} characters)", ""]

    @before_model
    async def third(request):
        return None

    prepared = await run_before_model(hooks_of(first, second, third), request(injected=("given",)))
    assert prepared.request.instructions == "Be kind. Be brief."
    assert prepared.request.injected == ("given", "(18 characters)")
    assert prepared.verdicts == (Verdict("first", "changed"), Verdict("second", "injected"))


async def test_an_ordered_hook_can_halt_the_turn_and_no_hook_runs_after_it():
    runs = []

    @before_model
    async def closed(request):
        return Halt("closed", {"until": "9:00"})

    @before_model
    async def later(request):
        runs.append(1)

    @before_model(parallel=True)
    async def beside(request):
        runs.append(1)

    prepared = await run_before_model(hooks_of(closed, later, beside), request())
    assert (prepared.halt.reason, prepared.halt.value, runs) == ("closed", {"until": "9:00"}, [])
    assert prepared.verdicts == (Verdict("closed", "halted", "closed"),)


async def test_parallel_hooks_run_concurrently_and_append_their_texts_in_declaration_order():
    """Their texts follow those of the ordered hooks [B64]."""
    both = asyncio.Barrier(2)

    @before_model(parallel=True)
    async def slow(request):
        await both.wait()
        await asyncio.sleep(0.01)
        return f"after {len(request.injected)}"

    @before_model(parallel=True)
    async def quick(request):
        await both.wait()
        return "quick"

    @before_model
    async def ordered(request):
        return "ordered"

    prepared = await run_before_model(hooks_of(slow, quick, ordered), request())
    assert prepared.request.injected == ("ordered", "after 1", "quick")


@pytest.mark.parametrize(
    ("outcome", "complaint"),
    [
        (RuntimeError("down"), "raised RuntimeError: down"),
        (60.0, "took longer than 0.05 s"),
        (Halt("stop"), "it may return None or text"),
        (7, "returned 7"),
    ],
    ids=["raises", "hangs", "halts", "returns a number"],
)
async def test_a_parallel_hook_that_fails_is_skipped_and_reported(outcome, complaint, caplog):
    """It may only append text, and its failure does not affect the other hooks [B64]."""

    async def act(request) -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        if isinstance(outcome, float):
            await asyncio.sleep(outcome)
        return outcome

    @before_model(parallel=True)
    async def good(request):
        return "weather: fine"

    bad = before_model(name="bad", timeout=0.05 if outcome == 60.0 else 5, parallel=True)(act)
    prepared = await run_before_model(hooks_of(bad, good), request())
    assert prepared.request.injected == ("weather: fine",)
    skipped, injected = prepared.verdicts
    assert (skipped.name, skipped.outcome, injected) == ("bad", "skipped", Verdict("good", "injected"))
    assert complaint in skipped.reason
    assert "'bad'" in caplog.text


@pytest.mark.parametrize(
    ("outcome", "kind", "complaint"),
    [
        (RuntimeError("down"), "handler_failed", "hook 'bad' raised RuntimeError: down"),
        (60.0, "timeout", "hook 'bad' took longer than 0.05 s"),
        (7, "handler_failed", "hook 'bad' returned 7; it may return None, text, a Request or Halt"),
        (Halt("stop", {1, object()}), "invalid_result", "hook 'bad' the halt value cannot be recorded"),
        (replace(request(), turn=2), "handler_failed", "hook 'bad' returned another conversation's request"),
    ],
    ids=["raises", "hangs", "returns a number", "halts with an odd value", "returns another request"],
)
async def test_an_ordered_hook_that_fails_raises_an_error_that_names_it(outcome, kind, complaint):
    async def act(request) -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        if isinstance(outcome, float):
            await asyncio.sleep(outcome)
        return outcome

    bad = before_model(name="bad", timeout=0.05 if outcome == 60.0 else 5)(act)
    with pytest.raises(HoldfastError) as caught:
        await run_before_model(hooks_of(bad), request())
    assert (caught.value.kind, caught.value.details) == (kind, {"hook": "bad"})
    assert str(caught.value).startswith(complaint)


@pytest.mark.parametrize("parallel", [False, True], ids=["ordered", "parallel"])
async def test_injections_over_the_reserve_are_an_error_that_names_the_hook(parallel):
    """Also for a parallel hook, whose text would be lost [B64]."""

    small = before_model(name="small", parallel=parallel)(lambda request: "x" * 399)
    large = before_model(name="large", parallel=parallel)(lambda request: ["y" * 2])
    fits = await run_before_model(hooks_of(small), request(injected=("given " * 100,)), reserve=100)
    assert len(fits.request.injected) == 2
    with pytest.raises(HoldfastError, match=r"hook 'large' brings .* to about 101 tokens; at most 100 fit") as caught:
        await run_before_model(hooks_of(small, large), request(), reserve=100)
    assert (caught.value.kind, caught.value.details) == ("too_large", {"hook": "large"})


async def test_cancelling_a_request_cancels_its_parallel_hooks():
    stopped = asyncio.Event()

    @before_model(parallel=True)
    async def waits(request):
        try:
            await asyncio.sleep(60)
        finally:
            stopped.set()

    task = asyncio.create_task(run_before_model(hooks_of(waits), request()))
    await asyncio.sleep(0.01)
    task.cancel()
    await stopped.wait()
    with pytest.raises(asyncio.CancelledError):
        await task


# --- after the model ---


async def test_guardrails_edit_a_reply_one_after_the_other():
    @after_model
    async def polite(reply):
        return f"{reply.text} Thank you."

    @after_model
    def no_calls(reply):
        return replace(reply, calls=())

    @after_model
    async def look(reply):
        assert (reply.text, reply.calls, reply.request.instructions) == ("Pay. Thank you.", (), "Be kind.")

    reply = ModelReply(text="Pay.", calls=(CallWanted(provider_id=None, tool="pay", args="{}"),), request=request())
    checked = await run_after_model(hooks_of(polite, no_calls, look), reply)
    assert (checked.reply.text, checked.rejected, checked.halt) == ("Pay. Thank you.", None, None)
    assert checked.verdicts == (Verdict("polite", "changed"), Verdict("no_calls", "changed"))
    untouched = await run_after_model(hooks_of(), reply)
    assert (untouched.reply, untouched.verdicts) == (reply, ())


async def test_a_guardrail_can_reject_a_reply_with_a_reason_that_names_it_or_halt():
    @after_model
    async def prices(reply):
        if "gone" in reply.text:
            return Halt("handed_over", "gone")
        return Reject("do not state prices") if "$" in reply.text else None

    checked = await run_after_model(hooks_of(prices), ModelReply(text="It is $5."))
    assert checked.rejected == "prices rejected this reply: do not state prices"
    assert checked.verdicts == (Verdict("prices", "rejected", "do not state prices"),)
    halted = await run_after_model(hooks_of(prices), ModelReply(text="gone"))
    assert (halted.halt.reason, halted.halt.value, halted.rejected) == ("handed_over", "gone", None)


SEVEN: Any = 7
NAMES: Any = ("pay",)


@pytest.mark.parametrize(
    "outcome",
    [SEVEN, Reject(SEVEN), Reject("\ud800"), ModelReply(text=SEVEN), ModelReply(text="", calls=NAMES), ValueError("x")],
    ids=[
        "returns a number",
        "rejects with a number",
        "rejects with text that cannot be encoded",
        "returns a reply whose text is a number",
        "returns a reply whose calls are names",
        "raises",
    ],
)
async def test_a_guardrail_that_fails_raises_an_error_that_names_it(outcome):
    async def act(reply):
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    with pytest.raises(HoldfastError, match=r"^hook 'bad' ") as caught:
        await run_after_model(hooks_of(after_model(name="bad")(act)), ModelReply(text="hi"))
    assert caught.value.kind == "handler_failed"


# --- the stream ---


def feed_stream(hooks, chunks):
    stream = StreamHooks(hooks_of(*hooks))
    shown = [stream.feed_text(chunk) for chunk in chunks]
    rest, thinking = stream.end()
    assert thinking == ""
    return [*shown, rest], stream


def test_a_redactor_hides_a_secret_that_is_split_over_chunks_and_shows_the_text_before_it():
    shown, stream = feed_stream(
        [redact("sk-[0-9a-f]+", longest=8)], ["The key is s", "k-9f8", "e7d6", " and that", " is all."]
    )
    assert "".join(shown) == "The key is [redacted] and that is all."
    assert shown[0] == "The k"
    assert stream.verdicts == (Verdict("redact", "changed"),)


@pytest.mark.parametrize("pattern", ["sk-[0-9a-f]+", r"\bab?c\b", "(?<=a)b{2,4}", "a|ab|abc", "(a)(b)", "(?=b)|ab"])
def test_a_redactor_gives_the_same_text_however_it_is_split_into_chunks(pattern):
    rng = random.Random(pattern)
    by = r"<\g<0>>"
    for _ in range(300):
        whole = "".join(rng.choice(["sk-", "a", "b", "c", "ab", " ", "9f", "k", "é"]) for _ in range(rng.randrange(30)))
        chunks, at = [], 0
        while at < len(whole):
            size = rng.randrange(1, 6)
            chunks.append(whole[at : at + size])
            at += size
        shown, stream = feed_stream([redact(pattern, by, longest=16)], chunks)
        wanted = re.sub(pattern, lambda match: match.expand(by) if match[0] else "", whole)
        assert "".join(shown) == wanted, (whole, chunks)
        assert bool(stream.verdicts) == (wanted != whole)


def test_a_redactor_holds_back_a_match_that_grows_however_long_it_gets():
    shown, _ = feed_stream([redact("sk-[0-9a-f]+", longest=8)], ["sk-", *["9f8e"] * 50, " over"])
    assert "".join(shown) == "[redacted] over"


def test_stream_hooks_run_in_order_with_separate_objects_for_text_and_thinking():
    made = []

    @on_stream
    class Upper:
        def __init__(self):
            made.append(self)

        def feed(self, text):
            return text.upper()

        def end(self):
            return "!"

    stream = StreamHooks(hooks_of(redact("ab", longest=4), Upper))
    assert [stream.feed_text("x a"), stream.feed_text("b y"), stream.feed_thinking("hm ab hm")] == [
        "",
        "X [REDACTED]",
        "HM [REDACTED]",
    ]
    assert stream.end() == (" Y!", " HM!")
    assert len(made) == 2
    assert [verdict.name for verdict in stream.verdicts] == ["redact", "Upper"]


def test_a_stream_without_hooks_is_unchanged():
    stream = StreamHooks(hooks_of())
    assert (stream.feed_text("a"), stream.feed_thinking("b"), stream.end(), stream.verdicts) == ("a", "b", ("", ""), ())


@pytest.mark.parametrize("outcome", [None, ValueError("x")], ids=["returns None", "raises"])
def test_a_stream_hook_that_fails_raises_an_error_that_names_it_without_the_text(outcome):
    class Broken:
        def feed(self, text) -> Any:
            if outcome is not None:
                raise outcome
            return outcome

        def end(self):
            return ""

    with pytest.raises(HoldfastError, match=r"^hook 'Broken' ") as caught:
        StreamHooks(hooks_of(on_stream(Broken))).feed_text("secret")
    assert (caught.value.kind, "secret" in str(caught.value)) == ("handler_failed", False)
