"""Event streams: they resume after any event, encode each event once, are bounded, and end with the server."""

import asyncio
import gc
import json
import socket
import time
import tracemalloc

from support.web_site import TOKEN, desk, refund_agent, site

from holdfast import Agent, Deny, Runtime
from holdfast.core.live import ToolProgress
from holdfast.errors import StoreError
from holdfast.models import FinishPart, TextPart
from holdfast.runtime.pending_calls import inbox
from holdfast.server import Limits, api_types, app, limits, routes, streams
from holdfast.stores.memory import MemoryStore

C = "/api/conversations/c"


def ids(events):
    """Return the sequence numbers of the log events among these; live events have none."""
    return [place for _, place, _ in events if place is not None]


async def test_a_stream_is_resumed_after_any_event():
    async with site(refund_agent()) as s:
        await s.begin()
        [entry] = await s.pending()
        await s.post(f"{C}/calls/{entry['call']}/resolve", {"decision": {"type": "deny", "reason": "no"}})
        head = (await s.idle())["seq"]
        log = (await s.get(f"{C}/log"))["events"]
        for seq in range(head):
            for options in (
                {"params": {"after": seq}},
                {"headers": {"last-event-id": str(seq)}, "params": {"after": 99}},
            ):
                async with s.events(f"{C}/events", **options) as reader:
                    received = [await reader.next() for _ in range(head - seq)]
                    assert [data for _, _, data in received] == log[seq:]
                    assert ids(received) == list(range(seq + 1, head + 1))
                    assert [kind for kind, _, _ in received] == [e["type"] for e in log[seq:]]


async def test_a_reader_gets_the_log_and_then_live_events_as_they_happen():
    """Deltas arrive in order, and only events of the log have an id [B12]."""
    async with site(desk("hello there")) as s:
        await s.post("/api/conversations", {"id": "c"}, 201)
        async with s.events(f"{C}/events") as reader:
            assert (await reader.next())[:2] == ("ConversationOpened", 1)
            await s.post(f"{C}/messages", {"text": "hi"}, 202)
            received = await reader.until("turn_completed")
            assert ids(received) == list(range(2, ids(received)[-1] + 1))
            deltas = [data for kind, place, data in received if kind == "text_delta"]
            assert "".join(d["text"] for d in deltas) == "hello there"
            assert [d["n"] for d in deltas] == list(range(1, len(deltas) + 1))
            live = [place for kind, place, _ in received if kind.islower()]
            assert live
            assert set(live) == {None}


async def test_a_viewer_that_joins_while_a_reply_streams_misses_no_delta():
    """The number of the last delta in the snapshot says where the stream continues."""
    go_on = asyncio.Event()

    class Slow:
        name = "slow"

        async def stream(self, request):
            for word in ("one ", "two ", "three "):
                yield TextPart(word)
            await go_on.wait()
            yield TextPart("four")
            yield FinishPart()

    async with site(Agent("slow", model=Slow())) as s:
        await s.begin()
        async with s.events(f"{C}/events") as first:
            while (snapshot := await s.get(C))["partial_n"] < 3:
                await asyncio.sleep(0.005)
            async with s.events(f"{C}/events", params={"after": snapshot["seq"]}) as second:
                go_on.set()
                text, n = snapshot["partial"], snapshot["partial_n"]
                for kind, _, data in await second.until("message_completed"):
                    if kind == "text_delta" and data["n"] > n:
                        assert data["n"] == n + 1
                        assert data["message_id"] == snapshot["message_id"]
                        text, n = text + data["text"], data["n"]
                assert text == "one two three four"
            await first.until("turn_completed")


async def test_a_live_event_is_encoded_once_for_all_readers():
    async with site(desk("hello")) as s:
        await s.post("/api/conversations", {"id": "c"}, 201)
        encoded, original = [], api_types.live_frame

        def counted(event):
            encoded.append(event)
            return original(event)

        api_types.live_frame = counted
        try:
            readers = [s.events(f"{C}/events") for _ in range(8)]
            open_now = [await reader.__aenter__() for reader in readers]
            for reader in open_now:
                await reader.next()
            await s.post(f"{C}/messages", {"text": "hi"}, 202)
            seen = [await reader.until("turn_completed") for reader in open_now]
            assert all(events == seen[0] for events in seen)
            assert len(encoded) <= len(seen[0]) + 2  # and the state change that follows
            for reader in readers:
                await reader.__aexit__(None, None, None)
        finally:
            api_types.live_frame = original


