"""``holdfast outbox``, and the channels of an agent's module in ``holdfast worker``."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from stores import ask
from terminal import assert_refused, until

from holdfast.stores.base import ChannelRow

ALERTS = Path(__file__).resolve().parent / "alerts.py"
TESTS = str(ALERTS.parent.parent)


@pytest.fixture
def receiver():
    """A receiver of webhooks that answers with ``receiver.status`` and records the paths."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            server.ids.append(self.headers["webhook-id"])
            self.send_response(server.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.ids, server.status = [], 200
    server.url = f"http://127.0.0.1:{server.server_port}/hook"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def rows(desk, url, *words):
    result = desk("outbox", "--json", "--store", url, *words)
    assert result.code == 0, result.err
    return result.objects


def test_a_worker_delivers_to_the_channels_of_its_agents_module_and_the_outbox_lists_retries_and_drops(desk, receiver):
    """What failed is listed with its error, and delivered under the same id after a retry [B116]."""
    url = f"sqlite:///{desk.path}/shared.db"
    receiver.status = 500
    env = {"RECEIVER": receiver.url, "PYTHONPATH": TESTS}
    with desk.start("worker", f"{ALERTS}:agent", "--store", url, env=env) as worker:
        worker.until(" on ")

        async def send(rt):
            await rt.send("c", "hi", agent="desk", by="boss")

        ask(url, send)
        (row,) = until(lambda: [row for row in rows(desk, url) if row["error"]])
        assert row["channel"] == "hook"
        assert row["kind"] == "suspended"
        assert "answered 500" in row["error"]
        listed = desk("outbox", "--store", url).out
        assert row["id"] in listed
        assert "receiver answered" in listed
        receiver.status = 200
        assert "1 notice will be tried again" in desk("outbox", "retry", row["id"], "--store", url).out
        until(lambda: rows(desk, url) == [])
        assert len(set(receiver.ids)) == 1
        assert len(receiver.ids) >= 2
        assert "no notice waits; channels: hook" in desk("outbox", "--store", url).out


def test_dropping_a_channel_ends_its_rows(desk):
    url = f"sqlite:///{desk.path}/shared.db"

    async def register(rt):
        for name in ("old", "new"):
            await rt.store.put_channel(ChannelRow(name=name, kinds=("turn_ended",)))
        await rt.send("c", "hi", agent="nobody")
        await rt.cancel("c")

    ask(url, register)
    assert "dropped the channel old" in desk("outbox", "drop", "--channel", "old", "--store", url).out
    assert "channels: new" in desk("outbox", "--store", url).out
    assert_refused(desk("outbox", "drop", "--channel", "old", "--store", url), 3)
    for words in (("retry", "nothing"), ("drop", "nothing")):
        assert_refused(desk("outbox", *words, "--store", url), 3)
    for words in (("retry",), ("drop",), ("eat",), ("retry", "x", "--all")):
        assert_refused(desk("outbox", *words, "--store", url), 2)


def test_a_list_that_has_no_channels_is_refused(desk):
    (desk.path / "wrong.py").write_text(
        "from holdfast import Agent, ScriptedModel\n"
        'agent = Agent("a", model=ScriptedModel(["hi"]))\nchannels = ["https://example.org"]\n'
    )
    result = desk("worker", "wrong:agent", "--store", "sqlite:///x.db")
    assert_refused(result, 2)
    assert "channels are objects with name, kinds and send" in result.err
