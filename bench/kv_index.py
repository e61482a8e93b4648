"""KV indexes: the first question about a document with an index and without, and what it costs.

Run ``python -m bench.kv_index``. A cluster of real processes (``tierkv up``, one compute node, the
shipped model) has tables of documents of the same length. In each round two new tables take turns,
one with a KV index and one without: a question about each document, one after the other, as a user
would ask. The answers must be those of the same calls without the cache. Then a hundredth of an
indexed table changes, and its refresh is compared with building the index. Dropping the index must
leave no block of it.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Sequence

from bench.batch import Session, cluster, connect
from bench.report import Report, finish, make_parser

_DOCUMENT_TOKENS = 1_000
_WORDS = (
    "parcel", "river", "kettle", "station", "signature", "lamp", "order", "blender", "late",
    "refund", "city", "agent",
)  # fmt: skip
_OPTIONS = '{"max_tokens": 4}'


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--documents", type=int, default=0, help="documents of a table")
    parser.add_argument("--rounds", type=int, default=0, help="rounds of the two ways")
    arguments = parser.parse_args(argv)
    documents = arguments.documents or (20 if arguments.quick else 60)
    rounds = arguments.rounds or (1 if arguments.quick else 5)
    rng = random.Random(arguments.seed)
    report = Report("kv_index")
    report.add("documents", documents)
    ways: dict[bool, list[float]] = {True: [], False: []}
    building: list[float] = []
    settings = ("front.max_calls=0", "compute.load_policy=always")
    with cluster(1, *settings) as (dsn, _), connect(dsn, 1, arguments.seed) as session:
        for number in range(rounds):
            for indexed in rng.sample((True, False), 2):
                table = f"docs_{number}_{int(indexed)}"
                _make(session, table, documents, rng)
                if indexed:
                    building.append(_index(session, table))
                ttft_s, answers = _ask_each(session, table)
                ways[indexed] += ttft_s
                if answers != _ask_without_cache(session, table):
                    raise AssertionError(f"other answers than without the cache: {table}")
        _make(session, "docs", documents, rng)
        report.add("document_tokens", _tokens(session, "docs"))
        _cost(report, session, documents)
    for indexed, name in ((True, "indexed"), (False, "plain")):
        report.add(f"{name}_first_token_s", statistics.median(ways[indexed]))
    report.add(
        "first_token_speedup", statistics.median(ways[False]) / statistics.median(ways[True])
    )
    report.add("index_documents_per_s", documents / statistics.median(building))
    finish(report, arguments.format)


def _make(session: Session, table: str, documents: int, rng: random.Random) -> None:
    """Make a table of documents that no other table has."""
    session.execute(f"CREATE TABLE {table} (id INTEGER, body VARCHAR)".encode())
    for number in range(documents):
        text = " ".join(rng.choice(_WORDS) for _ in range(_DOCUMENT_TOKENS))
        counted = session.execute("SELECT ai_count_tokens(%s)", (text,)).fetchone()
        assert counted is not None
        words = text.split()[: int(_DOCUMENT_TOKENS * _DOCUMENT_TOKENS / counted[0])]
        body = f"Case {number} of {table}: {' '.join(words)}."
        session.execute(f"INSERT INTO {table} VALUES (%s, %s)".encode(), (number, body))


def _index(session: Session, table: str) -> float:
    began = time.perf_counter()
    session.execute(
        f"CREATE KV INDEX {table}_kv ON {table} (body) "
        "WITH (background = off, refresh = manual)".encode()
    )
    return time.perf_counter() - began


def _question(table: str, question: str, options: str = _OPTIONS) -> str:
    return (
        f"SELECT (d).ttft_ms, (d).value FROM (SELECT ai_generate_detail(body || ' {question}', "
        f"options => '{options}') AS d FROM {table}"
    )


def _ask_each(session: Session, table: str) -> tuple[list[float], list[str]]:
    """Ask about one document after the other; return the times to the first token, in seconds."""
    ids = [row[0] for row in session.execute(f"SELECT id FROM {table} ORDER BY id".encode())]
    found: list[tuple[float, str]] = []
    for number in ids:
        text = f"{_question(table, 'What is it about?')} WHERE id = {number}) AS asked"
        row = session.execute(text.encode()).fetchone()
        assert row is not None
        found.append((row[0] / 1000, row[1]))
    return [seconds for seconds, _ in found], [value for _, value in found]


def _ask_without_cache(session: Session, table: str) -> list[str]:
    options = json.dumps(json.loads(_OPTIONS) | {"cache": False})
    text = _question(table, "What is it about?", options) + " ORDER BY id) AS asked"
    return [row[1] for row in session.execute(text.encode()).fetchall()]


def _tokens(session: Session, table: str) -> float:
    text = f"SELECT avg(ai_count_tokens(body)) FROM {table}"
    row = session.execute(text.encode()).fetchone()
    assert row is not None
    return float(row[0])


def _cost(report: Report, session: Session, documents: int) -> None:
    """Measure what an index takes: memory, a refresh after a change, its end."""
    building_s = _index(session, "docs")
    changed = max(1, documents // 100)
    session.execute(f"UPDATE docs SET body = 'Changed. ' || body WHERE id < {changed}".encode())
    began = time.perf_counter()
    session.execute("REFRESH KV INDEX docs_kv")
    report.add("refresh_after_change_to_full_ratio", (time.perf_counter() - began) / building_s)
    report.add("changed_documents", changed)
    blocks = "SELECT coalesce(sum(bytes), 0) FROM tierkv.kvcache_blocks WHERE tier = 'L2'"
    before = _number(session, blocks)
    began = time.perf_counter()
    session.execute("DROP KV INDEX docs_kv")
    report.add("drop_documents_per_s", documents / (time.perf_counter() - began))
    deadline_s = time.monotonic() + 20
    while (freed := before - _number(session, blocks)) <= 0 and time.monotonic() < deadline_s:
        time.sleep(0.05)  # The directory hears of it a moment later.
    report.add("pool_mib_per_document", freed / documents / (1 << 20))


def _number(session: Session, text: str) -> float:
    row = session.execute(text.encode()).fetchone()
    assert row is not None
    return float(row[0])


if __name__ == "__main__":
    main()
