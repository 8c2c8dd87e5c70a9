"""Garbage in a process that runs agents for long: looked for seldom, and not among what is loaded."""

from __future__ import annotations

import gc

NEW = 20_000
"""New objects after which garbage is looked for. At Python's own 700 that took 4% of the time of 6,000 decisions, and 8
to 10% of the client's processor time for appends by 500 conversations at once."""


def spare() -> None:
    """For a process that is all ours, once it is ready: what is loaded stays, and looking it over for garbage would
    hold up somebody now and then."""
    gc.freeze()
    gc.set_threshold(NEW, *gc.get_threshold()[1:])
