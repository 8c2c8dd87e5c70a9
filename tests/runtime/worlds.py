"""A simulation of two processes on one memory store, with callers, deadlines and kills.

Everything runs on one event loop in virtual time, which jumps to the next timer when no task is ready. So a scenario is
deterministic, and a minute of it costs milliseconds. A ``Process`` is a runtime with its own owner of the store. A kill
ends the store of a process at a chosen write, before or after the commit. Nothing that a killed process does later is
in the log or in the ledger of effects.
"""

import asyncio
import logging
import selectors
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any
from unittest import mock

import msgspec
from chaos import laws
from chaos.laws import Effect, Operation, Truth
from support.revival import rewrite
from support.runtimes import Clock
from support.timelines import check_timeline

from holdfast import (
    Agent,
    Answer,
    Approve,
    Ask,
    Call,
    ClientResult,
    Continue,
    Default,
    Deny,
    Extend,
    Failed,
    Halt,
    Result,
    Runtime,
    Submit,
    TakeBack,
    ToolError,
    tool,
)
from holdfast.core import codec
from holdfast.core.audit import kind_of
from holdfast.core.decide.deputies import DEPUTIES
from holdfast.core.decide.draft import Draft
from holdfast.core.decide.machine import decide_into
from holdfast.core.decisions import Pending, Principal
from holdfast.core.effects import owed
from holdfast.core.events import (
    AsideAnswered,
    AssistantSaid,
    CallStarted,
    CallSuspended,
    DeputyNamed,
    MessageReceived,
    OutputRejected,
    TurnEnded,
    TurnStarted,
    Usage,
)
from holdfast.core.inputs import ImportConversation
from holdfast.core.notice import notices_of
from holdfast.core.state import State, evolve, pending_entries, status_of
from holdfast.core.tool import fingerprint_of
from holdfast.core.transcript import AssistantMessage, ToolResult
from holdfast.errors import HoldfastError, ModelError, Refused
from holdfast.models.base import FinishPart, TextPart, ToolCallPart, UsagePart
from holdfast.runtime import commit
from holdfast.runtime.commit import build_append
from holdfast.runtime.decision_rows import check_rows
from holdfast.stores.base import GENESIS, ChannelRow, DecisionFilter, hash_chain
from holdfast.stores.memory import MemoryStore

OWNER_EVENTS = (TurnStarted, AssistantSaid, OutputRejected, AsideAnswered, CallStarted, TurnEnded)
CONVERSATION = "c"
HOUR = 3600.0
_pending = msgspec.json.Decoder(Pending)


# --- time ---


class Stuck(AssertionError):
    """No task can ever continue, or the loop never comes to rest."""


class _Selector(selectors.DefaultSelector):
    def __init__(self):
        super().__init__()
        self.now, self.iterations = 0.0, 0

    def select(self, timeout=None):
        found = super().select(0)
        if not found:
            if timeout is None:
                raise Stuck("no timer is left, and a task still waits")
            self.iterations = 0 if timeout > 0 else self.iterations + 1
            if self.iterations > 100_000:
                raise Stuck("busy loop: time does not advance")
            self.now += max(timeout, 0)
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self):
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self):
        return self._virtual.now


