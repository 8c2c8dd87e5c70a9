"""The billing agent is killed before and after every append to its log. The customer pays once, each time."""

from pathlib import Path

import billing
import pytest

from holdfast import Approve, Deny
from holdfast.testing import assert_effect_needs_approval, assert_paired, crash_everywhere, run_to_rest


@pytest.fixture(autouse=True)
def services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every test a card company and a mail service of its own."""
    monkeypatch.setattr(billing, "SERVICES", str(tmp_path / "services.db"))


def count(table: str) -> int:
    """Return the number of charges or mails that the services have got."""
    with billing.open_services() as services:
        return services.execute(f"SELECT count(*) FROM {table}").fetchone()[0]


def test_an_order_is_billed() -> None:
    rest = run_to_rest(billing.make_agent(), "Bill order 7", decisions={"charge": Approve()})
    assert rest.reason == "completed"
    assert_paired(rest.events)
    assert (count("charges"), count("mails")) == (1, 1)


def test_nothing_is_charged_without_approval() -> None:
    rest = run_to_rest(billing.make_agent(), "Bill order 7", decisions={"charge": Deny("not yet")})
    assert_effect_needs_approval(rest.events, "charge")
    assert count("charges") == 0


def test_a_crash_anywhere_charges_the_customer_once_and_mails_at_most_once() -> None:
    report = crash_everywhere(billing.make_agent, "Bill order 7", decisions={"charge": Approve()})
    print(report)
    report.check(repeatable=["find_order"])
    runs = 1 + len(report.crashes)
    assert report.tools["charge"].outcomes == {"ok": runs}
    assert count("charges") == runs
    assert count("mails") <= runs
