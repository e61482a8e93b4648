"""SGLang's own caches over our backend and real pool nodes: what comes back is what went in.

The pools, the radix tree, the cache controller with its threads and the backend factory are
SGLang's; numbers that follow from the tokens stand for what a model computes.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolTransfer
from sglang.srt.runtime_context import get_context, get_serving

from tests.engines.sglang.kit import HEADS, LAYERS, PAGE, Rank, until
from tests.fix_cluster import free_port
from tests.fix_serve_dmp import StartNode
from tests.fix_serve_meta import MetaAlone

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
MakeRank = Callable[..., Rank]
TOKENS = list(range(1, 10 * PAGE + 1))


def pool_of(address: str) -> dict[str, Any]:
    return {"pool": address}


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "page_head", "layer_first"])
def test_evicted_pages_come_back_from_the_pool(
    start_node: StartNode, make_rank: MakeRank, layout: str
) -> None:
    rank = make_rank(pool_of(start_node().address), layout=layout)
    rank.up()
    assert rank.host.layout == layout
    rank.compute(TOKENS)
    rank.forget(1_000)
    assert rank.cached(TOKENS) == 0
    assert rank.fetch(TOKENS) == len(TOKENS)
    assert rank.on_device(TOKENS) == 0
    rank.load_back(TOKENS)
    assert rank.on_device(TOKENS) == len(TOKENS) and rank.wrong(TOKENS) == 0
    counts = rank.backend.door.counts()
    assert counts["stored_tokens"] == counts["hit_tokens"] == counts["query_tokens"] == 160
    assert counts["write_bytes"] == counts["read_bytes"] == 160 * LAYERS * HEADS * 8 * 2 * 2
    assert rank.notes() == ()


@pytest.mark.parametrize("tells_prefixes", [False, True])
def test_one_engine_finds_what_another_computed(
    start_node: StartNode, make_rank: MakeRank, tells_prefixes: bool
) -> None:
    settings = pool_of(start_node().address)
    settings["hicache_storage_pass_prefix_keys"] = tells_prefixes
    first, second = (make_rank(settings) for _ in range(2))
    assert first.tree.hicache_storage_pass_prefix_keys is tells_prefixes
    first.up()
    second.up()
    first.compute(TOKENS)
    longer = [*TOKENS, *range(900, 900 + 2 * PAGE)]
    assert second.fetch(longer) == len(TOKENS)
    second.load_back(longer)
    assert second.wrong(TOKENS) == 0
    # What it shares with the prefix in the tree is not computed again, nor stored twice.
    second.compute(longer)
    assert second.backend.door.counts()["stored_tokens"] == 2 * PAGE
    assert first.fetch(longer) == len(longer)
    first.load_back(longer)
    assert first.wrong(longer) == 0


@pytest.mark.parametrize("salt", ["acme", "ü\n☃ @/\\ " + "x" * 3_000])
def test_salts_keep_tenants_apart(start_node: StartNode, make_rank: MakeRank, salt: str) -> None:
    address = start_node().address
    first, second = (make_rank(pool_of(address)) for _ in range(2))
    first.up()
    second.up()
    first.compute(TOKENS, salt=salt)
    assert second.fetch(TOKENS) == 0
    assert second.fetch(TOKENS, salt="another") == 0
    assert second.fetch(TOKENS, salt=salt) == len(TOKENS)
    second.load_back(TOKENS, salt=salt)
    assert second.wrong(TOKENS, salt=salt) == 0


def test_tenants_of_engines_are_kept_apart_too(start_node: StartNode, make_rank: MakeRank) -> None:
    address = start_node().address
    first = make_rank(pool_of(address) | {"tenant": "a"})
    second = make_rank(pool_of(address) | {"tenant": "b"})
    first.up()
    second.up()
    first.compute(TOKENS)
    assert second.fetch(TOKENS) == 0 and first.storage_pages(TOKENS) == 10


def test_a_killed_pool_means_misses_and_keeps_its_pages(
    start_node: StartNode, make_rank: MakeRank
) -> None:
    port = str(free_port())
    node = start_node("--port", port)
    rank = make_rank(pool_of(node.address))
    rank.up()
    rank.compute(TOKENS)
    node.end(signal.SIGKILL)
    rank.forget(1_000)
    assert rank.fetch(TOKENS) == 0
    others = list(range(500, 500 + 4 * PAGE))
    rank.compute(others)
    assert rank.wrong(others) == 0
    until(lambda: "pool_down" in rank.notes(), what=lambda: "the door says so")
    start_node("--port", port)
    rank.up()
    assert rank.fetch(TOKENS) == len(TOKENS)
    rank.load_back(TOKENS)
    assert rank.wrong(TOKENS) == 0


def test_a_pool_that_comes_late_is_used_then(start_node: StartNode, make_rank: MakeRank) -> None:
    port = str(free_port())
    rank = make_rank(pool_of(f"127.0.0.1:{port}"))
    rank.compute(TOKENS)
    assert rank.wrong(TOKENS) == 0 and rank.storage_pages(TOKENS) == 0
    start_node("--port", port)
    rank.up()
    others = list(range(500, 500 + 4 * PAGE))
    rank.compute(others)
    assert rank.storage_pages(others) == 4


def test_detaching_and_attaching_keeps_the_pages(
    start_node: StartNode, make_rank: MakeRank
) -> None:
    rank = make_rank(pool_of(start_node().address), attach=False)
    assert rank.attach() == ""
    rank.up()
    rank.compute(TOKENS)
    door = rank.backend.door
    rank.detach()
    assert not door.up and rank.backend is None
    rank.compute(list(range(500, 500 + PAGE)))
    rank.forget(1_000)
    assert rank.attach() == ""
    rank.up()
    assert rank.fetch(TOKENS) == len(TOKENS)
    rank.load_back(TOKENS)
    assert rank.wrong(TOKENS) == 0


def test_a_misspelt_setting_is_refused_with_the_right_one(
    start_node: StartNode, make_rank: MakeRank
) -> None:
    rank = make_rank({"pol": "127.0.0.1:1"}, attach=False)
    # SGLang logs the refusal with its trace.
    logging.getLogger("sglang").setLevel(logging.CRITICAL)
    assert "unknown setting 'pol'. Did you mean pool?" in rank.attach()
    rank.extra = {**rank.extra, "pool": start_node().address}
    del rank.extra["pol"]
    assert rank.attach() == ""


def test_bytes_that_rot_in_the_pool_are_a_miss(
    start_node: StartNode, make_rank: MakeRank, tmp_path: Path
) -> None:
    rank = make_rank(pool_of(start_node().address))
    rank.up()
    rank.compute(TOKENS)
    spoiled = spoil(rank, tmp_path, page=4)
    assert spoiled == 1
    rank.forget(1_000)
    # The page itself is refused, and those behind it are of no use.
    assert rank.fetch(TOKENS) == 4 * PAGE
    rank.load_back(TOKENS)
    assert rank.wrong(TOKENS[: 4 * PAGE]) == 0


def spoil(rank: Rank, folder: Path, *, page: int) -> int:
    """Flip a bit of a page in the pool's segment; returns how often its bytes were there."""
    match = rank.match(TOKENS)
    tokens = slice(page * PAGE, (page + 1) * PAGE)
    indices = rank.tree.path_device_indices(match.last_device_node)[tokens]
    wanted = rank.kv.v_buffer[LAYERS - 1][indices].contiguous().view(torch.uint8).numpy().tobytes()
    [segment] = [path for path in folder.iterdir() if path.stat().st_size >= 64 << 20]
    raw = segment.read_bytes()
    at, found = raw.find(wanted), 0
    with segment.open("r+b") as file:
        while at >= 0:
            file.seek(at)
            file.write(bytes([raw[at] ^ 1]))
            found, at = found + 1, raw.find(wanted, at + 1)
    return found


