"""Any sequence of what two engines on one pool may do: hits where they must be, no wrong number.

The engines compute, evict, fetch, clear, detach and attach; the pool's node dies and comes back.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engines.sglang.kit import PAGE, Rank, until
from tests.fix_cluster import free_port
from tests.fix_serve_dmp import Alone

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
SHARED_PAGES = 2

engines = st.integers(0, 1)
prompts = st.tuples(st.integers(0, 2), st.integers(1, 6), st.sampled_from([None, "a"]))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("compute"), engines, prompts),
        st.tuples(st.just("fetch"), engines, prompts),
        st.tuples(st.just("forget"), engines, prompts),
        st.tuples(st.sampled_from(["clear", "reattach"]), engines, prompts),
    ),
    min_size=4,
    max_size=12,
)
Prompt = tuple[int, int, str | None]


class Node:
    """A pool node that is killed and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.port = folder, str(free_port())
        self._process = Alone(folder, "--port", self.port)
        self.address = self._process.address

    def kill(self) -> None:
        self._process.end(signal.SIGKILL)
        self._process = Alone(self._folder, "--port", self.port)

    def end(self) -> None:
        self._process.end()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    started = Node(tmp_path_factory.mktemp("node"))
    yield started
    started.end()


def tokens_of(prompt: Prompt) -> list[int]:
    branch, pages, _ = prompt
    return [
        page * 100 + i if page < SHARED_PAGES else (branch + 1) * 10_000 + page * 100 + i
        for page in range(pages)
        for i in range(PAGE)
    ]


def pages_of(prompt: Prompt) -> list[tuple[object, ...]]:
    """Name the pages of a prompt: everything up to their end, and the salt."""
    tokens, salt = tokens_of(prompt), prompt[2]
    return [(salt, *tokens[:end]) for end in range(PAGE, len(tokens) + 1, PAGE)]


class Play:
    """Two engines, and what the pool must and may have.

    Attributes:
        must: pages that were stored since the last clear.
        may: pages that were computed since then, or are in an engine's own caches.
    """

    def __init__(self, node: Node, model: str) -> None:
        settings = {"pool": node.address, "model": model, "tenant": f"t-{uuid4().hex}"}
        self.node = node
        self.ranks = [Rank(settings, tokens=256) for _ in range(2)]
        self.must: set[tuple[object, ...]] = set()
        self.may: set[tuple[object, ...]] = set()
        self.wait()

    def wait(self) -> None:
        for rank in self.ranks:
            rank.up()

    def compute(self, rank: Rank, prompt: Prompt) -> None:
        tokens, salt = tokens_of(prompt), prompt[2]
        have = rank.cached(tokens, salt=salt) // PAGE
        rank.compute(tokens, salt=salt)
        self.must.update(pages_of(prompt)[have:])
        self.may.update(pages_of(prompt))

    def fetch(self, rank: Rank, prompt: Prompt) -> None:
        tokens, salt = tokens_of(prompt), prompt[2]
        have = rank.cached(tokens, salt=salt) // PAGE
        got = rank.fetch(tokens, salt=salt) // PAGE
        missing = pages_of(prompt)[have:]
        assert have + _leading(missing, self.must) <= got <= have + _leading(missing, self.may)
        rank.load_back(tokens, salt=salt)
        assert rank.wrong(tokens, salt=salt) == 0

    def forget(self, rank: Rank, prompt: Prompt) -> None:
        rank.forget(1_000)

    def clear(self, rank: Rank, prompt: Prompt) -> None:
        assert rank.tree.clear_storage_backend()
        self.must.clear()
        self.may.clear()

    def reattach(self, rank: Rank, prompt: Prompt) -> None:
        rank.detach()
        assert rank.attach() == ""
        rank.up()

    def kill(self) -> None:
        self.node.kill()
        # A door that has not seen it yet gives misses, and is up; a call makes it look.
        for each in self.ranks:
            each.storage_pages(tokens_of((0, 1, "nobody")))

        def back() -> bool:
            return all(bool(self.known(each)) for each in self.ranks)

        until(back, what=lambda: str([each.backend.door.why_down for each in self.ranks]))

    def known(self, rank: Rank) -> bool:
        """Whether the pool answers."""
        name = f"probe-{uuid4().hex}"
        call = rank.backend.door.submit(lambda pool: pool.put(name, b"1"), False, name="probe")
        return bool(call.result())

    def close(self) -> None:
        for rank in reversed(self.ranks):
            rank.close()


def _leading(pages: list[tuple[object, ...]], known: set[tuple[object, ...]]) -> int:
    return next((i for i, page in enumerate(pages) if page not in known), len(pages))


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(played=steps, killed_at=st.one_of(st.none(), st.integers(1, 11)))
def test_any_sequence_gives_hits_and_never_a_wrong_number(
    node: Node, model: str, played: list[tuple[str, int, Prompt]], killed_at: int | None
) -> None:
    play = Play(node, model)
    try:
        for number, (what, engine, prompt) in enumerate(played):
            if number == killed_at:
                play.kill()
            step: Callable[[Rank, Prompt], None] = getattr(play, what)
            step(play.ranks[engine], prompt)
    finally:
        play.close()
