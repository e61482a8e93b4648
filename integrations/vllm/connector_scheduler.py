"""The scheduler's half of the connector: which blocks to load, to save and to keep.

Called by integrations/vllm/connector.py in vLLM's scheduler. Lookups run in the background, and
vLLM is told to ask again. Only an idle engine waits for a lookup, two milliseconds a step at most.
vLLM's own objects are only read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Any, Final

from tierkv.costing.load_worth import TimedWorth
from tierkv.integrations.keys import identity_digest, is_uncached, parse_salt, user_namespace
from tierkv.integrations.pool_door import PoolDoor
from tierkv.integrations.vllm.connector_book import (
    IDLE_WAIT_S,
    BlockLoad,
    RequestBook,
    RequestStory,
    StepPlan,
    StepReport,
)
from tierkv.integrations.vllm.connector_lookups import Lookups
from tierkv.integrations.vllm.connector_settings import ConnectorSettings
from tierkv.kvcore import limits
from tierkv.kvcore.ids import BlockKey, NamespaceKey

HANDOFF: Final = "tierkv"
"""TierKV's entry in a request's ``kv_transfer_params``: ``{"blocks": 12, "block_tokens": 128}``."""


class SchedulerSide:
    """Decides for one engine; used by one thread.

    Attributes:
        book: unfinished requests.
        _first: the first block of the last answer about each request.
        _loading: requests with a running load, with the blocks' names by place.
        _lost: places of ``_loading`` that a worker could not read; other workers may still read.
        _in_step: requests that load within the step under way.
        _worth: decides if loading pays; None: always load.
        _idle: the last step had no work, so waiting here delays no request.
        _spare_s: time still available for waiting in the current step.
        _plan: the next step's plan so far.
    """

    def __init__(
        self,
        door: PoolDoor,
        settings: ConnectorSettings,
        *,
        block_tokens: int,
        hash_tokens: int,
        ranks: int,
        now: Callable[[], float],
    ) -> None:
        """Begin without requests.

        Args:
            door: the door to the pool.
            settings: the engine's settings.
            block_tokens: tokens of one of the engine's blocks.
            hash_tokens: tokens of one of the engine's own hashes.
            ranks: number of workers, each with a part of every block.
            now: a clock.
        """
        self.book = RequestBook(block_tokens=block_tokens, known_limit=limits.MAX_ENGINE_NAMES)
        self._door = door
        self._settings = settings
        self._block_tokens = block_tokens
        self._hashes_per_block = block_tokens // hash_tokens
        self._worth = TimedWorth(now) if settings.weighs else None
        self._lookups = Lookups(
            door,
            ranks=ranks,
            patience_s=settings.lookup_timeout_ms / 1_000,
            promise_s=settings.handoff_timeout_ms / 1_000,
            now=now,
            on_wait=None if self._worth is None else self._worth.worth.asked,
        )
        self._now = now
        self._idle = True
        self._spare_s = IDLE_WAIT_S
        self._first: dict[str, int] = {}
        self._loading: dict[str, dict[int, BlockKey]] = {}
        self._lost: dict[str, set[int]] = {}
        self._in_step: list[str] = []
        self._step_hashes: list[tuple[int, Any]] = []
        self._plan = StepPlan()
        self._was_up = False
        self._epoch = b""

    # Requests come and go

    def arrived(self, request: Any, local_tokens: int) -> None:
        """Begin a request, and look up its blocks in the background.

        Args:
            request: vLLM's request.
            local_tokens: number of leading tokens in the engine's own cache.
        """
        self._notice_losses()
        if not self._was_up:
            return
        if (reason := _why_skipped(request)) is not None:
            self._door.count(f"skipped_{reason}")
            return
        namespace = self._namespace(request.cache_salt)
        if namespace is None:
            return
        story = self.book.open(request, namespace)
        self._door.count("query_tokens", len(request.all_token_ids))
        if self._settings.loads and not request.skip_reading_prefix_cache:
            self._look(story, local_tokens // self._block_tokens)

    def over(self, request: Any, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        """End a request.

        Returns:
            True if vLLM must keep the blocks until workers report the saves; and the parameters for
            the decode engine.
        """
        request_id = request.request_id
        self._lookups.release(request_id)
        self._first.pop(request_id, None)
        story = self.book.stories.get(request_id)
        self.book.close(request_id)
        if story is None or (request_id in self._loading and not self._settings.in_step):
            # During a load vLLM itself keeps the blocks, until the load is reported.
            return False, None
        full = min(self.book.full_at_end(story, request.num_in_flight_tokens), len(block_ids))
        saves = self._settings.saves and self._door.up and not story.no_saves
        if saves:
            computed = full * self._block_tokens
            self._plan.saves += self.book.saves(story, full, block_ids, computed=computed)
        if story.in_workers:
            self._plan.closing.append(request_id)
        return story.in_workers, self._handoff(full) if saves else None

    # Loads

    def loadable(self, request: Any, computed: int) -> int | None:
        """Return the number of loadable tokens behind the computed ones; None: ask again."""
        first = computed // self._block_tokens
        if self._shares_a_load(request, first):
            return None
        story = self.book.stories.get(request.request_id)
        if story is None or not self._settings.loads or request.skip_reading_prefix_cache:
            return 0
        last = self._most_blocks(story)
        if first >= last or story.no_loads:
            return 0
        if not self._lookups.covers(request.request_id, first):
            self._look(story, first)
        end = self._answer(request.request_id, first)
        if end is None:
            return None
        self._doubt(story, end, last)
        if not self._pays(story, min(end, last) - first):
            self._lookups.release(request.request_id)
            return 0
        self._first[request.request_id] = first
        return max(min(end, last) - first, 0) * self._block_tokens

    def allocated(self, request: Any, block_ids: Sequence[int], tokens: int) -> None:
        """Record the blocks to load into; with ``tokens`` 0 nothing is loaded."""
        request_id = request.request_id
        story = self.book.stories.get(request_id)
        if story is None:
            return
        if tokens == 0:
            if request_id not in self._loading:
                self._lookups.release(request_id)
            return
        first = self._first[request_id]
        last = first + tokens // self._block_tokens
        keys = self.book.keys(story, last)[first:last]
        places = tuple(block_ids[first:last])
        self._loading[request_id] = dict(zip(places, keys, strict=True))
        self.book.known.add(keys)
        load = BlockLoad(request_id, tuple(keys), places, in_step=self._settings.in_step)
        self._plan.loads.append(load)
        if self._worth is not None:
            self._worth.worth.begun()
        if self._settings.in_step:
            self._in_step.append(request_id)
            index = first * self._hashes_per_block
            self._step_hashes.append((index, request.block_hashes[index]))

    # Steps

    def plan(self, output: Any) -> StepPlan:
        """Finish the plan of a step.

        Args:
            output: vLLM's scheduler output; only read.
        """
        self._lookups.settle_debts()
        self._notice_losses()
        plan, self._plan = self._plan, StepPlan()
        self._step_hashes.clear()
        self._idle, self._spare_s = not output.num_scheduled_tokens, IDLE_WAIT_S
        plan.idle = self._idle
        plan.preempted = set(output.preempted_req_ids or ())
        for request_id in plan.preempted:
            self.book.preempt(request_id)
        if self._worth is not None:
            plan.number = self._worth.step_begins(output.total_num_scheduled_tokens)
        if self._settings.saves and self._was_up:
            for request_id, count in output.num_scheduled_tokens.items():
                self._plan_saves(plan, request_id, count, output)
        return plan

    def heard(
        self, received: Iterable[str], failed: Iterable[int], report: StepReport | None
    ) -> dict[str, int]:
        """Process the workers' results.

        Args:
            received: requests whose loads have ended or failed.
            failed: places of blocks that could not be loaded.
            report: further results.

        Returns:
            Requests with a failed load within the step, each with the first failed place.
        """
        self._note_lost(set(failed))
        if report is not None:
            self.book.known.discard(report.unsaved)
        if self._worth is not None:
            self._worth.step_ended(0 if report is None else report.step)
        in_step, self._in_step = self._in_step, []
        poisoned: dict[str, int] = {}
        for request_id in [*received, *in_step]:
            blocks = self._loading.pop(request_id, {})
            self._lookups.release(request_id)
            lost = self._lost.pop(request_id, set())
            bad = [place for place in blocks if place in lost]
            if self._worth is not None and report is not None:
                tokens = len(blocks) * self._block_tokens
                self._worth.load_ended(tokens, report.load_s.get(request_id), whole=not bad)
            self._door.count("hit_tokens", (len(blocks) - len(bad)) * self._block_tokens)
            if not bad:
                continue
            self._door.count("load_failed_tokens", len(bad) * self._block_tokens)
            self.book.known.discard(blocks[place] for place in bad)
            if (story := self.book.stories.get(request_id)) is not None:
                story.no_loads, story.decided = True, 0
                if request_id in in_step:
                    poisoned[request_id] = bad[0]
        return poisoned

    def reset(self, epoch: bytes) -> None:
        """Stop using stored blocks: the engine may have other weights now.

        Args:
            epoch: mixed into all block names from now on, so the names are unique to this engine.
        """
        self._epoch = epoch
        self.book.known.clear()
        self.book.mute()

    # Inside

    def _note_lost(self, places: set[int]) -> None:
        """Record failed loads: one worker may report a failure before the last worker ends."""
        for request_id, blocks in self._loading.items() if places else ():
            if bad := places & blocks.keys():
                self._lost.setdefault(request_id, set()).update(bad)

    def _namespace(self, salt: str | None) -> NamespaceKey | None:
        key = self._tenant_key(salt)
        if key is None or not self._epoch:
            return key
        mac = blake2b(self._epoch, key=key, digest_size=len(key), person=b"tierkv-epoch")
        return NamespaceKey(mac.digest())

    def _tenant_key(self, salt: str | None) -> NamespaceKey | None:
        base = self._door.base_key
        if base is None:
            return None
        ours = parse_salt(salt) if salt is not None else None
        if ours is None:
            return user_namespace(base, salt)
        model = self._door.identity.model_info()
        if model is None or ours.identity != identity_digest(model.identity):
            self._door.complain(
                "foreign_salt",
                "a request's salt was made for another model or layout than this engine's",
                hint="Register the engine's node again, so that the front learns its layout.",
            )
            return user_namespace(base, salt)
        return ours.namespace_key

    def _look(self, story: RequestStory, first: int) -> None:
        """Look up the blocks from ``first`` on, and the block before.

        The block before was computed or loaded here, so the pool should have it. If the block is
        missing, the beliefs about the pool are out of date.
        """
        last = self._most_blocks(story)
        if first >= last or story.no_loads:
            return
        promised = min(self._promised(story.request), last)
        if not promised and not self._pays_to_ask(last - first):
            story.no_loads = True
            return
        first = max(first - 1, 0)
        keys = self.book.keys(story, last)[first:]
        self._lookups.start(story.request.request_id, first, keys, promised=promised)

    def _answer(self, request_id: str, first: int) -> int | None:
        """Return the end of a request's blocks in the pool; an idle engine waits a moment."""
        if not self._idle or self._spare_s <= 0.0:
            return self._lookups.result(request_id, first)
        began = self._now()
        end = self._lookups.result(request_id, first, wait_s=self._spare_s)
        self._spare_s -= self._now() - began
        return end

    def _pays_to_ask(self, blocks: int) -> bool:
        tokens = blocks * self._block_tokens
        pays = self._worth is None or self._worth.worth.pays_to_ask(tokens)
        if not pays:
            self._door.count("computed_instead_tokens", tokens)
        return pays

    def _pays(self, story: RequestStory, blocks: int) -> bool:
        """True if the found blocks should be loaded; if not, the request asks no more.

        Promised blocks are always loaded: another engine computed them for this request.
        """
        if self._worth is None or self._promised(story.request):
            return True
        if blocks <= 0:
            self._worth.worth.found_nothing()
            return True
        tokens = blocks * self._block_tokens
        pays = self._worth.worth.pays(tokens)
        if not pays:
            story.no_loads = True
            self._door.count("computed_instead_tokens", tokens)
        return pays

    def _most_blocks(self, story: RequestStory) -> int:
        """Return the most loadable blocks: never all tokens, as at least one must be computed."""
        return (len(story.request.all_token_ids) - 1) // self._block_tokens

    def _shares_a_load(self, request: Any, first: int) -> bool:
        """True if a request would read blocks that another request loads within this same step.

        If that load failed, vLLM would recompute the blocks only for the other request. The request
        therefore waits for the next step.
        """
        hashes = request.block_hashes
        count = min(len(hashes), first * self._hashes_per_block)
        return any(index < count and hashes[index] == h for index, h in self._step_hashes)

    def _doubt(self, story: RequestStory, end: int, last: int) -> None:
        """Discard all beliefs about the pool if a believed block is missing."""
        if any(key in self.book.known for key in story.keys[end:last]):
            self.book.known.clear()

    def _promised(self, request: Any) -> int:
        """Return the number of leading blocks promised by another engine; untrusted input."""
        told = request.kv_transfer_params
        told = told.get(HANDOFF) if isinstance(told, dict) else None
        if not isinstance(told, dict) or told.get("block_tokens") != self._block_tokens:
            return 0
        blocks = told.get("blocks")
        return blocks if type(blocks) is int and blocks > 0 else 0

    def _handoff(self, full: int) -> dict[str, Any] | None:
        if self._settings.loads or not full:
            return None
        return {HANDOFF: {"blocks": full, "block_tokens": self._block_tokens}}

    def _notice_losses(self) -> None:
        up = self._door.up
        if up and not self._was_up:
            self.book.known.clear()
        self._was_up = up

    def _plan_saves(self, plan: StepPlan, request_id: str, count: int, output: Any) -> None:
        story = self.book.stories.get(request_id)
        if story is None or story.no_saves:
            return
        full = self.book.full_after(story, count)
        computed = story.request.num_computed_tokens
        if not story.begun:
            story.begun = True
            if self.book.lacks(story, min(computed // self._block_tokens, full)):
                # Blocks of vLLM's own cache may still be computed for another request in this step:
                # they are complete in the next step.
                return
        if full <= story.decided:
            return
        block_ids = output.kv_connector_block_state.resolve_block_ids(request_id)[0]
        plan.saves += self.book.saves(story, full, block_ids, computed=computed)


def _why_skipped(request: Any) -> str | None:
    """Return why tokens alone do not name a request's blocks; None if they do."""
    if request.mm_features:
        return "multimodal"
    if request.lora_request is not None:
        return "lora"
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "embeds"
    if request.resumable:
        return "streaming"
    if request.pooling_params is not None:
        return "pooling"
    if is_uncached(request.cache_salt):
        return "uncached"
    return None