def test_a_full_pool_costs_hits_and_nothing_else(
    start_node: StartNode, make_rank: MakeRank
) -> None:
    node = start_node("--capacity", "32MiB")
    rank = make_rank(pool_of(node.address), tokens=256)
    rank.up()
    for start in range(0, 30_000, 200):  # Half as much again as fits: pages take 32 KiB.
        prompt = list(range(start, start + 10 * PAGE))
        rank.forget(1_000)
        rank.compute(prompt)
        assert rank.wrong(prompt) == 0
    rank.forget(1_000)
    kept = rank.fetch(prompt)
    rank.load_back(prompt)
    assert kept > 0 and rank.wrong(prompt) == 0
    assert rank.storage_pages(list(range(10 * PAGE))) == 0


def test_clear_is_for_all_engines_that_share(start_node: StartNode, make_rank: MakeRank) -> None:
    address = start_node().address
    first, second = (make_rank(pool_of(address)) for _ in range(2))
    first.up()
    second.up()
    first.compute(TOKENS)
    assert second.storage_pages(TOKENS) == 10
    assert first.tree.clear_storage_backend()
    assert first.storage_pages(TOKENS) == second.storage_pages(TOKENS) == 0
    assert make_rank(pool_of(address)).storage_pages(TOKENS) == 0
    second.compute(TOKENS)
    assert first.storage_pages(TOKENS) == second.storage_pages(TOKENS) == 10
    for rank in (first, second, first):
        assert rank.tree.clear_storage_backend()
        assert first.storage_pages(TOKENS) == second.storage_pages(TOKENS) == 0
    late = make_rank(pool_of(address))
    late.up()
    late.compute(TOKENS)
    assert first.storage_pages(TOKENS) == 10


