"""Where a prompt's KV is: tiers of its blocks and of its chunks, without a use or a lease."""

from __future__ import annotations

from collections.abc import Sequence

from tests.fix_meta import BreakableMeta, make_pool_node, store_chain
from tests.fix_scheduler import LAYOUT, make_request
from tierkv.kvcore.block import ChunkNamer, Tier, block_keys
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.ids import BlockKey
from tierkv.kvcore.request import Blend, GenerateRequest
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.directory_client import DirectoryClient
from tierkv.scheduler.prompt_locator import PromptPlaces, locate_prompt
from tierkv.scheduler.routing_stats import RoutingStats

SIZE = LAYOUT.block_tokens
PROMPT = make_request(token_ids=tuple(range(40, 40 + 3 * SIZE + 5)))


def directory_of(meta: BreakableMeta) -> DirectoryClient:
    config = SchedulerConfig(locate_timeout_s=20.0, directory_backoff_s=0.01)
    return DirectoryClient(meta, config=config, stats=RoutingStats(1), clock=SystemClock())


def chain(request: GenerateRequest) -> list[BlockKey]:
    return block_keys(request.namespace_key, request.token_ids, block_tokens=SIZE)


async def meta_with(keys: Sequence[BlockKey], tiers: Sequence[Tier]) -> BreakableMeta:
    meta = BreakableMeta()
    await store_chain(meta, make_pool_node(), keys, tiers)
    return meta


async def test_tokens_and_bytes_are_told_by_tier() -> None:
    meta = await meta_with(chain(PROMPT), [Tier.L2, Tier.L2, Tier.L4])
    before = (await meta.list_blocks(9)).blocks
    found = await locate_prompt(directory_of(meta), PROMPT, LAYOUT)
    assert found == PromptPlaces(
        wanted_tokens=3 * SIZE,
        found_tokens=3 * SIZE,
        memory_tokens=2 * SIZE,
        disk_tokens=SIZE,
        memory_bytes=2 * LAYOUT.stored_bytes,
        disk_bytes=LAYOUT.stored_bytes,
    )
    assert meta.leases_live == 0
    hits = [(block.hits, block.leases) for block in (await meta.list_blocks(9)).blocks]
    assert hits == [(block.hits, block.leases) for block in before]


async def test_a_silent_directory_is_not_an_absent_prompt() -> None:
    meta = await meta_with(chain(PROMPT)[:1], [Tier.L2])
    directory = directory_of(meta)
    other = make_request(token_ids=tuple(range(500, 560)))
    assert await locate_prompt(directory, other, LAYOUT) == PromptPlaces(wanted_tokens=48)
    short = make_request(token_ids=(1, 2))
    assert await locate_prompt(directory, short, LAYOUT) == PromptPlaces()
    await meta.close()
    assert await locate_prompt(directory, PROMPT, LAYOUT) is None


async def test_documents_count_at_any_position() -> None:
    ids = tuple(range(40, 40 + 5 * SIZE))
    start, stop = 4, 4 + SIZE + 3
    request = make_request(token_ids=ids, blend=Blend(((start, stop), (stop, stop + SIZE))))
    namer = ChunkNamer(request.namespace_key, ids[:start])
    keys = namer.block_keys(ids[start:stop], block_tokens=SIZE)
    meta = await meta_with(keys, [Tier.L2, Tier.L4])
    found = await locate_prompt(directory_of(meta), request, LAYOUT)
    assert found == PromptPlaces(
        wanted_tokens=2 * SIZE + 3,
        found_tokens=SIZE + 3,
        memory_tokens=SIZE,
        disk_tokens=3,
        memory_bytes=LAYOUT.stored_bytes,
        disk_bytes=LAYOUT.stored_bytes,
    )
