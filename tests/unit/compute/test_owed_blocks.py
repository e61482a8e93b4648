from __future__ import annotations

from tierkv.compute.l1.page_pool import FullBlock
from tierkv.compute.tiers.block_puts import PublishJob
from tierkv.compute.transfers.saves import OwedBlocks
from tierkv.kvcore.block import BlockSpec
from tierkv.kvcore.ids import BlockKey
from tierkv.kvcore.layout import KvCodec

KEYS = [BlockKey(bytes([i]) * 16) for i in range(6)]


def block(number: int, *, partial: bool = False) -> FullBlock:
    return FullBlock(BlockSpec(KEYS[number], KEYS[0], 64), number, partial)


def job(*numbers: int, codec: KvCodec = KvCodec.NONE) -> PublishJob:
    blocks = tuple(map(block, numbers))
    return PublishJob(7, blocks, codec, must=True, handoff=True)


def test_owed_blocks_come_back_oldest_first_from_where_they_lie_now() -> None:
    owed = OwedBlocks(9)
    for each in (job(1, 2, 3), job(4, codec=KvCodec.FP8), job(1)):
        owed.note(each, each.blocks)
    owed.note(job(5), [block(5, partial=True)])
    pages = {KEYS[1]: 11, KEYS[3]: 13, KEYS[4]: 14}
    (first,) = owed.take(1, pages.get)
    assert (first.seq_id, first.must, first.handoff, first.codec) == (0, False, False, KvCodec.NONE)
    assert [(b.spec.key, b.page) for b in first.blocks] == [(KEYS[3], 13)], "L1 has not got block 2"
    rest = owed.take(9, pages.get)
    assert [(j.codec, [b.page for b in j.blocks]) for j in rest] == [
        (KvCodec.FP8, [14]),
        (KvCodec.NONE, [11]),
    ]
    assert len(owed) == 0


def test_the_oldest_are_forgotten_beyond_the_limit() -> None:
    owed = OwedBlocks(2)
    owed.note(job(1, 2, 3, 4), job(1, 2, 3, 4).blocks)
    (kept,) = owed.take(9, lambda key: 1)
    assert [b.spec.key for b in kept.blocks] == KEYS[3:5]


def test_without_room_nothing_is_taken() -> None:
    owed = OwedBlocks(2)
    owed.note(job(1), job(1).blocks)
    assert owed.take(0, lambda key: 1) == []
    assert len(owed) == 1
