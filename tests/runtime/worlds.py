"""A small world in which everything may happen: two processes on one store, people, deadlines, kills.

Everything runs on one event loop whose time is not the wall's: it jumps to the next timer when nothing is left
to do. So a scenario is deterministic, and a minute of it costs milliseconds. A process is a ``Life``: a
runtime on its own owner of one memory store. A kill is its store dying at a chosen append, before or after the
commit; what the life still does afterwards leaves no trace, neither in the log nor in the ledger.
"""

import asyncio
import logging
import selectors
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import msgspec
from chaos import laws
from chaos.laws import Effect, Operation, Truth
from support.revival import rewrite
from support.runtimes import Clock

from holdfast import (
    Agent,
    Answer,
    Approve,
    Ask,
    Call,
    ClientResult,
    Default,
    Deny,
    Failed,
    Halt,
    Result,
    Runtime,
    Submit,
    ToolError,
    tool,
)
from holdfast.core import codec
from holdfast.core.decide.draft import Draft
from holdfast.core.decide.machine import decide_into
from holdfast.core.decisions import Pending, Principal
from holdfast.core.effects import owed
from holdfast.core.events import (
    AssistantSaid,
    CallStarted,
    OutputRejected,
    TurnEnded,
    TurnStarted,
)
from holdfast.core.inputs import ImportConversation
from holdfast.core.state import State, evolve, pending_entries, status_of
from holdfast.core.tool import fingerprint_of
from holdfast.core.transcript import AssistantMessage, ToolResult
from holdfast.errors import HoldfastError, ModelError, Refused
from holdfast.models.base import FinishPart, TextPart, ToolCallPart
from holdfast.runtime import commit
from holdfast.runtime.commit import build_append
from holdfast.stores.base import GENESIS, hash_chain
from holdfast.stores.memory import MemoryStore

OWNERS = (TurnStarted, AssistantSaid, OutputRejected, CallStarted, TurnEnded)
CONVERSATION = "c"
LONG = 3600.0
_pending = msgspec.json.Decoder(Pending)


# --- time ---


class Stuck(AssertionError):
    """Nothing will ever happen again, or too much does."""


class _Selector(selectors.DefaultSelector):
    def __init__(self):
        super().__init__()
        self.now, self.still = 0.0, 0

    def select(self, timeout=None):
        found = super().select(0)
        if not found:
            if timeout is None:
                raise Stuck("nothing is left to do, and somebody waits")
            self.still = 0 if timeout > 0 else self.still + 1
            if self.still > 100_000:
                raise Stuck("it spins: time stands still")
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


# --- the tools: what each of them really is, and what it does ---


async def act(name, n, call):
    """The effect: written into the ledger, unless this life is over; takes a while before and after."""
    life = call.scope
    await asyncio.sleep(0.002 * (n % 4))
    if life.dead:
        await asyncio.get_running_loop().create_future()
    world = life.world
    definition = fingerprint_of(life.agent.tools.get(name).spec)
    at = world.length(call.conversation)
    done = Effect(
        call.conversation, call.id, call.attempt, name, {"n": n}, at=at, definition=definition, plan=call.plan
    )
    world.ledger.append(done)
    await asyncio.sleep(0.003 * (n % 3))
    return {"did": name, "n": n, "attempt": call.attempt}


def server(name, **options):
    async def handler(n: int, call: Call) -> dict:
        return await act(name, n, call)

    return tool(name=name, description=f"Tool {name}.", **options)(handler)


def stub(name, **options):
    def handler(n: int) -> int: ...

    return tool(name=name, description=f"Tool {name}.", **options)(handler)


def planned(it):
    @it.preview
    async def _(n: int, call: Call) -> str:
        await asyncio.sleep(0.001 * (n % 3))
        if n == 5:
            raise ToolError("not_found", "it could not succeed")
        if n == 6:
            raise RuntimeError("the preview is broken")
        return f"plan {call.scope.world.plan} for {n}"

    return it


