"""Live events between processes on PostgreSQL: who hears what, and what survives loss, garbage and restarts."""

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

WIRES = "FROM pg_stat_activity WHERE query LIKE '%pg_notify(channel%' AND pid <> pg_backend_pid()"


@pytest.fixture
def url():
    """A new schema in PostgreSQL."""
    with pg.temporary(lease=30) as url:
        yield url


class End:
    """One process's end of the wire, and all that it has heard."""

    def __init__(self, url):
        self.wire = PostgresTransport(parse_address(url))
        self.told = []

    async def __aenter__(self):
        await self.wire.start()
        self._task = asyncio.create_task(self._hear())
        return self

    async def __aexit__(self, *_):
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.wire.stop()

    async def _hear(self):
        while True:
            self.told += await self.wire.receive()

    @property
    def items(self):
        return [heard.item for heard in self.told if heard.item is not None]

    @property
    def asked(self):
        return [heard.conversation for heard in self.told if heard.item is None]


@asynccontextmanager
async def ends(url, count):
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(End(url)) for _ in range(count)]


async def heard_by(one, other, conversation):
    """One listens to it, and the other knows."""
    one.wire.listen([conversation])
    await until(lambda: conversation in other.asked)
    assert other.wire.has_listeners(conversation)


async def statements(url):
    """When each wire's connection last did something, by the server's own account."""
    return sorted(row[0] for row in await pg.asked(url, f"SELECT state_change {WIRES}"))


# --- who hears what ------------------------------------------------------------------------------------------


async def test_what_is_sent_reaches_those_who_listen_in_order_and_nobody_else(url):
    async with ends(url, 3) as (owner, viewer, other):
        await heard_by(viewer, owner, "c")
        await heard_by(other, owner, "d")
        delivered = []
        other.wire._handle_message = lambda *told: delivered.extend(
            each for each in told if isinstance(each, notify.LiveItems)
        )
        for n in range(300):
            owner.wire.send("c", b"%d" % n)
        await until(lambda: len(viewer.items) == 300)
        assert viewer.told == [LiveMessage("d", None), *(LiveMessage("c", b"%d" % n) for n in range(300))]
        assert delivered == owner.items == []


async def test_two_who_listen_to_the_same_both_hear_it(url):
    async with ends(url, 3) as (owner, one, two):
        await heard_by(one, owner, "c")
        two.wire.listen(["c"])
        await until(lambda: owner.asked == ["c", "c"])
        owner.wire.send("c", b"x")
        await until(lambda: one.items == two.items == [b"x"])


async def test_while_nobody_listens_nothing_is_sent(url):
    async with ends(url, 2) as (owner, viewer):
        await heard_by(viewer, owner, "c")
        await asyncio.sleep(0.1)
        before = await statements(url)
        for _ in range(100):
            owner.wire.send("d", b"x")
            await asyncio.sleep(0.001)
        assert await statements(url) == before
        owner.wire.send("c", b"x")
        await until(lambda: viewer.items)
        assert await statements(url) != before


async def test_whoever_begins_to_listen_and_whoever_asks_again_is_reported(url):
    async with ends(url, 2) as (owner, viewer):
        await heard_by(viewer, owner, "c")
        assert owner.asked == ["c"]
        viewer.wire.listen(["c"])
        await until(lambda: owner.asked == ["c", "c"])
        viewer.wire.listen(["c", "d"])
        await until(lambda: owner.asked == ["c", "c", "d"])  # c's listeners have what they need


async def test_asking_again_is_for_what_came_last_and_not_for_all_that_is_listened_to(url):
    async with ends(url, 2) as (owner, viewer):
        viewer.wire.listen(["a", "b", "c"])
        await until(lambda: owner.asked == ["a", "b", "c"])
        owner.wire.send("b", b"a piece after the one that is missing")
        await until(lambda: viewer.items)
        viewer.wire.listen(["c", "b", "a"])
        await until(lambda: owner.asked == ["a", "b", "c", "b"])


