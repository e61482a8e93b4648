"""The answers of the answer cache that are in memory: the most recently used ones.

Pure. dbfront/answer_cache/answer_cache.py looks here first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from tierkv.dbfront.answer_cache.answer_key import PromptMark
from tierkv.dbfront.answer_cache.kept_answer import KeptAnswer


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
