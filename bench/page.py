"""The page in a real Chromium: how soon the first card is there, and again after a restart; a long conversation.

``python page.py STORE PORT`` serves a model that streams, to be killed: it is run as a process of its own.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import measures
from measures import Progress, Row, Sizes, clock

from assent import Agent, Runtime
from assent.models.base import FinishPart, Request, StreamPart, TextPart

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "page"))

CONVERSATION = "long"
WORDS = {True: 200, False: 2_000}
EVENTS = {True: 400, False: 5_000}
LONG_TASKS = """() => {
    window.longest = 0;
    new PerformanceObserver((list) => {
        for (const { duration } of list.getEntries()) window.longest = Math.max(window.longest, duration);
    }).observe({ type: "longtask" });
}"""


def missing() -> str | None:
    """What keeps this from being measured."""
    try:
        from browser import chromium

        chromium()
    except (ImportError, RuntimeError) as problem:
        return str(problem)
    return None


# --- the process that is measured ---


class Talker:
    """Says "fine." to most, and a long text to whoever asks for one: ``long N``."""

    name = "talker"

    async def stream(self, request: Request) -> AsyncIterator[StreamPart]:
        asked: Any = request.messages[-1]
        first, *rest = asked.text.split()
        if first == "long":
            for n in range(int(rest[0])):
                await asyncio.sleep(0.002)
                yield TextPart("\n\n" if n % 50 == 49 else f"**word** {n} ")
        yield TextPart("fine.")
        yield FinishPart()


def agent() -> Agent:
    return Agent("talker", model=Talker())


async def serving(store: str, port: int) -> None:
    from assent.server import app
    from assent.server.serving import listen, serve

    served = app(Runtime(agent(), store=store), auth=lambda request: request.cookies.get("who"))
    await serve(served, listen("127.0.0.1", port), lambda stop: print("ready", flush=True))


# --- cards ---


async def first_card(size: Sizes, progress: Progress) -> list[Row]:
    return await asyncio.to_thread(_cards, 1 if size is measures.QUICK else 5, progress)


def _cards(rounds: int, progress: Progress) -> list[Row]:
    from browser import Demo, Visitor, browser

    firsts, agains = list[float](), list[float]()
    with browser() as launched:
        for n in range(rounds):
            progress(f"the demo's first card, {n + 1}")
            with tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as name:
                demo = Demo(Path(name).resolve())
                visitor = Visitor(launched, demo, "somebody")
                began = clock()
                try:
                    page = visitor.at(demo.start())
                    card = page.locator("assent-approval .approve")
                    away = page.get_by_text("The page reconnects by itself")
                    card.wait_for()
                    firsts.append(clock() - began)
                    demo.kill()
                    away.wait_for()
                    page.wait_for_timeout(3_000)  # a restart takes its time
                    began = clock()
                    demo.start()
                    away.wait_for(state="hidden")
                    card.wait_for()
                    agains.append(clock() - began)
                    visitor.context.close()
                finally:
                    demo.kill()
    first, again = statistics.median(firsts), statistics.median(agains)
    return [
        Row("the demo's first card, from its start", "<= 10 s", f"{first:.1f} s", first, 10, min(firsts)),
        Row("the card again, from a restart after kill -9", "<= 1 s", f"{again:.2f} s", again, 1, min(agains)),
    ]


# --- a long conversation ---


async def long_conversation(size: Sizes, progress: Progress) -> list[Row]:
    quick = size is measures.QUICK
    with tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as name:
        folder = Path.cwd() / name
        progress(f"a conversation of {EVENTS[quick]:,} events")
        async with Runtime(agent(), store=f"sqlite:///{folder}/page.db") as rt:
            events = 0
            while events < EVENTS[quick]:
                events = (await (await rt.send(CONVERSATION, "How is the lamp?")).ended()).seq
        return await asyncio.to_thread(_long, folder, quick, progress)


def _long(folder: Path, quick: bool, progress: Progress) -> list[Row]:
    from browser import Stage, Visitor, browser

    stage = Stage(folder)
    stage.command = [__file__, stage.store, str(stage.port)]
    opened, longest = list[float](), list[float]()
    stage.start()
    try:
        with browser() as launched:
            for n in range(1 if quick else 5):
                progress(f"opened and streamed into, {n + 1}")
                visitor = Visitor(launched, stage, "somebody")
                page = visitor.page("inbox")
                page.get_by_text("Nothing waits").wait_for()
                said = page.locator(".said.assistant")
                began = clock()
                page.evaluate(f"location.hash = '#/c/{CONVERSATION}'")
                said.last.wait_for()
                opened.append(clock() - began)
                page.evaluate(LONG_TASKS)
                page.get_by_label("Message", exact=True).fill(f"long {WORDS[quick]}")
                page.keyboard.press("Enter")
                page.locator(".said.live").wait_for()
                page.locator(".said.live").wait_for(state="detached", timeout=120_000)
                longest.append(page.evaluate("window.longest"))
                visitor.context.close()
    finally:
        stage.kill()
    seconds, task = statistics.median(opened), statistics.median(longest)
    told = f"{task:.0f} ms" if task else "under 50 ms"  # the browser tells of longer ones only
    return [
        Row(f"a conversation of {EVENTS[quick]:,} events opens", "< 1 s", f"{seconds:.2f} s", seconds, 1, min(opened)),
        Row(f"longest task as {WORDS[quick]:,} pieces stream", "<= 100 ms", told, task or 50, 100, min(longest) or 50),
    ]


ALL = (first_card, long_conversation)

if __name__ == "__main__":
    asyncio.run(serving(sys.argv[1], int(sys.argv[2])))
