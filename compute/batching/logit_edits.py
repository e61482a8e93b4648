"""Changes of a request's logits before a token is chosen: bias, penalties, and tokens held back.

``LogitEdits`` belongs to one sequence. The token counts follow the tokens themselves, so a
preempted sequence, or a sequence begun by another node, has the counts of an undisturbed sequence.
This module decides without torch; ``apply_edits`` (compute/batching/sampler.py) changes all rows of
a step at once:

1. bias: added to the logits of the tokens that the request names;
2. penalties, as vLLM has them: the repetition penalty divides positive logits and multiplies
   negative ones, of tokens in prompt and answer; the frequency penalty is subtracted once for each
   time that a token was generated, the presence penalty once;
3. tokens that would end the answer before ``min_tokens``: minus infinity.

A step costs O(distinct tokens of the penalised sequences). A sequence without edits costs nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tierkv.kvcore.request import GenerateRequest, SamplingParams

Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]

_FIRST_ROOM: Final = 64
_NO_TOKENS: Final = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class RowEdits:
    """The changes of one row of logits.

    Attributes:
        sampling: the penalties.
        biased: token ids ``[b]`` with a bias, all different.
        biases: ``[b]``.
        seen: ids ``[n]`` of penalised tokens, all different. A view that is valid until the
            sequence's next token.
        counts: ``[n]``, how often each was generated; 0 for tokens of the prompt alone.
        held_back: token ids that must not come next.
    """

    sampling: SamplingParams
    biased: Int64Array
    biases: Float32Array
    seen: Int64Array
    counts: Float32Array
    held_back: Int64Array


class LogitEdits:
    """The edits of one sequence, which has seen the tokens ``[0, known)`` so far."""

    def __init__(self, request: GenerateRequest, ends: Collection[int]) -> None:
        """Begin before the first token.

        Args:
            request: the request; its sampling has edits.
            ends: tokens that end the answer; held back before ``min_tokens``. Empty for an answer
                held to a form, which says itself when it may end.
        """
        self._sampling = request.sampling
        self._prompt_tokens = len(request.token_ids) - request.resumed_tokens
        self._ends = np.array(sorted(ends), dtype=np.int64)
        self._biased = np.array([t for t, _ in request.sampling.logit_bias], dtype=np.int64)
        self._biases = np.array([b for _, b in request.sampling.logit_bias], dtype=np.float32)
        self._known = 0
        self._place: dict[int, int] = {}
        self._seen = np.zeros(_FIRST_ROOM, dtype=np.int64)
        self._counts = np.zeros(_FIRST_ROOM, dtype=np.float32)

    def at(self, tokens: Int64Array, length: int) -> RowEdits:
        """Return the edits for the token behind ``tokens[:length]``; O(new tokens).

        ``length`` is never less than before.
        """
        if self._sampling.penalizes:
            self._learn(tokens, length)
        places = len(self._place)
        early = length - self._prompt_tokens < self._sampling.min_tokens
        return RowEdits(
            self._sampling,
            self._biased,
            self._biases,
            self._seen[:places],
            self._counts[:places],
            self._ends if early else _NO_TOKENS,
        )

    def _learn(self, tokens: Int64Array, length: int) -> None:
        start = self._prompt_tokens
        if self._known < start:
            if self._sampling.repetition_penalty != 1.0:
                for token in np.unique(tokens[:start]).tolist():
                    self._place_of(token)
            self._known = start
        for token in tokens[self._known : length].tolist():
            self._counts[self._place_of(token)] += 1.0
        self._known = length

    def _place_of(self, token: int) -> int:
        """Return a token's place in both arrays; a new token gets the next one."""
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._seen):
            self._seen = np.concatenate((self._seen, np.zeros_like(self._seen)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._seen[place] = token
        return place
