"""What the doors (pgwire, http, CLI) ask of SQL: a session per client, and a server of sessions.

Implemented by dbfront/statement/session.py (the engine's own dialect) and, around it, by
dbfront/postgres_dialect (PostgreSQL's). The values that pass are those of dbfront/contracts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tierkv.dbfront.contracts import ClientInfo, RowStream, StatementDescription, StatementResult

if TYPE_CHECKING:
    from tierkv.dbfront.accounts.statistics import AiStats, StatementProgress


class SqlSession(Protocol):
    """One client's SQL session.

    1. ``split`` cuts a simple-query string into statements, comments and empty ones dropped. A
       ``SqlStatement`` (sql/plan/statement.py) keeps its tokens and plan; any ``str`` will do.
    2. ``describe`` never runs the statement.
    3. ``execute`` runs one statement; ``params`` bind ``$1``... Errors are those of
       kvcore/errors.py (UserError with SQLSTATE); outside a transaction the session stays usable,
       inside one its status becomes ``E`` until ROLLBACK.
    4. ``cancel`` may come from another task; the running statement ends in CancelledByUserError.
    5. ``copy_in`` loads rows of text or CSV data into a table and answers the row count.
    6. ``execute_rows`` is ``execute`` for clients that take rows as they come; a statement that
       can't be streamed gives its whole result. The next statement of the session runs a stream
       that is still open to its end first, and its rows are kept.
    7. ``execute_own`` runs a statement of the front's own: it may change what clients may not
       (sql/plan/kept_names.py), and is not counted; its rows are returned.
    8. ``catalogue_state`` stays the same only while the session sees the same tables by the same
       names, and is another session's too only if both see the same. None: it can't be told.
    9. ``on_progress`` may be set before a statement: it is told, on the event loop, how far the
       statement's AI calls are. ``last_ai_stats`` is of the last statement that had such calls.
    """

    on_progress: Callable[[StatementProgress], None] | None

    @property
    def last_ai_stats(self) -> AiStats: ...

    @property
    def pid(self) -> int: ...

    @property
    def transaction_status(self) -> str: ...

    def split(self, sql: str) -> list[str]: ...

    async def describe(self, sql: str) -> StatementDescription: ...

    async def execute(
        self, sql: str, params: Sequence[Any] | Mapping[str, Any] | None = None
    ) -> StatementResult: ...

    async def execute_rows(
        self, sql: str, params: Sequence[Any] | Mapping[str, Any] | None = None
    ) -> StatementResult | RowStream: ...

    async def execute_own(self, sql: str) -> Sequence[tuple[Any, ...]]: ...

    def catalogue_state(self) -> Hashable | None: ...

    async def copy_in(
        self, table: str, columns: Sequence[str], rows: Sequence[Sequence[str | None]]
    ) -> int: ...

    async def cancel(self) -> None: ...

    async def close(self) -> None: ...


class SqlServer(Protocol):
    """Makes sessions; one per process, shared by pgwire, http and the CLI."""

    async def open_session(self, client: ClientInfo) -> SqlSession: ...

    async def close(self) -> None: ...
