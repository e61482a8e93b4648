"""What a statement with AI calls is run with: the session's settings, read from PostgreSQL.

They are PostgreSQL's own placeholders, so transactions, SET LOCAL, RESET and functions that set
them work as everywhere; the relay reads them when such a statement begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tierkv.dbfront.call_defaults import CallDefaults
from tierkv.dbfront.statement.error_policy import ErrorPolicy
from tierkv.dbfront.statement.settings import SessionSettings
from tierkv.sql.settings import SETTINGS

_OTHERS: Final = (
    "default_transaction_isolation",
    "client_min_messages",
    "idle_in_transaction_session_timeout",
    "synchronize_seqscans",
    "max_parallel_workers_per_gather",
    "cursor_tuple_fraction",
    "plan_cache_mode",
)
_LEVELS: Final = ("debug5", "debug4", "debug3", "debug2", "debug1", "log", "notice", "warning")

READ_VALUES: Final = (
    "SELECT "
    + ", ".join(f"pg_catalog.current_setting('{name}', true)" for name in (*SETTINGS, *_OTHERS))
    + ", extract(epoch from pg_catalog.current_setting('statement_timeout')::interval)"
)


@dataclass(frozen=True, slots=True)
class SessionValues:
    """Settings as they are now.

    Attributes:
        settings: of ``tierkv.*``.
        isolation: ``default_transaction_isolation``.
        min_messages: least level of messages the client wants.
        put_back: what tierkv.begin_rounds sets for the rounds, by name, as it was.
        statement_timeout_s: 0.0 is none.
    """

    settings: SessionSettings
    isolation: str
    min_messages: str
    put_back: dict[str, str]
    statement_timeout_s: float

    @classmethod
    def from_row(cls, row: list[str | None]) -> SessionValues:
        """Read the row of READ_VALUES.

        Raises:
            UserError: a ``tierkv.*`` setting was given a value it can't have.
        """
        given = {
            name: value for name, value in zip(SETTINGS, row, strict=False) if value is not None
        }
        isolation, min_messages, *set_for_rounds, timeout = row[len(SETTINGS) :]
        return cls(
            SessionSettings(None, given),
            isolation or "",
            min_messages or "notice",
            {name: value for name, value in zip(_OTHERS[2:], set_for_rounds, strict=True) if value},
            float(timeout or 0),
        )

    def call_defaults(self, tenant: str) -> CallDefaults:
        """Return what calls take from the session."""
        return self.settings.call_defaults(tenant)

    @property
    def policy(self) -> ErrorPolicy:
        """What failed calls and big statements lead to."""
        return self.settings.error_policy()

    def wants(self, severity: str) -> bool:
        """Whether the client wants messages of that severity."""
        level = severity.lower()
        least = self.min_messages if self.min_messages in _LEVELS else "error"
        return least != "error" and _LEVELS.index(level) >= _LEVELS.index(least)
