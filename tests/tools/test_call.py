"""The Call object that a handler receives."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from holdfast.core.decisions import SYSTEM, Principal
from holdfast.errors import Invalid
from holdfast.tools import Call


def test_a_call_can_be_made_without_a_runtime() -> None:
    call = Call()
    assert (call.attempt, call.dry_run, call.cancelled, call.approver) == (1, False, False, None)
    assert call.principal == SYSTEM
    assert call.key == "conversation/call"


def test_the_key_is_the_same_on_every_attempt() -> None:
    assert {Call(id="c1", conversation="x", attempt=n).key for n in (1, 2, 3)} == {"x/c1"}


def test_a_principal_given_by_name_becomes_a_principal() -> None:
    call = Call(principal="ann", approver=Principal("bob", roles=("boss",)))
    assert call.principal.id == "ann"
    assert call.approver is not None
    assert call.approver.roles == ("boss",)


def test_progress_is_sent_immediately_whether_awaited_or_not() -> None:
    sent: list[Any] = []
    call = Call(sink=sent.append)

    async def handler() -> None:
        await call.progress(1)
        call.progress(2)  # not awaited: no warning (warnings are errors here)

    asyncio.run(handler())
    call.progress(3)
    assert sent == [1, 2, 3]
    assert Call().progress("no sink") is not None


def test_a_thread_sees_that_it_was_cancelled() -> None:
    call = Call()
    started, seen = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        while not call.cancelled:
            pass
        seen.set()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    call._cancel()
    thread.join(60)
    assert seen.is_set()


def test_cancelled_and_unknown_attributes_cannot_be_set() -> None:
    with pytest.raises(AttributeError):
        Call().cancelled = True  # type: ignore[misc]
    with pytest.raises(AttributeError):
        Call().canceled = True  # type: ignore[attr-defined]


def test_bytes_are_kept_under_their_hash_with_a_reference() -> None:
    call = Call()
    found = call.keep("ü", "text/plain; charset=utf-8", "a.txt")
    assert call.kept == {found.sha256: b"\xc3\xbc"}
    assert (found.size, found.media_type, found.name) == (2, "text/plain; charset=utf-8", "a.txt")
    assert call.keep("ü".encode()).sha256 == found.sha256


@pytest.mark.parametrize("wrong", [("html", ""), ("text/html\r\nx: y", ""), ("", ""), ("text/plain", "a\0")])
def test_a_reference_that_cannot_be_logged_or_sent_is_refused(wrong: tuple[str, str]) -> None:
    with pytest.raises(Invalid):
        Call().keep(b"", *wrong)
