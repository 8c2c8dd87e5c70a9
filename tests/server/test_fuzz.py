"""Fuzzing: every response is one that the OpenAPI document names, and never a 500."""

import asyncio
import threading
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import CHECKS, load_all_checks
from support.web_site import TOKEN, desk, site

from holdfast import ToolCall
from holdfast.server import openapi

DOCUMENT = openapi.build_document()
schema = schemathesis.openapi.from_dict(DOCUMENT)
FUZZ_SETTINGS = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
    derandomize=True,
    database=None,
)
HEADERS = {"authorization": f"Bearer {TOKEN}"}
load_all_checks()
RESPONSE_CHECKS = CHECKS.get_by_names(
    ["not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"]
)


def test_the_document_requires_the_digest_in_an_approval():
    approve = DOCUMENT["components"]["schemas"]["GivenApprove"]
    assert "digest" in approve["required"]
    assert approve["properties"]["digest"] == {"type": "string"}


@pytest.fixture(scope="module")
def served():
    """The address and the path parameters of a server in a thread; a call of every kind is pending there."""
    started, stop = threading.Event(), None
    real = {}

    async def run():
        nonlocal stop
        calls = [
            ToolCall("refund", {"order": 1, "amount": 1.0}),
            ToolCall("choose", {"colours": []}),
            ToolCall("locate", {}),
        ]
        async with site(desk(["?", *calls], "done")) as s:
            await s.post("/api/conversations", {"id": "c"}, 201)
            await s.post("/api/conversations/c/clients", {"client": "tab"})
            await s.post("/api/conversations/c/messages", {"text": "hi"}, 202)
            entries = await s.pending(3)
            real.update(
                base=s.base,
                conversation="c",
                client="tab",
                call=entries[0]["call"],
                grant="g1",
                delegation="d2",
                sha256="0" * 64,
            )
            stop = asyncio.Event()
            loop = asyncio.get_running_loop()
            real["stop"] = lambda: loop.call_soon_threadsafe(stop.set)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert started.wait(60)
    yield real
    real["stop"]()
    thread.join(60)


def make_test_of(operation):
    """Return the test of one operation. One test of all operations would repeat an id, which a parallel run refuses."""

    @schema.include(operation_id=operation).parametrize()
    @FUZZ_SETTINGS
    def test(case, served):
        case.call_and_validate(base_url=served["base"], headers=HEADERS, checks=RESPONSE_CHECKS)
        case.path_parameters = {name: served[name] for name in case.path_parameters or {}}
        case.call_and_validate(base_url=served["base"], headers=HEADERS, checks=RESPONSE_CHECKS)

    return test


OPERATIONS = [
    operation["operationId"]
    for path, operations in DOCUMENT["paths"].items()
    for operation in operations.values()
    if not path.endswith("/events")  # these responses do not end
]
for each in OPERATIONS:
    globals()[f"test_every_response_is_in_the_document_{each}"] = make_test_of(each)


@given(name=st.text(min_size=1), after=st.text(), last=st.text(alphabet=st.characters(max_codepoint=255)))
@FUZZ_SETTINGS
def test_a_stream_request_with_any_name_and_position_is_never_a_server_error(served, name, after, last):
    last = "".join(char for char in last if char.isprintable()).strip()
    for conversation in (name, "c"):
        url = f"{served['base']}/api/conversations/{quote(conversation, safe='')}/events?after={quote(after)}"
        headers: Any = HEADERS | {"last-event-id": last.encode("latin-1")}
        with httpx.stream("GET", url, headers=headers, trust_env=False) as response:
            assert response.status_code in (200, 404, 422)


@given(raw=st.binary(max_size=200))
@FUZZ_SETTINGS
def test_any_bytes_as_a_path_or_a_body_are_never_a_server_error(served, raw):
    with httpx.Client(base_url=served["base"], headers=HEADERS, trust_env=False) as http:
        path = "".join(f"%{byte:02x}" for byte in raw)
        assert http.get(f"/api/conversations/{path}").status_code in (200, 404, 405, 422)
        assert http.get(f"/{path}").status_code in (200, 404, 422)
        for where in ("/api/conversations", "/api/conversations/c/messages", "/api/pending/resolve"):
            answer = http.post(where, content=raw, headers={"content-type": "application/json"})
            assert answer.status_code in (201, 202, 409, 422)


def test_the_document_has_every_route_once_and_the_main_types():
    operations = [one["operationId"] for path in DOCUMENT["paths"].values() for one in path.values()]
    assert len(operations) == len(set(operations)) == 31
    assert len(OPERATIONS) == 29
    schemas = DOCUMENT["components"]["schemas"]
    assert {"ConversationPage", "Pending", "Approve", "CallSuspended", "TextDelta", "Problem", "ResolveRequest"} <= set(
        schemas
    )
