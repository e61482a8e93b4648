"""An answer in the answer cache, and the contract of stores for answers.

Two classes implement AnswerStore: dbfront/answer_cache/answer_file.py in an SQLite file, and
dbfront/answer_cache/answer_database.py in PostgreSQL, for several fronts.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from tierkv.dbfront.answer_cache.answer_key import PromptMark
from tierkv.dbfront.contracts import TextAnswer
from tierkv.kvcore.request import FinishReason, Usage

_OVERHEAD_BYTES: Final = 400
"""Memory of an answer besides its text and its numbers."""
_NUMBER_BYTES: Final = 32

KEPT_BETWEEN_PRUNES: Final = 2_000
"""Answers that a store takes before it looks at its limits again."""


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """A complete answer, and the work that it took.

    Attributes:
        text: see TextAnswer, like all fields but the last two.
        made_s: Unix time of the answer.
        marks: of the prompt, to find the answer when the prompt is forgotten.
    """

    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    label_probabilities: tuple[float, ...] = ()
    embedding: tuple[float, ...] = ()
    made_s: float = 0.0
    marks: bytes = b""

    @classmethod
    def of(cls, answer: TextAnswer, now_s: float, marks: bytes = b"") -> KeptAnswer:
        """Return what is kept of an answer."""
        return cls(
            answer.text,
            answer.finish_reason,
            answer.usage.prompt_tokens,
            answer.usage.completion_tokens,
            answer.label_probabilities,
            answer.embedding,
            now_s,
            marks,
        )

    @property
    def usage(self) -> Usage:
        """Tokens of the prompt and of the answer, without hits."""
        return Usage(self.prompt_tokens, self.completion_tokens)

    @property
    def memory_bytes(self) -> int:
        """Memory that the answer takes, estimated from above."""
        numbers = len(self.label_probabilities) + len(self.embedding)
        return _OVERHEAD_BYTES + 4 * len(self.text) + _NUMBER_BYTES * numbers + len(self.marks)

    def to_json(self) -> str:
        """Return the answer as a JSON array; numbers keep all their bits."""
        return json.dumps(
            [
                self.text,
                self.finish_reason.value,
                self.prompt_tokens,
                self.completion_tokens,
                self.label_probabilities,
                self.embedding,
            ]
        )

    @classmethod
    def from_json(cls, body: str, made_s: float, marks: bytes = b"") -> KeptAnswer:
        """Return the answer of ``to_json``.

        Raises:
            ValueError: the text is no such array.
        """
        try:
            text, reason, prompt, completion, probabilities, embedding = json.loads(body)
            return cls(
                text,
                FinishReason(reason),
                int(prompt),
                int(completion),
                tuple(probabilities),
                tuple(embedding),
                made_s,
                marks,
            )
        except TypeError as error:
            raise ValueError("not an answer") from error


def read_rows(rows: Iterable[tuple[bytes, str, float, bytes | None]]) -> dict[bytes, KeptAnswer]:
    """Return answers by key from rows (key, JSON, Unix time, marks).

    Unreadable answers are left out, and so are answers of older releases, which have no marks: in
    memory nothing would find them when their prompt is forgotten.
    """
    found = {}
    for key, body, made_s, marks in rows:
        if marks is None:
            continue
        try:
            found[bytes(key)] = KeptAnswer.from_json(body, made_s, bytes(marks))
        except ValueError:
            continue
    return found


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """What a store may keep.

    Attributes:
        most_bytes: size of all answers; the least recently used are deleted above it.
        keep_s: age at which an answer is deleted.
    """

    most_bytes: int
    keep_s: float

    def surplus(self, total_bytes: int) -> int:
        """Return the bytes to delete: a tenth of the limit is then free, so deletions are rare."""
        if total_bytes <= self.most_bytes:
            return 0
        return total_bytes - self.most_bytes * 9 // 10


class StoreLostError(Exception):
    """The store does not work at present; calls go on without the store."""


class AnswerStore(Protocol):
    """Lasting answers by key.

    1. ``find`` returns the stored answers among the keys, of any age that is kept.
    2. ``keep`` stores answers, and when others were last used; both are durable on return. An
       answer with a known key replaces the earlier one.
    3. ``keep`` now and then enforces the limits, and deletes the least recently used answers first.
    4. Methods may be called from any thread and wait for the disk or the network. StoreLostError
       says why a store does not work; later calls try again.
    5. Several stores may have the same place open, also in different processes.
    6. ``forget`` deletes the answers with any of some marks, and all answers without marks, and
       returns their keys. Their bytes are gone from an SQLite file on return.
    """

    @property
    def place(self) -> str:
        """Return the name of the place for people, without a password."""
        ...

    def find(self, keys: Iterable[bytes]) -> dict[bytes, KeptAnswer]: ...

    def keep(
        self, answers: Mapping[bytes, KeptAnswer], used: Mapping[bytes, float], now_s: float
    ) -> None: ...

    def forget(self, marks: Sequence[PromptMark]) -> set[bytes]: ...

    def close(self) -> None: ...


class RecentAnswers:
    """Answers by key, in order of use, within a number of bytes.

    Attributes:
        most_bytes: memory of all answers together.
        used_bytes: memory in use.
        evicted: answers that left because the memory was used.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.used_bytes = 0
        self.evicted = 0
        self._answers: OrderedDict[bytes, KeptAnswer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def find(self, key: bytes, oldest_s: float) -> KeptAnswer | None:
        """Return an answer and mark it as used; None if it is unknown or was made too early.

        Args:
            key: key of the answer.
            oldest_s: earliest Unix time of an answer that serves.
        """
        answer = self._answers.get(key)
        if answer is None or answer.made_s < oldest_s:
            return None
        self._answers.move_to_end(key)
        return answer

    def put(self, key: bytes, answer: KeptAnswer) -> None:
        """Keep an answer as the most recently used; an answer beyond all memory is not kept."""
        self.drop(key)
        if answer.memory_bytes > self.most_bytes:
            return
        self._answers[key] = answer
        self.used_bytes += answer.memory_bytes
        while self.used_bytes > self.most_bytes:
            _, oldest = self._answers.popitem(last=False)
            self.used_bytes -= oldest.memory_bytes
            self.evicted += 1

    def forget(self, marks: Sequence[PromptMark]) -> set[bytes]:
        """Remove the answers of forgotten prompts; return their keys."""
        gone = {
            key
            for key, answer in self._answers.items()
            if any(mark.is_in(answer.marks) for mark in marks)
        }
        for key in gone:
            self.drop(key)
        return gone

    def drop(self, key: bytes) -> None:
        """Remove an answer; nothing happens if it is unknown."""
        answer = self._answers.pop(key, None)
        if answer is not None:
            self.used_bytes -= answer.memory_bytes
