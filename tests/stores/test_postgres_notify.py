"""Live events between processes on PostgreSQL: delivery to listeners, lost and invalid payloads, restarts."""

import asyncio
import random
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import pg
from support.async_tests import until
from support.pgproxy import Proxy

from holdfast import Agent, Runtime
from holdfast.core.events import AssistantSaid, TurnEnded
from holdfast.core.live import TextDelta
from holdfast.errors import StoreError
from holdfast.models.base import FinishPart, TextPart
from holdfast.stores.base import LiveMessage
from holdfast.stores.postgres import PostgresStore, notify
from holdfast.stores.postgres.notify import (
    MAX_PARTS,
    PART_BYTES,
    MessageAssembler,
    MessageBuffer,
    PostgresTransport,
    split_message,
)
from holdfast.stores.postgres.notify import parse_part as part
from holdfast.stores.postgres.url import parse_address

TRANSPORT_BACKENDS = "FROM pg_stat_activity WHERE query LIKE '%pg_notify(channel%' AND pid <> pg_backend_pid()"


@pytest.fixture
def url():
    """A new schema in PostgreSQL."""
    with pg.temporary(lease=30) as url:
        yield url


class Endpoint:
    """One process's transport, with all messages that it has received."""

    def __init__(self, url):
        self.transport = PostgresTransport(parse_address(url))
        self.received = []

    async def __aenter__(self):
        await self.transport.start()
        self._task = asyncio.create_task(self._receive())
        return self

    async def __aexit__(self, *_):
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.transport.stop()

    async def _receive(self):
        while True:
            self.received += await self.transport.receive()

    @property
    def items(self):
        return [message.item for message in self.received if message.item is not None]

    @property
    def requests(self):
        return [message.conversation for message in self.received if message.item is None]


@asynccontextmanager
async def endpoints(url, count):
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Endpoint(url)) for _ in range(count)]


async def listen_and_wait(listener, sender, conversation):
    """Have one endpoint listen to a conversation, and wait until the other knows."""
    listener.transport.listen([conversation])
    await until(lambda: conversation in sender.requests)
    assert sender.transport.has_listeners(conversation)


async def activity(url):
    """Return when the server last saw activity on each transport's connection."""
    return sorted(row[0] for row in await pg.asked(url, f"SELECT state_change {TRANSPORT_BACKENDS}"))


# --- listeners -----------------------------------------------------------------------------------------------


async def test_messages_reach_the_listeners_of_their_conversation_in_order_and_no_other_process(url):
    async with endpoints(url, 3) as (owner, viewer, other):
        await listen_and_wait(viewer, owner, "c")
        await listen_and_wait(other, owner, "d")
        delivered = []
        other.transport._handle_message = lambda *messages: delivered.extend(
            each for each in messages if isinstance(each, notify.LiveItems)
        )
        for n in range(300):
            owner.transport.send("c", b"%d" % n)
        await until(lambda: len(viewer.items) == 300)
        assert viewer.received == [LiveMessage("d", None), *(LiveMessage("c", b"%d" % n) for n in range(300))]
        assert delivered == owner.items == []


async def test_two_listeners_of_a_conversation_both_receive_its_messages(url):
    async with endpoints(url, 3) as (owner, one, two):
        await listen_and_wait(one, owner, "c")
        two.transport.listen(["c"])
        await until(lambda: owner.requests == ["c", "c"])
        owner.transport.send("c", b"x")
        await until(lambda: one.items == two.items == [b"x"])


async def test_messages_of_a_conversation_without_listeners_are_not_sent(url):
    async with endpoints(url, 2) as (owner, viewer):
        await listen_and_wait(viewer, owner, "c")
        await asyncio.sleep(0.1)
        before = await activity(url)
        for _ in range(100):
            owner.transport.send("d", b"x")
            await asyncio.sleep(0.001)
        assert await activity(url) == before
        owner.transport.send("c", b"x")
        await until(lambda: viewer.items)
        assert await activity(url) != before


async def test_new_and_repeated_requests_to_listen_are_reported_to_the_owner(url):
    async with endpoints(url, 2) as (owner, viewer):
        await listen_and_wait(viewer, owner, "c")
        assert owner.requests == ["c"]
        viewer.transport.listen(["c"])
        await until(lambda: owner.requests == ["c", "c"])
        viewer.transport.listen(["c", "d"])
        await until(lambda: owner.requests == ["c", "c", "d"])  # c is not requested again with d


