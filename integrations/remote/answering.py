"""One request at a foreign engine: the engine's pieces in, events out, and the usage.

Used by integrations/remote/node.py in the node's event loop. A task reads the engine's stream into
a queue, so a cancellation ends the answer at once. Ending the task closes the stream, and the
engine stops. While the queue is full because of a slow reader, the task stops reading, which slows
the engine down.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing, suppress
from enum import Enum

from tierkv.integrations.remote.door import AnswerPiece, Counts, EngineDoor, EngineRequest
from tierkv.kvcore import limits
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import NodeLostError, TierKVError, TransportError
from tierkv.kvcore.ids import NodeId
from tierkv.kvcore.request import FinishReason, GenerateEvent, GenerateRequest, HitTokens, Usage


class _Stop(Enum):
    CANCELLED = "cancelled"


def hands_over(request: GenerateRequest) -> bool:
    """True if another node continues after the first token."""
    return request.handoff and may_continue(request)


def may_continue(request: GenerateRequest) -> bool:
    """True if an engine that takes the tokens so far for a prompt continues the answer rightly.

    JSON would begin again, and penalties would not count the tokens so far.
    """
    return not request.guide and not request.sampling.counts_answer


_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class Answering:
    """One request at one engine.

    Attributes:
        ask: the request to the engine.
        alone: no other request was present at the start, so the times measure computing alone.
        claimed_tokens: tokens of the prompt that the engine was believed to have cached.
        arrival_s: time of arrival.
        first_s: time of the first token; negative until then.
        ended_s: time of the last token.
        tokens: tokens of the answer so far.
        counts: the engine's token counts; None until the engine sends them.
    """

    def __init__(
        self,
        ask: EngineRequest,
        door: EngineDoor,
        *,
        node_id: NodeId,
        ends: Collection[int],
        clock: Clock,
        alone: bool,
    ) -> None:
        """Begin; ``ends`` are the ids that end an answer of the model."""
        self.ask = ask
        self.alone = alone
        self.claimed_tokens = 0
        self.arrival_s = clock.now()
        self.first_s = -1.0
        self.ended_s = self.arrival_s
        self.tokens = 0
        self.counts: Counts | None = None
        self._door = door
        self._node_id = node_id
        self._ends = frozenset(ends) | frozenset(ask.request.sampling.stop_token_ids)
        # Only the engine knows the number of tokens in a text.
        self._most = limits.MAX_ENGINE_REPLY_BYTES if door.speaks_text else ask.max_tokens
        self._clock = clock
        self._queue: asyncio.Queue[AnswerPiece | TierKVError | _Stop] = asyncio.Queue()
        self._queued_tokens = 0
        self._taken = asyncio.Event()

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, without resumed tokens of the answer."""
        return len(self.ask.request.token_ids) - self.ask.request.resumed_tokens

    @property
    def uncomputed_tokens(self) -> int:
        """Tokens still to be computed before the first token of the answer, as far as known.

        The front counts the same number for its own request. If the report included cached tokens,
        the front would attribute the excess to other fronts' prompts and avoid the very node that
        has the prefix.
        """
        return len(self.ask.request.token_ids) - self.claimed_tokens if self.first_s < 0.0 else 0

    def cancel(self) -> None:
        """End the request as cancelled."""
        self._queue.put_nowait(_Stop.CANCELLED)

    def lose(self, why: str) -> None:
        """End the request because the engine is gone."""
        self._queue.put_nowait(TransportError(why))

    async def events(self) -> AsyncGenerator[GenerateEvent, None]:
        """Have the engine answer; exactly the last event has a finish reason.

        Raises:
            UserError, OverloadedError: the engine refused the request.
            TransportError: the engine is lost.
            NodeLostError: the engine is lost within a text or JSON, which no other node can
                continue.
        """
        reader = asyncio.create_task(self._read())
        try:
            while True:
                item = await self._queue.get()
                if isinstance(item, TierKVError):
                    raise self._lost(item)
                if isinstance(item, AnswerPiece):
                    self._queued_tokens -= len(item.token_ids)
                    self._taken.set()
                event = self._stopped() if item is _Stop.CANCELLED else self._event(item)
                if event is None:
                    continue
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            reader.cancel()
            with suppress(asyncio.CancelledError):
                await reader

    async def _read(self) -> None:
        try:
            async with aclosing(self._door.answer(self.ask)) as pieces:
                async for piece in pieces:
                    await self._room()
                    self._queued_tokens += len(piece.token_ids)
                    self._queue.put_nowait(piece)
        except TierKVError as error:
            self._queue.put_nowait(error)
        except Exception as error:  # noqa: BLE001 - outermost of a task: the request must end
            self._queue.put_nowait(TierKVError(f"{type(error).__name__}: {error}"))

    async def _room(self) -> None:
        """Wait for room in the queue; a cancellation or error enters a full queue all the same."""
        while self._queued_tokens >= limits.MAX_QUEUED_ANSWER_TOKENS:
            self._taken.clear()
            await self._taken.wait()

    def _lost(self, error: TierKVError) -> TierKVError:
        begun = self.tokens and (self._door.speaks_text or not may_continue(self.ask.request))
        if isinstance(error, TransportError) and begun:
            return NodeLostError(error.message, hint="Send the request again.")
        return error

    def _event(self, item: AnswerPiece | _Stop) -> GenerateEvent | None:
        assert isinstance(item, AnswerPiece)
        tokens = item.token_ids
        if tokens or item.scores:
            self.ended_s = self._clock.now()
            self.first_s = self.ended_s if self.first_s < 0.0 else self.first_s
        if item.ended == "stop" and tokens and tokens[-1] in self._ends:
            tokens = tokens[:-1]
        self.tokens += len(tokens)
        if self.tokens > self._most:
            raise TransportError(f"the engine wrote more than {self._most} tokens")
        if not item.ended:
            return GenerateEvent(tokens, node_id=self._node_id) if tokens else None
        self.counts = item.counts
        reason = _REASONS.get(item.ended)
        if reason is None:
            raise TransportError(f"the engine ended an answer with {item.ended!r}")
        if reason is FinishReason.LENGTH and self._hands_over:
            reason = FinishReason.HANDOFF
        return self._last(reason, tokens, item.scores)

    @property
    def _hands_over(self) -> bool:
        request = self.ask.request
        written = request.resumed_tokens + self.tokens
        return hands_over(request) and written < request.sampling.max_tokens

    def _stopped(self) -> GenerateEvent:
        return self._last(FinishReason.CANCELLED, ())

    def _last(
        self, reason: FinishReason, tokens: tuple[int, ...], scores: tuple[float, ...] = ()
    ) -> GenerateEvent:
        first_s = self.first_s if self.first_s >= 0.0 else self._clock.now()
        return GenerateEvent(
            token_ids=tokens,
            finish_reason=reason,
            usage=self._usage(),
            node_id=self._node_id,
            ttft_s=first_s - self.arrival_s,
            scores=scores,
        )

    def _usage(self) -> Usage:
        resumed, counts = self.ask.request.resumed_tokens, self.counts
        if counts is not None and self._door.speaks_text:
            return Usage(
                counts.prompt_tokens, counts.completion_tokens, counts.hits, counted_there=True
            )
        hits = counts.hits if counts is not None else HitTokens()
        return Usage(self.prompt_tokens, self.tokens + resumed, hits)
