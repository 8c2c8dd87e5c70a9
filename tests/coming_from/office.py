"""The outside world of the programs: an address book, and an outbox that tests can count.

OFFICE_DIES=1 kills the process after a mail has gone out, before the program hears of it.
"""

import os
import signal
from pathlib import Path

OUTBOX = Path("outbox.txt")


def look_up(name: str) -> str:
    """Return the mail address of a person."""
    return f"{name.lower()}@example.org"


def deliver(to: str, text: str) -> str:
    """Send a mail, and return the receipt."""
    with OUTBOX.open("a") as outbox:
        outbox.write(f"{to}: {text}\n")
    if os.environ.get("OFFICE_DIES"):
        os.kill(os.getpid(), signal.SIGKILL)
    return f"sent to {to}"