def simulate(main, *args):
    """Run a coroutine function to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main(*args))


# --- tools ---


async def perform_effect(name, n, call):
    """Write the effect of a call into the ledger, unless its process is dead. Takes time before and after."""
    process = call.scope
    await asyncio.sleep(0.002 * (n % 4))
    if process.dead:
        await asyncio.get_running_loop().create_future()
    world = process.world
    definition = fingerprint_of(process.agent.tools.get(name).spec)
    at = world.length(call.conversation)
    done = Effect(
        call.conversation,
        call.id,
        call.attempt,
        name,
        {"n": n},
        at=at,
        definition=definition,
        plan=call.plan,
        answers=call.answers,
        state=call.state,
    )
    world.ledger.append(done)
    await asyncio.sleep(0.003 * (n % 3))
    return {"did": name, "n": n, "attempt": call.attempt}


def server_tool(name, **options):
    async def handler(n: int, call: Call) -> dict:
        return await perform_effect(name, n, call)

    return tool(name=name, description=f"Tool {name}.", **options)(handler)


def suspended_tool(name, **options):
    def handler(n: int) -> int: ...

    return tool(name=name, description=f"Tool {name}.", **options)(handler)


def with_preview(it):
    @it.preview
    async def _(n: int, call: Call) -> str:
        await asyncio.sleep(0.001 * (n % 3))
        if n == 5:
            raise ToolError("not_found", "it cannot succeed")
        if n == 6:
            raise RuntimeError("the preview is broken")
        return f"plan {call.scope.world.plan} for {n}"

    return it


async def approval_if_odd(args, call):
    await asyncio.sleep(0.001)
    return args["n"] % 2 == 1


async def reconcile(args, call):
    """Return the result if the ledger has the effect; else a decision that depends on the number."""
    await asyncio.sleep(0.001)
    done = [effect for effect in call.scope.world.ledger if effect.conversation == call.conversation]
    if any(effect.call == call.id for effect in done):
        return Result({"found": args["n"]})
    return ("redispatch", "fail", "ask")[args["n"] % 3]


async def asks(n: int, call: Call) -> object:
    await perform_effect("asks", n, call)
    return Ask("What now?", answer=int, expires=HOUR)


def continuing_tool(name, **options):
    """Return a tool that asks once or twice, and continues with each answer."""

    async def handler(n: int, call: Call) -> object:
        did = await perform_effect(name, n, call)
        if len(call.answers) <= n % 2:
            state = {"asked": len(call.answers) + 1, "n": n}
            on_deny = "continue" if n % 3 == 1 else "end"
            return Ask("And now?", answer=int, expires=HOUR, resume=state, on_deny=on_deny)
        return did

    return tool(name=name, description=f"Tool {name}.", **options)(handler)


async def stepped(n: int, call: Call) -> object:
    """Ask the model and pass its answer to itself as a checkpoint, then ask a person or return."""
    did = await perform_effect("stepped", n, call)
    if call.state is None:
        answer = await call.ask_model("Yes?")
        return Continue({"step": 1, "n": n, "said": answer.text})
    if n % 2 and not call.answers:
        return Ask("And now?", answer=int, expires=HOUR, resume={"step": 2, "n": n})
    return did


async def halts(n: int, call: Call) -> object:
    await perform_effect("halts", n, call)
    return Halt("handed_over", n)


async def breaks(n: int, call: Call) -> object:
    await perform_effect("breaks", n, call)
    raise ToolError("resource_missing", "broken") if n % 2 else RuntimeError("broken")


TOOLS = [
    server_tool("auto"),
    server_tool("once", recovery="fail"),
    server_tool("timed", timeout=0.005, recovery="fail"),
    server_tool("asked", recovery="ask", expires=HOUR),
    server_tool("known", recovery=reconcile, expires=HOUR),
    server_tool("gated", approval="required", recovery="redispatch", expires=HOUR),
    server_tool("gated_once", approval="required", recovery="fail", expires=HOUR, on_expiry="halt"),
    with_preview(server_tool("planned", approval="required", expires=HOUR, on_expiry="deny")),
    with_preview(server_tool("planned_once", approval="required", recovery="fail", expires=HOUR)),
    server_tool("policy", approval=approval_if_odd, recovery="fail", expires=HOUR),
    with_preview(server_tool("planned_policy", approval=approval_if_odd, expires=HOUR)),
    suspended_tool("human", executor="human", prompt="Which?", expires=HOUR, on_expiry=Default(0)),
    suspended_tool("client", executor="client", expires=HOUR),
    suspended_tool("gated_client", executor="client", approval="required", expires=HOUR),
    server_tool("manual", manual=True, expires=HOUR),
    server_tool("gated_manual", manual=True, approval="required", expires=HOUR),
    with_preview(
        server_tool(
            "paired",
            approval="required",
            approvers=2,
            recovery="redispatch",
            expires=HOUR,
            extend_limit=2 * HOUR,
            remind=[HOUR - 30],
            escalate_to=("boss",),
            escalate_after=5.0,
        )
    ),
    server_tool("audited", approval="required", approver_roles=("finance",), not_requester=True, expires=HOUR),
    with_preview(
        server_tool(
            "audited_pair",
            approval="required",
            approvers=2,
            approver_roles=("finance",),
            not_requester=True,
            recovery="redispatch",
            expires=HOUR,
            extend_limit=2 * HOUR,
            escalate_to=("bob",),
            escalate_after=1800.0,
        )
    ),
    server_tool("graced", approval="required", grace=5.0, recovery="redispatch", expires=HOUR),
    suspended_tool("graced_client", executor="client", approval="required", grace=5.0, expires=HOUR),
    with_preview(server_tool("graced_pair", approval="required", approvers=2, grace=5.0, recovery="fail", expires=8.0)),
    tool(name="asks", description="Asks.")(asks),
    continuing_tool("continues"),
    continuing_tool("continues_once", recovery="fail"),
    with_preview(continuing_tool("gated_continues", approval="required", expires=HOUR)),
    tool(name="stepped", description="Takes steps.")(stepped),
    tool(name="halts", description="Halts.")(halts),
    tool(name="breaks", description="Breaks.", recovery="fail")(breaks),
]


def always(args):
    return True


def if_odd(args):
    return args["n"] % 2 == 1


TRUTHS = {
    "auto": Truth(),
    "once": Truth(recovery="fail"),
    "timed": Truth(recovery="fail"),
    "asked": Truth(recovery="ask"),
    "known": Truth(recovery="reconcile"),
    "gated": Truth(always),
    "gated_once": Truth(always, recovery="fail"),
    "planned": Truth(always, planned=True, recovery="ask"),
    "planned_once": Truth(always, planned=True, recovery="fail"),
    "policy": Truth(if_odd, recovery="fail"),
    "planned_policy": Truth(if_odd, planned=True, recovery="ask"),
    "human": Truth(runs=False),
    "client": Truth(runs=False),
    "gated_client": Truth(always, runs=False),
    "manual": Truth(runs=False),
    "gated_manual": Truth(always, runs=False),
    "paired": Truth(always, planned=True, approvers=2),
    "audited": Truth(always, recovery="ask", roles=("finance",), not_requester=True),
    "audited_pair": Truth(always, planned=True, approvers=2, roles=("finance",), not_requester=True),
    "graced": Truth(always, grace=5.0),
    "graced_client": Truth(always, runs=False, grace=5.0),
    "graced_pair": Truth(always, planned=True, recovery="fail", approvers=2, grace=5.0),
    "asks": Truth(),
    "continues": Truth(),
    "continues_once": Truth(recovery="fail"),
    "gated_continues": Truth(always, planned=True, recovery="ask"),
    "stepped": Truth(),
    "halts": Truth(),
    "breaks": Truth(recovery="fail"),
}
GRACED = ("graced", "graced_client", "graced_pair")
"""The tools whose approvals can be taken back. They have scenarios of their own."""
AUDITED = ("audited", "audited_pair")
"""The tools about which only certain people may decide. They have scenarios of their own."""
NAMES = (*(name for name in TRUTHS if name not in (*AUDITED, *GRACED)), "nope", "!")
"""The names that the model may call. There is no tool ``nope``; at ``!`` the model itself fails."""
PEOPLE = {"ada": ("finance",), "cleo": ("finance",), "bob": (), "dan": ()}
"""The people who request and decide more than once, with their roles. Every other operation has its own principal."""


def approve_edited(entry):
    """Approve other arguments, with the digest of the original or without a digest."""
    return Approve(args={"n": 2}, digest=entry.digest if "once" in entry.tool else None)


DECISIONS = {
    "approval": (
        lambda entry: Approve(),
        lambda entry: Approve(digest=entry.digest),
        lambda entry: Approve(remember="args"),
        lambda entry: Approve(remember="tool", duration=30.0),
        lambda entry: approve_edited(entry) if not entry.recovery else Submit({"by hand": 1}),
        lambda entry: Deny("no"),
        lambda entry: Deny("stop", stop=True),
        lambda entry: Approve(digest="something else"),
        lambda entry: Extend(HOUR + 600.0 if entry.seq % 2 else "70m"),
    ),
    "elicitation": (lambda entry: Answer(7), lambda entry: Deny("no"), lambda entry: Answer("not a number")),
    "client_exec": (lambda entry: ClientResult(7), lambda entry: Failed("read_failed", "no signal")),
    "manual": (
        lambda entry: Submit({"by hand": 1} if entry.executor == "server" else 7),
        lambda entry: Failed("command_failed", "broke"),
    ),
}


class WorldModel:
    """A model that follows the script of the world, and checks every request that it gets."""

    name = "world"

    def __init__(self):
        self.world: Any = None

    async def stream(self, request):
        world = self.world
        if request.call:  # a handler asks
            yield TextPart("yes")
            yield UsagePart(Usage(3, 2))
            yield FinishPart()
            return
        world.check_request(request)
        script = world.script[(request.turn - 1) % len(world.script)]
        calls: Any = script[request.step - 1] if request.step <= len(script) else ()
        if request.aside:
            calls = [("auto", 1)]  # dropped: tools are off
        yield TextPart("one ")
        await asyncio.sleep(0.004)
        yield TextPart("two")
        for index, (name, n) in enumerate(calls):
            if name == "!":
                raise ModelError("the provider is down", kind="network")
            yield ToolCallPart(index, None, name, {"n": n} if n != 7 else '{"n": "seven"}')
        yield FinishPart()


MODEL = WorldModel()


@cache
def agent_of_version(version):
    """Return the agent of this version of the code: the tools do the same, and their descriptions differ."""
    tools = [it.copy_with(description=f"Tool {it.spec.name}, version {version}.") for it in TOOLS] if version else TOOLS
    return Agent("a", model=MODEL, tools=tools, max_steps=3)


def person_of(person, operation):
    """Return the principal of one of the people; its claims name the operation, by which its events are found."""
    return Principal(person, roles=PEOPLE[person], claims={"operation": operation})


# --- processes ---


class KillableStore:
    """A process's access to the memory store. It dies at a chosen write, and checks that each writer may write."""

    def __init__(self, process, inner, jitter):
        self._process, self._inner, self._jitter, self._turn = process, inner, jitter, 0
        self.owner = inner.owner
        self.writes_left, self.after = None, False

    def __getattr__(self, name):
        return getattr(self._inner, name)

    async def _pause(self):
        self._turn += 1
        for _ in range(self._jitter[self._turn % len(self._jitter)]):
            await asyncio.sleep(0)

    def _is_last_write(self):
        if self.writes_left is None:
            return False
        self.writes_left -= 1
        return self.writes_left == 0

    async def _die(self):
        self._process.dead = True
        self._inner.kill()
        await asyncio.get_running_loop().create_future()

    async def append(self, append):
        await self._pause()
        is_last = self._is_last_write()
        if is_last and not self.after:
            await self._die()
        world = self._process.world
        row = world.data.conversations.get(append.conversation)
        if append.epoch is None:
            events = [codec.decode_event(body) for body in append.events]
            for event in events:
                if isinstance(event, OWNER_EVENTS):
                    world.report_violation(f"a guest appends {laws.shown(event)}")
        await self._inner.append(append)
        if append.epoch is not None and row is not None and not append.release:
            current = world.data.conversations[append.conversation]
            if (current.owner, current.epoch) != (self.owner, append.epoch):
                world.report_violation(f"an owner of epoch {append.epoch} wrote in epoch {current.epoch}")
        world.appends += 1
        if is_last:
            await self._die()
        await self._pause()

    async def claim(self, conversation):
        return await self._claim_with(lambda: self._inner.claim(conversation))

    async def claim_owing(self, *args, **options):
        if not await self._inner.list_owing(*args):
            return {}  # not a write
        return await self._claim_with(lambda: self._inner.claim_owing(*args, **options))

    async def _claim_with(self, claim):
        await self._pause()
        is_last = self._is_last_write()
        if is_last and not self.after:
            await self._die()
        claimed = await claim()
        if is_last:
            await self._die()
        await self._pause()
        return claimed

    async def read(self, *args, **options):
        await self._pause()
        return await self._inner.read(*args, **options)

    async def load(self, conversation):
        await self._pause()
        return await self._inner.load(conversation)


