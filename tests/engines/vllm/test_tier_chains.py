"""A pool that is full gives up ends of prompts: what is left of one can still be loaded."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.vllm.tier_rig import Engine, be_patient, keys_of, pool_node

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
CHUNK = 1 << 20
COUNT = 12


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    be_patient(monkeypatch)
    # One extent: 31 chunks of a MiB beside their checksums.
    node = pool_node(tmp_path, "--set", "dmp.eviction_policy=leaf_lru", capacity="32MiB")
    made = Engine(COUNT, tier={"pool": node.address}, chunk_bytes=CHUNK)
    yield made
    made.close()
    node.end()


def test_what_is_left_of_a_prompt_begins_at_its_beginning(engine: Engine) -> None:
    keys = keys_of("old", COUNT)
    context = engine.request()
    for index, key in enumerate(keys):
        context.set_offload_key_position(key, (index + 1) * 16)
    order = random.Random(3)
    for part in (keys[:7], keys[7:]):
        engine.store(order.sample(part, len(part)), context)
    engine.finish(context)
    for filler in range(2):
        engine.store(keys_of(f"new-{filler}", COUNT))
    fresh = engine.request()
    left = engine.hits(keys, fresh)
    assert 0 < left < COUNT
    # Nothing behind the first gap takes room for nothing.
    assert [engine.hits([key], fresh) for key in keys[left:]] == [0] * (COUNT - left)
    engine.finish(fresh)
