"""``Slack``: messages with the card and buttons, modals for questions, and answers from threads."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, TypeVar
from urllib.parse import parse_qs

import msgspec

from holdfast.channels import card
from holdfast.channels.decide import find_pending, resolve_suspension
from holdfast.channels.links import Links
from holdfast.core.decisions import Approve, Decision, Deny, Pending, Principal, TakeBack
from holdfast.core.notice import OPEN_KINDS, Notice, NoticeKind, References, Routing, TryLater, Undeliverable
from holdfast.core.text.html_card import format_time
from holdfast.core.text.redaction import redact_exception
from holdfast.errors import DeclarationError, HoldfastError, Invalid, NotAllowed, Stale, install_command
from holdfast.runtime.runtime import Runtime

T = TypeVar("T")

log = logging.getLogger("holdfast")

KINDS: tuple[NoticeKind, ...] = (
    "suspended",
    "voted",
    "approved",
    "taken_back",
    "resolved",
    "expired",
    "reminder",
    "escalated",
    "extended",
)
ANSWER_SECONDS = 2.5
"""Slack expects an answer within 3 seconds; work that takes longer goes on in the background."""
API_SECONDS = 15
WINDOW_SECONDS = 300
"""Requests that are older are refused."""
MAX_SEEN = 10_000
"""Signatures of handled requests that are remembered within the window: each request is handled once."""
LATE_SECONDS = 300.0
"""For so long a notice waits for the message of its call, which another process may be about to post."""
DIGEST_LIMIT = 30
"""Notices in one digest: Slack takes about one message a second in a channel."""
DIGEST_SECONDS = 40.0
"""No request of a digest begins later, so that all of them end within the time of an attempt."""
RECORD_SECONDS = 3.0
"""Seconds that a message which is being posted has to be recorded when the runtime closes."""
MAX_TEXT = 2800
"""Characters of one section; Slack refuses more than 3000."""
PREFIX = "holdfast:"
_PERMANENT = ("channel_not_found", "not_in_channel", "is_archived", "invalid_blocks", "msg_too_long", "no_text")
_NOT_EDITABLE = ("cant_update_message", "edit_window_closed")
_TO_FIX = ("invalid_auth", "not_authed", "account_inactive", "token_revoked", "token_expired", "missing_scope")


class SlackReply(msgspec.Struct, frozen=True):
    """The response to a request of Slack."""

    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"


class _Target(msgspec.Struct, frozen=True, array_like=True):
    """The value of a button: the suspension that it was shown for, and the digest of what was shown."""

    conversation: str
    suspension: str
    digest: str = ""


class _Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a message is."""

    channel: str
    ts: str
    notice: str
    """The id of the notice that it was posted for."""
    replaced: bool = False
    """Whether it was rewritten, because a newer message has the card."""


class _Posting(msgspec.Struct, frozen=True, array_like=True):
    """What is recorded before a card is posted."""

    notice: str
    """The id of the notice that it is posted for."""
    at: float
    thread: str = ""
    """The message of the digest that it belongs to; empty: none."""


class SlackUnavailable(TryLater):
    """Slack takes no request now: the rest of a digest is not tried."""


class SlackRateLimit(SlackUnavailable):
    """Slack answered 429."""


class MessageMissing(Undeliverable):
    """The message to change does not exist any more."""


class _User(msgspec.Struct, frozen=True):
    id: str


class _Action(msgspec.Struct, frozen=True):
    action_id: str
    value: str = ""


class _Container(msgspec.Struct, frozen=True):
    """Where a button was pressed."""

    channel_id: str = ""
    thread_ts: str = ""


class _Option(msgspec.Struct, frozen=True):
    value: str


class _Element(msgspec.Struct, frozen=True):
    """One element of a dialog, with what was entered."""

    value: str | None = None
    selected_option: _Option | None = None


class _ViewState(msgspec.Struct, frozen=True):
    values: dict[str, dict[str, _Element]] = {}


class _View(msgspec.Struct, frozen=True):
    """A dialog that was submitted."""

    callback_id: str = ""
    private_metadata: str = ""
    state: _ViewState = _ViewState()