def allow_all(by, pending, decision):
    return True


class Process:
    """A process: a runtime and its running operations."""

    def __init__(self, world, inner, agent):
        self.world, self.dead, self.agent = world, False, agent
        agents = () if agent is None else (agent,)
        self.store: Any = KillableStore(self, inner, world.jitter)
        may_resolve = allow_all if world.rules else None
        self.rt = Runtime(
            *agents,
            store=self.store,
            clock=world.clock,
            scope=self.scope,
            parallel=world.parallel,
            may_resolve=may_resolve,
        )
        self.users = set()
        publish = self.rt._engine.bus.publish

        def check_and_publish(name, item):
            if not self.dead:
                world.check_published(name, item)
            publish(name, item)

        self.rt._engine.bus.publish = check_and_publish
        self.rt._engine.bus.has_readers = lambda name: True

    def scope(self, principal):
        return _Scope(self)

    async def start(self):
        await self.rt.start()
        return self

    async def end(self):
        """Close the runtime; if the process was killed, cancel its remaining tasks."""
        closing = asyncio.get_running_loop().create_task(self.rt.close())
        while not (self.dead or closing.done()):  # it may be killed while it closes
            await asyncio.sleep(0.001)
        self.rt._engine.closing = True
        tasks = [closing, *self.rt._engine.tasks(), *self.users]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Scope:
    def __init__(self, process):
        self._process = process

    async def __aenter__(self):
        return self._process

    async def __aexit__(self, *_):
        return None


