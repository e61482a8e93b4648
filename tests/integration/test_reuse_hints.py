"""What a caller says of the future arrives where blocks are evicted: in L1 and at the pool node."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fix_dmp import Rig, make_rig  # noqa: F401 - a fixture
from tests.fix_model import answer, make_request, running_node
from tierkv.compute.node import ComputeNode
from tierkv.dmp.segment.slots import SlotState
from tierkv.dmp.transport.inproc import InprocPoolNode
from tierkv.kvcore.block import BlockSpec, Expectation, block_keys
from tierkv.kvcore.ids import NamespaceKey
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.request import ReuseHint
from tierkv.policies.eviction import BlockFacts

pytestmark = pytest.mark.integration
PROMPT = [i * 7 % 128 for i in range(42)]
KEYS = block_keys(NamespaceKey(b"n" * 32), PROMPT[:40], block_tokens=8)
E = Expectation


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:  # noqa: F811
    return make_rig(capacity_bytes=16 << 20, extent_bytes=1 << 20)


def puts_of(rig: Rig) -> list[BlockSpec]:
    slots = [rig.node._state.table.store.peek(key) for key in KEYS]
    return [slot.block for slot in slots if slot is not None]


def facts_of(node: ComputeNode) -> list[BlockFacts]:
    pool = node._engine.pool
    return pool.facts(pool.lookup(KEYS))


async def test_rows_to_come_keep_what_they_share_and_nothing_else(rig: Rig) -> None:
    hint = ReuseHint(pending_calls=9, pending_tokens=16)
    async with running_node(InprocPoolNode(rig.node)) as node:
        await answer(node, make_request(PROMPT, hint=hint, session_id="s-1"))
        await node.flush()
        expected = [E.ROWS, E.ROWS, E.NONE, E.NONE, E.NONE]
        assert [facts.outlook.expectation for facts in facts_of(node)] == expected
        puts = puts_of(rig)
        assert [put.outlook.expectation for put in puts] == expected
        assert [(put.outlook.depth, put.outlook.tail) for put in puts] == [
            (i, i == 4) for i in range(5)
        ]
        assert {event.block.owner.session for event in rig.node.reports.inventory()} == {"s-1"}
        assert {event.block.owner.session for event in node.inventory()} == {"s-1"}
        await answer(node, make_request(PROMPT))
        assert [facts.outlook.expectation for facts in facts_of(node)] == [E.UNKNOWN] * 5


@pytest.mark.parametrize("codec", [KvCodec.NONE, KvCodec.INT8])
async def test_a_turn_is_expected_in_its_time(rig: Rig, codec: KvCodec) -> None:
    hint = ReuseHint(next_turn=True, next_turn_s=4.0)
    async with running_node(InprocPoolNode(rig.node), kv_codec=codec) as node:
        await answer(node, make_request(PROMPT, hint=hint, session_id="not a name"))
        await node.flush()
        told = [
            (put.outlook.expectation, put.outlook.expected_in_s, put.owner.session)
            for put in puts_of(rig)
        ]
        assert told == [(E.TURN, 4.0, "")] * 5
        assert {facts.outlook.expected_in_s for facts in facts_of(node)} == {4.0}


async def test_what_is_handed_over_is_wanted_at_once(rig: Rig) -> None:
    async with running_node(InprocPoolNode(rig.node)) as node:
        await answer(node, make_request(PROMPT, handoff=True))
        slots = [
            rig.node._state.table.store.in_state(i, SlotState.SEALED)
            for i in rig.node._state.table.store.indices()
        ]
        puts = [slot.block for slot in slots if slot is not None]
        assert {(put.outlook.expectation, put.outlook.expected_in_s) for put in puts} == {
            (E.ROWS, 0.0)
        }
        assert len(puts) == 6, "five blocks and the tail"