def connect(s, path, receive_buffer=4096):
    """Open a stream on a socket that nothing reads from yet."""
    host, port = s.base.removeprefix("http://").split(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.connect((host, int(port)))
    sock.sendall(f"GET {path} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {TOKEN}\r\n\r\n".encode())
    sock.setblocking(False)
    return sock


async def read_all(sock):
    loop, data = asyncio.get_running_loop(), b""
    while piece := await loop.sock_recv(sock, 65536):
        data += piece
        if b"\r\n0\r\n\r\n" in data:
            break
    return data


async def flood(s, n, size=20_000):
    """Publish many large live events; readers run in between."""
    for i in range(n):
        s.runtime._engine.bus.publish("c", ToolProgress(conversation="c", call_id="x", n=i, payload="x" * size))
        await asyncio.sleep(0)


async def test_a_slow_reader_is_disconnected_with_its_position_and_resumes_there():
    kept = streams.MAX_FRAMES
    streams.MAX_FRAMES = 8
    try:
        async with site(desk("hello")) as s:
            await s.post("/api/conversations", {"id": "c"}, 201)
            sock = connect(s, f"{C}/events")
            while not s.runtime._engine.bus.has_readers("c"):
                await asyncio.sleep(0.005)
            await flood(s, 500)
            await s.post(f"{C}/messages", {"text": "hi"}, 202)
            await s.idle()
            data = await read_all(sock)
            sock.close()
            tail = data[data.rindex(b"event: backpressure") :].splitlines()
            after = json.loads(tail[1].removeprefix(b"data: "))["after"]
            assert after == 1
            async with s.events(f"{C}/events", headers={"last-event-id": str(after)}) as reader:
                assert ids(await reader.until("TurnEnded"))[0] == after + 1
    finally:
        streams.MAX_FRAMES = kept


async def test_readers_that_never_read_are_disconnected_and_their_slots_are_freed():
    stall, frames = limits.STALL_SECONDS, streams.MAX_FRAMES
    limits.STALL_SECONDS, streams.MAX_FRAMES = 0.3, 8
    try:
        async with site(desk("hello"), limits=Limits(streams=20)) as s:
            await s.post("/api/conversations", {"id": "c"}, 201)
            socks = [connect(s, f"{C}/events") for _ in range(20)]
            while not s.runtime._engine.bus.has_readers("c"):
                await asyncio.sleep(0.005)
            await flood(s, 1000)
            while s.runtime._engine.bus.has_readers("c"):
                await asyncio.sleep(0.01)
            async with s.events(f"{C}/events") as reader:  # a slot is free again
                assert (await reader.next())[1] == 1
            for sock in socks:
                sock.close()
    finally:
        limits.STALL_SECONDS, streams.MAX_FRAMES = stall, frames


def test_a_channel_keeps_a_bounded_number_of_frames_and_bytes():
    channel = streams.Channel()
    for seq in range(1, 20_000):
        channel.push(streams.Frame(b"x" * 10, seq))
    assert len(channel.frames) <= 2 * streams.MAX_FRAMES
    assert channel.base == channel.frames[0].seq - 1
    assert channel.position_after(channel.base - 1) is None
    assert channel.position_after(19_999) == channel.next_position
    assert channel.frames[channel.position_after(19_000) - channel.first].seq == 19_001
    for seq in range(20_000, 20_100):
        channel.push(streams.Frame(b"x" * 1_000_000, seq))
        assert sum(len(frame.data) for frame in channel.frames) <= 2 * streams.MAX_FRAME_BYTES
    channel.push(streams.Frame(b"x" * 20_000_000, 20_100))
    assert len(channel.frames) == 1


async def test_a_quiet_stream_has_a_heartbeat():
    kept = streams.HEARTBEAT_SECONDS
    streams.HEARTBEAT_SECONDS = 0.05
    try:
        async with site(desk("hello")) as s:
            await s.post("/api/conversations", {"id": "c"}, 201)
            async with s.events(f"{C}/events") as reader:
                await reader.next()
                pending = asyncio.ensure_future(reader.until("TurnEnded"))
                while reader.beats < 2:
                    await asyncio.sleep(0.005)
                await s.post(f"{C}/messages", {"text": "hi"}, 202)
                await pending
    finally:
        streams.HEARTBEAT_SECONDS = kept


async def test_a_long_log_is_streamed_whole():
    async with site(desk("hello")) as s:
        await s.post("/api/conversations", {"id": "c"}, 201)
        for _ in range(450):
            await (await s.runtime.send("c", "hi", when_busy="queue")).final_result()
        head = (await s.get(C))["seq"]
        assert head > 1500
        async with s.events(f"{C}/events") as reader:
            received = [await reader.next() for _ in range(head)]
        assert ids(received) == list(range(1, head + 1))


async def test_the_inbox_stream_sends_the_list_of_pending_calls_and_then_changes():
    async with site(refund_agent()) as s:
        await s.begin("a")
        [first] = await s.pending()
        async with s.events("/api/pending/events") as reader:
            assert await reader.next() == ("pending", None, {"pending": [first]})
            await s.begin("b")
            kind, place, second = await reader.next()
            assert (kind, place, second["conversation"]) == ("added", None, "b")
            await s.post(f"/api/conversations/a/calls/{first['call']}/resolve", {"decision": {"type": "deny"}})
            assert await reader.next() == ("removed", None, {"conversation": "a", "call": first["call"]})
            async with s.events("/api/pending/events") as other:
                assert await other.next() == ("pending", None, {"pending": [second]})


async def test_a_stream_ends_with_a_problem_when_the_log_cannot_be_read():
    async with site(refund_agent()) as s:
        await s.begin()
        read = s.runtime.store.read

        async def fail(*_, **__):
            raise StoreError("the disk is gone", kind="log_read_failed")

        s.runtime.store.read = fail
        async with s.events(f"{C}/events") as reader:
            kind, place, data = await reader.next()
            assert (kind, place, data["kind"]) == ("problem", None, "log_read_failed")
        s.runtime.store.read = read
        async with s.events(f"{C}/events") as reader:
            assert (await reader.next())[:2] == ("ConversationOpened", 1)


async def test_a_position_beyond_the_log_means_its_end_and_does_not_delay_other_readers(tmp_path):
    async with site(desk("hello"), store=f"sqlite:///{tmp_path}/t.db") as s:
        await s.post("/api/conversations", {"id": "c"}, 201)
        async with s.events(f"{C}/events", params={"after": 999_999}) as odd:
            while not s.runtime._engine.bus.has_readers("c"):
                await asyncio.sleep(0.005)
            async with s.events(f"{C}/events") as reader:
                assert (await reader.next())[:2] == ("ConversationOpened", 1)
                await s.post(f"{C}/messages", {"text": "hi"}, 202)
                seen = await reader.until("turn_completed")
                assert seen == await odd.until("turn_completed")
                assert [kind for kind, _, _ in seen if kind == "text_delta"]


async def test_log_events_arrive_once_and_in_order_for_a_reader_that_is_ahead_of_the_channel(tmp_path):
    """A reader that joins while another process writes reads more of the log than the channel has sent."""
    store = f"sqlite:///{tmp_path}/t.db"
    async with site(store=store) as s, Runtime(desk("x"), store=store) as other:
        await other.open("c")
        async with s.events(f"{C}/events") as first:
            await first.next()
            while not s.runtime._engine.bus.has_readers("c"):
                await asyncio.sleep(0.005)
            back = asyncio.Event()
            watcher = s.runtime._engine._store_watcher
            foreign, watcher._on_remote_commit = watcher._on_remote_commit, back.wait  # it notices nothing for now
            await (await other.send("c", "hi")).final_result()
            async with s.events(f"{C}/events") as second:
                assert ids([await second.next() for _ in range(5)]) == [1, 2, 3, 4, 5]
                watcher._on_remote_commit = foreign
                back.set()
                await foreign()
                await (await other.send("c", "more")).final_result()
                assert ids(await second.until("TurnEnded")) == [6, 7, 8, 9]
                assert ids([*await first.until("TurnEnded"), *await first.until("TurnEnded")]) == list(range(2, 10))


async def test_a_reader_that_loses_access_to_a_conversation_gets_no_further_event_of_it():
    allowed = {"c"}
    async with site(desk("a secret"), may_see=lambda principal, conversation: conversation in allowed) as s:
        await s.runtime.open("c")
        async with s.events(f"{C}/events") as reader:
            await reader.next()
            while not s.runtime._engine.bus.has_readers("c"):
                await asyncio.sleep(0.005)
            allowed.clear()
            await s.runtime.send("c", "private")
            [(kind, _, problem)] = await reader.rest()
            assert (kind, problem["status"], problem["kind"]) == ("problem", 404, "not_found")


async def test_a_principal_that_loses_access_loses_its_open_streams_at_the_next_check(monkeypatch):
    monkeypatch.setattr(streams, "ACCESS_EVERY", 0.05)
    known, allowed = {"bo", "cy"}, {"c"}

    def auth(request):
        who = request.headers.get("x-who")
        return who if who in known else None

    async with site(desk("x"), auth=auth, may_see=lambda principal, conversation: conversation in allowed) as s:
        await s.runtime.open("c")
        bo, cy = {"x-who": "bo"}, {"x-who": "cy"}
        paths = (f"{C}/events", "/api/pending/events")
        async with (
            s.events(paths[0], headers=bo) as one,
            s.events(paths[1], headers=bo) as two,
            s.events(paths[0], headers=cy) as other,
        ):
            for reader in (one, two, other):
                await reader.next()
            known.remove("bo")
            for reader in (one, two):
                [(kind, _, problem)] = await reader.rest()
                assert (kind, problem["status"], problem["kind"]) == ("problem", 401, "not_authenticated")
            allowed.clear()
            [(kind, _, problem)] = await other.rest()
            assert (kind, problem["status"]) == ("problem", 404)


async def test_a_call_that_a_principal_may_no_longer_see_is_removed_from_its_inbox_stream(monkeypatch):
    """At the next change of the inbox, or at the next access check."""
    allowed = {"a", "b", "c"}

    async def next_event(reader):
        kind, _, data = await reader.next()
        return kind, {entry["conversation"] for entry in data.get("pending", [data])}

    async with site(refund_agent(), may_see=lambda principal, conversation: conversation in allowed) as s:
        for name in "ab":
            await s.runtime.send(name, "x")
        [gone] = [entry for entry in await s.pending(2) if entry["conversation"] == "a"]
        async with s.events("/api/pending/events") as reader:
            assert await next_event(reader) == ("pending", {"a", "b"})
            allowed.remove("a")
            await s.runtime.resolve("a", gone["call"], Deny("no"))
            assert await next_event(reader) == ("pending", {"b"})
        monkeypatch.setattr(streams, "ACCESS_EVERY", 0.05)
        async with s.events("/api/pending/events") as reader:
            assert await next_event(reader) == ("pending", {"b"})
            await s.runtime.send("c", "x")
            assert await next_event(reader) == ("added", {"c"})
            allowed.remove("c")
            assert await next_event(reader) == ("pending", {"b"})


async def test_the_inbox_stream_sends_heartbeats_while_only_hidden_calls_change(monkeypatch):
    monkeypatch.setattr(streams, "HEARTBEAT_SECONDS", 0.1)

    def may_see(principal, conversation):
        return conversation == "mine"

    async with site(refund_agent(), may_see=may_see) as s, s.events("/api/pending/events") as reader:
        await reader.next()
        for i in range(40):
            await s.runtime.send(f"o{i}", "x")
            await asyncio.sleep(0.02)
        await s.runtime.send("mine", "x")
        assert (await reader.next())[2]["conversation"] == "mine"
        assert reader.beats >= 3


async def test_a_call_that_is_suspended_while_may_see_runs_is_sent_after_the_list():
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def may_see(principal, conversation):
        asked.set()
        await go_on.wait()
        return True

    async with site(refund_agent(), may_see=may_see) as s:
        for name in "ab":
            await s.runtime.send(name, "x")
        while len(await s.runtime.pending()) < 2:
            await asyncio.sleep(0.005)
        async with s.events("/api/pending/events") as reader:
            await asked.wait()
            await s.runtime.send("c", "x")
            while len(await s.runtime.pending()) < 3:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)  # the channel has it too
            go_on.set()
            kind, _, data = await reader.next()
            assert (kind, {e["conversation"] for e in data["pending"]}) == ("pending", {"a", "b"})
            kind, _, data = await reader.next()
            assert (kind, data["conversation"]) == ("added", "c")


