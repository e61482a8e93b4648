"""TierKV: SQL with AI calls over a KV cache shared by all machines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierkv.dbapi import (
        Connection,
        Cursor,
        DatabaseError,
        DataError,
        Error,
        IntegrityError,
        InterfaceError,
        InternalError,
        NotSupportedError,
        OperationalError,
        ProgrammingError,
        Warning,
    )

__all__ = [
    "Connection",
    "Cursor",
    "DataError",
    "DatabaseError",
    "Error",
    "IntegrityError",
    "InterfaceError",
    "InternalError",
    "NotSupportedError",
    "OperationalError",
    "ProgrammingError",
    "Warning",
    "apilevel",
    "connect",
    "paramstyle",
    "threadsafety",
]

apilevel = "2.0"
threadsafety = 1
paramstyle = "qmark"


def connect(
    database: str = "",
    *,
    model: str | Path | Sequence[str | Path] | None = None,
    config: str | Path | None = None,
    user: str = "default",
    **settings: Any,
) -> Connection:
    """Open an embedded TierKV: SQL, model and cache in this process, nothing to start.

    Args:
        database: DuckDB file; empty keeps tables in memory.
        model: model folder, or several: the first model answers calls that name no model; None uses
            the small model shipped with TierKV.
        config: TOML file; None uses ``$TIERKV_CONFIG`` or an existing ``./tierkv.toml``.
        user: name of the user, and also the tenant whose cache is used.
        settings: any setting as ``section__key=value``, for example
            ``compute__l1_capacity="1GiB"``.

    Returns:
        connection: DB-API 2.0; ``connection.execute(sql).fetchall()`` works too.

    Raises:
        Error: a setting, a file or the model can't be used; the message contains the cure.
    """
    # Torch and DuckDB take seconds to import; `tierkv --help` and role processes don't need both.
    from tierkv.config import load_config
    from tierkv.dbapi_errors import translate_error
    from tierkv.embedded import connect_with
    from tierkv.kvcore.errors import TierKVError

    flags = {key.replace("__", ".", 1): value for key, value in settings.items()}
    if database:
        flags["front.database"] = database
    if model is not None:
        first, *more = [model] if isinstance(model, (str, Path)) else model
        flags |= {"compute.model": str(first), "compute.more_models": [str(each) for each in more]}
    try:
        loaded = load_config(Path(config) if config is not None else None, flags=flags)
        return connect_with(loaded, user=user)
    except TierKVError as error:
        raise translate_error(error) from error


def __getattr__(name: str) -> Any:
    """Import PEP 249's exceptions and classes on first use, not in every process."""
    if name not in __all__:
        raise AttributeError(f"module 'tierkv' has no attribute {name!r}")
    from tierkv import dbapi

    return getattr(dbapi, name)
