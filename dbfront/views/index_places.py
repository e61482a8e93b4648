"""Bytes of KV indexes by tier, for ``tierkv.kv_indexes``: located samples, kept for some seconds.

dbfront/statement/server.py has one IndexPlaces for a front, whatever its database. Locating is no
use of the KV. Digests are uniform, hence the first texts by digest are a fair sample of all texts.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from tierkv.dbfront.contracts import Message, TextCall, TextGenerator
from tierkv.kvcore.call_options import CallOptions, KvAction, Steering
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import TierKVError
from tierkv.sql.job_view_columns import SAMPLED
from tierkv.sql.jobs.job_statement import literal
from tierkv.sql.jobs.job_tables import SCHEMA
from tierkv.sql.views import Row

BYTES: Final = ("l1_bytes", "memory_bytes", "disk_bytes")
_UNKNOWN: Final[Row] = dict.fromkeys(BYTES)

_SAMPLE: Final = 64
_MOST_CHARS: Final = 1 << 18
"""Characters of a sample; the first text counts in any case."""

_KEPT_S: Final = 10.0
_BUDGET_S: Final = 2.0
"""Time for all indexes of one look at the view; later indexes show what was known before."""

_SOON_S: Final = 1.0
_ENOUGH: Final = 16
"""A sample of an index may end early, after so long and with so many texts."""

_MOST_KEPT: Final = 1_024

ReadTexts = Callable[[str], Awaitable[Sequence[Sequence[str | None]]]]
"""Runs a query of the front where the index is; returns rows of text."""


@dataclass(frozen=True, slots=True)
class SampledIndex:
    """An index, and the calls for warming the texts.

    Attributes:
        tenant: None: not recorded, by an older release.
        tokens: of all documents.
        refreshed_s: time of the last refresh, after which what was found is old.
    """

    owner: str
    name: str
    made_s: float
    kind: str
    model: str
    system_prompt: str
    tenant: str | None
    tokens: int = field(compare=False)
    refreshed_s: str | None = field(compare=False)

    @property
    def texts(self) -> str:
        """A query of the sample: text and tokens."""
        return (
            "SELECT body, CAST(tokens AS text) FROM (SELECT body, tokens, digest, "
            "sum(length(body)) OVER (ORDER BY digest) AS chars, "
            "row_number() OVER (ORDER BY digest) AS place FROM (SELECT body, tokens, digest "
            f"FROM {SCHEMA}.kv_index_texts WHERE owner = {literal(self.owner)} AND "
            f"name = {literal(self.name)} AND error = '' ORDER BY digest LIMIT {_SAMPLE}) AS s) "
            f"AS c WHERE place = 1 OR chars <= {_MOST_CHARS} ORDER BY digest"
        )

    def call(self, text: str | None) -> TextCall:
        """Return the call about the KV of a document; None: about what all documents share."""
        is_chunk = self.kind == "chunk"
        said = "." if is_chunk and text is not None else text or ""
        system = (Message("system", self.system_prompt),) if self.system_prompt else ()
        return TextCall(
            messages=(*system, Message("user", said)),
            documents=(text,) if is_chunk and text is not None else (),
            model=self.model or None,
            options=CallOptions(temperature=0.0, max_tokens=1),
            steering=Steering(KvAction.LOCATE),
            tenant=self.tenant or "",
        )


@dataclass(frozen=True, slots=True)
class _Kept:
    """What was found, when, and after which refresh."""

    found: Row
    at_s: float
    refreshed_s: str | None


class IndexPlaces:
    """Locates samples of indexes, at most once in _KEPT_S for an index."""

    def __init__(self, generator: TextGenerator, clock: Clock) -> None:
        """Note what to use; locates nothing."""
        self._generator = generator
        self._clock = clock
        self._kept: OrderedDict[SampledIndex, _Kept] = OrderedDict()
        self._looking = asyncio.Lock()

    async def add_to(self, rows: Sequence[Row], read: ReadTexts, tenant: str | None) -> list[Row]:
        """Add the bytes by tier to rows, in place of SAMPLED; NULL if they are not known.

        Args:
            rows: of the view.
            read: runs a query where the indexes are.
            tenant: whose KV the client may ask about; None: everybody's. Owners can write to the
                tables of indexes, and must not learn there what other tenants have asked.

        Raises:
            TierKVError: a query failed. A silent meta server is no error.
        """
        indexes = [_own(SampledIndex(**row[SAMPLED]), tenant) for row in rows]
        old = [index for index in indexes if index.tenant is not None and self._is_old(index)]
        old.sort(key=lambda index: kept.at_s if (kept := self._kept.get(index)) else 0.0)
        try:
            async with asyncio.timeout(_BUDGET_S if old else None), self._looking:
                for index in old:
                    if self._is_old(index):  # Another look may have waited for this one.
                        await self._look(index, read)
        except TimeoutError:
            for index in old:
                if self._is_old(index):
                    self._keep(index, self._found(index))
        return [
            located | self._found(index)
            for located, index in zip(unlocated(rows), indexes, strict=True)
        ]

    def _is_old(self, index: SampledIndex) -> bool:
        kept = self._kept.get(index)
        if kept is None or kept.refreshed_s != index.refreshed_s:
            return True
        return self._clock.now() - kept.at_s >= _KEPT_S

    def _found(self, index: SampledIndex) -> Row:
        kept = self._kept.get(index)
        return _UNKNOWN if kept is None else kept.found

    async def _look(self, index: SampledIndex, read: ReadTexts) -> None:
        rows = [(text or "", int(float(tokens or 0))) for text, tokens in await read(index.texts)]
        found: list[tuple[int, ...] | None] = []
        began_s = self._clock.now()
        try:
            shared = await self._located(index.call(None))
            for text, _ in rows:
                if len(found) >= _ENOUGH and self._clock.now() - began_s > _SOON_S:
                    break
                found.append(await self._located(index.call(text)))
        except TierKVError:
            self._keep(index, _UNKNOWN)
            return
        if shared is None or None in found:
            self._keep(index, _UNKNOWN)
            return
        share = _share(index.tokens, [tokens for _, tokens in rows[: len(found)]])
        self._keep(index, _scaled(shared, [each for each in found if each is not None], share))

    async def _located(self, call: TextCall) -> tuple[int, ...] | None:
        answer = await self._generator.answer(await self._generator.prepare(call))
        told = json.loads(answer.text)
        return tuple(int(told[name]) for name in BYTES) if BYTES[0] in told else None

    def _keep(self, index: SampledIndex, found: Row) -> None:
        self._kept.pop(index, None)
        self._kept[index] = _Kept(found, self._clock.now(), index.refreshed_s)
        while len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)


def _own(index: SampledIndex, tenant: str | None) -> SampledIndex:
    return index if tenant in (None, index.tenant) else replace(index, tenant=None)


def unlocated(rows: Iterable[Row]) -> list[Row]:
    """Return rows of indexes whose bytes are not known."""
    return [{n: value for n, value in row.items() if n != SAMPLED} | _UNKNOWN for row in rows]


def _share(tokens: int, sampled: Sequence[int]) -> float:
    """Return how many times the sample all documents are."""
    return max(1.0, tokens / sum(sampled)) if sum(sampled) else 1.0


def _scaled(shared: Sequence[int], found: Iterable[Sequence[int]], share: float) -> Row:
    """Return the bytes of all documents; the beginning that all of them share counts once."""
    own = [0] * len(BYTES)
    for each in found:
        own = [sum(pair) for pair in zip(own, map(_beyond, each, shared), strict=True)]
    total = [all_of + round(share * part) for all_of, part in zip(shared, own, strict=True)]
    return dict(zip(BYTES, total if any(own) else [0] * len(BYTES), strict=True))


def _beyond(size: int, shared: int) -> int:
    return max(0, size - shared)
