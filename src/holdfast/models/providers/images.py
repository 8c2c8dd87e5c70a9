"""The images of a request as each provider takes them.

Providers differ in the types, sizes and numbers that they accept, and in whether a tool's result may have an image. A
request that breaks a rule fails as a whole, and so would every later request of the conversation. So an image that the
provider or the model would refuse is replaced by a sentence that says why.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from holdfast.core.images import IMAGE_TYPES, image_side
from holdfast.models.base import RequestImage

_ANY_BYTES = 1 << 40


class ImageRules(msgspec.Struct, frozen=True, kw_only=True):
    """The images that a provider accepts. Sizes are those of the base64 text, which the providers count."""

    types: tuple[str, ...] = IMAGE_TYPES
    image_bytes: int = _ANY_BYTES
    request_bytes: int = _ANY_BYTES
    count: int = 1000
    side: int = 1 << 32
    """Pixels of the longer side."""
    in_results: bool = False
    """Whether a tool's result may have images; if not, they follow the results, as a user's message."""


NO_IMAGES = ImageRules(types=())
_RULES: Mapping[str, ImageRules] = {
    "anthropic": ImageRules(image_bytes=10 * 1024 * 1024, count=100, side=8000, in_results=True),
    "openai": ImageRules(in_results=True),
    "openai-chat": ImageRules(),
    "google": ImageRules(types=("image/png", "image/jpeg", "image/webp"), in_results=True),
    "groq": ImageRules(request_bytes=4_000_000, count=5),
    "deepseek": NO_IMAGES,
    "deepseek-responses": NO_IMAGES,
}
_GROQ_MODELS = re.compile(r"llama-4|qwen3\.\d|vision|-vl", re.IGNORECASE)
"""The models of Groq that take images; the layer has no list of them."""


def image_rules(provider: str, model: str, profile: Mapping[str, Any], wanted: bool | None = None) -> ImageRules:
    """Return the rules of a model.

    profile:  the layer's facts about the model
    wanted:   whether the model takes images, as the application says; None: as far as it is known here
    """
    rules = _RULES[provider]
    if wanted is not None:
        return (ImageRules() if rules is NO_IMAGES else rules) if wanted else NO_IMAGES
    known = provider != "groq" or _GROQ_MODELS.search(model)
    return rules if known and profile.get("supports_image_input", True) else NO_IMAGES


def choose_images(images: Sequence[RequestImage], rules: ImageRules) -> dict[str, list[RequestImage]]:
    """Return the images by call; one that the model does not take has a note in place of its content.

    The newest images count first, if the provider does not take all of them.
    """
    chosen: dict[str, list[RequestImage]] = {}
    count = total = 0
    for image in reversed(images):
        size = 4 * -(-len(image.content) // 3) if image.content is not None else 0
        if image.content is not None and (note := _refusal(image, size, count, total, rules)):
            image = RequestImage(call=image.call, artifact=image.artifact, note=note)
        if image.content is not None:
            count, total = count + 1, total + size
        chosen.setdefault(image.call, []).insert(0, image)
    return chosen


def _refusal(image: RequestImage, size: int, count: int, total: int, rules: ImageRules) -> str:
    """Return why the provider does not take the image; empty if it does."""
    if not rules.types:
        return "this model takes no images"
    if image.artifact.media_type not in rules.types:
        return f"this model takes only {', '.join(rules.types)}; convert it"
    if size > rules.image_bytes or size > rules.request_bytes:
        return "it is too large for this model; make a smaller copy"
    if image.content is not None and (image_side(image.content) or 0) > rules.side:
        return f"its longer side has more than {rules.side} pixels; make a smaller copy"
    if count >= rules.count or total + size > rules.request_bytes:
        return "newer images fill the request; make the call again to see it"
    return ""


def describe_refused(images: Sequence[RequestImage]) -> str:
    """Return a line for each of the images that is not sent."""
    return "".join(f"\n[{_describe(image)} is not shown: {image.note}]" for image in images if image.content is None)


def label_image(tool: str, call: str, image: RequestImage) -> str:
    """Return the line that stands before an image outside of its result, so that nobody takes it for a user's."""
    return f"[{_describe(image)}, from the result of {tool}, call {call}]"


def _describe(image: RequestImage) -> str:
    named = f" {image.artifact.name!r}" if image.artifact.name else ""
    return f"image{named} ({image.artifact.media_type}, {image.artifact.size} bytes)"
