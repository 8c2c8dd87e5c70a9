"""An approval holds for the definition of the tool that the approver saw, and for no other."""

import asyncio
from typing import Any

import msgspec
import pytest
from support.async_tests import until
from support.revival import rewrite
from support.runtimes import agent, logged, of, paired, sees

from holdfast import Approve, ClientResult, Deny, Runtime, ScriptedModel, Submit, Tool, ToolCall, Toolset
from holdfast import tool as declare
from holdfast.core import codec
from holdfast.core.events import AssistantSaid, CallReturned, CallStarted, CallSuspended, GrantGiven
from holdfast.core.schema.validation import call_digest
from holdfast.core.tool import fingerprint_of
from holdfast.errors import DeclarationError
from holdfast.hooks import Edit, before_tool
from holdfast.stores.memory import MemoryStore

READ, DELETE = "Read a file.", "Delete a file."


def file_tool(ran, description=READ, *, planned=False, approval: Any = "required", **options):
    """Return a gated tool named ``file``; each run appends its description and path to ``ran``."""

    async def file(path: str = "a") -> str:
        ran.append((description, path))
        return path

    made = declare(name="file", description=description, approval=approval, **options)(file)
    if planned:

        @made.preview
        async def _(path: str = "a") -> str:
            return f"{description} {path}"

    return made


FILE = [ToolCall("file", {"path": "a"})]


def prompt_and_reason(entry):
    return (entry.prompt, entry.reason)


def changed_definition(since="it was approved", to=DELETE):
    return (to, f"the tool's definition changed since {since}; it now says: {to}")


class Deployments:
    """One conversation that successive versions of the code run."""

    def __init__(self, *replies):
        self.store, self.model, self.ran = MemoryStore(), ScriptedModel(list(replies), follow=True), []

    def version(self, *tools, **options):
        return Runtime(agent(self.model, *tools, **options), store=self.store.sibling())

    def file(self, *args, **options):
        return file_tool(self.ran, *args, **options)


@pytest.mark.parametrize("planned", [False, True], ids=["without a preview", "with a preview"])
@pytest.mark.parametrize("edited", [False, True], ids=["original arguments", "edited arguments"])
async def test_an_approved_call_needs_a_new_approval_when_the_tools_definition_changed(planned, edited):
    """A process without the agent records the approval; then other code takes the call over [B35]."""

    deployments = Deployments(FILE, "done")
    path = "b" if edited else "a"
    async with deployments.version(deployments.file(planned=planned)) as rt:
        (old,) = (await (await rt.send("c", "hi")).result()).pending
        assert prompt_and_reason(old) == (READ, None)
    async with Runtime(store=deployments.store.sibling()) as desk:
        await desk.resolve("c", old.call, Approve(args={"path": "b"} if edited else None, digest=old.digest))
    async with deployments.version(deployments.file(DELETE, planned=planned)) as rt:
        (new,) = await until(rt.pending)
        assert (prompt_and_reason(new), new.args, deployments.ran) == (changed_definition(), {"path": path}, [])
        assert new.fingerprint != old.fingerprint
        assert new.digest == call_digest("file", new.args, new.preview, new.fingerprint)
        assert of(await rt.history("c"), CallStarted) == []
        await rt.resolve("c", new.call, Approve(digest=new.digest))
        await logged(rt, CallReturned)
        assert deployments.ran == [(DELETE, path)]
        paired(await rt.history("c"))


def external_tool(plans, *, executor: Any = "client", **options):
    """Return a gated tool that a client or a person runs; its preview returns ``plans[0]``."""

    @declare(name="share", approval="required", executor=executor, **options)
    async def share(what: str) -> str:
        """Share the screen."""
        raise AssertionError("the handler must not run")

    @share.preview
    async def _(what: str) -> str:
        return plans[0]

    return share


SHARE = [ToolCall("share", {"what": "screen"})]
EXTERNAL = {
    "client": ({}, "client_exec", ClientResult("shared")),
    "manual": ({"executor": "server", "manual": True}, "manual", Submit("shared")),
}


