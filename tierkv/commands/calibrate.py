"""``tierkv calibrate``: measures a model's KV on prompts and writes the tables of entropy codecs.

The shipped model is measured on prompts similar to the training prompts. Any other model needs a
text similar to the model's later prompts. No other part of the cluster has to run, and only the one
file is changed. The prompts run through our own decoder, so the measured KV is like the KV that
nodes will store: keys after rope, in the dtype of the pages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import zstandard
from torch import Tensor

from tierkv.compute.codec.entropy import (
    STEP_LEVELS,
    Calibration,
    CodecLevel,
    make_calibration,
    packer_for,
    save_calibration,
)
from tierkv.compute.demo_model.data import CHAT_TASKS, SINGLE_TASKS, make_probes
from tierkv.compute.loading import load_model
from tierkv.compute.model.batch import ChunkInput, build_batch
from tierkv.compute.model.decoder import Decoder
from tierkv.dbfront.contracts import Message
from tierkv.dbfront.tokens.tokenizer import TextTokenizer, load_tokenizer
from tierkv.kvcore.errors import ConfigError
from tierkv.kvcore.ids import HostId, NodeId
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.node import NodeRole
from tierkv.output import make_bar
from tierkv.parts.served_models import compute_config, model_folder
from tierkv.settings import ComputeSettings
from tierkv.storage.modelfiles.model_folder import CALIBRATION_NAME

_PROMPT_TOKENS = 1_024
"""A long text is cut into prompts of this length."""

_MOST_PROMPTS = 128
_PROBES_PER_TASK = 6
_SEED = 5


def calibrate(settings: ComputeSettings, *, prompts: Path | None, out: Path | None) -> Path:
    """Measure the configured model and write the tables.

    Args:
        settings: model, dtype and device.
        prompts: a UTF-8 text; may be None for the shipped model.
        out: file or folder to write to; None is the folder of the given model.

    Returns:
        the written file.

    Raises:
        ConfigError: the model folder is missing, the text is missing or too short, or the file
            can't be written; for the shipped model also if ``out`` is None.
    """
    folder = _folder_of(settings, out)
    target = folder if out is None else out
    target = target / CALIBRATION_NAME if target.is_dir() else target
    tokenizer = load_tokenizer(folder)
    if prompts is not None:
        pieces = _pieces_of(tokenizer, prompts)
    elif not settings.model:
        pieces = _shipped_prompts(tokenizer)
    else:
        raise ConfigError(
            f"calibrating {folder} needs a text similar to its later prompts",
            hint="Give --prompts FILE, with 20,000 tokens or more.",
        )
    config = compute_config(
        settings, node_id=NodeId("calibrate"), host=HostId("here"), role=NodeRole.COMPUTE
    )
    pages = 2 + max(map(len, pieces)) // config.block_tokens
    loaded = load_model(replace(config, l1_pages=pages, kv_codec=KvCodec.NONE, kv_calibration=None))
    with _shown(len(pieces)) as progress:
        found = measure_prompts(loaded.decoder, pieces, progress=progress)
    try:
        tables = tables_from(found)
        save_calibration(tables, target, revision=loaded.info.revision)
    except ValueError as error:
        raise ConfigError(f"{prompts} is too short: {error}") from error
    except OSError as error:
        raise ConfigError(f"can't write {target}: {error}", hint="Give --out FILE.") from error
    return target


def _folder_of(settings: ComputeSettings, out: Path | None) -> Path:
    """Return the model folder; the shipped folder's tables are part of the installation."""
    folder = model_folder(settings)
    if not folder.is_dir():
        raise ConfigError(f"the model folder {folder} does not exist", hint="Check --model.")
    if out is None and not settings.model:
        raise ConfigError(
            "the tables of the shipped model are part of the installation",
            hint="Give --out FILE or FOLDER for new tables, or --model FOLDER for another model.",
        )
    return folder


def _pieces_of(tokenizer: TextTokenizer, file: Path) -> list[tuple[int, ...]]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read {file}: {error}") from error
    if not text.strip():
        raise ConfigError(f"{file} is too short: it is empty", hint="Give 20,000 tokens or more.")
    tokens = asyncio.run(tokenizer.encode_prompt(text))
    starts = range(0, len(tokens), _PROMPT_TOKENS)
    return [tokens[start : start + _PROMPT_TOKENS] for start in starts][:_MOST_PROMPTS]


def _shipped_prompts(tokenizer: TextTokenizer) -> list[tuple[int, ...]]:
    """Create prompts of all tasks; held-out prompts, as everywhere except in training."""
    probes = make_probes(SINGLE_TASKS + CHAT_TASKS, _PROBES_PER_TASK, _SEED)
    return [
        asyncio.run(
            tokenizer.encode_chat([Message(m["role"], m["content"]) for m in probe.messages])
        )
        for probe in probes
    ]


@contextmanager
def _shown(total: int) -> Iterator[Callable[[int], None]]:
    with make_bar() as bar:
        task = bar.add_task("prompts measured", total=total)
        yield lambda done: bar.update(task, completed=done)


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
