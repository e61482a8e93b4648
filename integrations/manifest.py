"""Small values in the pool with the identity of every engine of a model.

Engines with different KV never share blocks, which looks like a cache without hits. Each engine
therefore writes its identity under the model's name, reads the other identities and reports the
differing fields. Called by integrations/pool_door.py in the keeper's thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from tierkv.dmp.client.pool import Pool
from tierkv.integrations.engine_report import Complaints
from tierkv.integrations.identity import EngineIdentity, differences
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.ids import NodeId

PERIOD_S: Final = 6 * 3600.0
"""Length of a period. Nothing is ever deleted from a pool, so names contain the period and only
entries of the current and the last period are read. The entry of an engine that has left is
forgotten after twelve hours at most."""

SLOTS: Final = 8
"""Most identities of one model that are kept per period."""

LOOK_INTERVAL_S: Final = 60.0
_MOST_BYTES: Final = 16 << 10
_MOST_FIELDS: Final = 64


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """The entry of one engine.

    Attributes:
        engine: the engine and its version.
        node: name of the engine in the cluster.
        fields: the engine's identity.
    """

    engine: str
    node: str
    fields: dict[str, str]

    def to_bytes(self) -> bytes:
        """Encode the entry as JSON."""
        text = json.dumps({"engine": self.engine, "node": self.node, "fields": self.fields})
        return text.encode()


class Manifest:
    """Writes an engine's identity into the pool and compares the identities there.

    Attributes:
        _next_at: time of the next look.
    """

    def __init__(
        self, identity: EngineIdentity, node_id: NodeId, complaints: Complaints, clock: Clock
    ) -> None:
        self._label = identity.label
        self._mine = ManifestEntry(
            f"{identity.engine} {identity.version}", node_id, identity.fields()
        )
        self._complaints = complaints
        self._clock = clock
        self._next_at = float("-inf")

    def look(self, pool: Pool) -> None:
        """Read, write and compare entries if ``LOOK_INTERVAL_S`` has passed since the last look."""
        now = self._clock.now()
        if now < self._next_at:
            return
        self._next_at = now + LOOK_INTERVAL_S
        period = int(self._clock.wall() // PERIOD_S)
        here = self._read(pool, period)
        others = [*here.values(), *self._read(pool, period - 1).values()]
        if all(entry.fields != self._mine.fields for entry in here.values()):
            others += self._leave(pool, period, taken=here)
        self._compare(others)

    def _read(self, pool: Pool, period: int) -> dict[int, ManifestEntry]:
        values = pool.get_many([self._name(period, slot) for slot in range(SLOTS)])
        read = {slot: _entry(value) for slot, value in enumerate(values) if value is not None}
        return {slot: entry for slot, entry in read.items() if entry is not None}

    def _leave(self, pool: Pool, period: int, *, taken: Iterable[int]) -> list[ManifestEntry]:
        """Write the own entry into a free slot; return entries that other engines wrote first."""
        faster: list[ManifestEntry] = []
        for slot in (slot for slot in range(SLOTS) if slot not in set(taken)):
            name = self._name(period, slot)
            # The first value under a name stays, so reading back shows which engine has the slot.
            value = pool.get(name) if pool.put(name, self._mine.to_bytes()) else None
            entry = _entry(value) if value is not None else None
            if value is None or (entry is not None and entry.fields == self._mine.fields):
                break
            if entry is not None:
                faster.append(entry)
        return faster

    def _compare(self, others: list[ManifestEntry]) -> None:
        for entry in others:
            unlike = differences(self._mine.fields, entry.fields)
            if unlike:
                self._complaints.hold(
                    "layout_mismatch",
                    f"{entry.engine} ({entry.node}) keeps {self._label} in this pool too, but "
                    f"nothing is shared with it: {unlike}",
                    hint="Both nodes serve on. Make the values equal to share KV.",
                )
                return
        self._complaints.settle("layout_mismatch")

    def _name(self, period: int, slot: int) -> str:
        return f"tierkv-manifest-1|{self._label}|{period}|{slot}"


def _entry(value: bytes) -> ManifestEntry | None:
    """Decode an entry; None for bytes not written by TierKV's classes."""
    if len(value) > _MOST_BYTES:
        return None
    try:
        found = json.loads(value)
        fields = dict(found["fields"])
        texts = [found["engine"], found["node"], *fields, *fields.values()]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if len(fields) > _MOST_FIELDS or not all(isinstance(text, str) for text in texts):
        return None
    return ManifestEntry(found["engine"], found["node"], fields)
