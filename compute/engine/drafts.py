"""The engine's guesses: which decodes get some, and what became of them.

Used by the engine only, in its thread. Guesses take what a step has left: nothing that is known
waits for them, and they fill pages that a sequence has, so that they never take one from others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tierkv.compute.batching.batch_plan import Chunk
from tierkv.compute.batching.sequence import Sequence as EngineSequence
from tierkv.compute.engine.speculation import NgramIndex, Pace, verified

ROWS_PER_STEP = 8
"""Tokens that cost about as much to compute as a step costs for one (CPU; bench.decoding)."""

_LEAST_GENERATED = 2
"""Answers of one token, such as labels, are not worth an index of their prompt."""


@dataclass(frozen=True, slots=True)
class GuessStats:
    """Counts since the start.

    Attributes:
        decoded_tokens: tokens that were chosen, all but the first of each request.
        guessed_tokens: guesses that were checked.
        right_tokens: those that were what the model chose.
    """

    decoded_tokens: int = 0
    guessed_tokens: int = 0
    right_tokens: int = 0


@dataclass(slots=True)
class _Guesser:
    pace: Pace
    index: NgramIndex = field(default_factory=NgramIndex)


class Drafts:
    """Guesses for greedy requests.

    Attributes:
        stats: what was guessed; replaced as a whole.
    """

    def __init__(self, most: int, *, max_batch_tokens: int) -> None:
        """Make one without sequences.

        Args:
            most: tokens to guess at a time; 0 switches guessing off.
            max_batch_tokens: the step's budget, which guesses share.
        """
        self.stats = GuessStats()
        self._most = most
        self._max_batch_tokens = max_batch_tokens
        self._guessers: dict[int, _Guesser] = {}

    def add_to(self, chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
        """Return a step's chunks with guesses behind those that decode."""
        if not self._most or not any(_may_guess(chunk) for chunk in chunks):
            return tuple(chunks)
        budget = self._max_batch_tokens - sum(chunk.count for chunk in chunks)
        least_share = (len(chunks) - 0.5) / ROWS_PER_STEP
        drafted = []
        for chunk in chunks:
            draft = self._guess(chunk, budget, least_share) if _may_guess(chunk) else ()
            budget -= len(draft)
            drafted.append(replace(chunk, draft=draft) if draft else chunk)
        return tuple(drafted)

    def _guess(self, chunk: Chunk, budget: int, least_share: float) -> tuple[int, ...]:
        seq = chunk.seq
        guesser = self._guessers.get(seq.seq_id)
        if guesser is None:
            guesser = self._guessers[seq.seq_id] = _Guesser(Pace(self._most))
        most = min(guesser.pace.next_guess(least_share), budget, _room(seq))
        return guesser.index.guess(seq.tokens, seq.length, most) if most > 0 else ()

    def checked(self, chunk: Chunk, chosen: Sequence[int | None]) -> tuple[int, ...]:
        """Return the tokens that follow, of those that were chosen in all rows of a chunk."""
        tokens = verified(chunk.draft, chosen)
        guesser = self._guessers.get(chunk.seq.seq_id)
        right = max(0, len(tokens) - 1) if chunk.draft else 0
        if guesser is not None and chunk.draft:
            guesser.pace.checked(len(chunk.draft), right)
        elif guesser is not None:
            guesser.pace.passed(len(tokens))
        if chunk.seq.generated:
            old, guessed = self.stats, len(chunk.draft)
            self.stats = GuessStats(
                old.decoded_tokens + len(tokens),
                old.guessed_tokens + guessed,
                old.right_tokens + right,
            )
        return tokens

    def forget(self, seq_id: int) -> None:
        """Drop a sequence that ended."""
        self._guessers.pop(seq_id, None)


def _may_guess(chunk: Chunk) -> bool:
    """Whether a chunk is the decode of a sequence whose tokens depend on nothing but its logits.

    An answer that is held to a form is not: what may be chosen is known one token at a time.
    """
    seq = chunk.seq
    decodes = chunk.samples and chunk.count == 1 and not chunk.loading
    greedy = seq.request.sampling.temperature == 0.0 and not seq.request.handoff
    return decodes and greedy and seq.form is None and seq.generated >= _LEAST_GENERATED


def _room(seq: EngineSequence) -> int:
    """Guesses that fit into its pages, and before the token that must be its last."""
    return min(seq.num_pages * seq.block_tokens, seq.max_length - 1) - seq.length
