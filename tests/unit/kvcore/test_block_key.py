"""Block names are the same on every machine and in every run, and differ whenever they must."""

from __future__ import annotations

import json
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.kvcore.block import (
    ROOT_PARENT,
    ChunkNamer,
    block_keys,
    namespace_key,
    next_block_key,
    tail_key,
)
from tierkv.kvcore.ids import NamespaceKey
from tierkv.kvcore.layout import BlockLayout, KvDtype

GOLDEN = Path(__file__).parents[2] / "golden" / "block_keys.json"
VECTORS: dict[str, Any] = json.loads(GOLDEN.read_text())
KEYS = [NamespaceKey(bytes.fromhex(ns["key"])) for ns in VECTORS["namespaces"]]
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=30)


@pytest.mark.parametrize("vector", VECTORS["layouts"])
def test_layout_fingerprints_are_golden(vector: dict[str, Any]) -> None:
    shape = {name: value for name, value in vector.items() if name != "fingerprint"}
    layout = BlockLayout(**{**shape, "dtype": KvDtype(shape["dtype"])})
    assert layout.fingerprint().hex() == vector["fingerprint"]


@pytest.mark.parametrize("vector", VECTORS["namespaces"])
def test_namespace_keys_are_golden(vector: dict[str, Any]) -> None:
    key = namespace_key(
        bytes.fromhex(VECTORS["cluster_secret"]),
        tenant=vector["tenant"],
        model_revision=vector["model_revision"],
        layout_fingerprint=bytes.fromhex(VECTORS["layouts"][vector["layout"]]["fingerprint"]),
    )
    assert key.hex() == vector["key"]


@pytest.mark.parametrize("vector", VECTORS["chains"])
def test_block_keys_are_golden(vector: dict[str, Any]) -> None:
    keys = block_keys(
        KEYS[vector["namespace"]], vector["token_ids"], block_tokens=vector["block_tokens"]
    )
    assert [key.hex() for key in keys] == vector["keys"]


@pytest.mark.parametrize("vector", VECTORS["chunks"])
def test_chunk_keys_are_golden(vector: dict[str, Any]) -> None:
    namer = ChunkNamer(KEYS[vector["namespace"]], vector["isolation_prefix_ids"])
    keys = namer.block_keys(vector["token_ids"], block_tokens=vector["block_tokens"])
    assert [key.hex() for key in keys] == vector["keys"]


def test_another_process_with_another_hash_seed_agrees() -> None:
    vector = VECTORS["chains"][3]
    code = (
        "from tierkv.kvcore.block import block_keys;"
        f"print([k.hex() for k in block_keys({KEYS[0]!r}, {vector['token_ids']}, block_tokens=4)])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "4711", "PYTHONPATH": str(GOLDEN.parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == str(vector["keys"])


@given(TOKENS, st.integers(1, 8))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_keys_are_the_documented_hash_chain(token_ids: list[int], block_tokens: int) -> None:
    expected, parent = [], ROOT_PARENT
    for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
        block = token_ids[start : start + block_tokens]
        encoded = b"".join(token.to_bytes(4, "little") for token in block)
        stepwise = next_block_key(KEYS[0], parent, block)
        parent = blake2b(parent + encoded, key=KEYS[0], digest_size=16).digest()
        assert stepwise == parent
        expected.append(parent)
    assert block_keys(KEYS[0], token_ids, block_tokens=block_tokens) == expected


@given(TOKENS, TOKENS)
@settings(max_examples=50, deadline=None, derandomize=True)
def test_chains_share_keys_exactly_as_far_as_they_share_blocks(a: list[int], b: list[int]) -> None:
    prefix = [*a, 1]
    one = block_keys(KEYS[0], prefix + a, block_tokens=2)
    two = block_keys(KEYS[0], prefix + b, block_tokens=2)
    for index, (left, right) in enumerate(zip(one, two, strict=False)):
        end = 2 * (index + 1)
        assert (left == right) is ((prefix + a)[:end] == (prefix + b)[:end])


@given(TOKENS.filter(lambda tokens: len(tokens) >= 4))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_tenants_and_revisions_share_no_key(token_ids: list[int]) -> None:
    chains = [set(block_keys(key, token_ids, block_tokens=2)) for key in KEYS]
    assert sum(map(len, chains)) == len(set.union(*chains))


def test_a_chunk_is_not_a_first_block() -> None:
    first = block_keys(KEYS[0], [1, 2, 3, 4], block_tokens=4)[0]
    chunk = ChunkNamer(KEYS[0], ()).block_keys([1, 2, 3, 4], block_tokens=4)
    assert chunk != [first]
    assert tail_key(KEYS[0], ROOT_PARENT, [1, 2, 3, 4]) not in (first, *chunk)


def test_a_chunk_has_another_name_after_another_prefix_or_with_a_token_more() -> None:
    names = [
        ChunkNamer(KEYS[0], prefix).block_keys(ids, block_tokens=4)[0]
        for prefix, ids in [
            ((), (1, 2, 3, 4)),
            ((1,), (2, 3, 4)),
            ((1,), (2, 3, 4, 5)),
            ((9,), (2, 3, 4)),
            ((), (1, 2, 3, 4, 5)),
        ]
    ]
    assert len(set(names)) == len(names)


def test_parts_of_a_namespace_can_not_run_into_each_other() -> None:
    secret = bytes(16)
    one = namespace_key(secret, tenant="ab", model_revision="c", layout_fingerprint=b"")
    two = namespace_key(secret, tenant="a", model_revision="bc", layout_fingerprint=b"")
    assert one != two
    assert len(one) == 32


@pytest.mark.parametrize("length", [0, 15, 65])
def test_a_secret_of_unusable_length_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="16 to 64 bytes"):
        namespace_key(bytes(length), tenant="t", model_revision="r", layout_fingerprint=b"")
