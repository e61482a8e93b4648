"""The documents of a KV index: how documents come, stay and go.

Theory of operation. ``tierkv_jobs.kv_index_texts`` has a row per different document. ``compare``
brings the rows and the KV in step with the table: documents without a row in the table are
forgotten, new ones are warmed, each batch recorded as it ends. With ``ttl`` a document moves on:

    new -> indexed -> expired (KV forgotten, digest known) -> gone (the table has no row with it)

An expired document is warmed again only after a time without any row. Uses of single documents
are not counted anywhere, hence the age of a document is the time since indexing. With
``tier = 'memory'`` documents are pinned for as long as pins may last, and pinned again in time.

dbfront/jobs/kv_indexes.py makes one IndexTexts per statement, and holds the lock of the index.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tierkv.dbfront.jobs.job import JobSession
from tierkv.dbfront.jobs.job_errors import JobRemedy, remedy, told
from tierkv.dbfront.jobs.job_runner import set_for_batch, try_again
from tierkv.dbfront.statement_results import StatementResult
from tierkv.kvcore import limits
from tierkv.kvcore.call_options import TOO_SHORT
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import SqlError, TierKVError
from tierkv.sql.jobs.job_statement import literal
from tierkv.sql.jobs.job_tables import SCHEMA
from tierkv.sql.jobs.kv_index_command import PIN_RENEW_S, KvIndexOptions

_BODY: Final = "tierkv_body"
_BUCKET_ROWS: Final = 100_000
"""Digests that the front compares at a time."""

_NO_ROOM: Final = ("53100", "53400")
"""SQLSTATEs when no more may be pinned: by the namespace, or in the cluster."""

_TOO_LONG: Final = "54000"
"""SQLSTATE of a document longer than the model's context."""

_PIECE_CHARS: Final = 1 << 20
"""Most characters of texts in a statement, well below the limit of SQL text."""


@dataclass(frozen=True, slots=True)
class KvIndex:
    """An index.

    Attributes:
        source: the table as written.
        expression: SQL of a document.
        path: search path of the session that made the index.
    """

    name: str
    source: str
    expression: str
    options: KvIndexOptions
    path: str

    @property
    def documents(self) -> str:
        """A query of the documents, in a column ``tierkv_body``."""
        return (
            f"SELECT {_BODY} FROM (SELECT CAST(({self.expression}) AS text) AS {_BODY} "
            f"FROM {self.source}) AS tierkv_rows WHERE {_BODY} <> ''"
        )

    def call(self, function: str, *more: str) -> str:
        """Return SQL of a call about the KV of a document."""
        text = [f"documents => {_listed(_BODY)}"] if self.options.kind == "chunk" else []
        prompt = "'.'" if text else _BODY
        model = [f"model => {literal(self.options.model)}"] if self.options.model else []
        system = f"system_prompt => {literal(self.options.system_prompt or '')}"
        return f"{function}({', '.join([prompt, *more, *model, system, *text])})"


def _listed(column: str) -> str:
    return f"ARRAY[{column}]"


