"""``tierkv key``: REST keys that the cluster keeps as hashes.

The command uses the same cluster as ``tierkv status``. Fronts let a new key in, and a revoked one
out, within a second; what a revoked key has begun ends.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Any

from tierkv.commands.meta import audit, cluster_meta
from tierkv.dbfront.contracts import Column
from tierkv.kvcore.api_keys import RECORD_KIND, ApiKey, digest_of, keys_of, new_key
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.errors import UserError
from tierkv.metaserver.client import Record
from tierkv.output import OutputFormat, render_rows
from tierkv.settings import Settings
from tierkv.sql.text.suggest import did_you_mean

COLUMNS = (Column("name", "VARCHAR"), Column("tenant", "VARCHAR"), Column("made", "VARCHAR"))


async def create_key(settings: Settings, name: str, tenant: str) -> None:
    """Make a key and print it, alone on a line; it is shown this once.

    Raises:
        UserError: the name is malformed or taken.
        NoNodeError: the meta server does not answer.
    """
    secret = new_key()
    key = ApiKey(name, tenant, digest_of(secret), SystemClock().wall())
    async with cluster_meta(settings) as meta:
        if any(
            each.name == name for each in keys_of(await meta.list_records(RECORD_KIND)).values()
        ):
            raise UserError(
                f"there is a key {name!r} already",
                hint=f"Give the new one another name, or run `tierkv key revoke {name}` first.",
            )
        await meta.put_record(Record(RECORD_KIND, name, key.to_json()))
        await audit(meta, "tierkv key create", f"key {name}", f"tenant = {tenant}")
    sys.stdout.write(f"{secret}\n")
    sys.stderr.write("Keep it: only its hash is stored. Send it as Authorization: Bearer KEY.\n")


async def print_keys(settings: Settings, output: OutputFormat) -> None:
    """Print one row per key, without the secrets.

    Raises:
        NoNodeError: the meta server does not answer.
    """
    async with cluster_meta(settings) as meta:
        keys = keys_of(await meta.list_records(RECORD_KIND)).values()
    rows = [_row(key) for key in sorted(keys, key=lambda key: key.name)]
    sys.stdout.write(render_rows(COLUMNS, rows, output))


async def revoke_key(settings: Settings, name: str) -> None:
    """Remove a key.

    Raises:
        UserError: there is no such key.
        NoNodeError: the meta server does not answer.
    """
    async with cluster_meta(settings) as meta:
        if not await meta.put_record(Record(RECORD_KIND, name, "")):
            known = [key.name for key in keys_of(await meta.list_records(RECORD_KIND)).values()]
            raise UserError(f"there is no key {name!r}", hint=did_you_mean(name, known))
        await audit(meta, "tierkv key revoke", f"key {name}")


def _row(key: ApiKey) -> tuple[Any, ...]:
    made = datetime.fromtimestamp(key.made_unix_s, UTC).isoformat(sep=" ", timespec="seconds")
    return key.name, key.tenant, made
