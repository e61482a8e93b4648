"""The meta servers as a process of the simulation sees them: it asks owners as SeveralMeta does.

metaserver/several_meta.py does this with asyncio; here the same pure cores
(metaserver/block_owners.py) are asked in simulated time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.sim.network import All, Ask, Process, Steps
from tierkv.kvcore.block_event import LeaseId
from tierkv.kvcore.ids import BlockKey, HostId
from tierkv.metaserver.block_owners import BlockOwners, PartAnswer, asked_of, joined
from tierkv.metaserver.client import LocateReply

if TYPE_CHECKING:
    pass

OVERDUE_S = 0.2
Lease = tuple[str, LeaseId]
"""Name of a server, and its own id of a lease."""


@dataclass(frozen=True, slots=True)
class Located:
    """The joined answer, and the leases behind it."""

    reply: LocateReply
    leases: tuple[Lease, ...] = ()


class Directory:
    """The servers of one process.

    Attributes:
        names: all servers, in the order that all processes have.
        owners: of each block.
        usable: whether a server answered last.
    """

    def __init__(self, process: Process, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.owners = BlockOwners(names)
        self.usable = dict.fromkeys(names, True)
        self._process = process

    def ask_all(
        self, question: Callable[[str], Callable[[Any], Any]]
    ) -> Generator[Any, Any, dict[str, Any]]:
        """Ask every server; return the answers of those that answered."""
        answers = yield All(tuple(Ask(name, question(name)) for name in self.names))
        for name, answer in zip(self.names, answers, strict=True):
            self.usable[name] = answer is not None
        return {n: a for n, a in zip(self.names, answers, strict=True) if a is not None}

    def locate(
        self, keys: Sequence[BlockKey], *, reader: HostId | None = None, reserve_s: float = 0.0
    ) -> Steps:
        """Ask the owners, then the second owners of what silent ones know; None without any."""
        table, parts, leases = self.owners.of(keys), list[PartAnswer](), list[Lease]()
        open_rows, heard = list(range(len(keys))), not keys
        for _ in range(self.owners.each):
            usable = [self.usable[name] for name in self.names]
            shares = {
                self.names[number]: [open_rows[row] for row in rows]
                for number, rows in asked_of(table[open_rows], usable).items()
            }
            asks = (
                Ask(
                    name,
                    lambda meta, some=[keys[row] for row in rows]: meta.locate(  # type: ignore[misc]
                        some, reader=reader, reserve_s=reserve_s
                    ),
                    OVERDUE_S,
                )
                for name, rows in shares.items()
            )
            answers = yield All(tuple(asks))
            open_rows = []
            for (name, rows), reply in zip(shares.items(), answers, strict=True):
                self.usable[name] = reply is not None
                if reply is None:
                    open_rows += rows
                    continue
                heard = True
                parts.append(PartAnswer(rows, reply))
                if reply.lease:
                    leases.append((name, reply.lease))
            if not open_rows:
                break
        if not heard:
            return None
        parts += [PartAnswer((row,), LocateReply()) for row in sorted(open_rows)]
        return Located(joined(parts, len(keys)), tuple(leases))


def located_now(
    metas: Sequence[Any], names: Sequence[str], keys: Sequence[BlockKey]
) -> LocateReply:
    """Join what live servers say without a network: for checks at rest."""
    owners = BlockOwners(names).of(keys)
    shares = asked_of(owners, [True] * len(names))
    parts = [
        PartAnswer(rows, metas[number].locate([keys[row] for row in rows]))
        for number, rows in shares.items()
    ]
    return joined(parts, len(keys))