class IndexTexts:
    """The documents of an index, through a session of the owner."""

    def __init__(self, session: JobSession, clock: Clock, index: KvIndex) -> None:
        """Use a session whose lock keeps other refreshes of the index away."""
        self._session = session
        self._clock = clock
        self._index = index

    async def compare(self) -> tuple[int, int]:
        """Warm new documents, and forget old and vanished documents; return both numbers.

        Raises:
            TierKVError: the refresh stopped; finished batches stay.
        """
        index, session = self._index, self._session
        await self._begin_progress()
        indexed, removed = 0, await self._expire()
        await self._renew_pins()
        ((rows,),) = (
            await session.execute(f"SELECT count(*) FROM ({index.documents}) AS tierkv_all")
        ).rows
        buckets = _buckets(int(rows))
        for bucket in buckets:
            found = await session.execute(
                f"SELECT DISTINCT md5({_BODY}) FROM ({index.documents}) AS tierkv_all "
                f"WHERE {bucket.replace('digest', f'md5({_BODY})')}"
            )
            wanted = {str(digest) for (digest,) in found.rows}
            known = await self._known(bucket)
            gone, new = sorted(known - wanted, key=_ending), sorted(wanted - known, key=_ending)
            size, left = index.options.batch, len(gone) + len(new)
            for at in range(0, left, size):
                await self._tell_left(left - at if bucket == buckets[-1] else None)
                old = gone[at : at + size]
                fresh = new[max(0, at - len(gone)) : max(0, at + size - len(gone))]
                if old:
                    await self.forget(old)
                    removed += len(old)
                if fresh:
                    await self._warm(fresh)
                    indexed += len(fresh)
                    session.tell(None, indexed, max(indexed, len(new)))
        await self._tell_left(0)
        return indexed, removed

    async def forget_all(self) -> int:
        """Free all documents; return how many there were."""
        await self._begin_progress()
        removed = 0
        while digests := await self._known(f"TRUE LIMIT {self._index.options.batch}"):
            await self.forget(digests)
            removed += len(digests)
        return removed

    async def forget(self, digests: Iterable[str]) -> None:
        """Forget the KV of documents, and the documents."""
        chosen = _chosen(digests)
        await self._forget_kv(chosen)
        for table in ("kv_index_texts", "kv_index_times"):
            await self._own(f"DELETE FROM {SCHEMA}.{table}", chosen)

    async def _known(self, condition: str) -> set[str]:
        texts = f"SELECT digest FROM {SCHEMA}.kv_index_texts WHERE {self._is}"
        old = f"SELECT digest FROM {SCHEMA}.kv_index_times WHERE {self._is} AND expired = 1"
        rows = await self._session.own(
            f"SELECT digest FROM ({texts} UNION ALL {old}) AS tierkv_known WHERE {condition}"
        )
        return {str(digest) for (digest,) in rows}

    async def _expire(self) -> int:
        """Forget the KV of documents older than ``ttl``; return the number of documents."""
        ttl_s, expired = self._index.options.ttl_s, 0
        if not ttl_s:
            return 0
        while digests := await self._due(f"indexed_s <= {self._clock.wall() - ttl_s}"):
            chosen = _chosen(digests)
            await self._forget_kv(chosen)
            await self._session.execute("BEGIN")
            await self._own(f"DELETE FROM {SCHEMA}.kv_index_texts", chosen)
            await self._own(f"UPDATE {SCHEMA}.kv_index_times SET expired = 1", chosen)
            await self._session.execute("COMMIT")
            expired += len(digests)
        return expired

    async def _renew_pins(self) -> None:
        if not self._index.options.in_memory:
            return
        while digests := await self._due(f"pinned_s <= {self._clock.wall() - PIN_RENEW_S}"):
            chosen = _chosen(digests)
            pin = self._index.call("ai_pin", self._keep)
            for values in await self._values(chosen):
                text = f"SELECT {pin} FROM ({values}) AS tierkv_old({_BODY})"
                result = await self._run(text)
                _refuse_unpinned(told_ for (told_,) in result.rows)
            now_s = self._clock.wall()
            await self._own(f"UPDATE {SCHEMA}.kv_index_times SET pinned_s = {now_s}", chosen)

    async def _due(self, condition: str) -> list[str]:
        rows = await self._session.own(
            f"SELECT digest FROM {SCHEMA}.kv_index_times WHERE {self._is} AND expired = 0 "
            f"AND {condition} LIMIT {self._index.options.batch}"
        )
        return [str(digest) for (digest,) in rows]

    @property
    def _keep(self) -> str:
        """How long a document is pinned, as SQL; empty: not at all."""
        options = self._index.options
        keep_s = limits.MAX_PIN_S if options.in_memory else options.pin_s
        return f"'{keep_s} s'" if keep_s else ""

    async def _warm(self, digests: Sequence[str]) -> None:
        """Compute the KV of new documents, and record them; a failing document has its error."""
        try:
            await try_again(self._session, self._clock, lambda: self._write(digests, error=""))
        except TierKVError as error:
            if error.sqlstate in _NO_ROOM and self._keep:
                await self._undo(digests)
            if remedy(error) is not JobRemedy.SET_ASIDE and error.sqlstate != _TOO_LONG:
                raise
            if len(digests) == 1:
                await self._write(digests, error=told(error))
                return
            half = len(digests) // 2
            await self._warm(digests[:half])
            await self._warm(digests[half:])

    async def _write(self, digests: Sequence[str], *, error: str) -> None:
        index, keep = self._index, self._keep
        warmed = index.call("ai_pin", keep) if keep else index.call("ai_warm")
        value = "0" if error else warmed
        await self._session.execute("BEGIN")
        await set_for_batch(self._session, index.options.priority)
        await self._session.execute("SET LOCAL tierkv.on_error = 'error'")
        result = await self._session.execute(
            f"SELECT md5({_BODY}) AS digest, {_BODY}, {value} AS tokens FROM (SELECT DISTINCT "
            f"{_BODY} FROM ({index.documents}) AS tierkv_all WHERE md5({_BODY}) IN "
            f"({', '.join(map(literal, digests))})) AS tierkv_new"
        )
        if index.options.in_memory:
            _refuse_unpinned(told_ for _, _, told_ in result.rows)
        owner, name = literal(self._session.owner), literal(index.name)
        rows = [
            f"({owner}, {name}, {literal(str(digest))}, {literal(str(body))}, {_tokens(told_)}, "
            f"{literal(error)})"
            for digest, body, told_ in result.rows
        ]
        for some in _pieces(rows):
            await self._session.own(f"INSERT INTO {SCHEMA}.kv_index_texts VALUES {', '.join(some)}")
        if result.rows and not error and (index.options.ttl_s or index.options.in_memory):
            now_s = self._clock.wall()
            times = ", ".join(
                f"({owner}, {name}, {literal(str(digest))}, {now_s}, {now_s}, 0)"
                for digest, _, _ in result.rows
            )
            await self._session.own(f"INSERT INTO {SCHEMA}.kv_index_times VALUES {times}")
        await self._session.execute("COMMIT")

    async def _undo(self, digests: Sequence[str]) -> None:
        """End the pins of a batch that is not recorded, with the KV: a drop would not find them.

        Texts that another index has keep theirs.
        """
        rows = await self._session.own(
            f"SELECT digest FROM {SCHEMA}.kv_index_texts WHERE {_chosen(digests)}"
        )
        own = set(digests) - {str(digest) for (digest,) in rows}
        if not own:
            return
        call = self._index.call("ai_forget", """options => '{"answer_cache": "off"}'""")
        await self._run(
            f"SELECT {call} FROM (SELECT DISTINCT {_BODY} FROM ({self._index.documents}) AS "
            f"tierkv_all WHERE md5({_BODY}) IN ({', '.join(map(literal, own))})) AS tierkv_new"
        )

    async def _forget_kv(self, chosen: str) -> None:
        # Kept answers leave by their age: they are right for whoever asks about the text again.
        call = self._index.call("ai_forget", """options => '{"answer_cache": "off"}'""")
        for values in await self._values(chosen):
            text = f"SELECT {call} FROM ({values}) AS tierkv_old({_BODY})"
            await self._run(text)

    async def _run(self, text: str) -> StatementResult:
        return await try_again(self._session, self._clock, lambda: self._session.execute(text))

    async def _values(self, chosen: str) -> list[str]:
        """Return the bodies of documents, as SQL in pieces; failed documents have no KV."""
        rows = await self._session.own(
            f"SELECT body FROM {SCHEMA}.kv_index_texts WHERE {self._is} AND {chosen} AND error = ''"
        )
        pieces = _pieces([f"({literal(str(body))})" for (body,) in rows])
        return [f"VALUES {', '.join(some)}" for some in pieces]

    async def _begin_progress(self) -> None:
        table = f"{SCHEMA}.kv_index_progress"
        if not await self._session.own(f"SELECT 1 FROM {table} WHERE {self._is}"):
            owner, name = literal(self._session.owner), literal(self._index.name)
            await self._session.own(f"INSERT INTO {table} VALUES ({owner}, {name}, NULL, 0)")
        await self._own(f"UPDATE {table} SET left_texts = NULL, told = 0")

    async def _tell_left(self, left: int | None) -> None:
        """Record how many documents are left to do; None: not known."""
        shown = "NULL" if left is None else left
        await self._own(f"UPDATE {SCHEMA}.kv_index_progress SET left_texts = {shown}")

    async def _own(self, change: str, condition: str = "TRUE") -> None:
        await self._session.own(f"{change} WHERE {self._is} AND {condition}")

    @property
    def _is(self) -> str:
        owner, name = literal(self._session.owner), literal(self._index.name)
        return f"owner = {owner} AND name = {name}"


