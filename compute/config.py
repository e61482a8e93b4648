"""Settings of a compute node.

Made by the composition root (tierkv/config.py) or by a test; every value is checked once, here. No
code in this file imports torch, so a front without torch can read the types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tierkv.kvcore.errors import ConfigError
from tierkv.kvcore.ids import NO_ZONE, HostId, NodeId, ZoneId
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.node import NodeRole
from tierkv.policies.select import PRODUCTION_POLICIES


class LoadPolicy(StrEnum):
    """When KV is loaded from the pool instead of computed."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


READ_BYTES = 1 << 20
"""Below this size the latency of a read dominates: in shared memory 0.1 ms a call, 0.1 ms for 1
MiB."""


@dataclass(frozen=True, slots=True)
class RandomModelSpec:
    """A model without weights on disk: a Hugging Face configuration and a seed.

    Attributes:
        config: content of a ``config.json``; needs ``architectures`` or ``model_type``.
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
        zone: this machine's zone; pool nodes of other zones come last.
        role: ``compute``, ``prefill`` or ``decode``.
        model_folder: a Hugging Face folder, or None when ``random_model`` is set.
        random_model: random weights, for benchmarks and tests.
        model_name: name of the model in requests.
        tokenizer_folder: folder where the front finds the tokenizer; defaults to ``model_folder``.
        dtype: ``auto`` (float32 on CPU, bfloat16 on CUDA), ``float32``, ``bfloat16``, ``float16``.
        device: ``auto``, ``cpu`` or ``cuda``.
        l1_bytes: memory for L1 pages when ``l1_pages`` is 0.
        touch_l1: allocate L1's memory at the start, so that memory can't run out later. False: a
            CPU's memory is allocated as pages are first written, for a process that may do little.
        l1_pages: number of L1 pages; 0 derives the number from ``l1_bytes``.
        block_tokens: tokens per block and page.
        max_batch_tokens: most tokens computed in one step.
        max_running: most requests in the batch.
        max_waiting: queued requests before new requests are refused.
        load_policy: when to load from the pool.
        kv_codec: encoding of KV below L1; lossy codecs may change answers.
        kv_calibration: file of tables for entropy-coded KV; None looks into the model folder.
        ttft_budget_s: with codec ``adaptive``, target for the time to the first token when loading;
            0: half of the estimated computing time.
        publish: whether new blocks are written to the pool.
        publish_queue_blocks: blocks waiting for publication before further blocks are skipped.
        load_threads: threads that look blocks up and load them.
        load_read_bytes: one read of a load brings as many layers as fit into this size; 0: one
            layer.
        load_timeout_s: a load that takes longer counts as failed; also the longest wait of a
            handoff for its blocks.
        locate_timeout_s: longest wait for the directory.
        threads: torch's intra-op threads; 0 leaves torch's choice.
        eviction_policy: name of the policy that picks the unused blocks to evict from L1
            (policies/select.py).
        speculative_tokens: tokens that a greedy answer may guess ahead, from repetitions in the
            text. 0: no guesses. -1: 8 with float32 on CPU; 0 on CUDA, where guesses gain little,
            and 0 with coarser dtypes, where near ties may end differently.
    """

    node_id: NodeId
    host: HostId
    zone: ZoneId = NO_ZONE
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
        """Return the number of tokens to guess ahead on a device type with a dtype.

        Coarser dtypes round a row's scores differently when the step has other rows too; in float32
        the difference is too small to matter.
        """
        if self.speculative_tokens >= 0:
            return self.speculative_tokens
        return 8 if device == "cpu" and dtype == "float32" else 0
