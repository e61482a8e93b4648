"""Salts carry a tenant's key there and back, and nobody else's text is taken for one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.integrations.keys import (
    TenantSalt,
    identity_digest,
    is_uncached,
    parse_salt,
    rank_key,
    uncached_salt,
    user_namespace,
)
from tierkv.kvcore.ids import BLOCK_KEY_BYTES, NAMESPACE_KEY_BYTES, BlockKey, NamespaceKey

keys = st.binary(min_size=NAMESPACE_KEY_BYTES, max_size=NAMESPACE_KEY_BYTES).map(NamespaceKey)
any_text = st.text(st.characters(exclude_categories=()))


@given(keys, st.text())
def test_a_salt_comes_back_and_fits_what_vllm_takes(key: NamespaceKey, identity: str) -> None:
    salt = TenantSalt(key, identity_digest(identity))
    text = str(salt)
    assert parse_salt(text) == salt
    assert len(text) <= 128
    assert not set("@/\\\0") & set(text)


@given(any_text)
def test_any_other_text_is_somebody_elses(text: str) -> None:
    assert parse_salt(text) is None
    assert parse_salt(f"tierkv1.{text}") is None


@given(keys, any_text, any_text)
def test_salts_of_users_are_apart(key: NamespaceKey, one: str, other: str) -> None:
    assert user_namespace(key, None) == key
    assert user_namespace(key, one) != key
    assert (user_namespace(key, one) == user_namespace(key, other)) == (one == other)


def test_ranks_have_names_of_their_own() -> None:
    key = BlockKey(bytes(range(BLOCK_KEY_BYTES)))
    assert rank_key(key, 0, 1) == key
    names = {key} | {rank_key(key, rank, ranks) for ranks in (2, 4) for rank in range(ranks)}
    assert len(names) == 7
    with pytest.raises(ValueError, match="rank 2 of 2"):
        rank_key(key, 2, 2)


def test_a_salt_for_nothing_kept_is_told_from_others() -> None:
    salt = uncached_salt("9f" * 16)
    assert is_uncached(salt) and parse_salt(salt) is None
    assert len(salt) <= 128 and not set("@/\\\0") & set(salt)
    assert not is_uncached(None) and not is_uncached("uncached-1")
