"""Which text of the log a search finds: messages, replies, and the titles that people give.

Arguments and results of tools are left out: they are data, and often long or confidential.
"""

from __future__ import annotations

from holdfast.core.events import AnyEvent, AsideAnswered, AssistantSaid, ConversationRenamed, MessageReceived


def has_text(event: AnyEvent) -> bool:
    """Return whether a search may find text of this event."""
    return isinstance(event, MessageReceived | ConversationRenamed) or bool(text_of(event))


def text_of(event: AnyEvent) -> str:
    """Return the text of a message or a reply; empty for other events."""
    return event.text if isinstance(event, MessageReceived | AssistantSaid | AsideAnswered) else ""
