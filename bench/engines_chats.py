"""Ten-round chats in turn: every contender gets every prompt, in sequence.

Used by bench.engines. The contenders are asked in turn and in changing order. The results are
compared prompt by prompt, so the noise of a shared machine affects all contenders alike. A chat
continues with the first contender's answers; the number of equal answers is counted.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from bench.engines_client import Answer, ask
from bench.engines_model import FIRST_TOKEN, ModelSize
from bench.engines_servers import MODEL, Contender


@dataclass(frozen=True, slots=True)
class Plan:
    """The conversations.

    Attributes:
        chats: number of chats in turn.
        rounds: rounds of each chat.
        start: tokens of the first prompt.
        turn: tokens a user adds per round.
        answer: tokens of an answer.
        cache: tokens of KV that an engine holds.
        repeats: number of repetitions, with new chats each time.
    """

    chats: int
    rounds: int
    start: int
    turn: int
    answer: int
    cache: int
    repeats: int

    def prompt_tokens(self, number: int) -> int:
        """Return the tokens of a round's prompt; rounds count from 0."""
        return self.start + number * (self.turn + self.answer)

    def phase(self, number: int) -> str:
        """Return ``cold``, ``restart``, or whether all chats fit a cache: ``fits``, ``exceeds``."""
        if number == 0:
            return "cold"
        if number >= self.rounds:
            return "restart"
        history = self.chats * (self.prompt_tokens(number) + self.answer)
        return "fits" if history <= self.cache else "exceeds"

    @property
    def context(self) -> int:
        """Tokens of the longest prompt (after the restart) with the answer."""
        return self.prompt_tokens(self.rounds) + self.answer


@dataclass(frozen=True, slots=True)
class Sample:
    """Answers of all contenders to one prompt."""

    round: int
    prompt_tokens: int
    answers: dict[str, Answer]


@dataclass(slots=True)
class Results:
    """Samples in measured order."""

    plan: Plan
    samples: list[Sample] = field(default_factory=list)

    def of(self, phase: str) -> list[Sample]:
        """Return a phase's samples."""
        return [s for s in self.samples if self.plan.phase(s.round) == phase]


def play(
    contenders: Sequence[Contender],
    size: ModelSize,
    plan: Plan,
    rng: random.Random,
    *,
    restart: bool = True,
) -> Results:
    """Play all chats, then restart every engine, unless told otherwise, and play one more round.

    The last repeat's chats continue after the restart.
    """
    results = Results(plan)
    chats: list[list[int]] = []
    for repeat in range(plan.repeats):
        chats = [_tokens(rng, size, plan.start) for _ in range(plan.chats)]
        for number in range(plan.rounds):
            print(f"  {size.name} chats {repeat + 1}.{number + 1}", file=sys.stderr, flush=True)
            _play_round(contenders, results, chats, number)
            for chat in chats:
                chat += _tokens(rng, size, plan.turn)
    if not restart:
        return results
    all_at_once(contenders, "restart")
    for contender in contenders:
        warm_up(contender, size, plan, rng)
    _play_round(contenders, results, chats, plan.rounds)
    return results


def all_at_once(contenders: Sequence[Contender], what: str) -> None:
    """Start, restart or stop all contenders concurrently, because starting is mostly waiting.

    Raises:
        ServerError: a contender did not come up.
    """
    print(f"  {what} {', '.join(c.name for c in contenders)}", file=sys.stderr, flush=True)
    with ThreadPoolExecutor(len(contenders)) as threads:
        list(threads.map(lambda one: getattr(one, what)(), contenders))


def warm_up(contender: Contender, size: ModelSize, plan: Plan, rng: random.Random) -> None:
    """Trigger the work of a first request with prompts that are not asked again."""
    for _ in range(2):
        ask(contender.port, MODEL, _tokens(rng, size, plan.start), plan.answer)


def _play_round(
    contenders: Sequence[Contender], results: Results, chats: list[list[int]], number: int
) -> None:
    for chat in chats:
        answers = {
            one.name: ask(one.port, MODEL, chat, results.plan.answer)
            for one in _rotated(contenders, len(results.samples))
        }
        results.samples.append(Sample(number, len(chat), answers))
        chat += answers[contenders[0].name].tokens


def _rotated(contenders: Sequence[Contender], by: int) -> Iterator[Contender]:
    for index in range(len(contenders)):
        yield contenders[(index + by) % len(contenders)]


def _tokens(rng: random.Random, size: ModelSize, count: int) -> list[int]:
    return [rng.randrange(FIRST_TOKEN, size.vocabulary) for _ in range(count)]


def median_ms(samples: Sequence[Sample], name: str) -> float:
    """Return the median time to the first token, in milliseconds."""
    return 1e3 * statistics.median(s.answers[name].ttft_s for s in samples)


def median_ratio(samples: Sequence[Sample], name: str, other: str, *, whole: bool = False) -> float:
    """Return the median of one contender's time over another's at the same prompt."""
    return statistics.median(
        _time(s.answers[name], whole) / _time(s.answers[other], whole) for s in samples
    )


def _time(answer: Answer, whole: bool) -> float:
    return answer.total_s if whole else answer.ttft_s


def cached_share(samples: Sequence[Sample], name: str) -> float:
    """Return the share of prompt tokens that were not computed, by the server's own count."""
    cached = sum(s.answers[name].cached_tokens or 0 for s in samples)
    return cached / sum(s.prompt_tokens for s in samples)


def equal_answers(samples: Sequence[Sample], name: str, other: str) -> int:
    """Count the prompts with equal tokens from two contenders."""
    return sum(s.answers[name].tokens == s.answers[other].tokens for s in samples)
