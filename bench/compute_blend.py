"""Time to first token of a prompt put together from known chunks, beside computing it whole.

Called by bench.compute. Six chunks stand in an order they were never computed in; what is measured
stands beside what the count of floating point operations promises.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass

from bench.compute_node import MODEL, ask, make_node, random_tokens
from compute.blend.selectors import CHECK_LAYER
from compute.node import ComputeNode
from kvcore.request import Blend

CHUNKS, HEAD_TOKENS, QUESTION_TOKENS = 6, 64, 64
RATIO = 0.15


@dataclass(frozen=True, slots=True)
class Blending:
    """Seconds by round, and the share of full prefill's operations that blending needs."""

    full_s: list[float]
    blend_s: list[float]
    flop_share: float

    @property
    def speedup(self) -> float:
        """The median of the rounds' ratios."""
        return statistics.median(a / b for a, b in zip(self.full_s, self.blend_s, strict=True))


async def measure(rounds: int, seed: int, *, chunk_tokens: int) -> Blending:
    """Make the chunks known, then ask for them in new orders with a new question each."""
    rng = random.Random(seed)
    head = random_tokens(rng, HEAD_TOKENS)
    chunks = [random_tokens(rng, chunk_tokens) for _ in range(CHUNKS)]
    length = HEAD_TOKENS + CHUNKS * chunk_tokens + QUESTION_TOKENS
    node = make_node(5 * length)
    await node.start()
    try:
        result = Blending([], [], _flop_share(length, CHUNKS * chunk_tokens))
        await ask(node, *_prompt(head, chunks, rng), blend=_blend(chunk_tokens))
        await node.flush()
        for number in range(rounds + 1):
            shuffled = rng.sample(chunks, CHUNKS)
            if shuffled == chunks:
                shuffled.reverse()
            prompt, count = _prompt(head, shuffled, rng)
            blended = await _settled(node, prompt, count, chunk_tokens)
            full = await ask(node, prompt, count, use_cache=False)
            if number:
                result.blend_s.append(blended)
                result.full_s.append(full.ttft_s)
        return result
    finally:
        await node.stop()


async def _settled(node: ComputeNode, prompt: list[int], count: int, chunk_tokens: int) -> float:
    answer = await ask(node, prompt, count, blend=_blend(chunk_tokens))
    if answer.usage.blended_tokens < (1 - RATIO) * 0.9 * CHUNKS * chunk_tokens:
        raise AssertionError(f"only {answer.usage.blended_tokens} tokens were blended")
    return answer.ttft_s


def _prompt(head: list[int], chunks: list[list[int]], rng: random.Random) -> tuple[list[int], int]:
    question = random_tokens(rng, QUESTION_TOKENS)
    return [*head, *(token for chunk in chunks for token in chunk), *question], 1


def _blend(chunk_tokens: int) -> Blend:
    starts = [HEAD_TOKENS + i * chunk_tokens for i in range(CHUNKS)]
    return Blend(tuple((start, start + chunk_tokens) for start in starts), recompute_ratio=RATIO)


def _flop_share(length: int, reused: int) -> float:
    """Return operations of a blending pass by those of a full one; the head's are left out.

    Layers up to the check layer's key and value projections are computed for all tokens.
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
