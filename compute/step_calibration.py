"""Computes a few prompts of nobody when an engine starts, to know what steps cost before the first.

The steps of a statement's batch are all alike, so they can't tell cost per token from cost per step
(compute/fit.py); these are chosen to differ. Kernels that a backend makes at their first use are
made here, too, and not in somebody's first answer.
"""

from __future__ import annotations

import logging

import numpy as np
import torch

from compute.batch import ChunkInput, build_batch
from compute.config import ComputeConfig
from compute.load_figures import LoadFigures
from compute.model import Decoder
from compute.page_pool import PagePool
from kvcore.clock import Clock
from policies.service_time import causal_pairs

_log = logging.getLogger(__name__)

_LONGEST_S = 0.1
"""A step that is expected to take longer is not tried: a large model starts hardly later."""
_GROWTH = 8
"""Each step is so many times the last one."""
_LEAST_SIZES = 3
"""Steps of few tokens can't tell cost per token from cost per step."""
_TRIES = 3
"""The shortest of so many counts: a busy machine stops a step for longer than it takes."""
_BUDGET_S = 0.4
"""What is measured by then has to do."""


def calibrate_steps(
    figures: LoadFigures, model: Decoder, pool: PagePool, config: ComputeConfig, clock: Clock
) -> None:
    """Compute steps of 1, 8, 64 ... tokens in spare pages, and fit their costs.

    Args:
        figures: takes in what they cost.
        model: what computes; nothing else uses it yet.
        pool: gives pages and gets them back.
        config: has the tokens of the longest step.
        clock: what measures.
    """
    try:
        with torch.inference_mode():
            figures.steps.calibrate(_measured(model, pool, config.max_batch_tokens, clock))
    except Exception:  # noqa: BLE001 - whatever a kernel raises; requests will meet it, and tell.
        _log.warning("measuring what steps cost failed: requests will tell", exc_info=True)


def _measured(
    model: Decoder, pool: PagePool, max_tokens: int, clock: Clock
) -> list[tuple[int, float, float]]:
    block_tokens = model.pages.layout.block_tokens
    context = min(max_tokens, model.arch.context_tokens, pool.available * block_tokens)
    samples: list[tuple[int, float, float]] = []
    tokens = 1
    end_s = clock.now() + _BUDGET_S
    _step_s(model, pool, tokens, clock)  # The first one warms up.
    while tokens <= context and (clock.now() < end_s or not samples):
        seconds = _shortest_s(model, pool, tokens, clock, end_s)
        samples.append((tokens, causal_pairs(0, tokens), seconds))
        if seconds * _GROWTH > _LONGEST_S and len(samples) >= _LEAST_SIZES:
            break
        tokens *= _GROWTH
    return samples


def _shortest_s(model: Decoder, pool: PagePool, tokens: int, clock: Clock, end_s: float) -> float:
    """Compute one prompt some times, or until ``end_s``, and return the least seconds."""
    took = [_step_s(model, pool, tokens, clock)]
    while len(took) < _TRIES and clock.now() < end_s:
        took.append(_step_s(model, pool, tokens, clock))
    return min(took)


def _step_s(model: Decoder, pool: PagePool, tokens: int, clock: Clock) -> float:
    """Compute one prompt and return the seconds it took."""
    block_tokens = model.pages.layout.block_tokens
    pages = pool.allocate(-(-tokens // block_tokens))
    assert pages, "nobody holds any before the first request"
    model.pages.clear(pages)
    chunk = ChunkInput(np.zeros(tokens, np.int64), 0, np.array(pages, np.int64), wants_logits=1)
    device = model.pages.kv.device
    began = clock.now()
    try:
        outputs = model.compute(build_batch([chunk], block_tokens=block_tokens, device=device))
        outputs.logits.cpu()  # A GPU has computed them then.
    finally:
        pool.release(pages)
    return clock.now() - began
