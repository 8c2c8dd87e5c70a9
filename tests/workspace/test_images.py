"""The read tool shows images to the model, as long as it shows the result."""

from __future__ import annotations

import hashlib
import struct
import zlib
from itertools import pairwise
from typing import Any, cast

import pytest

from holdfast import Agent, Call, Context, Result, Retention, Runtime, ScriptedModel, ToolCall, tool
from holdfast.core.images import MAX_IMAGE_BYTES
from holdfast.core.prompt.history import message_weight
from holdfast.core.prompt.images import find_images
from holdfast.core.tool import Artifact
from holdfast.core.transcript import ToolResult
from holdfast.events import CallReturned
from holdfast.hooks import after_tool
from holdfast.stores.memory import MemoryStore
from holdfast.workspace import Workspace


def png(width=3, height=2):
    """Return a PNG of one colour, made by hand."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = b"".join(b"\0" + b"\xc0\x20\x20" * width for _ in range(height))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def read(path="chart.png"):
    return [ToolCall("read", {"path": path})]


def reader(tmp_path, script, **options):
    ws = Workspace(tmp_path, mode="read_only", sandbox="none")
    model = ScriptedModel(script)
    return Agent("dev", model=model, tools=[ws.tools], **options), model


def result_in(request):
    return next(message for message in request.messages if isinstance(message, ToolResult))


async def test_an_image_that_is_read_is_part_of_the_next_request(tmp_path):
    """Images reach the model: reference and bytes, from the artifact that the result names."""
    (tmp_path / "chart.png").write_bytes(png())
    agent, model = reader(tmp_path, [read(), "A red bar."])
    async with Runtime(agent) as rt:
        assert (await rt.run("look", conversation="c")).reason == "completed"
        returned = next(event for event in await rt.history("c") if isinstance(event, CallReturned))
        assert await rt.artifact("c", returned.images[0].sha256) == png()
    assert model.requests[0].images == ()
    (image,) = model.requests[1].images
    reference = Artifact(hashlib.sha256(png()).hexdigest(), len(png()), "image/png", "chart.png")
    assert (image.artifact, image.content, image.note) == (reference, png(), "")
    assert returned.images == result_in(model.requests[1]).images == (reference,)
    assert image.call == returned.call_id
    assert returned.value["path"] == "chart.png"


async def test_an_image_is_shown_as_long_as_its_result(tmp_path):
    """After its retention the model sees a stub, and no image."""
    (tmp_path / "chart.png").write_bytes(png())
    context = Context(retention=Retention.turns(2))
    agent, model = reader(tmp_path, [read(), "A red bar.", "Yes.", "It was red."], context=context)
    async with Runtime(agent) as rt:
        for text in ("look", "sure?", "and then?"):
            await rt.run(text, conversation="c")
    assert [len(request.images) for request in model.requests] == [0, 1, 1, 0]
    assert '"images":1' in result_in(model.requests[3]).content
    assert model.requests[2].images == model.requests[1].images


async def test_an_image_that_is_too_large_is_only_described(tmp_path):
    (tmp_path / "huge.png").write_bytes(png() + bytes(5 * 1024 * 1024))
    agent, model = reader(tmp_path, [read("huge.png"), "Too large."])
    async with Runtime(agent) as rt:
        await rt.run("look")
    assert model.requests[1].images == ()
    assert "too large to be shown" in result_in(model.requests[1]).content


async def test_other_bytes_with_the_name_of_an_image_are_only_described(tmp_path):
    (tmp_path / "fake.png").write_bytes(b"\x7fELF" + bytes(2000))
    agent, model = reader(tmp_path, [read("fake.png"), "No image."])
    async with Runtime(agent) as rt:
        await rt.run("look")
    assert model.requests[1].images == ()
    assert "application/x-elf" in result_in(model.requests[1]).content


class ForgetfulStore(MemoryStore):
    async def artifact(self, sha256):
        return None


async def test_an_image_that_is_missing_from_the_store_is_not_sent(tmp_path):
    """A note says so, and the turn goes on."""
    (tmp_path / "chart.png").write_bytes(png())
    agent, model = reader(tmp_path, [read(), "I cannot see it."])
    async with Runtime(agent, store=ForgetfulStore()) as rt:
        assert (await rt.run("look")).reason == "completed"
    (image,) = model.requests[1].images
    assert image.content is None
    assert "missing from the store" in image.note


def keeper(make):
    @tool(name="make")
    async def handler(call: Call):
        """Make images."""
        return make(call)

    return handler


def many(call, count, size=0):
    images = [call.keep(png() + bytes(size) + bytes([n]), "image/png") for n in range(count)]
    return Result("made", images=images)


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda call: many(call, 9), "too_large", "at most 8 images"),
        (lambda call: many(call, 5, 5_000_000), "too_large", "20000000 bytes"),
        (lambda call: Result(1, images=[call.keep(b"%PDF-", "application/pdf")]), "invalid_result", "not application"),
        (lambda call: Result(1, images=[call.keep(b"GIF89a", "image/png")]), "invalid_result", "is image/gif, not"),
        (lambda call: Result(1, images=[call.keep("text", "image/png")]), "invalid_result", "no image"),
        (lambda call: Result(1, images=[Artifact("0" * 64, 4, "image/png")]), "invalid_result", "was not kept"),
        (lambda call: Result(1, images=cast("Any", ["chart.png"])), "invalid_result", "call.keep"),
        (lambda call: Result(1, images=cast("Any", "chart.png")), "invalid_result", "is a list"),
    ],
    ids=["nine", "bytes", "pdf", "other type", "text", "not kept", "path", "no list"],
)
async def test_a_result_with_bad_images_is_an_error(make, kind, words):
    model = ScriptedModel([[ToolCall("make")], "ok"])
    async with Runtime(Agent("a", model=model, tools=[keeper(make)])) as rt:
        await rt.run("make", conversation="c")
        returned = next(event for event in await rt.history("c") if isinstance(event, CallReturned))
    assert returned.error is not None
    assert (returned.error.kind, returned.images) == (kind, ())
    assert words in returned.error.message
    assert model.requests[1].images == ()


async def test_a_hook_can_leave_images_out_and_not_add_any():
    """A hook that replaces a result replaces its images, too."""

    @after_tool
    def hide(call, outcome):
        assert len(outcome.images) == 2
        return Result("hidden", images=outcome.images[1:])

    @after_tool
    def forge(call, outcome):
        return Result("forged", images=[Artifact("0" * 64, 4, "image/png")])

    found = []
    for hook in (hide, forge):
        model = ScriptedModel([[ToolCall("make")], "ok"])
        agent = Agent("a", model=model, tools=[keeper(lambda call: many(call, 2))], hooks=[hook])
        async with Runtime(agent) as rt:
            await rt.run("make")
        found.append(model.requests[1])
    assert [image.content for image in found[0].images] == [png() + b"\1"]
    assert found[1].images == ()
    assert "withheld" in result_in(found[1]).content


def results(*sizes):
    images = [Artifact(f"{n:064}", size, "image/png") for n, size in enumerate(sizes)]
    return [
        ToolResult(id=f"c{n}", call=f"c{n}", tool="read", ok=True, content="{}", images=(image,))
        for n, image in enumerate(images)
    ]


def test_a_request_has_a_bounded_number_of_images_and_bytes():
    """The newest are shown, and which one is the first stays the same for several requests [B63]."""
    for size, most in ((1, 20), (5_000_000, 4)):
        firsts = []
        for count in range(1, 60):
            found = find_images(results(*[size] * count))
            shown = [image.shown for image in found]
            assert shown[-1]
            assert sum(shown) <= most
            assert sum(image.artifact.size for image in found if image.shown) <= MAX_IMAGE_BYTES
            assert shown == sorted(shown)
            firsts.append(shown.index(True))
        moves = sum(before != after for before, after in pairwise(firsts))
        assert moves <= 60 / (most / 4)
        assert firsts == sorted(firsts)


def test_an_image_counts_as_1600_tokens():
    (with_image,) = results(4)
    assert message_weight(with_image) == 1 + 1600