async def test_asking_again_and_again_is_done_a_few_times_a_second(url):
    async with ends(url, 2) as (owner, viewer):
        await heard_by(viewer, owner, "c")
        began = asyncio.get_running_loop().time()
        for _ in range(100):
            viewer.wire.listen(["c"])
            await asyncio.sleep(0.005)
        await asyncio.sleep(notify.ASK_SECONDS)
        passed = asyncio.get_running_loop().time() - began
        await until(lambda: len(owner.asked) >= 3)
        assert len(owner.asked) <= passed / notify.ASK_SECONDS + 3


async def test_whoever_ceases_to_listen_is_sent_nothing_more(url):
    async with ends(url, 2) as (owner, viewer):
        viewer.wire.listen(["c", "d"])
        await until(lambda: owner.wire.has_listeners("d"))
        viewer.wire.listen(["c"])
        await until(lambda: not owner.wire.has_listeners("d"))
        assert owner.wire.has_listeners("c")


async def test_a_process_that_leaves_is_sent_nothing_more(monkeypatch, url):
    """It says so: nobody waits for a heartbeat that stays away."""
    monkeypatch.setattr(notify, "HEARTBEAT_SECONDS", 3600.0)
    monkeypatch.setattr(notify, "PEER_TIMEOUT_SECONDS", 3600.0)

    async with End(url) as owner:
        async with End(url) as viewer:
            await heard_by(viewer, owner, "c")
        await until(lambda: not owner.wire.has_listeners("c"))