async def test_a_repeated_request_is_sent_only_for_the_conversation_of_the_last_message(url):
    async with endpoints(url, 2) as (owner, viewer):
        viewer.transport.listen(["a", "b", "c"])
        await until(lambda: owner.requests == ["a", "b", "c"])
        owner.transport.send("b", b"a message after a lost one")
        await until(lambda: viewer.items)
        viewer.transport.listen(["c", "b", "a"])
        await until(lambda: owner.requests == ["a", "b", "c", "b"])


async def test_repeated_requests_to_listen_are_throttled(url):
    async with endpoints(url, 2) as (owner, viewer):
        await listen_and_wait(viewer, owner, "c")
        started = asyncio.get_running_loop().time()
        for _ in range(100):
            viewer.transport.listen(["c"])
            await asyncio.sleep(0.005)
        await asyncio.sleep(notify.ASK_SECONDS)
        passed = asyncio.get_running_loop().time() - started
        await until(lambda: len(owner.requests) >= 3)
        assert len(owner.requests) <= passed / notify.ASK_SECONDS + 3


async def test_a_process_that_stops_listening_to_a_conversation_is_no_listener_of_it(url):
    async with endpoints(url, 2) as (owner, viewer):
        viewer.transport.listen(["c", "d"])
        await until(lambda: owner.transport.has_listeners("d"))
        viewer.transport.listen(["c"])
        await until(lambda: not owner.transport.has_listeners("d"))
        assert owner.transport.has_listeners("c")


async def test_a_process_that_closes_its_transport_is_no_listener_any_more(monkeypatch, url):
    """It announces its end, so that the owner need not wait for the heartbeat timeout."""
    monkeypatch.setattr(notify, "HEARTBEAT_SECONDS", 3600.0)
    monkeypatch.setattr(notify, "PEER_TIMEOUT_SECONDS", 3600.0)

    async with Endpoint(url) as owner:
        async with Endpoint(url) as viewer:
            await listen_and_wait(viewer, owner, "c")
        await until(lambda: not owner.transport.has_listeners("c"))


