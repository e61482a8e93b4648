"""From a pass's outputs to what a request asked about its prompt: chances of tokens, an embedding.

Called by the engine for the row of a prompt's last token. That token is always computed, never
loaded, so a cached prefix serves these requests as it serves answers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tierkv.compute.batching.sequence import Readout
from tierkv.kvcore.request import GenerateRequest


def read_out(request: GenerateRequest, *, hidden: Tensor, logits: Tensor) -> Readout | None:
    """Answer a request that ``reads_out``.

    Args:
        request: what is asked.
        hidden: ``[hidden]`` after the last norm.
        logits: ``[vocab]`` float32.

    Returns:
        readout: None when a number of it is not finite.
    """
    if request.embed:
        return _finite(Readout(embedding=_numbers(_unit(hidden.float()))))
    scores = torch.log_softmax(logits.float(), dim=-1)
    asked = torch.tensor(request.score_token_ids, device=scores.device)
    return _finite(Readout(scores=_numbers(scores[asked])))


def _unit(vector: Tensor) -> Tensor:
    return vector.div(vector.norm())


def _numbers(vector: Tensor) -> tuple[float, ...]:
    return tuple(vector.tolist())


def _finite(readout: Readout) -> Readout | None:
    numbers = torch.tensor(readout.embedding or readout.scores)
    return readout if bool(torch.isfinite(numbers).all()) else None
