"""One step's work as tensors: which tokens, where their KV goes, what each sequence attends to.

Built once per step by the engine from plain chunk descriptions; the same tensors serve every
layer. Single-token chunks form padded decode groups, longer ones are prefill segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compute.pages import NULL_PAGE

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RawTarget:
    """Pages that get a chunk's keys before rope and values, besides the sequence's own pages.

    Attributes:
        start: position of the chunk's first token; the chunk is the end of its sequence.
        pages: block i of the chunk, its tokens ``[i * block_tokens, (i + 1) * block_tokens)``.
    """

    start: int
    pages: Int64Array


@dataclass(frozen=True, slots=True)
class ChunkInput:
    """New tokens of one sequence in one step.

    Attributes:
        token_ids: the new tokens, ``[count]``.
        start: position of the first of them; KV of ``[0, start)`` is in ``page_table`` already.
        page_table: pages covering at least ``start + count`` tokens.
        wants_logits: of how many of its last tokens logits are needed; more than one is for
            checking guessed tokens.
        raw: where KV goes a second time, free of position; None for all but chunks in isolation.
    """

    token_ids: Int64Array
    start: int
    page_table: Int64Array
    wants_logits: int
    raw: RawTarget | None = None


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one new token each, padded to a common number of pages.

    Attributes:
        rows: rows of the step's token axis, half-open ``[rows.start, rows.stop)``.
        gather: half-page indices, keys of all sequences then values, ``[2 * n * pages]``.
        context: keys to attend to, of the longest sequence.
        mask: True where a key may be seen, ``[n, 1, 1, context]``; None when all are as long.
    """

    rows: slice
    gather: Tensor
    context: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class PrefillSegment:
    """One sequence with several new tokens.

    Attributes:
        rows: its rows of the step's token axis.
        gather: half-page indices, keys then values, ``[2 * pages]``.
        start: tokens before the first of them.
        context: keys to attend to, ``start + count``; each token sees those up to its own.
    """

    rows: slice
    gather: Tensor
    start: int
    context: int


@dataclass(frozen=True, slots=True)
class RawWrite:
    """Rows of the step's token axis, and where their keys and then values go before rope."""

    source_rows: Tensor
    target_rows: Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Everything the decoder needs for one step.

    Attributes:
        token_ids: ``[tokens]`` int64.
        positions: ``[tokens]`` int64.
        write_rows: where keys and then values go, ``[2 * tokens]``, into ``L1Pages.token_rows``.
        groups: decode groups.
        segments: prefill segments.
        logit_rows: rows whose logits are wanted.
        logit_chunks: index of the chunk that each of those rows belongs to.
        raw: rows that are also kept position-free; None when there are none.
    """

    token_ids: Tensor
    positions: Tensor
    write_rows: Tensor
    groups: tuple[DecodeGroup, ...]
    segments: tuple[PrefillSegment, ...]
    logit_rows: Tensor
    logit_chunks: tuple[int, ...]
    raw: RawWrite | None = None


def build_batch(
    chunks: Sequence[ChunkInput], *, block_tokens: int, device: torch.device
) -> ForwardBatch:
    """Lay chunks out on one token axis: decode groups first, then prefill segments."""
    order = sorted(range(len(chunks)), key=lambda i: _group_of(chunks[i], block_tokens))
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
    wanted = [(i, ends[i] - n) for i in order for n in range(int(chunks[i].wants_logits), 0, -1)]
    groups, segments = _attention_parts(chunks, order, ends, block_tokens, device)
    return ForwardBatch(
        token_ids=_tensor(np.concatenate([chunks[i].token_ids for i in order]), device),
        positions=_tensor(np.concatenate(positions), device),
        write_rows=_tensor(np.concatenate([key_rows, key_rows + block_tokens]), device),
        groups=groups,
        segments=segments,
        logit_rows=_tensor(np.array([row for _, row in wanted], dtype=np.int64), device),
        logit_chunks=tuple(i for i, _ in wanted),
        raw=_raw_write(chunks, ends, block_tokens, device),
    )


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
    """Return the rows of the keys at positions ``at``; values are ``block_tokens`` further on."""
    rows: Int64Array = pages[at // block_tokens] * (2 * block_tokens) + at % block_tokens
    return rows


def _group_of(chunk: ChunkInput, block_tokens: int) -> int:
    """Return 0..63 for decodes (by size, so that padding at most doubles), 64 for prefills."""
    if len(chunk.token_ids) > 1:
        return 64
    return (chunk.start // block_tokens).bit_length()


def _attention_parts(
    chunks: Sequence[ChunkInput],
    order: Sequence[int],
    ends: dict[int, int],
    block_tokens: int,
    device: torch.device,
) -> tuple[tuple[DecodeGroup, ...], tuple[PrefillSegment, ...]]:
    groups: list[DecodeGroup] = []
    segments: list[PrefillSegment] = []
    start = 0
    while start < len(order):
        kind = _group_of(chunks[order[start]], block_tokens)
        if kind == 64:
            i = order[start]
            segments.append(_segment(chunks[i], ends[i], block_tokens, device))
            start += 1
            continue
        stop = start
        while stop < len(order) and _group_of(chunks[order[stop]], block_tokens) == kind:
            stop += 1
        members = [chunks[i] for i in order[start:stop]]
        groups.append(_group(members, slice(start, stop), block_tokens, device))
        start = stop
    return tuple(groups), tuple(segments)


def _group(
    members: Sequence[ChunkInput], rows: slice, block_tokens: int, device: torch.device
) -> DecodeGroup:
    lengths = np.array([m.start + 1 for m in members])
    width = -(-int(lengths.max()) // block_tokens)
    table = np.full((len(members), width), NULL_PAGE, dtype=np.int64)
    for row, member in enumerate(members):
        used = -(-int(lengths[row]) // block_tokens)
        table[row, :used] = member.page_table[:used]
    context = int(lengths.max())
    mask = None
    if lengths.min() < context:
        seen = np.arange(context)[None, :] < lengths[:, None]
        mask = torch.from_numpy(seen).to(device)[:, None, None, :]
    halves = table.reshape(-1) * 2
    gather = _tensor(np.concatenate([halves, halves + 1]), device)
    return DecodeGroup(rows, gather, context, mask)


def _segment(
    chunk: ChunkInput, end_row: int, block_tokens: int, device: torch.device
) -> PrefillSegment:
    count = len(chunk.token_ids)
    context = chunk.start + count
    halves = chunk.page_table[: -(-context // block_tokens)] * 2
    gather = _tensor(np.concatenate([halves, halves + 1]), device)
    return PrefillSegment(slice(end_row - count, end_row), gather, chunk.start, context)


def _tensor(array: Int64Array, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
