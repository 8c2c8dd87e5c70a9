"""The closed vocabulary of errors, and the codes that each error maps to."""

from __future__ import annotations

import pytest

from holdfast import errors
from holdfast.core.decisions import Failed
from holdfast.errors import KINDS, DeclarationError, HoldfastError, Stale, ToolError

CODES = [
    (errors.NotFound("no conversation"), 3, 404),
    (Stale("?", reason="unknown"), 3, 404),
    (Stale("?", reason="resolved", winner="ann"), 3, 409),
    (Stale("?", reason="cancelled"), 3, 409),
    (Stale("?", reason="superseded"), 3, 409),
    (Stale("?", reason="phase"), 3, 409),
    (Stale("?", reason="expired"), 4, 410),
    (errors.Busy("?"), 3, 409),
    (errors.Conflict("c", expected=1, actual=2), 3, 409),
    (errors.NotAllowed("?"), 5, 403),
    (errors.Invalid("?"), 2, 422),
    (errors.TooLarge("?"), 2, 422),
    (DeclarationError("?"), 2, 422),
    (errors.StoreError("?"), 1, 500),
    (errors.StoreDamaged("?"), 1, 500),
    (errors.StoreNewer("?"), 1, 500),
    (errors.ModelError("?"), 1, 500),
    (ToolError("not_found", "?"), 1, 500),
]


@pytest.mark.parametrize(("error", "exit_code", "status"), CODES, ids=lambda v: type(v).__name__)
def test_each_error_has_its_exit_code_and_its_http_status(error: HoldfastError, exit_code: int, status: int) -> None:
    assert (error.exit_code, error.http_status) == (exit_code, status)


def test_every_error_class_has_a_known_kind() -> None:
    def classes(root: type[HoldfastError]) -> list[type[HoldfastError]]:
        return [root, *(c for sub in root.__subclasses__() for c in classes(sub))]

    for cls in classes(HoldfastError):
        assert cls.kind in KINDS, cls


def test_the_tree_in_the_docstring_names_every_error_class() -> None:
    for name in errors.__all__:
        if isinstance(getattr(errors, name), type) and issubclass(getattr(errors, name), HoldfastError):
            assert name in (errors.__doc__ or ""), name


def test_an_unknown_error_kind_is_refused() -> None:
    for attempt in (
        lambda: ToolError("card_declined", "no"),
        lambda: Failed("card_declined", "no"),
        lambda: HoldfastError("no", kind="card_declined"),
    ):
        with pytest.raises(DeclarationError, match=r"unknown error kind 'card_declined'.*details"):
            attempt()


def test_a_stale_error_has_its_reason_and_the_winner() -> None:
    late = Stale("call 'x1' was decided by ann", reason="resolved", winner="ann")
    assert (late.kind, late.reason, late.winner) == ("stale", "resolved", "ann")
    assert late.details == {"reason": "resolved", "winner": "ann"}
