"""A distributed memory pool for KV blocks, for programs that use no other part of TierKV.

``Pool.connect("10.0.0.1:7401,10.0.0.2:7401")`` gives put, get, get_ranges, exists, pin and stats by
key; dmp/client/async_pool.py has the same methods as coroutines. The pool is a cache: a node that
is down, full or damaged causes a miss or a refused put, never an exception. Only the caller's own
errors raise.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, Self

from tierkv.dmp.client.node_link import NodeLink
from tierkv.dmp.client.pins import RENEW_S, Holder, Pins
from tierkv.dmp.client.reads import PoolReads
from tierkv.dmp.client.ring import Ring, reach_nodes
from tierkv.dmp.client.values import (
    Key,
    PoolStats,
    PutNotes,
    Value,
    note_each,
    parse_addresses,
    to_block_key,
    to_bytes_view,
    to_put,
    to_transport,
)
from tierkv.dmp.client.writes import OpenPut, OpenPuts
from tierkv.dmp.transport.connection import Peer
from tierkv.dmp.transport.select import PathOptions
from tierkv.dmp.transport.shm import ShmPoolNode
from tierkv.kvcore.clock import Clock, SystemClock
from tierkv.kvcore.ids import BlockKey, NodeId
from tierkv.kvwire.credentials import ClusterToken, TlsFiles, client_context

KEEP_INTERVAL_S: Final = 1.0
"""Interval between attempts to reach nodes that are down."""


class Pool(PoolReads):
    """A client of one or several DMP nodes; thread-safe, used as a context manager.

    Each key ranks the nodes by rendezvous hashing. A put goes to the first node in the ranking that
    accepts the value. A get (PoolReads) asks the first node, then the rest. Clients with the same
    list of nodes agree without a directory.
    """

    def __init__(self, ring: Ring, clock: Clock) -> None:
        super().__init__(ring)
        self._clock = clock
        self._pins = Pins(ring.seek)
        self._open_puts = OpenPuts(partial(ring.offer, near=True), clock)
        self._keeper = threading.Thread(target=self._keep, name="pool-keeper", daemon=True)
        self._keeper.start()

    @classmethod
    def connect(
        cls,
        addresses: str | Sequence[str],
        *,
        token: ClusterToken = "",
        transport: str = "auto",
        tls: TlsFiles | None = None,
        rdma_devices: Sequence[str] = (),
        connect_timeout_s: float = 1.0,
        op_timeout_s: float = 5.0,
        moves: bool = False,
    ) -> Self:
        """Reach the nodes and choose a path to each.

        Silent nodes are used as soon as they answer; at least one node must answer now.

        Args:
            addresses: ``host:port`` of every node, in a list or separated by commas.
            token: the cluster token, if the nodes require a token.
            transport: ``auto``, ``shm``, ``rdma`` or ``tcp``.
            tls: certificate files, for nodes that speak TLS.
            rdma_devices: this machine's RDMA devices to use; empty means all.
            connect_timeout_s: timeout for connecting to one node.
            op_timeout_s: longest silence inside one operation.
            moves: this client moves values between nodes: a busy node serves all others first.

        Raises:
            ConfigError: an address, the transport or a certificate file can't be used.
            AuthenticationError: a node requires another token.
            NoNodeError: no node answers; the message gives the reason for each node.
        """
        options = PathOptions(to_transport(transport), tuple(rdma_devices), tls)
        if tls is not None:
            client_context(tls)  # Later, an unusable file would look like a dead node.
        peers = [
            Peer(NodeId(""), address, token, connect_timeout_s, op_timeout_s, tls=tls, moves=moves)
            for address in parse_addresses(addresses)
        ]
        return cls(reach_nodes(peers, options), SystemClock())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Release pinned blocks, abort open puts and close all connections.

        Stored values stay in the pool.
        """
        self._closing.set()
        self._keeper.join()
        self._open_puts.close()
        self._pins.close()
        self._ring.close()

    # Put

    def put(self, key: Key, value: Value, *, range_bytes: int | None = None) -> bool:
        """Store a value under a key, unless the key exists already.

        Keys name content: a second put of a key keeps the first value and also returns True.

        Args:
            key: any str or bytes; 16 bytes are taken as a block key, anything else is hashed.
            value: a C-contiguous buffer, which must not change until the call returns.
            range_bytes: cut the value into ranges of this size (a layer each), for separate reads
                later.

        Returns:
            True if the value is in the pool now; False if no node has room or no node answers.

        Raises:
            ValueError: the value is empty, larger than limits.MAX_SLOT_BYTES, not a whole number of
                ranges, or has more than limits.MAX_LAYERS ranges.
        """
        return self.put_many([(key, value)], range_bytes=range_bytes)[0]

    def put_many(
        self,
        items: Mapping[Key, Value] | Iterable[tuple[Key, Value]],
        *,
        range_bytes: int | None = None,
        notes: Sequence[PutNotes] | None = None,
    ) -> list[bool]:
        """Store several values, in one round trip per node; one result each, in order.

        Args:
            items: keys and values; of equal keys the first counts.
            range_bytes: as for ``put``.
            notes: facts about each value, if the values are blocks of KV.

        If the client has named its host, blocks of KV and the values of ``open_puts`` go to nodes
        of this host first.
        """
        pairs = items.items() if isinstance(items, Mapping) else items
        named = [(to_block_key(key), to_bytes_view(value)) for key, value in pairs]
        values = dict(reversed(named))
        known = zip(named, note_each(notes, len(named)), strict=True)
        about = dict(reversed([(key, note) for (key, _), note in known]))
        puts = {
            key: to_put(key, value.nbytes, range_bytes, about[key]) for key, value in values.items()
        }
        done: set[BlockKey] = set()

        def store(link: NodeLink, keys: list[BlockKey]) -> set[BlockKey]:
            answers = link.put([puts[key] for key in keys], [values[key] for key in keys])
            stored = {key for key, answer in zip(keys, answers, strict=True) if answer}
            done.update(stored)
            return stored

        self._check_open()
        self._ring.offer(list(puts), store, near=notes is not None)
        with self._lock:
            self._counters.stored += len(done)
            self._counters.refused += len(puts) - len(done)
        return [key in done for key, _ in named]

    def open_puts(
        self,
        items: Sequence[tuple[Key, int, int]],
        *,
        notes: Sequence[PutNotes] | None = None,
        deadline_s: float = 30.0,
    ) -> list[OpenPut | None]:
        """Reserve values to be written range by range, in one round trip per node.

        A value is invisible before ``seal_puts``. A put without seal or abort is aborted by
        ``close``, or by the node at the deadline.

        Args:
            items: key, size and range size of each value.
            notes: facts about each value, if the values are blocks of KV.
            deadline_s: how long the node keeps the slots.

        Returns:
            One put each. None if there is nothing to write: the value exists already, an earlier
            item has the same key, or no node has room (then ``stats().refused`` grows).

        Raises:
            ValueError: sizes that don't fit, as for ``put``.
        """
        about = note_each(notes, len(items))
        puts = [
            to_put(to_block_key(key), size, range_bytes, note)
            for (key, size, range_bytes), note in zip(items, about, strict=True)
        ]
        first = {put.key: put for put in reversed(puts)}
        self._check_open()
        opened = self._open_puts.open(list(first.values()), deadline_s=deadline_s)
        with self._lock:
            self._counters.refused += len(first) - len(opened)
        return [opened.pop(put.key, None) for put in puts]

    def write_ranges(self, writes: Sequence[tuple[OpenPut, int, Value]]) -> list[bool]:
        """Write ranges of open puts, in one batch per node.

        Returns:
            True for each written range. A put with a failed range can't be sealed.

        Raises:
            ValueError: the range does not exist or the data has another length; nothing is written.
        """
        self._check_open()
        return self._open_puts.write(writes)

    def seal_puts(self, puts: Sequence[OpenPut]) -> list[bool]:
        """Make wholly written values readable, in one round trip per node; return which are.

        All the puts end here; unreadable values are aborted.
        """
        self._check_open()
        sealed = self._open_puts.seal(puts)
        with self._lock:
            self._counters.stored += sum(sealed)
            self._counters.refused += len(sealed) - sum(sealed)
        return sealed

    def abort_puts(self, puts: Iterable[OpenPut]) -> None:
        """Abort open puts; puts that have ended are ignored."""
        self._check_open()
        self._open_puts.abort(puts)

    # View and pin

    @contextlib.contextmanager
    def view(self, key: Key) -> Iterator[memoryview]:
        """Lend a value read-only: in place if the node is on this host, otherwise as a copy.

        The block is held meanwhile, which costs two short requests to the node, or none if the
        block is pinned. In place, no byte is copied and no checksum is computed. Don't use the view
        after the ``with`` block.

        Raises:
            KeyError: the value is not in the pool.
        """
        name = to_block_key(key)
        self._check_open()
        holder = self._pins.add([name]).get(name)
        if holder is None:
            raise KeyError(key)
        try:
            view = self._view(holder, name)
            if view is None:
                raise KeyError(key)
            with view:
                yield view
        finally:
            self._pins.drop([name])

    def pin(self, key: Key) -> bool:
        """Keep a value from eviction until ``unpin`` or ``close``; False if the value is missing.

        Pins are counted. A pin ends with this process, and when the node restarts.
        """
        return self.pin_many([key])[0]

    def pin_many(self, keys: Iterable[Key]) -> list[bool]:
        """Pin several values, in one round trip per node if the locations are known."""
        named = [to_block_key(key) for key in keys]
        self._check_open()
        pinned = self._pins.add(named)
        return [key in pinned for key in named]

    def unpin(self, key: Key) -> None:
        """Undo one ``pin``.

        Raises:
            KeyError: the value is not pinned.
        """
        if not self.unpin_many([key])[0]:
            raise KeyError(key)

    def unpin_many(self, keys: Iterable[Key]) -> list[bool]:
        """Undo one ``pin`` of each key, in one round trip per node; False for a key without a pin.

        A pin whose block was lost has ended already.
        """
        return self._pins.drop([to_block_key(key) for key in keys])

    def stats(self) -> PoolStats:
        """Return the counters of this client and of every node that answers."""
        self._check_open()
        members = self._ring.members()
        with self._lock:
            c = self._counters
            return PoolStats(
                hits=c.hits,
                misses=c.misses,
                stored=c.stored,
                refused=c.refused,
                pinned=len(self._pins),
                pins_lost=self._pins.lost,
                members=members,
                open_puts=len(self._open_puts),
                misfits=c.misfits,
            )

    # Inside

    def _view(self, holder: Holder, key: BlockKey) -> memoryview | None:
        link, location = holder
        if not isinstance(node := link.opened, ShmPoolNode):
            value = self.get(key)
            return None if value is None else memoryview(value)
        view: memoryview | None = None
        with link.absorb():
            view = node.view_block(location)
        with self._lock:
            self._counters.hits += view is not None
            self._counters.misses += view is None
        return view

    def _keep(self) -> None:
        """Reach nodes that are down, and renew pins; until closed."""
        renew_at = self._clock.now() + RENEW_S
        while not self._closing.wait(KEEP_INTERVAL_S):
            self._ring.reach_again()
            self._open_puts.expire()
            if self._clock.now() >= renew_at:
                renew_at = self._clock.now() + RENEW_S
                self._pins.renew()
