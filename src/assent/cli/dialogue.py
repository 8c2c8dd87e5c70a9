"""One waiting call, decided at the keyboard: approve, edit, deny, ask why, answer, or leave it pending."""

from __future__ import annotations

import asyncio
import difflib
import json
import os
import shlex
import tempfile
from collections.abc import Callable
from typing import Any, cast

from rich.text import Text

from assent.cli import values
from assent.cli.cards import WIDTH, card, deadline
from assent.cli.commands import options
from assent.cli.keyboard import Keyboard
from assent.cli.screen import Screen
from assent.cli.text import moment, shown, value_text
from assent.core.decisions import Answer, Approve, ClientResult, Decision, Deny, Failed, Pending, Submit
from assent.core.events import CallSuspended
from assent.core.strict_json import decode, decode_object
from assent.errors import Invalid
from assent.runtime.runtime import Runtime

JSON = dict[str, Any]


class Left(Exception):
    """They would rather leave it pending."""


class Dialogue:
    def __init__(self, rt: Runtime, screen: Screen, keyboard: Keyboard):
        self._rt, self._screen, self._keyboard = rt, screen, keyboard

    async def decision(self, entry: Pending) -> Decision:
        """What they decided; Left if nothing, EOFError if they are gone."""
        width = min(self._screen.out.width, WIDTH)
        self._screen.end_line()
        self._screen.out.print(card(entry, self._rt.home.now(), width), width=width)
        while True:
            try:
                if entry.kind == "elicitation":
                    decision = await self._question(entry)
                elif entry.kind == "approval":
                    decision = await self._approval(entry)
                else:
                    decision = await self._result(entry)
            except Invalid as problem:
                self.refused(problem)
                continue
            if decision is not None:
                return decision

    def refused(self, problem: Exception) -> None:
        self._screen.line(("  ✗ ", "red"), str(problem))

    async def _line(self, prompt: str) -> str:
        line = await self._keyboard.ask(prompt, fresh=True)
        if line is None:
            raise EOFError
        return line.strip()

    async def _choice(self, entry: Pending, **words: str) -> str:
        """One letter of those offered; w and l are always there."""
        words |= {"w": "(w)hy am I asked", "l": "(l)eave it pending"}
        while True:
            said = (await self._line(f"{', '.join(words.values())}: ")).lower()
            if said[:1] in words and (
                len(said) == 1 or words[said[0]].replace("(", "").replace(")", "").startswith(said)
            ):
                match said[0]:
                    case "w":
                        await self._why(entry)
                        continue
                    case "l":
                        raise Left
                    case letter:
                        return letter
            self._screen.line((f"  type one of {', '.join(words)}", "dim"))

    # --- approvals ---

    async def _approval(self, entry: Pending) -> Decision | None:
        if entry.recovery:
            words = {"a": "(a)pprove: run it again", "s": "(s)ubmit what it returned", "d": "(d)eny"}
        else:
            words = {"a": "(a)pprove", "e": "(e)dit", "d": "(d)eny"}
        match await self._choice(entry, **words):
            case "a":
                return Approve(digest=entry.digest)
            case "e":
                return await self._edited(entry)
            case "s":
                return Submit(decode(await self._line("what it returned, as JSON: "), "the result"))
            case _:
                return Deny(await self._line("why not (the model sees it): "))

    async def _edited(self, entry: Pending) -> Decision | None:
        before = _pretty(entry.args)
        text = before
        while True:
            text = await self._editor(text)
            args = decode_object(text, "the arguments")
            after = _pretty(args)
            if after == before:
                self._screen.line(("  nothing was changed", "dim"))
                return None
            self._diff(before, after)
            match (await self._line("run it with these arguments? (y)es, (e)dit again, (n)o: ")).lower()[:1]:
                case "y":
                    return Approve(args=args)
                case "e":
                    continue
                case _:
                    return None

    async def _editor(self, text: str) -> str:
        command = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
        with tempfile.TemporaryDirectory(prefix="assent-") as folder:
            path = os.path.join(folder, "arguments.json")
            _write(path, text)
            self._keyboard.paused = True
            try:
                process = await asyncio.create_subprocess_exec(*shlex.split(command), path)
                code = await process.wait()
            except (OSError, ValueError) as failure:
                raise Invalid(f"{command!r} cannot be run ({failure}); set $EDITOR") from failure
            finally:
                self._keyboard.paused = False
            if code != 0:
                raise Invalid(f"{command!r} ended with {code}; nothing was changed")
            return _read(path)

    def _diff(self, before: str, after: str) -> None:
        styles = {"+": "green", "-": "red"}
        for line in list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=2))[2:]:
            self._screen.out.print(Text(f"  {shown(line)}", style=styles.get(line[:1], "dim")), soft_wrap=True)

    # --- results of calls that run elsewhere ---

    async def _result(self, entry: Pending) -> Decision | None:
        if await self._choice(entry, s="(s)ubmit its result", f="(f)ailed") == "f":
            return Failed("command_failed", await self._line("what went wrong: "))
        text = await self._line("its result: ")
        value = values.typed(text, entry.schema, "the result")
        return ClientResult(value) if entry.kind == "client_exec" else Submit(value)

    # --- questions ---

    async def _question(self, entry: Pending) -> Decision | None:
        known = options(entry)
        if known is not None:
            for number, value in enumerate(known, 1):
                self._screen.line((f"  {number}", "bold"), f"  {value_text(value)}")
        plain = values.resolved(entry.schema, entry.schema)
        form = known is None and plain.get("type") == "object" and isinstance(plain.get("properties"), dict)
        if form:
            self._screen.line(("  /deny REASON, /why and /leave work at every field", "dim"))
            return await self._form(entry, plain)
        said = await self._said(entry, "your answer (or /deny REASON, /why, /leave): ")
        if not isinstance(said, str):
            return said
        if known is not None:
            spelled = [value_text(value) for value in known]
            if said not in spelled and said.isdecimal() and 1 <= int(said) <= len(known):
                return Answer(known[int(said) - 1])
            if said not in spelled:
                raise Invalid(f"{said!r} is none of the choices; type one, or its number")
        return Answer(values.typed(said, entry.schema, "answer", known))

    async def _form(self, entry: Pending, plain: JSON) -> Decision | None:
        fields = cast("JSON", plain["properties"])
        needed = cast("list[str]", plain.get("required") or [])
        pairs: list[str] = []
        for name, schema in fields.items():
            kind = _kind(schema, entry.schema)
            said = await self._said(entry, f"  {shown(name)} ({kind}{'' if name in needed else '; Enter skips it'}): ")
            if not isinstance(said, str):
                return said
            if said or name in needed:
                pairs.append(f"{name}={said}")
        return Answer(values.from_pairs(pairs, entry.schema, "answer"))

    async def _said(self, entry: Pending, prompt: str) -> str | Decision | None:
        """What was typed; a Deny, or None after /why."""
        said = await self._line(prompt)
        word, _, rest = said.partition(" ")
        match word:
            case "/deny":
                return Deny(rest.strip())
            case "/leave":
                raise Left
            case "/why":
                await self._why(entry)
                return None
            case _:
                return said

    # --- why ---

    async def _why(self, entry: Pending) -> None:
        say: Callable[..., None] = self._screen.line
        say(("  tool     ", "dim"), f"{entry.tool}, {entry.risk} risk")
        say(("  asked by ", "dim"), f"agent {entry.agent}, for {entry.principal.id}, {moment(entry.since)}")
        say(("  expires  ", "dim"), f"{moment(entry.deadline)}: {deadline(entry, self._rt.home.now())}")
        for event in reversed(await self._rt.history(entry.conversation)):
            if isinstance(event, CallSuspended) and event.call_id == entry.call:
                for verdict in event.verdicts:
                    why = f": {verdict.reason}" if verdict.reason else ""
                    say(("  because  ", "dim"), f"{verdict.name} said {verdict.outcome}{why}")
                break
        say(("  because  ", "dim"), _because(entry))
        say(("  digest   ", "dim"), entry.digest)


def _because(entry: Pending) -> str:
    if entry.recovery:
        return "it was interrupted while it ran, and whether it took effect is unknown"
    if entry.reason and entry.reason != "manual":
        return entry.reason
    return {
        "approval": "this tool asks before it runs",
        "elicitation": "the answer is the result of this call",
        "client_exec": "a client runs this tool, and none has answered yet",
        "manual": "this tool is run by hand",
    }[entry.kind]


def _kind(schema: Any, root: Any) -> str:
    plain = values.resolved(schema, root)
    if isinstance(plain.get("enum"), list):
        return " | ".join(shown(value_text(each)) for each in cast("list[Any]", plain["enum"]))
    kind = plain.get("type")
    if isinstance(kind, list):
        return " or ".join(map(str, cast("list[Any]", kind)))
    return {"string": "text", "object": "JSON", "array": "JSON", None: "JSON"}.get(kind, str(kind))


def _pretty(args: JSON) -> str:
    return json.dumps(args, indent=2, ensure_ascii=False) + "\n"


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as failure:
        raise Invalid(f"what the editor left cannot be read: {failure}") from failure
