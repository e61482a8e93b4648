"""What a compute node may be told.

Made by the composition root (tierkv/config.py) or by a test; every value is checked once, here.
Nothing in this file imports torch, so that a front without it can read the types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tierkv.kvcore.errors import ConfigError
from tierkv.kvcore.ids import HostId, NodeId
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.node import NodeRole
from tierkv.policies.select import PRODUCTION_POLICIES


class LoadPolicy(StrEnum):
    """When KV is loaded from the pool instead of computed."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


READ_BYTES = 1 << 20
"""Below this a read costs its latency: in shared memory 0.1 ms a call, 0.1 ms for 1 MiB."""


@dataclass(frozen=True, slots=True)
class RandomModelSpec:
    """A model without weights on disk: a Hugging Face configuration and a seed.

    Attributes:
        config: what a ``config.json`` would hold; needs ``architectures`` or ``model_type``.
        seed: equal seeds give equal weights on every machine.
    """

    config: Mapping[str, Any]
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ComputeConfig:
    """Settings of one compute node.

    Attributes:
        node_id: unique name in the cluster.
        host: this machine; a pool node of the same host is tier L2.
        role: ``compute``, ``prefill`` or ``decode``.
        model_folder: a Hugging Face folder, or None when ``random_model`` is set.
        random_model: random weights, for benchmarks and tests.
        model_name: what requests call the model.
        tokenizer_folder: where the front finds the tokenizer; defaults to ``model_folder``.
        dtype: ``auto`` (float32 on CPU, bfloat16 on CUDA), ``float32``, ``bfloat16``, ``float16``.
        device: ``auto``, ``cpu`` or ``cuda``.
        l1_bytes: memory for L1 pages when ``l1_pages`` is 0.
        touch_l1: take L1's memory at the start, so that it can't run out later; else a CPU's is
            taken as pages are first written, for a process that may do little.
        l1_pages: number of L1 pages; 0 derives it from ``l1_bytes``.
        block_tokens: tokens per block and page.
        max_batch_tokens: tokens computed in one step, at most.
        max_running: requests in the batch, at most.
        max_waiting: queued requests before new ones are refused.
        load_policy: when to load from the pool.
        kv_codec: how KV is encoded below L1; lossy ones may change answers.
        kv_calibration: file of tables for entropy-coded KV; None looks into the model folder.
        ttft_budget_s: with codec ``adaptive``, time to the first token that loading aims at; 0:
            half of what computing would take.
        publish: whether new blocks are written to the pool.
        publish_queue_blocks: blocks waiting for publication before more are skipped.
        load_threads: threads that look blocks up and load them.
        load_read_bytes: one read of a load brings as many layers as fit into this; 0: one layer.
        load_timeout_s: a load that takes longer counts as failed; a handoff waits for its blocks
            as long.
        locate_timeout_s: longest wait for the directory.
        threads: torch's intra-op threads; 0 leaves torch's choice.
        eviction_policy: which unused blocks leave L1 first, by name (policies/select.py).
        speculative_tokens: tokens that a greedy answer may guess ahead, from what it repeats; 0: it
            does not guess; -1: 8 with float32 on CPU; none on CUDA, where that is not measured, and
            none with dtypes so coarse that near ties may end otherwise.
    """

    node_id: NodeId
    host: HostId
    role: NodeRole = NodeRole.COMPUTE
    model_folder: str | None = None
    random_model: RandomModelSpec | None = None
    model_name: str = "model"
    tokenizer_folder: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    l1_bytes: int = 512 << 20
    l1_pages: int = 0
    touch_l1: bool = True
    block_tokens: int = 64
    max_batch_tokens: int = 1_024
    max_running: int = 256
    max_waiting: int = 10_000
    load_policy: LoadPolicy = LoadPolicy.AUTO
    kv_codec: KvCodec = KvCodec.NONE
    kv_calibration: str | None = None
    ttft_budget_s: float = 0.0
    publish: bool = True
    publish_queue_blocks: int = 1_024
    load_threads: int = 4
    load_read_bytes: int = READ_BYTES
    load_timeout_s: float = 10.0
    locate_timeout_s: float = 1.0
    threads: int = 0
    eviction_policy: str = "default"
    speculative_tokens: int = -1

    def __post_init__(self) -> None:
        if (self.model_folder is None) == (self.random_model is None):
            raise ConfigError("a compute node needs either a model folder or a random model")
        if self.max_running > self.max_batch_tokens:
            raise ConfigError("max_running may not exceed max_batch_tokens (one token each)")
        if self.eviction_policy not in PRODUCTION_POLICIES:
            known = ", ".join(sorted(PRODUCTION_POLICIES))
            raise ConfigError(
                f"compute.eviction_policy {self.eviction_policy!r} is none of {known}"
            )
        for name in ("block_tokens", "max_batch_tokens", "max_running", "load_threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")

    def guesses_on(self, device: str, dtype: str) -> int:
        """Return how many tokens are guessed ahead on a device of that type with that dtype.

        Coarser dtypes round a row's scores differently when other rows are computed beside it; in
        float32 that is too little to matter.
        """
        if self.speculative_tokens >= 0:
            return self.speculative_tokens
        return 8 if device == "cpu" and dtype == "float32" else 0
