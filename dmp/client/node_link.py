"""One node of a Pool: found by its address, watched, and never the cause of an exception.

Called by dmp/client/pool.py. The first HELLO tells who answers and where its segment is; then the
best path is opened. What fails is counted; a node that does not answer is left alone until the
pool's keeper has reached it again, so that callers never wait for a dead node twice.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from tierkv.dmp.pool_node import PathInfo, PutGrant
from tierkv.dmp.transfer_plan import Ends
from tierkv.dmp.transport.connection import Peer, PeerConnection, RefusedError
from tierkv.dmp.transport.select import Link, PathOptions, open_link, why_no_rdma
from tierkv.dmp.wire.messages import Welcome
from tierkv.dmp.wire.stored import DescribedBlock
from tierkv.kvcore.block import BlockSpec
from tierkv.kvcore.errors import AuthenticationError, CacheError, TransportError
from tierkv.kvcore.ids import BlockKey, HostId, NodeId

log = logging.getLogger(__name__)
MAX_KNOWN: Final = 65_536
"""Places of blocks remembered per node; a stale one fails cleanly and is asked for again."""


class NodeLink:
    """A node by address.

    Attributes:
        peer: whom to call; its node id is empty until the node has answered once.
        errors: cache errors by code.
        link: the open path; None until the node has answered once.
        up: whether calls are worth trying.
        reason: why not.
    """

    def __init__(self, peer: Peer, options: PathOptions) -> None:
        self.peer = peer
        self.errors: Counter[str] = Counter()
        self.link: Link | None = None
        self.up = False
        self.reason = "never reached"
        self._options = options
        self._welcome: Welcome | None = None
        self.known: dict[BlockKey, DescribedBlock] = {}
        self._lock = threading.Lock()

    @property
    def node_id(self) -> NodeId:
        """Its name; empty until it has answered once."""
        return self._welcome.node_id if self._welcome is not None else NodeId("")

    @property
    def host(self) -> HostId:
        """The host it says it is on; empty until it has answered once."""
        return self._welcome.host if self._welcome is not None else HostId("")

    @property
    def path(self) -> PathInfo:
        """How bytes travel to it."""
        return PathInfo("none", self.reason) if self.link is None else self.link.node.path

    def reach(self) -> bool:
        """Say HELLO, and open the path if the node is new or was started again.

        Called by one thread at a time: the one that connects, then the keeper.

        Raises:
            AuthenticationError: the node wants another token.
        """
        try:
            welcome = greet(self.peer)
        except TransportError as error:
            self._down(error)
            return False
        if self.link is None or welcome != self._welcome:
            self._open(welcome)
        self.opened.control.answered()
        self.up = True
        return True

    def _open(self, welcome: Welcome) -> None:
        peer = replace(self.peer, node_id=welcome.node_id)
        # Host names may differ or repeat; whether memory is shared only the mapping can tell.
        ends = Ends(
            here=HostId(""),
            there=welcome.host,
            segment_path=welcome.segment_path,
            no_rdma=why_no_rdma(self._options.rdma_devices),
            incarnation=welcome.incarnation,
        )
        old, self.link = self.link, open_link(peer, ends, self._options)
        self._welcome = welcome
        with self._lock:
            self.known.clear()
        if old is not None:
            old.node.close()

    def close(self) -> None:
        """Let go of the node; what it holds stays."""
        self.up = False
        self.reason = "closed"
        if self.link is not None:
            self.link.node.close()

    @contextlib.contextmanager
    def absorb(self) -> Iterator[None]:
        """Turn a failure of the node into a count; the caller's default answer stands."""
        try:
            yield
        except CacheError as error:
            self.errors[error.code] += 1
            if isinstance(error, TransportError):
                self._down(error)

    def _down(self, error: TransportError) -> None:
        if self.up:
            log.warning(
                "pool: %s is left alone until it answers again: %s", self.peer.address, error
            )
        self.up = False
        self.reason = str(error).strip().removeprefix("at ")  # It has no name before it answers.

    # What the pool asks

    def forget(self, key: BlockKey) -> None:
        """Forget a place that turned out wrong."""
        with self._lock:
            self.known.pop(key, None)

    def find(self, keys: Sequence[BlockKey]) -> dict[BlockKey, DescribedBlock]:
        """Ask where blocks are now; what rests on the node's disk is brought to its memory."""
        found: dict[BlockKey, DescribedBlock] = {}
        with self.absorb():
            found = self._described(keys)
            missing = [key for key in keys if key not in found]
            if missing and any(self.opened.node.promote(missing)):
                found |= self._described(missing)
        self._remember(found)
        return found

    def describe(self, keys: Sequence[BlockKey]) -> dict[BlockKey, DescribedBlock]:
        """Ask which blocks are in the node's memory now."""
        found: dict[BlockKey, DescribedBlock] = {}
        if keys:
            with self.absorb():
                found = self._described(keys)
        return found

    def _described(self, keys: Sequence[BlockKey]) -> dict[BlockKey, DescribedBlock]:
        blocks = self.opened.control.describe(keys)
        return {k: block for k, block in zip(keys, blocks, strict=True) if block is not None}

    def put(self, puts: Sequence[BlockSpec], payloads: Sequence[memoryview]) -> list[bool]:
        """Store values; True where the value is there afterwards, whoever stored it."""
        stored = [False] * len(puts)
        with self.absorb():
            places = self.opened.node.put(puts, payloads)
            stored = [place is not None for place in places]
            doubtful = [put.key for put, done in zip(puts, stored, strict=True) if not done]
            if doubtful:
                there = self._described(doubtful)
                stored = [s or put.key in there for put, s in zip(puts, stored, strict=True)]
        return stored

    def reserve(self, puts: Sequence[BlockSpec], *, deadline_s: float) -> list[PutGrant | None]:
        """Take slots for values; None where there is none, or the value is there already."""
        grants: list[PutGrant | None] = [None] * len(puts)
        with self.absorb():
            grants = self.opened.node.reserve(puts, deadline_s=deadline_s)
        return grants

    @property
    def opened(self) -> Link:
        """The open path.

        Raises:
            TransportError: the node was never reached.
        """
        if self.link is None:
            raise TransportError(f"{self.peer.address} was never reached")
        return self.link

    def _remember(self, found: dict[BlockKey, DescribedBlock]) -> None:
        with self._lock:
            self.known |= found
            while len(self.known) > MAX_KNOWN:
                self.known.pop(next(iter(self.known)))


Act = Callable[[NodeLink, list[BlockKey]], set[BlockKey]]
"""Does something with some keys at a node; answers those that are done."""


def greet(peer: Peer) -> Welcome:
    """Say HELLO on a connection of its own.

    Raises:
        AuthenticationError: wrong token.
        TransportError: nobody answers, or nobody of ours.
    """
    try:
        connection = PeerConnection(peer)
    except RefusedError as error:
        if error.refusal != AuthenticationError.code:
            raise
        raise AuthenticationError(
            f"{peer.address} wants another cluster token",
            hint="pass token=...; on the command line --config RUN_DIR/cluster.toml of a "
            "`tierkv up`, or TIERKV_CLUSTER_TOKEN=... before it",
        ) from error
    connection.close()
    return connection.welcome
