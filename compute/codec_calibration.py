"""Measures the KV of a model on prompts and builds the entropy codec's tables from the statistics.

Called by ``tierkv calibrate``. The prompts run through our own decoder, so the measured KV is like
the KV that nodes will store: keys after rope, in the dtype of the pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import zstandard
from torch import Tensor

from tierkv.compute.codec.calibration import STEP_LEVELS, Calibration, make_calibration
from tierkv.compute.codec.entropy import packer_for
from tierkv.compute.codec.frame import CodecLevel
from tierkv.compute.model.batch import ChunkInput, build_batch
from tierkv.compute.model.decoder import Decoder

SINK_TOKENS = 4
"""A prompt's first tokens attract attention with unusual keys; these tokens are not measured."""

STEPS_PER_SIGMA = (1 / 16, 1 / 4, 3 / 4)
"""Steps of the levels fine, medium and coarse, as shares of a layer's standard deviation."""

_SAMPLE_BLOCKS = 64
_ROUNDS = 3


class KvStatistics:
    """Sums over tokens per channel, and samples of whole blocks; fed one prompt at a time.

    Attributes:
        tokens: number of measured tokens.
        samples: kept blocks, each ``[layers, 2, block_tokens, kv_heads, head_dim]``.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.samples: list[Tensor] = []
        self._sum: Tensor | None = None
        self._squares: Tensor | None = None

    def add(self, kv: Tensor) -> None:
        """Add the KV of a prompt, ``[layers, 2, tokens, kv_heads, head_dim]``."""
        wide = kv.double()
        sums, squares = wide.sum(dim=2), wide.square().sum(dim=2)
        self._sum = sums if self._sum is None else self._sum + sums
        self._squares = squares if self._squares is None else self._squares + squares
        self.tokens += kv.shape[2]

    @property
    def mean(self) -> Tensor:
        """``[layers, 2, kv_heads, head_dim]``."""
        assert self._sum is not None, "no prompt was measured"
        return self._sum / self.tokens

    @property
    def spread(self) -> Tensor:
        """Standard deviation around the channels' means, ``[layers, 2]``."""
        assert self._squares is not None, "no prompt was measured"
        variance = self._squares / self.tokens - self.mean.square()
        return variance.mean(dim=(2, 3)).clamp(min=1e-12).sqrt()


def measure_prompts(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    progress: Callable[[int], None] = lambda done: None,
) -> KvStatistics:
    """Run prompts through a decoder one at a time, each cut to the capacity of the pages."""
    found = KvStatistics()
    for done, prompt in enumerate(prompts, 1):
        kv = _kv_of(decoder, prompt)
        found.add(kv[:, :, SINK_TOKENS:])
        _keep_blocks(found, kv, decoder.pages.layout.block_tokens)
        progress(done)
    return found


def _kv_of(decoder: Decoder, prompt: Sequence[int]) -> Tensor:
    pages, block = decoder.pages, decoder.pages.layout.block_tokens
    prompt = prompt[: (pages.num_pages - 1) * block]
    table = 1 + np.arange(-(-len(prompt) // block))
    chunk = ChunkInput(np.array(prompt, dtype=np.int64), 0, table, wants_logits=False)
    with torch.inference_mode():
        decoder.forward(build_batch([chunk], block_tokens=block, device=pages.kv.device))
        kv = pages.kv[:, 1 : 1 + len(table)].cpu()
    # [layers, pages, 2, tokens, heads, dim] to [layers, 2, tokens, heads, dim]
    return kv.transpose(1, 2).flatten(2, 3)[:, :, : len(prompt)]


def _keep_blocks(found: KvStatistics, kv: Tensor, block_tokens: int) -> None:
    """Keep two blocks of a prompt while there is room: the second and the last whole block."""
    whole = kv.shape[2] // block_tokens
    for block in sorted({1, whole - 1} - {0, -1}):
        if block < whole and len(found.samples) < _SAMPLE_BLOCKS:
            start = block * block_tokens
            found.samples.append(kv[:, :, start : start + block_tokens].float())


def tables_from(found: KvStatistics) -> Calibration:
    """Make tables with which all layers take equal room.

    All ranges of a block are as long as the longest, so a layer that needs fewer bytes at the same
    relative step gets a finer step for free.

    Raises:
        ValueError: no whole block was measured.
    """
    if not found.samples:
        raise ValueError("no prompt is two blocks long")
    mean = found.mean.to(torch.bfloat16).float()
    blocks = torch.stack(found.samples) - mean[None, :, :, None]
    steps = [
        _even_steps(blocks, share * found.spread, level)
        for level, share in zip(STEP_LEVELS, STEPS_PER_SIGMA, strict=True)
    ]
    return make_calibration(mean, torch.stack(steps))


def _even_steps(blocks: Tensor, steps: Tensor, level: CodecLevel) -> Tensor:
    """Refine the steps of layers that take less room than the largest, ``[layers, 2]``."""
    steps = steps.float()
    for _ in range(_ROUNDS):
        bits = _bits(blocks, steps, packer_for(level))
        # Each doubling of the step saves one bit per number.
        steps = steps / torch.exp2(bits.max() - bits)[:, None]
    return steps


def _bits(blocks: Tensor, steps: Tensor, packer: zstandard.ZstdCompressor) -> Tensor:
    """Return the bits per number in each layer."""
    symbols = (blocks / steps[None, :, :, None, None, None]).round().clamp(-127, 127)
    symbols = symbols.to(torch.int8)
    sizes = torch.zeros(blocks.shape[1])
    for block in symbols:
        for layer, numbers in enumerate(block):
            sizes[layer] += len(packer.compress(numbers.numpy().tobytes()))
    return sizes * 8 * blocks.shape[1] / blocks.numel()
