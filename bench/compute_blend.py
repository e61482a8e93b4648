"""Time to first token of a prompt made of known chunks, compared with computing the whole prompt.

Called by bench.compute. Six chunks come in an order that was never computed. The measured speed-up
is reported next to the speed-up expected from the count of floating point operations.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from dataclasses import dataclass

from bench.compute_node import MODEL, ask, make_node, random_tokens
from tierkv.compute.blend.plan import CHECK_LAYER
from tierkv.compute.node import ComputeNode
from tierkv.kvcore.request import Blend

CHUNKS, HEAD_TOKENS, QUESTION_TOKENS = 6, 64, 64
RATIO = 0.15
_TRIES = 60


@dataclass(frozen=True, slots=True)
class Blending:
    """Seconds by round, and blending's share of the operations of full prefill."""

    full_s: list[float]
    blend_s: list[float]
    flop_share: float

    @property
    def speedup(self) -> float:
        """The median of the rounds' ratios."""
        return statistics.median(a / b for a, b in zip(self.full_s, self.blend_s, strict=True))


async def measure(rounds: int, seed: int, *, chunk_tokens: int) -> Blending:
    """Make the chunks known, then ask in new orders with a new question each time."""
    rng = random.Random(seed)
    head = random_tokens(rng, HEAD_TOKENS)
    chunks = [random_tokens(rng, chunk_tokens) for _ in range(CHUNKS)]
    length = HEAD_TOKENS + CHUNKS * chunk_tokens + QUESTION_TOKENS
    node = make_node(5 * length)
    await node.start()
    try:
        result = Blending([], [], _flop_share(length, CHUNKS * chunk_tokens))
        await _make_known(node, head, chunks, rng)
        for number in range(rounds + 1):
            prompt = _prompt(head, _other_order(chunks, rng), rng)
            blended = await ask(node, prompt, 1, blend=_blend(chunk_tokens))
            if blended.usage.blended_tokens < _expected(chunk_tokens):
                raise AssertionError(f"only {blended.usage.blended_tokens} tokens were blended")
            full = await ask(node, prompt, 1, use_cache=False)
            if number:
                result.blend_s.append(blended.ttft_s)
                result.full_s.append(full.ttft_s)
        return result
    finally:
        await node.stop()


async def _make_known(
    node: ComputeNode, head: list[int], chunks: list[list[int]], rng: random.Random
) -> None:
    """Ask until all chunks come from the cache; an idle node computes chunks in the background."""
    chunk_tokens = len(chunks[0])
    await ask(node, _prompt(head, chunks, rng), 1, blend=_blend(chunk_tokens))
    for _ in range(_TRIES):
        await asyncio.sleep(1.0)
        prompt = _prompt(head, _other_order(chunks, rng), rng)
        answer = await ask(node, prompt, 1, blend=_blend(chunk_tokens))
        if answer.usage.blended_tokens >= _expected(chunk_tokens):
            return
    raise AssertionError("the chunks did not become known")


def _expected(chunk_tokens: int) -> int:
    """Return 95 % of the tokens that the check layer, the largest selection, leaves reused."""
    return int((1 - 1.5 * RATIO) * 0.95 * CHUNKS * chunk_tokens)


def _other_order(chunks: list[list[int]], rng: random.Random) -> list[list[int]]:
    """Shuffle so that another chunk is first, because the first order's prefix is known exactly."""
    order = rng.sample(chunks, len(chunks))
    return order if order[0] is not chunks[0] else order[::-1]


def _prompt(head: list[int], chunks: list[list[int]], rng: random.Random) -> list[int]:
    question = random_tokens(rng, QUESTION_TOKENS)
    return [*head, *(token for chunk in chunks for token in chunk), *question]


def _blend(chunk_tokens: int) -> Blend:
    starts = [HEAD_TOKENS + i * chunk_tokens for i in range(CHUNKS)]
    return Blend(tuple((start, start + chunk_tokens) for start in starts), recompute_ratio=RATIO)


def _flop_share(length: int, reused: int) -> float:
    """Return the operations of a blended pass over a full pass; the head is left out of the blend.

    The layers up to the check layer's key and value projections are computed for all tokens.
    """
    layers, hidden, inner = (
        MODEL[name] for name in ("num_hidden_layers", "hidden_size", "intermediate_size")
    )
    q_width = MODEL["num_attention_heads"] * MODEL["head_dim"]
    kv_width = 2 * MODEL["num_key_value_heads"] * MODEL["head_dim"]
    everywhere = hidden * (q_width + kv_width)
    dense = everywhere + q_width * hidden + 3 * hidden * inner
    computed = length - HEAD_TOKENS - reused + RATIO * reused
    scan = length - HEAD_TOKENS
    attended = length / 2 * 2 * q_width  # A query sees half of the prompt on average.
    full = layers * length * (dense + attended)
    blended = (
        CHECK_LAYER * scan * (dense + attended)
        + scan * everywhere
        + (layers - CHECK_LAYER) * computed * (dense + attended)
        - computed * everywhere
    )
    return blended / full