async def test_a_dead_listener_is_removed_after_the_heartbeat_timeout_and_a_quiet_one_is_kept(monkeypatch, url):
    monkeypatch.setattr(notify, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(notify, "PEER_TIMEOUT_SECONDS", 4.0)  # long enough for the quiet one on a busy machine

    async with endpoints(url, 3) as (owner, quiet, dead):
        await listen_and_wait(quiet, owner, "q")
        await listen_and_wait(dead, owner, "d")
        dead.transport.kill()
        await until(lambda: not owner.transport.has_listeners("d"))
        assert owner.transport.has_listeners("q")
        assert owner.requests == ["q", "d"]


async def test_a_new_process_learns_at_once_what_other_processes_listen_to(monkeypatch, url):
    """It does not wait for the next heartbeat."""
    monkeypatch.setattr(notify, "HEARTBEAT_SECONDS", 3600.0)

    async with Endpoint(url) as viewer:
        viewer.transport.listen(["c", "d"])
        async with Endpoint(url) as owner:
            await until(lambda: owner.requests == ["c", "d"])
        async with Endpoint(url) as another:
            await until(lambda: another.requests == ["c", "d"])


async def test_a_listener_of_ten_thousand_conversations_announces_only_the_one_that_it_adds(url):
    names = [f"conversation-{n:05d}" for n in range(10_000)]
    async with endpoints(url, 2) as (owner, viewer):
        viewer.transport.listen(names)
        await until(lambda: owner.requests == names)
        viewer.transport.listen([*names, "one more"])
        await until(lambda: len(owner.requests) > len(names))
        assert owner.requests == [*names, "one more"]
        async with Endpoint(url) as late:
            await until(lambda: len(late.requests) == 10_001)
            assert owner.requests == [*names, "one more"]  # not announced again to a process that knows it
            late.transport.send(names[7], b"x")
            await until(lambda: viewer.received == [LiveMessage(names[7], b"x")])
        viewer.transport.listen([])
        await until(lambda: not any(map(owner.transport.has_listeners, names)))


# --- messages ------------------------------------------------------------------------------------------------


async def test_a_message_of_200_kb_arrives_whole_and_in_order(url):
    large = random.Random(1).randbytes(200_000)
    async with endpoints(url, 2) as (owner, viewer):
        await listen_and_wait(viewer, owner, "c")
        for item in (b"before", large, b"after", b""):
            owner.transport.send("c", item)
        await until(lambda: len(viewer.items) == 4)
        assert viewer.items == [b"before", large, b"after", b""]


async def test_messages_that_are_sent_at_the_same_time_share_statements(url):
    async with endpoints(url, 2) as (owner, viewer):
        viewer.transport.listen([f"c{n}" for n in range(100)])
        await until(lambda: owner.transport.has_listeners("c99"))
        before = owner.transport.statements
        for n in range(100):
            for piece in range(10):
                owner.transport.send(f"c{n}", b"%d" % piece)
        await until(lambda: len(viewer.items) == 1000)
        assert owner.transport.statements - before <= 2


@given(st.binary(max_size=4 * PART_BYTES), st.integers(1, 10**12))
def test_a_message_is_split_into_payloads_below_the_limit_of_postgresql_and_joined_again(message, number):
    payloads = split_message("0123456789ab", number, message)
    assert max(len(payload.encode()) for payload in payloads) < 8000
    joining = MessageAssembler()
    *none, whole = [joining.add_part(part(payload)) for payload in payloads]
    assert whole == message
    assert set(none) <= {None}


def test_the_largest_part_fits_into_a_payload_with_the_largest_header():
    assert len(split_message("f" * 12, 10**15 - 1, bytes(PART_BYTES * MAX_PARTS))[-1]) < 8000


@given(st.data())
def test_lost_and_late_parts_leave_only_whole_messages_once_and_in_order(data):
    messages = [bytes([n]) * data.draw(st.integers(1, 3 * PART_BYTES)) for n in range(1, 6)]
    parts = [part(text) for n, message in enumerate(messages, 1) for text in split_message("0123456789ab", n, message)]
    lost = data.draw(st.sets(st.integers(0, len(parts) - 1), max_size=3))
    late = data.draw(st.lists(st.sampled_from(parts), max_size=3))
    joining = MessageAssembler()
    sent = [each for i, each in enumerate(parts) if i not in lost] + late
    joined = [message for each in sent if (message := joining.add_part(each)) is not None]
    assert joined == [message for message in messages if message in joined]
    incomplete = {parts[i].number for i in lost}
    assert all(message in joined for n, message in enumerate(messages, 1) if n not in incomplete)


def test_a_duplicate_part_does_not_count_as_a_missing_one():
    first, _, last = (part(text) for text in split_message("0123456789ab", 1, bytes(3 * PART_BYTES)))
    joining = MessageAssembler()
    assert [joining.add_part(each) for each in (first, first, last)] == [None, None, None]


def test_a_message_buffer_is_bounded_and_drops_its_oldest_messages():
    buffer = MessageBuffer(max_bytes=1000)
    for n in range(100):
        buffer.push(LiveMessage("c", b"%100d" % n))
    buffer.push(LiveMessage("c", bytes(2000)))  # larger than the buffer: it is not added
    assert [int(each.item or b"") for each in buffer.pop_batch(400)] == [94, 95]
    assert [int(each.item or b"") for each in buffer.pop_batch()] == [96, 97, 98, 99]
    assert not buffer


# --- faults --------------------------------------------------------------------------------------------------


async def test_invalid_payloads_on_the_channels_are_ignored(url):
    forged = "abcdefabcdef"
    payloads = [
        "",
        "hello",
        "{}",
        f"{forged} 1 0 1 not base64",
        f"{forged} 2 0 1 AAAA",  # no message
        f"{forged} 3 0 1 kadzb21ldGg=",  # an unknown one
        f"{forged} 4 5 2 AAAA",
        f"{forged} 5 0 9999 AAAA",
        f"{forged} 99999999999999999999 0 1 AAAA",
        "'; DROP TABLE events; -- 1 0 1 AAAA",
        "\u00e9" * 3000,
    ]
    raised = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: raised.append(context))
    async with endpoints(url, 2) as (owner, viewer):
        await listen_and_wait(viewer, owner, "c")
        channels = [owner.transport._all, *(end.transport._peer_channel(end.transport._id) for end in (owner, viewer))]
        for channel in channels:
            for payload in payloads:
                await pg.asked(url, "SELECT pg_notify($1, $2)", channel, payload)
        owner.transport.send("c", b"x")
        await until(lambda: viewer.items == [b"x"])
        assert owner.requests == ["c"]
        assert not viewer.requests
    assert not raised


