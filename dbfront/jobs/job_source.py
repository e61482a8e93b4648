"""What a job reads: the keys of its source, cut into batches, and the checks before it begins.

All queries run as the client's own, with the client's rights.
"""

from __future__ import annotations

from typing import Final

from tierkv.dbfront.jobs.job import AiJob, JobBatch, JobSession
from tierkv.kvcore.errors import FeatureNotSupportedError, SqlError
from tierkv.sql.jobs.job_statement import KEY, JobStatement, KeyRange, literal
from tierkv.sql.jobs.job_tables import SCHEMA
from tierkv.sql.text.suggest import did_you_mean

_KEY_TYPES: Final = (
    "smallint", "integer", "bigint", "numeric", "text", "character varying", "uuid",
    "tinyint", "hugeint", "utinyint", "usmallint", "uinteger", "ubigint", "uhugeint",
    "decimal", "varchar",
)  # fmt: skip
"""Types whose text means the same in every session, with one value per text."""


class JobSource:
    """The rows of a statement's FROM, by key."""

    def __init__(self, session: JobSession) -> None:
        self._session = session

    async def check_path(self, what: str, made: str) -> None:
        """Refuse to run after a change of the search path: names may mean other tables.

        Args:
            what: the job or table, for the error.
            made: search path when it was made.

        Raises:
            SqlError: 55000.
        """
        path = await self._session.search_path()
        if path != made:
            raise SqlError(
                f"{what} was made with another search_path",
                sqlstate="55000",
                detail=f"Its names could mean other tables. It was {made}; now it is {path}.",
                hint=f"Run SET search_path = {made} first.",
            )

    async def check_key(self, pieces: JobStatement, key: str) -> tuple[str, int]:
        """Return the type of the key and the number of rows; refuse a key that can't cut the rows.

        Raises:
            SqlError: 23502 or 23505, NULL or equal keys; or what the statement's own parts give.
            FeatureNotSupportedError: keys of a type whose text depends on the session.
        """
        keys = pieces.keys(key)
        await self._session.execute(pieces.probe(key))
        kind = (await self.type_of_key(keys)).lower()
        if kind.partition("(")[0] not in _KEY_TYPES:
            raise FeatureNotSupportedError(
                f"a key can't have type {kind}",
                hint="Use a column of an integer type, numeric, text or uuid, as a primary key is.",
            )
        rows, keyed, different = await self.count_source(keys)
        if keyed < rows:
            raise SqlError(
                f"key {key} is NULL in {rows - keyed} of {rows} rows",
                sqlstate="23502",
                hint="Rows without a key would be lost. Use another key, or leave them out in "
                "WHERE.",
            )
        if different < rows:
            raise SqlError(
                f"key {key} is not unique: {rows} rows have {different} values",
                sqlstate="23505",
                hint="Use a column with one value for each row of the SELECT's FROM.",
            )
        return kind, rows

    async def count_source(self, keys: str) -> tuple[int, int, int]:
        """Return the number of rows, rows with a key, and different keys, of a query of keys."""
        result = await self._session.execute(
            f"SELECT count(*), count({KEY}), count(DISTINCT {KEY}) FROM ({keys}) AS tierkv_source"
        )
        rows, keyed, different = (int(value) for value in result.rows[0])
        return rows, keyed, different

    async def type_of_key(self, keys: str) -> str:
        """Return the SQL type of the keys of a query, which may be empty."""
        one = f"(SELECT {KEY} FROM ({keys}) AS tierkv_source LIMIT 1)"
        kind = self._session.type_function
        result = await self._session.execute(f"SELECT CAST({kind}({one}) AS text)")
        return str(result.rows[0][0])

    async def last_key(self, keys: str) -> str | None:
        """Return the highest key of a query of keys now; None without rows."""
        result = await self._session.execute(
            f"SELECT CAST({KEY} AS text) AS last_key FROM ({keys}) AS tierkv_source "
            f"ORDER BY {KEY} DESC LIMIT 1"
        )
        return str(result.rows[0][0]) if result.rows else None

    async def next_batch(self, job: AiJob, left: KeyRange, most: int) -> JobBatch | None:
        """Return the lowest keys of a range as a batch; None without any."""
        keys = job.pieces.keys(job.options.key)
        where = left.condition(KEY, job.key_type)
        result = await self._session.execute(
            f"SELECT CAST({KEY} AS text) AS last_key, rows_here FROM (SELECT {KEY}, "
            f"count(*) OVER () AS rows_here FROM (SELECT {KEY} FROM ({keys}) "
            f"AS tierkv_source WHERE {where} ORDER BY {KEY} LIMIT {most}) AS tierkv_batch) "
            f"AS tierkv_last ORDER BY {KEY} DESC LIMIT 1"
        )
        if not result.rows:
            return None
        high, rows = result.rows[0]
        return JobBatch(KeyRange(left.low, str(high)), int(rows))

    async def cuts(self, keys: str, parts: int) -> list[str]:
        """Return the keys at which a source is cut into parts of equal size."""
        result = await self._session.execute(
            f"SELECT CAST(max_key AS text) FROM (SELECT {KEY} AS max_key, piece, row_number() "
            f"OVER (PARTITION BY piece ORDER BY {KEY} DESC) AS from_end FROM (SELECT {KEY}, "
            f"ntile({parts}) OVER (ORDER BY {KEY}) AS piece FROM ({keys}) AS tierkv_source) AS "
            f"tierkv_tiles) AS tierkv_ends WHERE from_end = 1 ORDER BY piece"
        )
        return [str(key) for (key,) in result.rows][:-1]


def refuse_transaction(session: JobSession, tag: str, work: str) -> None:
    """Refuse a statement that commits batches inside the client's transaction.

    Args:
        session: of the client.
        tag: the statement, for the error.
        work: what commits the batches, such as ``refresh``.

    Raises:
        SqlError: 25001.
    """
    if session.in_transaction:
        raise SqlError(
            f"{tag} cannot run inside a transaction block",
            sqlstate="25001",
            hint=f"A {work} commits each batch: COMMIT first.",
        )


async def unknown_name(
    session: JobSession, kind: str, table: str, name: str, sqlstate: str
) -> SqlError:
    """Return the error of a name that the client has none of, with a similar name as hint.

    Args:
        session: tells the owner.
        kind: for the message, such as ``AI table``.
        table: the table of schema ``tierkv_jobs`` with the names.
        name: the unknown name.
        sqlstate: of the error.
    """
    rows = await session.own(
        f"SELECT name FROM {SCHEMA}.{table} WHERE owner = {literal(session.owner)}"
    )
    names = [str(each) for (each,) in rows]
    return SqlError(
        f'{kind} "{name}" does not exist',
        sqlstate=sqlstate,
        hint=did_you_mean(name, names) if names else f"There is no {kind} yet.",
    )