async def test_a_process_that_dies_is_forgotten_after_a_while_and_one_that_is_merely_quiet_is_not(monkeypatch, url):
    monkeypatch.setattr(notify, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(
        notify, "PEER_TIMEOUT_SECONDS", 4.0
    )  # the quiet one may stand still for a while, on a busy machine

    async with ends(url, 3) as (owner, quiet, dead):
        await heard_by(quiet, owner, "q")
        await heard_by(dead, owner, "d")
        dead.wire.kill()
        await until(lambda: not owner.wire.has_listeners("d"))
        assert owner.wire.has_listeners("q")
        assert owner.asked == ["q", "d"]


async def test_who_comes_later_learns_at_once_what_the_others_listen_to(monkeypatch, url):
    """Not with the next heartbeat."""
    monkeypatch.setattr(notify, "HEARTBEAT_SECONDS", 3600.0)

    async with End(url) as viewer:
        viewer.wire.listen(["c", "d"])
        async with End(url) as owner:
            await until(lambda: owner.asked == ["c", "d"])
        async with End(url) as another:
            await until(lambda: another.asked == ["c", "d"])


async def test_ten_thousand_conversations_are_listened_to_and_one_more_costs_one(url):
    names = [f"conversation-{n:05d}" for n in range(10_000)]
    async with ends(url, 2) as (owner, viewer):
        viewer.wire.listen(names)
        await until(lambda: owner.asked == names)
        viewer.wire.listen([*names, "one more"])
        await until(lambda: len(owner.asked) > len(names))
        assert owner.asked == [*names, "one more"]
        async with End(url) as late:
            await until(lambda: len(late.asked) == 10_001)
            assert owner.asked == [*names, "one more"]  # who knew it is not told anew
            late.wire.send(names[7], b"x")
            await until(lambda: viewer.told == [LiveMessage(names[7], b"x")])
        viewer.wire.listen([])
        await until(lambda: not any(map(owner.wire.has_listeners, names)))


# --- what is sent --------------------------------------------------------------------------------------------


async def test_an_item_of_200_kb_arrives_whole_between_small_ones(url):
    large = random.Random(1).randbytes(200_000)
    async with ends(url, 2) as (owner, viewer):
        await heard_by(viewer, owner, "c")
        for item in (b"before", large, b"after", b""):
            owner.wire.send("c", item)
        await until(lambda: len(viewer.items) == 4)
        assert viewer.items == [b"before", large, b"after", b""]


async def test_what_is_sent_at_about_the_same_time_goes_in_one_statement(url):
    async with ends(url, 2) as (owner, viewer):
        viewer.wire.listen([f"c{n}" for n in range(100)])
        await until(lambda: owner.wire.has_listeners("c99"))
        before = owner.wire.statements
        for n in range(100):
            for piece in range(10):
                owner.wire.send(f"c{n}", b"%d" % piece)
        await until(lambda: len(viewer.items) == 1000)
        assert owner.wire.statements - before <= 2


@given(st.binary(max_size=4 * PART_BYTES), st.integers(1, 10**12))
def test_a_message_is_cut_into_payloads_that_postgresql_takes_and_joined_again(message, number):
    payloads = split_message("0123456789ab", number, message)
    assert max(len(payload.encode()) for payload in payloads) < 8000
    joining = MessageAssembler()
    *none, whole = [joining.add_part(part(payload)) for payload in payloads]
    assert whole == message
    assert set(none) <= {None}


def test_the_largest_head_fits_before_the_largest_part():
    assert len(split_message("f" * 12, 10**15 - 1, bytes(PART_BYTES * MAX_PARTS))[-1]) < 8000


@given(st.data())
def test_of_parts_that_are_lost_or_late_only_whole_messages_remain_once_and_in_order(data):
    messages = [bytes([n]) * data.draw(st.integers(1, 3 * PART_BYTES)) for n in range(1, 6)]
    parts = [part(text) for n, message in enumerate(messages, 1) for text in split_message("0123456789ab", n, message)]
    lost = data.draw(st.sets(st.integers(0, len(parts) - 1), max_size=3))
    late = data.draw(st.lists(st.sampled_from(parts), max_size=3))
    joining = MessageAssembler()
    sent = [each for i, each in enumerate(parts) if i not in lost] + late
    joined = [message for each in sent if (message := joining.add_part(each)) is not None]
    assert joined == [message for message in messages if message in joined]
    torn = {parts[i].number for i in lost}
    assert all(message in joined for n, message in enumerate(messages, 1) if n not in torn)


def test_a_part_that_came_twice_does_not_stand_for_one_that_is_missing():
    first, _, last = (part(text) for text in split_message("0123456789ab", 1, bytes(3 * PART_BYTES)))
    joining = MessageAssembler()
    assert [joining.add_part(each) for each in (first, first, last)] == [None, None, None]


def test_what_waits_is_bounded_and_the_oldest_goes_first():
    buffer = MessageBuffer(max_bytes=1000)
    for n in range(100):
        buffer.push(LiveMessage("c", b"%100d" % n))
    buffer.push(LiveMessage("c", bytes(2000)))  # it would displace all others, and not fit even so
    assert [int(each.item or b"") for each in buffer.pop_batch(400)] == [94, 95]
    assert [int(each.item or b"") for each in buffer.pop_batch()] == [96, 97, 98, 99]
    assert not buffer


# --- what goes wrong -----------------------------------------------------------------------------------------


async def test_garbage_on_the_channels_is_ignored_and_whoever_sends_it_is_nobody(url):
    forged = "abcdefabcdef"
    garbage = [
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
    async with ends(url, 2) as (owner, viewer):
        await heard_by(viewer, owner, "c")
        channels = [owner.wire._all, *(end.wire._peer_channel(end.wire._id) for end in (owner, viewer))]
        for channel in channels:
            for payload in garbage:
                await pg.asked(url, "SELECT pg_notify($1, $2)", channel, payload)
        owner.wire.send("c", b"x")
        await until(lambda: viewer.items == [b"x"])
        assert owner.asked == ["c"]
        assert not viewer.asked
    assert not raised


async def test_a_change_that_was_lost_is_found_at_the_next_sign_of_life(monkeypatch, url):
    monkeypatch.setattr(notify, "HEARTBEAT_SECONDS", 0.2)

    viewer, owner = End(url), End(url)
    take, losing = owner.wire._on_payload, False
    owner.wire._on_payload = lambda payload: None if losing else take(payload)
    async with viewer, owner:
        await heard_by(viewer, owner, "c")
        losing = True
        viewer.wire.listen(["c", "d"])
        await until(lambda: viewer.wire._announced == {"c", "d"})
        await asyncio.sleep(0.1)
        losing = False
        await until(lambda: "d" in owner.asked)
        assert owner.wire.has_listeners("d")


async def test_a_wire_whose_connections_are_ended_asks_again_by_itself(url):
    async with ends(url, 3) as (owner, viewer, third):
        await heard_by(viewer, owner, "c")
        await until(lambda: third.wire.has_listeners("c"))

        async def all_there():
            return len(await pg.asked(url, f"SELECT pid {WIRES}")) == 3

        for round in range(2, 5):
            await until(all_there)
            assert len(await pg.asked(url, f"SELECT pg_terminate_backend(pid) {WIRES}")) == 3
            await until(lambda round=round: len(owner.asked) >= round and owner.wire.has_listeners("c"))
            owner.wire.send("c", b"%d" % round)
            await until(lambda round=round: b"%d" % round in viewer.items)


async def test_when_only_the_owners_connection_was_lost_it_learns_anew_who_listens(url):
    port = pg.server().port
    async with Proxy(port) as proxy, End(url) as viewer:
        through = pg.server().url(tcp=True, holdfast_schema=pg.schema_of(url)).replace(f":{port}", f":{proxy.port}")
        async with End(through) as owner:
            await heard_by(viewer, owner, "c")
            with proxy.away():
                await until(lambda: not owner.wire.has_listeners("c"))
                owner.wire.send("c", b"nobody is there as far as is known")
            await until(lambda: owner.asked == ["c", "c"])
            owner.wire.send("c", b"x")
            await until(lambda: viewer.items == [b"x"])


@pytest.mark.parametrize("silent", ["owner", "viewer"])
async def test_a_connection_that_falls_silent_is_replaced(monkeypatch, silent, url):
    monkeypatch.setattr(notify, "HEARTBEAT_SECONDS", 0.1)

    port = pg.server().port
    async with Proxy(port) as proxy:
        through = pg.server().url(tcp=True, holdfast_schema=pg.schema_of(url), holdfast_lease=1)
        through = through.replace(f":{port}", f":{proxy.port}")
        at = {"owner": url, "viewer": url, silent: through}
        async with End(at["owner"]) as owner, End(at["viewer"]) as viewer:
            await heard_by(viewer, owner, "c")
            first = {"owner": owner, "viewer": viewer}[silent].wire._link
            with proxy.silent():
                await until(lambda: first.is_closed)
            await until(lambda: len(owner.asked) >= 2)
            owner.wire.send("c", b"x")
            await until(lambda: viewer.items[-1:] == [b"x"])


async def test_a_database_that_stands_still_stops_nobody_and_what_waits_stays_bounded(url):
    async with ends(url, 2) as (owner, viewer):
        await heard_by(viewer, owner, "c")
        with pg.server().frozen():
            for n in range(200):
                owner.wire.send("c", b"%100000d" % n)
            assert owner.wire._sending._size <= notify.MAX_BUFFER_BYTES
        await until(lambda: viewer.items and int(viewer.items[-1]) == 199)
        numbers = [int(item) for item in viewer.items]
        assert numbers == sorted(numbers)
        assert len(numbers) < 60


async def test_a_wire_without_a_database_says_so_when_it_starts_and_can_be_stopped_all_the_same(url):
    end = PostgresTransport(parse_address("postgresql://nobody@127.0.0.1:1/nowhere"))
    with pytest.raises(StoreError, match="nothing listens there"):
        await end.start()
    end.listen(["c"])
    end.send("c", b"x")
    assert not end.has_listeners("c")
    await end.stop()


# --- runtimes ------------------------------------------------------------------------------------------------


class Slow:
    """A model that says a word whenever it is let, and at last that it has said all."""

    name = "slow"

    def __init__(self, words):
        self.words, self.said, self.go = words, 0, asyncio.Semaphore(0)

    async def stream(self, request):
        for word in self.words:
            await self.go.acquire()
            self.said += 1
            yield TextPart(word)
        await self.go.acquire()
        yield FinishPart()


class Viewer:
    """Somebody who looks at a conversation: the pieces of the reply as they come."""

    def __init__(self, rt, conversation):
        self.pieces = []
        self._task = asyncio.create_task(self._look(rt.events(conversation)))

    async def _look(self, events):
        async for event in events:
            if isinstance(event, TextDelta):
                self.pieces.append((event.n, event.text))

    async def leave(self):
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def ended(rt, name):
    return any(isinstance(event, TurnEnded) for event in await rt.history(name))


def pieces(words):
    return list(enumerate(words, 1))


async def test_viewers_at_two_other_processes_see_the_reply_stream_and_what_was_said_before_they_looked(url):
    """B12, B53"""
    model = Slow(["Good ", "morning ", "to ", "you"])
    async with (
        Runtime(Agent("a", model=model), store=PostgresStore(url)) as owner,
        Runtime(store=PostgresStore(url)) as one,
        Runtime(store=PostgresStore(url)) as two,
    ):
        await owner.send("c", "hello")
        model.go.release()
        await until(lambda: model.said == 1)
        viewers = [Viewer(one, "c"), Viewer(two, "c")]
        await until(lambda: all(viewer.pieces == pieces(model.words[:1]) for viewer in viewers))
        model.go.release()
        await until(lambda: all(viewer.pieces == pieces(model.words[:2]) for viewer in viewers))
        seen = await one.snapshot("c")
        assert (seen.state, seen.partial) == ("streaming", "Good morning ")
        model.go.release()
        model.go.release()
        await until(lambda: all(viewer.pieces == pieces(model.words) for viewer in viewers))
        model.go.release()
        await until(lambda: ended(two, "c"))
        for viewer in viewers:
            await viewer.leave()
        await until(lambda: not owner.store.transport.has_listeners("c"))


async def streamed_through(url, words, trouble):
    """A reply that streams while something happens in its middle: the viewer elsewhere has all of it in the end."""
    model = Slow(words)
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
        await until(lambda: viewer.pieces == pieces(words[:half]))
        await trouble(model)
        await until(lambda: viewer.pieces == pieces(words[: model.said]))  # by itself, before anything more is said
        assert model.said == half + 1
        assert (await other.snapshot("c")).partial == "".join(words[: model.said])
        for _ in words[model.said :]:
            model.go.release()
        await until(lambda: viewer.pieces == pieces(words))
        model.go.release()
        await until(lambda: ended(other, "c"))
        (said,) = [event for event in await other.history("c") if isinstance(event, AssistantSaid)]
        assert said.text == "".join(words)
        await viewer.leave()


async def test_postgresql_restarts_in_mid_reply_and_the_viewer_has_all_of_it_and_the_history_too(url):
    async def restart(model):
        pg.server().halt()
        model.go.release()  # said while nobody can be told
        await until(lambda: model.said == 5)
        await asyncio.to_thread(pg.server().start)

    await streamed_through(url, [f"word{n} " for n in range(8)], restart)


async def test_the_wires_connections_are_ended_in_mid_reply_and_the_viewer_has_all_of_it(url):
    async def end(model):
        assert len(await pg.asked(url, f"SELECT pg_terminate_backend(pid) {WIRES}")) == 2
        model.go.release()
        await until(lambda: model.said == 5)

    await streamed_through(url, [f"word{n} " for n in range(8)], end)


async def test_a_reply_of_200_kb_is_told_to_whoever_looks_late(url):
    model = Slow(["x" * 100_000, "y" * 100_000, "."])
    async with (
        Runtime(Agent("a", model=model), store=PostgresStore(url)) as owner,
        Runtime(store=PostgresStore(url)) as other,
    ):
        await owner.send("c", "hello")
        model.go.release()
        model.go.release()
        await until(lambda: model.said == 2)
        viewer = Viewer(other, "c")
        await until(lambda: viewer.pieces == pieces(model.words[:2]))
        model.go.release()
        await until(lambda: viewer.pieces == pieces(model.words))
        await viewer.leave()
