"""The overhead over the provider layer (pydantic-ai): a streamed chunk, a request with a long history, memory.

``python models.py FILE`` opens a runtime on the file, sends a message and prints the process's resident memory in bytes
while the reply streams in. The benchmark starts it as a separate process.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from measures import QUICK, Progress, Row, Sizes, alternate, clock, copy_store, idle, run_python, weather
from parked import resident
from provider import serving

from holdfast import Agent, Context, Retention, Runtime, ScriptedModel, ToolCall
from holdfast.core import codec
from holdfast.core.events import AnyEvent, CallReturned
from holdfast.core.live import TextDelta
from holdfast.core.prompt.compaction import PromptRenderer
from holdfast.core.prompt.history import History
from holdfast.errors import install_command
from holdfast.models.base import FinishPart, Request, StreamPart, TextPart
from holdfast.models.providers import ProviderModel
from holdfast.runtime.steps.prompt import render_messages
from holdfast.stores.sqlite.store import SQLiteStore

EXTRAS = ("anthropic", "openai")
SAID, REPLIED = "How are you today, all of you?", "All is well, thank you for asking, and how are you?"
INSTRUCTIONS = "You are a helpful assistant."


def missing() -> str | None:
    """Return the reason for which these measures cannot run here, or None."""
    lacking = [name for name in ("pydantic_ai", *EXTRAS) if find_spec(name) is None]
    return f"{', '.join(lacking)} not installed: {install_command(','.join(EXTRAS))}" if lacking else None


# --- a streamed chunk ---


def layer_model(side: str, url: str) -> Any:
    """Return the layer's own model, the baseline."""
    if side == "anthropic":
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        return AnthropicModel("claude-haiku-4-5", provider=AnthropicProvider(api_key="k", base_url=url))
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return OpenAIChatModel("gpt-4o", provider=OpenAIProvider(api_key="k", base_url=f"{url}/v1"))


async def provider_chunk(size: Sizes, progress: Progress) -> list[Row]:
    from pydantic_ai.messages import ModelRequest, PartDeltaEvent, PartStartEvent, UserPromptPart
    from pydantic_ai.models import ModelRequestParameters

    n = size.chunks // 2
    rows: list[Row] = []
    cpu = time.process_time

    with serving(n) as url:
        for side, name in (
            ("anthropic", f"anthropic:claude-haiku-4-5@{url}"),
            ("openai", f"openai-chat:gpt-4o@{url}/v1"),
        ):
            model, bare = ProviderModel(name, key="k"), layer_model(side, url)
            agent = Agent("bench", model=model)

            async def ours(agent: Agent = agent) -> float:
                async with Runtime(agent) as rt:
                    await rt.open("c")

                    async def read() -> None:
                        seen = 0
                        async for event in rt.events("c"):
                            seen += isinstance(event, TextDelta)
                            if seen == n:
                                return

                    reader = asyncio.create_task(read())
                    await asyncio.sleep(0.01)
                    began = cpu()
                    await rt.send("c", "Talk")
                    await reader
                    await idle(rt, "c")
                    return (cpu() - began) / n

            async def layer(bare: Any = bare) -> float:
                began = cpu()
                seen = 0
                asked = [ModelRequest(parts=[UserPromptPart(content="Talk")])]
                async with bare.request_stream(asked, None, ModelRequestParameters()) as response:
                    async for event in response:
                        seen += isinstance(event, PartDeltaEvent | PartStartEvent)
                assert seen >= n, f"{seen} of {n}"
                return (cpu() - began) / n

            found = await alternate(size.rounds, progress, ours=ours, layer=layer)
            more = [a - b for a, b in zip(found["ours"], found["layer"], strict=True)]
            took, quiet = statistics.median(more) * 1e6, (min(found["ours"]) - min(found["layer"])) * 1e6
            whole, part = (statistics.median(found[which]) * 1e6 for which in ("ours", "layer"))
            shown = f"{took:.0f} us ({whole:.0f} - {part:.0f})"
            what = f"CPU of a chunk from {side} beyond the provider layer's"
            rows.append(Row(what, "<= 60 us", shown, max(took, 0.001), 60, quiet))
    return rows


# --- a request of a long history ---


