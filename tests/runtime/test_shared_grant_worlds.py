"""Generated worlds with shared grants: two processes, several conversations, revocations, deployments, planted rows.

The law: a call that needs an approval starts only after an approval of its own, or under a grant that is in the logs of
the store at that moment: given and not revoked before, in the order of all commits; in time; for this principal, these
arguments and this definition of the tool. The mutants below plant defects that the law must detect.
"""

import asyncio
import random
from contextlib import ExitStack, suppress
from typing import Any
from unittest import mock

import msgspec
import pytest
from support.runtimes import Clock, agent
from worlds import simulate

from holdfast import Approve, Runtime, ScriptedModel, ToolCall
from holdfast import tool as declare
from holdfast.core import codec
from holdfast.core.decide import gate
from holdfast.core.events import (
    AssistantSaid,
    CallResolved,
    CallStarted,
    CallSuspended,
    GrantGiven,
    GrantRevoked,
    MessageReceived,
    TurnStarted,
)
from holdfast.core.schema.validation import call_digest
from holdfast.core.state import Grant
from holdfast.core.tool import annotations_of, fingerprint_of
from holdfast.errors import Refused
from holdfast.runtime import commit
from holdfast.runtime.pending_calls.shared_grants import SharedGrants, full_grant_id, split_grant_id
from holdfast.stores.base import GrantRow
from holdfast.stores.memory import MemoryStore

USERS = ("ada", "bob")
SEEDS = 40
HUNTS = 250


class WatchedStore(MemoryStore):
    """A memory store whose calls take time, and which keeps the order of all commits of its world."""

    def __init__(self, world, data=None, definition=None):
        super().__init__(data)
        self.world, self.definition = world, definition

    async def _pause(self):
        await asyncio.sleep(self.world.random.choice([0, 0, 0.001, 0.003]))

    async def append(self, append):
        await self._pause()
        await super().append(append)
        for body in append.events:
            self.world.commits.append((append.conversation, codec.decode_event(body), self.definition))

    async def shared_grants(self, tool, user):
        found = await super().shared_grants(tool, user)
        await self._pause()
        return found

    async def heads(self, conversations):
        found = await super().heads(conversations)
        await self._pause()
        return found


class World:
    """Two processes on one store, and callers who do not wait for each other."""

    def __init__(self, seed):
        self.random, self.clock = random.Random(seed), Clock(1000.0)
        self.commits, self.tasks = [], []
        self.store = WatchedStore(self)
        self.versions: list[Any] = [None, None]
        self.processes: list[Any] = [None, None]

    def make_tool(self, version):
        """Return a version of the tool. The second has another description, the third another risk."""

        async def pay(amount: int) -> int:
            await asyncio.sleep(0.002)
            return amount

        pay.__doc__ = "Pay." if version != "2" else "Pay more."
        return declare(approval="required", risk="medium" if version == "3" else "low")(pay)

    async def deploy(self, index, version):
        """Replace a process by one with this version of the tool."""
        old = self.processes[index]
        if old is not None:
            await old.close()
        made = self.make_tool(version)
        self.versions[index] = fingerprint_of(made.spec), annotations_of(made.spec)
        replies = []
        for n in range(12):
            replies += [[ToolCall("pay", {"amount": n % 2}), ToolCall("pay", {"amount": 1})], "ok"]
        self.processes[index] = Runtime(
            agent(ScriptedModel(replies, follow=True), made),
            store=WatchedStore(self, self.store._data, self.versions[index]),
            clock=self.clock,
            drain=0,
            parallel=2,
        )
        await self.processes[index].start()

    async def act(self):
        """Take one random step."""
        choose = self.random.choice
        rt = choose([one for one in self.processes if one is not None])
        conversation = choose(["c0", "c1", "c2", "c3"])
        match choose(["ask", "ask", "ask", "approve", "approve", "approve", "revoke", "jump", "deploy", "plant"]):
            case "ask":
                await rt.send(conversation, "go", by=choose(USERS), when_busy="queue")
            case "approve":
                entries = await rt.pending()
                if entries:
                    decision = Approve(
                        remember=choose(["args", "tool"]),
                        scope=choose(["conversation", "user", "everyone"]),
                        duration=choose([None, 50.0]),
                    )
                    await rt.resolve(choose(entries), decision, by="boss")
            case "revoke":
                grants = await rt.grants()
                if grants:
                    await rt.revoke(choose(grants).id, by="boss")
            case "jump":
                self.clock.now += choose([1.0, 60.0])
            case "deploy":
                await self.deploy(choose([0, 1]), choose(["1", "2", "3"]))
            case "plant":
                grant = Grant(
                    id="g3", tool="pay", remember="tool", scope="everyone", by=gate.SYSTEM, at=0.0,
                    fingerprint=self.versions[0][0], annotations=self.versions[0][1],
                )  # fmt: skip
                row = GrantRow(
                    conversation=conversation, grant=choose(["g3", "g7", "g9"]), tool="pay", user=None, until=None,
                    body=msgspec.json.encode(grant),
                )  # fmt: skip
                self.store._data.grants.setdefault((row.conversation, row.grant), row)

    async def play(self):
        await self.store.open()
        for index in (0, 1):
            await self.deploy(index, "1")

        async def step():
            with suppress(Refused):
                await self.act()

        for _ in range(28):
            self.tasks.append(asyncio.create_task(step()))
            if self.random.random() < 0.6:
                await asyncio.sleep(self.random.choice([0.001, 0.004, 0.05]))
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await asyncio.sleep(1.0)
        for rt in self.processes:
            if rt is not None:
                await rt.close()
        await self.store.close()
        check_law(self.commits)