async def test_the_inbox_stream_sends_a_problem_and_not_an_empty_list_while_the_store_fails():
    async with site(refund_agent()) as s:
        await s.begin()
        await s.pending()
        pending = s.runtime.store.pending

        async def fail(*_, **__):
            raise StoreError("the disk is gone", kind="log_read_failed")

        s.runtime.store.pending = fail
        async with s.events("/api/pending/events") as reader:
            assert [(kind, data["kind"]) for kind, _, data in await reader.rest()] == [("problem", "log_read_failed")]
        s.runtime.store.pending = pending
        async with s.events("/api/pending/events") as reader:
            assert len((await reader.next())[2]["pending"]) == 1


async def test_the_stream_of_an_empty_inbox_starts_with_an_empty_list():
    async with site(refund_agent()) as s, s.events("/api/pending/events") as reader:
        assert await reader.next() == ("pending", None, {"pending": []})


async def test_pending_calls_and_events_of_another_process_are_streamed(tmp_path):
    """An answer that one process records reaches the viewers and the owner in another one [B87]."""
    store = f"sqlite:///{tmp_path}/t.db"
    async with site(store=store) as s, s.events("/api/pending/events") as reader:
        assert (await reader.next())[2] == {"pending": []}
        async with Runtime(refund_agent(), store=store) as other:
            turn = await other.send("c", "hi")
            kind, _, entry = await reader.next()
            assert (kind, entry["conversation"]) == ("added", "c")
            async with s.events(f"{C}/events") as viewer:
                await viewer.until("CallSuspended")
                await s.post(f"{C}/calls/{entry['call']}/resolve", {"decision": {"type": "deny", "reason": "no"}})
                assert (await reader.next())[0] == "removed"
                await turn.final_result()
                await viewer.until("TurnEnded")


