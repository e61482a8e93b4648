"""What an engine serves as a ModelInfo: out of its words, its folder, and what others saw of it.

Also the layout of another engine's blocks, from config.json alone.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tierkv import compute
from tierkv.integrations.remote.door import EngineDoor, EngineKind, EngineLook, RemoteConfig
from tierkv.integrations.remote.served_model import config_layout, opaque_layout, served_model
from tierkv.integrations.remote.text_tokens import END, text_folder
from tierkv.kvcore import limits
from tierkv.kvcore.errors import ConfigError
from tierkv.kvcore.ids import HostId, NodeId
from tierkv.kvcore.layout import BlockLayout, KvDtype
from tierkv.kvcore.node import NodeRole
from tierkv.parts.engine_part import open_door
from tierkv.storage.modelfiles.model_folder import inspect_model_folder

DEMO = Path(compute.__file__).parent / "demo_model" / "weights"
LOOK = EngineLook(
    "demo", folder=str(DEMO), context_tokens=2_048, block_tokens=32, blocks=256, dtype="auto"
)


def config(kind: EngineKind = EngineKind.VLLM, **changes: Any) -> RemoteConfig:
    fields = {"url": "http://127.0.0.1:1", "role": NodeRole.COMPUTE, "kind": kind} | changes
    return RemoteConfig(NodeId("n"), HostId("h"), **fields)


def door(kind: EngineKind = EngineKind.VLLM) -> EngineDoor:
    return open_door(config(kind))


def test_weights_name_the_model_and_the_engine_its_blocks() -> None:
    model = served_model(config(), door(), LOOK)
    assert model.revision == inspect_model_folder(DEMO).revision
    assert (model.name, model.context_tokens, model.eos_token_ids) == ("demo", 2_048, (2,))
    assert model.layout == BlockLayout(6, 2, 32, KvDtype.BFLOAT16, 32, order="vllm-untold")
    assert model.score_refusal == "" and model.embed_refusal and model.blend_refusal
    told = served_model(config(dtype="float32"), door(), LOOK)
    assert told.layout.dtype is KvDtype.FLOAT32


def test_what_runs_in_the_engine_knows_its_layout_best() -> None:
    plain = served_model(config(), door(), LOOK)
    true = BlockLayout(6, 2, 32, KvDtype.FLOAT32, 32, order="vllm-0.32-hnc")
    other_size = replace(true, block_tokens=64)
    seen = [
        replace(plain, revision="somebody else's"),
        replace(plain, layout=other_size),
        replace(plain, layout=true),
    ]
    assert served_model(config(), door(), LOOK, seen).layout == true
    assert served_model(config(), door(), LOOK, seen[:2]).layout == plain.layout


def test_a_text_engine_has_bytes_for_tokens() -> None:
    model = served_model(config(EngineKind.OPENAI), door(EngineKind.OPENAI), EngineLook("gpt"))
    assert model.folder == str(text_folder()) and model.eos_token_ids == (END,)
    assert model.score_refusal and model.context_tokens == limits.MAX_CONTEXT_TOKENS
    small = replace(LOOK, context_tokens=100)
    bytes_of = served_model(config(EngineKind.OPENAI), door(EngineKind.OPENAI), small)
    assert 100 < bytes_of.context_tokens < 10_000
    again = served_model(config(EngineKind.OPENAI), door(EngineKind.OPENAI), EngineLook("gpt"))
    assert again.identity == model.identity != bytes_of.identity


@pytest.mark.parametrize(
    ("served", "name"),
    [
        ("org/Model-7B", "org/Model-7B"),
        ("/data/models/My Model", "My_Model"),
        ("-x", "model--x"),
        ("日本", "__"),
        ("x" * 300, None),
    ],
)
def test_any_name_becomes_one_the_cluster_allows(served: str, name: str | None) -> None:
    model = served_model(config(), door(), replace(LOOK, served=served))
    assert re.fullmatch(limits.NAME_PATTERN, model.name)
    assert name is None or model.name == name
    given = served_model(config(model_name="mine"), door(), replace(LOOK, served=served))
    assert given.name == "mine"


def test_a_folder_elsewhere_has_to_be_named() -> None:
    away = replace(LOOK, folder="/no/such/folder")
    with pytest.raises(ConfigError, match="does not exist on this machine") as refused:
        served_model(config(), door(), away)
    assert "--model FOLDER" in refused.value.hint
    assert served_model(config(model_folder=str(DEMO)), door(), away).folder == str(DEMO)
    with pytest.raises(ConfigError, match="'/given' does not exist on this machine"):
        served_model(config(model_folder="/given"), door(), away)


LLAMA: dict[str, Any] = {
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 128,
    "dtype": "bfloat16",
}


def layout(config: dict[str, Any], dtype: str = "", block_tokens: int = 32) -> BlockLayout | None:
    return config_layout(config, block_tokens=block_tokens, dtype=dtype, order="o-1")


def test_a_plain_model_has_its_configurations_layout() -> None:
    want = BlockLayout(6, 2, 16, KvDtype.BFLOAT16, 32, order="o-1")
    assert layout(LLAMA) == layout(LLAMA, "auto") == layout({"text_config": LLAMA}) == want
    assert layout(LLAMA | {"head_dim": 24}) == BlockLayout(
        6, 2, 24, KvDtype.BFLOAT16, 32, order="o-1"
    )
    assert layout(LLAMA, "float32") == BlockLayout(6, 2, 16, KvDtype.FLOAT32, 32, order="o-1")
    old = {k: v for k, v in LLAMA.items() if k != "dtype"} | {"torch_dtype": "float16"}
    assert layout(old) == BlockLayout(6, 2, 16, KvDtype.FLOAT16, 32, order="o-1")


@pytest.mark.parametrize(
    "change",
    [
        {"kv_lora_rank": 512},
        {"dtype": None},
        {"dtype": "fp8"},
        {"num_hidden_layers": 0},
        {"num_attention_heads": "many"},
    ],
)
def test_anything_else_has_none(change: dict[str, Any]) -> None:
    assert layout(LLAMA | change) is None


def test_opaque_layouts_of_kinds_differ() -> None:
    assert opaque_layout("vllm", 16).block_tokens == 16
    assert opaque_layout("vllm").fingerprint() != opaque_layout("sglang").fingerprint()
