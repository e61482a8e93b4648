"""What SGLang loads of ours, against SGLang's own abstract class and backend factory."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
from typing import Any

import pytest

from tests.engines.conformance.documented import hooks_in_docs
from tests.engines.conformance.interfaces import hooks_of, load, misfits, overridden
from tierkv.integrations.launch import SGLANG_BACKEND, Events, LaunchKind, LaunchWish, plan_launch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("runs in .venv-interfaces", allow_module_level=True)

from tests.engines.sglang.stand_ins import install

BASE = "sglang.srt.mem_cache.hicache_storage:HiCacheStorage"


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    """Our class and SGLang's."""
    install()
    return load(SGLANG_BACKEND), load(BASE)


def test_sglang_can_call_ours_as_it_calls_its_own(pair: tuple[Any, Any]) -> None:
    ours, base = pair
    assert issubclass(ours, base)
    assert misfits(ours, base) == []


def test_the_documentation_names_every_hook_of_this_version(pair: tuple[Any, Any]) -> None:
    ours, base = pair
    documented = hooks_in_docs("HiCacheStorage")
    assert documented.ours == overridden(ours, base)
    assert documented.left == hooks_of(base).keys() - documented.ours


def test_sglang_finds_the_backend_by_its_path(pair: tuple[Any, Any]) -> None:
    factory = load("sglang.srt.mem_cache.storage.backend_factory:StorageBackendFactory")
    module, _, name = SGLANG_BACKEND.partition(":")
    assert factory._load_backend_class(module, name, "tierkv") is pair[0]


def test_sglang_gives_it_what_its_constructor_takes(pair: tuple[Any, Any]) -> None:
    inspect.signature(pair[0]).bind("storage config", {})


@pytest.mark.parametrize("events", [Events.LOCAL, Events.NETWORK])
def test_sglang_reads_the_line_that_connect_prints(pair: tuple[Any, Any], events: Events) -> None:
    pool = {"pool": "127.0.0.1:7401"}
    wish = LaunchWish(LaunchKind.SGLANG, "org/model", pool, block_tokens=32, ranks=2, events=events)
    parser = argparse.ArgumentParser()
    load("sglang.srt.server_args:ServerArgs").add_cli_args(parser)
    told = parser.parse_args(plan_launch(wish).argv[3:])
    assert (told.model_path, told.page_size, told.tp_size) == ("org/model", 32, 2)
    assert told.enable_hierarchical_cache and told.hicache_storage_backend == "dynamic"
    assert json.loads(told.hicache_storage_backend_extra_config)["pool"] == "127.0.0.1:7401"
    published = load("sglang.srt.disaggregation.kv_events:KVEventsConfig").from_cli(
        told.kv_events_config
    )
    assert (published.publisher, published.bind) == ("zmq", events is Events.LOCAL or None)