class Counted:
    """A wrapper of a function that counts its calls."""

    def __init__(self, ask):
        self.ask, self.times = ask, 0

    def __call__(self, *args, **options):
        self.times += 1
        return self.ask(*args, **options)


async def test_commits_of_other_processes_cause_bounded_reads_of_the_inbox_and_no_change_is_missed():
    """No change of another process is missed [B87]."""
    store = MemoryStore()
    async with (
        site(store=store) as s,
        s.events("/api/pending/events") as reader,
        Runtime(desk(*["hi"] * 10_000, name="busy"), store=store.sibling()) as others,
        Runtime(refund_agent(), store=store.sibling()) as other,
    ):
        await reader.next()
        store.pending = looks = Counted(store.pending)
        began = time.monotonic()
        while looks.times < 4:
            await (await others.send("busy", "x")).final_result()
        assert time.monotonic() - began >= 3 * inbox.MIN_REREAD_SECONDS
        turn = await other.send("c", "x")
        assert (await reader.next())[0] == "added"
        await other.resolve("c", (await turn.result()).pending[0].call, Deny("no"))
        assert (await reader.next())[0] == "removed"


async def test_only_changed_pending_entries_are_decoded():
    store = MemoryStore()
    async with Runtime(store=store) as rt, Runtime(refund_agent(), store=store.sibling()) as other:
        for n in range(5):
            await (await other.send(f"c{n}", "x")).result()
        feed = rt._engine.pending_feed
        feed._decode = decoded = Counted(feed._decode)
        changes = feed.changes()
        entries = (await anext(changes)).added
        assert len(entries) == decoded.times == 5
        await other.resolve("c1", entries[1].call, Deny("no"))
        assert (await anext(changes)) == inbox.PendingChanges([], [("c1", entries[1].call)])
        await (await other.send("c5", "x")).result()
        assert [entry.conversation for entry in (await anext(changes)).added] == ["c5"]
        assert decoded.times == 6
        await changes.aclose()


