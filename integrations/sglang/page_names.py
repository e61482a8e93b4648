"""Names of SGLang's pages in the pool, and the generation that ``clear`` advances.

SGLang names a page by a hash of all tokens up to the end of the page, seeded with the request's
salt and extra key. The hash does not determine the meaning or the owner of the bytes. Names
therefore hash again, with the engine's base key (tenant, weights, form of pages) and this process's
part of the page.

A pool can't delete, so names contain a generation, and ``clear`` begins the next generation: the
stored pages of all engines with the same base key become unreachable. ``clear`` puts a marker for
the next generation, and every request for pages also asks for the next marker. A marker may be
evicted like any value; every engine that stores pages puts it again. Engines that know different
generations find no hits in each other's pages, never wrong hits.

The engine's identity and the part of each page in this process are derived once, when SGLang
registers its host pool (integrations/sglang/hicache.py). The code is duck-typed, so importing this
module does not need SGLang: the configuration is ``HiCacheStorageConfig``, the model is SGLang's
own record of the arguments.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any, Final

from tierkv.dmp.client.pool import Pool
from tierkv.integrations.identity import EngineIdentity, revision_of
from tierkv.kvcore.ids import BLOCK_KEY_BYTES, BlockKey, NamespaceKey

MAMBA: Final = "mamba"
"""The pool of Mamba states, which are divided between ranks even if keys and values are not."""

_MODEL_FACTS: Final = {
    "quantization": "quantization",
    "kv dtype": "kv_cache_dtype",
    "compute dtype": "dtype",
    "model overrides": "json_model_override_args",
    "scales of the cache": "quantization_param_path",
    "modelopt": "modelopt_quant",
    "quantised while served": "quantize_and_serve",
    "configuration": "decrypted_config_file",
    "weight loader": "custom_weight_loader",
}
_MADE_UP: Final = "dummy"
"""The load format of random weights, which the folder therefore does not determine."""


def identity_of(
    storage: Any,
    host_pool: Any,
    *,
    version: str,
    model: str,
    revision: str | None,
    weights: str,
    arguments: Any,
) -> EngineIdentity:
    """Return the identity of an engine with opaque pages.

    All processes of one engine have equal facts; ``part_of`` distinguishes the processes.

    Args:
        storage: SGLang's configuration of storage.
        host_pool: the host pool of keys and values.
        version: SGLang's version. The byte order of a page and the hashes are internal to SGLang
            and may change with any version.
        model: folder or name.
        revision: the commit of a model without a local folder, if given.
        weights: the operator's name of the weights; weights may be replaced at runtime, which the
            folder does not show.
        arguments: SGLang's record of the model's arguments; None if missing.
    """
    replicated = bool(storage.is_mla_model)
    facts = {
        "sglang": version,
        "host pool": type(host_pool).__name__,
        "page layout": str(getattr(host_pool, "layout", "")),
        "page size": str(getattr(host_pool, "page_size", "")),
        "dtype": str(getattr(host_pool, "dtype", "")),
        "format": str(getattr(host_pool, "storage_format_tag", None) or ""),
        "weight version": weights,
        "pp": str(storage.pp_size),
        "cp": str(storage.attn_cp_size),
        "dcp": str(storage.dcp_size),
    }
    for name, field in _MODEL_FACTS.items():
        facts[name] = str(getattr(arguments, field, None) or "")
    made_up = getattr(arguments, "load_format", None) == _MADE_UP
    return EngineIdentity(
        engine="sglang",
        version=version,
        model=model,
        revision="" if made_up else revision_of(model, told=revision),
        layout=None,
        ranks=1 if replicated else int(storage.tp_size),
        rank=0 if replicated else int(storage.tp_rank),
        facts=tuple(facts.items()),
    )


def part_of(storage: Any, component: str, host_pool: Any, form: str) -> tuple[str, ...]:
    """Describe the part of each page in this process.

    Args:
        storage: SGLang's configuration of storage.
        component: name of the host pool.
        host_pool: the host pool.
        form: number and size of the pieces of a page.
    """
    shared = bool(storage.is_mla_model) and component != MAMBA
    layers = getattr(host_pool, "start_layer", ""), getattr(host_pool, "end_layer", "")
    return (
        "tp any" if shared else f"tp {storage.tp_rank} of {storage.tp_size}",
        f"pp {storage.pp_rank} of {storage.pp_size}",
        f"cp {storage.attn_cp_rank} of {storage.attn_cp_size}",
        f"dcp {storage.dcp_rank} of {storage.dcp_size}",
        f"layers {layers[0]} to {layers[1]}",
        form,
    )


KV: Final = "kv"
"""SGLang's name of the pool that holds keys and values."""