def test_a_clear_that_the_pool_has_not_heard_of_hides_everything(
    start_node: StartNode, make_rank: MakeRank
) -> None:
    port = str(free_port())
    node = start_node("--port", port)
    rank, other = (make_rank(pool_of(node.address)) for _ in range(2))
    rank.up()
    other.up()
    rank.compute(TOKENS)
    node.end(signal.SIGKILL)
    until(lambda: not rank.backend.door.up, what=lambda: "the door sees it")
    rank.tree.clear_storage_backend()
    start_node("--port", port)
    rank.up()
    other.up()
    # The first call tells the pool, and from then on it holds for the other one as well.
    assert rank.storage_pages(TOKENS) == 0 and other.storage_pages(TOKENS) == 0


def test_many_clears_are_found_by_an_engine_that_comes_later(
    start_node: StartNode, make_rank: MakeRank
) -> None:
    address = start_node().address
    rank = make_rank(pool_of(address))
    rank.up()
    for _ in range(70):
        assert rank.backend.clear()
    rank.compute(TOKENS)
    late = make_rank(pool_of(address))
    late.up()
    assert late.storage_pages(TOKENS) == 10


def test_replicated_kv_has_one_writer_and_all_ranks_read(
    start_node: StartNode, make_rank: MakeRank
) -> None:
    address = start_node().address
    writer, reader = (make_rank(pool_of(address), mla=True, tp=(rank, 2)) for rank in range(2))
    wider = make_rank(pool_of(address), mla=True, tp=(3, 4))
    for rank in (writer, reader, wider):
        rank.up()
    reader.compute(TOKENS)
    assert reader.storage_pages(TOKENS) == 0
    writer.compute(TOKENS)
    assert writer.storage_pages(TOKENS) == reader.storage_pages(TOKENS) == 10
    reader.forget(1_000)
    for rank in (reader, wider):
        assert rank.fetch(TOKENS) == len(TOKENS)
        rank.load_back(TOKENS)
        assert rank.wrong(TOKENS) == 0