async def test_a_lost_request_to_listen_is_recovered_at_the_next_heartbeat(monkeypatch, url):
    monkeypatch.setattr(notify, "HEARTBEAT_SECONDS", 0.2)

    viewer, owner = Endpoint(url), Endpoint(url)
    on_payload, losing = owner.transport._on_payload, False
    owner.transport._on_payload = lambda payload: None if losing else on_payload(payload)
    async with viewer, owner:
        await listen_and_wait(viewer, owner, "c")
        losing = True
        viewer.transport.listen(["c", "d"])
        await until(lambda: viewer.transport._announced == {"c", "d"})
        await asyncio.sleep(0.1)
        losing = False
        await until(lambda: "d" in owner.requests)
        assert owner.transport.has_listeners("d")


async def test_transports_reconnect_and_listen_again_after_their_connections_were_terminated(url):
    async with endpoints(url, 3) as (owner, viewer, third):
        await listen_and_wait(viewer, owner, "c")
        await until(lambda: third.transport.has_listeners("c"))

        async def are_connected():
            return len(await pg.asked(url, f"SELECT pid {TRANSPORT_BACKENDS}")) == 3

        for round in range(2, 5):
            await until(are_connected)
            assert len(await pg.asked(url, f"SELECT pg_terminate_backend(pid) {TRANSPORT_BACKENDS}")) == 3
            await until(lambda round=round: len(owner.requests) >= round and owner.transport.has_listeners("c"))
            owner.transport.send("c", b"%d" % round)
            await until(lambda round=round: b"%d" % round in viewer.items)


async def test_an_owner_that_reconnects_learns_its_listeners_again(url):
    port = pg.server().port
    async with Proxy(port) as proxy, Endpoint(url) as viewer:
        through = pg.server().url(tcp=True, holdfast_schema=pg.schema_of(url)).replace(f":{port}", f":{proxy.port}")
        async with Endpoint(through) as owner:
            await listen_and_wait(viewer, owner, "c")
            with proxy.away():
                await until(lambda: not owner.transport.has_listeners("c"))
                owner.transport.send("c", b"no listener is known")
            await until(lambda: owner.requests == ["c", "c"])
            owner.transport.send("c", b"x")
            await until(lambda: viewer.items == [b"x"])


@pytest.mark.parametrize("silent", ["owner", "viewer"])
async def test_a_silent_connection_is_replaced(monkeypatch, silent, url):
    monkeypatch.setattr(notify, "HEARTBEAT_SECONDS", 0.1)

    port = pg.server().port
    async with Proxy(port) as proxy:
        through = pg.server().url(tcp=True, holdfast_schema=pg.schema_of(url), holdfast_lease=1)
        through = through.replace(f":{port}", f":{proxy.port}")
        at = {"owner": url, "viewer": url, silent: through}
        async with Endpoint(at["owner"]) as owner, Endpoint(at["viewer"]) as viewer:
            await listen_and_wait(viewer, owner, "c")
            first = {"owner": owner, "viewer": viewer}[silent].transport._link
            with proxy.silent():
                await until(lambda: first.is_closed)
            await until(lambda: len(owner.requests) >= 2)
            owner.transport.send("c", b"x")
            await until(lambda: viewer.items[-1:] == [b"x"])


async def test_a_frozen_database_does_not_block_the_sender_and_its_buffer_stays_bounded(url):
    async with endpoints(url, 2) as (owner, viewer):
        await listen_and_wait(viewer, owner, "c")
        with pg.server().frozen():
            for n in range(200):
                owner.transport.send("c", b"%100000d" % n)
            assert owner.transport._sending._size <= notify.MAX_BUFFER_BYTES
        await until(lambda: viewer.items and int(viewer.items[-1]) == 199)
        numbers = [int(item) for item in viewer.items]
        assert numbers == sorted(numbers)
        assert len(numbers) < 60


async def test_a_transport_without_a_database_fails_to_start_and_can_still_be_stopped(url):
    end = PostgresTransport(parse_address("postgresql://nobody@127.0.0.1:1/nowhere"))
    with pytest.raises(StoreError, match="nothing listens there"):
        await end.start()
    end.listen(["c"])
    end.send("c", b"x")
    assert not end.has_listeners("c")
    await end.stop()


# --- runtimes ------------------------------------------------------------------------------------------------


class SteppedModel:
    """A model that emits one word for each release of ``go``, and one more release ends its reply."""

    name = "stepped"

    def __init__(self, words):
        self.words, self.emitted, self.go = words, 0, asyncio.Semaphore(0)

    async def stream(self, request):
        for word in self.words:
            await self.go.acquire()
            self.emitted += 1
            yield TextPart(word)
        await self.go.acquire()
        yield FinishPart()


