"""Random conversations in every format: whatever happens in them, the provider never refuses the next request."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress

import pytest
from support.async_tests import run_bounded
from support.model_agents import agent, model, of, paired, until
from support.revival import kill
from support.strict_server import Breaks, Closes, Cut, Ends, Garbage, Hang, Status, StrictServer

from holdfast import Answer, Approve, Busy, Call, Context, Deny, Halt, Retention, Runtime, ToolError, tool
from holdfast.core.events import (
    AsideAnswered,
    HistorySummarised,
    MessageReceived,
    OutputRejected,
    TurnEnded,
    TurnStarted,
)
from holdfast.models import Thinking, ToolCall
from holdfast.stores.memory import MemoryStore

SEEDS = range(16)
TURNS = 9
OUTPUT = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
SUMMARY = "You keep the memory of a conversation"
ODD_ARGS = ('{"n": ', "[1]", '{"n": "x"}', "null", '{"n": 1, "n": 2}', "{}", '{"n": NaN}')
ODD_NAMES = ("no such tool", "wörk!", "", "x" * 100)

EXPECTED = (
    "text json calls cut breaks hang refuses empty halt approve deny stop cancel kill "
    "rejected summarised stubs windows asides answers"
)  # fmt: skip


class World:
    """A seeded model, tools and users, with a count of what they did."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.stuck = False
        """A model or a tool hangs: only a cancel or a kill ends it."""
        self.happened = Counter()

    def note(self, what):
        self.happened[what] += 1

    # --- the model ---

    def reply(self, body):
        if SUMMARY in str(body):
            self.note("summary")
            return "They talked, and nothing came of it."
        kind = self.random.choices(
            ["text", "calls", "json", "cut", "breaks", "hang", "refuses", "empty"], [5, 10, 2, 2, 1, 1, 1, 1]
        )[0]
        self.note(kind)
        match kind:
            case "text":
                return self.random.choice(["Fine.", " \n", "Good — ça va 🙂.", [Thinking("hm"), "Well."], "x " * 200])
            case "json":
                return '{"n": 1}'
            case "calls":
                return [*self.words(), *(self.call() for _ in range(self.random.randint(1, 5)))]
            case "cut":
                return self.random.choice([Cut, Ends, Garbage])([*self.words(), "half a ", self.call()])
            case "breaks":
                return Breaks(["well, "])
            case "hang":
                self.stuck = True
                return Hang(self.random.choice([[], ["one moment "], ["one ", self.call()]]))
            case "refuses":
                return self.random.choice([Status(503), Status(400, "no"), Status(429), Closes(), Garbage()])
            case _:
                return self.random.choice([[], [Thinking("only a thought")]])

    def words(self):
        return self.random.choice([[], ["I look."], [Thinking("hm"), "I look."], [Thinking("hm")]])

    def call(self):
        id = self.random.choice([None, None, "same", "same", "functions.look:0", "i" * 60])
        match self.random.randint(0, 9):
            case 0:
                return ToolCall(self.random.choice(ODD_NAMES), {"n": 1}, id=id)
            case 1:
                return ToolCall(
                    "look", self.random.choice(['{"n": ', "[1]", '{"n": "x"}', "null", '{"n": 1, "n": 2}']), id
                )
            case 2 | 3 | 4:
                return ToolCall("look", {"n": self.random.randint(0, 5)}, id)
            case 5 | 6:
                return ToolCall("gated", {"n": self.random.randint(0, 2)}, id)
            case 7:
                return ToolCall("choose", {}, id)
            case 8:
                return ToolCall("slow", {}, id)
            case _:
                return ToolCall("stop", {}, id)

    # --- the tools ---

    def tools(self):
        world = self

        @tool(**self.random.choice([{}, {"retention": Retention.last(1)}, {"retention": Retention.forever()}]))
        async def look(n: int) -> str:
            """Look."""
            if n == 0:
                raise ToolError("not_found", "nothing there")
            if n == 1:
                raise ValueError("broken")
            return f"{n} " * 10**n if n < 5 else ""

        @tool(approval="required")
        async def gated(n: int) -> int:
            """Do something that has to be approved."""
            return n

        @tool(executor="human", prompt="Which?")
        def choose() -> str:
            """Ask the user."""
            raise NotImplementedError

        @tool(recovery=self.random.choice(["redispatch", "fail"]))
        async def slow(call: Call) -> str:
            """Hang on the first attempt."""
            if call.attempt == 1:
                world.stuck = True
                await asyncio.Event().wait()
            return "at last"

        @tool
        async def stop() -> str | Halt:
            """End the turn now and then."""
            if world.random.random() < 0.3:
                world.note("halt")
                return Halt("enough", {"n": 1})
            return "not yet"

        return [look, gated, choose, slow, stop]

    # --- the users ---

    async def ask_aside(self, rt):
        self.note("asides")
        with suppress(Busy):
            await rt.send("c", self.random.choice(["Why?", "Are you sure?\n", "🙂"]), when_busy="aside")
            if self.random.random() < 0.7:
                await until(lambda: _is_answered(rt, self))

    def decision(self, pending):
        if pending.tool == "choose":
            return Answer(self.random.choice(["this", ""]))
        kind = self.random.choice(["approve", "deny", "stop"])
        self.note(kind)
        return {"approve": Approve(), "deny": Deny("no"), "stop": Deny("no", stop=True)}[kind]