def _chosen(digests: Iterable[str]) -> str:
    return f"digest IN ({', '.join(map(literal, digests))})"


def _refuse_unpinned(answers: Iterable[Any]) -> None:
    """Refuse a document that has no pin, except for one shorter than a block.

    Raises:
        SqlError: 53100, the namespace may pin no more.
    """
    for answer in answers:
        found = json.loads(answer) if isinstance(answer, str) else answer
        rejected = isinstance(found, Mapping) and found.get("outcome") == "rejected"
        if rejected and found.get("reason") != TOO_SHORT:
            raise SqlError(
                f"a text can't stay in memory: {found.get('reason')}",
                sqlstate="53100",
                hint="Give the namespace more capacity, or make the index without tier = 'memory'.",
            )


def _buckets(rows: int) -> list[str]:
    """Return conditions on ``digest`` that cut all digests into parts of a moderate size."""
    digits = 0
    while rows > _BUCKET_ROWS * 16**digits and digits < 3:
        digits += 1
    if not digits:
        return ["TRUE"]
    return [f"right(digest, {digits}) = '{number:0{digits}x}'" for number in range(16**digits)]


def _ending(digest: str) -> str:
    """Return the order of documents in batches.

    dbfront/views/index_places.py samples by the beginning of digests. What comes and goes first has
    to be spread evenly over that order, or the sample has only the oldest documents.
    """
    return digest[::-1]


def _pieces(rows: Sequence[str]) -> Iterator[list[str]]:
    """Cut rows of SQL into pieces of a moderate length; a long text stands alone."""
    piece: list[str] = []
    chars = 0
    for row in rows:
        if piece and chars + len(row) > _PIECE_CHARS:
            yield piece
            piece, chars = [], 0
        piece.append(row)
        chars += len(row)
    if piece:
        yield piece


def _tokens(told_: object) -> str:
    """Return the tokens of a document, from ``ai_warm`` or from the JSON of ``ai_pin``."""
    if told_ is None:
        return "0"
    value = json.loads(told_) if isinstance(told_, str) and told_.startswith("{") else told_
    return str(value["tokens"] if isinstance(value, Mapping) else value)
