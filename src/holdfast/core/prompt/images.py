"""The images of a model request: those of the results that it shows, within limits.

Retention, window and budget decide which results are shown, and an image counts as 1,600 tokens there. On top of that
a request has at most 20 images with 20 MB in all: the newest. Which one is the first does not move at every new image,
so that the prefix of the request stays the same for a while: see ``compaction``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from holdfast.core.images import MAX_IMAGE_BYTES, MAX_SHOWN_IMAGES
from holdfast.core.prompt.compaction import roundest
from holdfast.core.tool import Artifact
from holdfast.core.transcript import Message, ToolResult


class NamedImage(msgspec.Struct, frozen=True):
    """An image that a result of a request names."""

    call: str
    artifact: Artifact
    shown: bool
    """False: it is left out, because newer images fill the request."""


def find_images(messages: Iterable[Message]) -> list[NamedImage]:
    """Return the images that the results among the messages name, in their order."""
    named = [
        (message.call, image) for message in messages if isinstance(message, ToolResult) for image in message.images
    ]
    first = _first_shown([image.size for _, image in named])
    return [NamedImage(call, image, n >= first) for n, (call, image) in enumerate(named)]


def _first_shown(sizes: Sequence[int]) -> int:
    first = _first_fitting(sizes, 1.0)
    return roundest(first, _first_fitting(sizes, 3 / 4)) if first else 0


def _first_fitting(sizes: Sequence[int], share: float) -> int:
    """Return the index from which all images fit into this share of the limits; at least the last image is shown."""
    count = total = 0
    for size in reversed(sizes):
        total += size
        if count and (count >= MAX_SHOWN_IMAGES * share or total > MAX_IMAGE_BYTES * share):
            break
        count += 1
    return len(sizes) - count
