"""An engine's blocks under our names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.fix_engine_events import (
    CLEARED,
    MODEL,
    WIDTH,
    Claimed,
    batch,
    engine_names,
    namespace,
    removed,
    salt,
    stored,
)
from tierkv.integrations.events.own_blocks import OwnBlocks
from tierkv.integrations.keys import TenantSalt
from tierkv.kvcore.block import ROOT_PARENT, Owner, block_keys
from tierkv.kvcore.ids import BlockKey

PROMPT = list(range(100, 112))


class Directory(Claimed):
    """What one engine is believed to hold, and the core that says so."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.blocks = OwnBlocks(MODEL, **options)

    def tell(self, *events: dict[str, Any], rank: int = 0) -> None:
        """Have a rank publish events."""
        self.report(self.blocks.apply(rank, batch(0, *events).events))
        assert self.keys == {block.key for block in self.blocks.inventory()}

    def has(self, tokens: Sequence[int], tenant: int = 0) -> int:
        """Return how many blocks of a prompt are claimed."""
        return self.blocks.leading(keys_of(tokens, tenant))


def keys_of(tokens: Sequence[int], tenant: int = 0) -> list[BlockKey]:
    """Name a prompt's blocks as the scheduler does."""
    return block_keys(namespace(tenant), tokens, block_tokens=WIDTH)


@pytest.fixture
def directory() -> Iterator[Directory]:
    """A directory of an engine that holds nothing yet."""
    made = Directory()
    yield made
    made.blocks.check_invariants()


def test_blocks_get_the_names_the_scheduler_asks_for(directory: Directory) -> None:
    directory.blocks.learn_tenant(namespace(), "acme")
    directory.tell(stored(PROMPT, salt(), session_id="chat"))
    first, second, third = directory.blocks.inventory()
    keys = keys_of(PROMPT)
    assert [first.key, second.key, third.key] == keys
    assert [first.block.parent, second.block.parent, third.block.parent] == [ROOT_PARENT, *keys[:2]]
    assert (first.block.tokens, first.block.owner) == (WIDTH, Owner("m", "acme", "chat"))


def test_a_later_event_goes_on_behind_an_earlier_one(directory: Directory) -> None:
    directory.tell(stored(PROMPT[:8], salt()))
    directory.tell(stored(PROMPT, salt(), first=2))
    assert directory.has(PROMPT) == 3


def test_a_block_is_gone_when_the_engine_drops_it_and_known_behind_it(directory: Directory) -> None:
    names = engine_names(PROMPT, salt())
    directory.tell(stored(PROMPT[:8], salt()))
    directory.tell(removed(names[1]))
    assert directory.has(PROMPT) == 1
    directory.tell(stored(PROMPT, salt(), first=2))  # The engine has a second copy of the dropped.
    assert len(directory.blocks) == 2
    directory.tell(stored(PROMPT, salt(), first=1))
    assert directory.has(PROMPT) == 3


def test_tenants_never_meet(directory: Directory) -> None:
    directory.tell(stored(PROMPT, salt(0)))
    assert (directory.has(PROMPT, 0), directory.has(PROMPT, 1)) == (3, 0)
    directory.tell(stored(PROMPT, salt(1)))
    assert (directory.has(PROMPT, 0), directory.has(PROMPT, 1)) == (3, 3)
    directory.tell(removed(engine_names(PROMPT, salt(0))[0]))
    assert (directory.has(PROMPT, 0), directory.has(PROMPT, 1)) == (0, 3)