@pytest.mark.parametrize("case", EXTERNAL)
async def test_a_changed_plan_needs_a_new_approval_before_a_client_or_person_gets_the_call(case):
    """A client or a manual executor gets only what was approved [B35, B42]."""
    options, kind, result = EXTERNAL[case]

    plans = ["to 3 people"]
    async with Runtime(agent([SHARE, "done"], external_tool(plans, **options))) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        plans[0] = "to 300 people"
        await rt.resolve("c", entry.call, Approve(digest=entry.digest))
        (again,) = (await turn.result()).pending
        assert (again.kind, again.reason, again.preview) == ("approval", "plan changed", "to 300 people")
        await rt.resolve("c", entry.call, Approve(digest=again.digest))
        (handed,) = (await turn.result()).pending
        assert handed.kind == kind
        await rt.resolve("c", entry.call, result)
        await turn.final_result()
        assert [event.kind for event in of(await rt.history("c"), CallSuspended)] == ["approval", "approval", kind]


async def test_a_client_call_with_a_plan_needs_a_new_approval_when_its_definition_changed():
    """The owner, which knows the definition, makes the plan [B35, B42]."""
    deployments = Deployments(SHARE, "done")
    async with deployments.version(external_tool(["to 3 people"])) as rt:
        (entry,) = (await (await rt.send("c", "hi")).result()).pending
    async with Runtime(store=deployments.store.sibling()) as desk:
        await desk.resolve("c", entry.call, Approve(digest=entry.digest))
        assert await desk.pending() == []
    async with deployments.version(external_tool(["to 3 people"], version=2)) as rt:
        (again,) = await until(rt.pending)
        assert again.kind == "approval"
        assert again.reason.startswith("the tool's definition changed since it was approved")
        await rt.resolve("c", entry.call, Approve(digest=again.digest))
        await logged(rt, CallSuspended, count=3)
        (handed,) = await rt.pending()
        assert handed.kind == "client_exec"


async def test_each_change_of_the_definition_needs_a_new_approval_also_a_change_back():
    """The definition that was shown last counts, and the reason is not a changed plan [B35]."""
    deployments = Deployments(FILE, "done")
    async with deployments.version(deployments.file(planned=True)) as rt:
        (entry,) = (await (await rt.send("c", "hi")).result()).pending
    for text in (DELETE, READ, DELETE, READ):
        async with Runtime(store=deployments.store.sibling()) as desk:
            await desk.resolve("c", entry.call, Approve(digest=entry.digest))
        async with deployments.version(deployments.file(text, planned=True)) as rt:
            (entry,) = await until(rt.pending)
            assert prompt_and_reason(entry) == changed_definition(to=text)
    async with deployments.version(deployments.file(READ, planned=True)) as rt:
        await rt.resolve("c", entry.call, Approve(digest=entry.digest))
        await logged(rt, CallReturned)
        assert deployments.ran == [(READ, "a")]


async def test_a_remembered_approval_does_not_cover_another_definition():
    """The pending entry says why; the original definition is covered again [B37]."""
    deployments = Deployments(FILE, "done", FILE, "done", FILE, "done")
    async with deployments.version(deployments.file()) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        await rt.resolve("c", entry.call, Approve(remember="tool"), by="boss")
        await turn.final_result()
        (grant,) = await rt.grants("c")
        (given,) = of(await rt.history("c"), GrantGiven)
        assert grant.fingerprint == given.fingerprint == entry.fingerprint
    async with deployments.version(deployments.file(DELETE)) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        why = f"the tool's definition changed since boss had an approval remembered (grant {grant.id})"
        assert prompt_and_reason(entry) == (DELETE, why)
        await rt.resolve("c", entry.call, Deny("no"))
        await turn.final_result()
        assert deployments.ran == [(READ, "a")]
    async with deployments.version(deployments.file()) as rt:
        await (await rt.send("c", "hi")).final_result()
        assert deployments.ran == [(READ, "a")] * 2