def check_law(commits):
    """Assert the law of this module over the commits of a whole store."""
    given, made, users, messages, approved, covered = {}, {}, {}, {}, set(), 0
    for name, event, definition in commits:
        match event:
            case MessageReceived():
                messages[name, event.seq] = event.by.id
            case TurnStarted():
                users[name] = messages[name, event.message]
            case AssistantSaid():
                made.update({(name, call.id): call for call in event.calls})
            case GrantGiven():
                given[name, event.grant] = event
            case GrantRevoked():
                given.pop((name, event.grant), None)
            case CallSuspended():
                approved.discard((name, event.call_id))
            case CallResolved(decision=Approve()):
                approved.add((name, event.call_id))
            case CallStarted() if (name, event.call_id) not in approved:
                call, where = made[name, event.call_id], f"{name}/{event.seq}"
                assert event.grant, f"{where}: started without an approval or a grant"
                key = split_grant_id(event.grant) or (name, event.grant)
                grant = given.get(key)
                assert grant is not None, f"{where}: under {event.grant}, which is not in force"
                assert grant.until is None or event.at < grant.until, f"{where}: under an expired grant"
                reach = {"conversation": key[0] == name, "user": grant.user == users[name], "everyone": True}
                assert reach[grant.scope], f"{where}: the grant is for others"
                digest = call_digest("pay", call.args, None)
                assert grant.remember == "tool" or grant.args_digest == digest, f"{where}: other arguments"
                assert definition == (grant.fingerprint, grant.annotations), f"{where}: another definition"
                covered += key[0] != name
            case _:
                pass
    return covered


def play(seed):
    world = World(seed)
    simulate(world.play)
    return world


def test_shared_grants_cover_only_what_they_were_given_for_in_generated_worlds():
    """A revoked grant covers nothing that starts afterwards, in the order of all commits [B115]."""
    covered = sum(check_law(play(seed).commits) for seed in range(SEEDS))
    assert covered > 20, "grants of other conversations are used in these worlds"


def index_is_trusted():
    """The runtime relies on the rows of the index."""

    async def from_rows(self, rows):
        found = [(row.conversation, msgspec.json.decode(row.body, type=Grant)) for row in rows]
        return [msgspec.structs.replace(grant, id=full_grant_id(name, grant.id)) for name, grant in found]

    return [(SharedGrants, "_read", from_rows)]


def revocation_is_not_checked_in_the_append():
    """A grant that was revoked after it was read lets the call start."""
    return [(commit, "_relied_grants", lambda draft: [])]


def user_is_not_compared():
    """A grant for one principal covers the turns of others."""
    found = MemoryStore.list_shared_grants

    async def of_all(self, tool, user):
        return [row for row in await found(self) if row.tool == tool]

    return [(Grant, "reaches", lambda self, user: True), (WatchedStore, "shared_grants", of_all)]


def definition_is_not_compared():
    """A grant covers another definition of the tool."""
    return [(gate, "covers_definition", lambda grant, wanted: True)]


def annotations_are_not_compared():
    """A grant covers the tool with another risk."""
    return [(gate, "covers_definition", lambda grant, wanted: grant.fingerprint == wanted.fingerprint)]


def end_is_not_compared():
    """A grant is valid after its time."""
    applies = gate.grant_applies

    def without_end(grant, args, now):
        return applies(msgspec.structs.replace(grant, until=None), args, now)

    return [(gate, "grant_applies", without_end)]


@pytest.mark.parametrize(
    "mutant",
    [
        index_is_trusted,
        revocation_is_not_checked_in_the_append,
        user_is_not_compared,
        definition_is_not_compared,
        annotations_are_not_compared,
        end_is_not_compared,
    ],
    ids=lambda mutant: mutant.__name__,
)
def test_the_law_detects(mutant):
    """Each planted defect violates the law in one of the worlds [B115]."""
    with ExitStack() as patches:
        for target, name, replacement in mutant():
            patches.enter_context(mock.patch.object(target, name, replacement))
        for seed in range(HUNTS):
            try:
                play(seed)
            except AssertionError:
                return
    raise AssertionError(f"{mutant.__doc__} No world of {HUNTS} detects it")
