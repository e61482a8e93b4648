"""What of SGLang's configuration keeps engines apart, and what only tells processes apart."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tierkv.integrations.identity import EngineIdentity
from tierkv.integrations.sglang.page_names import identity_of, part_of


def storage(**changes: Any) -> Any:
    settings = {
        "tp_rank": 1, "tp_size": 2, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0,
        "attn_cp_size": 1, "dcp_rank": 0, "dcp_size": 1, "is_mla_model": False,
    }  # fmt: skip
    return SimpleNamespace(**settings | changes)


def host(**changes: Any) -> Any:
    settings = {
        "layout": "page_first", "page_size": 64, "dtype": "torch.bfloat16", "start_layer": 0,
        "end_layer": 4, "storage_format_tag": None,
    }  # fmt: skip
    return SimpleNamespace(**settings | changes)


def arguments(**changes: Any) -> Any:
    settings = {"quantization": None, "kv_cache_dtype": "auto", "dtype": "auto"}
    return SimpleNamespace(**settings | changes)


def identity(
    the_storage: Any = None,
    the_host: Any = None,
    args: Any = None,
    version: str = "0.5.23",
    weights: str = "default",
) -> EngineIdentity:
    made = identity_of(
        the_storage or storage(),
        the_host or host(),
        version=version,
        model="org/model",
        revision="0" * 40,
        weights=weights,
        arguments=args or arguments(),
    )
    return replace(made, revision="abc")


@pytest.mark.parametrize(
    "other",
    [
        identity(storage(tp_size=4)),
        identity(storage(pp_size=2)),
        identity(storage(attn_cp_size=2)),
        identity(the_host=host(layout="layer_first")),
        identity(the_host=host(page_size=16)),
        identity(the_host=host(dtype="torch.float8_e4m3fn")),
        identity(the_host=host(storage_format_tag="unified-token-major")),
        identity(args=arguments(quantization="fp8")),
        identity(args=arguments(kv_cache_dtype="fp8_e5m2")),
        identity(args=arguments(json_model_override_args='{"rope_theta": 1}')),
        identity(args=arguments(quantization_param_path="scales.json")),
        identity(args=arguments(decrypted_config_file="other.json")),
        identity(version="0.5.24"),
        identity(weights="step-7"),
    ],
)
def test_engines_that_differ_are_kept_apart(other: EngineIdentity) -> None:
    assert other.fingerprint() != identity().fingerprint()


def test_made_up_weights_are_nobody_elses() -> None:
    made = identity_of(
        storage(),
        host(),
        version="0.5.23",
        model="org/model",
        revision="0" * 40,
        weights="default",
        arguments=arguments(load_format="dummy"),
    )
    assert made.revision == ""


def test_processes_of_one_engine_have_one_fingerprint() -> None:
    same = identity(storage(tp_rank=0), host(start_layer=4, end_layer=8))
    assert same.fingerprint() == identity().fingerprint() and same.rank == 0


def test_replicated_pages_are_of_no_tensor_parallel_size() -> None:
    wide = identity(storage(is_mla_model=True, tp_size=8))
    assert wide.fingerprint() == identity(storage(is_mla_model=True)).fingerprint()


def test_each_process_has_its_part_of_pages() -> None:
    parts = [
        part_of(storage(), "kv", host(), "2 x 1024"),
        part_of(storage(tp_rank=0), "kv", host(), "2 x 1024"),
        part_of(storage(pp_rank=1), "kv", host(), "2 x 1024"),
        part_of(storage(attn_cp_rank=1), "kv", host(), "2 x 1024"),
        part_of(storage(), "kv", host(end_layer=5), "2 x 1024"),
        part_of(storage(), "kv", host(), "2 x 2048"),
        part_of(storage(is_mla_model=True), "kv", host(), "2 x 1024"),
    ]
    assert len(set(parts)) == len(parts)


def test_replicated_keys_and_values_are_everybody_s_but_states_are_not() -> None:
    ranks = [storage(is_mla_model=True, tp_rank=rank) for rank in range(2)]
    kv, state = ({part_of(rank, name, host(), "") for rank in ranks} for name in ("kv", "mamba"))
    assert len(kv) == 1 and len(state) == 2