async def odd(args, call):
    await asyncio.sleep(0.001)
    return args["n"] % 2 == 1


async def look_up(args, call):
    """Evidence from outside: was it done? Where it was not, what becomes of it depends on the number."""
    await asyncio.sleep(0.001)
    done = [effect for effect in call.scope.world.ledger if effect.conversation == call.conversation]
    if any(effect.call == call.id for effect in done):
        return Result({"found": args["n"]})
    return ("redispatch", "fail", "ask")[args["n"] % 3]


async def asks(n: int, call: Call) -> object:
    await act("asks", n, call)
    return Ask("What now?", answer=int, expires=LONG)


async def halts(n: int, call: Call) -> object:
    await act("halts", n, call)
    return Halt("handed_over", n)


async def breaks(n: int, call: Call) -> object:
    await act("breaks", n, call)
    raise ToolError("resource_missing", "broken") if n % 2 else RuntimeError("broken")


TOOLS = [
    server("auto"),
    server("once", recovery="fail"),
    server("timed", timeout=0.005, recovery="fail"),
    server("asked", recovery="ask", expires=LONG),
    server("known", recovery=look_up, expires=LONG),
    server("gated", approval="required", recovery="redispatch", expires=LONG),
    server("gated_once", approval="required", recovery="fail", expires=LONG, on_expiry="halt"),
    planned(server("planned", approval="required", expires=LONG, on_expiry="deny")),
    planned(server("planned_once", approval="required", recovery="fail", expires=LONG)),
    server("policy", approval=odd, recovery="fail", expires=LONG),
    planned(server("planned_policy", approval=odd, expires=LONG)),
    stub("human", executor="human", prompt="Which?", expires=LONG, on_expiry=Default(0)),
    stub("client", executor="client", expires=LONG),
    stub("gated_client", executor="client", approval="required", expires=LONG),
    server("manual", manual=True, expires=LONG),
    server("gated_manual", manual=True, approval="required", expires=LONG),
    tool(name="asks", description="Asks.")(asks),
    tool(name="halts", description="Halts.")(halts),
    tool(name="breaks", description="Breaks.", recovery="fail")(breaks),
]


def always(args):
    return True


def when_odd(args):
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
    "policy": Truth(when_odd, recovery="fail"),
    "planned_policy": Truth(when_odd, planned=True, recovery="ask"),
    "human": Truth(runs=False),
    "client": Truth(runs=False),
    "gated_client": Truth(always, runs=False),
    "manual": Truth(runs=False),
    "gated_manual": Truth(always, runs=False),
    "asks": Truth(),
    "halts": Truth(),
    "breaks": Truth(recovery="fail"),
}
NAMES = (*TRUTHS, "nope", "!")
"""What the scripted model may call; ``nope`` does not exist, and at ``!`` the model itself fails."""


def edit(entry):
    """Other arguments, by somebody who has seen the original; or who says nothing of it."""
    return Approve(args={"n": 2}, digest=entry.digest if "once" in entry.tool else None)


DECISIONS = {
    "approval": (
        lambda entry: Approve(),
        lambda entry: Approve(digest=entry.digest),
        lambda entry: Approve(remember="args"),
        lambda entry: Approve(remember="tool", duration=30.0),
        lambda entry: edit(entry) if not entry.recovery else Submit({"by hand": 1}),
        lambda entry: Deny("no"),
        lambda entry: Deny("stop", stop=True),
        lambda entry: Approve(digest="something else"),
    ),
    "elicitation": (lambda entry: Answer(7), lambda entry: Deny("no"), lambda entry: Answer("not a number")),
    "client_exec": (lambda entry: ClientResult(7), lambda entry: Failed("read_failed", "no signal")),
    "manual": (
        lambda entry: Submit({"by hand": 1} if entry.executor == "server" else 7),
        lambda entry: Failed("command_failed", "broke"),
    ),
}