class ErrorLogWatcher(logging.Handler):
    """Reports every error that the runtime logs as a violation: no scenario should cause one."""

    def __init__(self, world):
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, entry):
        self._world.report_violation(f"logged: {entry.getMessage()} {entry.exc_info and entry.exc_info[1]!r}")


class World:
    def __init__(self, script, jitter=(0,), second=True, parallel=64, rules=False):
        self.script, self.jitter, self.second, self.parallel = script, tuple(jitter), second, parallel
        self.rules = rules
        """Whether there is a rule ``may_resolve``, which allows everything: decisions are judged before the append."""
        self.root = MemoryStore()
        self.data = self.root._data
        self.data.channels["desk"] = ChannelRow(name="desk", kinds=())  # it is never served: every row stays
        self.clock = Clock()
        self.plan = self.version = 0
        self.ledger, self.history, self.violations = [], [], []
        self.past_entries = {}
        self.processes: list[Process | None] = [None, None]
        self.appends = self.deaths = self.count = self.stalls = 0
        self.copies = {}
        """Imported conversation -> the events of the imported file."""
        MODEL.world = self

    # --- checks at every moment ---

    def report_violation(self, what):
        self.violations.append(what)

    def events(self, name=CONVERSATION):
        found = self.data.conversations.get(name)
        return [codec.decode_event(body) for body in found.events] if found else []

    def length(self, name=CONVERSATION):
        found = self.data.conversations.get(name)
        return len(found.events) if found else 0

    def check_published(self, name, item):
        """Check that an event is in the log before it is published."""
        found = self.data.conversations.get(name)
        log = found.events if found else []
        if item.seq is not None:
            if item.seq > len(log) or log[item.seq - 1] != codec.encode_event(item):
                self.report_violation(f"published before it was appended: {laws.shown(item)}")
        elif item.type == "suspended" and item.pending.call not in str(log):
            self.report_violation(f"announced before it was appended: {item}")

    def check_request(self, request):
        """Check that the results of a reply's calls follow it directly, in call order."""
        messages = list(request.messages)
        for at, message in enumerate(messages):
            if isinstance(message, AssistantMessage) and message.calls:
                results = messages[at + 1 : at + 1 + len(message.calls)]
                got = [m.call for m in results if isinstance(m, ToolResult)]
                if got != [use.call for use in message.calls]:
                    self.report_violation(f"the model made {message.calls} and sees {results}")

    # --- processes and operations ---

    async def ensure_process(self, index):
        """Return the process; start it again if it is dead."""
        process = self.processes[index]
        if process is not None and process.dead:
            self.deaths += 1
            await process.end()
            process = None
        if process is None:
            agent = agent_of_version(self.version) if index == 0 or self.second else None
            process = self.processes[index] = await Process(self, self.root.sibling(), agent).start()
        return process

    async def end(self):
        for process in self.processes:
            if process is not None:
                await process.end()

    # --- operations of callers: the verbs of a scenario ---

    async def attempt(self, index, verb, work, **facts):
        """Start an operation on one of the processes. ``work`` returns the sequence number of its event."""
        process = await self.ensure_process(index)
        self.count += 1
        entry = Operation(verb, f"{verb}{self.count}", **facts)
        entry.invoked, entry.delegations = self.clock(), self.length(DEPUTIES)
        self.history.append(entry)

        async def run():
            try:
                entry.seq = await work(process.rt, entry.by)
                entry.outcome = "ok"
            except Refused as refusal:
                entry.outcome, entry.said = "refused", repr(refusal)
            except HoldfastError as failure:
                entry.said = repr(failure)  # the runtime was closed: the outcome is unknown

        task = asyncio.get_running_loop().create_task(run())
        process.users.add(task)
        task.add_done_callback(process.users.discard)
        return task

    async def send(self, index, when_busy, mode=None):
        text = f"message {self.count}"

        async def work(rt, by):
            return (await rt.send(CONVERSATION, text, by=by, agent="a", when_busy=when_busy, mode=mode)).seq

        await self.attempt(index, "send", work, text=text)

    async def ask(self, index):
        await self.send(index, "aside")

    def known_entries(self):
        """Return all pending entries so far, those that are still pending first."""
        found = self.data.conversations.get(CONVERSATION)
        now = [_pending.decode(row.body) for row in found.calls.values()] if found else []
        for entry in now:
            self.past_entries[entry.id] = entry
        return now + [entry for entry in self.past_entries.values() if entry not in now]

    async def decide(self, index, which, flavour):
        entries = self.known_entries()
        if entries:
            await self._decide(index, entries[which % len(entries)], flavour)

    async def _decide(self, index, entry, flavour, name=CONVERSATION):
        makers = DECISIONS[entry.kind]
        decision = makers[flavour % len(makers)](entry)

        async def work(rt, by):
            return (await rt.resolve(name, entry.call, decision, by=by)).seq

        verb = "resolve" if name == CONVERSATION else "resolve elsewhere"
        await self.attempt(index, verb, work, decisions={entry.call: decision})

    async def take_back(self, index, which):
        """Take back an approval, or what was one: perhaps it has been taken back, or its call has started."""
        entries = self.known_entries()
        if entries:
            entry = entries[which % len(entries)]

            async def work(rt, by):
                return (await rt.take_back(CONVERSATION, entry.call, by=by)).seq

            await self.attempt(index, "resolve", work, decisions={entry.call: TakeBack()})

    # --- the same for people who act more than once, and their deputies ---

    async def request(self, index, person):
        """Send a message as one of the people, who is the requester of the turn."""
        text = f"message {self.count}"

        async def work(rt, by):
            return (await rt.send(CONVERSATION, text, by=person_of(person, by), agent="a", when_busy="queue")).seq

        await self.attempt(index, "send", work, text=text, person=person)

    async def name(self, index, person, deputy, seconds):
        """Name a deputy of a person."""

        async def work(rt, by):
            await rt.delegate(deputy, timedelta(seconds=seconds), by=person_of(person, by))

        await self.attempt(index, "name", work)

    async def end_deputy(self, index, which, person):
        """End one of the delegations so far, as one of the people."""
        named = [event.delegation for event in self.events(DEPUTIES) if isinstance(event, DeputyNamed)]
        if named:

            async def work(rt, by):
                await rt.end_delegation(named[which % len(named)], by=person_of(person, by))

            await self.attempt(index, "end", work)

    async def decide_as(self, index, which, flavour, person):
        """Decide as one of the people: in its own name or, where that is not enough, as a deputy."""
        entries = self.known_entries()
        if not entries:
            return
        entry = entries[which % len(entries)]
        makers = DECISIONS[entry.kind]
        decision = makers[flavour % len(makers)](entry)

        async def work(rt, by):
            return (await rt.resolve(CONVERSATION, entry.call, decision, by=person_of(person, by))).seq

        await self.attempt(index, "resolve", work, decisions={entry.call: decision}, person=person)

    async def race(self, which, flavour):
        """Resolve the same entry at both processes at once."""
        entries = self.known_entries()
        if entries:
            entry = entries[which % len(entries)]
            await self._decide(0, entry, flavour)
            await self._decide(1, entry, flavour + 1)

    async def submit(self, index, flavour):
        """Resolve all pending entries in one batch."""
        found = self.data.conversations.get(CONVERSATION)
        entries = [_pending.decode(row.body) for row in found.calls.values()] if found else []
        if not entries:
            return
        decisions = {}
        for entry in entries:
            makers = DECISIONS[entry.kind]
            decisions[entry.call] = makers[flavour % len(makers)](entry)

        async def work(rt, by):
            return (await rt.resolve_many(CONVERSATION, decisions, by=by)).seq

        await self.attempt(index, "resolve", work, decisions=decisions)

    async def cancel(self, index):
        async def work(rt, by):
            return None if await rt.cancel(CONVERSATION, by=by) else 0

        await self.attempt(index, "cancel", work)

    async def revoke(self, index):
        async def work(rt, by):
            for grant in await rt.grants(CONVERSATION):
                await rt.revoke(CONVERSATION, grant.id, by=by)

        await self.attempt(index, "revoke", work)

    async def rename(self, index):
        title = f"title {self.count}"

        async def work(rt, by):
            await rt.rename(CONVERSATION, title, by=by)

        await self.attempt(index, "rename", work, text=title)

    async def archive(self, index, archived):
        async def work(rt, by):
            await rt.archive(CONVERSATION, archived, by=by)

        await self.attempt(index, "archive", work)

    async def find(self, index):
        """Search for the messages, while others write."""

        async def work(rt, by):
            await rt.search("message")

        await self.attempt(index, "find", work)

    async def attach(self, index, seconds):
        """Attach a client, for a while or only for a moment."""

        async def work(rt, by):
            client = await rt.attach_client(CONVERSATION, client="page", keep=False)
            if not seconds:
                await client.detach()

        await self.attempt(index, "attach", work)

    async def look(self, index):
        async def work(rt, by):
            await rt.snapshot(CONVERSATION)

        await self.attempt(index, "look", work)

    async def copy(self, index, trusted):
        """Export the conversation as it is now, and import it under another name."""
        found = self.data.conversations.get(CONVERSATION)
        if found is None:
            return
        name, bodies = f"copy{len(self.copies)}", list(found.events)
        self.copies[name] = bodies
        draft = Draft(self.state([codec.decode_event(body) for body in bodies], name), self.clock())
        decide_into(draft, ImportConversation(by=Principal("importer"), trusted=trusted, origin=CONVERSATION), {})
        draft.bodies[:0] = bodies
        store = self.root.sibling()
        await store.open()
        empty = State(conversation=name)
        await store.append(build_append(empty, draft, owes=bool(owed(draft.state)), epoch=None, release=False))
        await store.close()
        if not trusted:
            await self._use_closed(index, name, draft.state)

    async def _use_closed(self, index, name, state):
        """Check that every operation on a conversation that was imported without trust is refused."""
        calls = state.turn.calls if state.turn else ()

        async def work(rt, by):
            operations = [
                lambda: rt.send(name, "go on", by=by, agent="a", when_busy="interrupt"),
                lambda: rt.cancel(name, by=by),
            ]
            operations += [lambda call=call: rt.resolve(name, call, Approve(), by=by) for call in calls]
            for operation in operations:
                try:
                    done = await operation()
                except Refused:
                    continue
                if done is not False:  # False: there was nothing to cancel
                    self.report_violation(f"an operation was accepted on a conversation imported without trust: {done}")

        await self.attempt(index, "use", work)

    # --- faults and time: more verbs of a scenario ---

    async def kill(self, index, writes, after):
        """Kill the process at its n-th write from now, before or after the commit."""
        process = await self.ensure_process(index)
        process.store.writes_left, process.store.after = writes, after

    def disarm_kills(self):
        for process in self.processes:
            if process is not None:
                process.store.writes_left = None

    async def stall(self, index):
        """Let the other process take over a live one, which then continues to run."""
        process = await self.ensure_process(index)
        other = await self.ensure_process(1 - index)
        if not process.dead and not other.dead and other.rt.agents:
            self.stalls += 1
            inner = process.store._inner
            del self.data.alive[inner.owner]
            await other.rt._engine.on_remote_commit()
            await other.rt._engine.claim_owing(but=())
            await self.pause(0.001)
            if not process.dead:
                self.data.alive[inner.owner] = inner
                inner._signal.set()

    async def restart(self, index):
        process = await self.ensure_process(index)
        await process.end()
        self.processes[index] = None

    async def deploy(self, index):
        """Deploy a new version: restart this process with it; the other one gets it at its next start."""
        self.version += 1
        await self.restart(index)

    async def jump(self, seconds):
        self.clock.now += seconds

    async def drift(self, _):
        self.plan += 1

    async def forget(self, how):
        """Delete or corrupt the snapshot, which is only a cache."""
        found = self.data.conversations.get(CONVERSATION)
        if found is not None and found.snapshot is not None:
            if how:
                found.snapshot = b"rubbish"
            else:
                found.snapshot, found.snapshot_seq = None, 0

    async def pause(self, seconds):
        await asyncio.sleep(seconds)

    async def settle(self, _=None):
        """Wait until all operations have ended and no work is owed."""
        start = asyncio.get_running_loop().time()
        calm, appends = 0, -1
        while calm < 3:  # long enough for tasks that poll the clock
            for index in (0, 1):
                await self.ensure_process(index)
            owing = any(found.owes for found in self.data.conversations.values())
            busy = [
                process for process in self.processes if process.dead or process.users or process.rt._engine._active
            ]
            calm = calm + 1 if not busy and appends == self.appends and not owing else 0
            appends = self.appends
            if asyncio.get_running_loop().time() - start > 60:
                raise Stuck(f"does not come to rest: {self.describe()}")
            await asyncio.sleep(0.02)

    async def play(self, steps):
        for verb, *args, pause in steps:
            await getattr(self, verb)(*args)
            if pause is None:
                await self.settle()
            elif pause:
                await asyncio.sleep(pause)

    async def drain(self, decide=None):
        """Bring every conversation to its end: decide the pending entries; after a few rounds let them expire."""
        self.disarm_kills()
        for round_ in range(40):
            await self.settle()
            states = [self.state(name=name) for name in (CONVERSATION, *self.copies)]
            states = [state for state in states if not state.closed and (state.turn or state.queue)]
            if not states:
                return
            for state in states:
                assert pending_entries(state), f"at rest in an open turn without a pending entry: {self.describe()}"
            entries = [entry for state in states for entry in pending_entries(state)]
            if windows := [entry.starts_at for entry in entries if entry.starts_at is not None]:
                self.clock.now = max(self.clock.now, *windows)
                await asyncio.sleep(0.1)
                continue
            if decide is None or round_ > 8:
                self.clock.now = max(entry.deadline for entry in entries) + 1
                await asyncio.sleep(0.1)
            else:
                for state in states:
                    for entry in pending_entries(state):
                        await self._decide(round_ % 2, entry, decide, state.conversation)
        raise Stuck(f"does not come to an end: {self.describe()}")

    # --- checks at the end ---

    def state(self, events=None, name=CONVERSATION):
        state = State(conversation=name)
        for event in self.events(name) if events is None else events:
            state = evolve(state, event)
        return state

    async def check(self):
        self.disarm_kills()  # a kill at a write of the check itself, such as a reindex, would hang the check
        assert not self.violations, f"{self.violations[0]}\n{self.describe()}"
        events = self.events()
        laws.check(events, [effect for effect in self.ledger if effect.conversation == CONVERSATION], TRUTHS)
        if events:
            await self._check_store(events)
        for name in self.copies:
            self._check_copy(name)
        self._check_replies(events)
        check_timeline(events)
        laws.acknowledged(events, self.history)
        laws.deputies(events, self.events(DEPUTIES), TRUTHS, PEOPLE, self.history)

    def _check_outbox(self, events):
        """Check that the outbox has exactly one row for each event that channels are told about [B116]."""
        states = []
        for event in events:
            states.append(evolve(states[-1] if states else State(conversation=CONVERSATION), event))
        expected = sorted(notices_of(State(conversation=CONVERSATION), events, states))
        rows = [row for row in self.data.outbox.values() if row.conversation == CONVERSATION]
        assert sorted((row.seq, row.kind) for row in rows) == expected, "the outbox differs from the log"

    async def _check_search(self, events):
        """Check that a search finds exactly the messages of the log, or says that it may not have found all."""
        process = next((each for each in self.processes if each is not None and not each.dead), None)
        if process is None:
            return
        messages = [event.seq for event in events if isinstance(event, MessageReceived) and "message" in event.text]
        hits: list[int] = []
        after = None
        assert await process.rt._engine.search_index.catch_up(), "the search index does not catch up with the log"
        while found := await process.store.find_texts(["message"], after=after, limit=3):
            hits += [hit.seq for hit in found if hit.conversation == CONVERSATION]
            after = found[-1]
        assert hits == messages[::-1], "a search finds other messages than the log has"

    async def _check_decisions(self, events):
        """Check that the index of decisions has exactly the decisions of the log, with what they are about [B122]."""
        process = next((each for each in self.processes if each is not None and not each.dead), None)
        if process is None:
            return
        found = await process.store.find_decisions(DecisionFilter(conversation=CONVERSATION), limit=10_000)
        expected = {event.seq: (kind_of(event), event.by.id, event.at) for event in events if kind_of(event)}
        assert {row.seq: (row.kind, row.by, row.at) for row in found} == expected, "the history differs from the log"
        calls = {event.seq: event for event in events if isinstance(event, CallSuspended)}
        for row in found:
            about = calls.get(row.suspension)
            named = None if about is None else (about.call_id, about.tool)
            assert not row.call or named == (row.call, row.tool), "a decision is about no call"
        assert await check_rows(process.store, CONVERSATION) == []

    async def _check_store(self, events):
        """Check that snapshot, indexes, hash chain and the states of the processes agree with the fold of the log."""
        state = self.state()
        found = self.data.conversations[CONVERSATION]
        if found.snapshot is not None and (start := codec.decode_state(found.snapshot)) is not None:
            assert start.seq == found.snapshot_seq
            for body in found.events[found.snapshot_seq :]:
                start = evolve(start, codec.decode_event(body))
            assert start == state, "snapshot and tail differ from the fold"
        listed = sorted((_pending.decode(row.body) for row in found.calls.values()), key=lambda e: e.call)
        assert listed == sorted(pending_entries(state), key=lambda e: e.call), "the pending index differs from the fold"
        assert (found.status, found.owes) == (status_of(state), bool(owed(state)))
        label = laws.label_of(events)
        assert (found.title, found.archived) == label, "the row's title or archive differs from the log"
        assert {entry.title for entry in listed} <= {label[0]}, "a pending entry has another title than the log"
        await self._check_search(events)
        await self._check_decisions(events)
        assert found.hashes == hash_chain(GENESIS, found.events)
        self._check_outbox(events)
        for process in self.processes:
            if process is not None and not process.dead:
                conv = await process.rt._engine.load_conversation(CONVERSATION)
                assert conv.state == state, "the state of a process differs from the fold"
                assert conv.epoch is None or found.owner == process.store.owner
                assert process.rt._engine.slots._free == self.parallel, "a slot is lost"

    def _check_copy(self, name):
        """Check an imported conversation: its file is unchanged, and the laws hold."""
        events, found = self.events(name), self.data.conversations[name]
        assert found.events[: len(self.copies[name])] == self.copies[name], "the events of the file have changed"
        laws.gapless(events)
        laws.pairs(events)
        laws.turns(events)
        mine = [effect for effect in self.ledger if effect.conversation == name]
        laws.imported(events, mine)
        laws.continuations(events, mine)
        check_timeline(events)
        state = self.state(name=name)
        assert state.closed == (not events[len(self.copies[name])].trusted)
        if state.closed:
            assert not found.owes, "work is owed without trust"
            assert not found.calls, "a call is pending without trust"
        assert (found.status, found.owes) == (status_of(state), bool(owed(state)))
        assert found.hashes == hash_chain(GENESIS, found.events)

    def _check_replies(self, events):
        """Check that the log has the calls that the model made."""
        for said in events:
            if isinstance(said, AssistantSaid) and not said.partial:
                script = self.script[(said.turn - 1) % len(self.script)]
                wanted = [name for name, _ in (script[said.step - 1] if said.step <= len(script) else ())]
                assert [made.tool for made in said.calls] == wanted, f"{said.seq}: the model called {wanted}"

    def describe(self):
        """Return the logs and the operations as text."""
        names = (CONVERSATION, *self.copies)
        log = "\n".join(f"{name} {laws.shown(event)}" for name in names for event in self.events(name))
        return f"{log}\n" + "\n".join(map(repr, self.history))


