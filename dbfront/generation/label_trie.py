"""Which of several labels a model says, from the chances of single tokens: a best-first walk.

Pure. The labels' tokens form a trie; a question asks for the chances of the tokens that go on from
one of its forks. dbfront/generation/readouts.py puts the questions to a model, likeliest fork
first, until no fork that is left can beat the best label.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

Spelling = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """Which chances are asked for.

    Attributes:
        prefix: tokens behind the prompt.
        token_ids: the tokens that may come next.
    """

    prefix: Spelling
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Branch:
    """What a fork goes on with: one token, or any of those that end an answer."""

    token_ids: tuple[int, ...]
    labels: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Fork:
    """Labels that begin with ``prefix`` and go on differently there."""

    prefix: Spelling
    branches: tuple[_Branch, ...]


def needs_end(spellings: Sequence[Spelling]) -> bool:
    """Whether a label is the beginning of another, so that only an end tells them apart."""
    ordered = sorted(spellings)
    return any(b[: len(a)] == a for a, b in itertools.pairwise(ordered))


class LabelWalk:
    """One prompt's walk through the labels.

    The chance of a label is the product over its forks of its branch's share there: the chance of
    the branch's tokens, relative to all branches of the fork.

    Attributes:
        question: what to ask next; None when the best label is known.
    """

    def __init__(self, spellings: Sequence[Spelling], end_token_ids: Sequence[int] = ()) -> None:
        """Begin at the root.

        Args:
            spellings: each label's tokens, at least one; all different.
            end_token_ids: what ends an answer; may be empty unless ``needs_end``.
        """
        assert spellings and all(spellings) and len(set(spellings)) == len(spellings)
        self._spellings = tuple(spellings)
        self._ends = tuple(end_token_ids)
        self._log_chances = [-math.inf] * len(self._spellings)
        self._open: list[tuple[float, int, _Branch]] = []
        self._asked = 0
        self.question: Question | None = None
        self._fork: _Fork | None = None
        self._reach(_Branch((), tuple(range(len(self._spellings)))), 0.0)
        self._go_on()

    @property
    def best(self) -> int:
        """The likeliest label as far as it is known; the first of equals."""
        return max(range(len(self._log_chances)), key=self._log_chances.__getitem__)

    @property
    def chances(self) -> tuple[float, ...]:
        """Each label's chance; they add up to 1. Labels behind one unasked fork share evenly."""
        chances = [math.exp(chance) for chance in self._log_chances]
        for minus_log_chance, _, branch in self._open:
            for label in branch.labels:
                chances[label] = math.exp(-minus_log_chance) / len(branch.labels)
        total = math.fsum(chances)
        return tuple(chance / total for chance in chances)

    def answer(self, scores: Sequence[float]) -> None:
        """Take the answer to ``question``: log-probabilities of its tokens, in its order."""
        assert self.question is not None and self._fork is not None
        parent, _, _ = heapq.heappop(self._open)
        of_token = dict(zip(self.question.token_ids, scores, strict=True))
        branches = self._fork.branches
        weights = [_log_sum([of_token[token] for token in b.token_ids]) for b in branches]
        total = _log_sum(weights)
        for branch, weight in zip(branches, weights, strict=True):
            self._reach(branch, weight - total - parent)
        self._go_on()

    def _reach(self, branch: _Branch, log_chance: float) -> None:
        """Take note of a branch's chance: it is a label, or leads to another fork."""
        if len(branch.labels) == 1:
            self._log_chances[branch.labels[0]] = log_chance
            return
        self._asked += 1
        heapq.heappush(self._open, (-log_chance, self._asked, branch))

    def _go_on(self) -> None:
        """Ask at the likeliest fork, if something behind it may beat the best label."""
        self.question = self._fork = None
        if self._open and -self._open[0][0] > self._log_chances[self.best]:
            fork = self._fork = self._fork_of(self._open[0][2].labels)
            asked = dict.fromkeys(token for b in fork.branches for token in b.token_ids)
            self.question = Question(fork.prefix, tuple(asked))

    def _fork_of(self, labels: tuple[int, ...]) -> _Fork:
        """Find where labels with a common beginning go different ways."""
        spelled = [self._spellings[label] for label in labels]
        first = min(spelled)
        depth = _common(first, max(spelled))  # What these two share, all between them share.
        ended = [label for label in labels if len(self._spellings[label]) == depth]
        going: dict[int, list[int]] = {}
        for label in labels:
            if len(self._spellings[label]) > depth:
                going.setdefault(self._spellings[label][depth], []).append(label)
        branches = [_Branch((token,), tuple(some)) for token, some in going.items()]
        if ended:
            assert self._ends, "a label begins another, and nothing ends an answer"
            branches.append(_Branch(self._ends, tuple(ended)))
        return _Fork(first[:depth], tuple(branches))


def _common(one: Spelling, other: Spelling) -> int:
    """Return how many leading tokens two spellings share."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _log_sum(logs: Sequence[float]) -> float:
    """Return the log of the sum of exponentials."""
    most = max(logs)
    return most + math.log(math.fsum(math.exp(log - most) for log in logs))
