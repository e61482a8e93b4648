"""Token-exact reuse: a prompt takes over the common part of a partly equal block, and only that."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from tests.fix_model import answer, make_request, running_node
from tests.fix_pool import CorruptingPoolNode, MemoryPoolNode
from tierkv.kvcore.ids import NamespaceKey

BLOCK = 8
DONOR = random.Random(1).choices(range(128), k=2 * BLOCK + 3)


def parting(common: int, length: int) -> list[int]:
    """A prompt that shares exactly so many tokens with the donor."""
    rest = random.Random(common).choices(range(128), k=length - common)
    if common < len(DONOR):
        rest[0] = (DONOR[common] + 1) % 128
    return [*DONOR[:common], *rest]


async def oracle(prompts: Sequence[Sequence[int]], **changes) -> list[list[int]]:
    async with running_node() as node:
        return [
            (await answer(node, make_request(p, use_cache=False, **changes)))[0] for p in prompts
        ]


@pytest.mark.parametrize("use_tail", [False, True])
async def test_every_length_of_the_common_part(use_tail) -> None:
    """The donor's last block is unfinished, or full by its answer."""
    common = range(2 * BLOCK + (3 if use_tail else 1))
    prompts = [parting(k, 2 * BLOCK + 5) for k in common]
    want = await oracle(prompts)
    async with running_node() as node:
        for k, prompt, tokens in zip(common, prompts, want, strict=True):
            await node.drop_cache()
            new = 1 if use_tail else 12
            await answer(node, make_request(DONOR, sampling={"max_tokens": new}))
            got, last = await answer(node, make_request(prompt))
            assert got == tokens, f"{k} tokens in common"
            assert last.usage.hit_tokens.l1 == last.usage.hit_tokens.total == k


async def test_a_prompt_shorter_than_a_block_and_a_conversation_hit_to_the_token() -> None:
    short = DONOR[: BLOCK - 2]
    want = await oracle([short])
    async with running_node() as node:
        tokens, _ = await answer(node, make_request(short))
        again, last = await answer(node, make_request(short))
        assert again == tokens == want[0] and last.usage.hit_tokens.l1 == len(short) - 1
        turn = [*short, *tokens, 5, 6, 7]  # The newest token of an answer has no KV.
        got, last = await answer(node, make_request(turn))
        assert last.usage.hit_tokens.l1 == len(short) + len(tokens) - 1
    assert [got] == await oracle([turn])


async def test_another_namespace_shares_nothing() -> None:
    async with running_node() as node:
        await answer(node, make_request(DONOR))
        other = make_request(DONOR, namespace_key=NamespaceKey(b"m" * 32))
        _, last = await answer(node, other)
        assert last.usage.hit_tokens.total == 0


async def test_without_cache_nothing_is_left_and_nothing_taken() -> None:
    async with running_node() as node:
        await answer(node, make_request(DONOR, use_cache=False))
        _, last = await answer(node, make_request(DONOR))
        assert last.usage.hit_tokens.total == 0
        _, last = await answer(node, make_request(DONOR, use_cache=False))
        assert last.usage.hit_tokens.total == 0


async def test_requests_at_once_compute_a_common_part_once() -> None:
    """Whole blocks were always computed once; of a block with 7 common tokens each had its own."""
    head = DONOR[: 2 * BLOCK - 1]
    rng = random.Random(3)
    prompts = [[*head, 100 + i, *rng.choices(range(128), k=4)] for i in range(12)]
    want = await oracle(prompts)
    async with running_node() as node:
        got = await asyncio.gather(*(answer(node, make_request(p)) for p in prompts))
    assert [tokens for tokens, _ in got] == want
    hits = sorted(last.usage.hit_tokens.l1 for _, last in got)
    assert hits == [0, *[len(head)] * 11]


