"""Both halves of vLLM's connector on a real pool, without vLLM: what they promise each other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fix_cluster import wait_for
from tests.fix_door import IDENTITY, LAYOUT, MakeDoor
from tests.fix_serve_dmp import Alone
from tierkv.integrations.keys import TenantSalt, identity_digest, rank_key, user_namespace
from tierkv.integrations.pool_door import PoolDoor
from tierkv.integrations.settings import PoolAccess
from tierkv.integrations.vllm.connector_book import BlockLoad, BlockSave, StepPlan, StepReport
from tierkv.integrations.vllm.connector_scheduler import HANDOFF, SchedulerSide
from tierkv.integrations.vllm.connector_settings import ALWAYS, LAYER_BY_LAYER, ConnectorSettings
from tierkv.integrations.vllm.connector_worker import StepResults, WorkerSide
from tierkv.integrations.vllm.kv_memory import StagedMemory, open_memory
from tierkv.kvcore.block import block_keys
from tierkv.kvcore.clock import ManualClock, SystemClock
from tierkv.kvcore.ids import BlockKey, NamespaceKey

pytestmark = pytest.mark.integration

WIDTH = LAYOUT.block_tokens
LAYERS = [f"layers.{i}" for i in range(LAYOUT.layers)]


@dataclass
class Request:
    """What is read of vLLM's request."""

    request_id: str
    all_token_ids: list[int]
    cache_salt: str | None = None
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    kv_transfer_params: Any = None
    mm_features: list[Any] = field(default_factory=list)
    lora_request: Any = None
    prompt_embeds: Any = None
    pooling_params: Any = None
    resumable: bool = False
    skip_reading_prefix_cache: bool = False

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.all_token_ids

    @property
    def block_hashes(self) -> list[int]:
        return [
            hash(tuple(self.all_token_ids[:end]))
            for end in range(WIDTH, len(self.all_token_ids) + 1, WIDTH)
        ]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Alone]:
    alone = Alone(tmp_path)
    yield alone
    alone.end()


@pytest.fixture
def open_door(node: Alone, make_door: MakeDoor) -> Callable[..., PoolDoor]:
    def make(**changes: Any) -> PoolDoor:
        door = make_door({"pool": node.address}, **changes)
        wait_for(lambda: door.up, what="the door is up")
        return door

    return make


def memory_of(seed: int, blocks: int = 12, *, staged: bool = False) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    shape = (blocks, LAYOUT.kv_heads, WIDTH, 2 * LAYOUT.head_dim)
    if staged:  # Every second number of a larger tensor: no piece of memory is a block.
        return {name: torch.rand(*shape[:-1], 2 * shape[-1])[..., ::2] for name in LAYERS}
    return {name: torch.rand(shape) for name in LAYERS}


def worker_of(door: PoolDoor, tensors: dict[str, torch.Tensor], **settings: Any) -> WorkerSide:
    blocks = len(next(iter(tensors.values())))
    return WorkerSide(
        door,
        ConnectorSettings(**settings),
        open_memory(tensors, blocks=blocks, block_tokens=WIDTH),
        block_tokens=WIDTH,
        now=SystemClock().now,
    )


def scheduler_of(door: PoolDoor, now: Callable[[], float] | None = None, **settings: Any) -> Any:
    return SchedulerSide(
        door,
        ConnectorSettings(**{"load_policy": ALWAYS} | settings),
        block_tokens=WIDTH,
        hash_tokens=WIDTH,
        ranks=door.identity.ranks,
        now=now or SystemClock().now,
    )


def keys_of(namespace: NamespaceKey | None, tokens: list[int]) -> list[BlockKey]:
    assert namespace is not None
    return block_keys(namespace, tokens, block_tokens=WIDTH)


def run_step(worker: WorkerSide, plan: StepPlan, layers: list[str] = LAYERS) -> StepResults:
    """Do what vLLM does in a step."""
    worker.vacate(plan.preempted)
    worker.begin_step(plan)
    if any(load.in_step for load in plan.loads):
        worker.load()
    for name in layers:
        worker.layer_needed(name)
        worker.layer_computed(name)
    if not any(load.in_step for load in plan.loads):
        worker.load()
    worker.end_step()
    return worker.results()


