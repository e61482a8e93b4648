"""What SGLang loads of ours, against SGLang's own abstract class and backend factory."""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

import pytest

from engines.launch import SGLANG_BACKEND
from tests.engines.conformance.documented import hooks_in_docs
from tests.engines.conformance.interfaces import hooks_of, load, misfits, overridden

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
