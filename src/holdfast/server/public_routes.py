"""The routes without a sign-in: pages behind signed links, and messages that channels receive.

The link's MAC, or the signature that the channel verifies, stands in for the sign-in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable
from urllib.parse import parse_qsl

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from holdfast.channels.card import answer_of, failure_of, read_fields
from holdfast.channels.decide import find_pending, foresee_refusal, resolve_suspension
from holdfast.channels.links import Links, OpenedLink, check_link
from holdfast.core.decisions import Accepted, Approve, Decision, Deny, Pending, Submit, TakeBack
from holdfast.core.notice import Channel
from holdfast.core.results import ANSWER_LIMIT
from holdfast.errors import HoldfastError, Invalid, NotAllowed, NotFound, Stale
from holdfast.runtime.runtime import Runtime
from holdfast.server import api_types, link_page
from holdfast.server.limits import BoundedResponse, Limits, PrincipalSlots, read_body
from holdfast.server.problems import HTTPProblem, unavailable
from holdfast.server.static_files import PageFiles

LINK_BODY_BYTES = 2 * ANSWER_LIMIT
CHANNEL_BODY_BYTES = 1024 * 1024
ASSETS = ("style.css", "icon.svg")
"""The files of the page that are served without a sign-in, because the page behind a link needs them."""


class ChannelReply(Protocol):
    """The response to a message that a channel has received."""

    status: int
    body: bytes
    content_type: str


@runtime_checkable
class ReceivingChannel(Protocol):
    """A channel that is sent messages by its service, under /channels/NAME."""

    async def receive(self, runtime: Runtime, headers: Mapping[str, str], body: bytes) -> ChannelReply:
        """Verify and handle a message; ``headers`` have lower-case names."""
        ...


def find_links(channels: Iterable[Channel], given: Links | None) -> list[Links]:
    """Return the links of these channels and the given ones, each once."""
    found: list[Links] = [] if given is None else [given]
    for channel in channels:
        links = getattr(channel, "links", None)
        if isinstance(links, Links) and links not in found:
            found.append(links)
    return found


class PublicRoutes:
    """The handlers of these routes."""

    def __init__(self, runtime: Runtime, links: Sequence[Links], files: PageFiles, limits: Limits):
        self._runtime, self._links, self._files = runtime, links, files
        self._slots = PrincipalSlots(limits.requests)

    async def show_asset(self, request: Request) -> Response:
        """Serve a file that the page behind a link needs."""
        path = request.path_params["path"]
        if path not in ASSETS or not self._links:
            raise HTTPProblem(404, "not_found", "this server has no such file")
        return self._files.response(["static", path], request.headers)

    async def open_link(self, request: Request) -> Response:
        """Show the call behind a link (GET), or decide it (POST)."""
        if not self._links:
            raise HTTPProblem(404, "not_found", "this server has no links")
        if not self._runtime.is_open:
            raise unavailable("the server is starting or stopping")
        try:
            links, link = self._read_link(request.path_params["token"])
            with self._slots.take(link.audience):
                if request.method == "POST":
                    return await self._decide(request, links, link)
                return await self._show(request, links, link)
        except (NotAllowed, Stale, Invalid) as refusal:
            if not _reads_html(request):
                raise
            return _page(link_page.render_message(*_explain(refusal)), refusal.http_status)

    def _read_link(self, token: str) -> tuple[Links, OpenedLink]:
        refusal: HoldfastError | None = None
        for links in self._links:
            try:
                return links, links.read(token)
            except NotAllowed as problem:
                refusal = problem
        assert refusal is not None
        raise refusal

    async def _show(self, request: Request, links: Links, link: OpenedLink) -> Response:
        check_link(link, None, self._runtime.now())
        try:
            entry = await find_pending(self._runtime, link.conversation, link.suspension)
        except Stale as over:
            if over.reason != "resolved" or not _reads_html(request):
                raise
            return _page(link_page.render_message(*_explain(over)))
        refusal = await foresee_refusal(self._runtime, entry, links.principal(link))
        return _page(link_page.render_card(link, entry, refusal=refusal))

    async def _decide(self, request: Request, links: Links, link: OpenedLink) -> Response:
        given = await _read_form(request)
        check_link(link, None, self._runtime.now())
        entry = await find_pending(self._runtime, link.conversation, link.suspension)
        try:
            decision = _read_decision(link, entry, given)
        except Invalid as problem:
            if not _reads_html(request):
                raise
            return _page(link_page.render_card(link, entry, problem.message), 422)
        check_link(link, decision, self._runtime.now())
        try:
            done = await resolve_suspension(
                self._runtime, link.conversation, link.suspension, decision, links.principal(link)
            )
        except Invalid as problem:
            if not _reads_html(request):
                raise
            return _page(link_page.render_card(link, entry, problem.message), 422)
        if done.starts_at is not None and _reads_html(request):
            return await self._show(request, links, link)  # with the button that takes it back
        return _accepted(request, given["decision"], done)

    async def receive(self, request: Request) -> Response:
        """Pass a message to the channel that it is addressed to."""
        name = request.path_params["name"]
        channel = next((each for each in self._runtime.channels if each.name == name), None)
        if not isinstance(channel, ReceivingChannel):
            raise NotFound(f"no channel {name[:80]!r} receives messages here")
        if not self._runtime.is_open:
            raise unavailable("the server is starting or stopping")
        with self._slots.take(f"channel {name}"):
            body = await read_body(request, CHANNEL_BODY_BYTES)
            reply = await channel.receive(self._runtime, dict(request.headers), body)
        return BoundedResponse(reply.body, reply.status, {"content-type": reply.content_type})


def _page(content: bytes, status: int = 200) -> Response:
    return BoundedResponse(content, status, link_page.HEADERS)


def _reads_html(request: Request) -> bool:
    return "text/html" in request.headers.get("accept", "")


async def _read_form(request: Request) -> dict[str, str]:
    """Return the fields of a form, or of a JSON object of texts."""
    body = await read_body(request, LINK_BODY_BYTES)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        return api_types.decode_body(body, dict[str, str])
    if kind != "application/x-www-form-urlencoded":
        raise HTTPProblem(415, "invalid_args", "send a form, or a JSON object of texts")
    try:
        return dict(parse_qsl(body.decode(), keep_blank_values=True, strict_parsing=bool(body), max_num_fields=500))
    except (UnicodeDecodeError, ValueError):
        raise Invalid("the form cannot be read") from None


def _read_decision(link: OpenedLink, entry: Pending, given: Mapping[str, str]) -> Decision:
    reason = given.get("reason", "").strip()[:2000]
    values = {name.removeprefix("value."): text for name, text in given.items() if name.startswith("value.")}
    values = {name: text.replace("\r\n", "\n") for name, text in values.items()}  # browsers send line breaks so
    match given.get("decision"):
        case "approve":
            return Approve(digest=link.digest)
        case "take_back":
            return TakeBack()
        case "deny":
            return Deny(reason)
        case "answer":
            return answer_of(entry, read_fields(entry, values))
        case "submit":
            return Submit(read_fields(entry, values))
        case "failed":
            return failure_of(reason)
        case other:
            raise Invalid(f"`decision` is one of {', '.join(link.decisions)}, not {other!r:.40}")


def _accepted(request: Request, tag: str, done: Accepted) -> Response:
    if not _reads_html(request):
        return BoundedResponse(msgspec.json.encode(done), headers={"content-type": "application/json"})
    words = {
        "approve": "Approved",
        "take_back": "Taken back",
        "deny": "Denied",
        "answer": "Answered",
        "submit": "Submitted",
        "failed": "Reported",
    }
    people = "person" if done.missing == 1 else "people"
    left = f" {done.missing} more {people} must approve before it runs." if done.missing else ""
    return _page(link_page.render_message(words[tag], f"Your decision is recorded.{left} You can close this page."))


def _explain(refusal: HoldfastError) -> tuple[str, str]:
    """Return the title and the text of the page about a refusal."""
    match refusal:
        case Stale(reason="expired"):
            return "Expired", "The time for this decision is over, or this link has ended. Nothing was changed."
        case Stale(reason="resolved"):
            return "Already decided", f"{refusal.message[:1].upper()}{refusal.message[1:]}. Nothing else was changed."
        case Stale(reason="superseded"):
            return "Changed", "This call has changed since the link was sent. A newer message has the current version."
        case Stale():
            return "Nothing to decide", f"{refusal.message[:1].upper()}{refusal.message[1:]}."
        case _:
            return "Not possible", f"Nothing was changed: {refusal.message}."  # it may begin with a principal's id
