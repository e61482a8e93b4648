"""Questions about several notes, with the notes as reusable chunks.

The prompts come from the demo model's held-out data: a question per prompt, with the notes between
an instruction and the question. The parts are tokenised separately, as the front tokenises
documents.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tierkv.compute.demo_model.data import make_chats
from tierkv.compute.demo_model.dialogue import TrainingDialogue
from tierkv.dbfront.contracts import Message
from tierkv.dbfront.tokens.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class BlendPrompt:
    """One question.

    Attributes:
        task: one of ``tierkv.compute.demo_model.data.CHAT_TASKS``.
        token_ids: the whole prompt.
        chunks: positions of the notes, half-open.
        answer: the right answer.
    """

    task: str
    token_ids: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...]
    answer: str


def make_prompts(
    tokenizer: TextTokenizer, tasks: Sequence[str], count: int, seed: int
) -> list[BlendPrompt]:
    """Return ``count`` prompts of each task."""
    rng = random.Random(f"blend {seed}")
    found: dict[str, list[BlendPrompt]] = {task: [] for task in tasks}
    while any(len(prompts) < count for prompts in found.values()):
        chat = make_chats(1, rng.randrange(2**32), turns=1)[0]
        task = chat.turns[0].task
        if len(found.get(task, range(count))) < count:
            found[task].append(_prompt(tokenizer, chat))
    return [prompt for task in tasks for prompt in found[task]]


def _prompt(tokenizer: TextTokenizer, chat: TrainingDialogue) -> BlendPrompt:
    messages = [Message(m["role"], m["content"]) for m in chat.messages()[:-1]]
    text = tokenizer.template.render(messages)
    pieces = asyncio.run(tokenizer.encode_parts(_split(text, [n.text for n in chat.documents])))
    ends = [sum(map(len, pieces[: i + 1])) for i in range(len(pieces))]
    chunks = tuple(pairwise(ends[:-1]))
    ids = tuple(token for piece in pieces for token in piece)
    return BlendPrompt(chat.turns[0].task, ids, chunks, chat.turns[0].answer)


def _split(text: str, notes: Sequence[str]) -> list[str]:
    """Split a text into head, notes (each with the space after the note) and the rest."""
    starts, at = [], 0
    for note in notes:
        at = text.index(note, at)
        starts.append(at)
        at += len(note)
    bounds = [0, *starts, at, len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]
