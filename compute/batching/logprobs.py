"""Log-probabilities of chosen tokens, from the logits before anything changes them.

Called once per step for the rows that ask, and never otherwise. The distribution is the model's
own: softmax over the whole vocabulary at temperature 1, whatever form, bias or penalty the request
has.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tierkv.kvcore.request import TokenLogprobs


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
