"""One node of a Pool, found by its address and monitored; never the cause of an exception.

Called by dmp/client/pool.py. The first HELLO tells the node's name and segment; then the best path
is opened. Failures are counted. A silent node gets no calls until the pool's keeper thread has
reached the node again; callers never wait for a dead node twice.
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
from tierkv.dmp.transport.connection import Peer, PeerConnection, RefusedError
from tierkv.dmp.transport.control import NodeControl
from tierkv.dmp.transport.select import Ends, PathOptions, open_path, why_no_rdma
from tierkv.dmp.wire.messages import About, Welcome
from tierkv.dmp.wire.range_codec import DescribedBlock
from tierkv.kvcore.block import BlockSpec
from tierkv.kvcore.errors import AuthenticationError, CacheError, TransportError
from tierkv.kvcore.ids import BlockKey, HostId, NodeId

log = logging.getLogger(__name__)
MAX_KNOWN: Final = 65_536
"""Locations of blocks remembered per node; a stale location fails cleanly and is looked up
again."""


class NodeLink:
    """A node by address.

    Attributes:
        peer: how to reach the node, as given: the node id may be empty.
        errors: cache errors by code.
        node: the node over the open path; None until the node has answered once.
        up: whether calls are worth trying.
        reason: why the node is not up.
    """

    def __init__(self, peer: Peer, options: PathOptions) -> None:
        self.peer = peer
        self.errors: Counter[str] = Counter()
        self.node: NodeControl | None = None
        self.up = False
        self.reason = "never reached"
        self._options = options
        self._welcome: Welcome | None = None
        self._about = About()
        self.known: dict[BlockKey, DescribedBlock] = {}
        self._lock = threading.Lock()

    @property
    def node_id(self) -> NodeId:
        """Name of the node; empty until the first answer."""
        return self._welcome.node_id if self._welcome is not None else NodeId("")

    @property
    def host(self) -> HostId:
        """Host that the node reports; empty until the first answer."""
        return self._welcome.host if self._welcome is not None else HostId("")

    @property
    def is_near(self) -> bool:
        """Whether the node is in this client's zone, as far as known."""
        return self.node is None or self.node.other_zone is None

    @property
    def path(self) -> PathInfo:
        """How bytes travel to the node."""
        return PathInfo("none", self.reason) if self.node is None else self.node.path

    def reach(self) -> bool:
        """Say HELLO, and open the path if the node is new or restarted.

        Called by one thread at a time: first the connecting thread, then the keeper.

        Raises:
            AuthenticationError: the node requires another token.
        """
        try:
            welcome, about = greet(self.peer)
        except TransportError as error:
            self._down(error)
            return False
        if self.node is None or (welcome, about) != (self._welcome, self._about):
            self._open(welcome, about)
        self.opened.answered()
        self.up = True
        return True

    def _open(self, welcome: Welcome, about: About) -> None:
        peer = replace(self.peer, node_id=welcome.node_id)
        # Host names may differ or repeat; only the mapping can tell whether memory is shared.
        ends = Ends(
            here=HostId(""),
            there=welcome.host,
            segment_path=welcome.segment_path,
            no_rdma=why_no_rdma(self._options.rdma_devices),
            incarnation=welcome.incarnation,
            zone=about.zone,
        )
        old, self.node = self.node, open_path(peer, ends, self._options)
        self._welcome, self._about = welcome, about
        with self._lock:
            self.known.clear()
        if old is not None:
            old.close()

    def close(self) -> None:
        """Close the path; blocks in the node stay."""
        self.up = False
        self.reason = "closed"
        if self.node is not None:
            self.node.close()

    @contextlib.contextmanager
    def absorb(self) -> Iterator[None]:
        """Count a failure of the node instead of raising; the caller's default result stands."""
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
        self.reason = str(error).strip().removeprefix("at ")  # No name before the first answer.

    # What the pool asks

    def forget(self, key: BlockKey) -> None:
        """Forget a location that turned out wrong."""
        with self._lock:
            self.known.pop(key, None)

    def find(self, keys: Sequence[BlockKey]) -> dict[BlockKey, DescribedBlock]:
        """Look up the locations of blocks; blocks on the node's disk are loaded into memory."""
        found: dict[BlockKey, DescribedBlock] = {}
        with self.absorb():
            found = self._described(keys)
            missing = [key for key in keys if key not in found]
            if missing and any(self.opened.promote(missing)):
                found |= self._described(missing)
        self._remember(found)
        return found

    def describe(self, keys: Sequence[BlockKey]) -> dict[BlockKey, DescribedBlock]:
        """Look up which blocks are in the node's memory now."""
        found: dict[BlockKey, DescribedBlock] = {}
        if keys:
            with self.absorb():
                found = self._described(keys)
        return found

    def _described(self, keys: Sequence[BlockKey]) -> dict[BlockKey, DescribedBlock]:
        blocks = self.opened.describe(keys)
        return {k: block for k, block in zip(keys, blocks, strict=True) if block is not None}

    def put(self, puts: Sequence[BlockSpec], payloads: Sequence[memoryview]) -> list[bool]:
        """Store values; True if the value exists afterwards, whichever client stored it."""
        stored = [False] * len(puts)
        with self.absorb():
            places = self.opened.put(puts, payloads)
            stored = [place is not None for place in places]
            doubtful = [put.key for put, done in zip(puts, stored, strict=True) if not done]
            if doubtful:
                there = self._described(doubtful)
                stored = [s or put.key in there for put, s in zip(puts, stored, strict=True)]
        return stored

    def reserve(self, puts: Sequence[BlockSpec], *, deadline_s: float) -> list[PutGrant | None]:
        """Reserve slots for values; None if no slot is free, or the value exists already."""
        grants: list[PutGrant | None] = [None] * len(puts)
        with self.absorb():
            grants = self.opened.reserve(puts, deadline_s=deadline_s)
        return grants

    @property
    def opened(self) -> NodeControl:
        """The node, over the open path.

        Raises:
            TransportError: the node was never reached.
        """
        if self.node is None:
            raise TransportError(f"{self.peer.address} was never reached")
        return self.node

    def _remember(self, found: dict[BlockKey, DescribedBlock]) -> None:
        with self._lock:
            self.known |= found
            while len(self.known) > MAX_KNOWN:
                self.known.pop(next(iter(self.known)))


Act = Callable[[NodeLink, list[BlockKey]], set[BlockKey]]
"""Runs an action with keys at a node; returns the keys that are done."""


def greet(peer: Peer) -> tuple[Welcome, About]:
    """Say HELLO on a separate connection, and ask about the node.

    Raises:
        AuthenticationError: wrong token.
        TransportError: no TierKV node answers.
    """
    try:
        connection = PeerConnection(peer)
    except RefusedError as error:
        if error.refusal != AuthenticationError.code:
            raise
        raise AuthenticationError(
            f"{peer.address} wants another cluster token",
            hint="Pass token=...; on the command line --config RUN_DIR/cluster.toml of a "
            "`tierkv up`, or TIERKV_CLUSTER_TOKEN=... before it.",
        ) from error
    try:
        return connection.welcome, connection.about()
    finally:
        connection.close()
