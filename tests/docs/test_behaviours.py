"""docs/behaviours.md lists every behaviour that a test names, with the current tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "behaviours.md").read_text()


@pytest.fixture(scope="module")
def behaviours() -> ModuleType:
    spec = importlib.util.spec_from_file_location("behaviours", ROOT / "scripts" / "behaviours.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tests_by_behaviour(behaviours: ModuleType) -> dict[int, dict[str, list[str]]]:
    """The tests that show each behaviour."""
    return behaviours.find_tests()


def test_every_number_in_a_test_docstring_is_a_behaviour_of_the_page(
    behaviours: ModuleType, tests_by_behaviour
) -> None:
    assert sorted(set(tests_by_behaviour) - set(behaviours.numbers_on(PAGE))) == []


def test_the_lists_of_tests_are_up_to_date(behaviours: ModuleType, tests_by_behaviour) -> None:
    message = "run python scripts/behaviours.py"
    assert behaviours.render(PAGE, tests_by_behaviour) == PAGE, message


def test_every_behaviour_that_exists_today_has_a_test(behaviours: ModuleType, tests_by_behaviour) -> None:
    today = behaviours.numbers_on(PAGE.split("## Planned")[0])
    assert [f"B{number}" for number in today if number not in tests_by_behaviour] == []


def test_no_number_is_used_twice_or_left_out(behaviours: ModuleType) -> None:
    numbers = sorted(behaviours.numbers_on(PAGE))
    assert numbers == list(range(1, len(numbers) + 1))


def test_ranges_and_lists_of_numbers_are_understood(behaviours: ModuleType) -> None:
    assert behaviours.numbers_in("A kill anywhere [B47-B49, B54].") == [47, 48, 49, 54]


def test_writing_the_page_again_changes_nothing(behaviours: ModuleType) -> None:
    shown = {1: {"tests/x/test_x.py": ["test_a", "test_b"]}, 2: {"tests/x/test_y.py": []}}
    page = "# Behaviours\n\n- **B1** One.\n- **B2** Two.\n- **B3** Three.\n"
    once = behaviours.render(page, shown)
    assert "test_b" in once
    assert behaviours.render(once, shown) == once
    assert behaviours.render(once, {}) == page
