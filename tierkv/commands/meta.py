"""The meta server as verbs of the command line reach it."""

from __future__ import annotations

import getpass
import os
import platform
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tierkv.commands.status import find_cluster
from tierkv.kvcore.errors import DirectoryUnavailableError, NoNodeError
from tierkv.metaserver.client import MetaClient
from tierkv.metaserver.several_meta import connect_meta
from tierkv.parts.access import cluster_access
from tierkv.parts.audit_writer import AuditWriter
from tierkv.settings import Settings


async def audit(meta: MetaClient, action: str, subject: str, detail: str = "") -> None:
    """Append a line to the audit log, on behalf of the user of this machine."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # A container's user may have no name.
        user = f"uid {os.getuid()}"
    await AuditWriter(meta).write(f"{user}@{platform.node()}", action, subject, detail=detail)


@asynccontextmanager
async def cluster_meta(settings: Settings) -> AsyncIterator[MetaClient]:
    """Yield a client of the meta server of the cluster that ``tierkv status`` would show.

    Raises:
        NoNodeError: the meta server does not answer, or could not store a change.
    """
    settings, _ = find_cluster(settings)
    address = settings.cluster.meta_address
    access = cluster_access(settings.cluster)
    meta = connect_meta(address, token=access.token, tls=access.tls)
    try:
        yield meta
    except DirectoryUnavailableError as error:
        if error.hint:  # The server answered but refused, for example with a full disk.
            raise NoNodeError(error.message, hint=error.hint) from error
        raise NoNodeError(
            f"no meta server answers at {address}",
            detail=error.message,
            hint="See `tierkv status`, or start a cluster with `tierkv up`.",
        ) from error
    finally:
        await meta.close()