async def test_reading_many_pending_entries_yields_to_other_tasks(monkeypatch):
    monkeypatch.setattr(inbox, "YIELD_EVERY", 2)
    turns = 0

    async def other():
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async with Runtime(refund_agent()) as rt:
        for n in range(20):
            await (await rt.send(f"c{n}", "x")).result()
        changes, ticking = rt._engine.pending_feed.changes(), asyncio.ensure_future(other())
        assert len((await anext(changes)).added) == 20
        assert turns > 5
        ticking.cancel()
        await changes.aclose()


async def test_streams_end_when_the_server_stops():
    async with site(refund_agent()) as s:
        await s.begin()
        await s.pending()
        async with s.events(f"{C}/events") as one, s.events("/api/pending/events") as two:
            await one.next()
            await two.next()
            s.stop()
            await one.rest()  # without waiting for the next heartbeat
            assert await two.rest() == []
        await asyncio.sleep(0)


async def test_a_reader_that_disconnects_is_unsubscribed():
    async with site(desk("hello")) as s:
        await s.post("/api/conversations", {"id": "c"}, 201)
        for _ in range(3):
            async with s.events(f"{C}/events") as reader:
                await reader.next()
                while not s.runtime._engine.bus.has_readers("c"):
                    await asyncio.sleep(0.001)
            while s.runtime._engine.bus.has_readers("c"):
                await asyncio.sleep(0.001)


