"""Conversations, arrivals, prefill, decoding and loading on one node, for bench.compute_gpu.

Called by bench.compute_gpu. The node is the production node; the pool is a DMP segment on this
host, the memory that a GPU host pins.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench.compute_gpu_limits import Device
from bench.compute_node import HERE, ask
from tierkv.compute import loading
from tierkv.compute.config import ComputeConfig, LoadPolicy, RandomModelSpec
from tierkv.compute.model.architecture import Architecture
from tierkv.compute.model.weights import Weights, assemble
from tierkv.compute.node import ComputeNode
from tierkv.dmp.config import DmpConfig
from tierkv.dmp.node.node import DmpNode
from tierkv.dmp.pool_node import PoolNode
from tierkv.dmp.server.server import DmpServer
from tierkv.dmp.transport.select import connect_pool_node
from tierkv.kvcore.block_event import NullReporter
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.ids import Incarnation, NodeId


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model."""

    architecture: str
    vocab: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    def config(self) -> dict[str, Any]:
        """Return a ``config.json`` with room for long prompts."""
        return {
            "architectures": [self.architecture],
            "model_type": "qwen2" if self.architecture.startswith("Qwen2") else "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": 262_144,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": False,
        }


@dataclass(frozen=True, slots=True)
class Conversation:
    """A history, then rounds that add a question each and are answered with 16 tokens.

    Attributes:
        off_rounds: number of rounds that are also measured with the cache off.
        from_host: whether the device drops its pages before each round.
    """

    history_tokens: int
    question_tokens: int
    rounds: int
    off_rounds: int = 3
    from_host: bool = False


@dataclass(frozen=True, slots=True)
class Times:
    """TTFT in seconds by round."""

    off_s: list[float]
    on_s: list[float]


