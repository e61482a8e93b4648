"""From logits to tokens: greedy, or a draw from the distribution that a request shapes.

Called once per step by the engine. A sampled token depends on the request's seed and on the number
of tokens generated before, never on batch mates, preemption or the computing node. Rows that ask
get log-probabilities, which come from the logits before anything changes them: softmax over the
whole vocabulary at temperature 1, whatever form, bias or penalty the request has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tierkv.compute.batching.logit_edits import Int64Array, RowEdits
from tierkv.kvcore.request import GenerateRequest, TokenLogprobs

_SEEDS = 1 << 63


@dataclass(frozen=True, slots=True)
class Draw:
    """How to choose one token.

    Attributes:
        temperature: 0.0 is greedy.
        top_p: nucleus mass in (0, 1].
        seed: seed of the request.
        index: completion tokens generated before this token, including resumed tokens.
        allowed: ``[vocab]``, True for allowed tokens, of which at least one exists; None: all.
        top_k: draw among this many most likely tokens; 0: among all.
        min_p: least probability, as a share of the most likely token's.
        edits: changes of the logits; None: none.
    """

    temperature: float
    top_p: float
    seed: int
    index: int
    allowed: NDArray[np.bool_] | None = None
    top_k: int = 0
    min_p: float = 0.0
    edits: RowEdits | None = None


def request_seed(request: GenerateRequest) -> int:
    """Return the request's seed, or a seed derived from the unguessable request id."""
    if request.sampling.seed is not None:
        return request.sampling.seed
    return int.from_bytes(blake2b(request.request_id.encode(), digest_size=8).digest(), "little")


class Sampler:
    """Chooses tokens; keeps a CPU generator, seeded anew for each draw."""

    def __init__(self) -> None:
        self._generator = torch.Generator()

    def sample(self, logits: Tensor, draws: Sequence[Draw]) -> list[int | None]:
        """Choose one token per row.

        Args:
            logits: ``[rows, vocab]`` float32.
            draws: one per row.

        Returns:
            tokens: None for a row with a non-finite logit.
        """
        finite = torch.isfinite(logits).all(dim=-1).tolist()
        logits = _edited(logits, draws)
        greedy = logits.argmax(dim=-1).tolist()
        tokens: list[int | None] = []
        for row, draw in enumerate(draws):
            if not finite[row]:
                tokens.append(None)
            elif draw.temperature == 0.0:
                tokens.append(greedy[row])
            else:
                tokens.append(self._draw(logits[row].cpu(), draw))
        return tokens

    def _draw(self, logits: Tensor, draw: Draw) -> int:
        """Invert the kept tokens' cumulative distribution at a uniform random number.

        ``min_p`` and ``top_k`` keep the most likely tokens; ``top_p`` is a share of their mass. Of
        equally likely tokens the one with the lower id counts as more likely.
        """
        chances, ids = torch.softmax(logits / draw.temperature, dim=-1).sort(
            descending=True, stable=True
        )
        mass = chances.cumsum(dim=-1)
        # A token of probability 0 is never chosen, however the last bits are rounded.
        likely = chances > 0
        nucleus = draw.top_p
        if draw.top_k or draw.min_p:
            likely &= chances >= draw.min_p * chances[0]
            if draw.top_k:
                likely[draw.top_k :] = False
            nucleus *= float(mass[int(likely.sum()) - 1])
        kept = int(((mass - chances < nucleus) & likely).sum())
        self._generator.manual_seed((draw.seed * 0x9E3779B97F4A7C15 + draw.index) % _SEEDS)
        uniform = torch.rand((), generator=self._generator, dtype=torch.float64)
        target = (uniform * mass[kept - 1]).to(mass.dtype)
        position = min(int(torch.searchsorted(mass[:kept], target, right=True)), kept - 1)
        return int(ids[position])


def _edited(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return the logits with all edits, and minus infinity for forbidden tokens."""
    rows = [row for row, draw in enumerate(draws) if draw.allowed is not None]
    edits = [(row, edits) for row, draw in enumerate(draws) if (edits := draw.edits) is not None]
    if not rows and not edits:
        return logits
    edited = logits.clone()
    apply_edits(edited, edits)
    if rows:
        allowed = np.stack([allowed for draw in draws if (allowed := draw.allowed) is not None])
        mask = torch.from_numpy(allowed).to(logits.device)
        edited[rows] = edited[rows].masked_fill(~mask, -torch.inf)
    return edited


def apply_edits(logits: Tensor, edits: Sequence[tuple[int, RowEdits]]) -> None:
    """Change rows of logits in place.

    Args:
        logits: ``[rows, vocab]`` float32.
        edits: rows with their edits; each row at most once.
    """
    biased = [(row, edit.biased) for row, edit in edits if len(edit.biased)]
    if biased:
        values = np.concatenate([edit.biases for _, edit in edits if len(edit.biased)])
        at = _places(biased, logits)
        logits[at] += torch.from_numpy(values).to(logits.device)
    penalised = [(row, edit) for row, edit in edits if len(edit.seen)]
    if penalised:
        at = _places([(row, edit.seen) for row, edit in penalised], logits)
        logits[at] = _penalised(logits[at], [edit for _, edit in penalised])
    held_back = [(row, edit.held_back) for row, edit in edits if len(edit.held_back)]
    if held_back:
        logits[_places(held_back, logits)] = -torch.inf


def _places(rows: Sequence[tuple[int, Int64Array]], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of the given tokens of each row."""
    numbers = np.repeat([row for row, _ in rows], [len(ids) for _, ids in rows])
    ids = np.concatenate([ids for _, ids in rows])
    device = logits.device
    return torch.from_numpy(numbers).to(device), torch.from_numpy(ids).to(device)


def _penalised(values: Tensor, edits: Sequence[RowEdits]) -> Tensor:
    """Return the logits of seen tokens after the penalties; one edit after the other."""
    sizes = [len(edit.seen) for edit in edits]

    def each(numbers: list[float]) -> Tensor:
        spread = np.repeat(np.array(numbers, dtype=np.float32), sizes)
        return torch.from_numpy(spread).to(values.device)

    counts = torch.from_numpy(np.concatenate([edit.counts for edit in edits])).to(values.device)
    repetition = each([edit.sampling.repetition_penalty for edit in edits])
    frequency = each([edit.sampling.frequency_penalty for edit in edits])
    presence = each([edit.sampling.presence_penalty for edit in edits])
    values = torch.where(values > 0, values / repetition, values * repetition)
    return values - frequency * counts - presence * (counts > 0)


def logprobs_of(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprobs]:
    """Describe each row's chosen token.

    Args:
        logits: ``[rows, vocab]``, finite.
        tokens: the chosen token of each row.
        tops: alternatives to report for each row; at most the vocabulary is reported.

    Returns:
        entries: one per row; alternatives of equal probability in the order of their ids.
    """
    scores = torch.log_softmax(logits.float(), dim=-1)
    chosen = torch.tensor(tokens, device=scores.device)
    own: list[float] = scores.gather(1, chosen[:, None])[:, 0].tolist()
    most = min(max(tops), scores.shape[1])
    if not most:
        return [TokenLogprobs(logprob) for logprob in own]
    best = scores.topk(most, dim=-1)
    entries = []
    for logprob, ids, values, top in zip(
        own, best.indices.tolist(), best.values.tolist(), tops, strict=True
    ):
        ranked = sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
        entries.append(TokenLogprobs(logprob, tuple(ranked[:top])))
    return entries