async def test_a_reader_that_disconnects_before_its_first_byte_leaves_no_task():
    """Some servers raise an error from ``send``. The check for leftover tasks is the one of every async test."""

    async def receive():
        return await asyncio.get_running_loop().create_future()

    async def send(message):
        if message["type"] == "http.response.body":
            raise OSError("the client has disconnected")

    async with Runtime(desk("x")) as rt:
        await rt.open("c")
        path = "/api/conversations/c/events"
        scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b""}
        headers = [(b"host", b"localhost")]
        served = app(rt, auth=lambda request: "ada")
        await served({**scope, "headers": headers, "root_path": "", "scheme": "http"}, receive, send)


class Viewer:
    """A request to the application without a server; ``send`` blocks after ``max_chunks`` chunks."""

    def __init__(self, served, path, who="ada", query=b"", max_chunks=10**9):
        self.sent, self.status, self.full, self.max_chunks = [], None, asyncio.Event(), max_chunks
        headers = [(b"host", b"localhost"), (b"x-who", who.encode())]
        scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": query}
        scope |= {"headers": headers, "root_path": "", "scheme": "http"}
        self.done = asyncio.create_task(served(scope, asyncio.Event().wait, self.send))

    async def send(self, message):
        self.status = message.get("status", self.status)
        if message.get("body"):
            if len(self.sent) >= self.max_chunks:
                self.full.set()
                await asyncio.Event().wait()
            self.sent.append(message["body"])

    async def blocked(self):
        await self.full.wait()

    @property
    def events(self):
        """The names of the events that arrived whole."""
        frames = b"".join(self.sent).split(b"\n\n")[:-1]
        return [line[7:].decode() for frame in frames for line in frame.split(b"\n") if line.startswith(b"event: ")]

    async def end(self):
        self.done.cancel()
        await asyncio.wait({self.done})


def principal_from_header(request):
    return request.headers.get("x-who")


async def send_large_message(rt, name, size=3_000_000):
    """Run a turn whose message has this size."""
    await (await rt.send(name, "x" * size)).result()


async def test_readers_that_catch_up_share_one_copy_of_an_event():
    """With a copy for each of them, 150 readers held 598 MB."""
    async with Runtime(desk(*["hi"] * 9)) as rt:
        await send_large_message(rt, "c")
        served = app(rt, principal_from_header)
        tracemalloc.start()
        try:
            viewers = [Viewer(served, f"{C}/events", max_chunks=3) for _ in range(30)]
            for viewer in viewers:
                await viewer.blocked()
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert held < 5 * 3_000_000
        for viewer in viewers:
            await viewer.end()


async def test_slow_readers_share_one_copy_of_a_large_live_event():
    async with Runtime(desk(*["hi"] * 9)) as rt:
        await rt.open("c")
        served = app(rt, principal_from_header)
        viewers = [Viewer(served, f"{C}/events", max_chunks=3) for _ in range(30)]
        while sum(len(found.channel.readers) for found in served._hub._open.values()) < 30:
            await asyncio.sleep(0.005)
        tracemalloc.start()
        try:
            for payload in ("small", "x" * 3_000_000):
                rt._engine.bus.publish("c", ToolProgress(conversation="c", call_id="x", n=1, payload=payload))
            for viewer in viewers:
                await viewer.blocked()
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert held < 5 * 3_000_000
        for viewer in viewers:
            await viewer.end()


async def test_a_principal_with_too_many_streams_gets_429():
    async with site(desk("x"), auth=principal_from_header, limits=Limits(principal_streams=1)) as s:
        ada, bo = {"x-who": "ada"}, {"x-who": "bo"}
        async with s.events("/api/pending/events", headers=ada) as reader:
            await reader.next()
            answer = await s.http.get("/api/pending/events", headers=ada)
            problem = answer.json()
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "5")
            assert problem["kind"] == "backpressure"
            assert problem["detail"] == "you have 1 streams open: close some of them, then open this one again"
            async with s.events("/api/pending/events", headers=bo) as other:
                await other.next()
        again = s.http.build_request("GET", "/api/pending/events", headers=ada)
        while (await s.http.send(again, stream=True)).is_error:
            await asyncio.sleep(0.01)


