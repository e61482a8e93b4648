"""The connector's state of each request: names of the blocks, and the blocks to save.

Called by integrations/vllm/connector_scheduler.py in the scheduler's thread. This file uses no
pool, no clock and no vLLM: a request is seen through ``RequestView``. Every token of a saved block
is known and was computed, or is computed in the saving step.

Plans travel to the workers' half, and reports back; they are pickled once per step. Blocks have the
scheduler's names there. Each worker derives the names of its own parts (integrations/keys.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from tierkv.kvcore.block import ROOT_PARENT, next_block_key
from tierkv.kvcore.ids import BlockKey, NamespaceKey

IDLE_WAIT_S: Final = 0.002
"""Longest wait, per step, for the pool in an idle engine: about the time lost anyway, since vLLM
asks again only after an empty step and a sleep of a millisecond."""


@dataclass(frozen=True, slots=True)
class BlockSave:
    """A full block to be written to the pool.

    Attributes:
        key: name of the block.
        block_id: place of the block in the engine's memory, valid until the save is over.
        request_id: the request with the block.
        fresh: this step computes the rest of the block, so each layer is complete after its
            attention; False: the block is complete already.
        parent: name of the previous block, which the pool keeps as long as this block.
        depth: number of blocks before this block.
    """

    key: BlockKey
    block_id: int
    request_id: str
    fresh: bool
    parent: BlockKey = ROOT_PARENT
    depth: int = 0


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """Leading blocks of a request, to be read from the pool in this order.

    Attributes:
        request_id: the waiting request.
        keys: names of the blocks.
        block_ids: destinations in the engine's memory.
        in_step: this step's attention reads the blocks, layer by layer; False: the request is not
            in this step, and waits for all blocks.
    """

    request_id: str
    keys: tuple[BlockKey, ...]
    block_ids: tuple[int, ...]
    in_step: bool


@dataclass(slots=True)
class StepPlan:
    """The work of one step.

    Attributes:
        saves: blocks to be written.
        loads: blocks to be read.
        closing: finished requests whose blocks are kept for saving; to be reported when the saves
            are over.
        preempted: requests whose blocks may be overwritten in this step.
        number: number of the step, if the scheduler wants a report of its end; else 0.
        idle: the step computes nothing, so a short wait delays no request.
    """

    saves: list[BlockSave] = field(default_factory=list)
    loads: list[BlockLoad] = field(default_factory=list)
    closing: list[str] = field(default_factory=list)
    preempted: set[str] = field(default_factory=set)
    number: int = 0
    idle: bool = False


@dataclass(slots=True)
class StepReport:
    """A worker's report after a step.

    Attributes:
        unsaved: names of blocks that were to be saved and are not in the pool.
        step: number of the step, if the plan had one.
        load_s: duration of the load of each loaded request.
    """

    unsaved: set[BlockKey] = field(default_factory=set)
    step: int = 0
    load_s: dict[str, float] = field(default_factory=dict)

    def merged(self, other: StepReport) -> StepReport:
        """Merge two workers' reports: a block is saved only if each part is saved."""
        slower = {
            name: max(self.load_s.get(name, 0.0), other.load_s.get(name, 0.0))
            for name in self.load_s | other.load_s
        }
        return StepReport(self.unsaved | other.unsaved, max(self.step, other.step), slower)


class RequestView(Protocol):
    """The attributes of vLLM's request that the connector reads."""

    @property
    def request_id(self) -> str:
        """Name of the request."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV was computed, or is in a step under way."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and answer so far; grows."""


@dataclass(slots=True)
class RequestStory:
    """One request.

    Attributes:
        request: vLLM's own.
        namespace: keys the names of the request's blocks.
        keys: names of the leading full blocks, as far as needed so far.
        decided: number of leading blocks already considered for saving.
        begun: the request was part of a step since it got its current blocks.
        in_workers: workers were told to save blocks of the request.
        no_loads: no further loads for the request: a load failed or does not pay, or the cache was
            reset.
        no_saves: no further saves of the request.
    """

    request: RequestView
    namespace: NamespaceKey
    keys: list[BlockKey] = field(default_factory=list)
    decided: int = 0
    begun: bool = False
    in_workers: bool = False
    no_loads: bool = False
    no_saves: bool = False