def test_divided_kv_is_each_rank_s_own(start_node: StartNode, make_rank: MakeRank) -> None:
    address = start_node().address
    first, second, whole = (make_rank(pool_of(address), tp=tp) for tp in ((0, 2), (1, 2), (0, 1)))
    for rank in (first, second, whole):
        rank.up()
    first.compute(TOKENS)
    assert (first.storage_pages(TOKENS), second.storage_pages(TOKENS)) == (10, 0)
    assert whole.storage_pages(TOKENS) == 0
    until(lambda: "layout_mismatch" in whole.notes(), what=lambda: str(whole.notes()))
    assert "tensor parallel 1 here, 2 there" in "".join(whole.backend.door.notes())
    assert "layout_mismatch" not in second.notes()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"layout": "layer_first"}, "page layout layer_first here, page_first_direct there"),
        ({"page": 32}, "page size 32 here, 16 there"),
    ],
)
def test_engines_that_cannot_share_say_so_and_serve(
    start_node: StartNode, make_rank: MakeRank, other: dict[str, Any], said: str
) -> None:
    address = start_node().address
    first = make_rank(pool_of(address))
    first.up()
    first.compute(TOKENS)
    second = make_rank(pool_of(address), **other)
    second.up()
    until(lambda: "layout_mismatch" in second.notes(), what=lambda: str(second.notes()))
    assert said in "".join(second.backend.door.notes())
    assert second.fetch(TOKENS) == 0
    second.compute(TOKENS)
    second.forget(1_000)
    assert second.fetch(TOKENS) == len(TOKENS)
    second.load_back(TOKENS)
    assert second.wrong(TOKENS) == 0


@pytest.mark.parametrize("layout", ["page_first_direct", "layer_first", "page_head"])
def test_flat_pages_are_the_same_bytes(
    start_node: StartNode, make_rank: MakeRank, layout: str
) -> None:
    address = start_node().address
    zero_copy = make_rank(pool_of(address), layout=layout)
    flat = make_rank(pool_of(address) | {"interface_v1": 0}, layout=layout)
    for rank in (zero_copy, flat):
        rank.up()
    flat.host.pin_memory = False  # SGLang would pin its flat pages, which takes a GPU.
    assert "interface_v1" in flat.notes() and zero_copy.notes() == ()
    zero_copy.compute(TOKENS)
    assert flat.fetch(TOKENS) == len(TOKENS)
    flat.load_back(TOKENS)
    assert flat.wrong(TOKENS) == 0
    others = list(range(500, 500 + 4 * PAGE))
    flat.compute(others)
    assert zero_copy.fetch(others) == len(others)
    zero_copy.load_back(others)
    assert zero_copy.wrong(others) == 0


def test_replaced_weights_share_nothing_with_what_was_before(
    start_node: StartNode, make_rank: MakeRank
) -> None:
    address = start_node().address
    rank, other = (make_rank(pool_of(address)) for _ in range(2))
    rank.up()
    other.up()
    rank.compute(TOKENS)
    more = list(range(500, 500 + 4 * PAGE))
    was = get_serving().weight_version
    try:
        # As SGLang's scheduler notes an update of weights that names a version.
        get_context().override("scheduler.weight_version", weight_version="step-7")
        assert rank.storage_pages(TOKENS) == 0 and "weights_replaced" in rank.notes()
        # What was on its way to storage when the weights changed must not get there.
        rank.compute(more)
        assert rank.storage_pages(more) == 0
        rank.detach()
        assert rank.attach() == ""
        rank.up()
        assert rank.storage_pages(TOKENS) == rank.storage_pages(more) == 0
        rank.forget(1_000)
        rank.compute(more)
        assert rank.storage_pages(more) == 4
    finally:
        get_context().override("scheduler.weight_version", weight_version=was)
    assert rank.storage_pages(more) == 0, "a version that comes again may be another"
    assert other.storage_pages(more) == 0 and other.storage_pages(TOKENS) == 10


