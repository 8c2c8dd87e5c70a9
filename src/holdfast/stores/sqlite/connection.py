"""The parts of ``apsw.Connection`` that the SQLite store uses, with types.

apsw's own stubs refer to ``collections.abc.Buffer``, which exists from Python 3.12 on: under 3.11 a type checker
reports every call of ``execute`` as unknown. Rows are ``Any`` until ``queries`` converts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import apsw

STATEMENT_CACHE_SIZE = 200


class Rows(Protocol):
    """The rows that a statement returns."""

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

    def executemany(self, statements: str, sequenceofbindings: Iterable[Sequence[Any]]) -> Rows: ...

    def changes(self) -> int: ...

    def config(self, op: int, *args: int) -> int: ...

    def set_busy_timeout(self, milliseconds: int) -> None: ...

    def set_wal_hook(self, callable: Callable[[Any, str, int], int] | None) -> None: ...

    def wal_checkpoint(self, dbname: str | None = None, mode: int = ...) -> tuple[int, int]: ...

    def close(self) -> None: ...


def connect(path: str, *, write: bool) -> Connection:
    """Open the file; create it if ``write`` is true and it does not exist."""
    flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE if write else apsw.SQLITE_OPEN_READONLY
    return apsw.Connection(path, flags=flags, statementcachesize=STATEMENT_CACHE_SIZE)