def gather(worker: WorkerSide, first: StepResults, done: Callable[[StepResults], bool]) -> None:
    """Take empty steps until ``done``; what they tell is added to ``first``."""

    def enough() -> bool:
        if done(first):
            return True
        more = run_step(worker, StepPlan())
        first.sent |= more.sent
        first.received |= more.received
        first.failed |= more.failed
        first.report = first.report.merged(more.report)
        return done(first)

    wait_for(enough, what="the transfer is over")


def save(worker: WorkerSide, keys: list[BlockKey], places: list[int], **more: Any) -> StepResults:
    saves = [BlockSave(k, p, "r", fresh=True) for k, p in zip(keys, places, strict=True)]
    results = run_step(worker, StepPlan(saves=saves, closing=["r"]), **more)
    gather(worker, results, lambda found: "r" in found.sent)
    return results


def load(
    worker: WorkerSide, keys: list[BlockKey], places: list[int], *, in_step: bool, **more: Any
) -> set[int]:
    """Load blocks; the places where that failed."""
    plan = StepPlan(loads=[BlockLoad("r", tuple(keys), tuple(places), in_step)])
    results = run_step(worker, plan, **more)
    if not in_step:
        gather(worker, results, lambda found: "r" in found.received)
    return results.failed


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("staged", [False, True])
def test_what_one_worker_saves_another_loads(
    open_door: Callable[..., PoolDoor], staged: bool, in_step: bool
) -> None:
    source, target = memory_of(1, staged=staged), memory_of(2, staged=staged)
    before = {name: tensor.clone() for name, tensor in target.items()}
    writer, reader = worker_of(open_door(), source), worker_of(open_door(), target)
    keys = [BlockKey(bytes([n]) * 16) for n in range(1, 4)]
    assert save(writer, keys, [2, 7, 4]).report == StepReport()
    assert load(reader, keys, [5, 0, 9], in_step=in_step) == set()
    for name in LAYERS:
        for there, here in ((2, 5), (7, 0), (4, 9)):
            assert torch.equal(source[name][there], target[name][here])
        for untouched in (1, 2, 3, 4, 6, 7, 8, 10, 11):
            assert torch.equal(before[name][untouched], target[name][untouched])


@pytest.mark.parametrize("in_step", [False, True])
def test_from_the_first_block_that_is_missing_all_failed(
    open_door: Callable[..., PoolDoor], in_step: bool
) -> None:
    worker = worker_of(open_door(), memory_of(1))
    keys = [BlockKey(bytes([n]) * 16) for n in range(1, 5)]
    save(worker, [keys[0], keys[2], keys[3]], [0, 2, 3])
    assert load(worker, keys, [8, 9, 10, 11], in_step=in_step) == {9, 10, 11}


def test_a_layer_nobody_waited_for_was_perhaps_read_too_early(
    open_door: Callable[..., PoolDoor],
) -> None:
    worker = worker_of(open_door(), memory_of(1))
    keys = [BlockKey(bytes([n]) * 16) for n in range(1, 3)]
    save(worker, keys, [0, 1])
    assert load(worker, keys, [8, 9], in_step=True, layers=LAYERS[:1]) == {8, 9}


def test_a_block_without_all_its_layers_is_not_saved(open_door: Callable[..., PoolDoor]) -> None:
    worker = worker_of(open_door(), memory_of(1))
    key = BlockKey(b"k" * 16)
    # As if the forward pass had ended with an exception.
    assert save(worker, [key], [0], layers=LAYERS[:1]).report.unsaved == {key}
    assert load(worker, [key], [5], in_step=False) == {5}
    assert save(worker, [key], [0]).report.unsaved == set()
    assert load(worker, [key], [5], in_step=False) == set()


def test_a_layer_that_is_computed_in_parts_is_not_saved(
    open_door: Callable[..., PoolDoor],
) -> None:
    door = open_door()
    worker = worker_of(door, memory_of(1))
    keys = keys_of(door.base_key, list(range(WIDTH)))
    plan = StepPlan(saves=[BlockSave(keys[0], 3, "r", fresh=True)], closing=["r"])
    results = run_step(worker, plan, [LAYERS[0], *LAYERS])
    gather(worker, results, lambda told: "r" in told.sent)
    assert results.report.unsaved == {keys[0]}
    assert door.submit(lambda pool: pool.exists(keys[0]), True, name="t").result() is False


