"""Pins: the KV of a pinned prompt stays in the pool's memory until a given time.

A pin is a record at the meta server and survives every process. Each front locates the blocks of
all pins every RENEW_S with a lease of LEASE_S: blocks stored again or moved to a different node are
kept too. Without any front a pin lapses after LEASE_S, and holds again when a front is back. After
a restart of a pool node the node's leases are gone for about a second. A lease keeps blocks of a
node's memory only; copies on disks are evicted as usual.
"""

from __future__ import annotations

import asyncio
import json
import logging
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Protocol

from tierkv.kvcore import limits
from tierkv.kvcore.block_event import NO_LEASE, LeaseId
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import DirectoryUnavailableError, SqlError, TierKVError
from tierkv.kvcore.ids import BLOCK_KEY_BYTES, BlockKey
from tierkv.metaserver.client import ClusterRecord, LocateReply, MetaClient

PIN_RECORDS: Final = "kv_pin"
RENEW_S: Final = 15.0
LEASE_S: Final = 120.0
_KEYS_PER_RECORD: Final = 160
_POOL_LOOK_S: Final = 0.5
_PAUSES_S: Final = (0.05, 0.1, 0.2, 0.4)
"""Pauses before whoever pins a prompt is told how much of it is in memory."""

_FIRST_LOOK_S: Final = 0.05
"""A block is in the pool a little later than its computation: a new pin is looked at often."""

log = logging.getLogger("tierkv.scheduler")


@dataclass(frozen=True, slots=True)
class Pin:
    """A pinned prompt.

    Attributes:
        tenant: whose it is.
        model: name of the model.
        keys: the full blocks of the prompt, in order.
        tokens: tokens in these blocks.
        size_bytes: upper bound of the bytes of the blocks in the pool.
        until_s: Unix time.
    """

    tenant: str
    model: str
    keys: tuple[BlockKey, ...]
    tokens: int
    size_bytes: int
    until_s: float

    @property
    def name(self) -> str:
        """The name: the key of the last block, which names all tokens before."""
        return self.keys[-1].hex()


class PinDesk(Protocol):
    """The part of DirectoryClient used here; a failure means "nothing found" or False."""

    async def find(self, keys: Sequence[BlockKey], *, reserve_s: float = 0.0) -> LocateReply: ...

    async def end_lease(self, lease: LeaseId, *, used: bool) -> bool: ...


@dataclass(slots=True, eq=False)
class _Kept:
    """A pin and its present lease.

    Attributes:
        in_memory: leading blocks in the pool's memory at the last look.
        due_s: time of the next look.
        wait_s: pause before the look after that.
    """

    pin: Pin
    lease: LeaseId = NO_LEASE
    in_memory: int = 0
    due_s: float = 0.0
    wait_s: float = _FIRST_LOOK_S


