"""Calls about a prompt's KV: warm, pin, retain, demote, locate, forget.

``Generation`` passes the calls with ``steering`` here. A prompt means every prompt that begins with
the text: the tokens added by the chat template after the text (end of the user's turn, start of the
answer) do not count. A pin keeps, and ``forget`` removes, the KV needed by all of these prompts.

Only computed blocks are saved. Where the pool has evicted what a compute node still has in pages,
pinning drops the pages and computes the prompt again.

To retain is to pin what is in the cache, if there is room: clients that mark every request for
caching must not fill the pool with blocks that nothing can evict.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from tierkv.dbfront.answer_cache.answer_cache import AnswerCache
from tierkv.dbfront.answer_cache.answer_key import PromptMark, last_mark
from tierkv.dbfront.answer_cache.kept_answer import StoreLostError
from tierkv.dbfront.contracts import PreparedCall, TextCall, TextEvent
from tierkv.kvcore.block import block_keys
from tierkv.kvcore.call_options import TOO_SHORT, KvAction
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import (
    CacheError,
    DirectoryUnavailableError,
    NotForgottenError,
    SqlError,
)
from tierkv.kvcore.request import FinishReason, GenerateRequest, Usage
from tierkv.metaserver.client import MetaClient
from tierkv.scheduler.dispatcher import Dispatcher
from tierkv.scheduler.pins import Pin, PinKeeper
from tierkv.scheduler.prompt_eraser import PromptEraser
from tierkv.scheduler.prompt_locator import locate_prompt

_MOST_RETAINED: Final = 0.25
"""Share of the pool's memory that is pinned at most for prompts to retain."""

_PAUSES_S: Final = (0.0, 0.05, 0.1, 0.2, 0.4)
"""The directory hears of a block in the pool a little later than the block is there."""

_CONTINUATIONS: Final = ("", "\n", " a")
"""The tokens common to all continuations are the text's own."""

_ANY_CONTINUATION: Final = (*_CONTINUATIONS, "a", "0", ".")
"""For answers, of which none may be missed: a continuation may change the last tokens."""

_PLACES: Final = (
    "l1_tokens", "memory_tokens", "disk_tokens", "l1_bytes", "memory_bytes", "disk_bytes",
)  # fmt: skip
"""Fields of PromptPlaces that are told."""

TokenIds = Callable[[TextCall], Awaitable[tuple[int, ...]]]
Generated = Callable[[PreparedCall], AsyncGenerator[TextEvent, None]]


