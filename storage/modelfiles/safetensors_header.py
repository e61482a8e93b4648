"""Reads the header of a safetensors file, without the tensors and without torch.

Called by storage/modelfiles/model_folder.py. The header is foreign input: its size is bounded and
every offset is checked against the file before use.

Ref: https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tierkv.kvcore.errors import ModelFolderError

MAX_HEADER_BYTES: Final = 100_000_000
"""The format's own bound."""

_BITS: Final = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: its type, shape and byte range [start, stop) in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class TensorIndex:
    """All tensors of one file.

    Attributes:
        path: the file.
        header: the raw header, part of a model's revision.
        data_at: offset of the tensor bytes.
        tensors: by name.
    """

    path: Path
    header: bytes
    data_at: int
    tensors: dict[str, TensorEntry]


def read_tensor_index(path: Path) -> TensorIndex:
    """Read and check a safetensors header.

    Raises:
        ModelFolderError: the file is no safetensors file, or is cut off or inconsistent.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header_bytes = int.from_bytes(file.read(8), "little")
            if size < 8 or header_bytes > min(MAX_HEADER_BYTES, size - 8):
                raise _broken(path, f"its header claims {header_bytes} bytes of {size}")
            header = file.read(header_bytes)
    except OSError as error:
        raise ModelFolderError(f"{path} can't be read: {error.strerror}") from error
    try:
        entries = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise _broken(path, "its header is not JSON") from error
    if not isinstance(entries, dict):
        raise _broken(path, "its header is not a JSON object")
    data_at = 8 + header_bytes
    tensors = {
        name: _entry(path, name, value, data_at)
        for name, value in entries.items()
        if name != "__metadata__"
    }
    end = max((t.stop for t in tensors.values()), default=data_at)
    if end != size:
        raise _broken(path, f"its tensors end at byte {end}, the file at {size}")
    return TensorIndex(path, header, data_at, tensors)


def _entry(path: Path, name: str, value: Any, data_at: int) -> TensorEntry:
    try:
        dtype, shape = str(value["dtype"]), tuple(value["shape"])
        start, stop = value["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise _broken(path, f"tensor {name!r} has no valid description") from error
    numbers = (*shape, start, stop)
    if any(type(n) is not int or n < 0 for n in numbers) or dtype not in _BITS:
        raise _broken(path, f"tensor {name!r} has an unknown dtype or an invalid shape")
    if (stop - start) * 8 != math.prod(shape) * _BITS[dtype]:
        raise _broken(path, f"tensor {name!r} has {stop - start} bytes, not what its shape needs")
    return TensorEntry(name, dtype, shape, data_at + start, data_at + stop)


def _broken(path: Path, why: str) -> ModelFolderError:
    return ModelFolderError(
        f"{path} is not a complete safetensors file: {why}",
        hint="Download or export it again.",
    )