_PERSON: Final = b"tierkv-sglang-1"
_MARKER: Final = b"tierkv-sglanggen"


class PageNames:
    """Names pages; immutable, so threads may share an instance.

    Args:
        base: the engine's own key.
        part: this process's part of a page: ranks, layers, number of bytes.
        generation: number of clears so far.
    """

    def __init__(self, base: NamespaceKey, part: Iterable[str], generation: int) -> None:
        self.base = base
        self.generation = generation
        self._mac = blake2b(key=base, digest_size=BLOCK_KEY_BYTES, person=_PERSON)
        self._mac.update(generation.to_bytes(8, "little"))
        for text in part:
            self._add(self._mac, text)

    def name(self, page_hash: str, component: str = KV) -> BlockKey:
        """Return the key of a page, from SGLang's hash and the name of the host pool."""
        mac = self._mac.copy()
        self._add(mac, component)
        self._add(mac, page_hash)
        return BlockKey(mac.digest())

    @staticmethod
    def _add(mac: blake2b, text: str) -> None:
        raw = text.encode("utf-8", "surrogatepass")
        mac.update(len(raw).to_bytes(4, "little") + raw)


def generation_marker(base: NamespaceKey, generation: int) -> BlockKey:
    """Return the key of the small value that marks the beginning of a generation."""
    mac = blake2b(key=base, digest_size=BLOCK_KEY_BYTES, person=_MARKER)
    mac.update(generation.to_bytes(8, "little"))
    return BlockKey(mac.digest())


WINDOW: Final = 64
"""Markers requested at once when an engine starts. Every 64th marker is kept, so that the search
never ends too early."""

_MARK: Final = b"tierkv: SGLang's pages were cleared"


class Generations:
    """The current generation of a base key, as far as this process knows; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: tuple[NamespaceKey, int] | None = None

    def current(self, pool: Pool, base: NamespaceKey) -> int:
        """Return the generation; the first call asks the pool."""
        with self._lock:
            if self._known is not None and self._known[0] == base:
                return self._known[1]
        return self.look(pool, base, since=0)

    def look(self, pool: Pool, base: NamespaceKey, *, since: int) -> int:
        """Ask the pool for the newest generation after the known generation ``since``."""
        newest, end = since, since
        while newest >= end:
            numbers = range(end + 1, end + WINDOW + 1)
            there = pool.exists_many([generation_marker(base, n) for n in numbers])
            end += WINDOW
            newest = max(
                [newest, *(n for n, is_there in zip(numbers, there, strict=True) if is_there)]
            )
        return self._learn(base, newest)

    def next_marker(self, base: NamespaceKey, generation: int) -> BlockKey:
        """Return the key of the marker that the next ``clear`` puts."""
        return generation_marker(base, generation + 1)

    def advance(self, pool: Pool, base: NamespaceKey) -> bool:
        """Begin the next generation; False if the pool has no room for the marker."""
        generation = self.look(pool, base, since=self.current(pool, base)) + 1
        if not self.keep(pool, base, generation):
            return False
        self._learn(base, generation)
        return True

    def keep(self, pool: Pool, base: NamespaceKey, generation: int) -> bool:
        """Put the markers of a generation again; False if the pool did not store them all."""
        if not generation:
            return True
        numbers = {generation, *range(WINDOW, generation, WINDOW)}
        return all(pool.put_many([(generation_marker(base, n), _MARK) for n in sorted(numbers)]))

    def _learn(self, base: NamespaceKey, generation: int) -> int:
        with self._lock:
            if self._known is not None and self._known[0] == base:
                generation = max(generation, self._known[1])
            self._known = (base, generation)
            return generation