def test_a_name_that_stands_for_two_blocks_is_not_believed(directory: Directory) -> None:
    short = stored(PROMPT, salt(0)) | {"block_hashes": [1, 2, 3]}
    directory.tell(short)
    directory.tell(stored(PROMPT, salt(1)) | {"block_hashes": [1, 2, 3]})
    assert (directory.has(PROMPT, 0), directory.has(PROMPT, 1)) == (3, 0)
    assert directory.blocks.skipped == {"ambiguous": 3}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"medium": "CPU"}, "other_medium"),
        ({"lora_name": "adapter"}, "adapter"),
        ({"lora_id": 1}, "adapter"),
        ({"kv_cache_spec_kind": "sliding_window"}, "other_cache"),
        ({"block_size": 2, "token_ids": PROMPT[:6]}, "other_size"),
        ({"token_ids": PROMPT[:5]}, "no_tokens"),
        ({"extra_keys": None}, "foreign"),
        ({"extra_keys": [["theirs"], None, None]}, "foreign"),
        ({"extra_keys": [[salt(), ["image", 0]], None, None]}, "foreign"),
        ({"extra_keys": [[b"\x00" * 32], None, None]}, "foreign"),
        ({"extra_keys": [["tierkv1.AAAA.AAAA"], None, None]}, "foreign"),
        ({"extra_keys": [[str(TenantSalt(namespace(), bytes(16)))], None, None]}, "foreign"),
        ({"parent_block_hash": b"never heard of"}, "foreign"),
    ],
)
def test_what_no_request_of_ours_can_reuse_is_passed_over(
    directory: Directory, fields: dict[str, Any], reason: str
) -> None:
    directory.tell(stored(PROMPT, salt()) | fields)
    assert not directory.keys
    assert directory.blocks.skipped == {reason: 3}


def test_a_chain_ends_before_an_image(directory: Directory) -> None:
    directory.tell(stored(PROMPT, salt()) | {"extra_keys": [[salt()], None, [["image", 1]]]})
    assert directory.has(PROMPT) == 2


def test_sglang_names_the_salt_with_the_event(directory: Directory) -> None:
    event = stored(PROMPT, salt())
    for field in ("extra_keys", "group_idx", "kv_cache_spec_kind"):
        del event[field]
    directory.tell(event | {"cache_salt": salt(), "block_hashes": [-5, 6, 7]})
    assert directory.has(PROMPT) == 3
    directory.tell({"type": "BlockRemoved", "block_hashes": [6], "medium": "CPU_PINNED"})
    assert directory.has(PROMPT) == 3
    directory.tell({"type": "BlockRemoved", "block_hashes": [6], "medium": "GPU"})
    assert directory.has(PROMPT) == 1


def test_a_block_of_two_groups_stays_until_both_dropped_it(directory: Directory) -> None:
    names = engine_names(PROMPT, salt())
    directory.tell(stored(PROMPT, salt()), stored(PROMPT, salt(), group_idx=1))
    directory.tell(removed(*names))
    assert directory.has(PROMPT) == 3
    directory.tell(removed(*names, group_idx=1))
    assert not directory.keys


def test_cleared_is_cleared_for_one_rank(directory: Directory) -> None:
    directory.tell(stored(PROMPT, salt()), rank=0)
    directory.tell(stored(PROMPT[:8], salt()), rank=1)
    directory.tell(CLEARED, rank=0)
    assert directory.has(PROMPT) == 2
    directory.tell(CLEARED, rank=1)
    assert not directory.keys


def test_a_rank_that_cannot_be_heard_claims_nothing(directory: Directory) -> None:
    directory.tell(stored(PROMPT, salt()))
    directory.report(directory.blocks.hide(0))
    directory.report(directory.blocks.hide(0))
    assert not directory.keys and not directory.blocks.inventory()
    directory.report(directory.blocks.show(0))
    directory.report(directory.blocks.show(0))
    assert directory.has(PROMPT) == 3
    directory.report(directory.blocks.hide(0))
    directory.report(directory.blocks.clear(0))
    directory.tell(stored(PROMPT[:4], salt()))
    assert directory.has(PROMPT) == 1


def test_more_blocks_than_fit_are_not_noted_until_others_go() -> None:
    directory = Directory(max_blocks=2)
    directory.tell(stored(PROMPT, salt()))
    assert directory.has(PROMPT) == 2
    assert directory.blocks.skipped == {"full": 1}
    directory.tell(removed(engine_names(PROMPT, salt())[1]))
    directory.tell(stored(PROMPT, salt(), first=2))
    assert len(directory.blocks) == 2
    directory.blocks.check_invariants()
