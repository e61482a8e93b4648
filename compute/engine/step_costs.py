"""Costs of steps on this node: measured at the start, learnt from steps, told in heartbeats.

Used by the engine only. A starting engine computes a few made-up prompts, because the steps of a
statement's batch are all alike and can't tell cost per token from cost per step or per prompt
(costing/fit.py); the made-up prompts differ in size. Kernels made by a backend at first use are
made during this time as well, and not during the first answer. The scheduler reads the load in the
heartbeat and predicts with the formulas of this node's own decisions (costing/service_time.py,
costing/node_cost.py).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from tierkv.compute.batching.batch_plan import Chunk
from tierkv.compute.batching.batcher import Batcher
from tierkv.compute.batching.sequence import Phase
from tierkv.compute.batching.sequence import Sequence as EngineSequence
from tierkv.compute.config import ComputeConfig
from tierkv.compute.l1.page_pool import PagePool
from tierkv.compute.model.batch import ChunkInput, build_batch
from tierkv.compute.model.decoder import Decoder
from tierkv.compute.tiers.load_figures import LoadFigures
from tierkv.compute.transfers.loads import Loads
from tierkv.costing.fit import Rate
from tierkv.costing.service_time import Line, causal_pairs, tell_cost
from tierkv.kvcore.block import Tier
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.node import NodeLoad

_log = logging.getLogger(__name__)

_LONGEST_S = 0.1
"""A step expected to take longer is not tried, so that a large model starts hardly later."""
_GROWTH = 8
"""Ratio of the sizes of a step and of the step before."""
_LEAST_SIZES = 3
"""Steps of few tokens can't tell cost per token from cost per step."""
_PROMPTS = 8
"""Steps of enough tokens are tried with one prompt and with this many prompts."""
_TRIES = 3
"""The shortest of this many tries counts, because a busy machine interrupts single steps for a
while.
"""
_TRIED_S = 0.03
"""Steps that take longer than this in total are not tried again, because the first answer waits."""
_OF_PARTS = 1.5
"""Upper bound of a step's time over the total time of its parts computed alone; the parts attend to
each other.
"""
_BUDGET_S = 0.4
"""Measuring stops after this time."""


MeasuredStep = tuple[int, float, float, int]
"""Tokens, pairs and seconds of a step, and the number of its prompts."""


def calibrate_steps(
    figures: LoadFigures, model: Decoder, pool: PagePool, config: ComputeConfig, clock: Clock
) -> None:
    """Compute steps of 1, 8, 64 ... tokens, of one prompt and of several, and fit their costs.

    Args:
        figures: stores the fitted costs.
        model: the model, not in use yet.
        pool: lends spare pages.
        config: says how many tokens the longest step has.
        clock: measures the steps.
    """
    try:
        with torch.inference_mode():
            steps = _measured(model, pool, config.max_batch_tokens, clock)
            figures.steps.calibrate(plausible(steps))
    except Exception:  # noqa: BLE001 - whatever a kernel raises; requests will show the error.
        _log.warning("measuring what steps cost failed: requests will tell", exc_info=True)


