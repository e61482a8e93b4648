"""``tierkv calibrate``: measures a model's KV on prompts and writes the tables of entropy codecs.

The shipped model is measured on prompts similar to the training prompts. Any other model needs a
text similar to the model's later prompts. No other part of the cluster has to run, and only the one
file is changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tierkv.compute.codec.calibration import save_calibration
from tierkv.compute.codec_calibration import measure_prompts, tables_from
from tierkv.compute.demo_model.data import CHAT_TASKS, SINGLE_TASKS, make_probes
from tierkv.compute.loading import load_model
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
