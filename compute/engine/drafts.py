"""Speculative decoding without a draft model: guesses from repeated text, and how many were right.

Used by the engine only, in the engine's thread. Answers copied from a prompt (extraction,
rewriting) continue as the prompt did after the same few tokens, and checking several guesses in a
pass costs little more than computing a single token. A guess never changes a token: the token
chosen by the model counts. Guesses use only the rest of a step's budget, and only pages already
held by the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tierkv.compute.batching.batch_plan import Chunk
from tierkv.compute.batching.sequence import Sequence as EngineSequence

Int64Array = NDArray[np.int64]

_SIZES = (3, 2)
"""Numbers of tokens that must agree, the longest first."""
_ID_BITS = 21
"""Larger token ids may collide, which costs a wrong guess."""
_FIRST_GUESS = 4
_CAREFUL_GUESS = 2
_FIRST_PAUSE = 16
_LONGEST_PAUSE = 256
_CROWDED = 0.25
"""If more than this share of guesses must be right to pay off, a sequence's first guesses are
short.
"""
_HOPE = 0.7
"""Share of a sequence's first guesses expected to be right."""


class NgramIndex:
    """The latest end of each run of two and of three tokens in a growing sequence.

    A run counts once another token follows. One dictionary entry per token and size; adding a token
    and looking up are O(1).
    """

    def __init__(self) -> None:
        self._after: tuple[dict[int, int], ...] = tuple({} for _ in _SIZES)
        self._known = 0

    def guess(self, tokens: Int64Array, length: int, most: int) -> tuple[int, ...]:
        """Return up to ``most`` tokens that may follow: those after the latest equal run.

        A copy running into the end of the sequence continues with the copied tokens, because
        repeated text repeats again.

        Args:
            tokens: tokens of the sequence; known tokens never change between calls.
            length: number of known tokens; never less than before.
            most: tokens to guess, at least 1.
        """
        for size, after in zip(_SIZES, self._after, strict=True):
            first = max(self._known, size) - size
            if first + size < length:
                runs = _runs(tokens[first : length - 1], size)
                after.update(zip(runs, range(first + size, length), strict=True))
        self._known = length
        for size, after in zip(_SIZES, self._after, strict=True):
            if length <= size:
                continue
            found = after.get(_runs(tokens[length - size : length], size)[0])
            if found is not None:
                period = length - found
                return tuple(tokens[found + np.arange(most) % period].tolist())
        return ()


def _runs(tokens: Int64Array, size: int) -> list[int]:
    """Name every run of ``size`` tokens by a number."""
    names = tokens[: len(tokens) - size + 1].copy()
    for offset in range(1, size):
        names = (names << _ID_BITS) ^ tokens[offset : len(tokens) - size + 1 + offset]
    listed: list[int] = names.tolist()
    return listed


@dataclass(slots=True)
class Pace:
    """How many tokens to guess for one sequence, learnt from the success of earlier guesses.

    Attributes:
        most: upper bound of a guess.
        guess: size of the next guess.
        share: share of right guesses, weighted towards the latest.
        pause: tokens to wait before the next guess.
        next_pause: length of the next wait; grows while guesses fail.
    """

    most: int
    guess: int = _FIRST_GUESS
    share: float = _HOPE
    pause: int = 0
    next_pause: int = _FIRST_PAUSE

    def next_guess(self, least_share: float) -> int:
        """Return how many tokens to guess now.

        Args:
            least_share: break-even share of right guesses; below this share guesses cost more than
                they spare.
        """
        if self.pause:
            return 0
        if self.share < least_share:
            if least_share <= _HOPE:
                self._wait()
            return 0
        unproven = self.share <= _HOPE and least_share > _CROWDED
        return min(self.guess, self.most, _CAREFUL_GUESS if unproven else self.most)

    def _wait(self) -> None:
        self.pause = self.next_pause
        self.next_pause = min(2 * self.next_pause, _LONGEST_PAUSE)

    def passed(self, tokens: int) -> None:
        """Count tokens computed without a guess."""
        if self.pause and self.pause <= tokens:
            self.share = max(self.share, _HOPE)
        self.pause = max(0, self.pause - tokens)

    def checked(self, guessed: int, right: int) -> None:
        """Learn from a checked guess; a guess that failed entirely starts a wait."""
        self.share += (right / guessed - self.share) / 2
        if right == guessed:
            self.guess, self.next_pause = min(2 * self.guess, self.most), _FIRST_PAUSE
        elif right:
            self.guess = max(_CAREFUL_GUESS, right)
        else:
            self.guess = max(_CAREFUL_GUESS, self.guess // 2)
            self._wait()


def verified(guess: Sequence[int], chosen: Sequence[int | None]) -> tuple[int, ...]:
    """Return the tokens of a decode without guesses; all returned tokens but the last were guessed.

    Args:
        guess: the guessed tokens.
        chosen: the model's choice before each guessed token and after the last; None: logits were
            not finite.
    """
    right = 0
    while right < len(guess) and guess[right] == chosen[right]:
        right += 1
    tokens = [token for token in chosen[: right + 1] if token is not None]
    return tuple(tokens)


ROWS_PER_STEP = 8
"""Computing this many tokens costs about as much as a step costs for one token (CPU;
bench.decoding).
"""

_LEAST_GENERATED = 2
"""Answers of one token, for example labels, are not worth an index of their prompt."""


@dataclass(frozen=True, slots=True)
class GuessStats:
    """Counts since the start.

    Attributes:
        decoded_tokens: chosen tokens, except the first of each request.
        guessed_tokens: checked guesses.
        right_tokens: guesses equal to the model's choice.
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
        stats: counts of guesses; replaced as a whole.
    """

    def __init__(self, most: int, *, max_batch_tokens: int) -> None:
        """Begin without sequences.

        Args:
            most: tokens to guess at a time; 0 switches guessing off.
            max_batch_tokens: the step's budget, shared by guesses.
        """
        self.stats = GuessStats()
        self._most = most
        self._max_batch_tokens = max_batch_tokens
        self._guessers: dict[int, _Guesser] = {}

    def add_to(self, chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
        """Return a step's chunks, with guesses behind decoding chunks."""
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
        """Return the tokens behind a chunk, and learn from the chunk's guess.

        Args:
            chunk: a computed chunk.
            chosen: the model's choice in each row of the chunk.
        """
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
    """Return whether a chunk decodes a sequence and the next token depends on the logits alone.

    An answer held to a form is excluded, because its allowed tokens are known only token by token.
    So are edits of the logits, which depend on the tokens before, and reports about each choice.
    """
    seq = chunk.seq
    decodes = chunk.samples and chunk.count == 1 and not chunk.loading
    sampling = seq.request.sampling
    greedy = sampling.temperature == 0.0 and not seq.request.handoff
    alone = seq.form is None and seq.edits is None and sampling.logprobs is None
    return decodes and greedy and alone and seq.generated >= _LEAST_GENERATED


def _room(seq: EngineSequence) -> int:
    """Return how many guesses fit into the sequence's pages and before the last allowed token."""
    return min(seq.num_pages * seq.block_tokens, seq.max_length - 1) - seq.length
