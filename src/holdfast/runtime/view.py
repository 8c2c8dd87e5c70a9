"""Reading a conversation: its snapshot, its events as they happen, and the wait until it rests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from holdfast.core import codec
from holdfast.core.effects import owed
from holdfast.core.events import AnyEvent, TurnEnded
from holdfast.core.live import AnyLive, InFlight, Snapshot
from holdfast.core.state import State, in_grace, pending_entries
from holdfast.core.transcript import Transcript
from holdfast.errors import Backpressure
from holdfast.runtime.conversation import Conversation
from holdfast.runtime.engine import Engine
from holdfast.runtime.event_log import read_pages


async def take_snapshot(engine: Engine, conversation: str) -> Snapshot:
    """Return the conversation as it is now; see ``Runtime.snapshot``."""
    conv = await engine.load_conversation(conversation)
    transcript = Transcript()
    last: TurnEnded | None = None
    # The conversation may go on while its log is read: read on until transcript and state agree.
    while (seen := transcript.seq) < conv.state.seq:
        async for page in read_pages(engine.store, conversation, seen, conv.state.seq + 1):
            for event in page:
                transcript.apply(event)
                last = event if isinstance(event, TurnEnded) else last
        if transcript.seq == seen:
            await conv.reload()
            conv, transcript, last = await engine.load_conversation(conversation), Transcript(), None
    state = conv.state
    turn = state.turn
    return Snapshot(
        conversation=conversation,
        state=conv.status(),
        turn=turn.number if turn else None,
        pending=pending_entries(state),
        in_flight=_calls_in_flight(conv),
        messages=transcript.visible_messages(),
        partial="".join(conv.partial.text),
        thinking="".join(conv.partial.thinking),
        message_id=conv.partial.message_id,
        partial_n=len(conv.partial.text),
        thinking_n=len(conv.partial.thinking),
        epoch=conv.partial.epoch,
        usage=state.usage,
        seq=state.seq,
        agent=turn.agent if turn else state.agent,
        title=state.title,
        archived=state.archived,
        queued=len(state.queue),
        asides=len(turn.asides) if turn else 0,
        reason=last.reason if last and turn is None else None,
        error=last.error if last and turn is None else None,
    )


def _calls_in_flight(conv: Conversation) -> list[InFlight]:
    """Return the calls that run or are about to, and the client calls that have reported progress."""
    turn = conv.state.turn
    return [
        InFlight(
            call_id=call_id,
            tool=call.made.tool,
            args=call.args,
            phase=call.phase,
            attempt=call.attempt,
            progress=conv.progress.get(call_id, (0, None))[1],
        )
        for call_id, call in (turn.calls if turn else {}).items()
        if call.phase in ("ready", "running") or (call.phase == "awaiting_client" and call_id in conv.progress)
    ]


async def follow_events(engine: Engine, conversation: str, after: int) -> AsyncIterator[AnyEvent | AnyLive]:
    """Yield the logged events after ``after``, then new ones and live events; see ``Runtime.events``."""
    # Loaded before the subscription: every later append is then published to it. The reference also keeps the
    # conversation from being evicted while this reads.
    conv = await engine.load_conversation(conversation)
    with engine.bus.subscribe(conv.name) as reader:
        seq = after
        async for page in read_pages(engine.store, conversation, seq):
            for event in page:
                seq = event.seq
                yield event
        while True:
            item = await reader.next(after=seq)
            if item.seq is None:
                yield item
            elif item.seq > seq:
                for body in await engine.store.read(conversation, seq, item.seq) if item.seq > seq + 1 else ():
                    yield codec.decode_event(body)
                seq = item.seq
                yield item


async def wait_until(engine: Engine, conversation: str, condition: Callable[[State], bool]) -> State:
    """Wait until the conversation's state meets a condition, whichever process runs it; return that state."""
    while True:
        conv = await engine.load_conversation(conversation)
        with engine.bus.subscribe(conversation) as reader:
            while True:
                if condition(state := conv.state):
                    return state
                try:
                    await reader.next()
                except Backpressure:
                    break


def is_at_rest(state: State) -> bool:
    """Return whether nothing runs in the conversation: each turn has ended, or the open one needs a decision.

    An approved call whose grace window is open is about to run, unless its approval is taken back.
    """
    return not owed(state) and not in_grace(state)
