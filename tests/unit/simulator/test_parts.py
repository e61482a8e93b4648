"""The parts of a simulated cluster, each alone: link, caches, workload, constants, prices."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.kvcore.errors import ConfigError
from tierkv.policies.select import PRODUCTION_POLICIES, make_policy
from tierkv.simulator.nodes.job import look_up
from tierkv.simulator.nodes.prefix_cache import PoolLink, PrefixCache
from tierkv.simulator.nodes.serving_model import load_constants
from tierkv.simulator.results import quantile
from tierkv.simulator.sizing import load_prices
from tierkv.simulator.trace import Request
from tierkv.simulator.workload import NOBODY, Workload, make_workload

CHAINS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=40)


def workload_of(chains: list[list[int]]) -> Workload:
    """Make a workload of prompts; an id is made from its whole prefix, as in real traces."""
    requests = []
    for number, chain in enumerate(chains):
        ids = tuple(
            sum((x + 1) * 4**i for i, x in enumerate(chain[: n + 1])) for n in range(len(chain))
        )
        requests.append(Request(float(number), 10 * len(ids) + 5, 1, ids))
    return make_workload(requests, block_tokens=10)


# -- link


def test_loads_go_one_after_the_other() -> None:
    link = PoolLink(10.0)
    assert link.load(50, now=1.0).end_s == 6.0
    second = link.load(10, now=2.0)
    assert (second.start_s, second.end_s) == (6.0, 7.0)
    assert link.queue_s(3.0) == 4.0
    assert link.queue_s(9.0) == 0.0


def test_writes_take_the_time_that_loads_leave() -> None:
    link = PoolLink(10.0)
    ticket = link.write(30, now=0.0)
    assert link.rest_of_write_s(ticket, 0.0) == 3.0
    link.load(20, now=1.0)  # One second was written; the load has the wire until 3.
    assert link.rest_of_write_s(ticket, 2.0) == 1.0 + 2.0
    assert link.write_backlog_s(4.0) == 1.0
    assert link.rest_of_write_s(ticket, 5.0) == 0.0
    assert link.write_backlog_s(100.0) == 0.0
    assert link.busy_s == 5.0


# -- caches


@pytest.mark.parametrize("policy", sorted(PRODUCTION_POLICIES))
@given(chains=CHAINS, capacity=st.integers(0, 8))
def test_a_cache_stays_closed_under_prefixes_and_within_its_size(
    policy: str, chains: list[list[int]], capacity: int
) -> None:
    load = workload_of(chains)
    residents = [0] * len(load.facts)
    cache = PrefixCache(make_policy(policy, capacity), capacity, load.facts, residents, 1)
    for prompt in load.prompts:
        cache.touch(prompt.blocks, prompt.arrival_s)
        cache.add(prompt.blocks, prompt.arrival_s)
        cache.check_invariants()
        depth = cache.depth(prompt.blocks)
        assert [block in cache for block in prompt.blocks] == [
            at < depth for at in range(len(prompt.blocks))
        ]
    assert len(cache) <= capacity


@given(chains=CHAINS)
def test_a_held_chain_is_never_evicted(chains: list[list[int]]) -> None:
    load = workload_of(chains)
    cache = PrefixCache(make_policy("leaf_lru", 6), 6, load.facts, [0] * len(load.facts), 1)
    first = load.prompts[0].blocks
    cache.add(first, 0.0)
    cache.hold(first[-1])
    for prompt in load.prompts[1:]:
        cache.add(prompt.blocks, prompt.arrival_s)
        assert cache.depth(first) == len(first)
    cache.release(first[-1])
    cache.check_invariants()


@given(chains=CHAINS, sizes=st.lists(st.integers(0, 6), min_size=3, max_size=3))
def test_look_up_finds_what_each_cache_has(chains: list[list[int]], sizes: list[int]) -> None:
    load = workload_of(chains)
    residents = [0] * len(load.facts)
    caches = [
        PrefixCache(make_policy("leaf_lru", size), size, load.facts, residents, 1 << bit)
        for bit, size in enumerate(sizes)
    ]
    for number, prompt in enumerate(load.prompts):
        caches[number % 3].add(prompt.blocks, prompt.arrival_s)
        found = look_up(prompt.blocks, residents, 2)
        assert [*found.local, found.pool] == [cache.depth(prompt.blocks) for cache in caches]


# -- workloads


def test_only_full_blocks_count_and_a_block_is_its_whole_prefix() -> None:
    load = make_workload(
        [Request(0.0, 25, 0, (7, 8, 9)), Request(1.0, 30, 1, (6, 8, 9))], block_tokens=10
    )
    first, second = load.prompts
    assert (first.blocks, second.blocks) == ((0, 1), (2, 3, 4))
    assert [facts.parent for facts in load.facts] == [None, 0, None, 2, 3]
    assert [facts.outlook.depth for facts in load.facts] == [0, 1, 0, 1, 2]
    assert first.output_tokens == 1
    assert load.block_references == 5


def test_sessions_are_linked_and_conversations_found() -> None:
    def request(at_s: float, ids: tuple[int, ...], session: str | None = None) -> Request:
        return Request(at_s, 10 * len(ids), 1, ids, session_id=session)

    load = make_workload(
        [
            request(0.0, (1, 2), "a"),
            request(1.0, (1, 3), "b"),
            request(4.0, (1, 2, 4), "a"),
            request(5.0, (9,)),
            request(6.0, (9, 8)),
            request(7.0, (9, 7)),
        ],
        block_tokens=10,
        speed=2.0,
    )
    assert [prompt.follower for prompt in load.prompts] == [2, *[NOBODY] * 5]
    assert [prompt.is_first for prompt in load.prompts] == [True, True, False, True, True, True]
    assert [prompt.conversation for prompt in load.prompts] == [0, 1, 0, 3, 3, 5]
    assert load.prompts[2].gap_s == 4.0
    assert load.prompts[2].arrival_s == 2.0


# -- constants and prices


def test_the_shipped_model_has_the_numbers_of_its_comments() -> None:
    model = load_constants().model("dense-70b-h20")
    assert model.layout(512).stored_bytes == 512 * 320 * 1024
    assert model.prefill_s(0, 0) == 0.0
    # At 32 K of context one more second computes about 2,880 tokens: reading pays above 0.95 GB/s.
    marginal_s = model.prefill_s(32_768, 1_000) - model.fixed_s
    assert 0.93e9 < 1_000 / marginal_s * 320 * 1024 < 0.96e9


def test_unknown_models_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="known: dense-70b-h20, "):
        load_constants().model("gpt")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("decode_slots = 256", "decode_slots = 0", "decode_slots must be positive"),
        ("heartbeat_s = 1.0", "heartbeat_s = -1.0", "must be a number, not negative"),
        ("fixed_s = 0.01 ", "fixed = 0.01 ", "must have exactly"),
        ("[cluster]", "[clusters]", r"no table \[cluster\]"),
        ("decode_harm = 0.2", "decode_harm = 1.0", "below 1"),
        ("write_share = 1.0", "write_share = 1.5", "at most 1"),
        ("[cluster]", "[cluster", "not valid TOML"),
    ],
)
def test_bad_constants_are_refused(old: str, new: str, says: str, tmp_path: Path) -> None:
    text = Path("simulator/models.toml").read_text().replace(old, new, 1)
    file = tmp_path / "models.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_constants(file)
    with pytest.raises(ConfigError, match="can't be read"):
        load_constants(tmp_path / "none.toml")


def test_prices_by_region_however_it_is_spelled(tmp_path: Path) -> None:
    prices = load_prices()
    assert (prices.currency, prices.per_gb_month["mainland"]) == ("CNY", 8.0)
    assert prices.regions(["hongkong", "Silicon Valley"]) == ("hong_kong", "silicon_valley")
    assert len(prices.regions([])) == 7
    with pytest.raises(ConfigError, match="no price for region 'mars'; known: mainland"):
        prices.regions(["mars"])


@pytest.mark.parametrize(
    ("text", "says"),
    [("regions = 3", "no table"), ("[regions]\na = -1", "positive"), ("[", "not valid")],
)
def test_bad_prices_are_refused(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "prices.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_prices(file)


def test_quantiles() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [quantile(values, share) for share in (0.5, 0.9, 0.99)] == [50.0, 90.0, 99.0]
    assert quantile([3.0], 0.5) == 3.0
    assert quantile([], 0.5) == 0.0
