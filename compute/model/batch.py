"""Tensors of one step: the tokens, the rows that receive their KV, and the attention plan.

The engine builds a batch once per step from plain chunk descriptions; every layer uses the same
tensors. compute/model/attention_plan.py decides which rows are attended to together.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tierkv.compute.model.attention_plan import AttentionPlan, QuerySpan, plan_attention
from tierkv.compute.model.row_groups import LEAST_SAVED_TOKENS, LONGEST_REST

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RawTarget:
    """Pages for a chunk's keys before rope and values, in addition to the sequence's own pages.

    Attributes:
        start: position of the chunk's first token; the chunk is the end of its sequence.
        pages: page i holds block i of the chunk, tokens ``[i * block_tokens, (i + 1) *
            block_tokens)``.
    """

    start: int
    pages: Int64Array


@dataclass(frozen=True, slots=True)
class ChunkInput:
    """New tokens of one sequence in one step.

    Attributes:
        token_ids: the new tokens, ``[count]``.
        start: position of the first new token; KV of ``[0, start)`` is in ``page_table`` already.
        page_table: pages covering at least ``start + count`` tokens.
        wants_logits: number of last tokens that need logits. If all of several tokens need logits,
            all tokens but the first are guesses to be checked.
        raw: second, position-free target of the KV; None except for chunks in isolation.
    """

    token_ids: Int64Array
    start: int
    page_table: Int64Array
    wants_logits: int
    raw: RawTarget | None = None


@dataclass(frozen=True, slots=True)
class RawWrite:
    """Rows of the step's token axis, and the target rows of keys before rope and then values."""

    source_rows: Tensor
    target_rows: Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Everything the decoder needs for one step.

    Attributes:
        token_ids: ``[tokens]`` int64.
        positions: ``[tokens]`` int64.
        write_rows: target rows of keys and then values in ``L1Pages.token_rows``, ``[2 * tokens]``.
        attention: attention plan of all rows.
        last: attention plan of ``logit_rows`` in the last layer, where other rows are not needed;
            None if all rows have outputs, or on CUDA.
        logit_rows: rows that need logits.
        logit_chunks: index of the chunk of each row in ``logit_rows``.
        raw: rows that are also kept position-free; None without any.
    """

    token_ids: Tensor
    positions: Tensor
    write_rows: Tensor
    attention: AttentionPlan
    logit_rows: Tensor
    logit_chunks: tuple[int, ...]
    raw: RawWrite | None = None
    last: AttentionPlan | None = None


def build_batch(
    chunks: Sequence[ChunkInput],
    *,
    block_tokens: int,
    device: torch.device,
    least_saved_tokens: int = LEAST_SAVED_TOKENS,
    longest_rest: int = LONGEST_REST,
) -> ForwardBatch:
    """Lay chunks out on one token axis: decode groups, then rest groups, then prefill segments.

    Args:
        chunks: tokens to compute; ``logit_chunks`` refers to this order.
        block_tokens: tokens per page.
        device: device of the tensors.
        least_saved_tokens: fewest saved key reads for which rows read a shared beginning once. Not
            used on CUDA: captured steps have one form for all.
        longest_rest: longest chunk, in tokens, that may share an attention call. Not used on CUDA.
    """
    owners = list(range(len(chunks)))
    if device.type != "cpu":
        owners, chunks = _one_by_one(chunks)
        least_saved_tokens, longest_rest = 1 << 62, 0
    counts = [len(c.token_ids) for c in chunks]
    plan = partial(
        plan_attention,
        block_tokens=block_tokens,
        device=device,
        least_saved_tokens=least_saved_tokens,
        longest_rest=longest_rest,
    )
    planned = plan([_span(c, count) for c, count in zip(chunks, counts, strict=True)])
    order, asked, last = planned.order, list(planned.order), None
    if device.type == "cpu" and any(map(operator.ne, counts, (c.wants_logits for c in chunks))):
        asking = [i for i, c in enumerate(chunks) if c.wants_logits]
        ends_only = plan([_span(chunks[i], int(chunks[i].wants_logits)) for i in asking])
        asked, last = [asking[k] for k in ends_only.order], ends_only.plan
    positions, writes, ends = [], [], {}
    row = 0
    for i in order:
        chunk = chunks[i]
        at = np.arange(chunk.start, chunk.start + len(chunk.token_ids))
        positions.append(at)
        writes.append(token_rows_of(chunk.page_table, at, block_tokens))
        row += len(at)
        ends[i] = row
    key_rows = np.concatenate(writes)
    wanted = [(i, ends[i] - n) for i in asked for n in range(int(chunks[i].wants_logits), 0, -1)]
    return ForwardBatch(
        token_ids=_tensor(np.concatenate([chunks[i].token_ids for i in order]), device),
        positions=_tensor(np.concatenate(positions), device),
        write_rows=_tensor(np.concatenate([key_rows, key_rows + block_tokens]), device),
        attention=planned.plan,
        logit_rows=_tensor(np.array([row for _, row in wanted], dtype=np.int64), device),
        logit_chunks=tuple(owners[i] for i, _ in wanted),
        raw=_raw_write(chunks, ends, block_tokens, device),
        last=last,
    )


def _span(chunk: ChunkInput, count: int) -> QuerySpan:
    """Return the last ``count`` tokens of a chunk as a query span."""
    start = chunk.start + len(chunk.token_ids) - count
    return QuerySpan(start, count, chunk.page_table, _is_guess(chunk))


def _is_guess(chunk: ChunkInput) -> bool:
    return chunk.wants_logits == len(chunk.token_ids) > 1


def _one_by_one(chunks: Sequence[ChunkInput]) -> tuple[list[int], list[ChunkInput]]:
    """Make each guessed token a separate row.

    The KV of all rows is written before any row attends to it.
    """
    owners, rows = [], []
    for i, chunk in enumerate(chunks):
        pieces = [chunk]
        if _is_guess(chunk):
            pieces = [
                ChunkInput(chunk.token_ids[j : j + 1], chunk.start + j, chunk.page_table, 1)
                for j in range(len(chunk.token_ids))
            ]
        rows += pieces
        owners += [i] * len(pieces)
    return owners, rows


def _raw_write(
    chunks: Sequence[ChunkInput], ends: dict[int, int], block_tokens: int, device: torch.device
) -> RawWrite | None:
    sources, targets = [], []
    for i, chunk in enumerate(chunks):
        if chunk.raw is None:
            continue
        count = len(chunk.token_ids)
        offsets = np.arange(count) + chunk.start - chunk.raw.start
        kept = offsets >= 0
        offsets = offsets[kept]
        sources.append(np.arange(ends[i] - count, ends[i])[kept])
        targets.append(token_rows_of(chunk.raw.pages, offsets, block_tokens))
    if not sources:
        return None
    keys = np.concatenate(targets)
    return RawWrite(
        _tensor(np.concatenate(sources), device),
        _tensor(np.concatenate([keys, keys + block_tokens]), device),
    )


def token_rows_of(pages: Int64Array, at: Int64Array, block_tokens: int) -> Int64Array:
    """Return the rows of the keys at positions ``at``; values are ``block_tokens`` rows further."""
    rows: Int64Array = pages[at // block_tokens] * (2 * block_tokens) + at % block_tokens
    return rows


def _tensor(array: Int64Array, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
