"""As much of ``apsw.Connection`` as is used here, typed.

apsw's own stubs name ``collections.abc.Buffer``, which Python has from 3.12 on: for 3.11 a type checker finds
every call of ``execute`` unknown. Rows are ``Any`` until ``statements`` makes values of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import apsw


class Rows(Protocol):
    """The answer to a statement."""

    @property
    def get(self) -> Any:
        """The only row (its only value, if it has one column), or None. Runs the statement to its end."""
        ...

    def fetchall(self) -> list[Any]: ...


class Connection(Protocol):
    """One connection, used by one thread."""

    @property
    def in_transaction(self) -> bool: ...

    def execute(self, statements: str, bindings: Sequence[Any] | None = None) -> Rows: ...

    def last_insert_rowid(self) -> int: ...

    def changes(self) -> int: ...

    def config(self, op: int, *args: int) -> int: ...

    def set_busy_timeout(self, milliseconds: int) -> None: ...

    def set_wal_hook(self, callable: Callable[[Any, str, int], int] | None) -> None: ...

    def wal_checkpoint(self, dbname: str | None = None, mode: int = ...) -> tuple[int, int]: ...

    def close(self) -> None: ...


def connect(path: str, *, write: bool) -> Connection:
    flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE if write else apsw.SQLITE_OPEN_READONLY
    return apsw.Connection(path, flags=flags, statementcachesize=200)
