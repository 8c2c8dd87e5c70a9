"""Picture each view of the page, in light, in dark and on a phone. Usage: scripts/screenshots.py FOLDER"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "page"))

from browser import Stage, Visitor, browser, read_and_click, select
from playwright.sync_api import Page

LOOKS = {
    "light": {"viewport": {"width": 1200, "height": 860}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1200, "height": 860}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light", "is_mobile": True, "has_touch": True},
}


def editing(page: Page) -> None:
    read_and_click(page.locator("assent-approval .edit"))
    page.locator("assent-approval").get_by_label("amount", exact=True).fill("5.50")
    page.get_by_text("5.50 EUR to the card").wait_for()
    page.locator("assent-approval .card").evaluate("card => card.scrollIntoView({block: 'center'})")


def opened(page: Page) -> None:
    page.locator(".row .head").first.click()
    page.locator(".row.open .card").wait_for()


def answering(page: Page) -> None:
    page.locator("assent-question").get_by_label("seats", exact=True).fill("12")
    read_and_click(page.get_by_role("button", name="Send the answer"))


def batch(page: Page) -> None:
    for row in page.locator(".row:has(input[type=checkbox])").all()[:3]:
        select(row)
    page.get_by_role("button", name="Review").click()


def unfolded(page: Page) -> None:
    page.get_by_text("Thinking", exact=True).click()


def listed(page: Page) -> None:
    page.get_by_role("button", name="1 remembered").click()


def running(page: Page) -> None:
    page.get_by_label("Message", exact=True).fill("count")
    page.keyboard.press("Enter")
    page.locator(".progress").wait_for()


def chosen(page: Page) -> None:
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Choose a file").click()
    chooser.value.element.dispatch_event("cancel")
    page.locator(".why").wait_for()


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place, browser() as launched:
        stage = Stage(Path(place))
        stage.start()
        try:
            talks = {
                word: stage.conversation(word) for word in ("refund", "patch", "book", "sign", "evil", "think", "fail")
            }
            kept = stage.waiting(stage.conversation("refund", name="kept"))
            decision = {"type": "approve", "digest": kept["digest"], "remember": "tool", "duration": "1d"}
            stage.ask("POST", f"conversations/kept/calls/{kept['call']}/resolve", {"decision": decision})
            for word in ("refund", "patch", "book", "sign", "evil"):
                stage.waiting(talks[word])
            views = {  # a place, or how to get to one of its own for each look
                "chat": (f"c/{talks['refund']}", None),
                "edit": (f"c/{talks['refund']}", editing),
                "diff": (f"c/{talks['patch']}", None),
                "question": (f"c/{talks['book']}", answering),
                "long": (f"c/{talks['sign']}", None),
                "hostile": (f"c/{talks['evil']}", None),
                "thinking": (f"c/{talks['think']}", unfolded),
                "failed": (f"c/{talks['fail']}", None),
                "remembered": ("c/kept", listed),
                "running": (lambda: f"c/{stage.conversation()}", running),
                "file": (lambda: f"c/{stage.conversation('file')}", None),
                "refused": (lambda: f"c/{stage.conversation('file')}", chosen),
                "inbox": ("inbox", None),
                "inbox-open": ("inbox", opened),
                "batch": ("inbox", batch),
                "home": ("", None),
            }
            for look, options in LOOKS.items():
                visitor = Visitor(launched, stage, "alice", **options)
                for name, (where, act) in views.items():
                    page = visitor.page(where() if callable(where) else where)
                    page.locator("assent-app .app").wait_for()
                    page.wait_for_timeout(900)  # what comes is there, and cards are armed
                    if act:
                        act(page)
                        page.wait_for_timeout(450)
                    page.screenshot(path=folder / f"{name}-{look}.png")
                    page.close()
                visitor.context.close()
        finally:
            stage.kill()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
