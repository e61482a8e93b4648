"""An agent's memory: questions over retrieved documents, with and without reuse of their KV.

Run ``python -m bench.memory``. A cluster of real processes (``tierkv up``, one compute node, the
shipped model) has a table of embedded documents. One statement finds the documents nearest to a
topic and answers from them. Three users ask the same questions in turns: one blends documents at
any position, one reuses exact prefixes only, one has the cache off. Half of the questions put what
was said last in front of the documents, so that no two of these prompts begin alike. The first
questions meet new documents; the later ones are measured. Answers of the second user must be those
of the third, or the script fails.
"""

from __future__ import annotations

import random
import statistics
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import psycopg

from bench.batch import Session, cluster
from bench.report import Report, finish, make_parser

_WORDS = (
    "parcel", "river", "kettle", "station", "signature", "lamp", "order", "blender", "late",
    "refund", "city", "agent",
)  # fmt: skip
_OPTIONS = {
    "blended": "{'max_tokens': 4}",
    "prefixes": "{'max_tokens': 4, 'blend': false}",
    "uncached": "{'max_tokens': 4, 'cache': false}",
}
"""Options of the calls of each user; a user is a tenant, whose KV no other tenant finds."""
_FIND = {
    "nearest": "SELECT body FROM mem ORDER BY embedding <=> ai_embed(%(topic)s), id LIMIT {found}",
    "after_note": "SELECT body FROM (SELECT %(said)s AS body, -1 AS far UNION ALL SELECT body, "
    "embedding <=> ai_embed(%(topic)s) FROM mem) ORDER BY far, body LIMIT {found} + 1",
}
"""How a question's documents are found: the nearest alone, or after what was said last."""
_TO_LEARN = 3
"""Shares of all questions that are asked before the measured ones: one in so many."""


@dataclass(slots=True)
class Way:
    """What one user's measured questions took."""

    ttft_s: list[float] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    computed_tokens: list[float] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--documents", type=int, default=0, help="documents in memory")
    parser.add_argument("--words", type=int, default=0, help="words of a document")
    parser.add_argument("--found", type=int, default=5, help="documents of a question")
    parser.add_argument("--questions", type=int, default=0)
    arguments = parser.parse_args(argv)
    documents = arguments.documents or (6 if arguments.quick else 12)
    questions = arguments.questions or (9 if arguments.quick else 60)
    words = arguments.words or (60 if arguments.quick else 200)
    rng = random.Random(arguments.seed)
    report = Report("memory")
    report.add("documents", documents)
    report.add("found", arguments.found)
    ways = {(find, name): Way() for find in _FIND for name in _OPTIONS}
    settings = ("front.max_calls=0", "compute.load_policy=always", "namespace.blend=true")
    with cluster(1, *settings) as (dsn, rest), ExitStack() as stack:
        texts = [_document(number, words, rng) for number in range(documents)]
        sessions = {
            name: stack.enter_context(_session(dsn.replace("user=tierkv", f"user={name}"), texts))
            for name in _OPTIONS
        }
        for number in range(2 * questions):
            topic = " ".join(rng.sample(_WORDS, 3))
            said = f"Said last: {number} {' '.join(rng.sample(_WORDS, 6))}."
            find = sorted(_FIND)[number % 2]
            for name in rng.sample(sorted(_OPTIONS), len(_OPTIONS)):
                way = Way() if number < 2 * questions // _TO_LEARN else ways[find, name]
                values = {"q": f"Question: What is said of {topic}?", "topic": topic, "said": said}
                _ask(sessions[name], rest, _statement(find, name, arguments.found), values, way)
    for find in _FIND:
        if ways[find, "prefixes"].answers != ways[find, "uncached"].answers:
            raise AssertionError("exact reuse gave other answers than no cache")
        _tell(report, find, {name: ways[find, name] for name in _OPTIONS})
    finish(report, arguments.format)


def _document(number: int, words: int, rng: random.Random) -> str:
    return f"Note {number}: {' '.join(rng.choice(_WORDS) for _ in range(words))}"


def _session(dsn: str, texts: Sequence[str]) -> Session:
    """Connect as a user and remember the documents."""
    session = psycopg.connect(dsn, autocommit=True)
    session.execute("CREATE TEMP TABLE docs (id INTEGER, body VARCHAR)")
    with session.cursor() as cursor:
        cursor.executemany("INSERT INTO docs VALUES (%s, %s)", list(enumerate(texts)))
    session.execute("CREATE TEMP TABLE mem AS SELECT *, ai_embed(body) AS embedding FROM docs")
    return session


def _statement(find: str, name: str, found: int) -> bytes:
    return (
        "SELECT (d).ttft_ms, (d).prompt_tokens, (d).cached_tokens, (d).value FROM (SELECT "
        f"ai_generate_detail(%(q)s, documents => ({_FIND[find].format(found=found)}), "
        f"options => {_OPTIONS[name]}) AS d) AS asked"
    ).encode()


def _ask(session: Session, rest: str, statement: bytes, values: dict[str, str], way: Way) -> None:
    before = _recomputed(rest)
    row = session.execute(statement, values).fetchone()
    assert row is not None
    ttft_ms, prompt, cached, answer = row
    way.ttft_s.append(ttft_ms / 1000)
    way.prompt_tokens.append(prompt)
    way.computed_tokens.append(prompt - cached + _recomputed(rest) - before)
    way.answers.append(answer)


def _recomputed(rest: str) -> float:
    """Return the reused tokens that were computed again so far, of all calls."""
    with urllib.request.urlopen(rest.removesuffix("/v1") + "/metrics") as reply:
        lines = reply.read().decode().splitlines()
    return sum(
        float(line.split()[-1])
        for line in lines
        if line.startswith("tierkv_recomputed_tokens_total")
    )


def _tell(report: Report, find: str, ways: dict[str, Way]) -> None:
    report.add(f"{find}_prompt_tokens", statistics.mean(ways["uncached"].prompt_tokens))
    for name, way in ways.items():
        report.add(f"{find}_{name}_first_token_s", statistics.median(way.ttft_s))
        report.add(f"{find}_{name}_computed_tokens", statistics.mean(way.computed_tokens))
        pairs = zip(way.answers, ways["uncached"].answers, strict=True)
        report.add(f"{find}_{name}_equal_answers_share", statistics.mean(a == b for a, b in pairs))


if __name__ == "__main__":
    main()
