"""Ask the user at the terminal to decide one pending call: approve, edit, deny, answer, or leave it pending."""

from __future__ import annotations

import asyncio
import difflib
import json
import os
import shlex
import tempfile
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

from rich.text import Text

from holdfast.cli.command_lines import known_answers
from holdfast.cli.input.values import from_pairs, parse_value, resolve_reference
from holdfast.cli.render.card import CARD_WIDTH, describe_deadline, render_card
from holdfast.cli.render.console import Screen
from holdfast.cli.render.text import escape_control_characters, format_time, value_text
from holdfast.core.decisions import Answer, Approve, ClientResult, Decision, Deny, Failed, Pending, Submit
from holdfast.core.events import CallSuspended
from holdfast.core.json_values import parse_strict_json, parse_strict_object
from holdfast.errors import Invalid
from holdfast.runtime.runtime import Runtime

if TYPE_CHECKING:
    from holdfast.cli.input.prompt import Prompt

JSON = dict[str, Any]
COMMANDS = ("/deny ", "/why", "/leave", "/ask ")
"""The commands at a question, as Tab completes them."""


class LeftPending(Exception):
    """The user leaves the call pending."""


class AskedAside(Exception):
    """The user asks the agent something before the decision."""

    def __init__(self, text: str):
        super().__init__(text)
        self.text = text


