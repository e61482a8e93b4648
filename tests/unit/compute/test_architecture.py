"""config.json: what is understood, and what is refused by name."""

from __future__ import annotations

import pytest

from tests.fix_model import FAMILY_EXTRAS, tiny_config
from tierkv.compute.model.architecture import parse_architecture
from tierkv.kvcore.errors import ModelFolderError


def test_families_differ_in_biases_and_norms() -> None:
    llama, qwen2, qwen3 = (parse_architecture(tiny_config(f)) for f in ("llama", "qwen2", "qwen3"))
    assert (llama.qkv_bias, qwen2.qkv_bias, qwen3.qkv_bias) == (False, True, False)
    assert (llama.qk_norm, qwen2.qk_norm, qwen3.qk_norm) == (False, False, True)
    assert (llama.head_dim, qwen3.head_dim) == (16, 24)


def test_biases_are_read_where_the_family_has_them() -> None:
    every = {f: parse_architecture(tiny_config(f, attention_bias=True)) for f in FAMILY_EXTRAS}
    assert [f for f in every if every[f].qkv_bias] == ["llama", "qwen2", "qwen3"]
    assert [f for f in every if every[f].out_bias] == ["llama", "qwen3"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_scaling": {"type": "dynamic"}, "rope_parameters": None}, "'dynamic'.*rope_type"),
        ({"rope_scaling": {"type": "linear"}, "rope_parameters": None}, "'factor'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial"),
        ({"use_sliding_window": True, "sliding_window": 64}, "sliding_window 64"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types.*sliding_attention",
        ),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"num_attention_heads": 3}, "do not divide"),
    ],
)
def test_unsupported_settings_are_refused_by_name(changes, words) -> None:
    with pytest.raises(ModelFolderError, match=words):
        parse_architecture(tiny_config() | changes)


def test_a_disabled_sliding_window_is_fine() -> None:
    config = tiny_config("qwen2", use_sliding_window=False, sliding_window=4096)
    assert parse_architecture(config | {"layer_types": ["full_attention"] * 3}).layers == 3


def test_mistral_is_served_without_its_window_only() -> None:
    config = tiny_config("mistral")
    assert parse_architecture(config).head_dim == 24
    del config["sliding_window"]  # The reference code then slides by 4096.
    for changes in ({"sliding_window": 4096}, {}):
        with pytest.raises(ModelFolderError, match="sliding_window 4096") as refused:
            parse_architecture(config | changes)
        assert "null" in str(refused.value.hint)


def test_a_missing_size_is_named() -> None:
    config = tiny_config()
    del config["vocab_size"]
    with pytest.raises(ModelFolderError, match="vocab_size"):
        parse_architecture(config)