async def talk(server, side, world):
    """Run one conversation and return its log."""
    # With so small a window, calls of earlier turns are sometimes in the request and sometimes not.
    context = Context(
        window=world.random.choice([2, 4, 40]),
        budget=world.random.choice([300, 30_000]),
        retention=world.random.choice([Retention.turns(1), Retention.turns(6)]),
        summary=world.random.choice([None, model(server, side)]),
    )
    one = agent(server, side, *world.tools(), context=context, instructions=world.random.choice(["", "Be brief."]))
    store = MemoryStore()
    rt = Runtime(one, store=store)
    await rt.start()
    try:
        for n in range(TURNS):
            world.stuck = False
            await rt.send(
                "c",
                world.random.choice([f"turn {n}", "Again.\n", "🙂"]),
                output=world.random.choice([None, None, OUTPUT]),
            )
            while True:
                snapshot = await until(lambda rt=rt: _snapshot_at_rest(rt, world))
                if snapshot.state == "idle":
                    break
                if snapshot.state == "awaiting_input" and world.random.random() < 0.2:
                    await world.ask_aside(rt)
                elif snapshot.state == "awaiting_input" and world.random.random() < 0.8:
                    pending = world.random.choice(snapshot.pending)
                    await rt.resolve("c", pending.call, world.decision(pending))
                elif world.random.random() < 0.5:
                    world.note("cancel")
                    world.stuck = False
                    await rt.cancel("c")
                else:
                    world.note("kill")
                    world.stuck = False
                    await kill(rt)
                    store = store.sibling()
                    rt = Runtime(one, store=store)
                    await rt.start()
        return await rt.history("c")
    finally:
        await rt.close()


async def _is_answered(rt, world):
    return world.stuck or not (await rt.snapshot("c")).asides


async def _snapshot_at_rest(rt, world):
    snapshot = await rt.snapshot("c")
    return snapshot if snapshot.state in ("idle", "awaiting_input") or world.stuck else None


@pytest.mark.parametrize("side", ["anthropic", "openai", "responses", "google"])
def test_no_conversation_leads_to_a_request_that_the_provider_refuses(side):
    """Every call has exactly one result in every request [B14, B22, B35, B50, B54, B59, B60, B62, B63, B120]."""
    happened = Counter()
    for seed in SEEDS:
        try:
            happened += run_conversation(side, seed)
        except BaseException as problem:
            problem.add_note(f"seed {seed}")
            raise
    assert [what for what in EXPECTED.split() if not happened[what]] == []  # every kind of event has happened


def run_conversation(side, seed):
    """Run and check one conversation; return the counts of what happened in it."""
    world = World(seed)

    async def check():
        with StrictServer([world.reply] * 2000) as server:
            log = await talk(server, side, world)
        assert server.refused == []
        paired(log)
        assert len(of(log, TurnStarted)) == len(of(log, TurnEnded)) == TURNS
        answers = of(log, AsideAnswered)
        assert [answer.message for answer in answers] == [each.seq for each in of(log, MessageReceived) if each.aside]
        world.happened["answers"] += sum(answer.error is None for answer in answers)
        world.happened["rejected"] += len(of(log, OutputRejected))
        world.happened["summarised"] += len(of(log, HistorySummarised))
        world.happened["stubs"] += sum("is no longer shown" in incoming.text for incoming in server.requests)
        firsts = {str(first_message(incoming.body)) for incoming in server.requests if SUMMARY not in incoming.text}
        world.happened["windows"] += len(firsts) - 1

    run_bounded(check())
    return world.happened


def first_message(body):
    """Return the first message of a request."""
    return next(body[word] for word in ("messages", "input", "contents") if word in body)[0]
