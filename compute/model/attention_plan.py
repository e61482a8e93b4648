"""Attention plan of a step: which rows read which pages, and which rows share a call.

compute/model/batch.py builds a plan once per step; compute/model/attention.py reads the plan in
every layer. Single queries, with or without guesses behind them, form padded decode groups. A few
queries of a sequence form padded rest groups. Longer runs of queries are prefill segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tierkv.compute.model.pages import NULL_PAGE
from tierkv.compute.model.row_groups import Cohort, find_cohorts, find_tiles

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class QuerySpan:
    """Consecutive query tokens of one sequence; each token attends to all tokens up to itself.

    Attributes:
        start: position of the first query.
        count: number of queries.
        page_table: pages covering at least ``start + count`` tokens.
        is_guess: whether the span is a known token followed by guesses.
    """

    start: int
    count: int
    page_table: Int64Array
    is_guess: bool = False


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one new token each, or one and as many guesses, padded to common pages.

    Attributes:
        rows: rows of the step's token axis, half-open ``[rows.start, rows.stop)``.
        gather: half-page indices without the shared pages, keys of all sequences then values, ``[2
            * n * pages]``.
        context: number of keys of the longest sequence, without the shared pages.
        mask: True where a key is visible, ``[n, 1, queries, context]``; None if all keys are
            visible.
        queries: new tokens of each sequence.
        shared: half-page indices, keys then values, of leading pages that all sequences have in
            common and all queries see in full; None if no pages are read separately.
    """

    rows: slice
    gather: Tensor
    context: int
    mask: Tensor | None
    queries: int = 1
    shared: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RestTile:
    """Sequences with a few new tokens each in one attention call, padded to the longest sequence.

    Attributes:
        rows: rows of the step's token axis.
        gather: half-page indices without the shared pages, keys of all sequences then values, ``[2
            * n * pages]``.
        context: number of keys of the longest sequence, without the shared pages.
        queries: new tokens of the sequence with the most.
        bias: added to scores, ``[n, 1, queries, context]`` float32; minus infinity hides a key.
        slots: index of the row behind each padded query, ``[n * queries]``; None without padding.
        places: index of the padded query of each row; None without padding.
    """

    rows: slice
    gather: Tensor
    context: int
    queries: int
    bias: Tensor
    slots: Tensor | None = None
    places: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RestGroup:
    """Sequences with a few new tokens each, with or without a shared beginning.

    Attributes:
        rows: rows of the step's token axis: the rows of all tiles in order.
        tiles: one attention call each.
        shared: as in ``DecodeGroup``.
    """

    rows: slice
    tiles: tuple[RestTile, ...]
    shared: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PrefillSegment:
    """One sequence with several new tokens.

    Attributes:
        rows: the sequence's rows of the step's token axis.
        gather: half-page indices, keys then values, ``[2 * pages]``.
        start: tokens before the first new token.
        context: number of keys, ``start + count``; each token sees the keys up to its own position.
    """

    rows: slice
    gather: Tensor
    start: int
    context: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """All rows of a step: decode groups, then rest groups, then prefill segments."""

    groups: tuple[DecodeGroup, ...]
    rests: tuple[RestGroup, ...] = ()
    segments: tuple[PrefillSegment, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedSpans:
    """A plan and the order of the spans in the plan.

    Attributes:
        plan: plan of all spans.
        order: indices of the spans in the order of the token axis.
    """

    plan: AttentionPlan
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """Spans that are adjacent on the token axis.

    Attributes:
        tiles: indices of the spans of each attention call; a decode group and a prefill segment
            have one call.
        form: the type that the part becomes.
        shared_pages: leading pages of a group that are read once.
    """

    tiles: tuple[tuple[int, ...], ...]
    form: type[DecodeGroup | RestGroup | PrefillSegment]
    shared_pages: int = 0

    @property
    def members(self) -> tuple[int, ...]:
        """Indices of all spans in order."""
        return tuple(i for tile in self.tiles for i in tile)


def plan_attention(
    spans: Sequence[QuerySpan],
    *,
    block_tokens: int,
    device: torch.device,
    least_saved_tokens: int,
    longest_rest: int,
) -> PlannedSpans:
    """Lay spans out on one token axis.

    Args:
        spans: the queries of each sequence.
        block_tokens: tokens per page.
        device: device of the tensors.
        least_saved_tokens: fewest saved key reads for which a shared beginning is read once.
        longest_rest: longest span, in tokens, that may share an attention call.
    """
    parts = _parts(spans, block_tokens, -(-least_saved_tokens // block_tokens), longest_rest)
    forms, row = [], 0
    for part in parts:
        forms.append(_form(spans, part, row, block_tokens, device))
        row = forms[-1].rows.stop
    plan = AttentionPlan(
        groups=tuple(form for form in forms if isinstance(form, DecodeGroup)),
        rests=tuple(form for form in forms if isinstance(form, RestGroup)),
        segments=tuple(form for form in forms if isinstance(form, PrefillSegment)),
    )
    return PlannedSpans(plan, tuple(i for part in parts for i in part.members))


def _parts(
    spans: Sequence[QuerySpan], block_tokens: int, least_saved: int, longest_rest: int
) -> list[_Part]:
    """Group decodes of similar length, so padding at most doubles the work, and similar rests."""
    alike: dict[tuple[int, int], list[int]] = {}
    rests, segments = list[int](), list[int]()
    for i, span in enumerate(spans):
        queries = span.count
        if queries > 1 and not span.is_guess:
            (rests if queries <= longest_rest else segments).append(i)
            continue
        pages = (span.start + queries - 1) // block_tokens
        alike.setdefault((queries, pages.bit_length()), []).append(i)
    groups = [
        _Part((tuple(members[k] for k in cohort.members),), DecodeGroup, cohort.shared_pages)
        for _, members in sorted(alike.items())
        for cohort in _cohorts([spans[i] for i in members], block_tokens, least_saved)
    ]
    for cohort in _cohorts([spans[i] for i in rests], block_tokens, least_saved):
        members = [rests[k] for k in cohort.members]
        tiles, large = _tiles(spans, members, cohort.shared_pages * block_tokens)
        segments += large
        if cohort.shared_pages and tiles:
            groups.append(_Part(tiles, RestGroup, cohort.shared_pages))
            continue
        groups += [_Part((tile,), RestGroup) for tile in tiles if len(tile) > 1]
        segments += [tile[0] for tile in tiles if len(tile) == 1]
    return groups + [_Part(((i,),), PrefillSegment) for i in segments]


def _tiles(
    spans: Sequence[QuerySpan], members: Sequence[int], shared_tokens: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    queries = np.array([spans[i].count for i in members])
    starts = np.array([spans[i].start for i in members])
    found = find_tiles(queries, starts + queries - shared_tokens)
    tiles = tuple(tuple(members[k] for k in tile) for tile in found.tiles)
    return tiles, tuple(members[k] for k in found.large)


def _cohorts(members: Sequence[QuerySpan], block_tokens: int, least_saved: int) -> list[Cohort]:
    if not members:
        return []
    full = np.array([m.start // block_tokens for m in members])
    if full.sum() - full.max() < least_saved:
        return [Cohort(tuple(range(len(members))), 0)]
    return find_cohorts(_table(members, full, int(full.max())), full, least_saved=least_saved)


def _form(
    spans: Sequence[QuerySpan],
    part: _Part,
    begin: int,
    block_tokens: int,
    device: torch.device,
) -> DecodeGroup | RestGroup | PrefillSegment:
    """Build the group or segment of a part."""
    if part.form is PrefillSegment:
        return _segment(spans[part.members[0]], begin, block_tokens, device)
    first, shared = part.shared_pages, None
    if first:
        shared = _gathered(spans[part.members[0]].page_table[:first], device)
    if part.form is DecodeGroup:
        members = [spans[i] for i in part.members]
        return _group(members, begin, shared, first, block_tokens, device)
    tiles, row = [], begin
    for tile in part.tiles:
        tiles.append(_tile([spans[i] for i in tile], row, first, block_tokens, device))
        row = tiles[-1].rows.stop
    return RestGroup(slice(begin, row), tuple(tiles), shared)


def _group(
    members: Sequence[QuerySpan],
    begin: int,
    shared: Tensor | None,
    first: int,
    block_tokens: int,
    device: torch.device,
) -> DecodeGroup:
    queries = members[0].count
    starts = np.array([m.start for m in members]) - first * block_tokens
    context = int(starts.max()) + queries
    table = _padded_table(members, starts + queries, first, block_tokens)
    mask = None
    if queries > 1 or starts.min() + 1 < context:
        mask = _visible(starts, queries, context).to(device)
    rows = slice(begin, begin + queries * len(members))
    return DecodeGroup(rows, _gathered(table, device), context, mask, queries, shared)


def _tile(
    members: Sequence[QuerySpan], begin: int, first: int, block_tokens: int, device: torch.device
) -> RestTile:
    counts = np.array([m.count for m in members])
    starts = np.array([m.start for m in members]) - first * block_tokens
    queries, context = int(counts.max()), int((starts + counts).max())
    table = _padded_table(members, starts + counts, first, block_tokens)
    hidden = ~_visible(starts, queries, context)
    bias = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf")).to(device)
    rows = slice(begin, begin + int(counts.sum()))
    slots = places = None
    if counts.min() < queries:
        is_real = np.arange(queries) < counts[:, None]
        slots = _tensor(np.maximum(is_real.cumsum() - 1, 0), device)
        places = _tensor(np.flatnonzero(is_real), device)
    return RestTile(rows, _gathered(table, device), context, queries, bias, slots, places)


def _visible(starts: Int64Array, queries: int, context: int) -> Tensor:
    """Return the keys visible to each query, up to its position: ``[n, 1, queries, context]``."""
    seen = starts[:, None] + np.arange(queries)[None, :]
    visible = np.arange(context)[None, None, :] <= seen[:, :, None]
    return torch.from_numpy(visible)[:, None]


def _padded_table(
    members: Sequence[QuerySpan], keys: Int64Array, first: int, block_tokens: int
) -> Int64Array:
    used = -(-keys // block_tokens)
    return _table(members, used, int(used.max()), first=first)


def _table(
    members: Sequence[QuerySpan], used: Int64Array, width: int, *, first: int = 0
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
    span: QuerySpan, begin: int, block_tokens: int, device: torch.device
) -> PrefillSegment:
    count = span.count
    context = span.start + count
    gather = _gathered(span.page_table[: -(-context // block_tokens)], device)
    return PrefillSegment(slice(begin, begin + count), gather, span.start, context)


def _tensor(array: Int64Array, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