class KnownKeys:
    """Blocks that are believed to be in the pool; the oldest are forgotten.

    A wrong belief costs a later hit or a lookup, never a wrong answer.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._keys: OrderedDict[BlockKey, None] = OrderedDict()

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: Iterable[BlockKey]) -> None:
        """Record that the pool has the blocks."""
        for key in keys:
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._limit:
            self._keys.popitem(last=False)

    def discard(self, keys: Iterable[BlockKey]) -> None:
        """Forget that the pool has the blocks."""
        for key in keys:
            self._keys.pop(key, None)

    def clear(self) -> None:
        """Forget everything: the pool was lost, and may have come back without its blocks."""
        self._keys.clear()


class RequestBook:
    """The unfinished requests, by id.

    Attributes:
        known: blocks that need no saving.
        stories: state by request id; requests that the connector does not handle are missing.
    """

    def __init__(self, *, block_tokens: int, known_limit: int) -> None:
        self.known = KnownKeys(known_limit)
        self._block_tokens = block_tokens
        self.stories: dict[str, RequestStory] = {}

    def __len__(self) -> int:
        return len(self.stories)

    def open(self, request: RequestView, namespace: NamespaceKey) -> RequestStory:
        """Begin a request."""
        story = self.stories[request.request_id] = RequestStory(request, namespace)
        return story

    def close(self, request_id: str) -> None:
        """Forget a request."""
        self.stories.pop(request_id, None)

    def preempt(self, request_id: str) -> None:
        """Forget the decisions for a request that restarts, perhaps in other blocks."""
        story = self.stories.get(request_id)
        if story is not None:
            story.decided, story.begun = 0, False

    def mute(self) -> None:
        """Stop loads and saves of all current requests."""
        for story in self.stories.values():
            story.no_loads = story.no_saves = True

    def keys(self, story: RequestStory, count: int) -> list[BlockKey]:
        """Return the names of a request's first blocks; costs one hash per new block."""
        width = self._block_tokens
        tokens = story.request.all_token_ids
        parent = story.keys[-1] if story.keys else ROOT_PARENT
        for index in range(len(story.keys), count):
            block = tokens[index * width : (index + 1) * width]
            if len(block) < width:
                raise ValueError(f"block {index} of {story.request.request_id} is not full")
            parent = next_block_key(story.namespace, parent, block)
            story.keys.append(parent)
        return story.keys[:count]

    def full_after(self, story: RequestStory, scheduled: int) -> int:
        """Return the number of full blocks after a step with ``scheduled`` tokens.

        Drafted tokens, and tokens sampled in a step whose output is pending, are not in
        ``all_token_ids`` yet and don't count. Every token in ``all_token_ids`` is computed by the
        end of the step at the latest: the last sampled token is the step's first.
        """
        request = story.request
        done = min(request.num_computed_tokens + scheduled, len(request.all_token_ids))
        return done // self._block_tokens

    def full_at_end(self, story: RequestStory, in_flight: int) -> int:
        """Return the number of full blocks of a finished request.

        The last sampled token was never computed, and the results of steps under way may be
        missing.
        """
        request = story.request
        done = min(request.num_computed_tokens - in_flight, len(request.all_token_ids) - 1)
        return max(done, 0) // self._block_tokens

    def lacks(self, story: RequestStory, count: int) -> bool:
        """True if the pool lacks any of a request's first blocks that were not decided yet."""
        keys = self.keys(story, count)
        return any(key not in self.known for key in keys[story.decided :])

    def saves(
        self, story: RequestStory, full: int, block_ids: Sequence[int], *, computed: int
    ) -> list[BlockSave]:
        """Decide which blocks to save now, each block once.

        Args:
            story: the request.
            full: number of leading blocks that are full at the end of this step.
            block_ids: places of the request's blocks, from the first.
            computed: tokens whose KV existed before this step.
        """
        full = min(full, len(block_ids))
        if full <= story.decided:
            return []
        keys = self.keys(story, full)
        there = computed // self._block_tokens
        saves = [
            BlockSave(
                keys[i],
                block_ids[i],
                story.request.request_id,
                fresh=i >= there,
                parent=keys[i - 1] if i else ROOT_PARENT,
                depth=i,
            )
            for i in range(story.decided, full)
            if keys[i] not in self.known
        ]
        story.decided = full
        story.in_workers = story.in_workers or bool(saves)
        self.known.add(save.key for save in saves)
        return saves
