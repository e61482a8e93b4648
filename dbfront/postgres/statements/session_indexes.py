"""The KV indexes that a relayed session sees, for EXPLAIN and for the counters of indexes.

dbfront/postgres/attendant.py makes one per session. PostgreSQL's row-level security chooses the
rows: those of the current user.
"""

from __future__ import annotations

from typing import Final

from tierkv.dbfront.postgres.statements.block import Block
from tierkv.dbfront.postgres.wire import messages
from tierkv.dbfront.postgres.wire.messages import decoded
from tierkv.kvcore.clock import Clock
from tierkv.sql.jobs.job_tables import NEWEST, SCHEMA
from tierkv.sql.jobs.kv_index_command import IndexedText

HAS_JOBS: Final = f"SELECT pg_catalog.to_regclass('{SCHEMA}.{NEWEST}') IS NOT NULL"
# Where row-level security may only raise errors, as in a dump, it would refuse the tables of jobs.
_MAY_LOOK: Final = f"{HAS_JOBS} AND pg_catalog.current_setting('row_security')::pg_catalog.bool"
_INDEXES: Final = (
    f"SELECT owner, name, source_name, expression, options FROM {SCHEMA}.kv_indexes "
    "WHERE owner = current_user"
)
_KEPT_S: Final = 5.0


class SessionIndexes:
    """Indexes as of the last look."""

    def __init__(self, clock: Clock, parameters: dict[str, str]) -> None:
        """Begin without a look.

        Args:
            clock: times the looks.
            parameters: of the session, with the encoding of texts.
        """
        self._clock = clock
        self._parameters = parameters
        self._found: tuple[IndexedText, ...] = ()
        self._looked_s = float("-inf")

    async def read(self, block: Block, *, afresh: bool) -> tuple[IndexedText, ...]:
        """Return the indexes of the current user, at most some seconds old.

        Args:
            block: of a statement that did not begin yet.
            afresh: look now.

        Raises:
            PostgresError: a statement failed.
        """
        if afresh or self._clock.now() - self._looked_s > _KEPT_S:
            self._looked_s = self._clock.now()
            (may_look,) = (await block.before(messages.own_statement(_MAY_LOOK))).first_row()
            if may_look == b"t":
                rows = (await block.before(messages.own_statement(_INDEXES))).all_rows()
                self._found = tuple(map(self._indexed, rows))
        return self._found

    def _indexed(self, row: list[bytes | None]) -> IndexedText:
        return IndexedText.of_row(*(decoded(value or b"", self._parameters) for value in row))
