"""The log as it grows: what is there, then what happens, whichever process does it.

Followed through ``Runtime.events``, printed from the store: what ``--json`` prints are the stored bytes.
"""

from __future__ import annotations

import msgspec

from assent.cli.cards import console
from assent.cli.logs import print_event
from assent.cli.output import raw_lines, say
from assent.cli.reading import made, missing, tools_before, unknown
from assent.cli.text import cut, value_text
from assent.core import codec
from assent.core.events import Event
from assent.core.live import AnyLive, Retrying, TextDelta, ToolProgress
from assent.errors import Backpressure
from assent.runtime.runtime import Runtime

PAGE = 500
LONG = 500


class Tail:
    """Prints the events after ``after``, each once and in order."""

    def __init__(self, rt: Runtime, conversation: str, after: int, as_json: bool):
        self._rt, self._name, self.after, self._json = rt, conversation, after, as_json
        self._out = console()
        self._tools: dict[str, str] = {}

    async def start(self) -> None:
        if self.after and not self._json:
            self._tools = await tools_before(self._rt, self._name, self.after)

    async def catch_up(self) -> None:
        """All that is in the log by now."""
        while bodies := await self._rt.store.read(self._name, after=self.after, limit=PAGE):
            self.after += len(bodies)
            if self._json:
                raw_lines(bodies)
                continue
            for body in bodies:
                event = codec.decode(body)
                self._tools |= made(event)
                print_event(self._out, event, self._tools)

    async def follow(self, live: bool) -> None:
        """For ever; a reader that fell behind reads what it missed from the log."""
        while True:
            try:
                async for event in self._rt.events(self._name, after=self.after):
                    if isinstance(event, Event):
                        if event.seq > self.after:
                            await self.catch_up()
                    elif live:
                        self._live(event)
            except Backpressure:
                await self.catch_up()

    def _live(self, event: AnyLive) -> None:
        if self._json:
            raw_lines([msgspec.json.encode(event)])
            return
        match event:
            case TextDelta():
                said = f"… {event.text}"
            case ToolProgress():
                said = f"… {self._tools.get(event.call_id, event.call_id)}: {value_text(event.payload)}"
            case Retrying():
                said = f"… the model failed ([{event.error.kind}]); again in {event.delay:.0f} s"
            case _:
                return  # the log says the same
        say(f"       {cut(said, LONG)}".replace("\n", "\\n"))


async def tail(url: str, conversation: str, after: int, follow: bool, live: bool, as_json: bool) -> int:
    if await missing(url):
        raise unknown(url, conversation)
    async with Runtime(store=url) as rt:
        await rt.history(conversation, limit=1)  # refuses an unknown one
        lines = Tail(rt, conversation, after, as_json)
        await lines.start()
        await lines.catch_up()
        if follow:
            await lines.follow(live)
    return 0