class _Message(msgspec.Struct, frozen=True):
    """An event of a channel."""

    type: str
    subtype: str | None = None
    bot_id: str | None = None
    user: str | None = None
    channel: str = ""
    thread_ts: str | None = None
    text: str = ""


class _Payload(msgspec.Struct, frozen=True):
    """The parts of Slack's requests that are used here."""

    type: str
    challenge: str = ""
    trigger_id: str = ""
    user: _User | None = None
    actions: list[_Action] = []
    container: _Container = _Container()
    view: _View | None = None
    event: _Message | None = None


class _Asker(msgspec.Struct, frozen=True):
    """A Slack user, and where the user acted."""

    user: str
    channel: str
    thread: str


class Slack:
    """Posts each pending call to a channel of Slack, where it can be decided.

    The message has the card and buttons. It is changed to the outcome wherever the call is decided. A question is
    answered in a dialog, or with a reply in the message's thread. A digest is one message that lists the calls, with a
    card for each in its thread; an earlier message of the same call is changed and loses its buttons.

    In the app's settings at api.slack.com: the scopes ``chat:write`` and, for answers in threads,
    ``channels:history`` with the event ``message.channels``. "Interactivity" and "Event Subscriptions" have the address
    https://YOUR-SERVER/channels/NAME, which ``holdfast.server.app`` and ``holdfast serve`` serve.

    token:           the bot token ("xoxb-...")
    signing_secret:  verifies that a request comes from Slack
    channel:         the id of the channel ("C0123456789") that the messages go to
    principal:       returns the principal of a Slack user's id, or None for a user who may not decide anything. By
                     default the principal of the user U123 is "slack:U123". A person then has one id here and another
                     on the page, so a call with ``not_requester`` or several ``approvers`` is not decided in Slack
    links:           adds a button that sends the user a personal link to the whole card
    name:            names the channel in the store, and in the address
    kinds:           the kinds of notices to post; those about decisions change the message
    route:           which notices, and when
    base_url:        the address of Slack's API; for tests
    """

    def __init__(
        self,
        token: str,
        signing_secret: str,
        *,
        channel: str,
        principal: Callable[[str], Principal | str | None] | None = None,
        links: Links | None = None,
        name: str = "slack",
        kinds: Sequence[NoticeKind] = KINDS,
        route: Routing | None = None,
        base_url: str = "https://slack.com/api/",
    ):
        if find_spec("slack_sdk") is None:
            raise DeclarationError(f"Slack needs slack_sdk: {install_command('slack')}")
        if not token or not signing_secret or not channel:
            raise DeclarationError("Slack: give the bot token, the signing secret and the id of the channel")
        from slack_sdk import WebClient
        from slack_sdk.signature import SignatureVerifier

        self.name, self.kinds, self.route, self.links = card.check_name(name), tuple(kinds), route, links
        self.digest_limit = DIGEST_LIMIT
        # Without retries of slack_sdk: they would post a message twice that Slack has taken without a reply.
        self._client = WebClient(token, base_url=base_url, timeout=API_SECONDS, retry_handlers=[])
        self._verifier = SignatureVerifier(signing_secret)
        self._channel, self._principal = channel, principal
        self._references: References | None = None
        self._seen: OrderedDict[str, float] = OrderedDict()
        self._tasks: set[asyncio.Task[Any]] = set()

    def connect(self, references: References) -> None:
        """Remember messages here; see ``RememberingChannel``."""
        self._references = references

    # --- notices to messages ---

    async def send(self, notice: Notice) -> None:
        """Post a message for a call that waits, or change it; see ``Channel``."""
        await self._show([notice])

    async def send_many(self, notices: list[Notice]) -> dict[str, Exception]:
        """Post one message that lists the calls that wait, with their cards in its thread; change other messages.

        Return the notices that were not delivered. Slack's limit of the rate is waited for if the time allows.
        """
        deadline = asyncio.get_running_loop().time() + DIGEST_SECONDS
        groups = _group_by_suspension(notices)
        asking = [group for group in groups if _asks(group)]
        failures: dict[str, Exception] = {}
        try:
            await self._within(deadline, lambda: self._announce(asking))
        except Exception as failure:
            _fail(failures, asking, failure)
            groups = [group for group in groups if group not in asking]
        for n, group in enumerate(groups):
            try:
                await self._within(deadline, lambda group=group: self._show(group))
            except SlackUnavailable as failure:
                _fail(failures, groups[n:], failure)
                break
            except Exception as failure:
                _fail(failures, [group], failure)
        return failures

    async def _within(self, deadline: float, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do the work, again after each limit of the rate; raise SlackUnavailable once the deadline has passed."""
        time_now = asyncio.get_running_loop().time
        while True:
            if time_now() > deadline:
                raise SlackUnavailable("the digest takes too long: the rest of it is sent later")
            try:
                return await work()
            except SlackRateLimit as limit:
                if time_now() + limit.after > deadline:
                    raise
                await asyncio.sleep(limit.after)

    async def _announce(self, groups: list[list[Notice]]) -> None:
        """Post the message of a digest, unless these calls have one from an earlier attempt, or there is only one."""
        fresh: list[list[Notice]] = []
        for group in groups:
            posting = await self._find_posting(group[-1])
            if posting is None or posting.notice not in _ids(group):
                fresh.append(group)
        if len(fresh) > 1:
            with suppress(Undeliverable):  # the list was refused: the cards are posted without it
                await self._finish(self._post_list(fresh))

    async def _post_list(self, groups: list[list[Notice]]) -> None:
        text = f"{len(groups)} calls wait for a decision"
        lines = "\n".join(f"• {_escape(card.title(group[-1]))}" for group in groups)
        posted = await self._call(
            "chat_postMessage", channel=self._channel, text=text, blocks=[_section(f"*{text}*\n{lines}")]
        )
        for group in groups:
            await self._put_posting(group[-1], posted["ts"])

    async def _show(self, group: list[Notice]) -> None:
        """Make the messages of one suspension show the state of these notices, which are in the order of events.

        It may be repeated after a failure at any step: a card that was posted for one of them is not posted again.
        """
        last = group[-1]
        if last.suspension is None:
            text = _escape(card.title(last))
            await self._call("chat_postMessage", channel=self._channel, text=text, metadata=_metadata(last))
            return
        places = await self._find_places(last)
        ended = next((notice for notice in group if notice.outcome is not None), None)
        waiting = next((notice for notice in reversed(group) if notice.pending is not None), None)
        if ended is None and waiting is None:
            return  # it was decided meanwhile: the notice about that follows
        posting = await self._find_posting(last)
        if not places and _is_posted_elsewhere(posting, group):
            raise TryLater("the message of this call is being posted")
        if ended is not None:
            for place in places:
                await self._rewrite(place, _closed_message(ended))
        elif waiting is not None:
            thread = posting.thread if posting is not None and posting.notice in _ids(group) else ""
            await self._show_waiting(group, waiting, places, thread)

    async def _show_waiting(self, group: list[Notice], waiting: Notice, places: list[_Place], thread: str) -> None:
        """Post the card, or change its message; take the buttons from all messages but the last.

        thread:  the message of a digest, which gets the card even if there is an earlier message
        """
        assert waiting.pending is not None
        is_posted = any(place.notice in _ids(group) for place in places)
        if not places or (thread and not is_posted):
            places = await self._finish(self._post(group, waiting, places, thread))
        elif not await self._rewrite(places[-1], self._open_message(waiting.pending)):
            places = await self._finish(self._post(group, waiting, places, ""))
        elif waiting.kind in OPEN_KINDS[1:] and not is_posted:  # a changed message notifies nobody
            place, text = places[-1], _escape(card.title(waiting))
            await self._call(
                "chat_postMessage", channel=place.channel, thread_ts=place.ts, text=text, metadata=_metadata(waiting)
            )
        for n, place in enumerate(places[:-1]):
            if not place.replaced:
                await self._rewrite(place, _replaced_message(waiting))
                places[n] = msgspec.structs.replace(place, replaced=True)
                await self._put_places(waiting, places)

    async def _post(self, group: list[Notice], waiting: Notice, places: list[_Place], thread: str) -> list[_Place]:
        """Post the card and record its message; return all messages of the suspension, the newest last."""
        pending = waiting.pending
        assert pending is not None
        await self._put_posting(group[-1], thread)
        options = {"thread_ts": thread} if thread else {}
        posted = await self._call(
            "chat_postMessage",
            channel=self._channel,
            metadata=_metadata(waiting),
            **self._open_message(pending),
            **options,
        )
        place = _Place(posted["channel"], posted["ts"], waiting.id)
        found = [*places, place]
        if self._references is not None:
            target = _Target(pending.conversation, pending.id, pending.digest)
            await self._references.put(f"thread/{place.channel}/{place.ts}", msgspec.json.encode(target).decode())
        await self._put_places(waiting, found)
        return found

    async def _rewrite(self, place: _Place, message: dict[str, Any]) -> bool:
        """Change a message; return whether it still exists."""
        try:
            await self._call("chat_update", channel=place.channel, ts=place.ts, **message)
        except MessageMissing:
            return False
        return True

    async def _finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of the work. If this task is cancelled, as at a close, the work has some seconds to end.

        A request to Slack cannot be taken back: a message that is not recorded would be posted again.
        """
        task = asyncio.get_running_loop().create_task(work, name=f"holdfast:slack:{self.name}")
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait({task}, timeout=RECORD_SECONDS)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise

    # --- what is recorded about messages ---

    async def _find_places(self, notice: Notice) -> list[_Place]:
        """Return the messages of a suspension, the newest last."""
        found = None if self._references is None else await self._references.get(f"messages/{_key(notice)}")
        return [] if found is None else msgspec.json.decode(found, type=list[_Place])

    async def _put_places(self, notice: Notice, places: list[_Place]) -> None:
        if self._references is not None:
            await self._references.put(f"messages/{_key(notice)}", msgspec.json.encode(places).decode())

    async def _find_posting(self, notice: Notice) -> _Posting | None:
        found = None if self._references is None else await self._references.get(f"posting/{_key(notice)}")
        return None if found is None else msgspec.json.decode(found, type=_Posting)

    async def _put_posting(self, notice: Notice, thread: str) -> None:
        if self._references is not None:
            posting = _Posting(notice.id, time.time(), thread)
            await self._references.put(f"posting/{_key(notice)}", msgspec.json.encode(posting).decode())

    async def _call(self, method: str, **arguments: Any) -> Any:
        """Call a method of Slack's API in a thread; raise TryLater or Undeliverable."""
        from slack_sdk.errors import SlackApiError, SlackClientError

        try:
            return await asyncio.to_thread(getattr(self._client, method), **arguments)
        except SlackApiError as failure:
            response: Any = failure.response
            error = str(response.get("error", "")) if hasattr(response, "get") else ""
            if getattr(response, "status_code", 0) == 429:
                after = str(response.headers.get("Retry-After", "1"))
                raise SlackRateLimit(
                    "Slack limits the rate", max(float(after) if after.isdigit() else 1.0, 1.0)
                ) from None
            if error == "message_not_found":
                raise MessageMissing("the message was deleted") from None
            if error in _PERMANENT or error in _NOT_EDITABLE:
                raise Undeliverable(f"Slack refused it: {error}") from None
            if error in _TO_FIX:
                raise SlackUnavailable(f"Slack refused it: {error} (the token or its scopes)") from None
            raise TryLater(f"Slack refused it: {error or 'no reason given'}") from None
        except (SlackClientError, OSError) as failure:
            raise SlackUnavailable(f"Slack could not be reached: {redact_exception(failure)}") from None

    def _open_message(self, pending: Pending) -> dict[str, Any]:
        """Return the text and the blocks of a call that waits."""
        value = msgspec.json.encode(_Target(pending.conversation, pending.id, pending.digest)).decode()
        buttons: list[dict[str, Any]] = []
        if pending.starts_at is not None:
            buttons.append(_button("undo", "Undo", value))
        elif pending.kind == "approval":
            buttons.append(_button("approve", "Run it again" if pending.recovery else "Approve", value, "primary"))
            buttons.append(_button("deny", "Deny", value, "danger"))
        else:
            buttons.append(_button("answer", "Answer", value, "primary"))
            buttons.append(_button("refuse", "It failed" if pending.kind == "manual" else "Decline", value))
        if self.links is not None:
            buttons.append(_button("link", "Open the card", value))
        blocks = [*_card_blocks(pending), {"type": "actions", "block_id": f"{PREFIX}actions", "elements": buttons}]
        return {"text": _escape(card.one_line(card.redact_value(pending.prompt or pending.tool))), "blocks": blocks}

    # --- requests of Slack ---

    async def receive(self, runtime: Runtime, headers: Mapping[str, str], body: bytes) -> SlackReply:
        """Verify a request and handle it: a button, a dialog, or a message in a thread."""
        stamp, signature = headers.get("x-slack-request-timestamp", ""), headers.get("x-slack-signature", "")
        if not self._is_genuine(body, stamp, signature):
            return SlackReply(401, b'{"error":"the signature is wrong or too old"}')
        if not self._remember(signature):
            return SlackReply()  # a repeated request: the first one was handled
        try:
            payload = _read_payload(headers.get("content-type", ""), body)
        except (ValueError, msgspec.MsgspecError, UnicodeDecodeError):
            return SlackReply(400, b'{"error":"the body cannot be read"}')
        match payload.type:
            case "url_verification":
                return SlackReply(body=payload.challenge.encode(), content_type="text/plain")
            case "block_actions":
                return await self._in_time(self._on_actions(runtime, payload))
            case "view_submission":
                return await self._in_time(self._on_submission(runtime, payload))
            case "event_callback":
                return await self._in_time(self._on_event(runtime, payload))
            case _:
                return SlackReply()

    def _is_genuine(self, body: bytes, stamp: str, signature: str) -> bool:
        if not stamp.isascii() or not stamp.isdigit() or abs(time.time() - int(stamp)) > WINDOW_SECONDS:
            return False
        try:
            return self._verifier.is_valid(body, stamp, signature)
        except UnicodeDecodeError:
            return False

    def _remember(self, signature: str) -> bool:
        """Return whether the request is new in this process. Across processes, a decision is taken once anyhow."""
        now = time.time()
        while self._seen and (next(iter(self._seen.values())) < now - 2 * WINDOW_SECONDS or len(self._seen) > MAX_SEEN):
            self._seen.popitem(last=False)
        if signature in self._seen:
            return False
        self._seen[signature] = now
        return True

    async def _in_time(self, work: Coroutine[Any, Any, SlackReply | None]) -> SlackReply:
        """Return the reply of the work, or an empty one in time; the work then goes on."""
        task = asyncio.get_running_loop().create_task(work, name=f"holdfast:slack:{self.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.wait({task}, timeout=ANSWER_SECONDS)
        if not task.done():
            return SlackReply()
        if (failure := task.exception()) is not None:
            log.error("channel %s: a request of Slack could not be handled", self.name, exc_info=failure)
            return SlackReply()
        return task.result() or SlackReply()

    async def _on_actions(self, runtime: Runtime, payload: _Payload) -> SlackReply | None:
        if payload.user is None:
            return None
        asker = _Asker(payload.user.id, payload.container.channel_id, payload.container.thread_ts)
        for action in payload.actions:
            if not action.action_id.startswith(PREFIX):
                continue
            target = msgspec.json.decode(action.value, type=_Target)
            try:
                await self._act(runtime, action.action_id.removeprefix(PREFIX), target, asker, payload.trigger_id)
            except HoldfastError as refusal:
                await self._tell(asker, refusal.message)
        return None

    async def _act(self, runtime: Runtime, name: str, target: _Target, asker: _Asker, trigger: str) -> None:
        match name:
            case "approve":
                await self._resolve(runtime, target, Approve(digest=target.digest), asker.user)
            case "undo":
                await self._resolve(runtime, target, TakeBack(), asker.user)
            case "deny" | "refuse" | "answer":
                entry = await find_pending(runtime, target.conversation, target.suspension)
                view = _refusal_view(entry, target) if name != "answer" else _answer_view(entry, target)
                await self._call("views_open", trigger_id=trigger, view=view)
            case "link" if self.links is not None:
                entry = await find_pending(runtime, target.conversation, target.suspension)
                self._check_identity(entry)
                link = self.links.make(entry, self._principal_of(asker.user).id, runtime.now())
                await self._tell(asker, f"Your personal link to this card: <{link}|read and decide>")
            case _:
                pass

    async def _on_submission(self, runtime: Runtime, payload: _Payload) -> SlackReply | None:
        view = payload.view
        if payload.user is None or view is None or not view.callback_id.startswith(PREFIX):
            return None
        target = msgspec.json.decode(view.private_metadata, type=_Target)
        given = _read_state(view)
        try:
            entry = await find_pending(runtime, target.conversation, target.suspension)
            if view.callback_id == f"{PREFIX}answer":
                decision: Decision = card.answer_of(entry, card.read_fields(entry, given))
            elif entry.kind == "manual":
                decision = card.failure_of(given.get("reason", ""))
            else:
                decision = Deny(given.get("reason", "").strip())
            await self._resolve(runtime, target, decision, payload.user.id)
        except HoldfastError as refusal:
            block = next(iter(view.state.values), f"{PREFIX}reason")
            errors = {"response_action": "errors", "errors": {block: refusal.message[:300]}}
            return SlackReply(body=msgspec.json.encode(errors))
        return None

    async def _on_event(self, runtime: Runtime, payload: _Payload) -> SlackReply | None:
        """Take a reply in the thread of a question as its answer."""
        event = payload.event
        if event is None or event.type != "message" or event.subtype or event.bot_id or not event.user:
            return None
        if not event.thread_ts or self._references is None:
            return None
        found = await self._references.get(f"thread/{event.channel}/{event.thread_ts}")
        if found is None:
            return None
        target = msgspec.json.decode(found, type=_Target)
        asker = _Asker(event.user, event.channel, event.thread_ts)
        try:
            entry = await find_pending(runtime, target.conversation, target.suspension)
            if entry.kind != "elicitation":
                return None  # people may talk about an approval without deciding it
            await self._resolve(runtime, target, card.answer_of(entry, _read_reply(entry, event.text)), asker.user)
        except Stale:
            return None  # the thread goes on after the answer
        except HoldfastError as refusal:
            await self._tell(asker, refusal.message)
        return None

    def _principal_of(self, user: str) -> Principal:
        found = f"slack:{user}" if self._principal is None else self._principal(user)
        if found is None:
            raise Invalid("your Slack user is not known here: ask the operator")
        return Principal.of(found)

    async def _resolve(self, runtime: Runtime, target: _Target, decision: Decision, user: str) -> None:
        by = self._principal_of(user)
        if self._principal is None:
            self._check_identity(await find_pending(runtime, target.conversation, target.suspension))
        await resolve_suspension(runtime, target.conversation, target.suspension, decision, by)

    def _check_identity(self, entry: Pending) -> None:
        """Raise NotAllowed if it matters which person decides, and Slack's users are not mapped to principals."""
        if self._principal is None and entry.kind == "approval" and (entry.not_requester or entry.approvers > 1):
            raise NotAllowed(
                f"a call of {entry.tool} depends on which person decides, and here Slack users are not known by the "
                "ids that they have elsewhere: decide on the page, or ask the operator to set Slack(principal=...)"
            )

    async def _tell(self, asker: _Asker, text: str) -> None:
        """Show a text to one user only."""
        thread = {"thread_ts": asker.thread} if asker.thread else {}
        try:
            await self._call("chat_postEphemeral", channel=asker.channel, user=asker.user, text=text, **thread)
        except (TryLater, Undeliverable) as failure:
            log.warning("channel %s: a user could not be told: %s", self.name, failure)


def _key(notice: Notice) -> str:
    return f"{notice.conversation}/{notice.suspension}"


def _ids(group: list[Notice]) -> set[str]:
    return {notice.id for notice in group}


def _group_by_suspension(notices: list[Notice]) -> list[list[Notice]]:
    """Return the notices of each suspension together; the end of a turn stands alone."""
    groups: dict[str, list[Notice]] = {}
    for notice in sorted(notices, key=lambda notice: (notice.conversation, notice.seq)):
        groups.setdefault(notice.id if notice.suspension is None else _key(notice), []).append(notice)
    return list(groups.values())


def _asks(group: list[Notice]) -> bool:
    """Return whether people are asked for a decision: the call waits, and more than a vote or an extension is told."""
    waits = group[-1].pending is not None and all(notice.outcome is None for notice in group)
    return waits and any(notice.kind in OPEN_KINDS for notice in group)


def _is_posted_elsewhere(posting: _Posting | None, group: list[Notice]) -> bool:
    """Return whether another process may be about to post the message for another notice of this suspension."""
    return posting is not None and posting.notice not in _ids(group) and time.time() - posting.at < LATE_SECONDS


def _fail(failures: dict[str, Exception], groups: list[list[Notice]], failure: Exception) -> None:
    failures.update((notice.id, failure) for group in groups for notice in group)


def _metadata(notice: Notice) -> dict[str, Any]:
    """Return the notice's id for the message: the same if it is posted again after a crash."""
    return {"event_type": "holdfast_notice", "event_payload": {"id": notice.id}}


def _read_payload(content_type: str, body: bytes) -> _Payload:
    if content_type.partition(";")[0].strip().lower() == "application/x-www-form-urlencoded":
        body = parse_qs(body.decode(), strict_parsing=True).get("payload", [""])[0].encode()
    return msgspec.json.decode(body, type=_Payload)


def _read_state(view: _View) -> dict[str, str]:
    """Return the texts of a dialog's fields by name."""
    found: dict[str, str] = {}
    for block, elements in view.state.values.items():
        for element in elements.values():
            text = element.value if element.selected_option is None else element.selected_option.value
            found[block.removeprefix(PREFIX).removeprefix("value.")] = text or ""
    return found


def _read_reply(entry: Pending, text: str) -> Any:
    """Return the answer that a reply in a thread gives. Slack's escapes are undone."""
    plain = text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&").strip()
    fields = card.fields_of(entry)
    if [field.name for field in fields] != [""]:
        raise Invalid("this question has several fields: press Answer")
    if fields[0].type == "choice":
        for choice in fields[0].choices:
            shown = choice if isinstance(choice, str) else msgspec.json.encode(choice).decode()
            if shown.casefold() == plain.casefold():
                return choice
        raise Invalid("reply with one of the answers, as it is written in the message")
    return card.read_fields(entry, {"": plain})


# --- blocks ---


def _escape(text: str) -> str:
    """Return text that Slack shows as it is: no mention, link or formatting of a tool or model takes effect."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _plain(text: str, limit: int = MAX_TEXT) -> dict[str, Any]:
    return {
        "type": "plain_text",
        "text": (text if len(text) <= limit else f"{text[: limit - 1]}…") or " ",
        "emoji": False,
    }


def _section(text: str) -> dict[str, Any]:
    return {"type": "section", "text": {"type": "mrkdwn", "text": text[:MAX_TEXT], "verbatim": True}}


def _button(action: str, label: str, value: str, style: str | None = None) -> dict[str, Any]:
    shown = {"style": style} if style else {}
    return {"type": "button", "action_id": f"{PREFIX}{action}", "text": _plain(label), "value": value, **shown}


def _card_blocks(pending: Pending) -> list[dict[str, Any]]:
    """Return the card of a call: its title, what would happen, its arguments and facts."""
    prompt = str(card.redact_value(pending.prompt or f"Run {pending.tool}?"))
    blocks: list[dict[str, Any]] = [{"type": "section", "text": _plain(prompt)}]
    if pending.reason or pending.recovery:
        why = (
            "It was interrupted and may have taken effect. Approving runs it again."
            if pending.recovery
            else pending.reason
        )
        blocks.append({"type": "section", "text": _plain(str(card.redact_value(why)))})
    if (preview := card.shown_preview(pending)) is not None:
        blocks.append(_values("What would happen", preview))
    if pending.preview_error:
        blocks.append({"type": "section", "text": _plain(f"No preview: {pending.preview_error}")})
    if pending.args:
        blocks.append(_values("Arguments", pending.args))
    if pending.choices:
        blocks.append(_values("One of", pending.choices))
    if deciders := card.deciders(pending):
        blocks.append({"type": "section", "text": _plain("\n".join(deciders))})
    facts = [
        f"{pending.risk} risk",
        f"{pending.tool} for {pending.principal.id}",
        f"expires {format_time(pending.deadline)}",
    ]
    blocks.append({"type": "context", "elements": [_plain(" · ".join(facts), 1900)]})
    return blocks


def _values(title: str, value: Any) -> dict[str, Any]:
    shown = card.redact_value(value)
    text = shown if isinstance(shown, str) else msgspec.json.format(msgspec.json.encode(shown), indent=2).decode()
    cut = text if len(text) <= 2400 else f"{text[:2400]}\n… {len(text) - 2400} more characters"
    body = _escape(cut).replace("```", "'''")
    return _section(f"*{title}*\n```{body}```"[:MAX_TEXT])


def _closed_message(notice: Notice) -> dict[str, Any]:
    """Return the message of a call that was decided: what it was, and the outcome, without buttons."""
    by = "" if notice.by.id == "system" else f" by {notice.decider}"
    outcome = f"{notice.outcome}{by}"
    mark = {"approved": "✅", "answered": "✅", "submitted": "✅", "denied": "⛔"}.get(notice.outcome or "", "⌛")
    why = f": {card.one_line(str(card.redact_value(notice.reason)), 500)}" if notice.reason else ""
    prompt = str(card.redact_value(notice.prompt or notice.tool or ""))
    blocks: list[dict[str, Any]] = [
        {"type": "section", "text": _plain(prompt)},
        {"type": "section", "text": _plain(f"{mark} {notice.tool} was {outcome}{why}")},
    ]
    return {"text": _escape(card.one_line(f"{notice.tool} was {outcome}: {prompt}")), "blocks": blocks}


def _replaced_message(notice: Notice) -> dict[str, Any]:
    """Return what an earlier message of a call shows when a newer one has the card."""
    prompt = str(card.redact_value(notice.prompt or notice.tool or ""))
    text = "This call still waits: a newer message has its buttons."
    blocks = [{"type": "section", "text": _plain(prompt)}, {"type": "section", "text": _plain(text)}]
    return {"text": _escape(card.one_line(f"{text} {prompt}")), "blocks": blocks}


def _view(action: str, title: str, submit: str, target: _Target, blocks: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "type": "modal",
        "callback_id": f"{PREFIX}{action}",
        "private_metadata": msgspec.json.encode(target).decode(),
        "title": _plain(title, 24),
        "submit": _plain(submit, 24),
        "close": _plain("Cancel", 24),
        "blocks": blocks,
    }


def _refusal_view(entry: Pending, target: _Target) -> dict[str, Any]:
    label = {"approval": "Deny", "manual": "It failed"}.get(entry.kind, "Decline")
    prompt = str(card.redact_value(entry.prompt or entry.tool))
    reason: dict[str, Any] = {
        "type": "input",
        "optional": True,
        "block_id": f"{PREFIX}reason",
        "label": _plain("Reason (the model sees it)"),
        "element": {"type": "plain_text_input", "action_id": "given", "max_length": 2000},
    }
    return _view("deny", label, label, target, [{"type": "section", "text": _plain(prompt)}, reason])


def _answer_view(entry: Pending, target: _Target) -> dict[str, Any]:
    prompt = str(card.redact_value(entry.prompt or entry.tool))
    blocks: list[dict[str, Any]] = [{"type": "section", "text": _plain(prompt)}]
    for field in card.fields_of(entry):
        block: dict[str, Any] = {
            "type": "input",
            "block_id": f"{PREFIX}value.{field.name}",
            "label": _plain(field.label, 2000),
            "optional": not field.required or field.type == "boolean",
            "element": _element(field),
        }
        if field.description:
            block["hint"] = _plain(field.description, 2000)
        blocks.append(block)
    return _view("answer", "Answer", "Send", target, blocks)


def _element(field: card.Field) -> dict[str, Any]:
    if field.type in ("choice", "boolean"):
        choices: Sequence[Any] = field.choices if field.type == "choice" else ("yes", "no")
        values = [str(n) for n in range(len(choices))] if field.type == "choice" else ["true", "false"]
        names = [each if isinstance(each, str) else msgspec.json.encode(each).decode() for each in choices]
        options = [{"text": _plain(name, 75), "value": value} for name, value in zip(names, values, strict=True)]
        return {"type": "static_select", "action_id": "given", "options": options[:100]}
    lines = field.type in ("text", "json")
    return {"type": "plain_text_input", "action_id": "given", "multiline": lines}
