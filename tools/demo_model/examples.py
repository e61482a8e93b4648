"""Converts conversations to training batches.

A conversation is rendered by the chat template and tokenized as one text, exactly as in use. The
batch also contains the guidance, the targets of attention: from a value to its name; from an answer
to the name in its question, to the value in a yes/no question, and to its evidence.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tierkv.compute.demo_model.data import sample_conversation
from tierkv.compute.demo_model.dialogue import LABEL_FIELDS, DialogueTurn, TrainingDialogue
from tierkv.compute.demo_model.phrasings import make_head
from tools.demo_model.tokenizer import ASSISTANT, EOS

Look = tuple[int, int, int, int]


@dataclass(frozen=True)
class Example:
    """One tokenized conversation.

    Attributes:
        ids: The tokens.
        answers: For each token, True if the token belongs to an answer (including the end token).
        looks: Guidance as layer, head, position of the query, position of the key.
        start: Position of the first token of the documents or of the first question.
    """

    ids: list[int]
    answers: list[bool]
    looks: list[Look]
    start: int


@dataclass(frozen=True)
class Batch:
    """Examples with a common prefix.

    Attributes:
        prefix: The common first tokens of all rows.
        rows: The tokens after the prefix, padded.
        answers: Mask of `rows`: tokens of an answer.
        real: Mask of `rows`: tokens without padding.
        looks: Guidance by layer and head, as indices of rows, of query tokens (without the prefix)
            and of key tokens (with the prefix).
    """

    prefix: Tensor
    rows: Tensor
    answers: Tensor
    real: Tensor
    looks: dict[tuple[int, int], Tensor]


class _Places:
    """Finds tokens by character positions."""

    def __init__(self, text: str, offsets: Sequence[tuple[int, int]]) -> None:
        self.text = text
        self.starts = [start for start, _ in offsets]

    def token(self, character: int) -> int:
        return bisect_right(self.starts, character) - 1

    def last(self, word: str, low: int, high: int) -> int | None:
        """Return the last token of the latest occurrence of a word within a range."""
        found = self.text.rfind(word, low, high)
        return None if found < 0 else self.token(found + len(word) - 1)


def _document_spans(text: str, conversation: TrainingDialogue) -> list[tuple[int, int]]:
    spans, position = [], 0
    for note in conversation.documents:
        start = text.index(note.text, position)
        position = start + len(note.text)
        spans.append((start, position))
    return spans


def _document_looks(
    places: _Places, conversation: TrainingDialogue, spans: Sequence[tuple[int, int]]
) -> list[Look]:
    """Guide each value to the latest occurrence of the name before the value."""
    looks = []
    for note, (low, high) in zip(conversation.documents, spans, strict=True):
        for field, words in note.evidence.items():
            found = places.text.find(words, low, high)
            if field == "name" or found < 0 or not note.name:
                continue
            name = places.last(note.name, 0, found)
            if name is None:
                continue
            end = places.token(found + len(words) - 1)
            begin = end if field in LABEL_FIELDS else places.token(max(found - 1, 0))
            looks += [(1, 0, position, name) for position in range(begin, end + 1)]
    return looks


def _turn_looks(
    places: _Places, conversation: TrainingDialogue, spans: Sequence[tuple[int, int]]
) -> list[Look]:
    """Guide each answer to the name in its question and to its evidence."""
    looks, position = [], 0
    for turn in conversation.turns:
        question = places.text.index(turn.question, position)
        position = places.text.index(ASSISTANT, question + len(turn.question))
        answer = places.token(position)
        low, high = spans[turn.document]
        if turn.name:
            name = places.last(turn.name, question, position)
            if name is not None:
                looks.append((2, 0, answer, name))
        found = places.text.find(turn.evidence, low, high)
        if found >= 0:
            copied = turn.answer == turn.evidence
            last = places.token(found + len(turn.evidence) - 1)
            begin = places.token(max(found - 1, 0)) if copied else last
            looks += [(3, 0, answer + k, begin + k) for k in range(last - begin + 1)]
            looks += _comparison_looks(places, turn, (question, answer, last))
    return looks


def _comparison_looks(
    places: _Places, turn: DialogueTurn, where: tuple[int, int, int]
) -> list[Look]:
    """Guide the value in a yes/no question to its evidence; for `no`, to the preceding word.

    The answer is guided to the value in the question, where an earlier layer has stored whether the
    value was found.
    """
    question, answer, evidence = where
    if not turn.asked:
        return []
    asked = places.last(turn.asked, question, question + len(turn.question))
    if asked is None:
        return []
    found = evidence if turn.answer == "yes" else asked - 1
    return [(3, 2, asked, found), (4, 0, answer, asked)]


def encode(
    tokenizer: PreTrainedTokenizerFast, conversations: list[TrainingDialogue]
) -> list[Example]:
    """Tokenize conversations.

    Args:
        tokenizer: The tokenizer with its chat template.
        conversations: The conversations to tokenize.

    Returns:
        One example per conversation.
    """
    texts = [
        str(tokenizer.apply_chat_template(c.messages(), tokenize=False)) for c in conversations
    ]
    encoded = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    begin = tokenizer.convert_tokens_to_ids(ASSISTANT)
    end = tokenizer.convert_tokens_to_ids(EOS)
    found = []
    for text, encoding, conversation in zip(texts, encoded, conversations, strict=True):
        answers, inside = [], False
        for token in encoding.ids:
            answers.append(inside)
            inside = (inside or token == begin) and token != end
        places = _Places(text, encoding.offsets)
        spans = _document_spans(text, conversation)
        looks = [(0, 0, k, k - 1) for k in range(1, len(answers))]
        looks += _document_looks(places, conversation, spans)
        looks += _turn_looks(places, conversation, spans)
        first = min(spans[0][0], text.index(conversation.turns[0].question))
        start = max(1, places.token(first) - 3)
        found.append(Example(encoding.ids, answers, looks, start))
    return found


def collate(examples: Sequence[Example]) -> Batch:
    """Combine examples with a common prefix into one batch."""
    limit = min(example.start for example in examples)
    shared = 1
    while shared < limit and len({example.ids[shared] for example in examples}) == 1:
        shared += 1
    width = max(len(example.ids) for example in examples) - shared
    rows = torch.zeros(len(examples), width, dtype=torch.long)
    answers = torch.zeros(len(examples), width, dtype=torch.bool)
    real = torch.zeros(len(examples), width, dtype=torch.bool)
    found: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for index, example in enumerate(examples):
        size = len(example.ids) - shared
        rows[index, :size] = torch.tensor(example.ids[shared:])
        answers[index, :size] = torch.tensor(example.answers[shared:])
        real[index, :size] = True
        for layer, head, query, key in example.looks:
            if shared <= query < shared + width - 1:
                found.setdefault((layer, head), []).append((index, query - shared, key))
    looks = {where: torch.tensor(part).T for where, part in found.items()}
    return Batch(torch.tensor(examples[0].ids[:shared]), rows, answers, real, looks)


def stream(
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    progress: Callable[[], float],
    tokens: int,
    heads: int = 8,
    group: int = 48,
) -> Iterator[Batch]:
    """Yield training batches without end.

    Args:
        tokenizer: The tokenizer.
        rng: Source of randomness.
        progress: Returns the completed share of the training.
        tokens: Maximum number of tokens of rows in a batch.
        heads: Number of heads (instructions) to draw at a time.
        group: Number of conversations to draw per head.

    Yields:
        Batches in random order.
    """
    while True:
        done = progress()
        batches: list[list[Example]] = []
        for _ in range(heads):
            head = make_head(rng, 0.15 if done < 0.35 else 0.55)
            drawn = [sample_conversation(rng, head, done) for _ in range(group)]
            current: list[Example] = []
            for example in sorted(encode(tokenizer, drawn), key=lambda e: len(e.ids)):
                size = len(example.ids) - min(example.start, 400)
                if current and (len(current) + 1) * size > tokens:
                    batches.append(current)
                    current = []
                current.append(example)
            batches.append(current)
        rng.shuffle(batches)
        yield from (collate(batch) for batch in batches)
