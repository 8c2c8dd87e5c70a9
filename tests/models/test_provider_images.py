"""Images of results reach each provider in a form that it accepts, or a sentence says why not."""

from __future__ import annotations

import base64
import hashlib
import json
import struct

import msgspec
import pytest
from support.model_requests import ask, assistant, offer, request, result, use, user
from support.strict_google import inline_data
from support.strict_server import StrictServer

from holdfast import Artifact
from holdfast.core.images import image_side
from holdfast.models import RequestImage
from holdfast.models.providers import ProviderModel
from holdfast.models.providers.images import choose_images, image_rules

PNG = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", 40, 30) + bytes(range(256))
GIF = b"GIF89a" + bytes(100)
LOOK = use("look", "id-1")
OTHER = use("look", "id-2")
TOOLS = (offer("look"),)


def image(content: bytes | None = PNG, media_type="image/png", name="chart.png", call="id-1", size=None):
    sha256 = hashlib.sha256(content or b"").hexdigest()
    artifact = Artifact(sha256, len(content or b"") if size is None else size, media_type, name)
    return RequestImage(call=call, artifact=artifact, content=content, note="" if content else "it is missing")


def history(*images):
    named = [one.artifact for one in images if one.call == "id-1"]
    others = [one.artifact for one in images if one.call == "id-2"]
    calls = [user("look"), assistant("", LOOK, OTHER), result(LOOK, images=named), result(OTHER, images=others)]
    return request(*calls, tools=TOOLS, images=images)


def groq(server):
    return server.groq.replace("openai/gpt-oss-120b", "meta-llama/llama-4-scout-17b-16e-instruct")


async def send(side, *images, name=None, messages=(), **options):
    """Send a history with these images to a strict provider; return the body that it received."""
    with StrictServer(["I see it."]) as server:
        model = ProviderModel(name(server) if name else getattr(server, side), key="k", **options)
        sent = history(*images)
        sent = msgspec.structs.replace(sent, messages=[*sent.messages, *messages])
        await ask(model, sent)
    assert server.refused == []
    return server.requests[0].body


ENCODED = base64.b64encode(PNG).decode()


async def test_anthropic_gets_the_image_inside_the_result():
    body = await send("anthropic", image(), image(GIF, "image/gif", call="id-2"))
    first, second = body["messages"][-1]["content"]
    assert [block["type"] for block in first["content"]] == ["text", "image"]
    assert first["content"][1]["source"] == {"type": "base64", "media_type": "image/png", "data": ENCODED}
    assert second["content"][1]["source"]["media_type"] == "image/gif"


async def test_openai_responses_gets_the_image_inside_the_output_of_the_function():
    body = await send("responses", image())
    output = next(item["output"] for item in body["input"] if item.get("type") == "function_call_output")
    assert [part["type"] for part in output] == ["input_text", "input_image"]
    assert output[1]["image_url"] == f"data:image/png;base64,{ENCODED}"


async def test_gemini_gets_the_image_inside_the_response_of_the_function():
    body = await send("google", image())
    response = body["contents"][-1]["parts"][0]["functionResponse"]
    assert inline_data(response["parts"][0]) == ("image/png", ENCODED)
    assert json.loads(next(iter(response["response"].values()))) == {"ok": True, "result": 1}


async def test_an_older_gemini_gets_the_image_after_the_responses():
    body = await send("google", image(), name=lambda server: server.google.replace("3-pro-preview", "2.5-pro"))
    assert "parts" not in body["contents"][-2]["parts"][0]["functionResponse"]
    assert [found for found in map(inline_data, body["contents"][-1]["parts"]) if found] == [("image/png", ENCODED)]


@pytest.mark.parametrize("side", ["openai", "groq"])
async def test_the_chat_api_gets_the_image_after_all_results_of_the_reply(side):
    """The chat API takes no images in results, and no message between the results of one reply."""
    name = groq if side == "groq" else None
    body = await send(side, image(), name=name, messages=[user("and now?")])
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "tool", "tool", "user", "user"]
    label, shown = body["messages"][4]["content"]
    assert label["text"] == f"[image 'chart.png' (image/png, {len(PNG)} bytes), from the result of look, call id-1]"
    assert shown["image_url"]["url"] == f"data:image/png;base64,{ENCODED}"
    assert body["messages"][2]["content"] == '{"ok":true,"result":1}'
    assert "and now?" in json.dumps(body["messages"][5])


