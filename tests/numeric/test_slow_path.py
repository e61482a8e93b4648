"""Never slower than no cache: a path that gets slow is left, probed, and taken again; same tokens.

What is asserted are decisions and counts, not times: the line is so slow, then so fast, that only
one decision is right.
"""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch")

from tests.fix_blend import some_tokens  # noqa: E402
from tests.fix_model import answer, make_request, running_node  # noqa: E402
from tests.fix_pool import MemoryPoolNode  # noqa: E402
from tierkv.compute.config import LoadPolicy  # noqa: E402
from tierkv.compute.node import ComputeNode  # noqa: E402
from tierkv.compute.tiers.load_log import LoadRecord  # noqa: E402

PROMPT = some_tokens(480)
SLOW_READ_S = 0.5
"""Long enough that not even the smallest load is worth its wait, however slow steps are."""
SEEN_AFTER = 4
"""Answers within which a change of the path is seen, at most; the first one pays for it."""
TRIED_AGAIN_AFTER = 60


class ChangingLine(MemoryPoolNode):
    """A pool on another host; each read takes ``read_s`` more.

    Attributes:
        read_s: what the line adds.
        loaded_bytes: bytes read so far.
    """

    def __init__(self) -> None:
        super().__init__("pool", host="there")
        self.read_s = 0.0
        self.loaded_bytes = 0
        self._never = threading.Event()

    def read_ranges(self, reads):
        self._never.wait(self.read_s)
        self.loaded_bytes += sum(len(read.destination) for read in reads)
        super().read_ranges(reads)


async def ask(node: ComputeNode, want: list[int]) -> tuple[LoadRecord, int]:
    """Answer the prompt with empty pages; returns the decision, and tokens loaded."""
    await node.drop_cache()
    tokens, last = await answer(node, make_request(PROMPT))
    assert tokens == want
    assert last.usage is not None
    return list(node.load_decisions())[-1], last.usage.hit_tokens.l3


async def test_a_path_that_got_slow_is_left_and_taken_again_when_it_is_fast() -> None:
    torch.set_num_threads(1)
    line = ChangingLine()
    async with running_node(line, load_policy=LoadPolicy.AUTO) as node:
        for length in (30, 200, 470):
            await answer(node, make_request(some_tokens(length), use_cache=False))
        want, _ = await answer(node, make_request(PROMPT))
        assert await node.flush()
        fast = [await ask(node, want) for _ in range(SEEN_AFTER)]
        assert fast[-1][0].kind in ("load", "part")
        assert fast[-1][1] > 0
        fast_rate = node.report().load.l3_bytes_per_s

        line.read_s = SLOW_READ_S
        for _ in range(SEEN_AFTER):
            await ask(node, want)
        before = line.loaded_bytes
        slow = [await ask(node, want) for _ in range(6)]
        assert {record.kind for record, _ in slow} == {"compute"}
        assert [hit_tokens for _, hit_tokens in slow] == [0] * len(slow)
        probed_bytes = line.loaded_bytes - before
        block_bytes = node.model.layout.stored_bytes
        assert probed_bytes < len(slow) * len(PROMPT) // 8 * block_bytes / 2
        assert node.report().load.l3_bytes_per_s < fast_rate / 4

        line.read_s = 0.0
        for _ in range(TRIED_AGAIN_AFTER):
            record, hit_tokens = await ask(node, want)
            if record.kind != "compute":
                break
        assert hit_tokens > 0
