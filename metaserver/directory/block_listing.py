"""Records of block copies for the admin view.

Called by metaserver/directory/directory.py when a view is read. It reads the ledger and changes
nothing. The requested limit and the number of scanned rows bound its cost.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from tierkv.kvcore.block import BlockSpec, Owner
from tierkv.kvcore.ids import BLOCK_KEY_BYTES, BlockKey
from tierkv.kvcore.location import Tier
from tierkv.metaserver.client import BlockListing, BlockRecord
from tierkv.metaserver.directory.arrays import U8, Ints, distinct
from tierkv.metaserver.directory.block_table import halves
from tierkv.metaserver.directory.copy_table import L1, L2, L4
from tierkv.metaserver.directory.ledger import Ledger
from tierkv.metaserver.directory.node_book import Holder, NodeBook

_ROWS_LOOKED_AT: Final = 1 << 20
"""Only the last rows of a larger table are scanned: a view must not delay locates."""

_TIERS: Final = {L1: Tier.L1, L2: Tier.L2, L4: Tier.L4}


def list_blocks(
    ledger: Ledger, book: NodeBook, limit: int, now: float, leased: tuple[bytes, ...]
) -> BlockListing:
    """Return up to ``limit`` copies, copies of the newest blocks first.

    Args:
        ledger: blocks and copies.
        book: the nodes of the copies.
        limit: largest number of copies.
        now: seconds.
        leased: chains of live leases, to be counted per block.
    """
    blocks = ledger.blocks
    rows = blocks.live_rows(newest=_ROWS_LOOKED_AT)
    rows = rows[np.argsort(-blocks.created[rows], kind="stable")[:limit]]
    copies = ledger.copies.of_heads(blocks.head[rows].astype(np.int64))
    order = np.argsort(copies.at, kind="stable")[:limit]
    at, holders = copies.at[order], copies.holders[order]
    rows = rows[at]
    return BlockListing(
        tuple(
            BlockRecord(
                block=BlockSpec(
                    key,
                    parent,
                    tokens,
                    owner=Owner(
                        ledger.models[model], ledger.tenants[tenant], ledger.sessions[session]
                    ),
                ),
                node_id=holder.info.node_id,
                tier=_TIERS[code & 0xFF].value,
                size_bytes=length or _page_bytes(holder, ledger.models[model]),
                age_s=age_s,
                idle_s=idle_s,
                hits=hits,
                heat=heat,
                leases=leases,
            )
            for key, parent, holder, code, tokens, length, model, tenant, session, age_s, idle_s,
            hits, heat, leases in zip(
                _keys(blocks.hot[rows, :2]),
                _keys(blocks.parents[rows]),
                [book.holder(code >> 8) for code in holders.tolist()],
                holders.tolist(),
                blocks.tokens[rows].tolist(),
                ledger.copies.lengths[copies.numbers[order]].tolist(),
                blocks.models[rows].tolist(),
                blocks.tenants[rows].tolist(),
                blocks.sessions[rows].tolist(),
                _ages(blocks.created[rows], blocks.since_born(now)),
                _ages(blocks.touched[rows], blocks.since_born(now)),
                blocks.uses[rows].tolist(),
                blocks.faded_heat(rows, now).tolist(),
                _times_leased(rows, ledger, leased),
                strict=True,
            )
        ),
        total=len(ledger.copies),
    )  # fmt: skip


def _times_leased(rows: Ints, ledger: Ledger, leased: tuple[bytes, ...]) -> list[int]:
    """Count the live leases that cover each of ``rows``."""
    counts = np.zeros(int(rows.max(initial=0)) + 1, np.int64)
    for chain in leased:
        keys = halves(chain)
        found, _ = ledger.blocks.index.find(keys[:, 0].copy(), keys[:, 1].copy())
        counts[distinct(found[(found != 0) & (found < len(counts))])] += 1
    times: list[int] = counts[rows].tolist()
    return times


def _keys(halved: U8) -> list[BlockKey]:
    raw = np.ascontiguousarray(halved).tobytes()
    step = BLOCK_KEY_BYTES
    return [BlockKey(raw[start : start + step]) for start in range(0, len(raw), step)]


def _ages(moments: NDArray[np.float32], now: float) -> list[float]:
    ages: list[float] = np.maximum(0.0, now - moments.astype(np.float64)).tolist()
    return ages


def _page_bytes(holder: Holder, model: str) -> int:
    """Return the size of a block in L1, whose events carry no size; 0 for unknown models."""
    models = holder.info.models
    return next((m.layout.payload_bytes for m in models if m.name == model), 0)
