"""Tokens of an answer as clients see them, for calls that ask for log-probabilities.

dbfront/tokens/detokenizer.py makes the values, dbfront/http/endpoints/openai.py writes them as
JSON. This module imports nothing: it is part of the contracts inside the front
(dbfront/contracts.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpelledToken:
    """A token that could come at some place of an answer.

    Attributes:
        spelled: bytes of UTF-8; a part of a character if the character has several tokens.
        logprob: natural log of the probability, in the model's own distribution.
    """

    spelled: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class AnswerToken:
    """A token of an answer; both first fields are those of SpelledToken.

    Attributes:
        top: the most likely tokens in the token's place, best first.
        start: characters of the answer before the token.
    """

    spelled: bytes
    logprob: float
    top: tuple[SpelledToken, ...]
    start: int