def forest(rng: random.Random, count: int, *, longest: int) -> list[list[int]]:
    """Prompts that go on with one another's beginnings, cut anywhere."""
    prompts: list[list[int]] = []
    for _ in range(count):
        head = rng.choice(prompts)[: rng.randrange(longest)] if prompts else []
        prompts.append([*head, *rng.choices(range(128), k=rng.randint(1, longest // 2))])
    return prompts


@pytest.mark.parametrize("seed", range(3))
async def test_output_is_the_same_where_donors_go_while_they_are_wanted(seed) -> None:
    """Few pages, small steps: donors are evicted, sequences preempted, prompts cut into chunks."""
    rng = random.Random(seed)
    prompts = forest(rng, 24, longest=60)
    want = await oracle(prompts)
    async with running_node(l1_pages=20, max_batch_tokens=12, max_running=6) as node:
        for _ in range(2):
            got = await asyncio.gather(*(answer(node, make_request(p)) for p in prompts))
            assert [tokens for tokens, _ in got] == want, f"{seed=}"
            await node.check_invariants()
            one_by_one = [(await answer(node, make_request(p)))[0] for p in prompts[:8]]
            assert one_by_one == want[:8], f"{seed=}"


def tree_hits(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens that the prompts' prefix tree spares; a prompt's last one is always computed."""
    known: set[tuple[int, ...]] = set()
    hits = 0
    for prompt in prompts:
        starts = [tuple(prompt[: n + 1]) for n in range(len(prompt))]
        hits += sum(start in known for start in starts[:-1])
        known.update(starts)
    return hits


@pytest.mark.parametrize("seed", range(4))
async def test_hits_are_those_of_the_prefix_tree(seed) -> None:
    prompts = forest(random.Random(seed), 60, longest=90)
    best = tree_hits(prompts)
    async with running_node(l1_pages=2_000, block_tokens=(8, 16, 32, 64)[seed]) as node:
        answers = [await answer(node, make_request(p, sampling={"max_tokens": 1})) for p in prompts]
        hits = sum(last.usage.hit_tokens.l1 for _, last in answers)
    assert 0.98 * best <= hits <= best, f"{seed=}"


async def test_the_pool_gives_parts_of_blocks_that_l1_has_no_more() -> None:
    """Every length of the common part; what only an unfinished block had is computed again."""
    pool = MemoryPoolNode()
    prompts = [parting(k, 2 * BLOCK + 5) for k in range(2 * BLOCK + 4)]
    want = await oracle(prompts)
    async with running_node(pool) as node:
        await answer(node, make_request(DONOR, sampling={"max_tokens": 1}))
        for k, prompt in enumerate(prompts):
            await node.flush()
            await node.drop_cache()
            got, last = await answer(node, make_request(prompt))
            assert got == want[k], f"{k} tokens in common"
            assert last.usage.hit_tokens.l2 == last.usage.hit_tokens.total
            assert last.usage.hit_tokens.l2 >= min(k, 2 * BLOCK)
        assert node.report().cache_errors == ()


@pytest.mark.parametrize("layer", [0, 2])
async def test_a_part_that_turns_out_bad_is_computed(layer) -> None:
    prompt = parting(BLOCK + 4, 2 * BLOCK + 5)
    want = await oracle([prompt])
    pool = CorruptingPoolNode(2, layer)
    async with running_node(pool) as node:
        await answer(node, make_request(DONOR))
        await node.flush()
        await node.drop_cache()
        got, last = await answer(node, make_request(prompt))
    assert got == want[0] and last.usage.hit_tokens.l2 == BLOCK


@pytest.mark.parametrize("seed", range(2))
async def test_the_pool_gives_all_of_the_tree_that_is_in_full_blocks(seed) -> None:
    """Each prompt finds L1 empty, so only what full blocks hold can be had."""
    pool, size = MemoryPoolNode(), (8, 16)[seed]
    prompts = forest(random.Random(seed), 40, longest=90)
    want = await oracle(prompts)
    saved = [p[: len(p) // size * size] for p in prompts]
    best = sum(
        max((common_tokens(p[:-1], other) for other in saved[:i]), default=0)
        for i, p in enumerate(prompts)
    )
    hits = 0
    async with running_node(pool, block_tokens=size, l1_pages=200) as node:
        for prompt, tokens in zip(prompts, want, strict=True):
            got, last = await answer(node, make_request(prompt))
            assert got == tokens, f"{seed=}"
            hits += last.usage.hit_tokens.l2
            assert last.usage.hit_tokens.l1 == 0
            await node.flush()
            await node.drop_cache()
    assert hits >= 0.98 * best, f"{seed=}"


def common_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
