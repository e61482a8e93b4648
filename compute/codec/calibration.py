"""Tables of the entropy codec: the means of one model's KV and the quantisation steps.

Measured once per model (compute/codec_calibration.py) and stored next to the model's weights; read
when a node starts. Writer and reader must have equal tables, so each frame carries their number.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tierkv.compute.codec.frame import CodecLevel
from tierkv.kvcore.errors import ConfigError
from tierkv.kvcore.layout import BlockLayout

STEP_LEVELS = (CodecLevel.FINE, CodecLevel.MEDIUM, CodecLevel.COARSE)
"""Order of the first axis of ``steps``."""

_FORMAT = "tierkv-kv-calibration-1"


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """Means and steps of one model.

    Attributes:
        mean: ``[layers, 2, kv_heads, head_dim]`` float32, exact in bfloat16, the stored dtype.
        steps: ``[3, layers, 2]`` float32, positive; one per level, layer and k or v.
        number: identifies the tables in frames; equal for equal tables.
    """

    mean: Tensor
    steps: Tensor
    number: int


def make_calibration(mean: Tensor, steps: Tensor) -> Calibration:
    """Round the means, check the steps and number the tables."""
    mean = mean.to(torch.bfloat16).float().contiguous()
    steps = steps.float().contiguous()
    if mean.ndim != 4 or steps.shape != (len(STEP_LEVELS), *mean.shape[:2]):
        raise ValueError(f"tables of shapes {tuple(mean.shape)} and {tuple(steps.shape)}")
    if not (mean.isfinite().all() and steps.isfinite().all() and (steps > 0).all()):
        raise ValueError("means must be finite, steps finite and positive")
    digest = blake2b(digest_size=4, person=b"tierkv-calibr")
    for table in (mean, steps):
        digest.update(str(tuple(table.shape)).encode() + table.numpy().tobytes())
    return Calibration(mean, steps, int.from_bytes(digest.digest(), "little"))


def save_calibration(calibration: Calibration, file: Path, *, revision: str) -> None:
    """Write the tables of the model with the given revision.

    Raises:
        OSError: the file can't be written.
    """
    about = {"format": _FORMAT, "model_revision": revision}
    tables = {"mean": calibration.mean.to(torch.bfloat16), "steps": calibration.steps}
    file.write_bytes(save(tables, metadata={"tierkv": json.dumps(about)}))


def load_calibration(file: Path, layout: BlockLayout, *, revision: str) -> Calibration:
    """Read the tables and check the model's layout and revision.

    Raises:
        ConfigError: the file is missing, unreadable, or belongs to another model; the hint says how
            to make the tables.
    """
    if not file.is_file():
        raise _refused(file, "there are no tables")
    try:
        with safe_open(file, framework="pt") as tensors:
            about = json.loads((tensors.metadata() or {}).get("tierkv", "{}"))
            calibration = make_calibration(tensors.get_tensor("mean"), tensors.get_tensor("steps"))
    except (SafetensorError, OSError, ValueError) as error:
        raise _refused(file, f"it can't be read: {error}") from error
    if not isinstance(about, dict) or about.get("format") != _FORMAT:
        raise _refused(file, "it is no calibration of this version")
    shape = (layout.layers, 2, layout.kv_heads, layout.head_dim)
    if about.get("model_revision") != revision or tuple(calibration.mean.shape) != shape:
        raise _refused(file, "it was made for another model")
    return calibration


def _refused(file: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"entropy-coded KV needs {file}: {reason}",
        hint="Run `tierkv calibrate --model FOLDER`.",
    )
