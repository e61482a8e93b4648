"""A model with a taste that a classifier can learn from vectors, and rows to judge."""

from __future__ import annotations

import math
from dataclasses import dataclass
from hashlib import blake2b

from tests.fix_sql import InstantGenerator, user_prompt
from tierkv.dbfront.contracts import EncodedAhead, PreparedCall, TextCall, TextEvent
from tierkv.kvcore.errors import FeatureNotSupportedError, RowLevelError

JUDGED = 1_000
"""Rows of table ``judged``: texts ``row 0`` to ``row 999``, and one NULL."""

TABLE = (
    "CREATE TABLE judged (id INTEGER, body TEXT);"
    f"INSERT INTO judged SELECT i, 'row ' || i FROM generate_series(0, {JUDGED - 1}) s(i);"
    "INSERT INTO judged VALUES (-1, NULL);"
)


def taste(text: str, salt: str = "") -> float:
    """Return a text's place on a line from -1 to 1, by chance but always the same."""
    digest = blake2b(f"{salt}|{text}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") / (1 << 31) - 1


@dataclass
class TasteGenerator(InstantGenerator):
    """Chooses a label by a text's place on a line; the vector of the text tells the place.

    Attributes:
        blur: half the width of the border between labels, where the answer is by chance.
        blind: True: vectors tell nothing.
        refuses_vectors: True: the model has no vectors.
        unembedded: a text that has no vector.
        constant: True: every text gets the first label.
    """

    blur: float = 0.0
    blind: bool = False
    refuses_vectors: bool = False
    unembedded: str = ""
    constant: bool = False

    async def prepare(self, call: TextCall, ahead: EncodedAhead | None = None) -> PreparedCall:
        if call.embed and self.refuses_vectors:
            raise FeatureNotSupportedError("model tiny provides no embeddings: none")
        if call.embed and call.prompt == self.unembedded:
            raise RowLevelError("this text has no vector")
        return await super().prepare(call, ahead)

    def _read_out(self, prepared: PreparedCall) -> TextEvent:
        call = prepared.call
        if call.embed:
            place = taste(call.prompt or "", "blind" if self.blind else "")
            other = math.sqrt(1 - place * place)
            return TextEvent(embedding=(place, other / 2, other * math.sqrt(3) / 2))
        if not call.labels:
            return super()._read_out(prepared)
        text = user_prompt(call).partition("\n")[0]
        place = taste(text)
        if abs(place) < self.blur:
            place = taste(text, "blurred")
        first = self.constant or place < 0
        # The second label, or no: the labels of a filter are two spellings of yes and of no.
        number = 0 if first else len(call.labels) // 2
        odds = [0.0] * len(call.labels)
        odds[number] = 1.0
        return TextEvent(call.labels[number], label_probabilities=tuple(odds))

    def asked(self) -> tuple[int, int]:
        """Return how many questions and how many vectors were asked for."""
        vectors = sum(call.embed for call in self.calls)
        return len(self.calls) - vectors, vectors
