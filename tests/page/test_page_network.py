"""The page on an unreliable network: dead connections, sleep, and requests without a response."""

import contextlib
import copy
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from support.browser import Stage, read_and_click, read_card, say, select, until

SHORT_TIMEOUTS = "Object.assign(holdfast.limits, {request: 4000, silence: 5000})"
"""Short timeouts, so that a test does not take minutes. The stage sends a heartbeat every second."""

HOUR_LATER = "const { now } = Date; Date.now = () => now() + 3_600_000"
"""The wall clock jumps by an hour and the page's timers do not run, as when the machine sleeps."""


class Proxy:
    """A TCP proxy that can become a black hole: nothing is forwarded and no connection is closed."""

    def __init__(self, port: int):
        self.target = port
        self.dark = False
        """Connections that were open while it was true stay dead afterwards."""
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                near, _ = self._listener.accept()
                self._sockets.append(near)
                if not self.dark:
                    self._join(near)

    def _join(self, near: socket.socket) -> None:
        far = socket.create_connection(("127.0.0.1", self.target))
        self._sockets.append(far)
        lost = threading.Event()
        for source, drain in ((near, far), (far, near)):
            self._threads.append(threading.Thread(target=self._forward, args=(source, drain, lost)))
            self._threads[-1].start()

    def _forward(self, source: socket.socket, drain: socket.socket, lost: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self.dark:
                    lost.set()
                if not lost.is_set():
                    drain.sendall(data)
            if not (self.dark or lost.is_set()):
                drain.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits on it
        for thread in self._threads:
            thread.join()
        for each in (self._listener, *self._sockets):
            each.close()


@pytest.fixture
def proxied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Stage, Proxy]]:
    """A server with quick heartbeats, and the proxy that the page connects through."""
    monkeypatch.setenv("STAGE_HEARTBEAT", "1")
    stage = Stage(tmp_path)
    stage.start()
    proxy = Proxy(stage.port)
    through = copy.copy(stage)
    through.url = f"http://127.0.0.1:{proxy.port}/"
    yield through, proxy
    proxy.close()
    stage.kill()


def open_page(visit, stage: Stage, place: str) -> Page:
    """Open a page, wait until it is connected, and shorten its timeouts."""
    page = visit(stage=stage).page(place)
    until(page, "window.holdfast?.connection === 'online'")
    page.evaluate(SHORT_TIMEOUTS)
    return page


def test_after_a_silent_network_loss_the_page_reconnects_and_a_press_shows_as_not_confirmed(
    visit, proxied: tuple[Stage, Proxy]
):
    stage, proxy = proxied
    name = stage.conversation("refund")
    page = open_page(visit, stage, f"c/{name}")
    card, banner = page.locator("holdfast-approval"), page.get_by_text("The page reconnects by itself")
    read_card(card.locator(".approve"))
    proxy.dark = True
    card.locator(".approve").click()
    expect(card.locator(".approve")).to_have_text("Sending…")
    expect(card.get_by_role("alert")).to_contain_text("Not confirmed: the server did not answer within 4 s.")
    expect(card.locator(".approve")).to_have_text("Approve once")
    expect(banner).to_be_visible()
    proxy.dark = False
    expect(banner).to_be_hidden()
    expect(card.get_by_role("alert")).to_have_count(0)
    read_and_click(card.locator(".approve"))
    expect(page.get_by_text("Done: refund went well.")).to_be_visible()
    say(page, "hello")
    expect(page.get_by_text("You said: hello")).to_be_visible()


def test_a_conversation_opened_on_a_dead_network_is_shown_once_the_network_is_back(visit, proxied: tuple[Stage, Proxy]):
    """The requests before a stream is opened have a timeout too."""
    stage, proxy = proxied
    name = stage.conversation("hello")
    page = open_page(visit, stage, "inbox")
    proxy.dark = True
    page.evaluate(f"location.hash = '#/c/{name}'")
    expect(page.get_by_text("The page reconnects by itself")).to_be_visible()
    proxy.dark = False
    expect(page.get_by_text("You said: hello")).to_be_visible()
    expect(page.get_by_text("The page reconnects by itself")).to_be_hidden()


def test_a_batch_and_a_message_show_that_they_are_being_sent_and_that_no_response_came(
    visit, proxied: tuple[Stage, Proxy]
):
    stage, proxy = proxied
    name = stage.conversation("refund")
    page = open_page(visit, stage, "inbox")
    select(page.locator(".row"))
    page.get_by_role("button", name="Review 1 selected").click()
    dialog = page.locator("dialog.batch")
    approve = dialog.locator(".primary")
    expect(approve).to_be_enabled()
    proxy.dark = True
    approve.click()
    expect(approve).to_have_text("Sending…")
    expect(dialog.get_by_role("alert")).to_contain_text("the outcome is unknown")
    expect(approve).to_have_text("Approve 1")
    page.keyboard.press("Escape")
    page.evaluate(f"location.hash = '#/c/{name}'")
    field = page.get_by_label("Message", exact=True)
    field.fill("are you there?")
    page.keyboard.press("Enter")
    expect(page.locator(".composer .primary")).to_have_text("Sending…")
    expect(page.locator(".below .notice")).to_contain_text("did not answer within 4 s")
    expect(field).to_have_value("are you there?")


@pytest.mark.parametrize(
    "event",
    [
        "window.dispatchEvent(new Event('offline'))",
        f"{HOUR_LATER}; document.dispatchEvent(new Event('visibilitychange'))",
        HOUR_LATER,
    ],
    ids=["offline", "visible again after an hour", "awake after an hour"],
)
def test_streams_reconnect_when_the_browser_was_offline_or_the_machine_has_slept(visit, stage: Stage, event: str):
    alice = visit()
    streams: list[str] = []
    ended: list[str] = []
    alice.context.on("request", lambda request: streams.append(request.url) if "/events" in request.url else None)
    alice.context.on("requestfailed", lambda request: ended.append(request.url) if "/events" in request.url else None)
    name = stage.conversation("hello")
    page = alice.page(f"c/{name}")
    until(page, lambda: {url.split("?")[0].rsplit("/", 2)[1] for url in streams} == {name, "pending"})
    expect(page.get_by_text("You said: hello")).to_be_visible()
    assert not ended
    for _ in range(20):  # a heartbeat right after the event shows that a stream is alive: then it stays open
        page.evaluate(f"() => {{ {event}; }}")
        page.wait_for_timeout(3_000)
        if len({url.split("?")[0] for url in ended}) == 2:
            break
    assert len({url.split("?")[0] for url in ended}) == 2
    until(page, lambda: len(streams) >= 4)
    say(page, "again")
    expect(page.get_by_text("You said: again")).to_be_visible()


def test_a_stream_is_not_reopened_between_two_heartbeats(visit, proxied: tuple[Stage, Proxy]):
    """The timeout for a silent stream is longer than the server's heartbeat interval."""
    stage, _ = proxied
    page = visit(stage=stage).page("inbox")
    until(page, "window.holdfast?.connection === 'online'")
    assert page.evaluate("holdfast.limits.silence") > 2 * 15_000
    page.evaluate(
        """() => {
            window.beats = 0;
            const { read } = ReadableStreamDefaultReader.prototype;
            ReadableStreamDefaultReader.prototype.read = function () {
                return read.call(this).then((given) => (window.beats += String(given.value).startsWith(':'), given));
            };
        }"""
    )
    until(page, "window.beats >= 1")  # all streams of the page are open by now
    streams: list[str] = []
    page.on("request", lambda request: streams.append(request.url) if "/events" in request.url else None)
    until(page, "window.beats >= 3")
    assert streams == []