async def test_a_granted_call_that_has_not_started_needs_an_approval_when_its_definition_changed():
    """The call waited for a slot, with or without a plan [B37]."""
    for planned in (False, True):
        deployments = Deployments(FILE, "done", [ToolCall("hold"), *FILE], "done")
        door = asyncio.Event()

        @declare
        async def hold(door=door) -> None:
            """Hold the only slot."""
            await door.wait()

        first = Runtime(
            agent(deployments.model, deployments.file(planned=planned), hold),
            store=deployments.store.sibling(),
            parallel=1,
            drain=0,
        )
        async with first as rt:
            turn = await rt.send("c", "hi")
            (entry,) = (await turn.result()).pending
            await rt.resolve("c", entry.call, Approve(remember="tool"))
            await turn.final_result()
            await rt.send("c", "again")
            await logged(rt, AssistantSaid, count=3)
            await logged(rt, CallStarted, count=2)
        door.set()
        async with deployments.version(deployments.file(DELETE, planned=planned), hold) as rt:
            (entry,) = await until(rt.pending)
            assert entry.prompt == DELETE
            assert "the tool's definition changed since the call was made" in (entry.reason or "")
            assert deployments.ran == [(READ, "a")]
            await rt.resolve("c", entry.call, Approve())
            await logged(rt, CallReturned, count=3)
            assert deployments.ran == [(READ, "a"), (DELETE, "a")]


async def test_arguments_that_the_new_definition_rejects_are_an_error_and_no_approver_is_asked():
    """No approver is asked about an invalid call [B17]."""
    deployments = Deployments(FILE, "done")
    async with deployments.version(deployments.file()) as rt:
        (entry,) = (await (await rt.send("c", "hi")).result()).pending
    async with Runtime(store=deployments.store.sibling()) as desk:
        await desk.resolve("c", entry.call, Approve())

    @declare(name="file", approval="required")
    async def narrower(number: int) -> None:
        """Read a numbered file."""
        deployments.ran.append(number)

    async with deployments.version(narrower) as rt:
        await logged(rt, CallReturned)
        (result,) = of(await rt.history("c"), CallReturned)
        assert (result.error.kind, deployments.ran) == ("invalid_args", [])
        assert "definition changed" in result.error.message
        await until(lambda: len(deployments.model.requests) == 2)
        assert sees(deployments.model)[0]["error"]["kind"] == "invalid_args"


async def test_a_call_without_a_plan_is_planned_and_approved_once_with_the_new_definition():
    """The first process stopped while it made the plan; one approval is enough [B73]."""
    deployments = Deployments(FILE, "done")
    preview_started = asyncio.Event()
    first = deployments.file(planned=True)

    @first.preview
    async def _(path: str = "a") -> str:
        preview_started.set()
        return await asyncio.get_running_loop().create_future()

    rt = Runtime(agent(deployments.model, first), store=deployments.store.sibling(), drain=0)
    async with rt:
        await rt.send("c", "hi")
        await preview_started.wait()
    async with deployments.version(deployments.file(DELETE, planned=True)) as rt:
        (entry,) = await until(rt.pending)
        assert prompt_and_reason(entry) == changed_definition("the call was made")
        await rt.resolve("c", entry.call, Approve(digest=entry.digest))
        await logged(rt, CallReturned)
        assert deployments.ran == [(DELETE, "a")]


async def stop_during_run(deployments, approval: Any = "required", **options):
    """Approve and start a call of the first definition, then stop its process."""
    began = asyncio.Event()

    async def file(path: str = "a") -> str:
        began.set()
        return await asyncio.get_running_loop().create_future()

    first = declare(name="file", description=READ, approval=approval, **options)(file)
    async with Runtime(agent(deployments.model, first), store=deployments.store.sibling(), drain=0) as rt:
        turn = await rt.send("c", "hi")
        if approval == "required":
            (entry,) = (await turn.result()).pending
            await rt.resolve("c", entry.call, Approve(), by="boss")
        await began.wait()


def rerun(args, call):
    return "redispatch"


@pytest.mark.parametrize("recovery", ["redispatch", rerun], ids=["redispatch", "reconcile"])
async def test_an_interrupted_approved_call_needs_a_new_approval_when_its_definition_changed(recovery):
    """The second attempt does not run by itself [B48]."""

    deployments = Deployments(FILE, "done")
    await stop_during_run(deployments, recovery=recovery)
    async with deployments.version(deployments.file(DELETE, recovery=recovery)) as rt:
        (entry,) = await until(rt.pending)
        assert (entry.recovery, entry.reason) == (True, changed_definition()[1])
        assert deployments.ran == []
        await rt.resolve("c", entry.call, Approve(digest=entry.digest))
        await logged(rt, CallReturned)
        assert deployments.ran == [(DELETE, "a")]
        assert [e.attempt for e in of(await rt.history("c"), CallStarted)] == [1, 2]


