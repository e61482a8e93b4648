"""What vLLM loads of ours, against vLLM's own abstract classes, factories and enums."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tests.engines.conformance.documented import hooks_in_docs
from tests.engines.conformance.interfaces import hooks_of, load, misfits, overridden
from tierkv.integrations.launch import VLLM_CONNECTOR

vllm = pytest.importorskip("vllm", reason="runs in .venv-interfaces")

CONNECTOR_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"


@pytest.fixture
def pair() -> tuple[Any, Any]:
    """Our class and vLLM's."""
    return load(VLLM_CONNECTOR), load(CONNECTOR_BASE)


def test_vllm_can_call_ours_as_it_calls_its_own(pair: tuple[Any, Any]) -> None:
    ours, base = pair
    assert issubclass(ours, base)
    assert misfits(ours, base) == []


def test_the_documentation_names_every_hook_of_this_version(pair: tuple[Any, Any]) -> None:
    ours, base = pair
    documented = hooks_in_docs("KVConnectorBase_V1")
    assert documented.ours == overridden(ours, base)
    assert documented.left == hooks_of(base).keys() - documented.ours


def test_vllm_finds_the_connector_by_its_path() -> None:
    factory = load("vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory")
    config = load("vllm.config.kv_transfer:KVTransferConfig")
    module, _, name = VLLM_CONNECTOR.partition(":")
    told = config(kv_connector=name, kv_connector_module_path=module, kv_role="kv_both")
    assert factory.get_connector_class(told) is load(VLLM_CONNECTOR)


def test_vllm_gives_the_connector_what_its_constructor_takes() -> None:
    ours = inspect.signature(load(VLLM_CONNECTOR))
    ours.bind("config", "role", "kv cache config")
    assert list(ours.parameters)[2] == "kv_cache_config"


def test_layer_hooks_are_not_lost_to_full_cuda_graphs() -> None:
    assert load(VLLM_CONNECTOR).requires_piecewise_for_cudagraph({}) is True


@pytest.mark.parametrize(
    ("path", "names"),
    [
        (
            "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorRole",
            {"SCHEDULER", "WORKER"},
        ),
    ],
)
def test_answers_have_the_names_we_give_them(path: str, names: set[str]) -> None:
    assert names <= set(load(path).__members__)
