"""Ask a client's user about waiting calls, and take the answers: what input rounds, tasks and the inbox share."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import mcp_types as types
from mcp.server.context import ServerRequestContext
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from holdfast.bridges.mcp.server_calls import Exchange
from holdfast.bridges.mcp.server_questions import can_ask, describe, key_of, make_form, read_answer
from holdfast.bridges.mcp.server_results import text_result
from holdfast.channels.card import public_pending
from holdfast.channels.decide import find_pending
from holdfast.channels.links import Links
from holdfast.core.decisions import Pending, Principal, decider_refusal, split_suspension
from holdfast.core.events import CallResolved, CallReturned, CallSuspended
from holdfast.core.text.html_card import format_time
from holdfast.errors import Invalid, NotAllowed, NotFound, Stale
from holdfast.runtime.arguments import check_conversation_id
from holdfast.runtime.runtime import Runtime

Context = ServerRequestContext[Any, Any]
MaySee = Callable[[Principal, str], bool | Awaitable[bool]]
"""Returns whether a principal may see a conversation, as in ``holdfast.server.app``."""
TASKS = "io.modelcontextprotocol/tasks"
Way = Literal["task", "form", "url", "live", "text"]
"""How a client is asked: with a task, a form or an address in a result, a request of ours, or not at all."""


def choose_way(ctx: Context) -> Way:
    """Return how this client can be asked, by its capabilities and its revision of the protocol."""
    if ctx.protocol_version not in MODERN_PROTOCOL_VERSIONS:
        return "live" if fills_forms(ctx) and ctx.session.can_send_request else "text"
    known = ctx.session.client_capabilities
    if known is None:
        return "text"
    return "task" if TASKS in (known.extensions or {}) else choose_round(ctx)


def choose_round(ctx: Context) -> Way:
    """Return how this client can be asked with an input round."""
    known = ctx.session.client_capabilities
    return "form" if fills_forms(ctx) else "url" if known is not None and known.elicitation is not None else "text"


def fills_forms(ctx: Context) -> bool:
    """Return whether the client shows forms to its user. A capability without modes means forms."""
    known = ctx.session.client_capabilities
    asks = known.elicitation if known else None
    return asks is not None and (asks.form is not None or asks.url is None)


@dataclass
class Taken:
    """What became of the answers of one round."""

    problems: dict[str, str] = field(default_factory=dict[str, str])
    """Suspension -> why its answer was not accepted: it is asked again."""
    refused: list[str] = field(default_factory=list[str])
    """Why decisions of this principal were refused: they are not asked again."""
    closed: bool = False
    """A form was closed without a decision."""
    consented: bool = False
    """The user has opened an address."""


class Rounds:
    """Questions to the users of clients. Decisions go through ``Runtime.resolve``, under the client's principal."""

    def __init__(self, runtime: Runtime[Any], may_see: MaySee | None, links: Links | None, note: str = ""):
        self.runtime, self._may_see, self._links, self._note = runtime, may_see, links, note

    async def check_visible(self, by: Principal, conversation: str) -> None:
        """Raise NotFound if the principal may not see the conversation, as if there were none."""
        if not await self.can_see(by, check_conversation_id(conversation)):
            raise NotFound(f"no conversation {conversation!r}")

    async def can_see(self, by: Principal, conversation: str) -> bool:
        if self._may_see is None:
            return True
        verdict = self._may_see(by, conversation)
        return await verdict if inspect.isawaitable(verdict) else verdict

    def may_ask(self, entry: Pending, by: Principal) -> bool:
        """Return whether this principal can be asked about the call at all."""
        voted = any(by.id in vote.people for vote in entry.votes)
        return can_ask(entry) and not voted and decider_refusal(entry, by) is None

    def link_for(self, entry: Pending, by: Principal) -> str | None:
        """Return the address at which the principal can decide the call, if there are links and the principal may."""
        voted = any(by.id in vote.people for vote in entry.votes)
        if self._links is None or entry.kind == "client_exec" or voted or decider_refusal(entry, by) is not None:
            return None
        return self._links.make(entry, by.id, self.runtime.now())

    def make_requests(
        self, exchange: Exchange, entries: Iterable[Pending], by: Principal, way: Way, taken: Taken
    ) -> tuple[Exchange, types.InputRequests]:
        """Return the questions of one round, and the exchange that remembers what was asked and shown."""
        requests: types.InputRequests = {}
        asked: dict[str, tuple[str, str]] = {}
        for entry in entries:
            params: types.ElicitRequestFormParams | types.ElicitRequestURLParams
            if way == "url":
                url = self.link_for(entry, by)
                if url is None:
                    continue
                params = types.ElicitRequestURLParams(message=describe(entry), url=url)
            else:
                params = make_form(entry, taken.problems.get(entry.id, ""))
            key = key_of(entry)
            key = key if exchange.kind != "ask" and key not in requests else entry.id
            requests[key] = types.ElicitRequest(params=params)
            asked[key] = (entry.id, entry.digest)
        return Exchange(exchange.kind, exchange.conversation, exchange.message, asked), requests

    async def take_answers(self, exchange: Exchange, given: Mapping[str, Any], by: Principal, way: Way) -> Taken:
        """Resolve what was asked with the answers that came. Answers to anything else are ignored.

        A suspension that was decided meanwhile stays as it was decided: the log has the outcome.
        """
        taken = Taken()
        for key, (suspension, digest) in exchange.asked.items():
            answer = given.get(key)
            if not isinstance(answer, types.ElicitResult):
                continue
            try:
                entry = await find_pending(self.runtime, exchange.conversation, suspension)
                if way == "url" and answer.action == "accept":
                    taken.consented = True
                    await self.wait_until_decided(entry)
                    continue
                decision = read_answer(entry, digest, answer)
                if decision is None:
                    taken.closed = True
                else:
                    await self.runtime.resolve(exchange.conversation, suspension, decision, by=by)
            except Stale:
                continue
            except NotAllowed as refusal:
                taken.refused.append(refusal.message)
            except Invalid as problem:
                taken.problems[suspension] = f"The answer was not accepted: {problem.message}"
        return taken

    async def ask_live(self, ctx: Context, exchange: Exchange, entry: Pending, by: Principal, problem: str) -> Taken:
        """Ask by a request to the client, on its open connection; for revisions of the protocol with a handshake.

        If the connection ends first, the call keeps waiting, and can be decided elsewhere.
        """
        form = make_form(entry, problem)
        asking = asyncio.ensure_future(
            ctx.session.elicit_form(form.message, form.requested_schema, related_request_id=ctx.request_id)
        )
        elsewhere = asyncio.ensure_future(self.wait_until_decided(entry))
        try:
            await asyncio.wait((asking, elsewhere), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                return Taken()
            if isinstance(asking.exception(), MCPError):
                return Taken(closed=True)  # the client does not answer
            asked = Exchange(exchange.kind, exchange.conversation, exchange.message, {"it": (entry.id, entry.digest)})
            return await self.take_answers(asked, {"it": asking.result()}, by, "live")
        finally:
            for task in (asking, elsewhere):
                task.cancel()
            await asyncio.gather(asking, elsewhere, return_exceptions=True)

    async def wait_until_decided(self, entry: Pending) -> None:
        """Return once this suspension is over, by a decision through any door."""
        async for event in self.runtime.events(entry.conversation, after=entry.seq):
            if isinstance(event, CallResolved | CallReturned | CallSuspended) and event.call_id == entry.call:
                return

    def explain(self, entries: Iterable[Pending], by: Principal, taken: Taken) -> types.CallToolResult:
        """Return the result for a client that cannot be asked: which calls wait, and where a person decides them."""
        lines: list[str] = list(taken.refused)
        waiting: list[dict[str, Any]] = []
        for entry in entries:
            call = f"{entry.conversation}/{entry.id}"
            lines.append(f"{entry.tool} waits for a person, until {format_time(entry.deadline)}: {entry.prompt}")
            refusal = decider_refusal(entry, by)
            if refusal is not None:
                lines.append(f"{refusal}.")
            link = self.link_for(entry, by)
            if link is not None:
                lines.append(f"Ask your user to open this address and decide there: {link}")
            if self._note:
                lines.append(self._note)
            lines.append(f"Afterwards, call the tool `result` with call={call!r} to get the result.")
            waiting.append({**summarize(entry), **({"link": link} if link is not None else {})})
        return text_result("\n".join(lines), {"waiting": waiting}, error=True)

    async def find_entry(self, call: str, by: Principal) -> Pending:
        """Return the waiting call of CONVERSATION/CALL or CONVERSATION/CALL:SEQ; raise Stale if it does not wait."""
        conversation, suspension = split_call(call)
        await self.check_visible(by, conversation)
        bare, seq = split_suspension(suspension)
        for entry in await self.runtime.pending(conversation):
            if entry.call == bare and seq in (None, entry.seq):
                return public_pending(entry)
        raise Stale(f"call {call!r} does not wait for a decision", reason="unknown")


def split_call(call: str) -> tuple[str, str]:
    """Return the conversation and the call of CONVERSATION/CALL."""
    conversation, slash, name = call.rpartition("/")
    if not slash or not conversation or not name:
        raise Invalid(f"{call[:80]!r} names no call: give CONVERSATION/CALL, as `pending` lists it")
    return conversation, name


def summarize(entry: Pending) -> dict[str, Any]:
    """Return a waiting call as data for a client."""
    return {
        "call": f"{entry.conversation}/{entry.id}",
        "tool": entry.tool,
        "kind": entry.kind,
        "prompt": entry.prompt,
        "args": entry.args,
        "risk": entry.risk,
        "agent": entry.agent,
        "requested_by": entry.principal.id,
        "deadline": format_time(entry.deadline),
    }
