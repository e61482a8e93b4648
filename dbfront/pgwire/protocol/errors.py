"""The only module that converts TierKV errors to fields of ErrorResponse and NoticeResponse."""

from __future__ import annotations

from typing import Final

from tierkv.dbfront.pgwire.protocol.messages import TooLong
from tierkv.dbfront.statement_results import Notice
from tierkv.kvcore.errors import DrainingError, RetryableError, SqlError, TierKVError

_INTERNAL: Final = "XX000"


class AdminShutdownError(DrainingError):
    """The server is shutting down (57P01); raised in idle connections."""

    code = "admin_shutdown"
    sqlstate = "57P01"


ADMIN_SHUTDOWN: Final = "terminating connection due to administrator command"
"""PostgreSQL's words for AdminShutdownError."""


class TooManyConnectionsError(TierKVError):
    """No room for one more connection (53300)."""

    code = "too_many_connections"
    sqlstate = "53300"


class IdleTimeoutError(TierKVError):
    """The client was idle for too long (57P05, 25P03)."""

    code = "idle_timeout"
    sqlstate = "57P05"

    def __init__(self, *, in_transaction: bool) -> None:
        where = "idle-in-transaction" if in_transaction else "idle-session"
        super().__init__(f"terminating connection due to {where} timeout")
        if in_transaction:
            self.sqlstate = "25P03"  # type: ignore[misc]  # as PostgreSQL's, per instance


def too_long(message: TooLong) -> SqlError:
    """Return the error for a message that is too long."""
    return SqlError(
        f"the message has {message.size} bytes, at most {message.limit} are allowed",
        sqlstate="54000",
        hint="Load data with COPY, or send it in several statements.",
    )


def error_fields(error: BaseException, *, fatal: bool = False) -> dict[str, str]:
    """Return the fields of an ErrorResponse, by PostgreSQL's one-letter codes.

    Only TierKVErrors show their text. Any other exception is an internal error, whose details
    belong in the log.
    """
    severity = "FATAL" if fatal else "ERROR"
    fields = {"S": severity, "V": severity}
    if not isinstance(error, TierKVError):
        return {**fields, "C": _INTERNAL, "M": f"internal error: {type(error).__name__}"}
    fields |= {"C": error.sqlstate, "M": error.message or error.code}
    fields |= {"D": error.detail or _retry_detail(error), "H": error.hint}
    position = getattr(error, "position", 0)
    return {**fields, "P": str(position) if position else ""}


def _retry_detail(error: TierKVError) -> str:
    """Return the detail that tells a client when to retry, as Retry-After does in HTTP."""
    cancelled = error.sqlstate == "57014"  # By the user or by a timeout: not for a retry.
    if cancelled or not isinstance(error, RetryableError) or error.retry_after_ms <= 0:
        return ""
    return f"retry after {error.retry_after_ms} ms"


def notice_fields(notice: Notice) -> dict[str, str]:
    """Return the fields of a NoticeResponse."""
    sqlstate = notice.sqlstate
    if notice.severity == "WARNING" and sqlstate == "00000":
        sqlstate = "01000"
    return {
        "S": notice.severity,
        "V": notice.severity,
        "C": sqlstate,
        "M": notice.message,
        "D": notice.detail,
        "H": notice.hint,
    }
