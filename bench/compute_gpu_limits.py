"""Best rates of a device, and transformers on the device: the reference for bench.compute_gpu.

Called by bench.compute_gpu. Each limit of the device is the median of several runs after a run that
does not count; transformers is timed once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers


@dataclass(frozen=True, slots=True)
class Device:
    """The device to measure, and whether sizes are only for a smoke test."""

    name: str
    tiny: bool

    def wait(self) -> None:
        """Wait until the device has finished all submitted work."""
        if self.name == "cuda":
            torch.cuda.synchronize()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of models on the device."""
        return torch.bfloat16 if self.name == "cuda" else torch.float32


def matmul_flops_per_s(device: Device) -> float:
    """Return operations per second of a large square matrix product."""
    size = 128 if device.tiny else 8_192
    a = torch.randn(size, size, device=device.name, dtype=device.dtype)
    return 2 * size**3 / _seconds(lambda: a @ a, device)


def copy_bytes_per_s(device: Device) -> float:
    """Return bytes read plus bytes written per second by a copy in device memory."""
    a = torch.empty((1 << 20) if device.tiny else (4 << 30), dtype=torch.uint8, device=device.name)
    b = torch.empty_like(a)
    return 2 * a.numel() / _seconds(lambda: b.copy_(a), device)


def bus_bytes_per_s(device: Device) -> float:
    """Return bytes per second from pinned host memory to the device."""
    pinned = device.name == "cuda"
    size = (1 << 20) if device.tiny else (1 << 30)
    a = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    b = torch.empty(size, dtype=torch.uint8, device=device.name)
    return size / _seconds(lambda: b.copy_(a, non_blocking=True), device)


def static_cache_tokens_per_s(
    config: dict[str, Any], device: Device, batch: int, prompt_tokens: int
) -> float:
    """Return the decoding rate of transformers' generate with a static cache, random weights."""
    new_tokens = 8 if device.tiny else 128
    fields = {k: v for k, v in config.items() if k != "architectures"}
    kind = getattr(transformers, config["architectures"][0])
    with torch.device(device.name):
        model = kind(kind.config_class(**fields)).to(device.dtype).eval()
    ids = torch.randint(10, config["vocab_size"], (batch, prompt_tokens), device=device.name)

    def generate(count: int) -> None:
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            cache_implementation="static",
        )

    first_s = _seconds(lambda: generate(1), device, repeats=1)
    all_s = _seconds(lambda: generate(new_tokens), device, repeats=1)
    return batch * (new_tokens - 1) / abs(all_s - first_s)  # Tiny models: noise of either sign.


def _seconds(action: Callable[[], object], device: Device, *, repeats: int = 7) -> float:
    times = []
    for number in range(repeats + 1):
        device.wait()
        began = time.perf_counter()
        action()
        device.wait()
        if number:
            times.append(time.perf_counter() - began)
    return statistics.median(times)