async def test_a_principal_with_too_many_unread_bytes_gets_backpressure_and_another_one_does_not():
    """A buffer that several of its streams share counts once. Every principal has its own budget."""
    async with Runtime(desk(*["hi"] * 9)) as rt:
        for name in "cd":
            await send_large_message(rt, name, 600_000)
        served = app(rt, principal_from_header, limits=Limits(principal_bytes=1_000_000))
        unread = [Viewer(served, f"{C}/events", max_chunks=3) for _ in range(5)]
        for viewer in unread:
            await viewer.blocked()
        other = Viewer(served, "/api/conversations/d/events")
        await other.done
        assert other.status == 200
        assert other.events == ["ConversationOpened", "backpressure"]
        assert b'{"after":1}' in b"".join(other.sent)
        log = Viewer(served, "/api/conversations/d/log")
        await log.done
        assert log.status == 429
        assert b"read or close them" in b"".join(log.sent)
        bo = Viewer(served, "/api/conversations/d/log", who="bo")
        await bo.done
        assert bo.status == 200
        for viewer in unread:
            await viewer.end()
        again = Viewer(served, "/api/conversations/d/log")
        await again.done
        assert again.status == 200


async def test_a_principal_whose_byte_budget_is_used_up_cannot_open_another_stream():
    async with Runtime(desk(*["hi"] * 9)) as rt:
        await send_large_message(rt, "c", 600_000)
        served = app(rt, principal_from_header, limits=Limits(principal_bytes=500_000))
        first = Viewer(served, f"{C}/events", max_chunks=3)
        await first.blocked()  # a single event over the budget is sent all the same
        second = Viewer(served, f"{C}/events")
        await second.done
        problem = json.loads(b"".join(second.sent))
        assert (problem["status"], problem["kind"]) == (429, "backpressure")
        assert "read or close them" in problem["detail"]
        await first.end()


async def test_a_snapshot_has_a_page_of_messages_and_says_how_many_come_before():
    async with site(desk(*["hi"] * 9)) as s:
        texts = [str(n) * 400_000 for n in range(5)]
        for text in texts:
            await (await s.runtime.send("c", text)).result()
        whole = json.loads(api_types.encode_json((await s.runtime.snapshot("c")).messages))
        first = await s.get(C)
        assert 0 < first["earlier"] < len(whole)
        assert len(json.dumps(first)) < 1_200_000
        found, before = first["messages"], first["earlier"]
        while before:
            page = await s.get(C, params={"before": before})
            assert page["messages"]
            found = page["messages"] + found
            before = page["earlier"]
        assert found == whole
        assert (await s.get(C, params={"limit": 1}))["messages"] == whole[-1:]
        assert (await s.get(C, params={"before": 0}))["messages"] == []


async def test_a_page_of_the_log_is_read_in_bounded_batches():
    """Events can have megabytes each: a page that is cut only after the read would fill the memory."""
    async with site(desk(*["hi"] * 200)) as s:
        for _ in range(30):
            await (await s.runtime.send("c", "hi")).result()
        read, limits = s.runtime.store.read, []

        async def counted(conversation, after=0, before=None, limit=None):
            limits.append(limit)
            return await read(conversation, after, before, limit)

        s.runtime.store.read = counted
        head = (await s.runtime.store.row("c")).seq
        for options in ({}, {"last": True}, {"after": 3, "before": 77}, {"last": True, "limit": 40, "before": 90}):
            events = (await s.get(f"{C}/log", params=options))["events"]
            low, high = options.get("after", 0), options.get("before", head + 1)
            wanted = list(range(low + 1, high))
            assert [e["seq"] for e in events] == (wanted[-options["limit"] :] if "limit" in options else wanted)
        assert max(limits) <= routes.READ_BATCH


def test_the_times_of_an_access_check_add_up_to_five_seconds():
    assert streams.ACCESS_EVERY + streams.ACCESS_SECONDS + streams.REFUSAL_SECONDS <= 5


def only_access_checks_end_streams(monkeypatch):
    """Neither a heartbeat nor a stalled write ends a stream here: only the access check does."""
    monkeypatch.setattr(streams, "HEARTBEAT_SECONDS", 1000.0)
    monkeypatch.setattr(limits, "STALL_SECONDS", 1000.0)
    monkeypatch.setattr(streams, "ACCESS_EVERY", 0.05)


