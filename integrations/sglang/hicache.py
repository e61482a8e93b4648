"""The pool as SGLang's storage below its hierarchical cache: ``TierKvHiCache``.

SGLang loads the class by name (docs/engines.md, dynamic backend) into each scheduler process, and
calls it from storage threads, which may wait. Pages move directly between SGLang's host memory and
the pool. A pool that is away, full or wrong causes misses, never an exception. Only invalid
settings raise an exception, when the backend is attached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.srt.runtime_context import get_model, get_serving
from sglang.version import __version__ as sglang_version

from tierkv.integrations.pool_door import PoolDoor
from tierkv.integrations.settings import PoolAccess
from tierkv.integrations.sglang.host_pages import (
    HostPages,
    SidePool,
    TransferBook,
    leading,
    page_memory,
    prefix_hit,
)
from tierkv.integrations.sglang.page_names import KV, identity_of, part_of
from tierkv.integrations.sglang.page_store import Component, PageStore
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.errors import ConfigError

_OF_SGLANG: Final = (
    "backend_name", "module_path", "class_name", "interface_v1", "tp_lcm_size",
    "prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys", "file_storage_path",
)  # fmt: skip
_OURS: Final = ("model", "revision")
_WHERE: Final = "hicache-storage-backend-extra-config"


class TierKvHiCache(HiCacheStorage):  # type: ignore[misc]  # base class is the engine's
    """Keeps SGLang's KV pages in TierKV's pool.

    Attributes:
        door: the door to the pool; None until SGLang has registered its host pool.
    """

    def __init__(
        self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None
    ) -> None:
        """Read the settings.

        Args:
            storage_config: SGLang's configuration, with TierKV's settings in ``extra_config``.
            kwargs: SGLang passes an empty mapping.

        Raises:
            ConfigError: a setting is unknown or can't be used.
        """
        extra = dict(storage_config.extra_config or {})
        self._storage = storage_config
        self._settings = PoolAccess.read(extra, also=(*_OF_SGLANG, *_OURS), where=_WHERE)
        self._model = _text(extra, "model")
        self._revision = _text(extra, "revision")
        self._zero_copy = bool(extra.get("interface_v1"))
        self._clock = SystemClock()
        self._book = TransferBook()
        self._store: PageStore | None = None
        self._weights = _weights()
        self._weights_replaced = False

    @property
    def door(self) -> PoolDoor | None:
        """The door to the pool."""
        return None if self._store is None else self._store.door

    # Host pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Register the host pool of keys and values, and begin to open the pool."""
        super().register_mem_pool_host(mem_pool_host)
        arguments = _arguments()
        model = self._model or getattr(arguments, "model_path", "") or ""
        revision = self._revision or getattr(arguments, "revision", None)
        identity = identity_of(
            self._storage,
            mem_pool_host,
            version=sglang_version,
            model=model or self._storage.model_name or "",
            revision=revision,
            arguments=arguments,
            weights=self._weights[1],
        )
        door = PoolDoor(self._settings, identity, part=self._process())
        self._store = PageStore(door, same_weights=self._same_weights)
        self._add(KV, mem_pool_host)
        self._say_what_costs(door)
        door.start()

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """Register a further host pool of a hybrid model."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if self._store is not None and _name(host_pool_name) != KV:
            self._add(_name(host_pool_name), host_pool)

    def _add(self, name: str, host_pool: Any) -> None:
        store = self._ready()
        try:
            pages = HostPages(host_pool)
        except (ValueError, TypeError, AttributeError, NotImplementedError) as error:
            store.door.complain(
                "host_pool",
                f"{type(host_pool).__name__} ({name}) has no pages to store: {error}",
                hint="SGLang continues without storage for this model.",
            )
            return
        form = f"{pages.pieces} x {pages.piece_bytes}"
        store.add(Component(name, pages, part_of(self._storage, name, host_pool, form)))

    def _process(self) -> str:
        """Return a name that distinguishes the processes of one engine."""
        storage = self._storage
        numbers = {"dp": storage.dp_rank, "pp": storage.pp_rank, "cp": storage.attn_cp_rank}
        parts = [f"{name}{number}" for name, number in numbers.items() if number]
        return "-".join([*parts, f"rank{storage.tp_rank}"])

    def _same_weights(self) -> bool:
        """True while SGLang runs the same weights as when the backend was attached.

        After a change nothing is stored or read any more, even if the old name returns: pages on
        the way to storage may belong to the old weights, and a name proves nothing.
        """
        now = _weights()
        if now != self._weights and not self._weights_replaced:
            self._weights_replaced = True
            self._ready().door.complain(
                "weights_replaced",
                f"the weights were replaced while SGLang was running (now {now[1]} of {now[0]}), "
                "so the pool is no longer used",
                hint="Detach the storage backend, flush the cache, and attach it again.",
            )
        return not self._weights_replaced

    def _say_what_costs(self, door: PoolDoor) -> None:
        if not self._zero_copy:
            door.complain(
                "interface_v1",
                "pages are copied an additional time on their way to the pool",
                hint='Add "interface_v1": 1 to the extra config.',
            )
        if self._storage.should_split_heads:
            door.complain(
                "tp_lcm_size",
                "pages are not split by heads, so engines of other tensor parallel sizes share "
                "nothing",
                hint="Leave tp_lcm_size out.",
            )

    # Pages in place

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """Count the leading pages that are in the pool; one round trip per node."""
        if self._store is None:
            return 0
        return leading(self._store.there(keys, [KV])[KV])

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Read pages into the host pool, verified. False: the memory may hold garbage."""
        return self._get(KV, keys, host_indices)

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Write pages from the host pool; True for each page that is now in the pool."""
        return self._set(KV, keys, host_indices, extra_info)

    # Hybrid models

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return the prefixes that all pools can restore; one round trip per node.

        Compressed groups (``BLOCK_GROUPS``) are never reported, because they don't limit a prefix.
        """
        gating = [t for t in pool_transfers or [] if t.hit_policy != PoolHitPolicy.BLOCK_GROUPS]
        if self._store is None:
            return PoolTransferResult(0, {}, [])
        there = self._store.there(keys, [KV, *(_name(t.name) for t in gating)])
        sides = [SidePool(_name(t.name), there[_name(t.name)], _trailing(t)) for t in gating]
        hit = prefix_hit(KV, there[KV], sides)
        return PoolTransferResult(hit.pages, hit.by_pool, hit.lengths)

    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """Read pages into several host pools."""
        return {t.name: self._get(_name(t.name), t.keys or [], t.host_indices) for t in transfers}

    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """Write pages from several host pools."""
        return {
            t.name: self._set(_name(t.name), t.keys or [], t.host_indices, extra_info)
            for t in transfers
        }

    # Flat pages, for SGLang without interface_v1

    def get(
        self,
        key: str,
        target_location: torch.Tensor | None = None,
        target_sizes: Any | None = None,
    ) -> torch.Tensor | None:
        """Read one flat page into a tensor; None if missing."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self,
        keys: list[str],
        target_locations: Sequence[torch.Tensor | None] | None = None,
        target_sizes: Any | None = None,
    ) -> list[torch.Tensor | None]:
        """Read flat pages into the given or new tensors; None for missing pages."""
        given = list(target_locations or [None] * len(keys))
        targets = [self._target(target) for target in given]
        if any(target is None for target in targets) or len(targets) != len(keys):
            return [None] * len(keys)
        views = [page_memory(target) for target in targets]

        def move(store: PageStore) -> list[bool]:
            return store.read_flat(keys, views)

        done = self._timed(KV, len(keys), is_read=True, move=move)
        return [target if ok else None for target, ok in zip(targets, done, strict=True)]

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: torch.Tensor | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Write one flat page."""
        return self.batch_set([key], [value if value is not None else target_location])

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor | None] | None = None,
        target_locations: Sequence[torch.Tensor | None] | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Write flat pages; True if all are now in the pool."""
        given = list(values if values is not None else target_locations or [])
        if len(given) != len(keys) or any(value is None for value in given):
            return False
        views = [page_memory(value.contiguous()) for value in given if value is not None]

        def move(store: PageStore) -> list[bool]:
            return store.write_flat(keys, views)

        return all(self._timed(KV, len(keys), is_read=False, move=move))

    def exists(self, key: str) -> bool:
        """True if a page is in the pool."""
        return bool(self.batch_exists([key]))

    # Administration

    def clear(self) -> bool:
        """Make all stored pages unreachable, for every engine that shares them.

        The memory is freed as the pool evicts. Until the pool has stored the clear, this process
        finds nothing.
        """
        return self._store is not None and self._store.clear()

    def get_stats(self) -> StorageMetrics:
        """Return the transfers since the last call, in the form of SGLang's metrics."""
        reads, writes = self._book.take()
        metrics = StorageMetrics()
        metrics.prefetch_pgs.extend(pages for pages, _ in reads)
        metrics.prefetch_bandwidth.extend(rate for _, rate in reads)
        metrics.backup_pgs.extend(pages for pages, _ in writes)
        metrics.backup_bandwidth.extend(rate for _, rate in writes)
        return metrics

    def close(self) -> None:
        """Leave the pool; stored pages stay there."""
        if self._store is not None:
            self._store.door.close()

    # Inside

    def _get(self, name: str, keys: list[str], host_indices: Any) -> list[bool]:
        def move(store: PageStore) -> list[bool]:
            component = store.components.get(name)
            if component is None:
                return [False] * len(keys)
            return store.read(component, keys, host_indices)

        return self._timed(name, len(keys), is_read=True, move=move)

    def _set(
        self,
        name: str,
        keys: list[str],
        host_indices: Any,
        extra_info: HiCacheStorageExtraInfo | None,
    ) -> list[bool]:
        if name == KV and not self._storage.is_storage_writer:
            return [True] * len(keys)  # All ranks have the same bytes; the writer stores them.
        before = (extra_info.prefix_keys if extra_info is not None else None) or []

        def move(store: PageStore) -> list[bool]:
            component = store.components.get(name)
            if component is None:
                return [False] * len(keys)
            return store.write(component, keys, host_indices, before)

        return self._timed(name, len(keys), is_read=False, move=move)

    def _timed(
        self, name: str, pages: int, *, is_read: bool, move: Callable[[PageStore], list[bool]]
    ) -> list[bool]:
        """Move pages and record the speed; an invalid call from SGLang is a miss."""
        store = self._store
        if store is None or not pages:
            return [False] * pages
        began = self._clock.now()
        try:
            done = move(store)
        except ValueError as error:
            store.door.complain("host_memory", f"{name}: {error}", hint="Counted as a miss.")
            return [False] * pages
        component = store.components.get(name)
        size = 0 if component is None else component.pages.page_bytes * sum(done)
        seconds = self._clock.now() - began
        self._book.add(is_read=is_read, pages=sum(done), size_bytes=size, seconds=seconds)
        return done

    def _target(self, given: torch.Tensor | None) -> torch.Tensor | None:
        """Return the tensor for a flat page; None if the given tensor can't be used."""
        if given is not None:
            return given if given.is_contiguous() else None
        component = None if self._store is None else self._store.components.get(KV)
        if component is None:
            return None
        return torch.empty(component.pages.page_bytes, dtype=torch.uint8)

    def _ready(self) -> PageStore:
        assert self._store is not None, "made by register_mem_pool_host"
        return self._store


def _name(pool_name: Any) -> str:
    """Return a pool's name as text; SGLang has an enumeration of texts."""
    return str(getattr(pool_name, "value", pool_name))


def _trailing(transfer: PoolTransfer) -> int | None:
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        return len(transfer.keys or []) or 1
    return None


def _text(extra: dict[str, Any], name: str) -> str:
    value = extra.get(name, "")
    if not isinstance(value, str):
        raise ConfigError(f"{_WHERE}: {name} = {value!r} is not text")
    return value


def _arguments() -> Any:
    """Return SGLang's record of the model's arguments; None outside of a server."""
    try:
        return get_model()
    except ValueError:
        return None


def _weights() -> tuple[str, str]:
    """Return the folder and version of the weights that SGLang runs."""
    try:
        return str(get_model().model_path), str(get_serving().weight_version)
    except ValueError:
        return "", ""
