"""Images in results: which ones a model is shown, and what the runtime checks before.

A provider refuses a whole request because of one bad image, and the image would be part of every later request of the
conversation. So type and content are checked before a result is logged.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from holdfast.core.tool import Artifact
from holdfast.errors import Invalid

IMAGE_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
"""Media types that models accept as images, and that browsers show without running anything in them."""
MAX_IMAGES = 8
"""Images of one result."""
MAX_IMAGE_BYTES = 20_000_000
"""Bytes of the images of one result, and of one request."""
MAX_SHOWN_IMAGES = 20
"""Images of one request: with more, Anthropic refuses images of over 2,000 pixels."""
IMAGE_TOKENS = 1_600
"""The estimated tokens of an image, whatever its size: Anthropic's count for an image of 1.15 megapixels."""

_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)


def image_type(head: bytes) -> str | None:
    """Return the media type of an image, by its first bytes; None for anything else."""
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for magic, kind in _MAGIC if head.startswith(magic)), None)


def image_side(content: bytes) -> int | None:
    """Return the pixels of an image's longer side; None if its header is not understood."""
    try:
        match image_type(content[:16]):
            case "image/png":
                return max(struct.unpack_from(">II", content, 16))
            case "image/gif":
                return max(struct.unpack_from("<HH", content, 6))
            case "image/webp":
                return _webp_side(content)
            case "image/jpeg":
                return _jpeg_side(content)
            case _:
                return None
    except (struct.error, IndexError):
        return None  # cut off


def _webp_side(content: bytes) -> int | None:
    match content[12:16]:
        case b"VP8X":
            return 1 + max(int.from_bytes(content[24:27], "little"), int.from_bytes(content[27:30], "little"))
        case b"VP8L":
            bits = int.from_bytes(content[21:25], "little")
            return 1 + max(bits & 0x3FFF, bits >> 14 & 0x3FFF)
        case b"VP8 ":
            return max(side & 0x3FFF for side in struct.unpack_from("<HH", content, 26))
        case _:
            return None


def _jpeg_side(content: bytes) -> int | None:
    at = 2
    while content[at] == 0xFF:
        marker = content[at + 1]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # a frame, not a table
            return max(struct.unpack_from(">HH", content, at + 5))
        at += 1 if marker == 0xFF else 2 + struct.unpack_from(">H", content, at + 2)[0]
    return None


def check_images(images: Any, kept: Mapping[Artifact, bytes]) -> tuple[Artifact, ...]:
    """Return the images of a result; raise Invalid unless each is a reference to an image that the call kept.

    kept:  the bytes that the call kept. An image that it did not keep could belong to another conversation.
    """
    if not isinstance(images, list | tuple):
        raise Invalid(f"Result: images is a list of references that call.keep returned, not {images!r:.80}")
    found: list[Artifact] = []
    for image in cast("Sequence[Any]", images):
        if not isinstance(image, Artifact):
            raise Invalid(f"Result: an image is a reference that call.keep returned, not {image!r:.80}")
        if image.media_type not in IMAGE_TYPES:
            raise Invalid(f"Result: models take {', '.join(IMAGE_TYPES)}, not {image.media_type}; convert the image")
        if (content := kept.get(image)) is None:
            raise Invalid(f"Result: image {image.name or image.sha256} was not kept by this call: use call.keep")
        if (real := image_type(content[:16])) != image.media_type:
            raise Invalid(f"Result: image {image.name or image.sha256} is {real or 'no image'}, not {image.media_type}")
        found.append(image)
    if len(found) > MAX_IMAGES or total_bytes(found) > MAX_IMAGE_BYTES:
        raise Invalid(
            f"a result has at most {MAX_IMAGES} images with {MAX_IMAGE_BYTES} bytes in all, not {len(found)} with "
            f"{total_bytes(found)} bytes",
            kind="too_large",
        )
    return tuple(found)


def total_bytes(images: Iterable[Artifact]) -> int:
    """Return the bytes of these images together."""
    return sum(image.size for image in images)