async def test_a_revoked_reader_that_never_reads_is_disconnected_in_the_middle_of_an_event(monkeypatch):
    only_access_checks_end_streams(monkeypatch)
    allowed = {"c"}
    async with Runtime(desk(*["hi"] * 9)) as rt:
        await send_large_message(rt, "c", 1_000_000)
        served = app(rt, principal_from_header, may_see=lambda principal, conversation: conversation in allowed)
        viewer = Viewer(served, f"{C}/events", max_chunks=10)
        await viewer.blocked()
        allowed.clear()
        await viewer.done
        assert viewer.events == ["ConversationOpened"]  # no problem event can be sent in the middle of an event


async def test_a_revoked_reader_is_disconnected_while_it_catches_up(monkeypatch):
    only_access_checks_end_streams(monkeypatch)
    known, checked = {"ada"}, asyncio.Event()

    def auth(request):
        if not known:
            checked.set()
        return "ada" if known else None

    class Slow(Viewer):
        async def send(self, message):
            if len(self.sent) == 5:
                known.clear()
                await checked.wait()
            await super().send(message)

    async with Runtime(desk(*["hi"] * 200)) as rt:
        for _ in range(50):
            await (await rt.send("c", "x" * 5_000)).result()
        viewer = Slow(app(rt, auth), f"{C}/events")
        await viewer.done
        assert 5 <= len(viewer.sent) <= 7
        assert viewer.events.count("TurnEnded") < 50


async def test_a_revoked_reader_is_disconnected_while_a_reply_streams(monkeypatch):
    """Deltas are not in the log: the access check does not wait for a log event."""
    only_access_checks_end_streams(monkeypatch)
    allowed = {"c"}

    class Endless:
        name = "endless"

        async def stream(self, request):
            while True:
                yield TextPart("word ")
                await asyncio.sleep(0.001)

    async with site(Agent("endless", model=Endless()), may_see=lambda who, name: name in allowed) as s:
        await s.begin()
        async with s.events(f"{C}/events") as reader:
            await reader.until("text_delta")
            allowed.clear()
            kind, _, problem = (await reader.rest())[-1]
            assert (kind, problem["status"]) == ("problem", 404)
        await s.runtime.cancel("c")


async def test_a_reader_whose_access_check_times_out_is_disconnected(monkeypatch):
    only_access_checks_end_streams(monkeypatch)
    monkeypatch.setattr(streams, "ACCESS_SECONDS", 0.05)
    slow = []

    async def auth(request):
        if slow:
            await asyncio.Event().wait()
        return "ada"

    async with site(desk("x"), auth=auth) as s, s.events("/api/pending/events") as reader:
        await reader.next()
        slow.append(True)
        [(kind, _, problem)] = await reader.rest()
        assert (kind, problem["status"], problem["kind"]) == ("problem", 503, "backpressure")


async def test_a_blocked_reader_is_disconnected_when_its_list_has_a_call_that_it_may_no_longer_see(monkeypatch):
    only_access_checks_end_streams(monkeypatch)
    allowed = {"a", "b"}
    async with Runtime(refund_agent()) as rt:
        for name in "ab":
            await (await rt.send(name, "x")).result()
        served = app(rt, principal_from_header, may_see=lambda who, name: name in allowed)
        viewer = Viewer(served, "/api/pending/events", max_chunks=1)
        await viewer.blocked()
        allowed.remove("a")
        await viewer.done
        assert viewer.events == []


async def test_a_disconnected_reader_leaves_no_reference_cycle(monkeypatch):
    """The garbage collector runs seldom: until then many revoked readers would fill the memory."""
    only_access_checks_end_streams(monkeypatch)
    allowed = {"c"}
    async with Runtime(desk(*["hi"] * 9)) as rt:
        await send_large_message(rt, "c", 1_000_000)
        served = app(rt, principal_from_header, may_see=lambda principal, conversation: conversation in allowed)
        gc.collect()
        gc.disable()
        try:
            viewers = [Viewer(served, f"{C}/events", max_chunks=max_chunks) for max_chunks in (10, 10**9)]
            await viewers[0].blocked()
            while "TurnEnded" not in viewers[1].events:
                await asyncio.sleep(0.01)
            allowed.clear()
            for viewer in viewers:
                await viewer.done
            while [each for each in gc.get_objects() if isinstance(each, streams.Stream)]:
                await asyncio.sleep(0.01)  # until their tasks have ended
        finally:
            gc.enable()
