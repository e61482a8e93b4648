"""One SGLang rank without a model: device pool, host pool, radix tree, controller, our backend.

All of it is SGLang's own, made as its scheduler makes it; what a model would compute is replaced by
numbers that follow from the tokens, so that wrong bytes are seen as wrong. Needs stand_ins.install.
"""

from __future__ import annotations

import atexit
import json
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    EvictParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

LAYERS, HEADS, HEAD_DIM = 3, 2, 8
PAGE = 16
DYNAMIC = {
    "backend_name": "tierkv",
    "module_path": "tierkv.integrations.sglang.hicache",
    "class_name": "TierKvHiCache",
    "interface_v1": 1,
    "prefetch_threshold": 1,
}


class Rank:
    """One SGLang scheduler process's cache.

    Attributes:
        tree: the radix tree over device, host and storage.
        kv: the device pool.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        *,
        layout: str = "page_first_direct",
        page: int = PAGE,
        mla: bool = False,
        tp: tuple[int, int] = (0, 1),
        tokens: int = 512,
        attach: bool = True,
    ) -> None:
        self.page = page
        self.extra = DYNAMIC | settings
        self._tp = tp
        arguments = self._arguments(layout, attach=attach)
        set_global_server_args_for_scheduler(arguments)
        self.kv = _device_pool(tokens, page, mla=mla)
        self.allocator = TokenToKVPoolAllocator(
            size=tokens, dtype=torch.bfloat16, device="cpu", kvcache=self.kv, need_sort=False
        )
        requests = ReqToTokenPool(
            size=4, max_context_len=tokens, device="cpu", enable_memory_saver=False
        )
        parameters = CacheInitParams(
            disable=False,
            req_to_token_pool=requests,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page,
            tree_components=(ComponentType.FULL,),
            tree_core_backend="python",
        )
        self.tree = UnifiedRadixCache(params=parameters)
        with self._ranks():
            self.tree.init_hicache(arguments, parameters)
        # What a server reserves on machines with terabytes is more than the tests have.
        self.controller.prefetch_capacity_limit = self.host.size
        self.tree.load_back_threshold = 0
        self._requests = 0
        if attach:
            assert self.backend is not None

    def _ranks(self) -> AbstractContextManager[Any]:
        here: AbstractContextManager[Any] = get_parallel().override(
            tp_rank=self._tp[0],
            tp_size=self._tp[1],
            attn_tp_rank=self._tp[0],
            attn_tp_size=self._tp[1],
            moe_tp_size=self._tp[1],
            pp_rank=0,
            pp_size=1,
        )
        return here

    def _arguments(self, layout: str, *, attach: bool) -> ServerArgs:
        return ServerArgs(
            model_path="dummy",
            page_size=self.page,
            hicache_io_backend="kernel" if layout in ("page_first", "page_head") else "direct",
            hicache_mem_layout=layout,
            hicache_write_policy="write_through",
            hicache_ratio=2.0,
            hicache_storage_backend="dynamic" if attach else None,
            hicache_storage_backend_extra_config=json.dumps(self.extra) if attach else None,
            hicache_storage_prefetch_policy="wait_complete",
        )

    # What it is made of

    @property
    def controller(self) -> Any:
        return self.tree.cache_controller

    @property
    def backend(self) -> Any:
        return self.controller.storage_backend

    @property
    def host(self) -> Any:
        return self.controller.storage_host_pool

    def up(self) -> None:
        """Wait until the backend has the pool."""
        until(lambda: self.backend.door.up, what=lambda: f"door: {self.backend.door.why_down}")

    # What a scheduler does

    def compute(self, tokens: Sequence[int], *, salt: str | None = None) -> None:
        """Have KV of tokens in the tree, and all of it in storage if that takes it."""
        indices = self.allocator.alloc(len(tokens))
        if indices is None:
            self.forget(self.kv.size)
            indices = self.allocator.alloc(len(tokens))
        assert indices is not None
        for buffer, numbers in zip(self._buffers(), self._numbers(tokens, salt), strict=True):
            buffer[indices] = numbers
        self.tree.insert(InsertParams(key=_key(tokens, salt), value=indices))
        self.settle()

    def settle(self) -> None:
        """Go through event rounds until nothing is on its way."""

        def nothing_under_way() -> bool:
            self.tree.check_hicache_events()
            return not self.tree.ongoing_write_through and not self.tree.ongoing_backup

        until(nothing_under_way, what=lambda: "backups")

    def forget(self, tokens: int) -> None:
        """Evict from device and host, as if others had needed the room."""
        self.tree.evict(EvictParams(num_tokens=tokens))
        self.tree.evict_host(tokens)

    def fetch(self, tokens: Sequence[int], *, salt: str | None = None) -> int:
        """Prefetch from storage what the tree lacks; returns tokens that are in the tree then."""
        match = self.match(tokens, salt=salt)
        have = match.device_prefix_len + match.host_hit_length
        handle = CacheRequestHandle(f"request-{self._requests}", 0)
        self._requests += 1
        tree = self.tree
        tree.prefetch_from_storage(
            handle,
            match.last_host_node,
            array("q", tokens[have:]),
            tree.get_last_hash_value(match.last_host_node),
            None,
            list(tokens[:have]),
            cache_salt=salt,
        )

        def arrived() -> bool:
            tree.check_hicache_events()
            return bool(tree.check_prefetch_progress(handle))

        until(arrived, what=lambda: "prefetch")
        tree.pop_prefetch_loaded_tokens(handle)
        return self.cached(tokens, salt=salt)

    def match(self, tokens: Sequence[int], *, salt: str | None = None) -> Any:
        """Return what the tree has."""
        return self.tree.match_prefix(MatchPrefixParams(key=_key(tokens, salt)))

    def cached(self, tokens: Sequence[int], *, salt: str | None = None) -> int:
        """Return how many tokens are on the device or the host."""
        match = self.match(tokens, salt=salt)
        return int(match.device_prefix_len + match.host_hit_length)

    def on_device(self, tokens: Sequence[int], *, salt: str | None = None) -> int:
        """Return how many tokens are on the device."""
        return int(self.match(tokens, salt=salt).device_prefix_len)

    def storage_pages(self, tokens: Sequence[int], *, salt: str | None = None) -> int:
        """Return how many leading pages are in storage."""
        return int(self.backend.batch_exists(self.hashes(tokens, salt=salt)))

    def load_back(self, tokens: Sequence[int], *, salt: str | None = None) -> None:
        """Bring what the host has of tokens to the device."""
        match = self.match(tokens, salt=salt)
        if not match.host_hit_length:
            return
        assert self.tree.load_back(match.best_match_node)
        assert self.tree.ready_to_load_host_cache() != -1
        self.tree.loading_check()

    def wrong(self, tokens: Sequence[int], *, salt: str | None = None) -> int:
        """Compare what is on the device with what was computed; returns wrong numbers."""
        match = self.match(tokens, salt=salt)
        indices = self.tree.path_device_indices(match.last_device_node)
        known = tokens[: len(indices)]
        pairs = zip(self._buffers(), self._numbers(known, salt), strict=True)
        return sum(int((buffer[indices] != numbers).sum()) for buffer, numbers in pairs)

    def hashes(self, tokens: Sequence[int], *, salt: str | None = None) -> list[str]:
        """Return SGLang's names of pages."""
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        named = get_storage_hash_str(_key(tokens, salt), None, page_size=self.page)
        assert isinstance(named, list)
        return named

    def notes(self) -> tuple[str, ...]:
        """Return the codes of complaints so far."""
        counts = self.backend.door.counts()
        return tuple(n.removeprefix("complaints_") for n in counts if n.startswith("complaints_"))

    def attach(self) -> str:
        """Attach the backend at runtime, as by PUT /hicache/storage-backend; what went wrong."""
        with self._ranks():
            done, message = self.tree.attach_storage_backend(
                storage_backend="dynamic", storage_backend_extra_config_json=json.dumps(self.extra)
            )
        return "" if done else message

    def detach(self) -> None:
        """Detach the backend at runtime."""
        done, message = self.tree.detach_storage_backend()
        assert done, message

    def close(self) -> None:
        """Detach, as at the end of a server."""
        self.tree.detach_storage_backend()
        atexit.unregister(self.tree.shutdown)

    # Inside

    def _buffers(self) -> list[torch.Tensor]:
        if hasattr(self.kv, "v_buffer"):
            return [*self.kv.k_buffer, *self.kv.v_buffer]
        return list(self.kv.kv_buffer)

    def _numbers(self, tokens: Sequence[int], salt: str | None) -> list[torch.Tensor]:
        """Return what a model would compute: it follows from the tokens so far, salt and layer."""
        made = []
        for number, buffer in enumerate(self._buffers()):
            generator = torch.Generator().manual_seed(number)
            row = torch.randn(buffer.shape[1:], generator=generator)
            factors, so_far = [], sum((salt or "").encode()) % 97
            for token in tokens:
                so_far = (so_far * 31 + token + 7) % 251
                factors.append(float(so_far + 1))
            scale = torch.tensor(factors).reshape(-1, *[1] * row.ndim)
            made.append((scale * row).to(buffer.dtype))
        return made


def until(
    condition: Callable[[], bool], *, what: Callable[[], str], deadline_s: float = 30
) -> None:
    """Wait for a condition."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what()}"
        time.sleep(0.01)


def _key(tokens: Sequence[int], salt: str | None) -> RadixKey:
    return RadixKey(array("q", tokens), extra_key=None, cache_salt=salt)


def _device_pool(tokens: int, page: int, *, mla: bool) -> Any:
    common = {
        "size": tokens,
        "page_size": page,
        "dtype": torch.bfloat16,
        "layer_num": LAYERS,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    if mla:
        return MLATokenToKVPool(kv_lora_rank=24, qk_rope_head_dim=8, **common)
    return MHATokenToKVPool(head_num=HEADS, head_dim=HEAD_DIM, **common)