class Rig:
    """A node on the device with a pool on this host."""

    def __init__(self, node: ComputeNode, pool: PoolNode, device: Device, seed: int) -> None:
        self._node, self._pool, self._device = node, pool, device
        self._rng = random.Random(seed)
        self._vocab = node._vocab_tokens

    @classmethod
    @asynccontextmanager
    async def open(
        cls, shape: Shape, device: Device, *, seed: int, pool_bytes: int
    ) -> AsyncIterator[Rig]:
        """Start node and pool; the node's pages take five sixths of the pool's memory."""
        config = ComputeConfig(
            NodeId("compute"), HERE,
            random_model=RandomModelSpec(shape.config(), seed=seed), device=device.name,
            l1_bytes=pool_bytes // 6 * 5,
            max_batch_tokens=1_024 if device.tiny else 8_192,
            load_policy=LoadPolicy.ALWAYS, load_timeout_s=300.0,
        )  # fmt: skip
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            dmp = DmpNode(
                DmpConfig(
                    NodeId("dmp"), HERE, segment_path=f"{folder}/segment",
                    capacity_bytes=pool_bytes,
                ),
                NullReporter(), SystemClock(),
            )  # fmt: skip
            dmp.start()
            server = DmpServer(dmp)
            server.start()
            pool = connect_pool_node(dmp.reports.info(data_address=server.address), host=HERE)
            with mock.patch.object(loading, "random_weights", _weights_on_device):
                node = ComputeNode(config, incarnation=Incarnation(1))
            await node.start()
            try:
                yield cls(node, pool, device, seed)
            finally:
                await node.stop()
                node.set_pool_nodes([])
                pool.close()
                server.stop()
                dmp.stop()

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(10, self._vocab) for _ in range(count)]

    async def converse(self, talk: Conversation) -> Times:
        """Play a conversation with the cache, and several of its rounds without the cache."""
        self._node.set_pool_nodes([self._pool] if talk.from_host else [])
        times = Times([], [])
        prompt = self._tokens(talk.history_tokens)
        await ask(self._node, prompt, 1)
        for number in range(talk.rounds):
            prompt = prompt + self._tokens(talk.question_tokens)
            if talk.from_host:
                await self._node.flush()
                await self._node.drop_cache()
            answer = await ask(self._node, prompt, 16)
            if answer.usage.hit_tokens.total < talk.history_tokens - 64:
                raise AssertionError(f"only {answer.usage.hit_tokens} of {len(prompt)} tokens hit")
            times.on_s.append(answer.ttft_s)
            if number < talk.off_rounds:
                off = await ask(self._node, prompt, 16, use_cache=False)
                times.off_s.append(off.ttft_s)
            prompt += answer.tokens
        self._node.set_pool_nodes([])
        await self._node.flush()
        await self._node.drop_cache()
        return times

    async def arrivals(
        self, tokens: int, rounds: int, *, per_s: float, use_cache: bool, rng: random.Random
    ) -> list[float]:
        """Return TTFTs of conversations; ``per_s`` requests arrive per second, at random times."""
        histories = [self._tokens(tokens) for _ in range(4)]
        loop, waits = asyncio.get_running_loop(), []
        at = loop.time()
        for _ in range(rounds):
            for history in histories:
                at += rng.expovariate(per_s)
                history += self._tokens(100)
                await asyncio.sleep(max(0.0, at - loop.time()))
                question = list(history)
                waits.append(
                    asyncio.ensure_future(ask(self._node, question, 16, use_cache=use_cache))
                )
        answers = await asyncio.gather(*waits)
        await self._node.drop_cache()
        return [answer.ttft_s for answer in answers]

    async def prefill_flops_per_s(self, tokens: int) -> float:
        """Return operations of the dense layers per second while a prompt is computed."""
        seconds = []
        for _ in range(4):
            answer = await ask(self._node, self._tokens(tokens), 1, use_cache=False)
            seconds.append(answer.ttft_s)
        return 2 * self._dense_parameters * tokens / statistics.median(seconds[1:])

    async def decode(self, batch: int, *, prompt_tokens: int) -> tuple[float, float]:
        """Return tokens per second, and the bytes of weights and KV read per second."""
        new_tokens = 8 if self._device.tiny else 128
        prompts = [self._tokens(prompt_tokens) for _ in range(batch)]
        await asyncio.gather(*(ask(self._node, prompt, 2) for prompt in prompts))
        answers = await asyncio.gather(*(ask(self._node, prompt, new_tokens) for prompt in prompts))
        seconds = max(answer.decode_s for answer in answers) / (new_tokens - 1)
        layout = self._node.model.layout
        weights = self._dense_parameters * layout.dtype.itemsize
        kv = batch * (prompt_tokens + new_tokens / 2) * layout.payload_bytes / layout.block_tokens
        await self._node.drop_cache()
        return batch / seconds, (weights + kv) / seconds

    async def loading_bytes_per_s(self, tokens: int) -> float:
        """Return bytes of KV per second from the host's pool until the first new token."""
        self._node.set_pool_nodes([self._pool])
        prompt = self._tokens(tokens)
        await ask(self._node, prompt, 1)
        rates = []
        for _ in range(3):
            await self._node.flush()
            await self._node.drop_cache()
            answer = await ask(self._node, [*prompt, *self._tokens(8)], 1)
            layout = self._node.model.layout
            size = answer.usage.hit_tokens.l2 / layout.block_tokens * layout.payload_bytes
            rates.append(size / answer.ttft_s)
        self._node.set_pool_nodes([])
        return statistics.median(rates)

    @property
    def _dense_parameters(self) -> int:
        """Count the parameters multiplied per token: all except an untied embedding table."""
        arch = self._node._engine._model.arch
        return self._node.model.parameters - (0 if arch.tied else arch.vocab_tokens * arch.hidden)


def _weights_on_device(
    arch: Architecture, *, seed: int, dtype: torch.dtype, device: torch.device
) -> Weights:
    """Draw weights on the device: on the CPU, eight billion numbers take a minute."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def source(name: str, shape: tuple[int, ...]) -> Tensor:
        if "norm" in name:
            return torch.ones(shape, dtype=dtype, device=device)
        drawn = torch.randn(shape, generator=generator, dtype=dtype, device=device)
        return drawn.mul_(shape[-1] ** -0.5)

    return assemble(arch, source)
