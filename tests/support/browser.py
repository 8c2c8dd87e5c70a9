"""A real Chromium and a real server process, for the tests and the screenshots of the page."""

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
TIMEOUT_SECONDS = 45
"""How long a test waits for a condition: machines are slow at times."""
expect.set_options(timeout=TIMEOUT_SECONDS * 1000)

# Chromium obeys the last --disable-features, so the names that Playwright disables are repeated.
PLAYWRIGHT_DISABLES = (
    "AvoidUnnecessaryBeforeUnloadCheckSync", "DestroyProfileOnBrowserClose", "HttpsUpgrades",
    "HttpsFirstBalancedModeAutoEnable", "LensOverlay", "MediaRouter", "PaintHolding", "ThirdPartyStoragePartitioning",
    "AvoidCorsURLLoaderRestartOnRedirect", "OptimizationHints", "NetworkTimeServiceQuerying", "AimEnabled",
    "PreconnectToSearch",
)  # fmt: skip
ADDRESS_BAR = ("WebUIOmniboxPopup", "WebUIOmniboxAimPopup")
"""The suggestions below the address bar: two pages of Chromium's own, which every window loads in half a second of
processor time, although no test can see them."""


def chromium() -> str:
    """Return the path of the installed Chromium: its shell without windows where there is one, which needs a quarter
    less processor time."""
    names = ("chromium-headless-shell", "chromium", "chromium-browser")
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if not found:
        raise RuntimeError("the page's tests need Chromium: apt-get install chromium, or set CHROMIUM=/path/to/it")
    return found


