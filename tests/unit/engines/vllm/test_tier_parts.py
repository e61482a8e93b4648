"""Names, options, formats, seeds and debts of the tier below vLLM's offloading."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from tierkv.integrations.vllm import tier_owed
from tierkv.integrations.vllm.tier_format import identity_of
from tierkv.integrations.vllm.tier_names import ChunkNames
from tierkv.integrations.vllm.tier_options import TierOptions
from tierkv.integrations.vllm.tier_owed import OwedChunks
from tierkv.integrations.vllm.tier_seed import is_random, seed_key
from tierkv.kvcore.errors import ConfigError
from tierkv.kvcore.ids import NamespaceKey

BASE = NamespaceKey(bytes(32))
COMMIT = "0123456789" * 4


def test_names_differ_by_everything_they_come_from() -> None:
    names = {
        ChunkNames(base, seed=seed, epoch=epoch).name(key)
        for base in (BASE, NamespaceKey(b"1" * 32))
        for seed in (b"seed", b"")
        for epoch in (b"", b"seed")
        for key in (b"k", b"kk")
    }
    assert len(names) == 16
    assert ChunkNames(BASE, seed=b"s").name(b"k") == ChunkNames(BASE, seed=b"s").name(b"k")


def test_options_are_checked() -> None:
    assert TierOptions.read({"pool": "x:1", "reset": "keep"}) == TierOptions(reset="keep")
    assert TierOptions.read({"enable_kv_events": True}).enable_kv_events
    with pytest.raises(ConfigError, match="reset = 'never' is none of forget, keep"):
        TierOptions.read({"reset": "never"})
    with pytest.raises(ConfigError, match="locality = 'here'"):
        TierOptions.read({"locality": "here"})
    with pytest.raises(ConfigError, match="enable_kv_events = 'yes' is of the wrong type"):
        TierOptions.read({"enable_kv_events": "yes"})


def test_a_made_up_seed_is_told_from_one_that_was_set() -> None:
    assert is_random(bytes(32).hex())
    assert not is_random("0") and not is_random("random") and not is_random("vllm-none-hash")
    assert seed_key(BASE, 1) != seed_key(BASE, 2)


def test_debts_are_bounded_and_wait_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_owed, "MOST_CHUNKS", 3)
    owed = OwedChunks()
    assert not owed.due(100)
    owed.add([b"a", b"b", b"c", b"d"], now=100)
    assert len(owed) == 3 and not owed.due(104) and owed.due(105)
    owed.paid([b"b", b"c", b"x"])
    assert len(owed) == 1 and owed.due(105)
    owed.paid([b"d"])
    assert not owed.due(105)


@dataclass(frozen=True)
class Group:
    tokens_per_block: int = 16
    layer_names: tuple[str, ...] = ("layers.0", "layers.1")
    group_id: int = 0


@dataclass(frozen=True)
class Model:
    name: str = "some/model"
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Cache:
    tokens_per_hash: int = 16
    blocks_per_chunk: int = 1


@dataclass(frozen=True)
class Parallel:
    world_size: int = 2
    tp_size: int = 2
    pp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1
    is_parallelism_agnostic: bool = True


@dataclass(frozen=True)
class Config:
    """As much of vLLM's OffloadingConfig as is read; tests/engines reads the real one."""

    groups: tuple[Group, ...] = (Group(),)
    model: Model = Model()
    cache: Cache = Cache()
    parallel: Parallel = Parallel()
    replicated_layout: bool = False
    canonical_layout: bool = False
    kv_cache_layout: str = "LBNHC"


def fingerprint(config: Config, **changes: Any) -> bytes:
    told = {"version": "0.32.0", "chunk_bytes": 65536, "revision": COMMIT} | changes
    return identity_of(config, **told).fingerprint()


def test_formats_differ_by_everything_that_bytes_depend_on() -> None:
    plain = Config()
    others = [
        replace(plain, groups=(Group(32),)),
        replace(plain, groups=(Group(layer_names=("layers.0", "layers.2")),)),
        replace(plain, groups=(Group(), Group(group_id=1))),
        replace(plain, model=Model(dtype="fp8")),
        replace(plain, cache=Cache(blocks_per_chunk=2)),
        replace(plain, parallel=Parallel(tp_size=1)),
        replace(plain, parallel=Parallel(pp_size=2)),
        replace(plain, replicated_layout=True),
        replace(plain, canonical_layout=True),
        replace(plain, kv_cache_layout="LBHNC"),
    ]
    prints = [fingerprint(config) for config in [plain, *others]]
    prints += [fingerprint(plain, version="0.33.0"), fingerprint(plain, chunk_bytes=4096)]
    assert len(set(prints)) == len(prints)
    assert fingerprint(plain, version="0.32.1") == fingerprint(plain)


def test_only_the_canonical_format_is_shared_by_engines_of_other_ranks() -> None:
    two, one = Parallel(), Parallel(tp_size=1, world_size=1)
    assert fingerprint(Config(parallel=two)) != fingerprint(Config(parallel=one))
    assert fingerprint(Config(parallel=two, canonical_layout=True)) == fingerprint(
        Config(parallel=one, canonical_layout=True)
    )


def test_a_model_without_commit_has_no_revision() -> None:
    identity = identity_of(Config(), version="0.32.0", chunk_bytes=65536, revision=None)
    assert identity.revision == ""
    told = identity_of(Config(), version="0.32.0", chunk_bytes=65536, revision=COMMIT)
    assert told.revision == f"some/model@{COMMIT}"
