"""Erasing a prompt's KV: naming the prompt's blocks, and removing blocks.

Used by compute/node.py. The keys of full blocks follow from the prompt's tokens. The next block
also has tokens of an answer or of a further prompt, hence the prompt's tokens do not give the key:
the block is found among the blocks with remembered tokens (compute/l1/part_index.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tierkv.compute.engine.engine import Engine
from tierkv.compute.l1.part_index import TOKEN_BYTES, scope_of
from tierkv.compute.tiers.chunk_lookup import prompt_chunks
from tierkv.kvcore.block import ROOT_PARENT, Erased, block_keys, coarse_key
from tierkv.kvcore.errors import CacheError, TransportError
from tierkv.kvcore.ids import BlockKey
from tierkv.kvcore.request import GenerateRequest, PromptBlocks


class BlockEraser:
    """Finds and erases blocks through one engine; for the node's event loop."""

    def __init__(self, engine: Engine, *, block_tokens: int, page_bytes: int) -> None:
        """Use an engine; ``page_bytes`` is the size of a page of L1."""
        self._engine = engine
        self._block_tokens = block_tokens
        self._page_bytes = page_bytes

    async def find(self, request: GenerateRequest) -> PromptBlocks:
        """Name the blocks of a prompt."""
        size, ids = self._block_tokens, request.token_ids
        chain = block_keys(request.namespace_key, ids, block_tokens=size)
        rest = b"".join(token.to_bytes(TOKEN_BYTES, "little") for token in ids[len(chain) * size :])
        scope = scope_of(request.namespace_key, chain[-1] if chain else ROOT_PARENT)
        inbox = self._engine.inbox
        here = await asyncio.wrap_future(inbox.call(lambda: self._engine.blocks_after(scope)))
        known = [*here, *self._engine.tiers.known.following(scope)]
        ends = [key for tokens, key in known if tokens.startswith(rest) or rest.startswith(tokens)]
        mine = frozenset(ends)
        chunks = () if request.blend is None else prompt_chunks(request, block_tokens=size)
        return PromptBlocks(
            tuple(chain),
            tuple(dict.fromkeys(ends)),
            tuple(dict.fromkeys(key for _, key in known if key not in mine)),
            tuple(key for chunk in chunks for key in chunk.keys),
        )

    async def erase_pages(self, keys: Sequence[BlockKey]) -> Erased:
        """Erase blocks, and all following blocks, from L1."""
        self._engine.tiers.known.forget(keys)
        pages = await asyncio.wrap_future(self._engine.inbox.call(lambda: self._engine.erase(keys)))
        return Erased(page_blocks=pages, page_bytes=pages * self._page_bytes)

    async def erase_pool(self, keys: Sequence[BlockKey]) -> tuple[Erased, tuple[str, ...]]:
        """Erase blocks, at all codec levels, from the connected pool nodes.

        Returns:
            the removed copies, and the names of the nodes that were asked.

        Raises:
            TransportError: a node failed; copies may be left there.
        """
        finder = self._engine.tiers.finder
        nodes = [*finder.nodes, *([] if finder.archive is None else [finder.archive])]
        both = [*keys, *map(coarse_key, keys)]
        answers = await asyncio.gather(
            *(asyncio.to_thread(node.erase, both) for node in nodes), return_exceptions=True
        )
        erased = Erased()
        for node, answer in zip(nodes, answers, strict=True):
            if isinstance(answer, CacheError):
                raise TransportError(f"pool node {node.node_id} did not erase all: {answer}")
            if isinstance(answer, BaseException):
                raise answer
            erased += answer
        return erased, tuple(node.node_id for node in nodes if node is not finder.archive)
