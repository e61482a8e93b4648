"""Time to first token over a growing history: cache off, and each tier as the only source of KV.

Called by bench.compute. Each round adds a question and its answer. Each tier below L1 has a
separate pool. The pool starts with the history's blocks and receives the blocks computed in the
tier's rounds, so no tier profits from another. The tokens must equal the tokens with the cache off,
which is measured before and after the tiers, one half of its rounds each. Pools check their blocks
in the background, as in production.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.compute_node import HERE, NAMESPACE, THERE, Timed, ask, make_node, random_tokens
from tierkv.compute.node import ComputeNode
from tierkv.dmp.config import DmpConfig
from tierkv.dmp.node.node import DmpNode
from tierkv.dmp.pool_node import PoolNode, RangeRead, RangeWrite
from tierkv.dmp.server.server import DmpServer
from tierkv.dmp.transport.select import PathOptions, Transport, connect_pool_node
from tierkv.kvcore.block import ROOT_PARENT, BlockSpec, Owner, RangeShape, block_keys
from tierkv.kvcore.block_event import NullReporter
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.ids import HostId, NodeId
from tierkv.storage.l4 import L4Store

TIERS = ("L1", "L2", "L3", "L4")
QUESTION_TOKENS, ANSWER_TOKENS = 48, 16
_DISK_WAIT_S = 120.0


@dataclass(frozen=True, slots=True)
class History:
    """TTFT in seconds by round; ``off`` covers only the rounds measured with the cache off."""

    tokens: int
    off: dict[int, float]
    tiers: dict[str, list[float]]


class Pool:
    """A DMP node in this process with a disk tier; the node can drop its memory."""

    def __init__(self, folder: Path, name: str, host: HostId, capacity_bytes: int) -> None:
        self._config = DmpConfig(
            NodeId(name), host, segment_path=f"/dev/shm/{folder.name}-{name}",
            capacity_bytes=capacity_bytes, demote_above=0.0, remove_on_stop=True,
        )  # fmt: skip
        self._disk = folder / name
        self._open()

    def _open(self) -> None:
        self._node = DmpNode(self._config, NullReporter(), SystemClock(), self._open_disk)
        self._node.start()
        self._server = DmpServer(self._node)
        self._server.start()
        info = self._node.reports.info(data_address=self._server.address)
        far = PathOptions(transport=Transport.TCP)
        options = PathOptions() if self._config.host == HERE else far
        self.client: PoolNode = connect_pool_node(info, host=HERE, options=options)

    def _open_disk(self) -> L4Store:
        return L4Store.open(self._disk, capacity_bytes=4 << 30)

    def close(self) -> None:
        """Stop the node; the disk keeps the blocks copied so far."""
        self.client.close()
        self._server.stop()
        self._node.stop()

    def forget_memory(self) -> None:
        """Wait until all blocks are on disk, then restart with empty memory."""
        deadline_s = time.monotonic() + _DISK_WAIT_S
        table = self._node._state.table
        while table.extents.used_bytes - table.clean.clean_bytes:
            if time.monotonic() > deadline_s:
                raise AssertionError("the disk did not take the blocks in time")
            time.sleep(0.01)
        self.close()
        self._open()


async def measure(history_tokens: int, rounds: int, off_rounds: set[int], seed: int) -> History:
    """Play the conversation once per tier, and several rounds with the cache off."""
    rng = random.Random(seed + history_tokens)
    history = random_tokens(rng, history_tokens)
    questions = [random_tokens(rng, QUESTION_TOKENS) for _ in range(rounds)]
    room = history_tokens + rounds * (QUESTION_TOKENS + ANSWER_TOKENS) + 256
    node = make_node(max(2 * room, 8_192))  # A quarter of the pages may wait for publication.
    await node.start()
    try:
        async with _pools(room * node.model.layout.payload_bytes // 64) as pools:
            node.set_pool_nodes([pools["L2"].client])
            await ask(node, history, 1)
            await node.flush()
            for name in ("L3", "L4"):
                _copy_blocks(node, history, pools["L2"].client, pools[name].client)
            node.set_pool_nodes([])
            answers, tiers = await _play(node, history, questions, "L1", None)
            early = set(sorted(off_rounds)[::2])
            off = await _off(node, history, questions, answers, early)
            for name, pool in pools.items():
                got, tiers_of = await _play(node, history, questions, name, pool)
                if got != answers:
                    raise AssertionError(f"{name}: other tokens than from L1")
                tiers |= tiers_of
            node.set_pool_nodes([])
        off |= await _off(node, history, questions, answers, off_rounds - early)
    finally:
        await node.stop()
    return History(history_tokens, off, tiers)


@asynccontextmanager
async def _pools(capacity_bytes: int) -> AsyncIterator[dict[str, Pool]]:
    # A whole extent is 32 MiB; one more for rounding.
    capacity_bytes += 64 << 20
    with tempfile.TemporaryDirectory(prefix="tierkv-ttft-") as name:
        hosts = {"L2": HERE, "L3": THERE, "L4": HERE}
        pools = {
            tier: Pool(Path(name), tier.lower(), host, capacity_bytes)
            for tier, host in hosts.items()
        }
        try:
            yield pools
        finally:
            for pool in pools.values():
                pool.close()


async def _play(
    node: ComputeNode,
    history: list[int],
    questions: Sequence[list[int]],
    tier: str,
    pool: Pool | None,
) -> tuple[list[tuple[int, ...]], dict[str, list[float]]]:
    prompt, answers, times = list(history), [], []
    for question in questions:
        prompt += question
        if pool is not None:
            if tier == "L4":
                node.set_pool_nodes([])
                await asyncio.to_thread(pool.forget_memory)
            node.set_pool_nodes([pool.client])
            await node.flush()  # Pages that are still being published can't be dropped.
            await node.drop_cache()
        answer = await ask(node, prompt, ANSWER_TOKENS)
        await node.flush()
        _check_source(answer, tier, len(history))
        answers.append(answer.tokens)
        times.append(answer.ttft_s)
        prompt += answer.tokens
    return answers, {tier: times}


def _check_source(answer: Timed, tier: str, history_tokens: int) -> None:
    hits = getattr(answer.usage.hit_tokens, tier.lower())
    if hits < history_tokens // 64 * 64:
        raise AssertionError(f"{tier} gave {hits} of {history_tokens} tokens")


async def _off(
    node: ComputeNode,
    history: list[int],
    questions: Sequence[list[int]],
    answers: Sequence[tuple[int, ...]],
    off_rounds: set[int],
) -> dict[int, float]:
    prompt, off = list(history), {}
    for number, (question, known) in enumerate(zip(questions, answers, strict=True)):
        prompt += question
        if number in off_rounds:
            answer = await ask(node, prompt, ANSWER_TOKENS, use_cache=False)
            if answer.tokens != known:
                raise AssertionError("other tokens than with the cache off")
            off[number] = answer.ttft_s
        prompt += known
    return off


def _copy_blocks(node: ComputeNode, history: list[int], source: PoolNode, target: PoolNode) -> None:
    """Copy the history's blocks to another pool, as if published to the other pool."""
    layout = node.model.layout
    keys = block_keys(NAMESPACE, history, block_tokens=layout.block_tokens)
    for start in range(0, len(keys), 16):
        some = keys[start : start + 16]
        places = [place for place in source.lookup(some) if place is not None]
        if len(places) != len(some):
            raise AssertionError("the history was not published")
        parents = [keys[i - 1] if i else ROOT_PARENT for i in range(start, start + len(some))]
        ranges, owner = (
            RangeShape(layout.stored_layer_bytes, layout.layers),
            Owner("model", "default"),
        )
        puts = [
            BlockSpec(key, parent, layout.block_tokens, ranges, owner)
            for key, parent in zip(some, parents, strict=True)
        ]
        grants = target.reserve(puts)
        granted = [grant for grant in grants if grant is not None]
        buffers = [bytearray(layout.stored_layer_bytes) for _ in some]
        for layer in range(layout.layers):
            source.read_ranges([
                RangeRead(place, layer, memoryview(buffer))
                for place, buffer in zip(places, buffers, strict=True)
            ])  # fmt: skip
            target.write_ranges([
                RangeWrite(grant, layer, memoryview(buffer))
                for grant, buffer in zip(granted, buffers, strict=True)
            ])  # fmt: skip
        target.seal(granted)
