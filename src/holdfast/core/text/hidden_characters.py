"""Find the characters that a reader cannot see: controls, bidirectional overrides, zero-width and blank letters."""

from __future__ import annotations

import re
import unicodedata

HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Co", "Cs", "Zl", "Zp"})
_BLANK = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\uffa0\ufe00-\ufe0e\U000e0000-\U000e0fff]")
"""Invisible letters and marks that Unicode classifies as neither control nor format characters."""


def is_hidden(char: str) -> bool:
    """Return whether a reader cannot see this character; newlines and tabs are hidden, too."""
    return unicodedata.category(char) in HIDDEN_CATEGORIES or _BLANK.match(char) is not None