async def test_an_interrupted_call_runs_again_without_asking_when_its_definition_is_the_same():
    """Recovery ``redispatch`` needs no second approval [B48]."""
    deployments = Deployments(FILE, "done")
    await stop_during_run(deployments, recovery="redispatch")
    async with deployments.version(deployments.file(recovery="redispatch")) as rt:
        await logged(rt, CallReturned)
        assert deployments.ran == [(READ, "a")]
        assert len(of(await rt.history("c"), CallSuspended)) == 1


async def test_an_interrupted_call_without_approval_runs_again_when_its_definition_changed():
    """There is no approval to void [B48, B89]."""
    deployments = Deployments(FILE, "done")
    await stop_during_run(deployments, approval="auto", recovery="redispatch")
    async with deployments.version(deployments.file(DELETE, approval="auto", recovery="redispatch")) as rt:
        await logged(rt, CallReturned)
        assert deployments.ran == [(DELETE, "a")]


@pytest.mark.parametrize(
    "decision", [Approve(), Submit("done by hand"), Deny("leave it")], ids=["approve", "submit", "deny"]
)
async def test_an_approved_recovery_needs_a_new_decision_when_the_definition_changed(decision):
    """The definition changes between the approval of the recovery and the run [B49]."""

    deployments = Deployments(FILE, "done")
    await stop_during_run(deployments, recovery="ask")
    async with deployments.version(deployments.file(recovery="ask")) as rt:
        (entry,) = await until(rt.pending)
        assert (entry.recovery, entry.reason) == (True, "recovery")
    async with Runtime(store=deployments.store.sibling()) as desk:
        await desk.resolve("c", entry.call, Approve(digest=entry.digest))
    async with deployments.version(deployments.file(DELETE, recovery="ask")) as rt:
        (entry,) = await until(rt.pending)
        assert (entry.recovery, entry.reason, deployments.ran) == (True, changed_definition()[1], [])
        await rt.resolve("c", entry.call, decision)
        await logged(rt, CallReturned)
        assert deployments.ran == ([(DELETE, "a")] if isinstance(decision, Approve) else [])


async def test_the_second_approval_of_a_hooked_call_shows_the_arguments_that_the_hook_edited():
    """Hooks run before the gate [B35]."""
    deployments = Deployments(FILE, "done")

    @before_tool
    async def cap(call, args):
        return Edit({"path": "capped"})

    async with deployments.version(deployments.file(), hooks=[cap]) as rt:
        (entry,) = (await (await rt.send("c", "hi")).result()).pending
        assert entry.args == {"path": "capped"}
    async with Runtime(store=deployments.store.sibling()) as desk:
        await desk.resolve("c", entry.call, Approve())
    async with deployments.version(deployments.file(DELETE), hooks=[cap]) as rt:
        (entry,) = await until(rt.pending)
        assert (prompt_and_reason(entry), entry.args) == (changed_definition(), {"path": "capped"})
        await rt.resolve("c", entry.call, Approve())
        await logged(rt, CallReturned)
        assert deployments.ran == [(DELETE, "capped")]


async def test_a_grant_covers_a_call_of_an_approval_function_only_for_its_own_definition():
    """A changed definition voids the grant [B37]."""

    def always(args, call):
        return True

    deployments = Deployments(FILE, "done", FILE, "done", FILE, "done")
    async with deployments.version(deployments.file(approval=always)) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        await rt.resolve("c", entry.call, Approve(remember="args"), by="boss")
        await turn.final_result()
        await (await rt.send("c", "hi")).final_result()
        assert len(deployments.ran) == 2
    async with deployments.version(deployments.file(DELETE, approval=always)) as rt:
        (entry,) = (await (await rt.send("c", "hi")).result()).pending
        assert entry.prompt == DELETE
        assert "had an approval remembered" in (entry.reason or "")


# --- the fingerprint ---


def act_spec(name="act", description="Act.", **options):
    async def act(n: int) -> int: ...

    return declare(name=name, description=description, **options)(act).spec


