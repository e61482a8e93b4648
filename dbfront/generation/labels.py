"""Labels as tokens, and the search for a model's most likely label.

dbfront/generation/generation.py tokenizes the labels of a call once and caches the spellings,
because a statement asks thousands of prompts for the same labels. The search is pure. The labels'
tokens form a trie, and a question asks for the probabilities of the tokens at one fork. The search
asks the most likely fork first and stops when no open fork can beat the best label.
dbfront/generation/readouts.py sends the questions to the model.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from tierkv.dbfront.contracts import TextCall
from tierkv.dbfront.tokens.tokenizer import TextTokenizer
from tierkv.kvcore import limits
from tierkv.kvcore.errors import UdfArgumentError
from tierkv.kvcore.node import ModelInfo

Spelling = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """The probabilities to ask for.

    Attributes:
        prefix: tokens appended to the prompt.
        token_ids: candidates for the next token.
    """

    prefix: Spelling
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Branch:
    """One continuation of a fork: one token, or any token that ends an answer."""

    token_ids: tuple[int, ...]
    labels: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Fork:
    """Labels with the common prefix ``prefix`` that differ in the next token."""

    prefix: Spelling
    branches: tuple[_Branch, ...]


def needs_end(spellings: Sequence[Spelling]) -> bool:
    """Return True if a label is a prefix of another label; only an end token separates the two."""
    ordered = sorted(spellings)
    return any(b[: len(a)] == a for a, b in itertools.pairwise(ordered))


class LabelWalk:
    """One prompt's search through the labels.

    The probability of a label is the product of its branch's share at each fork: the probability of
    the branch's tokens, relative to all branches of the fork.

    Attributes:
        question: the next question; None once the best label is known.
    """

    def __init__(self, spellings: Sequence[Spelling], end_token_ids: Sequence[int] = ()) -> None:
        """Start at the root.

        Args:
            spellings: tokens of each label; at least one label, no two labels equal.
            end_token_ids: tokens that end an answer; may be empty unless ``needs_end``.
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
        """The most likely label so far; ties go to the first label."""
        return max(range(len(self._log_chances)), key=self._log_chances.__getitem__)

    @property
    def chances(self) -> tuple[float, ...]:
        """Each label's probability; the sum is 1. Labels behind an unasked fork share evenly."""
        chances = [math.exp(chance) for chance in self._log_chances]
        for minus_log_chance, _, branch in self._open:
            for label in branch.labels:
                chances[label] = math.exp(-minus_log_chance) / len(branch.labels)
        total = math.fsum(chances)
        return tuple(chance / total for chance in chances)

    def answer(self, scores: Sequence[float]) -> None:
        """Process the answer to ``question``: log-probabilities of its tokens, in order."""
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
        """Record a branch's probability; the branch is a label, or leads to another fork."""
        if len(branch.labels) == 1:
            self._log_chances[branch.labels[0]] = log_chance
            return
        self._asked += 1
        heapq.heappush(self._open, (-log_chance, self._asked, branch))

    def _go_on(self) -> None:
        """Ask at the most likely fork, if a label behind the fork may beat the best label."""
        self.question = self._fork = None
        if self._open and -self._open[0][0] > self._log_chances[self.best]:
            fork = self._fork = self._fork_of(self._open[0][2].labels)
            asked = dict.fromkeys(token for b in fork.branches for token in b.token_ids)
            self.question = Question(fork.prefix, tuple(asked))

    def _fork_of(self, labels: tuple[int, ...]) -> _Fork:
        """Find the position at which labels with a common prefix diverge."""
        spelled = [self._spellings[label] for label in labels]
        first = min(spelled)
        depth = _common(first, max(spelled))  # The common prefix of min and max is common to all.
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
    """Return the length of the common prefix of two spellings."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _log_sum(logs: Sequence[float]) -> float:
    """Return the log of the sum of exponentials."""
    most = max(logs)
    return most + math.log(math.fsum(math.exp(log - most) for log in logs))


_KEPT = 64

_Key = tuple[str, str, bool, tuple[str, ...]]


class Labels:
    """Cache of spellings by model and labels; used by one event loop."""

    def __init__(self) -> None:
        self._spelled: OrderedDict[_Key, tuple[Spelling, ...]] = OrderedDict()

    async def spellings(
        self, call: TextCall, model: ModelInfo, tokenizer: TextTokenizer
    ) -> tuple[Spelling, ...]:
        """Return the tokens of each label of a call, as continuations of the prompt.

        After a conversation a label is written as the chat template writes answers. After a raw
        prompt a label is written verbatim, including a leading space.

        Raises:
            UdfArgumentError: too many labels, equal labels, or a label without tokens.
        """
        chat = call.messages is not None
        key = (model.folder, model.revision, chat, call.labels)
        if key not in self._spelled:
            check_labels(call.labels)
            if chat:
                spelled = tokenizer.encode_answers([label.strip() for label in call.labels])
            else:
                labels = map(tokenizer.plain_text.mask, call.labels)
                spelled = (await tokenizer.encode_parts(("", *labels)))[1:]
            _check_spellings(call.labels, spelled, model)
            self._spelled[key] = tuple(spelled)
            if len(self._spelled) > _KEPT:
                self._spelled.popitem(last=False)
        self._spelled.move_to_end(key)
        return self._spelled[key]

    async def walk(self, call: TextCall, model: ModelInfo, tokenizer: TextTokenizer) -> LabelWalk:
        """Start one prompt's search through its labels; see ``spellings``."""
        return LabelWalk(await self.spellings(call, model, tokenizer), model.eos_token_ids)


def check_labels(labels: tuple[str, ...]) -> None:
    """Refuse too many labels, equal labels and empty labels.

    Raises:
        UdfArgumentError: names the label and the reason.
    """
    if len(labels) > limits.MAX_LABELS:
        raise UdfArgumentError(
            f"{len(labels)} labels were given, at most {limits.MAX_LABELS} are allowed"
        )
    seen: set[str] = set()
    for label in labels:
        if not label.strip():
            raise UdfArgumentError("a label is empty", hint="Give every label some text.")
        if label in seen:
            raise UdfArgumentError(f"the label {label[:80]!r} is given twice")
        seen.add(label)


def _check_spellings(labels: tuple[str, ...], spellings: list[Spelling], model: ModelInfo) -> None:
    of: dict[Spelling, str] = {}
    for label, spelling in zip(labels, spellings, strict=True):
        if not spelling:
            raise UdfArgumentError(f"the label {label[:80]!r} has no tokens in model {model.name}")
        if spelling in of:
            raise UdfArgumentError(
                f"the labels {of[spelling][:80]!r} and {label[:80]!r} have the same tokens in "
                f"model {model.name}"
            )
        of[spelling] = label
    if not model.eos_token_ids and needs_end(spellings):
        raise UdfArgumentError(
            f"one label begins with another, and model {model.name} has no token that ends an "
            "answer",
            hint="Choose labels that differ earlier.",
        )
