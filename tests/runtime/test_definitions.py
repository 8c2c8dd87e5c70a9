"""What was approved is what runs: an approval holds for the tool's definition that was shown, and for no other."""

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
    """A gated tool named ``file``; ``ran`` has what each run of it was, by its description."""

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


def definition(entry):
    return (entry.prompt, entry.reason)


def changed(since="it was approved", to=DELETE):
    return (to, f"the tool's definition changed since {since}; it now says: {to}")


class Deployments:
    """One conversation, run by one version of the code after the other."""

    def __init__(self, *replies):
        self.store, self.model, self.ran = MemoryStore(), ScriptedModel(list(replies), follow=True), []

    def version(self, *tools, **options):
        return Runtime(agent(self.model, *tools, **options), store=self.store.sibling())

    def file(self, *args, **options):
        return file_tool(self.ran, *args, **options)


@pytest.mark.parametrize("planned", [False, True], ids=["without a preview", "with a preview"])
@pytest.mark.parametrize("edited", [False, True], ids=["as it was", "edited"])
async def test_a_call_approved_for_one_definition_is_asked_about_again_for_another(planned, edited):
    """B35: the approval is recorded where nothing runs, and then other code takes it up."""

    world = Deployments(FILE, "done")
    path = "b" if edited else "a"
    async with world.version(world.file(planned=planned)) as rt:
        (old,) = (await (await rt.send("c", "hi")).result()).pending
        assert definition(old) == (READ, None)
    async with Runtime(store=world.store.sibling()) as desk:
        await desk.resolve("c", old.call, Approve(args={"path": "b"} if edited else None, digest=old.digest))
    async with world.version(world.file(DELETE, planned=planned)) as rt:
        (new,) = await until(rt.pending)
        assert (definition(new), new.args, world.ran) == (changed(), {"path": path}, [])
        assert new.fingerprint != old.fingerprint
        assert new.digest == call_digest("file", new.args, new.preview, new.fingerprint)
        assert of(await rt.history("c"), CallStarted) == []
        await rt.resolve("c", new.call, Approve(digest=new.digest))
        await logged(rt, CallReturned)
        assert world.ran == [(DELETE, path)]
        paired(await rt.history("c"))


def handed_over(plans, *, executor: Any = "client", **options):
    """A gated tool that somebody else runs, with a preview that returns the first of these plans."""

    @declare(name="share", approval="required", executor=executor, **options)
    async def share(what: str) -> str:
        """Share the screen."""
        raise AssertionError("it runs elsewhere")

    @share.preview
    async def _(what: str) -> str:
        return plans[0]

    return share


SHARE = [ToolCall("share", {"what": "screen"})]
HANDED_OVER = {
    "client": ({}, "client_exec", ClientResult("shared")),
    "manual": ({"executor": "server", "manual": True}, "manual", Submit("shared")),
}


@pytest.mark.parametrize("who", HANDED_OVER)
async def test_a_plan_that_changed_is_asked_about_again_before_the_call_is_handed_over(who):
    """B35, B42: a client or a manual executor is given only what was approved."""
    options, kind, result = HANDED_OVER[who]

    plans = ["to 3 people"]
    async with Runtime(agent([SHARE, "done"], handed_over(plans, **options))) as rt:
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


async def test_a_client_call_with_a_plan_is_asked_about_again_for_another_definition():
    """B35, B42: its plan is made by the owner, which knows the definition."""
    world = Deployments(SHARE, "done")
    async with world.version(handed_over(["to 3 people"])) as rt:
        (entry,) = (await (await rt.send("c", "hi")).result()).pending
    async with Runtime(store=world.store.sibling()) as desk:
        await desk.resolve("c", entry.call, Approve(digest=entry.digest))
        assert await desk.pending() == []
    async with world.version(handed_over(["to 3 people"], version=2)) as rt:
        (again,) = await until(rt.pending)
        assert again.kind == "approval"
        assert again.reason.startswith("the tool's definition changed since it was approved")
        await rt.resolve("c", entry.call, Approve(digest=again.digest))
        await logged(rt, CallSuspended, count=3)
        (handed,) = await rt.pending()
        assert handed.kind == "client_exec"


