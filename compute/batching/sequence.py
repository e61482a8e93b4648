"""One request inside the engine: tokens, pages and progress.

A Sequence is mutated by the batcher, and in a few fields by the engine's thread around it. Token
ids and page table are preallocated arrays: a step slices the arrays instead of walking the prompt.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tierkv.compute.batching.logit_edits import LogitEdits
from tierkv.kvcore import limits
from tierkv.kvcore.block import ROOT_PARENT, Tier, block_keys, next_block_key, tail_key
from tierkv.kvcore.ids import BlockKey
from tierkv.kvcore.request import Blend, FinishReason, GenerateRequest, HitTokens, TokenLogprobs

Int64Array = NDArray[np.int64]
_NAME = re.compile(limits.NAME_PATTERN)
PRIORITY_ARRIVALS = 1_000
"""A request overtakes a request of one step lower priority that arrived up to this many arrivals
earlier.
"""


class Phase(StrEnum):
    """State of a sequence; ``ENDED`` is final.

    ``LOCATING`` and ``LOADING`` concern the exact prefix. In ``CHUNKS`` the remaining chunks are
    looked up, and in ``BLENDING`` the chunks are loaded and blended, which computes the whole
    prompt.
    """

    WAITING = "waiting"
    LOCATING = "locating"
    LOADING = "loading"
    CHUNKS = "chunks"
    BLENDING = "blending"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class BlendedTokens:
    """Savings of blending: hit tokens by tier, and reused tokens that were computed again."""

    hits: HitTokens
    recomputed: int


@dataclass(frozen=True, slots=True)
class Readout:
    """The answer to a question about a prompt; see GenerateEvent for both fields."""

    scores: tuple[float, ...] = ()
    embedding: tuple[float, ...] = ()


class AnswerForm(Protocol):
    """Holds an answer to a form, token by token (compute/engine/guides.py).

    Attributes:
        complete: the answer has ended; no token may follow.
        error: why the answer can't continue; empty while it can.
    """

    complete: bool
    error: str

    def allowed(self) -> NDArray[np.bool_] | None:
        """Return ``[vocab]``, True for tokens that may come next.

        None, with ``error`` set, if no token may come next.
        """
        ...

    def take(self, token: int) -> bool:
        """Accept the next token; return True when the token ends the answer."""
        ...


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's state; tokens ``[0, computed)`` have KV in the sequence's pages.

    Attributes:
        seq_id: number in order of arrival; breaks ties of priority.
        request: the request.
        arrival_s: time of arrival; 0.0 if no caller waits.
        block_tokens: tokens per block.
        tokens: known token ids, ``[0, length)`` valid, room for the whole answer.
        length: known tokens.
        max_length: ``length`` at which the answer is as long as allowed.
        keys: keys of the full blocks known by now, prompt first.
        page_table: pages of blocks ``[0, num_pages)``.
        computed: tokens with KV.
        committed: leading blocks with findable pages (stays 0 without cache).
        phase: see Phase.
        hit_tiers: tier of each leading prompt block not recomputed, at first admission.
        part_tokens: leading tokens of the next block that were not recomputed either.
        part_tier: tier of the part.
        part_sought: the known part of the next block was looked for already.
        claims: keys of blocks announced by this sequence.
        blocked_on: key of an announced block for which this sequence waits in the queue.
        started_s: time at which the first step was planned; negative until then.
        first_token_s: time at which the first token was sampled; negative until then.
        published_tokens: tokens handed to the pool.
        hits_final: set by the first preemption; blocks found again later count as no saving.
        unsaved: committed blocks that the pool refused when the blocks became full.
        tail_saved: the partial last block was saved at the last preemption.
        blend: permission to blend chunks; None once used, abandoned or never given.
        is_blend_trial: blending is tried against the costs, to learn what passes cost now.
        blended: savings of blending; None if no chunk was blended.
        findable_tokens: blocks ending behind this token never become findable: their KV is
            approximate.
        session: the request's session if it is a valid name, else empty; stored with the blocks.
        raw_start: position of the chunk computed in isolation here, at the end of ``tokens``;
            negative for every caller's sequence.
        raw_pages: second destination of that chunk's KV, free of position.
        form: the form of the answer, which has seen every token of the answer; None: free text.
        readout: the read-out made instead of an answer; None until then.
        edits: changes of the logits, which follow ``tokens``; None: none.
        logprobs: log-probabilities of the last chosen token, if the request asks for them.
        rank: sort key; a smaller rank runs earlier and is preempted later. A step of priority
            counts as a fixed number of arrivals, so no request is overtaken for ever.
    """

    seq_id: int
    request: GenerateRequest
    arrival_s: float
    block_tokens: int
    tokens: Int64Array
    length: int
    max_length: int
    keys: list[BlockKey]
    page_table: Int64Array
    num_pages: int = 0
    computed: int = 0
    committed: int = 0
    phase: Phase = Phase.WAITING
    hit_tiers: list[Tier] = field(default_factory=list)
    part_tokens: int = 0
    part_tier: Tier = Tier.L1
    part_sought: bool = False
    claims: list[BlockKey] = field(default_factory=list)
    blocked_on: BlockKey | None = None
    started_s: float = -1.0
    first_token_s: float = -1.0
    published_tokens: int = 0
    hits_final: bool = False
    unsaved: list[int] = field(default_factory=list)
    tail_saved: bool = False
    blend: Blend | None = None
    is_blend_trial: bool = False
    blended: BlendedTokens | None = None
    findable_tokens: int = sys.maxsize
    session: str = ""
    raw_start: int = -1
    raw_pages: Int64Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    form: AnswerForm | None = None
    readout: Readout | None = None
    edits: LogitEdits | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    rank: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        later = self.request.priority * PRIORITY_ARRIVALS
        self.rank = (self.seq_id + later, self.seq_id)

    @property
    def prompt_length(self) -> int:
        """Tokens in the request, resumed tokens included."""
        return len(self.request.token_ids)

    @property
    def generated(self) -> int:
        """Tokens sampled here."""
        return self.length - self.prompt_length

    @property
    def is_background(self) -> bool:
        """Whether no caller waits: the sequence computes a chunk in isolation."""
        return self.raw_start >= 0

    @property
    def chunks_stop(self) -> int:
        """End of the tokens that chunks may give to a blending pass; 0 without blending."""
        return min(self.blend.chunks[-1][1], self.reusable_tokens) if self.blend is not None else 0

    @property
    def reusable_tokens(self) -> int:
        """Tokens whose KV may be reused: at least the last token must be computed for logits.

        A chunk in isolation must be computed whole, to get its keys before rope.
        """
        return self.raw_start if self.is_background else self.length - 1

    @property
    def usable_blocks(self) -> int:
        """Full blocks that may be reused."""
        return min(len(self.keys), self.reusable_tokens // self.block_tokens)

    @property
    def wants_part(self) -> bool:
        """Whether the sequence may take over a part of the next block from another sequence."""
        ends_with_block = self.computed == self.num_pages * self.block_tokens
        may = self.request.use_cache and not self.part_sought
        return may and ends_with_block and self.computed < self.reusable_tokens

    @property
    def pages(self) -> list[int]:
        """The sequence's pages, in order."""
        held: list[int] = self.page_table[: self.num_pages].tolist()
        return held

    def pages_for(self, tokens: int) -> int:
        """Return the pages needed for KV of this many tokens."""
        return -(-tokens // self.block_tokens)

    def add_pages(self, pages: list[int]) -> None:
        """Append pages to the table."""
        self.page_table[self.num_pages : self.num_pages + len(pages)] = pages
        self.num_pages += len(pages)

    def extend(
        self, tokens: tuple[int, ...], stop_ids: Collection[int]
    ) -> tuple[int, FinishReason | None]:
        """Append chosen tokens until the answer ends.

        Returns:
            number of appended tokens, and why the answer ended; None while it continues.
        """
        for taken, token in enumerate(tokens):
            if token in stop_ids:
                return taken, FinishReason.STOP
            self.tokens[self.length] = token
            self.length += 1
            if self.form is not None and self.form.take(token):
                return taken + 1, FinishReason.STOP
            if self.length >= self.max_length:
                return taken + 1, FinishReason.LENGTH
            if self.request.handoff:
                return taken + 1, FinishReason.HANDOFF
        return len(tokens), None

    def token_bytes(self, start: int, stop: int) -> bytes:
        """Return tokens ``[start, stop)`` as bytes for comparison (compute/l1/part_index.py)."""
        return self.tokens[start:stop].astype("<u4").tobytes()

    def key_and_parent(self, block: int) -> tuple[BlockKey, BlockKey]:
        """Return the keys of a full block and its parent; a new block extends the chain."""
        if block == len(self.keys):
            ids = self.tokens[block * self.block_tokens : (block + 1) * self.block_tokens]
            parent = self.keys[-1] if self.keys else ROOT_PARENT
            self.keys.append(next_block_key(self.request.namespace_key, parent, ids.tolist()))
        return self.keys[block], self.keys[block - 1] if block else ROOT_PARENT

    @property
    def wants_tail(self) -> bool:
        """Whether the last, partial block of the computed tokens may be in the pool.

        The block was left in the pool by a handoff to this node or by a preemption: then the pool
        may have KV of all tokens but the newest.
        """
        resumed = self.request.use_cache and self.request.resumed_tokens > 0
        left = self.tail_saved or (resumed and self.generated == 0)
        return left and (self.length - 1) % self.block_tokens > 0

    def tail(self, tokens: int) -> tuple[BlockKey, BlockKey]:
        """Return the keys of the partial last block of ``[0, tokens)`` and of the parent block."""
        block = tokens // self.block_tokens
        parent = self.key_and_parent(block - 1)[0] if block else ROOT_PARENT
        ids = self.tokens[block * self.block_tokens : tokens].tolist()
        return tail_key(self.request.namespace_key, parent, ids), parent

    def missing_keys(self) -> list[BlockKey]:
        """Return the keys of blocks to load behind the pages: full blocks, then perhaps a tail."""
        keys = self.keys[self.num_pages : self.usable_blocks]
        if self.wants_tail and self.num_pages <= self.usable_blocks:
            keys.append(self.tail(self.length - 1)[0])
        return keys

    def loaded_tokens(self, blocks: int) -> int:
        """Return the tokens in the leading blocks after a load; the last block may be a tail."""
        return min(blocks * self.block_tokens, self.length - 1)

    def hit_tokens(self) -> HitTokens:
        """Count prompt tokens not recomputed, per tier; resumed tokens are not prompt."""
        prompt = self.prompt_length - self.request.resumed_tokens
        counts = dict.fromkeys(Tier, 0)
        for block, tier in enumerate(self.hit_tiers):
            counts[tier] += max(0, min(self.block_tokens, prompt - block * self.block_tokens))
        whole = len(self.hit_tiers) * self.block_tokens
        counts[self.part_tier] += max(0, min(self.part_tokens, prompt - whole))
        exact = HitTokens(*(counts[tier] for tier in (Tier.L1, Tier.L2, Tier.L3, Tier.L4)))
        return exact if self.blended is None else exact + self.blended.hits


def new_tokens_of(request: GenerateRequest) -> int:
    """Return how many tokens may still be generated for a request."""
    return 0 if request.reads_out else max(0, request.sampling.max_tokens - request.resumed_tokens)


def make_sequence(
    seq_id: int,
    request: GenerateRequest,
    *,
    arrival_s: float,
    block_tokens: int,
    form: AnswerForm | None = None,
) -> Sequence:
    """Prepare a request for the batcher; hashes its blocks once, O(prompt)."""
    length = len(request.token_ids)
    session = request.session_id or ""
    new_tokens = new_tokens_of(request)
    tokens = np.zeros(length + new_tokens, dtype=np.int64)
    tokens[:length] = request.token_ids
    keys: list[BlockKey] = []
    if request.use_cache:
        keys = block_keys(request.namespace_key, request.token_ids, block_tokens=block_tokens)
    return Sequence(
        seq_id=seq_id,
        request=request,
        arrival_s=arrival_s,
        block_tokens=block_tokens,
        tokens=tokens,
        length=length,
        max_length=length + new_tokens,
        keys=keys,
        page_table=np.zeros(-(-len(tokens) // block_tokens), dtype=np.int64),
        session=session if _NAME.fullmatch(session) else "",
        form=form,
    )