def plausible(steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """Cut time that a busy machine added to steps and that contradicts other steps.

    No step takes longer than a step of more tokens, nor much longer than its parts in total.
    """
    alone = {tokens: seconds for tokens, _, seconds, prompts in steps if prompts == 1}
    sizes = sorted(alone)
    for smaller, larger in reversed(list(pairwise(sizes))):
        alone[smaller] = min(alone[smaller], alone[larger])
    for smaller, larger in pairwise(sizes):
        alone[larger] = min(alone[larger], _OF_PARTS * larger / smaller * alone[smaller])
    return [
        (
            tokens,
            pairs,
            min(seconds, prompts * alone[tokens // prompts]) if prompts > 1 else alone[tokens],
            prompts,
        )
        for tokens, pairs, seconds, prompts in steps
    ]


def _measured(model: Decoder, pool: PagePool, max_tokens: int, clock: Clock) -> list[MeasuredStep]:
    block_tokens = model.pages.layout.block_tokens
    context = min(max_tokens, model.arch.context_tokens, pool.available * block_tokens)
    samples: list[MeasuredStep] = []
    tokens = 1
    end_s = clock.now() + _BUDGET_S
    sizes = 0
    _step_s(model, pool, (tokens,), clock)  # The first step warms up.
    while tokens <= context and (clock.now() < end_s or not samples):
        for prompts in (1, _PROMPTS) if tokens > _PROMPTS else (1,):
            each = tokens // prompts
            if prompts > 1 and prompts * -(-each // block_tokens) > pool.available:
                break
            seconds = _shortest_s(model, pool, (each,) * prompts, clock, end_s)
            samples.append((tokens, prompts * causal_pairs(0, each), seconds, prompts))
        sizes += 1
        if seconds * _GROWTH > _LONGEST_S and sizes >= _LEAST_SIZES:
            break
        tokens *= _GROWTH
    return samples


def _shortest_s(
    model: Decoder, pool: PagePool, prompts: tuple[int, ...], clock: Clock, end_s: float
) -> float:
    """Compute a step several times, or until ``end_s``, and return the least seconds."""
    took = [_step_s(model, pool, prompts, clock)]
    while len(took) < _TRIES and sum(took) < _TRIED_S and clock.now() < end_s:
        took.append(_step_s(model, pool, prompts, clock))
    return min(took)


def _step_s(model: Decoder, pool: PagePool, prompts: tuple[int, ...], clock: Clock) -> float:
    """Compute prompts of these lengths together and return the seconds."""
    block_tokens = model.pages.layout.block_tokens
    needed = [-(-tokens // block_tokens) for tokens in prompts]
    pages = pool.allocate(sum(needed))
    assert pages, "nobody holds any before the first request"
    model.pages.clear(pages)
    tables = np.split(np.array(pages, np.int64), np.cumsum(needed)[:-1])
    chunks = [
        ChunkInput(np.zeros(tokens, np.int64), 0, table, wants_logits=1)
        for tokens, table in zip(prompts, tables, strict=True)
    ]
    device = model.pages.kv.device
    began = clock.now()
    try:
        outputs = model.compute(build_batch(chunks, block_tokens=block_tokens, device=device))
        outputs.logits.cpu()  # A GPU has computed them then.
    finally:
        pool.release(pages)
    return clock.now() - began


_UNKNOWN = Line(0.0, 0.0)


class LoadReport:
    """Builds the NodeLoad for heartbeats.

    Attributes:
        prefill_rate: tokens per second in steps that were clearly prefill.
        decode_rate: tokens per second of one request in steps that only decoded.
        decode_steps: decoding steps per second.
    """

    def __init__(self, figures: LoadFigures, step_tokens: int) -> None:
        self.prefill_rate = Rate()
        self.decode_rate = Rate()
        self.decode_steps = Rate()
        self._figures = figures
        self._step_tokens = step_tokens

    def measured(self, chunks: Collection[Chunk], new_tokens: int, seconds: float) -> None:
        """Learn from a step that only decoded or was clearly prefill; ignore other steps.

        Args:
            chunks: the chunks of the step.
            new_tokens: tokens chosen in the step.
            seconds: duration of the step.
        """
        tokens = sum(chunk.count for chunk in chunks)
        if tokens == len(chunks):
            self.decode_rate.add(new_tokens / len(chunks), seconds)
            self.decode_steps.add(1, seconds)
        elif tokens >= 4 * len(chunks):
            self.prefill_rate.add(tokens, seconds)
            pairs = sum(causal_pairs(chunk.start, chunk.count) for chunk in chunks)
            self._figures.steps.add(tokens, pairs, seconds, len(chunks))

    def node_load(
        self, batcher: Batcher, pool: PagePool, loads: Loads, sequences: Iterable[EngineSequence]
    ) -> NodeLoad:
        """Return the current load of the node; O(sequences and loads)."""
        l2, l3, l4 = (self._figures.path(tier) or _UNKNOWN for tier in (Tier.L2, Tier.L3, Tier.L4))
        steps_per_s = self.decode_steps.value
        return replace(
            tell_cost(self._figures.steps.cost),
            requests_running=batcher.active,
            requests_waiting=batcher.waiting,
            waiting_prefill_tokens=batcher.uncomputed_tokens(),
            kv_usage=pool.used / max(1, pool.num_pages - 1),
            prefill_tokens_per_s=self.prefill_rate.value,
            decode_tokens_per_s=self.decode_rate.value,
            l2_bytes_per_s=l2.bytes_per_s,
            l3_bytes_per_s=l3.bytes_per_s,
            l4_bytes_per_s=l4.bytes_per_s,
            l2_latency_s=l2.latency_s,
            l3_latency_s=l3.latency_s,
            l4_latency_s=l4.latency_s,
            l2_queued_bytes=loads.queued_bytes(Tier.L2),
            l3_queued_bytes=loads.queued_bytes(Tier.L3),
            l4_queued_bytes=loads.queued_bytes(Tier.L4),
            step_tokens=self._step_tokens,
            decode_step_s=1 / steps_per_s if steps_per_s else 0.0,
            decodes_running=sum(
                seq.phase is Phase.RUNNING and seq.first_token_s >= 0.0 for seq in sequences
            ),
        )
