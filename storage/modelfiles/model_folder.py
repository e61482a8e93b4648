"""Reads a Hugging Face model folder: configuration, weights files, tokenizer, identity.

Called by compute (before it loads tensors), by the front (tokenizer) and by ``tierkv doctor``.
Never executes anything from the folder and never opens a pickle. Compute decides whether an
architecture is supported. The header of a safetensors file is foreign input: its size is bounded
and every offset is checked against the file before use; tensors are not read here.

Ref: https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from tierkv.kvcore import limits
from tierkv.kvcore.errors import ModelFolderError

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
CALIBRATION_NAME: Final = "kv_calibration.safetensors"
"""Tables of KV codecs, made by ``tierkv calibrate``; not weights, and not part of the revision."""
MAX_JSON_BYTES: Final = 256 << 20
FULL_DIGEST_BYTES: Final = 64 << 20
"""Files up to this size enter the revision whole; of larger ones small tensors do, and samples."""

_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 64 << 10
_SMALL_BYTES: Final = 4 * _SAMPLE_BYTES
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w-]*/[A-Za-z0-9][\w.-]*")
_PICKLES: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt")


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


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A checked model folder.

    Attributes:
        path: the folder.
        config: config.json.
        files: safetensors files, sorted by name.
        tensors: the file of each tensor by tensor name.
        revision: hex digest; equal for equal configuration and weights in any folder.
        context_tokens: ``max_position_embeddings``; 0 if not given.
        eos_token_ids: from generation_config.json, else config.json.
        tokenizer_file: tokenizer.json, or None.
        has_chat_template: whether the folder has a chat template.
        weights_bytes: size of all tensors.
    """

    path: Path
    config: dict[str, Any]
    files: tuple[Path, ...]
    tensors: dict[str, Path]
    revision: str
    context_tokens: int
    eos_token_ids: tuple[int, ...]
    tokenizer_file: Path | None
    has_chat_template: bool
    weights_bytes: int


def _fetch_hint(given: str) -> str:
    """Return advice for a wrong path; for a model hub name, how to download the folder."""
    if not _HUB_NAME.fullmatch(given):
        return (
            "Give the folder that holds config.json and *.safetensors, or no model for the demo "
            "model that TierKV brings along."
        )
    folder = f"models/{given.rpartition('/')[2]}"
    return (
        f"Models are not fetched by name. Run `hf download {given} --local-dir {folder}`, then "
        f"give {folder}."
    )


def inspect_model_folder(path: str | Path) -> ModelFolder:
    """Read everything about a model but its tensors.

    Costs one pass over files up to 64 MiB and 4 MiB of samples of each larger one.

    Raises:
        ModelFolderError: a file is missing or broken; the message says how to get it.
    """
    folder, config, indexes = _open(path)
    tensors = _join(folder, indexes)
    tokenizer = folder / "tokenizer.json"
    return ModelFolder(
        path=folder,
        config=config,
        files=tuple(index.path for index in indexes),
        tensors=tensors,
        revision=_revision(folder, indexes),
        context_tokens=_context_tokens(config),
        eos_token_ids=_eos_token_ids(folder, config),
        tokenizer_file=tokenizer if tokenizer.is_file() else None,
        has_chat_template=_has_chat_template(folder),
        weights_bytes=sum(_size(t) for index in indexes for t in index.tensors.values()),
    )


def read_model_config(path: str | Path) -> dict[str, Any]:
    """Return config.json after checking the folder; of the weights, only headers are read.

    Raises:
        ModelFolderError: as ``inspect_model_folder``.
    """
    folder, config, indexes = _open(path)
    _join(folder, indexes)
    _context_tokens(config)
    _eos_token_ids(folder, config)
    return config


