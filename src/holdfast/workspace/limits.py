"""Every limit of the workspace tools, as one value with defaults."""

from __future__ import annotations

import msgspec

KIB = 1024
MIB = 1024 * KIB


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the workspace tools. Each one bounds memory, time or what the model is sent."""

    read_lines: int = 2000
    """Lines that one read returns."""
    read_bytes: int = 48 * KIB
    """Bytes that one read returns."""
    line_characters: int = 2000
    """Characters of one line; the rest of a longer line is cut, with a marker."""
    paged_bytes: int = 64 * MIB
    """A larger file is only read in pages: its lines are not counted."""
    image_bytes: int = 5 * MIB
    """A larger image is described, not sent."""
    inline_diff_bytes: int = 32 * KIB
    """A longer diff is an artifact; the plan has its head."""
    command_seconds: float = 120
    """The default time limit of a command, by the wall clock."""
    max_command_seconds: float = 600
    """The longest time limit that a call may ask for."""
    output_bytes: int = 8000
    """Bytes of the head, and of the tail, of a command's output that the model sees."""
    kept_output_bytes: int = 1 * MIB
    """Bytes of the head, and of the tail, of a command's output that are kept in memory."""
    output_artifact_bytes: int = 10 * MIB
    """Bytes of a command's output that are kept as an artifact."""
    commands: int = 4
    """Commands that run at once."""
    queued_commands: int = 16
    """Commands that wait for one of these; one more is refused."""
    queue_seconds: float = 5
    """Seconds that a command waits before it is refused."""
    matches: int = 100
    """Matches that one grep returns."""
    search_seconds: float = 30
    """The time limit of one grep or glob."""
    search_bytes: int = 8 * MIB
    """Bytes of ripgrep's output that are read."""
    entries: int = 1000
    """Paths that one glob or list returns."""
    scanned_bytes: int = 4096 * MIB
    """Bytes of a file that one read passes on the way to its page."""
    edited_bytes: int = 16 * MIB
    """A larger file cannot be written, edited or patched."""
    conflict_diff_bytes: int = 6000
    """A longer diff since the last read is not sent with a conflict: the file is to be read again."""