async def long_request(size: Sizes, progress: Progress) -> list[Row]:
    from holdfast.models.providers.render import MessageRenderer

    messages, steps = size.history, 40
    progress(f"a history of {messages:,} messages")
    calls = [[ToolCall("weather", {"city": "Paris", "days": 3})]] * steps
    model = ScriptedModel([*([REPLIED] * (messages // 2)), *calls, "done"])
    context = Context(window=messages, budget=10**7, retention=Retention.forever())
    agent = Agent(
        "bench", model=model, tools=[weather], max_steps=steps + 1, instructions=INSTRUCTIONS, context=context
    )
    async with Runtime(agent) as rt:
        for _ in range(messages // 2 + 1):
            await rt.send("c", SAID)
            await idle(rt, "c")
        events = [codec.decode_event(body) for body in await rt.store.read("c")]

    rounds: list[float] = []
    counts: list[int] = []
    for n in range(max(1, size.rounds // 5)):
        progress(f"round {n + 1}")
        history, rendering, renderer = History(context), PromptRenderer(), MessageRenderer("anthropic", "anthropic")
        took: list[float] = []
        for event in events:
            history.apply(event)
            if not _asks(event, len(history.turns), messages // 2):
                continue
            began = clock()
            rendered = render_messages(history, rendering, instructions=INSTRUCTIONS, tools=agent.weight)
            request = Request(
                conversation="c",
                turn=1,
                step=1,
                instructions=INSTRUCTIONS,
                messages=rendered.messages,
                tools=agent.offers,
            )
            renderer.render_request(request, mark=False)
            took.append(clock() - began)
            counts.append(len(rendered.messages))
        rounds.append(statistics.median(took[1:]))  # the first request renders the whole history
    assert all(a <= b for a, b in pairwise(counts[:steps])), counts
    assert counts[0] >= messages, counts
    ms, best = statistics.median(rounds) * 1e3, min(rounds) * 1e3
    return [Row(f"a request of {messages:,} messages after one more step", "< 5 ms", f"{ms:.2f} ms", ms, 5, best)]


def _asks(event: AnyEvent, turn: int, before: int) -> bool:
    """Return whether the next event is a reply of the last turn."""
    return turn > before and isinstance(event, CallReturned)


# --- a long conversation ---


class MemoryModel:
    """A model that renders its request and measures the process's memory in the middle of the reply."""

    name = "weighs"

    def __init__(self) -> None:
        self.resident = 0

    async def stream(self, request: Request) -> AsyncIterator[StreamPart]:
        from holdfast.models.providers.render import MessageRenderer

        renderer = MessageRenderer("anthropic", "anthropic")  # includes the cache of rendered messages
        sent = renderer.render_request(request, mark=False)
        yield TextPart(f"{len(sent)} messages")
        self.resident = resident()
        yield FinishPart()


async def long_memory(size: Sizes, progress: Progress) -> list[Row]:
    short, long = (100, 500) if size is QUICK else (1_000, 20_000)
    with tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as name:
        directory = Path(name)
        small, large = directory / "short.db", directory / "long.db"
        progress(f"a conversation of {short:,} messages")
        await _talk(small, short)
        shutil.copy(small, large)
        progress(f"a conversation of {long:,} messages")
        await _talk(large, long - short)
        weights: dict[str, list[int]] = {"short": [], "long": []}
        for n in range(1 if size is QUICK else 5):
            for which, path in (("short", small), ("long", large)):
                progress(f"weighing a process with the {which} one, {n + 1}")
                weights[which].append(int(run_python(__file__, str(copy_store(path, directory)))[0]))
    light, heavy = statistics.median(weights["short"]), statistics.median(weights["long"])
    more = max((heavy - light) / 1e6, 0.001)
    shown = f"{more:.2f} MB ({heavy / 1e6:.1f} - {light / 1e6:.1f})"
    return [Row(f"RSS in a turn after {long:,} messages minus after {short:,}", "< 2 MB", shown, more, 2)]


async def _talk(path: Path, messages: int) -> None:
    store = SQLiteStore(path, synchronous="OFF")
    async with Runtime(Agent("bench", model=ScriptedModel([REPLIED] * (messages // 2))), store=store) as rt:
        for _ in range(messages // 2):
            await (await rt.send("c", SAID)).final_result()


async def weigh(path: str) -> int:
    model = MemoryModel()
    async with Runtime(Agent("bench", model=model), store=f"sqlite:///{path}") as rt:
        for _ in range(3):
            await (await rt.send("c", SAID)).final_result()
    return model.resident


ALL: tuple[Callable[..., Any], ...] = (provider_chunk, long_request, long_memory)


if __name__ == "__main__":
    print(asyncio.run(weigh(sys.argv[1])))