def test_only_name_description_parameters_and_version_are_part_of_the_fingerprint():
    """Expiry, risk, timeout and prompt may change [B89]."""
    one = fingerprint_of(act_spec())

    async def other(n: int, m: int = 0) -> int: ...

    different = [
        act_spec(name="act2"),
        act_spec(description="Act!"),
        act_spec(version=1),
        act_spec(version="2"),
        declare(name="act", description="Act.")(other).spec,
    ]
    assert len({one, *map(fingerprint_of, different)}) == 6
    same = [
        act_spec(expires="1h"),
        act_spec(risk="high"),
        act_spec(timeout=3),
        act_spec(prompt="Really?"),
        act_spec(version=None),
    ]
    assert {fingerprint_of(spec) for spec in same} == {one}
    assert fingerprint_of(act_spec(version=1)) == fingerprint_of(act_spec(version="1"))


def test_the_order_of_a_schemas_keys_is_not_part_of_the_fingerprint():
    schemas = [
        '{"type":"object","properties":{"a":{"type":"string"}}}',
        '{"properties": {"a": {"type": "string"}}, "type": "object"}',
    ]
    made = [declare(lambda args: None, name="t", description="T.", parameters=text).spec for text in schemas]
    assert made[0].parameters != made[1].parameters
    assert fingerprint_of(made[0]) == fingerprint_of(made[1])


@pytest.mark.parametrize("version", [True, 1.5, "", "  ", ["1"], {"v": 1}])
def test_a_version_that_is_neither_text_nor_a_whole_number_is_refused(version):
    """The error names the legal types of a version [B5]."""
    with pytest.raises(DeclarationError, match="version must be text or a whole number"):
        act_spec(version=version)


def test_a_class_style_tool_keeps_its_version_through_to_data_and_from_data():
    """A version that is a number is kept as text [B10, B11]."""

    class Classy(Tool):
        """Act."""

        name = "classy"
        version = 3

        async def execute(self, n: int) -> int: ...

    tool = Toolset(Classy).get("classy")
    assert tool.spec.version == "3"
    assert Tool.from_data(tool.to_data(handlers=False), lambda args: None).spec.version == "3"


async def test_a_new_version_voids_an_approval_as_a_new_description_does():
    """``version`` marks code that changed under the same description [B35]."""
    deployments = Deployments(FILE, "done")
    async with deployments.version(deployments.file(version=1)) as rt:
        (entry,) = (await (await rt.send("c", "hi")).result()).pending
    async with Runtime(store=deployments.store.sibling()) as desk:
        await desk.resolve("c", entry.call, Approve())
    async with deployments.version(deployments.file(version=2)) as rt:
        (entry,) = await until(rt.pending)
        assert prompt_and_reason(entry) == changed_definition(to=READ)
        assert deployments.ran == []


# --- logs of older versions ---


def without_fingerprints(event):
    """Return the event as a version without fingerprints wrote it."""

    def strip(value):
        if isinstance(value, dict):
            return {key: strip(each) for key, each in value.items() if key != "fingerprint"}
        return [strip(each) for each in value] if isinstance(value, list) else value

    old: Any = strip(msgspec.json.decode(codec.encode_event(event)))
    if old["type"] == "CallSuspended":
        old["digest"] = call_digest(old["tool"], old["args"], old.get("preview"))
    return codec.decode_event(msgspec.json.encode(old))


@pytest.mark.parametrize("planned", [False, True], ids=["without a preview", "with a preview"])
async def test_a_call_in_a_log_without_fingerprints_can_be_approved_and_runs(planned):
    """Only a known change of the definition needs a new approval (decision 0022)."""

    deployments = Deployments(FILE, "done")
    async with deployments.version(deployments.file(planned=planned)) as rt:
        await (await rt.send("c", "hi")).result()
        events = [without_fingerprints(event) for event in await rt.history("c")]
    deployments.store = MemoryStore()
    await deployments.store.open()
    await rewrite(deployments.store, "c", events)
    await deployments.store.close()
    async with deployments.version(deployments.file(planned=planned, version=2)) as rt:
        (entry,) = await rt.pending()
        assert entry.digest == call_digest("file", entry.args, entry.preview)
        own = await rt.preview("c", entry.call, {"path": "b"})
        await rt.resolve("c", entry.call, Approve(args={"path": "b"}, digest=own.digest, remember="tool"))
        await logged(rt, CallReturned)
        assert deployments.ran == [(READ, "b")]
        assert [grant.fingerprint for grant in await rt.grants("c")] == [""], "the grant covers any definition"
