"""Rows of SQL tables as values."""

from holdfast.stores.base import GrantRow, OutboxRow
from holdfast.stores.postgres import outbox as postgres_outbox
from holdfast.stores.rows import OUTBOX_COLUMNS, to_grant_row, to_outbox_row
from holdfast.stores.sqlite import outbox as sqlite_outbox


def test_both_sql_stores_map_the_rows_of_the_outbox_and_of_grants_with_the_same_functions():
    for module in (sqlite_outbox, postgres_outbox):
        assert module.to_outbox_row is to_outbox_row
        assert module.to_grant_row is to_grant_row


def test_the_columns_are_the_fields_in_their_order_and_the_flag_of_sqlite_becomes_a_bool():
    assert OutboxRow.__struct_fields__ == OUTBOX_COLUMNS
    row = to_outbox_row(("c/1/mail", "mail", "c", 1, "suspended", 1.0, 2.0, 3, "down", 1))
    assert row.failed is True
    assert (row.id, row.due, row.attempts, row.error) == ("c/1/mail", 2.0, 3, "down")
    grant = to_grant_row(("c", "g", "refund", None, None, b"{}"))
    assert grant == GrantRow(conversation="c", grant="g", tool="refund", user=None, until=None, body=b"{}")
