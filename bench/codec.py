"""Savings and cost of KV codecs: bytes, rates next to memcpy, and the shipped model's answers.

Run ``python -m bench.codec``. One thread. Rates are 10^9 bytes of KV in L1 per second, for 16
blocks of 64 tokens with 8 KV heads of 128 channels. The blocks are coded a layer at a time, as
loader threads code KV.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench.codec_quality import MEASURED, Quality, measure
from bench.report import Report, finish, make_parser, median_seconds
from tierkv.commands.calibrate import STEPS_PER_SIGMA
from tierkv.compute.codec.entropy import LEVELS, EntropyCodec, make_calibration
from tierkv.compute.codec.layer_codec import TORCH_DTYPES, make_codec
from tierkv.compute.demo_model.data import CHAT_TASKS, SINGLE_TASKS, make_probes
from tierkv.kvcore.layout import BlockLayout, KvCodec, KvDtype
from tools.demo_model.tokenizer import FOLDER

BLOCKS = 16
Encode = Callable[[Tensor], Any]
Decode = Callable[[Any, Tensor], Any]


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--count", type=int, default=0, help="probes per task; 0: 40, quick 4")
    parser.add_argument("--block-tokens", type=int, default=64, help="of the quality part")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    report = Report("KV codecs")
    for dtype in (KvDtype.BFLOAT16, KvDtype.FLOAT32):
        _rates(report, dtype, seed=arguments.seed, repeats=5 if arguments.quick else 20)
    count = arguments.count or (4 if arguments.quick else 40)
    for group, tasks in (("one_document", SINGLE_TASKS), ("chat", CHAT_TASKS)):
        probes = make_probes(tasks, count, arguments.seed)
        found = measure(FOLDER, probes, block_tokens=arguments.block_tokens)
        for name, quality in found.items():
            _quality(report, f"{group}_{name}", quality)
        report.note(f"{group}: {len(probes)} probes, blocks of {arguments.block_tokens} tokens")
    finish(report, arguments.format)


def _rates(report: Report, dtype: KvDtype, *, seed: int, repeats: int) -> None:
    layout = BlockLayout(1, 8, 128, dtype, 64)
    shape = (BLOCKS, 2, layout.block_tokens, layout.kv_heads, layout.head_dim)
    kv = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(TORCH_DTYPES[dtype])
    target = torch.empty_like(kv)
    size = kv.nbytes / 1e9

    def rate(action: object) -> float:
        assert callable(action)
        return size / median_seconds(action, repeats=repeats, clock=time.perf_counter)

    report.add(f"memcpy_{dtype}_gb_per_s", rate(lambda: target.copy_(kv)))
    for name in MEASURED:
        if not name.is_lossy:
            continue
        encode, decode = _fixed(layout, name) if name.has_fixed_size else _framed(layout, name)
        stored = encode(kv)
        report.add(f"{name}_{dtype}_times_smaller", kv.nbytes / _bytes(stored))
        report.add(f"{name}_{dtype}_encode_gb_per_s", rate(lambda e=encode: e(kv)))
        report.add(f"{name}_{dtype}_decode_gb_per_s", rate(lambda d=decode, s=stored: d(s, target)))


def _fixed(layout: BlockLayout, name: KvCodec) -> tuple[Encode, Decode]:
    codec = make_codec(replace(layout, codec=name))
    return codec.encode, lambda stored, target: target.copy_(codec.decode(stored))


def _framed(layout: BlockLayout, name: KvCodec) -> tuple[Encode, Decode]:
    """Return the codec with tables for normal numbers; a model's own tables pack a bit tighter."""
    mean = torch.zeros(1, 2, layout.kv_heads, layout.head_dim)
    steps = torch.tensor(STEPS_PER_SIGMA)[:, None, None].expand(-1, 1, 2)
    codec = EntropyCodec(layout, make_calibration(mean, steps), device="cpu")

    def encode(kv: Tensor) -> list[memoryview]:
        return [codec.encode(block[None], LEVELS[name])[0].data for block in kv]

    def decode(stored: list[memoryview], target: Tensor) -> None:
        for frame, block in zip(stored, target, strict=True):
            codec.decode(0, frame, block)

    return encode, decode


def _bytes(stored: Any) -> int:
    return sum(one.nbytes for one in stored)


def _quality(report: Report, name: str, quality: Quality) -> None:
    report.add(f"{name}_exact_match", quality.exact_match)
    report.add(f"{name}_agreement", quality.agreement)
    report.add(f"{name}_bits_per_number", quality.bits)
    report.add(f"{name}_kl_mean_nats", quality.kl_mean)
    report.add(f"{name}_kl_max_nats", quality.kl_max)
    report.add(f"{name}_reused_share", quality.reused_share)


if __name__ == "__main__":
    main()
