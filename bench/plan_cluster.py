"""A complete small cluster in this process, with caches as small as a benchmark needs.

Used by bench.plan and by tests of plans: a directory, a memory pool node and a compute node per
host, and a front. All parts are the production code except for the sockets.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tierkv import compute
from tierkv.compute.client import LocalComputeClient
from tierkv.compute.config import ComputeConfig, LoadPolicy, RandomModelSpec
from tierkv.dbfront.calls.evaluation import CallBatch, CallOutcome
from tierkv.dbfront.calls.field_order import ContextFields
from tierkv.dbfront.contracts import CallDefaults, PlanSummary, TextGenerator
from tierkv.dbfront.generation.generation import Generation
from tierkv.dmp.config import DmpConfig
from tierkv.dmp.transport.inproc import InprocPoolNode
from tierkv.kvcore.block import Tier
from tierkv.kvcore.ids import HostId, NodeId
from tierkv.metaserver.local import LocalMeta
from tierkv.parts.compute_part import ComputePart, make_compute_part
from tierkv.parts.parts import DmpPart
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.dispatcher import Dispatcher
from tierkv.scheduler.nodes.cluster_view import ClusterView
from tierkv.sql.calls.ai_call import AiCall

TOKENIZER = Path(compute.__file__).parent / "demo_model" / "weights"
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
"""A random-weight model with a noticeable prefill time and an acceptable benchmark time."""


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """Size of a cluster.

    Attributes:
        model: configuration of the random-weight model.
        nodes: compute nodes, each on a separate host with a pool node.
        l1_pages: pages of each compute node.
        pool_bytes: memory of each pool node, rounded up to whole extents.
        extent_bytes: size of an extent.
        block_tokens: tokens per block.
        max_running: requests in a node's batch.
        threads: torch's threads per node.
    """

    model: Mapping[str, Any]
    nodes: int
    l1_pages: int
    pool_bytes: int
    extent_bytes: int = 1 << 20
    block_tokens: int = 16
    max_running: int = 16
    threads: int = 1


@dataclass(slots=True)
class Peaks:
    """Peak use, summed over all nodes.

    Attributes:
        running_blocks: L1 pages held by running calls.
        l1_bytes: used bytes of L1 pages.
        l2_bytes: used bytes of the pool.
    """

    running_blocks: int = 0
    l1_bytes: int = 0
    l2_bytes: int = 0


@dataclass(slots=True)
class PlanCluster:
    """A started cluster.

    Attributes:
        meta: the directory.
        computes: the compute nodes.
        pools: the memory pool nodes.
        dispatcher: the front's scheduler.
        generation: the text generator of the front.
        peaks: peak use recorded by ``watch``.
    """

    meta: LocalMeta
    computes: list[ComputePart]
    pools: list[DmpPart]
    dispatcher: Dispatcher
    generation: Generation
    peaks: Peaks = field(default_factory=Peaks)

    async def settle(self) -> None:
        """Wait until computed blocks are in the pool and in the directory."""
        for part in self.computes:
            await part.flush()
        for pool in self.pools:
            await pool.flush()

    async def watch(self, interval_s: float = 0.01) -> None:
        """Record the peak use reported by the nodes; runs until cancelled."""
        peaks = self.peaks
        while True:
            computes = [part.node.report() for part in self.computes]
            pools = [pool.report() for pool in self.pools]
            running = sum(
                report.load.kv_usage * tier.blocks_total
                for report in computes
                for tier in report.tiers
                if tier.tier is Tier.L1
            )
            peaks.running_blocks = max(peaks.running_blocks, round(running))
            peaks.l1_bytes = max(peaks.l1_bytes, sum(_used(r.tiers, Tier.L1) for r in computes))
            peaks.l2_bytes = max(peaks.l2_bytes, sum(_used(r.tiers, Tier.L2) for r in pools))
            await asyncio.sleep(interval_s)


def _used(tiers: tuple[Any, ...], tier: Tier) -> int:
    return sum(stats.used_bytes for stats in tiers if stats.tier is tier)


@asynccontextmanager
async def plan_cluster(shape: ClusterShape) -> AsyncIterator[PlanCluster]:
    """Start a cluster and stop it at the end of the block."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        meta = LocalMeta()
        stack.push_async_callback(meta.close)
        computes, pools = [], []
        for number in range(shape.nodes):
            host = HostId(f"h{number}")
            pool = DmpPart(_pool_config(shape, number, host, folder), meta, listen=False)
            await pool.start()
            stack.push_async_callback(pool.stop)
            pools.append(pool)
            part = await make_compute_part(_compute_config(shape, number, host), meta)
            computes.append(part)
        for part in computes:
            part.node.set_pool_nodes([InprocPoolNode(pool.node) for pool in pools])
            await part.start()
            stack.push_async_callback(part.stop)
        view = ClusterView(fixed=[LocalComputeClient(part.node) for part in computes])
        dispatcher = Dispatcher(view, meta=meta, config=SchedulerConfig(refresh_interval_s=0.1))
        await dispatcher.start()
        stack.push_async_callback(dispatcher.stop)
        yield PlanCluster(meta, computes, pools, dispatcher, Generation(dispatcher))


def _pool_config(shape: ClusterShape, number: int, host: HostId, folder: str) -> DmpConfig:
    extents = -(-shape.pool_bytes // shape.extent_bytes)
    return DmpConfig(
        NodeId(f"dmp-{number}"),
        host,
        segment_path=f"{folder}/segment-{number}",
        capacity_bytes=extents * shape.extent_bytes,
        extent_bytes=shape.extent_bytes,
        nameless=True,
    )


def _compute_config(shape: ClusterShape, number: int, host: HostId) -> ComputeConfig:
    return ComputeConfig(
        NodeId(f"c{number}"),
        host,
        random_model=RandomModelSpec(shape.model, seed=3),
        model_name="random",
        tokenizer_folder=str(TOKENIZER),
        block_tokens=shape.block_tokens,
        l1_pages=shape.l1_pages,
        max_batch_tokens=512,
        max_running=shape.max_running,
        load_policy=LoadPolicy.ALWAYS,
        threads=shape.threads,
    )


async def answer_all(
    calls: Sequence[AiCall],
    generator: TextGenerator,
    defaults: CallDefaults,
    ended: Callable[[AiCall, CallOutcome], None],
) -> PlanSummary:
    """Answer distinct calls without a statement; ``ended`` receives the outcome of each call."""
    batch, summary = CallBatch(generator, defaults, ended), PlanSummary()
    await batch.start(calls, await ContextFields(defaults.field_reorder).written(calls))
    while await batch.next_wave():
        summary += await batch.ask()
    return summary