async def test_a_definition_that_changed_back_and_forth_is_asked_about_each_time():
    """B35: what was shown last counts, and it is not a plan that changed"""
    world = Deployments(FILE, "done")
    async with world.version(world.file(planned=True)) as rt:
        (entry,) = (await (await rt.send("c", "hi")).result()).pending
    for text in (DELETE, READ, DELETE, READ):
        async with Runtime(store=world.store.sibling()) as desk:
            await desk.resolve("c", entry.call, Approve(digest=entry.digest))
        async with world.version(world.file(text, planned=True)) as rt:
            (entry,) = await until(rt.pending)
            assert definition(entry) == changed(to=text)
    async with world.version(world.file(READ, planned=True)) as rt:
        await rt.resolve("c", entry.call, Approve(digest=entry.digest))
        await logged(rt, CallReturned)
        assert world.ran == [(READ, "a")]


async def test_a_remembered_approval_does_not_cover_another_definition():
    """B37: the call is asked about, and it says why; the same definition is covered again."""
    world = Deployments(FILE, "done", FILE, "done", FILE, "done")
    async with world.version(world.file()) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        await rt.resolve("c", entry.call, Approve(remember="tool"), by="boss")
        await turn.final_result()
        (grant,) = await rt.grants("c")
        (given,) = of(await rt.history("c"), GrantGiven)
        assert grant.fingerprint == given.fingerprint == entry.fingerprint
    async with world.version(world.file(DELETE)) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        why = f"the tool's definition changed since boss had an approval remembered (grant {grant.id})"
        assert definition(entry) == (DELETE, why)
        await rt.resolve("c", entry.call, Deny("no"))
        await turn.final_result()
        assert world.ran == [(READ, "a")]
    async with world.version(world.file()) as rt:
        await (await rt.send("c", "hi")).final_result()
        assert world.ran == [(READ, "a")] * 2


