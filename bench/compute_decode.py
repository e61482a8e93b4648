"""Decoded tokens per second compared with transformers' generate, with equal weights and threads.

Called by bench.compute. Both continue the same random prompts greedily, in turn; the tokens must be
equal. Our side is the whole node: queue, batcher, pages, sampling and delivery.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from bench.compute_node import MODEL, Timed, ask, make_node, random_tokens
from tierkv.compute.node import ComputeNode

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


@dataclass(frozen=True, slots=True)
class Decoding:
    """Tokens per second of all sequences, by round, of one batch size."""

    batch: int
    ours: list[float]
    theirs: list[float]

    @property
    def ratio(self) -> float:
        """The median of the rounds' ratios."""
        return statistics.median(a / b for a, b in zip(self.ours, self.theirs, strict=True))


async def measure(
    batches: Sequence[int], *, prompt_tokens: int, new_tokens: int, rounds: int, seed: int
) -> list[Decoding]:
    """Decode with both, alternating by round; a first round does not count."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        theirs = _random_model(Path(folder), seed)
        node = make_node(max(batches) * (prompt_tokens + new_tokens + 128), model_folder=folder)
        await node.start()
        try:
            results = []
            for batch in batches:
                result = Decoding(batch, [], [])
                for number in range(rounds + 1):
                    prompts = [random_tokens(rng, prompt_tokens) for _ in range(batch)]
                    ours, speed = await _ours(node, prompts, new_tokens)
                    want, their_speed = await asyncio.to_thread(
                        _theirs, theirs, prompts, new_tokens
                    )
                    if ours != want:
                        raise AssertionError("other tokens than transformers'")
                    if number:
                        result.ours.append(speed)
                        result.theirs.append(their_speed)
                results.append(result)
            return results
        finally:
            await node.stop()


def _random_model(folder: Path, seed: int) -> torch.nn.Module:
    """Write random weights as a Hugging Face folder; return the model loaded by transformers."""
    torch.manual_seed(seed)
    fields = {k: v for k, v in MODEL.items() if k != "architectures"}
    config = transformers.LlamaConfig(**fields)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return model.eval()


async def _ours(
    node: ComputeNode, prompts: list[list[int]], new_tokens: int
) -> tuple[list[list[int]], float]:
    """Prefill all prompts first, so the timed part is decoding of the whole batch."""
    await asyncio.gather(*(ask(node, prompt, 1) for prompt in prompts))
    timed: list[Timed] = await asyncio.gather(*(ask(node, p, new_tokens) for p in prompts))
    await node.drop_cache()
    seconds = max(answer.decode_s for answer in timed)
    return [list(answer.tokens) for answer in timed], len(prompts) * (new_tokens - 1) / seconds


def _theirs(
    model: torch.nn.Module, prompts: list[list[int]], new_tokens: int
) -> tuple[list[list[int]], float]:
    ids = torch.tensor(prompts)

    def generate(count: int) -> tuple[torch.Tensor, float]:
        began = time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return out, time.perf_counter() - began

    _, prefill_s = generate(1)
    out, all_s = generate(new_tokens)
    tokens = out[:, ids.shape[1] :].tolist()
    return tokens, len(prompts) * (new_tokens - 1) / (all_s - prefill_s)
