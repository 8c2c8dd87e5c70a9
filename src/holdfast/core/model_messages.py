"""Requests that a handler makes to the agent's model with ``call.ask_model``, and the answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, cast

import msgspec

from holdfast.core.events import Usage
from holdfast.core.images import IMAGE_TOKENS, IMAGE_TYPES, MAX_IMAGE_BYTES, MAX_SHOWN_IMAGES, image_type
from holdfast.core.json_values import check_plain_no_nul
from holdfast.core.prompt.history import estimate_tokens
from holdfast.errors import Invalid

MAX_MESSAGES = 1_000


class ModelMessage(msgspec.Struct, frozen=True):
    """A message for ``call.ask_model``.

    images:  the bytes of PNG, JPEG, GIF or WebP images, in messages of the user only. A model that takes no images is
             told that one is missing
    """

    role: Literal["user", "assistant"]
    text: str = ""
    images: tuple[bytes, ...] = ()


class ModelQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request of a handler."""

    messages: tuple[ModelMessage, ...]
    instructions: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    stop: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """The estimated tokens of the request."""
        texts = (self.instructions, *(message.text for message in self.messages))
        images = sum(len(message.images) for message in self.messages)
        return sum(map(estimate_tokens, texts)) + IMAGE_TOKENS * images


class ModelAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The model's answer to ``call.ask_model``."""

    text: str
    model: str
    """The name of the model that answered: the agent's, or one of its fallbacks."""
    finish: str = "stop"
    """The provider's reason for the end: ``stop``, ``length``, ..."""
    usage: Usage = Usage()
    """The tokens and the cost of the request. They are logged and count toward the turn's limits by themselves."""


def check_question(
    messages: str | Iterable[ModelMessage],
    *,
    instructions: str = "",
    max_tokens: int | None = None,
    temperature: float | None = None,
    stop: Iterable[str] = (),
) -> ModelQuestion:
    """Return the request of a handler; raise Invalid for one that cannot be sent to a model."""
    given = [ModelMessage("user", messages)] if isinstance(messages, str) else list(messages)
    if not 0 < len(given) <= MAX_MESSAGES or not all(isinstance(message, ModelMessage) for message in given):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise Invalid(f"ask_model: messages must be text or a list of 1 to {MAX_MESSAGES} ModelMessage objects")
    for message in given:
        _check_message(message)
    check_plain_no_nul(instructions, "instructions")
    if max_tokens is not None and (not isinstance(cast("Any", max_tokens), int) or max_tokens < 1):
        raise Invalid(f"ask_model: max_tokens must be a whole number of at least 1, not {max_tokens!r:.80}")
    if temperature is not None and not _is_number(temperature):
        raise Invalid(f"ask_model: temperature must be a number, not {temperature!r:.80}")
    words = tuple(stop)
    if isinstance(stop, str) or not all(isinstance(cast("Any", word), str) for word in words):
        raise Invalid(f"ask_model: stop must be a list of texts, not {stop!r:.80}")
    images = [image for message in given for image in message.images]
    if len(images) > MAX_SHOWN_IMAGES or sum(map(len, images)) > MAX_IMAGE_BYTES:
        raise Invalid(
            f"ask_model: a request can have at most {MAX_SHOWN_IMAGES} images, with {MAX_IMAGE_BYTES} bytes in all",
            kind="too_large",
        )
    return ModelQuestion(
        messages=tuple(given), instructions=instructions, max_tokens=max_tokens, temperature=temperature, stop=words
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e9 < value < 1e9


def _check_message(message: ModelMessage) -> None:
    if message.role not in ("user", "assistant"):
        raise Invalid(f'ask_model: a message\'s role is "user" or "assistant", not {message.role!r:.80}')
    check_plain_no_nul(message.text, "message")
    if message.images and message.role != "user":
        raise Invalid("ask_model: only user messages can have images")
    for image in message.images:
        if image_type(image[:16]) is None:
            raise Invalid(f"ask_model: an image must be bytes of one of these types: {', '.join(IMAGE_TYPES)}")
