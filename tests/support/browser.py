"""Real Chromium over a real server process, for the page's tests and its screenshots."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect, sync_playwright

STAGE = Path(__file__).with_name("stage.py")
PATIENCE = 45
"""Seconds for which something is waited for: machines are slow at times."""
expect.set_options(timeout=PATIENCE * 1000)


def chromium() -> str:
    found = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if not found:
        raise RuntimeError("the page's tests need Chromium: apt-get install chromium, or set CHROMIUM=/path/to/it")
    return found


@contextlib.contextmanager
def browser(scrollbars: bool = False) -> Iterator[Browser]:
    """scrollbars: they take space, as on most desktops"""
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        without = ["--hide-scrollbars"] if scrollbars else None
        launched = playwright.chromium.launch(executable_path=chromium(), args=flags, ignore_default_args=without)
        yield launched
        launched.close()


class Stage:
    """The server of stage.py in a process of its own, on a port that stays the same over restarts."""

    def __init__(self, folder: Path, mount: str = ""):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        folder.mkdir(exist_ok=True)
        self.folder, self.store = folder, f"sqlite:///{folder}/page.db"
        self.mount, self.url = mount, f"http://127.0.0.1:{self.port}{mount}/"
        self.command = [str(STAGE), self.store, str(self.port), mount]
        self.process: subprocess.Popen[str] | None = None
        self.opened = 0

    def start(self) -> str:
        """Start it; the line that it prints when it is there."""
        self.process = subprocess.Popen([sys.executable, *self.command], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert said, "the server did not start"
        return said

    def kill(self) -> None:
        """kill -9: no goodbye."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process = None

    def cue(self, name: str) -> None:
        """A scene waits for this."""
        (self.folder / name).touch()

    def ask(self, method: str, path: str, body: Any = None, who: str = "alice") -> Any:
        import msgspec

        request = urllib.request.Request(f"{self.url}api/{path}", method=method)
        request.add_header("cookie", f"who={who}")
        if method == "POST":
            request.add_header("content-type", "application/json")
            request.data = msgspec.json.encode(body or {})
        with urllib.request.urlopen(request, timeout=10) as reply:
            raw = reply.read()
        return msgspec.json.decode(raw) if raw else None

    def conversation(self, first: str | None = None, name: str | None = None, who: str = "alice") -> str:
        """A conversation, with a first message if one is given."""
        self.opened += 1
        found = self.ask("POST", "conversations", {"id": name or f"talk-{self.opened}"}, who)["conversation"]
        if first:
            self.ask("POST", f"conversations/{found}/messages", {"text": first}, who)
        return found

    def log(self, conversation: str) -> list[dict[str, Any]]:
        return self.ask("GET", f"conversations/{conversation}/log?limit=500")["events"]

    def waiting(self, conversation: str, who: str = "alice") -> dict[str, Any]:
        """The one call that waits, as soon as it does."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            found = self.ask("GET", f"pending?conversation={conversation}", who=who)["pending"]
            if found:
                return found[0]
            time.sleep(0.02)
        raise AssertionError("nothing waits")


class Demo(Stage):
    """The demo, as ``make demo`` starts it."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.command = ["-m", "holdfast", "demo", "--page", "--port", str(self.port), "--store", self.store]

    def start(self) -> str:
        """Start it; the address that it prints."""
        return super().start().split()[-1]


class Visitor:
    """A person with a browser of their own: pages that must never speak to anybody but the server."""

    def __init__(self, launched: Browser, stage: Stage, who: str, **options: Any):
        self.stage = stage
        self.context: BrowserContext = launched.new_context(**options)
        self.context.add_cookies([{"name": "who", "value": who, "url": stage.url, "sameSite": "Strict"}])
        self.context.set_default_timeout(PATIENCE * 1000)
        self.own = stage.url  # whatever else is asked is a stranger
        self.strangers: list[str] = []
        self.complaints: list[str] = []
        self.context.on("request", self._asked)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((self.stage.url, self.own, "data:", "about:")):
            self.strangers.append(request.url)

    def page(self, place: str = "") -> Page:
        return self.at(f"{self.stage.url}#/{place}")

    def at(self, address: str) -> Page:
        page = self.context.new_page()
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._console)
        page.goto(address)
        return page

    def _console(self, message: Any) -> None:
        # A server that is away, and a refused decision, are logged by the browser itself.
        if message.type == "error" and "Failed to load resource" not in message.text and "net::ERR" not in message.text:
            self.complaints.append(message.text)


def until(page: Page, fact: str | Callable[[], object]) -> None:
    """Wait for a fact, of the page or of the test; the page's policy forbids what playwright would do for that."""
    end = time.monotonic() + PATIENCE
    while not (page.evaluate(fact) if isinstance(fact, str) else fact()):
        assert time.monotonic() < end, fact
        page.wait_for_timeout(20)


UNREAD = """(button) => {
    const { guard, parts, heading } = button.closest('holdfast-approval, holdfast-question');
    return Boolean(guard.unseen(button.matches('.approve') ? parts : heading));
}"""
COUNTS = f"""(button) => {{
    const {{ guard }} = button.closest('holdfast-approval, holdfast-question');
    return !button.disabled && guard.armed && guard.steady() && !({UNREAD})(button);
}}"""
"""Whether a press of this button of a card would count now."""


READ = """async (part) => {
    const drawn = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
    part.scrollIntoView({ block: 'start' });
    await drawn();
    part.scrollIntoView({ block: 'end' });
    part.scrollTo(0, part.scrollHeight);
    await drawn();
}"""


def read_card(button: Locator) -> None:
    """Scroll through its card, as a user who reads it does, to the button; return once a press of it counts."""
    card = button.locator("xpath=ancestor::*[self::holdfast-approval or self::holdfast-question]")

    def counts() -> bool:
        if button.evaluate(UNREAD):  # also again, if its content has changed
            for part in card.locator("header:visible, .facts, .content").all():
                part.evaluate(READ)
            button.scroll_into_view_if_needed()
        return button.evaluate(COUNTS)

    button.scroll_into_view_if_needed()
    until(button.page, counts)


def read_and_click(button: Locator) -> None:
    """Click a card's button as a user does who has read the card."""
    read_card(button)
    button.click()


def select(row: Locator) -> None:
    """Select a row of the inbox: a press while it moves does nothing, and is made again."""
    box = row.get_by_role("checkbox")

    def selected() -> bool:
        box.scroll_into_view_if_needed()
        if not box.is_checked():
            box.click()
        return box.is_checked()

    until(row.page, selected)


def begin(page: Page) -> None:
    """A new conversation, which is open and listens."""
    page.get_by_role("button", name="New conversation").first.click()
    expect(page.get_by_label("Message", exact=True)).to_be_focused()


def say(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def register(page: Page, name: str, body: str) -> None:
    until(page, "window.holdfast !== undefined")
    run = f"async (args, {{progress}}) => {{ window.ran++; {body} }}"
    page.evaluate(f"() => {{ window.ran = 0; window.holdfast.registerTool({name!r}, {run}); }}")