class WorldModel:
    """Says what the world's script has for this turn and step; checks what it is shown."""

    name = "world"

    def __init__(self):
        self.world: Any = None

    async def stream(self, request):
        world = self.world
        world.shown_to_model(request)
        script = world.script[(request.turn - 1) % len(world.script)]
        calls: Any = script[request.step - 1] if request.step <= len(script) else ()
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
def deployed(version):
    """The agent as the code of this version has it: what its tools do is the same, what they say is not."""
    tools = [it.copy_with(description=f"Tool {it.spec.name}, version {version}.") for it in TOOLS] if version else TOOLS
    return Agent("a", model=MODEL, tools=tools, max_steps=3)


# --- processes ---


class Mortal:
    """One owner of the memory store, whose life ends at a chosen write; and the laws of who may write what."""

    def __init__(self, life, inner, jitter):
        self._life, self._inner, self._jitter, self._turn = life, inner, jitter, 0
        self.owner = inner.owner
        self.fuse, self.after = None, False

    def __getattr__(self, name):
        return getattr(self._inner, name)

    async def _pause(self):
        self._turn += 1
        for _ in range(self._jitter[self._turn % len(self._jitter)]):
            await asyncio.sleep(0)

    def _burns(self):
        if self.fuse is None:
            return False
        self.fuse -= 1
        return self.fuse == 0

    async def _die(self):
        self._life.dead = True
        self._inner.kill()
        await asyncio.get_running_loop().create_future()

    async def append(self, append):
        await self._pause()
        fatal = self._burns()
        if fatal and not self.after:
            await self._die()
        world = self._life.world
        row = world.data.conversations.get(append.conversation)
        if append.epoch is None:
            events = [codec.decode_event(body) for body in append.events]
            for event in events:
                if isinstance(event, OWNERS):
                    world.blame(f"a guest appends {laws.shown(event)}")
        await self._inner.append(append)
        if append.epoch is not None and row is not None and not append.release:
            current = world.data.conversations[append.conversation]
            if (current.owner, current.epoch) != (self.owner, append.epoch):
                world.blame(f"an owner of epoch {append.epoch} wrote in epoch {current.epoch}")
        world.appends += 1
        if fatal:
            await self._die()
        await self._pause()

    async def claim(self, conversation):
        return await self._claiming(lambda: self._inner.claim(conversation))

    async def claim_owing(self, *args, **options):
        if not await self._inner.list_owing(*args):
            return {}  # a look is no write
        return await self._claiming(lambda: self._inner.claim_owing(*args, **options))

    async def _claiming(self, claim):
        await self._pause()
        fatal = self._burns()
        if fatal and not self.after:
            await self._die()
        given = await claim()
        if fatal:
            await self._die()
        await self._pause()
        return given

    async def read(self, *args, **options):
        await self._pause()
        return await self._inner.read(*args, **options)

    async def load(self, conversation):
        await self._pause()
        return await self._inner.load(conversation)


class Life:
    """A process: a runtime, and whoever uses it."""

    def __init__(self, world, inner, agent):
        self.world, self.dead, self.agent = world, False, agent
        agents = () if agent is None else (agent,)
        self.store: Any = Mortal(self, inner, world.jitter)
        self.rt = Runtime(*agents, store=self.store, clock=world.clock, scope=self.scope, parallel=world.parallel)
        self.users = set()
        publish = self.rt._engine.bus.publish

        def checked(name, item):
            if not self.dead:
                world.published(name, item)
            publish(name, item)

        self.rt._engine.bus.publish = checked
        self.rt._engine.bus.has_readers = lambda name: True

    def scope(self, principal):
        return _Scope(self)

    async def start(self):
        await self.rt.start()
        return self

    async def end(self):
        """In the orderly way, or, if it was killed, by sweeping up what is left of it."""
        closing = asyncio.get_running_loop().create_task(self.rt.close())
        while not (self.dead or closing.done()):  # it may be killed on the way, too
            await asyncio.sleep(0.001)
        self.rt._engine.closing = True
        tasks = [closing, *self.rt._engine.tasks(), *self.users]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Scope:
    def __init__(self, life):
        self._life = life

    async def __aenter__(self):
        return self._life

    async def __aexit__(self, *_):
        return None