class PromptSteering:
    """Carries out the calls about KV.

    Attributes:
        pins: the cluster's pinned prompts.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        meta: MetaClient | None,
        clock: Clock,
        token_ids: TokenIds,
        answers: AnswerCache,
    ) -> None:
        """Use a dispatcher.

        Args:
            dispatcher: its nodes have the KV.
            meta: keeps pins, and knows which blocks follow others.
            clock: ends pins.
            token_ids: tokenizes a prompt.
            answers: has answers to prompts that are forgotten.
        """
        self._answers = answers
        self.pins = PinKeeper(
            dispatcher.directory, meta, clock, lambda: dispatcher.view.pool_starts
        )
        self._eraser = PromptEraser(dispatcher.view, meta, clock, dispatcher.refresh)
        self._view = dispatcher.view
        self._directory = dispatcher.directory
        self._meta = meta
        self._clock = clock
        self._token_ids = token_ids

    async def events(
        self, prepared: PreparedCall, generated: Generated
    ) -> AsyncGenerator[TextEvent, None]:
        """Carry out a call; the answer is JSON text.

        Args:
            prepared: the call.
            generated: answers a call; warming a prompt generates a single token.

        Raises:
            NotForgottenError: copies may be left of a prompt to forget.
            SqlError: 53400, too many pins.
        """
        steering = prepared.call.steering
        assert steering is not None
        if steering.action is KvAction.FORGET:
            told, usage = await self._forget(prepared), Usage(0, 0)
        elif steering.action is KvAction.DEMOTE:
            told, usage = await self._demote(prepared), Usage(0, 0)
        elif steering.action is KvAction.LOCATE:
            told, usage = await self._locate(prepared), Usage(0, 0)
        elif steering.action is KvAction.RETAIN:
            told, usage = await self._retain(prepared, steering.keep_s), Usage(0, 0)
        elif steering.action is KvAction.PIN and not steering.keep_s:
            told, usage = await self._unpin(prepared), Usage(0, 0)
        else:
            usage = await _usage(generated(prepared))
            told = _warmed(prepared)
            if steering.action is KvAction.PIN:
                pin = await self._pin_of(prepared, steering.keep_s)
                told = await self._pinned(prepared, pin)
                if pin is not None and usage.hit_tokens.l1 > told["tokens"]:
                    with suppress(CacheError):  # The pin waits for the blocks.
                        await self._eraser.drop_pages(prepared.request.model, pin.keys)
                        usage = await _usage(generated(prepared))
                        told = await self._pinned(prepared, pin)
        yield TextEvent(json.dumps(told), FinishReason.STOP, usage)

    async def _forget(self, prepared: PreparedCall) -> dict[str, Any]:
        request = await self._beginning(prepared)
        block_tokens = prepared.model.layout.block_tokens
        try:
            forgotten = await self._eraser.forget(request, block_tokens=block_tokens)
            await self.pins.end_with(forgotten.keys)
            steering, answers = prepared.call.steering, set[bytes]()
            if steering is None or not steering.keeps_answers:
                answers = await self._answers.forget_everywhere(await self._marks(prepared))
        except StoreLostError as error:
            raise NotForgottenError(
                f"the prompt's answers are not forgotten everywhere: {error}",
                hint="Run it again when the store of front.answer_cache works.",
            ) from None
        except CacheError as error:
            raise NotForgottenError(
                f"the prompt is not forgotten everywhere: {error.message}",
                hint=error.hint or "Run it again: what is gone stays gone.",
            ) from None
        erased = forgotten.erased
        blocks = erased.page_blocks + erased.memory_blocks + erased.resting_blocks
        return {
            "outcome": "accepted" if blocks else "missing",
            "tokens": len(request.token_ids),
            "shared_tokens": forgotten.shared_blocks * block_tokens,
            "blocks": blocks,
            "bytes": erased.page_bytes + erased.memory_bytes + erased.resting_bytes,
            "l1_bytes": erased.page_bytes,
            "memory_bytes": erased.memory_bytes,
            "disk_bytes": erased.resting_bytes,
            "answers": len(answers),
        }

    async def _marks(self, prepared: PreparedCall) -> list[PromptMark]:
        """Return the marks of the answers to all prompts that begin with a prompt.

        The text may also have been the input of an embedding, or a prompt without a chat template.
        """
        call, key = prepared.call, prepared.request.namespace_key
        variants = [call]
        if call.prompt_token_ids is None and not call.documents:
            text = call.prompt if call.messages is None else call.messages[-1].content
            alone = replace(call, messages=None, prompt=text)
            variants += [alone, replace(alone, embed=True)] if text else []
        marks: set[PromptMark] = set()
        for variant in variants:
            ids: tuple[int, ...] = prepared.request.token_ids
            if call.prompt_token_ids is None:
                ways = [_longer(variant, more) for more in _ANY_CONTINUATION]
                if call.documents:  # Their text is in front of the prompt's, which is any text.
                    ways += [_with_text(variant, more) for more in _ANY_CONTINUATION if more]
                ids = _common([await self._token_ids(way) for way in ways])
            mark = last_mark(key, ids)
            if mark is not None:
                marks.add(mark)
        return sorted(marks)

    async def _demote(self, prepared: PreparedCall) -> dict[str, Any]:
        request, layout = await self._beginning(prepared), prepared.model.layout

        async def pooled() -> int:
            wanted, found = len(request.token_ids) // layout.block_tokens, 0
            for pause_s in _PAUSES_S:
                await asyncio.sleep(pause_s)
                found = (await self._directory.locate(request, layout)).prefix_blocks
                if found >= wanted:
                    break
            return found

        try:
            moved = await self._eraser.demote(request, pooled)
        except CacheError as error:
            return _pinned("deferred", reason=error.message)
        outcome = "accepted" if moved.demoted == moved.blocks else "clipped"
        if not moved.erased.page_blocks:
            outcome = "missing"
        tokens = moved.demoted * layout.block_tokens
        return {**_pinned(outcome, tokens=tokens), "l1_bytes": moved.erased.page_bytes}

    async def _locate(self, prepared: PreparedCall) -> dict[str, Any]:
        request = await self._beginning(prepared)
        found = await locate_prompt(self._directory, request, prepared.model.layout)
        told = {"tokens": len(request.token_ids)}
        if found is None:
            return {"outcome": "deferred", **told, "reason": "the meta server does not answer"}
        whole = found.found_tokens == found.wanted_tokens
        outcome = "missing" if not found.found_tokens else "accepted" if whole else "clipped"
        places = {name: getattr(found, name) for name in _PLACES}
        return {"outcome": outcome, **told, **places}

    async def _pinned(self, prepared: PreparedCall, pin: Pin | None) -> dict[str, Any]:
        if pin is None:
            return _pinned("rejected", reason=TOO_SHORT)
        free = await self._quota_left(prepared.call.tenant, pin)
        if free is not None and pin.size_bytes > free:
            reason = f"{pin.size_bytes} bytes exceed what the namespace may still pin: {free}"
            return _pinned("rejected", reason=reason)
        try:
            blocks = await self.pins.add(pin)
        except DirectoryUnavailableError as error:
            return _pinned("rejected", reason=f"the meta server does not answer: {error.message}")
        tokens = blocks * prepared.model.layout.block_tokens
        until = datetime.fromtimestamp(pin.until_s, UTC).isoformat(timespec="seconds")
        outcome = "accepted" if blocks == len(pin.keys) else "clipped" if blocks else "deferred"
        return _pinned(outcome, tokens=tokens, until=until)

    async def _retain(self, prepared: PreparedCall, keep_s: float) -> dict[str, Any]:
        pin = await self._pin_of(prepared, keep_s)
        if pin is not None:
            others = sum(other.size_bytes for other in self.pins.others(pin.name))
            if others + pin.size_bytes > _MOST_RETAINED * self._view.pool_bytes:
                return _pinned("rejected", reason="too much of the pool's memory is pinned already")
        try:
            return await self._pinned(prepared, pin)
        except SqlError as error:
            return _pinned("rejected", reason=error.message)

    async def _unpin(self, prepared: PreparedCall) -> dict[str, Any]:
        pin = await self._pin_of(prepared, 0.0)
        ended = await self.pins.end([pin.name]) if pin is not None else 0
        return _pinned("ended" if ended else "missing")

    async def _pin_of(self, prepared: PreparedCall, keep_s: float) -> Pin | None:
        request, layout = await self._beginning(prepared), prepared.model.layout
        keys = block_keys(
            request.namespace_key, request.token_ids, block_tokens=layout.block_tokens
        )
        if not keys:
            return None
        return Pin(
            tenant=prepared.call.tenant,
            model=prepared.model.name,
            keys=tuple(keys),
            tokens=len(keys) * layout.block_tokens,
            size_bytes=len(keys) * layout.stored_bytes,
            until_s=self._clock.wall() + keep_s,
        )

    async def _quota_left(self, tenant: str, pin: Pin) -> int | None:
        """Return the bytes left for pins in a tenant's namespace; None: no limit."""
        namespaces = await self._meta.list_namespaces() if self._meta is not None else ()
        for namespace in namespaces:
            capacity = namespace.limits.capacity_bytes if namespace.limits is not None else 0
            if tenant in namespace.members and capacity:
                others = self.pins.others(pin.name)
                used = sum(p.size_bytes for p in others if p.tenant in namespace.members)
                return max(0, capacity - used)
        return None

    async def _beginning(self, prepared: PreparedCall) -> GenerateRequest:
        """Return the request with the tokens that do not depend on the text's continuation."""
        ids = prepared.request.token_ids
        if prepared.call.prompt_token_ids is None:
            longer = [_longer(prepared.call, more) for more in _CONTINUATIONS]
            ids = _common([await self._token_ids(call) for call in longer])
        blend = prepared.request.blend
        if blend is not None and (not blend.chunks or blend.chunks[-1][1] > len(ids)):
            blend = None
        return replace(prepared.request, token_ids=ids, blend=blend)


