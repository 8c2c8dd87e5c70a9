"""The SQLite store keeps the contract."""

import pytest

from assent.stores.sqlite import SQLiteStore
from assent.testing.store_contract import StoreContract


class TestSQLiteStore(StoreContract):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path):
        self.path = tmp_path / "assent.db"

    def make(self):
        return SQLiteStore(self.path)

    def sibling(self, store):
        return SQLiteStore(store.path)

    def kill(self, store):
        store.kill()