# --- scenarios ---


def play_scenario(scenario):
    """Play a scenario, check, bring it to its end, check again; return the world."""

    async def main():
        world = World(
            scenario["script"],
            scenario["jitter"],
            scenario["second"],
            scenario["parallel"],
            scenario.get("rules", False),
        )
        watcher = ErrorLogWatcher(world)
        logging.getLogger("holdfast").addHandler(watcher)
        try:
            await world.play(scenario["steps"])
            await world.settle()
            await world.check()
            await world.drain(scenario["drain"])
            await world.check()
        finally:
            logging.getLogger("holdfast").removeHandler(watcher)
            await world.end()
        return world

    with silence_log(), mock.patch.object(commit, "SNAPSHOT_EVERY", 4):
        return simulate(main)


def revive_log(script, events, decide=None):
    """Let new processes continue a log that ends with these events, bring it to its end and check it."""

    async def main():
        world = World(script, second=False)
        await world.root.open()
        await rewrite(world.root, CONVERSATION, events)
        await world.root.close()
        world.clock.now, world.count = events[-1].at, 1000  # the principals of the log are not used again
        made = {c.id: c for e in events if isinstance(e, AssistantSaid) for c in e.calls}
        gates = laws.gates(events, TRUTHS)
        for event in events:  # each claim may have had its effect
            if isinstance(event, CallStarted):
                call = made[event.call_id]
                args = gates[call.id].args if call.id in gates else call.args
                world.ledger.append(Effect(CONVERSATION, call.id, event.attempt, call.tool, args, at=event.seq))
        watcher = ErrorLogWatcher(world)
        logging.getLogger("holdfast").addHandler(watcher)
        try:
            await world.settle()
            await world.check()
            await world.drain(decide)
            await world.check()
            assert world.events()[: len(events)] == events
        finally:
            logging.getLogger("holdfast").removeHandler(watcher)
            await world.end()

    with silence_log(), mock.patch.object(commit, "SNAPSHOT_EVERY", 4):
        simulate(main)


@contextmanager
def silence_log():
    """Keep the log messages of the runtime off the terminal; ErrorLogWatcher sees them."""
    logger = logging.getLogger("holdfast")
    before, logger.propagate = logger.propagate, False
    try:
        yield
    finally:
        logger.propagate = before