def test_what_is_computed_behind_a_failed_load_is_not_saved(
    open_door: Callable[..., PoolDoor],
) -> None:
    worker = worker_of(open_door(), memory_of(1))
    missing, spoilt, good = (BlockKey(bytes([n]) * 16) for n in range(1, 4))
    plan = StepPlan(
        saves=[BlockSave(spoilt, 1, "r", fresh=True), BlockSave(good, 2, "s", fresh=True)],
        loads=[BlockLoad("r", (missing,), (0,), in_step=True)],
        closing=["r", "s"],
    )
    results = run_step(worker, plan)
    assert results.failed == {0}
    gather(worker, results, lambda found: found.sent == {"r", "s"})
    assert load(worker, [spoilt], [5], in_step=False) == {5}
    assert load(worker, [good], [6], in_step=False) == set()


def test_one_thread_is_enough(node: Alone) -> None:
    """A save that waits for layers must not keep the thread from the load these wait for."""
    settings = PoolAccess.read({"pool": node.address, "threads": 1})
    door = PoolDoor(settings, IDENTITY)
    wait_for(lambda: door.up, what="the door is up")
    worker = worker_of(door, memory_of(1))
    loaded, saved = BlockKey(b"a" * 16), BlockKey(b"b" * 16)
    save(worker, [loaded], [0])
    plan = StepPlan(
        saves=[BlockSave(saved, 1, "r", fresh=True)],
        loads=[BlockLoad("r", (loaded,), (2,), in_step=True)],
        closing=["r"],
    )
    results = run_step(worker, plan)
    assert results.failed == set()
    gather(worker, results, lambda found: "r" in found.sent)
    assert load(worker, [saved], [3], in_step=False) == set()
    worker.close()
    door.close()


def test_ranks_have_parts_of_their_own(open_door: Callable[..., PoolDoor]) -> None:
    sources = [memory_of(rank) for rank in range(2)]
    workers = [
        worker_of(open_door(ranks=2, rank=rank, part=f"rank{rank}"), source)
        for rank, source in enumerate(sources)
    ]
    key = BlockKey(b"k" * 16)
    save(workers[0], [key], [0])
    assert load(workers[1], [key], [5], in_step=False) == {5}
    # The scheduler counts a block when all its parts are there.
    door = open_door(ranks=2)
    scheduler = scheduler_of(door)
    request = Request("r", list(range(WIDTH + 1)))
    (name,) = keys_of(door.base_key, request.all_token_ids)
    assert door.submit(lambda p: p.put(rank_key(name, 0, 2), b"x"), False, name="t").result()
    scheduler.arrived(request, 0)
    assert answer(scheduler, request) == 0
    assert door.submit(lambda p: p.put(rank_key(name, 1, 2), b"x"), False, name="t").result()
    other = Request("s", request.all_token_ids)
    scheduler.arrived(other, 0)
    assert answer(scheduler, other) == WIDTH
    assert pinned(door) == 2


def answer(scheduler: Any, request: Request, computed: int = 0) -> int:
    """Ask until there is an answer."""
    found: list[int] = []

    def asked() -> bool:
        tokens = scheduler.loadable(request, computed)
        if tokens is not None:
            found.append(tokens)
        return tokens is not None

    wait_for(asked, what="the lookup is answered")
    return found[0]


def pinned(door: PoolDoor) -> int:
    return door.submit(lambda pool: pool.stats().pinned, -1, name="test").result()


def step_output(scheduled: dict[str, int], places: dict[str, list[int]], **more: Any) -> Any:
    state = SimpleNamespace(resolve_block_ids=lambda request_id: (places[request_id],))
    return SimpleNamespace(
        num_scheduled_tokens=scheduled, kv_connector_block_state=state, preempted_req_ids=None
    )


