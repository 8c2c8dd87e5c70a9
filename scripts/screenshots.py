"""Save a screenshot of each view of the page: light, dark, phone and 200 % zoom.

Usage: scripts/screenshots.py FOLDER [VIEW...]
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from playwright.sync_api import Page
from support.browser import Stage, Visitor, browser, read_and_click, select

LOOKS = {
    "light": {"viewport": {"width": 1200, "height": 860}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1200, "height": 860}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light", "is_mobile": True, "has_touch": True},
    "zoom": {"viewport": {"width": 640, "height": 400}, "color_scheme": "light", "device_scale_factor": 2},
}


def edit_arguments(page: Page) -> None:
    read_and_click(page.locator("holdfast-approval .edit"))
    page.locator("holdfast-approval").get_by_label("amount", exact=True).fill("5.50")
    page.get_by_text("5.50 EUR to the card").wait_for()
    page.locator("holdfast-approval .card").evaluate("card => card.scrollIntoView({block: 'center'})")


def open_row(page: Page) -> None:
    page.locator(".row .head").first.click()
    page.locator(".row.open .card").wait_for()


def open_bar(page: Page) -> None:
    page.locator("svg.lanes g").first.click()


def answer_question(page: Page) -> None:
    page.locator("holdfast-question").get_by_label("seats", exact=True).fill("12")
    read_and_click(page.get_by_role("button", name="Send the answer"))


def review_batch(page: Page) -> None:
    for row in page.locator(".row:has(input[type=checkbox])").all()[:3]:
        select(row)
    page.get_by_role("button", name="Review").click()


def offer_more_time(page: Page) -> None:
    page.get_by_role("button", name="More time").click()


def open_group(page: Page) -> None:
    page.locator("holdfast-calls summary").first.click()
    page.locator("holdfast-calls").scroll_into_view_if_needed()


def pick_time(page: Page) -> None:
    page.get_by_label("starts", exact=True).fill("2026-07-31T14:30")


def remember_for_user(page: Page) -> None:
    page.get_by_label("Remember").select_option("tool")
    page.get_by_label("where").select_option("user")
    page.locator(".covers").scroll_into_view_if_needed()


def ask_to_stop(page: Page) -> None:
    page.get_by_role("button", name="Stop", exact=True).click()


def approve_as(stage: Stage, conversation: str, *people: str) -> None:
    call = stage.pending_call(conversation)
    for who in people:
        decision = {"type": "approve", "digest": call["digest"]}
        stage.ask("POST", f"conversations/{conversation}/calls/{call['call']}/resolve", {"decision": decision}, who)


def unfold_thinking(page: Page) -> None:
    page.get_by_text("Thinking", exact=True).click()


def list_remembered(page: Page) -> None:
    page.get_by_role("button", name="1 remembered").click()


def start_run(page: Page) -> None:
    page.get_by_label("Message", exact=True).fill("count")
    page.keyboard.press("Enter")
    page.locator(".progress").wait_for()


def cancel_file_chooser(page: Page) -> None:
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Choose a file").click()
    chooser.value.element.dispatch_event("cancel")
    page.locator(".why").wait_for()


def main(folder: Path, *only: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place, browser() as launched:
        stage = Stage(Path(place))
        stage.start()
        try:
            talks = {
                word: stage.conversation(word)
                for word in (
                    *("refund", "patch", "book", "sign", "evil", "think", "fail"),
                    *("publish", "transfer", "rent", "reprint", "parcels", "meet", "links"),
                )
            }
            approve_as(stage, talks["publish"], "ada")
            approve_as(stage, talks["transfer"], "ben")
            approve_as(stage, talks["rent"], "ada", "ben")
            kept = stage.pending_call(stage.conversation("refund", name="kept"))
            decision = {"type": "approve", "digest": kept["digest"], "remember": "tool", "duration": "1d"}
            stage.ask("POST", f"conversations/kept/calls/{kept['call']}/resolve", {"decision": decision})
            for word in ("refund", "patch", "book", "sign", "evil"):
                stage.pending_call(talks[word])
            views = {  # name -> (path, or a function that creates one per look; an action on the page)
                "chat": (f"c/{talks['refund']}", None),
                "edit": (f"c/{talks['refund']}", edit_arguments),
                "diff": (f"c/{talks['patch']}", None),
                "votes": (f"c/{talks['publish']}", offer_more_time),
                "requester": (f"c/{talks['transfer']}", None),
                "asked-again": (f"c/{talks['rent']}", None),
                "folded": (f"c/{talks['reprint']}", None),
                "scope": (f"c/{talks['reprint']}", remember_for_user),
                "group": (f"c/{talks['parcels']}", open_group),
                "times": (f"c/{talks['meet']}", pick_time),
                "links": (f"c/{talks['links']}", None),
                "stopping": (f"c/{talks['parcels']}", ask_to_stop),
                "question": (f"c/{talks['book']}", answer_question),
                "long": (f"c/{talks['sign']}", None),
                "hostile": (f"c/{talks['evil']}", None),
                "thinking": (f"c/{talks['think']}", unfold_thinking),
                "failed": (f"c/{talks['fail']}", None),
                "remembered": ("c/kept", list_remembered),
                "running": (lambda: f"c/{stage.conversation()}", start_run),
                "file": (lambda: f"c/{stage.conversation('file')}", None),
                "refused": (lambda: f"c/{stage.conversation('file')}", cancel_file_chooser),
                "inbox": ("inbox", None),
                "inbox-open": ("inbox", open_row),
                "batch": ("inbox", review_batch),
                "history": ("history", None),
                "timeline": ("t/kept", open_bar),
                "home": ("", None),
            }
            for look, options in LOOKS.items():
                visitor = Visitor(launched, stage, "alice", **options)
                for name, (where, act) in views.items():
                    if only and name not in only:
                        continue
                    page = visitor.page(where() if callable(where) else where)
                    page.locator("holdfast-app .app").wait_for()
                    page.wait_for_timeout(900)  # until the view is complete and the cards accept clicks
                    if act:
                        act(page)
                        page.wait_for_timeout(450)
                    page.screenshot(path=folder / f"{name}-{look}.png")
                    page.close()
                visitor.context.close()
        finally:
            stage.kill()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
