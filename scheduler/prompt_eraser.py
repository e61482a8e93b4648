"""Forgetting a prompt: the prompt's KV leaves every tier on every node, with its bytes overwritten.

Used by the front's generation. Demoting removes copies from the pages of compute nodes only, and
only of blocks in the pool. Prompts that begin alike share blocks. A block is erased only if no
further stored prompt needs the block: from the prompt's last block upwards, as long as all blocks
after a block are erased too. Blocks after the prompt (answers, further turns) are always erased.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tierkv.compute.client import ComputeClient
from tierkv.kvcore.block import Erased
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import CacheError, TransportError
from tierkv.kvcore.ids import BlockKey
from tierkv.kvcore.node import NodeRole
from tierkv.kvcore.request import GenerateRequest, PromptBlocks
from tierkv.metaserver.client import DirectoryNode, MetaClient
from tierkv.scheduler.nodes.cluster_view import ClusterView

_TRIES_FOR_S: Final = 20.0
"""Longest time to wait for a node that starts again."""

_PAUSE_S: Final = 0.3
_MISSED_FOR_S: Final = 60.0
"""A node that is no longer listed is missed for so long."""


@dataclass(frozen=True, slots=True)
class ForgottenPrompt:
    """What is gone.

    Attributes:
        keys: the erased blocks; not all of the blocks need to have been stored.
        shared_blocks: leading blocks of the prompt, kept because a different stored prompt begins
            alike.
        erased: the removed copies.
    """

    keys: tuple[BlockKey, ...]
    shared_blocks: int
    erased: Erased


@dataclass(frozen=True, slots=True)
class DemotedPrompt:
    """Blocks of a prompt that are in no page any more, all blocks of the prompt, and the copies."""

    demoted: int
    blocks: int
    erased: Erased


class PromptEraser:
    """Erases prompts from all nodes."""

    def __init__(
        self,
        view: ClusterView,
        meta: MetaClient | None,
        clock: Clock,
        refresh: Callable[[], Awaitable[None]],
    ) -> None:
        """Use the nodes of a view.

        Args:
            view: the nodes.
            meta: knows the blocks after a block; None: nobody does.
            clock: ends tries.
            refresh: looks at the nodes again.
        """
        self._view = view
        self._meta = meta
        self._clock = clock
        self._refresh = refresh
        self._seen: dict[str, float] = {}

    async def forget(self, request: GenerateRequest, *, block_tokens: int) -> ForgottenPrompt:
        """Erase the KV of a prompt and of all that follows the prompt.

        A request with the same prompt that runs meanwhile may store the KV again. A node that is
        just starting again is waited for.

        Raises:
            TransportError: a node did not answer: copies may be left, and the call may be repeated.
            FeatureNotSupportedError: the model is served by an engine with a private cache.
        """
        give_up_s = self._clock.now() + _TRIES_FOR_S
        while True:
            try:
                return await self._try(request, block_tokens)
            except CacheError:
                if self._clock.now() >= give_up_s:
                    raise
                await asyncio.sleep(_PAUSE_S)
                await self._refresh()

    async def _try(self, request: GenerateRequest, block_tokens: int) -> ForgottenPrompt:
        clients = self._view.compute_clients(request.model)
        if not clients:
            raise TransportError("no compute node answers; its pages can't be erased")
        found = joined(await asyncio.gather(*(c.find_prompt(request) for c in clients)))
        after: Mapping[BlockKey, BlockKey] = {}
        if self._meta is not None and (found.chain or found.ends):
            after = await self._meta.blocks_after((*found.chain, *found.ends))
            # Asked last: a meta server that was just started again knows no blocks of its nodes.
            self._check_listed(await self._meta.list_nodes())
        ends_inside = len(request.token_ids) % block_tokens > 0
        doomed = blocks_to_erase(found, after, ends_inside=ends_inside)
        shared = sum(key not in doomed for key in found.chain)
        keys = tuple(dict.fromkeys((*doomed, *found.chunks)))
        return ForgottenPrompt(keys, shared, await self.erase(clients, keys))

    async def demote(
        self, request: GenerateRequest, pooled: Callable[[], Awaitable[int]]
    ) -> DemotedPrompt:
        """Remove a prompt's KV from the pages of compute nodes, as far as the pool has the KV.

        Args:
            request: the prompt.
            pooled: tells how many leading blocks are in the pool; asked after all saves.

        Raises:
            CacheError: a node or the meta server did not answer.
        """
        clients = self._view.compute_clients(request.model)
        found = joined(await asyncio.gather(*(c.find_prompt(request) for c in clients)))
        after: Mapping[BlockKey, BlockKey] = {}
        if self._meta is not None and found.chain:
            after = await self._meta.blocks_after(found.chain)
        own = blocks_to_erase(found, after, ends_inside=True)
        keys = [key for key in found.chain[: await pooled()] if key in own]
        total = Erased()
        if keys:
            for erased, _ in await asyncio.gather(*(c.erase(keys, pool=False) for c in clients)):
                total += erased
        return DemotedPrompt(len(keys), len(found.chain), total)

    async def drop_pages(self, model: str, keys: Sequence[BlockKey]) -> None:
        """Remove blocks from the pages of compute nodes; copies in the pool stay.

        Raises:
            CacheError: a node did not answer.
        """
        clients = self._view.compute_clients(model)
        await asyncio.gather(*(client.erase(keys, pool=False) for client in clients))

    def _check_listed(self, nodes: Sequence[DirectoryNode]) -> None:
        """Refuse while a compute or pool node is missing that was listed lately.

        Raises:
            TransportError: a node is missing.
        """
        now = self._clock.now()
        infos = [node.info for node in nodes]
        listed = {str(info.node_id) for info in infos if info.models or info.role is NodeRole.DMP}
        known = self._view.node_ids | listed
        self._seen |= dict.fromkeys(known, now)
        self._seen = {name: at for name, at in self._seen.items() if now - at < _MISSED_FOR_S}
        missing = sorted(self._seen.keys() - listed)
        if missing:
            raise TransportError(
                f"{', '.join(missing)} left the cluster less than {_MISSED_FOR_S:g} s ago, and may "
                "have copies"
            )

    async def erase(self, clients: Sequence[ComputeClient], keys: Sequence[BlockKey]) -> Erased:
        """Erase blocks from the pages of compute nodes, then from all pool nodes.

        Raises:
            TransportError: a node did not answer.
        """
        if not keys:
            return Erased()
        answers = await asyncio.gather(*(c.erase(keys, pool=False) for c in clients))
        total = Erased()
        for erased, _ in answers:
            total += erased
        in_pool, asked = await _first_answer(clients, keys)
        missed = self._view.pool_node_ids - set(asked)
        if missed:
            raise TransportError(
                f"pool node {', '.join(sorted(missed))} does not answer: it may still have copies",
                hint="Run it again when the node is back, or remove the node for good.",
            )
        return total + in_pool


async def _first_answer(
    clients: Sequence[ComputeClient], keys: Sequence[BlockKey]
) -> tuple[Erased, tuple[str, ...]]:
    """Have the first compute node that answers erase the blocks of the pool."""
    failure: CacheError | None = None
    for client in clients:
        try:
            return await client.erase(keys, pool=True)
        except CacheError as error:
            failure = error
    assert failure is not None
    raise failure


def joined(parts: Iterable[PromptBlocks]) -> PromptBlocks:
    """Join what several nodes know about one prompt."""
    chain: tuple[BlockKey, ...] = ()
    ends: dict[BlockKey, None] = {}
    others: dict[BlockKey, None] = {}
    chunks: dict[BlockKey, None] = {}
    for part in parts:
        chain = max(chain, part.chain, key=len)
        ends |= dict.fromkeys(part.ends)
        others |= dict.fromkeys(part.others)
        chunks |= dict.fromkeys(part.chunks)
    return PromptBlocks(chain, tuple(ends), tuple(others), tuple(chunks))


def blocks_to_erase(
    found: PromptBlocks, after: Mapping[BlockKey, BlockKey], *, ends_inside: bool
) -> dict[BlockKey, None]:
    """Return the blocks of a prompt and after the prompt, without blocks of further prompts.

    Args:
        found: the blocks of the prompt named by nodes.
        after: the stored blocks after ``found``, each with the preceding block.
        ends_inside: the prompt ends inside a block. A block after the last full block belongs to a
            further prompt if the block is known to begin otherwise. A block of unknown tokens is
            erased, to be safe.

    Returns:
        Keys in no particular order.
    """
    children: dict[BlockKey, set[BlockKey]] = defaultdict(set)
    for key, parent in after.items():
        children[parent].add(key)
    doomed = dict.fromkeys(found.ends)
    if found.chain:
        others = frozenset(found.others) if ends_inside else frozenset()
        doomed |= dict.fromkeys(children[found.chain[-1]] - others)
    below = list(doomed)
    while below:
        new = children[below.pop()] - doomed.keys()
        doomed |= dict.fromkeys(new)
        below += new
    for key in reversed(found.chain):
        if not children[key] <= doomed.keys():
            break
        doomed[key] = None
    return doomed
