"""Pool nodes for a test's engines, and vLLM itself.

vLLM is imported before warnings are errors: it and what it imports warn as they load.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler
    import vllm.v1.kv_offload.tiering.spec  # noqa: F401

    from tests.engines.vllm.tier_rig import Engine, MakeEngine, Server, be_patient, pool_node


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Server]:
    """Run a pool node; the test meets what it damages before the node's scrubber does."""
    server = pool_node(tmp_path, "--set", "dmp.scrub_rate=0", capacity="128MiB")
    yield server
    server.end()


@pytest.fixture
def make_engine(node: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeEngine]:
    """Make engines whose tier uses the node; they are never in a hurry."""
    be_patient(monkeypatch)
    made: list[Engine] = []

    def make(chunks: int = 8, *, tier: dict[str, Any] | None = None, **changes: Any) -> Engine:
        made.append(Engine(chunks, tier={"pool": node.address} | (tier or {}), **changes))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