async def test_a_call_that_a_grant_let_through_is_asked_about_where_the_code_changed_before_it_ran():
    """B37: also with a plan; nothing had begun"""
    for planned in (False, True):
        world = Deployments(FILE, "done", [ToolCall("hold"), *FILE], "done")
        door = asyncio.Event()

        @declare
        async def hold(door=door) -> None:
            """Hold the only slot."""
            await door.wait()

        first = Runtime(
            agent(world.model, world.file(planned=planned), hold), store=world.store.sibling(), parallel=1, drain=0
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
        async with world.version(world.file(DELETE, planned=planned), hold) as rt:
            (entry,) = await until(rt.pending)
            assert entry.prompt == DELETE
            assert "the tool's definition changed since the call was made" in (entry.reason or "")
            assert world.ran == [(READ, "a")]
            await rt.resolve("c", entry.call, Approve())
            await logged(rt, CallReturned, count=3)
            assert world.ran == [(READ, "a"), (DELETE, "a")]


async def test_arguments_that_the_new_definition_does_not_take_are_an_error_and_nobody_is_asked():
    """B17: nobody is asked to approve an invalid call"""
    world = Deployments(FILE, "done")
    async with world.version(world.file()) as rt:
        (entry,) = (await (await rt.send("c", "hi")).result()).pending
    async with Runtime(store=world.store.sibling()) as desk:
        await desk.resolve("c", entry.call, Approve())

    @declare(name="file", approval="required")
    async def narrower(number: int) -> None:
        """Read a numbered file."""
        world.ran.append(number)

    async with world.version(narrower) as rt:
        await logged(rt, CallReturned)
        (result,) = of(await rt.history("c"), CallReturned)
        assert (result.error.kind, world.ran) == ("invalid_args", [])
        assert "definition changed" in result.error.message
        await until(lambda: len(world.model.requests) == 2)
        assert sees(world.model)[0]["error"]["kind"] == "invalid_args"


async def test_a_call_whose_plan_was_not_made_yet_is_shown_as_the_tool_is_when_it_is_made():
    """B73: one question is enough"""
    world = Deployments(FILE, "done")
    asked = asyncio.Event()
    first = world.file(planned=True)

    @first.preview
    async def _(path: str = "a") -> str:
        asked.set()
        return await asyncio.get_running_loop().create_future()

    rt = Runtime(agent(world.model, first), store=world.store.sibling(), drain=0)
    async with rt:
        await rt.send("c", "hi")
        await asked.wait()
    async with world.version(world.file(DELETE, planned=True)) as rt:
        (entry,) = await until(rt.pending)
        assert definition(entry) == changed("the call was made")
        await rt.resolve("c", entry.call, Approve(digest=entry.digest))
        await logged(rt, CallReturned)
        assert world.ran == [(DELETE, "a")]


async def killed_while_it_ran(world, approval: Any = "required", **options):
    """A call that was approved and began under the first definition, and whose process then died."""
    began = asyncio.Event()

    async def file(path: str = "a") -> str:
        began.set()
        return await asyncio.get_running_loop().create_future()

    first = declare(name="file", description=READ, approval=approval, **options)(file)
    async with Runtime(agent(world.model, first), store=world.store.sibling(), drain=0) as rt:
        turn = await rt.send("c", "hi")
        if approval == "required":
            (entry,) = (await turn.result()).pending
            await rt.resolve("c", entry.call, Approve(), by="boss")
        await began.wait()


def settles(args, call):
    return "redispatch"


@pytest.mark.parametrize("recovery", ["redispatch", settles], ids=["redispatch", "reconcile"])
async def test_an_approved_call_that_was_interrupted_does_not_run_again_by_another_definition(recovery):
    """B48: attempt 2 after the code changed is asked about"""

    world = Deployments(FILE, "done")
    await killed_while_it_ran(world, recovery=recovery)
    async with world.version(world.file(DELETE, recovery=recovery)) as rt:
        (entry,) = await until(rt.pending)
        assert (entry.recovery, entry.reason) == (True, changed()[1])
        assert world.ran == []
        await rt.resolve("c", entry.call, Approve(digest=entry.digest))
        await logged(rt, CallReturned)
        assert world.ran == [(DELETE, "a")]
        assert [e.attempt for e in of(await rt.history("c"), CallStarted)] == [1, 2]


async def test_an_interrupted_call_runs_again_by_the_same_definition_as_before():
    """B48"""
    world = Deployments(FILE, "done")
    await killed_while_it_ran(world, recovery="redispatch")
    async with world.version(world.file(recovery="redispatch")) as rt:
        await logged(rt, CallReturned)
        assert world.ran == [(READ, "a")]
        assert len(of(await rt.history("c"), CallSuspended)) == 1


async def test_what_nobody_approved_runs_again_whatever_its_definition_says_now():
    """B48, B89: there is no approval to void"""
    world = Deployments(FILE, "done")
    await killed_while_it_ran(world, approval="auto", recovery="redispatch")
    async with world.version(world.file(DELETE, approval="auto", recovery="redispatch")) as rt:
        await logged(rt, CallReturned)
        assert world.ran == [(DELETE, "a")]


@pytest.mark.parametrize("decision", [Approve(), Submit("done by hand"), Deny("leave it")])
async def test_a_recovery_approved_for_one_definition_is_asked_about_again_for_another(decision):
    """B49: a second change, between the recovery's approval and the run"""

    world = Deployments(FILE, "done")
    await killed_while_it_ran(world, recovery="ask")
    async with world.version(world.file(recovery="ask")) as rt:
        (entry,) = await until(rt.pending)
        assert (entry.recovery, entry.reason) == (True, "recovery")
    async with Runtime(store=world.store.sibling()) as desk:
        await desk.resolve("c", entry.call, Approve(digest=entry.digest))
    async with world.version(world.file(DELETE, recovery="ask")) as rt:
        (entry,) = await until(rt.pending)
        assert (entry.recovery, entry.reason, world.ran) == (True, changed()[1], [])
        await rt.resolve("c", entry.call, decision)
        await logged(rt, CallReturned)
        assert world.ran == ([(DELETE, "a")] if isinstance(decision, Approve) else [])


async def test_a_hooked_call_that_was_approved_is_asked_about_again_by_its_edited_arguments():
    """B35: hooks are in front of the gate, once"""
    world = Deployments(FILE, "done")

    @before_tool
    async def cap(call, args):
        return Edit({"path": "capped"})

    async with world.version(world.file(), hooks=[cap]) as rt:
        (entry,) = (await (await rt.send("c", "hi")).result()).pending
        assert entry.args == {"path": "capped"}
    async with Runtime(store=world.store.sibling()) as desk:
        await desk.resolve("c", entry.call, Approve())
    async with world.version(world.file(DELETE), hooks=[cap]) as rt:
        (entry,) = await until(rt.pending)
        assert (definition(entry), entry.args) == (changed(), {"path": "capped"})
        await rt.resolve("c", entry.call, Approve())
        await logged(rt, CallReturned)
        assert world.ran == [(DELETE, "capped")]


async def test_a_policy_s_call_is_covered_by_a_grant_of_its_own_definition_only():
    """B37"""

    def always(args, call):
        return True

    world = Deployments(FILE, "done", FILE, "done", FILE, "done")
    async with world.version(world.file(approval=always)) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        await rt.resolve("c", entry.call, Approve(remember="args"), by="boss")
        await turn.final_result()
        await (await rt.send("c", "hi")).final_result()
        assert len(world.ran) == 2
    async with world.version(world.file(DELETE, approval=always)) as rt:
        (entry,) = (await (await rt.send("c", "hi")).result()).pending
        assert entry.prompt == DELETE
        assert "had an approval remembered" in (entry.reason or "")


# --- the fingerprint ---


def plain(name="act", description="Act.", **options):
    async def act(n: int) -> int: ...

    return declare(name=name, description=description, **options)(act).spec


def test_name_description_parameters_and_version_make_the_fingerprint_and_nothing_else_does():
    """B89: retention, expiry and the like may change"""
    one = fingerprint_of(plain())

    async def other(n: int, m: int = 0) -> int: ...

    different = [
        plain(name="act2"),
        plain(description="Act!"),
        plain(version=1),
        plain(version="2"),
        declare(name="act", description="Act.")(other).spec,
    ]
    assert len({one, *map(fingerprint_of, different)}) == 6
    same = [plain(expires="1h"), plain(risk="high"), plain(timeout=3), plain(prompt="Really?"), plain(version=None)]
    assert {fingerprint_of(spec) for spec in same} == {one}
    assert fingerprint_of(plain(version=1)) == fingerprint_of(plain(version="1"))


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
    """B5"""
    with pytest.raises(DeclarationError, match="version must be text or a whole number"):
        plain(version=version)


def test_a_version_is_kept_with_the_tool_in_every_style():
    """B10, B11"""

    class Classy(Tool):
        """Act."""

        name = "classy"
        version = 3

        async def execute(self, n: int) -> int: ...

    tool = Toolset(Classy).get("classy")
    assert tool.spec.version == "3"
    assert Tool.from_data(tool.to_data(handlers=False), lambda args: None).spec.version == "3"


async def test_a_new_version_voids_an_approval_as_a_new_description_does():
    """B35: for code that changed and whose description did not"""
    world = Deployments(FILE, "done")
    async with world.version(world.file(version=1)) as rt:
        (entry,) = (await (await rt.send("c", "hi")).result()).pending
    async with Runtime(store=world.store.sibling()) as desk:
        await desk.resolve("c", entry.call, Approve())
    async with world.version(world.file(version=2)) as rt:
        (entry,) = await until(rt.pending)
        assert definition(entry) == changed(to=READ)
        assert world.ran == []


# --- logs of older versions ---


def written_before(event):
    """The event as a version that took no fingerprints would have written it."""

    def bare(value):
        if isinstance(value, dict):
            return {key: bare(each) for key, each in value.items() if key != "fingerprint"}
        return [bare(each) for each in value] if isinstance(value, list) else value

    old: Any = bare(msgspec.json.decode(codec.encode_event(event)))
    if old["type"] == "CallSuspended":
        old["digest"] = call_digest(old["tool"], old["args"], old.get("preview"))
    return codec.decode_event(msgspec.json.encode(old))


@pytest.mark.parametrize("planned", [False, True], ids=["without a preview", "with a preview"])
async def test_a_call_of_a_log_without_fingerprints_is_approved_and_runs_as_it_always_did(planned):
    """Decision 0022: what is not known to have changed is not asked about again"""

    world = Deployments(FILE, "done")
    async with world.version(world.file(planned=planned)) as rt:
        await (await rt.send("c", "hi")).result()
        events = [written_before(event) for event in await rt.history("c")]
    world.store = MemoryStore()
    await world.store.open()
    await rewrite(world.store, "c", events)
    await world.store.close()
    async with world.version(world.file(planned=planned, version=2)) as rt:
        (entry,) = await rt.pending()
        assert entry.digest == call_digest("file", entry.args, entry.preview)
        own = await rt.preview("c", entry.call, {"path": "b"})
        await rt.resolve("c", entry.call, Approve(args={"path": "b"}, digest=own.digest, remember="tool"))
        await logged(rt, CallReturned)
        assert world.ran == [(READ, "b")]
        assert [grant.fingerprint for grant in await rt.grants("c")] == [""], "it covers any definition"