class Complaints(logging.Handler):
    """The runtime logs an error where something went wrong that should not: nothing should."""

    def __init__(self, world):
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, entry):
        self._world.blame(f"logged: {entry.getMessage()} {entry.exc_info and entry.exc_info[1]!r}")


class World:
    def __init__(self, script, jitter=(0,), second=True, parallel=64):
        self.script, self.jitter, self.second, self.parallel = script, tuple(jitter), second, parallel
        self.root = MemoryStore()
        self.data = self.root._data
        self.clock = Clock()
        self.plan = self.version = 0
        self.ledger, self.history, self.wrong = [], [], []
        self.seen = {}
        self.lives: list[Life | None] = [None, None]
        self.appends = self.deaths = self.count = self.stalls = 0
        self.asked = {}
        self.copies = {}
        """Conversations that were imported -> what the file held."""
        MODEL.world = self

    # --- what is watched all the time ---

    def blame(self, what):
        self.wrong.append(what)

    def events(self, name=CONVERSATION):
        found = self.data.conversations.get(name)
        return [codec.decode_event(body) for body in found.events] if found else []

    def length(self, name=CONVERSATION):
        found = self.data.conversations.get(name)
        return len(found.events) if found else 0

    def published(self, name, item):
        """Only what is in the log is told."""
        found = self.data.conversations.get(name)
        log = found.events if found else []
        if item.seq is not None:
            if item.seq > len(log) or log[item.seq - 1] != codec.encode_event(item):
                self.blame(f"published before it was appended: {laws.shown(item)}")
        elif item.type == "suspended" and item.pending.call not in str(log):
            self.blame(f"announced before it was appended: {item}")

    def shown_to_model(self, request):
        """Every call that the model made has one result, in call order, right behind it."""
        messages = list(request.messages)
        for at, message in enumerate(messages):
            if isinstance(message, AssistantMessage) and message.calls:
                results = messages[at + 1 : at + 1 + len(message.calls)]
                got = [m.call for m in results if isinstance(m, ToolResult)]
                if got != [use.call for use in message.calls]:
                    self.blame(f"the model made {message.calls} and sees {results}")

    # --- lives ---

    async def life(self, who):
        """The process, made again if it is dead."""
        life = self.lives[who]
        if life is not None and life.dead:
            self.deaths += 1
            await life.end()
            life = None
        if life is None:
            agent = deployed(self.version) if who == 0 or self.second else None
            life = self.lives[who] = await Life(self, self.root.sibling(), agent).start()
        return life

    async def end(self):
        for life in self.lives:
            if life is not None:
                await life.end()

    # --- what people do ---

    async def attempt(self, who, verb, work, **facts):
        """Begin an operation on one of the processes; it ends when it ends. ``work`` says where it stands."""
        life = await self.life(who)
        self.count += 1
        entry = Operation(verb, f"{verb}{self.count}", **facts)
        self.history.append(entry)

        async def tried():
            try:
                entry.seq = await work(life.rt, entry.by)
                entry.outcome = "ok"
            except Refused as refusal:
                entry.outcome, entry.said = "refused", repr(refusal)
            except HoldfastError as failure:
                entry.said = repr(failure)  # closed meanwhile: nobody knows

        task = asyncio.get_running_loop().create_task(tried())
        life.users.add(task)
        task.add_done_callback(life.users.discard)
        return task

    async def send(self, who, when_busy, mode=None):
        text = f"message {self.count}"

        async def work(rt, by):
            return (await rt.send(CONVERSATION, text, by=by, agent="a", when_busy=when_busy, mode=mode)).seq

        await self.attempt(who, "send", work, text=text)

    def waiting(self):
        """What was ever asked, the newest first where it still is."""
        found = self.data.conversations.get(CONVERSATION)
        now = [_pending.decode(row.body) for row in found.calls.values()] if found else []
        for entry in now:
            self.seen[entry.call, entry.digest, entry.kind] = entry
        return now + [entry for entry in self.seen.values() if entry not in now]

    async def decide(self, who, which, flavour):
        entries = self.waiting()
        if entries:
            await self._decide(who, entries[which % len(entries)], flavour)

    async def _decide(self, who, entry, flavour, name=CONVERSATION):
        makers = DECISIONS[entry.kind]
        decision = makers[flavour % len(makers)](entry)

        async def work(rt, by):
            return (await rt.resolve(name, entry.call, decision, by=by)).seq

        verb = "resolve" if name == CONVERSATION else "resolve elsewhere"
        await self.attempt(who, verb, work, decisions={entry.call: decision})

    async def race(self, which, flavour):
        """The same question is answered at both processes at once."""
        entries = self.waiting()
        if entries:
            entry = entries[which % len(entries)]
            await self._decide(0, entry, flavour)
            await self._decide(1, entry, flavour + 1)

    async def submit(self, who, flavour):
        """Everything that waits, at once: all or nothing."""
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

        await self.attempt(who, "resolve", work, decisions=decisions)

    async def cancel(self, who):
        async def work(rt, by):
            return None if await rt.cancel(CONVERSATION, by=by) else 0

        await self.attempt(who, "cancel", work)

    async def revoke(self, who):
        async def work(rt, by):
            for grant in await rt.grants(CONVERSATION):
                await rt.revoke(CONVERSATION, grant.id, by=by)

        await self.attempt(who, "revoke", work)

    async def attach(self, who, seconds):
        """A page is there for a while, or leaves again."""

        async def work(rt, by):
            client = await rt.attach_client(CONVERSATION, client="page", keep=False)
            if not seconds:
                await client.detach()

        await self.attempt(who, "attach", work)

    async def look(self, who):
        async def work(rt, by):
            await rt.snapshot(CONVERSATION)

        await self.attempt(who, "look", work)

    async def copy(self, who, trusted):
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
            await self._use_closed(who, name, draft.state)

    async def _use_closed(self, who, name, state):
        """Whatever somebody wants of a conversation that was imported without trust is refused."""
        calls = state.turn.calls if state.turn else ()

        async def work(rt, by):
            wishes = [
                lambda: rt.send(name, "go on", by=by, agent="a", when_busy="interrupt"),
                lambda: rt.cancel(name, by=by),
            ]
            wishes += [lambda call=call: rt.resolve(name, call, Approve(), by=by) for call in calls]
            for wish in wishes:
                try:
                    done = await wish()
                except Refused:
                    continue
                if done is not False:  # there was nothing to cancel
                    self.blame(f"somebody was served in a log that was imported without trust: {done}")

        await self.attempt(who, "use", work)

    # --- what happens to them ---

    async def kill(self, who, writes, after):
        """Let the process die at its n-th write from now, before or after the commit."""
        life = await self.life(who)
        life.store.fuse, life.store.after = writes, after

    async def stall(self, who):
        """The others think that it is dead; it is not, and goes on when somebody else has taken over."""
        life = await self.life(who)
        other = await self.life(1 - who)
        if not life.dead and not other.dead and other.rt.agents:
            self.stalls += 1
            inner = life.store._inner
            del self.data.alive[inner.owner]
            await other.rt._engine.on_remote_commit()
            await other.rt._engine.claim_owing(but=())
            await self.pause(0.001)
            if not life.dead:
                self.data.alive[inner.owner] = inner
                inner._signal.set()

    async def restart(self, who):
        life = await self.life(who)
        await life.end()
        self.lives[who] = None

    async def deploy(self, who):
        """New code: this process is started again with it, the other one when it is next started."""
        self.version += 1
        await self.restart(who)

    async def jump(self, seconds):
        self.clock.now += seconds

    async def drift(self, _):
        self.plan += 1

    async def forget(self, how):
        """The snapshot is a cache: it may be gone, or rubbish."""
        found = self.data.conversations.get(CONVERSATION)
        if found is not None and found.snapshot is not None:
            if how:
                found.snapshot = b"rubbish"
            else:
                found.snapshot, found.snapshot_seq = None, 0

    async def pause(self, seconds):
        await asyncio.sleep(seconds)

    async def settle(self, _=None):
        """Until everybody is served and nothing is owed that somebody here could do."""
        start = asyncio.get_running_loop().time()
        calm, appends = 0, -1
        while calm < 3:  # long enough for whoever looks at the clock
            for who in (0, 1):
                await self.life(who)
            owing = any(found.owes for found in self.data.conversations.values())
            busy = [life for life in self.lives if life.dead or life.users or life.rt._engine._active]
            calm = calm + 1 if not busy and appends == self.appends and not owing else 0
            appends = self.appends
            if asyncio.get_running_loop().time() - start > 60:
                raise Stuck(f"never comes to rest: {self.told()}")
            await asyncio.sleep(0.02)

    async def play(self, steps):
        for verb, *args, pause in steps:
            await getattr(self, verb)(*args)
            if pause is None:
                await self.settle()
            elif pause:
                await asyncio.sleep(pause)

    async def drain(self, decide=None):
        """Until the conversation is idle: everything is decided, and what is not so in a few rounds expires."""
        for life in self.lives:
            if life is not None:
                life.store.fuse = None
        for round_ in range(40):
            await self.settle()
            states = [self.state(name=name) for name in (CONVERSATION, *self.copies)]
            states = [state for state in states if not state.closed and (state.turn or state.queue)]
            if not states:
                return
            for state in states:
                assert pending_entries(state), f"at rest in a turn, and nobody is asked: {self.told()}"
            entries = [entry for state in states for entry in pending_entries(state)]
            if decide is None or round_ > 8:
                self.clock.now = max(entry.deadline for entry in entries) + 1
                await asyncio.sleep(0.1)
            else:
                for state in states:
                    for entry in pending_entries(state):
                        await self._decide(round_ % 2, entry, decide, state.conversation)
        raise Stuck(f"never comes to an end: {self.told()}")

    # --- what must hold ---

    def state(self, events=None, name=CONVERSATION):
        state = State(conversation=name)
        for event in self.events(name) if events is None else events:
            state = evolve(state, event)
        return state

    async def check(self):
        assert not self.wrong, f"{self.wrong[0]}\n{self.told()}"
        events = self.events()
        laws.check(events, [effect for effect in self.ledger if effect.conversation == CONVERSATION], TRUTHS)
        if events:
            await self._check_store(events)
        for name in self.copies:
            self._check_copy(name)
        self._check_replies(events)
        laws.acknowledged(events, self.history)

    async def _check_store(self, events):
        """state = fold(log) = snapshot + tail; the indexes say what the fold says; the chain holds."""
        state = self.state()
        found = self.data.conversations[CONVERSATION]
        if found.snapshot is not None and (start := codec.decode_state(found.snapshot)) is not None:
            assert start.seq == found.snapshot_seq
            for body in found.events[found.snapshot_seq :]:
                start = evolve(start, codec.decode_event(body))
            assert start == state, "snapshot + tail is not the fold"
        listed = sorted((_pending.decode(row.body) for row in found.calls.values()), key=lambda e: e.call)
        assert listed == sorted(pending_entries(state), key=lambda e: e.call), "the inbox is not what the fold says"
        assert (found.status, found.owes) == (status_of(state), bool(owed(state)))
        assert found.hashes == hash_chain(GENESIS, found.events)
        for life in self.lives:
            if life is not None and not life.dead:
                conv = await life.rt._engine.load_conversation(CONVERSATION)
                assert conv.state == state, "a process's state is not the fold"
                assert conv.epoch is None or found.owner == life.store.owner
                assert life.rt._engine.slots._free == self.parallel, "a slot is lost"

    def _check_copy(self, name):
        """What was imported is as it was, nothing of it ran unasked, and each of its calls has one result."""
        events, found = self.events(name), self.data.conversations[name]
        assert found.events[: len(self.copies[name])] == self.copies[name], "the file's events have changed"
        laws.gapless(events)
        laws.pairs(events)
        laws.turns(events)
        laws.imported(events, [effect for effect in self.ledger if effect.conversation == name])
        state = self.state(name=name)
        assert state.closed == (not events[len(self.copies[name])].trusted)
        if state.closed:
            assert not found.owes, "something is owed without trust"
            assert not found.calls, "something waits without trust"
        assert (found.status, found.owes) == (status_of(state), bool(owed(state)))
        assert found.hashes == hash_chain(GENESIS, found.events)

    def _check_replies(self, events):
        """What the model called is what the log says that it called."""
        for said in events:
            if isinstance(said, AssistantSaid) and not said.partial:
                script = self.script[(said.turn - 1) % len(self.script)]
                wanted = [name for name, _ in (script[said.step - 1] if said.step <= len(script) else ())]
                assert [made.tool for made in said.calls] == wanted, f"{said.seq}: the model called {wanted}"

    def told(self):
        names = (CONVERSATION, *self.copies)
        log = "\n".join(f"{name} {laws.shown(event)}" for name in names for event in self.events(name))
        return f"{log}\n" + "\n".join(map(repr, self.history))