class Dialogue:
    """Asks the user to decide calls."""

    def __init__(self, rt: Runtime, screen: Screen, prompt: Prompt):
        self._rt, self._screen, self._prompt = rt, screen, prompt

    async def ask_decision(self, entry: Pending) -> Decision:
        """Return the user's decision.

        Raises LeftPending if there is none, AskedAside if the user asks the agent something first, EOFError at the end
        of input, KeyboardInterrupt after Ctrl-C.
        """
        width = min(self._screen.out.width, CARD_WIDTH)
        self._screen.end_line()
        self._screen.out.print(render_card(entry, self._rt.now(), width), width=width)
        while True:
            try:
                if entry.kind == "elicitation":
                    decision = await self._ask_answer(entry)
                elif entry.kind == "approval":
                    decision = await self._ask_approval(entry)
                else:
                    decision = await self._ask_result(entry)
            except Invalid as problem:
                self.print_refusal(problem)
                continue
            if decision is not None:
                return decision

    def print_refusal(self, problem: Exception) -> None:
        self._screen.print_line(("  ✗ ", "red"), str(problem))

    async def _read_line(self, question: str, words: Iterable[str] = ()) -> str:
        return (await self._prompt.ask_answer(question, words)).strip()

    async def _ask_choice(self, entry: Pending, **words: str) -> str:
        """Return one of the offered letters; (w)hy and (l)eave are always offered, and handled here."""
        words |= {"w": "(w)hy am I asked", "l": "(l)eave it pending"}
        *offers, last = words.values()
        while True:
            typed = await self._read_line(f"{', '.join([*offers, '/ask TEXT', last])}: ")
            _check_aside(typed)
            reply = typed.lower()
            if reply[:1] in words and (
                len(reply) == 1 or words[reply[0]].replace("(", "").replace(")", "").startswith(reply)
            ):
                match reply[0]:
                    case "w":
                        await self._print_reasons(entry)
                        continue
                    case "l":
                        raise LeftPending
                    case letter:
                        return letter
            self._screen.print_line((f"  type one of {', '.join(words)}, or /ask and a question", "dim"))

    # --- approvals ---

    async def _ask_approval(self, entry: Pending) -> Decision | None:
        if entry.recovery:
            words = {"a": "(a)pprove: run it again", "s": "(s)ubmit what it returned", "d": "(d)eny"}
        elif entry.continues:
            words = {"a": "(a)pprove: it continues", "d": "(d)eny"}
        else:
            words = {"a": "(a)pprove", "e": "(e)dit", "d": "(d)eny"}
        match await self._ask_choice(entry, **words):
            case "a":
                return Approve(digest=entry.digest)
            case "e":
                return await self._edit_arguments(entry)
            case "s":
                return Submit(parse_strict_json(await self._read_line("what it returned, as JSON: "), "the result"))
            case _:
                return Deny(await self._read_line("why not (the model sees it): "))

    async def _edit_arguments(self, entry: Pending) -> Decision | None:
        before = _pretty(entry.args)
        text = before
        while True:
            text = await self._run_editor(text)
            args = parse_strict_object(text, "the arguments")
            after = _pretty(args)
            if after == before:
                self._screen.print_line(("  nothing was changed", "dim"))
                return None
            self._print_diff(before, after)
            match (await self._read_line("run it with these arguments? (y)es, (e)dit again, (n)o: ")).lower()[:1]:
                case "y":
                    return Approve(args=args)
                case "e":
                    continue
                case _:
                    return None

    async def _run_editor(self, text: str) -> str:
        command = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
        with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
            path = os.path.join(folder, "arguments.json")
            _write(path, text)
            self._prompt.paused = True
            try:
                process = await asyncio.create_subprocess_exec(*shlex.split(command), path)
                code = await process.wait()
            except (OSError, ValueError) as failure:
                raise Invalid(f"{command!r} cannot be run ({failure}); set $EDITOR") from failure
            finally:
                self._prompt.paused = False
            if code != 0:
                raise Invalid(f"{command!r} ended with {code}; nothing was changed")
            return _read(path)

    def _print_diff(self, before: str, after: str) -> None:
        styles = {"+": "green", "-": "red"}
        for line in list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=2))[2:]:
            self._screen.out.print(
                Text(f"  {escape_control_characters(line)}", style=styles.get(line[:1], "dim")), soft_wrap=True
            )

    # --- results of calls that run elsewhere ---

    async def _ask_result(self, entry: Pending) -> Decision | None:
        if await self._ask_choice(entry, s="(s)ubmit its result", f="(f)ailed") == "f":
            return Failed("command_failed", await self._read_line("what went wrong: "))
        text = await self._read_line("its result: ")
        value = parse_value(text, entry.schema, "the result")
        return ClientResult(value) if entry.kind == "client_exec" else Submit(value)

    # --- questions ---

    async def _ask_answer(self, entry: Pending) -> Decision | None:
        known = known_answers(entry)
        if known is not None:
            for number, value in enumerate(known, 1):
                self._screen.print_line((f"  {number}", "bold"), f"  {value_text(value)}")
        plain = resolve_reference(entry.schema, entry.schema)
        form = known is None and plain.get("type") == "object" and isinstance(plain.get("properties"), dict)
        if form:
            self._screen.print_line(("  /deny REASON, /ask TEXT, /why and /leave work at every field", "dim"))
            return await self._ask_fields(entry, plain)
        reply = await self._read_answer(entry, "your answer (or /deny REASON, /ask TEXT, /why, /leave): ", known or ())
        if not isinstance(reply, str):
            return reply
        if known is not None:
            spelled = [value_text(value) for value in known]
            if reply not in spelled and reply.isdecimal() and 1 <= int(reply) <= len(known):
                return Answer(known[int(reply) - 1])
            if reply not in spelled:
                raise Invalid(f"{reply!r} is none of the choices; type one, or its number")
        return Answer(parse_value(reply, entry.schema, "answer", known))

    async def _ask_fields(self, entry: Pending, plain: JSON) -> Decision | None:
        fields = cast("JSON", plain["properties"])
        needed = cast("list[str]", plain.get("required") or [])
        pairs: list[str] = []
        for name, schema in fields.items():
            kind = _kind(schema, entry.schema)
            reply = await self._read_answer(
                entry,
                f"  {escape_control_characters(name)} ({kind}{'' if name in needed else '; Enter skips it'}): ",
                cast("list[Any]", resolve_reference(schema, entry.schema).get("enum") or []),
            )
            if not isinstance(reply, str):
                return reply
            if reply or name in needed:
                pairs.append(f"{name}={reply}")
        return Answer(from_pairs(pairs, entry.schema, "answer"))

    async def _read_answer(self, entry: Pending, question: str, values: Iterable[Any] = ()) -> str | Decision | None:
        """Return the typed text, a Deny after /deny, or None after /why. Tab completes these values."""
        words = [word for word in map(value_text, values) if word == escape_control_characters(word)]
        text = await self._read_line(question, [*words, *COMMANDS])
        _check_aside(text)
        word, _, rest = text.partition(" ")
        match word:
            case "/deny":
                return Deny(rest.strip())
            case "/leave":
                raise LeftPending
            case "/why":
                await self._print_reasons(entry)
                return None
            case _:
                return text

    # --- why ---

    async def _print_reasons(self, entry: Pending) -> None:
        say: Callable[..., None] = self._screen.print_line
        say(("  tool     ", "dim"), f"{entry.tool}, {entry.risk} risk")
        say(("  asked by ", "dim"), f"agent {entry.agent}, for {entry.principal.id}, {format_time(entry.since)}")
        say(("  expires  ", "dim"), f"{format_time(entry.deadline)}: {describe_deadline(entry, self._rt.now())}")
        for event in reversed(await self._rt.history(entry.conversation)):
            if isinstance(event, CallSuspended) and event.call_id == entry.call:
                for verdict in event.verdicts:
                    why = f": {verdict.reason}" if verdict.reason else ""
                    say(("  because  ", "dim"), f"{verdict.name} said {verdict.outcome}{why}")
                break
        say(("  because  ", "dim"), _suspension_reason(entry))
        say(("  digest   ", "dim"), entry.digest)


def _check_aside(typed: str) -> None:
    """Raise AskedAside for /ask and a question."""
    word, _, rest = typed.partition(" ")
    if word == "/ask":
        if not rest.strip():
            raise Invalid("/ask needs a question: /ask why this amount?")
        raise AskedAside(rest.strip())


def _suspension_reason(entry: Pending) -> str:
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
    plain = resolve_reference(schema, root)
    if isinstance(plain.get("enum"), list):
        return " | ".join(escape_control_characters(value_text(value)) for value in cast("list[Any]", plain["enum"]))
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
        raise Invalid(f"the edited file cannot be read: {failure}") from failure
