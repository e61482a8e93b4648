"""Random sessions, said to PostgreSQL and to the relay: the client hears the same.

What PostgreSQL is told has the answers written in; the relay has AI calls in their place. Batches,
blocks, savepoints, errors, row limits and several statements in a string are all mixed.
"""

from __future__ import annotations

import random
import re

import pytest

from tests.fix_postgres import PostgresServer, RawClient, RunningRelay
from tests.fix_sql import answer_text
from tierkv.dbfront.postgres.wire import messages

pytestmark = pytest.mark.integration

STATEMENTS = (
    "SELECT 1 AS a",
    "SELECT {A} AS a",
    "SELECT {A} AS a",
    "SELECT i, {A} AS a FROM generate_series(1, 3) i",
    "SELECT i, {A} AS a FROM generate_series(1, 9) i WHERE {A} <> 'x' ORDER BY i LIMIT 4",
    "INSERT INTO t VALUES ({A})",
    "INSERT INTO t SELECT {A} RETURNING a",
    "UPDATE t SET a = {A}",
    "DELETE FROM t WHERE a = {A}",
    "SELECT count(*) AS a, max(a) FROM t",
    "SELECT 1 / 0",
    "SELECT {A} AS a, 1 / (length({A}) - length({A}))",
    "nonsense",
    "SELECT nothing, {A} FROM t",
    "SELECT a AS b, {A} AS a FROM t WHERE {A} <> 'x' ORDER BY 1",
    "DECLARE c CURSOR FOR SELECT a AS b, {A} AS a FROM t WHERE {A} <> a",
    "DECLARE c CURSOR FOR SELECT a AS b, {A} AS a FROM t ORDER BY 1",
    "FETCH c",
    "FETCH 2 FROM c",
    "MOVE c",
    "CLOSE c",
    "SHOW tierkv.max_calls",
    "SET tierkv.max_calls = 77",
)
BLOCKS = ("BEGIN", "COMMIT", "ROLLBACK", "BEGIN", "COMMIT")
SAVEPOINTS = ("SAVEPOINT s", "ROLLBACK TO s", "RELEASE s")


def make_script(rng: random.Random) -> list[list[str]]:
    """Messages as words: ``Q text``, or ``P text`` with what follows it, ``S`` ends a batch."""
    script = []
    for _ in range(rng.randint(3, 9)):
        pool = STATEMENTS + BLOCKS
        if rng.random() < 0.5:
            count = rng.choice([1, 1, 1, 2, 3])
            texts = [rng.choice(pool) for _ in range(count)]
            if count > 1:  # PostgreSQL reads the whole string before it runs anything of it.
                texts = [text for text in texts if text != "nonsense"] or ["SELECT 1"]
            script.append([f"Q{'; '.join(texts)}"])
            if rng.random() < 0.3:
                script.append([f"Q{rng.choice(SAVEPOINTS)}"])
        else:
            batch = []
            for _ in range(rng.choice([1, 1, 2, 4])):
                batch.append(f"P{rng.choice(pool)}")
                if rng.random() < 0.5:
                    batch.append("D")
                batch.append(f"E{rng.choice([0, 0, 1, 2])}")
                if rng.random() < 0.2:
                    batch.append(f"E{rng.choice([0, 1])}")
            script.append([*batch, "S"])
    return script


def spell(script: list[list[str]], *, answered: bool) -> list[bytes]:
    """Turn each step into bytes; each AI call has a prompt of its own."""
    number = 0

    def call(_: re.Match[str]) -> str:
        nonlocal number
        number += 1
        if answered:
            return f"CAST('{answer_text(f'p{number % 7}')}' AS text)"
        return f"ai_generate('p{number % 7}')"

    def text(word: str) -> bytes:
        return re.sub(r"\{A\}", call, word[1:]).encode()

    steps = []
    for step in script:
        data = b""
        for word in step:
            if word[0] == "Q":
                data += messages.query(text(word))
            elif word[0] == "P":
                data += messages.parse(b"", text(word))
                data += messages.framed(b"B", b"\0\0" + b"\0" * 6)
            elif word[0] == "D":
                data += messages.framed(b"D", b"P\0")
            elif word[0] == "E":
                data += messages.execute(b"", int(word[1:]))
            else:
                data += messages.SYNC
        steps.append(data)
    return steps


def heard(frames: list[tuple[str, bytes]]) -> list[object]:
    """Keep what must be equal: rows, tags, states; of errors the SQLSTATE; no notices."""
    kept: list[object] = []
    for kind, body in frames:
        if kind == "E":
            [state] = re.findall(rb"\0C(.{5})\0", b"\0" + body)
            kept.append((kind, state))
        elif kind == "T":
            kept.append((kind, body[:2]))
        elif kind not in "NSA":
            kept.append((kind, body))
    return kept


@pytest.mark.parametrize("seed", range(60))
def test_the_client_hears_the_same(
    postgres: PostgresServer, ai_relay: RunningRelay, seed: int
) -> None:
    rng = random.Random(seed)
    script = make_script(rng)
    direct = RawClient(f"{postgres.dsn} options='-c tierkv.max_calls=1000'")
    relayed = RawClient(ai_relay.dsn)
    try:
        for client in (direct, relayed):
            client.say(
                messages.query(
                    b"CREATE TEMP TABLE t AS SELECT text 'r' || i AS a FROM generate_series(1, 4) i"
                )
            )
            client.hear(1)
        told = zip(script, spell(script, answered=True), spell(script, answered=False), strict=True)
        for step, plain, calls in told:
            direct.say(plain)
            relayed.say(calls, rng)
            assert heard(relayed.hear(1)) == heard(direct.hear(1)), step
    finally:
        direct.close()
        relayed.close()