# --- the properties ---


def lived(scenario):
    """Play a scenario, check, bring it to its end, check again. Returns the world."""

    async def main():
        world = World(scenario["script"], scenario["jitter"], scenario["second"], scenario["parallel"])
        complaints = Complaints(world)
        logging.getLogger("holdfast").addHandler(complaints)
        try:
            await world.play(scenario["steps"])
            await world.settle()
            await world.check()
            await world.drain(scenario["drain"])
            await world.check()
        finally:
            logging.getLogger("holdfast").removeHandler(complaints)
            await world.end()
        return world

    with quiet(), mock.patch.object(commit, "SNAPSHOT_EVERY", 4):
        return simulate(main)


def revived(script, events, decide=None):
    """A log that ends with these events, found by a fresh process: brought to its end, and checked."""

    async def main():
        world = World(script, second=False)
        await world.root.open()
        await rewrite(world.root, CONVERSATION, events)
        await world.root.close()
        world.clock.now, world.count = events[-1].at, 1000  # nobody from the log comes back under the same name
        made = {c.id: c for e in events if isinstance(e, AssistantSaid) for c in e.calls}
        leave = laws.gates(events, TRUTHS)
        for event in events:  # each claim in it may have had its effect
            if isinstance(event, CallStarted):
                call = made[event.call_id]
                args = leave[call.id].args if call.id in leave else call.args
                world.ledger.append(Effect(CONVERSATION, call.id, event.attempt, call.tool, args, at=event.seq))
        complaints = Complaints(world)
        logging.getLogger("holdfast").addHandler(complaints)
        try:
            await world.settle()
            await world.check()
            await world.drain(decide)
            await world.check()
            assert world.events()[: len(events)] == events
        finally:
            logging.getLogger("holdfast").removeHandler(complaints)
            await world.end()

    with quiet(), mock.patch.object(commit, "SNAPSHOT_EVERY", 4):
        simulate(main)


@contextmanager
def quiet():
    """What the runtime logs is the world's business, not the terminal's."""
    logger = logging.getLogger("holdfast")
    before, logger.propagate = logger.propagate, False
    try:
        yield
    finally:
        logger.propagate = before