def test_single_pages_by_hand(start_node: StartNode, make_rank: MakeRank) -> None:
    rank = make_rank(pool_of(start_node().address))
    rank.up()
    backend = rank.backend
    page = torch.randn(rank.host.get_size_per_token() * PAGE // 2).bfloat16()
    [name, other] = rank.hashes(TOKENS)[:2]
    assert not backend.exists(name) and backend.get(name) is None
    assert backend.set(name, page) and backend.exists(name)
    assert backend.set(name, page), "a page that is there already is stored"
    target = torch.zeros_like(page)
    assert backend.get(name, target) is target and torch.equal(target, page)
    fresh = backend.get(name)
    assert fresh is not None and torch.equal(fresh.view(torch.bfloat16), page)
    assert backend.get(name, torch.zeros(7)) is None, "another size is a miss"
    assert not backend.set(other, page[:-1]) and not backend.set(other)
    assert backend.batch_exists([name, other]) == 1 and backend.batch_exists([]) == 0
    assert backend.batch_get([other, name], [None, None])[0] is None


def test_pools_beside_keys_and_values(start_node: StartNode, make_rank: MakeRank) -> None:
    rank = make_rank(pool_of(start_node().address))
    rank.up()
    backend, host = rank.backend, rank.host
    # A host pool like any other stands for those of hybrid models.
    backend.register_mem_host_pool_v2(host, "swa")
    backend.register_mem_host_pool_v2(host, "mamba")
    rank.compute(TOKENS)
    names = rank.hashes(TOKENS)
    indices = torch.arange(10 * PAGE, dtype=torch.int64)
    last = slice(8 * PAGE, 10 * PAGE)
    stored = backend.batch_set_v2(
        [
            PoolTransfer("swa", host_indices=indices[last], keys=names[8:]),
            PoolTransfer("mamba", host_indices=indices[: 5 * PAGE], keys=names[:5]),
        ]
    )
    assert stored == {"swa": [True] * 2, "mamba": [True] * 5}
    window = PoolTransfer("swa", keys=names[8:], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    every = PoolTransfer("mamba", keys=names, hit_policy=PoolHitPolicy.ALL_PAGES)
    groups = PoolTransfer("other", keys=names, hit_policy=PoolHitPolicy.BLOCK_GROUPS)
    found = backend.batch_exists_v2(names, [window, groups])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (10, [10])
    assert found.extra_pool_hit_pages == {"kv": 10, "swa": 10}
    found = backend.batch_exists_v2(names, [every])
    assert (found.kv_hit_pages, found.extra_pool_hit_pages["mamba"]) == (5, 5)
    assert backend.batch_exists_v2(names, [window, every]).kv_hit_pages == 0
    unknown = PoolTransfer("draft", host_indices=indices[:PAGE], keys=names[:1])
    assert backend.batch_set_v2([unknown]) == {"draft": [False]}
    before = host.kv_buffer[:, :2].clone()
    host.kv_buffer[:, :2] = 0
    got = backend.batch_get_v2(
        [PoolTransfer("mamba", host_indices=indices[: 2 * PAGE], keys=names[:2])]
    )
    assert got == {"mamba": [True, True]} and torch.equal(host.kv_buffer[:, :2], before)
    short = PoolTransfer("swa", host_indices=indices[:3], keys=names[8:])
    assert backend.batch_get_v2([short]) == {"swa": [False, False]}
    assert "host_memory" in rank.notes()


def test_a_cluster_keeps_its_pages_while_its_meta_server_is_away(
    start_node: StartNode, make_rank: MakeRank, tmp_path: Path
) -> None:
    port = free_port()
    meta = MetaAlone(tmp_path, port)
    try:
        start_node("--set", f"cluster.meta_address={meta.address}")
        rank = make_rank({"meta": meta.address})
        rank.up()
        rank.compute(TOKENS)
        meta.end(signal.SIGKILL)
        rank.forget(1_000)
        assert rank.fetch(TOKENS) == len(TOKENS)
        rank.load_back(TOKENS)
        assert rank.wrong(TOKENS) == 0
        until(lambda: "meta_down" in rank.notes(), what=lambda: str(rank.notes()))
        # An engine that starts now must not guess how blocks are named.
        late = make_rank({"meta": meta.address})
        assert late.storage_pages(TOKENS) == 0
        meta = MetaAlone(tmp_path, port)
        late.up()
        assert late.fetch(TOKENS) == len(TOKENS) and "new_secret" not in rank.notes()
    finally:
        meta.end()


def test_sglang_s_metrics_are_fed(start_node: StartNode, make_rank: MakeRank) -> None:
    rank = make_rank(pool_of(start_node().address))
    rank.up()
    rank.compute(TOKENS)
    rank.forget(1_000)
    rank.fetch(TOKENS)
    stats = rank.backend.get_stats()
    assert sum(stats.prefetch_pgs) == sum(stats.backup_pgs) == 10
    assert all(rate > 0 for rate in stats.prefetch_bandwidth + stats.backup_bandwidth)
    assert rank.backend.get_stats().prefetch_pgs == []
