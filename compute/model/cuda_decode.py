"""Decode steps as CUDA graphs: one launch instead of several hundred per layer stack.

The decoder uses graphs on CUDA for steps in which every sequence has one new token. A graph is the
plain forward pass captured over fixed buffers, so both compute the same function. Graphs are
compared with the plain pass at load. If a capture fails later, the decoder uses the plain pass.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tierkv.compute.model.attention_plan import AttentionPlan, DecodeGroup
from tierkv.compute.model.batch import ChunkInput, ForwardBatch, build_batch
from tierkv.compute.model.decoder import Decoder, Outputs

_log = logging.getLogger(__name__)
_MOST_SEQUENCES = 256
_MOST_GRAPHS = 96
_MOST_GATHER_BYTES = 1 << 30
"""Gathered KV of one layer; larger steps are bound by memory, not by launches."""
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}
"""Tolerated difference of a logit, relative to the largest logit, for a model of one layer. Padding
changes the choice of kernels and the order of additions, and rounding adds up from layer to layer:
in bfloat16, 32 layers of an 8 B model differ by 0.05 from the plain pass, and both by 0.05 from
float32. A mask that is wrong by one key makes 1.05 in a small model of 32 layers.
"""


def tolerated(dtype: torch.dtype, layers: int) -> float:
    """Return the tolerated difference for a model: errors of layers add up like random steps."""
    return _TOLERANCE[dtype] * math.sqrt(layers)


class StaticDecode:
    """Fixed buffers for decode steps up to a given number of sequences and pages.

    Attributes:
        batch: the buffers as a step; all sequences stand in one padded decode group.
    """

    def __init__(self, sequences: int, pages: int, *, block_tokens: int, device: torch.device):
        self._pages = pages
        zeros = torch.zeros(2 * sequences * pages, dtype=torch.int64, device=device)
        context = pages * block_tokens
        mask = torch.ones((sequences, 1, 1, context), dtype=torch.bool, device=device)
        self._group = DecodeGroup(slice(0, sequences), zeros, context, mask)
        self._keys_at = torch.arange(context, device=device)
        self.batch = ForwardBatch(
            token_ids=zeros[:sequences].clone(),
            positions=zeros[:sequences].clone(),
            write_rows=zeros[: 2 * sequences].clone(),
            attention=AttentionPlan((self._group,)),
            logit_rows=torch.arange(sequences, device=device),
            logit_chunks=tuple(range(sequences)),
        )

    def fill(self, step: ForwardBatch) -> None:
        """Copy a step into the buffers.

        Unused rows repeat the step's first row, which writes the same KV again.
        """
        count = len(step.token_ids)
        rows = torch.arange(len(self.batch.token_ids), device=step.token_ids.device)
        rows = torch.where(rows < count, rows, 0)
        self.batch.token_ids.copy_(step.token_ids[rows])
        self.batch.positions.copy_(step.positions[rows])
        self.batch.write_rows.copy_(
            torch.cat((step.write_rows[rows], step.write_rows[count + rows]))
        )
        halves = torch.cat([self._padded(group) for group in step.attention.groups])[rows].view(-1)
        self._group.gather.copy_(torch.cat((halves, halves + 1)))
        assert self._group.mask is not None
        seen = self._keys_at <= self.batch.positions[:, None]
        self._group.mask.copy_(seen[:, None, None, :])

    def _padded(self, group: DecodeGroup) -> Tensor:
        """Return the key halves of a group's pages, ``[n, pages]``, padded with the null page."""
        sequences = group.rows.stop - group.rows.start
        halves = group.gather[: len(group.gather) // 2].view(sequences, -1)
        return torch.nn.functional.pad(halves, (0, self._pages - halves.shape[1]))


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph with its buffers, its result and the scratch memory of its writes, kept alive."""

    graph: torch.cuda.CUDAGraph
    static: StaticDecode
    outputs: Outputs
    scratch: Tensor


class DecodeGraphs:
    """Graphs of one decoder by batch size and page-table width, captured when first needed.

    Attributes:
        refusal: reason for not using graphs; empty while graphs are used.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.refusal = ""
        self._decoder = decoder
        self._layout = decoder.pages.layout
        self._device = decoder.pages.kv.device
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._memory = torch.cuda.graph_pool_handle()

    def run(self, step: ForwardBatch) -> Outputs | None:
        """Return the step's outputs; None if the step must run without a graph."""
        size = self._size_for(step)
        if self.refusal or size is None:
            return None
        found = self._captured.get(size)
        if found is None and len(self._captured) >= _MOST_GRAPHS:
            return None
        try:
            found = found or self._capture(size, step)
        except RuntimeError as error:
            self.refusal = f"a CUDA graph could not be captured: {error}"
            _log.warning("decoding without CUDA graphs: %s", self.refusal)
            return None
        found.static.fill(step)
        found.graph.replay()
        return Outputs(*(rows[step.logit_rows] for rows in found.outputs))

    def _size_for(self, step: ForwardBatch) -> tuple[int, int] | None:
        """Round a step up to a size of a graph; return None if no graph can run the step.

        Sequences are rounded up to a power of two. Pages are rounded less coarsely, because all
        pages are gathered and attended to.
        """
        plan = step.attention
        if plan.segments or plan.rests or step.raw is not None or not plan.groups:
            return None
        if len(step.token_ids) > _MOST_SEQUENCES:
            return None
        sequences = _power_of_two(len(step.token_ids))
        pages = rounded_up(-(-max(g.context for g in plan.groups) // self._layout.block_tokens))
        gathered = sequences * pages * self._layout.layer_bytes
        return (sequences, pages) if gathered <= _MOST_GATHER_BYTES else None

    def _capture(self, size: tuple[int, int], step: ForwardBatch) -> _Captured:
        """Capture the plain pass; the warm-up writes only the step's own KV."""
        sequences, pages = size
        static = StaticDecode(
            sequences, pages, block_tokens=self._layout.block_tokens, device=self._device
        )
        static.fill(step)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # Libraries choose kernels and reserve memory in their first calls.
                self._decoder.compute_plainly(static.batch)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: loader threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            outputs = self._decoder.compute_plainly(static.batch)
        captured = _Captured(graph, static, outputs, self._decoder.attention.scratch)
        self._captured[size] = captured
        return captured


def attach_decode_graphs(decoder: Decoder) -> str:
    """Make a decoder on CUDA use graphs if their outputs match the plain pass.

    Returns:
        refusal: reason for not using graphs; empty if graphs are used.
    """
    if not decoder.pages.kv.is_cuda:
        return "not on CUDA"
    graphs = DecodeGraphs(decoder)
    with torch.inference_mode():
        difference = _difference(decoder, graphs)
    limit = tolerated(decoder.pages.kv.dtype, decoder.arch.layers)
    if difference is None:
        graphs.refusal = graphs.refusal or "the pass to compare with does not fit a graph"
    elif not graphs.refusal and not difference <= limit:
        graphs.refusal = f"logits differ by {difference:.2g} of the largest, over {limit:.2g}"
    if graphs.refusal:
        _log.warning("decoding without CUDA graphs: %s", graphs.refusal)
    else:
        decoder.graphs = graphs
    return graphs.refusal


def _difference(decoder: Decoder, graphs: DecodeGraphs) -> float | None:
    """Compare both passes on random KV in pages that are not in use yet, then clear the pages.

    Returns:
        The largest difference of two logits, as a share of the largest logit; None if the graphs
        computed nothing, so there was nothing to compare.
    """
    layout, usable = decoder.pages.layout, min(decoder.pages.num_pages - 1, 6)
    generator = torch.Generator(device=decoder.pages.kv.device).manual_seed(1)
    pages = list(range(1, usable + 1))
    for page in pages:
        decoder.pages.kv[:, page].normal_(generator=generator)
    table = np.array(pages, dtype=np.int64)
    lengths = sorted({usable * layout.block_tokens - 1, 1, layout.block_tokens})
    chunks = [ChunkInput(np.array([i + 1]), length, table, 1) for i, length in enumerate(lengths)]
    chunks = [chunk for chunk in chunks if chunk.start < usable * layout.block_tokens]
    step = build_batch(chunks, block_tokens=layout.block_tokens, device=decoder.pages.kv.device)
    plain = decoder.compute_plainly(step).logits
    graphed = graphs.run(step)
    decoder.pages.clear(pages)
    if graphed is None:
        return None
    return float((plain - graphed.logits).abs().max() / plain.abs().max())


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def rounded_up(pages: int) -> int:
    """Round up to a power of two; above eight, to a quarter of the power of two below."""
    if pages <= 8:
        return _power_of_two(pages)
    step = _power_of_two(pages + 1) >> 3
    return -(-pages // step) * step