def test_an_engine_with_nothing_to_compute_waits_for_the_answer(
    open_door: Callable[..., PoolDoor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.integrations.vllm.connector_scheduler.IDLE_WAIT_S", 60.0)
    door = open_door()
    scheduler = scheduler_of(door)
    prompt = list(range(4 * WIDTH))
    keys = keys_of(door.base_key, prompt)
    door.submit(lambda pool: pool.put_many([(key, b"x") for key in keys]), [], name="t").result()
    for name in ("first", "later"):
        request = Request(name, prompt)
        scheduler.arrived(request, 0)
        assert scheduler.loadable(request, 0) == 3 * WIDTH
        assert scheduler.plan(step_output({}, {})).idle


def test_an_engine_that_computes_does_not_wait_for_the_answer(
    open_door: Callable[..., PoolDoor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.integrations.vllm.connector_scheduler.IDLE_WAIT_S", 60.0)
    door, go_on = open_door(), threading.Event()
    scheduler = scheduler_of(door)
    assert not scheduler.plan(step_output({"other": 1}, {})).idle
    for _ in range(door.settings.threads):
        door.submit(lambda _: go_on.wait(60), None, name="test", urgent=True)
    request = Request("r", list(range(4 * WIDTH)))
    scheduler.arrived(request, 0)
    assert scheduler.loadable(request, 0) is None
    go_on.set()
    assert answer(scheduler, request) == 0


def test_an_engine_with_nothing_to_compute_waits_for_a_load(
    open_door: Callable[..., PoolDoor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.integrations.vllm.connector_worker.IDLE_WAIT_S", 60.0)
    worker = worker_of(open_door(), memory_of(1))
    key = BlockKey(b"k" * 16)
    save(worker, [key], [0])
    plan = StepPlan(loads=[BlockLoad("r", (key,), (5,), in_step=False)], idle=True)
    assert run_step(worker, plan, []).received == {"r"}


def test_a_prompt_is_found_loaded_and_let_go(open_door: Callable[..., PoolDoor]) -> None:
    door = open_door()
    scheduler = scheduler_of(door)
    prompt = list(range(4 * WIDTH))
    keys = keys_of(door.base_key, prompt)
    door.submit(lambda pool: pool.put_many([(key, b"x") for key in keys]), [], name="t").result()
    request = Request("r", prompt)
    scheduler.arrived(request, 0)
    # Never all tokens: one must be computed.
    assert answer(scheduler, request) == 3 * WIDTH
    assert answer(scheduler, request, 2 * WIDTH) == WIDTH
    assert pinned(door) == 3
    scheduler.allocated(request, [7, 8, 9, 10], WIDTH)
    plan = scheduler.plan(step_output({}, {}))
    assert plan.loads == [BlockLoad("r", (keys[2],), (9,), in_step=False)]
    assert pinned(door) == 3
    assert scheduler.heard({"r"}, set(), None) == {}
    wait_for(lambda: pinned(door) == 0, what="pins are let go")
    assert door.counts()["hit_tokens"] == WIDTH
    # The rest is computed and saved, in the places where it is; what was loaded is there.
    # Not before the next step: others may compute the first two in the one in which it begins.
    request.num_computed_tokens = 3 * WIDTH
    places = {"r": [7, 8, 9, 10]}
    assert scheduler.plan(step_output({"r": WIDTH - 1}, places)).saves == []
    request.num_computed_tokens = 4 * WIDTH - 1
    plan = scheduler.plan(step_output({"r": 1}, places))
    assert [(s.key, s.block_id, s.fresh) for s in plan.saves] == [
        (keys[0], 7, False), (keys[1], 8, False), (keys[3], 10, True),
    ]  # fmt: skip
    request.num_computed_tokens = 4 * WIDTH
    assert scheduler.over(request, [7, 8, 9, 10]) == (True, None)
    assert scheduler.plan(step_output({}, {})).closing == ["r"]
    assert len(scheduler.book) == 0


def test_a_load_that_failed_is_not_tried_for_ever(open_door: Callable[..., PoolDoor]) -> None:
    door = open_door()
    scheduler = scheduler_of(door)
    request = Request("r", list(range(2 * WIDTH + 1)))
    keys = keys_of(door.base_key, request.all_token_ids)
    door.submit(lambda pool: pool.put_many([(key, b"x") for key in keys]), [], name="t").result()
    scheduler.arrived(request, 0)
    assert answer(scheduler, request) == 2 * WIDTH
    scheduler.allocated(request, [7, 8, 9], 2 * WIDTH)
    scheduler.plan(step_output({}, {}))
    scheduler.heard({"r"}, {8}, None)
    assert scheduler.loadable(request, 0) == 0
    wait_for(lambda: pinned(door) == 0, what="pins are let go")
    assert door.counts()["load_failed_tokens"] == WIDTH
    # It is saved again, though it was believed to be in the pool.
    plan = scheduler.plan(step_output({"r": 2 * WIDTH + 1}, {"r": [7, 8, 9]}))
    assert [save.key for save in plan.saves] == keys[1:]


def test_a_load_fails_when_the_first_of_several_workers_says_so(
    open_door: Callable[..., PoolDoor],
) -> None:
    door = open_door()
    scheduler = scheduler_of(door)
    request = Request("r", list(range(2 * WIDTH + 1)))
    keys = keys_of(door.base_key, request.all_token_ids)
    door.submit(lambda pool: pool.put_many([(key, b"x") for key in keys]), [], name="t").result()
    scheduler.arrived(request, 0)
    assert answer(scheduler, request) == 2 * WIDTH
    scheduler.allocated(request, [7, 8, 9], 2 * WIDTH)
    scheduler.plan(step_output({}, {}))
    scheduler.heard((), {7, 8}, None)
    scheduler.heard({"r"}, (), None)  # A later step: the last worker has ended.
    assert scheduler.loadable(request, 0) == 0
    assert door.counts()["load_failed_tokens"] == 2 * WIDTH
    assert door.counts().get("hit_tokens", 0) == 0


def test_requests_that_end_early_hold_nothing(open_door: Callable[..., PoolDoor]) -> None:
    door = open_door()
    scheduler = scheduler_of(door)
    prompt = list(range(3 * WIDTH))
    keys = keys_of(door.base_key, prompt)
    door.submit(lambda pool: pool.put_many([(key, b"x") for key in keys]), [], name="t").result()
    for number in range(20):
        request = Request(f"r{number}", prompt)
        scheduler.arrived(request, 0)
        if number % 2:
            answer(scheduler, request)
        assert scheduler.over(request, []) == (False, None)
    wait_for(lambda: pinned(door) == 0, what="pins are let go")


def test_a_late_answer_is_not_waited_for(open_door: Callable[..., PoolDoor]) -> None:
    door, clock = open_door(), ManualClock()
    scheduler = scheduler_of(door, clock.now, lookup_timeout_ms=100)
    request = Request("r", list(range(WIDTH + 1)))
    # Nobody answers: all threads of the door are busy.
    release = threading.Event()
    for _ in range(door.settings.threads):
        door.submit(lambda pool: release.wait(60), False, name="test", urgent=True)
    scheduler.arrived(request, 0)
    assert scheduler.loadable(request, 0) is None
    clock.advance(0.2)
    assert scheduler.loadable(request, 0) == 0
    release.set()
    wait_for(lambda: pinned(door) == 0, what="pins are let go")
    assert door.counts()["lookup_late"] == 1


def test_a_promise_is_waited_for_some_time(open_door: Callable[..., PoolDoor]) -> None:
    door, clock = open_door(), ManualClock()
    scheduler = scheduler_of(door, clock.now, saves=False, handoff_timeout_ms=600_000)
    request = Request("r", list(range(2 * WIDTH + 1)))
    request.kv_transfer_params = {HANDOFF: {"blocks": 2, "block_tokens": WIDTH}}
    keys = keys_of(door.base_key, request.all_token_ids)
    scheduler.arrived(request, 0)

    def ask() -> int | None:
        clock.advance(0.02)
        found: int | None = scheduler.loadable(request, 0)
        return found

    for _ in range(5):
        assert ask() is None
    door.submit(lambda pool: pool.put_many([(key, b"x") for key in keys]), [], name="t").result()
    found: list[int | None] = []

    def answered() -> bool:
        found.append(ask())
        return found[-1] is not None

    wait_for(answered, what="the blocks have come")
    assert found[-1] == 2 * WIDTH
    # Nobody keeps this one.
    request = Request("s", list(range(7, 3 * WIDTH)), kv_transfer_params=request.kv_transfer_params)
    scheduler.arrived(request, 0)
    assert ask() is None
    clock.advance(601)
    assert scheduler.loadable(request, 0) == 0
    scheduler.over(request, [])
    scheduler.over(Request("r", []), [])
    wait_for(lambda: pinned(door) == 0, what="pins are let go")


def test_salts_name_tenants(open_door: Callable[..., PoolDoor]) -> None:
    door = open_door()
    scheduler = scheduler_of(door)
    model = door.identity.model_info()
    assert model is not None and door.base_key is not None
    tenant = NamespaceKey(b"t" * 32)
    ours = str(TenantSalt(tenant, identity_digest(model.identity)))
    foreign = str(TenantSalt(tenant, identity_digest("another model")))
    expected = {
        None: door.base_key,
        "": user_namespace(door.base_key, ""),
        "\ud800 ☃": user_namespace(door.base_key, "\ud800 ☃"),
        ours: tenant,
        foreign: user_namespace(door.base_key, foreign),
    }
    tokens = list(range(WIDTH))
    for number, (salt, namespace) in enumerate(expected.items()):
        request = Request(f"r{number}", tokens, salt)
        scheduler.arrived(request, 0)
        plan = scheduler.plan(step_output({f"r{number}": WIDTH}, {f"r{number}": [3]}))
        assert [save.key for save in plan.saves] == keys_of(namespace, tokens)
    assert door.counts()["complaints_foreign_salt"] == 1
    # After a reset nothing has the name it had.
    scheduler.reset(b"e" * 16)
    request = Request("late", tokens)
    scheduler.arrived(request, 0)
    plan = scheduler.plan(step_output({"late": WIDTH, "r0": WIDTH}, {"late": [3], "r0": [4]}))
    assert len(plan.saves) == 1
    assert plan.saves[0].key not in {keys_of(key, tokens)[0] for key in expected.values()}


@pytest.mark.parametrize(
    ("change", "count"),
    [
        ({"mm_features": ["an image"]}, "skipped_multimodal"),
        ({"lora_request": "one"}, "skipped_lora"),
        ({"prompt_embeds": "some"}, "skipped_embeds"),
        ({"resumable": True}, "skipped_streaming"),
        ({"pooling_params": "some"}, "skipped_pooling"),
    ],
)
def test_what_tokens_do_not_name_is_left_alone(
    open_door: Callable[..., PoolDoor], change: dict[str, Any], count: str
) -> None:
    door = open_door()
    scheduler = scheduler_of(door)
    request = Request("r", list(range(3 * WIDTH)), **change)
    scheduler.arrived(request, 0)
    assert scheduler.loadable(request, 0) == 0
    assert scheduler.plan(step_output({"r": 3 * WIDTH}, {"r": [1, 2, 3]})).saves == []
    assert scheduler.over(request, [1, 2, 3]) == (False, None)
    assert door.counts()[count] == 1


def test_blocks_loaded_in_this_step_are_not_shared_in_it(
    open_door: Callable[..., PoolDoor],
) -> None:
    door = open_door()
    scheduler = scheduler_of(door, load_mode=LAYER_BY_LAYER)
    prompt = list(range(3 * WIDTH + 1))
    keys = keys_of(door.base_key, prompt)
    door.submit(lambda pool: pool.put_many([(key, b"x") for key in keys]), [], name="t").result()
    first, second = Request("first", prompt), Request("second", prompt)
    unrelated = Request("unrelated", [*range(WIDTH), *range(900, 900 + 2 * WIDTH)])
    for request in (first, second, unrelated):
        scheduler.arrived(request, 0)
        answer(scheduler, request, WIDTH)
    assert answer(scheduler, first, WIDTH) == 2 * WIDTH
    scheduler.allocated(first, [5, 6, 7, 8], 2 * WIDTH)
    # vLLM's cache has them already, though they are not there yet.
    assert scheduler.loadable(second, 2 * WIDTH) is None
    assert scheduler.loadable(second, WIDTH) is not None
    assert scheduler.loadable(unrelated, WIDTH) is not None
    scheduler.plan(step_output({"first": 1}, {"first": [5, 6, 7, 8]}))
    assert scheduler.heard((), {7}, None) == {"first": 7}
    assert scheduler.loadable(second, 2 * WIDTH) is not None


def test_the_copying_memory_is_used_where_there_is_no_view() -> None:
    tensors = memory_of(1, staged=True)
    assert isinstance(open_memory(tensors, blocks=12, block_tokens=WIDTH), StagedMemory)
