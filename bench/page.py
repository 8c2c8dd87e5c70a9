"""The page in a real Chromium: time until the first card, time until it is back after a restart, a long conversation.

``python page.py STORE PORT`` serves a streaming model. The benchmark starts it as a separate process and kills it.
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

from holdfast import Agent, Runtime
from holdfast.models.base import FinishPart, Request, StreamPart, TextPart

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

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
    """Return the reason for which this measure cannot run here, or None."""
    try:
        from support.browser import chromium

        chromium()
    except (ImportError, RuntimeError) as problem:
        return str(problem)
    return None


# --- the measured process ---


class Talker:
    """A model that replies "fine.", or a long text to the message ``long N``."""

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
    from holdfast.server import app
    from holdfast.server.process import open_socket, serve

    served = app(Runtime(agent(), store=store), auth=lambda request: request.cookies.get("who"))
    await serve(served, open_socket("127.0.0.1", port), lambda stop: print("ready", flush=True))


# --- cards ---


async def first_card(size: Sizes, progress: Progress) -> list[Row]:
    return await asyncio.to_thread(_cards, 1 if size is measures.QUICK else 5, progress)


def _cards(rounds: int, progress: Progress) -> list[Row]:
    from support.browser import Demo, Visitor, browser

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
                    card = page.locator("holdfast-approval .approve")
                    away = page.get_by_text("The page reconnects by itself")
                    card.wait_for()
                    firsts.append(clock() - began)
                    demo.kill()
                    away.wait_for()
                    page.wait_for_timeout(3_000)  # wait for the restart
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
                await rt.run("How is the lamp?", conversation=CONVERSATION)
                events = (await rt.load_state(CONVERSATION)).seq
        return await asyncio.to_thread(_long, folder, quick, progress)


def _long(folder: Path, quick: bool, progress: Progress) -> list[Row]:
    from support.browser import Stage, Visitor, browser

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
                page.get_by_text("Nothing is waiting").wait_for()
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
    told = f"{task:.0f} ms" if task else "under 50 ms"  # the browser reports only longer tasks
    return [
        Row(f"a conversation of {EVENTS[quick]:,} events opens", "< 1 s", f"{seconds:.2f} s", seconds, 1, min(opened)),
        Row(f"longest task as {WORDS[quick]:,} pieces stream", "<= 100 ms", told, task or 50, 100, min(longest) or 50),
    ]


ALL = (first_card, long_conversation)

if __name__ == "__main__":
    asyncio.run(serving(sys.argv[1], int(sys.argv[2])))
