"""Lets SGLang be imported on a machine without a GPU, and copies between its pools there.

SGLang imports triton, sgl_kernel and torchvision whatever it runs on. Empty modules stand for these
(SGLang's own, which it uses on Macs), and torch for the kernels that copy between device and host
pool. Nothing else is replaced: pools, controller, radix tree and backend factory are the real ones.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

MISSING_HERE = ("triton", "sgl_kernel", "torchvision", "IPython")


class _Finder:
    """Answers imports of what is missing with SGLang's empty modules."""

    def __init__(self, make: Any) -> None:
        self._make = make

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in MISSING_HERE:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        made: ModuleType = self._make(spec.name)
        return made

    def exec_module(self, module: ModuleType) -> None:
        return None


def install() -> None:
    """Import SGLang."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # torch looks for triton too; it must find that there is none before we say there is one.
        import torch._inductor.compile_fx  # noqa: F401
        import transformers  # noqa: F401 - and neither may this find our torchvision

        sys.meta_path.append(_Finder(_platform_stubs()._MockModule))
        import sglang

        # It has patched transformers by now, which has no image processors without torchvision.
        registry = type("AutoImageProcessor", (), {"register": staticmethod(lambda *_, **__: None)})
        sys.modules["transformers"].AutoImageProcessor = registry  # type: ignore[attr-defined]
        import sglang.srt.mem_cache.unified_radix_cache  # noqa: F401
        from sglang.srt.mem_cache.pool_host import base, common
        from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
        from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
    common._cuda_host_register = lambda *_: None  # There is no CUDA to register memory with.
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # It wants 10 GiB free, for itself and others.
    for pool in (MHATokenToKVPoolHost, MLATokenToKVPoolHost):
        pool.backup_from_device_all_layer = _to_host
        pool.load_to_device_per_layer = _to_device


def _platform_stubs() -> Any:
    found = importlib.util.find_spec("sglang")
    assert found is not None and found.origin is not None
    path = Path(found.origin).with_name("_platform_stubs.py")
    spec = importlib.util.spec_from_file_location("_sglang_platform_stubs", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _pairs(host: Any, device: Any, layer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return host and device tensors of one layer: keys and values, or both in one."""
    if not hasattr(device, "v_buffer"):
        whole = host.kv_buffer
        first = host.layout == "layer_first"
        return [(whole[layer] if first else whole[:, layer], device.kv_buffer[layer])]
    if host.layout == "page_head":
        halves = [half[:, :, :, layer] for half in (host.k_buffer, host.v_buffer)]
    else:
        halves = [host.k_data_refs[layer], host.v_data_refs[layer]]
    return [(halves[0], device.k_buffer[layer]), (halves[1], device.v_buffer[layer])]


def _at(host: Any, tensor: torch.Tensor, indices: torch.Tensor) -> tuple[Any, ...]:
    """Return the index of tokens in a layer of a host pool, whatever its layout."""
    if host.layout == "page_head":  # [page][head][token of it][channel]
        return indices // host.page_size, slice(None), indices % host.page_size
    if tensor.ndim == 4:  # [page][token of it][head][channel]
        return indices // host.page_size, indices % host.page_size
    return (indices,)


def _to_host(
    self: Any, device_pool: Any, host_indices: Any, device_indices: Any, io_backend: str
) -> None:
    for layer in range(self.layer_num):
        for host, device in _pairs(self, device_pool, layer):
            host[_at(self, host, host_indices)] = device[device_indices]


def _to_device(
    self: Any,
    device_pool: Any,
    host_indices: Any,
    device_indices: Any,
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    for host, device in _pairs(self, device_pool, layer_id):
        device[device_indices] = host[_at(self, host, host_indices)]