def _open(path: str | Path) -> tuple[Path, dict[str, Any], list[TensorIndex]]:
    """Find the parts of a model."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ModelFolderError(
            f"there is no model folder {folder}",
            hint=_fetch_hint(str(path)),
        )
    return folder, _read_config(folder), [read_tensor_index(f) for f in _weights_files(folder)]


def _read_config(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").is_file():
        raise ModelFolderError(
            f"{folder} has no config.json",
            hint="Give a Hugging Face folder, as written by `hf download` or save_pretrained.",
        )
    return _read_json(folder / "config.json")


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of bounded size."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelFolderError(f"{path} is larger than {MAX_JSON_BYTES} bytes")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFolderError(f"{path} can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFolderError(
            f"{path} is not JSON: {error}", hint="Download or export it again."
        ) from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path} does not hold a JSON object")
    return value


def _weights_files(folder: Path) -> list[Path]:
    """Return the safetensors files: of the sharded index, the single file, or all."""
    if (folder / INDEX_NAME).is_file():
        return _sharded(folder)
    if (folder / SINGLE_NAME).is_file():
        return [folder / SINGLE_NAME]
    found = sorted(f for f in folder.glob("*.safetensors") if f.name != CALIBRATION_NAME)
    if found:
        return found
    if any(True for pattern in _PICKLES for _ in folder.glob(pattern)):
        raise ModelFolderError(
            f"{folder} has only pickled weights (.bin, .pt), which TierKV never opens",
            hint="Convert them: AutoModelForCausalLM.from_pretrained(folder)"
            ".save_pretrained(new_folder, safe_serialization=True).",
        )
    raise ModelFolderError(
        f"{folder} has no *.safetensors file",
        hint="Download the weights too (with git: `git lfs pull`).",
    )


def _sharded(folder: Path) -> list[Path]:
    weight_map = _read_json(folder / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFolderError(f"{folder / INDEX_NAME} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise ModelFolderError(f"{folder / INDEX_NAME} names a file outside the folder: {name}")
        if not (folder / name).is_file():
            raise ModelFolderError(
                f"{folder} lacks {name}, which {INDEX_NAME} names",
                hint="Download all shards (with git: `git lfs pull`).",
            )
    return [folder / name for name in names]


def _join(folder: Path, indexes: list[TensorIndex]) -> dict[str, Path]:
    tensors: dict[str, Path] = {}
    for index in indexes:
        for name in index.tensors:
            if name in tensors:
                raise ModelFolderError(
                    f"tensor {name!r} is in {tensors[name].name} and in {index.path.name}",
                    hint="Keep one set of weights in the folder.",
                )
            tensors[name] = index.path
    if not tensors:
        raise ModelFolderError(f"the safetensors files of {folder} hold no tensors")
    return tensors


def _size(tensor: TensorEntry) -> int:
    return tensor.stop - tensor.start


def _revision(folder: Path, indexes: list[TensorIndex]) -> str:
    """Return a digest of configuration and weights.

    blake2b over config.json, then per file its header, size and content. A file up to 64 MiB is
    read whole. Of a larger file the digest covers 64 samples of 64 KiB at even distances, each
    tensor up to 256 KiB (norms, biases) whole, and the first, middle and last 64 KiB of each larger
    tensor. File names do not enter. A fine-tune changes every large tensor or all small ones. If
    you edit single rows of a large tensor, change config.json too.
    """
    digest = blake2b(digest_size=16, person=b"tierkv-model-1")
    _add(digest, (folder / "config.json").read_bytes())
    for index in indexes:
        size = index.path.stat().st_size
        _add(digest, index.header)
        _add(digest, size.to_bytes(8, "little"))
        with index.path.open("rb") as file:
            for start, stop in _spans(index, size):
                file.seek(start)
                _add(digest, file.read(stop - start))
    return digest.hexdigest()


def _spans(index: TensorIndex, size: int) -> list[tuple[int, int]]:
    if size <= FULL_DIGEST_BYTES:
        step = 1 << 20
        return [(start, min(start + step, size)) for start in range(0, size, step)]
    last = size - _SAMPLE_BYTES
    starts = [last * i // (_SAMPLES - 1) for i in range(_SAMPLES)]
    spans = [(start, start + _SAMPLE_BYTES) for start in starts]
    for entry in sorted(index.tensors.values(), key=lambda entry: (entry.start, entry.stop)):
        if entry.stop - entry.start <= _SMALL_BYTES:
            spans.append((entry.start, entry.stop))
            continue
        middle = (entry.start + entry.stop - _SAMPLE_BYTES) // 2
        firsts = (entry.start, middle, entry.stop - _SAMPLE_BYTES)
        spans += [(start, start + _SAMPLE_BYTES) for start in firsts]
    return spans


def _add(digest: blake2b, data: bytes) -> None:
    digest.update(len(data).to_bytes(8, "little"))
    digest.update(data)


def _context_tokens(config: dict[str, Any]) -> int:
    value = config.get("max_position_embeddings", 0)
    if type(value) is not int or not 0 <= value <= limits.MAX_CONTEXT_TOKENS:
        raise ModelFolderError(
            f"config.json has max_position_embeddings = {value!r}, not a whole number up to "
            f"{limits.MAX_CONTEXT_TOKENS}"
        )
    return value


def _eos_token_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    generation = folder / "generation_config.json"
    value = _read_json(generation).get("eos_token_id") if generation.is_file() else None
    if value is None:
        value = config.get("eos_token_id")
    ids = [value] if type(value) is int else ([] if value is None else value)
    if not isinstance(ids, list) or any(type(i) is not int or i < 0 for i in ids):
        raise ModelFolderError(f"the model's eos_token_id is {value!r}, not a token id or a list")
    return tuple(ids)


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    tokenizer_config = folder / "tokenizer_config.json"
    return tokenizer_config.is_file() and bool(_read_json(tokenizer_config).get("chat_template"))
