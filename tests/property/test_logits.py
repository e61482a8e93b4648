"""Logits equal transformers' whatever is computed together and whatever is reused.

Prompts share heads; each starts at its own time and takes some of the blocks that are there then,
either the page itself or its bytes in another page, layer by layer, as a load from the pool does.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fix_logits import BLOCK, CASES, Pair, close

torch.set_num_threads(1)
HEAD = random.Random(11).choices(range(128), k=40)


@pytest.fixture(scope="module", params=["llama3-rope", "mistral", "qwen2-tied", "qwen3"])
def pair(request, tmp_path_factory) -> Iterator[Pair]:
    yield Pair(CASES[request.param], tmp_path_factory.mktemp(request.param), pages=129)


@dataclass
class Row:
    """A prompt on its way; ``moved`` says for each block whether its bytes are copied."""

    ids: list[int]
    reuse_blocks: int
    moved: list[bool]
    table: list[int] = field(default_factory=list)
    done: int = -1


class Desk:
    """Pages and who may reuse them."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.free = list(range(128, 0, -1))
        self.known: dict[tuple[int, ...], int] = {}

    def start(self, row: Row) -> None:
        """Take what is known of the prompt, as much as the row wants, and pages for the rest."""
        usable = min(row.reuse_blocks, (len(row.ids) - 1) // BLOCK)
        for block in range(usable):
            page = self.known.get(tuple(row.ids[: (block + 1) * BLOCK]))
            if page is None:
                break
            row.table.append(self.copy(page) if row.moved[block] else page)
        row.done = len(row.table) * BLOCK
        while len(row.table) * BLOCK < len(row.ids):
            row.table.append(self.free.pop())

    def copy(self, page: int) -> int:
        other = self.free.pop()
        for layer in range(self.pair.arch.layers):
            window = self.pair.pages.window(layer, [other])
            window.ranges[0][:] = self.pair.pages.read_ranges(layer, [page])[0]
            window.commit(1)
        return other

    def step(self, chunks: list[tuple[Row, int]]) -> None:
        got = self.pair.step([(r.ids, r.done, n, np.array(r.table)) for r, n in chunks])
        for index, (row, count) in enumerate(chunks):
            row.done += count
            close(got[index], self.pair.reference(row.ids[: row.done])[-1])
            for block in range(row.done // BLOCK):
                self.known.setdefault(tuple(row.ids[: (block + 1) * BLOCK]), row.table[block])


ROWS = st.builds(
    lambda head, tail, reuse, moved: Row(HEAD[:head] + tail, reuse, moved),
    st.sampled_from([8, 16, 23, 40]),
    st.lists(st.integers(0, 127), min_size=1, max_size=18),
    st.integers(0, 5),
    st.lists(st.booleans(), min_size=5, max_size=5),
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(rows=st.lists(ROWS, min_size=1, max_size=5), seed=st.integers(0, 2**32))
def test_any_chunking_mix_and_reuse_gives_the_logits_of_transformers(pair, rows, seed) -> None:
    rng = random.Random(seed)
    desk = Desk(pair)
    while left := [row for row in rows if row.done < len(row.ids)]:
        chunks = []
        for row in left:
            if row.done < 0 and rng.random() < 0.5:
                desk.start(row)
            if row.done >= 0:
                most = len(row.ids) - row.done
                chunks.append((row, min(most, rng.choice([1, 2, 7, 8, 20, 60]))))
        if chunks:
            desk.step(chunks)