class PinKeeper:
    """All pins of the cluster, kept by this front."""

    def __init__(
        self,
        desk: PinDesk,
        meta: MetaClient | None,
        clock: Clock,
        pool: Callable[[], object] = lambda: None,
    ) -> None:
        """Begin without pins; ``start`` reads those of the cluster.

        Args:
            desk: locates and leases blocks.
            meta: has the records; None: pins end with this process.
            clock: ``wall`` ends pins, ``now`` times the looks.
            pool: returns a different value after a pool node was started again: a restarted node
                has no leases.
        """
        self._desk = desk
        self._meta = meta
        self._clock = clock
        self._pool = pool
        self._pool_seen = pool()
        self._kept: dict[str, _Kept] = {}
        self._coming: dict[str, Pin] = {}
        self._records: dict[str, tuple[str, ...]] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._read_at_s = float("-inf")

    async def stop(self) -> None:
        """Stop looking; the leases run on until their end."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    def start(self) -> None:
        """Keep the pins in the background."""
        if self._task is None:
            self._task = asyncio.create_task(self._keep(), name="pins")

    def all(self) -> list[tuple[Pin, int]]:
        """Return pins, each with the number of blocks in memory at the last look."""
        now = self._clock.wall()
        kept = (each for each in self._kept.values() if each.pin.until_s > now)
        return sorted(((e.pin, e.in_memory) for e in kept), key=lambda pair: pair[0].until_s)

    def others(self, name: str) -> list[Pin]:
        """Return the pins of other names, with those that are just being recorded."""
        now = self._clock.wall()
        pins = {each.pin.name: each.pin for each in self._kept.values()} | self._coming
        return [pin for pin in pins.values() if pin.name != name and pin.until_s > now]

    def size_bytes(self, tenants: Iterable[str]) -> int:
        """Return the bytes pinned by tenants."""
        members = frozenset(tenants)
        return sum(pin.size_bytes for pin, _ in self.all() if pin.tenant in members)

    async def add(self, pin: Pin) -> int:
        """Keep a prompt's blocks; a second pin of a prompt replaces the time of the first.

        Returns:
            Number of leading blocks in the pool's memory, after a wait of at most a second for
            blocks on the way to the pool.

        Raises:
            SqlError: 53400, there are too many pins.
            DirectoryUnavailableError: the pin was not recorded.
        """
        known = self._kept.keys() | self._coming.keys()
        if pin.name not in known and len(known) >= limits.MAX_PINS:
            raise SqlError(
                f"{limits.MAX_PINS} prompts are pinned already",
                sqlstate="53400",
                hint="End pins with tierkv.pin(prompt, '0 s'), or let some end.",
            )
        self._coming[pin.name] = pin  # Before the first wait: pins of one statement come together.
        try:
            if self._meta is not None:
                await self._meta_put(pin)
        finally:
            self._coming.pop(pin.name, None)
        old = self._kept.get(pin.name)
        kept = self._kept[pin.name] = old or _Kept(pin)
        kept.pin, kept.due_s, kept.wait_s = pin, 0.0, _FIRST_LOOK_S
        self.start()
        await self._look(kept)
        for pause_s in _PAUSES_S:
            if kept.in_memory >= len(pin.keys):
                break
            await asyncio.sleep(pause_s)
            await self._look(kept)
        self._wake.set()
        return kept.in_memory

    async def end(self, names: Iterable[str]) -> int:
        """End pins by name; return how many there were.

        Raises:
            DirectoryUnavailableError: the meta server did not answer; pins may hold on.
        """
        ended = 0
        for name in names:
            kept = self._kept.pop(name, None)
            if kept is None:
                continue
            ended += 1
            await self._remove(name, kept)
        return ended

    async def end_with(self, keys: Iterable[BlockKey]) -> int:
        """End the pins of any of the given blocks; return the number of ended pins."""
        gone = frozenset(keys)
        names = [name for name, kept in self._kept.items() if not gone.isdisjoint(kept.pin.keys)]
        return await self.end(names)

    async def _remove(self, name: str, kept: _Kept) -> None:
        for record in self._records.pop(name, ()):
            if self._meta is not None:
                await self._meta.put_record(ClusterRecord(PIN_RECORDS, record, ""))
        await self._desk.end_lease(kept.lease, used=False)

    async def _meta_put(self, pin: Pin) -> None:
        assert self._meta is not None
        records = records_of(pin)
        for record in records:
            await self._meta.put_record(record)
        self._records[pin.name] = tuple(record.name for record in records)

    async def _keep(self) -> None:
        while True:
            self._wake.clear()
            now = self._clock.now()
            if now - self._read_at_s >= RENEW_S:
                self._read_at_s = now
                with suppress(DirectoryUnavailableError):
                    await self._read()
            if (pool := self._pool()) != self._pool_seen:
                self._pool_seen = pool
                for kept in self._kept.values():
                    kept.due_s = now
            for name, kept in list(self._kept.items()):
                try:
                    if kept.pin.until_s <= self._clock.wall():
                        await self.end([name])
                    elif kept.due_s <= now:
                        await self._look(kept)
                except TierKVError as error:
                    log.debug("a pin is looked at later: %s", error)
            due_s = min((kept.due_s for kept in self._kept.values()), default=now + RENEW_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(min(max(0.01, due_s - now), _POOL_LOOK_S)):
                    await self._wake.wait()

    async def _read(self) -> None:
        """Take over the pins made by a different front, and drop the pins ended there."""
        if self._meta is None:
            return
        records = await self._meta.list_records(PIN_RECORDS)
        pins = {pin.name: pin for pin in pins_of(records)}
        for name, pin in pins.items():
            self._records[name] = tuple(r.name for r in records if r.name.startswith(name))
            if name in self._kept:
                self._kept[name].pin = pin
            else:
                self._kept[name] = _Kept(pin)
        for name in self._kept.keys() - pins.keys():
            await self._desk.end_lease(self._kept.pop(name).lease, used=False)

    async def _look(self, kept: _Kept) -> None:
        """Lease the blocks at the present places."""
        reply = await self._desk.find(kept.pin.keys, reserve_s=LEASE_S)
        old, kept.lease = kept.lease, reply.lease
        if old != NO_LEASE:
            await self._desk.end_lease(old, used=False)
        kept.in_memory = min(reply.memory_blocks, len(kept.pin.keys))
        whole = kept.in_memory >= len(kept.pin.keys)
        kept.wait_s = RENEW_S if whole else min(2 * kept.wait_s, RENEW_S)
        kept.due_s = self._clock.now() + kept.wait_s


def records_of(pin: Pin) -> list[ClusterRecord]:
    """Return the records of a pin: several for a long prompt, because records are small."""
    parts = [
        pin.keys[at : at + _KEYS_PER_RECORD] for at in range(0, len(pin.keys), _KEYS_PER_RECORD)
    ]
    return [
        ClusterRecord(PIN_RECORDS, f"{pin.name}.{number:04}", _body(pin, keys, len(parts)))
        for number, keys in enumerate(parts)
    ]


def _body(pin: Pin, keys: Sequence[BlockKey], parts: int) -> str:
    values = {
        "tenant": pin.tenant,
        "model": pin.model,
        "tokens": pin.tokens,
        "bytes": pin.size_bytes,
        "until": pin.until_s,
        "parts": parts,
        "keys": b64encode(b"".join(keys)).decode(),
    }
    return json.dumps(values)


def pins_of(records: Iterable[ClusterRecord]) -> list[Pin]:
    """Return the pins of records, without pins with a missing or unreadable record."""
    parts: dict[str, list[tuple[str, Pin, int]]] = {}
    for record in records:
        name, _, number = record.name.partition(".")
        with suppress(ValueError, KeyError, TypeError):
            body = json.loads(record.body)
            raw = b64decode(body["keys"])
            step = BLOCK_KEY_BYTES
            keys = tuple(BlockKey(raw[at : at + step]) for at in range(0, len(raw), step))
            pin = Pin(
                body["tenant"], body["model"], keys, int(body["tokens"]), int(body["bytes"]),
                float(body["until"]),
            )  # fmt: skip
            parts.setdefault(name, []).append((number, pin, int(body["parts"])))
    pins: list[Pin] = []
    for found in parts.values():
        found.sort(key=lambda part: part[0])
        _, first, count = found[0]
        if len(found) == count:
            keys = tuple(key for _, part, _ in found for key in part.keys)
            pins.append(replace(first, keys=keys))
    return pins
