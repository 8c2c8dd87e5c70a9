"""Load the images of a model request from the store."""

from __future__ import annotations

import logging

from msgspec.structs import replace

from holdfast.core.prompt.images import NamedImage, find_images
from holdfast.errors import StoreDamaged
from holdfast.models.base import Request, RequestImage
from holdfast.stores.base import LogStore

log = logging.getLogger("holdfast")

LEFT_OUT_NOTE = "newer images fill the request; make the call again to see it"
MISSING_NOTE = "its content is missing from the store"


async def load_images(store: LogStore, request: Request) -> Request:
    """Return the request with the images that its results name; each content is read once.

    An image whose content is missing or damaged is not sent: its note says so, and the conversation goes on.
    """
    named = find_images(request.messages)
    if not named and not request.images:
        return request
    contents: dict[str, bytes | None] = {}
    for image in named:
        if image.shown and image.artifact.sha256 not in contents:
            contents[image.artifact.sha256] = await _read_content(store, request.conversation, image)
    return replace(request, images=tuple(_to_request_image(image, contents) for image in named))


async def _read_content(store: LogStore, conversation: str, image: NamedImage) -> bytes | None:
    sha256 = image.artifact.sha256
    try:
        content = await store.artifact(sha256)
    except StoreDamaged as problem:
        content = None
        log.warning("conversation %s: image %s is damaged: %s", conversation, sha256, problem)
    else:
        if content is None:
            log.warning("conversation %s: image %s is missing from the store", conversation, sha256)
    return content


def _to_request_image(image: NamedImage, contents: dict[str, bytes | None]) -> RequestImage:
    content = contents.get(image.artifact.sha256) if image.shown else None
    note = "" if content is not None else MISSING_NOTE if image.shown else LEFT_OUT_NOTE
    return RequestImage(call=image.call, artifact=image.artifact, content=content, note=note)