@contextlib.contextmanager
def browser(scrollbars: bool = False) -> Iterator[Browser]:
    """Start Chromium. With ``scrollbars`` they take space, as on most desktops."""
    with sync_playwright() as playwright:
        disabled = "--disable-features=" + ",".join(PLAYWRIGHT_DISABLES + ADDRESS_BAR)
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", disabled]
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
        self.environment: dict[str, str] | None = None
        self.process: subprocess.Popen[str] | None = None
        self.opened = 0

    def start(self) -> str:
        """Start the server, and return the line that it prints when it is ready."""
        command = [sys.executable, *self.command]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=self.environment)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the server did not start"
        return line

    def kill(self) -> None:
        """End the server as ``kill -9`` does."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process = None

    def cue(self, name: str) -> None:
        """Let a scene that waits for this cue continue."""
        (self.folder / name).touch()

    def ask(self, method: str, path: str, body: Any = None, who: str = "alice") -> Any:
        """Send a request to the HTTP API as a user, and return the decoded response."""
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
        """Open a conversation, send its first message if one is given, and return its id."""
        self.opened += 1
        found = self.ask("POST", "conversations", {"id": name or f"talk-{self.opened}"}, who)["conversation"]
        if first:
            self.ask("POST", f"conversations/{found}/messages", {"text": first}, who)
        return found

    def log(self, conversation: str) -> list[dict[str, Any]]:
        return self.ask("GET", f"conversations/{conversation}/log?limit=500")["events"]

    def pending_call(self, conversation: str, who: str = "alice") -> dict[str, Any]:
        """Return the first pending call of a conversation, as soon as there is one."""
        return self.pending_calls(conversation, 1, who)[0]

    def pending_calls(self, conversation: str, count: int, who: str = "alice") -> list[dict[str, Any]]:
        """Return the pending calls of a conversation, as soon as there are this many."""
        end = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < end:
            found = self.ask("GET", f"pending?conversation={conversation}", who=who)["pending"]
            if len(found) >= count:
                return found
            time.sleep(0.02)
        raise AssertionError(f"fewer than {count} calls are pending")


class Demo(Stage):
    """The demo, as ``make demo`` starts it."""

    def __init__(self, folder: Path, *words: str):
        super().__init__(folder)
        self.command = ["-m", "holdfast", "demo", "--page", "--port", str(self.port), "--store", self.store, *words]
        self.environment = {**os.environ, "TMPDIR": str(folder)}  # for the files of the demo

    def start(self) -> str:
        """Start the demo, and return the address that it prints."""
        return super().start().split()[-1]


class Visitor:
    """A user with a browser context, whose pages must send requests only to the server."""

    def __init__(self, launched: Browser, stage: Stage, who: str, **options: Any):
        self.stage = stage
        # Tests intercept requests, which Playwright does not see when a service worker sends them.
        self.context: BrowserContext = launched.new_context(**{"service_workers": "block", **options})
        self.context.add_cookies([{"name": "who", "value": who, "url": stage.url, "sameSite": "Strict"}])
        self.context.set_default_timeout(TIMEOUT_SECONDS * 1000)
        self.own = stage.url  # requests to other addresses are foreign
        self.foreign_requests: list[str] = []
        self.script_errors: list[str] = []
        self.context.on("request", self._check_request)

    def _check_request(self, request: Any) -> None:
        if not request.url.startswith((self.stage.url, self.own, "data:", "about:")):
            self.foreign_requests.append(request.url)

    def page(self, place: str = "") -> Page:
        return self.at(f"{self.stage.url}#/{place}")

    def at(self, address: str) -> Page:
        page = self.context.new_page()
        page.on("pageerror", lambda error: self.script_errors.append(str(error)))
        page.on("console", self._console)
        page.goto(address)
        return page

    def _console(self, message: Any) -> None:
        # The browser itself logs an unreachable server and a refused decision.
        if message.type == "error" and "Failed to load resource" not in message.text and "net::ERR" not in message.text:
            self.script_errors.append(message.text)


def until(page: Page, fact: str | Callable[[], object]) -> None:
    """Wait until a script or a function gives a true value. The page's policy forbids Playwright's own wait."""
    end = time.monotonic() + TIMEOUT_SECONDS
    while not (page.evaluate(fact) if isinstance(fact, str) else fact()):
        assert time.monotonic() < end, fact
        page.wait_for_timeout(20)


UNREAD = """(button) => {
    const { guard, parts, heading } = button.closest('holdfast-approval, holdfast-question');
    return Boolean(guard.unseen(button.matches('.approve') ? parts : heading));
}"""
PRESS_COUNTS = f"""(button) => {{
    const {{ guard }} = button.closest('holdfast-approval, holdfast-question');
    return !button.disabled && guard.armed && guard.steady() && !({UNREAD})(button);
}}"""
"""A script: whether a press of this button of a card would count now."""


READ = """async (part) => {
    const drawn = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
    part.scrollIntoView({ block: 'start' });
    await drawn();
    part.scrollIntoView({ block: 'end' });
    part.scrollTo(0, part.scrollHeight);
    await drawn();
}"""


def read_card(button: Locator) -> None:
    """Scroll through the card to its button, as a reader does; return once a press of the button counts."""
    card = button.locator("xpath=ancestor::*[self::holdfast-approval or self::holdfast-question]")

    def counts() -> bool:
        if button.evaluate(UNREAD):  # again, if its content has changed
            for part in card.locator("header:visible, .facts, .content").all():
                part.evaluate(READ)
            button.scroll_into_view_if_needed()
        return button.evaluate(PRESS_COUNTS)

    button.scroll_into_view_if_needed()
    until(button.page, counts)


def read_and_click(button: Locator) -> None:
    """Click a card's button as a user does who has read the card."""
    read_card(button)
    button.click()


def select(row: Locator) -> None:
    """Select a row of the inbox. A press while the row moves does nothing, and is repeated."""
    box = row.get_by_role("checkbox")

    def selected() -> bool:
        box.scroll_into_view_if_needed()
        if not box.is_checked():
            box.click()
        return box.is_checked()

    until(row.page, selected)


def begin(page: Page) -> None:
    """Open a new conversation and wait until its message field has the focus."""
    page.get_by_role("button", name="New conversation").first.click()
    expect(page.get_by_label("Message", exact=True)).to_be_focused()


def say(page: Page, text: str) -> None:
    """Send a message in the open conversation."""
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def register(page: Page, name: str, body: str) -> None:
    """Register a client tool in the page; ``window.ran`` counts its runs."""
    until(page, "window.holdfast !== undefined")
    run = f"async (args, {{progress}}) => {{ window.ran++; {body} }}"
    page.evaluate(f"() => {{ window.ran = 0; window.holdfast.registerTool({name!r}, {run}); }}")
