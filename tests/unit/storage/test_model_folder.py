from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tierkv.kvcore.errors import ModelFolderError
from tierkv.storage.modelfiles.model_folder import (
    FULL_DIGEST_BYTES,
    inspect_model_folder,
    read_tensor_index,
)

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    write_json(path / "config.json", CONFIG)
    save_file(make_tensors(), path / "model.safetensors", {"format": "pt"})
    return path


def make_tensors() -> dict[str, np.ndarray]:
    return {
        "a": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b": np.ones(5, dtype=np.float16),
        "empty": np.zeros((0, 3), dtype=np.float32),
    }


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    tensors = make_tensors()
    save_file({"a": tensors["a"]}, folder / "model-1.safetensors")
    save_file({"b": tensors["b"]}, folder / "model-2.safetensors")
    names = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    write_json(folder / "model.safetensors.index.json", {"weight_map": names})


def test_tells_what_is_there(folder: Path) -> None:
    write_json(folder / "tokenizer.json", {})
    write_json(folder / "tokenizer_config.json", {"chat_template": "{{ messages }}"})
    write_json(folder / "generation_config.json", {"eos_token_id": [7, 8]})
    model = inspect_model_folder(folder)
    assert model.config == CONFIG
    assert model.files == (folder / "model.safetensors",)
    assert set(model.tensors) == {"a", "b", "empty"}
    assert model.weights_bytes == 58
    assert (model.context_tokens, model.eos_token_ids) == (2048, (7, 8))
    assert model.tokenizer_file == folder / "tokenizer.json"
    assert model.has_chat_template


def test_optional_files_may_be_absent(folder: Path) -> None:
    model = inspect_model_folder(str(folder))
    assert model.eos_token_ids == (2,)
    assert model.tokenizer_file is None
    assert not model.has_chat_template


def test_shards_are_found_through_their_index(folder: Path) -> None:
    shard(folder)
    model = inspect_model_folder(folder)
    assert [file.name for file in model.files] == ["model-1.safetensors", "model-2.safetensors"]
    assert model.tensors["b"].name == "model-2.safetensors"


def test_the_tensor_index_agrees_with_the_library(folder: Path) -> None:
    index = read_tensor_index(folder / "model.safetensors")
    raw = index.path.read_bytes()
    for name, array in make_tensors().items():
        entry = index.tensors[name]
        assert entry.shape == array.shape
        assert raw[entry.start : entry.stop] == array.tobytes()


def test_the_revision_depends_on_content_only(folder: Path, tmp_path: Path) -> None:
    revision = inspect_model_folder(folder).revision
    copy = tmp_path / "elsewhere"
    shutil.copytree(folder, copy)
    write_json(copy / "tokenizer.json", {"not": "weights"})
    assert inspect_model_folder(copy).revision == revision
    tensors = make_tensors()
    tensors["b"][3] = 0.5
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    changed = inspect_model_folder(copy).revision
    write_json(copy / "config.json", CONFIG | {"rope_theta": 5.0})
    assert len({revision, changed, inspect_model_folder(copy).revision}) == 3


def test_large_files_enter_the_revision_by_samples(folder: Path) -> None:
    big = np.zeros(FULL_DIGEST_BYTES // 4 + 1000, dtype=np.float32)
    save_file({"big": big}, folder / "model.safetensors")
    revision = inspect_model_folder(folder).revision
    big[-1] = 1.0
    save_file({"big": big}, folder / "model.safetensors")
    assert inspect_model_folder(folder).revision != revision


def test_one_number_of_a_small_tensor_in_a_large_file_changes_the_revision(folder: Path) -> None:
    big = np.zeros(FULL_DIGEST_BYTES // 4 + 1000, dtype=np.float32)
    norms = {f"norm{i}": np.ones(1024, dtype=np.float32) for i in range(100)}
    save_file({"big": big, **norms}, folder / "model.safetensors")
    revision = inspect_model_folder(folder).revision
    norms["norm50"][512] = 2.0
    save_file({"big": big, **norms}, folder / "model.safetensors")
    assert inspect_model_folder(folder).revision != revision


def refusal(folder: Path) -> ModelFolderError:
    with pytest.raises(ModelFolderError) as caught:
        inspect_model_folder(folder)
    return caught.value


def test_each_missing_thing_has_its_own_message(folder: Path) -> None:
    assert "no model folder" in refusal(folder / "nothing").message
    named = refusal(Path("Qwen/Qwen3-0.6B")).hint
    assert "hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B" in named
    assert "hf download" not in refusal(folder / "nothing").hint
    (folder / "model.safetensors").unlink()
    assert "no *.safetensors" in refusal(folder).message
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    error = refusal(folder)
    assert "only pickled weights" in error.message
    assert "safe_serialization=True" in error.hint
    (folder / "config.json").unlink()
    assert "no config.json" in refusal(folder).message


def test_broken_json_is_named(folder: Path) -> None:
    for text, words in (("{", "not JSON"), ("[1]", "JSON object"), ("[" * 100_000, "not JSON")):
        (folder / "config.json").write_text(text)
        assert words in refusal(folder).message


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"eos_token_id": "two"}, "eos_token_id"),
        ({"eos_token_id": [1, -1]}, "eos_token_id"),
        ({"max_position_embeddings": "many"}, "max_position_embeddings"),
        ({"max_position_embeddings": -5}, "max_position_embeddings"),
    ],
)
def test_nonsense_in_the_configuration_is_named(
    folder: Path, config: dict[str, Any], words: str
) -> None:
    write_json(folder / "config.json", config)
    assert words in refusal(folder).message


def test_shards_that_lack_or_escape_are_refused(folder: Path) -> None:
    shard(folder)
    (folder / "model-2.safetensors").unlink()
    assert "lacks model-2.safetensors" in refusal(folder).message
    write_json(folder / "model.safetensors.index.json", {"weight_map": {"a": "../x.safetensors"}})
    assert "outside the folder" in refusal(folder).message
    write_json(folder / "model.safetensors.index.json", {"weight_map": {}})
    assert "no weight_map" in refusal(folder).message


def test_a_tensor_in_two_files_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    shutil.copy(folder / "one.safetensors", folder / "two.safetensors")
    assert "is in one.safetensors and in two.safetensors" in refusal(folder).message


def raw_file(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        (1 << 60).to_bytes(8, "little") + b"{}",
        raw_file(b"not json"),
        raw_file(b"[]"),
        raw_file(b'{"a": 3}'),
        raw_file(b'{"a": {"dtype": "F32", "shape": [1]}}'),
        raw_file(b'{"a": {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}}', b"1234"),
        raw_file(b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', b"1234"),
        raw_file(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', b"1234"),
        raw_file(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', b"123"),
        raw_file(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', b"12345"),
        raw_file(b'{"a": {"dtype": [], "shape": [1], "data_offsets": [0, 4]}}', b"1234"),
    ],
)
def test_a_broken_weights_file_is_refused(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    assert "not a complete safetensors file" in refusal(folder).message