async def _usage(events: AsyncGenerator[TextEvent, None]) -> Usage:
    """Let a call come to its end; return what the call cost."""
    last = TextEvent()
    async with aclosing(events):
        async for event in events:
            last = event
    return last.usage or Usage(0, 0)


def _warmed(prepared: PreparedCall) -> dict[str, Any]:
    tokens = len(prepared.request.token_ids)
    if tokens < prepared.model.layout.block_tokens:
        return {"outcome": "rejected", "tokens": tokens, "reason": TOO_SHORT}
    return {"outcome": "accepted", "tokens": tokens, "tier": "l1"}


def _pinned(outcome: str, *, tokens: int = 0, **more: str) -> dict[str, Any]:
    tier = {"tier": "pool"} if tokens else {}
    return {"outcome": outcome, "tokens": tokens, **tier, **more}


def _longer(call: TextCall, more: str) -> TextCall:
    """Return the call with a longer text."""
    if call.messages is None:
        return replace(call, prompt=(call.prompt or "") + more)
    *before, last = call.messages
    return replace(call, messages=(*before, replace(last, content=last.content + more)))


def _with_text(call: TextCall, text: str) -> TextCall:
    """Return the call with a different text."""
    if call.messages is None:
        return replace(call, prompt=text)
    *before, last = call.messages
    return replace(call, messages=(*before, replace(last, content=text)))


def _common(variants: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the longest common beginning."""
    for at, column in enumerate(zip(*variants, strict=False)):
        if len(set(column)) > 1:
            return variants[0][:at]
    return min(variants, key=len)