async def test_an_injected_text_stands_after_the_image():
    """Injected texts are not sent again: what stands before them must not move at the next step [B63]."""
    sent = msgspec.structs.replace(history(image()), injected=("remember this",))
    with StrictServer(["I see it."]) as server:
        await ask(ProviderModel(server.openai, key="k"), sent)
    kinds = [json.dumps(message["content"]) for message in server.requests[0].body["messages"][-2:]]
    assert "image_url" in kinds[0]
    assert "remember this" in kinds[1]


@pytest.mark.parametrize("side", ["groq", "deepseek"])
async def test_a_model_without_image_input_gets_a_sentence_instead(side):
    body = await send(side, image())
    text = json.dumps(body)
    assert "is not shown: this model takes no images" in text
    assert "image_url" not in text
    assert ENCODED not in text


async def test_a_server_of_your_own_can_be_said_to_take_no_images():
    assert "this model takes no images" in json.dumps(await send("openai", image(), images=False))


async def test_gemini_takes_no_gif():
    assert "takes only image/png, image/jpeg, image/webp" in json.dumps(
        await send("google", image(GIF, "image/gif", "dance.gif"))
    )


@pytest.mark.parametrize("side", ["anthropic", "openai", "responses", "google", "groq", "deepseek"])
async def test_an_image_without_content_is_described_to_every_provider(side):
    """Nothing is sent for an image whose content is missing: a sentence says so."""
    text = json.dumps(await send(side, image(None, size=7)))
    assert "image 'chart.png' (image/png, 7 bytes) is not shown: it is missing" in text


def test_the_newest_images_count_if_the_provider_does_not_take_all():
    rules = image_rules("groq", "meta-llama/llama-4-scout", {})
    chosen = choose_images([image(call=f"c{n}") for n in range(7)], rules)
    assert [bool(chosen[f"c{n}"][0].content) for n in range(7)] == [False, False, True, True, True, True, True]
    large = choose_images([image(PNG + bytes(4_000_000), call="c")], rules)
    assert "too large" in large["c"][0].note


def header(kind, width, height):
    """Return the beginning of an image, as its format's specification says."""
    w, h = width - 1, height - 1
    riff = b"RIFF" + bytes(4) + b"WEBP"
    return {
        "png": b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", width, height),
        "gif": b"GIF89a" + struct.pack("<HH", width, height),
        "jpeg": b"\xff\xd8\xff\xe0" + struct.pack(">H", 16) + bytes(14) + b"\xff\xff\xc4" + struct.pack(">H", 4) + b"ab"
        b"\xff\xc2" + struct.pack(">HBHH", 17, 8, height, width),
        "lossy": riff + b"VP8 " + bytes(4) + bytes(3) + b"\x9d\x01\x2a" + struct.pack("<HH", width, height),
        "lossless": riff + b"VP8L" + bytes(4) + b"\x2f" + struct.pack("<I", w | h << 14),
        "extended": riff + b"VP8X" + bytes(8) + w.to_bytes(3, "little") + h.to_bytes(3, "little"),
    }[kind]


@pytest.mark.parametrize("kind", ["png", "gif", "jpeg", "lossy", "lossless", "extended"])
def test_the_longer_side_of_an_image_is_read_from_its_header(kind):
    assert image_side(header(kind, 300, 9001)) == image_side(header(kind, 9001, 2)) == 9001
    for n in range(20):
        image_side(header(kind, 300, 9001)[:n])  # a header that is cut off raises nothing


async def test_anthropic_gets_no_image_with_more_pixels_than_it_takes():
    """A long screenshot would block the conversation: Anthropic refuses the request as a whole."""
    text = json.dumps(await send("anthropic", image(header("png", 800, 8001) + bytes(100))))
    assert "its longer side has more than 8000 pixels" in text
    assert '"type": "image"' not in text


@pytest.mark.parametrize("side", ["anthropic", "openai", "responses", "google"])
async def test_requests_with_the_same_image_begin_with_the_same_bytes(side):
    """The next step's request begins with this one, images included [B63]."""
    key = {"responses": "input", "google": "contents"}.get(side, "messages")
    before = (await send(side, image()))[key]
    after = (await send(side, image(), messages=[assistant("I see it."), user("thanks")]))[key]
    uncached = json.dumps(after[: len(before)]).replace(', "cache_control": {"type": "ephemeral"}', "")
    assert uncached == json.dumps(before).replace(', "cache_control": {"type": "ephemeral"}', "")
