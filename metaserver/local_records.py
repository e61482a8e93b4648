"""The durable half of a meta server in this process: namespaces, and records of other kinds.

The base of metaserver/local.py::LocalMeta.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tierkv.kvcore.errors import DirectoryUnavailableError
from tierkv.metaserver.client import ClusterRecord, Namespace, NamespaceGrant
from tierkv.metaserver.config import MetaConfig
from tierkv.metaserver.namespaces import NamespaceStore


class LocalRecords:
    """Implements the durable methods of MetaClient.

    Writes wait for the disk, so they run in a thread; the store has a lock of its own.

    Attributes:
        namespaces: the durable state; its ``trouble`` is the damage found at the start.
    """

    def __init__(self, config: MetaConfig) -> None:
        """Open the durable state; raise ConfigError when the database can't be used."""
        self.namespaces = NamespaceStore(
            config.database,
            cluster_secret=config.cluster_secret,
            default_policy=config.default_policy,
        )
        self._lock = threading.Lock()
        self._closed = False

    async def resolve_namespace(
        self, tenant: str, *, model_revision: str, layout_fingerprint: bytes
    ) -> NamespaceGrant:
        with self._open():
            return self.namespaces.resolve(
                tenant, model_revision=model_revision, layout_fingerprint=layout_fingerprint
            )

    async def list_namespaces(self) -> tuple[Namespace, ...]:
        with self._open():
            return self.namespaces.namespaces()

    async def put_namespace(self, namespace: Namespace) -> Namespace:
        with self._open():
            pass
        return await asyncio.to_thread(self.namespaces.put, namespace)

    async def drop_namespace(self, name: str) -> bool:
        with self._open():
            pass
        return await asyncio.to_thread(self.namespaces.drop, name)

    async def list_records(self, kind: str) -> tuple[ClusterRecord, ...]:
        with self._open():
            return self.namespaces.records(kind)

    async def put_record(self, record: ClusterRecord) -> bool:
        with self._open():
            pass
        return await asyncio.to_thread(self.namespaces.put_record, record)

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Hold the lock; refuse after ``close``."""
        with self._lock:
            if self._closed:
                raise DirectoryUnavailableError("the meta server in this process is closed")
            yield
