"""One step's work as tensors: which tokens, where their KV goes, what each sequence attends to.

Built once per step by the engine from plain chunk descriptions; the same tensors serve every
layer. Single-token chunks, with or without guesses behind them, form padded decode groups, longer
ones are prefill segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compute.cascade import LEAST_SAVED_TOKENS, Cohort, find_cohorts
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
        wants_logits: of how many of its last tokens logits are needed; if of all, then all but the
            first are guesses that are to be checked.
        raw: where KV goes a second time, free of position; None for all but chunks in isolation.
    """

    token_ids: Int64Array
    start: int
    page_table: Int64Array
    wants_logits: int
    raw: RawTarget | None = None


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one new token each, or one and as many guesses, padded to common pages.

    Attributes:
        rows: rows of the step's token axis, half-open ``[rows.start, rows.stop)``.
        gather: half-page indices, keys of all sequences then values, ``[2 * n * pages]``; without
            the shared ones.
        context: keys to attend to, of the longest sequence, behind the shared ones.
        mask: True where a key may be seen, ``[n, 1, queries, context]``; None when all are.
        queries: new tokens of each sequence.
        shared: half-page indices, keys then values, of pages that all sequences begin with and all
            queries see in full; None when they are not read apart.
    """

    rows: slice
    gather: Tensor
    context: int
    mask: Tensor | None
    queries: int = 1
    shared: Tensor | None = None


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


@dataclass(frozen=True, slots=True)
class _Part:
    """Chunks that lie side by side on the token axis and are attended to by one call.

    Attributes:
        members: indices of the chunks.
        queries: tokens of each of them; 0 stands for a single prefill segment.
        shared_pages: leading pages of a decode group that are read once.
    """

    members: tuple[int, ...]
    queries: int
    shared_pages: int = 0


def build_batch(
    chunks: Sequence[ChunkInput],
    *,
    block_tokens: int,
    device: torch.device,
    least_saved_tokens: int = LEAST_SAVED_TOKENS,
) -> ForwardBatch:
    """Lay chunks out on one token axis: decode groups first, then prefill segments.

    Args:
        chunks: what is computed; nothing changes their order in what is returned by chunk.
        block_tokens: tokens per page.
        device: where the tensors go.
        least_saved_tokens: rows that share a beginning read it once if that spares so many reads
            of a key. On CUDA they don't: captured steps have one form for all.
    """
    owners = list(range(len(chunks)))
    if device.type != "cpu":
        owners, chunks = _one_by_one(chunks)
        least_saved_tokens = 1 << 62
    parts = _parts(chunks, block_tokens, least_saved_tokens)
    order = [i for part in parts for i in part.members]
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
    groups, segments = _attention_parts(chunks, parts, ends, block_tokens, device)
    return ForwardBatch(
        token_ids=_tensor(np.concatenate([chunks[i].token_ids for i in order]), device),
        positions=_tensor(np.concatenate(positions), device),
        write_rows=_tensor(np.concatenate([key_rows, key_rows + block_tokens]), device),
        groups=groups,
        segments=segments,
        logit_rows=_tensor(np.array([row for _, row in wanted], dtype=np.int64), device),
        logit_chunks=tuple(owners[i] for i, _ in wanted),
        raw=_raw_write(chunks, ends, block_tokens, device),
    )


def _is_guess(chunk: ChunkInput) -> bool:
    return chunk.wants_logits == len(chunk.token_ids) > 1


def _one_by_one(chunks: Sequence[ChunkInput]) -> tuple[list[int], list[ChunkInput]]:
    """Make each guessed token a row of its own; its KV is written before anyone attends to it."""
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


def _parts(chunks: Sequence[ChunkInput], block_tokens: int, least_saved_tokens: int) -> list[_Part]:
    """Put decodes of equal size together (so that padding at most doubles), prefills alone."""
    alike: dict[tuple[int, int], list[int]] = {}
    segments = []
    for i, chunk in enumerate(chunks):
        queries = len(chunk.token_ids)
        if queries > 1 and not _is_guess(chunk):
            segments.append(_Part((i,), 0))
            continue
        pages = (chunk.start + queries - 1) // block_tokens
        alike.setdefault((queries, pages.bit_length()), []).append(i)
    least_saved = -(-least_saved_tokens // block_tokens)
    groups = [
        _Part(tuple(members[k] for k in cohort.members), queries, cohort.shared_pages)
        for (queries, _), members in sorted(alike.items())
        for cohort in _cohorts([chunks[i] for i in members], block_tokens, least_saved)
    ]
    return groups + segments


def _cohorts(members: Sequence[ChunkInput], block_tokens: int, least_saved: int) -> list[Cohort]:
    full = np.array([m.start // block_tokens for m in members])
    if full.sum() - full.max() < least_saved:
        return [Cohort(tuple(range(len(members))), 0)]
    return find_cohorts(_table(members, full, int(full.max())), full, least_saved=least_saved)


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


def _attention_parts(
    chunks: Sequence[ChunkInput],
    parts: Sequence[_Part],
    ends: dict[int, int],
    block_tokens: int,
    device: torch.device,
) -> tuple[tuple[DecodeGroup, ...], tuple[PrefillSegment, ...]]:
    groups: list[DecodeGroup] = []
    segments: list[PrefillSegment] = []
    for part in parts:
        stop = ends[part.members[-1]]
        if part.queries == 0:
            segments.append(_segment(chunks[part.members[0]], stop, block_tokens, device))
            continue
        rows = slice(stop - len(part.members) * part.queries, stop)
        groups.append(_group([chunks[i] for i in part.members], part, rows, block_tokens, device))
    return tuple(groups), tuple(segments)


def _group(
    members: Sequence[ChunkInput],
    part: _Part,
    rows: slice,
    block_tokens: int,
    device: torch.device,
) -> DecodeGroup:
    starts = np.array([m.start for m in members]) - part.shared_pages * block_tokens
    context = int(starts.max()) + part.queries
    used = -(-(starts + part.queries) // block_tokens)
    table = _table(members, used, -(-context // block_tokens), first=part.shared_pages)
    mask = None
    if part.queries > 1 or starts.min() + 1 < context:
        seen = starts[:, None] + np.arange(part.queries)[None, :]
        visible = np.arange(context)[None, None, :] <= seen[:, :, None]
        mask = torch.from_numpy(visible).to(device)[:, None]
    shared = None
    if part.shared_pages:
        shared = _gathered(members[0].page_table[: part.shared_pages], device)
    return DecodeGroup(rows, _gathered(table, device), context, mask, part.queries, shared)


def _table(
    members: Sequence[ChunkInput], used: Int64Array, width: int, *, first: int = 0
) -> Int64Array:
    """Return ``used`` pages of each member from ``first`` on, padded with the null page."""
    table = np.full((len(members), width), NULL_PAGE, dtype=np.int64)
    for row, member in enumerate(members):
        table[row, : used[row]] = member.page_table[first : first + used[row]]
    return table


def _gathered(pages: Int64Array, device: torch.device) -> Tensor:
    halves = pages.reshape(-1) * 2
    return _tensor(np.concatenate([halves, halves + 1]), device)


def _segment(
    chunk: ChunkInput, end_row: int, block_tokens: int, device: torch.device
) -> PrefillSegment:
    count = len(chunk.token_ids)
    context = chunk.start + count
    gather = _gathered(chunk.page_table[: -(-context // block_tokens)], device)
    return PrefillSegment(slice(end_row - count, end_row), gather, chunk.start, context)


def _tensor(array: Int64Array, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
