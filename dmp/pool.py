"""A distributed memory pool for KV blocks, for programs that want nothing else of TierKV.

``Pool.connect("10.0.0.1:7401,10.0.0.2:7401")`` gives put, get, get_ranges, exists, pin and stats by
key; dmp/async_pool.py has the same as coroutines. The pool is a cache: a node that is down, full or
damaged is a miss or a refused put, never an exception; only what the caller did wrong raises.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from typing import Final, Self

from dmp.node_link import NodeLink
from dmp.pool_arguments import (
    Key,
    Value,
    covering,
    parse_addresses,
    to_block_key,
    to_bytes_view,
    to_put,
    to_transport,
    to_writable_view,
)
from dmp.pool_node import PoolNodeStats
from dmp.pool_pins import RENEW_S, Holder, Pins
from dmp.pool_reads import Place, Want, fetch, landing, whole
from dmp.pool_ring import Act, Ring, reach_nodes
from dmp.pool_stats import PoolCounters, PoolMember, PoolStats
from dmp.stored import StoredBlock
from dmp.tls import TlsFiles, client_context
from dmp.transport.connection import Peer
from dmp.transport.select import PathOptions
from dmp.transport.shm import ShmPoolNode
from kvcore.clock import Clock, SystemClock
from kvcore.ids import BlockKey, NodeId

KEEP_INTERVAL_S: Final = 1.0
"""How often nodes that are down are tried again."""


class Pool:
    """A client of one or several DMP nodes; thread-safe, used as a context manager.

    Each key ranks the nodes by rendezvous hashing. A put goes to the first that takes it, a get
    asks them in the same order, so clients that list the same nodes agree without a directory.
    """

    def __init__(self, ring: Ring, clock: Clock) -> None:
        self._ring = ring
        self._clock = clock
        self._counters = PoolCounters()
        self._lock = threading.Lock()
        self._pins = Pins(ring.find)
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="pool-keeper", daemon=True)
        self._keeper.start()

    @classmethod
    def connect(
        cls,
        addresses: str | Sequence[str],
        *,
        token: str = "",
        transport: str = "auto",
        tls: TlsFiles | None = None,
        rdma_devices: Sequence[str] = (),
        connect_timeout_s: float = 1.0,
        op_timeout_s: float = 5.0,
    ) -> Self:
        """Reach the nodes and choose a path to each.

        Nodes that don't answer now are used as soon as they do; one must.

        Args:
            addresses: ``host:port`` of every node, in a list or separated by commas.
            token: the cluster token, if the nodes ask for one.
            transport: ``auto``, ``shm``, ``rdma`` or ``tcp``.
            tls: certificate files, for nodes that speak TLS.
            rdma_devices: this machine's RDMA devices to use; empty means all.
            connect_timeout_s: for connecting to one node.
            op_timeout_s: longest silence inside one operation.

        Raises:
            ConfigError: an address, the transport or a certificate file can't be used.
            AuthenticationError: a node wants another token.
            NoNodeError: no node answers; the message says why, node by node.
        """
        options = PathOptions(to_transport(transport), tuple(rdma_devices), tls)
        if tls is not None:
            client_context(tls)  # Later an unusable file would only look like a dead node.
        peers = [
            Peer(NodeId(""), address, token, connect_timeout_s, op_timeout_s, tls=tls)
            for address in parse_addresses(addresses)
        ]
        return cls(reach_nodes(peers, options), SystemClock())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Let pinned blocks go and close all connections; what was put stays in the pool."""
        self._closing.set()
        self._keeper.join()
        self._pins.close()
        self._ring.close()

    # Put

    def put(self, key: Key, value: Value, *, range_bytes: int | None = None) -> bool:
        """Store a value under a key, unless the key is there already.

        Keys name content: a second put of a key keeps the first value and is True as well.

        Args:
            key: any str or bytes; 16 bytes are taken as a block key, anything else is hashed.
            value: a C-contiguous buffer, which must not change until the call returns.
            range_bytes: cut it in ranges of this size (a layer each), to be read alone later.

        Returns:
            Whether the value is in the pool now; False when no node has room for it or answers.

        Raises:
            ValueError: the value is empty, larger than limits.MAX_SLOT_BYTES, or not a whole number
                of ranges, at most limits.MAX_LAYERS of them.
        """
        return self.put_many([(key, value)], range_bytes=range_bytes)[0]

    def put_many(
        self,
        items: Mapping[Key, Value] | Iterable[tuple[Key, Value]],
        *,
        range_bytes: int | None = None,
    ) -> list[bool]:
        """Store several values, in one round trip per node; one answer each, in order."""
        pairs = items.items() if isinstance(items, Mapping) else items
        named = [(to_block_key(key), to_bytes_view(value)) for key, value in pairs]
        values = dict(reversed(named))  # Of equal keys the first counts.
        puts = {key: to_put(key, value, range_bytes) for key, value in values.items()}
        done: set[BlockKey] = set()

        def store(link: NodeLink, keys: list[BlockKey]) -> set[BlockKey]:
            answers = link.put([puts[key] for key in keys], [values[key] for key in keys])
            stored = {key for key, answer in zip(keys, answers, strict=True) if answer}
            done.update(stored)
            return stored

        self._offer(list(puts), store)
        with self._lock:
            self._counters.stored += len(done)
            self._counters.refused += len(puts) - len(done)
        return [key in done for key, _ in named]

    # Get

    def get(self, key: Key) -> bytes | None:
        """Return a value whose checksums are right, or None."""
        return self.get_many([key])[0]

    def get_many(self, keys: Iterable[Key]) -> list[bytes | None]:
        """Return several values or Nones, in order; one batch per node."""
        named = [to_block_key(key) for key in keys]
        buffers: dict[BlockKey, BytesIO] = {}

        def place_for(key: BlockKey) -> Place:
            def place(block: StoredBlock) -> Sequence[tuple[int, memoryview]]:
                buffers[key] = landing(block.size_bytes)
                return whole(buffers[key].getbuffer(), block)

            return place

        got = self._fetch([Want(key, place_for(key)) for key in dict.fromkeys(named)])
        return [buffers[key].getvalue() if key in got else None for key in named]

    def get_into(self, key: Key, buffer: bytearray | memoryview) -> int | None:
        """Read a value straight into memory of the caller's; the fastest way to copy it.

        Returns:
            The value's size, or None: then the buffer may hold garbage.

        Raises:
            ValueError: the buffer is smaller than the value, read-only or not contiguous.
        """
        return self.get_many_into([(key, buffer)])[0]

    def get_many_into(
        self, items: Sequence[tuple[Key, bytearray | memoryview]]
    ) -> list[int | None]:
        """Read several values straight into memory of the caller's, one batch per node.

        Returns:
            Each value's size, or None: then its buffer may hold garbage.

        Raises:
            ValueError: a buffer is unfit, as for ``get_into``, or a key is named twice.
        """
        targets = {to_block_key(key): to_writable_view(buffer) for key, buffer in items}
        if len(targets) != len(items):
            raise ValueError("a key is named twice")
        sizes: dict[BlockKey, int] = {}

        def place_for(key: BlockKey, target: memoryview) -> Place:
            def place(block: StoredBlock) -> Sequence[tuple[int, memoryview]]:
                sizes[key] = block.size_bytes
                if block.size_bytes > target.nbytes:
                    raise ValueError(
                        f"a value of {block.size_bytes} bytes, a buffer of {target.nbytes}"
                    )
                return whole(target, block)

            return place

        got = self._fetch([Want(key, place_for(key, view)) for key, view in targets.items()])
        return [sizes[key] if key in got else None for key in targets]

    def get_ranges(self, key: Key, indices: Sequence[int]) -> list[bytes] | None:
        """Return some ranges of a value, for example a few layers, or None.

        Raises:
            ValueError: the value has no such range.
        """
        parts: list[BytesIO] = []

        def place(block: StoredBlock) -> Sequence[tuple[int, memoryview]]:
            if not all(0 <= index < block.range_count for index in indices):
                raise ValueError(f"the value has {block.range_count} ranges, not all of {indices}")
            parts[:] = [landing(block.range_bytes) for _ in indices]
            return [(index, p.getbuffer()) for index, p in zip(indices, parts, strict=True)]

        got = self._fetch([Want(to_block_key(key), place)])
        return [part.getvalue() for part in parts] if got else None

    def get_span(self, key: Key, offset: int, length: int) -> bytes | None:
        """Return bytes [offset, offset + length) of a value, or None.

        Reads, and checks, the ranges that hold them; a value put without ``range_bytes`` is one.

        Raises:
            ValueError: the span is empty or leaves the value.
        """
        buffer, start = bytearray(), 0

        def place(block: StoredBlock) -> Sequence[tuple[int, memoryview]]:
            nonlocal buffer, start
            size = block.range_bytes
            wanted = covering(offset, length, range_bytes=size, size_bytes=block.size_bytes)
            buffer, start = bytearray(size * len(wanted)), offset - wanted.start * size
            view = memoryview(buffer)
            return [(index, view[i * size : (i + 1) * size]) for i, index in enumerate(wanted)]

        got = self._fetch([Want(to_block_key(key), place)])
        return bytes(memoryview(buffer)[start : start + length]) if got else None

    @contextlib.contextmanager
    def view(self, key: Key) -> Iterator[memoryview]:
        """Lend a value read-only: in place where the node is on this host, else as a copy.

        The block is held meanwhile, which costs two short questions to the node; none if it is
        pinned. In place nothing is copied and no checksum is computed. Don't use the view after
        the ``with`` block.

        Raises:
            KeyError: the value is not in the pool.
        """
        name = to_block_key(key)
        self._check_open()
        holder = self._pins.add(name)
        if holder is None:
            raise KeyError(key)
        try:
            view = self._view(holder, name)
            if view is None:
                raise KeyError(key)
            with view:
                yield view
        finally:
            # A pin whose block was lost is gone already.
            with contextlib.suppress(KeyError):
                self._pins.drop(name)

    # Ask

    def exists(self, key: Key) -> bool:
        """Whether a value is in the pool; one that rests on disk is brought to memory."""
        return self.exists_many([key])[0]

    def exists_many(self, keys: Iterable[Key]) -> list[bool]:
        """Whether each value is in the pool."""
        named = [to_block_key(key) for key in keys]
        there: set[BlockKey] = set()

        def ask(link: NodeLink, wanted: list[BlockKey]) -> set[BlockKey]:
            found = set(link.find(wanted))
            there.update(found)
            return found

        self._offer(list(dict.fromkeys(named)), ask)
        return [key in there for key in named]

    def pin(self, key: Key) -> bool:
        """Keep a value from eviction until ``unpin`` or ``close``; False if it is not there.

        Pins are counted. They end with this process, and when their node is started again.
        """
        self._check_open()
        return self._pins.add(to_block_key(key)) is not None

    def unpin(self, key: Key) -> None:
        """Undo one ``pin``.

        Raises:
            KeyError: it is not pinned.
        """
        try:
            self._pins.drop(to_block_key(key))
        except KeyError:
            raise KeyError(key) from None

    def register(self, memory: memoryview) -> None:
        """Hint that ``get_into`` and ``put`` will often use this memory (RDMA registers it)."""
        for link in self._ring.links:
            with link.absorb():
                link.opened.node.register(memory)

    def stats(self) -> PoolStats:
        """Return the counters of this client and of every node that answers."""
        self._check_open()
        members = tuple(_member(link) for link in self._ring.links)
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
            )

    # Inside

    def _offer(self, keys: Sequence[BlockKey], act: Act) -> None:
        self._check_open()
        self._ring.offer(keys, act)

    def _fetch(self, wants: Sequence[Want]) -> set[BlockKey]:
        by_key = {want.key: want for want in wants}
        got: set[BlockKey] = set()

        def read(link: NodeLink, keys: list[BlockKey]) -> set[BlockKey]:
            read_now = fetch(link, [by_key[key] for key in keys])
            got.update(read_now)
            return read_now

        self._offer(list(by_key), read)
        with self._lock:
            self._counters.hits += len(got)
            self._counters.misses += len(by_key) - len(got)
        return got

    def _view(self, holder: Holder, key: BlockKey) -> memoryview | None:
        link, location = holder
        if not isinstance(node := link.opened.node, ShmPoolNode):
            value = self.get(key)
            return None if value is None else memoryview(value)
        view: memoryview | None = None
        with link.absorb():
            view = node.view_block(location)
        with self._lock:
            self._counters.hits += view is not None
            self._counters.misses += view is None
        return view

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise ValueError("the pool is closed")

    def _keep(self) -> None:
        """Reach nodes that are down, and renew pins; until closed."""
        renew_at = self._clock.now() + RENEW_S
        while not self._closing.wait(KEEP_INTERVAL_S):
            self._ring.reach_again()
            if self._clock.now() >= renew_at:
                renew_at = self._clock.now() + RENEW_S
                self._pins.renew()


def _member(link: NodeLink) -> PoolMember:
    stats: PoolNodeStats | None = None
    if link.up:
        with link.absorb():
            stats = link.opened.node.stats()
    errors = tuple(sorted(link.errors.items()))
    return PoolMember(link.peer.address, link.node_id, link.up, link.path, errors, stats)
