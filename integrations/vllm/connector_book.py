"""What the connector knows of each request: its blocks' names, and which of them to save.

Called by integrations/vllm/connector_scheduler.py in the scheduler's thread. No pool, no clock and
no vLLM here: a request is seen through ``RequestView``. Of a block that is saved every token is
known and was computed, or is computed in the step that saves it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tierkv.integrations.vllm.connector_plan import BlockSave
from tierkv.kvcore.block_key import ROOT_PARENT, next_block_key
from tierkv.kvcore.ids import BlockKey, NamespaceKey


class RequestView(Protocol):
    """What is read of vLLM's request."""

    @property
    def request_id(self) -> str:
        """Its name."""

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
        namespace: keys its blocks' names.
        keys: names of its leading full blocks, as far as they were needed.
        decided: so many leading blocks were considered for saving.
        begun: it was part of a step since it was put into the blocks it has now.
        in_workers: workers were told to save some of its blocks.
        no_loads: nothing (more) is loaded for it: a load failed, or the cache was reset.
        no_saves: nothing more of it is saved.
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
    """Blocks of which we believe that the pool has them; the oldest are forgotten.

    A wrong belief costs a later hit, or a question to the pool; never a wrong answer.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._keys: OrderedDict[BlockKey, None] = OrderedDict()

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: Iterable[BlockKey]) -> None:
        """Believe that the pool has these."""
        for key in keys:
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._limit:
            self._keys.popitem(last=False)

    def discard(self, keys: Iterable[BlockKey]) -> None:
        """Believe it no more."""
        for key in keys:
            self._keys.pop(key, None)

    def clear(self) -> None:
        """Believe nothing: the pool was lost, and may have come back without its blocks."""
        self._keys.clear()


class RequestBook:
    """The requests that are not over, by id.

    Attributes:
        known: blocks that need no saving.
    """

    def __init__(self, *, block_tokens: int, known_limit: int) -> None:
        self.known = KnownKeys(known_limit)
        self._block_tokens = block_tokens
        self._stories: dict[str, RequestStory] = {}

    def __len__(self) -> int:
        return len(self._stories)

    def open(self, request: RequestView, namespace: NamespaceKey) -> RequestStory:
        """Begin a request."""
        story = self._stories[request.request_id] = RequestStory(request, namespace)
        return story

    def find(self, request_id: str) -> RequestStory | None:
        """Return a request; None where the connector has nothing to do with it."""
        return self._stories.get(request_id)

    def close(self, request_id: str) -> None:
        """Forget a request."""
        self._stories.pop(request_id, None)

    def preempt(self, request_id: str) -> None:
        """Forget what was decided for a request that begins again, perhaps in other blocks."""
        story = self._stories.get(request_id)
        if story is not None:
            story.decided, story.begun = 0, False

    def mute(self) -> None:
        """Neither load nor save anything more for the requests there are."""
        for story in self._stories.values():
            story.no_loads = story.no_saves = True

    def keys(self, story: RequestStory, count: int) -> list[BlockKey]:
        """Return the names of a request's first blocks; costs a hash per block that is new."""
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
        """Return how many blocks are full after a step that computes so many tokens.

        Tokens that are only guessed (drafts), or sampled in a step whose output is under way, are
        not in ``all_token_ids`` yet and don't count. Every token that is there is computed by the
        end of the step at the latest: the last one that was sampled is the step's first.
        """
        request = story.request
        done = min(request.num_computed_tokens + scheduled, len(request.all_token_ids))
        return done // self._block_tokens

    def full_at_end(self, story: RequestStory, in_flight: int) -> int:
        """Return how many blocks of a request that is over are full.

        The token that was sampled last was never computed, and what steps under way compute may
        not be there.
        """
        request = story.request
        done = min(request.num_computed_tokens - in_flight, len(request.all_token_ids) - 1)
        return max(done, 0) // self._block_tokens

    def lacks(self, story: RequestStory, count: int) -> bool:
        """Whether the pool lacks some of a request's first blocks that were not decided yet."""
        keys = self.keys(story, count)
        return any(key not in self.known for key in keys[story.decided :])

    def saves(
        self, story: RequestStory, full: int, block_ids: Sequence[int], *, computed: int
    ) -> list[BlockSave]:
        """Decide which blocks to save now, each once.

        Args:
            story: whose.
            full: so many leading blocks are full when this step is over.
            block_ids: where the request's blocks are, from the first.
            computed: tokens whose KV was there before this step.
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