class Viewer:
    """A viewer of a conversation, with the numbered pieces of the reply that it has received."""

    def __init__(self, rt, conversation):
        self.pieces = []
        self._task = asyncio.create_task(self._watch(rt.events(conversation)))

    async def _watch(self, events):
        async for event in events:
            if isinstance(event, TextDelta):
                self.pieces.append((event.n, event.text))

    async def stop(self):
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def has_ended(rt, name):
    return any(isinstance(event, TurnEnded) for event in await rt.history(name))


def number_words(words):
    return list(enumerate(words, 1))


async def test_viewers_of_two_other_runtimes_receive_the_streamed_reply_from_its_beginning(url):
    """Viewers in other processes see the reply stream, with the text that came before they joined [B12, B53]."""
    model = SteppedModel(["Good ", "morning ", "to ", "you"])
    async with (
        Runtime(Agent("a", model=model), store=PostgresStore(url)) as owner,
        Runtime(store=PostgresStore(url)) as one,
        Runtime(store=PostgresStore(url)) as two,
    ):
        await owner.send("c", "hello")
        model.go.release()
        await until(lambda: model.emitted == 1)
        viewers = [Viewer(one, "c"), Viewer(two, "c")]
        await until(lambda: all(viewer.pieces == number_words(model.words[:1]) for viewer in viewers))
        model.go.release()
        await until(lambda: all(viewer.pieces == number_words(model.words[:2]) for viewer in viewers))
        seen = await one.snapshot("c")
        assert (seen.state, seen.partial) == ("streaming", "Good morning ")
        model.go.release()
        model.go.release()
        await until(lambda: all(viewer.pieces == number_words(model.words) for viewer in viewers))
        model.go.release()
        await until(lambda: has_ended(two, "c"))
        for viewer in viewers:
            await viewer.stop()
        await until(lambda: not owner.store.transport.has_listeners("c"))


async def check_stream_across_fault(url, words, fault):
    """Stream a reply with a fault in its middle, and check that a viewer of another runtime receives all of it."""
    model = SteppedModel(words)
    async with (
        Runtime(Agent("a", model=model), store=PostgresStore(url)) as owner,
        Runtime(store=PostgresStore(url)) as other,
    ):
        await owner.send("c", "hello")
        viewer = Viewer(other, "c")
        await until(lambda: owner.store.transport.has_listeners("c"))
        half = len(words) // 2
        for _ in range(half):
            model.go.release()
        await until(lambda: viewer.pieces == number_words(words[:half]))
        await fault(model)
        await until(lambda: viewer.pieces == number_words(words[: model.emitted]))  # before the model emits more
        assert model.emitted == half + 1
        assert (await other.snapshot("c")).partial == "".join(words[: model.emitted])
        for _ in words[model.emitted :]:
            model.go.release()
        await until(lambda: viewer.pieces == number_words(words))
        model.go.release()
        await until(lambda: has_ended(other, "c"))
        (message,) = [event for event in await other.history("c") if isinstance(event, AssistantSaid)]
        assert message.text == "".join(words)
        await viewer.stop()


async def test_a_viewer_receives_the_whole_reply_although_postgresql_restarts_during_it(url):
    async def restart(model):
        pg.server().halt()
        model.go.release()  # emitted while no viewer can be reached
        await until(lambda: model.emitted == 5)
        await asyncio.to_thread(pg.server().start)

    await check_stream_across_fault(url, [f"word{n} " for n in range(8)], restart)


async def test_a_viewer_receives_the_whole_reply_although_the_transports_are_disconnected(url):
    async def end(model):
        assert len(await pg.asked(url, f"SELECT pg_terminate_backend(pid) {TRANSPORT_BACKENDS}")) == 2
        model.go.release()
        await until(lambda: model.emitted == 5)

    await check_stream_across_fault(url, [f"word{n} " for n in range(8)], end)


async def test_a_late_viewer_receives_a_reply_of_200_kb_from_its_beginning(url):
    model = SteppedModel(["x" * 100_000, "y" * 100_000, "."])
    async with (
        Runtime(Agent("a", model=model), store=PostgresStore(url)) as owner,
        Runtime(store=PostgresStore(url)) as other,
    ):
        await owner.send("c", "hello")
        model.go.release()
        model.go.release()
        await until(lambda: model.emitted == 2)
        viewer = Viewer(other, "c")
        await until(lambda: viewer.pieces == number_words(model.words[:2]))
        model.go.release()
        await until(lambda: viewer.pieces == number_words(model.words))
        await viewer.stop()
