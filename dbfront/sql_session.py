"""The SQL contract of the servers (pgwire, http, CLI): one session per client, and a session
server.

dbfront/statement/session.py implements the contract in the engine's own dialect, and
dbfront/postgres_dialect wraps sessions for PostgreSQL's dialect. The values are in
dbfront/statement_results.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tierkv.dbfront.contracts import ClientInfo
from tierkv.dbfront.statement_results import RowStream, StatementDescription, StatementResult

if TYPE_CHECKING:
    from tierkv.dbfront.accounts.statistics import AiStats, StatementProgress


class SqlSession(Protocol):
    """One client's SQL session.

    1. ``split`` cuts a simple-query string into statements; comments and empty statements are
       dropped. A ``SqlStatement`` (sql/plan/plan.py) caches its tokens and plan; any ``str``
       is accepted.
    2. ``describe`` never runs the statement.
    3. ``execute`` runs one statement; ``params`` bind ``$1``... Errors are defined in
       kvcore/errors.py (UserError with SQLSTATE). After an error outside a transaction the session
       stays usable; inside a transaction the status is ``E`` until ROLLBACK.
    4. ``cancel`` may be called from another task; the running statement ends in
       CancelledByUserError.
    5. ``copy_in`` loads rows of text or CSV data into a table and returns the row count.
    6. ``execute_rows`` is ``execute`` for clients that read rows incrementally; a statement without
       streaming support returns the whole result. Before the next statement of the session, an open
       stream runs to its end and keeps the remaining rows for the reader.
    7. ``execute_own`` runs a statement of the front itself. The statement may change names reserved
       by the front (sql/plan/kept_names.py) and is not counted in statistics; the result is the
       rows.
    8. ``catalogue_state`` is equal for two moments or two sessions only if both see the same tables
       by the same names. None means unknown.
    9. ``on_progress`` may be set before a statement and is called on the event loop with the
       progress of the statement's AI calls. ``last_ai_stats`` belongs to the last statement with AI
       calls.
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
    """Opens sessions; one per process, shared by pgwire, http and the CLI."""

    async def open_session(self, client: ClientInfo) -> SqlSession: ...

    async def close(self) -> None: ...
