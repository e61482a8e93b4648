"""TierKV: SQL with AI calls over a KV cache that all machines share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierkv.dbapi import Connection

__all__ = ["apilevel", "connect", "paramstyle", "threadsafety"]

apilevel = "2.0"
threadsafety = 1
paramstyle = "qmark"


def connect(
    database: str = "",
    *,
    model: str | Path | None = None,
    config: str | Path | None = None,
    user: str = "default",
    **settings: Any,
) -> Connection:
    """Open an embedded TierKV: SQL, model and cache in this process, nothing to start.

    Args:
        database: DuckDB file; empty keeps tables in memory.
        model: model folder; None takes the small one that is shipped.
        config: TOML file; None takes ``$TIERKV_CONFIG`` or ``./tierkv.toml`` if there is one.
        user: also the tenant whose cache is used.
        settings: any setting as ``section__key=value``, such as ``compute__l1_capacity="1GiB"``.

    Returns:
        connection: DB-API 2.0; ``connection.execute(sql).fetchall()`` works too.

    Raises:
        kvcore.errors.ConfigError: a setting that can't be used.
        kvcore.errors.ModelFolderError: the model can't be served.
    """
    # Torch and DuckDB take seconds to import; `tierkv --help` and role processes don't need both.
    from tierkv.config import load_config
    from tierkv.embedded import connect_with

    flags = {key.replace("__", ".", 1): value for key, value in settings.items()}
    if database:
        flags["front.database"] = database
    if model is not None:
        flags["compute.model"] = str(model)
    loaded = load_config(Path(config) if config is not None else None, flags=flags)
    return connect_with(loaded, user=user)
