"""The exceptions of PEP 249, and the translation of a TierKVError to a PEP 249 exception.

Raised by tierkv/dbapi.py and tierkv/frames.py; ``tierkv`` and ``tierkv.dbapi`` export them.
"""

from __future__ import annotations

from tierkv.kvcore import errors


class Warning(Exception):  # PEP 249 names it so
    """An important warning (PEP 249)."""


class Error(Exception):
    """Base class; ``sqlstate``, ``detail`` and ``hint`` as from the server."""

    def __init__(self, cause: errors.TierKVError) -> None:
        parts = [cause.message, cause.detail, f"HINT: {cause.hint}" if cause.hint else ""]
        super().__init__("\n".join(part for part in parts if part))
        self.sqlstate = cause.sqlstate
        self.detail = cause.detail
        self.hint = cause.hint


class InterfaceError(Error):
    """Wrong use of this module, for example a closed connection."""


class DatabaseError(Error):
    """An error of the database."""


class DataError(DatabaseError):
    """A problem with the processed data (class 22)."""


class OperationalError(DatabaseError):
    """Not the caller's fault: no node, overload, timeout, cancel."""


class IntegrityError(DatabaseError):
    """A constraint was violated (class 23)."""


class InternalError(DatabaseError):
    """A bug in TierKV."""


class ProgrammingError(DatabaseError):
    """SQL, a name or an argument is wrong (class 42)."""


class NotSupportedError(DatabaseError):
    """A feature TierKV does not have (class 0A)."""


_BY_CLASS = {
    "22": DataError,
    "23": IntegrityError,
    "42": ProgrammingError,
    "0A": NotSupportedError,
    "XX": InternalError,
}


def translate_error(error: errors.TierKVError) -> Error:
    """Wrap a TierKVError in its PEP 249 class, by SQLSTATE."""
    if isinstance(error, errors.RetryableError):
        return OperationalError(error)
    kind = _BY_CLASS.get(error.sqlstate[:2])
    if kind is None:
        kind = ProgrammingError if isinstance(error, errors.UserError) else OperationalError
    return kind(error)
