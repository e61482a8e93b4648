"""What a tier is not told, options that give the same weights another KV, is found all the same."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

from tests.engines.vllm.engine_process import write_model
from tests.engines.vllm.tier_rig import Engine, offloading_config
from tierkv.integrations.vllm.model_facts import kv_facts
from tierkv.integrations.vllm.own_config import find_config
from tierkv.integrations.vllm.tier_format import identity_of

ROPE = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


def vllm_config(model: str, engine_id: str, **options: Any) -> Any:
    """Return what vLLM itself makes of its arguments."""
    transfer = KVTransferConfig(
        kv_connector="OffloadingConnector", kv_role="kv_both", engine_id=engine_id
    )
    arguments = EngineArgs(model=model, kv_transfer_config=transfer, max_model_len=256, **options)
    return arguments.create_engine_config()


def test_an_engine_s_configuration_is_found_by_its_id(model: str) -> None:
    first, second = vllm_config(model, "first"), vllm_config(model, "second")
    assert find_config("first") is first and find_config("second") is second
    assert find_config("third") is None


def test_engines_with_other_options_share_nothing(model: str) -> None:
    told = offloading_config({}, model=model)

    def identity(**options: Any) -> Any:
        whole = vllm_config(model, "engine", **options)
        return identity_of(told, version="0.32.0", chunk_bytes=1, revision=None, whole=whole)

    plain, same, turned = identity(), identity(seed=5), identity(hf_overrides=ROPE)
    assert plain.revision and plain.fingerprint() == same.fingerprint()
    assert plain.fingerprint() != turned.fingerprint()
    assert identity(load_format="dummy").revision == ""


def test_an_engine_with_adapters_hears_what_is_not_noticed(model: str) -> None:
    kept = [vllm_config(model, "with", enable_lora=True), vllm_config(model, "without")]
    for engine_id, said in (("with", 1), ("without", 0)):
        rig = Engine(tier={"pool": "127.0.0.1:9"}, wait=False, engine_id=engine_id, model=model)
        assert rig.door.counts().get("complaints_adapters", 0) == said
        rig.close()
    assert len(kept) == 2


def test_a_model_as_it_is_has_no_facts(model: str) -> None:
    assert kv_facts(vllm_config(model, "engine").model_config) == ()
